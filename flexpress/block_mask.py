"""BlockMask: which blocks of the attention matrix are empty, partial or full. Made of lists, sliced, cut, moved and compared.

The attributes have the names and the meaning of torch.nn.attention.flex_attention.BlockMask, whose objects are accepted
wherever ours are. Ours are instances of it, as others ask (transformers: `isinstance(attention_mask, BlockMask)`); no code of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.attention import flex_attention as torchs
from torch.types import Device

from flexpress.block_lists import capturing, kernel_size, listed_status, mask_mod_of_lists, read_lists, regridded, with_rows_beyond
from flexpress.checks import block_size, extent, pair
from flexpress.mask_attributes import MaskAttributes
from flexpress.mask_mods import noop_mask, same_mod
from flexpress.mods import MaskMod
from flexpress.plain_arguments import named_device
from flexpress.slices import Selection, selected, shown, take, three_indices

from .codegen.compiling import runs_uncompiled
from .codegen.mod.tensors import check_surroundings
from .codegen.plan.tiles import BLOCK
from .codegen.run.block_lists import BlockLists, lists_of

DEFAULT_BLOCK_SIZE = BLOCK
Index = int | slice | Sequence[int] | torch.Tensor


@runs_uncompiled
class BlockMask(MaskAttributes, torchs.BlockMask):  # type: ignore[misc, override]  # its attributes may be written to
    """A block-sparse mask.

    seq_lengths           (Q_LEN, KV_LEN). May be set: other lengths in the same rows of blocks, or fewer; what lists name beyond them is
                          dropped, for good, and what they do not name stays hidden
    BLOCK_SIZE            (Q block, KV block) in positions
    kv_num_blocks         int32 (B, H, rows): how many partial KV blocks each row of query blocks has; B and H may be 1
    kv_indices            int32 (B, H, rows, columns): which ones, ascending; entries past the count mean nothing
    full_kv_num_blocks    the same for blocks in which every position attends (no mask_mod needed); None if not kept apart
    full_kv_indices
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices
                          the transposed lists (B, H, columns[, rows]), made when first asked for
    mask_mod              decides single positions inside partial blocks. May be set

    These lists are copies: kernels read the mask's own, so writing to them, or later to those that the mask was made of, changes
    nothing; make another mask instead. Large index lists are kept only as wide as the densest row needs, and widened when asked for.

    `mask[batch, head, rows]` is the mask of a part of the batch, the heads and the query blocks, `mask.adjust(q_len, kv_len)` that of
    shorter lengths. Two masks are equal (`==`) if lengths, block size, lists and mask_mod mean the same.
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: torch.Tensor | None = None,
        full_kv_indices: torch.Tensor | None = None,
        q_num_blocks: torch.Tensor | None = None,
        q_indices: torch.Tensor | None = None,
        full_q_num_blocks: torch.Tensor | None = None,
        full_q_indices: torch.Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        mask_mod: MaskMod = noop_mask,
        *,
        dq_write_order: torch.Tensor | None = None,
        dq_write_order_full: torch.Tensor | None = None,
        dq_kv_order: torch.Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        """A block mask from lists made elsewhere, which may leave out B and H. They are copied, by kernels that nobody waits for; counts
        above a list's width and entries outside the mask list nothing, and a block listed as full and as partial is full.

        q_num_blocks, q_indices, full_q_num_blocks and full_q_indices are there for code written for torch: the transposed lists are made
        of the others. So are the orders of dQ's writes, which no kernel here needs. Raises TypeError, ValueError or NotImplementedError
        for arguments, showing shapes that do not fit.
        """
        for counts, indices, names in (
            (q_num_blocks, q_indices, "q_num_blocks and q_indices"),
            (full_q_num_blocks, full_q_indices, "full_q_num_blocks and full_q_indices"),
        ):
            if (counts is None) != (indices is None):
                raise ValueError(f"{names} go together: give both or neither")
            if not (counts is None or isinstance(counts, torch.Tensor) and isinstance(indices, torch.Tensor)):
                raise TypeError(
                    f"{names} must be tensors, got {type(counts).__name__} and {type(indices).__name__}; BLOCK_SIZE comes later"
                )
        if not callable(mask_mod):
            raise TypeError(f"mask_mod must be a function, got {type(mask_mod).__name__}")
        check_surroundings("BlockMask")
        lengths, size = pair("seq_lengths", seq_lengths, 0, "a pair of lengths (Q_LEN, KV_LEN)"), block_size(BLOCK_SIZE)
        lists = read_lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, size, lengths)
        self._set(lengths, lists, mask_mod, leading=tuple(kv_num_blocks.shape[:-1]))

    _TRACED = ("_made", "_set", "_forget")  # by torch.compile, for a mask that is made in what it compiles

    def _set(
        self,
        seq_lengths: tuple[int, int],
        lists: BlockLists,
        mask_mod: Callable,
        *,
        leading: tuple[int, ...] | None = None,
        decided_by: Callable | None = None,
        selection: Selection | None = None,
    ) -> BlockMask:
        """Give the mask its parts; lists are safe to be read by kernels.

        leading      extents of the lists in front of the rows, (B, H) if they have both
        decided_by   the mask_mod that lists agree with: it alone says what attends
        """
        self._seq_lengths, self._lists, self.mask_mod = seq_lengths, lists, mask_mod
        self._leading = tuple(lists.kv_num_blocks.shape[:2]) if leading is None else leading
        self._decided_by, self._selection = decided_by, selection
        self._forget()
        return self

    def _forget(self) -> None:
        """What is derived from lists and lengths is to be made anew."""
        self._walked: BlockLists | None = None  # the lists that kernels walk
        self._walked_mod: tuple | None = None  # of mask_mod_of_lists, for those
        self._parts: dict[tuple, tuple[Callable, BlockMask]] = {}  # of ranks, and the mask_mod of which each was made

    @classmethod
    def _made(cls, *parts, **more) -> BlockMask:
        """A mask of lists that need no look."""
        return cls.__new__(cls)._set(*parts, **more)

    @property
    def _decided(self) -> bool:
        """Does mask_mod alone say what attends? Else lists may leave out, or show in full, what it says otherwise."""
        return self._decided_by is self.mask_mod

    def is_as_made(self, size: tuple[int, int], lengths: tuple[int, int]) -> bool:
        """Would lists that are made of mask_mod now, for such blocks and lengths, be the mask's own?"""
        return self._decided and size == self.BLOCK_SIZE and self._seq_lengths == lengths

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: torch.Tensor | None = None,
        full_kv_indices: torch.Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: torch.Tensor | None = None,
        dq_write_order_full: torch.Tensor | None = None,
        dq_kv_order: torch.Tensor | bool | None = None,
    ) -> BlockMask:
        """A block mask from lists made elsewhere, as `BlockMask(...)` makes it. mask_mod=None hides nothing inside the listed blocks.

        seq_lengths is (rows, columns) of kv_indices in whole blocks if it is not given. compute_q_blocks and the orders of dQ's writes are
        there for code written for torch: the transposed lists are made when first asked for, whatever it says.
        """
        size = block_size(BLOCK_SIZE)
        if seq_lengths is None and isinstance(kv_indices, torch.Tensor) and not kv_indices.is_nested and kv_indices.dim() >= 2:
            seq_lengths = (kv_indices.shape[-2] * size[0], kv_indices.shape[-1] * size[1])
        lists = kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices
        seq_lengths = (0, 0) if seq_lengths is None else seq_lengths
        return cls(seq_lengths, *lists, BLOCK_SIZE=size, mask_mod=noop_mask if mask_mod is None else mask_mod)

    def for_kernels(self) -> tuple[BlockLists, Callable]:
        """The lists that kernels walk, and the mask_mod of their partial blocks: the mask's own, unless its blocks do not suit them
        (see kernel_size). Then lists of other blocks, with a mask_mod that knows of the mask's own where mask_mod alone does not."""
        walked = self._walked
        if walked is None:
            self._check_rows()
            size = kernel_size(self.BLOCK_SIZE, self._seq_lengths)
            walked = self._lists if size == self.BLOCK_SIZE else regridded(self._lists, size, self._seq_lengths).kept()
            self._walked = None if capturing(walked) else walked
        if walked is self._lists or self._decided:
            return walked.ready(), self.mask_mod
        mod = self._walked_mod
        if mod is None or mod[0] is not self.mask_mod:
            mod = mask_mod_of_lists(self.mask_mod, self._status(), self.BLOCK_SIZE)
            self._walked_mod = None if capturing(walked) else mod
        mod[2].wait()
        return walked.ready(), mod[1]

    def _check_rows(self) -> None:
        rows = self._grid[0]
        if self._lists.kv_indices.shape[2] < rows:
            raise ValueError(
                f"kv_indices lists {self._lists.kv_indices.shape[2]} rows of blocks, but {self._seq_lengths[0]} queries in "
                f"blocks of {self._lists.q_block} need {rows}: make a mask for these seq_lengths, {self._seq_lengths}"
            )

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(Q_LEN, KV_LEN). May be set, as the class says."""
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, value: tuple[int, int]) -> None:
        lengths = pair("seq_lengths", value, 0, "a pair of lengths (Q_LEN, KV_LEN)")
        if lengths != self._seq_lengths:
            if lengths[0] > self._seq_lengths[0] or lengths[1] > self._seq_lengths[1]:  # of which mask_mod and lists may differ
                if self._decided_by is not None:
                    self._lists = with_rows_beyond(self._lists, self._seq_lengths)
                self._decided_by = None
            self._lists = read_lists(*self._tables(), self.BLOCK_SIZE, lengths)
            self._seq_lengths = lengths
            self._forget()

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        lists = self._lists
        return lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices

    def _lists_by(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BlockLists:
        """The mask's lists with each of the tables changed."""
        counts, indices, full_counts, full_indices = self._tables()
        if full_counts is not None and full_indices is not None:
            full_counts, full_indices = change(full_counts), change(full_indices)
        return BlockLists(change(counts), change(indices), full_counts, full_indices, *self.BLOCK_SIZE, self._lists.interior)

    def to(self, device: Device) -> BlockMask:
        """The same mask with its lists on another device. Raises TypeError for anything else: lists are int32."""
        place = named_device(device)
        lists = self._lists_by(lambda table: table.to(place))
        selection = self._selected()
        mask_mod = self.mask_mod
        if selection is not None:  # its tables of positions move too; what the user's mask_mod captures is the user's
            selection = selection.made_for(lists.kv_indices.device)
            mask_mod = selection.mask_mod
        return self._made(
            self._seq_lengths, lists, mask_mod, leading=self._leading, decided_by=mask_mod if self._decided else None, selection=selection
        )

    def __getitem__(self, index: Index | tuple[Index, ...]) -> BlockMask:
        """The mask of some batch entries, heads and rows of query blocks: mask[1], mask[:, [0, 2]], mask[:, :, 3:5].

        index   up to three of int, slice, sequence of ints and 1-dimensional integer or bool tensor, for batch, head and row. An int
                keeps its dimension, with extent 1, as in torch. At most one may be a sequence or tensor

        Differs from torch's in that the result is a whole mask: seq_lengths[0] is the number of queries in the selected rows, and mask_mod
        is told the batch entry, head and query position of the original, so attention of the selected queries is that part of
        the attention of all. Those numbers are captured: another slice compiles nothing. A batch or head extent of 1
        stands for all entries; selecting 0 or : of it changes nothing.

        Raises IndexError for what is outside the mask, TypeError for other kinds of index, ValueError for a negative step and
        where the last query block is cut off by Q_LEN and would not be the last one selected.
        """
        self._check_rows()
        lists, rows = self._lists, self._grid[0]
        extents = (*lists.kv_indices.shape[:2], rows)
        names = ("batch", "head", "query block")
        chosen = tuple(selected(i, n, name) for i, n, name in zip(three_indices(index), extents, names, strict=True))
        Q_LEN, q_block = self.seq_lengths[0], lists.q_block
        lengths = [min(q_block, Q_LEN - r * q_block) for r in chosen[2]]
        if any(n < q_block for n in lengths[:-1]):
            raise ValueError(
                f"the last query block ({rows - 1}) has {Q_LEN - (rows - 1) * q_block} of {q_block} positions, so it can "
                f"only be the last one selected, once; got rows {shown(chosen[2])}. Put it last, or pad Q_LEN to a multiple "
                f"of {q_block}"
            )
        old = self._selected() or Selection(self.mask_mod, self.mask_mod, q_block)
        selection = old.then(chosen, extents).made_for(lists.kv_indices.device)

        def part(tensor):
            for dim, positions in enumerate(chosen):
                tensor = take(tensor, dim, positions)
            return tensor.contiguous()

        made = self._lists_by(part)
        return self._made(
            (sum(lengths), self._seq_lengths[1]),
            made,
            selection.mask_mod,
            decided_by=selection.mask_mod if self._decided else None,
            selection=selection,
        )

    def adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The mask of the first new_q_len queries and new_kv_len keys.

        Blocks beyond are dropped, and a full block that new_kv_len cuts becomes partial: create_block_mask's lists, but that a block cut by
        a new length stays partial where only mask_mod could tell that what is left of it is empty or full.

        Raises ValueError for a length greater than the mask's: its lists know nothing of positions beyond.
        """
        lengths = extent("new_q_len", new_q_len), extent("new_kv_len", new_kv_len)
        for name, new, old in zip(("new_q_len", "new_kv_len"), lengths, self._seq_lengths, strict=True):
            if new > old:
                raise ValueError(
                    f"{name}={new} is more than the {old} positions of this mask, whose lists know nothing beyond; "
                    f"make one with create_block_mask(mask_mod, B, H, {new_q_len}, {new_kv_len})"
                )
        rows, columns = (-(-n // size) for n, size in zip(lengths, self.BLOCK_SIZE, strict=True))
        status = self._status()[:, :, :rows, :columns].clone()
        cut = lengths[1] % self.BLOCK_SIZE[1] != 0
        partial = cut and (self._decided or self.mask_mod is noop_mask)  # else mask_mod may hide what the lists show
        if partial:
            status[..., -1].clamp_(max=1)  # so that no kernel checks full blocks
        lists = listed_status(status, self._lists, partial or not cut, self.BLOCK_SIZE)
        return self._made(lengths, lists, self.mask_mod, decided_by=self._decided_by, selection=self._selection)

    _adjust = adjust  # torch's name

    def __eq__(self, other: object) -> bool:
        """Whether both masks mean the same: batch and head extents, lengths, block size, partial and full blocks, and mask_mod.

        What index lists hold past their counts does not matter, nor the device of the lists. mask_mods are the same if they are one
        function, or have the same code and capture equal values. Reads the lists, so on an accelerator it waits for them.
        """
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self is other:
            return True
        mine, theirs = self._status(), other._status()
        if (self.seq_lengths, self.BLOCK_SIZE, mine.shape) != (other.seq_lengths, other.BLOCK_SIZE, theirs.shape):
            return False
        return torch.equal(mine, theirs.to(mine.device)) and same_mod(self.mask_mod, other.mask_mod, "mask", mine.device)

    def __getstate__(self) -> dict:
        """What pickle, copy and torch.save keep: lists, and the mask_mod, which must be one that pickles."""
        selection = self._selected()
        return {
            "seq_lengths": self._seq_lengths,
            "tables": self._lists.tables,
            "BLOCK_SIZE": self.BLOCK_SIZE,
            "interior": self._lists.interior,
            "leading": self._leading,
            "mask_mod": self.mask_mod if selection is None else None,
            "decided": self._decided,
            "selection": selection and selection.parts,
        }

    def __setstate__(self, state: dict) -> None:
        q_block, kv_block = state["BLOCK_SIZE"]
        lists = lists_of(state["tables"], q_block, kv_block, state["interior"])
        selection, mask_mod = state["selection"], state["mask_mod"]
        if selection is not None:
            selection = Selection.of_parts(selection).made_for(lists.kv_indices.device)
            mask_mod = selection.mask_mod
        decided_by = mask_mod if state["decided"] else None
        self._set(state["seq_lengths"], lists, mask_mod, leading=state["leading"], decided_by=decided_by, selection=selection)

    def __hash__(self) -> int:
        # masks are keys in users' caches as torch's are: equal ones must agree, and hashing must not wait for a device
        return hash((self.seq_lengths, self.BLOCK_SIZE))

    def _selected(self) -> Selection | None:
        """How mask_mod was made of another by slicing; None if it was not, or has been replaced since."""
        return self._selection if self._selection is not None and self._selection.mask_mod is self.mask_mod else None
