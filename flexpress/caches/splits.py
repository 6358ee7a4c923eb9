"""Attention to a cache in parts: the keys of every sequence split, a result for each part, to be merged by whoever has them all."""

from __future__ import annotations

import torch

from flexpress.caches.cached import cached_attention
from flexpress.caches.cached_arguments import place_batch
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.cache_checks import CacheTables
from flexpress.inputs.checks import whole
from flexpress.mods import MaskMod, ScoreMod, causal

from ..codegen.mod.captured.tensors import is_recorded
from ..codegen.mod.tracing.capture import plain
from ..codegen.mod.tracing.trace import check_wrapped

MOST_SPLITS = 1 << 16


@compilable
def split_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    splits: int,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    check: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cached_attention to the parts of each sequence: outs (splits, B, Hq, Q_LEN, D_V) in query's dtype and lses float32
    (splits, B, Hq, Q_LEN), all in one call. merge_attention makes the whole of them, also of what several devices have.

        out, lse = merge_attention(*split_attention(q, k_cache, v_cache, kv_len, 4))

    query     (B, Hq, Q_LEN, D_QK)
    splits    1 to 65536. A part has ceil(kv_len / splits) positions of its sequence, the last ones fewer, also none: 0 and lse -inf
    Other arguments, and mods, as for cached_attention, which by itself splits keys where that is faster.

    Raises ValueError or TypeError for arguments, and what cached_attention raises. Method: flash decoding (Dao et al. 2023).
    """
    splits = _checked(splits)
    check_wrapped(score_mod, mask_mod)
    recorded = is_recorded("split_attention", query, k_cache, v_cache)
    tables = CacheTables(kv_len, page_table, cache_loc, q_offset=q_offset, k_scale=k_scale, v_scale=v_scale)
    # errors name a sequence of the caller's: below, each part is one
    place_batch(query, k_cache, v_cache, tables, (q_scale, out_dtype), False if recorded else check)
    B, _, Q_LEN, _ = query.shape
    if page_table is None and cache_loc is None:
        cache_loc = torch.arange(B, dtype=torch.int32, device=query.device)
    first = kv_len - Q_LEN if q_offset is None else q_offset
    share = (kv_len + splits - 1) // splits
    begins = (torch.arange(splits, dtype=torch.int32, device=query.device)[:, None] * share).flatten()
    ends = torch.minimum(begins + share.repeat(splits), kv_len.repeat(splits))
    out, lse = cached_attention(
        query.repeat(splits, 1, 1, 1),
        k_cache,
        v_cache,
        torch.where((begins < ends) | (ends < 0), ends, 0),  # what is negative is to be refused
        page_table=page_table if page_table is None or cache_loc is not None else page_table.repeat(splits, 1),
        cache_loc=None if cache_loc is None else cache_loc.repeat(splits),
        q_offset=first.repeat(splits),
        score_mod=None if score_mod is None else _score_of_parts(score_mod, B),
        mask_mod=_mask_of_parts(causal if mask_mod is None else mask_mod, B, begins),
        scale=scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out_dtype=out_dtype,
        return_lse=True,
        check=check if recorded else False,
    )
    return out.unflatten(0, (splits, B)), lse.unflatten(0, (splits, B))


def _checked(splits) -> int:
    splits = whole("splits", splits, 1)
    if splits > MOST_SPLITS:
        raise ValueError(f"splits is {splits}; it must be at most {MOST_SPLITS}: each is as many sequences as the call has")
    return splits


def _score_of_parts(score_mod: ScoreMod, B: int) -> ScoreMod:
    """Part p of sequence b is number p * B + b."""
    score_mod = plain(score_mod)

    def score_of_parts(score, b, h, q_idx, kv_idx):
        return score_mod(score, b % B, h, q_idx, kv_idx)

    return score_of_parts


def _mask_of_parts(mask_mod: MaskMod, B: int, begins: torch.Tensor) -> MaskMod:
    """Part p of sequence b is number p * B + b. It has no key before where it begins; kv_len says where it ends."""
    mask_mod = plain(mask_mod)

    def mask_of_parts(b, h, q_idx, kv_idx):
        return mask_mod(b % B, h, q_idx, kv_idx) & (kv_idx >= begins[b])

    return mask_of_parts
