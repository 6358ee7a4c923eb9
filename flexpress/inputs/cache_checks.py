"""Checks of the arguments by which update_cache and cached_attention say where sequences are: one clear error each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from flexpress.inputs.checks import CACHE_DTYPES, DTYPES, MAX_HEAD_DIM, MAX_HEAD_DIM_QK, MOST, check_extents, whole

from ..codegen.mod.captured.tensors import LOWEST, ORDINARY, check_kind, check_memory
from ..codegen.registry import Table
from ..codegen.run.call import Cached
from ..codegen.run.layouts import shares_memory

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class CacheTables(NamedTuple):
    """Where the sequences of a batch are, as update_cache and cached_attention are given it."""

    kv_len: torch.Tensor
    page_table: torch.Tensor | None = None
    cache_loc: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    max_q_len: int | None = None
    q_offset: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def described(value) -> str:
    """A tensor's dtype, shape and device, or what is there instead of a tensor."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"[:80]
    kind = "" if type(value) in _PLAIN else f"{type(value).__name__} "
    return f"{kind}{value.dtype} {'nested' if value.is_nested else tuple(value.shape)} on {value.device}"


def check_plain(name: str, tensor, layout: str) -> None:
    """A tensor that a kernel can read: of the rank of `layout`, on a CPU or GPU, of no kind that stands for others."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {layout}, got {described(tensor)}")
    check_kind(name, tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name} must be in the memory of a GPU or CPU, got {described(tensor)}")
    if tensor.ndim != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got {described(tensor)}")


def check_still_there(name: str, tensor) -> None:
    """`check_kind` for an argument whose kind was looked at in an earlier call: the memory of a tensor may have been freed since."""
    if tensor.__class__ in ORDINARY:
        try:
            there = tensor.data_ptr() >= LOWEST
        except RuntimeError:  # it has no address
            there = False
        if not there:
            check_kind(name, tensor)


def check_all_there(name: str, given: tuple) -> None:
    """`check_still_there` for the arguments of a call with tokens of that name."""
    try:
        missing = any([t.data_ptr() < LOWEST for t in given if t.__class__ in ORDINARY])
    except RuntimeError:  # one has no address
        missing = True
    if missing:
        for what, tensor in zip((name, "k_cache", "v_cache", *CacheTables._fields, *_OTHERS[name]), given, strict=False):
            check_still_there(what, tensor)


def check_entries(k_cache: torch.Tensor, batch: int) -> None:
    """An entry for each sequence, where no table says which one."""
    if k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} has {k_cache.shape[0]} entries for {batch} sequences; say with cache_loc or "
            "page_table which ones are theirs"
        )


_OTHERS = {"key": ("value", "query", "rope"), "query": ("q_scale", "out_dtype")}  # what is checked beside tokens of that name
_keys = torch._C._dispatch_keys  # they tell ordinary memory from all else, the negative bit too
_passed: dict[tuple, bool] = Table("checked caches", 4096)  # what passed the checks; do tables have contiguous rows


def forms_of(*values) -> tuple | None:
    """All of some tensors and numbers that checks look at, but contents; None if there is no telling."""
    try:
        return tuple(
            [
                (type(t), t.shape, t.stride(), t.dtype, t.device, _keys(t).raw_repr()) if isinstance(t, torch.Tensor) else (type(t), t)
                for t in values
            ]
        )
    except (RuntimeError, TypeError, NotImplementedError):  # sparse and nested tensors have no strides
        return None


def check_batch(
    name: str,
    tokens,
    k_cache,
    v_cache,
    tables: CacheTables,
    others: tuple = (),
    check_others: Callable | None = None,
    check: bool | None = False,
) -> tuple[Cached, torch.Tensor | None]:
    """Where sequences are, and q_offset. `tokens`, an argument of that name, is (B, H, Q_LEN, D), or (T, H, D) with
    cu_seqlens_q. Checks are skipped for forms that passed before; `check_others(tokens, k_cache, v_cache,
    *others)` looks at others. Rows of page_table that cache_loc names become a table of their own."""
    forms = forms_of(name, tokens, k_cache, v_cache, *tables, *others)
    try:
        contiguous = _passed.get(forms)
    except TypeError:  # lists and dicts have no hash
        forms = contiguous = None
    if contiguous is None:
        _check_batch(name, tokens, k_cache, v_cache, tables)
        if check_others is not None:
            check_others(tokens, k_cache, v_cache, *others)
        contiguous = all(map(_has_contiguous_rows, tables))
        if forms is not None:
            _passed[forms] = contiguous
    else:
        check_all_there(name, (tokens, k_cache, v_cache, *tables, *others))
    if not contiguous:  # kernels read contiguous rows
        tables = CacheTables(*(t if _has_contiguous_rows(t) else t.contiguous() for t in tables))
    kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale = tables
    if page_table is not None and cache_loc is not None:
        page_table, cache_loc = _named_rows(page_table, cache_loc, looks(check, tokens)), None
    most = tokens.shape[2 if cu_seqlens_q is None else 0]
    max_q = most if max_q_len is None else min(whole("max_q_len", max_q_len), most)
    return Cached(cu_seqlens_q, max_q, kv_len, cache_loc, page_table, k_scale, v_scale), q_offset


def _has_contiguous_rows(table: torch.Tensor | int | None) -> bool:
    return not isinstance(table, torch.Tensor) or table.stride(-1) == 1


def looks(check: bool | None, tokens: torch.Tensor) -> bool:
    """Does a call with that `check` look at what its tables hold?"""
    return tokens.device.type == "cpu" if check is None else bool(check)


def _named_rows(page_table: torch.Tensor, cache_loc: torch.Tensor, look: bool) -> torch.Tensor:
    """A page table for the sequences of a batch, made on the device; -1, no page, for a row that is not there."""
    last = page_table.shape[0] - 1
    if look:
        named = cache_loc.tolist()
        if named and not 0 <= min(named) <= max(named) <= last:
            raise ValueError(
                f"cache_loc names rows from {min(named)} to {max(named)}; page_table {tuple(page_table.shape)} has rows 0 to {last}"
            )
    row = cache_loc.clamp(0, last)
    return page_table.index_select(0, row).masked_fill_((row != cache_loc)[:, None], -1)


def _check_batch(name, tokens, k_cache, v_cache, given: CacheTables) -> None:
    kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale = given
    ragged = cu_seqlens_q is not None
    _check_caches(name, tokens, "(T, H, D) with cu_seqlens_q" if ragged else "(B, H, Q_LEN, D)", k_cache, v_cache, k_scale, v_scale)
    device = tokens.device
    check_table("kv_len", kv_len, (None if ragged else tokens.shape[0],), torch.int32, device)
    batch, heads = kv_len.shape[0], k_cache.shape[2]
    tables = (
        ("page_table", page_table, (batch if cache_loc is None else None, None)),
        ("cache_loc", cache_loc, (batch,)),
        ("cu_seqlens_q", cu_seqlens_q, (batch + 1,)),
        ("q_offset", q_offset, (batch,)),
    )
    for what, tensor, shape in tables:
        if tensor is not None:
            check_table(what, tensor, shape, torch.int32, device)
    if page_table is not None and batch > page_table.shape[0] == 0:
        raise ValueError(f"page_table {tuple(page_table.shape)} has no rows for the {batch} sequences of cache_loc")
    for what, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if tensor is not None:
            check_table(what, tensor, (heads,), torch.float32, device)
    if cache_loc is None and page_table is None:
        check_entries(k_cache, batch)
    if max_q_len is not None:
        if not ragged:
            shown = f"{name} {tuple(tokens.shape)}"
            raise ValueError(f"max_q_len ({max_q_len}) goes with cu_seqlens_q, and there is none; {shown} says it, leave it out")
        whole("max_q_len", max_q_len)


def _check_caches(name: str, tokens, layout: str, k_cache, v_cache, k_scale, v_scale) -> None:
    layouts = (name, tokens, layout), ("k_cache", k_cache, "(N, S, Hkv, D_QK)"), ("v_cache", v_cache, "(N, S, Hkv, D_V)")
    for what, tensor, wanted in layouts:
        check_plain(what, tensor, wanted)
        if what != name:
            check_memory(what, tensor)
        if tensor.device != tokens.device:
            raise ValueError(f"{what} is on {tensor.device} but {name} is on {tokens.device}; move one with .to(...)")
    of_float8 = name == "query" and tokens.dtype == torch.float8_e4m3fn
    if tokens.dtype not in DTYPES and not of_float8:
        also = ", or with caches of it float8_e4m3fn" if name == "query" else ""
        raise TypeError(f"{name} must be float16, bfloat16 or float32{also}, got {tokens.dtype}")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale go together; pass ones for the one that is not scaled")
    if k_cache.dtype not in CACHE_DTYPES or v_cache.dtype != k_cache.dtype:
        raise TypeError(
            f"k_cache and v_cache must both be float16, bfloat16, float32 or float8_e4m3fn, got {k_cache.dtype} and {v_cache.dtype}"
        )
    if of_float8 and k_cache.dtype != tokens.dtype:
        raise TypeError(f"query has {tokens.dtype}, but k_cache and v_cache have {k_cache.dtype}; convert query: query.to(...)")
    if k_scale is not None and k_cache.dtype != torch.float8_e4m3fn:
        raise TypeError(f"k_scale and v_scale are for caches of float8_e4m3fn, got {k_cache.dtype}; leave them out")
    for what, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.is_neg():
            raise ValueError(f"{what} is a view with the negative bit (as x.conj().imag is); pass {what}.resolve_neg()")
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != tokens.shape[-1]:
        raise ValueError(
            f"{name} {tuple(tokens.shape)}, k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} do not fit: the "
            f"last extent of k_cache is that of {name}, its first three are those of v_cache"
        )
    if k_cache.shape[2] == 0:
        raise ValueError(f"k_cache {tuple(k_cache.shape)} has no heads; it needs at least 1")
    check_extents("k_cache", k_cache, MAX_HEAD_DIM_QK)
    check_extents("v_cache", v_cache, MAX_HEAD_DIM)


def check_table(name: str, tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    """`shape` with None for any extent."""
    if isinstance(tensor, torch.Tensor):
        check_memory(name, tensor)
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == dtype
        and tensor.device == device
        and tensor.ndim == len(shape)
        and all(want in (None, n) for want, n in zip(shape, tensor.shape, strict=True))
    ):
        return
    wanted = ", ".join("n" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "")
    error = ValueError if isinstance(tensor, torch.Tensor) else TypeError
    raise error(f"{name} must be {dtype} ({wanted}) on {device}, got {described(tensor)}")


def check_no_gradients(function: str, instead: str, **tensors: torch.Tensor | None) -> None:
    """NotImplementedError if autograd would want a gradient through one of them."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise NotImplementedError(f"{name} requires grad, but {function} is not differentiable: {instead}")


