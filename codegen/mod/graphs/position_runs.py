"""Masks that show runs of positions: of a query the keys from one to another, or of a key the queries.

q_idx >= kv_idx and q_idx - kv_idx < window are two comparisons for every pair. A query's first key, q_idx - window + 1, and last one,
q_idx, are numbers of a row; whether a key lies between them is one comparison, and where the keys end is part of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ...registry import remembered
from ..expr import Expr, ExprTable, ModGraph, symbols_in, walk
from ..symbolic.dispatch import OPERATIONS
from ..symbolic.nodes import cast
from ..symbolic.symbols import Sym
from ..table.dtypes import operand_dtypes
from ..table.op import kind
from ..table.ops import OPS, row_of
from ..table.rows_runs import BOUNDED, WITHIN
from .index_range import value_range
from .rewriting import SimplifyingRun

POSITIONS_END = "positions_end"  # a symbol: where the positions of the axis end
_BOUND = 1 << 28  # positions, and what is added to them, are smaller: comparisons with twice as much are decided, as `bounded` knows


class _Bounds(NamedTuple):
    """The first and the last position that a comparison shows; None where it does not say."""

    first: Sym | None = None
    last: Sym | None = None


@remembered("masks that show runs", 1024)
def as_run(graph: ModGraph, axis: str, ends: bool) -> ModGraph:
    """A mask with its comparisons of `axis` ("q_idx" or "kv_idx") as one; the mask itself where that saves none.

    ends   the symbol POSITIONS_END bounds the run, too. The graph has it among its symbols if it became part of the mask

    For positions that are smaller than INDEX_BOUND.
    """
    parts = _parts(graph.result)
    run = SimplifyingRun(graph.kind, ExprTable(walk(graph.result)), OPERATIONS)
    with run.active():
        run.line = graph.result.source
        found = [_bounds(run, part, axis) for part in parts]
        if sum(bound is not None for bounds in found if bounds for bound in bounds) + ends < 2 or not any(found):
            return graph
        firsts = [bounds.first for bounds in found if bounds and bounds.first is not None]
        lasts = [bounds.last for bounds in found if bounds and bounds.last is not None]
        if ends:
            lasts.append(_symbol(run, POSITIONS_END) - 1)
        first, last = _folded(torch.maximum, firsts), _folded(torch.minimum, lasts)
        position = _symbol(run, axis)
        if first is None:
            shown = position <= last
        elif last is None:
            shown = position >= first
        else:
            count = _folded(torch.maximum, [last - first + 1, Sym(run.table.make("literal", (), torch.int32, attr=0))])
            shown = Sym(run.table.make(WITHIN.name, (position.expr, first.expr, count.expr), torch.bool, source=run.line))
        for part, bounds in zip(parts, found, strict=True):
            if bounds is None:
                shown = shown & Sym(part)
    symbols = graph.symbols | ({POSITIONS_END} if ends else frozenset())
    return replace(graph, result=shown.expr, symbols=symbols)


def _parts(node: Expr) -> list[Expr]:
    """What must all hold."""
    if row_of(node).absorbing is False and all(a.dtype == torch.bool for a in node.args):
        return [part for a in node.args for part in _parts(a)]
    return [node]


def _symbol(run: SimplifyingRun, name: str) -> Sym:
    return Sym(run.table.make("symbol", (), torch.int32, attr=name))


def _folded(function, values: list[Sym]) -> Sym | None:
    found = None
    for value in values:
        found = value if found is None else function(found, value)
    return found


def _bounds(run: SimplifyingRun, node: Expr, axis: str) -> _Bounds | None:
    """What a comparison says of `axis`; None if it is none of integers, or of other values than sums of the two positions."""
    row = row_of(node)
    if row.shows is None or any(kind(a.dtype) != "int" for a in node.args):
        return None
    if any(dtype not in (torch.int32, torch.int64) for dtype in operand_dtypes(node)):
        return None
    left, right = node.args
    if axis in symbols_in(right):
        left, right, row = right, left, OPS[row.mirrored]
    if axis in symbols_in(right) or axis not in symbols_in(left):
        return None
    limit, is_size = _limited(run, right), row_of(left).torch is torch.abs
    place = _place(left.args[0] if is_size else left, axis)
    if place is None:
        return None
    first, last = row.shows(limit)
    if is_size:  # it is at most so much on both sides, or no run
        return _Bounds(_difference(place.other, last), _sum(place.other, last)) if first is None else None
    if place.sign < 0:
        first, last = OPS[row.mirrored].shows(_difference(place.other, limit))
    elif place.other is not None:
        first, last = row.shows(place.other + limit)
    return _Bounds(first, last)


class _Place(NamedTuple):
    """An expression as sign * (position - other); other None is 0."""

    sign: int
    other: Sym | None


def _place(node: Expr, axis: str) -> _Place | None:
    if node.op == "symbol":
        return _Place(1, None)
    signs = row_of(node).signs if node.op in OPS else ()
    if len(signs) != 2 or node.dtype not in (torch.int32, torch.int64):
        return None
    for place, (own, rest) in enumerate((node.args, node.args[::-1])):
        if own.op == "symbol" and own.attr == axis and axis not in symbols_in(rest):
            low, high = value_range(rest)
            if not -_BOUND < low <= high < _BOUND:
                return None  # the sum might wrap around
            other = cast(Sym(rest), torch.int32)
            own_sign, rest_sign = signs[place], signs[1 - place]
            return _Place(own_sign, other if own_sign * rest_sign < 0 else -other)
    return None


def _sum(other: Sym | None, limit: Sym) -> Sym:
    return limit if other is None else other + limit


def _difference(other: Sym | None, limit: Sym) -> Sym:
    return -limit if other is None else other - limit


def _limited(run: SimplifyingRun, node: Expr) -> Sym:
    """An integer as int32, brought between the bounds, which decides no comparison with positions."""
    low, high = value_range(node)
    small = -_BOUND <= low <= high <= _BOUND or torch.iinfo(node.dtype).bits < 32
    value = cast(Sym(node), torch.int32) if small or node.op == "scalar" else Sym(node)
    if small:
        return value
    return Sym(run.table.make(BOUNDED.name, (value.expr,), torch.int32, source=run.line))
