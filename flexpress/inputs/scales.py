"""scale= as a number or as a tensor, whose number is on a device or is learned."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexpress.inputs.checks import LARGEST_FLOAT32, check_scale

from ..codegen.mod.captured.tensors import check_kind, is_transformed, tracing
from ..codegen.mod.tracing.capture import name_of, plain


def read_scale(scale, score_mod: Callable | None, head_dim: int, device: torch.device) -> tuple[float, Callable | None]:
    """The scale as a number, and the score_mod. A tensor that wants its gradient, or whose number would have to be waited for, is captured:
    then the number is 1 and the score_mod that of scores times the tensor. Raises TypeError or ValueError."""
    if type(scale) is float and abs(scale) <= LARGEST_FLOAT32:  # as most are
        return scale, score_mod
    if isinstance(scale, torch.SymFloat):
        scale = number_on(device, scale)
    if not isinstance(scale, torch.Tensor):
        return check_scale(scale, head_dim), score_mod
    moving = is_transformed()
    if not moving:
        check_kind("scale", scale)
    _check_is_number("scale", scale)
    if scale.device.type == "cpu" and not (scale.requires_grad and torch.is_grad_enabled()) and not (tracing() or moving):
        return check_scale(scale.item(), head_dim), score_mod
    if scale.device.type != "cpu" and scale.device != device:
        raise ValueError(f"scale is on {scale.device} but query is on {device}; move it with .to(...)")
    return 1.0, _scaled(scale.to(device, torch.float32, non_blocking=True).reshape(()), score_mod)


def softmax_scale_of(softmax_scale):
    """What flash_attn's functions take, checked under their name for it. A tensor's value is read later."""
    if isinstance(softmax_scale, torch.Tensor):
        _check_is_number("softmax_scale", softmax_scale)
    else:
        check_scale(softmax_scale, 1, "softmax_scale")
    return softmax_scale


def _check_is_number(name: str, scale: torch.Tensor) -> None:
    if scale.numel() != 1 or scale.is_complex() or scale.dtype == torch.bool:
        raise ValueError(f"{name} must be a number, got a tensor of {scale.dtype} and shape {tuple(scale.shape)}")


def number_on(device: torch.device, value: torch.SymFloat) -> torch.Tensor:
    """A float that torch's compiler keeps open, as a tensor. By a product, which that compiler follows: of another operator it makes a
    graph for each value."""
    return torch.ones((), dtype=torch.float32, device=device) * value


def _scaled(factor: torch.Tensor, score_mod: Callable | None) -> Callable:
    """The score_mod of scores times a tensor."""
    if score_mod is None:

        def scaled(score, b, h, q_idx, kv_idx):
            return score * factor

        return scaled

    score_mod = plain(score_mod)

    def scaled_mod(score, b, h, q_idx, kv_idx):
        return score_mod(score * factor, b, h, q_idx, kv_idx)

    scaled_mod.__name__ = f"scaled_{name_of(score_mod)}"
    return scaled_mod
