"""The kernels of a serving step as operators of torch.library: opaque to torch.compile and torch.export, with fake implementations.

`import flexpress` registers them as torch.ops.flexpress.NAME. Queries, keys and values come as a linear layer leaves them,
(batch, tokens, heads * head dim), or each with heads apart, (batch, tokens, heads, head dim); outputs have the form of the queries. Caches
are changed in place. Batches are described by what `prepare_metadata` makes of a SequenceInfo's tensors, once a step and not once a layer:

    cu_seqlens   int32 (n + 1,)   where each sequence's new tokens start, and their end
    kv_len       int32 (n,)       positions of each sequence in the cache, the new ones included; 0 for a sequence without new tokens
    page_table   int32 (n, pages) or, for a cache with one entry a sequence, cache_loc int32 (n,)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexpress import sdpa
from flexpress.caches.cached_arguments import no_autocast
from flexpress.caches.shared_prefix import SharedPrefix
from flexpress.graphs.custom_ops import fake_of, operator
from flexpress.inputs.cache_checks import described, looks
from flexpress.steps.layer_step import attend, check_tokens, out_like


@operator("scaled_dot_product_attention", tags=(torch.Tag.nondeterministic_seeded,))  # with dropout
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """flexpress.scaled_dot_product_attention of (B, Hq, Q_LEN, D), (B, Hkv, KV_LEN, D) and (B, Hkv, KV_LEN, D_V), to a contiguous
    (B, Hq, Q_LEN, D_V). Not differentiable; autocast changes nothing."""
    with no_autocast(query):
        return sdpa.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ).contiguous()


@fake_of(scaled_dot_product_attention)
def _(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@operator("prepare_metadata")
def prepare_metadata(
    input_ids: torch.Tensor,
    seq_len: torch.Tensor,
    input_pos: torch.Tensor,
    cache_loc: torch.Tensor,
    pages_per_seq: torch.Tensor,
    seq_start: torch.Tensor,
    page_table: torch.Tensor,
) -> list[torch.Tensor]:
    """cu_seqlens, kv_len and page_table for attention to a paged cache, all int32; arguments as SequenceInfo.args."""
    return [*_lengths(seq_len, input_pos, page_table), _int32(page_table).clone(memory_format=torch.contiguous_format)]


@fake_of(prepare_metadata)
def _(input_ids, seq_len, input_pos, cache_loc, pages_per_seq, seq_start, page_table):
    return [*_fake_lengths(seq_len), page_table.new_empty(page_table.shape, dtype=torch.int32)]


@operator("prepare_flattened_metadata")
def prepare_flattened_metadata(
    input_ids: torch.Tensor,
    seq_len: torch.Tensor,
    input_pos: torch.Tensor,
    cache_loc: torch.Tensor,
    pages_per_seq: torch.Tensor,
    seq_start: torch.Tensor,
    page_table: torch.Tensor,
) -> list[torch.Tensor]:
    """cu_seqlens, kv_len and cache_loc, all int32, for attention to a cache with one page, its entry, for each sequence; arguments as for
    prepare_metadata. A sequence without an entry gets the first one: it has no new tokens."""
    return [*_lengths(seq_len, input_pos, page_table), _int32(page_table[:, 0].clamp(min=0)).contiguous()]


@fake_of(prepare_flattened_metadata)
def _(input_ids, seq_len, input_pos, cache_loc, pages_per_seq, seq_start, page_table):
    return [*_fake_lengths(seq_len), page_table.new_empty(page_table.shape[0], dtype=torch.int32)]


def _lengths(seq_len: torch.Tensor, input_pos: torch.Tensor, page_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for name, tensor, shape in (("seq_len", seq_len, "(n,)"), ("input_pos", input_pos, "(n,)"), ("page_table", page_table, "(n, pages)")):
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.ndim != (2 if "pages" in shape else 1):
            raise TypeError(f"{name} must be int32 {shape}, as SequenceInfo has it, got {described(tensor)}")
        if tensor.shape[0] != seq_len.shape[0]:
            raise ValueError(f"{name} {tuple(tensor.shape)} is not for the {seq_len.shape[0]} sequences of seq_len")
    if page_table.shape[1] == 0:
        raise ValueError(f"page_table {tuple(page_table.shape)} has no pages; it needs a column for each page of a sequence")
    cu_seqlens = torch.nn.functional.pad(_int32(seq_len).cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens, _int32(torch.where(seq_len > 0, input_pos + seq_len, 0))


_LARGEST = torch.iinfo(torch.int32).max


def _int32(numbers: torch.Tensor, room: int = 0) -> torch.Tensor:
    """As int32, which `room` may be added to. What is too large becomes the largest: wrapped, it could name a place in the cache."""
    if numbers.dtype == torch.int32:
        return numbers
    return numbers.clamp(-_LARGEST - 1, _LARGEST - room).to(torch.int32)


def _fake_lengths(seq_len):
    n = seq_len.shape[0]
    return seq_len.new_empty(n + 1, dtype=torch.int32), seq_len.new_empty(n, dtype=torch.int32)


@operator("mha_with_cache", ("k_cache", "v_cache"))
def mha_with_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    input_pos: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rope: torch.Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    rope_tail: bool = False,
) -> torch.Tensor:
    """Attention of b sequences with s new tokens each, q (b, s, Hq * D), k and v (b, s, Hkv * D and * D_V), to caches (N, S, Hkv, D) and
    (N, S, Hkv, D_V) that hold input_pos (b,) positions of each and take the new ones. To (b, s, Hq * D_V), in q's dtype.

    q, k, v             each may have heads apart, (b, s, Hq, D) and so on; the output is (b, s, Hq, D_V) where q is
    k_cache, v_cache    in q's dtype or any other that cached_attention takes. N >= b: sequence i has entry i, and others stay as they are
    rope, interleaved, rope_tail   as for update_cache: q and k are turned
    sliding_window      how many positions a token sees, its own included: 1, only itself; 0: all
    softcap             scores s become softcap * tanh(s / softcap); 0: they stay
    k_scale, v_scale    float32 (Hkv,): what caches of float8_e4m3fn are to be multiplied by; None: 1
    sinks               (Hq,), a logit for each head, as for cached_attention
    Raises ValueError or TypeError for arguments. Not differentiable; autocast changes nothing.
    """
    check_tokens(q, k, v, k_cache, v_cache)
    sequences = q.shape[0]
    if input_pos.shape != (sequences,) or input_pos.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_pos must be int32 (b,), a number for each sequence of q {tuple(q.shape)}, got {described(input_pos)}")
    if k_cache.shape[0] < sequences:
        raise ValueError(
            f"q {tuple(q.shape)} has {sequences} sequences, but k_cache {tuple(k_cache.shape)} only {k_cache.shape[0]} entries; it needs "
            "one for each"
        )
    if looks(None, q) and sequences and int(input_pos.min()) < 0:
        raise ValueError(f"input_pos has {int(input_pos.min())}; each must be 0 or more, the positions that its sequence has in the cache")
    kv_len = _int32(input_pos, q.shape[1]) + q.shape[1]
    where = {}
    if k_cache.shape[0] > sequences:
        where["cache_loc"] = torch.arange(sequences, dtype=torch.int32, device=q.device)
    return attend(
        (q, k, v),
        kv_len,
        None,
        where,
        (k_cache, v_cache),
        (rope, interleaved, rope_tail),
        scale,
        sliding_window,
        softcap,
        (k_scale, v_scale),
        sinks,
    )


@fake_of(mha_with_cache)
def _(
    q,
    k,
    v,
    input_pos,
    k_cache,
    v_cache,
    rope=None,
    interleaved=False,
    scale=None,
    sliding_window=0,
    softcap=0.0,
    k_scale=None,
    v_scale=None,
    sinks=None,
    *,
    rope_tail=False,
):
    return out_like(q, k_cache, v_cache)


@operator("flattened_mha_with_cache", ("k_cache", "v_cache"))
def flattened_mha_with_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_len: torch.Tensor,
    cache_loc: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rope: torch.Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    rope_tail: bool = False,
) -> torch.Tensor:
    """Attention of sequences with any numbers of new tokens, prefill and decoding in one batch, to caches (entries, S, Hkv, D) and D_V.

    q (b, 1, Hq * D), where row i is sequence i, or (1, T, Hq * D), sequence after sequence; k and v alike, each also with heads apart.
    cu_seqlens, kv_len, cache_loc from prepare_flattened_metadata, of b sequences or more; the rest as for mha_with_cache. To q's extents
    with D_V for D; rows of sequences with seq_len 0, and tokens after the last sequence's, give 0.
    """
    where = {"cache_loc": cache_loc}
    return attend(
        (q, k, v),
        kv_len,
        cu_seqlens,
        where,
        (k_cache, v_cache),
        (rope, interleaved, rope_tail),
        scale,
        sliding_window,
        softcap,
        (k_scale, v_scale),
        sinks,
    )


@fake_of(flattened_mha_with_cache)
def _(
    q,
    k,
    v,
    cu_seqlens,
    kv_len,
    cache_loc,
    k_cache,
    v_cache,
    rope=None,
    interleaved=False,
    scale=None,
    sliding_window=0,
    softcap=0.0,
    k_scale=None,
    v_scale=None,
    sinks=None,
    *,
    rope_tail=False,
):
    return out_like(q, k_cache, v_cache)


@operator("mha_with_paged_cache", ("k_cache", "v_cache"))
def mha_with_paged_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_len: torch.Tensor,
    page_table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rope: torch.Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    shared_order: torch.Tensor | None = None,
    shared_starts: torch.Tensor | None = None,
    shared_lengths: torch.Tensor | None = None,
    shared_pages: torch.Tensor | None = None,
    shared_prefix: torch.Tensor | None = None,
    shared_groups: Sequence[int] | None = None,
    sinks: torch.Tensor | None = None,
    *,
    rope_tail: bool = False,
) -> torch.Tensor:
    """flattened_mha_with_cache with caches (pages, page size, Hkv, D) and D_V, and page_table from prepare_metadata.

    shared_...   all of them, the `options` of SequenceInfo.shared_prefix: pages that sequences share are read once, where that is faster
    """
    where = {"page_table": page_table}
    shared = shared_order, shared_starts, shared_lengths, shared_pages, shared_prefix
    check_tokens(q, k, v, k_cache, v_cache)
    prefix = SharedPrefix.of(shared, shared_groups or (), k_cache.shape[1])
    return attend(
        (q, k, v),
        kv_len,
        cu_seqlens,
        where,
        (k_cache, v_cache),
        (rope, interleaved, rope_tail),
        scale,
        sliding_window,
        softcap,
        (k_scale, v_scale),
        sinks,
        prefix,
    )


@fake_of(mha_with_paged_cache)
def _(
    q,
    k,
    v,
    cu_seqlens,
    kv_len,
    page_table,
    k_cache,
    v_cache,
    rope=None,
    interleaved=False,
    scale=None,
    sliding_window=0,
    softcap=0.0,
    k_scale=None,
    v_scale=None,
    shared_order=None,
    shared_starts=None,
    shared_lengths=None,
    shared_pages=None,
    shared_prefix=None,
    shared_groups=None,
    sinks=None,
    *,
    rope_tail=False,
):
    return out_like(q, k_cache, v_cache)
