"""A drawn problem's forward pass against dense float64 attention."""

from __future__ import annotations

import math

import torch

from flexpress import AuxRequest, flex_attention
from support.dense import assert_as_accurate, dense_attention
from support.problems import mask_arguments, mask_mods, score_mods, tensor_of


def check_attention(p: dict, device: str) -> None:
    """Outputs, lse and highest scores of a problem are as exact as a plain computation's."""
    B, Hkv, Hq, length = p["B"], p["Hkv"], p["Hkv"] * p["group"], max(p["Q_LEN"], p["KV_LEN"])
    Bkv = 1 if p["one_kv_batch"] else B
    shapes = [(B, Hq, p["Q_LEN"], p["D_QK"]), (Bkv, Hkv, p["KV_LEN"], p["D_QK"]), (Bkv, Hkv, p["KV_LEN"], p["D_V"])]
    q, k, v = (
        tensor_of(shape, layout, p["dtype"], device, p["seed"] + i)
        for i, (shape, layout) in enumerate(zip(shapes, p["layouts"], strict=True))
    )
    score_mod, mask_mod = score_mods(Hq, length, device)[p["score"]], mask_mods(length, device)[p["mask"]]
    masked = mask_arguments(p, mask_mod, Hq, device)
    options = {} if p["USE_TMA"] is None else {"USE_TMA": p["USE_TMA"]}
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod,
        scale=p["scale"],
        enable_gqa=True,
        kernel_options=options,
        **masked,
        return_aux=AuxRequest(lse=True, max_scores=True),
    )
    assert out.shape == (B, Hq, p["Q_LEN"], p["D_V"]) and out.dtype == p["dtype"]
    assert_as_accurate(out, q, k, v, score_mod, mask_mod, p["scale"])
    _, lse, highest = dense_attention(q, k, v, score_mod, mask_mod, p["scale"])
    tolerance = 2e-5 if p["dtype"] == torch.float32 else 2e-2
    empty = lse == -math.inf
    assert torch.equal(aux.lse == -math.inf, empty)
    assert (out.masked_select(empty[..., None].expand_as(out)) == 0).all()
    for got, want in ((aux.lse, lse), (aux.max_scores, highest)):
        assert got.dtype == torch.float32
        difference = (got.double() - want).masked_fill(empty, 0).abs()
        assert (difference <= tolerance * (1 + want.masked_fill(empty, 0).abs())).all()
