"""What return_aux tells of the probabilities, inside transforms of torch.func and in forward mode: beside dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap

from flexpress import AuxRequest, flex_attention, mods, varlen_attention
from support.dense import relative_error
from support.devices import DEVICES
from support.probabilities import ALL, assert_right, dense

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LEARNED = AuxRequest(entropy=True, column_sums=True)
CLOSE = 1e-5


def mask(b, h, q_idx, kv_idx):
    """Of which one row sees nothing."""
    return (kv_idx <= q_idx + 4) & (q_idx != 3)


def biased(slopes):
    return lambda score, b, h, q_idx, kv_idx: torch.tanh(score) * 2 - slopes[h] * 0.1 * (q_idx - kv_idx)


def inputs(device: str, calls: int = 0, sinks: bool = True) -> list[torch.Tensor]:
    """q, k, slopes and, if asked for, sinks; of so many calls, if any."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 2, 9, 8), (1, 1, 13, 8), (2,), *([(2,)] if sinks else [])]
    return [torch.randn((calls, *shape) if calls else shape, generator=generator).to(device) for shape in shapes]


def printed(q, k, slopes, sinks=None, asked=ALL):
    return flex_attention(q, k, k, biased(slopes), mask_mod=mask, sinks=sinks, enable_gqa=True, return_aux=asked)[1]


def looked(*x):
    aux = printed(*x, asked=LEARNED)
    return aux.entropy, aux.column_sums


def exact(q, k, slopes, sinks=None):
    _, entropy, _, sums = dense(q, k, biased(slopes), mask, sinks=sinks)
    return entropy, sums


def weighed(function):
    """A loss of what a function gives, which tells rows and columns apart."""

    def loss(*x):
        return sum(
            (t.double() * torch.linspace(-1, 2, t.numel(), dtype=torch.float64, device=t.device).view(t.shape)).sum() for t in function(*x)
        )

    return loss


def in_double(tensors) -> tuple[torch.Tensor, ...]:
    return tuple(t.double() for t in tensors)


def assert_close(found, expected) -> None:
    errors = [relative_error(mine, right) for mine, right in zip(found, expected, strict=True)]
    assert max(errors) <= CLOSE, errors


@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (0, None, None, None), (None, 0, 0, None), (None, None, None, 0)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_vmap(device, dims):
    """Mapped sinks make calls of their own; top indices are mapped, too."""
    x = [t[0] if dim is None else t for t, dim in zip(inputs(device, 2), dims, strict=True)]
    found = vmap(lambda *x: tuple(printed(*x)), in_dims=dims)(*x)
    for i in range(2):
        q, k, slopes, sinks = (t if dim is None else t[i] for t, dim in zip(x, dims, strict=True))
        assert_right(type(printed(q, k, slopes))(*(t[i] for t in found)), q, k, biased(slopes), mask, sinks=sinks)


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_tangents(device, sinks):
    x = inputs(device, sinks=sinks)
    places, direction = tuple(range(len(x))), [torch.randn_like(t) for t in x]
    right = grad(weighed(exact), places)(*in_double(x))
    assert_close(grad(weighed(looked), places)(*x), right)
    found, tangents = jvp(looked, tuple(x), tuple(direction))
    values, of_exact = jvp(exact, in_double(x), in_double(direction))
    assert_close((*found, *tangents), (*values, *of_exact))
    assert not tangents[0][:, :, 3].any()
    with forward_ad.dual_level():
        q = forward_ad.make_dual(x[0], direction[0])
        assert forward_ad.unpack_dual(printed(q, *x[1:]).top_index).tangent is None
        of_q = [forward_ad.unpack_dual(t).tangent for t in looked(q, *x[1:])]
    nothing = [torch.zeros_like(t) for t in x[1:]]
    assert_close(of_q, jvp(exact, in_double(x), in_double((direction[0], *nothing)))[1])


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_tangents_of_mapped_calls(device):
    many = inputs(device, 2)
    of_calls = vmap(grad(weighed(looked), (0, 1, 2, 3)))(*many)
    one_direction = [torch.randn_like(t[0]) for t in many]
    tangents = vmap(lambda *x: jvp(looked, x, tuple(one_direction))[1])(*many)
    for i in range(2):
        x = in_double(t[i] for t in many)
        assert_close([g[i] for g in of_calls], grad(weighed(exact), (0, 1, 2, 3))(*x))
        assert_close([t[i] for t in tangents], jvp(exact, x, in_double(one_direction))[1])


