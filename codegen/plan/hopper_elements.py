"""Elements that a score_mod reads for every score, as of a learned bias `bias[h, q_idx, kv_idx]`: which of them the forward kernel for
Hopper has the TMA unit copy to shared memory, beside K and V."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..gpus import SHARED_MEMORY
from ..mod.expr import Expr, ModGraph, symbols_in
from ..mod.graphs.loads import loads_of, weight_of
from ..mod.table.dtypes import dtype_name
from ..text.snippet import Copied
from .forward import ForwardCase, Mod
from .hopper_tiles import ROWS, HopperTile, padded

OTHER_BYTES = 1 << 10  # of that for barriers and numbers
_WIDEST = 128  # head dims: wider ones leave no room
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Elements(NamedTuple):
    """A captured tensor of which the kernel copies tiles, [64, BLOCK_N] for each consumer.

    tensor    which of score_mod's tensors
    dtype     of it
    stages    how many tiles a consumer has buffers for
    name      of the parameter that would take the tensor
    """

    tensor: int
    dtype: torch.dtype
    stages: int = 1
    name: str = "ELEMENTS"

    def block(self, dtype: str, keys: int) -> tuple[str, int, int]:
        """(dtype, rows, columns) of one TMA copy, whatever q's `dtype` is."""
        return dtype_name(self.dtype), ROWS, keys

    def lying(self, captured: list[torch.Tensor]) -> torch.Tensor:
        """The tensor with four dimensions, the last two positions, as TMA copies from it."""
        found = captured[self.tensor].detach()
        if found.numel() == 0:  # as one zero, beyond which all is zero, too
            return found.new_zeros(1, 1, 1, 1)
        for dim in range(found.ndim - 2):
            found = found.narrow(dim, 0, 1) if found.stride(dim) == 0 else found
        return found[(None,) * (4 - found.ndim)]


def are_copied(case: ForwardCase, score: Mod | None) -> bool:
    """Does the kernel copy what a score_mod reads for every score of such a call, where the addresses of captured tensors are multiples of
    16 bytes?"""
    blocks = case.blocks
    if score is None or weight_of(score[0]) or case.cache or case.dtype.itemsize != 2 or max(case.d_qk, case.d_v) > _WIDEST:
        return False
    return not (blocks and (blocks.shifted or blocks.starts)) and copied_load(score) is not None


def with_elements(case: ForwardCase, tile: HopperTile, elements: Elements, handed: int) -> tuple[HopperTile, Elements] | None:
    """With buffers for the elements of a tile's scores, two if there is room; None if there is none. `handed`: bytes of what mods read of
    a key, which is in shared memory, too."""
    (d_qk, d_v), size = padded(case), case.dtype.itemsize
    room = SHARED_MEMORY["sm_90"] - OTHER_BYTES - size * (tile.BLOCK_M * d_qk + tile.stages * tile.BLOCK_N * (d_qk + d_v))
    room -= handed * tile.stages * tile.BLOCK_N
    output, buffer = size * tile.BLOCK_M * d_v, elements.dtype.itemsize * tile.BLOCK_M * tile.BLOCK_N
    if output + buffer <= room:
        return tile, elements._replace(stages=min(2, (room - output) // buffer))
    return (replace(tile, output_in_q=True), elements) if buffer <= room and d_v <= d_qk else None


def copied_flags(elements: Elements | None) -> dict[str, object]:
    """What the template knows of elements that are copied."""
    return {"ELEMENTS": elements, "ELEMENT_STAGES": elements.stages if elements else 0}


def elements_of(graph: ModGraph, copied: Copied) -> Elements:
    """What a copied load reads."""
    tensor = copied.load.attr
    return Elements(tensor, graph.tensors[tensor].dtype)


def copied_load(score: Mod) -> Copied | None:
    """The first load of a score_mod that copies of tiles can take the place of."""
    for number, load in enumerate(loads_of(score[0])):
        indices = _indices(load, number, score)
        if indices is not None:
            return Copied(load, "element", indices)
    return None


def _indices(load: Expr, number: int, score: Mod) -> tuple[Expr | None, ...] | None:
    """Those before the last two, None where all is one element; None for a load that is of another kind."""
    graph, layouts = score
    layout, capture = layouts[load.attr], graph.tensors[load.attr]
    if load.op != "load" or capture.dtype not in _DTYPES or not 2 <= capture.ndim <= 4 or layout.strides[-2:] != ("v", "1"):
        return None
    *first, q_idx, kv_idx = load.args
    if [index.op for index in (q_idx, kv_idx)] != ["symbol"] * 2 or (q_idx.attr, kv_idx.attr) != ("q_idx", "kv_idx"):
        return None
    found: list[Expr | None] = []
    for dim, index in enumerate(first):
        inside = (number, dim) in layout.inside
        if layout.strides[dim] == "0" and inside:
            found.append(None)
        # TMA reads zeros beyond the end, but does not count from there
        elif layout.strides[dim] == "v" and symbols_in(index) <= {"b", "h"} and (inside or index.op == "symbol"):
            found.append(index)
        else:
            return None
    return tuple(found)
