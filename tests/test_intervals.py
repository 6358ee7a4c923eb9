"""Intervals of mask_mods: bounds of every row of the op table hold, verdicts are never wrong, and sharp for the recipes."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verdicts import SIZE, Judged, Writer, check, random_case

from flexpress import ModError, create_block_mask, mods
from flexpress.codegen.mod.bind import bind
from flexpress.codegen.mod.bounds import BoundsRun, TooLarge, constant
from flexpress.codegen.mod.compute import compute
from flexpress.codegen.mod.current import Run
from flexpress.codegen.mod.dispatch import OPERATIONS
from flexpress.codegen.mod.expr import ExprTable, walk
from flexpress.codegen.mod.index_range import value_range
from flexpress.codegen.mod.intervals import Interval, _IntervalRun, _point, analyse
from flexpress.codegen.mod.nodes import apply
from flexpress.codegen.mod.op import kind
from flexpress.codegen.mod.ops import OPS
from flexpress.codegen.mod.symbols import Sym
from flexpress.codegen.run.masks import BlockGrid
from flexpress.codegen.text.layouts import layouts_of
from flexpress.codegen.text.mod_text import mod_text
from flexpress.codegen.text.snippet import Target
from support.compositions import BOOL_FORMS, FLOAT_FORMS, INT_FORMS, MASK_LEAVES, compositions, mask_captures
from support.devices import DEVICES
from support.evaluate import FLOATS, INTEGERS, make_mod
from support.rows import DIVISIONS, NUMBERS

WITHOUT_RULE = {"pow", "tan"}
NAMES = {
    name: name
    for name in ("b", "h", "q_min", "q_max", "kv_min", "kv_max", *(f"zone{i}_{end}" for i in range(20) for end in ("min", "max")))
}


@pytest.mark.parametrize("name", OPS)
def test_every_row_has_a_rule_or_is_written_by_others(name):
    assert (OPS[name].interval is not None) + (OPS[name].expand is not None) + (name in WITHOUT_RULE) == 1


# Rows


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


OPERANDS = ("interval", "unknown", "point", "number")
NEAR_ENDS = {True: (-128, -1, 0, 1, 3, 8, 127, 300), False: (0, 1, 3, 8, 128, 255, -1, 300)}  # signed or not


def integer_operands(name: str, dtypes: tuple) -> list[tuple]:
    """The kinds of operands from some dtypes that torch accepts: (dtypes,) * arity, a condition first."""
    found = []
    for kinds in itertools.product(*[(torch.bool,) if name == "where" and i == 0 else dtypes for i in range(OPS[name].arity)]):
        try:
            OPS[name].torch(*(torch.ones((), dtype=k) for k in kinds))
        except (TypeError, RuntimeError):
            continue
        found.append(kinds)
    return found


def ways(count: int) -> list[tuple]:
    """What may be known of operands, with a number for one of them at most, and an interval, or nothing known, among the others."""
    return [
        how for how in itertools.product(OPERANDS, repeat=count) if how.count("number") <= (count > 1) and {"interval", "unknown"} & {*how}
    ]


def accepts_number(name: str, dtypes: tuple, how: tuple) -> bool:
    try:
        OPS[name].torch(*(1 if known == "number" else torch.ones((), dtype=dtype) for known, dtype in zip(how, dtypes, strict=True)))
    except (TypeError, RuntimeError):
        return False
    return True


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", [name for name, row in OPS.items() if row.interval])
def test_every_interval_of_8_bits(name):
    """Bounds hold for all values in all intervals of a grid, wrapped around or not; nothing known, one value and numbers included."""
    for dtypes in integer_operands(name, (torch.int8, torch.uint8, torch.bool)):
        mixed = len(set(dtypes[name == "where" :])) > 1
        for how in ways(len(dtypes)):
            if "number" not in how:
                check_every_value(name, dtypes, how)
            elif not mixed and accepts_number(name, dtypes, how) and torch.bool not in dtypes[name == "where" :]:
                for number in NEAR_ENDS[dtypes[-1].is_signed]:
                    check_every_value(name, dtypes, how, number)


@pytest.mark.parametrize("name", [name for name, row in OPS.items() if row.interval])
def test_unknown_operands_of_every_width(name):
    """The same where operands are anything of wider dtypes, or one value of it, or a number at an end."""
    wide = (torch.int16, torch.int32, torch.int64)
    for dtypes in integer_operands(name, INTEGERS):
        if not {*dtypes} & {*wide} or len({*dtypes}) > 1 and not {torch.uint8, torch.bool} & {*dtypes}:
            continue
        for how in [how for how in ways(len(dtypes)) if "interval" not in how]:
            info = torch.iinfo(dtypes[-1])
            if "number" not in how:
                check_every_value(name, dtypes, how)
            elif accepts_number(name, dtypes, how):
                for number in (info.min, -1, 1, 3, info.max):
                    check_every_value(name, dtypes, how, number)


@pytest.mark.parametrize("source", (torch.bool, *INTEGERS), ids=str)
def test_casts_of_every_value(source):
    for target in (torch.bool, *INTEGERS, *FLOATS):
        for how in ("interval", "unknown", "point"):
            check_every_value(target, (source,), (how,))


def within(values: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.bool:
        return (values | ~lo) & (~values | hi)
    if not values.dtype.is_floating_point:
        return (values.long() >= lo.long()) & (values.long() <= hi.long())
    anything = ~(lo.isfinite() & hi.isfinite())
    return anything & (values.isnan() | lo.isnan() | hi.isnan()) | (values >= lo) & (values <= hi)


def legal(name: str) -> list[tuple]:
    """Kinds of operands of a row: dtypes, int and float for literals."""
    found = []
    for kinds in itertools.product((*INTEGERS, torch.float32, torch.float16, torch.bool, int, float), repeat=OPS[name].arity):
        if all(k in NUMBERS for k in kinds) or (name == "where" and kinds[0] is not torch.bool):
            continue
        ones = [k(1) if k in NUMBERS else torch.ones((), dtype=k) for k in kinds]
        try:
            OPS[name].torch(*ones)
        except (TypeError, RuntimeError):
            continue
        found.append(kinds)
    return found


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", [name for name, row in OPS.items() if row.interval])
def test_row(name):
    """Operands of any dtypes with intervals of any kind, extremes, NaN and what overflows included."""
    choices = legal(name)
    alike = [c for c in choices if len(set(c[name == "where" :])) == 1 and c[-1] in (torch.bool, torch.float32)] or choices

    @st.composite
    def cases(draw):
        kinds = draw(st.one_of(st.sampled_from(choices), st.sampled_from(alike)))
        literals, ranges = {}, []
        for i, k in enumerate(kinds):
            dtype = {int: torch.int32, float: torch.float32}.get(k, k)
            ends = draw(spans(dtype))
            if name in DIVISIONS and dtype in (torch.int32, torch.int64):  # the smallest number / -1 ends the process
                ends = [max(end, torch.iinfo(dtype).min + 1) for end in ends]
            if k in NUMBERS or (i and draw(st.integers(0, 5)) == 0):
                literals[i] = ends[0]
                ends = [ends[0], ends[0]]
            ranges.append(ends)
        return kinds, literals, ranges

    @settings(max_examples=60)
    @given(cases(), st.integers(0, 99))
    def run(case, seed):
        kinds, literals, ranges = case
        row = Row(name, kinds, literals)
        if row.bounds is not None:
            row.check(ranges, seed)

    run()


@pytest.mark.parametrize("source", (torch.int64, *FLOATS), ids=str)
def test_casts(source):
    @settings(max_examples=150)
    @given(st.sampled_from((torch.bool, *INTEGERS, *FLOATS)), spans(source), st.integers(0, 99))
    def run(target, ends, seed):
        Row(target, (source,), {}).check([ends], seed)

    run()


# Masks

SIZES = st.lists(st.integers(1, 24), min_size=1, max_size=3)
BLOCKS = st.tuples(*2 * [st.builds(lambda first, sizes: [*itertools.accumulate(sizes, initial=first)], st.integers(0, 50), SIZES)])


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
def test_random_masks():
    """Sure verdicts are right, for compositions of all rows, and there are many."""
    counts = [0, 0]

    def run(expression, captured, blocks):
        found, sure = check(expression, captured, *blocks)
        counts[0] += found
        counts[1] += sure

    depths = st.integers(1, 4).flatmap(lambda depth: compositions("b", depth, MASK_LEAVES))
    settings(max_examples=300)(given(depths, mask_captures(), BLOCKS)(run))()
    assert counts[0] / counts[1] > 0.4, counts


@pytest.mark.parametrize("seed", range(8))
def test_masks_that_gather_and_wrap_around(seed):
    """Random masks of tests/verdicts.py: gathers by one axis and by both, arithmetic on both sides, numbers at the ends of every dtype."""
    counts = [found for found in (check(*random_case(1000 * seed + number)) for number in range(60)) if found]
    assert len(counts) > 50 and sum(found for found, _ in counts) > 0.3 * sum(sure for _, sure in counts)


LISTED = (
    "{x} - 1 == 0",
    "(~{x}) + 7 != 0",
    "{x} + 1 <= 4",
    "{x} + 1 != 3",
    "-{x} > -4",
    "{x} * 2 == 4",
    "1 - {x} > 0",
    "abs({x} - 1) < 2",
    "({x} + 1) % 2 == 0",
    "{x} + 1 > 10",
    "({x} << (kv_idx & 3)) + 1 > 2",
    "({x} ** kv_idx) + 1 > 2",
    "({x} + 1) // 2 < 2",
    "{x} - n > n",
    "(n << {x}) - 1 > 2",
    "torch.minimum({x}, {x} - 1) < {x}",
    "abs(-{x} - 1) > 0",
    "({x} + 1).to(torch.int8) > 3",
    "torch.where({x} > 2, {x} + 1, 1 - {x}) >= 0",
    "({x} - 1 > {x}) | ({x} + 1 < {x})",
    "(({x} >> 1) + 1) * 3 > 5",
    "torch.fmod({x} - 1, 3) > -1",
    "torch.sign({x} - 1) + 1 > 0",
)


@pytest.mark.parametrize("form", LISTED)
def test_arithmetic_on_what_is_not_known(form):
    """Bounds of what nothing is known of are the ends of its dtype: arithmetic on them must not wrap around."""
    generator = torch.Generator().manual_seed(0)
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        near = torch.randint(0, 5, (40, 40), generator=generator).to(dtype)
        ends = torch.tensor([info.min, info.min + 1, info.max - 1, info.max, 0, 1, 2], dtype=dtype)
        for T in (near, ends[torch.randint(7, (40, 40), generator=generator)], torch.full((40, 40), info.max, dtype=dtype)):
            for x in ("T[q_idx, kv_idx]", "V[q_idx + kv_idx]", "(q_idx << (V[q_idx + kv_idx] & 3))", "(q_idx ** V[kv_idx - q_idx])"):
                check(form.format(x=x), {"T": T, "V": T.flatten(), "n": 100}, [0, 7, 8, 20], [0, 8, 16, 20])


@pytest.mark.parametrize(
    "expression",
    [
        "q_idx.half() < 3e9",
        "torch.isfinite(q_idx.half())",
        "s[q_idx + kv_idx].bfloat16() < 32768",
        "torch.minimum(s[q_idx + kv_idx].float(), x) < 0.1000000005",
        "(l[q_idx + kv_idx].float() - 1 < 2147483647)",
        "(q_idx.float() + 0.5 > q_idx)",
        "f[q_idx + kv_idx].int() - 1 < 0",
        "(f[q_idx, ] * 1).bool()",
        "f[q_idx + kv_idx] < math.inf",
        "f[q_idx + kv_idx] - f[q_idx + kv_idx] == 0",
        "f[kv_idx] * 0 == 0",
        "~(f[q_idx + kv_idx] <= f[kv_idx])",
        "f[h] <= torch.where(q_idx >= 0, math.inf, 0.0)",
        "u[q_idx + kv_idx] > -1",
        "u[q_idx + kv_idx] < 256",
        "u[q_idx + kv_idx] - 1 > 3",
        "-u[q_idx + kv_idx] > 3",
        "u[q_idx + kv_idx] // 300 == 0",
        "s[q_idx + kv_idx] < 40000",
        "(q_idx % 100).to(torch.int8) % 200 >= 0",
        "q_idx // 2**31 >= 0",
        "q_idx.to(torch.int8) >= 0",
        "torch.full_like(kv_idx, 2**40, dtype=torch.int64) // (kv_idx % 1000 + 2**20) > 9",
    ],
)
@pytest.mark.parametrize("first", [0, 65500, 2**24 - 9, 2**31 - 21])
def test_roundings_and_narrow_dtypes(expression, first):
    """Infinities after a cast, floats next to their literals, Python's numbers beyond a tensor's dtype, NaN."""
    floats = torch.tensor([math.nan, math.inf, -math.inf, 3e38, 0.0, 1.5, -2.0, 1e-40])
    captured = {
        "s": torch.full((40,), 32767, dtype=torch.int16),
        "l": torch.full((40,), 2**31 - 1),
        "f": floats.repeat(5),
        "x": 0.1,
        "u": torch.arange(236, 276).to(torch.uint8),
    }
    check(expression, captured, [first, first + 7, first + 8, first + 20], [0, 8, 16, 20])


@pytest.mark.parametrize("device", DEVICES)
def test_zones_hold_the_least_and_greatest_value(device):
    """Zone maps of every dtype, at its ends, with NaN and infinities; and masks on them are as torch has them."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16, torch.float32):
        if dtype.is_floating_point:
            ends = torch.tensor([math.nan, math.inf, -math.inf, 65504.0, 0.0, -1.0])
        else:
            ends = torch.tensor(corners(dtype), dtype=dtype)[[0, 1, -2, -1]]
        x = torch.where(torch.arange(40) < 20, ends[torch.randint(len(ends), (40,), generator=generator)], ends[-1]).to(dtype).to(device)
        mod = make_mod("x[q_idx] == x[kv_idx]", "mask", {"x": x})
        grid = BlockGrid(bind(mod, "mask"), (1, 1, 40, 40), x.device, (8, 8))
        maps = [tensor for name, tensor in grid.values.items() if name.startswith("zone")]
        assert len(maps) == 4
        parts = x.reshape(5, 8).float() if dtype.is_floating_point else x.reshape(5, 8).long()
        low, high = parts.amin(1), parts.amax(1)
        if dtype.is_floating_point:
            low, high = torch.where(low.isnan(), -math.inf, low), torch.where(high.isnan(), math.inf, high)
        for found, expected in zip(maps, (low, high, low, high), strict=True):
            assert (found[0, 0].to(expected.dtype) == expected).all(), dtype
        block_mask = create_block_mask(mod, None, None, 40, 40, device=device, BLOCK_SIZE=8)
        blocks = (x[:, None] == x).reshape(5, 8, 5, 8).transpose(1, 2).flatten(2)
        assert (dense_blocks(block_mask) == blocks.any(2).int() + blocks.all(2).int()).all(), dtype


