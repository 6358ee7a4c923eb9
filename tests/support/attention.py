"""A drawn problem's forward pass against dense float64 attention."""

from __future__ import annotations

import math

import torch

from flexpress import AuxRequest, flex_attention
from support.dense import assert_as_accurate, dense_attention
from support.problems import Problem, score_mods


def check_attention(p: Problem, device: str) -> None:
    """Outputs, lse and highest scores of a problem are as exact as a plain computation's."""
    q, k, v = p.tensors(device)
    score_mod, mask_mod = score_mods(p.Hq, p.length, device)[p.score], p.mask_mod(device)
    out, aux = flex_attention(q, k, v, score_mod, **p.options(device), return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.shape == (p.B, p.Hq, p.Q_LEN, p.D_V) and out.dtype == p.dtype
    assert_as_accurate(out, q, k, v, score_mod, mask_mod, p.scale)
    _, lse, highest = dense_attention(q, k, v, score_mod, mask_mod, p.scale)
    tolerance = 2e-5 if p.dtype == torch.float32 else 2e-2
    empty = lse == -math.inf
    assert torch.equal(aux.lse == -math.inf, empty)
    assert (out.masked_select(empty[..., None].expand_as(out)) == 0).all()
    for got, want in ((aux.lse, lse), (aux.max_scores, highest)):
        assert got.dtype == torch.float32
        difference = (got.double() - want).masked_fill(empty, 0).abs()
        assert (difference <= tolerance * (1 + want.masked_fill(empty, 0).abs())).all()
