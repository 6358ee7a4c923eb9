"""Neighbourhood attention in one, two or three dimensions: an element of a grid sees those around it.

    query i sees key j  if  on every axis  start <= j < start + window,  start = clamp(i - window // 2, 0, length - window)

So the window is centred on the query, and shifted inwards at the borders: every query sees as many keys. Hassani et al. 2022 (arXiv
2204.07143) for images; dilation: Hassani and Shi 2022 (arXiv 2209.15001), where an axis falls apart into `dilation` grids, of every
dilation-th element; causal axes: Hassani, Hwu and Shi 2024 (arXiv 2403.04690), for time in videos.

The grid is flattened as torch does it, the last axis fastest: position (y, x) of a grid (H, W) is ``y * W + x``. Blocks of a mask then
are runs of rows: those whose rows are too far away are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ._arguments import MaskMod, whole_number
from ._made import picklable

RECIPE = "neighborhood"


@picklable
def neighborhood(
    grid: int | Sequence[int], window: int | Sequence[int], dilation: int | Sequence[int] = 1, causal: bool | Sequence[bool] = False
) -> MaskMod:
    """A window of `window` elements on each axis of `grid`.

    Args:
        grid: the extents, one to three ints; Q_LEN and KV_LEN are their product. An int is a grid of one axis.
        window: how many elements are seen on each axis, at least 1, and at most the extent divided by the dilation. An int is that of all
            axes. One of an even size has one element more before the query than after it.
        dilation: the distance from one seen element to the next on each axis, at least 1.
        causal: axes on which only elements up to the query are seen: the window ends there, and is smaller at the beginning.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: something is not an int, or `causal` not a bool.
        ValueError: there are no axes, more than three, or not as many as `grid` has; or a window does not fit into its axis.

        create_block_mask(neighborhood((64, 64), 7), B=None, H=None, Q_LEN=4096, KV_LEN=4096)
        create_block_mask(neighborhood((16, 32, 32), (8, 5, 5), causal=(True, False, False)), None, None, 16384, 16384)
    """
    extents = [whole_number(RECIPE, "grid", n, "pass the extents of the grid", minimum=1) for n in _listed(grid)]
    if not 1 <= len(extents) <= 3:
        raise ValueError(f"{RECIPE}(): grid must have 1 to 3 axes, got {len(extents)}; flatten the others into the batch")
    others = (_each(name, given, len(extents)) for name, given in (("window", window), ("dilation", dilation), ("causal", causal)))
    *outer, columns = (_axis(*of_axis) for of_axis in zip(extents, *others, strict=True))
    *outer_extents, width = extents
    if not outer:

        def neighborhood(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return columns(q_idx, kv_idx, width, 1)

    elif len(outer) == 1:
        (rows,), (height,) = outer, outer_extents

        def neighborhood(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return rows(q_idx, kv_idx, height, width) & columns(q_idx % width, kv_idx % width, width, 1)

    else:
        (layers, rows), (depth, height) = outer, outer_extents

        def neighborhood(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            area = height * width
            seen = layers(q_idx, kv_idx, depth, area) & rows(q_idx % area, kv_idx % area, height, width)
            return seen & columns(q_idx % width, kv_idx % width, width, 1)

    return neighborhood


def _axis(length: int, window: object, dilation: object, causal: object) -> Callable:
    """Which position i sees which position j, on an axis of `length` elements that are `unit` positions each. Of j as little is computed as
    can be: a tile has as many of them as of scores, which must stay in registers."""
    window = whole_number(RECIPE, "window", window, "pass the number of elements seen on an axis", minimum=1)
    dilation = whole_number(RECIPE, "dilation", dilation, "pass the distance from one seen element to the next", minimum=1)
    if not isinstance(causal, bool):
        raise TypeError(f"{RECIPE}(): causal must be a bool, got {causal!r}; pass one, or one for each axis")
    if window * dilation > length:
        raise ValueError(
            f"{RECIPE}(): window times dilation must fit into an axis of {length}, got {window} * {dilation}; pass a window of at most "
            f"{length // dilation}"
        )

    def along(i, j, length, unit):
        span = ((window - 1) * dilation + 1) * unit  # positions from the first element that is seen through the last one
        if unit > 1:
            i, of_key = i // unit, j // unit
        else:
            of_key = j
        if causal:
            first = i - (window - 1) * dilation
        elif dilation == 1:
            first = (i - window // 2).clamp(0, length - window)
        else:
            start = i % dilation  # of the grid that i is in, and how many elements that has
            count = (length - 1 - start) // dilation + 1
            first = start + (i // dilation - window // 2).clamp_min(0).minimum(count - window) * dilation
        lowest = first * unit if unit > 1 else first
        seen = (j >= lowest) & (j < lowest + span)
        return seen if dilation == 1 else seen & (of_key % dilation == i % dilation)

    return along


def _listed(given: object) -> list:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _each(name: str, given: object, axes: int) -> list:
    """An argument of every axis."""
    listed = _listed(given)
    if isinstance(given, Sequence) and len(listed) != axes:
        raise ValueError(f"{RECIPE}(): {name} must have an entry for each of {axes} axes, got {given!r}; one value is that of all axes")
    return listed if isinstance(given, Sequence) else listed * axes
