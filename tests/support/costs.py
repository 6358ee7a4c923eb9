"""What a call has printed and compiled."""

from __future__ import annotations

from collections.abc import Callable

from flexpress import cache_info


def costs(call: Callable) -> tuple[int, int]:
    """Prints and compiles."""
    before = cache_info()
    call()
    after = cache_info()
    return after.prints - before.prints, after.compiles - before.compiles
