"""flex_attention: the front door."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flexpress import checks
from flexpress.block_mask import BlockMask, check_captured_device, lists_of
from flexpress.codegen.forward import forward
from flexpress.codegen.signature import bind


class AuxRequest(NamedTuple):
    """Which statistics flex_attention is to return beside the output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """lse and max_scores, float32 (B, Hq, Q_LEN), or None where not asked for."""

    lse: torch.Tensor | None = None
    max_scores: torch.Tensor | None = None


def flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Callable | None = None, block_mask=None,
                   scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
                   kernel_options: dict | None = None, *, return_aux: AuxRequest | None = None):
    """Attention with the user's own score and mask, by a kernel printed for them. No torch.compile, no dense scores.

        out[b, h, i] = sum_j softmax_j(score_mod(query[b, h, i] . key[b, h', j] * scale, b, h, i, j)) value[b, h', j]

    over the positions j that block_mask allows, with h' = h // (Hq / Hkv).

    query           (B, Hq, Q_LEN, D_QK), float16, bfloat16 or float32, any strides
    key, value      (B or 1, Hkv, KV_LEN, D_QK) and (B or 1, Hkv, KV_LEN, D_V); head dims up to 256
    score_mod       score_mod(score, b, h, q_idx, kv_idx) -> score, on scalars: score is float32, the others int32. It may index
                    captured tensors; an index outside a tensor reads zero
    block_mask      from create_block_mask, flexpress's or torch's
    scale           a number, 1 / sqrt(D_QK) by default
    enable_gqa      allows Hq to be a multiple of Hkv
    return_lse      also return lse; return_aux=AuxRequest(lse=True) is the newer form
    kernel_options  BLOCK_M, BLOCK_N, num_warps, num_stages, PRESCALE_QK, ROWS_GUARANTEED_SAFE, BLOCKS_ARE_CONTIGUOUS, USE_TMA,
                    FLOAT32_PRECISION ("ieee" or "tf32"), with or without the prefix fwd_
    return_aux      AuxRequest(lse, max_scores)

    Returns the output (B, Hq, Q_LEN, D_V), in query's dtype and order of dimensions; (out, lse) with return_lse; (out,
    AuxOutput) with return_aux. lse is the natural logarithm of the softmax's denominator, max_scores its largest score, both
    float32 (B, Hq, Q_LEN). A row with nothing to attend to gives output 0 and lse -inf.

    Raises ValueError, TypeError or NotImplementedError for arguments, ModError for a mod that cannot be traced. Gradients are not
    implemented yet: the backward pass of the result raises NotImplementedError.

    Meaning: torch.nn.attention.flex_attention (Dong et al. 2024, arXiv 2412.05496). Method: FlashAttention-2 (Dao 2023, arXiv
    2307.08691) with block lists.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux exclude each other: write return_aux=AuxRequest(lse=True)")
    query, key, value = _autocast(query, key, value)
    _check_once(query, key, value, enable_gqa)
    options = checks.parse_options(kernel_options)
    scale = checks.check_scale(scale, query.shape[3])
    score = mask = lists = None
    if score_mod is not None:
        score = bind(score_mod, "score")
        check_captured_device(score, query.device, "score_mod")
    if block_mask is not None:
        lists, mask_mod = _read_mask(block_mask, query, key)
        checks.check_tile_fits_mask(options, lists.q_block, lists.kv_block)
        mask = bind(mask_mod, "mask")
        check_captured_device(mask, query.device, "mask_mod")
    want_max = return_aux is not None and return_aux.max_scores

    inputs = (query, key, value)
    if torch.is_grad_enabled():
        inputs += tuple(t for bound in (score, mask) if bound for t in bound[1] if isinstance(t, torch.Tensor))
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        out, lse, max_scores = _ForwardOnly.apply(
            lambda: forward(query, key, value, scale, score, mask, lists, options, output_max=want_max), *inputs)
    else:
        out, lse, max_scores = forward(query, key, value, scale, score, mask, lists, options, output_max=want_max)
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, max_scores)
    return (out, lse) if return_lse else out


_checked: set[tuple] = set()


def _check_once(query, key, value, enable_gqa: bool) -> None:
    """Argument checks, skipped for shapes, dtypes and devices that passed before."""
    try:
        tensors = (query, key, value)
        seen = (*((t.shape, t.dtype, t.device) for t in tensors), enable_gqa)
        if seen in _checked:
            return
    except (AttributeError, TypeError):  # no tensors, or nested ones: the checks will say so
        seen = None
    checks.check_tensors(query, key, value, enable_gqa)
    if len(_checked) >= 4096:
        _checked.clear()
    _checked.add(seen)


def _autocast(*tensors: torch.Tensor):
    """Under autocast, float32 inputs become autocast's dtype, as for torch's scaled_dot_product_attention."""
    device = getattr(getattr(tensors[0], "device", None), "type", "cpu")
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors)


def _read_mask(block_mask, query, key):
    """The lists and the mask_mod of a BlockMask, ours or torch's, checked against the tensors."""
    if isinstance(block_mask, BlockMask):
        lists = block_mask.as_lists()
    elif all(hasattr(block_mask, a) for a in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod", "seq_lengths")):
        # torch pads masks with False, so its full blocks are inside too; lists from elsewhere may say anything
        lists = lists_of(block_mask, block_mask.seq_lengths[1] % block_mask.BLOCK_SIZE[1] == 0)
    elif callable(block_mask):
        raise TypeError("block_mask is a function; make a BlockMask of it with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)")
    else:
        raise TypeError(f"block_mask must be a BlockMask (from create_block_mask), got {type(block_mask).__name__}")
    checks.check_mask_fits(lists, block_mask.seq_lengths, query, key, block_mask.shape)
    return lists, block_mask.mask_mod


class _ForwardOnly(torch.autograd.Function):
    """Keeps the output attached to its inputs, so that a backward pass says what is missing instead of giving no gradient."""

    @staticmethod
    def forward(ctx, run, *inputs):
        out, lse, max_scores = run()
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("flex_attention has no backward pass yet; run it under torch.no_grad(), or detach its inputs")
