"""Rotary position embedding: tables, scaled for long contexts as models do it, and tokens turned without a cache."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flexpress import Llama3Scaling, YarnScaling, apply_rope, rope_table
from support.caches import turned
from support.dense import relative_error
from support.devices import DEVICES, for_any


def test_rope_table():
    """Angles are exact where float32 angles are not, and any other frequencies can be given."""
    table = rope_table(200_000, 8)
    exact = 199_999 * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    assert (table[-1].double() - torch.stack([exact.cos(), exact.sin()], -1)).abs().max() < 6e-8
    assert torch.equal(rope_table(10, 4, scale=2.0)[8], rope_table(10, 4)[4])
    assert torch.equal(rope_table(10, 4, theta=np.float32(5e5)), rope_table(10, 4, theta=5e5))
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


class Turn(NamedTuple):
    """Tokens to turn: `counts` of each sequence from `firsts` on, and `after` the last one; each by itself where `form` is "tokens"."""

    form: str
    counts: list[int]
    firsts: list[int]
    after: int
    heads: int
    D: int
    rope_dim: int
    interleaved: bool
    tail: bool
    strided: bool
    dtype: torch.dtype
    seed: int


@st.composite
def turns(draw, device):
    form, B = draw(st.sampled_from(["dense", "ragged", "tokens"])), draw(st.integers(1, 4))
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 17, 33]), min_size=B, max_size=B))
    D = draw(st.sampled_from([8, 20, 64, 192]))
    return Turn(
        form=form,
        counts={"dense": [max(counts)] * B, "ragged": counts, "tokens": [1] * B}[form],
        firsts=draw(st.lists(st.integers(0, 40), min_size=B, max_size=B)),
        after=draw(st.integers(0, 2)) if form == "ragged" else 0,
        heads=draw(st.integers(1, 3)),
        D=D,
        rope_dim=draw(st.sampled_from([2, D // 4 * 2, D])),
        interleaved=draw(st.booleans()),
        tail=draw(st.booleans()),
        strided=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
    )


@for_any(turns, cpu=60, cuda=100)
def test_any_turn(p, device):
    """Against float64; what is behind the last sequence stays, and gradients are turned back."""
    generator = torch.Generator().manual_seed(p.seed)
    tokens = sum(p.counts) + p.after
    shape = (len(p.counts), p.heads, p.counts[0], p.D) if p.form == "dense" else (tokens, p.heads, p.D)
    x, d_turned = (torch.randn(*shape, 2, generator=generator).to(device, p.dtype) for _ in range(2))
    x, d_turned = (t[..., 0] if p.strided else t[..., 0].contiguous() for t in (x, d_turned))
    int32 = dict(dtype=torch.int32, device=device)
    where = {"cu_seqlens_q": torch.tensor([0, *torch.tensor(p.counts).cumsum(0)], **int32)} if p.form == "ragged" else {}
    rope = rope_table(80, p.rope_dim, scaling=YarnScaling(4.0, 16), device=device)
    x.requires_grad_()
    found = apply_rope(x, rope, torch.tensor(p.firsts, **int32), **where, interleaved=p.interleaved, rope_tail=p.tail)
    found.backward(d_turned)
    assert found.shape == x.shape and found.dtype == x.dtype
    exact = x.detach().double().requires_grad_()
    flat = exact.transpose(1, 2).flatten(0, 1) if p.form == "dense" else exact
    at = torch.tensor([first + i for first, n in zip(p.firsts, p.counts, strict=True) for i in range(n)], device=device).long()
    expected = torch.cat([turned(flat[: len(at)], at[:, None], rope, p.interleaved, p.tail), flat[len(at) :]])
    expected = expected.unflatten(0, (shape[0], shape[2])).transpose(1, 2) if p.form == "dense" else expected
    expected.backward(d_turned.double())
    eps = torch.finfo(p.dtype).eps
    assert relative_error(found.detach(), expected.detach()) <= eps and relative_error(x.grad, exact.grad) <= eps
    if p.after:
        assert torch.equal(found[-p.after :], x[-p.after :])

    def turn(x):
        return apply_rope(x, rope, torch.tensor(p.firsts, **int32), **where, interleaved=p.interleaved, rope_tail=p.tail)

    value, tangent = torch.func.jvp(turn, (x.detach(),), (d_turned,))  # it is linear in x
    assert relative_error(value, expected.detach()) <= eps and relative_error(tangent, turn(d_turned).double()) <= 2 * eps
    (gradient,) = torch.func.vjp(turn, x.detach())[1](d_turned)
    assert relative_error(gradient, exact.grad) <= eps


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_well_made(device):
    x, rope = torch.randn(5, 2, 16, device=device, requires_grad=True), rope_table(9, 8, device=device)
    ragged = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    for args in (
        (x, rope, torch.tensor([0, 3, 8, 1, 2], dtype=torch.int32, device=device)),
        (x, rope, torch.tensor([4, 7], dtype=torch.int32, device=device), ragged, True, True),
        (x[None].transpose(1, 2), rope, torch.tensor([3], dtype=torch.int32, device=device)),
    ):
        torch.library.opcheck(torch.ops.flexpress.apply_rope.default, args)


@pytest.mark.parametrize("device", DEVICES)
def test_inside_a_graph_that_is_compiled(device):
    x, rope = torch.randn(2, 3, 5, 16, device=device, requires_grad=True), rope_table(30, 8, device=device)
    positions = torch.tensor([3, 20], dtype=torch.int32, device=device)

    def run(x):
        return apply_rope(x * 2, rope, positions, rope_tail=True).sin()

    found, want = torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x)
    assert torch.equal(found, want)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (found, want)))


@pytest.mark.parametrize("device", DEVICES)
def test_positions_outside_the_table_take_its_ends(device):
    """Where nobody looks at them."""
    x, rope = torch.randn(3, 2, 16, device=device), rope_table(9, 16, device=device)

    def at(*positions):
        return apply_rope(x, rope, torch.tensor(positions, dtype=torch.int32, device=device), check=False)

    assert torch.equal(at(-5, 4, 90), at(0, 4, 8)) and torch.equal(at(-(2**31), 8, 2**31 - 1), at(0, 8, 8))


def turn(**changes):
    arguments = {"x": torch.zeros(2, 3, 4, 16), "rope": rope_table(20, 16), "positions": torch.tensor([0, 5], dtype=torch.int32)}
    arguments |= {k: torch.tensor(v, dtype=torch.int32) if isinstance(v, list) else v for k, v in changes.items()}
    return apply_rope(**arguments)


FLAT = torch.zeros(6, 3, 16)
BAD_TURNS = {
    "dimensions": (dict(x=torch.zeros(4, 16)), ValueError, r"x must be \(B, H, Q_LEN, D\), got torch.float32 \(4, 16\)"),
    "dtype": (dict(x=torch.zeros(2, 3, 4, 16).double()), TypeError, "x must be float16, bfloat16 or float32, got torch.float64"),
    "a wide table": (dict(rope=rope_table(20, 32)), ValueError, "rope_dim up to the 16 of x, got torch.float32 .20, 16, 2."),
    "a table that learns": (dict(rope=rope_table(20, 16).requires_grad_()), NotImplementedError, "pass rope.detach"),
    "positions": (dict(positions=[1, 2, 3]), ValueError, r"positions must be torch.int32 \(2,\) on cpu, got torch.int32 \(3,\)"),
    "one position for all": (
        dict(x=FLAT, positions=torch.tensor(3).int(), cu_seqlens_q=[0, 6]),
        ValueError,
        r"positions must be torch.int32 \(",
    ),
    "int64 positions": (dict(positions=torch.tensor([1, 2])), ValueError, r"positions must be torch.int32 \(2,\)"),
    "positions of tokens": (dict(x=FLAT), ValueError, r"positions must be torch.int32 \(6,\)"),
    "ragged and dense": (dict(cu_seqlens_q=[0, 4, 8]), ValueError, r"cu_seqlens_q is for x \(T, H, D\), got torch.float32 \(2, 3, 4, 16\)"),
    "cu_seqlens_q": (dict(x=FLAT, cu_seqlens_q=[0, 4]), ValueError, r"cu_seqlens_q must be torch.int32 \(3,\)"),
    "falling": (dict(x=FLAT, cu_seqlens_q=[0, 4, 2]), ValueError, "cu_seqlens_q must start with 0, never fall"),
    "a negative position": (dict(positions=[-1, 2]), ValueError, "positions has -1; they must be 0 or more"),
    "a short table": (dict(positions=[0, 17]), ValueError, r"rope \(20, 8, 2\) has 20 positions, but a new token has position 20: make it"),
}


@pytest.mark.parametrize("case", [case for case in BAD_TURNS if case != "a table that learns"])
def test_errors_inside_transforms(case):
    changes, error, message = BAD_TURNS[case]
    if case in ("dimensions", "dtype", "a wide table"):
        error, message = ValueError, r"and a float32 rope from rope_table \(positions, rope_dim / 2, 2\)"
    with pytest.raises(error, match=message):
        torch.func.grad(lambda x: turn(**{**changes, "x": x}).sum())(changes.get("x", torch.zeros(2, 3, 4, 16)))


def test_no_sequences_inside_a_transform():
    """All tokens are behind the last sequence's, and stay as they are."""
    x, rope = torch.randn(4, 2, 16), rope_table(8, 16)
    nothing, starts = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out, tangent = torch.func.jvp(lambda x: apply_rope(x, rope, nothing, cu_seqlens_q=starts), (x,), (x.sin(),))
    assert torch.equal(out, x) and torch.equal(tangent, x.sin())


