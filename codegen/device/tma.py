"""TMA descriptors: how the tensor memory accelerator of Hopper and later GPUs finds blocks of K and V."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..gpus import round_up_head_dim
from ..mod.captured.tensors import LOWEST, check_address
from ..registry import remembered


def descriptor(tensor: torch.Tensor, rows: int, columns: int | None = None):
    """A descriptor of (Z, H, S, D) for blocks [rows, columns] of one head, all columns by default; what lies outside the tensor reads as
    zero and is not written. Of a tensor whose last dimension is not contiguous it is one of (Z, H, D, S)."""
    columns = columns or round_up_head_dim(tensor.shape[3])
    if tensor.device.type in ("cpu", "meta"):  # the interpreter reads through the tensor, and what is only begun has no address
        return _describe(tensor, tensor.shape, tensor.stride(), rows, columns)
    address = tensor.data_ptr()
    if address < LOWEST:
        check_address(tensor)
    return descriptor_at(address, tensor.dtype, tensor.shape, tensor.stride(), rows, columns)


@remembered("descriptors", 1024)
def descriptor_at(address: int, dtype: torch.dtype, shape: tuple, strides: tuple, rows: int, columns: int):
    """A descriptor of memory at an address: made once for that and a layout, and keeps no tensor alive."""
    return _describe(_Memory(address, dtype), shape, strides, rows, columns)


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a descriptor needs of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Descriptor(TensorDescriptor):
    """Blocks of [1, 1, rows, columns] in a (Z, H, S, D) tensor. `expanded` holds what a launch makes of it (see cuda.py)."""

    @functools.cached_property
    def expanded(self) -> dict:
        return {}


def _describe(base, shape: tuple, strides: tuple, rows: int, columns: int) -> Descriptor:
    if strides[3] != 1:
        shape, strides = (*shape[:2], shape[3], shape[2]), (*strides[:2], strides[3], strides[2])
    row = max(-(-shape[3] // 16) * 16, 16)  # a multiple of 16 bytes, whatever the elements
    outer = [s if n > 1 else row for s, n in zip(strides[:3], shape[:3], strict=True)]
    return Descriptor(base, list(shape), [*outer, 1], [1, 1, rows, columns])
