"""Queries, keys and values of float8_e4m3fn, with what they are to be multiplied by.

Where a device multiplies 8 bits, kernels take them as they are, and round the softmax's weights to 8 bits too. Elsewhere, and where it is
faster, they become bfloat16, which holds all of their numbers. Kernels multiply by scales in either case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from flexpress.inputs.checks import DTYPES

from ..codegen.device.devices import architecture_of
from ..codegen.gpus import WIDEST_TILE
from ..codegen.mod.captured.tensors import check_kind, readable
from ..codegen.plan.forward import Options
from ..codegen.plan.geometry import known_strides
from ..codegen.plan.hopper_tiles import WIDEST_8
from ..codegen.plan.tiles import FEWEST_KEYS_8
from ..codegen.run.as_bfloat16 import as_bfloat16
from ..codegen.run.call import Cached, Scales
from ..codegen.run.forward_kernels import why_portable
from ..codegen.run.layouts import aligned
from ..codegen.run.values_by_keys import by_keys

FLOAT8 = torch.float8_e4m3fn
NO_GRADIENTS = "attention of float8 has no gradients: call it under torch.no_grad(), or convert query, key and value"
NOT_OF_FLOAT8 = "entropy, top_index and column_sums are not supported for float8: convert query and key, key.to(torch.bfloat16)"
ONE_TILE = 64  # queries, for which V is read once: a copy would take longer than turning its tiles in the kernel
WORTH_A_COPY = 1024  # queries and keys: what products of 16 bits in the kernel for Hopper save is more than copies take
MULTIPLIED = ("sm_90", "sm_100")  # architectures of which kernels multiply 8 bits


class Quantised(NamedTuple):
    """Scales of query, key and value, and the output's dtype, as a caller gives them; None where not."""

    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None


def quantised(q_scale, k_scale, v_scale, out_dtype) -> Quantised | None:
    """Those, or None if there are none of them."""
    if q_scale is k_scale is v_scale is out_dtype is None:
        return None
    return Quantised(q_scale, k_scale, v_scale, out_dtype)


def output_dtype(query: torch.Tensor, asked: torch.dtype | None) -> torch.dtype:
    """The output's dtype, where a caller has asked for this one."""
    return asked or (torch.bfloat16 if query.dtype == FLOAT8 else query.dtype)


