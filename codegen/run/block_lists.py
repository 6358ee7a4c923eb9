"""Block lists as the drivers of kernels take them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..device.memory import META
from ..device.streams import MadeOn
from ..mod.expr import INDEX_BOUND
from ..plan.forward import Blocks, list_numbers, list_tables
from ..registry import remembered
from .launch import addresses_of


class Shifts(NamedTuple):
    """Where blocks of queries, and of keys, lie in a longer sequence: mods are told positions there.

    q, kv           int32, one for each block: by how many blocks further on it is
    q_len, kv_len   of that sequence. Keys past its end are hidden by mask_mod
    """

    q: torch.Tensor
    kv: torch.Tensor
    q_len: int
    kv_len: int

    def positions(self, block: int, axis: str, length: int) -> torch.Tensor:
        """int32 (length,) Where the rows of the "q" or the "kv" tensor are."""
        local = torch.arange(length, dtype=torch.int32, device=self.q.device)
        return local + block * getattr(self, axis)[local // block]


class Looks:
    """What is the same for all lists with tables of the same shapes, in the same blocks, on one device.

    sizes      strides of batch and head (in rows; 0 for a mask that all share), widths of the index lists, and, with `starts`, their rows
    structure  what a launch depends on beside addresses
    blocks     what of the lists changes a kernel
    fitting    Inputs, with Options and the lengths of a mask, that were found to fit
    """

    __slots__ = ("blocks", "fitting", "sizes", "structure")

    def __init__(
        self, shape: tuple, full_width: int | None, size: tuple[int, int], interior: bool, starts: bool, reach: tuple, _: torch.device
    ) -> None:
        Zm, Hm, rows, width = shape
        has_full, far = full_width is not None, max(reach, default=0) > INDEX_BOUND
        widths = [width, full_width] if full_width is not None else [width]
        self.sizes = [Hm * rows if Zm > 1 else 0, rows if Hm > 1 else 0, *widths, *([rows] if starts else [])]
        self.structure = has_full, *size, interior, starts, *reach, *self.sizes
        self.blocks = Blocks(has_full, *size, interior, starts, bool(reach), far)
        self.fitting: set = set()


_looks = remembered("looks of block lists", 4096)(Looks)


@dataclass(frozen=True)
class BlockLists:
    """The block lists of a mask as kernels read them.

    kv_num_blocks (Zm, Hm, rows), kv_indices (Zm, Hm, rows, columns), both contiguous int32; Zm and Hm are 1 or Z and Hq. full_*: the
    same for blocks that need no mask_mod, or None. `interior`: no full block reaches past KV_LEN.

    starts   int32 (rows + 1), or None: blocks of the tiles' axis (queries; keys, in transposed lists) are the positions from starts[i] up
             to starts[i + 1], at most a block's size; the last ones may be empty. The lists then hold first positions of blocks instead
             of their numbers, a full block has all its positions, and mask_mod hides from a partial one all that is not in it
    shifts   where blocks lie in a longer sequence, or None: then they lie where they are
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None
    full_kv_indices: torch.Tensor | None
    q_block: int
    kv_block: int
    interior: bool
    starts: torch.Tensor | None = None
    shifts: Shifts | None = None

    @property
    def counts_and_indices(self) -> tuple[torch.Tensor, ...]:
        """The lists themselves, as `lists_of` takes them. torch's compiler traces this."""
        if self.full_kv_num_blocks is None or self.full_kv_indices is None:
            return self.kv_num_blocks, self.kv_indices
        return self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices

    @functools.cached_property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        return *self.counts_and_indices, *(() if self.starts is None else (self.starts,)), *(self.shifts or ())[:2]

    @functools.cached_property
    def transposed(self) -> dict[int, BlockLists]:
        """The transposed lists, by KV_LEN, where they were made."""
        return {}

    def kept(self) -> BlockLists:
        """These, which were made just now and serve later calls: `ready` waits for them on other streams."""
        self.__dict__["made_on"] = MadeOn(self.tables)
        return self

    def ready(self) -> BlockLists:
        """These, when the current stream may read them."""
        made_on = self.__dict__.get("made_on")
        if made_on is not None:
            made_on.wait()
        return self

    @functools.cached_property
    def looks(self) -> Looks:
        """What is the same for all lists that look as these do."""
        indices, full, reach = self.kv_indices, self.full_kv_indices, () if self.shifts is None else self.shifts[2:]
        width, starts = None if full is None else full.shape[3], self.starts is not None
        return _looks(indices.shape, width, (self.q_block, self.kv_block), self.interior, starts, reach, indices.device)

    @property
    def structure(self) -> tuple:
        """What a launch depends on beside addresses."""
        return self.looks.structure

    @property
    def blocks(self) -> Blocks:
        """What of the lists changes a kernel."""
        return self.looks.blocks

    @property
    def by_head(self) -> bool:
        """Have heads lists of their own? Then they do not share a tile."""
        return self.kv_num_blocks.shape[1] > 1

    @functools.cached_property
    def addresses(self) -> list[int] | None:
        """Of the tables; None if one is no multiple of 16 bytes."""
        return addresses_of(self.tables)

    def tensors(self, axis: str = "kv") -> dict[str, torch.Tensor]:
        """The tables by the names of parameters, of lists of KV blocks or, transposed, of query blocks ("q")."""
        return self._tensors[axis]

    @functools.cached_property
    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {axis: dict(zip((p.name for p in list_tables(self.blocks, axis)), self.tables, strict=True)) for axis in ("kv", "q")}

    def numbers(self, axis: str = "kv") -> dict[str, int]:
        """The numbers that go with them by the names of parameters."""
        return dict(zip(list_numbers(self.blocks, axis), self.looks.sizes, strict=True))


def lists_of(tables: Sequence[torch.Tensor], q_block: int, kv_block: int, interior: bool) -> BlockLists:
    """Block lists of kv_num_blocks, kv_indices and, if they are kept apart, full_kv_num_blocks and full_kv_indices."""
    return BlockLists(*tables[:2], *(tables[2:] or (None, None)), q_block, kv_block, interior)


def transposed_unmade(lists: BlockLists, KV_LEN: int) -> BlockLists:
    """The transposed lists without memory: what kernels that walk them depend on."""
    Zm, Hm, rows, _ = lists.kv_indices.shape
    columns = -(-KV_LEN // lists.kv_block)
    counts, indices = (torch.empty(shape, dtype=torch.int32, device=META) for shape in ((Zm, Hm, columns), (Zm, Hm, columns, rows)))
    full = (None, None) if lists.full_kv_indices is None else (counts, indices)
    starts = None if lists.starts is None else torch.empty(columns + 1, dtype=torch.int32, device=META)
    return BlockLists(counts, indices, *full, lists.q_block, lists.kv_block, lists.interior, starts, lists.shifts)


def tiles_of(length: int, size: int, lists: BlockLists | None, axis: str) -> int:
    """How many tiles of `size` positions of the lists' rows there are; `axis` is the attribute that says how large a block is."""
    if lists is None or lists.starts is None:
        return -(-length // size)
    return (lists.starts.shape[0] - 1) * (getattr(lists, axis) // size)
