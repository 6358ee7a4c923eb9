"""Operands of Triton's interpreter, made alike without asking again.

Every sum, product and comparison there asks of which types its operands are and to what they are to be cast and broadcast, in dozens of
calls, which take longer than NumPy takes for a small tile. The answers follow from the types, of which a kernel has a few dozen.
"""

from __future__ import annotations

import math

import numpy as np
from triton.language import core
from triton.runtime import interpreter

from ..registry import Table

# the types that two operands get, by their types; None: they must be cast, or are not of one kind
_common: dict[tuple, tuple | None] = Table("common types of the interpreter's operands", 4096)
NUMBERS = {"fp32": np.float32, "fp64": np.float64, "int32": np.int32, "int64": np.int64}  # element types, of which numbers become constants


def keep_operands(scope) -> None:
    """Until `scope` is restored, tensors that need no cast become alike in type alone: NumPy broadcasts what they hold. So do numbers."""
    semantic = interpreter.interpreter_semantic
    make_alike, number_to_tensor = semantic.binary_op_type_checking_impl, semantic.to_tensor

    def to_tensor(x, check_type: bool = True):
        """Every assignment asks for it, mostly with what is a tensor."""
        return x if type(x) is core.tensor else number_to_tensor(x, check_type)

    def operands(lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        more = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        left, right = type(lhs) is core.tensor, type(rhs) is core.tensor
        if left and right:
            key = lhs.type.name, rhs.type.name, *more
            found = _common.get(key, _common)
            if found is _common:
                made = make_alike(lhs, rhs, *more)
                found = _common[key] = _types(lhs, rhs, made)
            if found is None:
                return make_alike(lhs, rhs, *more)
            of_left, of_right = found
            return (
                lhs if of_left is None else core.tensor(lhs.handle, of_left),
                rhs if of_right is None else core.tensor(rhs.handle, of_right),
            )
        if left and arithmetic_check and is_constant(rhs, lhs):
            return lhs, _constant(rhs, lhs.type)
        if right and arithmetic_check and is_constant(lhs, rhs):
            return _constant(lhs, rhs.type), rhs
        return make_alike(lhs, rhs, *more)

    scope.set_attr(semantic, "binary_op_type_checking_impl", operands)
    scope.set_attr(semantic, "to_tensor", to_tensor)


def _types(lhs, rhs, made: tuple) -> tuple | None:
    """The types of operands made alike, None for one that stays; None for both if their elements change."""
    pairs = tuple(zip((lhs, rhs), made, strict=True))
    # a comparison's tensor has the dtype of what it compares, until it is broadcast
    if any(was.type.scalar != now.type.scalar or was.type.scalar == core.int1 for was, now in pairs):
        return None
    return tuple(None if was.type == now.type else now.type for was, now in pairs)


def is_constant(number, tensor) -> bool:
    """Does a number become a constant of a tensor's element type?"""
    name = tensor.type.scalar.name
    if type(number) is int:
        return name in ("fp32", "fp64") or name in NUMBERS and abs(number) < 2**31
    if type(number) is not float or number == 0 and math.copysign(1.0, number) < 0:  # Tritons differ about -0.0
        return False
    return name in ("fp32", "fp64")


def _constant(number, type):
    scalar = type.scalar
    return core.tensor(interpreter.TensorHandle(np.array([number], dtype=NUMBERS[scalar.name]), scalar), type)
