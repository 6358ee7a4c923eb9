"""How many processes may compile: what cores this one has, less its container's limit and the ranks beside it, and what memory is free."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

_SHARE = 3 / 4  # of the cores, where the program goes on meanwhile
_BYTES = 1 << 28  # that a process takes which compiles
_RANKS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)  # processes of one program on this machine, by torchrun and MPI
_GROUPS = Path("/sys/fs/cgroup")


def at_once(awaited: bool) -> int:
    """How many processes may compile at once; 0 where there is neither a core nor memory to spare. `awaited`: the program waits for all."""
    return int(min(cores() * (1 if awaited else _SHARE), _free() / _BYTES))


def cores() -> float:
    """Cores for this process."""
    everywhere = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everywhere
    shared = own / _ranks() if own == everywhere else own  # a rank that is bound to cores has them alone
    return min(shared, _quota() / _ranks())


def _ranks() -> int:
    for name in _RANKS:
        if os.environ.get(name, "").isdecimal():
            return max(1, int(os.environ[name]))
    return 1


@functools.cache
def _quota() -> float:
    """Cores that the container may use, of Linux' control groups: of this process's group, and of those above."""
    found = [float("inf")]
    with contextlib.suppress(OSError, ValueError):
        place = next((line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "")
        group = _GROUPS / place.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(_GROUPS):
                with contextlib.suppress(OSError, ValueError):
                    quota, period = (folder / "cpu.max").read_text().split()
                    found.append(float(quota) / float(period))  # ValueError where it is "max"
    with contextlib.suppress(OSError, ValueError):  # version 1
        quota, period = ((_GROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if float(quota) > 0:
            found.append(float(quota) / float(period))
    return min(found)


def _free() -> float:
    """Bytes of memory that are free, or easily so."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return float("inf")
