"""Attention sinks: a learned logit for each head, which takes part in the softmax as the score of one more key whose value is 0."""

from __future__ import annotations

import torch

from flexpress import checks

from .codegen.mod.tensors import check_kind, readable


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
    return in_place(readable("sinks", sinks))


def in_place(sinks: torch.Tensor) -> torch.Tensor:
    """Contiguous and at a multiple of 16 bytes."""
    return sinks if sinks.is_contiguous() and sinks.data_ptr() % 16 == 0 else sinks.clone(memory_format=torch.contiguous_format)


def fold_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse with sinks, of those without: for a sequence that is split over ranks.

    out (B, Hq, Q_LEN, D_V), lse float32 (B, Hq, Q_LEN), sinks (Hq,)
    """
    logits = sinks.float().view(-1, 1)
    scores = logits.clamp(min=torch.finfo(torch.float32).min)  # -inf less -inf, for a row that is empty, would be NaN
    kept = torch.sigmoid(lse - scores)  # 0 for an empty row
    empty = (lse == float("-inf")) & (logits == float("-inf"))
    return (out * kept.unsqueeze(-1)).to(out.dtype), torch.where(empty, lse, torch.logaddexp(lse, scores.expand_as(lse)))
