"""Launching with the largest tile that a device can hold."""

from __future__ import annotations

from collections.abc import Callable

from ..device.cuda import DoesNotFit
from ..plan.tiles import Tile, next_smaller


def launch_fitting(holder, launch: Callable[[Tile], object], smaller: Callable[[Tile], Tile | None] = next_smaller):
    """`launch(tile)` with the holder's tile, or with the next smaller one that the device can hold; the holder keeps it."""
    while True:
        try:
            return launch(holder.tile)
        except DoesNotFit:
            tile = smaller(holder.tile)
            if tile is None:
                raise
            holder.tile = tile
