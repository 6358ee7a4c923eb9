"""The operators behind the functions of caches (see operators.py).

flexpress::cached_attention, flexpress::update_cache
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

import flexpress.cached
import flexpress.kv_cache
from flexpress.cache_checks import CacheTables
from flexpress.custom_ops import fake_of, operator_of_mods
from flexpress.float8 import output_dtype
from flexpress.programs import Captures, on_device, read_program

from .codegen.device.counters import nothing_kept
from .codegen.run.layouts import traced_like


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
    asked = read_program(program)
    score, mask = asked.mods(Captures(on_device(query.device, tensors), ints, floats))
    tables = CacheTables(kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    with torch.no_grad(), nothing_kept():
        return flexpress.cached.cached_attention(
            *(query, k_cache, v_cache),
            **{**tables._asdict(), "score_mod": score, "mask_mod": mask, "scale": scale},
            **{"return_lse": True, "batch_invariant": batch_invariant, "check": check, "sinks": sinks},
            **{"q_scale": q_scale, "out_dtype": asked.out_dtype},
        )


_PROGRAM = 10  # its place behind cu_seqlens_q


@fake_of(cached_attention)
def _(query, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, *others):
    lse, program = query.new_empty(query.shape[:-1], dtype=torch.float32), others[_PROGRAM]
    dtype = output_dtype(query, read_program(program).out_dtype)
    if cu_seqlens_q is not None:
        return query.new_empty((*query.shape[:2], v_cache.shape[3]), dtype=dtype), lse
    return traced_like(query, v_cache.shape[3], dtype), lse


@torch.library.custom_op("flexpress::update_cache", mutates_args=("k_cache", "v_cache"))
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
        turned = flexpress.kv_cache.update_cache(
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
