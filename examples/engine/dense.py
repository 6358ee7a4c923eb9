"""The same model without a cache, by plain torch: what an engine's tokens are checked against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .llama import Attend, Config, Llama
from .scheduler import Request

Stored = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]  # of a layer, its turned keys and values: as a cache gives them back


def dense_attention(config: Config, stored: Stored | None = None) -> Attend:
    """Attention within one whole sequence."""
    q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def turned(x: Tensor) -> Tensor:
        j = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=x.device) / config.head_dim
        frequencies, factor = config.rope_theta**-j, 1.0
        if config.scaling is not None:
            frequencies, factor = config.scaling.scaled(frequencies, config.rope_theta), config.scaling.table_factor
        angles = torch.arange(len(x), device=x.device)[:, None, None] * frequencies
        (first, second), c, s = x.chunk(2, -1), (angles.cos() * factor).to(x), (angles.sin() * factor).to(x)
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = qkv.split([q_heads, kv_heads, kv_heads], 1)
        q, k = turned(q), turned(k)
        k, v = stored(layer, k, v) if stored else (k, v)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    return attend


def wrong_tokens(model: Llama, request: Request, stored: Stored | None = None, exact: Llama | None = None) -> int:
    """How many tokens are not what the model in float64 chooses after those before.

    A logit may be below the best one by 4 errors of the dense model in the model's dtype, the largest of a row: ours may have twice that,
    for the best one and its own. In float32 this is next to nothing.
    """
    exact, device = exact or model.to(dtype=torch.float64), model.head.device
    ids = torch.tensor(request.prompt + request.made[:-1], device=device)
    rows = torch.arange(len(request.prompt) - 1, len(ids), device=device)
    attend, made = dense_attention(model.config, stored), torch.tensor(request.made, device=device)
    logits = exact.logits(ids, rows, attend)
    behind = logits.amax(-1) - logits.gather(1, made[:, None])[:, 0]
    return int((behind > 4 * (model.logits(ids, rows, attend) - logits).abs().amax(-1)).sum())
