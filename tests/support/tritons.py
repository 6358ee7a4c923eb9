"""Three Tritons compile kernels for GPUs that are not here (`make test`). All kernels for Hopper go through the passes of each, where they
differ; that is a fifth of the work. The assembler, which says what spills, gets most of them from one of the three, half of those from
the oldest, which an H100 with torch 2.11 has; --every-kernel: from all. Of those with sinks and dropout the pinned one brings all there.
For other GPUs the pinned Triton compiles, and all of that."""

from __future__ import annotations

import triton

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLDER, NEWER = _VERSION < (3, 7), _VERSION > (3, 7)
PINNED = not (OLDER or NEWER)


def my_turn(number: int) -> bool:
    """Does this Triton bring the kernel with this number to the assembler?"""
    return number % 2 == 1 if OLDER else number % 4 == (2 if NEWER else 0)
