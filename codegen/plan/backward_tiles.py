"""Tile sizes of the kernels of gradients and of tangents: one table per template, as in tiles.py."""

from __future__ import annotations

from dataclasses import replace

from .tiles import Tile, divisor, quick_tile

# (kernel, architecture, larger padded head dim, bytes per element) -> tile. backward_dq walks keys in steps of BLOCK_N,
# backward_dkv, which of wide heads is one kernel for dK and one for dV, walks queries in steps of BLOCK_M
_BACKWARD = {
    ("dq", "sm_90", 64, 2): Tile(64, 64, 4, 3),
    ("dq", "sm_90", 128, 2): Tile(128, 64, 8, 3),
    ("dq", "sm_90", 256, 2): Tile(128, 64, 8, 1),
    ("dq", "sm_90", 64, 4): Tile(64, 32, 8, 2),
    ("dq", "sm_90", 128, 4): Tile(64, 32, 8, 2),
    ("dq", "sm_90", 256, 4): Tile(32, 16, 8, 1),
    ("dkv", "sm_90", 64, 2): Tile(64, 64, 4, 3),
    ("dkv", "sm_90", 128, 2): Tile(64, 64, 4, 2),
    ("dkv", "sm_90", 256, 2): Tile(64, 64, 8, 2),
    ("dkv", "sm_100", 256, 2): Tile(32, 64, 8, 2),
    ("dkv", "sm_90", 64, 4): Tile(32, 64, 8, 2),
    ("dkv", "sm_90", 128, 4): Tile(32, 32, 8, 2),
    ("dkv", "sm_90", 256, 4): Tile(16, 32, 8, 1),
    ("dq", "sm_80", 64, 2): Tile(64, 64, 4, 2),
    ("dq", "sm_80", 128, 2): Tile(64, 64, 4, 2),
    ("dq", "sm_80", 256, 2): Tile(32, 32, 4, 2),
    ("dq", "sm_80", 64, 4): Tile(64, 32, 8, 2),
    ("dq", "sm_80", 128, 4): Tile(32, 32, 8, 2),
    ("dq", "sm_80", 256, 4): Tile(32, 16, 8, 1),
    ("dkv", "sm_80", 64, 2): Tile(64, 64, 4, 2),
    ("dkv", "sm_80", 128, 2): Tile(32, 64, 4, 2),
    ("dkv", "sm_80", 256, 2): Tile(32, 32, 4, 1),
    ("dkv", "sm_80", 64, 4): Tile(32, 64, 8, 2),
    ("dkv", "sm_80", 128, 4): Tile(32, 32, 8, 2),
    ("dkv", "sm_80", 256, 4): Tile(16, 32, 8, 1),
    ("dq", "gfx942", 64, 2): Tile(64, 64, 4, 1),
    ("dq", "gfx942", 128, 2): Tile(64, 32, 4, 1),
    ("dq", "gfx942", 256, 2): Tile(32, 16, 4, 1),
    ("dq", "gfx942", 64, 4): Tile(32, 32, 4, 1),
    ("dq", "gfx942", 128, 4): Tile(32, 16, 4, 1),
    ("dq", "gfx942", 256, 4): Tile(16, 16, 4, 1),
    ("dkv", "gfx942", 64, 2): Tile(32, 64, 4, 1),
    ("dkv", "gfx942", 128, 2): Tile(32, 32, 4, 1),
    ("dkv", "gfx942", 256, 2): Tile(16, 32, 4, 1),
    ("dkv", "gfx942", 64, 4): Tile(32, 32, 4, 1),
    ("dkv", "gfx942", 128, 4): Tile(16, 32, 4, 1),
    ("dkv", "gfx942", 256, 4): Tile(16, 16, 4, 1),
    ("dq", "sm_90", 512, 2): Tile(32, 32, 8, 2),
    ("dk", "sm_90", 512, 2): Tile(32, 32, 8, 2),
    ("dv", "sm_90", 512, 2): Tile(32, 64, 8, 2),
    ("dq", "sm_90", 512, 4): Tile(16, 16, 8, 1),
    ("dk", "sm_90", 512, 4): Tile(16, 16, 8, 1),
    ("dv", "sm_90", 512, 4): Tile(16, 16, 8, 1),
    ("dv", "sm_100", 512, 2): Tile(32, 32, 8, 2),  # with 64 keys the assembler does not come to an end in minutes
    ("dq", "sm_80", 512, 2): Tile(32, 16, 8, 1),
    ("dk", "sm_80", 512, 2): Tile(16, 32, 8, 1),
    ("dv", "sm_80", 512, 2): Tile(16, 32, 8, 2),
    ("dq", "sm_80", 512, 4): Tile(16, 16, 8, 1),
    ("dk", "sm_80", 512, 4): Tile(16, 16, 8, 1),
    ("dv", "sm_80", 512, 4): Tile(16, 16, 8, 1),
    ("dq", "gfx942", 512, 2): Tile(16, 16, 4, 1),
    ("dk", "gfx942", 512, 2): Tile(16, 16, 4, 1),
    ("dv", "gfx942", 512, 2): Tile(16, 16, 4, 1),
    ("dq", "gfx942", 512, 4): Tile(16, 16, 4, 1),
    ("dk", "gfx942", 512, 4): Tile(16, 16, 4, 1),
    ("dv", "gfx942", 512, 4): Tile(16, 16, 4, 1),
    ("dk", "cpu", 512, 2): Tile(64, 64, 1, 1),
    ("dk", "cpu", 512, 4): Tile(64, 64, 1, 1),
    ("dv", "cpu", 512, 2): Tile(64, 64, 1, 1),
    ("dv", "cpu", 512, 4): Tile(64, 64, 1, 1),
    ("dq", "cpu", 256, 2): Tile(64, 64, 1, 1),
    ("dq", "cpu", 256, 4): Tile(64, 64, 1, 1),
    ("dkv", "cpu", 256, 2): Tile(64, 64, 1, 1),
    ("dkv", "cpu", 256, 4): Tile(64, 64, 1, 1),
}


