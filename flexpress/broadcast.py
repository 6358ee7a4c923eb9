"""Tensors that broadcast to scores, as mods read them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def element_of(tensor: torch.Tensor) -> Callable:
    """element(b, h, q_idx, kv_idx) of a tensor of four dimensions: captured without its extents of 1, and indexed along the others only."""
    varies = tuple(extent != 1 for extent in tensor.shape)
    tensor = tensor.squeeze()

    def element(b, h, q_idx, kv_idx):
        return tensor[tuple(index for index, used in zip((b, h, q_idx, kv_idx), varies, strict=True) if used)]

    return element
