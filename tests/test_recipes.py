"""Every recipe against plain Python: its formula written out a second time, in loops over ints.

The left-hand side is what torch itself makes of the recipe (`create_mask`, vmap over the scores, eager
flex_attention), so these tests also hold the recipes to torch's rules for mods. No kernel is printed here.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from flexpress import AuxRequest, mods
from flexpress.codegen.mod.symbolic import vectors
from flexpress.mods import (
    alibi,
    alibi_slopes,
    alibi_symmetric,
    block_causal,
    block_diffusion,
    causal,
    causal_offset,
    compose_scores,
    differential,
    differential_lambda,
    dilated_window,
    disentangled,
    document,
    document_from_offsets,
    forget_gate,
    gaussian_distances,
    global_sliding,
    graph_bias,
    graph_distances,
    graph_neighbors,
    invariant_points,
    jagged_window,
    neighborhood,
    prefix_lm,
    relative_bias,
    sliding_window,
    sliding_window_bidirectional,
    softcap,
    t5_bias,
    t5_bucket,
    tree,
    within_radius,
    yarn_temperature,
)
from support.recipes import SIZES, assert_same_mask, assert_same_scores, dense_mask, dense_scores, values

fast = settings(max_examples=25, deadline=None)


# Masks


def test_causal():
    assert_same_mask(causal, lambda b, i, j: j <= i)


@pytest.mark.parametrize("offset", [-20, -3, 0, 5, 20])
def test_causal_offset(offset):
    assert_same_mask(causal_offset(offset), lambda b, i, j: j in range(i + offset + 1))


@pytest.mark.parametrize("q_len, kv_len", SIZES)
def test_causal_offset_aligns_the_last_query_with_the_last_key(q_len, kv_len):
    mask = dense_mask(causal_offset(kv_len - q_len), q_len, kv_len)
    assert mask[..., -1, :].all()
    ones = np.ones((q_len, kv_len), dtype=bool)
    np.testing.assert_array_equal(mask[0, 0], np.tril(ones, kv_len - q_len))


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_sliding_window(window):
    assert_same_mask(sliding_window(window), lambda b, i, j: j in range(i - window + 1, i + 1))
    keys_seen = dense_mask(sliding_window(window), 13, 13)[0, 0].sum(1)
    np.testing.assert_array_equal(keys_seen, [min(window, i + 1) for i in range(13)])


@pytest.mark.parametrize("left, right", [(0, 0), (3, 0), (0, 2), (4, 1), (50, 50)])
def test_sliding_window_bidirectional(left, right):
    assert_same_mask(sliding_window_bidirectional(left, right), lambda b, i, j: j in range(i - left, i + right + 1))


@fast
@given(st.integers(0, 20), st.integers(1, 16), st.integers(1, 16))
def test_the_two_windows_agree_where_they_overlap(before, q_len, kv_len):
    one_sided = dense_mask(sliding_window(before + 1), q_len, kv_len)
    left_only = dense_mask(sliding_window_bidirectional(before, 0), q_len, kv_len)
    np.testing.assert_array_equal(one_sided, left_only)
    both_sides = dense_mask(global_sliding(before + 1, 0), q_len, kv_len)
    np.testing.assert_array_equal(one_sided, both_sides & dense_mask(causal, q_len, kv_len))


@pytest.mark.parametrize("length", [0, 1, 6, 40])
def test_prefix_lm(length):
    assert_same_mask(prefix_lm(length), lambda b, i, j: j in range(length) or not j > i)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prefix_lm_with_a_length_per_batch_element(dtype):
    lengths = [0, 5]
    rule = lambda b, i, j: j in range(lengths[b]) or not j > i  # noqa: E731
    assert_same_mask(prefix_lm(torch.tensor(lengths, dtype=dtype)), rule)


def test_prefix_lm_sees_new_lengths_written_into_the_tensor():
    lengths = torch.tensor([2, 2])
    mask_mod = prefix_lm(lengths)
    lengths.fill_(4)
    np.testing.assert_array_equal(dense_mask(mask_mod, 6, 6), dense_mask(prefix_lm(4), 6, 6))


@pytest.mark.parametrize("window, dilation", [(1, 1), (4, 1), (1, 5), (3, 2), (4, 3), (50, 2)])
def test_dilated_window(window, dilation):
    assert_same_mask(dilated_window(window, dilation), lambda b, i, j: j in [i - step * dilation for step in range(window)])


@fast
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 24))
def test_dilated_window_sees_window_keys_where_there_are_as_many(window, dilation, length):
    keys_seen = dense_mask(dilated_window(window, dilation), length, length)[0, 0].sum(1)
    np.testing.assert_array_equal(keys_seen, [min(window, i // dilation + 1) for i in range(length)])


@pytest.mark.parametrize("window, num_global", [(1, 0), (1, 2), (3, 0), (3, 1), (2, 50)])
def test_global_sliding(window, num_global):
    def rule(b, i, j):
        return i in range(num_global) or j in range(num_global) or j in range(i - window + 1, i + window)

    assert_same_mask(global_sliding(window, num_global), rule)


# Documents


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("inner", [None, causal, sliding_window(2)])
def test_document(dtype, inner):
    ids = [3, 3, 3, -1, -1, 0, 7, 7, 7, 3]
    rule_of = {None: lambda i, j: True, causal: lambda i, j: j <= i}.get(inner, lambda i, j: j in (i - 1, i))
    assert_same_mask(document(torch.tensor(ids, dtype=dtype), inner), lambda b, i, j: ids[i] == ids[j] and rule_of(i, j), [(10, 10)])


@pytest.mark.parametrize("inner", [None, causal])
def test_document_with_ids_per_batch_element(inner):
    ids = [[0, 0, 0, 1, 1, 2], [5, 4, 4, 4, 4, 4]]
    assert_same_mask(document(torch.tensor(ids), inner), lambda b, i, j: ids[b][i] == ids[b][j] and (inner is None or j <= i), [(6, 6)])


@fast
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.integers(0, 3), st.booleans())
def test_document_from_offsets(lengths, padding, is_causal):
    spans, end = [], 0
    for length in [*lengths, padding]:
        spans.append(range(end, end + length))
        end += length
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    mask_mod = document_from_offsets(offsets, end, causal if is_causal else None)

    def rule(b, i, j):
        return any(i in span and j in span for span in spans) and not (is_causal and j > i)

    assert_same_mask(mask_mod, rule, [(end, end)])
    if not padding:
        left_out = document_from_offsets(offsets, mask_mod=causal if is_causal else None)
        np.testing.assert_array_equal(dense_mask(left_out, end, end), dense_mask(mask_mod, end, end))


def test_document_from_offsets_keeps_its_ids_when_the_offsets_change():
    offsets = torch.tensor([0, 3, 8])
    mask_mod = document_from_offsets(offsets)
    before = dense_mask(mask_mod, 8, 8)
    offsets.zero_()
    np.testing.assert_array_equal(dense_mask(mask_mod, 8, 8), before)


# Scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi(dtype):
    slopes = alibi_slopes(4).to(dtype)  # powers of two: exact in both
    rates = slopes.tolist()
    assert_same_scores(alibi(slopes), lambda score, h, i, j: score + rates[h] * (j - i))
    assert_same_scores(alibi_symmetric(slopes), lambda score, h, i, j: score - rates[h] * abs(i - j))


def slopes_by_recursion(heads):
    """The paper's slopes: each is the one before times the first; what is missing, from twice the heads."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    slopes = [(2.0**-8) ** (1 / power)]
    while len(slopes) < power:
        slopes.append(slopes[-1] * slopes[0])
    return slopes if power == heads else slopes + slopes_by_recursion(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("heads", [*range(1, 20), 32, 40, 71])
def test_alibi_slopes(heads):
    slopes = alibi_slopes(heads, "cpu")
    assert slopes.shape == (heads,) and slopes.dtype == torch.float32
    np.testing.assert_allclose(slopes.numpy(), slopes_by_recursion(heads), rtol=1e-5)


def test_alibi_slopes_of_eight_heads_are_the_papers():
    assert alibi_slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


@pytest.mark.parametrize("cap", [1, 2.5, 50.0, np.float32(3)])
def test_softcap(cap):
    assert_same_scores(softcap(cap), lambda score, h, i, j: float(cap) * math.tanh(score / float(cap)))


def test_softcap_bounds_the_scores():
    scores = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30]).reshape(1, 1, 1, 5)
    assert dense_scores(softcap(5.0), scores).flatten().tolist() == [-5, -5, 0, 5, 5]


