"""The kernel that writes new keys and values into a cache, and turns queries and keys by their positions: its plan and its driver."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.kernel import backend_of, kernel_for
from ..registry import remembered
from ..text.spec import KernelSpec, dtype_name
from .decode import Cached

BLOCK_T = 16  # tokens of a program; for a single new token of every sequence 1


class UpdateCase(NamedTuple):
    """What changes the kernel."""

    dtype: torch.dtype
    d_qk: int
    d_v: int
    ragged: bool = False
    located: bool = False
    page_size: int = 0
    offsets: bool = False
    scales: bool = False
    rope_dim: int = 0  # 0: nothing is turned
    interleaved: bool = False
    converts: bool = False  # the cache has another dtype


@remembered("specs of update_cache", 256)
def update_spec(case: UpdateCase, backend: str) -> KernelSpec:
    """The kernel's KernelSpec."""
    pointers = [
        *(["CU_Q"] if case.ragged else []),
        *(["KV_LOCS"] if case.located else []),
        *(["PAGES"] if case.page_size else []),
        *(["OFFSETS"] if case.offsets else []),
        *(["K_SCALES", "V_SCALES"] if case.scales else []),
        *(["TABLE", "Q", "Q_OUT"] if case.rope_dim else []),
    ]
    outer = "" if case.ragged else "z"
    numbers = [
        "Hkv",
        "Q_LEN",
        "CAPACITY",
        *(["Z", "T"] if case.ragged else []),
        *(["ENTRIES"] if case.page_size or case.located else []),
        *(f"stride_{t}{d}" for t in "kv" for d in f"{outer}mh"),
        *(f"stride_{t}c{d}" for t in "kv" for d in "zmh"),
        *(["stride_pages"] if case.page_size else []),
    ]
    if case.rope_dim:
        numbers += ["TABLE_ROWS", "stride_table", *(f"stride_{t}{d}" for t in "qo" for d in f"{outer}mh")]
    rest = case.d_qk - case.rope_dim
    flags = {
        "DTYPE": dtype_name(case.dtype),
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "D_V_ROUNDED": _power(case.d_v),
        "REST_ROUNDED": _power(rest),
        "ROPE_DIM": case.rope_dim,
        "HALF": case.rope_dim // 2,
        "HALF_ROUNDED": _power(case.rope_dim // 2),
        "INTERLEAVED": case.interleaved,
        "RAGGED": case.ragged,
        "LOCATED": case.located,
        "PAGE_SIZE": case.page_size,
        "OFFSETS": case.offsets,
        "KV_SCALES": case.scales,
        "CONVERTS": case.converts,
        "pointers": tuple(pointers),
        "numbers": tuple(numbers),
        "parameters": tuple(numbers),
    }
    return KernelSpec("update_cache", (), tuple(flags.items()), backend)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def update(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cached: Cached,
    offsets: torch.Tensor | None,
    table: torch.Tensor | None,
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    *,
    interleaved: bool,
) -> None:
    """Write k and v, and q turned to q_out. Shapes and dtypes are checked, contents need not be; all are [(Z,) tokens, heads, head dim]
    with a contiguous head dim. Ragged tokens after the last sequence get to q_out as they are.

    table   float32 [positions, rope_dim / 2, 2], contiguous in its last two dimensions; beyond its end its last row counts
    """
    ragged, paged = cached.cu_q is not None, cached.pages is not None
    Q_LEN = max(cached.max_q, 1) if ragged else k.shape[1]
    Z, Hkv = cached.kv_lens.shape[0], k.shape[-2]
    capacity = k_cache.shape[1] * (cached.pages.shape[1] if paged else 1)
    turned = table is not None
    case = UpdateCase(
        k.dtype,
        k.shape[-1],
        v.shape[-1],
        ragged,
        cached.kv_locs is not None,
        k_cache.shape[1] if paged else 0,
        offsets is not None,
        cached.k_scales is not None,
        2 * table.shape[1] if turned else 0,
        interleaved,
        k_cache.dtype != k.dtype,
    )
    kernel = kernel_for(update_spec(case, backend_of(k.device.type)))
    pointers = [t for t in (cached.cu_q, cached.kv_locs, cached.pages, offsets, cached.k_scales, cached.v_scales) if t is not None]
    numbers = [
        Hkv,
        Q_LEN,
        capacity,
        *((Z, k.shape[0]) if ragged else ()),
        *(k_cache.shape[:1] if paged or cached.kv_locs is not None else ()),
        *k.stride()[:-1],
        *v.stride()[:-1],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *([cached.pages.stride(0)] if paged else []),
    ]
    if turned:
        pointers += [table, q, q_out]
        numbers += [*table.shape[:1], table.stride(0), *q.stride()[:-1], *q_out.stride()[:-1]]
    tokens = 1 if Q_LEN == 1 else BLOCK_T
    heads = q.shape[-2] if turned else 0
    grid = (-(-Q_LEN // tokens) * (Z + (ragged and heads > 0)), Hkv + heads)
    kernel.launch(grid, (k, v, k_cache, v_cache, cached.kv_lens, *pointers, *numbers), k.device, (tokens,), num_warps=4, num_stages=1)
