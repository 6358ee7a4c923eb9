"""Where a score_mod or its derivative may be infinite or NaN. There, 0 times it need not be 0, and a kernel has to choose the 0."""

from __future__ import annotations

import math

import torch

from ..expr import Expr, symbols_in, walk
from ..table.ops import row_of

_LARGEST = {torch.float16: 65504.0, torch.bfloat16: torch.finfo(torch.bfloat16).max}  # others: float32's
_ORDINARY = (1e-9, 1e9)  # sizes of captured numbers that are ordinary


def are_ordinary(numbers: list) -> bool:
    """Are captured numbers neither infinite nor NaN, and neither so large nor so small that a few products or quotients of them are?"""
    low, high = _ORDINARY
    return all(low < abs(n) < high for n in numbers if isinstance(n, float))


def may_be_nan(expr: Expr, ordinary: bool = True) -> bool:
    """Could the value be infinite or NaN where "grad" is 0? Elements of tensors may be, scores are finite, and captured numbers are
    `ordinary` or may be anything. Then 0 times what the gradient is multiplied by need not be 0."""
    return not math.isfinite(_size(expr, ordinary, {}))


def padding_may_be_nan(expr: Expr, ordinary: bool = True) -> bool:
    """Could a score_mod's result be NaN for a score of 0 where it is none for the scores of that row? Not if it only adds to the score."""
    sizes: dict[int, float] = {}
    for node in walk(expr):
        row = row_of(node)
        adds = row.signs or row.chooses or node.op in ("symbol", "cast")
        if node.dtype.is_floating_point and "score" in symbols_in(node) and not adds:
            operands = [_size(a, ordinary, sizes) for a in node.args if "score" not in symbols_in(a)]
            if not (row.size or _divides_by_constant(node)) or not all(map(math.isfinite, operands)):
                return True
    return False


def _size(node: Expr, ordinary: bool, sizes: dict[int, float]) -> float:
    """What a value is at most, signs aside, where "grad" is at most 1; inf if it may be infinite, NaN if it may be NaN."""
    found = sizes.get(id(node))
    if found is not None:
        return found
    most = _LARGEST.get(node.dtype, torch.finfo(torch.float32).max)
    if not node.dtype.is_floating_point:
        found = 2.0**64
    elif node.op == "symbol":
        found = 1.0 if node.attr in ("grad", "grad_tangent") else most / 4
    elif node.op == "literal":
        found = abs(node.attr)
    elif node.op == "scalar":
        found = _ORDINARY[1] if ordinary else math.nan
    else:
        operands = [_size(a, ordinary, sizes) for a in node.args]
        row = row_of(node)
        rule = abs if node.op == "cast" else row.size
        if any(map(math.isnan, operands)) or any(map(math.isinf, operands)) and not (node.op == "cast" or row.of_infinity):
            found = math.nan
        elif _divides_by_constant(node):
            divisor = node.args[1]
            found = operands[0] / (abs(divisor.attr) if divisor.is_literal else _ORDINARY[0])
        else:
            found = rule(*operands) if rule else math.nan
    found = math.inf if found > most else found
    sizes[id(node)] = found
    return found


def _divides_by_constant(node: Expr) -> bool:
    if row_of(node).scales != (0,):
        return False
    divisor = node.args[1]
    return divisor.op == "scalar" or (divisor.is_literal and divisor.attr != 0)
