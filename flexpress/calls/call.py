"""A call from top to bottom: arguments, mods, blocks, kernels.

q, k, v, options    checked, once for all that look alike            arguments.py, checks.py
score_mod, mask_mod traced once; what they capture is read anew      codegen/mod/tracing/bind.py
block lists         which blocks of a mask are computed              codegen/run/masks.py
forward             the first kernel that serves; what it needs      codegen/run/forward.py, forward_kernels.py
                      its text: mods lowered into a template         codegen/plan/, codegen/text/, templates/
                      compiled and launched                          codegen/device/, codegen/run/launch.py
backward            from what autograd kept                          autograd.py, codegen/run/backward.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flexpress.calls.arguments import as_before, checked, is_narrow, lists_of_call, read_mask, tells_entries_apart
from flexpress.calls.autograd import differentiable
from flexpress.calls.packing import extras_of_dropout
from flexpress.calls.recorded import Recorded, recorded
from flexpress.calls.transformed import Transformed, transformed
from flexpress.inputs import checks
from flexpress.inputs.dropout import Dropout
from flexpress.inputs.float8 import (
    Quantised,
    as_multiplied,
    check_quantised,
    output_dtype,
    read_scales,
    refuse_gradients,
    refuse_transformed,
)
from flexpress.inputs.scales import read_scale
from flexpress.inputs.sinks import read_sinks
from flexpress.masks.mask_mods import check_made_of

from ..codegen.mod.captured.tensors import are_plain, check_kind, is_transformed, read_captured, readable_inputs, recording
from ..codegen.mod.graphs.wide import in_wide_integers
from ..codegen.mod.tracing.bind import bind
from ..codegen.run.call import Bound, ExtraInputs, Inputs
from ..codegen.run.forward import forward

_autocasts = torch._C._is_any_autocast_enabled
_bound = tuple.__new__  # Bound's own is a function in Python, which is a part of what a call takes


def bound(
    query,
    key,
    value,
    score_mod,
    block_mask,
    scale,
    enable_gqa,
    kernel_options,
    mask_mod,
    packed=None,
    gather=None,
    sinks=None,
    dropout=None,
    quantised=None,
    of_operator=False,
) -> Bound | Recorded | Transformed:
    """The arguments of flex_attention, checked, its mods bound, and its block lists.

    packed   where sequences start among the queries and among the keys, int32 (n + 1,) each, if these are packed sequences
    gather   makes ordinary tensors of those that a bound mod captures, in place, which are told by where they are from
    sinks, dropout, quantised   as files of these names in inputs/ read them
    of_operator   an operator was called, which is below all that records and transforms calls: a Bound is returned
    """
    q, k, v = query, key, value
    inputs = None if _autocasts() else as_before(q, k, v, enable_gqa)
    if inputs is None:
        asked = score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod, packed, sinks, dropout, quantised
        if not of_operator and not are_plain(q, k, v):
            if (unusual := _unusual(q, k, v, asked, gather)) is not None:
                return unusual
            q, k, v = readable_inputs(q, k, v)
        if _autocasts():
            q, k, v = checks.autocast(q, k, v)
        inputs = checked(q, k, v, enable_gqa)
        if inputs is None:
            return recorded(query, key, value, *asked, gather=gather)
    options = checks.DEFAULT if kernel_options is None else checks.parse_options(kernel_options)
    if scale is None:
        scale = inputs.scale
    else:
        scale, score_mod = read_scale(scale, score_mod, inputs.head_dim, inputs.device)
    score = mask = lists = transposed = None
    if score_mod is not None:
        score = _bound_mod(score_mod, "score", inputs, packed)
        if score[1]:
            read_captured(score, inputs.device, "score_mod", gather)
    if block_mask is not None:
        check_made_of(block_mask, mask_mod)
        lists, transposed, mask_mod = read_mask(block_mask, q, k, inputs, options)
    if mask_mod is not None:
        mask = _bound_mod(mask_mod, "mask", inputs, packed)
        if mask[1]:
            read_captured(mask, inputs.device, "mask_mod", gather)
    narrow = mask is not None and is_narrow(mask, inputs, options, block_mask)
    if mask is not None and (lists is None or narrow or tells_entries_apart(mask, lists, inputs, block_mask)):
        make = lists_of_call(inputs, options, packed, narrow, dropout is not None)
        lists, transposed = make(mask), partial(make, transposed=True)
    extras = None if sinks is None and dropout is None else _extras(inputs, packed, sinks, dropout)
    if quantised is not None or inputs.is_float8:
        q, k, v, inputs, extras = _as_multiplied(q, k, v, inputs, quantised, options, lists, extras, score)
    return _bound(Bound, (q, k, v, inputs, scale, score, mask, lists, transposed, options, extras))


def _bound_mod(mod: Callable, kind: str, inputs: Inputs, packed: tuple | None) -> tuple:
    """A mod's graph and what it captures. What is made of mods on sequences holds already (Packing)."""
    found = bind(mod, kind, inputs.device)
    return found if packed else in_wide_integers(found, inputs.extents)


