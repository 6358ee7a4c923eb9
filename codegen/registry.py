"""Every in-memory cache of the package: bounded, listed and cleared in one place.

_plans: dict[tuple, Plan] = Table("forward plans", 1024)        a dict of at most 1024 entries
@remembered("strides", 4096)                                    the results of a function
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .turn import Turn


class CacheSize(NamedTuple):
    """How full one of the caches is."""

    name: str
    entries: int
    limit: int


class Bounded(dict):
    """A dict that holds at most `limit` entries: the oldest goes when one more comes. Reading is a dict's own, and so as fast.

    Threads may use one together: whoever reads takes what `get` gave, as an entry may go at any time.
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __setitem__(self, key, value) -> None:
        while len(self) >= self.limit and key not in self:
            try:
                self.pop(next(iter(self)), None)
            except (RuntimeError, StopIteration):  # another thread made room, or filled it
                continue
        super().__setitem__(key, value)

    def setdefault(self, key, default):
        found = self.get(key)
        if found is None:
            self[key] = found = default
        return found


class Table(Bounded):
    """One that is listed here, for the process."""

    __slots__ = ()

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(limit)
        _register(name, self)


_caches: dict[str, Table] = {}


def _register(name: str, cache: Table) -> None:
    if name in _caches:
        raise ValueError(f"two caches are called {name!r}")
    _caches[name] = cache


def remembered(name: str, limit: int) -> Callable:
    """Decorator: keeps at most `limit` results, by the (positional) arguments, listed here. Threads that race all get the same object."""

    def decorate(function):
        results = Table(name, limit)

        @functools.wraps(function)
        def found(*args):
            result = results.get(args, _NOTHING)
            if result is _NOTHING:
                result = _keeping.run(_kept, results, args, function(*args))
            return result

        return found

    return decorate


_NOTHING = object()
_keeping = Turn()


def _kept(results: Table, key: tuple, result):
    """The result that is there, or this one."""
    found = results.get(key, _NOTHING)
    if found is _NOTHING:
        results[key] = found = result
    return found


def clear() -> None:
    """Empty all of them."""
    for cache in _caches.values():
        cache.clear()


def sizes() -> Iterator[CacheSize]:
    """How full each is, by name."""
    for name, cache in sorted(_caches.items()):
        yield CacheSize(name, len(cache), cache.limit)


@dataclass
class CacheInfo:
    """Counters since the process started (or `cache_clear`)."""

    traces: int = 0  # mods traced
    prints: int = 0  # kernels rendered from a template
    compiles: int = 0  # kernels compiled (GPU) or loaded for the interpreter (CPU)
    hits: int = 0  # look-ups that found a plan, or a kind of call, ready. A call may count several: 2 if its mask_mod captures a tensor


INFO = CacheInfo()
