"""Intervals of mask_mods: what is sure of a whole block of positions, without looking at each.

`analyse` walks a mask's graph from its leaves to its result and applies the op table's `interval` column. The bounds are traced
like a mod: the outcome is a small program in the least and largest positions of a block. It is sound, never sharp by promise:
where integers might wrap around or floats be NaN, the program finds out and the bounds become the dtype's whole range.

Positions are int32 in [0, 2**31 - 1). Bounds of integers are computed exactly, in int32 where ranges prove that nothing wraps,
else in int64; bounds of floats in float32, rounded outwards.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .dispatch import apply, cast
from .expr import MASK_SYMBOLS, RANGE_RULES, UNKNOWN, Expr, ExprTable, ModGraph, SourceLine, symbols_in, walk
from .lower import operand_dtypes, wrapped
from .ops import OPS, kind
from .registry import remembered
from .symbols import Run, Sym

_AXES = {"q_idx": ("q_min", "q_max"), "kv_idx": ("kv_min", "kv_max")}
_LARGEST_INDEX = (1 << 31) - 2


@dataclass(frozen=True, eq=False)
class Zone:
    """A part of a mask that depends on one axis and reads captured tensors: its least and largest value in a block is measured,
    not derived.

    axis   "q_idx" or "kv_idx", along which it reads tensors
    graph  the part as a mod of its own (of the kind "zone"), with the mask's tensors and scalars

    A float part with a NaN among its values has (-inf, inf).
    """

    axis: str
    graph: ModGraph


@dataclass(frozen=True, eq=False)
class Analysis:
    """What is known of a block.

    verdict   int32 of "b", "h", "q_min", "q_max", "kv_min", "kv_max" and, per zone, "zone0_min", "zone0_max" (bool, int64 or
              float32): 0 if the block is surely empty, 2 if surely full, else 1
    by_rules  False if the verdict meets something without any bound, of which an element-wise evaluation would know more
    """

    verdict: ModGraph
    zones: tuple[Zone, ...]
    by_rules: bool


@dataclass(frozen=True, eq=False)
class Interval:
    """The values of an expression in a block: from lo to hi. `point`: the expression itself, if it has one value in the block."""

    lo: Sym
    hi: Sym
    dtype: torch.dtype
    point: Expr | None = None

    is_point = property(lambda self: self.lo.expr is self.hi.expr)  # then lo is the value, whatever it is
    least = property(lambda self: _constant(_limits(self.dtype)[0]))
    greatest = property(lambda self: _constant(_limits(self.dtype)[1]))


@remembered("analyses of masks", 1024)
def analyse(graph: ModGraph) -> Analysis:
    """The intervals of a traced mask_mod."""
    nodes = walk(graph.result)
    run = _IntervalRun(graph.kind, ExprTable(nodes))
    with run.active():
        return _analyse(graph, nodes, run)


def _analyse(graph: ModGraph, nodes: list[Expr], run: _IntervalRun) -> Analysis:
    axes, reads, rounds = _traits(nodes)
    needed, zones = {id(graph.result)}, []
    for node in reversed(nodes):
        if id(node) in needed and not _is_point(node, axes, rounds):
            if len(axes[id(node)]) == 1 and reads[id(node)]:
                zones.append(node)
            elif node.op != "load":
                needed.update(id(a) for a in node.args)
    zones.reverse()
    places = {id(node): i for i, node in enumerate(zones)}
    found: dict[int, Interval] = {}
    for node in nodes:
        if id(node) not in needed:
            continue
        run.line = node.source
        if _is_point(node, axes, rounds):
            found[id(node)] = _point(node)
        elif id(node) in places:
            found[id(node)] = run.measured(places[id(node)], node, id(node) in rounds)
        elif node.op == "symbol":
            found[id(node)] = Interval(*(run.position(name) for name in _AXES[node.attr]), node.dtype)
        elif node.op == "load":
            found[id(node)] = run.unknown(node.dtype)
        elif node.op == "cast":
            found[id(node)] = run.rounded(run.converted(found[id(node.args[0])], node.dtype), node.dtype)
        else:
            found[id(node)] = run.ruled(node, [found[id(a)] for a in node.args])
    run.line = graph.result.source
    result = found[id(graph.result)]
    verdict = cast(result.hi, torch.int32) + cast(result.lo, torch.int32)  # what must be can be
    symbols = {id(n): frozenset(axes[id(n)]) | symbols_in(n) for n in zones}
    parts = tuple(Zone(*axes[id(n)], _part(graph, "zone", n, symbols[id(n)])) for n in zones)
    read = symbols_in(verdict.expr)
    return Analysis(_part(graph, "verdict", verdict.expr, read), parts, run.by_rules)


def _part(graph: ModGraph, kind: str, result: Expr, symbols: frozenset[str]) -> ModGraph:
    return ModGraph(kind, graph.name, result, graph.tensors, graph.scalars, graph.origin, symbols)


_EXACT = {"symbol", "literal", "scalar", "load", "cast", "neg", "abs", "sign", "minimum", "maximum", "floor", "ceil", "trunc", "round",
          "where", "detach"}


def _traits(nodes: list[Expr]) -> tuple[dict[int, frozenset[str]], dict[int, bool], set[int]]:
    """Of each node: the axes it depends on, whether it reads a tensor along one; and the floats that hold a rounded operation."""
    axes, reads, rounds = {}, {}, set()
    for node in nodes:
        own = {node.attr} & set(_AXES) if node.op == "symbol" else ()
        axes[id(node)] = frozenset(own).union(*(axes[id(a)] for a in node.args))
        reads[id(node)] = bool(node.op == "load" and axes[id(node)]) or any(reads[id(a)] for a in node.args)
        if node.dtype.is_floating_point and (node.op not in _EXACT or any(id(a) in rounds for a in node.args)):
            rounds.add(id(node))
    return axes, reads, rounds


def _is_point(node: Expr, axes: dict, rounds: set[int]) -> bool:
    """Has it one value in a block? Rounded floats are left to the rules: another kernel may round them otherwise."""
    return not axes[id(node)] and id(node) not in rounds


def _constant(value) -> Sym:
    dtype = {bool: torch.bool, float: torch.float32}.get(type(value))
    if dtype is None:
        dtype = torch.int32 if wrapped(value, torch.int32) == value else torch.int64
    return Sym(Run.current.table.make("literal", (), dtype, attr=value))


def _limits(dtype: torch.dtype) -> tuple:
    if dtype == torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _point(node: Expr) -> Interval:
    value = _computable(Sym(node))
    return Interval(value, value, node.dtype, node)


def _computable(value: Sym) -> Sym:
    """A bound in one of the dtypes that bounds have: bool, int32, int64 or float32."""
    expr = value.expr
    if expr.is_literal:
        kinds = {"bool": bool, "int": int, "float": float}
        return _constant(kinds[kind(expr.dtype)](expr.attr))
    if kind(expr.dtype) == "float":
        return cast(value, torch.float32)
    if kind(expr.dtype) == "int":
        return cast(value, torch.int64 if expr.dtype == torch.int64 else torch.int32)
    return value


class _IntervalRun(Run):
    """Nodes of bounds: simplified, and marked with the line of the mask's node at hand."""

    line: SourceLine | None = None
    by_rules = True

    def __init__(self, kind: str, table: ExprTable) -> None:
        super().__init__(kind, table)
        self.ranges: dict[int, tuple[float, float]] = {}
        self.wraps: set[int] = set()
        self.conversions: dict[tuple, Interval] = {}

    def source(self) -> SourceLine | None:
        return self.line

    # leaves

    def position(self, name: str) -> Sym:
        node = self.table.make("symbol", (), torch.int32, attr=name)
        self.ranges[id(node)] = (0, _LARGEST_INDEX)
        return Sym(node)

    def measured(self, number: int, part: Expr, rounds: bool) -> Interval:
        """The symbols of a zone."""
        dtype = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[kind(part.dtype)]
        lo, hi = (self.table.make("symbol", (), dtype, attr=f"zone{number}_{end}") for end in ("min", "max"))
        if kind(part.dtype) == "int":
            self.ranges[id(lo)] = self.ranges[id(hi)] = _limits(part.dtype)
        if rounds:
            lo, hi = (Sym(lo) - (torch.abs(Sym(lo)) * 2**-10 + 1e-37)).expr, (Sym(hi) + (torch.abs(Sym(hi)) * 2**-10 + 1e-37)).expr
        return Interval(Sym(lo), Sym(hi), part.dtype)

    def unknown(self, dtype: torch.dtype) -> Interval:
        self.by_rules = False
        return self.whole(dtype)

    def whole(self, dtype: torch.dtype) -> Interval:
        return Interval(*map(_constant, _limits(dtype)), dtype)

    # conversions, as kernels make them

    def converted(self, x: Interval, dtype: torch.dtype) -> Interval:
        key = id(x), dtype
        if key not in self.conversions:
            self.conversions[key] = x if x.dtype == dtype and (x.point is None or not x.point.weak) else self._converted(x, dtype)
        return self.conversions[key]

    def _converted(self, x: Interval, dtype: torch.dtype) -> Interval:
        have, want = kind(x.dtype), kind(dtype)
        if x.point is not None:
            value = x.point
            if value.is_literal and have == want == "int":
                return Interval(*[_constant(wrapped(value.attr, dtype))] * 2, dtype)
            exact = _point(cast(Sym(value), torch.float32 if want == "float" else dtype).expr)
            return Interval(exact.lo, exact.hi, dtype, exact.point)
        if have == want and want != "int":
            return Interval(x.lo, x.hi, dtype)
        if want == "bool":
            zero = torch.zeros_like(x.lo)
            none = (x.lo == zero) & (x.hi == zero)
            return Interval((x.lo > zero) | (x.hi < zero), ~none, dtype)
        if want == "float":
            return Interval(cast(x.lo, torch.float32), cast(x.hi, torch.float32), dtype)
        if have == "bool":
            return Interval(cast(x.lo, torch.int32), cast(x.hi, torch.int32), dtype)
        if have == "int":
            return self.fitted(x.lo, x.hi, dtype)
        least, greatest = _limits(dtype)
        lo, hi, zero = torch.trunc(x.lo), torch.trunc(x.hi), torch.zeros_like(x.lo)
        inside = (lo >= float(least)) & (hi < float(greatest + 1))
        wide = torch.int64 if dtype == torch.int64 else torch.int32
        ends = [cast(torch.where(inside, end, zero), wide) for end in (lo, hi)]
        return Interval(*(torch.where(inside, end, _constant(limit)) for end, limit in zip(ends, (least, greatest), strict=True)), dtype)

    def fitted(self, lo: Sym, hi: Sym, dtype: torch.dtype) -> Interval:
        """Exact integer bounds of what is computed in `dtype`: the whole range if it may wrap around."""
        least, greatest = map(_constant, _limits(dtype))
        inside = (lo >= least) & (hi <= greatest)
        return Interval(_computable(torch.where(inside, lo, least)), _computable(torch.where(inside, hi, greatest)), dtype)

    def rounded(self, x: Interval, dtype: torch.dtype) -> Interval:
        """After a cast: half precision rounds."""
        if dtype not in (torch.float16, torch.bfloat16):
            return x
        return Interval(*(cast(cast(end, dtype), torch.float32) for end in (x.lo, x.hi)), dtype)

    # rules

    def ruled(self, node: Expr, operands: list[Interval]) -> Interval:
        rule = OPS[node.op].interval
        operands = [self.converted(x, dtype) for x, dtype in zip(operands, operand_dtypes(node), strict=True)]
        found = self._exactly(rule, operands) if rule else None
        if found is None:
            return self.unknown(node.dtype)
        lo, hi = map(_computable, found)
        result = self.fitted(lo, hi, node.dtype) if kind(node.dtype) == "int" else Interval(lo, hi, node.dtype)
        if result.lo.expr is result.least.expr and result.hi.expr is result.greatest.expr:
            self.by_rules = False
        return result

    def _exactly(self, rule: Callable, operands: list[Interval]):
        """A rule's bounds, if need be in int64 and only for operands so small that no integer wraps around on the way."""
        if all(kind(x.dtype) != "int" for x in operands):
            return rule(*operands)
        for largest in (None, math.inf, 1 << 62, 1 << 31):
            same = {id(x): self._limited(x, largest) for x in operands}
            small, limited = (_constant(True), operands) if largest is None else (
                functools.reduce(operator.and_, [small for small, _ in same.values()]), [same[id(x)][1] for x in operands])
            found = rule(*limited)
            if found is None:
                return None
            if not self._wraps(found, limited):
                return tuple(torch.where(small, bound, limit) for bound, limit in zip(
                    map(_computable, found), map(_constant, _limits(self._dtype(operands, found))), strict=True))
        return None

    @staticmethod
    def _dtype(operands: list[Interval], found) -> torch.dtype:
        return torch.bool if found[0].dtype == torch.bool else operands[-1].dtype

    def _limited(self, x: Interval, largest: float | None) -> tuple[Sym, Interval]:
        """Are the bounds of an operand below `largest`; and the operand in int64, with other bounds if they are not."""
        if largest is None or kind(x.dtype) != "int":
            return _constant(True), x
        lo, hi = cast(x.lo, torch.int64), cast(x.hi, torch.int64)
        if largest == math.inf:
            return _constant(True), Interval(lo, hi, x.dtype)
        small = (lo > -largest) & (hi < largest)
        ends = []
        for end in (lo, hi):
            part = torch.where(small, end, torch.ones_like(end))
            reach = self.range_of(end.expr)
            if not part.expr.is_literal and part.expr is not end.expr:
                self.ranges[id(part.expr)] = max(reach[0], 1 - largest), min(max(reach[1], 1), largest - 1)
            ends.append(part)
        return small, Interval(*(ends if not x.is_point else ends[:1] * 2), x.dtype)

    def _wraps(self, found, operands: list[Interval]) -> bool:
        known = {id(end.expr) for x in operands for end in (x.lo, x.hi)}
        stack = [value.expr for value in found if isinstance(value, Sym)]
        while stack:
            node = stack.pop()
            if id(node) in known:
                continue
            known.add(id(node))
            self.range_of(node)
            if id(node) in self.wraps:
                return True
            stack.extend(node.args)
        return False

    def range_of(self, node: Expr) -> tuple[float, float]:
        """Bounds of a bound, for any block; (-inf, inf), for a float, includes NaN."""
        if id(node) not in self.ranges:
            self.ranges[id(node)] = self._range_of(node)
        return self.ranges[id(node)]

    def _range_of(self, node: Expr) -> tuple[float, float]:
        limits = _limits(node.dtype)
        if node.is_literal:
            return UNKNOWN if node.attr != node.attr else (node.attr, node.attr)
        if node.op == "symbol" and node.attr in MASK_SYMBOLS:
            return 0, _LARGEST_INDEX
        rule = _RANGES.get("whole" if node.op in ("floor", "ceil", "trunc", "round") else node.op)
        if rule is None or node.dtype == torch.bool:
            return limits
        args = [self.range_of(a) for a in (node.args[1:] if node.op == "where" else node.args)]
        floating = node.dtype.is_floating_point
        if any(math.isinf(end) for arg in args for end in arg) and node.op != "where":
            return limits
        low, high = rule(*args)
        if node.op == "cast" and not floating:
            inside = limits[0] <= low and high <= limits[1] and not node.args[0].dtype.is_floating_point
            return (low, high) if inside else limits
        if floating:
            low, high = low - abs(low) * 1e-6, high + abs(high) * 1e-6
            return (low, high) if max(abs(low), abs(high)) < 1e38 else UNKNOWN
        if low < limits[0] or high > limits[1]:
            self.wraps.add(id(node))
            return limits
        return low, high

    # shorter expressions

    def simplified(self, op: str, operands: list[Expr]) -> Expr | None:
        if all(o.is_literal for o in operands):
            return None
        x, y = operands[0], operands[-1]
        if op == "where":
            return self._simple_choice(*operands)
        if op in _ORDERS:
            return self._decided(op, x, y)
        if op == "invert":
            return self._inverted(x)
        if op == "abs" and self.range_of(x)[0] >= 0 and x.dtype != torch.bool:
            return x
        if op in ("minimum", "maximum", "and_", "or_") and x is y:
            return x
        if op in ("minimum", "maximum") and x.dtype == y.dtype and x.dtype != torch.bool:
            (low, high), (least, most) = self.range_of(x), self.range_of(y)
            if all(map(math.isfinite, (low, high, least, most))) and (high <= least or most <= low):
                return x if (high <= least) == (op == "minimum") else y
        if kind(x.dtype) == kind(y.dtype) == "int" and not (x.weak and y.weak):
            neutral = {"add": 0, "sub": 0, "mul": 1, "floor_divide": 1}.get(op)
            if y.is_literal and y.attr == neutral and neutral is not None and (y.weak or x.dtype == y.dtype):
                return x
            if op in ("add", "mul") and x.is_literal and x.attr == neutral and (x.weak or x.dtype == y.dtype):
                return y
        return None

    def _simple_choice(self, condition: Expr, x: Expr, y: Expr) -> Expr | None:
        if condition.is_literal:
            return x if condition.attr else y
        if x is y:
            return x
        if x.is_literal and y.is_literal and x.dtype == y.dtype and x.attr == y.attr and x.dtype != torch.float32:
            return x
        return None

    def _decided(self, op: str, x: Expr, y: Expr) -> Expr | None:
        """A comparison that has the same outcome in every block."""
        if torch.bool in (x.dtype, y.dtype):
            return None
        (a, b), (c, d) = self.range_of(x), self.range_of(y)
        if x is y and math.isfinite(a) and math.isfinite(b):
            a = b = c = d = 0
        floats = x.dtype.is_floating_point, y.dtype.is_floating_point
        if any(floats) and not all(floats):
            return None  # one of them will be rounded
        if any(f and not n.is_literal and math.isinf(end) for f, n, ends in zip(floats, (x, y), ((a, b), (c, d)), strict=True)
               for end in ends) or any(n.is_literal and n.attr != n.attr for n in (x, y)):
            return None  # it may be NaN
        always, never = _ORDERS[op](a, b, c, d)
        return _constant(bool(always)).expr if always or never else None

    def _inverted(self, x: Expr) -> Expr | None:
        if x.dtype != torch.bool:
            return None
        if x.op == "invert":
            return x.args[0]
        if x.op in _OPPOSITES and not any(a.dtype.is_floating_point and math.isinf(self.range_of(a)[0]) for a in x.args):
            return apply(OPS[_OPPOSITES[x.op]], tuple(map(Sym, x.args)), {}).expr
        return None


