"""Kernels to own: a call of cached_attention, as in decoding, as one file that needs torch, and triton or a C++ compiler, alone."""

from __future__ import annotations

from pathlib import Path

import torch

from flexpress.exporting.export import asked_target, bound_mod, refuse_layout
from flexpress.exporting.exported_files import check_path, write
from flexpress.inputs import checks
from flexpress.inputs.cache_checks import CacheTables, check_batch
from flexpress.inputs.plain_arguments import flag
from flexpress.inputs.sinks import check_sinks
from flexpress.mods import MaskMod, ScoreMod

from ..codegen.device.cache import VERSION
from ..codegen.export.cached import CachedFile, ExportedCache
from ..codegen.export.cached_cpu import CachedCppFile
from ..codegen.export.file import beside
from ..codegen.mod.table.dtypes import dtype_name
from ..codegen.mod.tracing.trace import check_wrapped


def export_cached(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    target: str | None = None,
    path: str | Path | None = None,
    layout: str = "file",
    overwrite: bool = False,
) -> str:
    """The kernels of a call of cached_attention as the text of a Python file that needs torch and triton alone, or, with kernels in C++ for
    CPUs, torch and a C++ compiler: `attention` of the queries of some sequences, their last positions or those that q_offset says, to a
    cache, contiguous or in pages.

        flexpress.export_cached(q, k_pages, v_pages, kv_len, page_table=pages, score_mod=alibi(slopes), path="paged_decode.py")

    query, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, k_scale, v_scale, q_offset, sinks
                as for cached_attention, with query (B, Hq, Q_LEN, D_QK), or (T, Hq, D_QK) with cu_seqlens_q; examples. Which of them
                there are, dtypes, head dims, the size of pages and Hq / Hkv are the file's; the number of sequences, of heads, of
                pages, kv_len and strides are free, but head dims must be contiguous. The tile is chosen for Q_LEN, which is free as
                well, unless it is 1 and there is no mask_mod and no q_offset: such a file is for single queries
    max_q_len   with cu_seqlens_q, the most queries of a sequence, for which the tile is chosen (by default T); free in the file, too
    score_mod, mask_mod, scale, target, path, layout, overwrite
                as for export. Mods see positions in a sequence; by default later keys are hidden

    Returns the text. Raises ValueError, TypeError or NotImplementedError for arguments, ModError for a mod that cannot be traced,
    FileExistsError for what is there already.
    """
    overwrite = flag("overwrite", overwrite)
    check_path(path)
    if page_table is not None and cache_loc is not None:
        raise ValueError("export_cached takes page_table or cache_loc, not both; pass page_table[cache_loc]")
    tables = CacheTables(kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    where, q_offset = check_batch("query", query, k_cache, v_cache, tables)
    _refuse(query, k_cache, v_cache, scale)
    if sinks is not None:
        check_sinks(sinks, query.shape[1], query.device)
    target = asked_target(target, None, query)
    refuse_layout(layout, target)
    if q_offset is where.kv_lens:
        q_offset = q_offset.detach()  # an argument of its own in the file
    (score, of_score), (mask, of_mask) = _mods(score_mod, mask_mod, where.kv_lens, q_offset, where.cu_q, where.max_q, query.device)
    d_qk = query.shape[-1]
    call = ExportedCache(
        *(score, mask, where.kv_lens, q_offset, where.cu_q, "" if sinks is None else dtype_name(sinks.dtype)),
        *(query.dtype, None if k_cache.dtype == query.dtype else k_cache.dtype),
        *(d_qk, v_cache.shape[3], d_qk**-0.5 if scale is None else checks.check_scale(scale, d_qk)),
        target,
        0 if page_table is None else k_cache.shape[1],
        cache_loc is not None,
        where.k_scales is not None,
        query.shape[1] // k_cache.shape[2],
        max(where.max_q, 1),
        (tuple(query.shape), tuple(k_cache.shape), tuple(v_cache.shape), 0 if page_table is None else page_table.shape[1]),
        (of_score, of_mask),
    )
    kind = CachedCppFile if target == "cpu" else CachedFile
    text = beside(lambda reserved: kind(call, VERSION, reserved)).text
    write(text, path, layout, overwrite)
    return text


def _refuse(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale) -> None:
    """Raise for what no exported file takes."""
    if query.shape[1] % k_cache.shape[2]:
        raise ValueError(f"query has {query.shape[1]} heads, no multiple of the {k_cache.shape[2]} heads of k_cache")
    if any(t.stride(-1) != 1 for t in (query, k_cache, v_cache)):
        raise ValueError("exported kernels read contiguous head dims; query, k_cache and v_cache need a stride of 1 in the last dimension")
    if 0 in k_cache.shape:
        raise ValueError(f"k_cache {tuple(k_cache.shape)} holds nothing; pass one that is like those to come")
    if isinstance(scale, torch.Tensor):
        raise TypeError("export_cached takes scale as a number; let the score_mod multiply by a tensor")


def _mods(
    score_mod, mask_mod, kv_len: torch.Tensor, q_offset: torch.Tensor | None, cu_q: torch.Tensor | None, q_len: int, device: torch.device
) -> tuple[tuple, tuple]:
    """The bound mods of the numbers of queries, each with where what it captures comes from."""
    exported_query_length = q_len  # as Q_LEN says

    def position(b, q_idx):
        if q_offset is not None:
            return q_idx + q_offset[b]
        return q_idx + (kv_len[b] - (exported_query_length if cu_q is None else cu_q[b + 1] - cu_q[b]))

    def score(score, b, h, q_idx, kv_idx):
        return score_mod(score, b, h, position(b, q_idx), kv_idx)

    def mask(b, h, q_idx, kv_idx):
        allowed = kv_idx <= position(b, q_idx) if mask_mod is None else mask_mod(b, h, position(b, q_idx), kv_idx)
        return allowed & (kv_idx < kv_len[b])

    check_wrapped(score_mod, mask_mod)
    # one query, the last position, sees all that there is
    masked = mask_mod is not None or q_len > 1 or q_offset is not None or cu_q is not None
    return bound_mod(None if score_mod is None else score, "score", device), bound_mod(mask if masked else None, "mask", device)
