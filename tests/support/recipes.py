"""Recipes as torch runs them, and their rules written out a second time in plain Python."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as torch_flex

SIZES = [(13, 13), (7, 12), (12, 7)]  # (Q_LEN, KV_LEN)


def dense_mask(mask_mod, q_len, kv_len, batch=2, heads=3):
    """What torch makes of a mask_mod: bool array (batch, heads, q_len, kv_len)."""
    mask = torch_flex.create_mask(mask_mod, batch, heads, q_len, kv_len, device="cpu")
    assert mask.dtype == torch.bool
    return mask.expand(batch, heads, q_len, kv_len).numpy()


def expected_mask(rule, q_len, kv_len, batch=2, heads=3):
    """The same from ``rule(b, i, j) -> bool``, called with Python ints."""
    cells = [[[bool(rule(b, i, j)) for j in range(kv_len)] for i in range(q_len)] for b in range(batch)]
    mask = np.array(cells).reshape(batch, 1, q_len, kv_len)
    return np.broadcast_to(mask, (batch, heads, q_len, kv_len))


def dense_scores(score_mod, scores):
    """What torch's vmap makes of a score_mod for scores (B, H, Q_LEN, KV_LEN), with int32 indices."""
    mod = score_mod
    for mapped in (4, 3, 2, 1):  # kv_idx innermost, b outermost
        mod = torch.vmap(mod, in_dims=(0, *(0 if place == mapped else None for place in range(1, 5))))
    with TransformGetItemToIndex():
        return mod(scores, *(torch.arange(n, dtype=torch.int32) for n in scores.shape))


def expected_scores(rule, scores):
    """The same from ``rule(score, h, i, j) -> float``, called with Python numbers."""
    array = scores.detach().double().numpy()
    cells = [rule(float(score), h, i, j) for (b, h, i, j), score in np.ndenumerate(array)]
    return np.array(cells).reshape(array.shape)


def assert_same_mask(mask_mod, rule, sizes=SIZES):
    for q_len, kv_len in sizes:
        np.testing.assert_array_equal(dense_mask(mask_mod, q_len, kv_len), expected_mask(rule, q_len, kv_len))


def assert_same_scores(score_mod, rule, shape=(2, 4, 9, 11)):
    scores = torch.linspace(-5, 5, math.prod(shape)).reshape(shape)
    out = dense_scores(score_mod, scores)
    assert out.dtype == torch.float32 and out.shape == scores.shape
    np.testing.assert_allclose(out.numpy(), expected_scores(rule, scores), rtol=1e-5, atol=1e-5)


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
