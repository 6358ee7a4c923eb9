"""What return_aux tells of the probabilities themselves: entropy, top index, column sums; and the gradients of the first and the last.

No kernel has these gradients. With P the probabilities and S the scores, that of column sums is that of attention to a value of one column,

    <w, column_sums> = sum_i (P w)_i

and entropy is lse less the mean of S, which is the tangent of lse where all scores grow alike: d lse(t S) / dt = sum P S, at t = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexpress.calls.call import attend
from flexpress.calls.derivatives import Attention, Given, added, gradients_of, pushed, second
from flexpress.calls.mapped import ALONE, inputs_of, mapped
from flexpress.calls.problem import Problem
from flexpress.calls.recorded import Recorded
from flexpress.calls.transformed import Transformed
from flexpress.inputs.sinks import before_sinks, read_sinks, sink_shares

from ..codegen.compiling import runs_uncompiled
from ..codegen.gpus import WIDEST_TILE
from ..codegen.mod.captured.levels import one_by_one
from ..codegen.mod.captured.tensors import savable
from ..codegen.mod.graphs.scaled import scaled_graph
from ..codegen.run.call import Bound, ExtraInputs
from ..codegen.run.captured import all_apart
from ..codegen.run.statistics import Statistics, Wanted, statistics

NOT_IN_CONTEXT = (
    "entropy, top_index and column_sums are not known where sequences lie on several devices, with context=: leave them out of return_aux, "
    "or call without"
)
NOTHING, NOTHING_SEEN = Wanted(), Statistics()


def wanted_of(return_aux) -> Wanted:
    """What an AuxRequest asks of the probabilities; torch's asks nothing."""
    return Wanted(*(bool(getattr(return_aux, name, False)) for name in Wanted._fields))


def attend_and_look(call: Bound | Recorded | Transformed, want_max: bool, wanted: Wanted, deterministic: bool) -> tuple:
    """out, lse, max_scores and Statistics of a call, as one tuple, with None for what is not wanted."""
    return *attend(call, want_max, deterministic), *(look(call, wanted, deterministic) if any(wanted) else NOTHING_SEEN)


def look(call: Bound | Recorded | Transformed, wanted: Wanted, deterministic: bool) -> Statistics:
    """What is wanted of the probabilities of a call."""
    if isinstance(call, Recorded):
        return call.look(wanted, deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if isinstance(call, Transformed):
        problem, x, sinks = replace(call.problem, dropout=None, deterministic=deterministic), list(call.tensors), call.sinks
        if call.problem.dropout is not None:
            x.pop()  # the seed: probabilities are those before dropout
    else:
        learned = call.q, call.k, *call.captured, *(() if call.sinks is None else (call.sinks,))
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in learned):
            return statistics(call, wanted)
        if call.score is not None:
            call = call._replace(score=all_apart(call.score))
        if wanted.entropy and call.q.shape[3] > WIDEST_TILE:
            raise NotImplementedError(wide_entropy(call.q))
        problem, (q, k, sinks, *captured), mask_tensors = parts_of_call(call, deterministic)
        x = [q, k, call.v, *captured, *mask_tensors]
    found = iter(Looked.apply(replace(problem, wanted=wanted), *x, sinks))
    return Statistics(*(next(found) if asked else None for asked in wanted))


def wide_entropy(q: torch.Tensor) -> str:
    """Why the entropy of such wide heads has no gradient."""
    return (
        f"the entropy of return_aux has gradients for head dims up to {WIDEST_TILE}, and q and k have {q.shape[3]}: ask for it under "
        "torch.no_grad(), or leave it out"
    )


def parts_of_call(call: Bound, deterministic: bool) -> tuple[Problem, tuple[torch.Tensor | None, ...], list[torch.Tensor]]:
    """Its Problem; q, k, sinks or None, and what score_mod captures; what mask_mod captures."""
    mask_tensors = call.mask[1][: len(call.mask[0].tensors)] if call.mask else []
    problem = Problem.of(call._replace(extras=None), deterministic)  # probabilities are those before dropout
    return problem, (call.q, call.k, call.sinks, *call.captured), mask_tensors


