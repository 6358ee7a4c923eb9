"""FlashAttention's functions, on tensors (B, S, H, D): flex_attention behind the signatures of flash_attn_triton.

    out = flash_attn_func(q, k, v, bias=None, causal=False, softmax_scale=None, return_lse=False)
    out = flash_attn_kvpacked_func(q, kv, ...)
    out = flash_attn_qkvpacked_func(qkv, ...)

Arguments that the three share:

bias           (B or 1, H or 1, Sq or 1, Skv or 1), a floating-point tensor added to the scaled scores, before the softmax: (1, H, 1, Skv)
               is a vector per head, (1, H, Sq, Skv) a matrix. Read where it lies; -inf hides a position
causal         query i sees key j if j <= i, whatever the lengths: the triangle starts in the top left corner. FlashAttention's CUDA
               functions align it to the bottom right corner from version 2.1 on; flexpress.flash_attn has those
softmax_scale  a number, 1 / sqrt(D) by default; 0 is 0, where FlashAttention's Triton file takes it for the default
return_lse     return (out, lse): lse float32 (B, H, Sq), the natural logarithm of the softmax's denominator; -inf for a row with nothing

All take float16, bfloat16 or float32, any lengths, any strides and head dims up to 512, copy none of their inputs, and return (B, Sq, H, D)
in q's dtype and q's order of dimensions in memory. A row with nothing to attend to gives 0. DTensors, sharded over batch (dimension 0)
and heads (the last but one) or replicated, give DTensors; bias then may be one too.

ValueError, TypeError or NotImplementedError names the argument that does not fit and shows the shapes.

Source of signatures, layouts and meaning: flash_attn/flash_attn_triton.py of FlashAttention (Dao et al. 2022, arXiv 2205.14135). New here:
fewer key and value heads than query heads, float32, head dims above 128, biases with any extent of 1 and any strides, lse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch

from flexpress.attention import flex_attention
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.checks import DTYPES, MAX_HEAD_DIM, autocasts, check_rank
from flexpress.inputs.scales import softmax_scale_of
from flexpress.masks.mask_mods import without_ones
from flexpress.mods import causal as causal_mask

from .codegen.mod.captured.tensors import followed

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]


@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@compilable
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (B, Sq, H, D) to k and v (B, Skv, Hkv, D), H a multiple of Hkv. Returns (B, Sq, H, D).

    The other arguments and the errors are described at the top of this module.
    """
    followed("flash_attn_func")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tensor, "(B, S, H, D)", may_stand=True)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got k {_shape(k)} and v {_shape(v)}")
    check_together("q", q, "k", k, k.shape)
    check_together("q", q, "v", v, v.shape)
    return _attention(q, k, v, bias, causal, softmax_scale, return_lse)


@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@compilable
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (B, Sq, H, D) to kv (B, Skv, 2, Hkv, D), keys first, H a multiple of Hkv. Returns (B, Sq, H, D).

    The other arguments and the errors are described at the top of this module.
    """
    followed("flash_attn_kvpacked_func")
    check_rank("q", q, "(B, S, H, D)", may_stand=True)
    check_rank("kv", kv, "(B, S, 2, H, D)", may_stand=True)
    k, v = kv.unbind(2)
    check_together("q", q, "kv", kv, k.shape)
    return _attention(q, k, v, bias, causal, softmax_scale, return_lse)


@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, bias: torch.Tensor | None = None, causal: bool = False, softmax_scale: float | None = None, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@compilable
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, bias: torch.Tensor | None = None, causal: bool = False, softmax_scale: float | None = None, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of qkv (B, S, 3, H, D), in this order, to itself. Returns (B, S, H, D).

    The other arguments and the errors are described at the top of this module.
    """
    followed("flash_attn_qkvpacked_func")
    check_rank("qkv", qkv, "(B, S, 3, H, D)", may_stand=True)
    q, k, v = qkv.unbind(2)
    check_together("qkv", qkv, "qkv", qkv, q.shape)
    return _attention(q, k, v, bias, causal, softmax_scale, return_lse)


def _attention(q, k, v, bias, causal, softmax_scale, return_lse):
    """flex_attention on the (B, H, S, D) views of tensors that fit together."""
    score_mod = None
    if bias is not None:
        _check_bias(bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
        score_mod = added(bias)
    out = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod,
        None,
        softmax_scale_of(softmax_scale),
        enable_gqa=True,
        return_lse=return_lse,
        mask_mod=causal_mask if causal else None,
    )
    return (out[0].transpose(1, 2), out[1]) if return_lse else out.transpose(1, 2)


def added(bias: torch.Tensor) -> Callable:
    """The score_mod that adds a bias of four dimensions."""
    bias, at = without_ones(bias)

    def add_bias(score, b, h, q_idx, kv_idx):
        return score + bias[at(b, h, q_idx, kv_idx)]

    return add_bias


def _check_bias(bias: torch.Tensor, shape: tuple[int, int, int, int]) -> None:
    """Does bias broadcast to scores of `shape`, (B, H, Sq, Skv)?"""
    check_rank("bias", bias, "(B, H, Sq, Skv)", may_stand=True)
    if not bias.dtype.is_floating_point:
        raise TypeError(f"bias must have a floating-point dtype, got {bias.dtype}; it is added to the scores: -inf hides a position")
    if any(have not in (1, want) for have, want in zip(bias.shape, shape, strict=True)):
        raise ValueError(
            f"bias of shape {_shape(bias)} does not broadcast to the scores (B, H, Sq, Skv) = {shape}; each extent must be that or 1"
        )


def check_together(q_name: str, q: torch.Tensor, name: str, packed: torch.Tensor, shape: tuple) -> None:
    """Do keys or values of `shape` (B, Skv, Hkv, D), which lie in `packed`, fit to the queries in `q`? Skv is not looked at."""
    shapes = f"got {_shape(q)}" if q is packed else f"got {q_name} {_shape(q)} and {name} {_shape(packed)}"
    if not autocasts(q):  # which converts them
        if packed.dtype != q.dtype:
            raise TypeError(f"{q_name} and {name} must have the same dtype, got {q.dtype} and {packed.dtype}; convert one with .to(...)")
        if q.dtype not in DTYPES:
            raise TypeError(f"{q_name} has dtype {q.dtype}; supported are float16, bfloat16 and float32. Convert it with .to(...)")
    if q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{q_name} is on {q.device}; kernels run on CUDA or ROCm GPUs ('cuda') and on 'cpu'")
    if packed.device != q.device:
        raise ValueError(f"{q_name} is on {q.device} but {name} is on {packed.device}; move one with .to(...)")
    B, H, D = q.shape[0], q.shape[-2], q.shape[-1]
    if shape[0] != B:
        raise ValueError(f"{q_name} and {name} must have the same batch size, {shapes}")
    if shape[3] != D:
        raise ValueError(f"{q_name} and {name} must have the same head dim, {shapes}")
    if D == 0 or D > MAX_HEAD_DIM:
        raise NotImplementedError(f"{q_name} has head dim {D}; supported are 1 to {MAX_HEAD_DIM}, {shapes}")
    if shape[2] != H and (shape[2] == 0 or H % shape[2]):
        raise ValueError(f"{q_name}'s number of heads must be a multiple of {name}'s, {shapes}")


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
