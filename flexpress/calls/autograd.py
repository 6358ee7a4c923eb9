"""flex_attention and autograd: what is kept for the backward pass, and the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from flexpress.calls.derivatives import Attention, gradients_of
from flexpress.calls.problem import Problem, dense
from flexpress.inputs.sinks import before_sinks

from ..codegen.compiling import runs_uncompiled
from ..codegen.mod.captured.levels import one_by_one
from ..codegen.mod.captured.tensors import check_values, is_transformed, is_unseen, savable
from ..codegen.mod.captured.watched import are_saved_elsewhere
from ..codegen.mod.graphs.loads import reached_by_gradients
from ..codegen.run.backward import backward, begin
from ..codegen.run.call import Bound, ExtraInputs, Rows, for_backward
from ..codegen.run.captured import all_apart
from ..codegen.run.forward import forward

_NONE: frozenset[int] = frozenset()
ONCE = (
    "flex_attention is differentiable once where torch records it as an operator (torch.compile, dispatch modes), and with context=: these "
    "gradients have no derivative. Call it outside or without them, or detach the gradient"
)


def differentiable(bound: Bound, output_max: bool, deterministic: bool) -> tuple:
    """out, lse and max_scores (or None) of a call of which a gradient is wanted."""
    if bound.score:
        bound = bound._replace(score=all_apart(bound.score))
    return _Attention.apply(bound, output_max, deterministic, bound.q, bound.k, bound.v, bound.sinks, *bound.captured)


class Needed(NamedTuple):
    """Which inputs of _Attention want a gradient."""

    q: bool
    k: bool
    v: bool
    sinks: bool
    captured: tuple[bool, ...]

    @classmethod
    def of(cls, ctx) -> Needed:
        _, _, _, q, k, v, sinks, *captured = ctx.needs_input_grad
        return cls(q, k, v, sinks, tuple(captured))

    @property
    def wanted(self) -> frozenset[int]:
        """The numbers of captured tensors."""
        return frozenset([i for i, needed in enumerate(self.captured) if needed]) if self.captured else _NONE


@runs_uncompiled
class _Attention(torch.autograd.Function):
    """The forward pass, and a backward pass that recomputes the weights from Rows."""

    @staticmethod
    def forward(ctx, bound: Bound, output_max: bool, deterministic: bool, q, k, v, sinks, *captured):
        needed = Needed.of(ctx)
        before = functools.partial(begin, for_backward(bound, needed.sinks), needed.wanted, deterministic)
        elsewhere = are_saved_elsewhere()
        if elsewhere:
            before = functools.partial(_begin_scaled, before)
        out, lse, max_scores, rows = forward(bound, output_max=output_max, output_rows=True, waits=deterministic, before=before)
        _, _, _, inputs, scale, score, mask, lists, transposed, options, extras = bound
        if elsewhere:  # then `raw` would be this pass's, and the values perhaps those of another one, by another kernel
            rows = rows.scaled(scale)
        seed, places = (extras.seed, extras.places) if extras else (None, ())
        ctx.extras = extras and ExtraInputs(dropout_p=extras.dropout_p)
        mask_tensors = mask[1][: len(mask[0].tensors)] if mask else []
        # tensors are saved by autograd, which notices if they are overwritten before the backward pass
        score = score and (score[0], score[1][len(captured) :])
        mask = mask and (mask[0], mask[1][len(mask_tensors) :])
        ctx.kept = inputs, scale, score, mask, lists, transposed, options
        ctx.deterministic, ctx.raw, ctx.provisional, ctx.count = deterministic, rows.raw, rows.provisional, len(captured)
        ctx.count_all = len(captured) + len(mask_tensors)
        saved = q, k, v, out, rows.values, sinks, seed, *captured, *mask_tensors, *places
        ctx.dtypes = [t if t is None else t.dtype for t in saved]
        ctx.save_for_backward(*(map(savable, saved) if extras or captured or mask_tensors else saved))
        ctx.set_materialize_grads(False)
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        return out, lse, max_scores

    @staticmethod
    @one_by_one
    def backward(ctx, d_out, d_lse, _):
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        transformed = False
        if not is_unseen():
            transformed = is_transformed()
            if not transformed:
                check_values("the backward pass of flex_attention")
        saved = ctx.saved_tensors
        if [t if t is None else t.dtype for t in saved] != ctx.dtypes:
            raise TypeError("hooks of saved tensors gave flex_attention's back in other dtypes; they must unpack what was packed")
        q, k, v, out, values, sinks, seed, *others = saved
        sinks = sinks if sinks is None else sinks.contiguous()  # hooks may have laid it out anew
        captured, mask_tensors, places = others[: ctx.count], others[ctx.count : ctx.count_all], others[ctx.count_all :]
        inputs, scale, score, mask, lists, transposed_lists, options = ctx.kept
        score, mask = score and (score[0], [*captured, *score[1]]), mask and (mask[0], [*mask_tensors, *mask[1]])
        extras = ctx.extras
        if extras is not None:
            extras = extras._replace(sinks=sinks, seed=seed, places=tuple([t.contiguous() for t in places]))
        bound = Bound(q, k, v, inputs, scale, score, mask, lists, transposed_lists, options, extras)
        if transformed or torch.is_grad_enabled():
            return None, None, None, *_differentiable(ctx, bound, (d_out, d_lse, out.detach(), values), mask_tensors)
        d_out = torch.zeros_like(out) if d_out is None else dense("gradient of flex_attention's output", d_out)
        d_lse = None if d_lse is None else dense("gradient of flex_attention's lse", d_lse)
        rows, needed = Rows(values, ctx.raw, ctx.provisional), Needed.of(ctx)
        options = {"wanted": needed.wanted, "deterministic": ctx.deterministic, "waits": ctx.deterministic}
        *found, of_captured, of_sinks = backward(for_backward(bound, needed.sinks), out, rows, d_out, d_lse, **options)
        found = [g if wanted else None for g, wanted in zip((*found, of_sinks), needed, strict=False)]
        if captured:
            reached = reached_by_gradients(score[0])
            found += [of_captured.get(i) if i in reached else None for i in range(ctx.count)]
        return None, None, None, *found


def _begin_scaled(before: Callable, out: torch.Tensor, rows: Rows, jobs: list, meanwhile_raw: bool | None = None, **others) -> None:
    """`before`, for a backward pass whose rows are scaled."""
    before(out, rows._replace(raw=False), jobs, None if meanwhile_raw is None else False, **others)


def _differentiable(ctx, bound: Bound, given: tuple, mask_tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients as functions of what they depend on, for create_graph=True and for transforms of torch.func."""
    d_out, d_lse, out, values = given
    if ctx.raw:
        values = values * values.new_tensor([bound.scale, 1.0])
    problem = Problem.of(bound, ctx.deterministic)
    unlearned = [*mask_tensors, *([bound.extras.seed] if problem.dropout else [])]
    x = bound.q, bound.k, bound.v, *bound.captured, *unlearned
    needed, of_sinks = Needed.of(ctx), None
    of_x = [*needed[:3], *needed.captured, *(False for _ in unlearned)]
    if bound.sinks is not None:  # a function of attention without them, of which nothing was kept
        out, lse, _, values = Attention.apply(problem, *x)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_out, d_lse, of_sinks = before_sinks(out, lse, bound.sinks, d_out, d_lse)
    q, k, v, *captured = gradients_of(problem, (out, values, *x), d_out, d_lse, of_x)[: 3 + ctx.count]
    return [q, k, v, of_sinks if needed.sinks else None, *captured]


def once(gradients: list[torch.Tensor | None], inputs: tuple[torch.Tensor | None, ...], words: str = ONCE) -> list[torch.Tensor | None]:
    """Gradients with respect to inputs. With create_graph=True what is made of them must not pass for differentiable: `words` say so."""
    if not torch.is_grad_enabled():
        return gradients
    anchor = next(t for t in inputs if t is not None and t.requires_grad)
    return [g if g is None else Refusing.apply(anchor, g, words) for g in gradients]


@runs_uncompiled
class Refusing(torch.autograd.Function):
    """A tensor as it is, attached to an input that it depends on: a backward pass through it is refused in these words."""

    @staticmethod
    def forward(ctx, anchor, tensor, words: str):
        ctx.words = words
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, _):
        raise NotImplementedError(ctx.words)