# 192 / 128, padded to 256 / 128
_BACKWARD_UNEQUAL = {("dkv", "sm_90", 256, 2): Tile(32, 64, 4, 2), ("dq", "sm_90", 256, 2): Tile(128, 64, 8, 2)}
# where a score_mod has dot products of rows or vectors, whose tiles and sums take registers: these spill least
_BACKWARD_HEAVY = {
    ("dots", "dkv", "sm_90", 2): Tile(32, 64, 8, 2),
    ("dots", "dq", "sm_90", 2): Tile(64, 64, 8, 2),
    ("dots", "dkv", "sm_80", 2): Tile(32, 64, 8, 2),
    ("dots", "dq", "sm_80", 2): Tile(64, 32, 8, 2),
    ("vectors", "dkv", "sm_90", 2): Tile(32, 32, 4, 2),
    ("vectors", "dq", "sm_90", 2): Tile(64, 32, 8, 2),
    ("vectors", "dkv", "sm_80", 2): Tile(32, 32, 4, 2),
    ("vectors", "dq", "sm_80", 2): Tile(64, 32, 8, 2),
}
# where it loads elements that every position has of its own
_BACKWARD_OWN = {("dkv", "sm_90", 128, 2): Tile(32, 64, 4, 2)}


def backward_tile(
    kernel: str,
    arch: str,
    d_qk: int,
    d_v: int,
    itemsize: int,
    *,
    heavy: str = "",
    q_block: int = 0,
    kv_block: int = 0,
    options: dict | None = None,
    quick: bool = False,
) -> Tile:
    """The tile of backward_dq or backward_dkv (`kernel` is "dq", "dkv", "dk" or "dv"); arguments as for forward_tile.

    heavy     what a score_mod computes with: "dots" or "vectors" of captured tensors (loads.weight_of), or "own elements" of every
              position (forward.own_elements)
    options   the user's dq_BLOCK_M, dq_BLOCK_N, dq_num_warps, dq_num_stages, and the same with dkv_
    """
    family = {"sm_86": "sm_80", "sm_100": "sm_90"}.get(arch, arch)
    widths = sorted(w for name, a, w, size in _BACKWARD if name == kernel and a == family and size == itemsize)
    width = next((w for w in widths if w >= max(d_qk, d_v)), widths[-1])
    row = (kernel, family, width, itemsize)
    tile = _BACKWARD.get((kernel, arch, width, itemsize), _BACKWARD[row])
    if d_qk != d_v:
        tile = _BACKWARD_UNEQUAL.get(row, tile)
    tile = _BACKWARD_OWN.get(row, tile) if heavy == "own elements" else _BACKWARD_HEAVY.get((heavy, kernel, family, itemsize), tile)
    named = "dq_" if kernel == "dq" else "dkv_"
    chosen = {k.removeprefix(named): v for k, v in (options or {}).items() if k.startswith(named)}
    if q_block:
        tile = replace(tile, BLOCK_M=divisor(tile.BLOCK_M, q_block), BLOCK_N=divisor(tile.BLOCK_N, kv_block))
    if quick:
        tile = quick_tile(tile, arch, 32)
    return replace(tile, **chosen)


