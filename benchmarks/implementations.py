"""The attention implementations that are compared, all called the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from workloads import Mod, Workload

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Mods = tuple[Mod | None, Mod | None]


def flexpress(row: Workload, mods: Mods, device: str, **options: Any) -> Attention:
    """Flexpress, with its own block mask."""
    import flexpress

    score_mod, mask_mod = mods
    mask = flexpress.create_block_mask(mask_mod, None, None, row.q_len, row.length, device) if mask_mod else None

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flexpress.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=row.gqa, **options)

    return attention


def torch_flex(row: Workload, mods: Mods, device: str, **kernel_options: Any) -> Attention:
    """torch.compile(flex_attention) for this one shape.

    The block mask is made without torch.compile: it is the same mask, its making is not timed here, and
    compiling it costs seconds.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    score_mod, mask_mod = mods
    mask = create_block_mask(mask_mod, None, None, row.q_len, row.length, device) if mask_mod else None
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=row.gqa, kernel_options=kernel_options or None)

    return attention


def torch_flex_tma(row: Workload, mods: Mods, device: str) -> Attention:
    """torch_flex with the tensor memory accelerator asked for."""
    return torch_flex(row, mods, device, USE_TMA=True)


def sdpa(backend: SDPBackend) -> Callable[[Workload, Mods, str], Attention]:
    """Return the builder of scaled_dot_product_attention on one backend."""

    def build(row: Workload, mods: Mods, device: str) -> Attention:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=row.mask is not None, enable_gqa=row.gqa)

        return attention

    return build


@dataclass(frozen=True)
class Implementation:
    """How to build an attention function for a workload, and which workloads it takes."""

    build: Callable[[Workload, Mods, str], Attention]
    takes: Callable[[Workload], bool] = lambda row: True


IMPLEMENTATIONS = {
    "flexpress": Implementation(flexpress),
    "flexpress_deterministic": Implementation(partial(flexpress, deterministic=True)),
    "torch_flex": Implementation(torch_flex),
    "torch_flex_tma": Implementation(torch_flex_tma),
    "cudnn": Implementation(sdpa(SDPBackend.CUDNN_ATTENTION), lambda row: row.dense_or_causal),
    "flash": Implementation(sdpa(SDPBackend.FLASH_ATTENTION), lambda row: row.dense_or_causal and row.d_qk == row.d_v),
}
