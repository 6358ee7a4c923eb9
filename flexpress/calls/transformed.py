"""Calls inside transforms of torch.func (grad, vjp, jvp, vmap and what is made of them), and in forward mode: functions of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from flexpress.calls.derivatives import Attention, pushed
from flexpress.calls.packing import places_of_dropout
from flexpress.calls.problem import Problem
from flexpress.calls.recorded import lists_of_mask
from flexpress.inputs import checks
from flexpress.inputs.scales import read_scale
from flexpress.inputs.sinks import check_sinks, fold_sinks
from flexpress.masks.block_lists import leave_out_entries

from ..codegen.mod.captured.levels import untransformed
from ..codegen.mod.captured.tensors import followed
from ..codegen.mod.expr import ModGraph
from ..codegen.mod.tracing.bind import bind_once
from ..codegen.run.call import ExtraInputs


class Transformed(NamedTuple):
    """A call and its tensors: q, k, v, and what score_mod and mask_mod capture; and sinks, which are folded into what comes of these."""

    problem: Problem
    tensors: tuple[torch.Tensor, ...]
    sinks: torch.Tensor | None = None

    def attend(self, output_max: bool, deterministic: bool) -> tuple:
        """out, lse and max_scores (None if they are not wanted)."""
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        problem = replace(self.problem, output_max=output_max, deterministic=deterministic)
        out, lse, max_scores = _attention(problem, self.tensors)
        if self.sinks is not None:
            out, lse = fold_sinks(out, lse, self.sinks)
        return out, lse, max_scores if output_max else None


def _attention(problem: Problem, tensors: tuple[torch.Tensor, ...]) -> tuple:
    """out, lse and max_scores; in one pass with tangents where forward mode is the innermost transform.

    Outside of torch.func tensors may have a tangent and require a gradient at once. The gradient has a tangent then, too, so it must be
    that of what has both.
    """
    innermost = torch._C._functorch.peek_interpreter_stack()
    if innermost is None:
        forward_mode = not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    else:
        forward_mode = innermost.key() == torch._C._functorch.TransformType.Jvp
    forward_mode = forward_mode and forward_ad._current_level >= 0
    duals = [forward_ad.unpack_dual(t) for t in tensors] if forward_mode else []
    if all(dual.tangent is None for dual in duals):
        return Attention.apply(problem, *tensors)[:3]
    out, lse, max_scores, _, out_t, lse_t = pushed(problem, *map(list, zip(*duals, strict=True)))
    return forward_ad.make_dual(out, out_t), forward_ad.make_dual(lse, lse_t), max_scores


def transformed(
    query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod, packed, sinks=None, dropout=None
) -> Transformed:
    """The arguments of flex_attention; `packed` as for call.bound."""
    followed("flex_attention")
    query, key, value = checks.autocast(query, key, value)
    checks.check_tensors(query, key, value, enable_gqa, kinds=False)
    if sinks is not None:
        check_sinks(sinks, query.shape[1], query.device)
    options, lists = checks.parse_options(kernel_options), None
    if block_mask is not None:
        with untransformed():  # lists that are read of a mask now serve other calls, too
            lists, decided, mask_mod = lists_of_mask(block_mask, query, key, mask_mod)
        checks.check_tile_fits_mask(options, lists.q_block, lists.kv_block)
    scale, score_mod = read_scale(scale, score_mod, query.shape[3], query.device)
    score, of_score = _traced(score_mod, "score", query.device)
    mask, of_mask = _traced(mask_mod, "mask", query.device)
    if lists is not None and decided and leave_out_entries(lists, mask[0].symbols, query.shape[:2]):
        lists = None  # mask_mod makes them
    extras, seeds = None, ()
    if dropout is not None:
        with untransformed():
            places = places_of_dropout(packed, query.shape[2], key.shape[2])
        extras, seeds = ExtraInputs(None, dropout.p, None, places), (dropout.seed,)
    problem = Problem(scale, options, score, mask, lists, tuple(packed or ()), dropout=extras)
    return Transformed(problem, (query, key, value, *of_score, *of_mask, *seeds), sinks)


def _traced(mod, kind: str, device: torch.device) -> tuple[tuple[ModGraph, list] | None, list]:
    """A mod's graph with the numbers that it captures, and the tensors."""
    if mod is None:
        return None, []
    graph, values = bind_once(mod, kind, device)
    count = len(graph.tensors)
    return (graph, values[count:]), values[:count]
