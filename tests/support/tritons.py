"""Two Tritons compile kernels for GPUs that are not here (`make test`). All kernels for Hopper go through the passes of both, where Tritons
differ; that is a tenth of the work. The assembler, which says what spills, gets most of them from one of the two; --every-kernel: all."""

from __future__ import annotations

import triton

OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def my_turn(number: int) -> bool:
    """Does this Triton bring the kernel with this number to the assembler? They take turns."""
    return number % 2 == OLDER
