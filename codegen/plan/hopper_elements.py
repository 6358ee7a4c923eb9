"""Elements that a score_mod reads for every score, as of a learned bias `bias[h, q_idx, kv_idx]`: which of them the forward kernel for
Hopper has the TMA unit copy to shared memory, beside K and V."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.expr import Expr
from ..mod.loads import loads_of, weight_of
from .forward import ForwardCase, Mod

SHARED_BYTES = 227 << 10  # of a multiprocessor, for one program
OTHER_BYTES = 1 << 10  # of that for barriers and numbers
_WIDEST = 128  # head dims: wider ones leave no room
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Elements(NamedTuple):
    """A captured tensor of which the kernel copies tiles, [64, BLOCK_N] for each consumer.

    tensor    which of score_mod's tensors
    dtype     of it
    indices   of its dimensions before the last two, which are positions: "b", "h", or a number
    stages    how many tiles a consumer has buffers for
    name      of the parameter that would take the tensor
    """

    tensor: int
    dtype: torch.dtype
    indices: tuple[str | int, ...]
    stages: int = 1
    name: str = "ELEMENTS"

    @property
    def place(self) -> str:
        """The first two coordinates of a tile in what is `lying`, as the kernel names them."""
        names = [{"b": "z", "h": "h"}.get(str(index), str(index)) for index in self.indices]
        return ", ".join([*["0"] * (2 - len(names)), *names])

    def lying(self, captured: list[torch.Tensor]) -> torch.Tensor:
        """The tensor with four dimensions, as TMA copies from it."""
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
    return not (blocks and (blocks.shifted or blocks.starts)) and elements_of(score) is not None


def elements_of(score: Mod) -> tuple[Expr, Elements] | None:
    """The first load of a score_mod that copies of tiles can take the place of, and what is copied."""
    for number, load in enumerate(loads_of(score[0])):
        found = _elements(load, number, score)
        if found:
            return load, found
    return None


def _elements(load: Expr, number: int, score: Mod) -> Elements | None:
    graph, layouts = score
    layout, capture = layouts[load.attr], graph.tensors[load.attr]
    if load.op != "load" or capture.dtype not in _DTYPES or not 2 <= capture.ndim <= 4 or layout.strides[-2:] != ("v", "1"):
        return None
    *first, q_idx, kv_idx = [index.attr if index.op in ("symbol", "literal") else None for index in load.args]
    if (q_idx, kv_idx) != ("q_idx", "kv_idx"):
        return None
    indices = []
    for dim, index in enumerate(first):
        if layout.strides[dim] == "0" and (number, dim) in layout.inside:  # all the same
            indices.append(0)
        elif layout.strides[dim] == "v" and (index in ("b", "h") or (isinstance(index, int) and index >= 0)):
            indices.append(index)
        else:
            return None
    return Elements(load.attr, capture.dtype, tuple(indices))
