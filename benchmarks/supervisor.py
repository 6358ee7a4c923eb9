"""Running cases in a process of their own: one that dies or hangs in a kernel costs its own row and no other.

A program's main calls `run`: it is `supervise` in the process that the user starts, and the program's work where `--worker` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
import torch._dynamo
from common import Row

DEVICE_LOST = 3  # exit code of a worker whose GPU context no longer answers


class DeviceLost(Exception):
    """The GPU context is unusable after a failed kernel."""


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
        unusable = False
        try:
            yield
        except Exception as error:
            row["error"] = common.first_line(error)
            unusable = isinstance(error, common.CaptureFailed)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.marker.unlink(missing_ok=True)
        try:
            common.synchronize()
        except Exception as error:
            row.setdefault("error", common.first_line(error))
            unusable = True
        if unusable:
            raise DeviceLost


def arguments(
    description: str | None,
    out: str,
    cases: Sequence[str],
    impls: Sequence[str],
    default: Sequence[str],
    parents: Sequence[argparse.ArgumentParser] = (),
) -> argparse.ArgumentParser:
    """Return a parser with the options of a supervised program; `default` are its usual implementations."""
    parser = common.arguments(description, out, parents)
    parser.add_argument(
        "--cases", type=common.names(cases), default=list(cases), help=f"comma-separated, of {', '.join(cases)} (default: all)"
    )
    parser.add_argument(
        "--impls",
        type=common.names(impls),
        default=list(default),
        help=f"comma-separated, of {', '.join(impls)} (default: {','.join(default)})",
    )
    parser.add_argument("--rep", type=float, default=100.0, help="ms of runs per measurement (default: %(default)g)")
    parser.add_argument("--resume", action="store_true", help="keep the rows in the results file and do the others")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds one step may take (default: %(default)g)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def finished(row: Row, figure: str) -> bool:
    """Return whether nothing is left to do for a row: it has its time, under the key `figure`, or an error."""
    return row[figure] is not None or "error" in row


def work(
    args: argparse.Namespace,
    head: Row,
    cases: Mapping[str, Any],
    takes: Callable[[str, Any], bool],
    run: Callable[[Any, list[str], list[Row], Watch], None],
    figure: str,
) -> int:
    """Do what is still missing in the results file; return the exit code.

    `takes(impl, case)` says whether an implementation can do a case; `run(case, impls, rows, watch)` appends
    their rows, and may raise DeviceLost.  `figure` is the key of a row's time.
    """
    torch._dynamo.config.recompile_limit = 1000
    rows = common.read_results(args.out)[1] if args.out.exists() else []
    watch = Watch(marker_of(args.out), args.limit)
    start = time.perf_counter()
    for name in args.cases:
        case = cases[name]
        done = {row["impl"] for row in rows if row["case"] == name}
        impls = [impl for impl in args.impls if takes(impl, case) and impl not in done]
        if not impls:
            continue
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        lost = False
        try:
            run(case, impls, rows, watch)
        except DeviceLost:
            lost = True
            rows = [row for row in rows if finished(row, figure)]
        except Exception as error:  # making the inputs or the reference failed: nobody's row is at fault
            for row in rows:
                if not finished(row, figure):
                    row["error"] = common.first_line(error)
        common.write_results(args.out, head, rows)
        print(f"{time.perf_counter() - start:6.1f} s  {name}", flush=True)
        if lost:
            return DEVICE_LOST
    return 0


def marker_of(out: Path) -> Path:
    """Return the file in which a worker says what it is running."""
    return out.with_name(out.name + ".running")


def supervise(args: argparse.Namespace, argv: Sequence[str], script: str, new_row: Callable[[str, str], Row]) -> int:
    """Run workers, `script` with `argv`, until everything has a row; return the exit code."""
    marker = marker_of(args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        args.out.unlink(missing_ok=True)
    while True:
        marker.unlink(missing_ok=True)
        code = subprocess.call([sys.executable, script, *argv, "--worker"])
        if code == 0:
            return 0
        if code == DEVICE_LOST:
            continue
        if not marker.exists():
            return code
        case, impl = json.loads(marker.read_text())
        head, rows = common.read_results(args.out) if args.out.exists() else (common.header(args.commit), [])
        rows.append(new_row(case, impl) | {"error": f"the process ended with code {code} or ran past {args.limit} s"})
        common.write_results(args.out, head, rows)
        marker.unlink()


def run(
    args: argparse.Namespace,
    argv: Sequence[str],
    script: str,
    work: Callable[[argparse.Namespace], int],
    new_row: Callable[[str, str], Row],
    tables: Callable[[Sequence[Row]], Sequence[str]],
) -> int:
    """Be the worker, or run workers and print the `tables` of all rows, and the errors; return the exit code."""
    if args.worker:
        return work(args)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    code = supervise(args, argv, script, new_row)
    if args.out.exists():
        rows = common.read_results(args.out)[1]
        for table in tables(rows):
            print(f"\n{table}")
        for row in rows:
            if "error" in row:
                print(f"{row['case']} {row['impl']}: {row['error']}")
    return code
