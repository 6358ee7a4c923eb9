"""Several score_mods as one, applied from left to right.

    compose_scores(f, g)(score, ...) = g(f(score, ...), ...)

Order matters as soon as one of them is not a sum: ``compose_scores(softcap(50.0), alibi(slopes))`` caps the
product of query and key and then adds the bias, the other order caps both together.

For masks there are torch's `and_masks` and `or_masks`.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import ScoreMod, function
from ._made import picklable


@picklable
def compose_scores(*score_mods: ScoreMod) -> ScoreMod:
    """One score_mod that applies `score_mods` in order.

    Args:
        score_mods: one or more functions (score, b, h, q_idx, kv_idx) -> score. Each gets the score that the
            one before it returned, and the same positions.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float. A single score_mod
        comes back as it is.

    Raises:
        TypeError: one of them is not a function.
        ValueError: there are none.

        flex_attention(q, k, v, score_mod=compose_scores(softcap(50.0), alibi(slopes)))
    """
    if not score_mods:
        raise ValueError("compose_scores(): score_mods must hold a function, got none; pass them one by one")
    for place, score_mod in enumerate(score_mods):
        function(
            "compose_scores",
            f"score_mods[{place}]",
            score_mod,
            "pass functions (score, b, h, q_idx, kv_idx) -> score, one by one and not as a list",
        )
    if len(score_mods) == 1:
        return score_mods[0]

    def compose_scores(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return compose_scores
