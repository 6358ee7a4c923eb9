"""Threads of which one runs at a time, until it must wait: where all wait for each other, that is an error at once.

Which one goes on is drawn from a seed, and a thread may lose its turn wherever it could have waited. So is when something happens that a
thread has asked for and does not do itself.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable


class Abandoned(BaseException):
    """Raised in threads that wait when another one fails."""


class Turns:
    SPINS = 1000  # turns of threads that only look whether something has changed

    def __init__(self, seed: int) -> None:
        self.waiting: list[tuple[Callable[[], bool], threading.Lock | Callable[[], None]]] = []
        self.last: list[threading.Lock | Callable[[], None]] = []  # what comes when nobody else can go on, in this order
        self.error: BaseException | None = None
        self.draw, self.spins = random.Random(seed), 0

    def together(self, functions: Iterable[Callable[[], None]]) -> None:
        """Run all to their end, or to the first error. A thread that has its turn may start others, too."""
        left = 0

        def run(function, gate) -> None:
            nonlocal left
            try:
                self._pause(gate)
                function()
            except Abandoned:
                pass
            except BaseException as error:  # whichever thread it is in
                self.error = self.error or error
            left -= 1
            self._next()

        for function in functions:
            left += 1
            gate = _closed()
            self.waiting.append((_always, gate))
            threading.Thread(target=run, args=(function, gate), daemon=True).start()
        try:
            self.wait(lambda: left == 0)
        except Abandoned:
            raise self.error from None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until something is true, which only others change."""
        gate = _closed()
        self.waiting.append((ready, gate))
        self._next()
        self._pause(gate)

    def let_one(self) -> None:
        """Another may go on first."""
        self.wait(_always)

    def let_all(self) -> None:
        """Go on when all others wait."""
        gate = _closed()
        self.last.append(gate)
        self._next()
        self._pause(gate)

    def at_some_time(self, happen: Callable[[], None]) -> None:
        """While somebody waits, or not before all do."""
        if self.draw.random() < 0.5:
            self.waiting.append((_always, happen))
        else:
            self.last.append(happen)

    def _pause(self, gate: threading.Lock) -> None:
        gate.acquire()
        if self.error:
            raise Abandoned

    def _next(self) -> None:
        """Whoever calls has had its turn."""
        while not self.error:
            able = [i for i, (ready, _) in enumerate(self.waiting) if ready()]
            self.spins = 0 if able else self.spins + 1
            if able:
                _, next = self.waiting.pop(self.draw.choice(able))
            elif self.last and self.spins < self.SPINS:
                next = self.last.pop(0)
            else:
                self.error = AssertionError("nobody arrives: every thread waits")
                break
            if not callable(next):
                next.release()
                return
            try:
                next()
            except BaseException as error:
                self.error = error
        for gate in (*(next for _, next in self.waiting), *self.last):
            if not callable(gate):
                gate.release()
        self.waiting, self.last = [], []


def _closed() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def _always() -> bool:
    return True
