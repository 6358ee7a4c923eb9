"""Intervals of mask_mods: what is sure of a whole block of positions, without looking at each.

`analyse` walks a mask's graph from its leaves to its result and applies the op table's `interval` column. The bounds are traced
like a mod: the outcome is a small program in the least and largest positions of a block. It is sound, never sharp by promise:
where integers might wrap around or floats be NaN, the program finds out and the bounds become the dtype's whole range.

Positions are int32 in [0, 2**31 - 1). Bounds of integers are exact (bounds.py), those of floats are in float32 and rounded outwards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...registry import remembered
from ..current import Operations
from ..expr import Expr, ExprTable, ModGraph, symbols_in, walk
from ..symbolic.dispatch import OPERATIONS
from ..symbolic.nodes import cast
from ..symbolic.symbols import Sym
from ..table.dtypes import operand_dtypes, wrapped
from ..table.op import kind
from ..table.ops import OPS, row_of
from .bounds import LARGEST_INDEX, BoundsRun, TooLarge, constant, limits_of

_AXES = {"q_idx": ("q_min", "q_max"), "kv_idx": ("kv_min", "kv_max")}


@dataclass(frozen=True, eq=False)
class Zone:
    """A part of a mask that depends on one axis and reads captured tensors: its least and largest value in a block is measured,
    not derived.

    axis   "q_idx" or "kv_idx", along which it reads tensors
    graph  the part as a mod of its own (of the kind "zone"), with the mask's tensors and scalars

    A float part with a NaN among its values has (-inf, inf). What was measured of a rounded float leaves room for the roundings of other
    kernels; where such a float is compared, converted or an index, there is no such room, and no zone.
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
    least = property(lambda self: constant(limits_of(self.dtype)[0]))
    greatest = property(lambda self: constant(limits_of(self.dtype)[1]))


@remembered("analyses of masks", 1024)
def analyse(graph: ModGraph) -> Analysis:
    """The intervals of a traced mask_mod."""
    nodes = walk(graph.result)
    run = _IntervalRun(graph.kind, ExprTable(nodes), OPERATIONS)
    with run.active():
        return _analyse(graph, nodes, run)


def _analyse(graph: ModGraph, nodes: list[Expr], run: _IntervalRun) -> Analysis:
    axes, reads, rounds, jumps = _traits(nodes)
    needed, zones = {id(graph.result)}, []
    for node in reversed(nodes):
        if id(node) in needed and not _is_point(node, axes, rounds):
            if len(axes[id(node)]) == 1 and reads[id(node)] and id(node) not in jumps:
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


def _traits(nodes: list[Expr]) -> tuple[dict[int, frozenset[str]], dict[int, bool], set[int], set[int]]:
    """Of each node: the axes it depends on, whether it reads a tensor along one; the nodes that rounding may change, and those of them
    that it may change by more than a rounding: what a rounded number is compared with, converted to or an index of."""
    axes, reads, rounds, jumps = {}, {}, set(), set()
    for node in nodes:
        own = {node.attr} & set(_AXES) if node.op == "symbol" else ()
        axes[id(node)] = frozenset(own).union(*(axes[id(a)] for a in node.args))
        reads[id(node)] = bool(node.op == "load" and axes[id(node)]) or any(reads[id(a)] for a in node.args)
        floating, of_rounded = node.dtype.is_floating_point, any(id(a) in rounds for a in node.args)
        if of_rounded or (floating and not row_of(node).exact):
            rounds.add(id(node))
        narrows = node.op == "cast" and node.dtype in (torch.float16, torch.bfloat16)
        if of_rounded and (not floating or narrows or row_of(node).jumps or any(id(a) in jumps for a in node.args)):
            jumps.add(id(node))
    return axes, reads, rounds, jumps


def _is_point(node: Expr, axes: dict, rounds: set[int]) -> bool:
    """Has it one value in a block? What rounding changes is left to the rules: another kernel may round otherwise."""
    return not axes[id(node)] and id(node) not in rounds


def _point(node: Expr) -> Interval:
    value = _computable(Sym(node))
    return Interval(value, value, node.dtype, node)


