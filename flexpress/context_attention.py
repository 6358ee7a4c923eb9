"""Attention over a sequence that is split over ranks: each attends to its own keys while those of others come, and the partial results are
merged.

What a stage computes is attention as anywhere else. Partial results merge by the statistics of their rows, and the backward pass of a
stage is given those of whole rows, so its gradients are the stage's share (Liu et al. 2023, arXiv 2310.01889). Keys come a second time
for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flexpress.call import bound
from flexpress.context import ContextPlan
from flexpress.context_stages import Stage, score_mod_of, stages_of

from .codegen.compiling import runs_uncompiled
from .codegen.mod.bind import bind
from .codegen.run.backward import backward
from .codegen.run.call import Bound, Rows
from .codegen.run.forward import forward

REMOTE_STAGES = 1  # in which the keys of other ranks come


class Part(NamedTuple):
    """A stage's result. top and weight, float32 (B, Hq, Q_LEN): the largest score, and the log2 of its weight."""

    out: torch.Tensor
    lse: torch.Tensor
    top: torch.Tensor
    weight: torch.Tensor


def attend_in_context(
    plan: ContextPlan, query, key, value, score_mod, scale, enable_gqa: bool, kernel_options, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the queries that this rank holds, of its parts of query, key and value."""
    plan.check_inputs(query, key, value)
    stages = stages_of(plan, REMOTE_STAGES)
    captured = []
    if score_mod is not None:
        graph, values = bind(score_mod_of(plan, score_mod, stages[0].kv_positions), "score")
        captured = values[: len(graph.tensors)]

    def bound_to(stage: Stage, q, k, v) -> Bound:
        mod = score_mod_of(plan, score_mod, stage.kv_positions)
        return bound(q, k, v, mod, stage.mask, scale, enable_gqa, kernel_options, None)

    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return _InContext.apply(plan, stages, bound_to, deterministic, query, key, value, *captured)


@runs_uncompiled
class _InContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: ContextPlan, stages: list[Stage], bound_to: Callable, deterministic: bool, q, k, v, *captured):
        arriving = [stage.gather(k, v, plan.group) for stage in stages[1:]]
        calls, parts = [], []
        for stage, (keys, values) in _in_turn(stages, (k, v), arriving):
            call = bound_to(stage, q, keys, values)
            found, lse, _, rows = forward(call, output_rows=True)
            if rows.raw:
                rows.values.select(-1, 0).mul_(call.scale)
            parts.append(Part(found, lse, *rows.values.unbind(-1)))
            calls.append(call._replace(q=None, k=None, v=None))
        out, lse, rows = merged(parts, calls[0].scale if calls[0].score is None else 1.0) if parts else _nothing(q, v)
        ctx.plan, ctx.stages, ctx.calls, ctx.deterministic = plan, stages, calls, deterministic
        ctx.save_for_backward(q, k, v, out, rows, *captured)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, rows, *captured = ctx.saved_tensors
        wanted = frozenset(i for i, needed in enumerate(ctx.needs_input_grad[7:]) if needed)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        group, stages, calls = ctx.plan.group, ctx.stages, iter(ctx.calls)
        arriving = [stage.gather(k, v, group) for stage in stages[1:]]
        dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
        of_captured = {i: torch.zeros_like(captured[i], dtype=torch.float32) for i in wanted}
        given = {}  # to be returned; a stage without queries has no keys either
        for stage, (keys, values) in _in_turn(stages, (k, v), arriving):
            call = next(calls)._replace(q=q, k=keys, v=values)
            found = backward(call, out, Rows(rows, False), d_out, d_lse, wanted=wanted, deterministic=ctx.deterministic)
            dq += found[0]
            for i in wanted:
                of_captured[i] += found[3][i]
            if stage.rows is None:
                dk += found[1]
                dv += found[2]
            else:
                given[stage] = found[1:3]
        returning = [stage.give_back(*given.get(stage, arrived.pair()), group) for stage, arrived in zip(stages[1:], arriving, strict=True)]
        for stage, gradients in zip(stages[1:], returning, strict=True):
            stage.add(gradients, dk, dv)
        for i in sorted(wanted):
            torch.distributed.all_reduce(of_captured[i], group=group)
        gradients = (g.to(t.dtype) for g, t in ((dq, q), (dk, k), (dv, v)))
        return None, None, None, None, *gradients, *(of_captured[i].to(t.dtype) if i in wanted else None for i, t in enumerate(captured))


def _in_turn(stages: list[Stage], own: tuple, arriving: list):
    """Each stage with something to attend to, with its keys and values when they are there."""
    for stage, arrived in zip(stages, (None, *arriving), strict=True):
        pair = own if arrived is None else arrived.pair()
        if stage.mask is not None:
            yield stage, pair


def _nothing(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `merged` returns of no parts."""
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    return q.new_zeros((*q.shape[:3], v.shape[3])), lse, torch.stack((lse, torch.zeros_like(lse)), -1)


def merged(parts: list[Part], unit: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and the statistics of whole rows, (B, Hq, Q_LEN, 2), of parts. unit: of `top`, which is scores times this."""
    if len(parts) == 1:
        (part,) = parts
        return part.out, part.lse, torch.stack((part.top, part.weight), -1)
    tops = torch.stack([part.top for part in parts])
    scores = torch.where(torch.isneginf(torch.stack([part.lse for part in parts])), -torch.inf, tops * unit)
    best, which = scores.max(0)
    shares = torch.exp2(-torch.stack([part.weight for part in parts])) * torch.exp(scores - best)
    shares = torch.where(torch.isneginf(scores), 0.0, shares)
    total = shares.sum(0)
    fractions = torch.where(total > 0, shares / total, 0.0)
    out = sum(part.out * fraction[..., None] for part, fraction in zip(parts, fractions, strict=True)).to(parts[0].out.dtype)
    rows = torch.stack((tops.gather(0, which[None])[0], torch.where(total > 0, -torch.log2(total), 0.0)), -1)
    return out, best + torch.log(total), rows
