"""Tangents and second derivatives of dot products of long rows in packed sequences, under torch.func, with sinks, dropout and statistics.

Random problems are in test_long_dots.py."""

from __future__ import annotations

import pytest
import torch

from flexpress import AuxRequest, dropout_mask, flex_attention, varlen_attention
from support.dense import dense_attention, factors_of
from support.devices import DEVICES
from support.tangents import twice_differentiated

H, D, WIDTH = 2, 16, 24


def rows(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def inputs(device: str, M: int, N: int) -> list[torch.Tensor]:
    """q, k, v, and rows of queries and of keys."""
    return rows(device, (2, H, M, D), (2, H, N, D), (2, H, N, D), (2, H, M, WIDTH), (2, N, WIDTH))


def bent(qr, kr):
    return lambda s, b, h, i, j: s * 1.1 + torch.tanh(0.3 * torch.dot(qr[b, h, i], kr[b, j]))


def bent_densely(qr, kr):
    product = 0.3 * qr @ kr[:, None].transpose(-1, -2)
    return lambda s, *_: s * 1.1 + torch.tanh(product)


def attend(q, k, v, qr, kr):
    return flex_attention(q, k, v, bent(qr, kr))


def attend_densely(q, k, v, qr, kr):
    return dense_attention(q, k, v, bent_densely(qr, kr))[0]


def close(found, exact, most: float = 3e-5) -> bool:
    return bool((found.double() - exact).norm() <= most * exact.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(33, 70), (130, 40)])
def test_forward_over_reverse_mode(lengths, device):
    """A tangent of gradients, and the gradient of a tangent."""
    x = inputs(device, *lengths)
    direction = rows(device, *(t.shape for t in x))
    exact_x, exact_direction = ([t.double() for t in tensors] for tensors in (x, direction))

    def both(attend, x, direction):
        slopes = torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=tuple(range(5)))
        _, moved = torch.func.jvp(slopes, tuple(x), tuple(direction))
        change = lambda *x: torch.func.jvp(attend, x, tuple(direction))[1].square().sum()  # noqa: E731
        return *moved, *torch.func.grad(change, argnums=tuple(range(5)))(*x)

    for found, exact in zip(both(attend, x, direction), both(attend_densely, exact_x, exact_direction), strict=True):
        assert close(found, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moving", [(3,), (4,), (1, 4), (0, 3)])
def test_what_moves_alone(moving, device):
    """Only one side of the product has a tangent, or wants a second derivative."""
    x = inputs(device, 20, 37)
    exact_x = [t.double() for t in x]

    def second(attend, x):
        x = [t.detach().requires_grad_(i in moving) for i, t in enumerate(x)]
        wanted = [x[i] for i in moving]
        first = torch.autograd.grad(attend(*x).square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    for found, exact in zip(second(attend, x), second(attend_densely, exact_x), strict=True):
        assert close(found, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_mapped_tangents(device):
    """Each call of vmap has rows, and a direction, of its own."""
    q, k, v, qr, kr = inputs(device, 9, 12)
    more, moves = rows(device, (3, *qr.shape), (3, *kr.shape))

    def moved(attend, q, k, v, kr):
        return lambda qr, direction: torch.func.jvp(lambda qr, kr: attend(q, k, v, qr, kr), (qr, kr), (qr, direction))[1]

    found = torch.func.vmap(moved(attend, q, k, v, kr))(more, moves)
    dense = moved(attend_densely, *(t.double() for t in (q, k, v, kr)))
    for n in range(3):
        assert close(found[n], dense(more[n].double(), moves[n].double()))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device):
    lengths = [20, 0, 33]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    x = rows(device, *[(sum(lengths), H, D)] * 3, (3, 33, WIDTH), (3, 33, WIDTH))

    def packed(q, k, v, qr, kr):
        mod = lambda s, b, h, i, j: s + torch.sin(0.3 * torch.dot(qr[b, i], kr[b, j]))  # noqa: E731
        out, lse = varlen_attention(q, k, v, ends, score_mod=mod, return_lse=True)
        return out, lse

    def dense(q, k, v, qr, kr):
        parts = []
        for s, n in ((s, n) for s, n in enumerate(lengths) if n):
            here, bias = slice(int(ends[s]), int(ends[s + 1])), torch.sin(0.3 * qr[s, :n] @ kr[s, :n].T)
            parts.append(dense_attention(*(t[here].transpose(0, 1)[None] for t in (q, k, v)), lambda score, *_, bias=bias: score + bias))
        return torch.cat([out[0].transpose(0, 1) for out, *_ in parts]), torch.cat([lse[0].T for _, lse, _ in parts])

    weights = rows(device, (sum(lengths), H, D), (sum(lengths), H))
    direction = rows(device, *(t.shape for t in x))
    found = twice_differentiated(packed, x, weights, direction)
    for got, exact in zip(found, twice_differentiated(dense, *([t.double() for t in ts] for ts in (x, weights, direction))), strict=True):
        assert close(got, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_sinks_and_dropout(device):
    M, N = 20, 37
    x = [*inputs(device, M, N), *rows(device, (H,))]
    seed = torch.tensor([5], device=device)
    kept = factors_of(dropout_mask(seed, (2, H, M, N), 0.3), 0.3)

    def ours(q, k, v, qr, kr, sinks):
        return flex_attention(q, k, v, bent(qr, kr), sinks=sinks, dropout_p=0.3, dropout_seed=seed, return_lse=True)

    def dense(q, k, v, qr, kr, sinks):
        scores = bent_densely(qr, kr)(q @ k.transpose(-1, -2) * D**-0.5)
        scores = torch.cat([scores, sinks[:, None, None].expand(2, H, M, 1)], -1)
        return (scores.softmax(-1)[..., :N] * kept.to(v.dtype)) @ v, scores.logsumexp(-1)

    weights, direction = rows(device, (2, H, M, D), (2, H, M)), rows(device, *(t.shape for t in x))
    found = twice_differentiated(ours, x, weights, direction)
    exact = twice_differentiated(dense, *([t.double() for t in ts] for ts in (x, weights, direction)))
    for got, want in zip(found, exact, strict=True):
        assert close(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_statistics(device):
    """The gradient of the entropy, and two derivatives of column sums."""
    q, k, v, qr, kr = inputs(device, 20, 37)

    def ours(qr, kr):
        return flex_attention(q, k, v, bent(qr, kr), return_aux=AuxRequest(entropy=True, column_sums=True))[1]

    def dense(qr, kr):
        score = q.double() @ k.double().transpose(-1, -2) * D**-0.5
        weights = bent_densely(qr, kr)(score).softmax(-1)
        return weights.sum(2), torch.special.entr(weights).sum(-1)

    (by_key,) = rows(device, (2, H, 37))
    learned = [t.detach().requires_grad_() for t in (qr, kr)]
    found, exact_learned = ours(*learned), [t.detach().double().requires_grad_() for t in (qr, kr)]
    columns, entropy = dense(*exact_learned)
    for got, exact in zip(
        torch.autograd.grad(found.entropy.square().sum(), learned, retain_graph=True),
        torch.autograd.grad(entropy.square().sum(), exact_learned, retain_graph=True),
        strict=True,
    ):
        assert close(got, exact)

    def twice(columns, learned):
        first = torch.autograd.grad((columns * by_key.to(columns.dtype)).sum(), learned, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), learned)

    for got, exact in zip(twice(found.column_sums, learned), twice(columns, exact_learned), strict=True):
        assert close(got, exact)
