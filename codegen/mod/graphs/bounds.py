"""Expressions for the ends of intervals. An integer among them is a number of mathematics: it never wraps around.

Each integer operation is made from the ranges of its operands: numbers are computed in Python's integers, all else in int32 if its range
shows that this holds the result, else in int64. Where int64 might not hold it either, nothing is made: `TooLarge` is raised, and
intervals.py tries smaller operands. So there is no overflow to be found afterwards, in a number that was folded least of all.

A part of the mask itself, with one value in the block, may be an end too. Its operations wrap around in their own dtypes as in the mod,
and what may have wrapped has the range of its dtype.
"""

from __future__ import annotations

import math
import operator

import torch

from ..current import Operations, Run
from ..expr import MASK_SYMBOLS, Expr, ExprTable
from ..symbolic.nodes import apply, cast
from ..symbolic.symbols import Sym
from ..table.dtypes import wrapped
from ..table.op import Op, kind
from ..table.ops import OPS, row_of
from ..table.ranges import UNKNOWN, either, quotients, same
from .rewriting import RewriteRun

LARGEST_INDEX = (1 << 31) - 2


class TooLarge(Exception):
    """An integer bound that int64 might not hold."""


def limits_of(dtype: torch.dtype) -> tuple:
    """Least and greatest value of a dtype; infinite for floats."""
    if dtype == torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _holds(dtype: torch.dtype, low: float, high: float) -> bool:
    least, greatest = limits_of(dtype)
    return least <= low and high <= greatest


def constant(value) -> Sym:
    """A number as a bound: bool, int32 or int64, or float32."""
    if isinstance(value, bool):
        dtype = torch.bool
    elif isinstance(value, float):
        dtype, value = torch.float32, torch.tensor(value, dtype=torch.float32, device="cpu").item()
    else:
        dtype = _dtype_of(value, value)
    return Sym(Run.current.table.make("literal", (), dtype, attr=value))


def _dtype_of(low: float, high: float) -> torch.dtype:
    for dtype in (torch.int32, torch.int64):
        if _holds(dtype, low, high):
            return dtype
    raise TooLarge


