"""BlockMask: which blocks of the attention matrix are empty, partial or full; and the functions that make and combine masks.

The attributes have the names and the meaning of torch.nn.attention.flex_attention.BlockMask, whose objects are accepted
wherever ours are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from flexpress.codegen import masks
from flexpress.codegen.capture import name_of
from flexpress.codegen.errors import ModError
from flexpress.codegen.forward import BlockLists
from flexpress.codegen.signature import bind
from flexpress.slices import Selection, selected, shown, take, three_indices

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


class BlockMask:
    """A block-sparse mask.

    seq_lengths           (Q_LEN, KV_LEN)
    BLOCK_SIZE            (Q block, KV block) in positions
    kv_num_blocks         int32 (B, H, rows): how many partial KV blocks each row of query blocks has; B and H may be 1
    kv_indices            int32 (B, H, rows, columns): which ones, ascending; entries past the count mean nothing
    full_kv_num_blocks    the same for blocks in which every position attends (no mask_mod needed); None if not kept apart
    full_kv_indices
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices
                          the transposed lists (B, H, columns[, rows]), made when first asked for
    mask_mod              decides single positions inside partial blocks

    Index lists are kept only as wide as the densest row needs, and widened when they are asked for; kernels read `as_lists()`.

    `mask[batch, head, rows]` is the mask of a part of the batch, the heads and the query blocks, `mask.adjust(q_len, kv_len)` that of
    shorter lengths. Two masks are equal (`==`) if lengths, block size, lists and mask_mod mean the same.
    """

    def __init__(self, seq_lengths, kv_num_blocks, kv_indices, full_kv_num_blocks=None, full_kv_indices=None,
                 BLOCK_SIZE=DEFAULT_BLOCK_SIZE, mask_mod=noop_mask, *, q_num_blocks=None, q_indices=None, full_q_num_blocks=None,
                 full_q_indices=None, _interior: bool | None = None, _selection: Selection | None = None) -> None:
        # torch's constructor takes the transposed lists too; here they are always made of the others
        del q_num_blocks, q_indices, full_q_num_blocks, full_q_indices
        self.seq_lengths = tuple(seq_lengths)
        self.BLOCK_SIZE = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
        self.kv_num_blocks, self._kv_indices = kv_num_blocks, kv_indices
        self.full_kv_num_blocks, self._full_kv_indices = full_kv_num_blocks, full_kv_indices
        self.mask_mod = mask_mod
        self._interior = self.seq_lengths[1] % self.BLOCK_SIZE[1] == 0 if _interior is None else _interior
        self._selection = _selection
        self._lists: BlockLists | None = None
        self._transposed: BlockLists | None = None

    @classmethod
    def from_kv_blocks(cls, kv_num_blocks, kv_indices, full_kv_num_blocks=None, full_kv_indices=None,
                       BLOCK_SIZE=DEFAULT_BLOCK_SIZE, mask_mod=None, seq_lengths=None, compute_q_blocks: bool = True) -> BlockMask:
        """A block mask from lists made elsewhere; shapes as in the class. mask_mod=None hides nothing inside the listed blocks.

        seq_lengths is (rows, columns) of kv_indices in whole blocks if it is not given. compute_q_blocks is there for code written for
        torch: the transposed lists are made when first asked for, whatever it says.
        """
        if kv_indices.dim() < 2:
            raise ValueError(f"kv_indices must have at least 2 dimensions (rows, columns), got shape {tuple(kv_indices.shape)}")
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise ValueError("full_kv_num_blocks and full_kv_indices go together: give both or neither")
        if kv_num_blocks.shape != kv_indices.shape[:-1]:
            raise ValueError(f"kv_num_blocks has shape {tuple(kv_num_blocks.shape)}, but kv_indices {tuple(kv_indices.shape)} needs "
                             f"{tuple(kv_indices.shape[:-1])}")
        size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
        if seq_lengths is None:
            seq_lengths = (kv_indices.shape[-2] * size[0], kv_indices.shape[-1] * size[1])
        return cls(seq_lengths, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, size, mask_mod or noop_mask)

    def as_tuple(self, flatten: bool = True) -> tuple:
        """The attributes in the order of torch 2.13's as_tuple; flatten=False keeps seq_lengths and BLOCK_SIZE as pairs.

        Q_LEN, KV_LEN, four lists, four transposed lists, four times None (torch's orders of dQ writes, which no kernel here needs),
        Q block, KV block, mask_mod.
        """
        lengths, size = (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        return (*lengths, self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices, self.q_num_blocks,
                self.q_indices, self.full_q_num_blocks, self.full_q_indices, None, None, None, None, *size, self.mask_mod)

    def as_lists(self) -> BlockLists:
        """The lists as kernels read them: 4-dimensional, contiguous, int32."""
        if self._lists is None:
            self._lists = lists_of(self.kv_num_blocks, self._kv_indices, self.full_kv_num_blocks, self._full_kv_indices, self.BLOCK_SIZE,
                                   self._interior)
        return self._lists

    def as_transposed_lists(self) -> BlockLists:
        """The transposed lists (query blocks for each KV block) as kernels read them, in the fields of the others."""
        if self._transposed is None:
            self._transposed = transposed_lists_of(self.as_lists(), self.seq_lengths[1])
        return self._transposed

    kv_indices = property(lambda self: _padded(self._kv_indices, self._grid[1]))
    full_kv_indices = property(lambda self: _padded(self._full_kv_indices, self._grid[1]))
    q_num_blocks = property(lambda self: self.as_transposed_lists().kv_num_blocks)
    q_indices = property(lambda self: _padded(self.as_transposed_lists().kv_indices, self._grid[0]))
    full_q_num_blocks = property(lambda self: self.as_transposed_lists().full_kv_num_blocks)
    full_q_indices = property(lambda self: _padded(self.as_transposed_lists().full_kv_indices, self._grid[0]))

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN)"""
        return (*self.kv_num_blocks.shape[:-1], *self.seq_lengths)

    def numel(self) -> int:
        """Positions in the mask, hidden ones included."""
        return torch.Size(self.shape).numel()

    def sparsity(self) -> float:
        """The percentage of positions that lie in empty blocks."""
        blocks = self.kv_num_blocks.sum()
        if self.full_kv_num_blocks is not None:
            blocks = blocks + self.full_kv_num_blocks.sum()
        rows, columns = self._grid
        total = self.kv_num_blocks.shape[:-1].numel() * rows * columns
        return 100.0 * (1.0 - blocks.item() / total) if total else 0.0

    def to_dense(self) -> torch.Tensor:
        """int32 (B, H, rows, columns): 1 where a block is partial or full."""
        status = self._status()
        return (status != 0).to(torch.int32).reshape(*self.kv_num_blocks.shape[:-1], *status.shape[-2:])

    def to(self, device) -> BlockMask:
        """The same mask with its lists on another device."""
        moved = [None if t is None else t.to(device) for t in (self.kv_num_blocks, self._kv_indices, self.full_kv_num_blocks,
                                                               self._full_kv_indices)]
        selection = self._selected()
        mask_mod = self.mask_mod
        if selection is not None:  # its tables of positions move too; what the user's mask_mod captures is the user's
            selection = selection.made_for(moved[1].device)
            mask_mod = selection.mask_mod
        return BlockMask(self.seq_lengths, *moved, self.BLOCK_SIZE, mask_mod, _interior=self._interior, _selection=selection)

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
        lists = self.as_lists()
        rows = self._grid[0]
        if lists.kv_indices.shape[2] < rows:
            raise ValueError(f"kv_indices lists {lists.kv_indices.shape[2]} rows of blocks, but {self.seq_lengths[0]} queries in "
                             f"blocks of {lists.q_block} need {rows}: give from_kv_blocks the right seq_lengths")
        extents = (*lists.kv_indices.shape[:2], rows)
        names = ("batch", "head", "query block")
        chosen = tuple(selected(i, n, name) for i, n, name in zip(three_indices(index), extents, names, strict=True))
        Q_LEN, q_block = self.seq_lengths[0], lists.q_block
        lengths = [min(q_block, Q_LEN - r * q_block) for r in chosen[2]]
        if any(n < q_block for n in lengths[:-1]):
            raise ValueError(f"the last query block ({rows - 1}) has {Q_LEN - (rows - 1) * q_block} of {q_block} positions, so it can "
                             f"only be the last one selected, once; got rows {shown(chosen[2])}. Put it last, or pad Q_LEN to a multiple "
                             f"of {q_block}")
        old = self._selected() or Selection(self.mask_mod, self.mask_mod, q_block)
        selection = old.then(chosen, extents).made_for(lists.kv_indices.device)

        def part(tensor):
            for dim, positions in enumerate(chosen if tensor is not None else ()):
                tensor = take(tensor, dim, positions)
            return tensor

        return BlockMask((sum(lengths), self.seq_lengths[1]), *(part(t) for t in (
            lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices)), self.BLOCK_SIZE, selection.mask_mod,
            _interior=self._interior, _selection=selection)

    def adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The mask of the first new_q_len queries and new_kv_len keys.

        Blocks beyond are dropped, and a full block that new_kv_len cuts becomes partial: create_block_mask's lists, but that a block cut by
        a new length stays partial where only mask_mod could tell that what is left of it is empty or full.

        Raises ValueError for a length greater than the mask's: its lists know nothing of positions beyond.
        """
        for name, new, old in (("new_q_len", new_q_len, self.seq_lengths[0]), ("new_kv_len", new_kv_len, self.seq_lengths[1])):
            if isinstance(new, bool) or not isinstance(new, int) or new < 0:
                raise ValueError(f"{name} must be a length, got {new!r}")
            if new > old:
                raise ValueError(f"{name}={new} is more than the {old} positions of this mask, whose lists know nothing beyond; "
                                 f"make one with create_block_mask(mask_mod, B, H, {new_q_len}, {new_kv_len})")
        rows, columns = (-(-n // size) for n, size in zip((new_q_len, new_kv_len), self.BLOCK_SIZE, strict=True))
        status = self._status()[:, :, :rows, :columns].clone()
        interior = self._interior
        if new_kv_len < self.seq_lengths[1]:
            interior = True
            if new_kv_len % self.BLOCK_SIZE[1]:
                status[..., -1].clamp_(max=1)
        made = masks.block_lists(status, self._full_kv_indices is not None)
        return BlockMask((new_q_len, new_kv_len), *made[:2], *(made[2:] or (None, None)), self.BLOCK_SIZE, self.mask_mod,
                         _interior=interior, _selection=self._selection)

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
        return _status_of(self.as_lists(), columns)[:, :, :rows]

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
                cells = (status[z, h, r:r + step_r, c:c + step_c] for c in range(0, columns, step_c))
                lines.append("".join("  " if not cell.any() else "██" if bool((cell == 2).all()) else "░░" for cell in cells))
            pictures.append("\n".join(lines))
        return "\n\n".join(pictures)

    def __repr__(self) -> str:
        return (f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, sparsity={self.sparsity():.2f}%, "
                f"mask_mod={name_of(self.mask_mod)})")

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


def lists_of(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, BLOCK_SIZE, interior: bool) -> BlockLists:
    """BlockLists of the attributes of a BlockMask, ours or torch's."""

    def ready(tensor, ndim):
        if tensor is None:
            return None
        while tensor.dim() < ndim:
            tensor = tensor.unsqueeze(0)
        return tensor.to(torch.int32).contiguous()

    return BlockLists(ready(kv_num_blocks, 3), ready(kv_indices, 4), ready(full_kv_num_blocks, 3), ready(full_kv_indices, 4), *BLOCK_SIZE,
                      interior)


def _padded(indices: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """Index lists of at least `width` entries a row."""
    if indices is None or indices.shape[-1] >= width:
        return indices
    return torch.nn.functional.pad(indices, (0, width - indices.shape[-1]))


def transposed_lists_of(lists: BlockLists, KV_LEN: int) -> BlockLists:
    """For each KV block the query blocks that visit it."""
    status = _status_of(lists, -(-KV_LEN // lists.kv_block))
    made = masks.block_lists(status.transpose(-1, -2), lists.full_kv_indices is not None)
    return BlockLists(*made[:2], *(made[2:] or (None, None)), lists.q_block, lists.kv_block, lists.interior)


def _status_of(lists: BlockLists, columns: int) -> torch.Tensor:
    """int8 (B, H, rows, columns) from lists: 0 empty, 1 partial, 2 full."""
    status = torch.zeros((*lists.kv_num_blocks.shape, columns + 1), dtype=torch.int8, device=lists.kv_indices.device)
    for value, counts, indices in ((1, lists.kv_num_blocks, lists.kv_indices), (2, lists.full_kv_num_blocks, lists.full_kv_indices)):
        if indices is not None:
            position = torch.arange(indices.shape[-1], device=indices.device)
            listed = torch.where(position < counts[..., None], indices, columns)  # the extra column takes what is not listed
            status.scatter_(-1, listed.long(), value)
    return status[..., :columns]


def create_block_mask(mask_mod: Callable, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device=None,
                      BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE, *, separate_full_blocks: bool = True,
                      capacity: int | None = None) -> BlockMask:
    """The BlockMask of `mask_mod(b, h, q_idx, kv_idx) -> bool` for B x H masks of Q_LEN x KV_LEN.

    B, H                  None (or 1) if the mask is the same for every batch entry or head
    device                of the lists; the current accelerator by default, else the CPU
    BLOCK_SIZE            one size or (Q, KV); attention kernels need multiples of 16
    separate_full_blocks  False: list full blocks as partial ones too, so that mask_mod is evaluated everywhere

    capacity              most partial (and most full) blocks that a row may have. By default the lists are as wide as the densest row
                          needs, for which the host waits; with a capacity it does not, so a CUDA graph may hold the call. A
                          row with more blocks stops the program (a device-side assertion)

    Printed kernels decide whole blocks by bounds of mask_mod where bounds tell, and evaluate it position by position in the others; no
    mask of Q_LEN x KV_LEN is ever in memory. Raises ModError if the mod cannot be traced, ValueError or TypeError for other arguments.
    """
    B, H = _extent("B", B), _extent("H", H)
    for name, value in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a length, got {value!r}")
    size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise ValueError(f"BLOCK_SIZE must be a positive integer or a pair of them, got {BLOCK_SIZE!r}")
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0):
        raise ValueError(f"capacity must be a number of blocks, got {capacity!r}")
    device = resolve_device(device)
    bound = bind(mask_mod, "mask")
    check_captured_device(bound, device, "mask_mod")
    lists = masks.create_lists(bound, (B, H, Q_LEN, KV_LEN), device, size, separate_full_blocks, capacity)
    full = lists[2:] if separate_full_blocks else (None, None)
    return BlockMask((Q_LEN, KV_LEN), *lists[:2], *full, size, mask_mod, _interior=True)


def create_mask(mod_fn: Callable, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device=None) -> torch.Tensor:
    """The dense mask, bool (B, H, Q_LEN, KV_LEN), of a mask_mod; or of a score_mod, where it does not turn a zero score into -inf.

    For looking at and for tests: attention never needs it.
    """
    device = resolve_device(device)
    kind = "score" if _positional(mod_fn) == 5 else "mask"
    bound = bind(mod_fn, kind)
    check_captured_device(bound, device, f"{kind}_mod")
    return masks.dense_mask(bound, _extent("B", B), _extent("H", H), Q_LEN, KV_LEN, device)


def _positional(mod) -> int:
    import inspect

    parameters = inspect.signature(mod).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _extent(name: str, value: int | None) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer or None, got {value!r}")
    return value


def resolve_device(device) -> torch.device:
    """A device with its index, so that it compares equal to a tensor's."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def check_captured_device(bound, device: torch.device, where: str) -> None:
    """Kernels read captured tensors where they lie: on the device of the call."""
    graph, values = bound
    for capture, tensor in zip(graph.tensors, values, strict=False):
        if tensor.device != device:
            raise ValueError(f"{where} {graph.name} captures {capture.name}, a tensor of shape {tuple(tensor.shape)} on {tensor.device}, "
                             f"but the call is on {device}; move it with .to({str(device)!r})")
