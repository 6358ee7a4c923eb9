"""Which kernels a call gets, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flexpress.attention import prepared

from .codegen.compiling import runs_uncompiled
from .codegen.mod.bind import why_every_call
from .codegen.mod.sums import as_sum
from .codegen.mod.tensors import check_surroundings
from .codegen.plan.hopper_forward import scores_are_raw
from .codegen.run import backward, forward


@runs_uncompiled
def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable | None = None,
    block_mask=None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: dict | None = None,
    *,
    mask_mod: Callable | None = None,
    deterministic: bool = False,
) -> str:
    """Which kernels flex_attention chooses for these arguments, and why not the ones for Hopper: a line each for forward and backward.

        forward   GLUON
        backward  TRITON: deterministic: programs add to dQ in any order

    "GLUON" are the kernels for sm_90 alone, "TRITON" the portable ones, "DECODE" the one for few queries. The arguments are
    those of flex_attention; tensors that want gradients (requires_grad), captured ones too, are taken into account.
    A mod that has to be traced at every call, which takes some tenths of a millisecond, has a line that says why.
    Nothing is compiled or run but what a mask_mod's block lists need; that a kernel spills too many registers, or does not compile, is
    known only after the first call.

    Raises what flex_attention raises.
    """
    check_surroundings("explain")
    q, k, v, inputs, scale, score, mask, lists, _, options = prepared(
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod
    )
    keys = forward.keys_of(score, mask, inputs.extents)
    captured = score[1][: len(score[0].tensors)] if score else []
    differentiable = any(t.requires_grad for t in (q, k, v, *captured))
    _, _, arch, reason = forward.case_of(
        q, k, v, scale, lists, options, False, *keys, output_rows=differentiable and torch.is_grad_enabled()
    )
    lines = ["forward   DECODE" if forward.decodes(q, k, options) else _line("forward", reason)]
    if differentiable:
        wanted = frozenset(i for i, t in enumerate(captured) if t.requires_grad)
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        q, k, v = map(backward.with_rows, (q, k, v))  # and the output's gradient is taken to lie as q does
        *_, reason = backward.case_of(
            q,
            k,
            v,
            q,
            scale,
            lists,
            options,
            deterministic,
            False,
            wanted,
            *keys,
            raw_tops=reason is None and score is not None and scores_are_raw(as_sum(score[0]), scale > 0),
        )
        lines.append(_line("backward", reason))
    lines += _traced_at_every_call(score_mod, mask_mod or getattr(block_mask, "mask_mod", None))
    if arch == "cpu":
        lines.append("on the CPU kernels run in Triton's interpreter, for tests")
    return "\n".join(lines)


def _line(what: str, reason: str | None) -> str:
    return f"{what:<9} TRITON: {reason}" if reason else f"{what:<9} GLUON"


def _traced_at_every_call(score_mod: Callable | None, mask_mod: Callable | None) -> Iterator[str]:
    """A line for each that is."""
    for name, mod, kind in (("score_mod", score_mod, "score"), ("mask_mod", mask_mod, "mask")):
        reason = mod is not None and why_every_call(mod, kind)
        if reason:
            yield f"{name} is traced at every call: it {reason}"
