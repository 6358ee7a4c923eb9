"""The driver of the kernel that says which tiles the prefixes of groups make."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.devices import backend_of
from ..plan.shared_tiles import BLOCK, NUMBERS, most_parts, tiles_spec
from ..registry import INFO, Table
from .launch import Launch
from .shared_tables import Laid

_launches: dict[tuple, Launch] = Table("tiles of shared prefixes", 1024)


class Tiles(NamedTuple):
    """Tiles of BLOCK rows and a part of a group's keys each, int32.

    tiles   (room, NUMBERS): first row, the one behind the last, group, which BLOCK rows of the group, which part, of how many
    count   (1,): how many there are
    parts   (T,): how many parts each token has
    most    parts of a token for which there is room
    """

    tiles: torch.Tensor
    count: torch.Tensor
    parts: torch.Tensor
    most: int


def lay_tiles(laid: Laid, lengths: torch.Tensor, heads: int, programs: int) -> Tiles:
    """The tiles of a step; `lengths` (groups,) int32: keys that each group shares."""
    T, groups, device = laid.token.shape[0], lengths.shape[0], lengths.device
    most, rows = most_parts(T, heads, programs), T // BLOCK + groups
    int32 = {"dtype": torch.int32, "device": device}
    count, parts = torch.zeros(T + 4, **int32).split((4, T))
    found = Tiles(torch.empty(rows * most, NUMBERS, **int32), count[:1], parts, most)
    tensors = {"GROUP_STARTS": laid.starts, "LENGTHS": lengths, "TOKEN": laid.token, "PLACE": laid.place}
    tensors |= {"TILES": found.tiles, "COUNT": found.count, "PARTS": found.parts}
    key = (T, groups, heads, programs, device)
    launch = _launches.get(key)
    if launch is None:
        numbers = {"GROUPS": groups, "T": T, "HEADS": heads, "PROGRAMS": programs, "MOST": most}
        launch = _launches[key] = Launch(tiles_spec(backend_of(device.type)), numbers, tuple(tensors))
    else:
        INFO.hits += 1
    if not launch.again_with(list(tensors.values()), device):
        launch.with_constants((BLOCK,), tensors, [], (rows,), device)
    return found
