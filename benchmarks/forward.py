"""Time the forward, and with --backward the backward, of every workload in every implementation.

    python benchmarks/forward.py --out results.json

Implementations take turns, three rounds each, after a rest and another one first in every round, on the same
random tensors; before a thing is timed its output is compared with a float64 reference.  With --sustained they
take turns again, without rests, in one order and then in the other.  A failure is a row with an `error`.  The
file is rewritten after every case.  The work is done in one process of its own: should that process die or hang
in a kernel, the culprit gets an error row and a new process goes on with the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import common
import supervisor
import torch
import torch._functorch.config
from common import Row
from implementations import IMPLEMENTATIONS, Attention, in_layout
from reference import ERROR_LIMIT, Slice, Tensors, WrongResult, check_output, finite, gradient_error, references
from supervisor import Watch
from workloads import BY_NAME, Mods, Workload, count_pairs

_FA4 = ["fa4"] if common.installed_version(common.FA4) else []
DEFAULT = ("flexpress", "flexpress_varlen", "torch_flex", "cudnn", "flash", "sdpa", "manual", *_FA4)
REST = 0.25  # seconds without work before a timing: what ran before decides how warm the card is, and its power limit how fast it runs then
PEERS = ("torch_flex", "cudnn", "fa4")  # those that flexpress is compared with in the summary
CHECK_SCALE = 4.0  # of q in the check: at ordinary scores a lost softcap would hardly show


@dataclass(frozen=True)
class Effort:
    """How long things are timed.

    `rounds` times about `rep` ms, each after `rest` seconds without work; then twice `sustained` seconds without rests, if that is not 0.
    """

    rep: float = 100.0
    rounds: int = 3
    rest: float = REST
    sustained: float = 0.0
    backward: bool = False

    @property
    def passes(self) -> tuple[str, ...]:
        return ("fwd", "bwd") if self.backward else ("fwd",)


class Problem(NamedTuple):
    """The tensors of a case, in one memory layout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v

    def for_check(self) -> tuple[torch.Tensor, ...]:
        """Return q, k and v with larger scores."""
        return (self.q.detach() * CHECK_SCALE).requires_grad_(self.q.requires_grad), self.k, self.v


class Run(NamedTuple):
    """An implementation that is to be timed."""

    row: Row
    attention: Attention
    problem: Problem
    learned: Tensors

    def forward(self) -> Callable[[], torch.Tensor]:
        """Return what to time."""
        return partial(self.attention, *self.problem.qkv)

    def backward(self) -> Callable[[], Tensors]:
        """Return what to time, after a forward pass."""
        out = self.forward()()
        leaves = (*self.problem.qkv, *self.learned)
        return lambda: torch.autograd.grad(out, leaves, self.problem.grad_out, retain_graph=True)


def new_row(case: str, impl: str) -> Row:
    """Return a row with every key and nothing measured."""
    row: Row = {"case": case, "impl": impl, "rel_err": None, "row_err": None, "grad_err": None}
    for which in ("fwd", "fwd_sustained", "bwd", "bwd_sustained"):
        row |= {f"{which}_ms": None, f"{which}_tflops": None, f"{which}_rounds": []}
    return row


def make_problem(case: Workload, device: str, layout: str, backward: bool) -> Problem:
    """Return the tensors of a case; q, k and v require gradients if `backward`."""
    *qkv, grad_out = in_layout(layout, case.inputs(device))
    return Problem(*(x.requires_grad_(backward) for x in qkv), grad_out)


def check(run: Run, answers: list[Slice], backward: bool) -> None:
    """Run once, fill in the row's errors, and raise WrongResult if they are too large."""
    row, (q, k, v) = run.row, run.problem.for_check()
    poison = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype, device=q.device)
    del poison  # its memory is the allocator's first choice for the output: elements never written stay NaN
    out = run.attention(q, k, v)
    check_output(row, answers, out)
    if backward:
        error = gradient_error(answers, *torch.autograd.grad(out, (q, k, v, *run.learned), run.problem.grad_out))
        row["grad_err"] = finite(error)
        if not error < ERROR_LIMIT:
            raise WrongResult(f"relative error {error:.3g} in the gradients")


def checked(case: Workload, mods: Mods, fresh: list[Row], watch: Watch, device: str, backward: bool) -> list[Run]:
    """Return the runs of the rows of which the results are right; the others have an error."""
    for tensor in mods.learned:
        tensor.requires_grad_(backward)
    layouts = {IMPLEMENTATIONS[row["impl"]].layout for row in fresh}
    problems = {layout: make_problem(case, device, layout, backward) for layout in sorted(layouts)}
    any_layout = next(iter(problems.values()))
    answers = references(case, any_layout.for_check(), mods, any_layout.grad_out if backward else None)
    runs = []
    for row in fresh:
        how = IMPLEMENTATIONS[row["impl"]]
        with watch.step(row):
            run = Run(row, how.build(case, mods, device), problems[how.layout], mods.learned)
            check(run, answers, backward)
            runs.append(run)
    return runs


