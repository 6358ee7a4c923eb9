"""Writing new keys and values into a cache, contiguous or in pages, and rotary position embedding on the way."""

from __future__ import annotations

import torch

from flexpress.cache_checks import check_batch, check_contents, described
from flexpress.codegen.compiling import runs_uncompiled
from flexpress.codegen.tensors import check_memory, check_surroundings
from flexpress.codegen.update_cache import update


def rope_table(length: int, rope_dim: int, theta: float = 10000.0, scale: float = 1.0, *, inv_freq: torch.Tensor | None = None,
               device=None) -> torch.Tensor:
    """Cosine and sine of the angles of rotary position embedding, float32 (length, rope_dim / 2, 2), computed in float64.

    Dimension pair j of position p is turned by p / scale * theta ** (-2 j / rope_dim).

    scale      linear scaling: positions are divided by it
    inv_freq   (rope_dim / 2,): angles per position, instead of theta's, for any other scaling (that of Llama 3, YaRN and so on)

    Method: RoFormer (Su et al. 2021, arXiv 2104.09864).
    """
    if rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"rope_dim must be even and at least 2, got {rope_dim}")
    if inv_freq is None:
        inv_freq = theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64, device=device) / rope_dim)
    elif inv_freq.shape != (rope_dim // 2,):
        raise ValueError(f"inv_freq must have shape ({rope_dim // 2},) for rope_dim {rope_dim}, got {tuple(inv_freq.shape)}")
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] / scale * inv_freq.to(device, torch.float64)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float()


@runs_uncompiled
def update_cache(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_len: torch.Tensor, *,
                 page_table: torch.Tensor | None = None, cache_loc: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
                 max_q_len: int | None = None, q_offset: torch.Tensor | None = None, query: torch.Tensor | None = None,
                 rope: torch.Tensor | None = None, interleaved: bool = False, k_scale: torch.Tensor | None = None,
                 v_scale: torch.Tensor | None = None, check: bool | None = None) -> torch.Tensor | None:
    """Write the new keys and values of B sequences to their places in a cache, in one kernel.

    key, value    (B, Hkv, Q_LEN, D_QK) and (B, Hkv, Q_LEN, D_V); or with cu_seqlens_q (T, Hkv, D_QK) and (T, Hkv, D_V)
    rope          from rope_table, with a row for every position that a sequence reaches: keys are turned before they are written. rope_dim
                  may be less than D_QK: the dimensions after it stay as they are
    interleaved   pairs are dimensions 2j and 2j + 1; else j and j + rope_dim / 2 (as in Llama's weights on Hugging Face)
    query         (B, Hq, Q_LEN, D_QK) or (T, Hq, D_QK), with rope: a turned copy of it is returned
    check         look at what kv_len, cu_seqlens_q, page_table and cache_loc hold, and raise ValueError before anything is written; by
                  default where that does not wait for a GPU. Unchecked, a position that has no place is not written

    Other arguments as for cached_attention: kv_len counts the new positions, too. k_cache and v_cache are changed, and may be
    float8_e4m3fn with k_scale and v_scale. Returns the turned query, or None.
    """
    check_surroundings("update_cache")
    cached = check_batch("key", key, k_cache, v_cache, kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, q_offset, k_scale, v_scale)
    for name, tensor in (("value", value), ("query", query), ("rope", rope)):
        if isinstance(tensor, torch.Tensor):
            check_memory(name, tensor)
            if tensor.device != key.device:
                raise ValueError(f"{name} is on {tensor.device} but key is on {key.device}; move one with .to(...)")
    ragged = cu_seqlens_q is not None
    Hkv, D_V = k_cache.shape[2], v_cache.shape[3]
    if key.shape[1] != Hkv or value.shape != (*key.shape[:-1], D_V) or value.dtype != key.dtype:
        raise ValueError(f"key is {described(key)} and value {described(value)}; k_cache {tuple(k_cache.shape)} and v_cache "
                         f"{tuple(v_cache.shape)} need {Hkv} heads, head dims {k_cache.shape[3]} and {D_V}, and all else alike")
    if query is not None and rope is None:
        raise ValueError("query is turned by rope; pass rope=rope_table(...), or leave query out")
    if rope is not None:
        _check_rope(rope, key)
    if query is not None and (query.dtype != key.dtype or query.shape[:1] + query.shape[2:] != key.shape[:1] + key.shape[2:]):
        raise ValueError(f"query is {described(query)} and key {described(key)}: all but the number of heads must be equal")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(f"the head dims of k_cache and v_cache must be contiguous, got strides {k_cache.stride()} and {v_cache.stride()}")
    if check or (check is None and key.device.type == "cpu"):
        reached = check_contents(key, k_cache, kv_len, page_table, cache_loc, cu_seqlens_q, q_offset)
        if rope is not None and reached > rope.shape[0]:
            raise ValueError(f"rope {tuple(rope.shape)} has {rope.shape[0]} positions, but a new token has position {reached - 1}: make it "
                             f"with rope_table({reached}, ...) or longer")
    if key.numel() == 0 or cached.max_q == 0 and ragged:
        return query
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (key, value))
    q = q_out = None
    if rope is not None:
        q = k[:, :0] if query is None else query if query.stride(-1) == 1 else query.contiguous()
        q_out = torch.empty_like(q)
    tensors = k, v, q, q_out
    if not ragged:  # tokens before heads
        tensors = tuple(t if t is None else t.transpose(1, 2) for t in tensors)
    update(*tensors[:2], k_cache, v_cache, cached, q_offset, rope, *tensors[2:], interleaved=interleaved)
    return None if query is None else q_out


def _check_rope(rope: torch.Tensor, key: torch.Tensor) -> None:
    fits = rope.ndim == 3 and rope.shape[2] == 2 and rope.dtype == torch.float32 and rope.device == key.device
    if not fits or not 1 <= rope.shape[1] <= key.shape[-1] // 2 or rope.stride()[1:] != (2, 1):
        raise ValueError(f"rope must be float32 (positions, rope_dim / 2, 2) on {key.device}, from rope_table, with rope_dim up to the "
                         f"{key.shape[-1]} of key, got {described(rope)}")
