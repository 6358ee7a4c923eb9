"""Processes that compile kernels beside this one, several at once.

Triton's passes belong to a process, one kernel at a time, and its front end holds Python's lock. So there is one more process: a Python
that has loaded stages.py alone, and forks for every kernel. It starts when there is something to compile, and ends with this process or
after a minute without work. Where it cannot start, all is compiled here.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import logs
from ..progress import OFF
from . import stages
from .cores import at_once

IDLE = 60.0  # seconds
_LAST = 5.0  # seconds that the end of this process waits for a thread
_ENDS = 2.0  # seconds in which the process ends when it is told to
_LOSSES = 3  # processes that may be lost before no more are started
_SPARE = 4  # kernels that are compiled at once, from which on this process leaves all to the others
SETTING = {"waits": (os.environ.get("FLEXPRESS_WAIT") or "0").strip().lower() not in OFF}  # see run/meanwhile.py
_START = (  # the path first, so that nothing is imported from the working directory
    "import sys; sys.path[:], place = {!r}; import importlib.util as u;"
    "spec = u.spec_from_file_location('flexpress_stages', place); module = u.module_from_spec(spec); sys.modules[spec.name] = module;"
    "spec.loader.exec_module(module); module.serve()"
)


class Job:
    """A kernel on its way. `then` gets its metadata, code and extension, in another thread.

    found     what `then` made of them, once the job is `over`; None if it went wrong: then this process compiles it, and raises what is
              wrong
    why       what went wrong
    seconds   of the process that compiled it; it may have waited for others before
    """

    def __init__(self, request: stages.Request | None = None, then: Callable[[bytes, bytes, str], Any] | None = None) -> None:
        self.request, self.then, self.found, self.why, self.seconds = request, then, None, "", 0.0
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is over, `seconds` at most. Is it?"""
        return self._over.wait(seconds)

    def renew(self) -> None:
        """In a forked child, where another thread may hold its lock for ever."""
        self._over = threading.Event()

    def end(self, answer: tuple | str) -> None:
        """With what a worker answers: what it compiled, or why it has not."""
        try:
            if isinstance(answer, str):
                self.why = answer
            else:
                self.found = self.then(*answer)
        except Exception as error:
            self.why = f"{type(error).__name__}: {error}"
        finally:
            self._over.set()


