"""Attention of new queries to the keys and values of a cache, contiguous or in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch

from flexpress import checks
from flexpress.cache_checks import CacheTables, check_batch, check_contents, check_no_gradients, check_positive, looks
from flexpress.cached_calls import INSTEAD, call_of, check_mod_learns_nothing, check_serves, check_sinks_learn_nothing, scale_of
from flexpress.cached_problem import CachedProblem
from flexpress.float8 import FLOAT8, check_cached_query, output_dtype, with_query_scale
from flexpress.in_graph import compilable
from flexpress.mods import MaskMod, ScoreMod
from flexpress.programs import captures_of, mod_program
from flexpress.recorded import bound_mod
from flexpress.shared_attention import Together, attend_shared, check_contents_of, check_shared, is_worthwhile
from flexpress.shared_prefix import SharedPrefix, SharedTables
from flexpress.sinks import check_sinks, read_sinks

from .codegen.mod.capture import name_of
from .codegen.mod.dtypes import dtype_name
from .codegen.mod.tensors import is_recorded
from .codegen.run.cached import attend_cached
from .codegen.run.call import Cached
from .codegen.run.profiled import in_range, is_profiled


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
    return_lse: bool = False,
    batch_invariant: bool = False,
    check: bool | None = None,
    sinks: torch.Tensor | None = None,
    shared_prefix: SharedPrefix | SharedTables | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@compilable(left_out=("shared_prefix",))
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
    batch_invariant: bool = False,
    check: bool | None = None,
    sinks: torch.Tensor | None = None,
    shared_prefix: SharedPrefix | SharedTables | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
    return_lse    also return lse
    batch_invariant    a sequence's result is bitwise the same whatever else is in the batch (and takes longer)
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
    if is_recorded("cached_attention", query, k_cache, v_cache):
        run = _recorded(query, k_cache, v_cache, tables, of_query, score_mod, mask_mod, scale, batch_invariant, check, sinks)
        found = run(query)
    else:
        what = score_mod, mask_mod, scale, sinks, batch_invariant
        found = _attend_all(_problem(query, k_cache, v_cache, tables, of_query, what, check, shared_prefix), shared_prefix)
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
        return _recorded(query, k_cache, v_cache, tables, of_query, score_mod, mask_mod, scale, False, check, sinks)
    what = score_mod, mask_mod, scale, sinks
    problem = _problem(query, k_cache, v_cache, tables, of_query, what, check, shared_prefix)
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


def _problem(query, k_cache, v_cache, tables: CacheTables, of_query: tuple, what: tuple, check, shared_prefix) -> CachedProblem:
    """The call, checked. of_query: q_scale and out_dtype; what: fields of CachedProblem from score_mod on."""
    placed = widen(*place_batch(query, k_cache, v_cache, tables, of_query, check), k_cache, *of_query)
    problem = CachedProblem(*placed, k_cache, v_cache, *what)
    if shared_prefix is not None:
        check_shared(shared_prefix, problem.query, tables, k_cache)
        if looks(check, problem.query):
            check_contents_of(shared_prefix, tables.kv_len, problem.where.pages)  # type: ignore[arg-type]  # check_shared saw some
    return problem


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


def _recorded(query, k_cache, v_cache, tables, of_query, score_mod, mask_mod, scale, batch_invariant, check, sinks) -> Callable:
    """For calls that torch is to see: from the queries to out and lse, by the operator."""
    if sinks is not None:
        check_sinks(sinks, query.shape[1], query.device)
        check_sinks_learn_nothing(sinks)
    place_batch(query, k_cache, v_cache, tables, of_query, False)
    scale, score_mod = scale_of(scale, score_mod, query)
    score, mask = bound_mod(score_mod, "score", query.device), bound_mod(mask_mod, "mask", query.device)
    for bound in (score, mask):
        check_mod_learns_nothing(bound, "score" if bound is score else "mask")
    program = mod_program(score, mask, out=of_query[1] and dtype_name(of_query[1])).text()
    return lambda queries: torch.ops.flexpress.cached_attention(
        *(*checks.autocast(queries), k_cache, v_cache, *tables, *captures_of(score, mask)),
        *(scale, batch_invariant, check, program, sinks, of_query[0]),
    )


def place_batch(query, k_cache, v_cache, tables: CacheTables, of_query: tuple, check) -> tuple[torch.Tensor, Cached, torch.Tensor | None]:
    """query as kernels read it, where the sequences are, and q_offset; all checked."""
    if torch._C._is_any_autocast_enabled():
        (query,) = checks.autocast(query)
    where, q_offset = check_batch("query", query, k_cache, v_cache, tables, of_query, check_cached_query, check)
    if query.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} has {query.shape[1]} heads, no multiple of the {k_cache.shape[2]} heads of k_cache "
            f"{tuple(k_cache.shape)}"
        )
    if torch.is_grad_enabled():
        tensors = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "q_scale": of_query[0]}
        check_no_gradients("cached_attention", INSTEAD, **tensors, k_scale=tables.k_scale, v_scale=tables.v_scale)
    if looks(check, query):
        check_contents(query, k_cache, where, q_offset)
        check_positive("q_scale", of_query[0])
    return query.resolve_neg() if query.is_neg() else query, where, q_offset


def widen(query, where: Cached, q_offset, k_cache, q_scale, out_dtype) -> tuple[torch.Tensor, Cached, torch.Tensor | None]:
    """What was placed, with queries of float8 in the output's dtype, which holds their numbers: kernels convert the cache to it."""
    if query.dtype != FLOAT8:
        return query, where, q_offset
    return query.to(output_dtype(query, out_dtype)), with_query_scale(where, q_scale, k_cache.shape[2]), q_offset


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
