"""Locks for slow work (printing, interpreting, compiling) that outlive what may befall the thread that holds them.

An interrupt may strike between two bytecodes, also after a lock was taken and before the `try` that would give it back; a fork copies
a lock that another thread holds into a process without that thread. Neither may leave a lock that nobody can open.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref

_LOOK_AGAIN = 1.0  # seconds of waiting before one looks whether the holder is still at work
_FORK_WAITS = 10.0  # seconds that a fork waits for other threads' work, at most

_turns: weakref.WeakSet[Turn] = weakref.WeakSet()
_awaited: list[Turn] = []
_replacing = threading.Lock()


class Turn:
    """`turn.run(work, *args)` is work(*args) while no other thread is in a `run` of the same turn. The same thread may be.

    fork_waits   a fork waits (10 s at most) until no other thread is inside, because a child cannot mend what is half done there.
                 For work that takes seconds and waits for nobody
    """

    def __init__(self, *, fork_waits: bool = False) -> None:
        self._lock, self._closed = threading.RLock(), False
        _turns.add(self)
        if fork_waits:
            _awaited.append(self)

    def run(self, work, *args):
        lock = self._taken()
        try:
            return work(*args)
        finally:
            lock.release()  # that one: in a forked child the turn has another by now

    def is_free(self) -> bool:
        """Could this thread run its work at once?"""
        lock = self._lock
        if not lock.acquire(blocking=False):
            return False
        lock.release()
        return True

    @property
    def depth(self) -> int:
        """How often this thread is inside: more than once by way of a signal handler or a finalizer."""
        return _runs(self, threading.get_ident())

    def close(self) -> None:
        """At the end of the process: wait until nobody is inside (a minute at most). A thread that comes later ends there."""
        self._closed = self._lock.acquire(timeout=60.0)

    def _taken(self):
        """The lock, held by this thread."""
        if self._lock._is_owned() and self.depth == 1:  # an interrupt threw this thread out before it gave the lock back
            while self._lock._is_owned():
                self._lock.release()
        while True:
            lock = self._lock
            if lock.acquire(timeout=_LOOK_AGAIN):
                if lock is self._lock:
                    return lock
                lock.release()
            else:
                if self._closed:
                    raise SystemExit
                holder = re.search(r"owner=(\d+)", repr(lock))  # RLock's own record: it is written as the lock is taken
                if holder and int(holder[1]) and not _runs(self, int(holder[1])):
                    with _replacing:
                        if self._lock is lock:
                            self._lock = threading.RLock()

    def _renew(self) -> None:
        self._lock, self._closed = threading.RLock(), False


def _runs(turn: Turn, thread: int) -> int:
    """How many calls of `turn.run` a thread is in."""
    frame, count = sys._current_frames().get(thread), 0
    while frame is not None:
        count += frame.f_code is Turn.run.__code__ and frame.f_locals.get("self") is turn
        frame = frame.f_back
    return count


_held: list = []  # locks that a fork in progress has taken


def _before_fork() -> None:
    for turn in _awaited:
        lock = turn._lock
        if lock.acquire(timeout=_FORK_WAITS):
            _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()


def _in_child() -> None:
    global _replacing
    _after_fork()
    _replacing = threading.Lock()
    for turn in list(_turns):
        turn._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
