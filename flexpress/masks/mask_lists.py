"""What a BlockMask is made of: lists as they were made or given, and those for its lengths and its mask_mod now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from flexpress.inputs.checks import pair
from flexpress.masks.block_lists import (
    capturing,
    check_rows,
    kernel_size,
    mask_mod_of_lists,
    read_lists,
    regridded,
    status_of,
    transposed_lists,
    with_rows_beyond,
    without_values,
)
from flexpress.masks.given_lists import GivenLists
from flexpress.masks.slices import Selection

from ..codegen.compiling import runs_uncompiled
from ..codegen.run.block_lists import BlockLists

M = TypeVar("M", bound="MaskLists")
C = TypeVar("C", bound=type)


def settable(cls: C) -> C:
    """Class decorator: the class's properties are set by its __setattr__. By themselves they are not in what torch 2.11's compiler traces:
    it keeps a value that nobody looks at."""
    found = {name: member.fset for name, member in vars(cls).items() if isinstance(member, property) and member.fset is not None}
    cls._SETTERS = {**getattr(cls, "_SETTERS", {}), **found}
    return cls


@dataclass(frozen=True, slots=True, eq=False)  # read faster than a NamedTuple, at every call
class Walked:
    """The lists that kernels walk.

    own       the mask's own, of which they are made
    decided   does its mask_mod alone say what attends, whatever it captures holds since?
    plain     is it the mask_mod of their partial blocks?
    """

    lists: BlockLists
    own: BlockLists
    decided: bool
    plain: bool


class ListedMask:
    """Read as a BlockMask is, where an operator was given lists that kernels walk as they are. Made in a tenth of the time."""

    __slots__ = ("_decided", "_lists", "_size", "mask_mod", "seq_lengths")

    def __init__(self, seq_lengths: tuple[int, int], lists: BlockLists, mask_mod: Callable, decided: bool) -> None:
        self.seq_lengths, self.mask_mod = seq_lengths, mask_mod
        self._lists, self._size, self._decided = lists, (lists.q_block, lists.kv_block), decided

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN)."""
        return *self._lists.kv_indices.shape[:2], *self.seq_lengths

    def for_kernels(self) -> tuple[BlockLists, Callable]:
        """As that of MaskLists."""
        return self._lists, self.mask_mod


