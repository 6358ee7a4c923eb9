"""What the benchmark programs share: arguments, the header of a results file, timing, and writing JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("FLEXPRESS_WAIT", "1")  # read when flexpress is imported: what is timed are the kernels that serve in the end

Row = dict[str, Any]
FA4 = "flash-attn-4"  # FlashAttention-4, which shares its module's name with FlashAttention-2
SUSTAINED_GROUP = 20.0  # ms of calls between two events


def arguments(description: str | None, out: str, parents: Sequence[argparse.ArgumentParser] = ()) -> argparse.ArgumentParser:
    """Return a parser with the options every program has, and those of `parents`; `out` is the default results file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, parents=parents)
    parser.add_argument("--out", type=Path, default=Path(out), help="results file (default: %(default)s)")
    parser.add_argument(
        "--commit",
        default=os.environ.get("FLEXPRESS_COMMIT"),
        help="commit for the header (default: $FLEXPRESS_COMMIT, else what git says)",
    )
    return parser


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: a comma-separated choice from `known`, in the order of `known`."""

    def choose(text: str) -> list[str]:
        asked = [part.strip() for part in text.split(",") if part.strip()]
        wrong = [name for name in asked if name not in known]
        if wrong or not asked:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong) or 'nothing'}: choose from {', '.join(known)}")
        return [name for name in known if name in asked]

    return choose


def integers(text: str) -> list[int]:
    """An argparse type: comma-separated whole numbers."""
    return [int(n) for n in text.split(",")]


def command_output(*command: str) -> str | None:
    """Return the first line that `command` prints, or None if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def rows_of(command: Sequence[str], environment: dict[str, str], limit: float) -> list[Row]:
    """Run a process for at most `limit` seconds and return the rows of its last line, which is JSON; a failure is a row with an `error`."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [{"error": f"ran past {limit} s"}]
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        complaint = done.stderr.strip().splitlines()
        return [{"error": complaint[-1][:300] if complaint else f"ended with code {done.returncode}"}]
    return json.loads(lines[-1])


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None: asked without an import, as several may share a module's name."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_of(package: str) -> str | None:
    """Return the version of an importable package, or None."""
    try:
        module = importlib.import_module(package)
    except ImportError:
        return None
    return getattr(module, "__version__", None) or installed_version(package)


def header(commit: str | None = None) -> Row:
    """Return what the numbers depend on: device, driver, versions, commit and date (UTC)."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "flexpress": version_of("flexpress"),
        "fa4": installed_version(FA4),
        "commit": commit or command_output("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_results(path: Path, head: Row, rows: Sequence[Row]) -> None:
    """Write `{"header": ..., "rows": [...]}`: a reader sees the old file or the whole new one, never a part.

    Raises ValueError for NaN and infinity, which JSON does not have.
    """
    text = json.dumps({"header": head, "rows": list(rows)}, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_results(path: Path) -> tuple[Row, list[Row]]:
    """Return (header, rows) of a results file."""
    data = json.loads(path.read_text())
    return data["header"], data["rows"]


def first_line(error: BaseException) -> str:
    """Return an exception as one line: its type and the first line of its message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def synchronize() -> None:
    """Wait for the device; does nothing where there is none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_us(run: Callable[[], object], times: int) -> float:
    """Return the median time, in microseconds, in which `run` returns, of so many runs; then wait for the device."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    synchronize()
    return statistics.median(found) * 1e6


def time_ms(fn: Callable[[], object], rep: float = 100.0) -> float:
    """Return the median time of `fn` in ms between CUDA events, over about `rep` ms of runs, L2 cleared."""
    from triton.testing import do_bench

    return float(do_bench(fn, warmup=25, rep=rep, return_mode="median"))


def queued_ms(fn: Callable[[], object], rep: float = 100.0, batch: int = 10) -> float:
    """Return the median time of `fn` in ms between CUDA events, over about `rep` ms of runs, L2 cleared, the first batch left out.

    The device waits until a batch of runs is enqueued: left to run, it would catch up with a host that is late, and the
    gaps would be counted. A batch is `batch` runs, or as few as take `rep` ms. Raises RuntimeError if a batch never is enqueued in time.
    """
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    batch = min(batch, calls_in(rep, fn))
    cycles = 2**23  # of waiting, a few ms
    batches: list[list[float]] = []
    while sum(map(sum, batches[1:])) < rep:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(batch)]
        released = torch.cuda.Event()
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        released.record()
        for start, end in events:
            flush.zero_()
            start.record()
            fn()
            end.record()
        late = released.query()
        torch.cuda.synchronize()
        if not late:
            batches.append([start.elapsed_time(end) for start, end in events])
        elif cycles == 2**31:
            raise RuntimeError(f"{batch} runs were not enqueued within a second: they wait for the device, or fill its queue. Use time_ms")
        else:
            cycles *= 2
    return statistics.median(ms for times in batches[1:] for ms in times)


def elapsed_ms(fn: Callable[[], object], times: int = 1) -> float:
    """Return the time in ms of one of `times` calls one after another, and wait for them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def calls_in(ms: float, fn: Callable[[], object]) -> int:
    """Return how many calls of `fn` take `ms`, at least 1, by the second one."""
    fn()
    return max(1, math.ceil(ms / max(elapsed_ms(fn), 1e-3)))


def sustained_ms(fn: Callable[[], object], seconds: float) -> float:
    """Return the time of `fn` in ms while the device has done nothing else for `seconds`: the mean of the second half.

    The host is ahead by one group of calls, so the device rests only where a call takes the host longer. L2 is not cleared.
    """
    times = calls_in(SUSTAINED_GROUP, fn)
    began = time.perf_counter()
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    while len(marks) < 4 or time.perf_counter() - began < seconds:
        for _ in range(times):
            fn()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        marks[-2].synchronize()
    marks[-1].synchronize()
    middle = len(marks) // 2
    return marks[middle].elapsed_time(marks[-1]) / (len(marks) - 1 - middle) / times


class CaptureFailed(Exception):
    """A CUDA graph could not be captured; the current stream of this process is in doubt."""


def captured(run: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Capture `run` into a CUDA graph; return its output tensors and what replays it.

    `run` runs once before, on the stream of the capture, so that everything is compiled, loaded and allocated.
    Raises what it raises then, and CaptureFailed.
    """
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outs = run()
    except Exception as error:  # capture_end complains, too, and hides what `run` raised
        raise CaptureFailed(first_line(error.__context__ or error)) from error
    return outs, graph.replay


def replay_ms(replay: Callable[[], None], rep: float = 100.0, groups: int = 10) -> float:
    """Return the median time in ms of one `replay`, over about `rep` ms: events stand around each of `groups` of several."""

    def group(count: int) -> float:
        replay()  # keeps the device busy while the host enqueues the first that counts
        return elapsed_ms(replay, count)

    group(1)
    count = max(1, round(rep / groups / group(3)))
    return statistics.median(group(count) for _ in range(groups))


def copy_tb_s(rep: float) -> float:
    """Return the rate of a device copy of 2 GiB, bytes read and written, in TB/s."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_ms(lambda: target.copy_(source), rep) * 1e-9


def tflops(flops: float, ms: float) -> float:
    """Return the rate in TFLOP/s of `flops` operations that took `ms` milliseconds."""
    return flops / ms * 1e-9


def ratio(new: float | None, old: float | None) -> float | None:
    """Return new / old, or None where either is missing."""
    return new / old if new and old else None


def median(values: Sequence[float]) -> float | None:
    """Return the median, or None of nothing."""
    return statistics.median(values) if values else None


def table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a text table: first column to the left, the others to the right, '-' for None."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"
        return "-" if value is None else str(value)

    grid = [list(columns)] + [[cell(value) for value in line] for line in lines]
    widths = [max(len(line[i]) for line in grid) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(widths[i]) if i else text.ljust(widths[i]) for i, text in enumerate(line)) for line in grid)