_OPPOSITES = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}

# (always, never) of comparisons of a value in [a, b] with one in [c, d]
_ORDERS = {
    "lt": lambda a, b, c, d: (b < c, a >= d),
    "le": lambda a, b, c, d: (b <= c, a > d),
    "gt": lambda a, b, c, d: (a > d, b <= c),
    "ge": lambda a, b, c, d: (a >= d, b < c),
    "eq": lambda a, b, c, d: (a == b == c == d, b < c or d < a),
    "ne": lambda a, b, c, d: (b < c or d < a, a == b == c == d),
}


def _every(operation: Callable, a: tuple, b: tuple) -> tuple:
    values = [operation(x, y) for x in a for y in b]
    return min(values), max(values)


def _quotient_range(a: tuple, b: tuple) -> tuple:
    if b[0] > 0:
        return _every(operator.floordiv, a, b)
    most = max(abs(a[0]), abs(a[1]))
    return -most, most


def _remainder_range(a: tuple, b: tuple) -> tuple:
    if b[0] > 0:
        return 0, b[1] - 1
    most = max(abs(b[0]), abs(b[1]), abs(a[0]), abs(a[1]))
    return -most, most


_RANGES = RANGE_RULES | {  # of finite operands, and of divisors of any sign
    "invert": lambda a: (-a[1] - 1, -a[0] - 1),
    "where": lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "floor_divide": _quotient_range,
    "div_trunc": lambda a, b: (-max(map(abs, a)), max(map(abs, a))),
    "remainder": _remainder_range,
    "fmod": lambda a, b: (-max(map(abs, a)), max(map(abs, a))),
    "rshift": lambda a, b: (min(a[0], 0), max(a[1], 0)),
    "whole": lambda a: (a[0] - 1, a[1] + 1),
}
