"""Sinks in forward mode, in second derivatives and in torch.func, against float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, hessian, jacrev, vjp, vmap

from flexpress import create_block_mask, flex_attention, mods, varlen_attention
from support.dense import relative_error
from support.devices import DEVICES, for_any
from support.tangents import check_second, check_tangents, dense_attention_with_sinks, derivative_problems

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@for_any(derivative_problems, cpu=2, cuda=30)
def test_tangents_of_any_problem(p, device):
    check_tangents(p, device, sinks=True)


@for_any(derivative_problems, cpu=2, cuda=30)
def test_second_derivatives_of_any_problem(p, device):
    check_second(p, device, sinks=True)


def tensors(device: str) -> list[torch.Tensor]:
    """q, k, v, slopes and sinks."""
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 2, 9, 8), (2, 1, 13, 8), (2, 1, 13, 4), (2,), (2,)
    return [torch.randn(s, generator=generator).to(device) for s in shapes]


def ours(q, k, v, slopes, sinks):
    return flex_attention(q, k, v, mods.alibi(slopes), mask_mod=mods.causal, enable_gqa=True, sinks=sinks, return_lse=True)


def theirs(q, k, v, slopes, sinks):
    alibi = lambda s, b, h, m, n: s + slopes[h] * (n - m)  # noqa: E731
    return dense_attention_with_sinks(sinks)(q, k, v, alibi, mods.causal, None, torch.float64)[:2]


def doubled(x) -> list[torch.Tensor]:
    return [t.double() for t in x]


TRANSFORMS = {
    "grad": lambda attend: grad(lambda *x: attend(*x)[0].square().sum() + attend(*x)[1].sum(), (0, 1, 2, 3, 4)),
    "vjp": lambda attend: lambda *x: vjp(attend, *x)[1](attend(*x)),
    "jacobian": lambda attend: jacrev(lambda *x: attend(*x)[1][:, :, 5], (0, 3, 4)),
    "hessian": lambda attend: hessian(lambda *x: attend(*x)[0].square().sum(), (3, 4)),
    "mapped sinks": lambda attend: lambda *x: vmap(attend, (None, None, None, None, 0))(*x[:4], torch.stack([x[4], -x[4], 0 * x[4]])),
    "mapped queries": lambda attend: lambda *x: vmap(attend, (0, None, None, None, None))(torch.stack([x[0], -x[0]]), *x[1:]),
    "gradients by example": lambda attend: (
        lambda *x: vmap(grad(lambda sinks, q: attend(q[None], *(t[:1] for t in x[1:3]), x[3], sinks)[0].square().sum()), (None, 0))(
            x[4], x[0]
        )
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, device):
    x = tensors(device)
    found, wanted = TRANSFORMS[name](ours)(*x), TRANSFORMS[name](theirs)(*doubled(x))
    found, wanted = torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_pass_inside_a_transform(device):
    """Of a call outside of it."""
    x = [t.requires_grad_() for t in tensors(device)]
    exact = [t.detach().double().requires_grad_() for t in x]
    weights = torch.randn(3, 2, 2, 9, 4, device=device)

    def gradients(attend, x):
        out, _ = attend(*x)
        return vmap(lambda w: torch.autograd.grad(out, x, w.to(out.dtype), retain_graph=True))(weights)

    found, wanted = gradients(ours, x), gradients(theirs, exact)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("by", ["create_graph", "torch.func"])
def test_rows_without_keys_and_sinks_without_weight(by, masked, device):
    """Second derivatives are finite there, and those of the other rows are not touched; a sink as large as lse is no corner either."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, n, 8, generator=generator).to(device) for n in (5, 4, 4))
    q[:, 2, 4], sinks = 0.0, torch.tensor([-math.inf, 0.7, math.log(3)], device=device)

    def seen(b, h, q_idx, kv_idx):
        return kv_idx < q_idx - (q_idx == 4).int()  # none of query 0, 3 of query 4, whose scores are 0 in head 2

    def second(attend, *x):
        def loss(*x):
            out, lse = attend(*x)
            return out.square().sum() + torch.where(lse == -math.inf, 0.0, lse).square().sum()

        if by == "torch.func":
            return grad(lambda *x: sum(g.square().sum() for g in grad(loss, (0, 1, 2, 3))(*x)), (0, 1, 2, 3))(*x)
        x = [t.detach().requires_grad_() for t in x]
        first = torch.autograd.grad(loss(*x), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), x)

    mask = {"block_mask": create_block_mask(seen, None, None, 5, 4, device)} if masked else {"mask_mod": seen}
    found = second(lambda q, k, v, s: flex_attention(q, k, v, **mask, sinks=s, return_lse=True), q, k, v, sinks)
    finite = sinks.double().clamp(min=-1e4)  # whose weight is 0 as well
    wanted = second(
        lambda q, k, v, s: dense_attention_with_sinks(s)(q, k, v, None, seen, None, torch.float64)[:2], *doubled((q, k, v)), finite
    )
    for have, want in zip(found[:3], wanted[:3], strict=True):
        assert have.isfinite().all()
        assert relative_error(have[:, 1:], want[:, 1:]) < 1e-4  # lse of head 0 is another one in an empty row
        assert relative_error(have[:, 0, 1:], want[:, 0, 1:]) < 1e-4
    assert relative_error(found[3][1:], wanted[3][1:]) < 1e-4
    assert found[3][0] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device):
    q, k, v, slopes, sinks = (t[:1] if t.ndim == 4 else t for t in tensors(device))
    cu, packed = torch.tensor([0, 9], dtype=torch.int32, device=device), [t[0].transpose(0, 1) for t in (q, k[:, :, :9], v[:, :, :9])]

    def attend(q, k, v, slopes, sinks):
        return varlen_attention(q, k, v, cu, score_mod=mods.alibi(slopes), mask_mod=mods.causal, sinks=sinks)

    found = hessian(lambda *x: attend(*x).square().sum(), (3, 4))(*packed, slopes, sinks)
    exact = doubled((q, k[:, :, :9], v[:, :, :9], slopes, sinks))
    wanted = hessian(lambda *x: theirs(*x)[0].square().sum(), (3, 4))(*exact)
    for of_first, of_first_exact in zip(found, wanted, strict=True):
        for have, want in zip(of_first, of_first_exact, strict=True):
            torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)


def test_what_is_no_sink_is_refused_in_transforms_too():
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=r"sinks must have shape \(2,\)"):
        grad(lambda q: flex_attention(q, q, q, sinks=torch.zeros(3)).sum())(q)
