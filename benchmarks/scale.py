"""TFLOP/s as the work grows: over lengths, odd lengths, batch sizes, heads and head dims.

    python benchmarks/scale.py --out scale.json
    python benchmarks/scale.py --out scale.json --backward --part batch,heads
    python benchmarks/plot.py scale.json scale.png

A point is a workload as in forward.py, checked and timed as there, but in two short rounds. In the end every point is printed where
flexpress is below 0.9 of the fastest other implementation.

    full, causal            512 to 131072 positions, 16384 tokens in all or one sequence
    full_b1, causal_b1      512 to 8192 positions, one sequence
    odd                     causal, one position less than a power of two
    batch                   1 to 16 sequences, causal
    heads                   1 to 64 heads, one sequence, causal
    dim_full, dim_causal    head dims of 32 to 256
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import forward
import supervisor
import torch
import torch._functorch.config
from common import Row
from implementations import IMPLEMENTATIONS
from supervisor import Watch
from workloads import Workload, causal

DEFAULT = tuple(impl for impl in ("flexpress", "cudnn", "fa4") if impl in forward.DEFAULT)
LENGTHS = tuple(2**n for n in range(9, 18))
TOKENS = 16384
DIMS = (32, 64, 80, 96, 128, 160, 192, 256)
REST = 0.05  # seconds
LIMIT = 0.9  # of the fastest other implementation: what is below is a cliff


@dataclass(frozen=True)
class Point(Workload):
    """A workload at `x`, the number that grows in its part of the picture."""

    part: str = ""
    x: int = 0


def point(part: str, x: int, **changes: Any) -> Point:
    return Point(f"{part}_{x}", f"{part} {x}", part=part, x=x, **changes)


def points() -> Iterator[Point]:
    for part, mask in (("full", None), ("causal", causal)):
        for length in LENGTHS:
            yield point(part, length, batch=max(1, TOKENS // length), length=length, mask=mask)
        for length in LENGTHS:
            if length < TOKENS:
                yield point(f"{part}_b1", length, batch=1, length=length, mask=mask)
        for dim in DIMS:
            yield point(f"dim_{part}", dim, d_qk=dim, d_v=dim, mask=mask)
    for length in LENGTHS:
        yield point("odd", length - 1, batch=max(1, TOKENS // length), length=length - 1, mask=causal)
    for batch in (1, 2, 4, 8, 16):
        yield point("batch", batch, batch=batch, mask=causal)
    for heads in (1, 2, 4, 8, 16, 32, 64):
        yield point("heads", heads, batch=1, heads=heads, kv_heads=heads, mask=causal)


POINTS = {row.name: row for row in points()}
PARTS = tuple(dict.fromkeys(row.part for row in POINTS.values()))


def new_row(case: str, impl: str) -> Row:
    """Return a row with every key and nothing measured."""
    return forward.new_row(case, impl) | {"part": POINTS[case].part, "x": POINTS[case].x}


def work(args: argparse.Namespace) -> int:
    """Do what is still missing in the results file; return the exit code."""
    torch._functorch.config.donated_buffer = False  # or a compiled backward could not be run twice
    effort = forward.Effort(args.rep, rounds=2, rest=REST, backward=args.backward)
    head = common.header(args.commit) | {"rep_ms": args.rep, "rest_s": REST}

    def run(case: Point, impls: list[str], rows: list[Row], watch: Watch) -> None:
        forward.run_case(case, impls, rows, watch, effort=effort, make_row=new_row)

    return supervisor.work(args, head, POINTS, lambda impl, case: IMPLEMENTATIONS[impl].takes(case), run, "fwd_ms")


def cliffs(rows: Sequence[Row], which: str = "fwd") -> list[tuple[str, float, str, float]]:
    """Return (point, TFLOP/s, fastest other implementation, ratio to it) where flexpress is below LIMIT of that."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["impl"]] = row[f"{which}_tflops"] or 0.0
    low = []
    for case, rates in found.items():
        ours = rates.get("flexpress")
        best = max((impl for impl in rates if not impl.startswith("flexpress")), key=rates.__getitem__, default=None)
        if ours is not None and best is not None and ours < LIMIT * rates[best]:
            low.append((case, ours, best, ours / rates[best]))
    return low


def summary(rows: Sequence[Row], which: str) -> str:
    """Return the table of TFLOP/s, and of the points where flexpress is slow."""
    low = cliffs(rows, which)
    count = len({row["case"] for row in rows})
    return "\n".join(
        [
            forward.summary(rows, which),
            f"\n{which}: {len(low)} of {count} points below {LIMIT} of the fastest other implementation",
            *([common.table(["point", "flexpress", "fastest other", "ratio"], low)] if low else []),
        ]
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = supervisor.arguments(__doc__, "scale.json", list(POINTS), list(IMPLEMENTATIONS), DEFAULT)
    parser.set_defaults(rep=25.0)
    parser.add_argument("--part", type=common.names(PARTS), default=list(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--backward", action="store_true", help="time and check the gradients too")
    args = parser.parse_args(argv)
    args.cases = [case for case in args.cases if POINTS[case].part in args.part]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    tables = [partial(summary, which=which) for which in forward.Effort(backward=args.backward).passes]
    return supervisor.run(args, argv, __file__, work, new_row, lambda rows: [table(rows) for table in tables])


if __name__ == "__main__":
    sys.exit(main())
