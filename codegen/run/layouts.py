"""How tensors lie in memory: outputs as their inputs do, rows that the backward kernels can read, and elements that share a place."""

from __future__ import annotations

import torch

from ..device.memory import empty
from ..plan.geometry import FARTHEST_ROWS
from ..registry import remembered


def output_like(q: torch.Tensor, d_v: int) -> torch.Tensor:
    """An empty (Z, Hq, Q_LEN, D_V) tensor laid out as q is, so that (B, S, H, D) code gets (B, S, H, D) back."""
    return empty((*q.shape[:3], d_v), strides_like(q, d_v), q.dtype, q.device)


def strides_like(q: torch.Tensor, d_v: int) -> tuple[int, ...]:
    """The strides of that."""
    return _strides_like(q.shape[:3], q.stride(), d_v)


def traced_like(q: torch.Tensor, d_v: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`output_like` for tensors without values, whose extents may be symbols; of q's dtype by default."""
    return q.new_empty_strided((*q.shape[:3], d_v), _ordered(q.shape[:3], q.stride(), d_v), dtype=dtype or q.dtype)


@remembered("strides of outputs", 4096)
def _strides_like(shape: tuple[int, ...], order: tuple[int, ...], d_v: int) -> tuple[int, ...]:
    return _ordered(shape, order, d_v)


def _ordered(shape: tuple[int, ...], order: tuple[int, ...], d_v: int) -> tuple[int, ...]:
    strides, step = [0, 0, 0, 1], d_v
    for i in sorted(range(3), key=lambda i: order[i]):
        strides[i] = step
        step *= torch.sym_max(shape[i], 1)
    return tuple(strides)


def shares_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """May two indices of such a tensor name one place? Exact for what slicing, permuting and expanding make."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at a multiple of 16 bytes, or such a copy."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its rows are contiguous, not too far apart, and 16-byte steps apart where they can be, else a copy."""
    return tensor if _has_rows(tensor.shape, tensor.stride(), 16 // tensor.element_size()) else tensor.contiguous()


@remembered("checked strides of the backward pass", 4096)
def _has_rows(shape: tuple, strides: tuple, vector: int) -> bool:
    if strides[3] != 1 and shape[3] > 1 or strides[2] > FARTHEST_ROWS and shape[2] > 1:
        return False
    return shape[3] % vector != 0 or not any(s % vector for s, n in zip(strides[:3], shape, strict=False) if n > 1)
