"""The recipes of flexpress.mods with example parameters, by name: for the command line and for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flexpress import mods

HEADS, LENGTH = 16, 4096  # what the example tensors are made for, unless other heads are asked for


class Recipe(NamedTuple):
    """A mod to be made, for so many heads: `kind` is "score", "mask" or "none"."""

    kind: str
    example: str
    make: Callable[[int], Callable | None]


def _table(heads: int) -> torch.Tensor:
    """A bias for every head and distance."""
    return torch.zeros(heads, 2 * LENGTH - 1)


def _ids() -> torch.Tensor:
    """Eight documents of equal length."""
    return torch.arange(LENGTH, dtype=torch.int32) // (LENGTH // 8)


def _places(*shape: int) -> torch.Tensor:
    """Points along a spiral."""
    turn = torch.arange(LENGTH) * 0.1
    return torch.stack([turn.cos(), turn.sin(), turn * 0.1], dim=1).expand(*shape, LENGTH, 3)


def _points(heads: int) -> torch.Tensor:
    """Four points for every head and position."""
    return _places(1, heads, 4).transpose(2, 3).contiguous()


def _parents() -> torch.Tensor:
    """A tree of chains of eight nodes, each of which branches off the one before at its fourth node."""
    nodes = torch.arange(LENGTH, dtype=torch.int32)
    return torch.where((nodes % 8 == 0) & (nodes > 0), nodes - 5, nodes - 1)


def _hops() -> torch.Tensor:
    """Distances in a graph of so many nodes in a row, up to 8."""
    nodes = torch.arange(LENGTH)
    return (nodes[:, None] - nodes).abs().clamp_max(8).to(torch.int8)


def _windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Windows that grow with the position."""
    position = torch.arange(LENGTH, dtype=torch.int32)
    return position - position // 4, position + 1


RECIPES = {
    "plain": Recipe("none", "no mod", lambda heads: None),
    "causal": Recipe("mask", "causal", lambda heads: mods.causal),
    "sliding_window": Recipe("mask", "sliding_window(1024)", lambda heads: mods.sliding_window(1024)),
    "prefix_lm": Recipe("mask", "prefix_lm(512)", lambda heads: mods.prefix_lm(512)),
    "document": Recipe("mask", "document(ids, causal)", lambda heads: mods.document(_ids(), mods.causal)),
    "dilated_window": Recipe("mask", "dilated_window(256, 4)", lambda heads: mods.dilated_window(256, 4)),
    "global_sliding": Recipe("mask", "global_sliding(256, 1)", lambda heads: mods.global_sliding(256, 1)),
    "neighborhood": Recipe("mask", "neighborhood((64, 64), 7)", lambda heads: mods.neighborhood((64, 64), 7)),
    "tree": Recipe("mask", "tree(parents)", lambda heads: mods.tree(_parents())),
    "block_causal": Recipe("mask", "block_causal(32)", lambda heads: mods.block_causal(32)),
    "block_diffusion": Recipe("mask", "block_diffusion(2048, 32)", lambda heads: mods.block_diffusion(LENGTH // 2, 32)),
    "jagged_window": Recipe("mask", "jagged_window(starts, ends)", lambda heads: mods.jagged_window(*_windows())),
    "graph_neighbors": Recipe("mask", "graph_neighbors(distances, 2)", lambda heads: mods.graph_neighbors(_hops(), 2)),
    "alibi": Recipe("score", f"alibi(alibi_slopes({HEADS}))", lambda heads: mods.alibi(mods.alibi_slopes(heads))),
    "softcap": Recipe("score", "softcap(50.0)", lambda heads: mods.softcap(50.0)),
    "relative_bias": Recipe("score", "relative_bias(table)", lambda heads: mods.relative_bias(_table(heads))),
    "t5_bias": Recipe("score", "t5_bias(weight)", lambda heads: mods.t5_bias(torch.zeros(32, heads))),
    "within_radius": Recipe("mask", "within_radius(places, 2.0)", lambda heads: mods.within_radius(_places(), 2.0)),
    "gaussian_distances": Recipe(
        "score",
        "gaussian_distances(places, means, widths, weights)",
        lambda heads: mods.gaussian_distances(_places(1).contiguous(), torch.linspace(0, 10, 8), torch.ones(8), torch.zeros(heads, 8)),
    ),
    "invariant_points": Recipe(
        "score",
        "invariant_points(points, points, weights)",
        lambda heads: mods.invariant_points(_points(heads), _points(heads), torch.ones(heads)),
    ),
    "graph_bias": Recipe("score", "graph_bias(distances, weight)", lambda heads: mods.graph_bias(_hops(), torch.zeros(9, heads))),
    "disentangled": Recipe("score", "disentangled(c2p, p2c)", lambda heads: mods.disentangled(*torch.zeros(2, 1, heads, LENGTH, 16))),
    "forget_gate": Recipe("score", "forget_gate(log_gates)", lambda heads: mods.forget_gate(torch.zeros(1, heads, LENGTH))),
    "yarn_temperature": Recipe("score", "yarn_temperature(32.0)", lambda heads: mods.yarn_temperature(32.0)),
}


def make(*names: str, heads: int = HEADS) -> tuple[Callable | None, Callable | None]:
    """(score_mod, mask_mod) of recipes by name; several of a kind are composed.

    Score mods apply from left to right, masks must all hold. Tensors are for `heads` query heads. Raises ValueError for an unknown name.

        score_mod, mask_mod = make("alibi", "causal")
    """
    from flexpress.masks.mask_mods import and_masks

    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise ValueError(f"there is no recipe {unknown[0]!r}; there are {', '.join(RECIPES)}")
    made = {kind: [RECIPES[n].make(heads) for n in names if RECIPES[n].kind == kind] for kind in ("score", "mask")}
    scores, masks = made["score"], made["mask"]
    score_mod = mods.compose_scores(*scores) if scores else None
    return score_mod, masks[0] if len(masks) == 1 else and_masks(*masks) if masks else None