def _extras(inputs: Inputs, packed: tuple | None, sinks: torch.Tensor | None, dropout: Dropout | None) -> ExtraInputs:
    """What changes the softmax, checked."""
    if sinks is not None:
        sinks = read_sinks(sinks, inputs.extents[1], inputs.device)
    if dropout is None:
        return ExtraInputs(sinks)
    return extras_of_dropout(dropout, packed, inputs.extents)._replace(sinks=sinks)


def _unusual(q, k, v, asked: tuple, gather: Callable | None) -> Recorded | Transformed | None:
    """The call, if torch is to see it or transforms it. `asked`: what `recorded` takes behind q, k and v."""
    if recording(q, k, v):
        return recorded(q, k, v, *asked, gather=gather)
    if not is_transformed():
        return None
    refuse_transformed(q)
    return transformed(q, k, v, *asked[:-1])


def _as_multiplied(q, k, v, inputs: Inputs, quantised: Quantised | None, options, lists, extras: ExtraInputs | None, score) -> tuple:
    """q, k and v of float8 as kernels take them, their Inputs, and extras with their scales."""
    if quantised is not None:
        check_quantised(quantised, q, k)
    if extras is not None and extras.seed is not None:
        raise NotImplementedError(f"dropout_p is for training, and query is {q.dtype}, which has no gradients: leave dropout_p out")
    if options.prescale_qk:
        raise ValueError(f"kernel_options['PRESCALE_QK'] would round query, which is {q.dtype}, again: leave it out")
    if torch.is_grad_enabled():
        sinks, scales = extras and extras.sinks, quantised[:3] if quantised else ()
        captured = score[1][: len(score[0].tensors)] if score else ()
        refuse_gradients(q, k, v, sinks, *scales, *captured)
    scales, out = read_scales(quantised), output_dtype(q, quantised and quantised.out_dtype)
    q, k, v = as_multiplied(q, k, v, options, lists.kv_block if lists else 0)
    inputs = checked(q, k, v, inputs.enable_gqa)  # type: ignore[assignment]  # which are on no device "meta"
    if not scales and out == q.dtype:
        return q, k, v, inputs, extras
    return q, k, v, inputs, (extras or ExtraInputs())._replace(scales=scales, out=None if out == q.dtype else out)


def attend(call: Bound | Recorded | Transformed, output_max: bool, deterministic: bool) -> tuple:
    """out, lse and max_scores (None if they are not wanted)."""
    if call.__class__ is not Bound:
        return call.attend(output_max, deterministic)
    try:
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        if torch.is_grad_enabled():
            q, k, v, _, _, score, _, _, _, _, extras = call
            captured = score[1][: len(score[0].tensors)] if score else ()
            learned = (*captured, extras.sinks) if extras and extras.sinks is not None else captured
            if q.requires_grad or k.requires_grad or v.requires_grad or any([t.requires_grad for t in learned]):
                return differentiable(call, output_max, deterministic)
        return forward(call, output_max=output_max, waits=deterministic)[:3]
    except RuntimeError:
        for name, tensor in (("query", call.q), ("key", call.k), ("value", call.v)):  # one whose looks passed, but without address?
            check_kind(name, tensor)
        raise
