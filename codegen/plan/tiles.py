"""Tile sizes: one table per template, and what to do when a tile does not fit.

A tile is chosen by (architecture, head dim, element size) and by what the mods cost. The numbers for sm_90 were measured on an
H100 (benchmarks/results); the others follow from shared memory. `fitting` drops a tile that the device's shared memory
cannot hold, before launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..gpus import SHARED_MEMORY, WIDEST_TILE


@dataclass(frozen=True, slots=True)
class Tile:
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# (architecture, larger padded head dim, bytes per element) -> tile
_FORWARD = {
    ("sm_90", 64, 2): Tile(64, 64, 4, 3),
    ("sm_90", 128, 2): Tile(64, 64, 4, 3),
    ("sm_90", 256, 2): Tile(128, 64, 8, 2),
    ("sm_90", 64, 4): Tile(64, 64, 8, 2),
    ("sm_90", 128, 4): Tile(64, 32, 8, 2),
    ("sm_90", 256, 4): Tile(64, 16, 8, 2),
    ("sm_80", 64, 2): Tile(128, 64, 4, 3),
    ("sm_80", 128, 2): Tile(128, 64, 8, 3),
    ("sm_80", 256, 2): Tile(64, 32, 4, 2),
    ("sm_80", 64, 4): Tile(64, 64, 8, 2),
    ("sm_80", 128, 4): Tile(64, 32, 8, 2),
    ("sm_80", 256, 4): Tile(64, 16, 8, 2),
    ("gfx942", 64, 2): Tile(128, 64, 4, 1),
    ("gfx942", 128, 2): Tile(128, 64, 4, 1),
    ("gfx942", 256, 2): Tile(64, 32, 4, 1),
    ("gfx942", 64, 4): Tile(64, 64, 4, 1),
    ("gfx942", 128, 4): Tile(64, 32, 4, 1),
    ("gfx942", 256, 4): Tile(32, 16, 4, 1),
    ("sm_90", 512, 2): Tile(64, 32, 8, 2),
    ("sm_90", 512, 4): Tile(16, 16, 8, 1),
    ("sm_80", 512, 2): Tile(32, 32, 8, 2),
    ("sm_80", 512, 4): Tile(16, 16, 8, 1),
    ("gfx942", 512, 2): Tile(32, 16, 4, 1),
    ("gfx942", 512, 4): Tile(16, 16, 4, 1),
    ("cpu", 256, 2): Tile(64, 64, 1, 1),
    ("cpu", 256, 4): Tile(64, 64, 1, 1),
}

# where a kernel without block lists, or unequal head dims, measured faster with another tile
_FORWARD_DENSE = {("sm_90", 64, 2): Tile(128, 64, 4, 3)}
_FORWARD_UNEQUAL = {("sm_90", 256, 2): Tile(128, 64, 8, 3)}  # 192 / 128, padded to 256 / 128
_FORWARD_VALUES_IN_KEYS = {("sm_90", 512, 2): Tile(64, 64, 8, 2)}


def forward_tile(
    arch: str,
    d_qk: int,
    d_v: int,
    itemsize: int,
    *,
    gathers: bool = False,
    q_block: int = 0,
    kv_block: int = 0,
    options: dict | None = None,
    quick: bool = False,
    values_in_keys: bool = False,
) -> Tile:
    """The forward kernel's tile.

    d_qk, d_v          padded head dims
    gathers            a mod loads one element of a tensor for every position, or vectors, which leaves no registers for a larger tile
    q_block, kv_block  a block mask's sizes, which BLOCK_M and BLOCK_N must divide; 0 without block lists
    options            the user's BLOCK_M, BLOCK_N, num_warps, num_stages
    quick              the kernel is to compile fast, rather than to run fast
    values_in_keys     V is read with K
    """
    family = {"sm_86": "sm_80", "sm_100": "sm_90"}.get(arch, arch)
    widths = sorted(k[1] for k in _FORWARD if k[0] == family and k[2] == itemsize)
    row = (family, next((w for w in widths if w >= max(d_qk, d_v)), widths[-1]), itemsize)
    tile = _FORWARD[row]
    if values_in_keys and arch != "sm_100":
        tile = _FORWARD_VALUES_IN_KEYS.get(row, tile)
    elif d_qk != d_v:
        tile = _FORWARD_UNEQUAL.get(row, tile)
    elif not kv_block and not gathers:
        tile = _FORWARD_DENSE.get(row, tile)
    chosen = {k: v for k, v in (options or {}).items() if k in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")}
    if q_block and "BLOCK_M" not in chosen:
        tile = replace(tile, BLOCK_M=_divisor(tile.BLOCK_M, q_block))
    if kv_block and "BLOCK_N" not in chosen:
        tile = replace(tile, BLOCK_N=_divisor(tile.BLOCK_N, kv_block))
    if quick:
        tile = _quick(tile, arch)
    if arch != "cpu":
        tile = fitting(tile, arch, d_qk, 0 if values_in_keys else d_v, itemsize)
    return replace(tile, **chosen)


# (larger padded head dim, bytes per element) -> keys of a decode block; a tile has as many rows as there are. With 16 rows of 16 bits
# on sm_90 and sm_100 shared memory is full of loads in flight and one program keeps a multiprocessor busy
_DECODE_KEYS = {(64, 2): 128, (128, 2): 64, (256, 2): 32, (64, 4): 64, (128, 4): 32, (256, 4): 16}
_DECODE_KEYS_16_ROWS = {(64, 2): 256, (128, 2): 128, (256, 2): 64}
# (architecture, is V read with K, rows) -> tile of wide heads of 16 bits. With fewer stages nothing is loaded ahead
_DECODE_WIDE = {
    ("sm_90", True, 16): Tile(16, 64, 4, 3),
    ("sm_90", True, 32): Tile(32, 64, 8, 3),
    ("sm_90", True, 64): Tile(64, 64, 8, 2),
    ("sm_90", False, 16): Tile(16, 32, 4, 3),
    ("sm_90", False, 32): Tile(32, 32, 8, 3),
    ("sm_90", False, 64): Tile(64, 32, 8, 2),
    ("sm_100", True, 64): Tile(64, 32, 8, 2),
    ("sm_100", False, 64): Tile(64, 16, 8, 2),
    ("sm_80", True, 16): Tile(16, 32, 4, 3),
    ("sm_80", True, 32): Tile(32, 32, 8, 3),
    ("sm_80", True, 64): Tile(64, 32, 8, 2),
    ("sm_80", False, 16): Tile(16, 32, 4, 2),
    ("sm_80", False, 32): Tile(32, 16, 8, 3),
    ("sm_80", False, 64): Tile(64, 16, 8, 2),
}


def most_rows(arch: str, d_qk: int, d_v: int, itemsize: int) -> int:
    """How many rows a tile of decode may have; d_qk, d_v and other arguments as for decode_tile."""
    if max(d_qk, d_v) <= WIDEST_TILE or arch == "cpu":
        return 128
    return 64 if itemsize == 2 and arch in ("sm_80", "sm_90", "sm_100") else 16


def decode_tile(
    arch: str, rows: int, d_qk: int, d_v: int, itemsize: int, *, kv_block: int = 0, paged: bool = False, values_in_keys: bool = False
) -> Tile:
    """The tile of decode with `rows` rows (queries times heads that share keys); other arguments as for forward_tile."""
    if arch == "cpu":
        tile = Tile(rows, 64, 1, 1)
    else:
        if max(d_qk, d_v) > WIDEST_TILE:
            tile = _wide_decode_tile(arch, rows, itemsize, values_in_keys)
        else:
            row = next(w for w in (64, 128, 256) if w >= max(d_qk, d_v)), itemsize
            keys = _DECODE_KEYS_16_ROWS.get(row, _DECODE_KEYS[row]) if rows == 16 and arch in ("sm_90", "sm_100") else _DECODE_KEYS[row]
            tile = fitting(Tile(rows, keys, 4, 1 if arch == "gfx942" else 3), arch, d_qk, d_v, itemsize)
        if paged and tile.num_stages > 1:  # loads of pages come first: Triton gives K and V every other stage
            tile = replace(tile, num_stages=2 * tile.num_stages - 1)
    return replace(tile, BLOCK_N=_divisor(tile.BLOCK_N, kv_block)) if kv_block else tile


def _wide_decode_tile(arch: str, rows: int, itemsize: int, values_in_keys: bool) -> Tile:
    if most_rows(arch, WIDEST_TILE + 1, 1, itemsize) < 64:
        return Tile(rows, 16, 8 if arch.startswith("sm_") else 4, 1)
    row = values_in_keys, rows
    return _DECODE_WIDE.get((arch, *row)) or _DECODE_WIDE[("sm_90", *row)]


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
    ("dq", "sm_90", 512, 2): Tile(64, 16, 8, 2),
    ("dk", "sm_90", 512, 2): Tile(16, 64, 8, 2),
    ("dv", "sm_90", 512, 2): Tile(32, 64, 8, 2),
    ("dq", "sm_90", 512, 4): Tile(16, 16, 8, 1),
    ("dk", "sm_90", 512, 4): Tile(16, 16, 8, 1),
    ("dv", "sm_90", 512, 4): Tile(16, 16, 8, 1),
    ("dk", "sm_100", 512, 2): Tile(32, 32, 8, 2),  # 64 keys take the assembler a quarter of an hour
    ("dv", "sm_100", 512, 2): Tile(32, 32, 8, 2),
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

    heavy     "dots" or "vectors" of captured tensors that a score_mod computes with, see loads.weight_of
    options   the user's dq_BLOCK_M, dq_BLOCK_N, dq_num_warps, dq_num_stages, and the same with dkv_
    """
    family = {"sm_86": "sm_80", "sm_100": "sm_90"}.get(arch, arch)
    widths = sorted(w for name, a, w, size in _BACKWARD if name == kernel and a == family and size == itemsize)
    width = next((w for w in widths if w >= max(d_qk, d_v)), widths[-1])
    row = (kernel, family, width, itemsize)
    tile = _BACKWARD.get((kernel, arch, width, itemsize), _BACKWARD[row])
    if d_qk != d_v:
        tile = _BACKWARD_UNEQUAL.get(row, tile)
    tile = _BACKWARD_HEAVY.get((heavy, kernel, family, itemsize), tile)
    named = "dq_" if kernel == "dq" else "dkv_"
    chosen = {k.removeprefix(named): v for k, v in (options or {}).items() if k.startswith(named)}
    if q_block:
        tile = replace(tile, BLOCK_M=_divisor(tile.BLOCK_M, q_block), BLOCK_N=_divisor(tile.BLOCK_N, kv_block))
    if quick:
        tile = _quick(tile, arch, 32)
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


