"""Attention to a set of keys, from attention to its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_attention(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the same queries to all keys, of attention to disjoint sets of keys.

    outs   (..., Q_LEN, D_V) each, as flex_attention returns it       lses   float32 (..., Q_LEN) each

    Computed in float32; out has the dtype of the parts. A row without keys in any part gives 0 and lse -inf. Differentiable in both.
    Raises ValueError for shapes that do not fit. Source: partial softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867).
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_attention needs an lse for each out, and at least one, got {len(outs)} outs and {len(lses)} lses")
    shapes = {tuple(t.shape) for t in outs}, {tuple(t.shape) for t in lses}
    if len(shapes[0]) > 1 or shapes[1] != {tuple(outs[0].shape[:-1])}:
        raise ValueError(f"all outs must have one shape (..., Q_LEN, D_V) and all lses (..., Q_LEN), got {shapes[0]} and {shapes[1]}")
    stacked = torch.stack(tuple(lses))
    largest = stacked.detach().amax(0)
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = (stacked - largest).exp()
    total = weights.sum(0)
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    out = sum(out.float() * (weight / total).unsqueeze(-1) for out, weight in zip(outs, weights, strict=True))
    return out.to(outs[0].dtype), torch.where(seen, largest + total.log(), -torch.inf)