@pytest.mark.parametrize("length", [11, 16])
def test_relative_bias(length):
    table = values(4, 2 * length - 1)
    numbers = table.tolist()
    assert_same_scores(relative_bias(table), lambda score, h, i, j: score + numbers[h][length - 1 + j - i])


def test_relative_bias_reaches_both_ends_of_its_table():
    out = dense_scores(relative_bias(torch.arange(5.0).reshape(1, 5)), torch.zeros(1, 1, 3, 3))
    assert out[0, 0].tolist() == [[2, 3, 4], [1, 2, 3], [0, 1, 2]]


def bucket_by_counting(distance, num_buckets, max_distance, bidirectional):
    """T5's rule in whole numbers: it counts the bucket edges at or below the distance, comparing powers."""
    side, away = 0, max(-distance, 0)
    if bidirectional:
        num_buckets //= 2
        side, away = (num_buckets, distance) if distance > 0 else (0, -distance)
    exact = num_buckets // 2
    if away < exact:
        return side + away
    steps = num_buckets - exact
    bucket = exact
    for k in range(1, steps):  # edge k is at exact * (max_distance / exact) ** (k / steps)
        bucket += away**steps * exact**k >= max_distance**k * exact**steps
    return side + bucket


T5_SETTINGS = [(32, 128, True), (32, 128, False), (8, 20, True), (6, 7, False), (2, 5, False), (4, 3, True), (64, 1000, True)]


