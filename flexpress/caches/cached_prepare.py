"""What precompile_cached has compiled: the kernels of a call of cached_attention, which launches nothing but what makes block lists."""

from __future__ import annotations

import torch

from flexpress.caches.cached_arguments import place_batch, widen
from flexpress.caches.cached_calls import call_of, check_serves
from flexpress.caches.cached_problem import CachedProblem
from flexpress.caches.shared_attention import Together, attend_shared, check_shared, is_possible, may_fill
from flexpress.caches.shared_prefix import SharedPrefix
from flexpress.inputs.cache_checks import CacheTables

from ..codegen.run.cached import attend_cached


def prepare(
    query,
    k_cache,
    v_cache,
    tables: CacheTables,
    of_query: tuple,
    score_mod,
    mask_mod,
    scale,
    batch_invariant: bool,
    sinks: torch.Tensor | None = None,
    shared: SharedPrefix | None = None,
) -> None:
    """Compile what cached_attention launches, and launch nothing but what makes block lists and, with `shared`, what makes its tables and
    merges parts. `of_query`: q_scale and out_dtype."""
    placed = widen(*place_batch(query, k_cache, v_cache, tables, of_query, False), k_cache, *of_query)
    problem = CachedProblem(*placed, k_cache, v_cache, score_mod, mask_mod, scale, sinks, batch_invariant)

    def compiled(problem: CachedProblem, together: Together | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        call, out, lse = call_of(problem, together)
        check_serves(call)
        if call is not None:
            attend_cached(call, prepare=True)
        return out, lse

    if shared is not None:
        check_shared(shared, query, tables, k_cache)
    compiled(problem)
    if shared is not None and is_possible(shared, problem):
        for in_tiles in (False, True) if may_fill(problem) else (False,):
            attend_shared(compiled, shared, problem, in_tiles)