@settable
@runs_uncompiled
class MaskLists:
    """The base of BlockMask, which keeps its lists.

    _given           lists of a user, who may write to them; or None, and then
    _whole           the lists as they were made,
    _whole_lengths   for these lengths,
    _whole_mod       and this mask_mod,
    _agreed          which alone said then what attends
    _cuts            are full blocks of _whole, where Q_LEN cuts the last row of blocks, partial in torch's lists? mask_mod was asked of the
                     queries that there are, so for another one they are partial
    _fixed           does mask_mod capture nothing, so that it says the same at every call?
    _changed         are the lengths others since?
    _agrees          does _whole_mod alone say what attends in the lengths of now, too?
    _replaced        is mask_mod another since? torch's compiler cannot compare functions, so in what it traces each one that is set is
    _leading         extents of the lists in front of the rows, (B, H) if they have both
    """

    # by torch.compile: a mask may be made, read and changed in what it compiles
    _TRACED: tuple[str, ...] = (
        "__setattr__",
        "_made",
        "_set",
        "_forget",
        "_decided",
        "_decided_as_made",
        "_partial_where_cut",
        "_lists",
        "_current",
        "_as_made",
        "_grid",
        "_indices",
        "_status",
        "mask_mod",
        "seq_lengths",
    )

    _SETTERS: ClassVar[dict[str, Callable]]
    _seq_lengths: tuple[int, int]
    _size: tuple[int, int]
    _given: GivenLists | None
    _whole: BlockLists | None
    _whole_lengths: tuple[int, int]
    _whole_mod: Callable
    _mask_mod: Callable
    _agreed: bool
    _agrees: bool
    _replaced: bool
    _selection: Selection | None
    _leading: tuple[int, ...]
    _cuts: bool
    _changed: bool
    _fixed: bool

    def __setattr__(self, name: str, value) -> None:
        put = self._SETTERS.get(name)
        if put is None:
            object.__setattr__(self, name, value)
        else:
            put(self, value)

    def _set(
        self: M,
        seq_lengths: tuple[int, int],
        lists: BlockLists | GivenLists,
        mask_mod: Callable,
        *,
        leading: tuple[int, ...] | None = None,
        agrees: bool = False,
        selection: Selection | None = None,
        cuts: bool | None = None,
        fixed: bool = False,
    ) -> M:
        """Give the mask its parts; BlockLists are safe to be read by kernels.

        agrees        does mask_mod alone say what attends?
        cuts, fixed   as above; by default blocks are cut where it does
        """
        given = isinstance(lists, GivenLists)
        self._given, self._whole = (lists, None) if given else (None, lists)
        self._seq_lengths, self._whole_lengths = seq_lengths, seq_lengths
        self._mask_mod, self._whole_mod, self._replaced = mask_mod, mask_mod, False
        self._size = lists.size if given else (lists.q_block, lists.kv_block)
        counts = lists.tables[0] if given else lists.kv_num_blocks
        self._leading = tuple(counts.shape[:-1]) if leading is None else leading
        self._agreed, self._agrees, self._selection = agrees, agrees, selection
        self._cuts, self._changed = agrees if cuts is None else cuts, False
        self._fixed = fixed
        self._partial: BlockLists | None = None  # _whole, with partial blocks where it is cut
        self._written: dict[str, torch.Tensor | None] = {}  # tables that a user set, and no kernel reads
        self._forget()
        return self

    def _forget(self) -> None:
        """What is derived from lists and lengths is to be made anew."""
        self._derived: dict[bool, BlockLists] = {}  # those for changed lengths, by whether cut blocks are partial
        self._walked: Walked | None = None
        self._walked_mod: tuple | None = None  # of mask_mod_of_lists, for those
        self._parts: dict[tuple, tuple] = {}  # of ranks, and the mask_mod and lists of which each was made

    @classmethod
    def _made(cls: type[M], *parts, **more) -> M:
        """A mask of lists that need no look."""
        return cls.__new__(cls)._set(*parts, **more)

    @property
    def _decided(self) -> bool:
        """Does mask_mod alone say what attends? Else lists may leave out, or show in full, what it says otherwise."""
        return self._agrees and not self._replaced

    @property
    def _decided_as_made(self) -> bool:
        """Did it in the lengths that the mask was made for?"""
        return self._agreed and not self._replaced

    @property
    def _partial_where_cut(self) -> bool:
        """Are full blocks that Q_LEN cuts to be partial for kernels, too? mask_mod may say otherwise of them now: as in torch's lists."""
        return self._cuts and not (self._decided and self._fixed)

    @property
    def _lists(self) -> BlockLists:
        """The lists of now, for mask_mod: 4-dimensional, contiguous, int32, not to be written to."""
        return self._current(self._partial_where_cut)

    def _current(self, partial: bool) -> BlockLists:
        """The lists of now; `partial`: those that were cut as they were made are to be partial."""
        if self._given is not None:
            return self._given.lists(self._seq_lengths)
        made = self._as_made(partial)
        if not self._changed or (self._seq_lengths[1] == self._whole_lengths[1] and self._grid[0] == made.kv_indices.shape[2]):
            return made
        found = self._derived.get(partial)
        if found is None or without_values():
            counts, indices, *full = made.counts_and_indices
            found = read_lists(counts, indices, *(full or (None, None)), self._size, self._seq_lengths)
            if not (without_values() or capturing(found)):
                self._derived[partial] = found.kept()
        return found.ready()

    def _as_made(self, partial: bool) -> BlockLists:
        """The lists as they were made; `partial` is as for _current."""
        if self._whole is None:
            raise AttributeError("a BlockMask of lists that were given has none that were made")
        if not partial:
            return self._whole
        found = self._partial
        if found is None or without_values():
            found = with_rows_beyond(self._whole, self._whole_lengths)
            if not (found is self._whole or without_values() or capturing(found)):
                self._partial = found.kept()
        return found.ready()

    def for_kernels(self) -> tuple[BlockLists, Callable]:
        """The lists that kernels walk, and the mask_mod of their partial blocks: the mask's own, unless its blocks do not suit them
        (see kernel_size). Then lists of other blocks, with a mask_mod that knows of the mask's own where mask_mod alone does not."""
        walked, decided = self._walked, self._decided and self._fixed  # what it captures may hold something else since
        if walked is None or walked.decided is not decided or self._given is not None:
            walked = self._walk(decided)
        if walked.plain:
            return walked.lists.ready(), self._mask_mod
        mod = self._walked_mod
        if mod is None or mod[0] is not self._mask_mod or mod[3] is not walked:
            mod = (*mask_mod_of_lists(self._mask_mod, status_of(walked.own, self._grid[1]), self._size), walked)
            self._walked_mod = None if capturing(walked.lists) else mod
        mod[2].wait()
        return walked.lists.ready(), mod[1]

    def _walk(self, decided: bool) -> Walked:
        """The lists that kernels walk, made anew where the mask's own are others than before."""
        own, walked = self._lists if self._given is None else self._given.lists(self._seq_lengths), self._walked
        if walked is None or walked.own is not own or walked.decided is not decided:
            check_rows(own.kv_indices.shape[2], self._seq_lengths, self._size)
            size = kernel_size(self._size, self._seq_lengths)
            lists = own if size == self._size else regridded(own, size, self._seq_lengths).kept()
            walked = Walked(lists, own, decided, lists is own or decided)
            self._walked = None if capturing(own) else walked
        return walked

    @property
    def _indices(self) -> torch.Tensor:
        """kv_indices as they were made or given, with 4 dimensions."""
        return self._as_made(False).kv_indices if self._given is None else self._given.with_batch_and_head().tables[1]

    @property
    def mask_mod(self) -> Callable:
        """(b, h, q_idx, kv_idx) -> bool: decides single positions inside partial blocks. May be set."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, value: Callable) -> None:
        self._mask_mod, self._replaced = value, torch.compiler.is_dynamo_compiling() or value is not self._whole_mod

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(Q_LEN, KV_LEN). May be set, as the class says."""
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, value: tuple[int, int]) -> None:
        lengths, made = pair("seq_lengths", value, 0, "a pair of lengths (Q_LEN, KV_LEN)"), self._whole_lengths
        if lengths != self._seq_lengths:
            self._seq_lengths, self._changed = lengths, lengths != made
            beyond = lengths[0] > made[0] or lengths[1] > made[1]  # of which mask_mod and lists may differ
            self._agrees = self._agreed and not beyond
            self._forget()

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of blocks; lists may have fewer columns."""
        (Q_LEN, KV_LEN), (q_block, kv_block) = self._seq_lengths, self._size
        return -(-Q_LEN // q_block), -(-KV_LEN // kv_block)

    def _status(self) -> torch.Tensor:
        """int8 (B, H, rows, columns): 0 empty, 1 partial, 2 full."""
        return status_of(self._lists, self._grid[1])

    def as_lists(self) -> BlockLists:
        """The lists of now, for mask_mod: 4-dimensional, contiguous, int32, not to be written to."""
        return self._lists

    def as_transposed_lists(self) -> BlockLists:
        """The transposed lists (query blocks for each KV block), in the fields of the others."""
        return transposed_lists(self._lists, self._seq_lengths[1])
