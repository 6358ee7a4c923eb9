"""The differential fuzzer: random programs that call Flexpress, against dense attention in float64.

    python tests/fuzz.py --n 10000 --seed 1 --jobs 16                   # in the interpreter
    python tests/fuzz.py --n 3000 --seed 1 --device cuda --jobs 8
    python tests/fuzz.py --seed 1 --only 4711                           # print one program, run it, say what is wrong
    python tests/fuzz.py --n 2000 --kinds verdicts,evaluate --seconds 300

A program follows from seed and index. Exit status 1 if any result differs, an error is raised that should not be, or a program takes too
long.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """status: "right", "refused" (an error that is right), "wrong", "error" or "slow"."""

    index: int
    kind: str
    status: str
    message: str = ""
    seconds: float = 0.0
    compared: float = 1.0
    worst: dict = field(default_factory=dict)


def outcome(seed: int, index: int, device: str, kinds: tuple, small: int = 0) -> Outcome:
    """Generate, run and judge one program."""
    import torch

    from support.fuzz_programs import program

    began = time.perf_counter()
    try:
        p = program(seed, index, device, kinds, small)
    except Exception:
        return Outcome(index, "?", "error", "while it was made: " + traceback.format_exc())
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(p.poison, warn_only=True)
    try:
        judged = p.judged()
    except Exception as error:
        if p.refusals.strip("|") and re.search(p.refusals.strip("|"), str(error)):
            return Outcome(index, p.kind, "refused", str(error), time.perf_counter() - began)
        return Outcome(index, p.kind, "error", traceback.format_exc(), time.perf_counter() - began)
    finally:
        torch.use_deterministic_algorithms(False)
    seconds = time.perf_counter() - began
    message = "\n".join(f"{d.name} {d.what}" for d in judged.differences)
    return Outcome(index, p.kind, "wrong" if judged.differences else "right", message, seconds, judged.compared, judged.worst)


def worker(seed: int, device: str, kinds: tuple, tasks, results) -> None:
    """Run programs whose numbers come from `tasks`; say which one begins and how it ends."""
    os.environ["FLEXPRESS_CACHE_DIR"] = tempfile.mkdtemp(prefix="flexpress-fuzz-")
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    me = os.getpid()
    while True:
        index = tasks.get()
        if index is None:
            results.put((me, "end", None))
            return
        results.put((me, "begin", index))
        found = outcome(seed, index, device, kinds)
        results.put((me, "done", found))
        if found.status == "error" and "CUDA error" in found.message:  # nothing that this process does on the device from now on is right
            results.close()
            results.join_thread()
            os._exit(1)


class Campaign:
    """Workers, what each is doing, and what came of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.context = options, multiprocessing.get_context("spawn")
        self.results = self.context.Queue()
        self.outcomes: list[Outcome] = []
        self.workers: dict[int, tuple] = {}  # process and its queue of tasks, by pid
        self.running: dict[int, tuple[int, float]] = {}  # index and when it began, by pid
        self.next = options.start
        self.began = self.reported = time.time()

    def start(self) -> None:
        tasks = self.context.Queue()
        process = self.context.Process(
            target=worker, args=(self.options.seed, self.options.device, self.options.kinds, tasks, self.results), daemon=True
        )
        process.start()
        self.workers[process.pid] = process, tasks
        self.give(process.pid)
        self.give(process.pid)

    def give(self, pid: int) -> None:
        """The next program for a worker, or its end."""
        o = self.options
        over = self.next >= o.start + o.n or (o.seconds and time.time() - self.began > o.seconds)
        self.workers[pid][1].put(None if over else self.next)
        self.next += not over

    def lose(self, pid: int, status: str, message: str) -> None:
        """A worker that hangs or died: another takes its place, and the programs that it had waiting."""
        process, tasks = self.workers.pop(pid)
        process.kill()
        process.join()
        index, began = self.running.pop(pid, (None, time.time()))
        if index is not None:
            self.done(Outcome(index, "?", status, message, time.time() - began))
        waiting = []
        while True:
            try:
                waiting.append(tasks.get(timeout=0.2))
            except queue.Empty:
                break
        self.start_with([i for i in waiting if i is not None])

    def start_with(self, indices: list[int]) -> None:
        tasks = self.context.Queue()
        for index in indices:
            tasks.put(index)
        process = self.context.Process(
            target=worker, args=(self.options.seed, self.options.device, self.options.kinds, tasks, self.results), daemon=True
        )
        process.start()
        self.workers[process.pid] = process, tasks
        self.give(process.pid)
        if not indices:
            self.give(process.pid)

    def run(self) -> None:
        for _ in range(min(self.options.jobs, self.options.n)):
            self.start()
        while self.workers:
            try:
                pid, event, what = self.results.get(timeout=1)
            except queue.Empty:
                pid, event, what = 0, "", None
            if event == "begin":
                self.running[pid] = what, time.time()
            elif event == "done":
                self.running.pop(pid, None)
                self.done(what)
                if pid in self.workers:
                    self.give(pid)
            elif event == "end" and pid in self.workers:
                self.workers.pop(pid)[0].join()
            now = time.time()
            for pid in list(self.workers):
                index, began = self.running.get(pid, (None, now))
                if now - began > self.options.timeout:
                    self.lose(pid, "slow", f"took more than {self.options.timeout} s")
                elif not self.workers[pid][0].is_alive() and self.results.empty():
                    self.lose(pid, "error", f"its process ended with status {self.workers[pid][0].exitcode}")
            if now - self.reported > self.options.every:
                self.reported = now
                print(self.line(), flush=True)

    def done(self, found: Outcome) -> None:
        self.outcomes.append(found)
        if found.status in ("wrong", "error", "slow"):
            print(f"\n[{found.status}] seed {self.options.seed} index {found.index} ({found.kind})\n{shown(found.message)}", flush=True)

    def line(self) -> str:
        counts = Counter(o.status for o in self.outcomes)
        seconds = time.time() - self.began
        rate = len(self.outcomes) / max(seconds, 1e-9) / self.options.jobs
        return f"{len(self.outcomes)} programs in {seconds:.0f} s ({rate:.2f} a second and process): " + ", ".join(
            f"{n} {status}" for status, n in sorted(counts.items())
        )

    def summary(self) -> str:
        lines = ["", self.line()]
        by_kind = defaultdict(list)
        for o in self.outcomes:
            by_kind[o.kind].append(o)
        for kind, found in sorted(by_kind.items()):
            counts = Counter(o.status for o in found)
            seconds, share = (sum(values) / len(found) for values in ([o.seconds for o in found], [100 * o.compared for o in found]))
            lines.append(
                f"  {kind:18} {len(found):6}: {', '.join(f'{n} {s}' for s, n in sorted(counts.items()))}; "
                f"{seconds:.2f} s each, {share:.1f} % of elements compared"
            )
        bad = sorted((o.index, o.status) for o in self.outcomes if o.status not in ("right", "refused"))
        lines.append(f"differences: {bad}" if bad else "no differences")
        if len(self.outcomes) < self.options.n:
            lines.append(f"stopped after {len(self.outcomes)} of {self.options.n}")
        return "\n".join(lines)


