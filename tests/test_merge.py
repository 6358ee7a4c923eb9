"""Results of attention to parts of the keys are put together: as if all had been one call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress import flex_attention, merge_attention
from support.dense import dense_attention
from support.devices import DEVICES


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 99), st.sampled_from([1.0, 1e4]))
def test_parts_make_the_whole(sizes, seed, scale):
    """In float64, for values and gradients; some rows see nothing in some parts, or in all."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64).requires_grad_() for n in (5, sum(sizes), sum(sizes)))
    hidden = torch.rand(5, sum(sizes)) < 0.6
    hidden[0] = True

    def attend(first, last):
        scores = (q @ k[:, :, first:last].transpose(-1, -2) * scale).masked_fill(hidden[:, first:last], -torch.inf)
        seen = ~hidden[:, first:last].all(-1)
        lse = torch.where(seen, torch.where(seen[:, None], scores, 0.0).logsumexp(-1), -torch.inf)
        weights = (scores - torch.where(seen, lse, 0.0)[..., None]).exp()
        return weights @ v[:, :, first:last], lse

    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [attend(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    found, whole = merge_attention(*zip(*parts, strict=True)), attend(0, ends[-1])
    for have, want in zip(found, whole, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
    d_out, d_lse = torch.randn(found[0].shape), torch.randn(found[1].shape)
    losses = [(out * d_out).sum() + (torch.where(torch.isneginf(lse), 0.0, lse) * d_lse).sum() for out, lse in (found, whole)]
    for have, want in zip(*(torch.autograd.grad(loss.double(), (q, k, v)) for loss in losses), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4 * max(1.0, scale))


@pytest.mark.parametrize("device", DEVICES)
def test_of_kernels(device):
    q, k, v = (torch.randn(1, 2, 70, 16, device=device).requires_grad_() for _ in range(3))
    parts = [flex_attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 33), slice(33, 70))]
    out, lse = merge_attention(*zip(*parts, strict=True))
    exact, exact_lse, _ = dense_attention(q, k, v)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5 if device == "cpu" else 2e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5 if device == "cpu" else 2e-3)
    d_out = torch.randn_like(out)
    for have, want in zip(
        torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True), torch.autograd.grad(exact, (q, k, v), d_out.double()), strict=True
    ):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-4 if device == "cpu" else 1e-2)


def test_shapes_that_do_not_fit():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="needs an lse for each out, and at least one, got 2 outs and 1 lses"):
        merge_attention([out, out], [lse])
    with pytest.raises(ValueError, match=r"all lses \(..., Q_LEN\), got"):
        merge_attention([out, out[:, :1]], [lse, lse])
