"""Measure what a user waits for with mods never seen: the first calls of a new process with an empty cache.

    python benchmarks/cold.py --out cold.json
    python benchmarks/cold.py --out cold.json --part first --waits 0 --runs 1

Every run is a process of its own, with torch imported and the GPU initialised before the clock starts, with FLEXPRESS_WAIT=0 and =1. The
__pycache__ of modules and templates is there from the second run on, unless PYTHONDONTWRITEBYTECODE is set. Torch
itself imports more at the first torch.autograd.grad of a process: that is done before, too, and `torch_backward_s` says how long it took.

first       ALiBi and causal: the block mask, the first forward, the first backward; then training steps, one after another, until explain()
            says that nothing is being compiled and a few more were made. Python's collector of cycles may run in a step, 0.1 s long with
            all of torch in memory: `collector_ms` is its longest time in one step, `longest_ms` the longest step without it
eight       8 other score_mods, each with the causal mask, forward and backward, each in a thread of its own
precompile  the same 8 by one flexpress.precompile
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from common import Row

PARTS = ("first", "eight", "precompile")
WAITS = ("0", "1")
SHAPE = (4, 16, 4096, 128)
PATIENCE = 60.0  # seconds after which steps end, whatever is still being compiled
AFTER = 20  # steps with the fastest kernels


def score_mods(heads: int, device: str) -> list[Callable[..., torch.Tensor]]:
    """Return 8 score_mods, each with kernels of its own."""
    slopes = 2.0 ** -torch.arange(1, heads + 1, device=device)
    table = torch.randn(512, heads, device=device)
    return [
        lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx),
        lambda score, b, h, q_idx, kv_idx: 30.0 * torch.tanh(score / 30.0),
        lambda score, b, h, q_idx, kv_idx: score + table[(q_idx - kv_idx).clamp(0, 511), h],
        lambda score, b, h, q_idx, kv_idx: score * (1.0 + 0.1 * slopes[h]),
        lambda score, b, h, q_idx, kv_idx: score - 0.01 * torch.log1p((q_idx - kv_idx).abs().float()),
        lambda score, b, h, q_idx, kv_idx: torch.where((q_idx - kv_idx) % 2 == 0, score, 0.5 * score),
        lambda score, b, h, q_idx, kv_idx: score + table[kv_idx % 512, h],
        lambda score, b, h, q_idx, kv_idx: 20.0 * torch.tanh((score - slopes[h] * (q_idx - kv_idx)) / 20.0),
    ]


def ready(length: int) -> tuple[str, Callable[[], list[torch.Tensor]]]:
    """Return the device, in use, and what makes query, key, value and the output's gradient with `length` positions."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.randn(8, 8, device=device).sum().item()

    def inputs() -> list[torch.Tensor]:
        shape = (*SHAPE[:2], length, SHAPE[3]) if device == "cuda" else (1, 2, length, 16)
        made = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
        return [*(t.requires_grad_() for t in made[:3]), made[3]]

    return device, inputs


def torch_backward(device: str) -> float:
    """Return the seconds of this process's first torch.autograd.grad, which imports torch.fx and sympy to compare shapes."""
    x = torch.ones(8, device=device, requires_grad=True)
    clock = Clock()
    torch.autograd.grad(2 * x, x, torch.ones_like(x))
    return clock.seconds()


class Clock:
    """Seconds since it was made, once the device has finished."""

    def __init__(self) -> None:
        common.synchronize()
        self.start = time.perf_counter()

    def seconds(self) -> float:
        common.synchronize()
        return time.perf_counter() - self.start


class Collector:
    """Seconds that Python's collector of cycles took since they were last asked for."""

    def __init__(self) -> None:
        self.took, self.began = 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict) -> None:
        if phase == "start":
            self.began = time.perf_counter()
        else:
            self.took += time.perf_counter() - self.began

    def seconds(self) -> float:
        took, self.took = self.took, 0.0
        return took