def tangent_tile(kernel: str, arch: str, d_qk: int, d_v: int, itemsize: int, q_block: int = 0, kv_block: int = 0) -> Tile:
    """The tile of a kernel of tangents; other arguments as for forward_tile."""
    tile = Tile(64, 64, 1, 1) if arch == "cpu" else _TANGENT[kernel, next(w for w in (64, 128, 256) if w >= max(d_qk, d_v)), itemsize]
    if arch == "gfx942":
        tile = replace(tile, num_stages=1)
    elif arch in ("sm_80", "sm_86") and kernel == "tangent":  # 64 keys spill there
        tile = replace(tile, BLOCK_N=min(tile.BLOCK_N, 32))
    elif arch == "sm_90" and (kernel, itemsize) == ("tangent", 2) and 64 < max(d_qk, d_v) <= 128:  # wgmma has no use for more warps
        tile = replace(tile, BLOCK_N=32, num_warps=4)
    if q_block:
        tile = replace(tile, BLOCK_M=_divisor(tile.BLOCK_M, q_block), BLOCK_N=_divisor(tile.BLOCK_N, kv_block))
    return tile


def _quick(tile: Tile, arch: str, keys: int = 64) -> Tile:
    """A tile of which each thread has little, without a pipeline: LLVM and the assembler take a third to two thirds of the time."""
    if not arch.startswith("sm_"):
        return tile
    return Tile(min(tile.BLOCK_M, 64), min(tile.BLOCK_N, keys), 8, 1)


