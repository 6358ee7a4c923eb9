"""Intervals of mask_mods: bounds of every row of the op table hold, verdicts are never wrong, and sharp for the recipes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from evaluate import FLOATS, INTEGERS, make_mod
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import BOOL_FORMS, DIVISIONS, FLOAT_FORMS, INT_FORMS, NUMBERS, compositions
from verdicts import Judged, check, random_case

from flexpress import ModError, mods
from flexpress.codegen.dispatch import apply
from flexpress.codegen.expr import Expr, ExprTable, walk
from flexpress.codegen.host import compute
from flexpress.codegen.intervals import Interval, _IntervalRun, _point, analyse
from flexpress.codegen.ops import OPS, kind
from flexpress.codegen.signature import bind
from flexpress.codegen.snippet import Target
from flexpress.codegen.spec import layouts_of, mod_text
from flexpress.codegen.symbols import Run, Sym

WITHOUT_RULE = {"pow", "tan"}
NAMES = {name: name for name in ("b", "h", "q_min", "q_max", "kv_min", "kv_max",
                                 *(f"zone{i}_{end}" for i in range(20) for end in ("min", "max")))}


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
    """One row on operands that are leaves: symbols of a dtype in an interval, or literals."""

    def __init__(self, name: str, dtypes: tuple, literals: dict) -> None:
        self.run = _IntervalRun("mask", ExprTable())
        make = self.run.table.make
        with Run("mask", self.run.table).active():
            self.leaves = [make("literal", (), torch.int64 if d is int else torch.float32 if d is float else d, attr=literals[i],
                                weak=d in NUMBERS) if i in literals else make("symbol", (), d, attr=f"x{i}") for i, d in enumerate(dtypes)]
            self.node = (Sym(make("cast", (self.leaves[0],), name)).expr if isinstance(name, torch.dtype)
                         else apply(OPS[name], tuple(map(Sym, self.leaves)), {}).expr)
        with self.run.active():
            self.bounds = None if self.node.is_literal else self.bounded()

    def bounded(self) -> Interval:
        ends = {}
        for leaf in walk(self.node):
            if leaf.op == "symbol":
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
        assert within(results, lo, hi).all(), (self.node.op, [str(n.dtype) for n in self.leaves], [n.attr for n in self.leaves],
                                               spans, lo.item(), hi.item(), results[~within(results, lo, hi)][0].item())


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
    alike = [c for c in choices if len(set(c[name == "where":])) == 1 and c[-1] in (torch.bool, torch.float32)] or choices

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

    @settings(max_examples=150)
    @given(cases(), st.integers(0, 99))
    def run(case, seed):
        kinds, literals, ranges = case
        row = Row(name, kinds, literals)
        if row.bounds is not None:
            row.check(ranges, seed)

    run()


@pytest.mark.parametrize("source", (torch.bool, *INTEGERS, *FLOATS), ids=str)
def test_casts(source):
    @settings(max_examples=150)
    @given(st.sampled_from((torch.bool, *INTEGERS, *FLOATS)), spans(source), st.integers(0, 99))
    def run(target, ends, seed):
        Row(target, (source,), {}).check([ends], seed)

    run()


# Masks

LEAVES = {"f": ("floats[kv_idx]", "floats[q_idx]", "(q_idx * 0.5)", "(h * x)", "table[q_idx, kv_idx]", "floats[h]", "kv_idx.float()"),
          "i": ("q_idx", "kv_idx", "q_idx", "kv_idx", "h", "b", "ints[q_idx]", "(kv_idx - q_idx)", "(q_idx - kv_idx)", "ids[kv_idx]",
                "ids[q_idx - 7]", "(h + n)", "(q_idx + n)", "(b - big)", "grid[q_idx, h]", "grid[b, kv_idx]", "ids[n - kv_idx]"),
          "b": ("(q_idx >= kv_idx)", "flags[kv_idx]", "(kv_idx > n)", "(q_idx - kv_idx < n)", "(ids[q_idx] == ids[kv_idx])",
                "flags[q_idx // 2]", "(kv_idx < ids[b])"),
          "a": ("x", "2", "0.5", "n", "q_idx", "kv_idx", "big")}


@st.composite
def environments(draw) -> dict:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    integer = draw(st.sampled_from(INTEGERS))
    spread = draw(st.sampled_from((1, 5, 40, 2**31 - 1)))
    limits = torch.iinfo(integer)
    floats = torch.randn(40, generator=generator) * draw(st.sampled_from((1.0, 50.0)))
    if draw(st.integers(0, 4)) == 0:
        floats[draw(st.integers(0, 39))] = draw(st.sampled_from((math.nan, math.inf, -math.inf, 3e38)))
    return {"floats": floats.to(draw(st.sampled_from(FLOATS))),
            "flags": torch.rand(30, generator=generator) < draw(st.sampled_from((0.1, 0.9))),
            "ints": torch.randint(max(-spread, limits.min), min(spread, limits.max), (50,), generator=generator).to(integer),
            "ids": torch.randint(0, 4, (60,), generator=generator).sort().values, "table": torch.randn(64, 64, generator=generator),
            "grid": torch.randint(-9, 9, (64, 64), generator=generator), "x": draw(st.sampled_from((0.5, -1.25, 3.0))),
            "n": draw(st.sampled_from((0, 1, 5, 17, 40, -3, 2**31 - 1, -2**31, 2**31, 2**40))),
            "big": draw(st.sampled_from((2**31 - 1, -2**31, 2**30, 100, 2**33))), "on": draw(st.booleans())}


BLOCKS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 24), st.integers(0, 50), st.integers(1, 24)), min_size=3, max_size=3)


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
def test_random_masks():
    """Sure verdicts are right, for compositions of all rows, and there are many."""
    counts = [0, 0]

    def run(expression, captured, blocks):
        found = [check(expression, captured, [q, q + queries], [kv, kv + keys]) for q, queries, kv, keys in blocks]
        counts[0] += sum(sure for sure, _ in found)
        counts[1] += sum(sure for _, sure in found)

    depths = st.integers(1, 4).flatmap(lambda depth: compositions("b", depth, LEAVES))
    settings(max_examples=500)(given(depths, environments(), BLOCKS)(run))()
    assert counts[0] / counts[1] > 0.4, counts


@pytest.mark.parametrize("form", sorted({*BOOL_FORMS, *(f"({f}) < 3" for f in INT_FORMS), *(f"({f}) < 1.5" for f in FLOAT_FORMS)}))
def test_forms(form):
    """The same, each form on leaves alone."""
    def run(choice, captured, blocks):
        expression = form
        for k in "fiba":
            while f"{{{k}}}" in expression:
                expression = expression.replace(f"{{{k}}}", choice.choice(LEAVES[k]), 1)
        for q, queries, kv, keys in blocks:
            check(expression, captured, [q, q + queries], [kv, kv + keys])

    settings(max_examples=12)(given(st.randoms(use_true_random=False), environments(), BLOCKS)(run))()


def test_large_captured_ints():
    """A captured int beyond int32 is compared as it is, and wraps around in arithmetic as in torch."""
    for n in (5, 2**31 - 1, 2**31, -2**40):
        assert verdict_of(lambda b, h, q_idx, kv_idx, n=n: q_idx - kv_idx < n) == (2 * (n > 0),) * 2
        wrapped = (n + 2**31) % 2**32 - 2**31
        assert verdict_of(lambda b, h, q_idx, kv_idx, n=n: kv_idx < h + n) == (2 * (wrapped > 0),) * 2


def verdict_of(mod) -> tuple[int, int]:
    """(verdict, truth) of the first 4 x 4 positions."""
    return tuple(int(found[0, 0]) for found in Judged.of(mod).blocks([0, 4], [0, 4]))


@pytest.mark.parametrize("n", [2**63, -2**63 - 1, 10**400])
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


@pytest.mark.parametrize("expression, by_rules", [
    ("table[q_idx, kv_idx] > 0", False), ("torch.tan(q_idx * 0.1) > kv_idx", False), ("table[q_idx, h] > 0", True),
    ("(q_idx >= kv_idx) & (table[h, q_idx - kv_idx] > 0)", False), ("torch.tan(h * 0.1) > kv_idx", False), ("q_idx ** 2 > kv_idx", True)])
def test_by_rules(expression, by_rules):
    assert analyse(bind(make_mod(expression, "mask", {"table": torch.zeros(8, 8)}), "mask")[0]).by_rules == by_rules


@pytest.mark.parametrize("expression, axis, count", [
    ("table[q_idx, h] * 3 + table[b, q_idx] > 2", ["q_idx"], 1), ("ids[ids[kv_idx]] < q_idx", ["kv_idx"], 1),
    ("ids[q_idx] == ids[kv_idx]", ["q_idx", "kv_idx"], 2), ("kv_idx < ids[b]", [], 0), ("q_idx * 2 < kv_idx", [], 0)])
def test_zones_are_as_large_as_can_be(expression, axis, count):
    zones = analyse(bind(make_mod(expression, "mask", {"table": torch.zeros(8, 8), "ids": torch.arange(8)}), "mask")[0]).zones
    assert [zone.axis for zone in zones] == axis and len(zones) == count


# Printed

def printed(mod) -> tuple[str, ...]:
    graph, captured = bind(mod, "mask")
    verdict = analyse(graph).verdict
    text = mod_text(verdict, layouts_of(verdict, captured, (2, 2, 64, 64)), NAMES, Target("cuda", "float32"), shape="[1, 1]")
    return tuple(line for line in text.lines if not line.startswith("#"))


def test_causal_is_short():
    assert printed(mods.causal) == ("verdict_0 = (q_max >= kv_min).to(tl.int32) + (q_min >= kv_max).to(tl.int32)",)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_print(name):
    lines = printed(RECIPES[name][0])
    assert len(lines) < 20
    if name in ("causal", "sliding_window", "bidirectional", "prefix_lm", "global_sliding"):
        assert "int64" not in "".join(lines)
