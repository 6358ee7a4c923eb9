"""The attention implementations that are compared, all called the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from workloads import CAP, Mods, Workload, causal, document_ids, documents, softcap, window

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def flexpress(row: Workload, mods: Mods, device: str, **options: Any) -> Attention:
    """Flexpress, with its own block mask."""
    import flexpress

    mask_mod = mods.mask
    mask = flexpress.create_block_mask(mask_mod, None, None, row.q_len, row.length, device) if mask_mod else None

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flexpress.flex_attention(q, k, v, score_mod=mods.score, block_mask=mask, enable_gqa=row.gqa, sinks=mods.sinks, **options)

    return attention


def torch_flex(row: Workload, mods: Mods, device: str, **kernel_options: Any) -> Attention:
    """torch.compile(flex_attention) for this one shape.

    The block mask is made without torch.compile: it is the same mask, its making is not timed here, and
    compiling it costs seconds.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    score_mod, mask_mod = mods[:2]
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


def sdpa_of_torchs_choice(row: Workload, mods: Mods, device: str) -> Attention:
    """scaled_dot_product_attention, which chooses its backend."""
    return partial(scaled_dot_product_attention, is_causal=row.mask is not None, enable_gqa=row.gqa)


def manual(row: Workload, mods: Mods, device: str) -> Attention:
    """What people write by hand: a product, a softmax, a product."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * row.d_qk**-0.5).softmax(-1) @ v

    return attention


def ends_of_documents(row: Workload, device: str) -> tuple[torch.Tensor, int]:
    """Return what varlen functions want to know of a row with documents: where they begin and end, int32, and the longest length."""
    lengths = document_ids(row.length, row.size, "cpu").bincount().repeat(row.batch)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return starts.to(device, torch.int32), int(lengths.max())


def packed(attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Call `attend` with (tokens, heads, head dim): views, if memory is "BSHD". Returns (batch, heads, length, head dim)."""
    out = attend(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)))
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def flexpress_varlen(row: Workload, mods: Mods, device: str) -> Attention:
    """varlen_attention of the same documents, causal."""
    import flexpress

    cu_seqlens, _ = ends_of_documents(row, device)
    return partial(packed, partial(flexpress.varlen_attention, cu_seqlens_q=cu_seqlens, mask_mod=causal(row, device)))


def fa4(row: Workload, mods: Mods, device: str) -> Attention:
    """FlashAttention-4, called as its users call it: by `causal`, `window_size`, `softcap` and `learnable_sink`, documents packed."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    given: dict[str, Any] = {"causal": row.mask is not None, "learnable_sink": mods.sinks}
    if row.mask is window:
        given["window_size"] = (row.size - 1, 0)  # it counts the keys before the query
    if row.score is softcap:
        given["softcap"] = CAP
    if row.mask is documents:
        cu_seqlens, longest = ends_of_documents(row, device)
        given |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}

        def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flash_attn_varlen_func(q, k, v, **given)[0]

        return partial(packed, varlen)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **given)[0].transpose(1, 2)

    return attention


def fa4_takes(row: Workload) -> bool:
    """Whether FlashAttention-4 has arguments for the row: its score_mod is another language."""
    return row.half and row.learned is None and row.score in (None, softcap) and row.mask in (None, causal, window, documents)


def in_layout(layout: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the (B, H, S, D) tensors, which are contiguous, with their memory in `layout`, "BHSD" or "BSHD"."""
    if layout == "BHSD":
        return tuple(tensors)
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)


@dataclass(frozen=True)
class Implementation:
    """How to build an attention function for a workload, which workloads it takes, and how it likes q, k, v to lie in memory."""

    build: Callable[[Workload, Mods, str], Attention]
    takes: Callable[[Workload], bool] = lambda row: True
    layout: str = "BHSD"


IMPLEMENTATIONS = {
    "flexpress": Implementation(flexpress),
    "flexpress_deterministic": Implementation(partial(flexpress, deterministic=True)),
    "flexpress_varlen": Implementation(flexpress_varlen, lambda row: row.mask is documents and row.plain_scores, "BSHD"),
    "torch_flex": Implementation(torch_flex, lambda row: row.sinks is None),
    "torch_flex_tma": Implementation(torch_flex_tma, lambda row: row.sinks is None),
    "cudnn": Implementation(sdpa(SDPBackend.CUDNN_ATTENTION), lambda row: row.half and row.dense_or_causal),
    "flash": Implementation(sdpa(SDPBackend.FLASH_ATTENTION), lambda row: row.half and row.dense_or_causal and row.d_qk == row.d_v),
    "fa4": Implementation(fa4, fa4_takes, "BSHD"),
    "sdpa": Implementation(sdpa_of_torchs_choice, lambda row: not row.half and row.dense_or_causal),
    "manual": Implementation(manual, lambda row: not row.half and row.dense_or_causal and row.mask is None and not row.gqa),
}
