"""flash_attn's functions on caches: flash_attn_with_kvcache, and pages under packed queries."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from flexpress.caches.cached import attention_after, cached_attention
from flexpress.caches.kv_cache import update_cache
from flexpress.caches.rope import rotated
from flexpress.codegen.mod.captured.tensors import check_surroundings
from flexpress.flash_attn.meaning import Options, cache_mask_mod_of, plain, read_options, same_place, score_mod_of
from flexpress.flash_attn.tables import check_caches_fit, checked_lengths
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.cache_checks import check_no_gradients, check_plain, check_table, described
from flexpress.inputs.checks import whole
from flexpress.inputs.packed_checks import check_cu_seqlens
from flexpress.inputs.scales import softmax_scale_of

COPIED_FROM = {"cuda": 512, "cpu": sys.maxsize}  # queries of a sequence, beside which a copy of the keys behind left padding is little


@compilable
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> Any:  # a tensor, or a tuple where more is asked for
    """Attention of q (B, Sq, Hq, D) to a cache, after new keys and values were written behind those that it holds.

    k_cache, v_cache   (N, S, Hkv, D), or with a block_table pages (N, page size, Hkv, D); changed if k is given
    k, v               (B, S_new, Hkv, D): written from position cache_seqlens on
    rotary_cos, rotary_sin   (positions, rotary_dim / 2), at least as many positions as a sequence has room: k is turned by those from
                       cache_seqlens on, and q too; q all by that of cache_seqlens if neither causal nor window_size limits it. With k
    cache_seqlens      int32 (B,) or a number: positions that the cache holds before the call. By default it is full
    cache_batch_idx    int32 (B,): each sequence's entry of the cache, b by default; not with a block_table
    cache_leftpad      int32 (B,): how many positions at the beginning of a sequence hold nothing, and are not read; k_cache and v_cache
                       then lie alike in memory, as two contiguous ones do
    block_table        int32 (B, n): the pages of each sequence
    rotary_interleaved pairs are dimensions 2j and 2j + 1; else j and j + rotary_dim / 2
    num_splits         is not needed: how keys are split among programs follows from the sizes
    return_softmax_lse also return lse (B, Hq, Sq), float32

    softmax_scale, causal, window_size, softcap, alibi_slopes and sinks are described at the top of flash_attn_interface. Returns
    (B, Sq, Hq, D).

    On a GPU the contents of cache_seqlens, cache_leftpad, cache_batch_idx and block_table are not looked at: nothing outside of the cache
    is read or written whatever they hold. On the CPU they are checked before anything is written, in compiled programs, too.

    Raises ValueError or TypeError for arguments, and NotImplementedError where gradients are on and a tensor requires grad: there is no
    backward pass. Source of signature and meaning: FlashAttention 2.8.
    """
    check_surroundings("flash_attn_with_kvcache")
    k_cache, v_cache, where = _placed(q, k_cache, v_cache, k, v, cache_batch_idx, cache_leftpad, block_table)
    options = read_options(causal, window_size, softcap, alibi_slopes, q, q.shape[0])
    whole("num_splits", num_splits)
    if torch.is_grad_enabled():
        tensors = dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        learned = dict(alibi_slopes=alibi_slopes, sinks=sinks)
        check_no_gradients("flash_attn_with_kvcache", "call it under torch.no_grad()", **tensors, **learned)
    lengths, room = _lengths(cache_seqlens, q, k, k_cache, block_table)
    rope = _rope(rotary_cos, rotary_sin, q, k, room)
    lengths = checked_lengths(lengths, 0 if k is None else k.shape[1], room, k_cache, cache_batch_idx, block_table, cache_leftpad)
    filled = lengths if k is None else lengths + k.shape[1]
    query, meaning = q.transpose(1, 2), _meaning(options, q.shape[1] == 1, softmax_scale, sinks)
    read, bring = (k_cache, v_cache, filled, where), None
    if cache_leftpad is not None:
        read = _behind_padding(*read, cache_leftpad, room)
        if q.shape[1] >= COPIED_FROM[q.device.type]:
            read, bring = _brought_together(*read)
    attention = attention_after(query, *read[:3], **read[3], **meaning)  # which raises before anything is written
    if k is not None:
        limited = (options.left, options.right) != (None, None)
        query = _append(query, k, v, k_cache, v_cache, (lengths, filled), where, rope, rotary_interleaved, limited)
    if bring is not None:
        bring()
    out, lse = attention(query)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def attend_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, meaning: tuple, softmax_scale, block_table, sinks) -> tuple:
    """out (total_q, Hq, D) and lse (Hq, total_q) of packed queries and the pages k and v; `meaning` as read_options takes it."""
    check_plain("q", q, "(total_q, Hq, D)")
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
    for name, pages in (("k", k), ("v", v)):
        check_plain(name, pages, "(pages, page size, Hkv, D)")
    check_caches_fit(q, k, v, ("k", "v"))
    batch = cu_seqlens_q.shape[0] - 1
    check_table("cu_seqlens_k", cu_seqlens_k, (batch + 1,), torch.int32, q.device)
    check_table("block_table", block_table, (batch, None), torch.int32, q.device)
    options = read_options(*meaning, q, batch)
    longest = min(whole("max_seqlen_q", plain(max_seqlen_q)), q.shape[0])
    if torch.is_grad_enabled():
        tensors = dict(q=q, k=k, v=v, alibi_slopes=options.alibi_slopes, sinks=sinks)
        check_no_gradients("flash_attn_varlen_func with a block_table", "leave it out to train, or use torch.no_grad()", **tensors)
    asked = {"cu_seqlens_q": cu_seqlens_q, "longest": longest}
    lengths = checked_lengths(cu_seqlens_k.diff(), 0, block_table.shape[1] * k.shape[1], k, None, block_table, **asked)
    where = {"page_table": block_table, "cu_seqlens_q": cu_seqlens_q.to(torch.int32), "max_q_len": longest}
    out, lse = cached_attention(q, k, v, lengths, **where, **_meaning(options, longest == 1, softmax_scale, sinks), return_lse=True)
    return out, lse.transpose(0, 1)


def _meaning(options: Options, one_query: bool, softmax_scale, sinks) -> dict[str, Any]:
    """cached_attention's arguments for queries that are the last positions of their sequences; `one_query`: no sequence has more."""
    return {
        "score_mod": score_mod_of(options, same_place, one_query),
        "mask_mod": cache_mask_mod_of(options, one_query),
        "scale": softmax_scale_of(softmax_scale),
        "check": False,  # done
        "sinks": sinks,
    }


