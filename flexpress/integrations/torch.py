"""torch's own attention functions by flexpress's kernels.

    import flexpress.integrations.torch
    flexpress.integrations.torch.activate()

`scaled_dot_product_attention`, wherever torch chooses FlashAttention for it, and `torch.nn.attention.varlen.varlen_attn` then run
flexpress's kernels on NVIDIA GPUs, forward and backward. torch.nn.attention.restore_flash_attention_impl() ends it.

The operators of torch that change hands are those of its registry of FlashAttention implementations. Layouts are FlashAttention's:
(B, S, H, D), or (total, H, D) with cu_seqlens; causal masks and windows begin in the bottom right corner; lse is (B, H, S) or (H, total).
"""

from __future__ import annotations

import math

import torch
from torch.library import Library

from flexpress.caches.cached import cached_attention
from flexpress.calls.call import attend, bound
from flexpress.calls.packed_call import packed_call
from flexpress.flash_attn.meaning import Options, cache_mask_mod_of, mask_mod_of, options_of, placed_by_sequence, placed_last, same_place
from flexpress.masks.mask_mods import noop_mask

from ..codegen.run.backward import backward
from ..codegen.run.call import Bound, Rows

NAME = "flexpress"


def register() -> None:
    """Make the name "flexpress" known to torch.nn.attention.activate_flash_attention_impl. Nothing else changes.

    Raises NotImplementedError where torch has no such registry.
    """
    _registry().register_flash_attention_impl(NAME, register_fn=install)


def activate() -> None:
    """`register`, and let torch's functions run flexpress's kernels. Raises as `register` does."""
    register()
    _registry().activate_flash_attention_impl(NAME)


def _registry():
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise NotImplementedError(
            f"torch {torch.__version__} has no registry of FlashAttention implementations; call flexpress.flex_attention or use torch>=2.11"
        )
    return torch.nn.attention


class Installed:
    """That torch's operators run flexpress's kernels: until `remove`."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        """Give the operators back to torch. A second call does nothing."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def install(device: str = "CUDA") -> Installed:
    """Let torch's operators on this kind of device, by its name in torch's dispatcher, run flexpress's kernels."""
    library = Library("aten", "IMPL")
    for operator in (
        _flash_attention_forward,
        _flash_attention_forward_no_dropout_inplace,
        _flash_attention_backward,
        _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward,
    ):
        if hasattr(torch.ops.aten, operator.__name__):  # torch 2.11 has four of them
            library.impl(operator.__name__, operator, device)
    return Installed(library)


def _seen(is_causal: bool, left: int | None, right: int | None) -> Options:
    """Which keys a query sees, from the one at its own place: so many before it and after it, all with None or -1."""
    left, right = (-1 if n is None else int(n) for n in (left, right))
    return options_of(is_causal or right == 0, left, right)


def _dense_call(query, key, value, seen: Options, scale: float | None) -> Bound:
    """The call for tensors (B, H, S, D)."""
    mask_mod = mask_mod_of(seen, placed_last(query.shape[2], key.shape[2]), one_query=False)
    return bound(query, key, value, None, None, scale, True, None, mask_mod)


def _packed_call(query, key, value, cu_q, cu_k, seen: Options, scale: float | None, used: torch.Tensor | None = None) -> Bound:
    """The call for packed sequences. used: how many keys of each sequence there are, if not all that have room."""
    shared = cu_k is None or (cu_k.data_ptr() == cu_q.data_ptr() and cu_k.shape == cu_q.shape)
    if shared and used is None:
        place = same_place
    else:
        starts = cu_q if cu_k is None else cu_k
        keys = starts.diff() if used is None else used
        place = placed_by_sequence(keys - cu_q.diff())
    mask_mod = mask_mod_of(seen, place, one_query=False)
    if used is not None:
        allowed = noop_mask if mask_mod is None else mask_mod
        mask_mod = lambda b, h, q_idx, kv_idx: allowed(b, h, q_idx, kv_idx) & (kv_idx < used[b])
    return packed_call(query, key, value, cu_q, None if shared else cu_k, None, mask_mod, scale)


