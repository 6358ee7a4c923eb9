"""Checks of the arguments by which update_cache and cached_attention say where sequences are: one clear error each."""

from __future__ import annotations

import torch

from flexpress.codegen.decode import Cached
from flexpress.codegen.tensors import check_memory

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def described(value) -> str:
    """A tensor's dtype, shape and device, or what is there instead of a tensor."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def check_batch(name: str, tokens, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale,
                v_scale) -> Cached:
    """Those arguments, put together. `tokens`, an argument of that name, is (B, H, Q_LEN, D) or with cu_seqlens_q (T, H, D)."""
    ragged = cu_seqlens_q is not None
    _check_caches(name, tokens, "(T, H, D) with cu_seqlens_q" if ragged else "(B, H, Q_LEN, D)", k_cache, v_cache, k_scale, v_scale)
    device = tokens.device
    if page_table is not None and cache_loc is not None:
        raise ValueError("page_table and cache_loc exclude each other: a page table says where a sequence is")
    if isinstance(kv_len, torch.Tensor):
        check_memory("kv_len", kv_len)
    batch = kv_len.shape[0] if isinstance(kv_len, torch.Tensor) and kv_len.ndim == 1 else None
    _check_table("kv_len", kv_len, (batch if ragged else tokens.shape[0],), torch.int32, device)
    tables = (("page_table", page_table, (batch, None)), ("cache_loc", cache_loc, (batch,)), ("cu_seqlens_q", cu_seqlens_q, (batch + 1,)),
              ("q_offset", q_offset, (batch,)))
    for what, tensor, shape in tables:
        if tensor is not None:
            _check_table(what, tensor, shape, torch.int32, device)
    for what, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if tensor is not None:
            _check_table(what, tensor, (k_cache.shape[2],), torch.float32, device)
    if cache_loc is None and page_table is None and k_cache.shape[0] != batch:
        raise ValueError(f"k_cache {tuple(k_cache.shape)} has {k_cache.shape[0]} entries for {batch} sequences; say with cache_loc or "
                         "page_table which ones are theirs")
    if max_q_len is not None and not (ragged and 0 <= max_q_len <= tokens.shape[0]):
        raise ValueError(f"max_q_len ({max_q_len}) is for cu_seqlens_q, and from 0 to the number of tokens in {name} {tuple(tokens.shape)}")
    max_q = tokens.shape[0 if ragged else 2] if max_q_len is None else max_q_len
    return Cached(cu_seqlens_q, max_q, kv_len, cache_loc, page_table, k_scale, v_scale)


def _check_caches(name: str, tokens, layout: str, k_cache, v_cache, k_scale, v_scale) -> None:
    layouts = ((name, tokens, layout), ("k_cache", k_cache, "(N, S, Hkv, D_QK)"), ("v_cache", v_cache, "(N, S, Hkv, D_V)"))
    for what, tensor, wanted in layouts:
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != wanted.count(",") + 1:
            raise ValueError(f"{what} must be {wanted}, got {described(tensor)}")
        check_memory(what, tensor)
        if tensor.device != tokens.device:
            raise ValueError(f"{what} is on {tensor.device} but {name} is on {tokens.device}; move one with .to(...)")
    if tokens.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16 or float32, got {tokens.dtype}")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale go together; pass ones for the one that is not scaled")
    wanted = tokens.dtype if k_scale is None else torch.float8_e4m3fn
    if k_cache.dtype != wanted or v_cache.dtype != wanted:
        raise TypeError(f"k_cache and v_cache must be {wanted}, {f'as {name} is' if k_scale is None else 'as scales are given'}, got "
                        f"{k_cache.dtype} and {v_cache.dtype}")
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != tokens.shape[-1]:
        raise ValueError(f"{name} {tuple(tokens.shape)}, k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} do not fit: the "
                         f"last extent of k_cache is that of {name}, its first three are those of v_cache")


def _check_table(name: str, tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    """`shape` with None for any extent."""
    if isinstance(tensor, torch.Tensor):
        check_memory(name, tensor)
    if (isinstance(tensor, torch.Tensor) and tensor.dtype == dtype and tensor.device == device and tensor.ndim == len(shape)
            and all(want in (None, n) for want, n in zip(shape, tensor.shape, strict=True))):
        return
    wanted = ", ".join("n" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "")
    raise ValueError(f"{name} must be {dtype} ({wanted}) on {device}, got {described(tensor)}")


def check_contents(tokens, k_cache, kv_len, page_table, cache_loc, cu_seqlens_q, q_offset) -> int:
    """What those tensors hold. Waits for the device that they are on. Returns the end of the new tokens' positions."""
    lengths, cache = kv_len.tolist(), f"k_cache {tuple(k_cache.shape)}"
    counts = [tokens.shape[2]] * len(lengths) if cu_seqlens_q is None else _counts(cu_seqlens_q.tolist(), tokens.shape[0])
    offsets = [n - c for n, c in zip(lengths, counts, strict=True)] if q_offset is None else q_offset.tolist()
    size = k_cache.shape[1]
    room = size * (1 if page_table is None else page_table.shape[1])
    reached = 0
    for b, (offset, count, length) in enumerate(zip(offsets, counts, lengths, strict=True)):
        end = max(offset + count, length)
        if length == 0 and cu_seqlens_q is None:  # a sequence that is not there
            continue
        reached = max(reached, offset + count)
        if offset < 0 or end > room:
            raise ValueError(f"sequence {b} has {count} new tokens from position {offset} on, and kv_len {length}; positions go from 0 to "
                             f"{room - 1} in {cache}{f' with {page_table.shape[1]} pages' if page_table is not None else ''}")
        if page_table is not None:
            pages = page_table[b, :-(-end // size)].tolist()
            if pages and not 0 <= min(pages) <= max(pages) < k_cache.shape[0]:
                raise ValueError(f"page_table[{b}] names pages from {min(pages)} to {max(pages)}; {cache} has pages 0 to "
                                 f"{k_cache.shape[0] - 1}")
    entries = cache_loc.tolist() if cache_loc is not None else []
    if entries and not 0 <= min(entries) <= max(entries) < k_cache.shape[0]:
        raise ValueError(f"cache_loc names entries from {min(entries)} to {max(entries)}; {cache} has entries 0 to {k_cache.shape[0] - 1}")
    return reached


def _counts(starts: list[int], tokens: int) -> list[int]:
    counts = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    if starts[0] != 0 or min(counts, default=0) < 0 or starts[-1] > tokens:
        raise ValueError(f"cu_seqlens_q must start with 0, never fall, and end with at most the {tokens} tokens there are, got {starts}")
    return counts
