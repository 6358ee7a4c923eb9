"""Head dims as tiles have them: powers of two, and wide ones as a sum of such.

A tile of 1024 columns for 576 would nearly double what a kernel loads and multiplies. No multiprocessor has the registers or the memory.
"""

from __future__ import annotations

from typing import NamedTuple

from ..gpus import WIDEST_TILE, round_up_head_dim

STEP = 64  # columns to which wide head dims are padded: what a tile's row has in 128 bytes of 16-bit elements


class Columns(NamedTuple):
    """Some columns of a tile."""

    start: int
    width: int


class Slice(NamedTuple):
    """Some columns of a head dim.

    suffix   of the names of its tiles in a kernel: "" for all columns, else "_0", "_1" and so on
    padded   it ends past the head dim
    """

    suffix: str
    start: int
    width: int
    padded: bool


def _powers_of_two(columns: int) -> tuple[Columns, ...]:
    """As many columns as powers of two that add up, the largest first."""
    found, start = [], 0
    while start < columns:
        width = 1 << (columns - start).bit_length() - 1
        found.append(Columns(start, width))
        start += width
    return tuple(found)


def slices_of(d: int, itemsize: int = 2) -> tuple[Slice, ...]:
    """One slice up to WIDEST_TILE columns; of more, the powers of two that add up: 576 is 512 + 64, 320 is 256 + 64."""
    if d <= WIDEST_TILE:
        width = round_up_head_dim(d, itemsize)
        return (Slice("", 0, width, width != d),)
    found = _powers_of_two(-(-d // STEP) * STEP)
    suffixes = [f"_{i}" for i in range(len(found))] if len(found) > 1 else [""]
    return tuple(Slice(suffix, *c, c.start + c.width > d) for suffix, c in zip(suffixes, found, strict=True))


def padded(d: int, added: int = 0) -> int:
    """The columns of all slices, by which tables of tiles go. `added`: columns of dot products of captured rows, which take the place of
    as many where a tile of all has room for them."""
    return sum(s.width for s in slices_of(max(d, min(d + added, WIDEST_TILE))))


def lies_in(d_v: int, d_qk: int) -> bool:
    """Are d_v columns of values, the first of d_qk columns of keys, whole tiles of the keys?"""
    values, keys = slices_of(d_v), slices_of(d_qk)
    same = [(v.start, v.width) == (k.start, k.width) for v, k in zip(values, keys, strict=False)]
    return d_v <= d_qk and all(same) and (d_v == d_qk or not values[-1].padded)


def summed_columns(d: int, padded_dim: int, step: int = 16) -> tuple[Columns, ...]:
    """The columns that a product over rows of head dim `d` has to read, as powers of two: of 80, padded to 128, 64 and 16.

    step   columns of one instruction: 32 bytes
    """
    return _powers_of_two(min(-(-d // step) * step, padded_dim))


def parts_of(d: int, padded_dim: int, least: int = 16) -> tuple[Columns, ...]:
    """Columns of accumulators of a product of Hopper's, without most of the padding where two powers of two have a quarter less: 96 of 128
    are 64 and 32, 80 are 64 and 16, and 112 stay 128. Products of fewer than 64 columns take nearly as long as those of 64.

    least   columns of an accumulator
    """
    half, rest = padded_dim // 2, max(least, round_up_head_dim(max(1, d - padded_dim // 2)))
    if padded_dim < 128 or rest > half // 2:
        return (Columns(0, padded_dim),)
    return Columns(0, half), Columns(half, rest)