def dense_blocks(block_mask) -> torch.Tensor:
    """0, 1 or 2 of the blocks of a mask of one batch entry and head."""
    found = torch.zeros(
        block_mask.kv_num_blocks.shape[-1],
        -(-block_mask.shape[-1] // block_mask.BLOCK_SIZE[1]),
        dtype=torch.int32,
        device=block_mask.kv_num_blocks.device,
    )
    partial, full = (block_mask.kv_num_blocks, block_mask.kv_indices), (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    for value, (counts, indices) in ((1, partial), (2, full)):
        for row, count in enumerate(counts[0, 0].tolist()):
            found[row, indices[0, 0, row, :count].long()] = value
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_masks_that_gather_by_both_axes(device):
    """In kernels, where the interpreter or a GPU computes the bounds: the listed forms on a table."""
    T = torch.randint(0, 5, (128, 128), generator=torch.Generator().manual_seed(0)).to(device)
    T = torch.where(torch.arange(128, device=device)[:, None] < 64, T, 2)
    for dtype, forms in ((torch.int32, LISTED if device == "cuda" else LISTED[:6]), (torch.int64, LISTED[6:9]), (torch.uint8, LISTED[:2])):
        table = T.to(dtype)
        for form in forms:
            expression = form.format(x="T[q_idx, kv_idx]")
            mod = make_mod(expression, "mask", {"T": table, "n": 100})
            block_mask = create_block_mask(mod, None, None, 128, 128, device=device, BLOCK_SIZE=32)
            kv_idx = torch.arange(128, dtype=torch.int32, device=device)
            dense = eval(expression, {"torch": torch, "T": table, "n": 100, "q_idx": kv_idx[:, None], "kv_idx": kv_idx})
            blocks = dense.reshape(4, 32, 4, 32).transpose(1, 2).flatten(2)
            assert (dense_blocks(block_mask) == blocks.any(2).int() + blocks.all(2).int()).all(), (expression, dtype)


@pytest.mark.parametrize("form", sorted({*BOOL_FORMS, *(f"({f}) < 3" for f in INT_FORMS), *(f"({f}) < 1.5" for f in FLOAT_FORMS)}))
def test_forms(form):
    """The same, each form on leaves alone."""

    def run(choice, captured, blocks):
        expression = form
        for k in "fiba":
            while f"{{{k}}}" in expression:
                expression = expression.replace(f"{{{k}}}", choice.choice(MASK_LEAVES[k]), 1)
        check(expression, captured, *blocks)

    settings(max_examples=12)(given(st.randoms(use_true_random=False), mask_captures(), BLOCKS)(run))()


def test_large_captured_ints():
    """A captured int beyond int32 is compared as it is, and wraps around in arithmetic as in torch."""
    for n in (5, 2**31 - 1, 2**31, -(2**40)):
        assert verdict_of(lambda b, h, q_idx, kv_idx, n=n: q_idx - kv_idx < n) == (2 * (n > 0),) * 2
        wrapped = (n + 2**31) % 2**32 - 2**31
        assert verdict_of(lambda b, h, q_idx, kv_idx, n=n: kv_idx < h + n) == (2 * (wrapped > 0),) * 2


def verdict_of(mod) -> tuple[int, int]:
    """(verdict, truth) of the first 4 x 4 positions."""
    return tuple(int(found[0, 0]) for found in Judged.of(mod).blocks([0, 4], [0, 4]))


@pytest.mark.parametrize("name", sorted(name for name, row in OPS.items() if row.decided or (row.integers and not row.chooses)))
def test_ranges_of_integers_hold_every_value(name):
    """Of small ranges, exhaustively: what an operation may give lies in its range, and a comparison that is decided has that outcome."""
    ranges = [(low, high) for low in range(-4, 5) for high in range(low, 5)]
    count = 1 if name in ("neg", "abs", "sign", "invert") else 2
    compute = OPS[name].integers.compute if OPS[name].integers else getattr(operator, name)
    divides = name in ("floor_divide", "div_trunc", "remainder", "fmod")
    for operands in itertools.product(ranges, repeat=count):
        found = {
            compute(*values)
            for values in itertools.product(*(range(low, high + 1) for low, high in operands))
            if not (divides and values[1] == 0)
        }
        if OPS[name].decided:
            always, never = OPS[name].decided(*itertools.chain(*operands))
            assert (not always or found == {True}) and (not never or found == {False}), operands
        elif found:
            low, high = OPS[name].integers.range(*operands)
            assert low <= min(found) and max(found) <= high, operands


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q_idx, kv_idx: kv_idx >= torch.sqrt(h * 1.0),  # no axis: not read as a number
        lambda b, h, q_idx, kv_idx: TWOS[kv_idx] * 1.5 >= q_idx,  # read along an axis: measured
    ],
    ids=["point", "zone"],
)
def test_rounded_numbers_leave_room_for_other_roundings(mod):
    """Another kernel may round otherwise: where the last bit decides, nothing is sure."""
    assert verdict_of(mod) == (1, 2)


