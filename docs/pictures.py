"""The pictures of docs/recipes.md: what each recipe hides, or makes of scores, at 32 x 32 positions. `make pictures` draws them anew.

A mask is what create_mask says of every position, with the blocks of create_block_mask behind it; scores are what evaluate_mod says.
Both are run by printed kernels. A picture is an SVG whose paths are runs of cells of one colour.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch

import flexpress
from flexpress import mods
from flexpress.plot import _COLOURS

FOLDER = Path(__file__).parent / "pictures"
SIZE, BLOCK, CELL = 32, 8, 6  # positions, positions of a block, pixels of a position
LEVELS = 11  # colours of scores, an odd number: the one in the middle is 0
EMPTY, PARTIAL, FULL = _COLOURS
HIDDEN = "#fbe5bd"  # a position that a partial block hides
BLUE, WHITE, RED = (0x05, 0x71, 0xB0), (0xF7, 0xF7, 0xF7), (0xCA, 0x00, 0x20)  # ends and middle of ColorBrewer's RdBu


class Recipe(NamedTuple):
    """kind is "mask", "score" or "weights" (of values in attention, not of a mod's making); of a score_mod, what `scores` it is given: 0,
    or `slope` a position that the key is ahead."""

    kind: str
    code: str
    slope: float = 0.0


RECIPES = {
    "causal": Recipe("mask", "causal"),
    "causal_offset": Recipe("mask", "causal_offset(8)"),
    "sliding_window": Recipe("mask", "sliding_window(6)"),
    "sliding_window_bidirectional": Recipe("mask", "sliding_window_bidirectional(6, 3)"),
    "dilated_window": Recipe("mask", "dilated_window(5, 3)"),
    "global_sliding": Recipe("mask", "global_sliding(4, 2)"),
    "prefix_lm": Recipe("mask", "prefix_lm(10)"),
    "document": Recipe("mask", "document(ids)"),
    "document_from_offsets": Recipe("mask", "document_from_offsets(torch.tensor([0, 12, 20, 32]), mask_mod=causal)"),
    "within_radius": Recipe("mask", "within_radius(places, 0.9)"),
    "neighborhood": Recipe("mask", "neighborhood((4, 8), (3, 5))"),
    "tree": Recipe("mask", "tree(parents)"),
    "block_causal": Recipe("mask", "block_causal(6)"),
    "block_diffusion": Recipe("mask", "block_diffusion(16, 4)"),
    "jagged_window": Recipe("mask", "jagged_window(starts, ends)"),
    "graph_neighbors": Recipe("mask", "graph_neighbors(distances, 1)"),
    "alibi": Recipe("score", "alibi(alibi_slopes(4))"),
    "alibi_symmetric": Recipe("score", "alibi_symmetric(alibi_slopes(4))"),
    "softcap": Recipe("score", "softcap(10.0)", 1.0),
    "relative_bias": Recipe("score", "relative_bias(table)"),
    "t5_bias": Recipe("score", "t5_bias(weight, num_buckets=16, max_distance=32)"),
    "gaussian_distances": Recipe("score", "gaussian_distances(places[None], means, widths, weights)"),
    "invariant_points": Recipe("score", "invariant_points(points, points, torch.ones(4))"),
    "compose_scores": Recipe("score", "compose_scores(softcap(10.0), alibi(alibi_slopes(4)))", 1.0),
    "graph_bias": Recipe("score", "graph_bias(distances, depth)"),
    "disentangled": Recipe("score", "disentangled(c2p, p2c)"),
    "forget_gate": Recipe("score", "forget_gate(log_gates)"),
    "yarn_temperature": Recipe("score", "yarn_temperature(32.0)", 1.0),
    "differential": Recipe("weights", "differential(flex_attention, query, key, value, 0.8)"),
}


def made(code: str):
    """The mod that a line of code makes, or the weights, with the tensors that docs/recipes.md names."""
    distance, turn = torch.arange(-SIZE + 1, SIZE), torch.arange(SIZE) * 0.4
    helix = torch.stack([turn.cos(), turn.sin(), turn / 9], dim=1)
    place = torch.arange(SIZE)
    angles = place[:, None] * torch.tensor([0.05, 0.2, 0.6, 1.4])
    waves = torch.cat([angles.cos(), angles.sin()], 1)  # (SIZE, 8): their products fall with the distance
    broad = waves * torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(2)
    edges = torch.stack([place[1:], (place[1:] - 1) // 2])  # of a binary tree
    tensors = {
        "parents": torch.where((place % 6 == 0) & (place > 0), place - 4, place - 1),
        "starts": place - place // 3,
        "ends": place + 1 + place % 4,
        "distances": mods.graph_distances(torch.cat([edges, edges.flip(0)], 1), SIZE, 8),
        "depth": -torch.arange(9.0)[:, None].expand(9, 4) / 2,
        "c2p": torch.linspace(-1, 1, 16).expand(1, 4, SIZE, 16) * (place[:, None] % 8 < 4),
        "p2c": -torch.linspace(-1, 1, 16).abs().expand(1, 4, SIZE, 16),
        "log_gates": torch.where((place == 12) | (place == 20), -4.0, -0.05).expand(1, 4, SIZE),
        "query": 4 * torch.stack([waves, broad])[None],
        "key": torch.stack([waves, broad])[None],
        "value": torch.eye(SIZE)[None, None],
        "flex_attention": flexpress.flex_attention,
        "ids": (torch.arange(SIZE) >= 12).int() + (torch.arange(SIZE) >= 20).int(),
        "table": (torch.cos(distance / 4) * torch.exp(-distance.abs() / 12)).repeat(4, 1),
        "places": helix,
        "means": torch.tensor([0.0, 2.0]),
        "widths": torch.tensor([0.6, 0.5]),
        "weights": torch.tensor([[1.0, -0.4]]).repeat(4, 1),
        "points": helix[:, None].expand(1, 4, SIZE, 2, 3).contiguous(),
        "weight": -torch.cat([torch.arange(8), torch.arange(8)])[:, None].expand(16, 4) / 8,
    }
    return eval(code, {**{name: getattr(mods, name) for name in mods.__all__}, **tensors, "torch": torch})


def drawn(recipe: Recipe) -> tuple[torch.Tensor, list[str], str]:
    """Which colour each position has, int (SIZE, SIZE); the colours; and a caption."""
    mod = made(recipe.code)
    if recipe.kind == "weights":
        return _shaded(mod[0, 0])
    if recipe.kind == "mask":
        seen = flexpress.create_mask(mod, None, None, SIZE, SIZE, "cpu")[0, 0]
        mask = flexpress.create_block_mask(mod, None, None, SIZE, SIZE, "cpu", BLOCK)
        status = mask._status()[0, 0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        colours = torch.where(status == 1, torch.where(seen, 2, 1), status + (status == 2))
        return colours.int(), [EMPTY, HIDDEN, PARTIAL, FULL], f"{mask.sparsity():.0f} % of the blocks are empty"
    position = torch.arange(SIZE, dtype=torch.float32)
    scores = (recipe.slope * (position[None] - position[:, None])).expand(1, 4, SIZE, SIZE)
    return _shaded(flexpress.evaluate_mod(mod, scores.contiguous())[0, 0])


def _shaded(values: torch.Tensor) -> tuple[torch.Tensor, list[str], str]:
    """`drawn` of numbers, (SIZE, SIZE)."""
    largest = values.abs().max().item()
    half = LEVELS // 2
    levels = torch.round(values / largest * half).int() + half
    return levels, [_between(i / half - 1) for i in range(LEVELS)], f"red {largest:.2g}, white 0, blue -{largest:.2g}"


def _between(x: float) -> str:
    """The colour of a number from -1 to 1."""
    end = RED if x > 0 else BLUE
    return "#" + "".join(f"{round(w + (e - w) * abs(x)):02x}" for w, e in zip(WHITE, end, strict=True))


def svg(colours: torch.Tensor, palette: list[str], caption: str) -> str:
    """A picture of cells, with a caption."""
    paths = []
    for number, colour in enumerate(palette):
        runs = [_runs((row == number).tolist(), y) for y, row in enumerate(colours)]
        if any(runs):
            paths.append(f'<path fill="{colour}" d="{"".join(runs)}"/>')
    grid = "".join(f"M{i} 0v{SIZE}M0 {i}h{SIZE}" for i in range(0, SIZE + 1, BLOCK))
    width, height = SIZE * CELL + 26, SIZE * CELL + 42
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            '<text x="22" y="12">kv_idx</text>',
            '<text x="12" y="52" transform="rotate(-90 12 52)">q_idx</text>',
            f'<g transform="translate(20 18) scale({CELL})">',
            *paths,
            f'<path fill="none" stroke="#888888" stroke-width="0.06" d="{grid}"/>',
            "</g>",
            f'<text x="20" y="{height - 8}">{caption}</text>',
            "</svg>\n",
        ]
    )


def _runs(row: list[bool], y: int) -> str:
    """The True cells of a row, each run of them as one rectangle of a path."""
    text, x = "", 0
    while x < len(row):
        end = x
        while end < len(row) and row[end]:
            end += 1
        if end > x:
            text += f"M{x} {y}h{end - x}v1h-{end - x}z"
        x = end + 1
    return text


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, recipe in RECIPES.items():
        (FOLDER / f"{name}.svg").write_text(svg(*drawn(recipe)), encoding="utf-8")
    print(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
