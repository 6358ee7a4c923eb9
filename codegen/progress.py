"""One line on a terminal while something takes longer than a second: `flexpress: compiling forward_causal_d128_bf16, 3 s`.

It goes to stderr where that is a terminal, and is wiped out when the work is done. FLEXPRESS_PROGRESS=0 turns it off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator

from .turn import Turn

AFTER = 1.0  # seconds of work before the line appears
_EVERY = 0.25  # seconds between two looks at what is going on
_COLUMNS = 100
_WIPED = "\r\x1b[2K"
OFF = {"0", "off", "false", "no"}  # what turns a setting off


class _Work:
    """Something that takes a while. It is gone when nobody holds it, however its holder was left."""

    def __init__(self, what: str) -> None:
        self.what, self.start = what, time.monotonic()


class _Screen:
    """The line, and who writes it: a thread that lives while there is work."""

    def __init__(self) -> None:
        self.turn, self.works, self.thread = Turn(), weakref.WeakSet(), None
        self.shown, self.stream = "", None  # the line, and where it was written

    def begin(self, work: _Work) -> None:
        self.turn.run(self._begin, work)

    def end(self, work: _Work) -> None:
        self.turn.run(self._end, work)

    def _begin(self, work: _Work) -> None:
        self.works.add(work)
        if self.thread is None:
            self.thread = threading.Thread(target=self._watch, name="flexpress-progress", daemon=True)
            self.thread.start()

    def _end(self, work: _Work) -> None:
        self.works.discard(work)
        self._draw()

    def _watch(self) -> None:
        working = True
        while working:
            time.sleep(_EVERY)
            working = self.turn.run(self._tick)

    def _tick(self) -> bool:
        """Is there work left?"""
        self._draw()
        if not self.works:
            self.thread = None
        return self.thread is not None

    def _draw(self) -> None:
        """The oldest work that takes long; or nothing, where something was."""
        now = time.monotonic()
        long = sorted((w for w in self.works if now - w.start >= AFTER), key=lambda w: w.start)
        others = f" and {len(long) - 1} more" if len(long) > 1 else ""
        text = f"flexpress: {long[0].what}{others}, {now - long[0].start:.0f} s"[:_COLUMNS] if long else ""
        if text == self.shown:
            return
        self.stream, self.shown = self.stream or sys.stderr, text
        with contextlib.suppress(OSError, ValueError):  # it was closed
            self.stream.write(_WIPED + text)
            self.stream.flush()
        if not text:
            self.stream = None


_screen = _Screen()


def _renew() -> None:
    global _screen
    _screen = _Screen()  # in a forked child nobody writes the line


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def wanted() -> bool:
    """Is stderr a terminal, and the line not turned off?"""
    if os.environ.get("FLEXPRESS_PROGRESS", "").strip().lower() in OFF:
        return False
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False


@contextlib.contextmanager
def shown(what: str) -> Iterator[None]:
    """While the body runs: the line, once it takes long."""
    if not wanted():
        yield
        return
    screen, work = _screen, _Work(what)
    try:
        screen.begin(work)
        yield
    finally:
        screen.end(work)