TWOS = torch.full((4,), 2.0)


@pytest.mark.parametrize("seed", range(4))
def test_value_ranges_hold(seed):
    """What lowering knows of integers, from the largest indices of a call: every node of random expressions is inside."""
    known = 0
    for number in range(60):
        rng = random.Random(1000 * seed + number)
        writer = Writer(rng)
        expression = f"({writer.integer(3)}) > 0"
        try:
            judged = Judged.of(make_mod(expression, "mask", writer.captured))
        except (ModError, RuntimeError, TypeError):
            continue
        positions = {
            name: torch.arange(SIZE, dtype=torch.int32).reshape([-1 if i == axis else 1 for i in range(4)])
            for axis, name in enumerate(("b", "h", "q_idx", "kv_idx"))
        }
        run = BoundsRun("mask", ExprTable(), OPERATIONS)
        for node in walk(judged.graph.result):
            if not node.weak and kind(node.dtype) == "int":
                values, (low, high) = judged.value(node, positions).long(), run.range_of(node)
                assert low <= values.min() and values.max() <= high, (expression, writer.captured, node.op, low, high)
            low, high = value_range(node, dict.fromkeys(positions, SIZE - 1), tuple(judged.scalars))
            if not node.weak and kind(node.dtype) == "int" and -math.inf < low:
                known += node.op not in ("symbol", "literal")
                values = judged.value(node, positions).long()
                assert low <= values.min() and values.max() <= high, (expression, writer.captured, node.op, low, high)
    assert known > 20


