"""The dtypes that operations compute in, and what kernels call them."""

from __future__ import annotations

import functools

import torch

from ..expr import Expr
from .op import kind
from .ops import row_of


def operand_dtypes(node: Expr) -> list[torch.dtype]:
    """What the operands of an operation are converted to first."""
    how = row_of(node).operands
    if how == "choice":
        return [torch.bool, node.dtype, node.dtype]
    dtype = {"result": node.dtype, "float": torch.float32, "bool": torch.bool}.get(how) or common_dtype(node.args)
    return [dtype] * len(node.args)


def common_dtype(operands: tuple[Expr, ...]) -> torch.dtype:
    """The dtype in which operands are compared: torch's own rule for tensors; Python's numbers keep their value.

    (torch wraps a number to the tensor's dtype: there, -1 equals 255 in uint8, and 2**31 is below every int32.)
    """
    result = functools.reduce(torch.promote_types, [o.dtype for o in operands if not o.weak] or [torch.bool])
    for number in (o for o in operands if o.weak):
        if kind(number.dtype) == "float" or kind(result) == "float":
            result = torch.float32
        elif kind(number.dtype) == "int":
            result = torch.promote_types(result, _dtype_holding(number, result))
    return result


def _dtype_holding(number: Expr, dtype: torch.dtype) -> torch.dtype:
    """An integer dtype in which a Python int keeps its value, `dtype` itself if possible."""
    if not number.is_literal:
        return torch.int32
    return next((t for t in (dtype, torch.int32) if kind(t) == "int" and wrapped(number.attr, t) == number.attr), torch.int64)


def wrapped(value: int, dtype: torch.dtype) -> int:
    """An integer as it is in an integer dtype: what does not fit wraps around."""
    low, bits = torch.iinfo(dtype).min, torch.iinfo(dtype).bits
    return (int(value) - low) % (1 << bits) + low


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(dtype: torch.dtype) -> str:
    """The name of the dtype in which values of a torch dtype are computed."""
    if dtype.is_floating_point:
        return "float32"
    return "int1" if dtype == torch.bool else dtype_name(dtype)
