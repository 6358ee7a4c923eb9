"""Gradients of captured tensors that are read by the position itself: sums, without a position computed for every value."""

from __future__ import annotations

import pytest
import torch

from flexpress import flex_attention
from flexpress.codegen.run import captured
from support.dense import dense_attention
from support.devices import DEVICES

B, H, Q_LEN, KV_LEN = 2, 3, 20, 37
OTHER = torch.randn(KV_LEN, 32, generator=torch.Generator().manual_seed(1))
# a captured tensor's shape, and what is added to the score
WHOLE = {
    "by head": ((H,), lambda t, u, b, h, i, j: t[h] * (j - i)),
    "more heads than there are": ((H + 2,), lambda t, u, b, h, i, j: t[h] * (j - i)),
    "by batch entry and head": ((B, H), lambda t, u, b, h, i, j: t[b, h] * (j - i)),
    "by head and batch entry": ((H, B), lambda t, u, b, h, i, j: t[h, b] * (j - i)),
    "by query": ((Q_LEN,), lambda t, u, b, h, i, j: t[i] * j),
    "by query and head, longer": ((Q_LEN + 5, H), lambda t, u, b, h, i, j: t[i, h] * j),
    "by key": ((KV_LEN,), lambda t, u, b, h, i, j: t[j] * i),
    "by key, all": ((KV_LEN, H, B), lambda t, u, b, h, i, j: t[j, h, b] * i),
    "a number": ((), lambda t, u, b, h, i, j: t * (j - i)),
    "twice": ((max(B, H),), lambda t, u, b, h, i, j: t[h] * (j - i) + t[b] * i),
    "rows by query": ((Q_LEN, 32), lambda t, u, b, h, i, j: (t[i] * u[j]).sum(-1)),
    "rows by head and key": ((H, KV_LEN, 32), lambda t, u, b, h, i, j: (u[i] * t[h, j]).sum(-1)),
}


def check(shape, term, device, change=lambda t: t):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, n, 16, device=device) for n in (Q_LEN, KV_LEN, KV_LEN))
    own = torch.randn(shape, device=device)
    weight = torch.randn(B, H, Q_LEN, 16, device=device)

    def gradient(attend, dtype):
        leaf = own.to(dtype).requires_grad_()
        learned, other = change(leaf), OTHER.to(device, dtype)
        out = attend(*(t.to(dtype) for t in (q, k, v)), lambda s, b, h, i, j: s + 0.1 * term(learned, other, b, h, i, j))
        return torch.autograd.grad((out * weight).sum(), leaf)[0]

    found = gradient(lambda q, k, v, mod: flex_attention(q, k, v, mod), torch.float32)
    exact = gradient(lambda q, k, v, mod: dense_attention(q, k, v, mod)[0], torch.float64)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", WHOLE)
