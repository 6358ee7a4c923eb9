"""Kernels that serve while faster ones are compiled beside this process.

The kernels for Hopper take 4 to 6 s to compile. Other processes compile those for a call of a new kind, and portable kernels with tiles
that compile fast, in half a second, serve it. The first call after that is served by what was compiled. Both compute the same, but for
rounding. Whoever must have the same bits every time waits: see `must_wait`. So does a call that these kernels do not serve.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .. import logs
from ..device import compiler, workers
from ..device.devices import on
from ..device.workers import SETTING, Job
from ..plan.forward import Options
from ..registry import Table


class Meanwhile(NamedTuple):
    """What serves calls of a kind until jobs are over, and which kernel they wait for: its candidate's name and key."""

    ready: Any
    jobs: list[Job]
    awaited: tuple

    @property
    def over(self) -> bool:
        return all(job.over for job in self.jobs)

    @property
    def came(self) -> bool:
        """Has every kernel that was begun been compiled, and was there one? The first job is the thread's that begins."""
        return len(self.jobs) > 1 and all(job.found for job in self.jobs[1:])


def quick(options: Options) -> Options:
    """The options of the same call for kernels that compile fast, which serve until the others are compiled."""
    return options._replace(backend="PORTABLE", quick=True)


def begun_beside(begin: Callable[[list[Job]], None], device: torch.device) -> list[Job]:
    """Jobs that come by and by from `begin`, in another thread, as kernels are printed before; one is over when all have begun.

    That thread neither launches nor takes memory of a device: the caller may capture a CUDA graph by then, which both would spoil.
    """
    jobs, pool = [Job()], workers.POOL

    def work() -> None:
        try:
            with on(device), torch.no_grad(), contextlib.suppress(Exception):  # whoever needs the kernels is told what is wrong
                pool.start()
                compiler.load_ahead()
                pool.await_start()  # until then the caller compiles here, and would share Python's lock with this thread
                begin(jobs)
        finally:
            pool.printers.pop(thread, None)
            jobs[0].end("all are begun")

    thread = threading.Thread(target=work, name="flexpress-begin", daemon=True)
    pool.printers[thread] = jobs[0]
    try:
        thread.start()
    except RuntimeError:  # no more threads: the next call compiles
        pool.printers.pop(thread)
        jobs[0].end("no thread can be started")
    return jobs


class _Thread(threading.local):
    waits = False


_thread = _Thread()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Inside, this thread waits for all kernels: it has them compiled for later."""
    before, _thread.waits = _thread.waits, True
    try:
        yield
    finally:
        _thread.waits = before


def must_wait(device: torch.device, options: Options, waits: bool) -> bool:
    """Is a call to wait for the kernels that serve it in the end? Where its caller wants these (`waits`), where results must not depend on
    when a compiler is done, where launches are recorded for later, where a kernel is named, where no process can compile it, in `waiting`,
    and with FLEXPRESS_WAIT=1."""
    if waits or torch.are_deterministic_algorithms_enabled() or options.backend:
        return True
    return SETTING["waits"] or _thread.waits or bool(workers.POOL.fails) or is_capturing(device)


def failed(what: str, meanwhile: bool, why: Exception) -> bool:
    """A pass has failed. If what served it did so `meanwhile`, True: the call waits for the other kernels, and raises what is wrong with
    these. Else that is raised."""
    if not meanwhile:
        raise why
    logs.CHOICE.info("%s: what was to serve meanwhile fails, so the call waits: %s: %s", what, type(why).__name__, why)
    return True


def is_capturing(device: torch.device) -> bool:
    """Is a CUDA graph captured?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def serving(table: Table, key: tuple, device: torch.device, options: Options, waits: bool) -> tuple[Any, bool]:
    """What serves calls of a kind for now, None if nothing does, or need not any more; and whether to wait for the kernels that were begun,
    as one did not come: it is compiled here, and what is wrong is raised."""
    found = table.get(key)
    if found is None:
        return None, False
    if found.over or must_wait(device, options, waits):
        table.pop(key, None)
        return None, found.over and not found.came
    return found.ready, False


def awaited_in(table: Table, key: tuple) -> bool:
    """Is the kernel of a candidate's name and key on its way for any kind of call?"""
    return any(found.awaited == key and not found.over for found in list(table.values()))