@pytest.mark.parametrize("setting", T5_SETTINGS)
def test_t5_bucket(setting):
    distances = range(-1200, 1201)
    buckets = t5_bucket(torch.tensor(distances), *setting)
    assert buckets.dtype == torch.int32
    assert buckets.tolist() == [bucket_by_counting(distance, *setting) for distance in distances]


@fast
@given(st.integers(2, 24), st.integers(0, 500), st.booleans(), st.integers(-2000, 2000))
def test_t5_bucket_of_any_setting(half, beyond, bidirectional, distance):
    per_direction = half if bidirectional else 2 * half
    setting = (2 * half, per_direction // 2 + 1 + beyond, bidirectional)
    bucket = t5_bucket(torch.tensor(distance), *setting).item()
    # Some settings put an edge so close above a distance that float32 cannot tell them apart.
    next_distance = distance + (distance > 0) - (distance < 0)
    assert bucket in {bucket_by_counting(d, *setting) for d in (distance, next_distance)}


def test_t5_bucket_known_values():
    # Eight exact buckets, then edges at 8 * sqrt(2) ** k: 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5.
    before = [0, -1, -7, -8, -11, -12, -16, -31, -32, -64, -90, -91, -5000]
    assert t5_bucket(torch.tensor(before)).tolist() == [0, 1, 7, 8, 8, 9, 10, 11, 12, 14, 14, 15, 15]
    assert t5_bucket(torch.tensor([1, 7, 8, 127, 128, 10**6])).tolist() == [17, 23, 24, 31, 31, 31]
    assert t5_bucket(torch.tensor([5, 0, -15, -16, -127, -(10**6)]), bidirectional=False).tolist() == [0, 0, 15, 16, 31, 31]


@pytest.mark.parametrize("setting", T5_SETTINGS)
def test_t5_bias(setting):
    weight = values(setting[0], 2)
    rows = weight.tolist()

    def rule(score, h, i, j):
        return score + rows[bucket_by_counting(j - i, *setting)][h]

    assert_same_scores(t5_bias(weight, *setting), rule, (1, 2, 40, 37))


def test_compose_scores_applies_left_to_right():
    slopes = alibi_slopes(4)
    rates = slopes.tolist()

    def capped(score):
        return 3 * math.tanh(score / 3)

    assert_same_scores(compose_scores(softcap(3.0), alibi(slopes)), lambda score, h, i, j: capped(score) + rates[h] * (j - i))
    assert_same_scores(compose_scores(alibi(slopes), softcap(3.0)), lambda score, h, i, j: capped(score + rates[h] * (j - i)))
    assert_same_scores(
        compose_scores(softcap(3.0), alibi(slopes), alibi_symmetric(slopes), softcap(3.0)),
        lambda score, h, i, j: capped(capped(score) + rates[h] * (j - i - abs(i - j))),
    )


def test_compose_scores_of_one_is_that_one():
    score_mod = softcap(2.0)
    assert compose_scores(score_mod) is score_mod


@pytest.mark.parametrize("recipe, shape", [(alibi, (4,)), (alibi_symmetric, (4,)), (relative_bias, (4, 31)), (t5_bias, (32, 4))])
def test_gradients_flow_to_what_is_captured(recipe, shape):
    captured = values(*shape).requires_grad_()
    counted = torch.zeros(shape)
    dense_scores(recipe(captured), torch.zeros(1, 4, 16, 16)).sum().backward()
    for h, i, j in np.ndindex(4, 16, 16):
        if recipe is t5_bias:
            counted[bucket_by_counting(j - i, 32, 128, True), h] += 1
        elif recipe is relative_bias:
            counted[h, j - i + 15] += 1
        else:
            counted[h] += j - i if recipe is alibi else -abs(j - i)
    assert captured.grad.tolist() == counted.tolist()


# Places in space


@pytest.mark.parametrize("radius", [0.7, 2.5])
def test_within_radius(radius):
    places = values(2, 13, 3)
    assert_same_mask(within_radius(places[0], radius), lambda b, i, j: math.dist(places[0, i].tolist(), places[0, j].tolist()) <= radius)
    assert_same_mask(within_radius(places, radius), lambda b, i, j: math.dist(places[b, i].tolist(), places[b, j].tolist()) <= radius)


def test_gaussian_distances():
    places, means, widths, weights = values(1, 11, 3), values(5).abs(), values(5).abs() + 0.3, values(4, 5)

    def rule(score, h, i, j):
        distance = math.dist(places[0, i].tolist(), places[0, j].tolist())
        bells = zip(weights[h].tolist(), means.tolist(), widths.tolist(), strict=True)
        return score + sum(weight * math.exp(-(((distance - mean) / width) ** 2) / 2) for weight, mean, width in bells)

    assert_same_scores(gaussian_distances(places, means, widths, weights), rule, (1, 4, 9, 11))


def test_invariant_points():
    query_points, key_points, weights = values(1, 4, 9, 2, 3), values(1, 4, 11, 2, 3, seed=1), values(4).abs()

    def rule(score, h, i, j):
        pairs = zip(query_points[0, h, i].tolist(), key_points[0, h, j].tolist(), strict=True)
        return score - weights[h].item() / 2 * sum(math.dist(a, b) ** 2 for a, b in pairs)

    assert_same_scores(invariant_points(query_points, key_points, weights), rule, (1, 4, 9, 11))


def test_invariant_points_do_not_see_how_the_whole_is_turned_and_moved():
    points, turned = values(1, 4, 9, 2, 3), torch.linalg.qr(values(3, 3)).Q
    given = [points, points @ turned + torch.tensor([5.0, -2.0, 1.0])]
    one, other = (dense_scores(invariant_points(p, p, torch.ones(4)), torch.zeros(1, 4, 9, 9)) for p in given)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# In torch's own flex_attention

IDS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2])
PLACES = torch.arange(16)
PAIRS = torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), torch.ones(1, 2, 2, 8)
HOPS = (PLACES[:, None] - PLACES).abs().clamp_max(5)

