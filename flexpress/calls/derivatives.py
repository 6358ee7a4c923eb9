"""Attention and its derivatives as functions that torch can differentiate, push tangents through and map.

    Attention    out, lse, max_scores and rows, of x: q, k, v and the tensors that score_mod captures
    Tangents     these, and the tangents of out and lse in a direction of x: one pass
    Gradients    the gradients of x, of those of out and lse
    Second       the tangents of Gradients in a direction of x, with those of out and lse

Where gradients of a loss <w, out> are differentiated in a direction, the result is the tangent of these gradients, since second derivatives
are symmetric; and the gradient for w is the tangent of out. So four kinds of kernels make all first and second derivatives, in any order
but forward mode over forward mode. Third derivatives are refused.

Every function takes a Problem, perhaps indices, and then tensors, or None. A plain call in eager mode goes past all of this (autograd.py),
as long as nobody asks for a gradient that can be differentiated.
"""

from __future__ import annotations

import math

import torch

from flexpress.calls.mapped import BATCH, inputs_of, mapped
from flexpress.calls.problem import Problem, dense

from ..codegen.compiling import runs_uncompiled
from ..codegen.mod.captured.levels import one_by_one
from ..codegen.run.backward import backward
from ..codegen.run.call import Rows
from ..codegen.run.captured import distinct
from ..codegen.run.forward import forward
from ..codegen.run.tangent import gradient_tangents, tangent

THIRD = (
    "flex_attention has first and second derivatives, and this would be a third, or forward mode over forward mode; the entropy of "
    "return_aux has a first one. Use dense attention for it; for second derivatives forward over reverse mode (torch.func.hessian, jvp "
    "of grad)"
)

Given = torch.Tensor | None