def time_one(run: Run, which: str, key: str, watch: Watch, timer: Callable[[Callable[[], object]], float]) -> None:
    """Add to the row's rounds `key` what `timer` says of its forward ("fwd") or backward pass."""
    if "error" not in run.row:
        with watch.step(run.row):
            run.row[f"{key}_rounds"].append(timer(run.forward() if which == "fwd" else run.backward()))


def run_case(
    case: Workload,
    impls: Sequence[str],
    rows: list[Row],
    watch: Watch,
    device: str = "cuda",
    effort: Effort = Effort(),
    make_row: Callable[[str, str], Row] = new_row,
) -> None:
    """Append a row for each of `impls` to `rows` and fill them in.

    Raises DeviceLost when a failure took the GPU context with it; rows that hold neither a time nor an error
    are then still to be done.
    """
    fresh = [make_row(case.name, impl) for impl in impls]
    rows.extend(fresh)
    mods = case.make_mods(device)
    runs = checked(case, mods, fresh, watch, device, effort.backward)
    for number in range(effort.rounds):
        first = number % max(len(runs), 1)
        for which in effort.passes:
            for run in runs[first:] + runs[:first]:
                time.sleep(effort.rest)
                time_one(run, which, which, watch, lambda call: common.queued_ms(call, effort.rep))
    if effort.sustained:
        for which in effort.passes:
            for run in runs + runs[::-1]:
                time_one(run, which, f"{which}_sustained", watch, lambda call: common.sustained_ms(call, effort.sustained))
    pairs = count_pairs(mods.mask, case.length, device)
    for row in (run.row for run in runs):
        for which, flops in (("fwd", case.forward_flops(pairs)), ("bwd", case.backward_flops(pairs))):
            for key in (which, f"{which}_sustained"):
                ms = common.median(row[f"{key}_rounds"])
                row |= {f"{key}_ms": ms, f"{key}_tflops": common.tflops(flops, ms) if ms else None}


def ceilings(rep: float) -> Row:
    """Return the rates of this card now: an 8192^3 bf16 product, and a copy (read + written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = common.tflops(2 * 8192**3, common.time_ms(lambda: a @ b, rep))
    return {"matmul_tflops": matmul, "copy_tb_s": common.copy_tb_s(rep)}


def work(args: argparse.Namespace) -> int:
    """Do what is still missing in the results file; return the exit code."""
    torch._functorch.config.donated_buffer = False  # or a compiled backward could not be run twice
    head = common.header(args.commit)
    head |= {"rep_ms": args.rep, "rest_s": REST, "sustained_s": args.sustained, **ceilings(args.rep)}
    run = partial(run_case, effort=Effort(args.rep, sustained=args.sustained, backward=args.backward))
    return supervisor.work(args, head, BY_NAME, lambda impl, case: IMPLEMENTATIONS[impl].takes(case), run, "fwd_ms")


def summary(rows: Sequence[Row], which: str = "fwd") -> str:
    """Return the table of TFLOP/s for "fwd" or "bwd" (or "fwd_sustained", "bwd_sustained"), with the ratios of flexpress to its peers."""
    impls = [impl for impl in IMPLEMENTATIONS if any(row["impl"] == impl for row in rows)]
    found = {(row["case"], row["impl"]): row for row in rows}
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        rates = {impl: found.get((case, impl), {}).get(f"{which}_tflops") for impl in IMPLEMENTATIONS}
        shown: Row = dict(rates)
        for impl in impls:
            if rates[impl] is None and "error" in found.get((case, impl), {}):
                shown[impl] = "failed"
        ratios = [common.ratio(rates["flexpress"], rates[peer]) for peer in PEERS]
        error = found.get((case, "flexpress"), {}).get("grad_err" if which.startswith("bwd") else "rel_err")
        lines.append([case, *(shown[impl] for impl in impls), *ratios, error])
    return common.table([f"{which} TFLOP/s", *impls, *(f"/{peer}" for peer in PEERS), "flexpress err"], lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = supervisor.arguments(__doc__, "forward.json", list(BY_NAME), list(IMPLEMENTATIONS), DEFAULT)
    parser.add_argument("--backward", action="store_true", help="time and check the gradients too")
    parser.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS", help="time each for so long without rests, too, twice")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    passes = [
        f"{which}{end}" for end in ("", *(["_sustained"] if args.sustained else [])) for which in Effort(backward=args.backward).passes
    ]
    return supervisor.run(args, argv, __file__, work, new_row, lambda rows: [summary(rows, which) for which in passes])


if __name__ == "__main__":
    sys.exit(main())