def _divisor(size: int, of: int) -> int:
    """The largest power of two up to `size` that divides `of`."""
    while of % size:
        size //= 2
    return size


def fitting(tile: Tile, arch: str, d_qk: int, d_v: int, itemsize: int) -> Tile:
    """`tile`, or the next smaller one whose Q tile and pipelined K and V blocks fit into shared memory."""
    while shared_bytes(tile, d_qk, d_v, itemsize) > SHARED_MEMORY[arch]:
        smaller = next_smaller(tile)
        if smaller is None:
            return tile
        tile = smaller
    return tile


def shared_bytes(tile: Tile, d_qk: int, d_v: int, itemsize: int) -> int:
    """An upper estimate of a forward tile's shared memory in bytes."""
    return itemsize * (tile.BLOCK_M * max(d_qk, d_v) + tile.num_stages * tile.BLOCK_N * (d_qk + d_v))


def next_smaller(tile: Tile) -> Tile | None:
    """Fewer stages first, then a narrower block, then a shorter one; None below 16 x 16."""
    if tile.num_stages > 1:
        return replace(tile, num_stages=tile.num_stages - 1)
    if tile.BLOCK_N > 16:
        return replace(tile, BLOCK_N=tile.BLOCK_N // 2)
    if tile.BLOCK_M > 16:
        return replace(tile, BLOCK_M=tile.BLOCK_M // 2)
    return None