class BoundsRun(RewriteRun):
    """Nodes of bounds: exact integers, simplified."""

    def __init__(self, kind: str, table: ExprTable, operations: Operations) -> None:
        super().__init__(kind, table, operations)
        self.ranges: dict[int, tuple[float, float]] = {}

    def simplified(self, op: str, operands: list[Expr]) -> Expr | None:
        row = OPS[op]
        values = operands[1:] if row.chooses else operands
        integers = all(kind(v.dtype) == "int" for v in values)
        if integers and not row.decided:
            return self._exact(row, operands[: -len(values)], values)
        if all(o.is_literal for o in operands) and not integers:
            return None
        return self._shorter(row, operands)

    # integers

    def _exact(self, row: Op, condition: list[Expr], values: list[Expr]) -> Expr:
        """An operation on integers; only one that chooses has a condition."""
        if row.integers is None:
            raise NotImplementedError(f"{row.name} of integer bounds: give its row the column `integers`")
        values = [constant(int(v.attr)).expr if v.is_literal else v for v in values]
        if not condition and all(v.is_literal for v in values):
            return constant(row.integers.compute(*(v.attr for v in values))).expr
        shorter = self._shorter(row, [*condition, *values])
        if shorter is not None:
            return shorter
        ranges = [self.range_of(v) for v in values]
        found = row.integers.range(*ranges)
        held = [found, *ranges]
        if row.divides:  # a remainder is computed from the quotient, and the least number / -1 overflows
            held.append(quotients(operator.floordiv)(*ranges))
        dtype = _dtype_of(min(low for low, _ in held), max(high for _, high in held))
        if any(v.dtype == torch.int64 for v in values):
            dtype = torch.int64
        values = [v if v.is_literal else cast(Sym(v), dtype).expr for v in values]
        node = self.table.make(row.name, (*condition, *values), dtype, source=self.source())
        self.ranges[id(node)] = found
        return node

    # ranges

    def range_of(self, node: Expr) -> tuple[float, float]:
        """Bounds of a bound, for any block; (-inf, inf), for a float, includes NaN."""
        if id(node) not in self.ranges:
            self.ranges[id(node)] = self._range_of(node)
        return self.ranges[id(node)]

    def _range_of(self, node: Expr) -> tuple[float, float]:
        if node.is_literal:
            return UNKNOWN if node.attr != node.attr else (node.attr, node.attr)
        if node.op == "symbol" and node.attr in MASK_SYMBOLS:
            return 0, LARGEST_INDEX
        limits = limits_of(node.dtype)
        values = node.args[1:] if row_of(node).chooses else node.args
        if not values or node.op == "load" or node.dtype == torch.bool:
            return limits
        low, high = (self._float_range if node.dtype.is_floating_point else self._integer_range)(node, values) or limits
        return (low, high) if limits[0] <= low and high <= limits[1] else limits

    def _integer_range(self, node: Expr, values: tuple[Expr, ...]) -> tuple[float, float] | None:
        """Of an operation of the mask itself, on operands converted to its dtype; None if unknown."""
        if any(kind(v.dtype) == "float" for v in values):
            return None
        ranges = []
        for value in values:
            low, high = map(int, self.range_of(value))
            if value.is_literal:
                low = high = wrapped(low, node.dtype)
            ranges.append((low, high) if _holds(node.dtype, low, high) else limits_of(node.dtype))
        if node.op == "cast":
            return ranges[0]
        row = OPS[node.op]
        if row.integers is None or (row.divides and ranges[1][0] <= 0 <= ranges[1][1]):
            return None  # anything may come of a division by 0
        return row.integers.range(*ranges)

    def _float_range(self, node: Expr, values: tuple[Expr, ...]) -> tuple[float, float] | None:
        """Of a float operation, which rounds; None if unknown."""
        ranges = [self.range_of(value) for value in values]
        row = row_of(node)
        if row.chooses:
            return either(*ranges)
        rule = same if node.op == "cast" else None if row.divides else row.range
        if rule is None or any(math.isinf(end) for ends in ranges for end in ends):
            return None
        low, high = rule(*ranges)
        low, high = low - abs(low) * 1e-6, high + abs(high) * 1e-6
        if node.op == "cast" and node.dtype in (torch.float16, torch.bfloat16):
            low, high = torch.tensor([low, high], dtype=torch.float32, device="cpu").to(node.dtype).tolist()
        return (low, high) if max(abs(low), abs(high)) < 1e38 else None

    # shorter expressions

    def _shorter(self, row: Op, operands: list[Expr]) -> Expr | None:
        x, y = operands[0], operands[-1]
        if row.chooses:
            return self._simple_choice(*operands)
        if row.decided:
            return self._decided(row, x, y)
        if row.involution:
            return self._inverted(row, x)
        if row.unchanged is not None and self.range_of(x)[0] >= row.unchanged:
            return x
        if row.idempotent and x is y:
            return x
        if row.picks and x.dtype == y.dtype and x.dtype != torch.bool:
            (low, high), (least, most) = self.range_of(x), self.range_of(y)
            if all(map(math.isfinite, (low, high, least, most))) and (high <= least or most <= low):
                return x if (high <= least) == (row.picks is min) else y
        if kind(x.dtype) == kind(y.dtype) == "int":
            for neutral, operand, other in ((row.neutral[1], y, x), (row.neutral[0], x, y)):
                if neutral is not None and operand.is_literal and operand.attr == neutral:
                    return other
        return None

    def _simple_choice(self, condition: Expr, x: Expr, y: Expr) -> Expr | None:
        if condition.is_literal:
            return x if condition.attr else y
        if x is y:
            return x
        if x.is_literal and y.is_literal and x.dtype == y.dtype and x.attr == y.attr and x.dtype != torch.float32:
            return x
        return None

    def _decided(self, row: Op, x: Expr, y: Expr) -> Expr | None:
        """A comparison that has the same outcome in every block."""
        if torch.bool in (x.dtype, y.dtype):
            return None
        (a, b), (c, d) = self.range_of(x), self.range_of(y)
        if x is y and math.isfinite(a) and math.isfinite(b):
            a = b = c = d = 0
        floats = x.dtype.is_floating_point, y.dtype.is_floating_point
        if any(floats) and not all(floats):
            return None  # one of them will be rounded
        if any(
            f and not n.is_literal and math.isinf(end) for f, n, ends in zip(floats, (x, y), ((a, b), (c, d)), strict=True) for end in ends
        ) or any(n.is_literal and n.attr != n.attr for n in (x, y)):
            return None  # it may be NaN
        always, never = row.decided(a, b, c, d)
        return constant(bool(always)).expr if always or never else None

    def _inverted(self, row: Op, x: Expr) -> Expr | None:
        """The opposite of what is true or false."""
        if x.dtype != torch.bool:
            return None
        if x.op == row.name:
            return x.args[0]
        opposite = row_of(x).opposite
        if opposite and not any(a.dtype.is_floating_point and math.isinf(self.range_of(a)[0]) for a in x.args):
            return apply(OPS[opposite], tuple(map(Sym, x.args)), {}).expr
        return None
