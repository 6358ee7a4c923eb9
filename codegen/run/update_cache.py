"""The driver of the kernel that writes new keys and values into a cache, and turns queries and keys by their positions."""

from __future__ import annotations

import torch

from ..device.devices import backend_of
from ..device.kernel import kernel_for
from ..plan.update_cache import BLOCK_T, UpdateCase, update_spec
from ..text.parameters import named_strides
from .decode import Cached


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
        ragged=ragged,
        located=cached.kv_locs is not None,
        page_size=k_cache.shape[1] if paged else 0,
        offsets=offsets is not None,
        kv_dtype=k_cache.dtype if k_cache.dtype != k.dtype else None,
        scales=cached.k_scales is not None,
        rope_dim=2 * table.shape[1] if turned else 0,
        interleaved=interleaved,
    )
    outer = "mh" if ragged else "zmh"
    values = {
        **{"K": k, "V": v, "K_CACHE": k_cache, "V_CACHE": v_cache, "OFFSETS": offsets, **cached.named},
        **{"Hkv": Hkv, "Q_LEN": Q_LEN, "CAPACITY": capacity, "Z": Z, "T": k.shape[0], "ENTRIES": k_cache.shape[0]},
        **named_strides("k", outer, k.stride()),
        **named_strides("v", outer, v.stride()),
        **named_strides("kc", "zmh", k_cache.stride()),
        **named_strides("vc", "zmh", v_cache.stride()),
    }
    if paged:
        values["stride_pages"] = cached.pages.stride(0)
    if turned:
        values |= {"TABLE": table, "TABLE_ROWS": table.shape[0], "stride_table": table.stride(0), "Q": q, "Q_OUT": q_out}
        values |= {**named_strides("q", outer, q.stride()), **named_strides("o", outer, q_out.stride())}
    kernel = kernel_for(update_spec(case, backend_of(k.device.type)))
    tokens = 1 if Q_LEN == 1 else BLOCK_T
    heads = q.shape[-2] if turned else 0
    grid = (-(-Q_LEN // tokens) * (Z + (ragged and heads > 0)), Hkv + heads)
    kernel.launch(grid, kernel.spec.arguments(values), k.device, (tokens,), num_warps=4, num_stages=1)
