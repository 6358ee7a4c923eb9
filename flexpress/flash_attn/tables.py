"""Checks of what flash_attn's functions are told of caches: forms of tensors, and what tables hold, in compiled programs, too."""

from __future__ import annotations

import torch

from flexpress.codegen.mod.captured.tensors import tracing
from flexpress.graphs.custom_ops import fake_of, operator
from flexpress.inputs.cache_checks import take_rows
from flexpress.inputs.checks import DTYPES, autocasts
from flexpress.inputs.packed_checks import check_heads_fit


def check_caches_fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str]) -> None:
    """Do q (..., Hq, D), and keys and values (N, S, Hkv, D), whose names are given, belong together?"""
    k_name, v_name = names
    if q.dtype not in DTYPES and not autocasts(q) and not q.dtype == k.dtype == torch.float8_e4m3fn:
        also = f", or float8_e4m3fn as {k_name} and {v_name}"
        raise TypeError(f"q must be float16, bfloat16 or float32{also}, got {q.dtype} and {k.dtype}; convert it with .to(...)")
    if k.dtype != v.dtype:
        raise TypeError(f"{k_name} and {v_name} must have the same dtype, got {k.dtype} and {v.dtype}; convert one with .to(...)")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{k_name} {tuple(k.shape)} and {v_name} {tuple(v.shape)} must be alike in all extents but the last")
    if k.shape[2] == 0:
        raise ValueError(f"{k_name} {tuple(k.shape)} has no heads; it needs at least 1")
    check_heads_fit(q, k_name, k)


def checked_lengths(lengths, new: int, room: int, cache, cache_batch_idx, block_table, leftpad=None, cu_seqlens_q=None, longest: int = 0):
    """`lengths`, of tables whose contents are checked: at once, or where a compiler traces, when its program runs. Those on a GPU are not
    looked at."""
    if cache.device.type != "cpu":
        return lengths
    given = lengths, new, room, *cache.shape[:2], cache_batch_idx, block_table, leftpad, cu_seqlens_q, longest
    if tracing():
        return torch.ops.flexpress.flash_cache_lengths(*given)
    _check_contents(*given)
    return lengths


@operator("flash_cache_lengths")
def flash_cache_lengths(
    lengths: torch.Tensor,
    new: int,
    room: int,
    entries: int,
    size: int,
    cache_batch_idx: torch.Tensor | None,
    block_table: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    longest: int,
) -> torch.Tensor:
    """A copy of lengths, of tables that hold what they should. What follows from it runs behind the check."""
    _check_contents(lengths, new, room, entries, size, cache_batch_idx, block_table, leftpad, cu_seqlens_q, longest)
    return lengths.clone()


@fake_of(flash_cache_lengths)
def _(lengths, *_others):
    return torch.empty_like(lengths)


def _check_contents(lengths, new: int, room: int, entries: int, size: int, batch_idx, block_table, leftpad, cu_seqlens_q, longest) -> None:
    """Are all positions, entries and pages in the cache? Queries may be more than keys."""
    counts = lengths.tolist()
    for b, n in enumerate(counts):
        if n < 0 or n + new > room:
            raise ValueError(f"sequence {b} has {n} positions in the cache and {new} new ones; there is room for {room}")
    if leftpad is not None:
        _check_range("cache_leftpad", leftpad.tolist(), "positions", room + 1)
        for b, (padding, n) in enumerate(zip(leftpad.tolist(), counts, strict=True)):
            if padding > n:
                raise ValueError(f"cache_leftpad[{b}] is {padding}, but sequence {b} has {n} positions in the cache, padding included")
    if cu_seqlens_q is not None and int(cu_seqlens_q.diff().amax() if cu_seqlens_q.shape[0] > 1 else 0) > longest:
        raise ValueError(f"max_seqlen_q is {longest}, but a sequence has more queries: cu_seqlens_q is {cu_seqlens_q.tolist()}")
    holders: dict[int, list[tuple[int, range]]] = {}
    if block_table is not None:
        places, called = block_table.tolist(), "page {} (block_table)"
        for b, (n, pages) in enumerate(zip(counts, places, strict=True)):
            _check_range(f"block_table[{b}]", pages[: -(-(n + new) // size)], "pages", entries)
    elif batch_idx is not None:
        places, called = [[entry] for entry in batch_idx.tolist()], "entry {} (cache_batch_idx)"
        _check_range("cache_batch_idx", [entry for (entry,) in places], "entries", entries)
    else:
        return
    for b, (n, pages) in enumerate(zip(counts, places, strict=True) if new else ()):
        for first in range(n - n % size, n + new, size):  # page by page; an entry is one page
            take_rows(holders, b, pages[first // size], range(max(n - first, 0), min(n + new - first, size)), called)


def _check_range(name: str, found: list[int], what: str, count: int) -> None:
    if found and not 0 <= min(found) <= max(found) < count:
        raise ValueError(f"{name} names {what} from {min(found)} to {max(found)}; the cache has {what} 0 to {count - 1}")
