"""The operators behind the public functions: what torch's compiler, exporter, autograd and counters see of a call.

    flexpress::flex_attention             flex_attention, varlen_attention and the flash functions
    flexpress::flex_attention_backward    its gradients

Those of masks are in mask_operators.py, those of caches in cache_operators.py, those of what else return_aux asks for in
probability_operators.py.

A plain call in eager mode goes past them (recorded.py says which calls do not). Mods come as a program (programs.py) with the tensors
and numbers that they capture, numbers of bool among the ints.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch.utils.flop_counter import register_flop_formula

from flexpress.calls.autograd import ONCE
from flexpress.calls.call import bound
from flexpress.graphs.custom_ops import fake_of, operator_of_mods
from flexpress.graphs.programs import Captures, Program, read_graph_once, read_program
from flexpress.inputs.dropout import Dropout
from flexpress.inputs.float8 import output_dtype, quantised
from flexpress.masks.block_lists import walked_in_every_length
from flexpress.masks.block_mask import BlockMask
from flexpress.masks.mask_lists import ListedMask
from flexpress.masks.mask_mods import noop_mask

from ..codegen.device.counters import nothing_kept
from ..codegen.device.memory import empty
from ..codegen.plan.extras import backward_needs_sinks
from ..codegen.run.backward import backward
from ..codegen.run.block_lists import lists_of
from ..codegen.run.call import Bound, Rows
from ..codegen.run.forward import forward
from ..codegen.run.layouts import strides_like, traced_like


def call_of(
    query,
    key,
    value,
    captures: Captures,
    lists: list,
    starts: list,
    scale: float,
    program: Program,
    sinks=None,
    seed=None,
    scales=(None, None, None),
) -> Bound:
    """The call that an operator was given."""
    lists, starts = [t.contiguous() for t in lists], [t.contiguous() for t in starts]  # hooks of saved tensors may lay them out anew
    score, mask = program.mods(captures, query.device)
    block_mask = None
    if program.lists:
        q_block, kv_block, interior, decided = program.lists
        own, transposed = _halves(lists) if program.transposed else (lists, None)
        made, size, lengths = lists_of(own, q_block, kv_block, interior), (q_block, kv_block), (query.shape[2], key.shape[2])
        if transposed:
            made.transposed[lengths[1]] = lists_of(transposed, q_block, kv_block, interior)
        mask = mask or noop_mask
        if walked_in_every_length(size):
            block_mask = ListedMask(lengths, made, mask, decided)
        else:
            block_mask = BlockMask._made(lengths, made, mask, agrees=decided, cuts=False, fixed=decided)  # what is cut is partial already
        mask = None
    packed = (starts[0], starts[-1]) if starts else None
    return bound(
        query,
        key,
        value,
        score,
        block_mask,
        scale,
        True,
        program.options,
        mask,
        packed,
        sinks=sinks,
        dropout=seed if seed is None else Dropout(program.dropout_p, seed),
        quantised=quantised(*scales, program.out_dtype),
        of_operator=True,
    )


def _halves(lists: list) -> tuple[list, list]:
    """A mask's tables, and the transposed ones behind them."""
    half = len(lists) // 2
    return lists[:half], lists[half:]


@operator_of_mods("flex_attention")
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: list[torch.Tensor],
    ints: list[int],
    floats: list[float],
    lists: list[torch.Tensor],
    starts: list[torch.Tensor],
    scale: float,
    program: str,
    sinks: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, max_scores and what the backward pass needs of every row, float32 (B, Hq, Q_LEN, 2); the last two are empty where the
    program does not want them.

    lists    of a block mask: kv_num_blocks, kv_indices and, if there are, full_kv_num_blocks and full_kv_indices; then, if the program
             says so, the transposed ones
    starts   where packed sequences start, those of queries and, if they differ, of keys
    """
    wanted = read_program(program)
    with nothing_kept():
        scales = q_scale, k_scale, v_scale
        call = call_of(query, key, value, Captures(tensors, ints, floats), lists, starts, scale, wanted, sinks, seed, scales)
        out, lse, max_scores, rows = forward(call, output_max=wanted.max_scores, output_rows=wanted.rows)
    return out, lse, _or_empty(max_scores, query), _or_empty(rows and rows.scaled(call.scale).values, query)


def _or_empty(tensor: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    return empty((0,), (1,), torch.float32, query.device) if tensor is None else tensor


@fake_of(flex_attention)
def _(query, key, value, tensors, ints, floats, lists, starts, scale, program, sinks=None, seed=None, *_):
    wanted = read_program(program)
    statistics = functools.partial(query.new_empty, dtype=torch.float32)
    rows = query.shape[:3]
    return (
        traced_like(query, value.shape[3], output_dtype(query, wanted.out_dtype)),
        statistics(rows),
        statistics(rows if wanted.max_scores else 0),
        statistics((*rows, 2) if wanted.rows else 0),
    )


def no_gradients(numbers: list) -> list | None:
    """Those of an operator's list of numbers: autograd takes empty lists for lists of tensors."""
    return None if numbers else []


