"""BlockMask: which blocks of the attention matrix are empty, partial or full. Made of lists, sliced, cut, moved and compared.

The attributes have the names and the meaning of torch.nn.attention.flex_attention.BlockMask, whose objects are accepted
wherever ours are. Ours are instances of it, as others ask (transformers: `isinstance(attention_mask, BlockMask)`); no code of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.attention import flex_attention as torchs
from torch.types import Device

from flexpress.inputs.checks import block_size, extent, pair
from flexpress.inputs.plain_arguments import named_device
from flexpress.masks.block_lists import check_rows, check_tables, listed_status, status_of
from flexpress.masks.given_lists import GivenLists, check_written, orders_of
from flexpress.masks.mask_attributes import KV_LISTS, ORDERS, Q_LISTS, MaskAttributes
from flexpress.masks.mask_mods import noop_mask, same_mod
from flexpress.masks.slices import Places, Selection, selected, shown, take, three_indices
from flexpress.mods import MaskMod

from ..codegen.compiling import runs_uncompiled
from ..codegen.mod.captured.levels import of_all_calls
from ..codegen.mod.captured.tensors import followed
from ..codegen.plan.tiles import BLOCK
from ..codegen.run.block_lists import BlockLists, lists_of

DEFAULT_BLOCK_SIZE = BLOCK
Index = int | slice | Sequence[int] | torch.Tensor


@runs_uncompiled
class BlockMask(MaskAttributes, torchs.BlockMask):  # type: ignore[misc]
    """A block-sparse mask.

    seq_lengths           (Q_LEN, KV_LEN). May be set: other lengths in the same rows of blocks, or fewer. Lists are those that the mask was
                          made with, and shown so, whatever lengths it has; what they do not name stays hidden
    BLOCK_SIZE            (Q block, KV block) in positions
    kv_num_blocks         int32 (B, H, rows): how many partial KV blocks each row of query blocks has; B and H may be 1
    kv_indices            int32 (B, H, rows, columns): which ones, ascending; past the count all others, ascending, as in torch's lists
    full_kv_num_blocks    the same for blocks in which every position attends (no mask_mod needed); None if not kept apart. A block that
    full_kv_indices       Q_LEN or KV_LEN cuts is partial, as in torch's
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices
                          the transposed lists (B, H, columns[, rows]), made when first asked for
    mask_mod              decides single positions inside partial blocks. May be set

    Lists of a mask that create_block_mask made are shown as copies: writing to them changes nothing. Lists that a mask was made of are
    shown as they were given, and followed: what is written to them later holds from the next call on. Kernels read copies, in which nothing
    points outside, made again after a write that torch counted (of tensors of inference mode it counts none: they are read at every call)
    and in each CUDA graph. Lists may also be set (`mask.kv_indices = other`). Large index lists are kept only as wide as the densest row
    needs, and widened when asked for.

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
        """A block mask from lists made elsewhere, which may leave out B and H, and may be written to later. Counts above a list's width and
        entries outside the mask list nothing, and a block listed as full and as partial is full.

        q_num_blocks, q_indices, full_q_num_blocks and full_q_indices are there for code written for torch, which is shown them: the
        transposed lists that kernels read are made of the others. So are the orders of dQ's writes, which no kernel here needs. Raises
        TypeError, ValueError or NotImplementedError for arguments, showing shapes that do not fit; inside torch.compile, the call does.
        """
        lengths, size = pair("seq_lengths", seq_lengths, 0, "a pair of lengths (Q_LEN, KV_LEN)"), block_size(BLOCK_SIZE)
        tables, written = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices), (q_num_blocks, q_indices)
        if not torch.compiler.is_dynamo_compiling():  # there the call with the mask looks at lists
            followed("BlockMask")
            tables = tuple(map(of_all_calls, KV_LISTS, tables))
            if not callable(mask_mod):
                raise TypeError(f"mask_mod must be a function, got {type(mask_mod).__name__}")
            check_tables(*tables)
            check_written(*written, full_q_num_blocks, full_q_indices)
        if dq_write_order_full is not None and dq_write_order is None:
            raise ValueError("dq_write_order_full requires dq_write_order")
        self._set(lengths, GivenLists(tables, size), mask_mod)
        of_queries = dict(zip(Q_LISTS, (*written, full_q_num_blocks, full_q_indices), strict=True))
        self._written = {name: table for name, table in of_queries.items() if table is not None}
        self.dq_write_order, self.dq_write_order_full = dq_write_order, dq_write_order_full
        self.dq_kv_order, self.dq_kv_order_spt = dq_kv_order, dq_kv_order_spt

    _TRACED: tuple[str, ...] = (
        "__init__",
        "from_kv_blocks",
        "_lists_by",
        "to",
        "__copy__",
        "_again",
        "__getitem__",
        "_queries",
        "adjust",
        "_adjust",
        "_selected",
    )

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
        orders = orders_of(dq_write_order, dq_write_order_full, dq_kv_order)
        return cls(seq_lengths, *lists, BLOCK_SIZE=size, mask_mod=noop_mask if mask_mod is None else mask_mod, **orders)

    def _lists_by(self, change: Callable[[torch.Tensor], torch.Tensor], partial: bool = False) -> BlockLists | GivenLists:
        """The lists as they were made or given, with each of the tables changed; `partial` is as for _as_made."""
        if self._given is not None:
            return self._given.with_batch_and_head().changed(change)
        lists = self._as_made(partial)
        return lists_of([change(table) for table in lists.counts_and_indices], *self._size, lists.interior)

    def to(self, device: Device) -> BlockMask:
        """The same mask with its lists on another device. Raises TypeError for anything else: lists are int32."""
        place = named_device(device)

        def moved(table):
            return table.to(place) if isinstance(table, torch.Tensor) else table

        selection, mask_mod = self._selected(), self.mask_mod
        if selection is not None:  # its tables of positions move too; what the user's mask_mod captures is the user's
            selection = selection.made_for(place)
            mask_mod = selection.mask_mod
        lists = self._lists_by(moved) if self._given is None else self._given.changed(moved)
        return self._again(lists, mask_mod, selection, moved)

    def __copy__(self) -> BlockMask:
        lists = self._as_made(False) if self._given is None else self._given
        return self._again(lists, self.mask_mod, self._selected(), lambda table: table)

    def _again(self, lists: BlockLists | GivenLists, mask_mod: Callable, selection: Selection | None, change: Callable) -> BlockMask:
        """This mask of other lists that mean the same; what it was told that no kernel reads is changed."""
        facts = {"agrees": self._decided_as_made, "cuts": self._cuts, "fixed": self._fixed}
        made = self._made(self._whole_lengths, lists, mask_mod, leading=self._leading, selection=selection, **facts)
        made.seq_lengths = self.seq_lengths
        made._written = {name: change(table) for name, table in self._written.items()}
        for name in ORDERS:
            setattr(made, name, change(getattr(self, name)))
        return made

    def __getitem__(self, index: Index | tuple[Index, ...]) -> BlockMask:
        """The mask of some batch entries, heads and rows of query blocks: mask[1], mask[:, [0, 2]], mask[:, :, 3:5].

        index   up to three of int, slice, sequence of ints and 1-dimensional integer or bool tensor, for batch, head and row. An int
                keeps its dimension, with extent 1, as in torch. At most one may be a sequence or tensor

        Differs from torch's in that the result is a whole mask: seq_lengths[0] is the number of queries in the selected rows, and mask_mod
        is told the batch entry, head and query position of the original, so attention of the selected queries is that part of
        the attention of all. Those numbers are captured: another slice compiles nothing. A batch or head extent of 1
        stands for all entries; selecting 0 or : of it changes nothing. Rows are those that the mask was made with, also if seq_lengths was
        set to fewer queries since.

        The values of a tensor are waited for, but not inside torch.compile, nor while a CUDA graph is captured: there each row that it
        selects counts as a whole block of queries (set seq_lengths for fewer), and an index outside fails as in index_select.

        Raises IndexError for what is outside the mask, TypeError for other kinds of index, ValueError for a negative step and
        where the last query block is cut off by Q_LEN and would not be the last one selected.
        """
        indices = self._indices
        check_rows(indices.shape[2], self._seq_lengths, self._size)
        extents = tuple(indices.shape[:3])
        names = ("batch", "head", "query block")
        chosen = tuple(selected(i, n, name) for i, n, name in zip(three_indices(index), extents, names, strict=True))
        made_queries, queries = self._queries(chosen[2])
        cuts = self._cuts and self._decided and not isinstance(chosen[2], torch.Tensor)  # which may have the cut row anywhere
        old = self._selected()
        if old is None:
            old = Selection(self.mask_mod, self.mask_mod, self._size[0])
        selection = old.then(chosen, extents).made_for(indices.device)

        def part(tensor):
            for dim, positions in enumerate(chosen):
                tensor = take(tensor, dim, positions)
            return tensor if self._given is not None else tensor.contiguous()

        made = self._made(
            (made_queries, self._whole_lengths[1]),
            self._lists_by(part, self._partial_where_cut or (self._cuts and not cuts)),
            selection.mask_mod,
            agrees=self._decided,
            selection=selection,
            cuts=cuts,
            fixed=self._fixed,
        )
        made.seq_lengths = queries, self._seq_lengths[1]
        made.dq_kv_order_spt = self.dq_kv_order_spt
        return made

    def _queries(self, rows: Places) -> tuple[int, int]:
        """How many queries these rows of blocks had as the mask was made, and have now; if none, all that they had. Rows that nobody can
        wait for count as whole ones."""
        q_block, now = self._size[0], self._seq_lengths[0]
        if isinstance(rows, torch.Tensor):
            return len(rows) * q_block, len(rows) * q_block
        most = self._whole_lengths[0] if self._given is None else (1 + max([0, *rows])) * q_block
        made, lengths = ([max(0, min(q_block, n - r * q_block)) for r in rows] for n in (most, now))
        lengths = lengths if any(lengths) else made
        there = [i for i, n in enumerate(lengths) if n]
        if any(n < q_block for n in lengths[: there[-1] if there else 0]):
            raise ValueError(
                f"the last query block ({now // q_block}) has {now % q_block} of {q_block} positions, so it can "
                f"only be the last one selected, once; got rows {shown(rows)}. Put it last, or pad Q_LEN to a multiple "
                f"of {q_block}"
            )
        return sum(made), sum(lengths)

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
        rows, columns = (-(-n // size) for n, size in zip(lengths, self._size, strict=True))
        status = self._status()[:, :, :rows, :columns].clone()
        cut = lengths[1] % self.BLOCK_SIZE[1] != 0
        partial = cut and (self._decided or self.mask_mod is noop_mask)  # else mask_mod may hide what the lists show
        if partial:
            status[..., -1].clamp_(max=1)  # so that no kernel checks full blocks
        lists = listed_status(status, self._lists, partial or not cut, self.BLOCK_SIZE)
        cuts = self._cuts and self._decided and rows == -(-self._whole_lengths[0] // self._size[0])  # its last row is that of this mask
        made = self._made(lengths, lists, self.mask_mod, agrees=self._decided, selection=self._selected(), cuts=cuts, fixed=self._fixed)
        made.dq_kv_order_spt = self.dq_kv_order_spt
        return made

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
        mine, theirs = (status_of(mask._current(mask._cuts), mask._grid[1]) for mask in (self, other))
        if (self.seq_lengths, self.BLOCK_SIZE, mine.shape) != (other.seq_lengths, other.BLOCK_SIZE, theirs.shape):
            return False
        return torch.equal(mine, theirs.to(mine.device)) and same_mod(self.mask_mod, other.mask_mod, "mask", mine.device)

    def __getstate__(self) -> dict:
        """What pickle, copy and torch.save keep: lists, and the mask_mod, which must be one that pickles."""
        selection, given = self._selected(), self._given
        lists = given or self._as_made(False)
        return {
            "seq_lengths": self._seq_lengths,
            "tables": lists.tables,
            "BLOCK_SIZE": self.BLOCK_SIZE,
            "interior": isinstance(lists, BlockLists) and lists.interior,
            "leading": self._leading,
            "mask_mod": self.mask_mod if selection is None else None,
            "decided": self._decided_as_made,
            "selection": selection and selection.parts,
            "made_for": self._whole_lengths,
            "cuts": self._cuts,
            "fixed": self._fixed,
            "given": given is not None,
            "written": (self._written, *(getattr(self, name) for name in ORDERS)),
        }

    def __setstate__(self, state: dict) -> None:
        tables, (q_block, kv_block) = state["tables"], state["BLOCK_SIZE"]
        given = GivenLists(tables, (q_block, kv_block)) if state.get("given") else None
        lists = given or lists_of(tables, q_block, kv_block, state["interior"])
        selection, mask_mod = state["selection"], state["mask_mod"]
        if selection is not None:
            selection = Selection.of_parts(selection).made_for(tables[1].device)
            mask_mod = selection.mask_mod
        lengths, facts = state["seq_lengths"], {"agrees": state["decided"], "cuts": state.get("cuts"), "fixed": state.get("fixed", False)}
        self._set(state.get("made_for", lengths), lists, mask_mod, leading=state["leading"], selection=selection, **facts)
        self.seq_lengths = lengths
        self._written, *orders = state.get("written", ({}, None, None, None, None))
        for name, order in zip(ORDERS, orders, strict=True):
            setattr(self, name, order)

    def __hash__(self) -> int:
        # masks are keys in users' caches as torch's are: equal ones must agree, and hashing must not wait for a device
        return hash((self.seq_lengths, self.BLOCK_SIZE))

    def _selected(self) -> Selection | None:
        """How mask_mod was made of another by slicing; None if it was not, or has been replaced since."""
        return None if self._replaced else self._selection
