"""Points that queries and keys have in space: the closer, the more they attend, however the whole is turned and moved.

    invariant_points:  score - weights[h] / 2 * sum over points p of |query_points[b, h, i, p] - key_points[b, h, j, p]| ** 2

Jumper et al. 2021 (AlphaFold 2, Nature 596, supplementary section 1.8.2, algorithm 22) call this invariant point attention: every
residue's frame has turned its points into the space that all share before they are passed here, so distances do not depend on
where that space begins. There are 4 points for a query and a key, and weights are learned, above 0.

    score_mod = invariant_points(query_points, key_points, F.softplus(gamma) * (2 / (9 * 4)) ** 0.5)
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import LARGEST, ScoreMod, float_tensor, short
from ._made import picklable

_SHAPE = ("B", "Hq", "S", "P", "3")


@picklable
def invariant_points(query_points: Tensor, key_points: Tensor, weights: Tensor) -> ScoreMod:
    """Takes half of ``weights[h]`` times the squared distances of a query's points from a key's from the score.

    Args:
        query_points: floating-point tensor (B, Hq, Q_LEN, P, 3), on the device of the query: P points, any dimension for 3. A kernel
            has them in registers: P is 4 in AlphaFold, and neither it nor the dimension may be above 64, or their product above 256.
            Captured, not copied; it gets a gradient.
        key_points: the same for keys, (B, Hq, KV_LEN, P, 3).
        weights: floating-point tensor (Hq,). It gets a gradient, too.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: an argument is not a floating-point tensor.
        ValueError: the points do not have 5 dimensions, their last two extents differ or are too large, or `weights` does not have one.
    """
    query_points = float_tensor("invariant_points", "query_points", query_points, _SHAPE)
    key_points = float_tensor("invariant_points", "key_points", key_points, _SHAPE)
    weights = float_tensor("invariant_points", "weights", weights, ("Hq",))
    if query_points.shape[-2:] != key_points.shape[-2:]:
        raise ValueError(
            f"invariant_points(): queries have {query_points.shape[-2]} points of {query_points.shape[-1]} numbers, keys have "
            f"{key_points.shape[-2]} of {key_points.shape[-1]}; give both as many"
        )
    count, dimensions = query_points.shape[-2:]
    short("invariant_points", "query_points", count, "points")
    short("invariant_points", "query_points", dimensions, "dimensions")
    if count * dimensions > LARGEST:
        raise ValueError(
            f"invariant_points(): query_points must have at most {LARGEST} numbers of a query, got {count} points of {dimensions} "
            "dimensions; pass fewer, since a kernel has them in registers"
        )

    def invariant_points(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        apart = query_points[b, h, q_idx].float() - key_points[b, h, kv_idx].float()  # half precision holds no squares above 65504
        return score - 0.5 * weights[h] * (apart * apart).sum((-2, -1))

    return invariant_points
