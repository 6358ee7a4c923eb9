"""The recipes of places in space, as kernels compute them, against dense attention, with gradients to all that they capture."""

from __future__ import annotations

import pytest
import torch

from flexpress import create_block_mask, evaluate_mod, flex_attention
from flexpress.mods import gaussian_distances, invariant_points, within_radius
from support.dense import dense_attention
from support.devices import DEVICES

B, H, S = 2, 2, 70


def random(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device).requires_grad_()


def distances(places, means, widths, weights):
    """The bias of gaussian_distances."""
    apart = places[:, :, None] - places[:, None]
    distance = torch.linalg.vector_norm(apart, dim=-1)[:, None, :, :, None]
    return (weights[:, None, None] * torch.exp(-0.5 * ((distance - means) / widths) ** 2)).sum(-1)


def points(query_points, key_points, weights):
    """That of invariant_points."""
    return -0.5 * weights[:, None, None] * (query_points[:, :, :, None] - key_points[:, :, None]).square().sum((-2, -1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "recipe, bias, shapes",
    [
        (gaussian_distances, distances, [(B, S, 3), (4,), (4,), (H, 4)]),
        (invariant_points, points, [(B, H, S, 4, 3), (B, H, S, 4, 3), (H,)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_scores_by_places(recipe, bias, shapes, device):
    captured = [random(device, *shape) for shape in shapes]
    captured[1] = (random(device, *shapes[1]) * 0.5 + 1).detach().requires_grad_()
    q, k, v, upstream = torch.randn(4, B, H, S, 32, device=device)
    mask = create_block_mask(within_radius(captured[0], 2.0), B, None, S, S, device) if recipe is gaussian_distances else None
    out = flex_attention(q, k, v, recipe(*captured), mask)
    exact_mask = None
    if mask is not None:
        near = (captured[0][:, :, None] - captured[0][:, None]).square().sum(-1)[:, None] <= 4.0
        exact_mask = lambda *_: near  # noqa: E731
    exact, *_ = dense_attention(q, k, v, lambda score, *_: score + bias(*(t.double() for t in captured)), exact_mask)
    torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=1e-4)
    for got, expected in zip(*(torch.autograd.grad(o, captured, upstream.to(o.dtype)) for o in (out, exact)), strict=True):
        assert (got - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_places_that_lie_together_make_empty_blocks(device):
    places = torch.arange(1024, device=device)[:, None] * torch.tensor([0.1, 0.0, 0.0], device=device)
    assert create_block_mask(within_radius(places, 5.0), None, None, 1024, 1024, device, 128).sparsity() > 60


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_distances_whose_squares_half_precision_does_not_hold(dtype):
    places = torch.tensor([[0.0, 0, 0], [304, 0, 0], [0, 384, 0], [512, 0, 0]])
    exact = torch.cdist(places, places)
    seen = evaluate_mod(within_radius(places.to(dtype), 400.0), torch.zeros(1, 1, 4, 4), "mask")[0, 0]
    assert torch.equal(seen, exact <= 400)
    points = places.to(dtype).view(1, 1, 4, 1, 3)
    found = evaluate_mod(invariant_points(points, points, torch.ones(1)), torch.zeros(1, 1, 4, 4))[0, 0]
    torch.testing.assert_close(found, -0.5 * exact**2)
