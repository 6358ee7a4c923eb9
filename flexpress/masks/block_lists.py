"""Lists of blocks: those from elsewhere made safe, their transposes, and the same blocks on the grid that kernels walk.

Kernels take what lists say at its word: a count is how many entries are read, an entry is where keys are read. Lists that printed kernels
wrote are right. Others pass `read_lists` once, which waits for no device: afterwards a count is at most the list's width, entries are
inside the mask, ascend and are listed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..codegen.device.streams import MadeOn
from ..codegen.mod.captured.tensors import check_kind, tracing
from ..codegen.mod.tracing.capture import name_of, plain
from ..codegen.plan.tiles import BLOCK
from ..codegen.registry import remembered
from ..codegen.run import masks
from ..codegen.run.block_lists import BlockLists, lists_of
from ..codegen.run.evaluated_masks import evaluated_lists


def read_lists(
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, size: tuple[int, int], seq_lengths: tuple[int, int]
) -> BlockLists:
    """BlockLists of lists that came from elsewhere: copies, from which rows, counts and entries that point outside are gone. A block that
    is listed as full and as partial is full.

    Raises TypeError, ValueError or NotImplementedError for what are no lists, naming them and showing both shapes.
    """
    check_tables(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    has_full = full_kv_indices is not None
    rows, columns = (-(-n // s) for n, s in zip(seq_lengths, size, strict=True))
    full = made = ()
    if has_full:
        full = _listed(full_kv_num_blocks, full_kv_indices, rows, columns)
        made = _counted(full, columns)
    partial = _listed(kv_num_blocks, kv_indices, rows, columns)
    if has_full and full.shape[-1] and partial.shape[-1]:
        place = torch.searchsorted(full, partial).clamp_(max=full.shape[-1] - 1)
        partial = torch.where(full.gather(-1, place) == partial, columns, partial).sort(-1).values
    # of a length that torch's compiler leaves open nothing is said: kernels then look where keys end
    interior = not isinstance(columns, torch.SymInt) and seq_lengths[1] % size[1] == 0
    return BlockLists(*_counted(partial, columns), *(made or (None, None)), *size, interior=interior)


def leave_out_entries(lists: BlockLists, symbols: frozenset[str], entries: tuple[int, int]) -> bool:
    """Are the lists made for one batch entry or head of a mask_mod that tells those of a call apart? `symbols`: what it reads; `entries`:
    the call's batch entries and heads."""
    extents = lists.kv_num_blocks.shape[:2]
    return any(name in symbols and made == 1 and n != 1 for name, made, n in zip("bh", extents, entries, strict=True))


def check_tables(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices) -> None:
    """Raises as `read_lists` does."""
    _check("kv_num_blocks", kv_num_blocks, "kv_indices", kv_indices, None)
    if (full_kv_num_blocks is None) != (full_kv_indices is None):
        raise ValueError("full_kv_num_blocks and full_kv_indices go together: give both or neither")
    if full_kv_indices is not None:
        _check("full_kv_num_blocks", full_kv_num_blocks, "full_kv_indices", full_kv_indices, kv_indices)


