"""Three Tritons compile kernels for GPUs that are not here (`make test`). All kernels for Hopper go through the passes of each, where they
differ; that is a tenth of the work. The assembler, which says what spills, gets most of them from the oldest or from the newer ones, in
turn; --every-kernel: all."""

from __future__ import annotations

import triton

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLDER, NEWER = _VERSION < (3, 7), _VERSION > (3, 7)


def my_turn(number: int) -> bool:
    """Does this Triton bring the kernel with this number to the assembler? The oldest and the newer ones take turns."""
    return number % 2 == OLDER
