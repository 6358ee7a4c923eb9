"""What follows from the shapes and strides of q, k, v and out alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..gpus import WIDEST_TILE
from ..registry import remembered

FARTHEST_ROWS = 1 << 23  # elements from one row to the next: offsets inside a block, of up to 256 rows, are 32 bits
STRIDES = {t: tuple(f"stride_{t}{d}" for d in dims) for t, dims in (("q", "zhmd"), ("k", "zhnd"), ("v", "zhnd"), ("o", "zhm"))}


def known_strides(shape: Iterable[int], strides: Iterable[int]) -> tuple[int, ...]:
    """Strides that count: 0 of dimensions of size 1."""
    return tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True))


def in_units(strides: dict[str, int], unit: int) -> tuple[tuple[str, ...], dict[str, int]]:
    """Which of named strides are multiples of so many elements, 16 bytes, and all as kernels take them: those in that unit."""
    aligned = tuple(name for name, stride in strides.items() if stride % unit == 0)
    return aligned, strides | {name: strides[name] // unit for name in aligned}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What follows from the shapes and strides of q, k, v and out alone."""

    units: tuple[bool, bool, bool]
    aligned: tuple[str, ...]
    numbers: dict[str, int]  # sizes and strides by the names of parameters, in the units that `aligned` tells
    tma: bool  # shapes and strides of k and v that TMA can load
    q_tma: bool = False  # those of q
    wide_tma: bool = False  # those of k, however wide


@remembered("geometries", 4096)
def geometry_of(itemsize: int, shapes: tuple, strides: tuple, out_strides: tuple) -> Geometry:
    """The geometry of q, k, v (their shapes and strides) and out; a dimension of size 1 has stride 0. NotImplementedError for rows that are
    FARTHEST_ROWS apart, and for columns so far apart that a block's last element is beyond 32 bits, too."""
    (_, Hq, Q_LEN, _), (_, Hkv, KV_LEN, _), (Zkv, *_) = shapes
    known = [*map(known_strides, shapes, strides)]
    units = tuple(s[3] == 1 or shape[3] == 1 for s, shape in zip(known, shapes, strict=True))
    for t, s, shape in zip(("query", "key", "value"), known, shapes, strict=True):
        if s[2] > FARTHEST_ROWS or 255 * s[2] + (shape[3] - 1) * s[3] >= 1 << 31:
            raise NotImplementedError(
                f"{t}: positions lie {s[2]} elements apart in memory, columns {s[3]}, and kernels reach {FARTHEST_ROWS} and, over 256 "
                f"positions of {shape[3]} columns, 2**31; give a copy in which they lie closer, as {t}.contiguous() does"
            )
    vector = 16 // itemsize
    sizes = {"Hq": Hq, "Zkv": Zkv, "GROUP_SIZE": Hq // Hkv, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    strided = {name: n for t, s in zip("qkv", known, strict=True) for name, n in zip(STRIDES[t], s, strict=True)}
    columns = {name: strided.pop(name) for name in (STRIDES[t][3] for t in "qkv")}
    aligned, rows = in_units(strided, vector)
    found = sizes | rows | columns | dict(zip(STRIDES["o"], out_strides, strict=False))
    q_tma, *tma = (_fits_tma(s, shape, vector) for s, shape in zip(known, shapes, strict=True))
    if itemsize == 1:
        tma[1] = _fits_transposed(known[2], shapes[2])
    wide_tma = _fits_tma(known[1], shapes[1], vector, shapes[1][3])
    return Geometry(units, aligned, found, all(tma), q_tma, wide_tma)


def _fits_tma(strides: tuple, shape: tuple, vector: int, widest: int = WIDEST_TILE) -> bool:
    """TMA wants a contiguous head dim and strides of whole 16 bytes, none of them 0; head dims in several tiles most kernels read by
    pointers."""
    outer = all(s % vector == 0 and (s or n == 1) for s, n in zip(strides[:3], shape[:3], strict=True))
    return outer and strides[3] == 1 and shape[3] % vector == 0 and shape[3] <= widest


def _fits_transposed(strides: tuple, shape: tuple) -> bool:
    """What TMA wants of V of 8 bits, whose transpose it copies (see float8.py): rows of whole 16 bytes, of which the last may be less."""
    outer = all(s % 16 == 0 and (s or n == 1) for s, n in zip((*strides[:2], strides[3]), (*shape[:2], shape[3]), strict=True))
    return outer and strides[2] in (0, 1) and shape[3] <= WIDEST_TILE
