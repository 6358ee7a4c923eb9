"""Dot products of rows of captured tensors in the forward kernel for Hopper: which ones it computes, and from what it copies."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.expr import Expr, ModGraph, symbols_in
from ..mod.graphs.added_dots import AddedDot, added_dot
from ..mod.graphs.loads import loads_of, weight_of
from ..mod.table.dtypes import dtype_name
from ..text.layouts import TensorLayout
from .forward import ForwardCase, Mod
from .hopper_tiles import ROWS

DOT_WIDTH = 64  # of rows, as they lie in shared memory


class DotRows(NamedTuple):
    """Rows of a captured tensor, of which the kernel copies tiles.

    name     of the parameter that would take the tensor
    tensor   which of score_mod's tensors
    symbols  what indexes its dimensions but the last: of "b", "h", and "q_idx" or "kv_idx"
    """

    name: str
    tensor: int
    symbols: tuple[str, ...]

    def block(self, dtype: str, keys: int) -> tuple[str, int, int]:
        """(dtype, rows, columns) of one TMA copy: q's `dtype`; ROWS rows of queries, or `keys` rows of keys."""
        return dtype, ROWS if "q_idx" in self.symbols else keys, DOT_WIDTH

    def lying(self, captured: list[torch.Tensor]) -> torch.Tensor:
        """The tensor as (b, h, position, element), where TMA can copy from."""
        found = captured[self.tensor].detach()
        if found.numel() == 0:  # as one row of zeros, beyond which all is zero, too
            found = found.new_zeros([*[1] * (found.ndim - 1), max(1, found.shape[-1])])
        if found.data_ptr() % 16:  # a copy, whose rows begin as far apart
            found = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device).copy_(found)
        order = [self.symbols.index(s) for s in ("b", "h", *self.symbols) if s in self.symbols]
        found = found.permute(*dict.fromkeys(order), len(self.symbols))
        for dim, symbol in enumerate(("b", "h")):
            found = found if symbol in self.symbols else found.unsqueeze(dim)
        return found


def dot_flags(added: AddedDot | None) -> dict[str, object]:
    """What the template knows of a dot product that is added."""
    return {
        "DOT_ROWS": rows_of(added) if added else (),
        "DOT_ROUNDED": dtype_name(added.rounded) if added and added.rounded else "",
        "DOT_FACTOR": added.factor if added else 1.0,
        "DOT_WIDTH": DOT_WIDTH,
    }


def why_no_dot(case: ForwardCase, padded: tuple[int, int], graph: ModGraph, layouts: tuple[TensorLayout, ...]) -> str | None:
    """Why the kernel cannot compute the dot product of rows of a score_mod, or None if it can."""
    added = added_dot(graph)
    if added is None:
        return "a dot product of rows of captured tensors is a further product of matrices, here in a sum `score + dot` alone"
    if added.rest and (weight_of(added.rest) or any("score" in symbols_in(load) for load in loads_of(added.rest))):
        return "what is made of the sum of the score and a dot product of rows takes more registers than the tiles leave"
    if any(row.dtype != case.dtype for row in added.dot.args):
        return f"rows in a dot product are not {dtype_name(case.dtype)}, as q is; the portable kernels have their precision"
    if added.dot.attr > DOT_WIDTH or padded not in ((64, 64), (128, 128)):
        widths = f"{added.dot.attr} elements, head dims {case.d_qk} and {case.d_v}"
        return f"a dot product of rows has {widths}: there is room for up to {DOT_WIDTH}, beside equal head dims of 33 to 128"
    if not all(_is_plain(row, layouts[row.attr].strides) for row in added.dot.args):
        return "rows in a dot product are read in another way than by b, h and a position, or lie where TMA cannot copy from"
    if not case.scale_is_positive or case.cache or case.extras.scales or (case.blocks and (case.blocks.starts or case.blocks.shifted)):
        return "a dot product of rows beside a cache, packed sequences, other positions or a scale that is not positive"
    return None


def _is_plain(row: Expr, strides: tuple[str, ...]) -> bool:
    """Are the indices of a row b, h and a position, each at most once, and do TMA's strides lead to it?"""
    symbols = [index.attr for index in row.args if index.op == "symbol"]
    aligned = strides[-1] == "1" and all(s == "v" for s in strides[:-1])
    return aligned and len(symbols) == len(row.args) == len(set(symbols)) and set(symbols) <= {"b", "h", "q_idx", "kv_idx"}


def rest_of(added: AddedDot, score: Mod) -> Mod | None:
    """What a score_mod makes of the score with the dot product. Its loads have other numbers."""
    if added.rest is None:
        return None
    places, old = {id(load): i for i, load in enumerate(loads_of(added.rest))}, loads_of(score[0])
    known = ({(places[id(old[n])], dim) for n, dim in layout.inside if id(old[n]) in places} for layout in score[1])
    return added.rest, tuple(layout._replace(inside=frozenset(found)) for layout, found in zip(score[1], known, strict=True))


def rows_of(added: AddedDot) -> tuple[DotRows, ...]:
    """The rows of a query and of a key."""
    pairs = zip(("Q_ROWS", "K_ROWS"), added.dot.args, strict=True)
    return tuple(DotRows(name, row.attr, tuple(i.attr for i in row.args)) for name, row in pairs)