@operator_of_mods("flex_attention_backward")
def flex_attention_backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    tensors: list[torch.Tensor],
    ints: list[int],
    floats: list[float],
    lists: list[torch.Tensor],
    starts: list[torch.Tensor],
    scale: float,
    program: str,
    wanted: list[int],
    sinks: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The gradients of query, key and value, of sinks if given, and of the `wanted` ones of score_mod's tensors, laid out as these are."""
    wishes = read_program(program)
    if rows.shape != (*query.shape[:3], 2) or out.shape != (*query.shape[:3], value.shape[3]):
        raise ValueError(
            f"out {tuple(out.shape)} and rows {tuple(rows.shape)} are not what flexpress::flex_attention gives for these inputs"
        )
    with torch.no_grad(), nothing_kept():
        call = call_of(query, key, value, Captures(tensors, ints, floats), lists, starts, scale, wishes, sinks, seed)
        *gradients, of_captured, of_sinks = backward(
            call, out, Rows(rows, False), d_out, d_lse, wanted=frozenset(wanted), deterministic=wishes.deterministic
        )
    found = [*gradients, *([] if sinks is None else [of_sinks]), *(of_captured[i] for i in wanted)]
    return [laid_out_as(g, t) for g, t in zip(found, _learned(query, key, value, sinks, tensors, wanted), strict=True)]


def _learned(query, key, value, sinks, tensors: list, wanted: list[int]) -> list[torch.Tensor]:
    """What gradients are of, in their order."""
    return [query, key, value, *([] if sinks is None else [sinks]), *(tensors[i] for i in wanted)]


def laid_out_as(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient in memory as the fake implementation says."""
    if tensor.ndim == 4 and gradient.stride() == strides_like(tensor, tensor.shape[3]) and gradient.device == tensor.device:
        return gradient
    expected = gradient_like(tensor)
    return gradient if gradient.stride() == expected.stride() and gradient.device == tensor.device else expected.copy_(gradient)


def gradient_like(tensor: torch.Tensor) -> torch.Tensor:
    return traced_like(tensor, tensor.shape[3]) if tensor.ndim == 4 else tensor.new_empty(tensor.shape)


@fake_of(flex_attention_backward)
def _(d_out, d_lse, query, key, value, out, rows, tensors, ints, floats, lists, starts, scale, program, wanted, sinks=None, seed=None):
    return [gradient_like(t) for t in _learned(query, key, value, sinks, tensors, wanted)]


def _refuse(ctx, *_):
    raise NotImplementedError(ONCE)


flex_attention_backward.register_autograd(_refuse)


def _keep(ctx, inputs, output) -> None:
    query, key, value, tensors, ints, floats, lists, starts, scale, program, sinks, seed, *_ = inputs
    out, _, max_scores, rows = output
    ctx.save_for_backward(query, key, value, out, rows, sinks, seed, *tensors, *lists, *starts)
    ctx.counts = len(tensors), len(lists)
    ctx.others = ints, floats, scale, program
    ctx.mark_non_differentiable(max_scores, rows)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_out, d_lse, *_):
    """Of as many inputs as were given: torch leaves out the last ones that have their defaults."""
    query, key, value, out, rows, sinks, seed, *others = ctx.saved_tensors
    captured, listed = ctx.counts
    tensors, lists, starts = others[:captured], others[captured : captured + listed], others[captured + listed :]
    ints, floats, scale, program = ctx.others
    none = [[None] * len(tensors), *map(no_gradients, (ints, floats)), *([None] * len(part) for part in (lists, starts))]
    if d_out is None and d_lse is None:
        return (None, None, None, *none, None, None, None, None, None, None, None)[: len(ctx.needs_input_grad)]
    asked = read_program(program)
    if not asked.rows:  # recorded where nothing wanted a gradient, as in an exported program
        with torch.no_grad():
            arguments = query, key, value, tensors, ints, floats, lists, starts, scale, replace(asked, rows=True).text(), sinks, seed
            *_, rows = torch.ops.flexpress.flex_attention(*arguments)
    # mask_mod's tensors, which come behind those of score_mod, have no gradient
    learned = len(read_graph_once(asked.score).tensors) if asked.score else 0
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3][:learned]) if needed]
    learns = sinks is not None and ctx.needs_input_grad[10]
    needed = sinks if sinks is not None and backward_needs_sinks(learns, scale) else None
    found = torch.ops.flexpress.flex_attention_backward(
        torch.zeros_like(out) if d_out is None else d_out,
        *(d_lse, query, key, value, out, rows, tensors, ints, floats, lists, starts, scale, program, wanted),
        needed,
        seed,
    )
    of_sinks = None if needed is None else found.pop(3)
    for i, gradient in zip(wanted, found[3:], strict=True):
        none[0][i] = gradient
    of_inputs = (g if needed else None for g, needed in zip(found[:3], ctx.needs_input_grad[:3], strict=True))
    return (*of_inputs, *none, None, None, of_sinks if learns else None, None, None, None, None)[: len(ctx.needs_input_grad)]


flex_attention.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.flexpress.flex_attention)
def _(query, key, value, *_, **__):
    """As torch counts scaled_dot_product_attention: every position, masked or not."""
    B, Hq, Q_LEN, D_QK = query
    return 2 * B * Hq * Q_LEN * key[2] * (D_QK + value[3])


@register_flop_formula(torch.ops.flexpress.flex_attention_backward)
def _(d_out, d_lse, query, key, value, *_, **__):
    """Scores, and the gradients of weights, values, queries and keys."""
    B, Hq, Q_LEN, D_QK = query
    return 2 * B * Hq * Q_LEN * key[2] * (3 * D_QK + 2 * value[3])