def shown(message: str, most: int = 25) -> str:
    lines = message.splitlines()
    return "\n".join(lines if len(lines) <= most else [*lines[:3], "...", *lines[-most:]])


def replay(options: argparse.Namespace) -> int:
    """Print a program, run it, and look for a smaller one that is wrong too."""
    from support.fuzz_programs import program

    result = 0
    for small in (0, 1, 2, 3) if options.small is None else (options.small,):
        found = outcome(options.seed, options.only, options.device, options.kinds, small)
        bad = found.status not in ("right", "refused")
        result |= bad
        first = small == 0 or options.small is not None
        if not first and not bad:
            continue
        p = program(options.seed, options.only, options.device, options.kinds, small)
        print(p.text() if first else f"\n# --small {small} is wrong too:\n{p.body()}")
        print(f"# {found.status}: " + found.message.replace("\n", "\n# "))
        for name, (element, norm) in found.worst.items():
            print(f"# {name}: {element:.3f} of what is allowed by element, {norm:.3f} by norm")
    return result


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--n", type=int, default=200, help="programs")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("FLEXPRESS_FUZZ_SEED", 0)))
    parser.add_argument("--start", type=int, default=0, help="the first index")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, help="one program: print it and run it")
    parser.add_argument("--small", type=int, help="with --only: the program with extents halved this often")
    parser.add_argument(
        "--kinds", type=lambda text: tuple(text.split(",")), default=(), help="kinds of programs (changes what an index means)"
    )
    parser.add_argument("--seconds", type=float, default=0, help="begin no program after this time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one program may take")
    parser.add_argument("--every", type=float, default=10, help="seconds between lines of progress")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if options.only is not None:
        return replay(options)
    campaign = Campaign(options)
    campaign.run()
    print(campaign.summary())
    return int(any(o.status not in ("right", "refused") for o in campaign.outcomes))


if __name__ == "__main__":
    os.environ.setdefault("FLEXPRESS_CPU", "interpreter")  # on a CPU this is of kernels in Triton
    sys.exit(main())
