"""Disentangled positions: content and position have keys and queries of their own, and no rotation mixes them.

    score + c2p[b, h, i, bucket(i - j)] + p2c[b, h, j, bucket(j - i)]        for query i, key j

with ``c2p = query . position_keys`` and ``p2c = key . position_queries``: what a query seeks at a distance, and what a key is worth at
one. DeBERTa (He et al. 2020, arXiv 2006.03654), where bucket(d) is d + span, cut off at 0 and 2 * span - 1.

Both products are small matrix products, a row of ``2 * span`` numbers for each token, and are computed before attention; kernels look
numbers up. Gradients go through them to the tables of positions, and to queries and keys.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import ScoreMod, float_tensor
from ._made import picklable


@picklable
def disentangled(c2p: Tensor, p2c: Tensor) -> ScoreMod:
    """Adds both terms to the score.

    Args:
        c2p: floating-point tensor (B, Hq, Q_LEN, 2 * span): ``scale * query @ position_keys.mT``. Captured, not copied.
        p2c: floating-point tensor (B, Hq, KV_LEN, 2 * span): ``scale * key @ position_queries.mT``. Captured, not copied.

        position_keys and position_queries are (Hq, 2 * span, D); row ``r`` of the first is for keys ``r - span`` positions before the
        query, of the second for queries as far before the key. DeBERTa's scale, with three terms in a score, is ``1 / sqrt(3 * D)``;
        give it to flex_attention, too.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: `c2p` or `p2c` is not a floating-point tensor.
        ValueError: they do not have four dimensions, differ in the last one, or it is odd.

        scale = (3 * D) ** -0.5
        mod = disentangled(scale * query @ position_keys.mT, scale * key @ position_queries.mT)
        out = flex_attention(query, key, value, score_mod=mod, scale=scale)
    """
    c2p = float_tensor("disentangled", "c2p", c2p, ("B", "Hq", "Q_LEN", "2 * span"))
    p2c = float_tensor("disentangled", "p2c", p2c, ("B", "Hq", "KV_LEN", "2 * span"))
    buckets = c2p.shape[3]
    if p2c.shape[3] != buckets or buckets % 2:
        raise ValueError(
            f"disentangled(): c2p and p2c must have 2 * span columns each, got {buckets} and {p2c.shape[3]}; "
            "make both of tables of 2 * span positions"
        )

    def disentangled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        buckets = c2p.shape[3]
        span, last = buckets // 2, buckets - 1
        sought = c2p[b, h, q_idx, (q_idx - kv_idx + span).clamp(0, last)]
        return score + sought + p2c[b, h, kv_idx, (kv_idx - q_idx + span).clamp(0, last)]

    return disentangled
