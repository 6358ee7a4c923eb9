"""Attention of new queries to the keys and values of a cache, contiguous or in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch

from flexpress.caches.cached_arguments import problem_of, recorded_call
from flexpress.caches.cached_calls import call_of, check_serves, check_sinks_learn_nothing, scale_of
from flexpress.caches.cached_probabilities import look_at_cache
from flexpress.caches.cached_problem import CachedProblem
from flexpress.caches.shared_attention import Together, attend_shared, is_worthwhile
from flexpress.caches.shared_prefix import SharedPrefix, SharedTables
from flexpress.calls.return_aux import AuxOutput, AuxRequest, AuxStatistics, asked_for, aux_of, looked, opened, result_of
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.cache_checks import CacheTables
from flexpress.inputs.sinks import read_sinks
from flexpress.mods import MaskMod, ScoreMod

from ..codegen.mod.captured.tensors import is_recorded
from ..codegen.mod.tracing.capture import name_of
from ..codegen.run.cached import attend_cached
from ..codegen.run.profiled import in_range, is_profiled


@overload
def cached_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[False] = False,
    return_aux: None = None,
    batch_invariant: bool = False,
    check: bool | None = None,
    sinks: torch.Tensor | None = None,
    shared_prefix: SharedPrefix | SharedTables | None = None,
) -> torch.Tensor: ...
@overload
def cached_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[True],
    return_aux: None = None,
    batch_invariant: bool = False,
    check: bool | None = None,
    sinks: torch.Tensor | None = None,
    shared_prefix: SharedPrefix | SharedTables | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def cached_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[False] = False,
    return_aux: AuxRequest,
    batch_invariant: bool = False,
    check: bool | None = None,
    sinks: torch.Tensor | None = None,
    shared_prefix: SharedPrefix | SharedTables | None = None,
) -> tuple[torch.Tensor, AuxOutput | AuxStatistics]: ...
@overload
def cached_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    batch_invariant: bool = False,
    check: bool | None = None,
    sinks: torch.Tensor | None = None,
    shared_prefix: SharedPrefix | SharedTables | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput | AuxStatistics]: ...
@compilable(inner=lambda **given: looked(cached_attention, **given), opened=opened, closed=result_of, left_out=("shared_prefix",))
def cached_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    batch_invariant: bool = False,
    check: bool | None = None,
    sinks: torch.Tensor | None = None,
    shared_prefix: SharedPrefix | SharedTables | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput | AuxStatistics]:
    """Attention of the queries of B sequences, prefill or decoding or both, to what a cache holds of each one.

    query         (B, Hq, Q_LEN, D_QK); or with cu_seqlens_q (T, Hq, D_QK), the queries of all sequences one after another. float16,
                  bfloat16, float32, or with such a cache float8_e4m3fn; head dims 1 to 512, D_QK up to 576; under autocast it becomes
                  autocast's dtype first
    k_cache, v_cache   (N, S, Hkv, D_QK) and (N, S, Hkv, D_V): N sequences of up to S positions, or with page_table N pages of S positions.
                  float16, bfloat16, float32 or float8_e4m3fn: what is not query's dtype is converted to it as it is read. Any strides.
                  Of more than 256 columns, values that are a view of the keys, k_cache[..., :D_V], are read once with them
    kv_len        int32 (B,): positions of each sequence that the cache holds, the new ones included; on the device, so it may grow under a
                  CUDA graph. 0 for a sequence that is not there
    page_table    int32 (B, n): the pages that hold a sequence's positions in order; entries past kv_len are never read
    cache_loc     int32 (B,): the sequence's entry in the cache, b by default; with page_table (R, n), its row there. (Each such call
                  makes a table of those rows. For many layers, make it once: page_table[cache_loc].) SequenceInfo.cache_loc is something
                  else, a flat list of pages: pass its page_table here
    cu_seqlens_q  int32 (B + 1,): where each sequence's queries start in query, and their end; lengths may be 0. max_q_len is the largest
                  length or more (how large tiles are follows from it); by default T
    q_offset      int32 (B,): the position of each sequence's first query; by default its queries are its last positions
    score_mod     score_mod(score, b, h, q_idx, kv_idx) with q_idx and kv_idx positions in the sequence, b its number in this batch
    mask_mod      mask_mod(b, h, q_idx, kv_idx); by default kv_idx <= q_idx
    scale         a number, 1 / sqrt(D_QK) by default, or a tensor of one
    k_scale, v_scale   float32 (Hkv,): what caches of float8_e4m3fn are to be multiplied by; by default 1
    q_scale       float32, of one element or (Hkv,): the same of queries of float8_e4m3fn, for the heads that share each head of k_cache
    out_dtype     the output's dtype where query is float8_e4m3fn: bfloat16 by default, float16 or float32
    return_lse    also return lse; return_aux=AuxRequest(lse=True, ...) asks for more, as in flex_attention: column_sums are (B, Hq,
                  positions that a sequence has room for), all else has the shape of lse. For all but lse the keys are read again
    batch_invariant    a sequence's output and lse are bitwise the same whatever else is in the batch (and take longer)
    sinks         (Hq,), a logit for each head, as for flex_attention
    shared_prefix what pool.shared_prefix(sequences, device) says of this batch, or its tables(...), made once a step for all layers
    check         raise ValueError for what tables and scales hold (no place in the cache, lengths that disagree); by default on the CPU

    Returns (B, Hq, Q_LEN, D_V) or (T, Hq, D_V), in query's dtype (or out_dtype); with return_lse also lse, float32, (B, Hq, Q_LEN) or
    (T, Hq). A query with nothing to attend to, and a token after the last sequence, gets 0 and lse -inf.
    Raises ValueError or TypeError for arguments, ModError for a mod that cannot be traced, NotImplementedError for kinds of tensors that
    kernels cannot read and, as there is no backward pass, where gradients are on and a tensor requires grad.

    Unchecked, nothing outside the tensors is read or written, and every row is: kv_len above the cache's room is taken as that room; a
    page outside the cache holds zeros, and an entry outside (cache_loc) zeros or nothing; queries past max_q_len may get 0 and lse -inf,
    and so do tokens that cu_seqlens_q gives to no sequence.

    On Hopper, queries of 512 a sequence or more on average take another kernel: ragged ones, and padded ones that lie one after another in
    memory, as those of one sequence do, or of a transposed (B, Q_LEN, Hq, D_QK). The cache must have query's dtype, of 16 bits, contiguous
    head dims of 33 to 256, and pages of 8, 16, 32, 64 or a multiple of 128 positions; not with batch_invariant. Method: flash decoding (Dao
    et al. 2023), paged attention (Kwon et al. 2023, arXiv 2309.06180).

    With shared_prefix, pages that sequences share are read once for all their queries, each sequence reads the rest, and the two parts are
    merged by lse: the same numbers but for rounding (parts are rounded to query's dtype, and a lse of 1e6 is exact to 0.06). On Hopper,
    where the queries of groups fill half of tiles of 128 or more, and all else is as above, parts are float32 and added up once. It goes
    the usual way where less than 96 MiB and 1.5 a query need not be read again, where sequences have more than 64 queries on average,
    with batch_invariant, for mods with dot products of rows, and where torch records the call. Method: Hydragen (Juravsky et al. 2024,
    arXiv 2402.05099), cascade inference of FlashInfer (Ye et al. 2025, arXiv 2501.01005).
    """
    tables = CacheTables(kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    of_query = q_scale, out_dtype
    asked = max_scores, wanted = asked_for(return_aux, return_lse)
    if is_recorded("cached_attention", query, k_cache, v_cache):
        run = recorded_call(query, k_cache, v_cache, tables, of_query, score_mod, mask_mod, scale, batch_invariant, check, sinks, asked)
        found = run(query)
    else:
        what = score_mod, mask_mod, scale, sinks, batch_invariant
        problem = problem_of(query, k_cache, v_cache, tables, of_query, what, check, shared_prefix)
        found = _attend_all(problem, shared_prefix)
        if max_scores or any(wanted):
            found = *found, *look_at_cache(problem, max_scores, wanted)
    if return_aux is not None:
        _, lse, *others = found
        return found[0], aux_of(return_aux, lse, *(others or (None,)))
    return found if return_lse else found[0]


def attention_after(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | torch.Tensor | None = None,
    check: bool | None = None,
    sinks: torch.Tensor | None = None,
    shared_prefix: SharedPrefix | SharedTables | None = None,
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """cached_attention in two steps, for what writes to the caches in between: a bad argument must not leave them changed. All that it
    raises for arguments is raised here. Returns a function from the queries, which may have been turned, to out and lse."""
    tables, of_query = CacheTables(kv_len, page_table, cache_loc, cu_seqlens_q, k_scale=k_scale, v_scale=v_scale), (None, None)
    if is_recorded("cached_attention", query, k_cache, v_cache):
        return recorded_call(query, k_cache, v_cache, tables, of_query, score_mod, mask_mod, scale, False, check, sinks)
    what = score_mod, mask_mod, scale, sinks
    problem = problem_of(query, k_cache, v_cache, tables, of_query, what, check, shared_prefix)
    dtype = problem.query.dtype  # which autocast may have chosen
    if scale is not None:
        scale_of(scale, None, query)
    if sinks is not None:
        problem.sinks = read_sinks(sinks, query.shape[1], query.device)
        check_sinks_learn_nothing(sinks)

    def attend(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if queries is not query:
            problem.query = queries.to(dtype)
        return _attend_all(problem, shared_prefix)

    return attend


def _attend_all(problem: CachedProblem, shared_prefix) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse: what sequences share is read once where that is worth it."""
    if shared_prefix is not None and is_worthwhile(shared_prefix, problem):
        return attend_shared(_attend, shared_prefix, problem)
    return _attend(problem)


def _of_nothing(problem: CachedProblem, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a call without any keys: queries of a sequence have its sink."""
    out.zero_(), lse.fill_(float("-inf"))
    if problem.sinks is None:
        return out, lse
    if problem.where.cu_q is None:
        return out, lse.copy_(problem.sinks[:, None])
    there = torch.arange(lse.shape[0], device=lse.device) < problem.where.cu_q[-1]
    return out, torch.where(there[:, None], problem.sinks.float(), lse)


def _attend(problem: CachedProblem, together: Together | None = None) -> tuple:
    """out and lse. together: what sequences attend to beside that; raises Unusable if the kernel for it is not."""
    call, out, lse = call_of(problem, together)
    check_serves(call)
    if call is None:
        return _of_nothing(problem, out, lse)
    run = attend_cached
    if is_profiled():
        causal = ["causal"] if call.masked and problem.mask_mod is None else []
        run = in_range(attend_cached, "cached_attention", [*map(name_of, filter(None, (problem.score_mod, problem.mask_mod))), *causal])
    run(call)
    if call.lse is not lse:  # of padded queries that were taken one after another
        lse.copy_(call.lse.view(*lse.transpose(1, 2).shape).transpose(1, 2))
    return out, lse
