"""A call of cached_attention as kernels take it, of arguments that are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flexpress.caches.cached_mods import causal, causal_from, mask_from, mask_of_rows, of_own_queries, part_of, position_from, score_from
from flexpress.caches.cached_problem import CachedProblem
from flexpress.caches.shared_attention import Together
from flexpress.inputs import checks
from flexpress.inputs.cache_checks import check_no_gradients
from flexpress.inputs.scales import read_scale
from flexpress.inputs.sinks import read_sinks

from ..codegen.device.devices import architecture_of
from ..codegen.device.memory import contiguous
from ..codegen.mod.captured.tensors import read_captured
from ..codegen.mod.graphs.wide import in_wide_integers
from ..codegen.mod.tracing.bind import bind
from ..codegen.run import prefill
from ..codegen.run.cached import serves_long_prompt
from ..codegen.run.cached_call import CachedCall
from ..codegen.run.call import ExtraInputs
from ..codegen.run.launch import Unusable
from ..codegen.run.layouts import output_like
from ..codegen.run.shared_parts import SharedParts

INSTEAD = "train with flex_attention or varlen_attention, or call it under torch.no_grad()"


def call_of(problem: CachedProblem, together: Together | None = None) -> tuple[CachedCall | None, torch.Tensor, torch.Tensor]:
    """The call as kernels take it, or None if there is nothing to compute; out and lse, not filled yet. together: what the sequences attend
    to beside that. Long padded queries are ragged ones of equal lengths where the kernel for Hopper then serves: call.lse is not lse."""
    packed = one_after_another(problem) if together is None else None
    if packed is not None:
        call, _, _ = call_as_it_is(packed)
        if call is not None and serves_long_prompt(call):
            out = output_like(problem.query, call.v.shape[3])
            call.out = out.transpose(1, 2).view(1, *packed.query.shape[:2], -1).transpose(1, 2)
            return call, out, contiguous(out.shape[:-1], torch.float32, out.device)
    return call_as_it_is(problem, together)


def one_after_another(problem: CachedProblem) -> CachedProblem | None:
    """The same call with the queries of all sequences one after another, if each has many that lie so, and they may be added up in any
    order."""
    query = problem.query
    if problem.is_ragged or problem.batch_invariant or query.shape[2] < prefill.LEAST or architecture_of(query.device) != "sm_90":
        return None
    B, _, Q_LEN, _ = query.shape
    if B > 1 and query.stride(0) != Q_LEN * query.stride(2):
        return None
    starts = torch.arange(0, B * Q_LEN + 1, Q_LEN, dtype=torch.int32, device=query.device)
    return replace(problem, query=query.transpose(1, 2).flatten(0, 1), where=replace(problem.where, cu_q=starts, max_q=Q_LEN))


def call_as_it_is(problem: CachedProblem, together: Together | None = None) -> tuple[CachedCall | None, torch.Tensor, torch.Tensor]:
    """The call, and out and lse, with queries as they lie; the rest as for call_of."""
    query, where, q_offset, score_mod, mask_mod = problem.query, problem.where, problem.q_offset, problem.score_mod, problem.mask_mod
    k_cache, v_cache, scale, sinks = problem.k_cache, problem.v_cache, problem.scale, problem.sinks
    if scale is None:
        scale = query.shape[-1] ** -0.5
    else:
        scale, score_mod = scale_of(scale, score_mod, query)
    extras = None
    if sinks is not None:
        extras = ExtraInputs(read_sinks(sinks, query.shape[1], query.device))
        check_sinks_learn_nothing(sinks)
    ragged = problem.is_ragged
    kv_lens: torch.Tensor = where.kv_lens  # type: ignore[assignment]  # a cache has them
    q = query.transpose(0, 1)[None] if ragged else query
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    KV_LEN = k.shape[2] * (1 if where.pages is None else where.pages.shape[1])
    extents = kv_lens.shape[0], q.shape[1], where.max_q if ragged else q.shape[2], KV_LEN
    out, to_fill, lse = _outputs(query, ragged, v.shape[3])
    if out.numel() == 0 or k.shape[0] == 0 or 0 in extents:
        return None, out, lse

    if problem.batch_invariant:
        where = replace(where, invariant=True)
    # else one query a sequence sees all that there is, by kernels that take keys in another order than those with lists
    masked = mask_mod is not None or not problem.sees_all and (where.max_q > 1 or q_offset is not None or where.invariant)
    position = position_from(q_offset, kv_lens, where.cu_q, q.shape[2])

    def by_position(kind: str) -> tuple | None:
        mask = causal if mask_mod is None else mask_mod
        return _bound(score_mod if kind == "score" else mask, kind, q.device, extents)

    def by_number(kind: str) -> tuple | None:
        if kind == "score":
            mod = None if score_mod is None else score_from(part_of(score_mod, kind, q.device, KV_LEN), position)
        elif mask_mod is None:
            mod = causal_from(position, kv_lens) if masked else None
        else:
            own = of_own_queries(position, where.cu_q) if where.invariant and where.cu_q is not None else position
            mod = mask_from(part_of(mask_mod, kind, q.device, KV_LEN), own, kv_lens)
        return _bound(mod, kind, q.device)

    call = CachedCall(q, k, v, to_fill, lse, extents, scale, where, masked, q_offset, checks.DEFAULT, by_position, by_number, extras)
    if together is not None:
        call.shared = _shared_parts(call, together, problem.scale)
    return call, out, lse


def _outputs(query: torch.Tensor, ragged: bool, d_v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, the same as kernels take it, and lse; not filled."""
    lse = contiguous(query.shape[:-1], torch.float32, query.device)
    if not ragged:
        out = output_like(query, d_v)
        return out, out, lse
    out = contiguous((*query.shape[:2], d_v), query.dtype, query.device)
    return out, out.transpose(0, 1)[None], lse


