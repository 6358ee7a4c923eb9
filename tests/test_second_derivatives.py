"""Second derivatives by create_graph=True: of gradients of q, k, v and captured tensors, through out and lse, against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from flexpress import create_block_mask, flex_attention, mods, scaled_dot_product_attention, varlen_attention
from support.dense import dense_attention
from support.devices import DEVICES, for_any
from support.gradients import GradientProblem
from support.tangents import assert_as_exact, check_second, derivative_problems, twice_differentiated

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@for_any(derivative_problems, cpu=2, cuda=60)
def test_any_problem(p, device):
    check_second(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["none", "temperature", "per_query", "per_key", "bias", "table", "table, deterministic"])
def test_learned_tensors(name, device):
    """Every way to gather the gradient of a learned tensor."""
    shape = dict(B=2, Q_LEN=20, KV_LEN=33, D_QK=16, D_V=8, BLOCK_SIZE=64, group=1)
    name, _, deterministic = name.partition(", ")
    p = GradientProblem(**shape, dtype=torch.float32, score=name, mask="causal", seed=3, lse=True, deterministic=bool(deterministic))
    check_second(p, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_is_the_same_with_and_without_a_graph(device):
    q, k, v = (torch.randn(1, 2, 40, 16, device=device, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, device=device, requires_grad=True)
    out = flex_attention(q, k, v, mods.alibi(slopes), mask_mod=mods.causal)
    d_out = torch.randn_like(out)
    plain = torch.autograd.grad(out, (q, k, v, slopes), d_out, retain_graph=True)
    assert not any(g.requires_grad for g in plain)
    graphed = torch.autograd.grad(out, (q, k, v, slopes), d_out, create_graph=True)
    assert all(torch.equal(a, b) and b.requires_grad for a, b in zip(plain, graphed, strict=True))


def dense(mask_mod):
    return lambda q, k, v: dense_attention(q, k, v, None, mask_mod)[:2]


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device):
    """Blocks that begin where sequences do, and packed ones."""
    for lengths, head_dim in (([20, 0, 13], 8), *([([600, 700], 16)] if device == "cuda" else [])):
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
        x = [torch.randn(1, 2, sum(lengths), head_dim, device=device) for _ in range(3)]
        weights, direction = [torch.randn_like(x[0]), None], [torch.randn_like(t) for t in x]

        def attend(*x, ends=ends):
            q, k, v = (t[0].transpose(0, 1) for t in x)
            out, lse = varlen_attention(q, k, v, ends, mask_mod=mods.causal, return_lse=True)
            return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]

        reference = [
            twice_differentiated(dense(mods.document(ids, mods.causal)), [t.to(p) for t in x], [weights[0].to(p), None], direction)
            for p in (torch.float64, torch.float32)
        ]
        assert_as_exact(twice_differentiated(attend, x, weights, direction), *reference, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_begin_with_sequences(device, monkeypatch):
    """The same where the blocks are short, so that the interpreter gets through."""
    monkeypatch.setattr("flexpress.calls.packed_blocks.LONG", 0)
    monkeypatch.setattr("flexpress.calls.packed_blocks.MAX_QUERIES", 0)
    lengths = [40, 30, 5]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(3, device=device), torch.tensor(lengths, device=device))
    x = [torch.randn(1, 1, 75, 8, device=device) for _ in range(3)]
    weights, direction = [torch.randn_like(x[0]), None], [torch.randn_like(t) for t in x]

    def attend(*x):
        out, lse = varlen_attention(*(t[0].transpose(0, 1) for t in x), ends, mask_mod=mods.causal, return_lse=True)
        return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]

    reference = [
        twice_differentiated(dense(mods.document(ids, mods.causal)), [t.to(p) for t in x], [weights[0].to(p), None], direction)
        for p in (torch.float64, torch.float32)
    ]
    assert_as_exact(twice_differentiated(attend, x, weights, direction), *reference, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_penalty_trains(device):
    """What second derivatives are for: the norm of a gradient is a loss, beside the output, of a layer with a learned bias."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator).to(device).requires_grad_() for s in ((1, 2, 20, 8), (8, 8), (2, 20, 20)))

    def loss(x, weight, bias, attend):
        out = attend(x @ weight, x, x, lambda s, b, h, m, n: s + bias[h, m, n])
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out.sum() + slope.square().sum()

    found = torch.autograd.grad(loss(x, weight, bias, flex_attention), (x, weight, bias))
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    wanted = torch.autograd.grad(loss(*exact, lambda *args: dense_attention(*args)[0]), exact)
    assert_as_exact(found, wanted, wanted, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_third_derivatives_are_refused_in_words(device):
    q = torch.randn(1, 1, 20, 16, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(flex_attention(q, q, q).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="this would be a third"):
        second.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_empty_problems(device):
    q, k = (torch.randn(1, 2, n, 8, device=device, requires_grad=True) for n in (5, 0))
    (first,) = torch.autograd.grad(flex_attention(q, k, k).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    assert not first.any() and not second.any()


@pytest.mark.parametrize("device", DEVICES)
def test_other_front_doors(device):
    """What ends in the same call is differentiable as often."""
    q = torch.randn(1, 2, 20, 16, device=device, requires_grad=True)
    mask = create_block_mask(mods.causal, None, None, 20, 20, device)
    found = []
    for attend in (lambda q: flex_attention(q, q, q, None, mask), lambda q: scaled_dot_product_attention(q, q, q, is_causal=True)):
        (first,) = torch.autograd.grad(attend(q).square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), q)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "term",
    [
        lambda t, s: torch.nn.functional.logsigmoid(t),
        lambda t, s: torch.logaddexp(t, s * 0),
        lambda t, s: torch.logaddexp2(s * 0, t),
        lambda t, s: torch.nn.functional.softplus(t),
    ],
    ids=["logsigmoid", "logaddexp", "logaddexp2", "softplus"],
)
def test_where_two_forms_meet(term, device):
    """At 0, and where two numbers are the same: that is where gates begin."""
    q, k, v = (torch.randn(1, 1, 16, 16, device=device) for _ in range(3))
    weight, direction = torch.randn(1, 1, 16, 16, device=device), torch.randn(16, device=device)

    def second(attend, dtype):
        gates = torch.zeros(16, device=device, dtype=dtype).requires_grad_()
        out = attend(q.to(dtype), k.to(dtype), v.to(dtype), lambda s, b, h, i, j: s + term(gates[j], s))
        (gradient,) = torch.autograd.grad((out * weight.to(dtype)).sum(), gates, create_graph=True)
        return torch.autograd.grad((gradient * direction.to(dtype)).sum(), gates)[0]

    found, expected = second(flex_attention, torch.float32), second(lambda *args: dense_attention(*args)[0], torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
