"""Attention to a cache that is split over ranks by position: each rank attends to what it holds, and the results are merged by lse."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flexpress.caches.cached import cached_attention
from flexpress.caches.cached_mods import mask_behind, score_behind
from flexpress.calls.merge import merge_attention
from flexpress.inputs.sinks import check_sinks, fold_sinks
from flexpress.mods import MaskMod, ScoreMod


def split_cached_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    kv_start: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
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
    batch_invariant: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of queries to sequences whose keys are spread over the ranks of a group. Every rank gets the whole result.

    query            (B, Hq, Q_LEN, D_QK), the same on all ranks
    k_cache, v_cache what this rank holds, as for cached_attention, with its page_table or cache_loc
    kv_len           int32 (B,): how many positions of each sequence this rank holds; 0 for none
    kv_start         int32 (B,): the position of the first of them; where there are none it means nothing
    group            of the ranks; all by default
    q_offset         int32 (B,): the position of each sequence's first query; by default its queries are its last positions
    score_mod, mask_mod   as for cached_attention, told positions in the whole sequence
    Other arguments as for cached_attention.

    Returns out (B, Hq, Q_LEN, D_V) in query's dtype (of float8 queries bfloat16, or out_dtype), and lse, float32 (B, Hq, Q_LEN). What is
    sent is one result for each rank; the host does not wait. What tables and lengths hold is not looked at; nothing outside the cache is
    read. Raises what cached_attention raises.
    """
    if sinks is not None:
        check_sinks(sinks, query.shape[1], query.device)
    if q_offset is None:
        ends = torch.where(kv_len > 0, kv_start + kv_len, 0)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        q_offset = ends - query.shape[2]
    out, lse = cached_attention(
        *(query, k_cache, v_cache, kv_len),
        page_table=page_table,
        cache_loc=cache_loc,
        q_offset=(q_offset - kv_start).to(torch.int32),
        score_mod=None if score_mod is None else score_behind(score_mod, kv_start),
        mask_mod=None if mask_mod is None else mask_behind(mask_mod, kv_start),
        scale=scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
        return_lse=True,
        check=False,  # queries stand after the positions that a rank holds
    )
    mine = torch.cat((out.float(), lse.unsqueeze(-1)), -1)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    merged, lse = merge_attention([part[..., :-1] for part in found], [part[..., -1] for part in found])
    if sinks is not None:  # once, not in each part
        merged, lse = fold_sinks(merged, lse, sinks)
    return merged.to(out.dtype), lse