class Pool:
    """The processes of this one.

    process            what forks
    running, waiting   the jobs that are not over
    printers           threads of this process that print kernels for which nobody waits, and the jobs that end with them
    fails              why no process can be started; "" as long as one may
    awaiting           how many threads have nothing else to do than to wait for all jobs
    """

    def __init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self.process: subprocess.Popen | None = None
        self.running: dict[int, Job] = {}
        self.waiting: deque[Job] = deque()
        self.printers: dict[threading.Thread, Job] = {}
        self.fails, self.awaiting = "", 0
        self._answers = False  # has the process loaded all that it needs?
        self._started = threading.Event()  # it has, or will not
        self._lost, self._closed = 0, False

    @property
    def has_room(self) -> bool:
        """Would a job begin at once?"""
        return len(self.running) + len(self.waiting) < limit()

    @property
    def is_better(self) -> bool:
        """Is it better to compile there, also where nobody compiles here? So it is while a thread prints other kernels here, once the
        process answers, and if there are cores to spare. Else a fork takes 0.1 s longer."""
        return bool(self.printers) and self._answers and limit() >= _SPARE

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def awaited(self) -> list[Job]:
        """All jobs that are not over, those of threads that print among them."""
        return [*list(self.printers.values()), *list(self.running.values()), *list(self.waiting)]

    @contextlib.contextmanager
    def all_awaited(self) -> Iterator[None]:
        """Inside, this thread waits for kernels: they may have all cores."""
        with self._lock:
            self.awaiting += 1
        try:
            yield
        finally:
            with self._lock:
                self.awaiting -= 1

    def start(self) -> None:
        """Have the process there when it is needed."""
        with self._lock, contextlib.suppress(OSError):
            self._start()

    def await_start(self) -> None:
        """Until the process can compile, if there is one."""
        if self.process is not None and not self._answers:
            self._started.wait(_LAST)

    def submit(self, job: Job) -> Job:
        with self._lock:
            if self._closed and threading.current_thread() in self.printers:
                raise SystemExit  # of the thread, quietly
            try:
                self._start()
            except OSError as error:
                job.end(str(error))
                return job
            self.waiting.append(job)
            self._hand_out()
        return job

    def close(self) -> None:
        """At the end of this process. What is being compiled is dropped, and nothing of it is left."""
        with self._lock:
            self._closed, process = True, self.process
        if process is not None:
            _end(process)
        for thread in list(self.printers):  # in torch's C++ now and then, where the end of Python would catch them
            thread.join(_LAST)

    def withdraw(self, job: Job) -> bool:
        """Take back a job that has not begun; False if it has."""
        with self._lock:
            if job not in self.waiting:
                return False
            self.waiting.remove(job)
        job.end("it was taken back")
        return True

    def hasten(self, job: Job) -> bool:
        """Somebody waits for a job: it is the next one to begin, if it has not begun. True, as it is on its way."""
        with self._lock:
            if job in self.waiting:
                self.waiting.remove(job)
                self.waiting.appendleft(job)
        return True

    def _start(self) -> None:
        """OSError where it cannot be started."""
        if self.fails or self._closed:
            raise OSError(self.fails or "this process ends")
        if self.process is not None:
            return
        process = None
        self._started.clear()
        try:
            if not is_python(sys.executable) or not hasattr(os, "fork"):
                raise OSError(f"there is no fork, or sys.executable is no Python: {sys.executable!r}")
            paths = [path for path in sys.path if isinstance(path, str)]
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format((paths, stages.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is not for it
            )
            threading.Thread(target=self._listen, args=(process,), name="flexpress-compile", daemon=True).start()
        except Exception as error:  # whatever forbids it: an audit hook may raise anything
            if process is not None:
                _end(process)
            self._give_up(f"{type(error).__name__}: {error}")
            raise OSError(self.fails) from error
        self.process = process

    def _give_up(self, why: str) -> None:
        if self._closed:
            return
        self.fails = why
        logs.COMPILE.info("no process compiles beside this one, so calls wait for kernels: %s", why)

    def _hand_out(self) -> None:
        while self.waiting and len(self.running) < limit():
            number = next(self._numbers)
            job = self.running[number] = self.waiting.popleft()
            with contextlib.suppress(OSError, ValueError):  # it has ended, as `_listen` finds, too
                # as a tuple: a Request would be looked for in the package, which imports torch
                stages.send(self.process.stdin.fileno(), (number, tuple(job.request)))

    def _listen(self, process: subprocess.Popen) -> None:
        """Take answers, until the process ends or has had no work for a while."""
        answers, ready = process.stdout.fileno(), select.poll()  # select.select takes no file numbers from 1024 on
        ready.register(answers, select.POLLIN)
        while True:
            if not ready.poll(1e3 * IDLE):
                with self._lock:
                    if not self.is_idle:
                        continue
                    self.process, self._answers = None, False
                break
            try:
                number, answer, seconds = stages.receive(answers)
            except Exception:  # noqa: BLE001 - whatever half a message may do: nobody may wait for ever
                break
            if number is None:
                self._answers = True
                self._started.set()
                continue
            self.running[number].seconds = seconds
            self.running[number].end(answer)
            with self._lock:
                del self.running[number]
                self._hand_out()
        _end(process)
        with contextlib.suppress(OSError):
            process.stdout.close()
        self._started.set()
        with self._lock:
            lost = []
            if self.process is process:  # it broke
                lost, self.process = [*self.running.values(), *self.waiting], None
                self.running.clear()
                self.waiting.clear()
                self._lost += 1
                if not self._answers and process.returncode >= 0:
                    self._give_up(f"{sys.executable} has ended with {process.returncode} before it had loaded Triton")
                elif self._lost >= _LOSSES:
                    self._give_up(f"{self._lost} of them have ended")
                self._answers = False
        for job in lost:
            job.end("the process that compiles has ended")


def is_python(executable: str | None) -> bool:
    """Would that be another interpreter? Not a program that has Python inside: it would start itself again."""
    return bool(executable) and not getattr(sys, "frozen", False) and Path(executable).name.lower().startswith(("python", "pypy"))


def _end(process: subprocess.Popen) -> None:
    """It ends when nobody can ask any more, and takes with it what it began."""
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_ENDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def limit() -> int:
    """How many kernels may be compiled at once."""
    return max(1, min(24, at_once(awaited=True)) if POOL.awaiting else min(12, at_once(awaited=False)))


POOL = Pool()


@atexit.register
def _at_exit() -> None:
    POOL.close()


def wait(seconds: float | None = None) -> bool:
    """Until nothing is on its way, `seconds` at most. Is nothing?"""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        jobs = POOL.awaited
        if not jobs:
            return True
        for job in jobs:
            if not job.wait(None if end is None else max(0.0, end - time.monotonic())):
                return False


def _in_child() -> None:
    """A forked child has none of this: its copies of pipes would keep the process alive."""
    global POOL
    before, POOL = POOL, Pool()
    for job in before.awaited:
        job.renew()
        job.end("the process was forked")
    for pipe in (before.process.stdin, before.process.stdout) if before.process else ():
        with contextlib.suppress(OSError, ValueError):  # closed already
            os.close(pipe.fileno())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