MASKS = {
    "block_causal": block_causal(5),
    "block_diffusion": block_diffusion(8, 3),
    "causal": causal,
    "causal_offset": causal_offset(2),
    "dilated_window": dilated_window(3, 2),
    "document": document(IDS),
    "document_and_inner": document(torch.stack([IDS, IDS.flip(0)]), causal),
    "document_from_offsets": document_from_offsets(torch.tensor([0, 5, 8]), 16),
    "global_sliding": global_sliding(3, 2),
    "graph_neighbors": graph_neighbors(HOPS, 2),
    "jagged_window": jagged_window(PLACES - PLACES // 2, PLACES + 2),
    "neighborhood": neighborhood((4, 4), 3),
    "prefix_lm": prefix_lm(4),
    "prefix_lm of a tensor": prefix_lm(torch.tensor([3, 9])),
    "sliding_window": sliding_window(4),
    "sliding_window_bidirectional": sliding_window_bidirectional(2, 1),
    "within_radius": within_radius(values(16, 3), 1.5),
    "within_radius of a batch": within_radius(values(2, 16, 3), 1.5),
    "tree": tree((PLACES - 1) // 2),
}
SCORES = {
    "alibi": alibi(alibi_slopes(4)),
    "alibi_symmetric": alibi_symmetric(alibi_slopes(4)),
    "compose_scores": compose_scores(softcap(1.0), alibi(alibi_slopes(4))),
    "disentangled": disentangled(values(2, 4, 16, 6), values(2, 4, 16, 6, seed=1)),
    "forget_gate": forget_gate(-values(2, 4, 16).abs()),
    "graph_bias": graph_bias(HOPS, values(6, 4)),
    "relative_bias": relative_bias(values(4, 31)),
    "softcap": softcap(0.5),
    "t5_bias": t5_bias(values(32, 4)),
    "gaussian_distances": gaussian_distances(values(2, 16, 3), values(4).abs(), torch.ones(4), values(4, 4)),
    "invariant_points": invariant_points(values(2, 4, 16, 2, 3), values(2, 4, 16, 2, 3, seed=1), values(4).abs()),
    "yarn_temperature": yarn_temperature(8.0),
}


@contextmanager
def eager_flex_attention():
    switch = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    before = getattr(torch_flex, switch)
    setattr(torch_flex, switch, True)
    try:
        yield torch_flex.flex_attention
    finally:
        setattr(torch_flex, switch, before)


def attention(q, k, v, score_mod=None, mask_mod=None):
    """Attention written out in float64, the mod's part from `dense_scores` and `dense_mask`, tested above."""
    batch, heads, q_len, dim = q.shape
    scores = q.double() @ k.double().mT / math.sqrt(dim)
    if score_mod is not None:
        scores = dense_scores(score_mod, scores)
    if mask_mod is not None:
        mask = torch.from_numpy(dense_mask(mask_mod, q_len, k.shape[2], batch, heads).copy())
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v.double()


@pytest.mark.parametrize("name", MASKS)
def test_masks_run_in_torch_flex_attention(name):
    q, k, v = values(3, 2, 4, 16, 8).unbind(0)
    block_mask = torch_flex.create_block_mask(MASKS[name], 2, 4, 16, 16, device="cpu")
    with eager_flex_attention() as flex_attention:
        out = flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(out.double(), attention(q, k, v, mask_mod=MASKS[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_scores_run_in_torch_flex_attention(name):
    q, k, v = values(3, 2, 4, 16, 8).unbind(0)
    with eager_flex_attention() as flex_attention:
        out = flex_attention(q, k, v, score_mod=SCORES[name])
    torch.testing.assert_close(out.double(), attention(q, k, v, score_mod=SCORES[name]), rtol=1e-4, atol=1e-5)


# Wrong arguments

EVEN = "num_buckets must be even, half for each direction, got 31"

REFUSED = [
    (lambda: causal_offset(1.5), TypeError, "offset must be an int, got 1.5"),
    (lambda: causal_offset(torch.tensor(3)), TypeError, "offset must be an int, got a tensor of shape"),
    (lambda: sliding_window(0), ValueError, "window must be at least 1, got 0"),
    (lambda: sliding_window(True), TypeError, "window must be an int, got True"),
    (lambda: sliding_window(4.0), TypeError, "window must be an int, got 4.0"),
    (lambda: sliding_window_bidirectional(-1, 2), ValueError, "left must be at least 0, got -1"),
    (lambda: sliding_window_bidirectional(2, "2"), TypeError, "right must be an int, got '2'"),
    (lambda: prefix_lm(-1), ValueError, "prefix_length must be at least 0, got -1"),
    (lambda: prefix_lm(2.0), TypeError, "prefix_length must be an int, got 2.0"),
    (lambda: prefix_lm(torch.ones(3)), TypeError, "prefix_length must have an integer dtype"),
    (lambda: prefix_lm(torch.tensor(3)), ValueError, "prefix_length must have shape (B,), got ()"),
    (lambda: dilated_window(0, 1), ValueError, "window must be at least 1, got 0"),
    (lambda: dilated_window(3, 0), ValueError, "dilation must be at least 1, got 0"),
    (lambda: dilated_window(3, 1.5), TypeError, "dilation must be an int, got 1.5"),
    (lambda: global_sliding(0, 1), ValueError, "window must be at least 1, got 0"),
    (lambda: global_sliding(1, -1), ValueError, "num_global must be at least 0, got -1"),
    (lambda: document([0, 0, 1]), TypeError, "ids must be a tensor of shape (S,) or (B, S), got [0, 0, 1]"),
    (lambda: document(torch.zeros(4)), TypeError, "ids must have an integer dtype, got torch.float32"),
    (lambda: document(torch.zeros(4).bool()), TypeError, "ids must have an integer dtype, got torch.bool"),
    (lambda: document(torch.tensor(3)), ValueError, "ids must have shape (S,) or (B, S), got ()"),
    (lambda: document(IDS, True), TypeError, "mask_mod must be a function, got True"),
    (lambda: document_from_offsets([0, 3]), TypeError, "offsets must be a tensor of shape (documents + 1,)"),
    (lambda: document_from_offsets(torch.tensor([[0, 3]])), ValueError, "offsets must have shape"),
    (lambda: document_from_offsets(torch.tensor([0])), ValueError, "got [0]"),
    (lambda: document_from_offsets(torch.tensor([1, 3])), ValueError, "offsets must be 0 and then"),
    (lambda: document_from_offsets(torch.tensor([0, 3, 2])), ValueError, "never falling, got [0, 3, 2]"),
    (lambda: document_from_offsets(torch.tensor([0, 3]), 2), ValueError, "total must be at least 3, got 2"),
    (lambda: document_from_offsets(torch.tensor([0, 0])), ValueError, "total must be at least 1, got 0"),
    (lambda: document_from_offsets(torch.tensor([0, 3]), 3.0), TypeError, "total must be an int, got 3.0"),
    (lambda: document_from_offsets(torch.tensor([0, 3]), mask_mod=3), TypeError, "mask_mod must be"),
    (lambda: alibi(0.5), TypeError, "slopes must be a tensor of shape (Hq,), got 0.5"),
    (lambda: alibi(torch.ones(4, 1)), ValueError, "slopes must have shape (Hq,), got (4, 1)"),
    (lambda: alibi_symmetric(torch.ones(4).int()), TypeError, "slopes must have a floating-point dtype"),
    (lambda: alibi_slopes(0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: alibi_slopes(8.0), TypeError, "num_heads must be an int, got 8.0"),
    (lambda: softcap(0), ValueError, "cap must be finite and above 0 in float32, got 0.0"),
    (lambda: softcap(-2.0), ValueError, "cap must be finite and above 0 in float32, got -2.0"),
    (lambda: softcap(math.nan), ValueError, "cap must be finite and above 0 in float32, got nan"),
    (lambda: softcap(math.inf), ValueError, "cap must be finite and above 0 in float32, got inf"),
    (lambda: softcap(1e39), ValueError, "cap must be finite and above 0 in float32, got 1e+39"),
    (lambda: softcap(1e-39), ValueError, "cap must be finite and above 0 in float32, got 1e-39"),
    (lambda: softcap(10**400), ValueError, "cap must be finite in float32, got int too large for it"),
    (lambda: alibi_slopes(np.ones(2)), TypeError, "num_heads must be an int, got array([1., 1.]) (ndarray)"),
    (lambda: alibi_slopes(int), TypeError, "num_heads must be an int, got <class 'int'> (type)"),
    (lambda: softcap("50"), TypeError, "cap must be a number, got '50'"),
    (lambda: softcap(torch.tensor(50.0)), TypeError, "cap must be a number, got a tensor of shape ()"),
    (lambda: relative_bias(torch.ones(4, 6)), ValueError, "table must have an odd number of columns"),
    (lambda: relative_bias(torch.ones(7)), ValueError, "table must have shape (Hq, 2 * S - 1), got (7,)"),
    (lambda: relative_bias(torch.ones(4, 7).long()), TypeError, "table must have a floating-point dtype"),
    (lambda: t5_bias(torch.ones(4, 32)), ValueError, "weight must have num_buckets = 32 rows"),
    (lambda: t5_bias(torch.ones(32)), ValueError, "weight must have shape (num_buckets, Hq), got (32,)"),
    (lambda: t5_bias(torch.ones(31, 4), 31), ValueError, EVEN),
    (
        lambda: t5_bias(torch.ones(32, 4), bidirectional=torch.ones(2)),
        TypeError,
        "bidirectional must be True or False, got a tensor of shape",
    ),
    (lambda: t5_bias(torch.ones(32, 4), bidirectional="no"), TypeError, "bidirectional must be True or False, got 'no'"),
    (lambda: t5_bias(torch.ones(2, 4), 2), ValueError, "num_buckets must be at least 4, got 2"),
    (lambda: t5_bias(torch.ones(1, 4), 1, 9, False), ValueError, "num_buckets must be at least 2, got 1"),
    (lambda: t5_bucket(IDS, 32, 8), ValueError, "max_distance must be at least 9, got 8"),
    (lambda: t5_bucket(IDS, 32.0), TypeError, "num_buckets must be an int, got 32.0"),
    (lambda: within_radius(torch.ones(4).int(), 1.0), ValueError, "places must have shape (S, 3) or (B, S, 3), got (4,)"),
    (
        lambda: within_radius(torch.ones(4, 0), 1.0),
        ValueError,
        "places must have 1 to 64 dimensions, got 0; pass as many, since a kernel has",
    ),
    (lambda: within_radius(torch.ones(2, 4, 65), 1.0), ValueError, "places must have 1 to 64 dimensions, got 65"),
    (lambda: gaussian_distances(values(1, 9, 65), *values(2, 3), values(2, 3)), ValueError, "places must have 1 to 64 dimensions, got 65"),
    (lambda: gaussian_distances(values(1, 9, 3), *values(2, 65), values(2, 65)), ValueError, "means must have 1 to 64 bells, got 65"),
    (lambda: gaussian_distances(values(1, 9, 3), *values(2, 0), values(2, 0)), ValueError, "means must have 1 to 64 bells, got 0"),
    (lambda: invariant_points(*values(2, 1, 2, 9, 65, 3), values(2)), ValueError, "query_points must have 1 to 64 points, got 65"),
    (lambda: invariant_points(*values(2, 1, 2, 9, 4, 0), values(2)), ValueError, "query_points must have 1 to 64 dimensions, got 0"),
    (lambda: invariant_points(*values(2, 1, 2, 9, 43, 6), values(2)), ValueError, "at most 256 numbers of a query, got 43 points of 6"),
    (lambda: within_radius(torch.ones(4, 3), 0), ValueError, "radius must be finite and above 0 in float32, got 0.0"),
    (lambda: gaussian_distances(*[torch.ones(3)] * 4), ValueError, "places must have shape (B, S, 3), got (3,)"),
    (lambda: gaussian_distances(values(1, 9, 3), values(3), values(4), values(2, 3)), ValueError, "3 means, 4 widths and 3 weights a head"),
    (lambda: invariant_points(values(1, 2, 9, 3), 0, 0), ValueError, "query_points must have shape (B, Hq, S, P, 3), got (1, 2, 9, 3)"),
    (lambda: invariant_points(values(1, 2, 9, 4, 3), values(1, 2, 9, 3, 3), values(2)), ValueError, "queries have 4 points of 3 numbers"),
    (lambda: neighborhood((), 1), ValueError, "grid must have 1 to 3 axes, got 0"),
    (lambda: neighborhood((2, 2, 2, 2), 1), ValueError, "grid must have 1 to 3 axes, got 4"),
    (lambda: neighborhood((4, 4.0), 1), TypeError, "grid must be an int, got 4.0"),
    (lambda: neighborhood((4, 4), (3, 3, 3)), ValueError, "window must have an entry for each of 2 axes"),
    (
        lambda: neighborhood((4, 4), 5),
        ValueError,
        "window times dilation must fit into an axis of 4, got 5 * 1; pass a window of at most 4",
    ),
    (lambda: neighborhood(9, 3, 4), ValueError, "window times dilation must fit into an axis of 9, got 3 * 4; pass a window of at most 2"),
    (lambda: neighborhood(9, 3, causal=1), TypeError, "causal must be a bool, got 1"),
    (lambda: neighborhood(9, "3"), TypeError, "window must be an int, got '3'"),
    (lambda: tree([-1, 0]), TypeError, "parents must be a tensor of shape (T,) or (B, T), got [-1, 0]"),
    (lambda: tree(torch.tensor(-1)), ValueError, "parents must have shape (T,) or (B, T), got ()"),
    (lambda: tree(torch.tensor([-1, 2, 1])), ValueError, "parents must lead to a root, -1, from each node; from node 1 they go round"),
    (lambda: tree(torch.tensor([[-1, 0], [-1, 1]])), ValueError, "from node 1 they go round in a circle"),
    (lambda: tree(torch.tensor([-1, 0, 3])), ValueError, "parents must be below 3, the number of nodes, got 3"),
    (lambda: tree(torch.tensor([255, 0, 1], dtype=torch.uint8)), ValueError, "parents must be below 3, the number of nodes, got 255"),
    (lambda: tree(torch.tensor([-5, 0])), ValueError, "parents must be numbers of nodes, from 0 on, got -5; -1 is for a root"),
    (lambda: tree(PLACES - 1, -1), ValueError, "start must be at least 0, got -1"),
    (lambda: tree(PLACES - 1, 1.0), TypeError, "start must be an int, got 1.0"),
    (lambda: tree(PLACES - 1, torch.tensor(1)), ValueError, "start must have shape (B,), got ()"),
    (lambda: block_causal(0), ValueError, "block must be at least 1, got 0"),
    (lambda: block_diffusion(8, 2.0), TypeError, "block must be an int, got 2.0"),
    (lambda: block_diffusion(0, 2), ValueError, "length must be at least 1, got 0"),
    (lambda: jagged_window(PLACES.float(), PLACES), TypeError, "starts must have an integer dtype, got torch.float32"),
    (lambda: jagged_window(PLACES, PLACES[1:]), ValueError, "ends must have the shape of starts, (16,), got (15,)"),
    (lambda: graph_bias(HOPS.float(), values(6, 4)), TypeError, "distances must have an integer dtype, got torch.float32"),
    (lambda: graph_bias(PLACES, values(6, 4)), ValueError, "distances must have shape (N, N) or (B, N, N), got (16,)"),
    (lambda: graph_bias(HOPS, values(6)), ValueError, "weight must have shape (distances, Hq), got (6,)"),
    (lambda: graph_neighbors(HOPS, -1), ValueError, "hops must be at least 0, got -1"),
    (lambda: graph_distances(PLACES.view(8, 2), 16, 3), ValueError, "edges must have shape (2, E), got (8, 2)"),
    (lambda: graph_distances(PLACES.view(2, 8), 16, 0), ValueError, "max_distance must be at least 1, got 0"),
    (lambda: graph_distances(torch.tensor([[0, -1], [1, 0]]), 2, 3), ValueError, "edges must name nodes from 0 to 1, got the edge [-1, 0]"),
    (lambda: graph_distances(torch.tensor([[0], [2]]), 2, 3), ValueError, "edges must name nodes from 0 to 1, got the edge [0, 2]"),
    (lambda: graph_distances(torch.tensor([[0], [1]]), 2, 40000), ValueError, "max_distance must be at most 32767, which int16 holds, got"),
    (lambda: disentangled(values(1, 1, 4, 6), values(1, 1, 4, 4)), ValueError, "must have 2 * span columns each, got 6 and 4"),
    (lambda: disentangled(values(1, 1, 4, 5), values(1, 1, 4, 5)), ValueError, "must have 2 * span columns each, got 5 and 5"),
    (lambda: disentangled(values(4, 6), values(4, 6)), ValueError, "c2p must have shape (B, Hq, Q_LEN, 2 * span), got (4, 6)"),
    (lambda: forget_gate(HOPS[None]), TypeError, "log_gates must have a floating-point dtype, got torch.int64"),
    (lambda: forget_gate(values(4, 16)), ValueError, "log_gates must have shape (B, Hq, S), got (4, 16)"),
    (lambda: yarn_temperature(0), ValueError, "factor must be finite and above 0 in float32, got 0.0"),
    (lambda: yarn_temperature(2.0, "1"), TypeError, "mscale must be a number, got '1'"),
    (lambda: differential(3, *values(3, 1, 2, 4, 4), 0.5), TypeError, "attention must be a function, got 3"),
    (lambda: differential(len, *values(3, 1, 3, 4, 4), 0.5), ValueError, "query must have an even number of heads, got 3"),
    (lambda: differential(len, *values(3, 2, 4, 4), 0.5), ValueError, "query must have shape (B, 2 * Hq, Q_LEN, D), got (2, 4, 4)"),
    (lambda: differential(len, *values(3, 1, 4, 2, 8), 0.5), ValueError, "got value (1, 4, 2, 8) and key (1, 4, 2, 8); both halves"),
    (lambda: differential(len, *PAIRS, 0.5, return_lse=True), ValueError, "return_lse is of one softmax, and the result of two; leave it"),
    (lambda: differential(len, *PAIRS, 0.5, return_aux=AuxRequest(lse=True)), ValueError, "return_aux is of one softmax, and the result"),
    (lambda: differential(lambda q, k, v: (q, q), *PAIRS, 0.5), TypeError, "attention must give one tensor, got tuple; pass one that"),
    (lambda: differential_lambda(*values(3, 8), values(7), layer=1), ValueError, "must be of one length, got [8, 8, 8, 7]; the paper's"),
    (lambda: differential_lambda(*values(4, 8), layer=-1), ValueError, "layer must be at least 0, got -1"),
    (lambda: differential_lambda(*values(4, 2, 8), layer=1), ValueError, "lq1 must have shape (D,), got (2, 8)"),
    (lambda: compose_scores(), ValueError, "score_mods must hold a function, got none"),
    (lambda: compose_scores(softcap(1.0), 3), TypeError, "score_mods[1] must be a function, got 3"),
    (lambda: compose_scores([softcap(1.0)]), TypeError, "score_mods[0] must be a function, got ["),
]


@pytest.mark.parametrize("call, error, message", REFUSED, ids=[message for _, _, message in REFUSED])
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert message in text
    assert text.partition("():")[0] in mods.__all__, "the message opens with the recipe's name"
    assert "; " in text, "the message ends with what to do"


def test_recipes_take_vectors_as_long_as_kernels_do():
    assert (mods._arguments.LONGEST, mods._arguments.LARGEST) == (vectors.LONGEST, vectors.LARGEST)


def test_differential_of_one_output():
    """Options that ask for nothing more are passed on."""
    asked = dict(return_lse=False, return_aux=None)
    out = differential(lambda q, k, v, **options: v * len(options), *PAIRS, 0.5, **asked)
    assert torch.equal(out, PAIRS[2])


# The folder

SOURCES = sorted(Path(mods.__file__).parent.glob("*.py"))


def test_every_public_name_is_there_and_documented():
    assert list(mods.__all__) == sorted(set(mods.__all__))
    for name in mods.__all__:
        assert inspect.isfunction(getattr(mods, name)) and getattr(mods, name).__doc__


@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_the_function_a_recipe_returns_is_named_after_it(name):
    mod = {**MASKS, **SCORES}[name]
    assert mod.__name__ == {"document_from_offsets": "document"}.get(name, name.partition(" ")[0])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_recipes_import_only_torch_and_the_standard_library(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, "reaches outside the folder"
            imported = [node.module] if node.level == 0 else []
        else:
            continue
        for module in imported:
            assert module.partition(".")[0] in {"torch", *sys.stdlib_module_names}, module
