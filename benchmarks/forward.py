"""Time the forward, and with --backward the backward, of every workload in every implementation.

    python benchmarks/forward.py --out results.json

Implementations take turns, two rounds each, on the same random bf16 tensors; before a thing is timed its
output is compared with a float64 reference.  A failure is a row with an `error`.  The file is rewritten after
every case.  The work is done in one process of its own: should that process die or hang in a kernel, the
culprit gets an error row and a new process goes on with the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import common
import torch
import torch._dynamo
import torch._functorch.config
from common import Row
from implementations import IMPLEMENTATIONS, Attention
from reference import Slice, Tensors, gradient_error, output_errors, references
from workloads import BY_NAME, Workload, count_pairs

DEFAULT = ("flexpress", "torch_flex", "cudnn", "flash")
ROUNDS = 2
CHECK_SCALE = 4.0  # of q in the check: at ordinary scores a lost softcap would hardly show
ERROR_LIMIT = 0.02  # bf16 lands between 0.001 and 0.01
ROW_ERROR_LIMIT = 0.2
DEVICE_LOST = 3  # exit code of a worker whose GPU context no longer answers


class WrongResult(Exception):
    """An implementation's output is not the attention that was asked for."""


class DeviceLost(Exception):
    """The GPU context is unusable after a failed kernel."""


def new_row(case: str, impl: str) -> Row:
    """Return a row with every key and nothing measured."""
    keys = ("fwd_ms", "fwd_tflops", "bwd_ms", "bwd_tflops", "rel_err", "row_err", "grad_err")
    return {"case": case, "impl": impl, **dict.fromkeys(keys), "fwd_rounds": [], "bwd_rounds": []}


@dataclass(frozen=True)
class Watch:
    """Says in the file `marker` what is running: whom to blame when this process ends early.

    A step that takes longer than `limit` seconds (a kernel that hangs) ends the process.
    """

    marker: Path
    limit: float = 180.0

    @contextlib.contextmanager
    def step(self, row: Row) -> Iterator[None]:
        """Run one step for `row`: an exception becomes its error.  Raises DeviceLost if the GPU is gone."""
        self.marker.write_text(json.dumps([row["case"], row["impl"]]))
        faulthandler.dump_traceback_later(self.limit, exit=True)
        try:
            yield
        except Exception as error:
            row["error"] = common.first_line(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.marker.unlink(missing_ok=True)
        try:
            common.synchronize()
        except Exception as error:
            row.setdefault("error", common.first_line(error))
            raise DeviceLost from None


def finite(value: float) -> float | None:
    """Return `value`, or None for NaN and infinity, which a results file cannot hold."""
    return value if abs(value) < float("inf") else None


def check(
    row: Row, attention: Attention, qkv: Tensors, grad_out: torch.Tensor | None, answers: list[Slice]
) -> None:
    """Run `attention` once, fill in the row's errors, and raise WrongResult if they are too large.

    The gradients are left out when `grad_out` is None.
    """
    q, k, v = qkv
    poison = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype, device=q.device)
    del poison  # its memory is the allocator's first choice for the output: elements never written stay NaN
    out = attention(q, k, v)
    rel_err, row_err = output_errors(answers, out)
    row["rel_err"], row["row_err"] = finite(rel_err), finite(row_err)
    if not (rel_err < ERROR_LIMIT and row_err < ROW_ERROR_LIMIT):
        raise WrongResult(f"relative error {rel_err:.3g}, worst row {row_err:.3g}")
    if grad_out is not None:
        error = gradient_error(answers, *torch.autograd.grad(out, (q, k, v), grad_out))
        row["grad_err"] = finite(error)
        if not error < ERROR_LIMIT:
            raise WrongResult(f"relative error {error:.3g} in the gradients")


def time_round(
    row: Row, attention: Attention, qkv: Tensors, grad_out: torch.Tensor | None, rep: float
) -> None:
    """Add one round of times to the row; without `grad_out` of the forward only."""
    row["fwd_rounds"].append(common.time_ms(lambda: attention(*qkv), rep))
    if grad_out is not None:
        out = attention(*qkv)
        row["bwd_rounds"].append(
            common.time_ms(lambda: torch.autograd.grad(out, qkv, grad_out, retain_graph=True), rep)
        )