def check_rows(listed: int, seq_lengths: tuple[int, int], size: tuple[int, int]) -> None:
    """Raises ValueError if there are queries for which lists have no row."""
    rows = -(-seq_lengths[0] // size[0])
    if listed < rows:
        raise ValueError(
            f"kv_indices lists {listed} rows of blocks, but {seq_lengths[0]} queries in blocks of {size[0]} need {rows}: make a mask "
            f"for these seq_lengths, {seq_lengths}"
        )


def _check(counts_name: str, counts, indices_name: str, indices, partial: torch.Tensor | None) -> None:
    """Do counts and indices fit together, and full ones to the `partial` indices?"""
    for name, tensor in ((counts_name, counts), (indices_name, indices)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor of int32, got {type(tensor).__name__}")
        if not torch.compiler.is_dynamo_compiling():  # which traces ordinary tensors alone
            check_kind(name, tensor)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers (int32), got {tensor.dtype}")
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name} is on {tensor.device}; block lists are on 'cuda' or 'cpu'")
    if indices.dim() not in (2, 3, 4):
        raise ValueError(
            f"{indices_name} must have shape ([B, [H,]] rows, columns), at least 2 dimensions and at most 4, got {tuple(indices.shape)}"
        )
    if counts.shape != indices.shape[:-1]:
        raise ValueError(
            f"{counts_name} has shape {tuple(counts.shape)}, but {indices_name} {tuple(indices.shape)} needs {tuple(indices.shape[:-1])}"
        )
    if counts.device != indices.device:
        raise ValueError(f"{counts_name} is on {counts.device} but {indices_name} is on {indices.device}; move one with .to(...)")
    if partial is not None and indices.shape[:-1] != partial.shape[:-1]:
        raise ValueError(
            f"{indices_name} has shape {tuple(indices.shape)} but kv_indices {tuple(partial.shape)}; all but the last extent "
            "must be the same"
        )
    if partial is not None and indices.device != partial.device:
        raise ValueError(f"{indices_name} is on {indices.device} but kv_indices is on {partial.device}; move one with .to(...)")


def _listed(counts: torch.Tensor, indices: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The listed blocks of each of `rows`, ascending and once, and then `columns` where there is none; int32, 4 dimensions."""
    counts, indices = (t.detach()[(None,) * (n - t.dim())] for t, n in ((counts, 3), (indices, 4)))
    counts, indices = counts[:, :, :rows].long(), indices[:, :, :rows].long()
    place = torch.arange(indices.shape[-1], device=indices.device)
    listed = (place < counts[..., None]) & (indices >= 0) & (indices < columns)
    found = torch.where(listed, indices, columns).to(torch.int32).sort(-1).values
    if found.shape[-1] > 1:
        again = torch.nn.functional.pad(found[..., 1:] == found[..., :-1], (1, 0))
        found = torch.where(again, columns, found).sort(-1).values
    return found


def _counted(listed: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of that. Kernels may read the first index of an empty row, so no list has width 0."""
    there = listed < columns
    indices = torch.where(there, listed, 0)
    if not indices.shape[-1]:
        indices = torch.nn.functional.pad(indices, (0, 1))
    return there.sum(-1, dtype=torch.int32), indices.contiguous()


def status_of(lists: BlockLists, columns: int) -> torch.Tensor:
    """int8 (B, H, rows, columns) from lists: 0 empty, 1 partial, 2 full."""
    status = torch.zeros((*lists.kv_num_blocks.shape, columns + 1), dtype=torch.int8, device=lists.kv_indices.device)
    for value, counts, indices in ((1, lists.kv_num_blocks, lists.kv_indices), (2, lists.full_kv_num_blocks, lists.full_kv_indices)):
        if counts is not None and indices is not None:  # the extra column takes what is not listed
            status.scatter_(-1, _masked(counts, indices, columns).long(), value)
    return status[..., :columns]


def listed_status(status: torch.Tensor, like: BlockLists, interior: bool, size: tuple[int, int], *, wait: bool = True) -> BlockLists:
    """The lists of a status, with full blocks apart if `like` has them apart; `wait` is as for masks.block_lists."""
    apart = like.full_kv_indices is not None
    if without_values():  # no memory that a kernel could write
        made = evaluated_lists(status, [status.shape[-1]] * (1 + apart), apart, device=status.device)
    else:
        made = masks.block_lists(status, apart, wait=wait)
    return lists_of(made, *size, interior)


def with_rows_beyond(lists: BlockLists, seq_lengths: tuple[int, int]) -> BlockLists:
    """The lists of a mask that was made for these lengths, for more queries or another mask_mod: what was full in the queries of a last
    block that is cut is partial, as in torch's lists. Nobody waits, and no kernel is launched."""
    counts, indices, q_block, kv_block = lists.kv_num_blocks, lists.kv_indices, lists.q_block, lists.kv_block
    full_counts, full_indices = lists.full_kv_num_blocks, lists.full_kv_indices
    cut = seq_lengths[0] % q_block
    open_ = isinstance(cut, torch.SymInt)  # of torch's compiler and exporter: nobody asks whether it is 0
    if full_counts is None or full_indices is None or not (open_ or cut):
        return lists
    columns = -(-seq_lengths[1] // kv_block)
    both = [_masked(n[:, :, -1], i[:, :, -1], columns) for n, i in ((counts, indices), (full_counts, full_indices))]
    width = indices.shape[-1] + full_indices.shape[-1]
    if isinstance(width, torch.SymInt) or isinstance(columns, torch.SymInt):
        width = torch.sym_max(torch.sym_min(width, columns), 1)
    else:  # of numbers, torch 2.11's compiler traces Python's own alone
        width = max(min(width, columns), 1)
    last = torch.cat(both, -1).sort(-1).values[..., :width]
    last = torch.where(last < columns, last, 0).unsqueeze(2)
    wider = torch.nn.functional.pad(indices, (0, width - indices.shape[-1]))
    moved = full_counts[:, :, -1:]
    if open_:
        is_cut = torch.full((), cut, dtype=torch.int32, device=indices.device) != 0  # type: ignore[arg-type]
        last, moved = torch.where(is_cut, last, wider[:, :, -1:]), torch.where(is_cut, moved, 0)
    return BlockLists(
        torch.cat([counts[:, :, :-1], counts[:, :, -1:] + moved], 2),
        torch.cat([wider[:, :, :-1], last], 2),
        torch.cat([full_counts[:, :, :-1], full_counts[:, :, -1:] - moved], 2),
        full_indices,
        q_block,
        kv_block,
        lists.interior,
    )


def _masked(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Index lists with `columns` past the counts."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    return torch.where(place < counts[..., None], indices, columns)


def permuted(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Index lists as torch makes them, int32 (..., columns): what is listed, and then all others, both ascending. Of lists that ascend."""
    listed = torch.zeros((*counts.shape, columns + 1), dtype=torch.int8, device=indices.device)
    listed.scatter_(-1, _masked(counts, indices, columns).long(), 1)  # the last column takes what is not listed
    return torch.argsort(listed[..., :columns], dim=-1, descending=True, stable=True).to(torch.int32)


def transposed_lists(lists: BlockLists, KV_LEN: int) -> BlockLists:
    """For each KV block the query blocks that visit it; made once."""
    if without_values():  # an operator, of which torch sees that all calls with a mask ask for the same
        tables, size = lists.counts_and_indices, [lists.q_block, lists.kv_block]
        return lists_of(torch.ops.flexpress.transposed_lists(list(tables), KV_LEN, size, lists.interior), *size, lists.interior)
    found = lists.transposed.get(KV_LEN)
    if found is None:
        captured = capturing(lists)
        found = made_transposed(lists, KV_LEN, wait=not captured)
        if not captured:
            lists.transposed[KV_LEN] = found.kept()
    return found.ready()


def made_transposed(lists: BlockLists, KV_LEN: int, wait: bool) -> BlockLists:
    """For each KV block the query blocks that visit it, made anew; `wait` is as for masks.block_lists."""
    status = status_of(lists, -(-KV_LEN // lists.kv_block)).transpose(-1, -2)
    made = listed_status(status, lists, lists.interior, (lists.q_block, lists.kv_block), wait=wait)
    return made if lists.shifts is None else replace(made, shifts=lists.shifts)


def without_values() -> bool:
    """Does torch record operations without their values? Then nothing may be kept, and no kernel launched."""
    return torch.compiler.is_dynamo_compiling() or tracing()


def capturing(lists: BlockLists) -> bool:
    """Is a CUDA graph captured, which nobody may wait for, and whose tensors hold nothing before its replay?"""
    return lists.kv_indices.is_cuda and torch.cuda.is_current_stream_capturing()


def kernel_size(size: tuple[int, int], seq_lengths: tuple[int, int]) -> tuple[int, int]:
    """The blocks that kernels walk for a mask with blocks of `size`: its own, unless no tile of 16 positions divides them, or a tile would
    walk through a block that is longer than the sequence by far."""
    return tuple(n if n % 16 == 0 and n < 2 * max(length, BLOCK) else BLOCK for n, length in zip(size, seq_lengths, strict=True))


@remembered("blocks that kernels walk", 256)
def walked_in_every_length(size: tuple[int, int]) -> bool:
    """Do blocks of `size` suit kernels whatever the lengths?"""
    return kernel_size(size, (0, 0)) == size


def regridded(lists: BlockLists, size: tuple[int, int], seq_lengths: tuple[int, int]) -> BlockLists:
    """The same positions in blocks of `size`: empty or full where all blocks that a new one touches are, else partial. Nobody waits."""
    old = lists.q_block, lists.kv_block
    low = high = status_of(lists, -(-seq_lengths[1] // old[1]))
    for dim, was, now, length in zip((2, 3), old, size, seq_lengths, strict=True):
        if was != now:
            low, high = _pooled(low, dim, was, now, length, torch.amin), _pooled(high, dim, was, now, length, torch.amax)
    status = torch.where(low == 2, 2, (high > 0).to(torch.int8)).to(torch.int8)
    return listed_status(status, lists, seq_lengths[1] % size[1] == 0, size, wait=False)


def _pooled(status: torch.Tensor, dim: int, was: int, now: int, length: int, reduce: Callable) -> torch.Tensor:
    """The least or greatest status of the blocks of `was` positions that each block of `now` positions touches."""
    begin = torch.arange(0, length, now, device=status.device)
    first, last = begin // was, ((begin + now).clamp(max=length) - 1) // was
    touched = (first[:, None] + torch.arange((now - 1) // was + 2, device=status.device)).minimum(last[:, None])
    found = status.index_select(dim, touched.flatten()).unflatten(dim, touched.shape)
    return reduce(found, dim + 1)


def mask_mod_of_lists(mask_mod: Callable, status: torch.Tensor, size: tuple[int, int]) -> tuple[Callable, Callable, MadeOn]:
    """A mask_mod; one that hides what lists of blocks of `size` hide, and asks it in partial blocks alone; and where `status`, which that
    one reads, is made."""
    (q_block, kv_block), by_batch, by_head = size, status.shape[0] > 1, status.shape[1] > 1
    given, mask_mod, status = mask_mod, plain(mask_mod), status.contiguous()

    def listed(b, h, q_idx, kv_idx):
        found = status[b if by_batch else 0, h if by_head else 0, q_idx // q_block, kv_idx // kv_block]
        return (found == 2) | ((found == 1) & mask_mod(b, h, q_idx, kv_idx))

    listed.__name__ = f"{name_of(mask_mod)}_in_listed_blocks"
    return given, listed, MadeOn([status])
