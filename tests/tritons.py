"""Two Tritons compile kernels for GPUs that are not here (`make test`). All kernels go through the passes of both, which is where Tritons
differ and a tenth of the work; the assembler, which says what spills, gets most of them from one of the two."""

from __future__ import annotations

import triton

OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def my_turn(number: int) -> bool:
    """Does this Triton bring the kernel with this number to the assembler? They take turns."""
    return number % 2 == OLDER
