"""Three Tritons compile kernels for GPUs that are not here (`make test`). All kernels for Hopper go through the passes of each, where they
differ; that is a tenth of the work. The assembler, which says what spills, gets most of them from one of the three; --every-kernel: all."""

from __future__ import annotations

import triton

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLDER, NEWER = _VERSION < (3, 7), _VERSION > (3, 7)
_PLACE = 0 if OLDER else 2 if NEWER else 1


def my_turn(number: int) -> bool:
    """Does this Triton bring the kernel with this number to the assembler? Those of three ages take turns."""
    return number % 3 == _PLACE