def _computable(value: Sym) -> Sym:
    """A bound in one of the dtypes that bounds have: bool, int32, int64 or float32."""
    expr = value.expr
    if expr.is_literal:
        kinds = {"bool": bool, "int": int, "float": float}
        return constant(kinds[kind(expr.dtype)](expr.attr))
    if kind(expr.dtype) == "float":
        return cast(value, torch.float32)
    if kind(expr.dtype) == "int":
        return cast(value, torch.int64 if expr.dtype == torch.int64 else torch.int32)
    return value


class _IntervalRun(BoundsRun):
    """Intervals of the mask's nodes, from those of their operands."""

    by_rules = True

    def __init__(self, kind: str, table: ExprTable, operations: Operations) -> None:
        super().__init__(kind, table, operations)
        self.conversions: dict[tuple, Interval] = {}

    # leaves

    def position(self, name: str) -> Sym:
        node = self.table.make("symbol", (), torch.int32, attr=name)
        self.ranges[id(node)] = (0, LARGEST_INDEX)
        return Sym(node)

    def measured(self, number: int, part: Expr, rounds: bool) -> Interval:
        """The symbols of a zone."""
        dtype = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[kind(part.dtype)]
        lo, hi = (self.table.make("symbol", (), dtype, attr=f"zone{number}_{end}") for end in ("min", "max"))
        if kind(part.dtype) == "int":
            self.ranges[id(lo)] = self.ranges[id(hi)] = limits_of(part.dtype)
        if rounds:
            lo, hi = (Sym(lo) - (torch.abs(Sym(lo)) * 2**-10 + 1e-37)).expr, (Sym(hi) + (torch.abs(Sym(hi)) * 2**-10 + 1e-37)).expr
        return Interval(Sym(lo), Sym(hi), part.dtype)

    def unknown(self, dtype: torch.dtype) -> Interval:
        self.by_rules = False
        return self.whole(dtype)

    def whole(self, dtype: torch.dtype) -> Interval:
        return Interval(*map(constant, limits_of(dtype)), dtype)

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
            if value.is_literal and have == "int" and want != "bool":
                return Interval(*[constant(wrapped(value.attr, dtype) if want == "int" else float(value.attr))] * 2, dtype)
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
        least, greatest = limits_of(dtype)
        lo, hi, zero = torch.trunc(x.lo), torch.trunc(x.hi), torch.zeros_like(x.lo)
        inside = (lo >= float(least)) & (hi < float(greatest + 1))
        wide = torch.int64 if dtype == torch.int64 else torch.int32
        ends = [cast(torch.where(inside, end, zero), wide) for end in (lo, hi)]
        return Interval(*(torch.where(inside, end, constant(limit)) for end, limit in zip(ends, (least, greatest), strict=True)), dtype)

    def fitted(self, lo: Sym, hi: Sym, dtype: torch.dtype) -> Interval:
        """Exact integer bounds of what is computed in `dtype`: the whole range if it may wrap around."""
        least, greatest = map(constant, limits_of(dtype))
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
        """A rule's bounds, if need be only for operands so small that int64 holds whatever comes up on the way."""
        for largest in (None, 1 << 62, 1 << 31):
            same = {id(x): self._limited(x, largest) for x in operands}
            small = functools.reduce(operator.and_, [small for small, _ in same.values()])
            try:
                found = rule(*(same[id(x)][1] for x in operands))
            except TooLarge:
                continue
            if found is None or small.expr.is_literal and small.expr.attr:
                return found
            return tuple(
                torch.where(small, bound, limit)
                for bound, limit in zip(found, map(constant, limits_of(self._dtype(operands, found))), strict=True)
            )
        return None

    @staticmethod
    def _dtype(operands: list[Interval], found) -> torch.dtype:
        return torch.bool if found[0].dtype == torch.bool else operands[-1].dtype

    def _limited(self, x: Interval, largest: int | None) -> tuple[Sym, Interval]:
        """Are the bounds of an operand below `largest`; and the operand, with other bounds if they are not."""
        if largest is None or kind(x.dtype) != "int":
            return constant(True), x
        small, ends = (x.lo > -largest) & (x.hi < largest), []
        for end in (x.lo, x.hi):
            part = torch.where(small, end, torch.ones_like(end))
            if not part.expr.is_literal and part.expr is not end.expr:
                low, high = self.range_of(end.expr)
                self.ranges[id(part.expr)] = min(max(low, 1 - largest), 1), max(min(high, largest - 1), 1)
            ends.append(part)
        return small, Interval(*(ends[:1] * 2 if x.is_point else ends), x.dtype)
