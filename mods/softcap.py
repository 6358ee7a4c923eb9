"""Logit soft-capping: scores are squeezed into (-cap, cap) before the softmax.

    cap * tanh(score / cap)

Near 0 it is the identity (the error is about score**3 / (3 * cap**2)), far from 0 it levels off at the cap,
and it is smooth between. Gemma 2 (Gemma Team 2024, arXiv 2408.00118) caps attention scores at 50; the form
goes back to Bello et al. 2016 (arXiv 1611.09940), who clip the logits of a pointer network so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import ScoreMod, positive_number
from ._made import picklable


@picklable
def softcap(cap: float) -> ScoreMod:
    """Caps the magnitude of every score, smoothly.

    The score a score_mod gets is already scaled (by ``1 / sqrt(D)`` unless `scale` says otherwise), which is
    where Gemma 2 caps it. In a composition the order matters: a bias added before the cap is capped with the
    score.

    Args:
        cap: the bound, finite and above 0.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: `cap` is not a number.
        ValueError: `cap` is not finite or not above 0.

        flex_attention(q, k, v, score_mod=softcap(50.0), block_mask=block_mask)
    """
    cap = positive_number("softcap", "cap", cap, "to leave the scores as they are, leave the softcap out")

    def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score * (1.0 / cap))  # a product is cheaper than a division at every position

    return softcap
