"""What a layer does in a serving step: it writes its new keys and values to its cache, then attends to that."""

from __future__ import annotations

import torch

from flexpress import mods
from flexpress.caches.cached import attention_after
from flexpress.caches.cached_arguments import no_autocast
from flexpress.caches.kv_cache import update_cache
from flexpress.caches.shared_prefix import SharedPrefix
from flexpress.inputs.cache_checks import check_still_there, described


def out_like(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """An empty output for queries (batch, tokens, Hq * D) or (batch, tokens, Hq, D), in their form."""
    D_V = v_cache.shape[-1]
    return q.new_empty((*q.shape[:2], q.shape[2] // k_cache.shape[-1] * D_V) if q.ndim == 3 else (*q.shape[:3], D_V))


def check_tokens(q, k, v, k_cache, v_cache) -> None:
    """ValueError unless q, k and v have the batch, tokens, heads and head dims of one layer with these caches."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.ndim != 4 or cache.shape[3] == 0:
            raise ValueError(f"{name} must be (entries or pages, positions, heads, head dim), got {described(cache)}")
    for name, tensor, cache in (("q", q, k_cache), ("k", k, k_cache), ("v", v, v_cache)):
        heads, head_dim = cache.shape[2:]
        check_still_there(name, tensor)
        if tensor.ndim not in (3, 4) or tensor.shape[:2] != q.shape[:2] or tensor.dtype != q.dtype:
            raise ValueError(
                "q, k and v must be (batch, tokens, heads * head dim) or (batch, tokens, heads, head dim) with equal batch, tokens and "
                f"dtype, got q {described(q)} and {name} {described(tensor)}"
            )
        width = tensor.shape[2:].numel()
        if tensor.ndim == 4 and tensor.shape[3] != head_dim or width % head_dim or name != "q" and width != heads * head_dim:
            wanted = f"{'heads' if name == 'q' else heads} * {head_dim}"
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must have {wanted} as its last extent, or its last two, for a cache {tuple(cache.shape)}"
            )


def _check_one_each(cu_seqlens: torch.Tensor, kv_len: torch.Tensor) -> None:
    """Does cu_seqlens give each sequence one token? Looked at on the CPU. One that is not there (kv_len 0) may have a row, and no token."""
    if cu_seqlens.device.type != "cpu":
        return
    starts = cu_seqlens.tolist()
    for b, length in enumerate(kv_len.tolist()):
        if length and starts[b + 1] - starts[b] != 1:
            raise ValueError(f"q has a token for each sequence, but by cu_seqlens {starts} sequence {b} has {starts[b + 1] - starts[b]}")


def attend(
    qkv,
    kv_len,
    cu_seqlens,
    where,
    caches,
    turning,
    scale,
    sliding_window,
    softcap,
    scales,
    sinks,
    shared_prefix: SharedPrefix | None = None,
) -> torch.Tensor:
    """Write the new keys and values, then attend; the caches' extents say what heads there are. Arguments as serving_ops has them."""
    check_tokens(*qkv, *caches)
    if kv_len.ndim != 1:
        raise ValueError(f"kv_len must be int32 (n,), a length for each sequence, got {described(kv_len)}")
    if cu_seqlens is not None and cu_seqlens.shape != (kv_len.shape[0] + 1,):
        raise ValueError(
            f"cu_seqlens {tuple(cu_seqlens.shape)} must be one longer than kv_len {tuple(kv_len.shape)}, both from the metadata operator"
        )
    q, (k_cache, v_cache) = qkv[0], caches
    sequences, rows = kv_len.shape[0], q.shape[0]
    if 1 < rows < sequences and q.shape[1] == 1:  # metadata of the largest batch, as a CUDA graph has it: row i is sequence i
        sequences, kv_len, where = rows, kv_len[:rows], {name: t[:rows] for name, t in where.items()}
    one_each = q.shape[:2] == (sequences, 1)
    if one_each and cu_seqlens is not None:
        _check_one_each(cu_seqlens, kv_len)
    split = tuple(
        t if t.ndim == 4 else t.unflatten(-1, (-1, cache.shape[-1])) for t, cache in zip(qkv, (k_cache, k_cache, v_cache), strict=True)
    )
    if cu_seqlens is None or one_each:  # (b, s, heads, head dim) to (b, heads, s, head dim)
        query, key, value = (t.transpose(1, 2) for t in split)
    else:
        query, key, value = (t.flatten(0, 1) for t in split)
        where = {**where, "cu_seqlens_q": cu_seqlens}
    where = {**where, "k_scale": scales[0], "v_scale": scales[1]}
    score_mod = mods.softcap(softcap) if softcap else None
    mask_mod = mods.sliding_window(sliding_window) if sliding_window else None
    rope, interleaved, rope_tail = turning
    turn = {} if rope is None else {"query": query, "rope": rope, "interleaved": interleaved, "rope_tail": rope_tail}
    with no_autocast(q):
        mods_of_layer = {"score_mod": score_mod, "mask_mod": mask_mod, "scale": scale, "sinks": sinks}
        how = {**where, **mods_of_layer, "shared_prefix": shared_prefix}
        attention = attention_after(query, k_cache, v_cache, kv_len, **how)
        turned = update_cache(key, value, k_cache, v_cache, kv_len, **where, **turn)
        attended, _ = attention(query if turned is None else turned)
    if attended.ndim == 4:
        attended = attended.transpose(1, 2)
    heads = attended.shape[-2:] if q.ndim == 4 else (attended.shape[-2:].numel(),)
    return attended.reshape(*q.shape[:2], *heads).contiguous()  # contiguous already, but where q is not
