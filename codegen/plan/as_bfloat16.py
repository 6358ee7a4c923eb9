"""The kernel that makes bfloat16 of float8 as a plan."""

from __future__ import annotations

from ..text.parameters import constants, numbers, pointer
from ..text.spec import KernelSpec

ELEMENTS = 4096  # of a program: two loads of 16 bytes a thread


def as_bfloat16_spec(backend: str) -> KernelSpec:
    """The kernel's KernelSpec."""
    parameters = (
        pointer("ELEMENTS", "uint8", "[16 * SIXTEENS]"),
        pointer("OUT", "bfloat16", "[16 * SIXTEENS], written"),
        *numbers("SIXTEENS"),
        *constants("BLOCK_T"),
    )
    return KernelSpec("as_bfloat16", (), (), backend, parameters)
