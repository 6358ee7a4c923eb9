"""Attention over a sequence that is split over GPUs, beside one GPU's kernel at the same work and a gather of all keys by hand.

    python benchmarks/context.py --out results.json      # on all GPUs of this machine

Forward and backward of bfloat16, 32 query heads and 8 key heads of 128, one sequence. Each row: milliseconds on the slowest GPU, TFLOP/s
a GPU counted from what the mask shows, and its ratio to one GPU that attends to a sequence of as much work with the library's kernel.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import arguments, header, write_results

from flexpress import create_block_mask, flex_attention, mods
from flexpress.distributed import ContextPlan

HQ, HKV, D = 32, 8, 128
ROUNDS, REPEATS = 5, 6


def masks(length: int) -> dict:
    """mask_mods by name, with a score_mod or None. Documents are 12, of lengths that differ by up to a factor of 5."""
    torch.manual_seed(0)
    shares = torch.rand(12) + 0.25
    ends = (shares.cumsum(0) / shares.sum() * length).long()
    ids = torch.bucketize(torch.arange(length), ends, right=True).clamp(max=11).int().cuda()
    slopes = mods.alibi_slopes(HQ).cuda()

    def documents(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return {
        "causal": (mods.causal, None),
        "causal, ALiBi": (mods.causal, mods.alibi(slopes)),
        "causal, softcap": (mods.causal, mods.softcap(30.0)),
        "window 4096": (mods.sliding_window(4096), None),
        "prefix": (mods.prefix_lm(length // 4), None),
        "12 documents": (documents, None),
    }


def inputs(q_len: int, kv_len: int, positions=None) -> list[torch.Tensor]:
    """q, k, v and dO; keys of all ranks are the same numbers."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (1, HQ, q_len, D), (1, HKV, kv_len, D), (1, HKV, kv_len, D), (1, HQ, q_len, D)
    made = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return made if positions is None else [t[:, :, positions].contiguous() for t in made]


def timed(call) -> float:
    """Milliseconds of a call on the slowest rank: median of rounds."""
    times = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATS):
            call()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) / REPEATS, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return statistics.median(times[1:])


def both_ways(attend, q, k, v, d_out):
    """The times of a forward pass, and of both."""
    for t in (q, k, v):
        t.requires_grad_()

    def step():
        torch.autograd.grad(attend(q, k, v), (q, k, v), d_out)

    with torch.no_grad():
        forward = timed(lambda: attend(q, k, v))
    return forward, timed(step)


def gathered_by_hand(plan: ContextPlan, mask_mod, score_mod):
    """What one writes without a plan: every rank gets all keys, and gradients of all go back."""
    positions = plan.position_ids.int()
    order = torch.cat([plan.on_device(p) for p in map(_positions(plan), range(plan.ranks))]).argsort()

    def mask(b, h, q_idx, kv_idx):
        return mask_mod(b, h, positions[q_idx], kv_idx)

    def score(score, b, h, q_idx, kv_idx):
        return score_mod(score, b, h, positions[q_idx], kv_idx)

    blocks = create_block_mask(mask, None, None, len(positions), plan.kv_len, "cuda")

    def attend(q, k, v):
        k, v = (_AllGather.apply(t, order) for t in (k, v))
        return flex_attention(q, k, v, score if score_mod else None, blocks, enable_gqa=True)

    return attend


def _positions(plan):
    from flexpress.context import positions_of

    return lambda rank: positions_of(plan.layout.kv_blocks[rank], plan.kv_len)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, order):
        ctx.order = order
        found = tensor.new_empty((dist.get_world_size() * tensor.shape[2], *tensor.shape[:2], tensor.shape[3]))
        dist.all_gather_into_tensor(found, tensor.permute(2, 0, 1, 3).contiguous())
        return found.index_select(0, order).permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx, gradient):
        whole = torch.empty_like(gradient.permute(2, 0, 1, 3)).index_copy_(0, ctx.order, gradient.permute(2, 0, 1, 3).contiguous())
        mine = whole.new_empty((whole.shape[0] // dist.get_world_size(), *whole.shape[1:]))
        dist.reduce_scatter_tensor(mine, whole.contiguous())
        return mine.permute(1, 2, 0, 3), None


def measure(rank: int, world: int, asked: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    rows = []
    for length in asked.lengths:
        for name, (mask_mod, score_mod) in masks(length).items():
            plan = ContextPlan(q_len=length, mask_mod=mask_mod, device="cuda", head_groups=asked.groups)
            visited = int((plan.status != 0).sum())
            flops = 4 * visited * 128 * 128 * D * HQ / world
            mine = inputs(length, length, plan.position_ids)
            forward, total = both_ways(lambda q, k, v, s=score_mod, p=plan: flex_attention(q, k, v, s, enable_gqa=True, context=p), *mine)
            row = {
                "ranks": world,
                "length": length,
                "mask": name,
                "imbalance": plan.layout.imbalance,
                "forward_ms": forward,
                "both_ms": total,
            }
            row |= {"remote_blocks": plan.layout.remote_blocks.tolist(), "blocks": -(-length // 128), "head_groups": asked.groups}
            row["forward_tflops"], row["both_tflops"] = flops / forward / 1e9, 3.5 * flops / total / 1e9
            alone = int(length / world**0.5) // 128 * 128 if name != "window 4096" else length // world
            single_mask, single_score = masks(alone)[name]
            blocks = create_block_mask(single_mask, None, None, alone, alone, "cuda")
            single_flops = 4 * int((blocks._status() != 0).sum()) * 128 * 128 * D * HQ
            f, b = both_ways(
                lambda q, k, v, s=single_score, m=blocks: flex_attention(q, k, v, s, m, enable_gqa=True), *inputs(alone, alone)
            )
            row["one_gpu"] = {"length": alone, "forward_tflops": single_flops / f / 1e9, "both_tflops": 3.5 * single_flops / b / 1e9}
            row["forward_ratio"] = row["forward_tflops"] / row["one_gpu"]["forward_tflops"]
            row["both_ratio"] = row["both_tflops"] / row["one_gpu"]["both_tflops"]
            f, b = both_ways(gathered_by_hand(plan, mask_mod, score_mod), *mine)
            row |= {"all_gather_forward_ms": f, "all_gather_both_ms": b}
            rows.append(row)
            if rank == 0:
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                write_results(asked.out, header(asked.commit), rows)
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__, "benchmarks/results/context.json")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[32768, 65536, 131072])
    parser.add_argument("--groups", type=int, default=2, help="head_groups of the plans")
    asked = parser.parse_args()
    world = torch.cuda.device_count()
    torch.multiprocessing.spawn(measure, (world, asked), nprocs=world)


if __name__ == "__main__":
    main()
