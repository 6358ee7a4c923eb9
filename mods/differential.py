"""Differential attention: the difference of two softmaxes, which cancels what both attend to without need.

    out = softmax(q1 k1^T * scale) v - lam * softmax(q2 k2^T * scale) v

The Differential Transformer (Ye et al. 2024, arXiv 2410.05258). `lam` is learned: the paper's is
``exp(lq1 . lk1) - exp(lq2 . lk2) + init`` with vectors of a layer, init = 0.8 - 0.6 * exp(-0.3 * layer), its layers counted from 0. There
each head of the result is normalised (RMSNorm) and multiplied by ``1 - init``, which is left to the model.

No mod can say this, since a mod knows one score: it is two calls of attention, with the same mods and masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._arguments import as_flag, float_tensor, function, whole_number


def differential(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, lam: Tensor | float, **options: Any
) -> Tensor:
    """Attention with the first half of the heads of query and key, less `lam` times attention with the second half.

    Args:
        attention: flexpress.flex_attention, torch's own, or any function of query, key, value and `options` that gives one tensor.
        query: tensor (B, 2 * Hq, Q_LEN, D): q1 of all heads, then q2.
        key: tensor (B, 2 * Hkv, KV_LEN, D): k1 of all heads, then k2.
        value: tensor (B, Hkv, KV_LEN, D_V); in the paper D_V is 2 * D.
        lam: a number, or a tensor that broadcasts to (B, Hq, Q_LEN, D_V): of no dimension for a layer, (Hq, 1, 1) for each head.
        options: passed on to both calls: score_mod, mask_mod, block_mask, scale, enable_gqa. Mods see h from 0 to Hq - 1. No return_lse
            and return_aux: what they ask for is of one softmax.

    Returns:
        tensor (B, Hq, Q_LEN, D_V), differentiable in all tensors.

    Raises:
        TypeError: `attention` is no function, or gives more than a tensor, or a tensor is not a floating-point one.
        ValueError: a tensor does not have four dimensions, query or key an odd number of heads, value not half as many as key, or
            more than the output is asked for.

        out = differential(flex_attention, query, key, value, differential_lambda(lq1, lk1, lq2, lk2, layer=3), mask_mod=causal)
    """
    recipe = "differential"
    attention = function(recipe, "attention", attention, "pass flex_attention")
    query = float_tensor(recipe, "query", query, ("B", "2 * Hq", "Q_LEN", "D"))
    key = float_tensor(recipe, "key", key, ("B", "2 * Hkv", "KV_LEN", "D"))
    value = float_tensor(recipe, "value", value, ("B", "Hkv", "KV_LEN", "D_V"))
    for name, tensor in (("query", query), ("key", key)):
        if tensor.shape[1] % 2:
            raise ValueError(
                f"{recipe}(): {name} must have an even number of heads, got {tensor.shape[1]}; concatenate both halves in dim 1"
            )
    if key.shape[1] != 2 * value.shape[1]:
        raise ValueError(
            f"{recipe}(): value must have half as many heads as key, got value {tuple(value.shape)} and key {tuple(key.shape)}; "
            "both halves of key share the heads of value"
        )
    for name in ("return_lse", "return_aux"):
        if options.get(name) is not None and as_flag(options[name]) is not False:
            raise ValueError(
                f"{recipe}(): {name} is of one softmax, and the result of two; leave it out, or call attention with each half of the heads"
            )
    (q1, q2), (k1, k2) = query.chunk(2, 1), key.chunk(2, 1)
    first = attention(q1, k1, value, **options)
    if not isinstance(first, Tensor):
        raise TypeError(f"{recipe}(): attention must give one tensor, got {type(first).__name__}; pass one that returns the output alone")
    return first - lam * attention(q2, k2, value, **options)


def differential_lambda(lq1: Tensor, lk1: Tensor, lq2: Tensor, lk2: Tensor, layer: int) -> Tensor:
    """The paper's lambda of a layer.

    Args:
        lq1, lk1, lq2, lk2: floating-point tensors (D,), learned; in the paper from a normal distribution of standard deviation 0.1.
        layer: number of the layer, from 0.

    Returns:
        tensor of no dimension.

    Raises:
        TypeError: a tensor is not a floating-point one, or `layer` not an int.
        ValueError: a tensor is not one-dimensional, they differ in length, or `layer` is below 0.
    """
    recipe = "differential_lambda"
    named = {"lq1": lq1, "lk1": lk1, "lq2": lq2, "lk2": lk2}
    lq1, lk1, lq2, lk2 = (float_tensor(recipe, name, tensor, ("D",)) for name, tensor in named.items())
    lengths = [len(tensor) for tensor in (lq1, lk1, lq2, lk2)]
    if len(set(lengths)) > 1:
        raise ValueError(f"{recipe}(): lq1, lk1, lq2 and lk2 must be of one length, got {lengths}; the paper's is the head dim")
    layer = whole_number(recipe, "layer", layer, "pass the number of the layer, from 0", minimum=0)
    init = 0.8 - 0.6 * math.exp(-0.3 * layer)
    return torch.exp(torch.dot(lq1, lk1)) - torch.exp(torch.dot(lq2, lk2)) + init