def run_case(
    case: Workload,
    impls: Sequence[str],
    rows: list[Row],
    watch: Watch,
    device: str = "cuda",
    rep: float = 100.0,
    backward: bool = False,
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
    for _ in range(ROUNDS):
        for row, attention in runs:
            if "error" in row:
                continue
            with watch.step(row):
                time_round(row, attention, (q, k, v), grad_out, rep)
    for row, _ in runs:
        for name, flops in (("fwd", case.forward_flops(pairs)), ("bwd", case.backward_flops(pairs))):
            ms = common.median(row[f"{name}_rounds"])
            row[f"{name}_ms"] = ms
            row[f"{name}_tflops"] = common.tflops(flops, ms) if ms else None


def finished(row: Row) -> bool:
    """Return whether nothing is left to do for a row."""
    return row["fwd_ms"] is not None or "error" in row


def ceilings(rep: float) -> Row:
    """Return the rates of this card now: an 8192^3 bf16 product, and a copy (read + written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    big = a.repeat(16, 1)
    target = torch.empty_like(big)
    return {
        "matmul_tflops": common.tflops(2 * 8192**3, common.time_ms(lambda: a @ b, rep)),
        "copy_tb_s": 2 * big.nbytes / common.time_ms(lambda: target.copy_(big), rep) * 1e-9,
    }


def work(args: argparse.Namespace) -> int:
    """Do what is still missing in the results file; return the exit code."""
    torch._dynamo.config.recompile_limit = 1000
    torch._functorch.config.donated_buffer = False  # or a compiled backward could not be run twice
    head = common.header(args.commit)
    head |= {"rep_ms": args.rep, **ceilings(args.rep)}
    rows = common.read_results(args.out)[1] if args.out.exists() else []
    watch = Watch(marker_of(args.out), args.limit)
    start = time.perf_counter()
    for name in args.cases:
        case = BY_NAME[name]
        done = {row["impl"] for row in rows if row["case"] == name}
        impls = [impl for impl in args.impls if IMPLEMENTATIONS[impl].takes(case) and impl not in done]
        if not impls:
            continue
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        lost = False
        try:
            run_case(case, impls, rows, watch, rep=args.rep, backward=args.backward)
        except DeviceLost:
            lost = True
            rows = [row for row in rows if finished(row)]
        except Exception as error:  # making the inputs or the reference failed: nobody's row is at fault
            for row in rows:
                if not finished(row):
                    row["error"] = common.first_line(error)
        common.write_results(args.out, head, rows)
        print(f"{time.perf_counter() - start:6.1f} s  {name}", flush=True)
        if lost:
            return DEVICE_LOST
    return 0


def marker_of(out: Path) -> Path:
    """Return the file in which a worker says what it is running."""
    return out.with_name(out.name + ".running")


def supervise(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run workers until everything has a row; return the exit code."""
    marker = marker_of(args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        args.out.unlink(missing_ok=True)
    while True:
        marker.unlink(missing_ok=True)
        code = subprocess.call([sys.executable, __file__, *argv, "--worker"])
        if code == 0:
            return 0
        if code == DEVICE_LOST:
            continue
        if not marker.exists():
            return code
        case, impl = json.loads(marker.read_text())
        head, rows = common.read_results(args.out) if args.out.exists() else (common.header(args.commit), [])
        rows.append(
            new_row(case, impl) | {"error": f"the process ended with code {code} or ran past {args.limit} s"}
        )
        common.write_results(args.out, head, rows)
        marker.unlink()


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
    parser = common.arguments(__doc__, "forward.json")
    parser.add_argument(
        "--cases",
        type=common.names(list(BY_NAME)),
        default=list(BY_NAME),
        help="comma-separated workloads (default: all)",
    )
    parser.add_argument(
        "--impls",
        type=common.names(list(IMPLEMENTATIONS)),
        default=list(DEFAULT),
        help=f"comma-separated, of {', '.join(IMPLEMENTATIONS)} (default: {','.join(DEFAULT)})",
    )
    parser.add_argument(
        "--rep", type=float, default=100.0, help="ms of runs per measurement (default: %(default)g)"
    )
    parser.add_argument("--backward", action="store_true", help="time and check the gradients too")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows in the results file and do the others"
    )
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds one step may take (default: %(default)g)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    if args.worker:
        return work(args)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    code = supervise(args, argv)
    if args.out.exists():
        rows = common.read_results(args.out)[1]
        for which in ("fwd", "bwd") if args.backward else ("fwd",):
            print(f"\n{summary(rows, which)}")
        for row in rows:
            if "error" in row:
                print(f"{row['case']} {row['impl']}: {row['error']}")
    return code


if __name__ == "__main__":
    sys.exit(main())