def check_serves(call: CachedCall | None) -> None:
    """Raises Unusable if what sequences attend to together is not for the kernel that reads it."""
    if call is not None and call.shared is not None and (reason := call.shared.refusal()):
        raise Unusable(reason)


def _shared_parts(call: CachedCall, together: Together, scale) -> SharedParts:
    """What the sequences of a call attend to together, as the kernel takes it."""
    score_mod, where, laid, q = together.score_mod, together.where, together.laid, call.q
    if scale is not None:
        _, score_mod = scale_of(scale, score_mod, q)
    rows = laid.token.shape[0]
    extents = where.kv_lens.shape[0], q.shape[1], rows, call.k.shape[2] * where.pages.shape[1]  # type: ignore[union-attr]
    reach = *extents[:3], extents[3] + call.extents[3]  # queries stand behind the rest of their sequence

    def by_position(kind: str) -> tuple | None:
        return _bound(score_mod if kind == "score" else together.mask_mod, kind, q.device, reach)

    def by_number(kind: str) -> tuple | None:
        row = position_from(laid.starts[:-1], where.kv_lens, None, 0)  # type: ignore[arg-type]
        mod = mask_from(mask_of_rows(together.mask_mod, laid.sequence, laid.position), row, where.kv_lens)  # type: ignore[arg-type]
        return _bound(mod, kind, q.device)

    masked, options = together.mask_mod is not None, checks.DEFAULT
    groups = CachedCall(
        *(q, call.k, call.v, call.out, call.lse, extents, call.scale, where, masked, None, options, by_position, by_number, call.extras)
    )
    reached = call.extents[0], call.k.shape[2] * call.cached.pages.shape[1]  # type: ignore[union-attr]
    return SharedParts(groups, laid, together.lay, reached, call.cached.cu_q is not None)


def check_sinks_learn_nothing(sinks: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        check_no_gradients("cached_attention", INSTEAD, sinks=sinks)


def scale_of(scale, score_mod, query) -> tuple[float, Callable | None]:
    if isinstance(scale, torch.Tensor) and torch.is_grad_enabled():
        check_no_gradients("cached_attention", INSTEAD, scale=scale)
    return read_scale(scale, score_mod, query.shape[-1], query.device)


def _bound(mod: Callable | None, kind: str, device: torch.device, extents: tuple[int, ...] | None = None) -> tuple | None:
    """A score_mod's or mask_mod's graph and what it captures, on the call's device.

    extents   (B, H, Q_LEN, KV_LEN) of a mod of positions, of which queries have some among the keys
    """
    if mod is None:
        return None
    bound = bind(mod, kind, device)
    if extents:
        bound = in_wide_integers(bound, (*extents[:2], max(extents[2:]), extents[3]))
    read_captured(bound, device, f"{kind}_mod")
    check_mod_learns_nothing(bound, kind)
    return bound


def check_mod_learns_nothing(bound: tuple | None, kind: str) -> None:
    if bound is None:
        return
    if torch.is_grad_enabled() and any([t.requires_grad for t in bound[1][: len(bound[0].tensors)]]):
        raise NotImplementedError(f"{kind}_mod captures a tensor that requires grad, but cached_attention is not differentiable: {INSTEAD}")
