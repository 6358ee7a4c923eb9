"""Dropout in every derivative and in torch.func: the same weights are dropped in all of them."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from flexpress import dropout_mask, flex_attention, mods, varlen_attention
from support.dense import dense_attention, dropped_attention, factors_of
from support.devices import DEVICES, for_any
from support.tangents import assert_as_exact, check_second, check_tangents, derivative_problems, twice_differentiated

pytestmark = pytest.mark.usefixtures("poisoned_memory")
P = 0.3


def tensors(device: str) -> list[torch.Tensor]:
    """q, k, v and slopes."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(device) for s in ((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 4), (2,))]


def seed_on(device: str) -> torch.Tensor:
    return torch.tensor([7], device=device)


def ours(q, k, v, slopes, **more):
    return flex_attention(q, k, v, mods.alibi(slopes), mask_mod=mods.causal, dropout_p=P, dropout_seed=seed_on(q.device), **more)


def theirs(q, k, v, slopes):
    kept = dropout_mask(seed_on(q.device), (1, 2, 20, 20), P)
    return dropped_attention(q, k, v, kept, P, lambda s, b, h, m, n: s + slopes[h] * (n - m), mods.causal)


def assert_close(found, wanted) -> None:
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)


REVERSE = {
    "grad": lambda attend: grad(lambda *x: attend(*x).square().sum(), (0, 1, 2, 3)),
    "vjp": lambda attend: lambda *x: vjp(attend, *x)[1](attend(*x)),
    "create_graph": lambda attend: lambda *x: torch.autograd.grad(attend(*x).square().sum(), x, create_graph=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REVERSE)
def test_gradients(name, device):
    x = [t.requires_grad_() for t in tensors(device)]
    assert_close(REVERSE[name](ours)(*x), REVERSE[name](theirs)(*(t.detach().double().requires_grad_() for t in x)))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device):
    """A sequence drops what it would drop alone, as the first of a batch."""
    q, k, v, slopes = tensors(device)
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)

    def attend(q, k, v, slopes):
        packed = (t[0].transpose(0, 1) for t in (q, k, v))
        options = {"mask_mod": mods.causal, "dropout_p": P, "dropout_seed": seed_on(device)}
        return varlen_attention(*packed, cu, score_mod=mods.alibi(slopes), **options)

    found = REVERSE["grad"](attend)(q, k, v, slopes)
    assert_close(found, REVERSE["grad"](theirs)(*(t.double() for t in (q, k, v, slopes))))


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_draws_from_torchs_generator(device):
    """As eager mode does: the same seed, the same gradients."""
    linear, x = torch.nn.Linear(8, 8).to(device), torch.randn(1, 2, 20, 8, device=device)

    def loss(parameters):
        q = functional_call(linear, parameters, x)
        return flex_attention(q, x, x, dropout_p=P).square().sum()

    parameters = dict(linear.named_parameters())
    torch.manual_seed(5)
    found = grad(loss)(parameters)
    torch.manual_seed(5)
    wanted = torch.autograd.grad(loss(parameters), tuple(parameters.values()))
    torch.testing.assert_close(tuple(found.values()), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_with_sinks_too(device):
    """As functions that have derivatives, and as they are."""
    x, sinks = [t.requires_grad_() for t in tensors(device)], torch.randn(2, device=device, requires_grad=True)
    out = ours(*x, sinks=sinks)
    plain, graphed = (torch.autograd.grad(out.square().sum(), (*x, sinks), create_graph=how, retain_graph=True) for how in (False, True))
    torch.testing.assert_close(graphed, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad(lambda s: ours(*x, sinks=s).square().sum())(sinks), plain[-1], rtol=1e-4, atol=1e-5)


@for_any(derivative_problems, cpu=2, cuda=30)
def test_any_tangent(p, device):
    check_tangents(p, device, dropout_p=0.3)


@for_any(derivative_problems, cpu=2, cuda=30)
def test_any_second_derivative(p, device):
    check_second(p, device, dropout_p=0.3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moving", range(4))
def test_one_tangent_alone(moving, device):
    x = tensors(device)

    def along(attend, x):
        return jvp(lambda t: attend(*x[:moving], t, *x[moving + 1 :]), (x[moving],), (torch.ones_like(x[moving]),))

    assert_close(along(ours, x), along(theirs, [t.double() for t in x]))


JACOBIANS = {
    "jacrev": lambda attend, q, k, v: jacrev(lambda s: attend(q, k, v, s).sum((0, 2, 3))),
    "jacfwd": lambda attend, q, k, v: jacfwd(lambda s: attend(q, k, v, s).sum((0, 2, 3))),
    "hessian": lambda attend, q, k, v: hessian(lambda s: attend(q, k, v, s).square().sum()),
    "reverse over reverse": lambda attend, q, k, v: jacrev(grad(lambda s: attend(q, k, v, s).square().sum())),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians(name, device):
    x = tensors(device)
    found = JACOBIANS[name](ours, *x[:3])(x[3])
    assert_close([found], [JACOBIANS[name](theirs, *(t.double() for t in x[:3]))(x[3].double())])


@pytest.mark.parametrize("device", DEVICES)
def test_all_orders_with_sinks(device):
    q, k, v, slopes = tensors(device)
    sinks = torch.randn(2, device=device)

    def penalty(attend, sinks, q):
        return grad(lambda q: attend(q, sinks).square().sum())(q).square().sum()

    found = grad(penalty, 1)(lambda q, s: ours(q, k, v, slopes, sinks=s), sinks, q)
    kept = dropout_mask(seed_on(device), (1, 2, 20, 20), P)
    exact = [t.double() for t in (q, k, v, slopes, sinks)]

    def dense(q, sinks):
        out, lse, _ = dense_attention(
            q, *exact[1:3], lambda s, b, h, m, n: s + exact[3][h] * (n - m), mods.causal, factors=factors_of(kept, P)
        )
        return out * torch.sigmoid(lse - sinks[:, None])[..., None]

    assert_close([found], [grad(penalty, 1)(dense, exact[4], exact[0])])


@pytest.mark.parametrize("device", DEVICES)
def test_mapped_calls_drop_what_each_would_alone(device):
    q, *others = tensors(device)
    many = torch.stack([q, 2 * q, -q])
    assert torch.equal(vmap(lambda q: ours(q, *others))(many), torch.stack([ours(t, *others) for t in many]))
    assert torch.equal(vmap(lambda q: ours(q, *others), 4, 1)(many.movedim(0, 4)), torch.stack([ours(t, *others) for t in many], 1))
    assert vmap(lambda q: ours(q, *others))(many[:0]).shape == (0, *ours(q, *others).shape)
    seeds = torch.tensor([[3], [4], [3]], device=device)

    def attend(q, seed):
        return flex_attention(q, q, q, dropout_p=P, dropout_seed=seed)

    found = vmap(attend, (None, 0))(q, seeds)
    assert torch.equal(found, torch.stack([attend(q, seed) for seed in seeds])) and not torch.equal(found[0], found[1])
    gradients = vmap(grad(lambda q, seed: attend(q, seed).square().sum()), (0, 0))(many, seeds)
    alone = [grad(lambda q, seed: attend(q, seed).square().sum())(*given) for given in zip(many, seeds, strict=True)]
    torch.testing.assert_close(gradients, torch.stack(alone))


@pytest.mark.parametrize("device", DEVICES)
def test_randomness_is_torchs(device):
    q, *_ = tensors(device)
    many = q.expand(3, *q.shape)

    def attend(q):
        return flex_attention(q, q, q, dropout_p=P)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(attend)(many)
    torch.manual_seed(1)
    first, second, third = vmap(attend, randomness="same")(many)
    torch.manual_seed(1)
    assert torch.equal(first, second) and torch.equal(first, third) and torch.equal(first, attend(q))
    first, second, third = vmap(attend, randomness="different")(many)
    assert not torch.equal(first, second) and not torch.equal(first, third) and not torch.equal(second, third)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_examples(device):
    """Per-sample gradients of a module, with dropout of their own."""
    linear, x = torch.nn.Linear(8, 8).to(device), torch.randn(3, 2, 20, 8, device=device)

    def loss(parameters, x):
        q = functional_call(linear, parameters, x)[None]
        return flex_attention(q, q, x[None], dropout_p=P).square().sum()

    parameters = {name: t.detach() for name, t in linear.named_parameters()}
    found = vmap(grad(loss), (None, 0), randomness="different")(parameters, x)
    assert all(found[name].shape == (3, *t.shape) and found[name].isfinite().all() for name, t in parameters.items())
    torch.manual_seed(3)
    found = vmap(grad(loss), (None, 0), randomness="same")(parameters, x)
    for i in range(3):
        torch.manual_seed(3)
        for name, gradient in grad(loss)(parameters, x[i]).items():
            torch.testing.assert_close(found[name][i], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_of_packed_sequences(device, monkeypatch):
    """In blocks of packed positions, and in those that begin with sequences, which the interpreter gets through where they are short."""
    lengths = [33, 0, 20]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    x = [torch.randn(1, 2, sum(lengths), 8, device=device) for _ in range(3)]
    weights, direction = [torch.randn_like(x[0]), None], [torch.randn_like(t) for t in x]

    def attend(*x):
        given = {"mask_mod": mods.causal, "dropout_p": P, "dropout_seed": seed_on(device), "return_lse": True}
        out, lse = varlen_attention(*(t[0].transpose(0, 1) for t in x), ends, **given)
        return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]

    def dense(*x):
        parts = zip(*(t.split(lengths, 2) for t in x), strict=True)
        kept = dropout_mask(seed_on(device), (3, 2, 33, 33), P)
        found = [
            dense_attention(*part, None, mods.causal, None, x[0].dtype, factors_of(kept[i : i + 1, :, :n, :n], P))[:2]
            for i, (part, n) in enumerate(zip(parts, lengths, strict=True))
            if n
        ]
        return [torch.cat(outs, 2) for outs in zip(*found, strict=True)]

    reference = [
        twice_differentiated(dense, [t.to(p) for t in x], [weights[0].to(p), None], direction) for p in (torch.float64, torch.float32)
    ]
    assert_as_exact(twice_differentiated(attend, x, weights, direction), *reference, torch.float32)
    monkeypatch.setattr("flexpress.calls.packed_blocks.LONG", 0)
    monkeypatch.setattr("flexpress.calls.packed_blocks.MAX_QUERIES", 0)
    assert_as_exact(twice_differentiated(attend, x, weights, direction), *reference, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_that_is_overwritten_is_an_error(device):
    x, seed = [t.requires_grad_() for t in tensors(device)[:3]], seed_on(device)
    out = flex_attention(*x, dropout_p=P, dropout_seed=seed)
    (first, *_) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_all_or_nothing_is_dropped(device):
    q, k, v, _ = tensors(device)
    out, tangent = jvp(lambda v: flex_attention(q, k, v, dropout_p=1.0), (v,), (v,))
    assert not out.any() and not tangent.any()
    x = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(flex_attention(x, k, v, dropout_p=1.0).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert not first.any() and not second.any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_level_without_tangents(device):
    """As another thread may have opened one: torch's levels are those of the process."""
    x = [t.requires_grad_() for t in tensors(device)]
    wanted = torch.autograd.grad(ours(*x).square().sum(), x)
    with forward_ad.dual_level():
        out = ours(*x)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x), wanted)
