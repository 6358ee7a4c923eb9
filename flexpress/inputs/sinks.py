"""Attention sinks: a learned logit for each head, which takes part in the softmax as the score of one more key whose value is 0."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from flexpress.inputs import checks

from ..codegen.mod.captured.tensors import check_kind, readable
from ..codegen.run.layouts import aligned


def check_sinks(sinks, heads: int, device: torch.device) -> None:
    """Raises TypeError or ValueError for what are no sinks of so many query heads."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks must be a tensor of shape ({heads},), a logit for each query head, got {type(sinks).__name__}")
    if sinks.is_nested:  # which has no shape to compare
        check_kind("sinks", sinks)
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), a logit for each head of query, got {tuple(sinks.shape)}")
    if sinks.dtype not in checks.DTYPES:
        raise TypeError(f"sinks must be float16, bfloat16 or float32, got {sinks.dtype}; convert them: sinks.float()")
    if sinks.device != device:
        raise ValueError(f"sinks are on {sinks.device}, but query is on {device}; move them: sinks.to(query.device)")


def read_sinks(sinks, heads: int, device: torch.device) -> torch.Tensor:
    """Sinks as kernels read them. Raises as check_sinks does."""
    check_sinks(sinks, heads, device)
    return aligned(readable("sinks", sinks).contiguous())


def fold_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse with sinks, of those without: where keys lie on several ranks, and where derivatives are asked for. Twice differentiable.

    out (B, Hq, Q_LEN, D_V), lse float32 (B, Hq, Q_LEN), sinks (Hq,)
    """
    scores, share, _ = sink_shares(lse, sinks)
    # logaddexp, whose second derivatives are NaN at -inf
    folded = torch.where(lse > scores, lse + softplus(scores - lse), scores + softplus(lse - scores))
    nothing = (lse == float("-inf")) & (sinks == float("-inf")).view(-1, 1)
    return (out * share.unsqueeze(-1)).to(out.dtype), torch.where(nothing, lse, folded)


def before_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, d_out: torch.Tensor, d_lse: torch.Tensor | None) -> tuple:
    """The gradients of fold_sinks's arguments, where d_out and d_lse are those of what it gives. Differentiable."""
    _, share, of_sink = sink_shares(lse, sinks)
    of_share = (d_out.float() * out.float()).sum(-1) * share * of_sink
    before, found = of_share, -of_share
    if d_lse is not None:
        before, found = before + d_lse * share, found + d_lse * of_sink
    return (d_out * share.unsqueeze(-1)).to(d_out.dtype), before, found.sum((0, 2)).to(sinks.dtype)


def sink_shares(lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sinks as scores (Hq, 1), and which share of each row's weight keys and sinks have."""
    scores = sinks.float().view(-1, 1).clamp(min=torch.finfo(torch.float32).min)  # -inf less -inf, for a row that is empty, would be NaN
    return scores, torch.sigmoid(lse - scores), torch.sigmoid(scores - lse)