def _paged(query, key, value, cu_q, max_q: int, seen: Options, scale, lengths, page_table, num_splits) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, (H, total), of packed queries to a paged cache."""
    if lengths is None or cu_q is None:
        raise ValueError(_refused("a block_table without cu_seq_q and seqused_k"))
    mask_mod = cache_mask_mod_of(seen, one_query=False)
    options = {"page_table": page_table, "cu_seqlens_q": cu_q, "max_q_len": int(max_q), "mask_mod": mask_mod, "scale": scale}
    out, lse = cached_attention(query, key, value, lengths, **options, return_lse=True, batch_invariant=num_splits == 1)
    return out, lse.transpose(0, 1).contiguous()


def _refused(what: str) -> str:
    return f"flexpress, the active FlashAttention implementation, does not take {what}; restore_flash_attention_impl() brings back torch's"


def _check(dropout_p: float, return_debug_mask: bool = False, alibi_slopes=None, *more: str) -> None:
    """`more`: what a torch of another version asks for beside these."""
    for what, asked in (("dropout", dropout_p != 0), ("a debug mask", return_debug_mask), ("alibi_slopes", alibi_slopes is not None)):
        if asked:
            raise NotImplementedError(_refused(what))
    if more:
        raise NotImplementedError(_refused(more[0]))


def _unused(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What torch's operators return of random numbers: their state, twice, and a debug mask."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


@torch.no_grad()
def _forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, is_causal, scale, left, right, seqused_k, block_table, num_splits
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (as query) and lse of tensors in FlashAttention's layouts."""
    seen = _seen(is_causal, left, right)
    if block_table is not None:
        return _paged(query, key, value, cum_seq_q, max_q, seen, scale, seqused_k, block_table, num_splits)
    if cum_seq_q is not None:
        out, lse, _ = attend(_packed_call(query, key, value, cum_seq_q, cum_seq_k, seen, scale, seqused_k), False, False)
        return out[0].transpose(0, 1), lse[0]
    if seqused_k is not None:
        raise NotImplementedError(_refused("seqused_k without cu_seq_q"))
    out, lse, _ = attend(_dense_call(*(t.transpose(1, 2) for t in (query, key, value)), seen, scale), False, False)
    return out.transpose(1, 2), lse


@torch.no_grad()
def _gradients(call: Bound, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor) -> list[torch.Tensor]:
    """Of query, key and value, all tensors (B, H, S, D). Rows measure scores from 0, as there is only lse to know them by; an empty one has
    no largest score."""
    empty = lse == float("-inf")
    values = torch.stack([torch.where(empty, lse, 0.0), torch.where(empty, 0.0, -lse * math.log2(math.e))], -1)
    rows = Rows(values, False)
    return list(backward(call, out, rows, grad_out, None, deterministic=torch.are_deterministic_algorithms_enabled())[:3])


def _flash_attention_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
    **more,
):
    _check(dropout_p, return_debug_mask, alibi_slopes, *(name for name, value in more.items() if value is not None))
    places = is_causal, scale, window_size_left, window_size_right, seqused_k, block_table, num_splits
    out, lse = _forward(query, key, value, cum_seq_q, cum_seq_k, max_q, *places)
    return out, lse, *_unused(query)


def _flash_attention_forward_no_dropout_inplace(out, *args, **options):
    made, lse, *_ = _flash_attention_forward(*args, **options)
    out.copy_(made)
    return lse


def _flash_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    _check(dropout_p)
    seen = _seen(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        turned = [t.transpose(1, 2) for t in (query, key, value, out, grad_out)]
        found = _gradients(_dense_call(*turned[:3], seen, scale), turned[3], logsumexp, turned[4])
        return tuple(g.transpose(1, 2) for g in found)
    call = _packed_call(query, key, value, cum_seq_q, cum_seq_k, seen, scale)
    found = _gradients(call, out.transpose(0, 1)[None], logsumexp[None], grad_out.transpose(0, 1)[None])
    return tuple(g[0].transpose(0, 1) for g in found)


def _scaled_dot_product_flash_attention(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _check(dropout_p, return_debug_mask)
    with torch.no_grad():
        out, lse, _ = attend(_dense_call(query, key, value, _seen(is_causal, None, None), scale), False, False)
    state, offset, debug_mask = _unused(query)
    return out, lse, None, None, query.shape[2], key.shape[2], state, offset, debug_mask


def _scaled_dot_product_flash_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    _check(dropout_p)
    return tuple(_gradients(_dense_call(query, key, value, _seen(is_causal, None, None), scale), out, logsumexp, grad_out))
