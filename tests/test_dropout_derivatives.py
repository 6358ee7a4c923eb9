"""Dropout in torch.func and beside derivatives that it has not."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from flexpress import dropout_mask, flex_attention, mods, varlen_attention
from support.dense import dropped_attention
from support.devices import DEVICES

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


REFUSED = {
    "jvp": lambda q, *x: jvp(lambda q: ours(q, *x), (q,), (q,)),
    "vmap": lambda q, *x: vmap(lambda q: ours(q, *x))(torch.stack([q, q])),
    "vmap, randomness": lambda q, *_: vmap(lambda q: flex_attention(q, q, q, dropout_p=P), randomness="different")(torch.stack([q, q])),
    "jacrev": lambda q, *x: jacrev(lambda q: ours(q, *x))(q),
    "hessian": lambda q, *x: hessian(lambda q: ours(q, *x).sum())(q),
    "grad of grad": lambda q, *x: grad(lambda q: grad(lambda q: ours(q, *x).square().sum())(q).sum())(q),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_derivative_is_refused_in_words(name):
    with pytest.raises(NotImplementedError, match="dropout_p has first derivatives in reverse mode"):
        REFUSED[name](*tensors("cpu"))


def test_a_gradient_has_no_derivative():
    x = [t.requires_grad_() for t in tensors("cpu")]
    (first, *_) = torch.autograd.grad(ours(*x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="none of a gradient"):
        first.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_level_without_tangents(device):
    """As another thread may have opened one: torch's levels are those of the process."""
    x = [t.requires_grad_() for t in tensors(device)]
    wanted = torch.autograd.grad(ours(*x).square().sum(), x)
    with forward_ad.dual_level():
        out = ours(*x)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x), wanted)
