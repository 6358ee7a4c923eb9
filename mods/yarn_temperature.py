"""YaRN's temperature: the softmax of a model that was stretched to a longer context is made sharper.

    score * (0.1 * ln(factor) + 1) ** 2

Peng et al. 2023 (arXiv 2309.00071, section 3.4). Rotary embeddings whose queries and keys are scaled each by ``0.1 * ln(factor) + 1``
have the same effect; this is for caches of keys that were not, and for embeddings that do not rotate.
"""

from __future__ import annotations

import math

from torch import Tensor

from ._arguments import ScoreMod, positive_number
from ._made import picklable


@picklable
def yarn_temperature(factor: float, mscale: float = 1.0) -> ScoreMod:
    """Multiplies the score by ``(0.1 * mscale * ln(factor) + 1) ** 2``.

    Args:
        factor: how many times longer the context is than the one trained on; up to 1 nothing changes.
        mscale: what the logarithm is weighted with: 1 in the paper, 0.707 or 1 in DeepSeek's models (their mscale_all_dim).

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: `factor` or `mscale` is not a number.
        ValueError: `factor` or `mscale` is not finite or not above 0.

        flex_attention(q, k, v, score_mod=yarn_temperature(32.0), block_mask=block_mask)
    """
    factor = positive_number("yarn_temperature", "factor", factor, "pass how many times longer the context is")
    mscale = positive_number("yarn_temperature", "mscale", mscale, "the paper has 1.0")
    sharpness = (0.1 * mscale * math.log(max(factor, 1.0)) + 1.0) ** 2

    def yarn_temperature(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * sharpness

    return yarn_temperature