def test_tables_made_in_inference_mode_have_gradients_beside_them():
    with torch.inference_mode():
        rope, positions = rope_table(20, 16, device="cpu"), torch.tensor([2, 5], dtype=torch.int32)
    x = torch.randn(2, 3, 4, 16, requires_grad=True)
    back = torch.autograd.grad(apply_rope(x, rope, positions).sum(), x)[0]
    assert torch.equal(back, torch.autograd.grad(apply_rope(x, rope.clone(), positions.clone()).sum(), x)[0])


@pytest.mark.parametrize("name", ["x", "rope", "positions"])
def test_no_value_comes_of_a_tensor_without_values(name):
    """torch asks an operator's fake implementation as soon as one tensor is on "meta"."""
    given = {"x": torch.randn(2, 3, 4, 16), "rope": rope_table(20, 16, device="cpu"), "positions": torch.zeros(2, dtype=torch.int32)}
    with pytest.raises((ValueError, NotImplementedError), match="meta"):
        apply_rope(**given | {name: given[name].to("meta")})
    assert apply_rope(**{name: t.to("meta") for name, t in given.items()}).is_meta


@pytest.mark.parametrize("case", BAD_TURNS)
def test_errors_of_turns(case):
    changes, error, message = BAD_TURNS[case]
    with pytest.raises(error, match=message):
        turn(**{**changes, "x": changes.get("x", torch.zeros(2, 3, 4, 16)).requires_grad_(case == "a table that learns")})


BAD = {
    "nothing": (lambda: apply_rope(None, rope_table(20, 16), torch.zeros(2).int()), TypeError, "x must be a torch.Tensor, got NoneType"),
    "list": (lambda: apply_rope(FLAT, rope_table(20, 16), [0] * 6), TypeError, "positions must be a torch.Tensor, got list"),
    "list of starts": (
        lambda: apply_rope(FLAT, rope_table(20, 16), torch.zeros(2).int(), cu_seqlens_q=[0, 2, 6]),
        TypeError,
        "cu_seqlens_q must be a torch.Tensor, got list",
    ),
    "device": (lambda: rope_table(4, 8, device="x"), TypeError, "device must be a torch.device or its name, got 'x'"),
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