def first(length: int) -> Row:
    """Time the first mask, forward and backward, and training steps until the fastest kernels are in place."""
    device, inputs = ready(length)
    q, k, v, d_out = inputs()
    imported = Clock()
    import flexpress
    from flexpress.mods import causal

    row: Row = {"import_s": imported.seconds(), "torch_backward_s": torch_backward(device)}
    mod = score_mods(q.shape[1], device)[0]
    whole, part = Clock(), Clock()
    mask = flexpress.create_block_mask(causal, None, None, length, length, device)
    row["mask_s"], part = part.seconds(), Clock()
    out = flexpress.flex_attention(q, k, v, mod, mask)
    row["forward_s"], part = part.seconds(), Clock()
    torch.autograd.grad(out, (q, k, v), d_out)
    row["backward_s"] = part.seconds()

    def kernels() -> str:
        return flexpress.explain(q, k, v, mod, mask)

    row["kernels"], row["in_place_s"] = kernels(), None
    times: list[float] = []
    collections: list[float] = []
    collector, left = Collector(), AFTER
    while left and whole.seconds() < PATIENCE:
        step = Clock()
        torch.autograd.grad(flexpress.flex_attention(q, k, v, mod, mask), (q, k, v), d_out)
        seconds = step.seconds()
        collections.append(collector.seconds())
        times.append(seconds - collections[-1])
        if "being compiled" not in kernels():
            left -= 1
            row["in_place_s"] = row["in_place_s"] or whole.seconds()
    ordered = sorted(times)
    row |= {"steps": len(times), "step_ms": 1e3 * ordered[len(ordered) // 2]}
    return row | {"longest_ms": 1e3 * ordered[-1], "collector_ms": 1e3 * max(collections)}


def in_threads(work: Callable[[Any], object], given: Sequence[Any]) -> None:
    """Do `work` of each in a thread of its own, and wait for all. Raises the first of what they raise."""
    raised: list[BaseException] = []

    def done(one: Any) -> None:
        try:
            work(one)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=done, args=(one,)) for one in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def eight(length: int) -> Row:
    """Time 8 forward and backward passes in 8 threads, and how long it takes until the fastest kernels of all are in place."""
    device, inputs = ready(length)
    import flexpress
    from flexpress.mods import causal

    calls = [(inputs(), mod) for mod in score_mods(SHAPE[1] if device == "cuda" else 2, device)]

    def step(call: tuple) -> None:
        (q, k, v, d_out), mod = call
        mask = flexpress.create_block_mask(causal, None, None, length, length, device)
        torch.autograd.grad(flexpress.flex_attention(q, k, v, mod, mask), (q, k, v), d_out)

    def awaited() -> bool:
        return any("being compiled" in flexpress.explain(q, k, v, mod, mask_mod=causal) for (q, k, v, _), mod in calls)

    row: Row = {"torch_backward_s": torch_backward(device)}
    whole = Clock()
    in_threads(step, calls)
    row["all_s"] = whole.seconds()
    while awaited() and whole.seconds() < PATIENCE:
        time.sleep(0.05)
    return row | {"in_place_s": None if awaited() else whole.seconds()}


def precompile(length: int) -> Row:
    """Time flexpress.precompile of 8 mods."""
    device, inputs = ready(length)
    import flexpress
    from flexpress.mods import causal

    q, k, v, _ = inputs()
    shared = {"query": q, "key": k, "value": v, "mask_mod": causal, "backward": True}
    whole = Clock()
    flexpress.precompile([{**shared, "score_mod": mod} for mod in score_mods(q.shape[1], device)])
    return {"all_s": whole.seconds()}


def in_process(args: argparse.Namespace, part: str, waits: str) -> Row:
    """Run one part in a new process that finds no kernel. A failure is a row with an `error`."""
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        environment = os.environ | {"FLEXPRESS_CACHE_DIR": str(Path(folder, "kernels")), "FLEXPRESS_WAIT": waits}
        command = [sys.executable, __file__, "--child", part, "--length", str(args.length)]
        (row,) = common.rows_of(command, environment, args.limit)
        return row


def measure_all(args: argparse.Namespace) -> Iterator[Row]:
    """Yield one row after another. precompile always waits."""
    for run in range(args.runs):
        for part in args.part:
            for waits in args.waits if part != "precompile" else ("1",):
                yield {"part": part, "waits": waits == "1", "run": run} | in_process(args, part, waits)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = common.arguments(__doc__, "cold.json")
    parser.add_argument("--part", type=common.names(PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)} (default: all)")
    parser.add_argument("--waits", type=common.names(WAITS), default=list(WAITS), help="values of FLEXPRESS_WAIT (default: 0,1)")
    parser.add_argument("--runs", type=int, default=3, help="of each (default: %(default)s)")
    parser.add_argument("--length", type=int, default=SHAPE[2], help="positions (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds per process (default: %(default)g)")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        print(json.dumps([{"first": first, "eight": eight, "precompile": precompile}[args.child](args.length)]))
        return 0
    head, rows = common.header(args.commit), []
    keys = ("part", "waits", "run", "torch_backward_s", "mask_s", "forward_s", "backward_s", "all_s", "in_place_s")
    keys += "steps", "step_ms", "longest_ms", "error"
    for row in measure_all(args):
        rows.append(row)
        common.write_results(args.out, head, rows)
        print(" ".join(f"{key}={row[key]}" for key in keys if key in row), flush=True)
    print(common.table(keys, [[row.get(key) for key in keys] for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
