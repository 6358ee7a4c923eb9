"""Short sequences: what a multiprocessor has one or a few tiles of, where the choice of the kernel counts for more than its rate.

    python benchmarks/short.py --out short.json
    python benchmarks/short.py --out short.json --backward

One sequence in bfloat16, 256 to 2048 positions and 8 to 64 heads. What is timed is a CUDA graph of 20 calls, forward, or forward and
backward with --backward: flexpress as it chooses, its portable kernels, its kernels for Hopper, SDPA, and FlashAttention-4 where it is
installed, in turns in one process. Outputs and gradients are compared with float64. In the end every problem is printed where flexpress is
below 0.9 of the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence

import common
import torch
from common import Row
from implementations import in_layout
from reference import ERROR_LIMIT, WrongResult

OWN = {"flexpress": None, "portable": "PORTABLE", "hopper": "HOPPER"}  # with these BACKENDs
PEERS = ("sdpa", "fa4") if common.installed_version(common.FA4) else ("sdpa",)
MASKS = ("full", "causal")
LENGTHS, HEADS, DIMS = (256, 512, 1024, 2048), (8, 16, 32, 64), (64, 128)
CALLS, ROUNDS = 20, 5
LIMIT = 0.9  # of the fastest


def attention(impl: str, mask: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of `impl`."""
    import flexpress

    if impl == "sdpa":
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")
    if impl == "fa4":
        from flash_attn.cute import flash_attn_func

        return lambda: flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=mask == "causal")[0].transpose(1, 2)
    lists = flexpress.create_block_mask(flexpress.mods.causal, None, None, q.shape[2], k.shape[2], "cuda") if mask == "causal" else None
    return lambda: flexpress.flex_attention(q, k, v, block_mask=lists, kernel_options={"BACKEND": OWN[impl]} if OWN[impl] else None)


def exact(mask: str, tensors: Sequence[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    """Return out and the gradients of q, k and v in float64."""
    q, k, v = leaves = [t.detach().double().requires_grad_() for t in tensors]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask == "causal":
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    out = scores.softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.double())]


def error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error."""
    return max(float((a.detach().double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=False))


def measure(mask: str, length: int, heads: int, dim: int, backward: bool, rep: float) -> list[Row]:
    """Return a row for each implementation of one problem."""
    tensors = [torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    weights = torch.randn_like(tensors[0])
    wanted, rows, replays = exact(mask, tensors, weights), [], []
    layouts = {impl: "BSHD" if impl == "fa4" else "BHSD" for impl in (*OWN, *PEERS)}
    given = {impl: [t.detach().requires_grad_(backward) for t in in_layout(layout, tensors)] for impl, layout in layouts.items()}
    attends = {impl: attention(impl, mask, *qkv) for impl, qkv in given.items()}  # which hold the lists that the graphs read
    for impl, attend in attends.items():

        def call(attend: Callable[[], torch.Tensor] = attend, qkv: list[torch.Tensor] = given[impl]) -> list[torch.Tensor]:
            out = attend()
            return [out, *torch.autograd.grad(out, qkv, weights)] if backward else [out]

        def calls(call: Callable[[], list[torch.Tensor]] = call) -> list[torch.Tensor]:
            return [call() for _ in range(CALLS)][-1]

        row: Row = {"mask": mask, "length": length, "heads": heads, "dim": dim, "impl": impl, "us": None, "rel_err": None}
        outs, replay = common.captured(calls)
        replay()
        row["rel_err"] = error(outs, wanted)
        rows.append(row)
        replays.append(replay)
    rounds = [[common.replay_ms(replay, rep) for replay in replays] for _ in range(ROUNDS)]
    for row, times in zip(rows, zip(*rounds, strict=True), strict=True):
        row["us"] = 1e3 * common.median(times) / CALLS  # type: ignore[operator]
    return rows


def summary(rows: Sequence[Row]) -> str:
    """Return the table of times, and of the problems where flexpress is slow."""
    lines, low = [], []
    impls = len(OWN) + len(PEERS)
    for at in range(0, len(rows), impls):
        case = rows[at : at + impls]
        wrong = {row["impl"] for row in case if not row["rel_err"] <= ERROR_LIMIT}
        if wrong & set(OWN):
            raise WrongResult(f"{case[0]}: {sorted(wrong)}")
        times = {row["impl"]: float("inf") if row["impl"] in wrong else row["us"] for row in case}  # a peer's wrong result is none
        name = [case[0][key] for key in ("mask", "length", "heads", "dim")]
        best = min(times.values())
        ratios = [times[peer] / times["flexpress"] for peer in PEERS]
        lines.append([*name, *times.values(), *ratios, max(r["rel_err"] for r in case if r["impl"] in OWN)])
        if best < LIMIT * times["flexpress"]:
            low.append([*name, min(times, key=times.__getitem__), best / times["flexpress"]])
    columns = ["mask", "length", "heads", "dim", *OWN, *PEERS, *(f"{peer} / flexpress" for peer in PEERS), "error"]
    found = [common.table(columns, lines)]
    found.append(f"\n{len(low)} of {len(lines)} problems below {LIMIT} of the fastest")
    return "\n".join([*found, *([common.table(["mask", "length", "heads", "dim", "fastest", "ratio"], low)] if low else [])])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = common.arguments(__doc__, "short.json")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--lengths", type=common.integers, default=list(LENGTHS), help="comma-separated (default: all)")
    parser.add_argument("--heads", type=common.integers, default=list(HEADS), help="comma-separated (default: all)")
    parser.add_argument("--dims", type=common.integers, default=list(DIMS), help="comma-separated (default: all)")
    parser.add_argument("--rep", type=float, default=5.0, help="ms of runs per measurement (default: %(default)g)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    torch.manual_seed(0)
    head, rows = common.header(args.commit) | {"passes": "forward and backward" if args.backward else "forward"}, []
    for dim, mask, length, heads in itertools.product(args.dims, MASKS, args.lengths, args.heads):
        rows += measure(mask, length, heads, dim, args.backward, args.rep)
        common.write_results(args.out, head, rows)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