@runs_uncompiled
class Looked(torch.autograd.Function):
    """(problem, q, k, v, what the mods capture, sinks or None) -> those statistics that the problem wants. v has no part in them."""

    @staticmethod
    def forward(problem: Problem, *tensors):
        *x, sinks = tensors
        bound = problem.bound(*x[:3], x[3:])
        if sinks is not None:
            bound = bound._replace(extras=ExtraInputs(read_sinks(sinks.detach(), bound.q.shape[1], bound.q.device)))
        return tuple(t for t in statistics(bound, problem.wanted) if t is not None)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.problem, q, k, _, *others = inputs
        tensors = q, k, None, *others
        ctx.save_for_backward(*map(savable, tensors))
        if ctx.problem.wanted.top_index:
            ctx.mark_non_differentiable(output[int(ctx.problem.wanted.entropy)])
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @one_by_one
    def backward(ctx, *given):
        given = iter(given)
        d_entropy, _, d_sums = (next(given) if asked else None for asked in ctx.problem.wanted)
        inputs, mask_tensors = _inputs_of(ctx.problem, ctx.saved_tensors)
        needs, _ = _inputs_of(ctx.problem, ctx.needs_input_grad[1:])
        of_q, of_k, of_sinks, *others = gradients(ctx.problem, inputs, mask_tensors, d_entropy, d_sums, needs)
        return None, of_q, of_k, None, *others, *(None for _ in mask_tensors), of_sinks

    @staticmethod
    def jvp(ctx, _, *direction):
        inputs, mask_tensors = _inputs_of(ctx.problem, ctx.saved_tensors)
        direction, _ = _inputs_of(ctx.problem, direction)
        ways = [way for way, asked in zip((_entropy_tangent, None, _columns_tangent), ctx.problem.wanted, strict=True) if asked]
        return tuple(None if way is None else way(ctx.problem, inputs, mask_tensors, direction) for way in ways)

    @staticmethod
    def vmap(info, in_dims, problem: Problem, *tensors):
        return mapped(Looked, info, in_dims, problem, None, tensors, [*inputs_of(len(tensors) - 1), ALONE])


def _inputs_of(problem: Problem, tensors) -> tuple[tuple, tuple]:
    """Of what Looked takes, or of something for each of that: q, k, sinks and what score_mod captures; and what mask_mod captures."""
    q, k, _, *others, sinks = tensors
    return (q, k, sinks, *others[: problem.of_score]), tuple(others[problem.of_score :])


def gradients(problem: Problem, inputs, mask_tensors, d_entropy, d_sums, needs) -> list[Given]:
    """Of `inputs`, which are q, k, sinks or None, and captured tensors; None where not needed. d_entropy, d_sums: those of the statistics,
    or None."""
    needs = [needed and t is not None for t, needed in zip(inputs, needs, strict=True)]
    if d_entropy is not None and any(needs) and inputs[0].shape[3] > WIDEST_TILE:
        raise NotImplementedError(wide_entropy(inputs[0]))
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


def _of_columns(problem: Problem, inputs, mask_tensors, d_sums: torch.Tensor, needs: list[bool]) -> list[Given]:
    """Of attention to d_sums as values, which are those of query heads, where every row counts once."""
    q, k, sinks, *captured = inputs
    x = q, _of_query_heads(q, k), d_sums.to(q.dtype).unsqueeze(-1), *captured, *mask_tensors
    out, lse, _, rows = Attention.apply(problem, *x)
    d_out, d_lse, of_sinks = torch.ones_like(out), None, None
    if sinks is not None:
        d_out, d_lse, of_sinks = before_sinks(out, lse, sinks, d_out, None)
    of_q, of_k, _, *others = gradients_of(problem, (out, rows, *x), d_out, d_lse, _needs_of_x(needs, mask_tensors))
    if of_k is not None:
        of_k = of_k.unflatten(1, (k.shape[1], -1)).sum(2)
        of_k = of_k if k.shape[0] == q.shape[0] else of_k.sum(0, keepdim=True)
    return [of_q, of_k, of_sinks, *others[: len(captured)]]