@runs_uncompiled
class Attention(torch.autograd.Function):
    """(problem, q, k, v, *captured) -> out, lse, max_scores, rows. The last two have no derivative; max_scores is empty if unwanted."""

    @staticmethod
    def forward(problem: Problem, q, k, v, *captured):
        bound = problem.bound(q, k, v, captured)
        out, lse, max_scores, rows = forward(bound, output_max=problem.output_max, output_rows=True)
        return out, lse, _or_empty(max_scores, out), rows.scaled(bound.scale).values

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.problem, *tensors = inputs
        out, _, max_scores, rows = output
        ctx.save_for_backward(out, rows, *tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(max_scores, rows)
        ctx.set_materialize_grads(False)

    @staticmethod
    @one_by_one
    def backward(ctx, d_out, d_lse, *_):
        found = gradients_of(ctx.problem, ctx.saved_tensors, d_out, d_lse, ctx.needs_input_grad[1:])
        return None, *found

    @staticmethod
    def jvp(ctx, _, *direction):
        found = pushed(ctx.problem, ctx.saved_tensors, direction)
        return found[4], found[5], None, None

    @staticmethod
    def vmap(info, in_dims, problem: Problem, *tensors):
        return mapped(Attention, info, in_dims, problem, None, tensors, inputs_of(len(tensors)))


@runs_uncompiled
class Tangents(torch.autograd.Function):
    """(problem, q, k, v, *captured, and the tangents of all these, or None) -> as Attention, and the tangents of out and lse."""

    @staticmethod
    def forward(problem: Problem, *tensors):
        x, direction = _halves(tensors)
        bound = problem.bound(*x[:3], x[3:])
        moves = problem.direction(bound, direction)
        found = tangent(bound, moves, output_max=problem.output_max, output_rows=True)
        return found.out, found.lse, _or_empty(found.max_scores, found.out), found.rows, found.out_tangent, found.lse_tangent

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.problem, *tensors = inputs
        out, _, max_scores, rows, *_ = output
        ctx.save_for_backward(out, rows, *tensors)
        ctx.mark_non_differentiable(max_scores, rows)
        ctx.set_materialize_grads(False)

    @staticmethod
    @one_by_one
    def backward(ctx, d_out, d_lse, _, __, d_out_t, d_lse_t):
        out, rows, *tensors = ctx.saved_tensors
        x, direction = _halves(tensors)
        needs_x, needs_direction = _halves(ctx.needs_input_grad[1:])
        found = gradients_of(ctx.problem, (out, rows, *x), d_out, d_lse, needs_x)
        of_direction = gradients_of(ctx.problem, (out, rows, *x), d_out_t, d_lse_t, needs_direction)
        if (d_out_t is not None or d_lse_t is not None) and any(needs_x):
            d_out_t = torch.zeros_like(out) if d_out_t is None else d_out_t
            more, _ = second(ctx.problem, x, d_out_t, d_lse_t, direction, needs_x)
            found = [added(a, b) for a, b in zip(found, more, strict=True)]
        return None, *found, *of_direction

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(THIRD)

    @staticmethod
    def vmap(info, in_dims, problem: Problem, *tensors):
        return mapped(Tangents, info, in_dims, problem, None, tensors, inputs_of(len(tensors) // 2) * 2)


@runs_uncompiled
class Gradients(torch.autograd.Function):
    """(problem, wanted, d_out, d_lse or None, out, rows, q, k, v, *captured) -> the gradients of q, k, v and of the `wanted` captured
    tensors. out and rows are what Attention gives for x, and no further inputs."""

    INPUTS = 4  # where q is among the tensors

    @staticmethod
    def forward(problem: Problem, wanted: tuple[int, ...], d_out, d_lse, out, rows, q, k, v, *captured):
        captured = _distinct(captured, wanted)
        bound = problem.bound(q, k, v, captured)
        d_out, d_lse = map(_plain, (d_out, d_lse))
        options = {"wanted": frozenset(wanted), "deterministic": problem.deterministic}
        *found, of_captured, _ = backward(bound, out.detach(), Rows(rows.detach(), False), d_out, d_lse, **options)
        return *found, *(of_captured[i].to(captured[i].device) for i in wanted)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.problem, ctx.wanted, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @one_by_one
    def backward(ctx, *direction):
        d_out, d_lse, _, _, *x = ctx.saved_tensors
        needs_out, needs_lse, _, _, *needs = ctx.needs_input_grad[2:]
        direction = _direction(direction, ctx.wanted, len(x))
        if all(t is None for t in direction):
            return (None,) * (6 + len(x))
        if any(needs):
            found, (out_t, lse_t) = second(ctx.problem, x, d_out, d_lse, direction, needs)
        else:
            found, (*_, out_t, lse_t) = [None] * len(x), pushed(ctx.problem, x, direction)
        return None, None, out_t if needs_out else None, lse_t if needs_lse else None, None, None, *found

    @staticmethod
    def jvp(ctx, _, __, d_out_t, d_lse_t, out_t, rows_t, *direction):
        d_out, d_lse, out, rows, *x = ctx.saved_tensors
        kept = [True, True, True, *(i in ctx.wanted for i in range(len(x) - 3))]
        found = gradients_of(ctx.problem, (out, rows, *x), d_out_t, d_lse_t, kept)
        if any(t is not None for t in direction):
            more, _ = second(ctx.problem, x, d_out, d_lse, direction, kept)
            found = [added(a, b) for a, b in zip(found, more, strict=True)]
        return tuple(t for t, keep in zip(found, kept, strict=True) if keep)

    @staticmethod
    def vmap(info, in_dims, problem: Problem, wanted, *tensors):
        return mapped(Gradients, info, in_dims, problem, wanted, tensors, [BATCH] * 4 + inputs_of(len(tensors) - 4))


@runs_uncompiled
class Second(torch.autograd.Function):
    """(problem, wanted, d_out, d_lse or None, q, k, v, *captured, and a direction of x) -> the tangents of the gradients of q, k, v and of
    the `wanted` captured tensors, and those of out and lse."""

    INPUTS = 2  # where q is among the tensors

    @staticmethod
    def forward(problem: Problem, wanted: tuple[int, ...], d_out, d_lse, *tensors):
        x, direction = _halves(tensors)
        x = (*x[:3], *_distinct(x[3:], wanted))
        bound = problem.bound(*x[:3], x[3:])
        d_out, d_lse = map(_plain, (d_out, d_lse))
        *found, of_captured, out_t, lse_t = gradient_tangents(
            bound, problem.direction(bound, direction), d_out, d_lse, wanted=frozenset(wanted), deterministic=problem.deterministic
        )
        return *found, *(of_captured[i].to(x[3 + i].device) for i in wanted), out_t, lse_t

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.like = [(t.shape, t.dtype, t.device) for t in output]

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(THIRD)

    @staticmethod
    def jvp(ctx, *_):
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError(THIRD)
        # A backward pass through tangents, inside of the dual_level that they are of: torch asks for tangents of its gradients, which
        # nobody may want.
        return tuple(torch.full(shape, math.nan, dtype=dtype, device=device) for shape, dtype, device in ctx.like)

    @staticmethod
    def vmap(info, in_dims, problem: Problem, wanted, *tensors):
        return mapped(Second, info, in_dims, problem, wanted, tensors, [BATCH] * 2 + inputs_of(len(tensors) // 2 - 1) * 2)


def pushed(problem: Problem, x, direction) -> tuple:
    """What Tangents gives. Its kernel's rows are of scores with scale; those that backward kernels take are so where there is a
    score_mod."""
    return Tangents.apply(problem.as_pushed(), *x, *direction)


def second(problem: Problem, x, d_out, d_lse, direction, needs) -> tuple[list[Given], tuple]:
    """What Second gives: for x, None where not needed, and the tangents of out and lse."""
    wanted = _learned(problem, needs)
    *found, out_t, lse_t = Second.apply(problem, wanted, d_out, d_lse, *x, *direction)
    return _spread(found, wanted, needs), (out_t, lse_t)


def gradients_of(problem: Problem, saved, d_out, d_lse, needs) -> list[Given]:
    """The gradients of x, None where not needed. saved: out, rows and x."""
    out, rows, *x = saved
    if (d_out is None and d_lse is None) or not any(needs):
        return [None] * len(x)
    wanted = _learned(problem, needs)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    return _spread(Gradients.apply(problem, wanted, d_out, d_lse, out, rows, *x), wanted, needs)


def _learned(problem: Problem, needs) -> tuple[int, ...]:
    """Which captured tensors get a gradient: of those that need one, score_mod's. What mask_mod captures has none."""
    count = len(problem.score[0].tensors) if problem.score else 0
    return tuple(i for i, needed in enumerate(needs[3 : 3 + count]) if needed)


def _spread(found, wanted: tuple[int, ...], needs) -> list[Given]:
    """Gradients of q, k, v and the `wanted` captured tensors, at their places among x."""
    of_inputs = [g if needed else None for g, needed in zip(found[:3], needs[:3], strict=True)]
    return [*of_inputs, *_direction(found, wanted, len(needs))[3:]]


def _direction(found, wanted: tuple[int, ...], count: int) -> list[Given]:
    """What there is for q, k, v and the `wanted` captured tensors, as something for each of the `count` tensors of x."""
    at = dict(zip(wanted, found[3:], strict=True))
    return [*found[:3], *(at.get(i) for i in range(count - 3))]


def _halves(tensors) -> tuple[tuple, tuple]:
    half = len(tensors) // 2
    return tuple(tensors[:half]), tuple(tensors[half:])


def added(a: Given, b: Given) -> Given:
    """Their sum; None is 0."""
    return b if a is None else a if b is None else a + b


def _or_empty(tensor: Given, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((like.shape[0], 0), dtype=torch.float32) if tensor is None else tensor


def _plain(gradient: Given) -> Given:
    return gradient if gradient is None else dense("gradient of flex_attention's output", gradient).detach()


def _distinct(captured, wanted: tuple[int, ...]) -> tuple:
    return tuple(distinct(t.detach()) if i in wanted else t for i, t in enumerate(captured))