def test_positions_themselves(kind, device, monkeypatch):
    monkeypatch.setattr(captured, "compute", None)  # which says what positions are read
    check(*WHOLE[kind], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind, change",
    [
        ("by batch entry and head", lambda t: t[:, :1].expand(B, H)),
        ("by query", lambda t: t[:1].expand(Q_LEN)),
        ("rows by head and key", lambda t: t[:, :, :1].expand(H, KV_LEN, 32)),
        ("rows by head and key", lambda t: t[:1].expand(H, KV_LEN, 32)),
        ("by key, all", lambda t: t[:, :1].expand(KV_LEN, H, B)),
    ],
)
def test_positions_of_one_element(kind, change, device):
    check(*WHOLE[kind], device, change)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_at_what_autograd_has_expanded(device):
    """Of each index its own: what stands behind, as a hook, may not be a sum over them."""
    q, k, v = (torch.randn(2, 3, 20, 16, device=device) for _ in range(3))
    learned = torch.randn(20, 1, device=device, requires_grad=True)

    def gradient(attend, dtype, hook=None):
        expanded = learned.to(dtype).expand(20, 3)
        if hook:
            expanded.register_hook(hook)
        out = attend(q.to(dtype), k.to(dtype), v.to(dtype), lambda s, b, h, i, j: s + expanded[j, h])
        return torch.autograd.grad(out.square().sum(), learned if hook else expanded)[0]

    for hook in (None, lambda g: g.clamp(-0.1, 0.1)):
        found = gradient(lambda q, k, v, mod: flex_attention(q, k, v, mod), torch.float32, hook)
        exact = gradient(lambda q, k, v, mod: dense_attention(q, k, v, mod)[0], torch.float64, hook)
        torch.testing.assert_close(found.double(), exact.double(), rtol=1e-4, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape, term",
    [
        ((H,), lambda t, u, b, h, i, j: t[H - 1 - h] * (j - i)),
        ((H, H), lambda t, u, b, h, i, j: t[h, h] * (j - i)),
        ((Q_LEN,), lambda t, u, b, h, i, j: t[i // 2] * j),
        ((KV_LEN + 1,), lambda t, u, b, h, i, j: t[j + 1] * i),
        ((H, 2), lambda t, u, b, h, i, j: t[h, 1] * (j - i)),
    ],
)
def test_positions_that_are_computed(shape, term, device):
    check(shape, term, device)


@pytest.mark.parametrize("device", DEVICES)
def test_no_sum_is_an_einsum(device, monkeypatch):
    """Autocast, which may be on around backward(), has einsum in half precision on a GPU: sums of many numbers would overflow."""
    q, k, v = (torch.randn(2, 2, 20, 16, device=device) for _ in range(3))
    slopes, table = torch.rand(2, 2, device=device, requires_grad=True), torch.rand(20, 2, device=device, requires_grad=True)
    whole = torch.rand((), device=device, requires_grad=True)

    def mod(score, b, h, m, n):
        return score + slopes[h, b] * n + table[n, h] * whole

    out, learned = flex_attention(q, k, v, mod), (slopes, table, whole)
    expected = torch.autograd.grad(out.square().sum(), learned, retain_graph=True)
    monkeypatch.setattr(torch, "einsum", None)
    with torch.autocast(device, torch.bfloat16):
        found = torch.autograd.grad(out.square().sum(), learned)
    for gradient, exact in zip(found, expected, strict=True):
        assert torch.equal(gradient, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("read", [lambda t, h, i, j: t[h, i], lambda t, h, i, j: t[h, j - j], lambda t, h, i, j: t[h, -1]])
def test_one_index_of_any_stride(read, queries, device):
    """A dimension of one index has stride 0 in what NumPy makes with [:, None], and is contiguous to torch."""
    q, k, v = (torch.randn(B, H, n, 16, device=device) for n in (queries, KV_LEN, KV_LEN))
    learned = torch.randn(H, device=device).as_strided((H, 1), (1, 0))

    def gradient(attend, dtype):
        leaf = learned.to(dtype).as_strided((H, 1), (1, 0)).requires_grad_()
        assert leaf.stride() == (1, 0)
        index = (lambda i: i * 0) if queries > 1 else lambda i: i
        out = attend(q.to(dtype), k.to(dtype), v.to(dtype), lambda s, b, h, i, j: s * read(leaf, h, index(i), j))
        return torch.autograd.grad(out.square().sum(), leaf)[0]

    found = gradient(flex_attention, torch.float32)
    expected = gradient(lambda *args: dense_attention(*args)[0], torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(
    "mod",
    [
        lambda w: lambda s, b, h, i, j: s / s.abs() * w[h],
        lambda w: lambda s, b, h, i, j: s * torch.rsqrt(s * s) * w[0],
        lambda w: lambda s, b, h, i, j: s + w[h] * (s * s) ** -0.5 * s,
    ],
    ids=["sign", "rsqrt", "power"],
)
def test_scores_of_zero_that_are_nan_past_the_last_query(mod, second, device):
    """In a tile's rows that are no queries; a sum by head is of all of its rows."""
    q, k, v = (torch.randn(1, H, n, 16, device=device) for n in (70, KV_LEN, KV_LEN))

    def gradients(attend, dtype):
        own, query = torch.tensor([0.5, -0.7, 0.3], device=device, dtype=dtype).requires_grad_(), q.to(dtype).requires_grad_()
        out = attend(query, k.to(dtype), v.to(dtype), mod(own))
        found = torch.autograd.grad(out.square().sum(), (own, query), create_graph=second)
        return torch.autograd.grad(found[1].square().sum() + found[0].sum(), own) if second else found[:1]

    (found,) = gradients(lambda *args: flex_attention(*args, kernel_options={"BACKEND": "PORTABLE"}), torch.float32)
    (expected,) = gradients(lambda *args: dense_attention(*args)[0], torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