def _of_query_heads(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keys of every query head, of those that several share."""
    return k.expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // k.shape[1], 1)


def _of_entropy(problem: Problem, inputs, mask_tensors, d_entropy: torch.Tensor, needs: list[bool]) -> list[Given]:
    """Of lse with sinks, less the mean of keys' scores and sinks by what each has of the weight."""
    sinks, captured = inputs[2], inputs[3:]
    problem, x, grows, base = _growing(problem, inputs, mask_tensors)
    out, lse, _, rows, _, mean = pushed(problem, x, grows)
    d_lse, d_mean, of_sinks = d_entropy, -d_entropy, None
    if sinks is not None:
        scores, share, of_sink = sink_shares(lse, sinks)
        turned = of_sink * torch.where(of_sink == 0.0, 0.0, mean - (scores - base))  # what the entropy loses as weight goes to the keys
        d_lse, d_mean = d_entropy * share * (1.0 - turned), -d_entropy * share
        of_sinks = (d_entropy * share * turned).sum((0, 2)).to(sinks.dtype)
    empty = lse == float("-inf")
    d_lse, d_mean = d_lse.masked_fill(empty, 0.0), d_mean.masked_fill(empty, 0.0)
    needs = _needs_of_x(needs, x[3 + len(captured) :])
    nothing = torch.zeros_like(out)
    first = gradients_of(problem, (out, rows, *x), nothing, d_lse, needs)
    more, _ = second(problem, x, nothing, d_mean, grows, needs)
    of_q, of_k, _, *others = map(added, first, more)
    return [of_q, of_k, of_sinks, *others[: len(captured)]]


def _growing(problem: Problem, inputs, mask_tensors) -> tuple[Problem, tuple, list[Given], torch.Tensor]:
    """The problem with what scores are above a base of each row times a factor, as forward mode has it; its x, with values of one column,
    and factors, which are 1, and bases behind what score_mod captures; the direction in which factors grow; and bases.

    A base is the row's largest score: of larger numbers the mean would have no digits for what scores differ by."""
    q, k, _, *captured = inputs
    problem = problem.as_pushed()
    graph, numbers = problem.score
    values = k.new_zeros((*k.shape[:3], 1))
    base = Attention.apply(replace(problem, output_max=True), q, k, values, *captured, *mask_tensors)[2]
    base = torch.where(base.isfinite(), base, 0.0)
    factor = torch.ones_like(base)
    x = q, k, values, *captured, factor, base, *mask_tensors
    return replace(problem, score=(scaled_graph(graph), numbers)), x, [factor if t is factor else None for t in x], base


def _needs_of_x(needs: list[bool], behind: Sequence) -> list[bool]:
    """Of q, k, v, captured tensors and those `behind` them, of those of q, k, sinks and captured tensors."""
    return [*needs[:2], False, *needs[3:], *(False for _ in behind)]


def _columns_tangent(problem: Problem, inputs, mask_tensors, direction) -> torch.Tensor:
    """Column sums are the gradient of attention's values, where every row counts once, or what its sink leaves it: this is the tangent."""
    (q, k, sinks, *captured), (q_t, k_t, sinks_t, *captured_t) = inputs, direction
    if all(t is None for t in direction):
        return q.new_zeros((*q.shape[:2], k.shape[2]), dtype=torch.float32)
    keys = _of_query_heads(q, k)
    x = q, keys, q.new_zeros((*keys.shape[:3], 1)), *captured, *mask_tensors
    moves = [q_t, None if k_t is None else _of_query_heads(q, k_t), None, *captured_t, *(None for _ in mask_tensors)]
    of_values = [i == 2 for i in range(len(x))]
    out, lse, _, rows = Attention.apply(problem, *x)
    weights = torch.ones_like(out) if sinks is None else sink_shares(lse, sinks)[1].unsqueeze(-1).to(out.dtype)
    found, (_, lse_t) = second(problem, x, weights, None, moves, of_values)
    if sinks is not None:
        moved = _share_tangent(lse, lse_t, sinks, sinks_t).unsqueeze(-1).to(out.dtype)
        found = map(added, found, gradients_of(problem, (out, rows, *x), moved, None, of_values))
    return list(found)[2].squeeze(-1).float()


def _entropy_tangent(problem: Problem, inputs, mask_tensors, direction) -> torch.Tensor:
    """The mean of what a row's scores are above `base` is the gradient of lse for a factor of that."""
    (q, _, sinks, *captured), (q_t, k_t, sinks_t, *captured_t) = inputs, direction
    if all(t is None for t in direction):
        return q.new_zeros(q.shape[:3], dtype=torch.float32)
    problem, x, grows, base = _growing(problem, inputs, mask_tensors)
    out, lse, _, _, _, mean = pushed(problem, x, grows)
    moves = [q_t, k_t, None, *captured_t, *(None for _ in x[3 + len(captured) :])]
    found, (_, lse_t) = second(problem, x, torch.zeros_like(out), torch.ones_like(lse), moves, [t is not None for t in grows])
    entropy_t = lse_t - found[3 + len(captured)]
    if sinks is not None:
        scores, share, of_sink = sink_shares(lse, sinks)
        gained = torch.where(of_sink == 0.0, 0.0, scores - base - mean)
        entropy_t = share * entropy_t + _share_tangent(lse, lse_t, sinks, sinks_t) * gained
    return entropy_t.masked_fill(lse == float("-inf"), 0.0)


def _share_tangent(lse: torch.Tensor, lse_t: torch.Tensor, sinks: torch.Tensor, sinks_t: Given) -> torch.Tensor:
    """That of the share that keys have of each row's weight."""
    _, share, of_sink = sink_shares(lse, sinks)
    moved = lse_t if sinks_t is None else lse_t - sinks_t.float().view(-1, 1)
    return share * torch.where(of_sink == 0.0, 0.0, of_sink * moved)
