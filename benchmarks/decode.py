"""Time decoding, new queries of every sequence against a cache, in every implementation.

    python benchmarks/decode.py --out decode.json
    python benchmarks/decode.py --out decode.json --resume --ragged-prefill

What is timed is a CUDA graph of several calls, each with its own copy of the cache, as the layers of a model have:
what the graph reads is many times larger than L2, so every call reads its keys and values from memory.  All that a
call launches counts, block lists of masks included.  The outputs of the graph itself are compared with a float64
reference; then implementations take turns, three rounds each.  With --ragged-prefill the problem is that of ragged.py.

A failure is a row with an `error`.  The file is rewritten after every case.  The work is done in one process of its
own: should that process die or hang in a kernel, the culprit gets an error row and a new process goes on with the rest.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import common
import ragged
import serving
import supervisor
import torch
from common import Row, ratio
from reference import check_output
from serving import IMPLEMENTATIONS, Run
from supervisor import Watch

ROUNDS = 3
DEFAULT = tuple(impl for impl in IMPLEMENTATIONS if impl != "efficient")
RATIOS = (
    *(("flexpress", peer) for peer in ("torch_flex", "cudnn", "flash")),
    ("flexpress_cached", "torch_flex"),
    *((f"flexpress_{layout}", "cudnn") for layout in ("cached", "paged_16", "paged_64", "paged_128")),
)


class Tools(NamedTuple):
    """How outputs and what repeats them are made of a function, and how the latter is timed."""

    capture: Callable[[Callable[[], list[torch.Tensor]]], tuple[list[torch.Tensor], Callable[[], None]]] = common.captured
    time_ms: Callable[[Callable[[], None], float], float] = common.replay_ms


class Measured(NamedTuple):
    """A row, and what to time for it; the outputs live as long as the graph that writes them."""

    row: Row
    run: Run
    outs: list[torch.Tensor]
    replay: Callable[[], None]
    update: Callable[[], None] | None


def new_row(case: str, impl: str) -> Row:
    """Return a row with every key and nothing measured."""
    keys = ("us", "tb_s", "of_copy", "tflops", "update_us", "rel_err", "row_err", "calls", "bytes")
    return {"case": case, "impl": impl, **dict.fromkeys(keys), "us_rounds": [], "update_rounds": []}


def prepare(row: Row, run: Run, tools: Tools) -> Measured:
    """Compile, capture and check.  Raises WrongResult."""
    update = tools.capture(run.update)[1] if run.update else None
    outs, replay = tools.capture(run.call)
    for out in outs:
        out.fill_(math.nan)
    replay()
    for out in outs[:: max(1, len(outs) - 1)]:  # the first and the last; every copy holds the same numbers
        check_output(row, run.answers, run.parts(out))
    return Measured(row, run, outs, replay, update)


@torch.no_grad()
def run_case(
    case: Any,
    impls: Sequence[str],
    rows: list[Row],
    watch: Watch,
    device: str = "cuda",
    rep: float = 100.0,
    copy_tb_s: float | None = None,
    tools: Tools | None = None,
) -> None:
    """Append a row for each of `impls` to `rows` and fill them in.

    Raises DeviceLost when a failure took the GPU context with it; rows that hold neither a time nor an error
    are then still to be done.
    """
    tools = tools or Tools()
    fresh = [new_row(case.name, impl) for impl in impls]
    rows.extend(fresh)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0
    problem = case.problem(device, l2)
    found = []
    for row in fresh:
        with watch.step(row):
            found.append(prepare(row, problem.run(row["impl"]), tools))
    for _ in range(ROUNDS):
        for one in found:
            if "error" in one.row:
                continue
            with watch.step(one.row):
                one.row["us_rounds"].append(tools.time_ms(one.replay, rep) * 1e3)
                if one.update:
                    one.row["update_rounds"].append(tools.time_ms(one.update, rep) * 1e3)
    for one in found:
        if "error" not in one.row:
            one.row["us"], one.row["update_us"] = (common.median(one.row[f"{key}_rounds"]) for key in ("us", "update"))
            problem.figures(one.row, copy_tb_s)


def work(args: argparse.Namespace) -> int:
    """Do what is still missing in the results file; return the exit code."""
    copy = common.copy_tb_s(args.rep)
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    head = common.header(args.commit) | {"rep_ms": args.rep, "copy_tb_s": copy, "l2_bytes": l2}
    run = partial(run_case, rep=args.rep, copy_tb_s=copy)
    if args.ragged_prefill:
        return supervisor.work(args, head, ragged.BY_NAME, lambda impl, case: True, run, "us")
    return supervisor.work(args, head, serving.BY_NAME, lambda impl, case: IMPLEMENTATIONS[impl].takes(case), run, "us")


def summary(rows: Sequence[Row]) -> str:
    """Return tables of the times, and of rates as ratios to those of peers: above 1 flexpress is the faster one."""
    found = {(row["case"], row["impl"]): row for row in rows}
    shown = []
    decoding = [case for case in dict.fromkeys(row["case"] for row in rows) if case in serving.BY_NAME]
    if decoding:
        impls = [impl for impl in IMPLEMENTATIONS if any((case, impl) in found for case in decoding)]
        times, rates = [], []
        for case in decoding:
            here = {impl: found.get((case, impl), {}) for impl in IMPLEMENTATIONS}
            us = {impl: row.get("us") for impl, row in here.items()}
            times.append([case, *("failed" if "error" in here[impl] else us[impl] for impl in impls)])
            best = max(
                (row for impl, row in here.items() if "flexpress" in impl and row.get("tb_s")), key=lambda row: row["tb_s"], default={}
            )
            errors = [row["rel_err"] for impl, row in here.items() if "flexpress" in impl and row.get("rel_err")]
            ratios = [ratio(us[peer], us[impl]) for impl, peer in RATIOS]
            rates.append([case, *ratios, best.get("tb_s"), best.get("of_copy"), max(errors, default=None)])
        short = {impl: impl.replace("flexpress_", "") for impl in IMPLEMENTATIONS}
        shown.append(common.table(["us", *(short[impl] for impl in impls)], times))
        columns = [f"{short[impl]}/{peer}" for impl, peer in RATIOS]
        shown.append(common.table(["times as fast", *columns, "best TB/s", "of copy", "worst err"], rates))
    for case in ragged.BY_NAME:
        here = [row for row in rows if row["case"] == case]
        equal = found.get((case, "flexpress_equal"), {}).get("tflops")
        lines = [
            [
                row["impl"],
                "failed" if "error" in row else row["us"],
                row["tflops"],
                ratio(row["tflops"], equal),
                row["update_us"],
                row["rel_err"],
            ]
            for row in here
        ]
        if here:
            shown.append(common.table([case, "us", "TFLOP/s", "/equal", "update us", "err"], lines))
    return "\n\n".join(shown)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    first = argparse.ArgumentParser(add_help=False)  # which cases and implementations there are to choose from
    first.add_argument("--ragged-prefill", action="store_true", help="prefill of prompts of different lengths instead of decoding")
    known, rest = first.parse_known_args(argv)
    choice = (ragged.BY_NAME, ragged.IMPLS, ragged.DEFAULT)
    if not known.ragged_prefill:
        choice = (serving.BY_NAME, tuple(IMPLEMENTATIONS), DEFAULT)
    which, impls, default = choice
    parser = supervisor.arguments(__doc__, "decode.json", list(which), impls, default, parents=[first])
    return parser.parse_args(rest, namespace=known)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    return supervisor.run(args, argv, __file__, work, new_row, lambda rows: [summary(rows)])


if __name__ == "__main__":
    sys.exit(main())