# (kernel of tangents, larger padded head dim, bytes per element) -> tile. What these keep in registers is twice what others do
_TANGENT = {
    ("tangent", 64, 2): Tile(64, 64, 4, 2),
    ("tangent", 128, 2): Tile(64, 64, 8, 2),
    ("tangent", 256, 2): Tile(32, 32, 8, 1),
    ("tangent", 64, 4): Tile(32, 32, 8, 1),
    ("tangent", 128, 4): Tile(16, 16, 8, 1),
    ("tangent", 256, 4): Tile(16, 16, 8, 1),
    ("tangent_dq", 64, 2): Tile(64, 32, 8, 1),
    ("tangent_dq", 128, 2): Tile(32, 32, 4, 1),
    ("tangent_dq", 256, 2): Tile(32, 32, 8, 1),
    ("tangent_dq", 64, 4): Tile(32, 32, 8, 1),
    ("tangent_dq", 128, 4): Tile(16, 16, 8, 1),
    ("tangent_dq", 256, 4): Tile(16, 16, 8, 1),
    ("tangent_dkv", 64, 2): Tile(64, 32, 8, 1),
    ("tangent_dkv", 128, 2): Tile(32, 32, 4, 1),
    ("tangent_dkv", 256, 2): Tile(32, 32, 8, 1),
    ("tangent_dkv", 64, 4): Tile(32, 32, 8, 1),
    ("tangent_dkv", 128, 4): Tile(16, 16, 8, 1),
    ("tangent_dkv", 256, 4): Tile(16, 16, 8, 1),
}


def tangent_tile(kernel: str, arch: str, width: int, itemsize: int, q_block: int = 0, kv_block: int = 0) -> Tile:
    """The tile of a kernel of tangents. `width`: the larger padded head dim; other arguments as for forward_tile."""
    tile = Tile(64, 64, 1, 1) if arch == "cpu" else _TANGENT[kernel, next(w for w in (64, 128, 256) if w >= width), itemsize]
    if arch == "gfx942":
        tile = replace(tile, num_stages=1)
    elif arch in ("sm_80", "sm_86") and kernel == "tangent":  # 64 keys spill there
        tile = replace(tile, BLOCK_N=min(tile.BLOCK_N, 32))
    elif arch == "sm_90" and (kernel, itemsize) == ("tangent", 2) and 64 < width <= 128:  # wgmma has no use for more warps
        tile = replace(tile, BLOCK_N=32, num_warps=4)
    if q_block:
        tile = replace(tile, BLOCK_M=divisor(tile.BLOCK_M, q_block), BLOCK_N=divisor(tile.BLOCK_N, kv_block))
    return tile