def test_integer_bounds_are_as_wide_as_they_must_be():
    """int32 where that holds the operands, the result and the quotient of a remainder, else int64, else none."""
    run = BoundsRun("mask", ExprTable(), OPERATIONS)
    with run.active():
        q, x, wide = (
            Sym(run.table.make("symbol", (), dtype, attr=name))
            for name, dtype in (("q_idx", torch.int32), ("x", torch.int32), ("wide", torch.int64))
        )
        for made, dtype in (
            (q + 1, torch.int32),
            (q * 2, torch.int64),
            (q - q - 1, torch.int32),
            (x + 1, torch.int64),
            (-x, torch.int64),
            (~x, torch.int32),
            (abs(x), torch.int64),
            (x % (q - 1), torch.int64),
            (x % (q + 1), torch.int32),
            (torch.fmod(x, x), torch.int64),
            (x // (q + 1), torch.int32),
            (2**40 // (q % 1000 + 2**20), torch.int64),
        ):
            assert made.dtype == dtype, made.expr.op
        assert (constant(2**31 - 1) + 1).expr.attr == 2**31 and (-constant(-(2**31))).expr.attr == 2**31
        ends = constant(-(2**63)), constant(2**63 - 1)
        for beyond in (lambda: wide + 1, lambda: -wide, lambda: wide * wide, lambda: ends[1] + 1, lambda: abs(ends[0])):
            with pytest.raises(TooLarge):
                beyond()
        divided = run.table.make("floor_divide", (q.expr, (q - 1).expr), torch.int32)  # the mask's own, perhaps by 0
        assert run.range_of(divided) == (-(2**31), 2**31 - 1)


def test_value_range_of_shared_operands():
    """x * x * ... by squaring: every node is looked at once."""
    assert value_range(bind(make_mod("q_idx ** 2**40 > 0", "mask", {}), "mask")[0].result.args[0]) == (-math.inf, math.inf)


@pytest.mark.parametrize("n", [2**63, -(2**63) - 1, 10**400])
def test_an_int_beyond_64_bits_is_refused(n):
    with pytest.raises(ModError, match="does not fit into 64 bits"):
        bind(lambda b, h, q_idx, kv_idx: q_idx < n, "mask")


# Recipes: every empty and every full block is found


def documents(sorted_ids: bool) -> torch.Tensor:
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([40, 8, 48, 96, 64]))
    return ids if sorted_ids else ids[torch.randperm(256, generator=torch.Generator().manual_seed(0))]


RECIPES = {  # mask, empty blocks, full blocks, of 256 of 16 x 16
    "causal": (mods.causal, 120, 120),
    "causal_offset": (mods.causal_offset(32), 91, 151),
    "sliding_window": (mods.sliding_window(64), 186, 42),
    "bidirectional": (mods.sliding_window_bidirectional(48, 31), 169, 60),
    "prefix_lm": (mods.prefix_lm(70), 110, 130),
    "prefix_lm_batch": (mods.prefix_lm(torch.tensor([70, 3])), 110, 130),
    "global_sliding": (mods.global_sliding(40, 16), 132, 74),
    "dilated_window": (mods.dilated_window(16, 4), 186, 0),
    "dilated_every": (mods.dilated_window(64, 1), 186, 42),
    "document": (mods.document(documents(True)), 186, 65),
    "document_causal": (mods.document(documents(True), mods.causal), 213, 25),
    "document_shuffled": (mods.document(documents(False)), 0, 0),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    mod, empty, full = RECIPES[name]
    judged = Judged.of(mod)
    verdict, truth = (found[0, 0] for found in judged.blocks(*[list(range(0, 257, 16))] * 2))
    for sure, count in ((0, empty), (2, full)):
        assert ((verdict == sure) & (truth == sure)).sum() == count  # found
        assert (truth == sure).sum() == count  # all there are
    assert judged.analysis.by_rules


@pytest.mark.parametrize(
    "expression, by_rules",
    [
        ("table[q_idx, kv_idx] > 0", False),
        ("torch.tan(q_idx * 0.1) > kv_idx", False),
        ("table[q_idx, h] > 0", True),
        ("(q_idx >= kv_idx) & (table[h, q_idx - kv_idx] > 0)", False),
        ("torch.tan(h * 0.1) > kv_idx", False),
        ("q_idx ** 2 > kv_idx", True),
    ],
)
def test_by_rules(expression, by_rules):
    assert analyse(bind(make_mod(expression, "mask", {"table": torch.zeros(8, 8)}), "mask")[0]).by_rules == by_rules


@pytest.mark.parametrize(
    "expression, axis, count",
    [
        ("table[q_idx, h] * 3 + table[b, q_idx] > 2", ["q_idx"], 1),
        ("ids[ids[kv_idx]] < q_idx", ["kv_idx"], 1),
        ("ids[q_idx] == ids[kv_idx]", ["q_idx", "kv_idx"], 2),
        ("kv_idx < ids[b]", [], 0),
        ("q_idx * 2 < kv_idx", [], 0),
    ],
)
def test_zones_are_as_large_as_can_be(expression, axis, count):
    zones = analyse(bind(make_mod(expression, "mask", {"table": torch.zeros(8, 8), "ids": torch.arange(8)}), "mask")[0]).zones
    assert [zone.axis for zone in zones] == axis and len(zones) == count


@pytest.mark.parametrize(
    "expression, dtype",
    [
        ("f[q_idx] > 0.5", torch.bool),
        ("f[q_idx].int() == kv_idx", torch.int32),
        ("torch.tanh(f[q_idx]) > 0.5", torch.float32),
        ("(f[q_idx] * 3).int() == kv_idx", torch.float32),
        ("torch.floor(f[q_idx] * 3) > kv_idx", torch.float32),
        ("(f[q_idx] * 3).half() > kv_idx", torch.float32),
        ("t[(f[q_idx] * 3).int()] > kv_idx", None),
        ("torch.floor(f[q_idx]) > kv_idx", torch.float32),
    ],
)
def test_zones_leave_room_for_roundings(expression, dtype):
    """What a rounded float is compared with, converted to or an index of may be another number in another kernel: it is not measured."""
    zones = analyse(bind(make_mod(expression, "mask", {"f": torch.zeros(8), "t": torch.arange(8)}), "mask")[0]).zones
    assert [zone.graph.result.dtype for zone in zones] == ([dtype] if dtype else [])


# Printed


def printed(mod) -> tuple[str, ...]:
    graph, captured = bind(mod, "mask")
    verdict = analyse(graph).verdict
    text = mod_text(verdict, layouts_of(verdict, captured, (2, 2, 64, 64)), NAMES, Target("cuda", "float32"), tile="[1, 1]")
    return tuple(line for line in text.lines if not line.startswith("#"))


def test_causal_is_short():
    assert printed(mods.causal) == ("verdict_0 = (q_max >= kv_min).to(tl.int32) + (q_min >= kv_max).to(tl.int32)",)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_print(name):
    lines = printed(RECIPES[name][0])
    assert len(lines) < 20
    if name in ("causal", "sliding_window", "bidirectional", "prefix_lm", "global_sliding"):
        assert "int64" not in "".join(lines)
