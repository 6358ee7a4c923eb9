"""Masks whose comparisons with a position become one: the same pairs, whatever the numbers are."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress import flex_attention, mods
from flexpress.codegen.mod.expr import walk
from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.graphs.position_runs import POSITIONS_END, as_run
from flexpress.codegen.mod.tracing.bind import bind
from support.dense import dense_attention
from support.devices import DEVICES

Q_LEN, KV_LEN = 9, 11
NUMBERS = st.one_of(st.integers(-12, 12), st.sampled_from([-(2**31), 2**31 - 1, -(2**28) - 1, 2**28 + 1]))
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@st.composite
def comparisons(draw):
    """A comparison of positions, with numbers that are captured, elements of tensors or written in the mod."""
    compare, number, flipped = draw(st.sampled_from(COMPARISONS)), draw(NUMBERS), draw(st.booleans())
    dtype = draw(st.sampled_from([torch.int8, torch.int16, torch.int32, torch.int64]))
    numbers = NUMBERS if dtype in (torch.int32, torch.int64) else st.integers(-12, 12)
    row = torch.tensor([draw(numbers) for _ in range(Q_LEN)], dtype=dtype)
    left = draw(
        st.sampled_from(
            [
                lambda q, k: k,
                lambda q, k: q - k,
                lambda q, k: k - q,
                lambda q, k: (q - k).abs(),
                lambda q, k: k - 3,
                lambda q, k: k + q,
                lambda q, k: 2 - k,
                lambda q, k: k // 2,
            ]
        )
    )
    right = draw(
        st.sampled_from([lambda b, h, q: number, lambda b, h, q: row[q], lambda b, h, q: q, lambda b, h, q: q + 2, lambda b, h, q: h + 1])
    )
    if flipped:
        return lambda b, h, q, k: compare(right(b, h, q), left(q, k))
    return lambda b, h, q, k: compare(left(q, k), right(b, h, q))


@st.composite
def masks(draw):
    parts = draw(st.lists(comparisons(), min_size=1, max_size=4))

    def mask(b, h, q_idx, kv_idx):
        shown = parts[0](b, h, q_idx, kv_idx)
        for part in parts[1:]:
            shown = shown & part(b, h, q_idx, kv_idx)
        return shown

    return mask


def value(graph, captured, end):
    symbols = {"b": torch.tensor(0), "h": torch.tensor(1), POSITIONS_END: torch.tensor(end)}
    symbols |= {"q_idx": torch.arange(Q_LEN)[:, None], "kv_idx": torch.arange(KV_LEN)[None, :]}
    symbols = {name: symbol.int() for name, symbol in symbols.items()}
    tensors = captured[: len(graph.tensors)]
    return compute(graph.result, symbols, tensors, captured[len(graph.tensors) :]).expand(Q_LEN, KV_LEN)


@given(masks(), st.sampled_from(["q_idx", "kv_idx"]), st.booleans(), st.integers(0, 12))
def test_a_run_shows_the_same_pairs(mask, axis, ends, end):
    graph, captured = bind(mask, "mask")[:2]
    run = as_run(graph, axis, ends)
    expected = value(graph, captured, end)
    if POSITIONS_END in run.symbols:
        position = {"q_idx": torch.arange(Q_LEN)[:, None], "kv_idx": torch.arange(KV_LEN)[None, :]}[axis]
        expected = expected & (position < end)
    assert torch.equal(value(run, captured, end), expected)


def compared(mask, axis="kv_idx", ends=False):
    """How many comparisons a run has, and has the mask without it."""
    graph = bind(mask, "mask")[0]
    made = as_run(graph, axis, ends)
    return [sum(n.op in ("lt", "le", "gt", "ge", "eq", "within") for n in walk(g.result)) for g in (made, graph)]


@pytest.mark.parametrize(
    "mask, ends, counts",
    [
        (mods.sliding_window(5), False, [1, 2]),
        (mods.sliding_window_bidirectional(5, 6), True, [1, 2]),
        (mods.causal, False, [1, 1]),
        (lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < 4, False, [1, 1]),
        (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (h != 0) & (kv_idx > 3), False, [1, 2]),
        (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < 3), True, [2, 2]),  # no run
    ],
)
def test_comparisons_of_keys_that_are_left(mask, ends, counts):
    assert compared(mask, ends=ends) == counts


def test_comparisons_of_queries_that_are_left():
    assert compared(mods.sliding_window(5), "q_idx") == [1, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [-(2**31), -1, 0, 1, 20, 2**31 - 1])
def test_windows_of_any_size(device, window):
    length, dtype = (70, torch.float32) if device == "cpu" else (700, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 64, generator=generator, device=device).to(dtype).requires_grad_() for _ in range(3))

    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    expected = dense_attention(q, k, v, mask_mod=mask)[0]
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    for backend in ("PORTABLE",) if device == "cpu" else ("PORTABLE", "HOPPER"):
        out = flex_attention(q, k, v, mask_mod=mask, kernel_options={"BACKEND": backend})
        for found, wanted in zip((out, *torch.autograd.grad(out.sum(), (q, k, v))), (expected, *gradients), strict=True):
            assert (found - wanted).abs().max() <= (1e-5 if device == "cpu" else 2e-2) * max(1.0, wanted.abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_large_numbers_on_both_sides(device):
    """What is added to a position may be as large as what decides without it."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx + (2**28 - 1) <= 2**28 + 100) & (kv_idx >= q_idx - 1000)

    q, v = torch.zeros(1, 1, 256, 16, device=device), torch.eye(256, device=device)[None, None]
    seen = flex_attention(q, q, v, mask_mod=mask_mod)[0, 0] > 0
    positions = torch.arange(256, device=device)
    assert torch.equal(seen, mask_mod(0, 0, positions[:, None], positions[None]))
