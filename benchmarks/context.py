"""Attention over a sequence that is split over GPUs, beside one GPU's kernel at the same work and what others do.

    python benchmarks/context.py --out results.json      # on all GPUs of this machine
    python benchmarks/context.py --lengths 32768 --masks "causal;12 documents" --seconds 200

Forward and backward of bfloat16, 32 query heads and 8 key heads of 128, one sequence. A row for each length, mask and way:

context plan               flex_attention(..., context=plan)
one GPU                    the same kernel on one GPU, of a sequence that is as much work as each of them has
all-gather by hand         all keys on all GPUs, and then flex_attention without a plan
torch ring, all-gather     torch's context_parallel with scaled_dot_product_attention, by both of its rotate methods; it knows causal masks

with milliseconds of the slowest GPU, TFLOP/s of each, counted from the blocks of 128 x 128 that the mask shows, and the ratio to one GPU's.
Rows are printed and written as they come. One that fails has its error instead. Without GPUs, `--ranks 2` tries the program by gloo.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import arguments, first_line, header, integers, names, tflops, write_results

from flexpress import create_block_mask, flex_attention, mods
from flexpress.distributed import ContextPlan
from flexpress.distributed.layout import BLOCK, positions_of

MASKS = "causal", "causal, ALiBi", "causal, softcap", "window", "prefix", "12 documents"
WAYS = "one GPU", "context plan", "all-gather by hand", "torch ring", "torch all-gather"
ROTATE = {"torch ring": "alltoall", "torch all-gather": "allgather"}
WINDOW = 4096
BOTH = 3.5  # forward and backward, in forward passes: 2 and 5 products
ROUND, ROUNDS, MOST = 0.1, 3, 20  # seconds of a round, rounds, and calls of a round

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Problem:
    """A mask of a length, on a device: mask_mod, and score_mod or None."""

    def __init__(self, name: str, length: int, asked: argparse.Namespace, device: torch.device) -> None:
        self.name, self.length, self.asked, self.device, self.score_mod = name, length, asked, device, None
        self.mask_mod = mods.causal
        if name == "causal, ALiBi":
            self.score_mod = mods.alibi(mods.alibi_slopes(asked.heads).to(device))
        elif name == "causal, softcap":
            self.score_mod = mods.softcap(30.0)
        elif name == "window":
            self.mask_mod = mods.sliding_window(WINDOW)
        elif name == "prefix":
            self.mask_mod = mods.prefix_lm(length // 4)
        elif name == "12 documents":
            self.mask_mod = _documents(length, device)

    def alone(self, ranks: int) -> Problem:
        """The problem of one GPU that has as much work as each of `ranks`: a shorter sequence, its work falls with length or its square."""
        share = self.length / (ranks if self.name == "window" else ranks**0.5)
        return Problem(self.name, max(int(share) // BLOCK, 1) * BLOCK, self.asked, self.device)

    def flops(self, status: torch.Tensor) -> float:
        """Of a forward pass, counted from the blocks that the mask shows."""
        return 4 * int((status != 0).sum()) * BLOCK * BLOCK * self.asked.head_dim * self.asked.heads

    def inputs(self, q_len: int | None = None, kv_len: int | None = None) -> list[torch.Tensor]:
        """q, k, v and dO; the lengths are the sequence's by default, and those of keys are those of queries."""
        asked = self.asked
        q_len = self.length if q_len is None else q_len
        kv_len = q_len if kv_len is None else kv_len
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        shapes = (asked.heads, q_len), (asked.kv_heads, kv_len), (asked.kv_heads, kv_len), (asked.heads, q_len)
        return [torch.randn((1, *shape, asked.head_dim), generator=generator, device=self.device).to(dtype) for shape in shapes]


