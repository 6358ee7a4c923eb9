"""What return_aux tells of the probabilities themselves: entropy, top index, column sums; and the gradients of the first and the last.

No kernel has these gradients. With P the probabilities and S the scores, that of column sums is that of attention to a value of one column,

    <w, column_sums> = sum_i (P w)_i

and entropy is lse less the mean of S, which is the tangent of lse where all scores grow alike: d lse(t S) / dt = sum P S, at t = 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexpress.autograd import once
from flexpress.derivatives import Attention, added, gradients_of, pushed, second
from flexpress.problem import Problem
from flexpress.sinks import before_sinks, sink_shares

from .codegen.compiling import runs_uncompiled
from .codegen.gpus import WIDEST_TILE
from .codegen.mod.levels import one_by_one
from .codegen.mod.scaled import scaled_graph
from .codegen.run.call import Bound
from .codegen.run.captured import all_apart
from .codegen.run.statistics import Statistics, Wanted, statistics

NOT_OVER_DEVICES = (
    "entropy, top_index and column_sums are not known where keys or heads lie on several devices: leave them out of return_aux, or call "
    "flex_attention with ordinary tensors and without context="
)
NOTHING = Wanted()
LOOKED_ONCE = (
    "entropy and column_sums of return_aux are differentiable once: their gradients have no derivative. Detach the gradient, or compute "
    "what is to be differentiated twice by dense attention"
)


def wanted_of(return_aux) -> Wanted:
    """What an AuxRequest asks of the probabilities; torch's asks nothing."""
    return Wanted(*(bool(getattr(return_aux, name, False)) for name in Wanted._fields))


def look(call, wanted: Wanted, deterministic: bool) -> Statistics:
    """What is wanted of the probabilities of a call, a Bound or a Recorded."""
    if not isinstance(call, Bound):
        return call.look(wanted, deterministic)
    learned = call.q, call.k, *call.captured, *(() if call.sinks is None else (call.sinks,))
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in learned):
        return statistics(call, wanted)
    if call.score is not None:
        call = call._replace(score=all_apart(call.score))
    if wanted.entropy and call.q.shape[3] > WIDEST_TILE:
        raise NotImplementedError(
            f"the entropy of return_aux has gradients for head dims up to {WIDEST_TILE}, and q and k have {call.q.shape[3]}: ask for it "
            "under torch.no_grad(), or leave it out"
        )
    problem, inputs, mask_tensors = parts_of_call(call, deterministic or torch.are_deterministic_algorithms_enabled())
    found = iter(_Looked.apply(call, problem, wanted, mask_tensors, *inputs))
    return Statistics(*(next(found) if asked else None for asked in wanted))


def parts_of_call(call: Bound, deterministic: bool) -> tuple[Problem, tuple[torch.Tensor | None, ...], list[torch.Tensor]]:
    """Its Problem; q, k, sinks or None, and what score_mod captures; what mask_mod captures."""
    mask_tensors = call.mask[1][: len(call.mask[0].tensors)] if call.mask else []
    problem = Problem.of(call._replace(extras=None), deterministic)  # probabilities are those before dropout
    return problem, (call.q, call.k, call.sinks, *call.captured), mask_tensors


@runs_uncompiled
class _Looked(torch.autograd.Function):
    """(a call, its Problem, wanted, what mask_mod captures, q, k, sinks or None, *captured) -> those statistics that are wanted."""

    @staticmethod
    def forward(ctx, call: Bound, problem: Problem, wanted: Wanted, mask_tensors: list, *inputs):
        found = statistics(call, wanted)
        # autograd saves no tensor of inference mode, which has no version
        ctx.save_for_backward(*(t.clone() if t is not None and t.is_inference() else t for t in (*inputs, *mask_tensors)))
        ctx.problem, ctx.wanted, ctx.count = problem, wanted, len(inputs)
        if found.top_index is not None:
            ctx.mark_non_differentiable(found.top_index)
        ctx.set_materialize_grads(False)
        return tuple(t for t in found if t is not None)

    @staticmethod
    @one_by_one
    def backward(ctx, *given):
        given = iter(given)
        d_entropy, _, d_sums = (next(given) if asked else None for asked in ctx.wanted)
        saved = ctx.saved_tensors  # once: hooks of saved tensors may unpack them only so often
        inputs, mask_tensors = saved[: ctx.count], saved[ctx.count :]
        with torch.no_grad():
            found = gradients(ctx.problem, inputs, mask_tensors, d_entropy, d_sums, ctx.needs_input_grad[4:])
        return None, None, None, None, *once(found, inputs, LOOKED_ONCE)


