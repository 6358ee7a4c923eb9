"""ALiBi: attention with linear biases, a penalty on distance in place of position embeddings.

    alibi:            score + slopes[h] * (j - i)       for query i, key j
    alibi_symmetric:  score - slopes[h] * |j - i|

Press, Smith and Lewis 2021 (arXiv 2108.12409). The paper is about causal models, where j <= i and the two
forms agree. Without a causal mask `alibi` *rewards* keys that come later; `alibi_symmetric` is the one for
encoders.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import ScoreMod, float_tensor, whole_number
from ._made import picklable


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The paper's fixed slopes, one per head.

    For n heads, n a power of two, head k = 1 .. n has slope ``2 ** (-8 * k / n)``: 1/2, 1/4, ..., 1/256 for
    eight. Otherwise let m be the largest power of two below n. The first m slopes are those for m heads; the
    other n - m interpolate them: they are the first, third, fifth, ... of the slopes for 2 * m heads, each
    the geometric mean of its neighbours, as in the code the authors published.

    Args:
        num_heads: number of query heads, at least 1.
        device: where the tensor goes; torch's default device when left out.

    Returns:
        float32 tensor (num_heads,).

    Raises:
        TypeError: `num_heads` is not an int.
        ValueError: `num_heads` is below 1.
    """
    heads = whole_number("alibi_slopes", "num_heads", num_heads, "pass the number of query heads", minimum=1)
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * k / power) for k in range(1, power + 1)]
    slopes += [2.0 ** (-4 * k / power) for k in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


@picklable
def alibi(slopes: Tensor) -> ScoreMod:
    """Adds ``slopes[h] * (kv_idx - q_idx)`` to the score: 0 on the diagonal, lower the further back the key.

    Args:
        slopes: floating-point tensor (Hq,), one slope per query head, on the device of the query;
            `alibi_slopes` makes the paper's. Best in float32, as torch multiplies by the distance in the
            dtype of the slopes. May require grad. Captured, not copied.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: `slopes` is not a floating-point tensor.
        ValueError: `slopes` is not one-dimensional.

        flex_attention(q, k, v, score_mod=alibi(alibi_slopes(q.shape[1], q.device)), block_mask=block_mask)
    """
    slopes = float_tensor("alibi", "slopes", slopes, ("Hq",))

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


@picklable
def alibi_symmetric(slopes: Tensor) -> ScoreMod:
    """Subtracts ``slopes[h] * |q_idx - kv_idx|`` from the score: keys on both sides are penalised alike.

    Arguments, result and errors are those of `alibi`.
    """
    slopes = float_tensor("alibi_symmetric", "slopes", slopes, ("Hq",))

    def alibi_symmetric(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * torch.abs(q_idx - kv_idx)

    return alibi_symmetric