def _documents(length: int, device: torch.device):
    """12 of them, of lengths that differ by up to a factor of 5."""
    shares = torch.rand(12, generator=torch.Generator().manual_seed(0)) + 0.25
    ends = (shares.cumsum(0) / shares.sum() * length).long()
    ids = torch.bucketize(torch.arange(length), ends, right=True).clamp(max=11).int().to(device)

    def documents(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return documents


def slowest(value: float, device: torch.device) -> float:
    """The largest of what ranks have."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call on the slowest rank: median of rounds."""

    def once(calls: int) -> float:
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return slowest((time.perf_counter() - begin) / calls, device)

    once(1)  # compiles
    if device.type == "cpu":
        return 1e3 * once(1)
    calls = min(max(int(ROUND / once(1)), 1), MOST)
    return 1e3 * statistics.median(once(calls) for _ in range(ROUNDS))


def both_ways(attend: Attend, q, k, v, d_out) -> tuple[float, float]:
    """The times of a forward pass, and of both."""
    for t in (q, k, v):
        t.requires_grad_()
    with torch.no_grad():
        forward = timed(lambda: attend(q, k, v), q.device)
    return forward, timed(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), d_out), q.device)


@contextmanager
def attention_of(way: str, problem: Problem, plan: ContextPlan) -> Iterator[tuple[Attend, list[torch.Tensor], float]]:
    """A way to attend, its inputs on this rank, and floating-point operations of a forward pass on each."""
    flops = problem.flops(plan.status) / plan.ranks
    if way == "context plan":
        yield (
            (lambda q, k, v: flex_attention(q, k, v, problem.score_mod, enable_gqa=True, context=plan)),
            problem.inputs(len(plan.position_ids)),
            flops,
        )
    elif way == "one GPU":
        alone = problem.alone(plan.ranks)
        mask = create_block_mask(alone.mask_mod, None, None, alone.length, alone.length, problem.device)
        yield (lambda q, k, v: flex_attention(q, k, v, alone.score_mod, mask, enable_gqa=True)), alone.inputs(), alone.flops(mask._status())
    elif way == "all-gather by hand":
        yield gathered_by_hand(plan, problem), problem.inputs(len(plan.position_ids)), flops
    else:
        with torchs(way, problem, plan) as attend:
            yield attend, problem.inputs(problem.length // plan.ranks), flops


@contextmanager
def torchs(way: str, problem: Problem, plan: ContextPlan) -> Iterator[Attend]:
    """torch's context_parallel. Where it refuses grouped heads, keys are repeated."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(ROTATE[way])
    mesh = dist.device_mesh.init_device_mesh(problem.device.type, (plan.ranks,))
    whole = torch.zeros(problem.length, device=problem.device)
    grouped = True

    def attend(q, k, v):
        nonlocal grouped
        if grouped:
            try:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            except (RuntimeError, NotImplementedError, AssertionError, ValueError):
                grouped = False
        shared = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0], no_restore_buffers={whole}):
        yield attend


def gathered_by_hand(plan: ContextPlan, problem: Problem) -> Attend:
    """What one writes without a plan: every rank gets all keys, and gradients of all go back."""
    positions, mask_mod, score_mod = plan.position_ids.int(), problem.mask_mod, problem.score_mod
    order = torch.cat([plan.on_device(positions_of(blocks, plan.kv_len)) for blocks in plan.layout.kv_blocks]).argsort()

    def mask(b, h, q_idx, kv_idx):
        return mask_mod(b, h, positions[q_idx], kv_idx)

    def score(score, b, h, q_idx, kv_idx):
        return score_mod(score, b, h, positions[q_idx], kv_idx)

    blocks = create_block_mask(mask, None, None, len(positions), plan.kv_len, problem.device)

    def attend(q, k, v):
        k, v = (_AllGather.apply(t, order) for t in (k, v))
        return flex_attention(q, k, v, score if score_mod else None, blocks, enable_gqa=True)

    return attend


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, order):
        ctx.order = order
        found = tensor.new_empty((dist.get_world_size() * tensor.shape[2], *tensor.shape[:2], tensor.shape[3]))
        dist.all_gather_into_tensor(found, tensor.permute(2, 0, 1, 3).contiguous())
        return found.index_select(0, order).permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.permute(2, 0, 1, 3).contiguous()
        whole = torch.empty_like(gradient).index_copy_(0, ctx.order, gradient)
        mine = whole.new_empty((whole.shape[0] // dist.get_world_size(), *whole.shape[1:]))
        dist.reduce_scatter_tensor(mine, whole)
        return mine.permute(1, 2, 0, 3), None


def measured(way: str, problem: Problem, plan: ContextPlan, one_gpu: dict) -> dict:
    """Times and rates of a way, or its error on any rank."""
    found, error = {}, ""
    try:
        with attention_of(way, problem, plan) as (attend, inputs, flops):
            forward, both = both_ways(attend, *inputs)
            found = {"forward_ms": forward, "both_ms": both}
            found |= {"forward_tflops": tflops(flops, forward), "both_tflops": tflops(BOTH * flops, both)}
    except Exception as failure:
        error = first_line(failure)
    errors: list[str | None] = [None] * plan.ranks
    dist.all_gather_object(errors, error)
    if any(errors):
        return {"error": "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(errors) if words)}
    if way == "one GPU":
        one_gpu |= found
        return found | {"alone": problem.alone(plan.ranks).length}
    for part in ("forward", "both"):
        if one_gpu:
            found[f"{part}_ratio"] = found[f"{part}_tflops"] / one_gpu[f"{part}_tflops"]
    return found


def rows(asked: argparse.Namespace, ranks: int, device: torch.device) -> Iterator[dict]:
    """The rows of the table, as they come."""
    begun = time.perf_counter()
    for length in asked.lengths:
        for name in asked.masks:
            problem, one_gpu = Problem(name, length, asked, device), {}
            plan = ContextPlan(q_len=length, mask_mod=problem.mask_mod, device=device, head_groups=asked.groups)
            about = {"ranks": ranks, "length": length, "mask": name, "head_groups": plan.head_groups, "imbalance": plan.layout.imbalance}
            about |= {"remote_blocks": plan.layout.remote_blocks.tolist(), "blocks": -(-length // BLOCK)}
            for way in asked.ways:
                if way in ROTATE and name != "causal":
                    continue
                if slowest(time.perf_counter() - begun, device) > asked.seconds:
                    found = {"error": f"not measured: {asked.seconds} seconds were over"}
                else:
                    found = measured(way, problem, plan, one_gpu)
                gc.collect()
                yield {**about, "way": way, **found}


def measure(rank: int, world: int, store: str, asked: argparse.Namespace) -> None:
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    options = {"device_id": device} if on_gpus else {}
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120), **options
    )
    found = []
    for row in rows(asked, world, device):
        found.append(row)
        if rank == 0:
            print(shown(row), flush=True)
            write_results(asked.out, header(asked.commit), found)
    dist.destroy_process_group()


def shown(row: dict) -> str:
    """A row as a line."""
    line = f"{row['ranks']} x {row['length']:7d}  {row['mask']:16s} {row['way']:20s}"
    if "error" in row:
        return f"{line} {row['error']}"
    parts = []
    for part in ("forward", "both"):
        ratio = row.get(f"{part}_ratio")
        parts.append(f"{part} {row[f'{part}_ms']:9.3f} ms {row[f'{part}_tflops']:7.1f} TFLOP/s" + (f" {ratio:5.2f}" if ratio else " " * 6))
    return f"{line} {'   '.join(parts)}"


def chosen_masks(text: str) -> list[str]:
    """Masks by name, which have commas."""
    chosen = [name.strip() for name in text.split(";")]
    if unknown := set(chosen) - set(MASKS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {'; '.join(MASKS)}")
    return chosen


def main() -> None:
    parser = arguments(__doc__, "benchmarks/results/context.json")
    parser.add_argument("--lengths", type=integers, default=[32768, 65536, 131072])
    parser.add_argument("--masks", type=chosen_masks, default=list(MASKS), help=f"separated by ; of {'; '.join(MASKS)}")
    parser.add_argument("--ways", type=names(WAYS), default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="rows after so many seconds are not measured")
    parser.add_argument("--groups", type=int, default=1, help="head_groups of the plans")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="default: all GPUs")
    for name, default in (("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    if asked.ranks == 0:
        parser.error("there is no GPU; --ranks 2 tries the program by gloo")
    with tempfile.TemporaryDirectory() as folder:
        how = "spawn" if torch.cuda.is_available() else "fork"  # CUDA may not start in a fork, which has all that is imported here
        given = asked.ranks, os.path.join(folder, "store"), asked
        torch.multiprocessing.start_processes(measure, given, nprocs=asked.ranks, start_method=how)


if __name__ == "__main__":
    main()
