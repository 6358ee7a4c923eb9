"""The kernel that puts attention to two sets of keys together as a plan: from what is known of tensors to its KernelSpec."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.table.dtypes import dtype_name
from ..text.parameters import constants, numbers, pointer, stride_names
from ..text.spec import KernelSpec
from .masks import power_of_two

ELEMENTS = 2048  # of a tile, at most: small ones, as few tokens are to fill the device


class MergeCase(NamedTuple):
    """What changes the kernel."""

    dtype: torch.dtype
    d_v: int


def rows_of_program(d_v: int) -> int:
    """Rows that a program takes."""
    return max(1, ELEMENTS // power_of_two(d_v))


def merge_spec(case: MergeCase, backend: str) -> KernelSpec:
    """The kernel's KernelSpec."""
    dtype = dtype_name(case.dtype)
    parameters = (
        pointer("PART", dtype, f"[PARTS, Hq, {case.d_v}], contiguous: one part's outputs"),
        pointer("PART_LSE", "float32", "[PARTS, Hq], contiguous"),
        pointer("PLACE", "int32", "[ROWS / Hq]: which of PARTS tokens is the token's; another one is none"),
        pointer("O", dtype, f"[Z, Hq, Q_LEN, {case.d_v}]: the other part's outputs; written"),
        pointer("LSE", "float32", "[Z, Hq, Q_LEN]: written"),
        *numbers("ROWS", "PARTS", "Hq", "Q_LEN", *stride_names("o", "zhm"), *stride_names("l", "zhm")),
        *constants("BLOCK_R"),
    )
    flags = {"D_V": case.d_v, "D_V_ROUNDED": power_of_two(case.d_v)}
    return KernelSpec("merge_parts", (), tuple(flags.items()), backend, parameters)