def _placed(q, k_cache, v_cache, k, v, cache_batch_idx, cache_leftpad, block_table) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """k_cache and v_cache with the entries that are used, and what says where sequences are, as cached_attention takes it."""
    layouts = ("q", q, "(B, Sq, Hq, D)"), ("k_cache", k_cache, "(N, S, Hkv, D)"), ("v_cache", v_cache, "(N, S, Hkv, D)")
    for name, tensor, layout in layouts:
        check_plain(name, tensor, layout)
    check_caches_fit(q, k_cache, v_cache, ("k_cache", "v_cache"))
    if (k is None) != (v is None):
        raise ValueError(f"k and v go together, got {'k' if v is None else 'v'} alone")
    B = q.shape[0]
    if k is not None:
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            check_plain(name, new, "(B, S_new, Hkv, D)")
            if new.shape[0] != B or new.shape[1] != k.shape[1] or new.shape[2:] != cache.shape[2:] or new.dtype != q.dtype:
                wanted = (B, k.shape[1], *cache.shape[2:])
                raise ValueError(f"{name} must be {q.dtype} {wanted}, for q {tuple(q.shape)} and its cache, got {described(new)}")
    if cache_batch_idx is not None and block_table is not None:
        raise ValueError("cache_batch_idx and block_table exclude each other: a block table says where a sequence is")
    tables = ("cache_batch_idx", cache_batch_idx, (B,)), ("cache_leftpad", cache_leftpad, (B,)), ("block_table", block_table, (B, None))
    for name, table, shape in tables:
        if table is not None:
            check_table(name, table, shape, torch.int32, q.device)
    if cache_batch_idx is None and block_table is None:
        if k_cache.shape[0] < B:
            raise ValueError(f"k_cache {tuple(k_cache.shape)} has too few entries for q {tuple(q.shape)}; one for each sequence")
        k_cache, v_cache = k_cache[:B], v_cache[:B]
    return k_cache, v_cache, {"cache_loc": cache_batch_idx, "page_table": block_table}


