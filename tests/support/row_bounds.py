"""Bounds of one row of the op table, and every value that it may give: what test_interval_rules.py compares."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import strategies as st

from flexpress.codegen.mod.current import Run
from flexpress.codegen.mod.expr import ExprTable, walk
from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.graphs.intervals import Interval, _IntervalRun, _point
from flexpress.codegen.mod.symbolic.dispatch import OPERATIONS
from flexpress.codegen.mod.symbolic.nodes import apply
from flexpress.codegen.mod.symbolic.symbols import Sym
from flexpress.codegen.mod.table.op import kind
from flexpress.codegen.mod.table.ops import OPS
from support.rows import DIVISIONS, NUMBERS


def corners(dtype: torch.dtype) -> list:
    """Numbers near which rules change: zeros, signs, powers of two, extremes."""
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_floating_point:
        sizes = [0.0, 1e-38, 1e-20, 1e-3, 0.5, 0.99, 1.0, 1.5, 2.5, 3.0, 7.25, 90.0, 65504.0, 2.0**24, 2.0**31, 1e20, 3e38, math.inf]
        return torch.tensor([*sizes, *(-x for x in sizes)]).tolist()  # as float32
    info = torch.iinfo(dtype)
    sizes = [0, 1, 2, 3, 5, 7, 8, 31, 32, 100, 127, 128, 255, 2**15, 2**16 + 1, 2**24 + 1, 2**30, 2**31 - 1, 2**31, 2**40, 2**62]
    found = {s + d for x in sizes for s in (x, -x) for d in (-1, 0, 1)} | {info.min, info.min + 1, info.max - 1, info.max}
    return sorted(n for n in found if info.min <= n <= info.max)


@st.composite
def spans(draw, dtype: torch.dtype) -> list:
    """An ascending interval's ends, often near each other, often equal."""
    if dtype == torch.bool:
        return sorted(draw(st.tuples(st.booleans(), st.booleans())))
    ends = st.sampled_from(corners(dtype))
    if dtype.is_floating_point:
        ends = st.one_of(ends, ends, st.sampled_from((math.inf, -math.inf)))
    first = draw(ends)
    if dtype.is_floating_point:
        second = draw(st.one_of(st.just(first), ends, st.floats(0, 20, width=32).map(lambda d: first + d)))
    else:
        info = torch.iinfo(dtype)
        second = draw(st.one_of(st.just(first), ends, st.integers(0, 40).map(lambda d: min(first + d, info.max))))
    return sorted((first, second))