def check_quantised(given: Quantised, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raises TypeError or ValueError for scales, or an output's dtype, that do not go with query (B, Hq, Q_LEN, D) and key."""
    batch, heads = query.shape[0], key.shape[1]
    for name, scale in zip(("q_scale", "k_scale", "v_scale"), given, strict=False):
        if scale is not None:
            _check_scale(name, scale, query)
            if scale.numel() != 1 and tuple(scale.shape) not in ((heads,), (1, heads), (batch, heads), (batch, 1)):
                raise ValueError(
                    f"{name} must have one element or shape ({heads},) or ({batch}, {heads}), by the heads of key {tuple(key.shape)} and "
                    f"the batch entries of query {tuple(query.shape)}; got {tuple(scale.shape)}"
                )
    _check_output(query, given.out_dtype)


def check_cached_query(query: torch.Tensor, k_cache: torch.Tensor, _, q_scale, out_dtype) -> None:
    """Raises TypeError or ValueError for q_scale and out_dtype of cached_attention that do not go with query and k_cache (N, S, Hkv, D)."""
    if q_scale is not None:
        heads = k_cache.shape[2]
        _check_scale("q_scale", q_scale, query)
        if q_scale.numel() != 1 and tuple(q_scale.shape) != (heads,):
            shapes = f"the heads of k_cache {tuple(k_cache.shape)}; got {tuple(q_scale.shape)}"
            raise ValueError(f"q_scale must have one element or shape ({heads},), by {shapes}")
    _check_output(query, out_dtype)


def _check_output(query: torch.Tensor, out_dtype) -> None:
    if out_dtype is not None:
        if query.dtype != FLOAT8:
            raise TypeError(f"out_dtype is for float8_e4m3fn, but query has {query.dtype}, which is the output's: leave it out")
        if not isinstance(out_dtype, torch.dtype) or out_dtype not in DTYPES:
            raise TypeError(f"out_dtype is {out_dtype!r}; it must be torch.bfloat16, torch.float16 or torch.float32")


def _check_scale(name: str, scale, query: torch.Tensor) -> None:
    if query.dtype != FLOAT8:
        raise TypeError(f"{name} is for float8_e4m3fn, but query has {query.dtype}: leave it out")
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} must be a float32 tensor, got {type(scale).__name__}: torch.tensor({scale!r}, device=query.device)")
    check_kind(name, scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}: {name}.float()")
    if scale.device != query.device:
        raise ValueError(f"{name} is on {scale.device}, but query is on {query.device}: {name}.to(query.device)")


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Raises NotImplementedError if one of them requires grad."""
    if any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError(NO_GRADIENTS)


def refuse_transformed(query: torch.Tensor) -> None:
    """Raises NotImplementedError for float8 inside of transforms."""
    if isinstance(query, torch.Tensor) and query.dtype == FLOAT8:
        raise NotImplementedError(
            "float8 is not supported inside transforms of torch.func, and in forward mode: convert query, key and value"
        )


def refuse_float8_over_devices(query: torch.Tensor, given: Quantised | None) -> None:
    """Raises NotImplementedError for float8 where several devices compute."""
    if given is not None or query.dtype == FLOAT8:
        raise NotImplementedError("float8 is not supported for DTensors, and with context=: convert query, key and value")


def read_scales(given: Quantised | None) -> tuple[tuple[str, Scales], ...]:
    """Scales that were checked, as kernels take them."""
    if given is None:
        return ()
    found = []
    for name, scale in zip("qkv", given, strict=False):
        if scale is not None:
            scale = aligned(readable(f"{name}_scale", scale))
            spread = scale.reshape(1, 1) if scale.numel() == 1 else scale if scale.ndim == 2 else scale[None]
            found.append((name, Scales(scale, known_strides(spread.shape, spread.stride()))))
    return tuple(found)


def as_multiplied(q, k, v, options: Options, kv_block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of float8 as this device's kernels take them. kv_block: keys of a block of a mask, or 0."""
    arch = architecture_of(q.device)
    if arch == "cpu" and not options.use_tma:  # kernels in C++ read every dtype, and the interpreter every layout
        return q, k, v
    keys = dict(options.tile).get("BLOCK_N", FEWEST_KEYS_8)
    narrow = keys < FEWEST_KEYS_8 or kv_block % FEWEST_KEYS_8
    few_bits = arch in (*MULTIPLIED, "cpu") and not narrow and max(q.shape[3], v.shape[3]) <= WIDEST_TILE
    if not few_bits or (arch == "sm_90" and _faster_in_16_bits(q, k, v, options, kv_block)):
        return as_bfloat16(q), as_bfloat16(k), as_bfloat16(v)
    if options.use_tma is False or (options.use_tma is None and q.shape[2] <= ONE_TILE):
        return q, k, v
    return q, k, by_keys(v)


def _faster_in_16_bits(q, k, v, options: Options, kv_block: int) -> bool:
    """Has the kernel for Hopper no tile of 8 bits for these head dims, but one of bfloat16 that beats the portable kernel?"""
    (Z, Hq, Q_LEN, d_qk), KV_LEN, d_v = q.shape, k.shape[2], v.shape[3]
    if (d_qk <= WIDEST_8.q_and_k and d_v <= WIDEST_8.v) or min(Q_LEN, KV_LEN) < WORTH_A_COPY:
        return False
    if options.use_tma is False or options.tile or options.backend not in (None, "HOPPER"):
        return False
    return why_portable(Q_LEN, KV_LEN, Z * Hq, max(d_qk, d_v), bool(kv_block), q.device) is None


def with_query_scale(where: Cached, q_scale: torch.Tensor | None, kv_heads: int) -> Cached:
    """Scales of a cache that bring scores to where q_scale, checked, does, too."""
    if q_scale is None:
        return where
    ones = torch.ones(kv_heads, dtype=torch.float32, device=q_scale.device)
    k_scales = (ones if where.k_scales is None else where.k_scales) * q_scale.detach().reshape(-1)
    return replace(where, k_scales=k_scales, v_scales=ones if where.v_scales is None else where.v_scales)
