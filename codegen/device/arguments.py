"""Arguments of a launch: their layout, which names a variant of a kernel, and as launchers and Triton's compiler take them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..mod.captured.tensors import LOWEST, check_address

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
_WIDE = 1 << 31


class Numbers:
    """Integers and floats that are arguments of many calls: described once."""

    def __init__(self, values: list) -> None:
        self.layout, self.values = describe(tuple(values))
        self.short = not {"i64", "u1"} & set(self.layout)  # all of 32 bits


def one_by_one(args: tuple) -> list:
    """Arguments with the numbers among them apart."""
    return [value for arg in args for value in (arg.values if isinstance(arg, Numbers) else (arg,))]


def describe(args: tuple, unmade: bool = False) -> tuple[tuple, list]:
    """The layout of a call's arguments (a variant's key), and the arguments as the launcher takes them. `unmade`: for what is compiled and
    not launched; tensors on "meta" count as aligned."""
    layout, plain = [], []
    for arg in args:
        kind = type(arg)
        if kind is int:
            layout.append("i32" if -_WIDE <= arg < _WIDE else "i64")
            plain.append(arg)
        elif kind is float:
            layout.append("fp32")
            plain.append(arg)
        elif isinstance(arg, torch.Tensor):
            address = arg.data_ptr()
            if address < LOWEST and not (unmade and arg.is_meta):
                check_address(arg)
            layout.append((arg.dtype, address % 16 == 0))
            plain.append(address)
        elif kind is Numbers:
            layout += arg.layout
            plain += arg.values
        elif kind is bool:
            layout.append("u1")
            plain.append(arg)
        else:  # a TMA descriptor
            layout.append((arg.base.dtype, *arg.block_shape))
            plain.append(arg)
    return tuple(layout), plain


def type_of(entry, gluon: bool = False) -> str:
    """Triton's name for one entry of a layout. Descriptors of Gluon kernels tell how a block lies in shared memory, too."""
    if isinstance(entry, str):
        return entry
    if len(entry) == 2:
        return "*" + TYPES[entry[0]]
    return descriptor_type(TYPES[entry[0]], entry[0].itemsize, entry[1:], gluon)


def descriptor_type(element: str, itemsize: int, block: tuple[int, ...], gluon: bool = False) -> str:
    """Triton's name for a descriptor of blocks. In shared memory, 8 rows or more are swizzled in the widest pattern that they fill."""
    widths = (32, 64, 128) if math.prod(block[:-1]) >= 8 else ()
    width = max((w for w in widths if block[-1] * itemsize % w == 0), default=0)
    layout = f",NVMMASharedLayout({width}, {itemsize * 8}, {len(block)})" if gluon else ""
    return f"tensordesc<{element}[{', '.join(map(str, block))}]{layout}>"


def plain_values(args: Iterable) -> list | None:
    """Arguments as `launch_plain` takes them, addresses for tensors; None if an address is no multiple of 16 bytes or has no memory, an
    integer has more than 32 bits, or there is a bool: a kernel that takes one may take an integer in another call."""
    values = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg = arg.data_ptr()
            if arg % 16 or arg < LOWEST:
                return None
        elif arg.__class__ is int:
            if not -_WIDE <= arg < _WIDE:
                return None
        elif arg.__class__ is Numbers:
            if not arg.short:
                return None
            values += arg.values
            continue
        elif arg.__class__ is bool:
            return None
        values.append(arg)
    return values
