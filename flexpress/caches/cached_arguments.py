"""The arguments of cached_attention, checked: as a CachedProblem, or where torch is to see the call as its operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from flexpress.caches.cached_calls import INSTEAD, check_mod_learns_nothing, check_sinks_learn_nothing, scale_of
from flexpress.caches.cached_problem import CachedProblem
from flexpress.caches.shared_attention import check_contents_of, check_shared
from flexpress.calls.probabilities import NOTHING
from flexpress.graphs.bound_mods import bound_mod
from flexpress.graphs.programs import captures_of, mod_program
from flexpress.inputs import checks
from flexpress.inputs.cache_checks import CacheTables, check_batch, check_contents, check_no_gradients, check_positive, looks
from flexpress.inputs.float8 import FLOAT8, check_cached_query, output_dtype, with_query_scale
from flexpress.inputs.sinks import check_sinks

from ..codegen.mod.table.dtypes import dtype_name
from ..codegen.run.call import Cached


def problem_of(query, k_cache, v_cache, tables: CacheTables, of_query: tuple, what: tuple, check, shared_prefix) -> CachedProblem:
    """The call, checked. of_query: q_scale and out_dtype; what: fields of CachedProblem from score_mod on."""
    placed = widen(*place_batch(query, k_cache, v_cache, tables, of_query, check), k_cache, *of_query)
    problem = CachedProblem(*placed, k_cache, v_cache, *what)
    if shared_prefix is not None:
        check_shared(shared_prefix, problem.query, tables, k_cache)
        if looks(check, problem.query):
            check_contents_of(shared_prefix, tables.kv_len, problem.where.pages)  # type: ignore[arg-type]  # check_shared saw some
    return problem


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


def recorded_call(
    query, k_cache, v_cache, tables, of_query, score_mod, mask_mod, scale, batch_invariant, check, sinks, asked=(False, NOTHING)
) -> Callable:
    """For calls that torch is to see: from the queries to out and lse, by the operator. `asked`: for max_scores, and for what of the
    probabilities; with one of them they follow, and None for others."""
    if sinks is not None:
        check_sinks(sinks, query.shape[1], query.device)
        check_sinks_learn_nothing(sinks)
    place_batch(query, k_cache, v_cache, tables, of_query, False)
    scale, score_mod = scale_of(scale, score_mod, query)
    score, mask = bound_mod(score_mod, "score", query.device), bound_mod(mask_mod, "mask", query.device)
    for bound in (score, mask):
        check_mod_learns_nothing(bound, "score" if bound is score else "mask")
    program = mod_program(score, mask, out=of_query[1] and dtype_name(of_query[1])).text()
    captures = captures_of(score, mask)
    names = asked[0], *asked[1]

    def attend(queries: torch.Tensor) -> tuple:
        arguments = (*checks.autocast(queries), k_cache, v_cache, *tables, *captures, scale, batch_invariant, check, program)
        found = torch.ops.flexpress.cached_attention(*arguments, sinks, of_query[0])
        if not any(names):
            return found
        others = torch.ops.flexpress.cached_statistics(*arguments, *names, sinks, of_query[0])
        return *found, *(t if named else None for t, named in zip(others, names, strict=True))

    return attend


def no_autocast(tensor: torch.Tensor):
    """Operators compute in the dtype that they are given, as their fakes say, also under autocast."""
    return torch.autocast(tensor.device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext()
