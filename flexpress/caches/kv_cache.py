"""Writing new keys and values into a cache, contiguous or in pages, and turning them by their positions on the way."""

from __future__ import annotations

from typing import overload

import torch
from torch.autograd.graph import increment_version

from flexpress.caches.rope import check_reached, check_rope
from flexpress.graphs.in_graph import compilable
from flexpress.inputs import checks
from flexpress.inputs.cache_checks import (
    CacheTables,
    check_batch,
    check_contents,
    check_no_gradients,
    check_plain,
    check_writable,
    described,
    looks,
)

from ..codegen.mod.captured.tensors import is_recorded
from ..codegen.run.call import Cached
from ..codegen.run.update_cache import update


@overload
def update_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | None = None,
    query: None = None,
    rope: torch.Tensor | None = None,
    interleaved: bool = False,
    rope_tail: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check: bool | None = None,
) -> None: ...
@overload
def update_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | None = None,
    query: torch.Tensor,
    rope: torch.Tensor | None = None,
    interleaved: bool = False,
    rope_tail: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check: bool | None = None,
) -> torch.Tensor: ...
@compilable
def update_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
    interleaved: bool = False,
    rope_tail: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check: bool | None = None,
) -> torch.Tensor | None:
    """Write the new keys and values of B sequences to their places in a cache, in one kernel.

    key, value    (B, Hkv, Q_LEN, D_QK) and (B, Hkv, Q_LEN, D_V); or with cu_seqlens_q (T, Hkv, D_QK) and (T, Hkv, D_V). Under autocast
                  they, and query, become autocast's dtype first
    rope          from rope_table, with a row for every position that a sequence reaches: keys are turned before they are written. rope_dim
                  may be less than D_QK: the dimensions after it stay as they are
    interleaved   pairs are dimensions 2j and 2j + 1; else j and j + rope_dim / 2 (as in Llama's weights on Hugging Face)
    rope_tail     the last rope_dim dimensions turn, not the first, counted from where they start (latent attention: 64 behind 512)
    query         (B, Hq, Q_LEN, D_QK) or (T, Hq, D_QK), with rope: a turned copy of it is returned. Tokens after the last sequence's are
                  in it as they are
    check         look at what kv_len, cu_seqlens_q, page_table, cache_loc, q_offset and the scales hold, and raise ValueError before
                  anything is written: for positions and pages that are not in the cache, lengths that do not agree, and two tokens with
                  one place. By default where that does not wait for a GPU. Unchecked, what has no place (a page or an entry that is not
                  in the cache, such as -1; a position outside) is not written, nothing is read or written outside the tensors, and of
                  two tokens with one place any may stay. A token that cu_seqlens_q gives to two sequences has one of their turned queries

    Other arguments as for cached_attention: kv_len counts the new positions, too. k_cache and v_cache are changed; their head dims must be
    contiguous. Where they overlap, as values that are a view of the keys, key and value must agree there: of two numbers for one place
    any may stay. They may have another dtype than key and value have, float8_e4m3fn too, then k_scale and v_scale divide what is written.
    Returns the turned query, or None.

    Raises ValueError or TypeError for arguments, NotImplementedError for kinds of tensors that kernels cannot read and,
    unless gradients are off (torch.no_grad), where one of them requires grad.
    """
    recorded = is_recorded("update_cache", key, k_cache, v_cache)
    if torch._C._is_any_autocast_enabled():
        key, value, query = checks.autocast(key, value, query)
    tables = CacheTables(kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    cached, q_offset = check_batch("key", key, k_cache, v_cache, tables, (value, query, rope), _check_new, False if recorded else check)
    if torch.is_grad_enabled():
        tensors = {"key": key, "value": value, "query": query, "k_cache": k_cache, "v_cache": v_cache, "rope": rope}
        check_no_gradients("update_cache", "call it under torch.no_grad()", **tensors, k_scale=k_scale, v_scale=v_scale)
    if recorded:
        turned = torch.ops.flexpress.update_cache(
            *(key, value, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset),
            *(query, rope, interleaved, k_scale, v_scale, check, rope_tail),
        )
        return None if query is None else turned
    if looks(check, key):
        check_reached(rope, check_contents(key, k_cache, cached, q_offset, written=True))
    if key.numel() == 0:
        return None if query is None else query.clone()
    return _update(key, value, query, k_cache, v_cache, cached, q_offset, rope, interleaved, rope_tail)


def _update(key, value, query, k_cache, v_cache, cached: Cached, q_offset, rope, interleaved: bool, rope_tail: bool) -> torch.Tensor | None:
    """update_cache of arguments that are checked."""
    k, v = (_apart(readable(t), k_cache, v_cache) for t in (key, value))
    q = q_out = None
    if rope is not None:
        q = k[:, :0] if query is None else _apart(readable(query), k_cache, v_cache)
        q_out = torch.empty_like(q)
    turned = q_out
    if cached.cu_q is None:  # tokens before heads
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if q is not None and q_out is not None:
            q, turned = q.transpose(1, 2), q_out.transpose(1, 2)
    update(k, v, k_cache, v_cache, cached, q_offset, rope, q, turned, interleaved=interleaved, rope_tail=rope_tail)
    if not (k_cache.is_inference() or v_cache.is_inference()):  # these have no versions
        increment_version((k_cache, v_cache))  # so that autograd notices where it has saved one of them
    return None if query is None else q_out


def _apart(tensor: torch.Tensor, *written: torch.Tensor) -> torch.Tensor:
    """A tensor that is read while caches are written: a copy where it shares memory with them, as tokens that move in a cache."""
    return tensor.clone() if any(torch._C._is_alias_of(tensor, cache) for cache in written) else tensor  # type: ignore[attr-defined]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """With contiguous head dims and without the negative bit."""
    tensor = tensor.resolve_neg() if tensor.is_neg() else tensor
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_new(key, k_cache, v_cache, value, query, rope) -> None:
    """What check_batch leaves."""
    Hkv, D_V = k_cache.shape[2], v_cache.shape[3]
    tokens, end = ("(T", " with cu_seqlens_q") if key.ndim == 3 else ("(B", "")
    inner = "" if key.ndim == 3 else ", Q_LEN"
    check_plain("value", value, f"{tokens}, Hkv{inner}, D_V){end}")
    if key.shape[1] != Hkv or value.shape != (*key.shape[:-1], D_V) or value.dtype != key.dtype or value.device != key.device:
        raise ValueError(
            f"key is {described(key)} and value {described(value)}; k_cache {tuple(k_cache.shape)} and v_cache "
            f"{tuple(v_cache.shape)} need {Hkv} heads, head dims {k_cache.shape[3]} and {D_V}, and all else alike"
        )
    if rope is not None:
        check_rope(rope, "key", key)
    if query is not None:
        if rope is None:
            raise ValueError("query is turned by rope; pass rope=rope_table(...), or leave query out")
        check_plain("query", query, f"{tokens}, Hq{inner}, D_QK){end}")
        if query.dtype != key.dtype or query.device != key.device or query.shape[:1] + query.shape[2:] != key.shape[:1] + key.shape[2:]:
            raise ValueError(f"query is {described(query)} and key {described(key)}: all but the number of heads must be equal")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(f"the head dims of k_cache and v_cache must be contiguous, got strides {k_cache.stride()} and {v_cache.stride()}")
    check_writable("k_cache", k_cache)
    check_writable("v_cache", v_cache)