def check_writable(name: str, cache: torch.Tensor) -> None:
    """Every element has a place of its own."""
    if shares_memory(cache.shape, cache.stride()):
        raise ValueError(
            f"{name} {tuple(cache.shape)} has strides {cache.stride()}: elements share memory (as expand makes it), so "
            f"what is written for one changes others; pass {name}.clone() or a tensor of its own"
        )


def check_contents(tokens, k_cache, cached: Cached, q_offset, written: bool = False) -> int:
    """What the tensors hold that say where sequences are. Waits for the device that they are on. Returns the end of the new tokens'
    positions.

    written   the new tokens are to be written: each needs a place of its own, inside kv_len
    """
    lengths, cache = cached.kv_lens.tolist(), f"k_cache {tuple(k_cache.shape)}"
    ragged, pages, locations = cached.cu_q is not None, cached.pages, cached.kv_locs
    counts = check_counts(cached.cu_q.tolist(), tokens.shape[0], cached.max_q) if ragged else [tokens.shape[2]] * len(lengths)
    offsets = [n - c for n, c in zip(lengths, counts, strict=True)] if q_offset is None else q_offset.tolist()
    entries, size = k_cache.shape[:2]
    room = size * (1 if pages is None else pages.shape[1])
    pages = pages if pages is None else pages.cpu()
    locations = [*range(len(lengths))] if locations is None else locations.tolist()
    if locations and not 0 <= min(locations) <= max(locations) < entries and pages is None:
        raise ValueError(f"cache_loc names entries from {min(locations)} to {max(locations)}; {cache} has entries 0 to {entries - 1}")
    check_positive("k_scale", cached.k_scales)
    check_positive("v_scale", cached.v_scales)
    reached, holders = 0, {}  # which sequence writes to a row of a page, or of an entry
    for b, (offset, count, length) in enumerate(zip(offsets, counts, lengths, strict=True)):
        if length < 0:
            raise ValueError(f"kv_len[{b}] is {length}; it must be 0 (a sequence that is not there) or more")
        if length == 0 and not ragged:  # a sequence that is not there
            continue
        end = max(offset + count, length) if count and written else length  # queries may be later than the keys that they look at
        if (count and offset < 0) or end > room:
            raise ValueError(
                f"sequence {b} has {count} new tokens from position {offset} on, and kv_len {length}; positions go from 0 to "
                f"{room - 1} in {cache}{f' with {pages.shape[1]} pages' if pages is not None else ''}"
            )
        if count and offset + count - 1 > MOST:
            raise ValueError(f"sequence {b} has {count} queries from position {offset} on; kernels count in 32 bits, to {MOST}")
        if pages is not None:
            mine = pages[b, : -(-end // size)].tolist()
            if mine and not 0 <= min(mine) <= max(mine) < entries:
                raise ValueError(f"page_table[{b}] names pages from {min(mine)} to {max(mine)}; {cache} has pages 0 to {entries - 1}")
        if not count:
            continue
        reached = max(reached, offset + count)
        if not written:
            continue
        if offset + count > length:
            raise ValueError(
                f"sequence {b} has {count} new tokens from position {offset} on, but kv_len {length}, which counts the new ones, too"
            )
        for first in range(offset - offset % size, offset + count, size):  # page by page; an entry is one page
            place = locations[b] if pages is None else mine[first // size]
            rows = range(max(offset - first, 0), min(offset + count - first, size))
            take_rows(holders, b, place, rows, "entry {} (cache_loc)" if pages is None else "page {} (page_table)")
    return reached


def take_rows(holders: dict[int, list[tuple[int, range]]], b: int, place: int, rows: range, called: str) -> None:
    """Note that sequence b writes to these rows of a page or an entry. ValueError if another one does; `called`: what to say of a place."""
    for other, taken in holders.setdefault(place, []):
        if rows.start < taken.stop and taken.start < rows.stop:
            raise ValueError(
                f"sequences {other} and {b} both write to {called.format(place)}, rows "
                f"{max(rows.start, taken.start)} to {min(rows.stop, taken.stop) - 1}; give each its own"
            )
    holders[place].append((b, rows))


def check_positive(name: str, scale: torch.Tensor | None) -> None:
    """What a tensor of scales holds. Waits for its device."""
    wrong = [] if scale is None else [x for x in scale.flatten().tolist() if not 0 < x < math.inf]
    if wrong:
        raise ValueError(f"{name} has {wrong[0]}; scales must be positive and finite")


def check_counts(starts: list[int], tokens: int, max_q: int | None = None) -> list[int]:
    """How many tokens each sequence has, by what cu_seqlens_q holds."""
    counts = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    if starts[0] != 0 or min(counts, default=0) < 0 or starts[-1] > tokens:
        raise ValueError(f"cu_seqlens_q must start with 0, never fall, and end with at most the {tokens} tokens there are, got {starts}")
    if max_q is not None and max(counts, default=0) > max_q:
        b = counts.index(max(counts))
        raise ValueError(
            f"max_q_len is {max_q}, but sequence {b} has {counts[b]} queries (cu_seqlens_q {starts}); it must be the largest length or more"
        )
    return counts
