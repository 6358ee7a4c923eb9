"""Slices of a block mask: what an index selects, and the mask_mod that knows where it comes from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from flexpress.masks.block_lists import without_values

from ..codegen.mod.tracing.capture import name_of, plain
from ..codegen.run.meanwhile import is_capturing

Places = Sequence[int] | torch.Tensor  # a tensor of int64 where nobody can wait for its values


class Selection:
    """How the mask_mod of a slice comes from that of a whole mask.

    base        the mask_mod of the whole mask
    mask_mod    that of the slice
    q_block     positions in a query block
    b, h, rows  the batch entry, head and query block of the whole mask for each of the slice, as Places; None if they are the same
    """

    def __init__(self, base: Callable, mask_mod: Callable, q_block: int, b=None, h=None, rows=None) -> None:
        self.base, self.mask_mod, self.q_block = base, mask_mod, q_block
        self.b, self.h, self.rows = b, h, rows

    def then(self, chosen: tuple, extents: tuple) -> Selection:
        """What a slice of this slice is of the whole."""
        maps = []
        for old, new, extent, shared in zip((self.b, self.h, self.rows), chosen, extents, (True, True, False), strict=True):
            # entry 0 alone, of several, is a mask for every entry of a call: it needs the map that makes 0 of all of them
            kept = _is_run(new, 0) and not (shared and len(new) == 1 < extent)
            maps.append(_among(old, new) if old is not None else None if kept else new)
        return Selection(self.base, self.mask_mod, self.q_block, *maps)

    @property
    def parts(self) -> tuple:
        """What pickle keeps."""
        return self.base, self.q_block, *(None if places is None else [int(i) for i in places] for places in (self.b, self.h, self.rows))

    @classmethod
    def of_parts(cls, parts: tuple) -> Selection:
        """The one with these parts; its mask_mod is yet to be made."""
        base, *others = parts
        return cls(base, base, *others)

    def made_for(self, device) -> Selection:
        """This selection with its mask_mod made, capturing tensors on `device`."""
        made = self.base
        if not (self.b is None and self.h is None and self.rows is None):
            made = _reindexed(self.base, _index_map(self.b, device), _index_map(self.h, device), _row_map(self.rows, self.q_block, device))
        return Selection(self.base, made, self.q_block, self.b, self.h, self.rows)


def _reindexed(mask_mod: Callable, batch: Callable, head: Callable, query: Callable) -> Callable:
    mask_mod = plain(mask_mod)

    def reindexed(b, h, q_idx, kv_idx):
        return mask_mod(batch(b), head(h), query(q_idx), kv_idx)

    if not torch.compiler.is_dynamo_compiling():
        reindexed.__name__ = f"{name_of(mask_mod)}_slice"
    return reindexed


def _index_map(positions: Places | None, device) -> Callable:
    """positions[i] as a function that can be traced: no table where they are evenly spaced, so most slices share one kernel."""
    if positions is None:
        return lambda i: i
    if isinstance(positions, torch.Tensor):
        table, one = _table(positions, device), len(positions) == 1  # which stands for all
        return lambda i: table[0 if one else i]
    first = positions[0] if len(positions) else 0
    step = positions[1] - first if len(positions) > 1 else 0
    if all(p == first + n * step for n, p in enumerate(positions)):
        return lambda i: i * step + first
    table = _table(positions, device)
    return lambda i: table[i]


def _row_map(rows: Places | None, q_block: int, device) -> Callable:
    """A position's place in the whole mask, where row i of blocks is rows[i] there, as a function that can be traced."""
    if rows is None:
        return lambda i: i
    first = 0 if isinstance(rows, torch.Tensor) or not len(rows) else rows[0]
    if _is_run(rows, first):
        offset = first * q_block
        return lambda i: i + offset
    table = _table(rows, device)
    return lambda i: table[i // q_block] * q_block + i % q_block


def _table(positions: Places, device) -> torch.Tensor:
    """Of int64: what a mod computes of its elements is not seen to be computed of indices (codegen/mod/graphs/wide.py)."""
    if isinstance(positions, torch.Tensor):
        return positions.to(device)
    return torch.tensor(list(positions), dtype=torch.int64, device=device)


def _among(old: Places, new: Places) -> Places:
    """The `new` ones of `old` places."""
    if isinstance(old, torch.Tensor):
        return take(old, 0, new)
    if isinstance(new, torch.Tensor):
        return take(_table(old, new.device), 0, new)
    return [old[i] for i in new]


def three_indices(index) -> tuple:
    """An index as (batch, head, row). Raises IndexError for more."""
    parts = index if isinstance(index, tuple) else (index,)
    if sum(p is ... for p in parts) > 1:
        raise IndexError("a block mask is indexed with at most one ...")
    if any(p is ... for p in parts):
        at = next(i for i, p in enumerate(parts) if p is ...)
        parts = (*parts[:at], *[slice(None)] * (4 - len(parts)), *parts[at + 1 :])
    if len(parts) > 3:
        raise IndexError(
            f"a block mask is indexed by batch, head and query block, got {len(parts)} indices; for fewer keys use "
            "mask.adjust(q_len, kv_len)"
        )
    if sum(isinstance(p, Sequence) or (isinstance(p, torch.Tensor) and p.dim() > 0) for p in parts) > 1:
        raise IndexError(
            "at most one index of a block mask may be a tensor or sequence (torch would pair their elements up); index twice, "
            "mask[batches][:, heads], for every combination"
        )
    return (*parts, *[slice(None)] * (3 - len(parts)))


def selected(index, extent: int, name: str) -> Places:
    """The positions that one index selects of `extent`."""
    if isinstance(index, slice):
        if index.step is not None and operator.index(index.step) < 1:
            raise ValueError(f"the {name} index {index} has a step of {index.step}; steps must be positive: pass a list of positions")
        return range(extent)[index]
    if isinstance(index, torch.Tensor):
        if index.dim() > 1 or index.is_floating_point() or index.is_complex() or (index.dtype == torch.bool and index.dim() == 0):
            raise TypeError(
                f"the {name} index must be a 1-dimensional tensor of integers or bools, got {index.dtype} of shape {tuple(index.shape)}"
            )
        if index.dtype == torch.bool:
            if len(index) != extent:
                raise IndexError(f"the {name} index has {len(index)} bools for {extent} entries")
            index = index.nonzero().flatten()
        if without_values() or is_capturing(index.device):
            places = index.reshape(-1).long()
            return torch.where(places < 0, places + extent, places)
        index = index.tolist()
    values = index if isinstance(index, Sequence) and not isinstance(index, (str, bytes)) else [index]
    found = []
    for value in values:
        try:
            position = operator.index(value)
        except TypeError:
            position = None
        if position is None or isinstance(value, bool):
            raise TypeError(f"the {name} index must be an int, a slice, integers or a tensor of them, got {value!r}")
        if not -extent <= position < extent:
            everyone = " (extent 1: the same for all; leave the index out)" if extent == 1 and name != "query block" else ""
            raise IndexError(f"{name} index {position} is outside a mask with {extent}{everyone}")
        found.append(position % extent)
    return found


def _is_run(positions: Places, first: int) -> bool:
    return not isinstance(positions, torch.Tensor) and all(p == first + n for n, p in enumerate(positions))


def take(tensor: torch.Tensor, dim: int, positions: Places) -> torch.Tensor:
    """tensor's `positions` along `dim`; a view where they are neighbours, or ascend in even steps, as a slice of torch's is."""
    if isinstance(positions, torch.Tensor):
        return tensor.index_select(dim, positions.to(tensor.device))
    first = positions[0] if len(positions) else 0
    if _is_run(positions, first):
        return tensor.narrow(dim, first, len(positions))
    step = positions[1] - first if len(positions) > 1 else 0
    if step > 0 and all(p == first + n * step for n, p in enumerate(positions)):
        return tensor[(slice(None),) * dim + (slice(first, positions[-1] + 1, step),)]
    return tensor.index_select(dim, torch.tensor(positions, device=tensor.device))


def shown(positions: Sequence[int]) -> str:
    return str(list(positions)) if len(positions) <= 8 else f"[{', '.join(map(str, positions[:7]))}, ..., {positions[-1]}]"
