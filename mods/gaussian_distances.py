"""A learned function of the distance between two places in space, as a sum of bells.

    gaussian_distances:  score + sum over k of weights[h, k] * exp(-((distance - means[k]) / widths[k]) ** 2 / 2)

with the distance of places[b, i] from places[b, j]. Shi et al. 2022 (Graphormer on molecules, arXiv 2203.04810, section 2.2) add this to
the scores of atoms; the bells are those of Schütt et al. 2017 (SchNet, arXiv 1706.08566). All four tensors get gradients.

    score_mod = gaussian_distances(places, torch.linspace(0, 10, 16), torch.full((16,), 0.7), torch.nn.Parameter(torch.zeros(H, 16)))
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import ScoreMod, float_tensor, short
from ._made import picklable


@picklable
def gaussian_distances(places: Tensor, means: Tensor, widths: Tensor, weights: Tensor) -> ScoreMod:
    """Adds a sum of bells of the distance between two places to the score.

    Args:
        places: floating-point tensor (B, S, 3), on the device of the query; any dimension up to 64 for 3. Captured, not copied.
        means, widths: floating-point tensors (K,): where bells are, and how wide. A kernel computes K exponentials for every position:
            up to 16 or so are cheap, 64 the most.
        weights: floating-point tensor (Hq, K).

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: an argument is not a floating-point tensor.
        ValueError: an argument has another number of dimensions, K is not the same in all, or it or the dimension of places is not
            1 to 64.
    """
    places = float_tensor("gaussian_distances", "places", places, ("B", "S", "3"))
    means = float_tensor("gaussian_distances", "means", means, ("K",))
    widths = float_tensor("gaussian_distances", "widths", widths, ("K",))
    weights = float_tensor("gaussian_distances", "weights", weights, ("Hq", "K"))
    if not means.shape[0] == widths.shape[0] == weights.shape[1]:
        raise ValueError(
            f"gaussian_distances(): there are {means.shape[0]} means, {widths.shape[0]} widths and {weights.shape[1]} weights a head; "
            "give each bell one of each"
        )
    short("gaussian_distances", "places", places.shape[-1], "dimensions")
    short("gaussian_distances", "means", means.shape[0], "bells")

    def gaussian_distances(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.linalg.vector_norm(places[b, q_idx] - places[b, kv_idx], dim=-1, keepdim=True)
        off = (distance - means) / widths
        return score + (weights[h] * torch.exp(-0.5 * off * off)).sum(-1)

    return gaussian_distances