def _behind_padding(k_cache, v_cache, filled, where: dict, leftpad, room: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """What attention reads of those: caches whose pages are single positions, and tables in which each sequence begins behind its padding.
    Queries, masks and ALiBi go by distances, which stay."""
    k_rows, k_steps = _positions("k_cache", k_cache)
    v_rows, v_steps = _positions("v_cache", v_cache)
    if k_steps != v_steps:
        raise ValueError(
            f"cache_leftpad needs a k_cache and a v_cache that lie alike in memory, got strides {k_cache.stride()} and {v_cache.stride()}; "
            "make both with the same layout"
        )
    leftpad, (per_entry, per_position) = leftpad.clamp(min=0), k_steps
    entries, size = k_cache.shape[:2]
    if where["page_table"] is None:
        entry, int32 = where["cache_loc"], {"dtype": torch.int32, "device": leftpad.device}
        if entry is None:
            first = torch.arange(leftpad.shape[0], **int32) * per_entry
        else:  # no number behind the least one is a page
            first = (entry * per_entry).masked_fill_((entry < 0) | (entry >= entries), torch.iinfo(torch.int32).min)
        table = (first + leftpad * per_position)[:, None] + torch.arange(room, **int32) * per_position
    else:
        at = (torch.arange(room, device=leftpad.device) + leftpad[:, None]).clamp(max=max(room - 1, 0))
        page = where["page_table"].gather(1, at // size)
        table = page * per_entry + at.remainder_(size).to(torch.int32) * per_position
        table.masked_fill_((page < 0) | (page >= entries), -1)
    return k_rows, v_rows, (filled.clamp(max=room) - leftpad).clamp(min=0), {"page_table": table}


def _brought_together(k_rows, v_rows, lengths, where: dict) -> tuple[tuple, Callable[[], None]]:
    """Caches without padding for those tables, and what brings there what the tables name: the kernel of long prompts knows no pages of one
    position."""
    table = where["page_table"]
    places = table.clamp(min=0, max=k_rows.shape[0] - 1).flatten()  # behind its keys a sequence has any
    pairs = []
    for rows in (k_rows, v_rows):
        whole = rows.new_empty((*table.shape, *rows.shape[2:]))
        pairs.append((rows.squeeze(1), whole.flatten(0, 1)))

    def bring() -> None:
        for rows, whole in pairs:
            if rows.itemsize == 1:  # torch moves no float8
                rows, whole = rows.view(torch.uint8), whole.view(torch.uint8)
            whole.copy_(rows.index_select(0, places))

    k, v = (whole.unflatten(0, table.shape) for _, whole in pairs)
    return (k, v, lengths, {}), bring


def _positions(name: str, cache: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """A view (n, 1, Hkv, D) of a cache (N, S, Hkv, D), and how many of the n lie between its entries and between its positions."""
    per_entry, per_position = (stride if n > 1 else 0 for n, stride in zip(cache.shape[:2], cache.stride(), strict=False))
    divides = per_position and per_entry % per_position == 0  # mostly; gcd would make numbers of a compiler's symbols
    step = per_position if divides else math.gcd(per_entry, per_position) or 1
    steps = per_entry // step, per_position // step
    count = 1 + sum((n - 1) * between for n, between in zip(cache.shape, steps, strict=False)) if cache.numel() else 0
    if count + cache.shape[1] * steps[1] >= 2**31:
        raise ValueError(f"cache_leftpad is for caches of fewer than 2**31 positions, got {name} {tuple(cache.shape)}")
    return cache.as_strided((count, 1, *cache.shape[2:]), (step, step, *cache.stride()[2:])), steps


def _lengths(cache_seqlens, q, k, k_cache, block_table) -> tuple[torch.Tensor, int]:
    """int32 (B,): positions that the cache holds before the call; and for how many there is room."""
    B, room = q.shape[0], k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens says where k and v are to be written; pass it with them")
        cache_seqlens = room
    if isinstance(cache_seqlens, torch.Tensor):
        check_table("cache_seqlens", cache_seqlens, (B,), torch.int32, q.device)
        return cache_seqlens, room
    if whole("cache_seqlens", cache_seqlens) > room:
        raise ValueError(f"cache_seqlens is {cache_seqlens}, but a sequence in the cache has room for {room} positions")
    return torch.full((B,), cache_seqlens, dtype=torch.int32, device=q.device), room


def _rope(cos, sin, q, k, room: int) -> torch.Tensor | None:
    """The table that update_cache takes."""
    if cos is None and sin is None:
        return None
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_plain(name, table, "(positions, rotary_dim / 2)")
        if not table.is_floating_point() or table.device != q.device or table.shape != cos.shape:
            raise ValueError(f"{name} must be floating-point, on {q.device} and as large as the other table, got {described(table)}")
    if k is None:
        raise ValueError("rotary_cos and rotary_sin are for new keys; pass k and v, or turn q before the call")
    if not 1 <= cos.shape[1] <= q.shape[-1] // 2:
        raise ValueError(f"rotary_cos {tuple(cos.shape)} is for {2 * cos.shape[1]} dimensions, but q {tuple(q.shape)} has {q.shape[-1]}")
    if cos.shape[0] < room:
        raise ValueError(f"rotary_cos {tuple(cos.shape)} has {cos.shape[0]} positions; a sequence in the cache may have {room}")
    if cos.dtype != sin.dtype:  # of which one may be float8, which torch converts to nothing else by itself
        cos, sin = cos.float(), sin.float()
    return torch.stack((cos, sin), dim=-1).float()


def _append(query, k, v, k_cache, v_cache, lengths: tuple, where: dict, rope, interleaved: bool, limited: bool) -> torch.Tensor:
    """Write k and v to the cache, and return query (B, Hq, Sq, D), turned if there is a rope: each by its own position, or where all see
    all (not `limited`) by that of the first. `lengths` before and after."""
    (before, after), queries = lengths, query.shape[2]
    together = rope is not None and queries == k.shape[1] and (limited or queries == 1)
    turned = update_cache(
        *(k.transpose(1, 2), v.transpose(1, 2), k_cache, v_cache, after),
        **where,
        query=query if together else None,
        rope=rope,
        interleaved=bool(interleaved),
        check=False,
    )
    if rope is None:
        return query
    if together:
        return turned
    steps = torch.arange(queries, dtype=torch.int32, device=query.device)
    positions = before[:, None] + (steps if limited else torch.zeros_like(steps))
    angles = rope[positions.clamp(0, rope.shape[0] - 1)].unsqueeze(2)
    return rotated(query.transpose(1, 2), angles, interleaved).transpose(1, 2)
