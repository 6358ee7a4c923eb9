"""Intervals of mask_mods: verdicts are never wrong, and sharp for the recipes. Of single rows: test_interval_rules.py."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verdicts import Judged, check, random_case

from flexpress import create_block_mask, mods
from flexpress.codegen.mod.graphs.intervals import analyse
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.block_grid import BlockGrid
from flexpress.codegen.text.layouts import layouts_of
from flexpress.codegen.text.mod_text import mod_text
from flexpress.codegen.text.snippet import Target
from support.compositions import BOOL_FORMS, FLOAT_FORMS, INT_FORMS, MASK_LEAVES, compositions, mask_captures
from support.devices import DEVICES
from support.evaluate import INTEGERS, make_mod
from support.row_bounds import corners

NAMES = {
    name: name
    for name in ("b", "h", "q_min", "q_max", "kv_min", "kv_max", *(f"zone{i}_{end}" for i in range(20) for end in ("min", "max")))
}


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
    settings(max_examples=140)(given(depths, mask_captures(), BLOCKS)(run))()
    assert counts[0] / counts[1] > 0.4, counts


@pytest.mark.parametrize("seed", range(5))
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
    """In kernels, which compute the bounds: the listed forms on a table."""
    T = torch.randint(0, 5, (128, 128), generator=torch.Generator().manual_seed(0)).to(device)
    T = torch.where(torch.arange(128, device=device)[:, None] < 64, T, 2)
    for dtype, forms in ((torch.int32, LISTED), (torch.int64, LISTED[6:9]), (torch.uint8, LISTED[:2])):
        table = T.to(dtype)
        for form in forms:
            expression = form.format(x="T[q_idx, kv_idx]")
            mod = make_mod(expression, "mask", {"T": table, "n": 100})
            block_mask = create_block_mask(mod, None, None, 128, 128, device=device, BLOCK_SIZE=32)
            kv_idx = torch.arange(128, device=device)
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

    settings(max_examples=8)(given(st.randoms(use_true_random=False), mask_captures(), BLOCKS)(run))()


def test_large_captured_ints():
    """A captured int beyond int32 is compared as it is, and wraps around in arithmetic as in torch."""
    for n in (5, 2**31 - 1, 2**31, -(2**40)):
        assert verdict_of(lambda b, h, q_idx, kv_idx, n=n: q_idx - kv_idx < n) == (2 * (n > 0),) * 2
        wrapped = (n + 2**31) % 2**32 - 2**31
        assert verdict_of(lambda b, h, q_idx, kv_idx, n=n: kv_idx < h + n) == (2 * (wrapped > 0),) * 2


def test_squares_of_what_may_be_0():
    assert verdict_of(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) ** 2 < 3) == (1, 1)
    assert verdict_of(lambda b, h, q_idx, kv_idx: (q_idx * 0.5 - kv_idx) ** 2 < 1) == (1, 1)


def verdict_of(mod) -> tuple[int, int]:
    """(verdict, truth) of the first 4 x 4 positions."""
    return tuple(int(found[0, 0]) for found in Judged.of(mod).blocks([0, 4], [0, 4]))


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