@pytest.mark.parametrize("device", DEVICES)
def test_column_sums_are_differentiable_twice(device):
    """By create_graph=True and forward over reverse mode; the entropy has no second derivative, and says so."""
    x = inputs(device)
    direction, places = [torch.randn_like(t) for t in x], (0, 1, 2, 3)

    def first(function, *x):
        return grad(weighed(lambda *x: function(*x)[1:]), places)(*x)

    right = jvp(lambda *x: first(exact, *x), in_double(x), in_double(direction))[1]
    assert_close(jvp(lambda *x: first(looked, *x), tuple(x), tuple(direction))[1], right)
    learned = [t.clone().requires_grad_() for t in x]
    gradients = torch.autograd.grad(weighed(lambda *x: looked(*x)[1:])(*learned), learned, create_graph=True)
    assert_close(torch.autograd.grad(gradients, learned, direction), right)
    (of_q,) = torch.autograd.grad(looked(*learned)[0].sum(), learned[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="first and second derivatives.*the entropy of return_aux has a first one"):
        of_q.sum().backward()
    with pytest.raises(NotImplementedError, match="the entropy of return_aux has a first one"):
        jacfwd(grad(lambda q: looked(q, *x[1:])[0].sum()))(x[0])


@pytest.mark.parametrize("device", DEVICES)
def test_beside_gradients_of_the_output(device):
    """What is looked at is beside a loss, and needs no derivative: per-sample gradients with entropies to be logged."""
    q, k, slopes, _ = inputs(device, 2)

    def loss(q, k):
        out, aux = flex_attention(
            q, k, k, biased(slopes[0]), mask_mod=mask, enable_gqa=True, dropout_p=0.3, dropout_seed=seed, return_aux=ALL
        )
        return out.square().sum(), (aux.entropy, aux.top_index)

    seed = torch.tensor([7], device=device)
    gradients, (entropy, top_index) = vmap(grad(loss, has_aux=True))(q, k)
    for i in range(2):
        expected = printed(q[i], k[i], slopes[0])
        assert torch.equal(entropy[i], expected.entropy) and torch.equal(top_index[i], expected.top_index)
        assert relative_error(gradients[i], grad(loss, has_aux=True)(q[i], k[i])[0]) <= CLOSE


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device):
    """Offsets may be an argument of what is transformed."""
    q = torch.randn(2, 20, 1, 8, device=device)
    ends = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)

    def aux(q, ends):
        return varlen_attention(q, q, q, ends, mask_mod=mods.causal, return_aux=ALL)[1]

    found = vmap(lambda q: tuple(aux(q, ends)))(q)
    gradients = vmap(grad(lambda q, ends: aux(q, ends).entropy.square().sum()), in_dims=(0, None))(q, ends)
    for i in range(2):
        expected, learned = aux(q[i], ends), q[i].clone().requires_grad_()
        assert all(relative_error(mine[i].double(), right.double()) <= CLOSE for mine, right in zip(found, expected, strict=True))
        assert torch.equal(found[3][i], expected.top_index)
        (right,) = torch.autograd.grad(aux(learned, ends).entropy.square().sum(), learned)
        assert relative_error(gradients[i], right) <= CLOSE


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_very_low_scores(device, low):
    """As additive masks mark padding: what scores differ by is lost in them, and others keep their derivatives."""
    q, k = (torch.randn(1, 1, 7, 8, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
    bias = torch.zeros(7, 7, device=device)
    bias[0] = low

    def entropy(k):
        return flex_attention(q, k, k, lambda s, b, h, i, j: s + bias[i, j], return_aux=AuxRequest(entropy=True))[1].entropy

    def plain(k):
        p = torch.log_softmax(q @ k.mT / 8**0.5 + bias, -1)
        return -(p.exp() * p).sum(-1)

    found, right = (grad(lambda k, f=f: f(k).square().sum())(k) for f in (entropy, plain))
    assert relative_error(found, right) <= 1e-4
    tangents = [jvp(f, (k,), (k,))[1] for f in (entropy, plain)]
    torch.testing.assert_close(*tangents, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_that_counts_moves(device):
    """Statistics know no values, and tangents of theirs are zeros."""
    q, k, *_ = inputs(device)
    nothing = jvp(lambda v: tuple(flex_attention(q, k, v, enable_gqa=True, return_aux=LEARNED)[1])[2::2], (k,), (k,))[1]
    assert len(nothing) == 2 and not any(t.any() for t in nothing)


def test_in_half_precision():
    """Results and tangents are float32."""
    q, k = (torch.randn(1, 2, 70, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    x, direction = (q, k, torch.ones(2)), tuple(torch.randn_like(t) for t in (q, k, torch.ones(2)))
    found, tangents = jvp(looked, x, direction)
    assert all(t.dtype == torch.float32 for t in (*found, *tangents))
    for mine, right in zip(tangents, jvp(exact, in_double(x), in_double(direction))[1], strict=True):
        assert relative_error(mine, right) <= 1e-2
