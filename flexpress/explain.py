"""Which kernels a call gets, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import flex_attention as torchs

from flexpress.calls.call import bound
from flexpress.calls.packed_call import check_no_block_mask, packed_call
from flexpress.inputs.checks import check_are_tensors
from flexpress.inputs.dropout import read_dropout
from flexpress.inputs.float8 import quantised, refuse_float8_over_devices
from flexpress.inputs.plain_arguments import flag
from flexpress.mods import MaskMod, ScoreMod

from .codegen.compiling import runs_uncompiled
from .codegen.mod.captured.tensors import check_values, is_distributed
from .codegen.mod.tracing.bind import why_every_call
from .codegen.plan.candidates import Choice
from .codegen.run import backward, forward
from .codegen.run.call import Bound, for_backward, keys_of
from .codegen.run.forward_kernels import leaves_raw
from .codegen.run.layouts import with_rows


@runs_uncompiled
def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    deterministic: bool = False,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> str:
    """Which kernels flex_attention, or with cu_seqlens_q varlen_attention, chooses for these arguments, and why not those that come first:
    a line each for forward and backward.

        forward   HOPPER; not DECODE: query has 4096 positions, more than 16
        backward  PORTABLE; not HOPPER: deterministic: programs add to dQ in any order

    "HOPPER" are the kernels for sm_90 alone, "PORTABLE" those for any device, "DECODE" the one for few queries, "CPP" those for CPUs, in
    C++. The arguments are those of flex_attention, or of varlen_attention, except context, return_lse and return_aux. There is a line for
    the backward pass where a tensor wants a gradient (requires_grad), a captured one or sinks, too.
    Where a kernel is still being compiled beside the program, and one that compiles fast serves meanwhile, its line says so.
    A mod that has to be traced at every call, which takes some tenths of a millisecond, has a line that says why.
    Nothing is compiled or run but what a mask_mod's block lists need; that a kernel spills too many registers, or does not compile, is
    known only after the first call.

    Raises what flex_attention raises.
    """
    enable_gqa, deterministic = flag("enable_gqa", enable_gqa), flag("deterministic", deterministic)
    arguments = query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod
    check_are_tensors(query=query, key=key, value=value)
    dropout = read_dropout(dropout_p, dropout_seed, query.device)
    float8 = quantised(q_scale, k_scale, v_scale, out_dtype)
    if is_distributed(query):
        from flexpress.distributed.dtensors import bound_shard  # imports torch's module, which takes long

        refuse_float8_over_devices(query, float8)
        _, call = bound_shard(*arguments, sinks, dropout)
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_values("explain", query=query, key=key, value=value)
        check_no_block_mask(block_mask)
        of_tokens, extras = (query, key, value, cu_seqlens_q, cu_seqlens_k), {"sinks": sinks, "dropout": dropout, "quantised": float8}
        call = packed_call(*of_tokens, score_mod, mask_mod, scale, kernel_options, **extras)  # type: ignore[assignment]
    else:
        check_values("explain", query=query, key=key, value=value)
        # of tensors with values it is no Recorded
        call = bound(*arguments, sinks=sinks, dropout=dropout, quantised=float8)  # type: ignore[assignment]
    lines, interpreted = _choices(call, deterministic)
    lines += _traced_at_every_call(score_mod, getattr(block_mask, "mask_mod", None) if mask_mod is None else mask_mod)
    if interpreted:
        lines.append("on the CPU these kernels run in Triton's interpreter, for tests")
    return "\n".join(lines)


def _choices(call: Bound, deterministic: bool) -> tuple[list[str], bool]:
    """A line for the forward pass and, if there may be one, for the backward pass; are kernels for GPUs interpreted?"""
    keys = keys_of(call.score, call.mask, call.inputs.extents, call.lists)
    sinks = call.sinks
    learned = (call.q, call.k, call.v, *call.captured, *(() if sinks is None else (sinks,)))
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in learned)
    choice, seen = forward.choice_of(call, keys, output_rows=differentiable)
    awaited = forward.is_awaited(choice, seen)
    lines = [_line("forward", choice, awaited)]
    if differentiable:
        later, raw = for_backward(call, sinks is not None and sinks.requires_grad), leaves_raw(choice.candidate, seen)
        chosen, itself_awaited = _backward_choice(later, keys, raw, deterministic)
        lines.append(_line("backward", chosen, awaited or itself_awaited))
    return lines, seen.arch == "cpu" and choice.candidate.name != "CPP"


def _backward_choice(call: Bound, keys: tuple, raw: bool, deterministic: bool) -> tuple[Choice, bool]:
    """With whether it is on its way. raw: as of Rows. The output's gradient is taken to lie as query does."""
    wanted = frozenset(i for i, t in enumerate(call.captured) if t.requires_grad)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    details = backward.details_of(call, raw, False, wanted, deterministic)
    q, k, v = map(with_rows, call[:3])
    choice, seen = backward.choice_of((q, k, v, q), call.scale, keys, None if call.lists is None else call.lists.blocks, details)
    return choice, backward.is_awaited(choice, seen)


def _line(what: str, choice: Choice, awaited: bool) -> str:
    return f"{what:<9} {choice.reasons}{'; being compiled, a portable one serves meanwhile' if awaited else ''}"


def _traced_at_every_call(score_mod: Callable | None, mask_mod: Callable | None) -> Iterator[str]:
    """A line for each that is."""
    for name, mod, kind in (("score_mod", score_mod, "score"), ("mask_mod", mask_mod, "mask")):
        reason = mod is not None and why_every_call(mod, kind)
        if reason:
            yield f"{name} is traced at every call: it {reason}"
