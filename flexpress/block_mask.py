"""BlockMask: which blocks of the attention matrix are empty, partial or full; and the functions that make and combine masks.

The attributes have the names and the meaning of torch.nn.attention.flex_attention.BlockMask, whose objects are accepted
wherever ours are.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch

from flexpress.block_lists import (
    capturing,
    kernel_size,
    listed_status,
    mask_mod_of_lists,
    read_lists,
    regridded,
    status_of,
    transposed_lists,
)
from flexpress.checks import block_size, pair, whole
from flexpress.slices import Selection, selected, shown, take, three_indices

from .codegen.compiling import runs_uncompiled
from .codegen.mod.bind import bind
from .codegen.mod.capture import name_of
from .codegen.mod.errors import ModError
from .codegen.mod.tensors import check_surroundings, read_captured
from .codegen.run import masks
from .codegen.run.block_lists import BlockLists

DEFAULT_BLOCK_SIZE = 128


def noop_mask(b, h, q_idx, kv_idx):
    """The mask that hides nothing."""
    return b.new_ones((), dtype=torch.bool)


def and_masks(*mask_mods: Callable) -> Callable:
    """The mask_mod that is true where all of `mask_mods` are. Source: torch.nn.attention.flex_attention.and_masks."""
    return _combined(mask_mods, "and", lambda b: b.new_ones((), dtype=torch.bool), lambda x, y: x & y)


def or_masks(*mask_mods: Callable) -> Callable:
    """The mask_mod that is true where any of `mask_mods` is. Source: torch.nn.attention.flex_attention.or_masks."""
    return _combined(mask_mods, "or", lambda b: b.new_zeros((), dtype=torch.bool), lambda x, y: x | y)


def _combined(mask_mods: tuple, word: str, start: Callable, join: Callable) -> Callable:
    for i, mod in enumerate(mask_mods):
        if not callable(mod):
            raise TypeError(f"{word}_masks: argument {i} must be a mask_mod, got {type(mod).__name__}")

    def combined(b, h, q_idx, kv_idx):
        result = start(b)
        for mod in mask_mods:
            result = join(result, mod(b, h, q_idx, kv_idx))
        return result

    combined.__name__ = f"_{word}_".join(map(name_of, mask_mods)) or f"{word}_masks"
    return combined


@runs_uncompiled
class BlockMask:
    """A block-sparse mask.

    seq_lengths           (Q_LEN, KV_LEN). May be set: other lengths in the same blocks; what lists name beyond them is dropped
    BLOCK_SIZE            (Q block, KV block) in positions
    kv_num_blocks         int32 (B, H, rows): how many partial KV blocks each row of query blocks has; B and H may be 1
    kv_indices            int32 (B, H, rows, columns): which ones, ascending; entries past the count mean nothing
    full_kv_num_blocks    the same for blocks in which every position attends (no mask_mod needed); None if not kept apart
    full_kv_indices
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices
                          the transposed lists (B, H, columns[, rows]), made when first asked for
    mask_mod              decides single positions inside partial blocks. May be set

    These lists are copies: kernels read the mask's own, so writing to them, or later to those that the mask was made of, changes
    nothing; make another mask instead. Index lists are kept only as wide as the densest row needs, and widened when they are asked for.

    `mask[batch, head, rows]` is the mask of a part of the batch, the heads and the query blocks, `mask.adjust(q_len, kv_len)` that of
    shorter lengths. Two masks are equal (`==`) if lengths, block size, lists and mask_mod mean the same.
    """

    def __init__(
        self,
        seq_lengths,
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        BLOCK_SIZE=DEFAULT_BLOCK_SIZE,
        mask_mod=noop_mask,
        *,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
    ) -> None:
        """A block mask from lists made elsewhere, which may leave out B and H. They are copied, by kernels that nobody waits for; counts
        above a list's width and entries outside the mask list nothing, and a block listed as full and as partial is full.

        q_num_blocks, q_indices, full_q_num_blocks and full_q_indices are there for code written for torch: the transposed lists are made
        of the others. Raises TypeError, ValueError or NotImplementedError for arguments, showing shapes that do not fit.
        """
        for counts, indices, names in (
            (q_num_blocks, q_indices, "q_num_blocks and q_indices"),
            (full_q_num_blocks, full_q_indices, "full_q_num_blocks and full_q_indices"),
        ):
            if (counts is None) != (indices is None):
                raise ValueError(f"{names} go together: give both or neither")
        if not callable(mask_mod):
            raise TypeError(f"mask_mod must be a function, got {type(mask_mod).__name__}")
        check_surroundings("BlockMask")
        lengths, size = pair("seq_lengths", seq_lengths, 0, "a pair of lengths (Q_LEN, KV_LEN)"), block_size(BLOCK_SIZE)
        lists = read_lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, size, lengths)
        self._set(lengths, lists, mask_mod, leading=tuple(kv_num_blocks.shape[:-1]))

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
        self._walked_mod: tuple[Callable, Callable] | None = None  # a mask_mod, and what it is in the blocks of those

    @classmethod
    def _made(cls, *parts, **more) -> BlockMask:
        """A mask of lists that need no look."""
        return cls.__new__(cls)._set(*parts, **more)

    @property
    def _decided(self) -> bool:
        """Does mask_mod alone say what attends? Else lists may leave out, or show in full, what it says otherwise."""
        return self._decided_by is self.mask_mod

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        BLOCK_SIZE=DEFAULT_BLOCK_SIZE,
        mask_mod=None,
        seq_lengths=None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """A block mask from lists made elsewhere, as `BlockMask(...)` makes it. mask_mod=None hides nothing inside the listed blocks.

        seq_lengths is (rows, columns) of kv_indices in whole blocks if it is not given. compute_q_blocks is there for code written for
        torch: the transposed lists are made when first asked for, whatever it says.
        """
        size = block_size(BLOCK_SIZE)
        if seq_lengths is None and isinstance(kv_indices, torch.Tensor) and not kv_indices.is_nested and kv_indices.dim() >= 2:
            seq_lengths = (kv_indices.shape[-2] * size[0], kv_indices.shape[-1] * size[1])
        return cls(
            (0, 0) if seq_lengths is None else seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            size,
            noop_mask if mask_mod is None else mask_mod,
        )

    def as_tuple(self, flatten: bool = True) -> tuple:
        """The attributes in the order of torch 2.13's as_tuple; flatten=False keeps seq_lengths and BLOCK_SIZE as pairs.

        Q_LEN, KV_LEN, four lists, four transposed lists, four times None (torch's orders of dQ writes, which no kernel here needs),
        Q block, KV block, mask_mod.
        """
        lengths, size = (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        return (
            *lengths,
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
            self.q_num_blocks,
            self.q_indices,
            self.full_q_num_blocks,
            self.full_q_indices,
            None,
            None,
            None,
            None,
            *size,
            self.mask_mod,
        )

    def as_lists(self) -> BlockLists:
        """The mask's own lists: 4-dimensional, contiguous, int32, not to be written to."""
        return self._lists

    def as_transposed_lists(self) -> BlockLists:
        """The transposed lists (query blocks for each KV block), in the fields of the others."""
        return transposed_lists(self._lists, self._seq_lengths[1])

    def for_kernels(self) -> tuple[BlockLists, Callable]:
        """The lists that kernels walk, and the mask_mod of their partial blocks: the mask's own, unless its blocks do not suit them
        (see kernel_size). Then lists of other blocks, with a mask_mod that knows of the mask's own where mask_mod alone does not."""
        walked = self._walked
        if walked is None:
            self._check_rows()
            size, walked = kernel_size(self.BLOCK_SIZE, self._seq_lengths), self._lists
            if size != self.BLOCK_SIZE:
                walked = regridded(walked, size, self._seq_lengths)
            self._walked = None if capturing(walked) else walked
        if walked is self._lists or self._decided:
            return walked, self.mask_mod
        mod = self._walked_mod
        if mod is None or mod[0] is not self.mask_mod:
            mod = self.mask_mod, mask_mod_of_lists(self.mask_mod, self._status().contiguous(), self.BLOCK_SIZE)
            self._walked_mod = None if capturing(walked) else mod
        return walked, mod[1]

    def _check_rows(self) -> None:
        rows = self._grid[0]
        if self._lists.kv_indices.shape[2] < rows:
            raise ValueError(
                f"kv_indices lists {self._lists.kv_indices.shape[2]} rows of blocks, but {self._seq_lengths[0]} queries in "
                f"blocks of {self._lists.q_block} need {rows}: give from_kv_blocks the right seq_lengths"
            )

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, value) -> None:
        lengths = pair("seq_lengths", value, 0, "a pair of lengths (Q_LEN, KV_LEN)")
        if lengths != self._seq_lengths:
            self._lists = read_lists(*self._tables(), self.BLOCK_SIZE, lengths)
            self._seq_lengths = lengths
            self._forget()

    def _tables(self) -> tuple[torch.Tensor | None, ...]:
        lists = self._lists
        return lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices

    def _shown(self, tensor: torch.Tensor | None, width: int | None = None) -> torch.Tensor | None:
        """A list as users get it: a copy, with B and H where the mask was made with them, and at least `width` entries in a row."""
        if tensor is None:
            return None
        tensor = tensor.reshape(*self._leading, *tensor.shape[2:])
        missing = 0 if width is None else width - tensor.shape[-1]
        return torch.nn.functional.pad(tensor, (0, missing)) if missing > 0 else tensor.clone()

    BLOCK_SIZE = property(lambda self: (self._lists.q_block, self._lists.kv_block))
    kv_num_blocks = property(lambda self: self._shown(self._lists.kv_num_blocks))
    kv_indices = property(lambda self: self._shown(self._lists.kv_indices, self._grid[1]))
    full_kv_num_blocks = property(lambda self: self._shown(self._lists.full_kv_num_blocks))
    full_kv_indices = property(lambda self: self._shown(self._lists.full_kv_indices, self._grid[1]))
    q_num_blocks = property(lambda self: self._shown(self.as_transposed_lists().kv_num_blocks))
    q_indices = property(lambda self: self._shown(self.as_transposed_lists().kv_indices, self._grid[0]))
    full_q_num_blocks = property(lambda self: self._shown(self.as_transposed_lists().full_kv_num_blocks))
    full_q_indices = property(lambda self: self._shown(self.as_transposed_lists().full_kv_indices, self._grid[0]))

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN)"""
        return (*self._leading, *self._seq_lengths)

    def numel(self) -> int:
        """Positions in the mask, hidden ones included."""
        return torch.Size(self.shape).numel()

    def sparsity(self) -> float:
        """The percentage of positions that lie in empty blocks."""
        status = self._status()
        return 100.0 * (1.0 - torch.count_nonzero(status).item() / status.numel()) if status.numel() else 0.0

    def to_dense(self) -> torch.Tensor:
        """int32 (B, H, rows, columns): 1 where a block is partial or full."""
        status = self._status()
        return (status != 0).to(torch.int32).reshape(*self._leading, *status.shape[-2:])

    def to(self, device) -> BlockMask:
        """The same mask with its lists on another device."""
        moved = [None if t is None else t.to(device) for t in self._tables()]
        selection = self._selected()
        mask_mod = self.mask_mod
        if selection is not None:  # its tables of positions move too; what the user's mask_mod captures is the user's
            selection = selection.made_for(moved[1].device)
            mask_mod = selection.mask_mod
        return self._made(
            self._seq_lengths,
            BlockLists(*moved, *self.BLOCK_SIZE, self._lists.interior),
            mask_mod,
            leading=self._leading,
            decided_by=mask_mod if self._decided else None,
            selection=selection,
        )

    def __getitem__(self, index) -> BlockMask:
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
            for dim, positions in enumerate(chosen if tensor is not None else ()):
                tensor = take(tensor, dim, positions)
            return tensor

        tables = [part(t) for t in self._tables()]
        made = BlockLists(*(t if t is None else t.contiguous() for t in tables), *self.BLOCK_SIZE, lists.interior)
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
        lengths = whole("new_q_len", new_q_len), whole("new_kv_len", new_kv_len)
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

    def __eq__(self, other) -> bool:
        """Whether both masks mean the same: batch and head extents, lengths, block size, partial and full blocks, and mask_mod.

        What index lists hold past their counts does not matter, nor the device of the lists. mask_mods are the same if they are one
        function, or have the same code and capture equal values. Reads the lists, so on an accelerator it waits for them.
        """
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self is other:
            return True
        if (self.seq_lengths, self.BLOCK_SIZE) != (other.seq_lengths, other.BLOCK_SIZE):
            return False
        mine, theirs = self._status(), other._status()
        return mine.shape == theirs.shape and torch.equal(mine, theirs.to(mine.device)) and same_mod(self.mask_mod, other.mask_mod, "mask")

    def __hash__(self) -> int:
        # masks are keys in users' caches as torch's are: equal ones must agree, and hashing must not wait for a device
        return hash((self.seq_lengths, self.BLOCK_SIZE))

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of blocks; lists may have more rows and fewer columns."""
        return tuple(-(-n // size) for n, size in zip(self.seq_lengths, self.BLOCK_SIZE, strict=True))

    def _status(self) -> torch.Tensor:
        """int8 (B, H, rows, columns): 0 empty, 1 partial, 2 full."""
        rows, columns = self._grid
        return status_of(self._lists, columns)[:, :, :rows]

    def _selected(self) -> Selection | None:
        """How mask_mod was made of another by slicing; None if it was not, or has been replaced since."""
        return self._selection if self._selection is not None and self._selection.mask_mod is self.mask_mod else None

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """A picture of the blocks: full, partial (or mixed) and empty as `██`, `░░` and blanks, one batch and head each.

        grid_size is the largest number of (rows, columns) drawn, -1 for all of them; `limit` the number of pictures.
        """
        status = self._status().cpu()
        rows, columns = status.shape[-2:]
        limits = (rows, columns) if grid_size == -1 else (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        step_r, step_c = (max(1, -(-n // most)) for n, most in zip((rows, columns), limits, strict=True))
        pictures = []
        for z, h in itertools.product(range(status.shape[0]), range(status.shape[1])):
            if len(pictures) == limit:
                pictures.append(f"... {status.shape[0] * status.shape[1] - limit} more; raise limit= to see them")
                break
            lines = [f"({z}, {h})"]
            for r in range(0, rows, step_r):
                cells = (status[z, h, r : r + step_r, c : c + step_c] for c in range(0, columns, step_c))
                lines.append("".join("  " if not cell.any() else "██" if bool((cell == 2).all()) else "░░" for cell in cells))
            pictures.append("\n".join(lines))
        return "\n\n".join(pictures)

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, sparsity={self.sparsity():.2f}%, "
            f"mask_mod={name_of(self.mask_mod)})"
        )

    def __str__(self) -> str:
        return f"{self!r}\n{self.to_string()}"


def same_mod(mod, other, kind: str) -> bool:
    """Whether two mods are one function, or have the same code and capture equal values: one trace, which fits both."""
    if mod is other:
        return True
    try:
        (graph, values), (other_graph, other_values) = bind(mod, kind), bind(other, kind)
    except (ModError, TypeError):  # not for tracing, so known by identity only
        return False
    return graph is other_graph and all(_same_value(x, y) for x, y in zip(values, other_values, strict=True))


def _same_value(value, other) -> bool:
    if isinstance(value, torch.Tensor):
        return value is other or (value.device == other.device and torch.equal(value, other))
    return value == other or (value != value and other != other)


def is_foreign_mask(mask) -> bool:
    """Is this a BlockMask of torch's, or of its kind?"""
    return all(hasattr(mask, a) for a in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod", "seq_lengths"))


_adopted: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # masks of torch's, with what was read and the BlockMask of it


@runs_uncompiled
def adopt(mask) -> BlockMask:
    """The BlockMask of one of torch's, or of its kind: made once, and again after its lists or lengths were changed; at every call if lists
    are tensors of inference mode, of which torch does not notice that. While a CUDA graph is captured it is made for the graph, whose
    replays read the lists anew."""
    tables = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    kept = isinstance(tables[1], torch.Tensor) and not (tables[1].is_cuda and torch.cuda.is_current_stream_capturing())
    try:
        state = [mask.seq_lengths, mask.BLOCK_SIZE, *(None if t is None else (id(t), t._version) for t in tables)]
        found = _adopted.get(mask) if kept else None
    except (AttributeError, TypeError, RuntimeError):  # no tensors, of inference mode, or a mask that cannot be a key
        kept = found = None
    if found is None or found[0] != state:
        made = BlockMask(mask.seq_lengths, *tables, mask.BLOCK_SIZE, mask.mask_mod)
        if not kept:
            return made
        found = _adopted[mask] = state, tables, made  # holding the tensors, so that no other gets the id of one
    found[2].mask_mod = mask.mask_mod
    return found[2]


@runs_uncompiled
def create_block_mask(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device=None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    *,
    separate_full_blocks: bool = True,
    capacity: int | None = None,
) -> BlockMask:
    """The BlockMask of `mask_mod(b, h, q_idx, kv_idx) -> bool` for B x H masks of Q_LEN x KV_LEN.

    B, H                  None (or 1) if the mask is the same for every batch entry or head
    device                of the lists; the current accelerator by default, else the CPU
    BLOCK_SIZE            one size or (Q, KV), of any number of positions. Attention is fastest with 128; where no tile of 16 positions
                          divides a size, kernels walk blocks of 128 made of these
    separate_full_blocks  False: list full blocks as partial ones too, so that mask_mod is evaluated everywhere

    capacity              most partial (and most full) blocks that a row may have. By default the lists are as wide as the densest row
                          needs, for which the host waits; with a capacity it does not, so a CUDA graph may hold the call. A
                          row with more blocks stops the program (a device-side assertion)

    Printed kernels decide whole blocks by bounds of mask_mod where bounds tell, and evaluate it position by position in the others; no
    mask of Q_LEN x KV_LEN is ever in memory. Raises ModError if the mod cannot be traced, ValueError or TypeError for other arguments.
    """
    check_surroundings("create_block_mask")
    extents, size = _extents(B, H, Q_LEN, KV_LEN), block_size(BLOCK_SIZE)
    capacity = capacity if capacity is None else whole("capacity", capacity)
    device = resolve_device(device)
    bound = bind(mask_mod, "mask")
    read_captured(bound, device, "mask_mod")
    lists = masks.create_lists(bound, extents, device, size, separate_full_blocks, capacity)
    full = lists[2:] if separate_full_blocks else (None, None)
    return BlockMask._made(extents[2:], BlockLists(*lists[:2], *full, *size, interior=True), mask_mod, decided_by=mask_mod)


@runs_uncompiled
def create_mask(mod_fn: Callable, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device=None) -> torch.Tensor:
    """The dense mask, bool (B, H, Q_LEN, KV_LEN), of a mask_mod; or of a score_mod, where it does not turn a zero score into -inf.

    For looking at and for tests: attention never needs it.
    """
    check_surroundings("create_mask")
    if not callable(mod_fn):
        raise TypeError(f"mod_fn must be a mask_mod or a score_mod, got {type(mod_fn).__name__}")
    extents, device = _extents(B, H, Q_LEN, KV_LEN), resolve_device(device)
    kind = "score" if _positional(mod_fn) == 5 else "mask"
    bound = bind(mod_fn, kind)
    read_captured(bound, device, f"{kind}_mod")
    return masks.dense_mask(bound, *extents, device)


def _positional(mod) -> int:
    import inspect

    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: tracing will tell
        return 4
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _extents(B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> tuple[int, int, int, int]:
    """(B, H, Q_LEN, KV_LEN) of a mask, checked; None stands for 1."""
    return (*(1 if n is None else whole(name, n, 1) for name, n in (("B", B), ("H", H))), whole("Q_LEN", Q_LEN), whole("KV_LEN", KV_LEN))


def resolve_device(device) -> torch.device:
    """A device with its index, so that it compares equal to a tensor's. Raises TypeError for what is none, NotImplementedError for one
    without kernels."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if isinstance(device, bool):
            raise TypeError
        device = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"device must be a torch.device or its name, got {device!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device is {str(device)!r}; kernels run on CUDA or ROCm GPUs ('cuda') and, interpreted, on 'cpu'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
