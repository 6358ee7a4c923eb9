"""The operators behind the functions of caches (see attention_operators.py).

flexpress::cached_attention, flexpress::cached_statistics (what return_aux tells), flexpress::update_cache
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from flexpress.caches import cached, kv_cache
from flexpress.caches.cached_arguments import problem_of
from flexpress.caches.cached_probabilities import look_at_cache
from flexpress.graphs.custom_ops import fake_of, operator, operator_of_mods
from flexpress.graphs.programs import Captures, read_program
from flexpress.inputs.cache_checks import CacheTables
from flexpress.inputs.float8 import output_dtype

from ..codegen.device.counters import nothing_kept
from ..codegen.run.layouts import traced_like
from ..codegen.run.statistics import Wanted


@operator_of_mods("cached_attention")
def cached_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    page_table: torch.Tensor | None,
    cache_loc: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_q_len: int | None,
    q_offset: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    tensors: list[torch.Tensor],
    ints: list[int],
    floats: list[float],
    scale: float,
    batch_invariant: bool,
    check: bool | None,
    program: str,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of flexpress.cached_attention, which has the same arguments."""
    tables = CacheTables(kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    arguments = _arguments(query, k_cache, v_cache, tables, Captures(tensors, ints, floats), scale, program, sinks, q_scale)
    with torch.no_grad(), nothing_kept():
        return cached.cached_attention(**arguments, return_lse=True, batch_invariant=batch_invariant, check=check)


def _arguments(query, k_cache, v_cache, tables: CacheTables, captures: Captures, scale: float, program: str, sinks, q_scale) -> dict:
    """Those of flexpress.cached_attention by name."""
    asked = read_program(program)
    score, mask = asked.mods(captures, query.device)
    given = {"query": query, "k_cache": k_cache, "v_cache": v_cache, **tables._asdict(), "scale": scale, "sinks": sinks}
    return {**given, "score_mod": score, "mask_mod": mask, "q_scale": q_scale, "out_dtype": asked.out_dtype}


_PROGRAM = 10  # its place behind cu_seqlens_q


@fake_of(cached_attention)
def _(query, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, *others):
    lse, program = query.new_empty(query.shape[:-1], dtype=torch.float32), others[_PROGRAM]
    dtype = output_dtype(query, read_program(program).out_dtype)
    if cu_seqlens_q is not None:
        return query.new_empty((*query.shape[:2], v_cache.shape[3]), dtype=dtype), lse
    return traced_like(query, v_cache.shape[3], dtype), lse


@operator_of_mods("cached_statistics")
def cached_statistics(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    page_table: torch.Tensor | None,
    cache_loc: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_q_len: int | None,
    q_offset: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    tensors: list[torch.Tensor],
    ints: list[int],
    floats: list[float],
    scale: float,
    batch_invariant: bool,
    check: bool | None,
    program: str,
    max_scores: bool,
    entropy: bool,
    top_index: bool,
    column_sums: bool,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What return_aux tells of flexpress.cached_attention, which has the same arguments; empty where not wanted."""
    tables = CacheTables(kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    given = _arguments(query, k_cache, v_cache, tables, Captures(tensors, ints, floats), scale, program, sinks, q_scale)
    what = (*(given[name] for name in ("score_mod", "mask_mod", "scale", "sinks")), batch_invariant)
    with torch.no_grad(), nothing_kept():
        problem = problem_of(query, k_cache, v_cache, tables, (q_scale, given["out_dtype"]), what, check, None)
        found = look_at_cache(problem, max_scores, Wanted(entropy, top_index, column_sums))
    return tuple(t if t is not None else query.new_empty(0, dtype=dtype) for t, dtype in zip(found, _STATISTICS, strict=True))


_ASKED = 13  # where that begins behind page_table
_STATISTICS = torch.float32, torch.float32, torch.int64, torch.float32


@fake_of(cached_statistics)
def _(query, k_cache, v_cache, kv_len, page_table, *others):
    max_scores, entropy, top_index, column_sums = others[_ASKED : _ASKED + 4]
    rows, room = query.shape[:-1], k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    shapes = [rows if asked else (0,) for asked in (max_scores, entropy, top_index)]
    shapes.append((kv_len.shape[0], query.shape[1], room) if column_sums else (0,))
    return tuple(query.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, _STATISTICS, strict=True))


@operator("update_cache", ("k_cache", "v_cache"))
def update_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    page_table: torch.Tensor | None,
    cache_loc: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_q_len: int | None,
    q_offset: torch.Tensor | None,
    query: torch.Tensor | None,
    rope: torch.Tensor | None,
    interleaved: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    check: bool | None,
    rope_tail: bool = False,
) -> torch.Tensor:
    """flexpress.update_cache, which has the same arguments; empty without query."""
    tables = CacheTables(kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    with torch.no_grad():
        turned = kv_cache.update_cache(
            *(key, value, k_cache, v_cache),
            **{**tables._asdict(), "query": query, "rope": rope, "interleaved": interleaved, "rope_tail": rope_tail, "check": check},
        )
    return key.new_empty(0) if turned is None else turned


@fake_of(update_cache)
def _(key, value, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, query, *_):
    if query is None:
        return key.new_empty(0)
    return torch.empty_like(query if query.stride(-1) == 1 else query.contiguous())


@register_flop_formula(torch.ops.flexpress.cached_attention)
def _(query, k_cache, v_cache, kv_len, page_table, *_, **__):
    """As if each sequence filled its place in the cache."""
    positions = k_cache[1] * (page_table[1] if page_table else 1)
    rows = torch.Size(query[:-1]).numel()
    return 2 * rows * positions * (query[-1] + v_cache[3])