def inside(low, high, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of an interval: its ends, their neighbours, the corners within, and random ones; NaN if an end is infinite."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.tensor([low, high])
    found = [low, high, *(c for c in corners(dtype) if low <= c <= high)]
    share = torch.rand(24, generator=generator, dtype=torch.float64).tolist()
    if dtype.is_floating_point:
        found += [low + (high - low) * s for s in share if math.isfinite(high - low)]
        found += [math.nan] if math.isinf(low) or math.isinf(high) else []
        return torch.tensor(found, dtype=torch.float32).clamp(low, high)
    found += [min(low + int((high - low) * s), high) for s in share] + [min(low + 1, high), max(high - 1, low)]
    return torch.tensor(found, dtype=dtype)


_DISCRETE = {"floor_divide", "div_trunc", "remainder", "fmod"}  # jump with the rounding of what they divide


class Row:
    """One row on operands that are leaves: symbols of a dtype in an interval, or literals.

    unknown, points   places of operands of which nothing is known, or that have one value, as what a block reads by b and h alone
    """

    def __init__(self, name: str, dtypes: tuple, literals: dict, unknown: tuple = (), points: tuple = ()) -> None:
        self.unknown, self.points = ([f"x{i}" for i in places] for places in (unknown, points))
        self.run = _IntervalRun("mask", ExprTable(), OPERATIONS)
        make = self.run.table.make
        with Run("mask", self.run.table, OPERATIONS).active():
            self.leaves = [
                make("literal", (), torch.int64 if d is int else torch.float32 if d is float else d, attr=literals[i], weak=d in NUMBERS)
                if i in literals
                else make("symbol", (), d, attr=f"x{i}")
                for i, d in enumerate(dtypes)
            ]
            self.node = (
                Sym(make("cast", (self.leaves[0],), name)).expr
                if isinstance(name, torch.dtype)
                else apply(OPS[name], tuple(map(Sym, self.leaves)), {}).expr
            )
        with self.run.active():
            self.bounds = None if self.node.is_literal else self.bounded()

    def bounded(self) -> Interval:
        ends = {}
        for leaf in walk(self.node):
            if leaf.op == "symbol" and leaf.attr in self.unknown:
                ends[id(leaf)] = self.run.unknown(leaf.dtype)
            elif leaf.op == "symbol" and leaf.attr in self.points:
                ends[id(leaf)] = _point(leaf)
            elif leaf.op == "symbol":
                dtype = {"bool": torch.bool, "float": torch.float32, "int": torch.int64}[kind(leaf.dtype)]
                lo, hi = (Sym(self.run.table.make("symbol", (), dtype, attr=f"{leaf.attr}_{end}")) for end in ("lo", "hi"))
                if kind(leaf.dtype) == "int":
                    info = torch.iinfo(leaf.dtype)
                    self.run.ranges[id(lo.expr)] = self.run.ranges[id(hi.expr)] = (info.min, info.max)
                ends[id(leaf)] = Interval(lo, hi, leaf.dtype)
            elif leaf.is_literal:
                ends[id(leaf)] = _point(leaf)
            elif leaf.op == "cast":
                ends[id(leaf)] = self.run.rounded(self.run.converted(ends[id(leaf.args[0])], leaf.dtype), leaf.dtype)
            else:
                ends[id(leaf)] = self.run.ruled(leaf, [ends[id(a)] for a in leaf.args])
        return ends[id(self.node)]

    def check(self, spans: list, seed: int) -> None:
        """Every value of the operands has a result within the bounds."""
        symbols, values = {}, {}
        for i, (leaf, (low, high)) in enumerate(zip(self.leaves, spans, strict=True)):
            if leaf.op == "symbol":
                dtype = {"bool": torch.bool, "float": torch.float32, "int": torch.int64}[kind(leaf.dtype)]
                symbols[f"x{i}_lo"], symbols[f"x{i}_hi"] = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
                shape = [1] * len(spans)
                shape[i] = -1
                values[f"x{i}"] = inside(low, high, leaf.dtype, seed + i).reshape(shape)
        lo, hi = (compute(end.expr, symbols, [], []) for end in (self.bounds.lo, self.bounds.hi))
        results = compute(self.node, values, [], [])
        if self.node.dtype == torch.float32 and all(n.dtype == torch.float32 for n in self.leaves) and self.node.op not in _DISCRETE:
            precise = compute(self.node, {**values, "score": torch.zeros((), dtype=torch.float64)}, [], [])  # rounded otherwise
            results = torch.cat([results.double().flatten(), precise[precise.abs() < 3e38]])
        assert within(results, lo, hi).all(), (
            self.node.op,
            [str(n.dtype) for n in self.leaves],
            [n.attr for n in self.leaves],
            spans,
            lo.item(),
            hi.item(),
            results[~within(results, lo, hi)][0].item(),
        )


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a dtype of 8 bits; of a wider one its corners and those of the grid."""
    if dtype.itemsize > 1 or dtype == torch.bool:
        return torch.tensor(sorted({*corners(dtype), *grid(dtype).flatten().tolist()}), dtype=dtype)
    info = torch.iinfo(dtype)
    return torch.arange(info.min, info.max + 1).to(dtype)


@functools.cache
def grid(dtype: torch.dtype) -> torch.Tensor:
    """(intervals, 2): all intervals between some values of a dtype of 8 bits, its ends among them; of a wider one the whole, and values."""
    if dtype == torch.bool:
        return torch.tensor([[False, False], [False, True], [True, True]])
    limits = torch.iinfo(dtype)
    ends = [
        n
        for n in (limits.min, limits.min + 1, -65, -9, -2, -1, 0, 1, 2, 3, 7, 8, 65, 127, 128, 200, limits.max - 1, limits.max)
        if limits.min <= n <= limits.max
    ]
    ends = sorted({*ends})
    return torch.tensor(
        [
            [low, high]
            for low in ends
            for high in ends
            if low <= high and (dtype.itemsize == 1 or low == high or (low, high) == (limits.min, limits.max))
        ]
    )


def spread(values: torch.Tensor, place: int, count: int) -> torch.Tensor:
    """A vector along dimension `place` of `count`."""
    return values.reshape([-1 if i == place else 1 for i in range(count)])


def reduced(values: torch.Tensor, place: int, ranges: torch.Tensor, least: bool) -> torch.Tensor:
    """The least or greatest of results along dimension `place`, in each of some ranges [first, last) of it. NaN stays."""
    parts = [values.narrow(place, first, last - first) for first, last in ranges.tolist()]
    return torch.stack([part.amin(place) if least else part.amax(place) for part in parts], place)


def pieces(whole: torch.Tensor, intervals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some values cut wherever an interval ends: [first, last) of each piece, and of each interval in pieces."""
    low, high = intervals.long().T.contiguous()
    lows, highs = torch.searchsorted(whole.long(), low), torch.searchsorted(whole.long(), high, right=True)
    cuts = torch.cat([lows, highs]).unique()
    return torch.stack([cuts[:-1], cuts[1:]], -1), torch.stack([torch.searchsorted(cuts, lows), torch.searchsorted(cuts, highs)], -1)


@functools.cache
def brute_force(name, dtypes: tuple, numbers: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest result of a row for every choice of intervals from the operands' grids, from all values in them.

    numbers  per operand None, or a number that takes its place

    Results are torch's own; where integers are divided by 0 they are anything.
    """
    literals = {i: n for i, n in enumerate(numbers) if n is not None}
    row = Row(name, tuple(int if i in literals else dtype for i, dtype in enumerate(dtypes)), literals)
    values = [torch.tensor([literals[i]]) if i in literals else every(dtype) for i, dtype in enumerate(dtypes)]
    found = compute(row.node, {f"x{i}": spread(v, i, len(values)) for i, v in enumerate(values)}, [], []).expand([len(v) for v in values])
    least = greatest = found if found.dtype in (torch.bool, torch.float32) else found.long()
    if row.node.op in DIVISIONS and kind(row.node.dtype) == "int":
        by_zero, info = spread(values[1].to(row.node.dtype), 1, 2) == 0, torch.iinfo(row.node.dtype)
        least, greatest = torch.where(by_zero, info.min, least), torch.where(by_zero, info.max, greatest)
    cut = {i: pieces(values[i], grid(dtype)) for i, dtype in enumerate(dtypes) if i not in literals}
    for step in (0, 1):  # pieces first: they are few
        for i, parts in cut.items():
            least, greatest = reduced(least, i, parts[step], True), reduced(greatest, i, parts[step], False)
    return least, greatest


def chosen(dtype: torch.dtype, known: str, number: int | None) -> torch.Tensor:
    """Which intervals of a grid an operand may be in."""
    low, high = grid(dtype).T
    if known == "interval":
        return torch.arange(len(low))
    if known == "unknown":
        return ((low == low.min()) & (high == high.max())).nonzero()[0]
    return (low == high).nonzero()[:, 0] if known == "point" else torch.tensor([0])


def check_every_value(name, dtypes: tuple, how: tuple, number: int | None = None) -> None:
    """Bounds of a row hold for every interval of the grid and every value in it.

    how  what is known of each operand: an "interval", a "point" (its value, when the kernel runs), the "number" itself, or it is "unknown"
    """
    numbers = tuple(number if known == "number" else None for known in how)
    literals = {i: n for i, n in enumerate(numbers) if n is not None}
    row = Row(
        name,
        tuple(int if i in literals else dtype for i, dtype in enumerate(dtypes)),
        literals,
        *(tuple(i for i, known in enumerate(how) if known == what) for what in ("unknown", "point")),
    )
    if row.bounds is None:
        return
    least, greatest = brute_force(name, dtypes, numbers)
    symbols, choices = {}, []
    for i, (dtype, known) in enumerate(zip(dtypes, how, strict=True)):
        choices.append(chosen(dtype, known, number))
        low, high = (spread(ends, i, len(dtypes)) for ends in grid(dtype)[choices[i]].T)
        symbols |= {f"x{i}": low.to(dtype), f"x{i}_lo": low, f"x{i}_hi": high}
        least, greatest = least.index_select(i, choices[i]), greatest.index_select(i, choices[i])
    lo, hi = (compute(end.expr, symbols, [], []) for end in (row.bounds.lo, row.bounds.hi))
    wrong = (~(within(least, lo, hi) & within(greatest, lo, hi))).nonzero()
    if len(wrong):
        spans = [grid(dtype)[choice[at]].tolist() for dtype, choice, at in zip(dtypes, choices, wrong[0], strict=True)]
        pytest.fail(f"{name} of {dtypes}, of which are known {how}, in {spans}, number {number}: {len(wrong)} wrong")


def within(values: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.bool:
        return (values | ~lo) & (~values | hi)
    if not values.dtype.is_floating_point:
        return (values.long() >= lo.long()) & (values.long() <= hi.long())
    anything = ~(lo.isfinite() & hi.isfinite())
    return anything & (values.isnan() | lo.isnan() | hi.isnan()) | (values >= lo) & (values <= hi)
