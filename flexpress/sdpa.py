"""scaled_dot_product_attention: torch's function of this name, by flex_attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flexpress import mods
from flexpress.attention import flex_attention
from flexpress.flash import added
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.checks import check_tensor
from flexpress.masks.mask_mods import without_ones

from .codegen.mod.captured.tensors import followed, is_causal_bias


@compilable(inner=lambda **given: _attended(**given), opened=lambda given: _without_causal_bias(**given))
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its signature and meaning.

    query        (..., Hq, Q_LEN, D), or without dimensions before Q_LEN: any 2-D, 3-D, 4-D or higher layout and any strides. float16,
                 bfloat16 or float32, head dims up to 512, of query and key up to 576
    key, value   (..., Hkv, KV_LEN, D) and (..., Hkv, KV_LEN, D_V). What precedes them broadcasts, heads only without enable_gqa
    attn_mask    broadcasts to (..., Hq, Q_LEN, KV_LEN): bool, True for what takes part, or floating-point, added to the scaled scores.
                 Read where it lies. One that is added gets its gradient. Or torch.nn.attention.bias.causal_upper_left(Q_LEN, KV_LEN) or
                 causal_lower_right(Q_LEN, KV_LEN), of which nothing is read
    dropout_p    as for flex_attention: torch's generator gives the seed, but other weights are dropped than by torch's function
    is_causal    query i sees key j if j <= i, whatever the lengths; not with attn_mask
    scale        a number or a tensor of one, 1 / sqrt(D) by default
    enable_gqa   allows Hq to be a multiple of Hkv. Other than in torch key and value have as many heads

    Returns (..., Hq, Q_LEN, D_V) in query's dtype. A row with nothing to attend to gives 0. Differentiable twice, with respect to query,
    key, value and an attn_mask that is added.

    Raises ValueError, TypeError or NotImplementedError for arguments; the shapes that are shown are those of 4-D views.
    """
    followed("scaled_dot_product_attention")
    return _attended(**_without_causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def _without_causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: bool) -> dict[str, Any]:
    """Arguments of `_attended`. A CausalBias of torch's, whose memory means nothing, becomes `causal_bias`: its lengths, and is it aligned
    to the last query and key?"""
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal exclude each other: put the causal mask into attn_mask")
    causal_bias = None
    if attn_mask is not None and is_causal_bias(attn_mask):
        causal_bias = (attn_mask.seq_len_q, attn_mask.seq_len_kv), attn_mask.variant.name == "LOWER_RIGHT"
        attn_mask, is_causal = None, True
    arguments = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout_p}
    return {**arguments, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "causal_bias": causal_bias}


def _attended(
    query, key, value, attn_mask, dropout_p, is_causal: bool, scale, enable_gqa: bool, causal_bias: tuple[tuple[int, int], bool] | None
) -> torch.Tensor:
    _check(query, key, value, attn_mask, enable_gqa)
    shape, tensors = _as_four_dimensions(query, key, value, enable_gqa)
    score_mod, mask_mod = None, mods.causal if is_causal else None
    if causal_bias is not None:
        lengths, aligned_last = causal_bias
        if lengths != (query.shape[-2], key.shape[-2]):
            raise ValueError(
                f"attn_mask is a causal bias of {lengths} positions, but query and key have {query.shape[-2]} and {key.shape[-2]}"
            )
        if aligned_last and lengths[0] != lengths[1]:
            mask_mod = mods.causal_offset(lengths[1] - lengths[0])
    if attn_mask is not None:
        scores = (*shape, query.shape[-2], key.shape[-2])
        mask = _mask_as_four_dimensions(attn_mask, scores)
        if attn_mask.dtype == torch.bool:
            mask_mod = _taken_from(mask)
        else:
            score_mod = added(mask)
    grouped = enable_gqa or tensors[1].shape[1] == 1
    out = flex_attention(*tensors, score_mod, None, scale, grouped, mask_mod=mask_mod, dropout_p=dropout_p)
    return out if len(shape) == 2 else out.reshape(*shape, *out.shape[2:])


def _check(query, key, value, attn_mask, enable_gqa: bool) -> None:
    layout = "(..., heads, length, head dim)" if enable_gqa else "(..., length, head dim)"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, layout, may_stand=True)
        if tensor.ndim < (3 if enable_gqa else 2):
            raise ValueError(f"{name} must have shape {layout}, got {tuple(tensor.shape)}")
    if attn_mask is None:
        return
    check_tensor("attn_mask", attn_mask, "(..., Q_LEN, KV_LEN)", may_stand=True)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or floating-point, got {attn_mask.dtype}")
    if attn_mask.device != query.device:
        raise ValueError(f"attn_mask is on {attn_mask.device} but query is on {query.device}; move one with .to(...)")


def _as_four_dimensions(query, key, value, enable_gqa: bool) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """What precedes Q_LEN in the result's shape, and views (B, H, length, head dim) of the three. Key and value keep extents of 1 that
    both have."""
    tensors = query, key, value
    batches, heads = ([t.shape[:-3] for t in tensors], [t.shape[-3:-2] for t in tensors])
    try:
        batch = torch.broadcast_shapes(*batches)
        common = tuple(query.shape[-3:-2]) if enable_gqa else tuple(torch.broadcast_shapes(*heads))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(("query", "key", "value"), tensors, strict=True))
        remedy = "" if enable_gqa else "; for grouped-query attention pass enable_gqa=True"
        raise ValueError(f"what precedes the lengths of query, key and value does not broadcast: {shapes}{remedy}") from None
    shape = (*batch, *common)

    def viewed(tensor, batch, heads):
        if tensor.shape[:-2] == (*batch, *heads) and tensor.ndim == 4:
            return tensor
        return tensor.expand(*batch, *heads, *tensor.shape[-2:]).reshape(math.prod(batch), math.prod(heads), *tensor.shape[-2:])

    found = [viewed(query, batch, common)]
    one_batch = all(math.prod(b) == 1 for b in batches[1:])
    one_head = all(math.prod(h) == 1 for h in heads[1:])
    for tensor in (key, value):
        wide = tensor.shape[:-3] if one_batch else batch
        found.append(viewed(tensor, wide, tensor.shape[-3:-2] if enable_gqa or one_head else common))
    return shape, found


def _mask_as_four_dimensions(mask: torch.Tensor, scores: tuple[int, ...]) -> torch.Tensor:
    """A view with four dimensions of a mask that broadcasts to `scores`, (..., Q_LEN, KV_LEN); extents of 1 stay."""
    try:
        fits = tuple(torch.broadcast_shapes(mask.shape, scores)) == tuple(scores)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"attn_mask {tuple(mask.shape)} does not broadcast to the scores (..., Q_LEN, KV_LEN) = {tuple(scores)} of query and key"
        )
    rank = max(len(scores), 4)
    mask = mask[(None,) * (rank - mask.ndim)]
    batch = mask.shape[:-3]
    if rank == 4:
        return mask
    if math.prod(batch) > 1:
        batch = scores[:-3]
    return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])


def _taken_from(mask: torch.Tensor) -> Callable:
    """The mask_mod that is True where a mask of four dimensions is."""
    mask, at = without_ones(mask)

    def attn_mask(b, h, q_idx, kv_idx):
        return mask[at(b, h, q_idx, kv_idx)]

    return attn_mask
