"""Learned biases that depend on the head and on the distance between query and key.

    relative_bias:  score + table[h, (j - i) + S - 1]         for query i, key j: a number for every distance
    t5_bias:        score + weight[t5_bucket(j - i), h]       distances share buckets, wider the further away

Shaw, Uszkoreit and Vaswani 2018 (arXiv 1803.02155) learn a vector per clipped distance and add it to the keys
and values; Raffel et al. 2019 (T5, arXiv 1910.10683, section 2.1) reduce it to a scalar per head added to the
score, with buckets that grow logarithmically. Both tables get gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._arguments import ScoreMod, flag, float_tensor, whole_number
from ._made import picklable

# A bucket may begin exactly at a whole distance (16, 32 and 64 by default), where a logarithm rounded down
# gives the bucket before. The nudge, in buckets, is above float32's rounding and, for settings in use, below
# the gap from any other distance to the edge after it (0.016 by default).
_NUDGE = 1e-5


@picklable
def relative_bias(table: Tensor) -> ScoreMod:
    """Adds ``table[h, kv_idx - q_idx + S - 1]`` to the score.

    Args:
        table: floating-point tensor (Hq, 2 * S - 1), on the device of the query. Column S - 1 is distance 0,
            column 0 the key furthest before the query, the last column the key furthest after it. S is taken
            from the table; Q_LEN and KV_LEN must not exceed it: a longer sequence indexes outside the
            table. Captured, not copied.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: `table` is not a floating-point tensor.
        ValueError: `table` is not two-dimensional or its second extent is even.
    """
    table = float_tensor("relative_bias", "table", table, ("Hq", "2 * S - 1"))
    if table.shape[1] % 2 == 0:
        raise ValueError(
            f"relative_bias(): table must have an odd number of columns, 2 * S - 1, got shape "
            f"{tuple(table.shape)}; give it a column for each distance from -(S - 1) to S - 1"
        )

    def relative_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        zero = table.shape[1] // 2  # S - 1, the column of distance 0
        return score + table[h, kv_idx - q_idx + zero]

    return relative_bias


def t5_bucket(relative_position: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
    """The bucket of a distance, by T5's rule.

    With n buckets for a direction and m = n // 2, distances 0 .. m - 1 have a bucket each; from there on the
    bucket of distance d is ``m + floor((n - m) * log(d / m) / log(max_distance / m))``, at most n - 1.

    Args:
        relative_position: integer tensor of any shape (0-dim in a mod): key position less query position.
        num_buckets: how many there are in all. Bidirectional: an even number, at least 4; keys before or at
            the query share the first half, keys after it the second. Else at least 2, and keys after the
            query fall into bucket 0.
        max_distance: above m; keys this far away or further share the last bucket (with some nearer ones).
        bidirectional: True for encoders, False for decoders.

    Returns:
        int32 tensor of the same shape, 0 .. num_buckets - 1.

    Raises:
        TypeError: `num_buckets` or `max_distance` is not an int.
        ValueError: `num_buckets` or `max_distance` is too small, or `num_buckets` odd though bidirectional.
    """
    n, farthest = _checked("t5_bucket", num_buckets, max_distance, bidirectional)
    return (_two_sided if bidirectional else _one_sided)(relative_position, n, farthest)


@picklable
def t5_bias(weight: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> ScoreMod:
    """Adds ``weight[t5_bucket(kv_idx - q_idx, ...), h]`` to the score.

    T5 does not scale its scores: pass ``scale=1.0`` to flex_attention to compute what T5 computes.

    Args:
        weight: floating-point tensor (num_buckets, Hq), on the device of the query; the layout of an
            ``nn.Embedding``'s weight. Captured, not copied.
        num_buckets, max_distance, bidirectional: as for `t5_bucket`; the defaults are those of T5's encoder.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: `weight` is not a floating-point tensor; or as `t5_bucket`.
        ValueError: `weight` does not have the shape (num_buckets, Hq); or as `t5_bucket`.
    """
    weight = float_tensor("t5_bias", "weight", weight, ("num_buckets", "Hq"))
    n, farthest = _checked("t5_bias", num_buckets, max_distance, bidirectional)
    if weight.shape[0] != num_buckets:
        raise ValueError(
            f"t5_bias(): weight must have num_buckets = {num_buckets} rows, got shape "
            f"{tuple(weight.shape)}; pass its own num_buckets, or weight.T if heads come first"
        )
    bucket = _two_sided if bidirectional else _one_sided

    def t5_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + weight[bucket(kv_idx - q_idx, n, farthest), h]

    return t5_bias


def _checked(recipe: str, num_buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, int]:
    """n, in the letters of `t5_bucket`, and max_distance."""
    flag(recipe, "bidirectional", bidirectional)
    buckets = whole_number(recipe, "num_buckets", num_buckets, "T5 has 32", minimum=4 if bidirectional else 2)
    if bidirectional and buckets % 2:
        raise ValueError(
            f"{recipe}(): num_buckets must be even, half for each direction, got {buckets}; pass {buckets + 1}, or bidirectional=False"
        )
    n = buckets // 2 if bidirectional else buckets
    remedy = f"distances below {n // 2} have buckets of their own, it lies beyond"
    return n, whole_number(recipe, "max_distance", max_distance, remedy, minimum=n // 2 + 1)


def _two_sided(relative_position: Tensor, n: int, farthest: int) -> Tensor:
    bucket = _one_direction(torch.abs(relative_position), n, farthest)
    return torch.where(relative_position > 0, bucket + n, bucket)


def _one_sided(relative_position: Tensor, n: int, farthest: int) -> Tensor:
    return _one_direction(torch.where(relative_position < 0, -relative_position, 0), n, farthest)


def _one_direction(distance: Tensor, n: int, farthest: int) -> Tensor:
    m = n // 2
    scale = (n - m) / math.log(farthest / m)  # buckets per unit of log distance
    far = torch.where(distance < m, m, distance).to(torch.float32)  # no logarithm of 0
    coarse = m + (torch.log(far / m) * scale + _NUDGE).to(torch.int32)
    return torch.where(distance < m, distance, torch.where(coarse < n, coarse, n - 1)).to(torch.int32)
