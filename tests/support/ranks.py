"""Processes that attend together. `main` is such a process's program, with RANKS WORLD FOLDER DEVICE MODULES as its arguments: it runs all
checks of that many ranks in these modules, and writes what failed.

RANKS is "2", or "0,1,2,3" for a process that forks into so many once it has imported what they need, which takes longer than most checks.
So on a CPU all modules that are tested share their processes.

Each check compares what processes compute together with what one process does that has all of the tensors.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from support.once import once

CHECKS: dict[tuple[str, str], tuple[int, object]] = {}  # by module and name, the number of ranks, and the check


def check(world: int):
    def add(function):
        CHECKS[function.__module__, function.__name__] = world, function
        return function

    return add


def checks_in(module) -> dict[str, int]:
    """The checks of a module, and how many ranks each wants."""
    return {name: world for (where, name), (world, _) in CHECKS.items() if where == module.__name__}


def here() -> torch.device:
    """Where a check makes tensors if it does not say."""
    return torch.get_default_device()


def from_first_rank(compute):
    """What `compute()` gives on rank 0, on every rank: what is the same everywhere. Random numbers go on as if it drew none."""
    found = [None]
    if torch.distributed.get_rank() == 0:
        with torch.random.fork_rng(devices=[]):
            found = [compute()]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def run(world: int, folder: Path, modules: list[str], device: str) -> list[dict[str, dict[str, str]]]:
    """For each of `world` processes what failed: tracebacks by modules and names of checks, which are all there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = "from support.ranks import main; main()"
    shares = [",".join(map(str, range(world)))] if device == "cpu" else map(str, range(world))  # after a fork CUDA may not start
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, ranks, str(world), str(folder), device, *modules],
            env=environment,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for ranks in shares
    ]
    words = []
    for process in started:
        try:
            words.append(process.communicate(timeout=300)[1])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and its forks
            words.append(process.communicate()[1])
    failed = []
    for rank in range(world):
        found = folder / f"{rank}.json"
        said = words[rank % len(words)].decode(errors="replace")
        failed.append(json.loads(found.read_text()) if found.exists() else dict.fromkeys(modules, {"": said}))
    return failed


def failures_of(module):
    """A fixture: by its name, number of ranks and device, what a check of a module raised on a rank, or "". All of them are run once."""

    @pytest.fixture(scope="module")
    def failed(tmp_path_factory):
        def of(name: str, world: int, device: str = "cpu") -> str:
            modules = sorted({where for where, _ in CHECKS}) if device == "cpu" else [module.__name__]

            def write(folder: Path) -> None:
                (folder / "failed.json").write_text(json.dumps(run(world, folder, modules, device)))

            folder = once(tmp_path_factory, "-".join([*modules, str(world), device]), write)
            for rank, found in enumerate(json.loads((folder / "failed.json").read_text())):
                errors = found[module.__name__]
                if why := errors.get(name, f"it did not run: {errors}"):
                    return f"rank {rank} of {world}: {why}"
            return ""

        return of

    return failed


def on_devices(module) -> list:
    """Parameters of a test of a module's checks: name, number of ranks, and "cpu" or "cuda", one GPU for each rank."""
    checks, gpus = checks_in(module).items(), torch.cuda.device_count()
    too_few = [pytest.mark.skipif(gpus < n, reason=f"{n} ranks want {n} GPUs") for n in range(9)]
    on_gpus = [pytest.param(name, n, "cuda", marks=[pytest.mark.gpu, too_few[n]], id=f"{name}-{n}-cuda") for name, n in checks]
    return [*(pytest.param(name, n, "cpu", id=f"{name}-{n}") for name, n in checks), *on_gpus]


def main() -> None:
    ranks, world, folder, kind, *modules = sys.argv[1:]
    (rank, *others), world, folder = map(int, ranks.split(",")), int(world), Path(folder)
    for module in modules:
        importlib.import_module(module)
    forks = []
    for other in others:
        fork = os.fork()
        if not fork:
            rank, forks = other, []
            break
        forks.append(fork)
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    torch.distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=device if kind == "cuda" else None,
    )
    failed = {module: {} for module in modules}
    for (module, name), (wanted, function) in CHECKS.items():
        if wanted == world:
            torch.manual_seed(0)
            started = time.perf_counter()
            try:
                function()
                failed[module][name] = ""
            except Exception:
                failed[module][name] = traceback.format_exc()
            print(f"rank {rank} of {world}: {name} took {time.perf_counter() - started:.1f} s", flush=True)
            (folder / f"{rank}.json").write_text(json.dumps(failed))
    torch.distributed.destroy_process_group()
    for fork in forks:
        os.waitpid(fork, 0)
