"""The kernel that lays values of 8 bits out by keys as a plan: from what is known of tensors to its KernelSpec."""

from __future__ import annotations

from typing import NamedTuple

from ..gpus import round_up_head_dim
from ..text.parameters import constants, numbers, pointer, stride_names
from ..text.spec import KernelSpec

BYTES = 8192  # of a tile: a thread has 64, each in a register of its own
OUT_STRIDES = ("stride_oz", "stride_oh", "stride_od")


class ByKeysCase(NamedTuple):
    """What changes the kernel.

    unit      the head dim of values is contiguous
    aligned   strides of theirs that are multiples of 16 bytes and are passed in that unit, as those of the result are
    """

    d_v: int
    unit: bool = True
    aligned: tuple[str, ...] = ("stride_vz", "stride_vh", "stride_vn")


def keys_of_program(d_v: int) -> int:
    """Keys that a program takes."""
    return max(16, BYTES // round_up_head_dim(d_v))


def by_keys_spec(case: ByKeysCase, backend: str) -> KernelSpec:
    """The kernel's KernelSpec."""
    strides = stride_names("v", "zhn" if case.unit else "zhnd")
    parameters = (
        pointer("V", "uint8", f"[Z, H, KV_LEN, {case.d_v}]"),
        pointer("OUT", "uint8", f"[Z, H, {case.d_v}, KV_LEN] in rows of stride_od bytes; written"),
        *numbers("H", "KV_LEN", *strides, *OUT_STRIDES),
        *constants("BLOCK_T"),
    )
    flags = {"D_V": case.d_v, "D_V_ROUNDED": round_up_head_dim(case.d_v), "V_UNIT": case.unit, "aligned": (*case.aligned, *OUT_STRIDES)}
    return KernelSpec("values_by_keys", (), tuple(flags.items()), backend, parameters)