def gradients(problem: Problem, inputs, mask_tensors, d_entropy, d_sums, needs) -> list[torch.Tensor | None]:
    """Of `inputs`, which are q, k, sinks or None, and captured tensors; None where not needed. d_entropy, d_sums: those of the statistics,
    or None."""
    needs = [needed and t is not None for t, needed in zip(inputs, needs, strict=True)]
    if not any(needs) or all(d is None or not d.numel() for d in (d_entropy, d_sums)):
        return [torch.zeros_like(t) if needed else None for t, needed in zip(inputs, needs, strict=True)]
    size, found = None, [None] * len(inputs)
    if inputs[0].dtype == torch.float16:  # which ends at 65504, and whoever trains in it scales the loss
        size = torch.stack([d.abs().amax() for d in (d_entropy, d_sums) if d is not None]).amax().clamp(min=torch.finfo(torch.float32).tiny)
        d_entropy, d_sums = (d if d is None else d / size for d in (d_entropy, d_sums))
    for way, given in ((_of_columns, d_sums), (_of_entropy, d_entropy)):
        if given is not None:
            found = list(map(added, found, way(problem, inputs, mask_tensors, given, needs)))
    if size is not None:
        found = [g if g is None else (g * size).to(g.dtype) for g in found]
    return [g if needed else None for g, needed in zip(found, needs, strict=True)]


def _of_columns(problem: Problem, inputs, mask_tensors, d_sums: torch.Tensor, needs: list[bool]) -> list[torch.Tensor | None]:
    """Of attention to d_sums as values, which are those of query heads, where every row counts once."""
    q, k, sinks, *captured = inputs
    heads = q.shape[1] // k.shape[1]
    keys = k.expand(q.shape[0], -1, -1, -1).repeat_interleave(heads, 1)
    x = q, keys, d_sums.to(q.dtype).unsqueeze(-1), *captured, *mask_tensors
    out, lse, _, rows = Attention.apply(problem, *x)
    d_out, d_lse, of_sinks = torch.ones_like(out), None, None
    if sinks is not None:
        d_out, d_lse, of_sinks = before_sinks(out, lse, sinks, d_out, None)
    of_q, of_k, _, *others = gradients_of(problem, (out, rows, *x), d_out, d_lse, _needs_of_x(needs, mask_tensors))
    if of_k is not None:
        of_k = of_k.unflatten(1, (-1, heads)).sum(2)
        of_k = of_k if k.shape[0] == q.shape[0] else of_k.sum(0, keepdim=True)
    return [of_q, of_k, of_sinks, *others[: len(captured)]]


def _of_entropy(problem: Problem, inputs, mask_tensors, d_entropy: torch.Tensor, needs: list[bool]) -> list[torch.Tensor | None]:
    """Of lse with sinks, less the mean of keys' scores and sinks by what each has of the weight."""
    q, k, sinks, *captured = inputs
    factor, (graph, numbers) = torch.ones((), dtype=torch.float32, device=q.device), problem.as_pushed().score
    problem = replace(problem, score=(scaled_graph(graph), numbers))
    x = q, k, k.new_zeros((*k.shape[:3], 1)), *captured, factor, *mask_tensors
    grows = [torch.ones_like(factor) if t is factor else None for t in x]
    out, lse, _, rows, _, mean = pushed(problem, x, grows)
    d_lse, d_mean, of_sinks = d_entropy, -d_entropy, None
    if sinks is not None:
        scores, share, of_sink = sink_shares(lse, sinks)
        turned = of_sink * torch.where(of_sink == 0.0, 0.0, mean - scores)  # what the entropy loses as weight goes to the keys
        d_lse, d_mean = d_entropy * share * (1.0 - turned), -d_entropy * share
        of_sinks = (d_entropy * share * turned).sum((0, 2)).to(sinks.dtype)
    empty = lse == float("-inf")
    d_lse, d_mean = d_lse.masked_fill(empty, 0.0), d_mean.masked_fill(empty, 0.0)
    needs = _needs_of_x(needs, [factor, *mask_tensors])
    pushed_problem, nothing = problem.as_pushed(), torch.zeros_like(out)
    first = gradients_of(pushed_problem, (out, rows, *x), nothing, d_lse, needs)
    more, _ = second(pushed_problem, x, nothing, d_mean, grows, needs)
    of_q, of_k, _, *others = map(added, first, more)
    return [of_q, of_k, of_sinks, *others[: len(captured)]]


def _needs_of_x(needs: list[bool], behind: list) -> list[bool]:
    """Of q, k, v, captured tensors and those `behind` them, of those of q, k, sinks and captured tensors."""
    return [*needs[:2], False, *needs[3:], *(False for _ in behind)]
