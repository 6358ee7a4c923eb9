"""Tile sizes of decode: few rows, and keys as they come from memory. As in tiles.py, those for sm_90 were measured on an H100."""

from __future__ import annotations

from dataclasses import replace

from ..gpus import SHARED_MEMORY, WIDEST_TILE
from .tiles import Tile, divisor, fitting, shared_bytes

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
            stages = 1 if arch == "gfx942" else 3
            if paged and keys > _DECODE_KEYS[row] and row[0] <= 128:  # as many in flight, in smaller pieces: sequences are short, too
                keys, stages = keys // 2, 4
            tile = fitting(Tile(rows, keys, 4, stages), arch, d_qk, d_v, itemsize)
        if paged and tile.num_stages > 1:  # loads of pages come first: Triton gives K and V every other stage
            tile = replace(tile, num_stages=2 * tile.num_stages - 1)
    return replace(tile, BLOCK_N=divisor(tile.BLOCK_N, kv_block)) if kv_block else tile


def programs_at_once(arch: str, rows: int, d_qk: int, d_v: int, itemsize: int) -> int:
    """How many programs with the tile of so many rows share a multiprocessor, to the good of all: two, where rows are so many that one
    waits for its products, and shared memory has room for both."""
    if arch != "sm_90" or rows < 64:
        return 1
    tile = decode_tile(arch, rows, d_qk, d_v, itemsize)
    return 2 if 2 * shared_bytes(tile, d_qk, d_v, itemsize) <= SHARED_MEMORY[arch] else 1


def _wide_decode_tile(arch: str, rows: int, itemsize: int, values_in_keys: bool) -> Tile:
    if most_rows(arch, WIDEST_TILE + 1, 1, itemsize) < 64:
        return Tile(rows, 16, 8 if arch.startswith("sm_") else 4, 1)
    row = values_in_keys, rows
    return _DECODE_WIDE.get((arch, *row)) or _DECODE_WIDE[("sm_90", *row)]
