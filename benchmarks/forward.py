"""Time the forward, and with --backward the backward, of every workload in every implementation.

    python benchmarks/forward.py --out results.json

Implementations take turns, three rounds each, after a rest and another one first in every round, on the same
random bf16 tensors; before a thing is timed its output is compared with a float64 reference.  A failure is a row with an
`error`.  The file is rewritten after every case.  The work is done in one process of its own: should that
process die or hang in a kernel, the culprit gets an error row and a new process goes on with the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

import common
import supervisor
import torch
import torch._functorch.config
from common import Row
from implementations import IMPLEMENTATIONS, Attention
from reference import ERROR_LIMIT, Slice, Tensors, WrongResult, check_output, finite, gradient_error, references
from supervisor import Watch
from workloads import BY_NAME, Workload, count_pairs

DEFAULT = ("flexpress", "torch_flex", "cudnn", "flash")
ROUNDS = 3
REST = 0.25  # seconds without work before a timing: what ran before decides how warm the card is, and its power limit how fast it runs then
CHECK_SCALE = 4.0  # of q in the check: at ordinary scores a lost softcap would hardly show


def new_row(case: str, impl: str) -> Row:
    """Return a row with every key and nothing measured."""
    keys = ("fwd_ms", "fwd_tflops", "bwd_ms", "bwd_tflops", "rel_err", "row_err", "grad_err")
    return {"case": case, "impl": impl, **dict.fromkeys(keys), "fwd_rounds": [], "bwd_rounds": []}


def check(row: Row, attention: Attention, qkv: Tensors, grad_out: torch.Tensor | None, answers: list[Slice]) -> None:
    """Run `attention` once, fill in the row's errors, and raise WrongResult if they are too large.

    The gradients are left out when `grad_out` is None.
    """
    q, k, v = qkv
    poison = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype, device=q.device)
    del poison  # its memory is the allocator's first choice for the output: elements never written stay NaN
    out = attention(q, k, v)
    check_output(row, answers, out)
    if grad_out is not None:
        error = gradient_error(answers, *torch.autograd.grad(out, (q, k, v), grad_out))
        row["grad_err"] = finite(error)
        if not error < ERROR_LIMIT:
            raise WrongResult(f"relative error {error:.3g} in the gradients")


def time_forward(row: Row, attention: Attention, qkv: Tensors, rep: float) -> None:
    """Add one round to the row."""
    row["fwd_rounds"].append(common.queued_ms(lambda: attention(*qkv), rep))


def time_backward(row: Row, attention: Attention, qkv: Tensors, rep: float, grad_out: torch.Tensor) -> None:
    """Add one round to the row."""
    out = attention(*qkv)
    row["bwd_rounds"].append(common.queued_ms(lambda: torch.autograd.grad(out, qkv, grad_out, retain_graph=True), rep))


def run_case(
    case: Workload, impls: Sequence[str], rows: list[Row], watch: Watch, device: str = "cuda", rep: float = 100.0, backward: bool = False
) -> None:
    """Append a row for each of `impls` to `rows` and fill them in.

    Raises DeviceLost when a failure took the GPU context with it; rows that hold neither a time nor an error
    are then still to be done.
    """
    fresh = [new_row(case.name, impl) for impl in impls]
    rows.extend(fresh)
    mods = case.make_mods(device)
    *tensors, gradient = case.inputs(device)
    q, k, v = (x.requires_grad_(backward) for x in tensors)
    wide = (q.detach() * CHECK_SCALE).requires_grad_(backward)
    grad_out = gradient if backward else None
    pairs = count_pairs(mods[1], case.length, device)
    answers = references(case, (wide, k, v), mods, grad_out)
    runs: list[tuple[Row, Attention]] = []
    for row in fresh:
        with watch.step(row):
            attention = IMPLEMENTATIONS[row["impl"]].build(case, mods, device)
            check(row, attention, (wide, k, v), grad_out, answers)
            runs.append((row, attention))
    del answers, wide
    timers = [time_forward] + ([partial(time_backward, grad_out=grad_out)] if backward else [])
    for number in range(ROUNDS):
        first = number % max(len(runs), 1)
        for time_one in timers:
            for row, attention in runs[first:] + runs[:first]:
                if "error" not in row:
                    time.sleep(REST)
                    with watch.step(row):
                        time_one(row, attention, (q, k, v), rep)
    for row, _ in runs:
        for name, flops in (("fwd", case.forward_flops(pairs)), ("bwd", case.backward_flops(pairs))):
            ms = common.median(row[f"{name}_rounds"])
            row[f"{name}_ms"] = ms
            row[f"{name}_tflops"] = common.tflops(flops, ms) if ms else None


def ceilings(rep: float) -> Row:
    """Return the rates of this card now: an 8192^3 bf16 product, and a copy (read + written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = common.tflops(2 * 8192**3, common.time_ms(lambda: a @ b, rep))
    return {"matmul_tflops": matmul, "copy_tb_s": common.copy_tb_s(rep)}


def work(args: argparse.Namespace) -> int:
    """Do what is still missing in the results file; return the exit code."""
    torch._functorch.config.donated_buffer = False  # or a compiled backward could not be run twice
    head = common.header(args.commit)
    head |= {"rep_ms": args.rep, "rest_s": REST, **ceilings(args.rep)}
    run = partial(run_case, rep=args.rep, backward=args.backward)
    return supervisor.work(args, head, BY_NAME, lambda impl, case: IMPLEMENTATIONS[impl].takes(case), run, "fwd_ms")


def summary(rows: Sequence[Row], which: str = "fwd") -> str:
    """Return the table of TFLOP/s for "fwd" or "bwd", with the ratios of flexpress to its peers."""
    impls = [impl for impl in IMPLEMENTATIONS if any(row["impl"] == impl for row in rows)]
    found = {(row["case"], row["impl"]): row for row in rows}
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        rates = {impl: found.get((case, impl), {}).get(f"{which}_tflops") for impl in IMPLEMENTATIONS}
        shown: Row = dict(rates)
        for impl in impls:
            if rates[impl] is None and "error" in found.get((case, impl), {}):
                shown[impl] = "failed"
        ratios = [common.ratio(rates["flexpress"], rates[peer]) for peer in ("torch_flex", "cudnn")]
        error = found.get((case, "flexpress"), {}).get("rel_err" if which == "fwd" else "grad_err")
        lines.append([case, *(shown[impl] for impl in impls), *ratios, error])
    return common.table([f"{which} TFLOP/s", *impls, "/torch_flex", "/cudnn", "flexpress err"], lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = supervisor.arguments(__doc__, "forward.json", list(BY_NAME), list(IMPLEMENTATIONS), DEFAULT)
    parser.add_argument("--backward", action="store_true", help="time and check the gradients too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    passes = ("fwd", "bwd") if args.backward else ("fwd",)
    return supervisor.run(args, argv, __file__, work, new_row, lambda rows: [summary(rows, which) for which in passes])


if __name__ == "__main__":
    sys.exit(main())
