"""The kernels of one rank of a plan, on one GPU and without anything that is sent, beside the same kernels on a sequence of as much work.

    python benchmarks/context_kernels.py --ranks 4 --out results.json

Forward and backward of bfloat16, of a group of heads as a plan computes them at once: half of 32 query heads and 8 key heads of 128. Each
row: milliseconds; TFLOP/s counted from what the mask shows, and their ratio to one sequence; and the same with mods that read positions
from tables, as one would without a plan.
"""

from __future__ import annotations

import torch
from common import arguments, header, integers, queued_ms, tflops, write_results
from context import BOTH, MASKS, Problem

from flexpress import create_block_mask, flex_attention
from flexpress.codegen.run import masks as mask_kernels
from flexpress.codegen.run.block_lists import lists_of
from flexpress.distributed.exchange import lists_of_part
from flexpress.distributed.layout import BLOCK, Layout, whole_blocks
from flexpress.masks.block_mask import BlockMask


def mask_of(problem: Problem) -> BlockMask:
    """The mask of all of a problem."""
    return create_block_mask(problem.mask_mod, None, None, problem.length, problem.length, problem.device, BLOCK)


class Part:
    """What one rank of a plan computes: its block mask, and how many positions it has and gets."""

    def __init__(self, problem: Problem, ranks: int, rank: int) -> None:
        status, length, mask_mod = mask_of(problem)._status(), problem.length, problem.mask_mod
        layout = Layout(status.cpu().numpy(), length, length, ranks)
        rows = torch.from_numpy(layout.q_blocks[rank])
        blocks = torch.cat([torch.from_numpy(part) for part in layout.keys(rank)])
        self.positions = [torch.from_numpy(whole_blocks(part.numpy())).int().to(problem.device) for part in (rows, blocks)]
        rows, blocks = rows.to(problem.device), blocks.to(problem.device)
        self.status, self.problem = status[:, :, rows][..., blocks], problem
        self.lengths = len(rows) * BLOCK, len(blocks) * BLOCK
        self.shifted = BlockMask._made(self.lengths, lists_of_part(self.status, rows, blocks, length, length), mask_mod)

    def by_tables(self) -> tuple:
        """score_mod and block mask that read positions from tables."""
        q_at, kv_at = self.positions
        score_mod, mask_mod = self.problem.score_mod, self.problem.mask_mod

        def mask(b, h, q_idx, kv_idx):
            return mask_mod(b, h, q_at[q_idx], kv_at[kv_idx])

        def score(score, b, h, q_idx, kv_idx):
            return score_mod(score, b, h, q_at[q_idx], kv_at[kv_idx])

        lists = lists_of(mask_kernels.block_lists(self.status), BLOCK, BLOCK, interior=True)
        return score if score_mod else None, BlockMask._made(self.lengths, lists, mask)


def measured(problem: Problem, score_mod, block_mask: BlockMask, lengths: tuple[int, int], rep: float) -> dict:
    """Milliseconds and TFLOP/s of a forward pass, and of both passes."""
    q, k, v, d_out = problem.inputs(*lengths)

    def forward():
        return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)

    flops = problem.flops(block_mask._status())
    with torch.no_grad():
        forward_ms = queued_ms(forward, rep)
    for t in (q, k, v):
        t.requires_grad_()
    both_ms = queued_ms(lambda: torch.autograd.grad(forward(), (q, k, v), d_out), rep)
    return {
        "forward_ms": forward_ms,
        "both_ms": both_ms,
        "forward_tflops": tflops(flops, forward_ms),
        "both_tflops": tflops(BOTH * flops, both_ms),
    }


def row_of(problem: Problem, ranks: int, rank: int, rep: float) -> dict:
    part, alone = Part(problem, ranks, rank), problem.alone(ranks)
    found = measured(problem, problem.score_mod, part.shifted, part.lengths, rep)
    tables = measured(problem, *part.by_tables(), part.lengths, rep)
    one = measured(alone, alone.score_mod, mask_of(alone), (alone.length, alone.length), rep)
    ratios = {f"{way}_ratio": found[f"{way}_tflops"] / one[f"{way}_tflops"] for way in ("forward", "both")}
    heads = {"query_heads": problem.asked.heads, "key_heads": problem.asked.kv_heads}
    return {
        "mask": problem.name,
        "ranks": ranks,
        "rank": rank,
        "length": problem.length,
        **heads,
        **found,
        **ratios,
        "one": one,
        "tables": tables,
    }


def main() -> None:
    parser = arguments(__doc__, "benchmarks/results/context_kernels.json")
    parser.add_argument("--lengths", type=integers, default=[65536])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0, help="which rank's part")
    parser.add_argument("--rep", type=float, default=300.0, help="ms to measure each")
    for name, default in (("heads", 16), ("kv-heads", 4), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    rows = []
    for length in asked.lengths:
        for name in MASKS:
            rows.append(row_of(Problem(name, length, asked, torch.device("cuda")), asked.ranks, asked.rank, asked.rep))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
            write_results(asked.out, header(asked.commit), rows)


if __name__ == "__main__":
    main()
