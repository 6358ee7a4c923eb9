"""Forget gates: a learned gate at every position takes away from all that lies before it.

    score + log f[j + 1] + log f[j + 2] + ... + log f[i]        for query i, key j <= i

The Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130). f is a number from 0 to 1 for each head and token, made of the token
itself: ``sigmoid(x @ w + b)``. One below 1 at every position is ALiBi with slope -log f; a 0 ends a text. The sum is a difference of two
entries of a running sum, so a kernel reads one number a query and one a key, and gates get gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import ScoreMod, float_tensor
from ._made import picklable


@picklable
def forget_gate(log_gates: Tensor) -> ScoreMod:
    """Adds the sum of ``log_gates`` from after the key up to the query.

    Args:
        log_gates: floating-point tensor (B, Hq, S) of log f, none above 0: ``torch.nn.functional.logsigmoid(x @ w + b)``. Finite: where
            a text ends, -100 will do. Entry 0 has no effect. May require grad. Its running sum, in float32 or more, is captured.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float. For causal attention: later keys would gain.

    Raises:
        TypeError: `log_gates` is not a floating-point tensor.
        ValueError: `log_gates` does not have three dimensions.

        gates = torch.nn.functional.logsigmoid(x @ w + b).mT  # x (B, S, dim), w (dim, Hq)
        flex_attention(q, k, v, score_mod=forget_gate(gates), mask_mod=causal)
    """
    log_gates = float_tensor("forget_gate", "log_gates", log_gates, ("B", "Hq", "S"))
    total = log_gates.cumsum(-1, dtype=torch.promote_types(log_gates.dtype, torch.float32))

    def forget_gate(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + (total[b, h, q_idx] - total[b, h, kv_idx])

    return forget_gate
