"""Attention of new queries to the keys and values of a cache, contiguous or in pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexpress import checks
from flexpress.block_mask import check_captured_device
from flexpress.codegen.decode import Cached, decode
from flexpress.codegen.forward import architecture_of, keys_of, output_like
from flexpress.codegen.masks import automatic_lists
from flexpress.codegen.signature import bind

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn,)


def cached_attention(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_len: torch.Tensor, *,
                     page_table: torch.Tensor | None = None, cache_loc: torch.Tensor | None = None,
                     cu_seqlens_q: torch.Tensor | None = None, max_q_len: int | None = None, q_offset: torch.Tensor | None = None,
                     score_mod: Callable | None = None, mask_mod: Callable | None = None, scale: float | None = None,
                     k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, return_lse: bool = False,
                     batch_invariant: bool = False):
    """Attention of the queries of B sequences, prefill or decoding or both, to what a cache holds of each one.

    query         (B, Hq, Q_LEN, D_QK); or with cu_seqlens_q (T, Hq, D_QK), the queries of all sequences one after another
    k_cache, v_cache   (N, S, Hkv, D_QK) and (N, S, Hkv, D_V): N sequences of up to S positions, or with page_table N pages of S positions.
                  In query's dtype, or float8_e4m3fn with k_scale and v_scale. Any strides
    kv_len        int32 (B,): positions of each sequence that the cache holds, the new ones included; on the device, so it may grow under a
                  CUDA graph. 0 for a sequence that is not there
    page_table    int32 (B, n): the pages that hold a sequence's positions in order; entries past kv_len are never read
    cache_loc     int32 (B,): the sequence's entry in the cache, b by default; not with page_table
    cu_seqlens_q  int32 (B + 1,): where each sequence's queries start in query, and their end; lengths may be 0. max_q_len is the largest
                  length or more (the kernels' grid follows from it); by default T
    q_offset      int32 (B,): the position of each sequence's first query; by default its queries are its last positions
    score_mod     score_mod(score, b, h, q_idx, kv_idx) with q_idx and kv_idx positions in the sequence, b its number in this batch
    mask_mod      mask_mod(b, h, q_idx, kv_idx); by default kv_idx <= q_idx
    k_scale, v_scale   float32 (Hkv,): what k_cache and v_cache are to be multiplied by
    batch_invariant    a sequence's result is bitwise the same whatever else is in the batch (and takes longer)

    Returns (B, Hq, Q_LEN, D_V) or (T, Hq, D_V), in query's dtype; with return_lse also lse, float32, (B, Hq, Q_LEN) or (T, Hq). A query
    with nothing to attend to, and a token after the last sequence, gets 0 and lse -inf. Not differentiable.

    Raises ValueError or TypeError for arguments, ModError for a mod that cannot be traced. What the tensors on the device hold is not
    looked at: kv_len above the cache's room is taken as that room; page_table's and cache_loc's entries must be inside the cache.

    Method: flash decoding (Dao et al. 2023), paged attention (Kwon et al. 2023, arXiv 2309.06180).
    """
    ragged = cu_seqlens_q is not None
    _check(query, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    q = query.transpose(0, 1)[None] if ragged else query
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    Z, Hq = kv_len.shape[0], q.shape[1]
    max_q = (query.shape[0] if max_q_len is None else max_q_len) if ragged else q.shape[2]
    KV_LEN = k.shape[2] * (1 if page_table is None else page_table.shape[1])
    if ragged:
        out = query.new_empty((*query.shape[:2], v.shape[3]))
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        to_fill = out.transpose(0, 1)[None]
    else:
        to_fill = out = output_like(q, v.shape[3])
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if 0 in (out.numel(), KV_LEN, Z, max_q):
        out.zero_()
        lse.fill_(float("-inf"))
        return (out, lse) if return_lse else out

    masked = mask_mod is not None or max_q > 1 or q_offset is not None  # else one query, which sees all that there is
    if q_offset is None and (masked or score_mod is not None):
        q_offset = kv_len - (cu_seqlens_q.diff() if ragged else q.shape[2])
    score = mask = lists = None
    extents = (Z, Hq, max_q, KV_LEN)
    if score_mod is not None:
        score = bind(_score_from(score_mod, q_offset), "score")
        check_captured_device(score, query.device, "score_mod")
    if masked:
        mask = bind(_causal_from(q_offset, kv_len) if mask_mod is None else _mask_from(mask_mod, q_offset, kv_len), "mask")
        check_captured_device(mask, query.device, "mask_mod")
        lists = automatic_lists(mask, extents=extents, device=query.device, size=(128, 128))
    where = Cached(cu_seqlens_q, max_q, kv_len, cache_loc, page_table, k_scale, v_scale, batch_invariant)
    decode(q, k, v, (to_fill, lse), checks.check_scale(scale, q.shape[3]), score, mask, keys_of(score, mask, extents), lists,
           architecture_of(query.device), cached=where)
    return (out, lse) if return_lse else out


def _score_from(score_mod: Callable, offset: torch.Tensor) -> Callable:
    def score_from(score, b, h, q_idx, kv_idx):
        return score_mod(score, b, h, q_idx + offset[b], kv_idx)

    return score_from


def _mask_from(mask_mod: Callable, offset: torch.Tensor, kv_len: torch.Tensor) -> Callable:
    def mask_from(b, h, q_idx, kv_idx):
        return mask_mod(b, h, q_idx + offset[b], kv_idx) & (kv_idx < kv_len[b])

    return mask_from


def _causal_from(offset: torch.Tensor, kv_len: torch.Tensor) -> Callable:
    def causal_from(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx + offset[b]) & (kv_idx < kv_len[b])

    return causal_from


def _check(query, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale) -> None:
    """One clear error for what does not fit together."""
    ragged = cu_seqlens_q is not None
    for name, tensor, layout in (("query", query, "(T, Hq, D)" if ragged else "(B, Hq, Q_LEN, D)"), ("k_cache", k_cache, "(N, S, Hkv, D_QK)"),
                                 ("v_cache", v_cache, "(N, S, Hkv, D_V)")):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != layout.count(",") + 1:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be {layout}{' with cu_seqlens_q' if name == 'query' and ragged else ''}, got {shape}")
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be float16, bfloat16 or float32, got {query.dtype}")
    scaled = k_scale is not None or v_scale is not None
    allowed = FP8 if scaled else (query.dtype,)
    if k_cache.dtype not in allowed or v_cache.dtype != k_cache.dtype:
        raise TypeError(f"k_cache and v_cache must both be {'float8_e4m3fn, as k_scale or v_scale is given' if scaled else query.dtype}, "
                        f"got {k_cache.dtype} and {v_cache.dtype}")
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != query.shape[-1] or query.shape[1] % max(k_cache.shape[2], 1):
        raise ValueError(f"query {tuple(query.shape)}, k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} do not fit: k_cache's "
                         "last extent is query's, its first three are v_cache's, and its heads (the third) divide query's (the second)")
    if query.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("cached_attention is not differentiable; use flex_attention or varlen_attention to train, or torch.no_grad()")
    if page_table is not None and cache_loc is not None:
        raise ValueError("page_table and cache_loc exclude each other: a page table says where a sequence is")
    if scaled and (k_scale is None or v_scale is None):
        raise ValueError("k_scale and v_scale go together; pass ones for the one that is not scaled")
    batch = kv_len.shape[0] if isinstance(kv_len, torch.Tensor) and kv_len.ndim == 1 else -1
    wanted = {"kv_len": (kv_len, (query.shape[0] if not ragged else batch,)), "page_table": (page_table, (batch, None)),
              "cache_loc": (cache_loc, (batch,)), "cu_seqlens_q": (cu_seqlens_q, (batch + 1,)), "q_offset": (q_offset, (batch,))}
    for name, (tensor, shape) in wanted.items():
        if tensor is None and name != "kv_len":
            continue
        fits = isinstance(tensor, torch.Tensor) and tensor.ndim == len(shape) and all(w in (None, n) for w, n in zip(shape, tensor.shape, strict=True))
        if not fits or tensor.dtype != torch.int32 or tensor.device != query.device:
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            want = ", ".join("n" if w is None else str(w) for w in shape)
            raise ValueError(f"{name} must be int32 ({want}{',' if len(shape) == 1 else ''}) on {query.device}, got {got}")
    if cache_loc is None and page_table is None and k_cache.shape[0] != batch:
        raise ValueError(f"k_cache {tuple(k_cache.shape)} has {k_cache.shape[0]} entries for {batch} sequences; say with cache_loc or "
                         "page_table which ones are theirs")
    if max_q_len is not None and (not ragged or not 0 <= max_q_len <= query.shape[0]):
        raise ValueError(f"max_q_len ({max_q_len}) is for cu_seqlens_q, and from 0 to the {query.shape[0]} tokens of query")
    for name, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if tensor is not None and (tensor.shape != (k_cache.shape[2],) or tensor.dtype != torch.float32 or tensor.device != query.device):
            raise ValueError(f"{name} must be float32 ({k_cache.shape[2]},) on {query.device}, one for each head of k_cache "
                             f"{tuple(k_cache.shape)}, got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}")
