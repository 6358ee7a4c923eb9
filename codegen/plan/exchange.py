"""The kernels that lay out what ranks of a context plan exchange, as plans: from what is known of tensors to KernelSpecs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.table.dtypes import dtype_name
from ..text.parameters import Parameter, constants, numbers, pointer, stride_names
from ..text.spec import KernelSpec
from .masks import power_of_two

ELEMENTS = 4096  # of a tile, at most: more take registers and hide no more of the way to memory


class ExchangeCase(NamedTuple):
    """What changes the kernels.

    block     positions of a block
    aligned   strides that are multiples of 16 bytes and are passed in that unit
    """

    dtype: torch.dtype
    d_qk: int
    d_v: int
    block: int = 128
    aligned: tuple[str, ...] = ()


def positions_of_program(block: int, d_qk: int, d_v: int) -> int:
    """Positions of a block that a program takes."""
    return min(block, ELEMENTS // power_of_two(max(d_qk, d_v)))


def copy_spec(case: ExchangeCase, backend: str) -> KernelSpec:
    """The KernelSpec of copy_blocks."""
    dtype = dtype_name(case.dtype)
    tensors = [
        pointer("K", dtype, f"[Z, Hkv, LEN, {case.d_qk}]"),
        pointer("V", dtype, f"[Z, Hkv, LEN, {case.d_v}]"),
        pointer("OUT", dtype, f"[positions, Z, Hkv, {case.d_qk + case.d_v}], contiguous; written"),
        pointer("sources", "int32", "[blocks]: numbers of blocks of K and V"),
        pointer("targets", "int32", "[blocks]: and of OUT"),
    ]
    return _spec("copy_blocks", case, backend, tensors, ("HEADS", "Hkv", "LEN", *_strides("k", "v")))


def add_spec(case: ExchangeCase, backend: str) -> KernelSpec:
    """The KernelSpec of add_blocks."""
    dtype = dtype_name(case.dtype)
    tensors = [
        pointer("DK", dtype, f"[Z, Hkv, rows, {case.d_qk}]"),
        pointer("DV", dtype, f"[Z, Hkv, rows, {case.d_v}]"),
        pointer("RETURNED", dtype, f"[positions, Z, Hkv, {case.d_qk + case.d_v}], contiguous"),
        pointer("own", "int32", "[blocks]: numbers of blocks of DK and DV, or -1"),
        pointer("places", "int32", "[blocks, MOST]: and of RETURNED"),
        pointer("DK_SUM", dtype, f"[Z, Hkv, LEN, {case.d_qk}]; written"),
        pointer("DV_SUM", dtype, f"[Z, Hkv, LEN, {case.d_v}]; written"),
    ]
    return _spec("add_blocks", case, backend, tensors, ("HEADS", "Hkv", "LEN", "MOST", *_strides("k", "v", "sk", "sv")))


def _strides(*tensors: str) -> list[str]:
    return [name for t in tensors for name in stride_names(t, "zhn")]


def _spec(template: str, case: ExchangeCase, backend: str, tensors: list[Parameter], sizes: tuple[str, ...]) -> KernelSpec:
    flags = {
        "DTYPE": dtype_name(case.dtype),
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "D_QK_ROUNDED": power_of_two(case.d_qk),
        "D_V_ROUNDED": power_of_two(case.d_v),
        "BLOCK": case.block,
        "aligned": case.aligned,
        "ALIGNMENT": 16 // case.dtype.itemsize,
    }
    return KernelSpec(template, (), tuple(flags.items()), backend, (*tensors, *numbers(*sizes), *constants("BLOCK_T")))
