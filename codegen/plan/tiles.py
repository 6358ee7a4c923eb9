"""Tile sizes of the portable forward kernel, and what to do when a tile does not fit. Others: backward_tiles.py, decode_tiles.py and
hopper_tiles.py.

A tile is chosen by (architecture, head dim, element size) and by what the mods cost. The numbers for sm_90 were measured on an
H100 (benchmarks/results); the others follow from shared memory. `fitting` drops a tile that the device's shared memory
cannot hold, before launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..gpus import SHARED_MEMORY


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
    ("sm_90", 64, 1): Tile(64, 64, 4, 3),
    ("sm_90", 128, 1): Tile(64, 64, 8, 3),
    ("sm_90", 256, 1): Tile(64, 64, 8, 3),
    ("cpu", 256, 1): Tile(64, 64, 1, 1),
    ("cpu", 256, 2): Tile(64, 64, 1, 1),
    ("cpu", 256, 4): Tile(64, 64, 1, 1),
}

# where a kernel without block lists, or unequal head dims, measured faster with another tile
_FORWARD_DENSE = {("sm_90", 64, 2): Tile(128, 64, 4, 3), ("sm_90", 64, 1): Tile(128, 128, 8, 3)}
_FORWARD_UNEQUAL = {
    ("sm_90", 256, 2): Tile(128, 64, 8, 3),  # 192 / 128, padded to 256 / 128
    ("sm_80", 512, 2): Tile(32, 16, 8, 2),  # 576 / 512: 32 keys leave room for one stage, which spills
}
_FORWARD_VALUES_IN_KEYS = {("sm_90", 512, 2): Tile(64, 64, 8, 2)}
# with few blocks of 64 keys: room for another program, rather than for a third stage
_FORWARD_NARROW = {("sm_90", 64, 2): Tile(64, 64, 4, 2)}

BLOCK = 128  # of queries and of keys, where a call makes its own lists
NARROW_BLOCK = 64  # the same under a narrow mask
FEWEST_KEYS_8 = 32  # of a tile whose products are of 8 bits
# (architecture, larger padded head dim, bytes per element): a mask is narrow if a row of BLOCK queries visits so many blocks, or fewer
_NARROW = {("sm_90", 64, 2): 3}


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
    elif kv_block == NARROW_BLOCK:
        tile = _FORWARD_NARROW.get(row, tile)
    chosen = {k: v for k, v in (options or {}).items() if k in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")}
    if q_block and "BLOCK_M" not in chosen:
        tile = replace(tile, BLOCK_M=divisor(tile.BLOCK_M, q_block))
    if kv_block and "BLOCK_N" not in chosen:
        tile = replace(tile, BLOCK_N=divisor(tile.BLOCK_N, kv_block))
    if quick:
        tile = quick_tile(tile, arch)
    if arch != "cpu":
        tile = fitting(tile, arch, d_qk, 0 if values_in_keys else d_v, itemsize)
    return replace(tile, **chosen)


def narrow_limit(arch: str, d_qk: int, d_v: int, itemsize: int) -> int:
    """How many blocks a row of BLOCK queries may visit for NARROW_BLOCK to be faster; 0: it never is."""
    widths = [width for family, width, size in _NARROW if (family, size) == (arch, itemsize) and width >= max(d_qk, d_v)]
    return _NARROW[arch, min(widths), itemsize] if widths else 0


def quick_tile(tile: Tile, arch: str, keys: int = 64) -> Tile:
    """A tile of which each thread has little, without a pipeline: LLVM and the assembler take a third to two thirds of the time."""
    if not arch.startswith("sm_"):
        return tile
    return Tile(min(tile.BLOCK_M, 64), min(tile.BLOCK_N, keys), 8, 1)


def divisor(size: int, of: int) -> int:
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
