"""Rotary position embedding: tables, scaled for long contexts as models do it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flexpress import Llama3Scaling, YarnScaling, rope_table


def test_rope_table():
    """Angles are exact where float32 angles are not, and any other frequencies can be given."""
    table = rope_table(200_000, 8)
    exact = 199_999 * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    assert (table[-1].double() - torch.stack([exact.cos(), exact.sin()], -1)).abs().max() < 6e-8
    assert torch.equal(rope_table(10, 4, scale=2.0)[8], rope_table(10, 4)[4])
    assert torch.equal(rope_table(10, 4, inv_freq=torch.tensor([1.0, 0.01], dtype=torch.float64)), rope_table(10, 4))


@st.composite
def scalings(draw):
    factor, length = draw(st.floats(1.0, 64.0)), draw(st.sampled_from([64, 4096, 8192]))
    if draw(st.booleans()):
        low = draw(st.floats(0.5, 4.0))
        return Llama3Scaling(factor, length, low, low + draw(st.floats(0.5, 8.0)))
    slow = draw(st.floats(0.5, 4.0))
    attention_factor = draw(st.none() | st.floats(0.5, 2.0))
    return YarnScaling(factor, length, slow + draw(st.floats(1.0, 60.0)), slow, attention_factor, draw(st.booleans()))


@given(scalings(), st.sampled_from([8, 64, 128]), st.sampled_from([1e4, 5e5, 1e6]))
@settings(max_examples=100, deadline=None)
def test_scalings_are_those_of_transformers(scaling, rope_dim, theta):
    """Which computes angles in float32."""
    kind = "llama3" if isinstance(scaling, Llama3Scaling) else "yarn"
    parameters = {"rope_type": kind, "rope_theta": theta, **{k: v for k, v in vars(scaling).items() if v is not None}}
    config = LlamaConfig(hidden_size=rope_dim * 2, num_attention_heads=2, head_dim=rope_dim, rope_parameters=parameters)
    config.max_position_embeddings = int(scaling.factor * scaling.original_max_position_embeddings)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    expected = rope_table(4, rope_dim, inv_freq=inv_freq) * factor
    assert (rope_table(4, rope_dim, theta, scaling=scaling) - expected).abs().max() < 1e-5


@given(scalings(), st.sampled_from([2, 8, 96]))
@settings(max_examples=100, deadline=None)
def test_pairs_turn_slower_in_order_and_never_more_than_by_the_factor(scaling, rope_dim):
    """From the fastest pair to the slowest one, between 1 and `factor` times slower."""
    inv_freq = 5e5 ** (-torch.arange(0, rope_dim, 2).double() / rope_dim)
    slower = inv_freq / scaling.scaled(inv_freq, 5e5)
    assert (slower >= 1 - 1e-12).all() and (slower <= scaling.factor * (1 + 1e-12)).all() and (slower.diff() >= -1e-12).all()
    lengths = rope_table(9, rope_dim, 5e5, scaling=scaling).norm(dim=-1)
    assert torch.allclose(lengths, torch.full_like(lengths, scaling.table_factor), rtol=1e-6)


def test_yarn_sharpens_scores():
    assert YarnScaling(40.0, 4096).table_factor == 0.1 * math.log(40.0) + 1 and YarnScaling(0.5, 4096).table_factor == 1.0
    assert YarnScaling(40.0, 4096, attention_factor=1.5).table_factor == 1.5 and Llama3Scaling(8.0, 8192).table_factor == 1.0


BAD = {
    "length": (lambda: rope_table(-1, 8), ValueError, "length is -1"),
    "rope_dim": (lambda: rope_table(4, 7), ValueError, "rope_dim must be even and at least 2, got 7"),
    "theta": (lambda: rope_table(4, 8, 0.0), ValueError, "theta is 0.0; it must be positive"),
    "inv_freq": (lambda: rope_table(4, 8, inv_freq=[1.0]), TypeError, r"inv_freq must be a floating-point tensor \(4,\), got list"),
    "inv_freq's shape": (lambda: rope_table(4, 8, inv_freq=torch.ones(3)), ValueError, r"shape \(4,\) for rope_dim 8, got \(3,\)"),
    "both": (lambda: rope_table(4, 8, inv_freq=torch.ones(4), scaling=Llama3Scaling(8, 64)), ValueError, "inv_freq and scaling exclude"),
    "two scales": (lambda: rope_table(4, 8, scale=2, scaling=Llama3Scaling(8, 64)), ValueError, r"scale of positions \(2.0\) exclude"),
    "scaling": (lambda: rope_table(4, 8, scaling="yarn"), TypeError, "scaling must be a Llama3Scaling, a YarnScaling or None, got 'yarn'"),
    "factor": (lambda: Llama3Scaling(0, 64), ValueError, "factor is 0; it must be positive"),
    "positions": (lambda: YarnScaling(2, 0), ValueError, "original_max_position_embeddings is 0; it must be at least 1"),
    "low and high": (lambda: Llama3Scaling(8, 64, 4.0, 4.0), ValueError, "high_freq_factor is 4.0; it must be above low_freq_factor"),
    "betas": (lambda: YarnScaling(8, 64, 1.0, 2.0), ValueError, "beta_fast is 1.0; it must be above beta_slow, which is 2.0"),
    "truncate": (lambda: YarnScaling(8, 64, truncate=1), TypeError, "truncate must be a bool, got 1"),
    "yarn's theta": (
        lambda: rope_table(4, 8, 1.0, scaling=YarnScaling(8, 64)),
        ValueError,
        "theta is 1.0; with YarnScaling it must be above 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
