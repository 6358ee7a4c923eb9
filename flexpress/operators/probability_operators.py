"""The operators behind what return_aux asks of flex_attention beside lse and max_scores.

    flexpress::probability_statistics     entropy, top index and column sums
    flexpress::probability_gradients      their gradients

Mods come as for the operators in attention_operators.py.
"""

from __future__ import annotations

import torch

from flexpress.calls.probabilities import gradients, parts_of_call
from flexpress.graphs.custom_ops import fake_of, operator_of_mods
from flexpress.graphs.programs import Captures, read_program
from flexpress.operators.attention_operators import call_of, gradient_like, laid_out_as, no_gradients

from ..codegen.device.counters import nothing_kept
from ..codegen.run.meanwhile import is_capturing
from ..codegen.run.statistics import Wanted, statistics

_STATISTICS = torch.float32, torch.int64, torch.float32
_FIRST = 3  # of `wanted`: before captured tensors come query, key and sinks


@operator_of_mods("probability_statistics")
def probability_statistics(
    query: torch.Tensor,
    key: torch.Tensor,
    tensors: list[torch.Tensor],
    ints: list[int],
    floats: list[float],
    lists: list[torch.Tensor],
    scale: float,
    program: str,
    entropy: bool,
    top_index: bool,
    column_sums: bool,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of a call's probabilities; empty where not wanted. Other arguments are those of flex_attention."""
    with torch.no_grad(), nothing_kept():
        call = call_of(query, key, key, Captures(tensors, ints, floats), lists, [], scale, read_program(program), sinks)
        found = statistics(call, Wanted(entropy, top_index, column_sums))
    return tuple(t if t is not None else query.new_empty(0, dtype=dtype) for t, dtype in zip(found, _STATISTICS, strict=True))


@fake_of(probability_statistics)
def _(query, key, tensors, ints, floats, lists, scale, program, entropy, top_index, column_sums, sinks=None):
    rows = query.shape[:3]
    shapes = rows if entropy else (0,), rows if top_index else (0,), (*rows[:2], key.shape[2]) if column_sums else (0,)
    return tuple(query.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, _STATISTICS, strict=True))


@operator_of_mods("probability_gradients")
def probability_gradients(
    d_entropy: torch.Tensor,
    d_sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    tensors: list[torch.Tensor],
    ints: list[int],
    floats: list[float],
    lists: list[torch.Tensor],
    scale: float,
    program: str,
    wanted: list[int],
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The gradients of the `wanted` ones of query (0), key (1), sinks (2) and score_mod's tensors (from 3 on), laid out as these are.

    A gradient that is 0 everywhere is what a compiler gives though nobody wants it. Then nothing is computed, unless a CUDA graph is
    captured, while which nobody can look.
    """
    given = [d if d.numel() and (is_capturing(d.device) or bool(d.any())) else None for d in (d_entropy, d_sums)]
    like = _learned(query, key, tensors, wanted, sinks)
    if given == [None, None]:
        return [gradient_like(t).zero_() for t in like]
    with torch.no_grad(), nothing_kept():
        wishes = read_program(program)
        call = call_of(query, key, key, Captures(tensors, ints, floats), lists, [], scale, wishes, sinks)
        problem, inputs, mask_tensors = parts_of_call(call, wishes.deterministic)
        needs = [i in wanted for i in range(len(inputs))]
        found = [g for g in gradients(problem, inputs, mask_tensors, *given, needs) if g is not None]
    return [laid_out_as(g, t) for g, t in zip(found, like, strict=True)]


@fake_of(probability_gradients)
def _(d_entropy, d_sums, query, key, tensors, ints, floats, lists, scale, program, wanted, sinks=None):
    return [gradient_like(t) for t in _learned(query, key, tensors, wanted, sinks)]


def _learned(query, key, tensors: list, wanted: list[int], sinks) -> list[torch.Tensor]:
    return [(query, key, sinks, *tensors)[i] for i in wanted]


def _refuse(ctx, *_):
    raise NotImplementedError(
        "entropy and column_sums of return_aux are differentiable once where the call is an operator: their gradients have no derivative "
        "there. Detach the gradient, or make the call outside of torch.compile"
    )


probability_gradients.register_autograd(_refuse)


def _keep(ctx, inputs, output) -> None:
    query, key, tensors, ints, floats, lists, scale, program, *_, sinks = inputs
    ctx.save_for_backward(query, key, sinks, *tensors, *lists)
    ctx.count, ctx.others = len(tensors), (ints, floats, scale, program)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, d_entropy, _, d_sums):
    """Of as many inputs as were given: torch leaves out the last ones that have their defaults."""
    query, key, sinks, *others = ctx.saved_tensors
    tensors, lists = others[: ctx.count], others[ctx.count :]
    ints, floats, scale, program = ctx.others
    needs = ctx.needs_input_grad
    of_sinks = needs[11] if len(needs) > 11 else False
    wanted = [i for i, needed in enumerate((*needs[:2], of_sinks, *needs[2])) if needed]
    arguments = query, key, tensors, ints, floats, lists, scale, program, wanted, sinks
    found = dict(zip(wanted, torch.ops.flexpress.probability_gradients(d_entropy, d_sums, *arguments), strict=True))
    of_tensors = [found.get(_FIRST + i) for i in range(len(tensors))]
    none = *map(no_gradients, (ints, floats)), [None] * len(lists), None, None, None, None, None
    return (found.get(0), found.get(1), of_tensors, *none, found.get(2))[: len(needs)]


probability_statistics.register_autograd(_differentiate, setup_context=_keep)
