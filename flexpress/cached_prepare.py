"""What precompile_cached has compiled: the kernels of a call of cached_attention, which launches nothing but what makes block lists."""

from __future__ import annotations

from typing import Any

import torch

from flexpress.cached import place_batch, widen
from flexpress.cached_calls import call_of, check_serves
from flexpress.cached_problem import CachedProblem
from flexpress.shared_attention import Together, attend_shared, check_shared, is_possible, may_fill
from flexpress.shared_prefix import SharedPrefix

from .codegen.run.cached import attend_cached


def prepare(
    query,
    k_cache,
    v_cache,
    batch: dict[str, Any],
    of_query: tuple,
    score_mod,
    mask_mod,
    scale,
    batch_invariant: bool,
    sinks: torch.Tensor | None = None,
    shared: SharedPrefix | None = None,
) -> None:
    """Compile what cached_attention launches, and launch nothing but what makes block lists and, with `shared`, what makes its tables and
    merges parts. `batch`: what describes it, by name; `of_query`: q_scale and out_dtype."""
    names = "page_table", "cache_loc", "cu_seqlens_q", "max_q_len", "q_offset", "k_scale", "v_scale"
    described = batch["kv_len"], False, tuple(batch[name] for name in names), of_query
    placed = widen(*place_batch(query, k_cache, v_cache, *described), k_cache, *of_query)
    problem = CachedProblem(*placed, k_cache, v_cache, score_mod, mask_mod, scale, sinks, batch_invariant)

    def compiled(problem: CachedProblem, together: Together | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        call, out, lse = call_of(problem, together)
        check_serves(call)
        if call is not None:
            attend_cached(call, prepare=True)
        return out, lse

    if shared is not None:
        tables = (batch[name] for name in ("kv_len", "page_table", "cache_loc", "cu_seqlens_q", "q_offset"))
        check_shared(shared, query, *tables, k_cache)
    compiled(problem)
    if shared is not None and is_possible(shared, problem):
        for in_tiles in (False, True) if may_fill(problem) else (False,):
            attend_shared(compiled, shared, problem, in_tiles)
