"""Rotary position embedding without a cache: queries or keys turned by their positions, as an operator with a gradient."""

from __future__ import annotations

import torch

from flexpress.caches.kv_cache import readable
from flexpress.caches.rope import check_reached, check_rope, rotated
from flexpress.graphs.custom_ops import fake_of, operator
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.cache_checks import check_counts, check_plain, check_table, described, looks
from flexpress.inputs.checks import DTYPES, check_are_tensors

from ..codegen.mod.captured.levels import is_mapped
from ..codegen.mod.captured.tensors import is_transformed, savable
from ..codegen.run.call import Cached
from ..codegen.run.update_cache import update

_FOR_TOKENS = "cu_seqlens_q is for x (T, H, D), got {}; leave it out, or pass the tokens one after another"


@compilable
def apply_rope(
    x: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    interleaved: bool = False,
    rope_tail: bool = False,
    check: bool | None = None,
) -> torch.Tensor:
    """x with the heads of its tokens turned by their positions, in one kernel. Where keys also go to a cache, update_cache does both.

    x             (B, H, Q_LEN, D), or tokens one after another (T, H, D); float16, bfloat16 or float32, any strides
    rope          from rope_table, with a row for every position: rope_dim up to D
    positions     int32 (B,): the position of each sequence's first token; for (T, H, D) without cu_seqlens_q int32 (T,), of each token
    cu_seqlens_q  int32 (B + 1,): where each sequence starts in x (T, H, D), and its end; lengths may be 0. Tokens after the last sequence's
                  stay as they are
    interleaved   pairs are dimensions 2j and 2j + 1; else j and j + rope_dim / 2
    rope_tail     the last rope_dim dimensions turn, not the first, counted from where they start (latent attention: 64 behind 128)
    check         look at what positions and cu_seqlens_q hold, and raise ValueError for positions that rope has no row for. By default on
                  the CPU; unchecked, positions before the table's take its first row and those behind its last one

    Returns a tensor like x, computed in float32. Differentiable in x, any number of times, by torch.func and in forward mode,
    too. An operator, torch.ops.flexpress.apply_rope, for
    torch.compile and torch.export.
    Raises ValueError or TypeError for arguments, NotImplementedError for kinds of tensors that kernels cannot read, and for a rope that
    requires grad.

    Method: RoFormer (Su et al. 2021, arXiv 2104.09864); on the last dimensions: DeepSeek-V2 (2024, arXiv 2405.04434).
    """
    check_are_tensors(x=x, rope=rope, positions=positions)
    if cu_seqlens_q is not None:
        check_are_tensors(cu_seqlens_q=cu_seqlens_q)
    if is_transformed():  # torch.func and forward mode do not look into operators
        return _in_torch(x, rope, positions, cu_seqlens_q, interleaved, rope_tail, check)
    return torch.ops.flexpress.apply_rope(x, rope, positions, cu_seqlens_q, interleaved, rope_tail, check)


def _in_torch(x, rope, positions, cu_seqlens_q, interleaved: bool, rope_tail: bool, check: bool | None) -> torch.Tensor:
    """The same in torch's operations. x may be a transform's tensor, and so may the others."""
    _check_forms(x, rope, positions, cu_seqlens_q)
    if looks(check, x) and not any(map(is_mapped, (positions, cu_seqlens_q))):
        _check_contents(x, rope, positions, cu_seqlens_q)
    there = None
    if x.ndim == 4:
        at = positions[:, None] + torch.arange(x.shape[2], device=x.device)
    elif cu_seqlens_q is None:
        at = positions
    elif not positions.shape[0]:
        return x.clone()  # all tokens are behind the last sequence's
    else:
        tokens = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True)
        there, sequence = sequence < positions.shape[0], sequence.clamp(max=positions.shape[0] - 1)
        at = positions[sequence] + tokens - cu_seqlens_q[sequence]
    angles = rope[at.clamp(0, rope.shape[0] - 1)].unsqueeze(-4 if x.ndim == 4 else -3)
    found = rotated(x, angles, interleaved, rope_tail)
    return found if there is None else torch.where(there[:, None, None], found, x)


@operator("apply_rope")
def _apply_rope(
    x: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    interleaved: bool = False,
    rope_tail: bool = False,
    check: bool | None = None,
) -> torch.Tensor:
    """flexpress.apply_rope, which has the same arguments."""
    _check(x, rope, positions, cu_seqlens_q)
    if looks(check, x):
        _check_contents(x, rope, positions, cu_seqlens_q)
    x = readable(x)
    turned = torch.empty_like(x)
    if x.numel() == 0:
        return turned
    positions, cu_seqlens_q = positions.contiguous(), None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    tokens, found = x, turned
    if x.ndim == 4:  # tokens before heads
        tokens, found = x.transpose(1, 2), turned.transpose(1, 2)
    elif cu_seqlens_q is None:
        tokens, found = x[:, None], turned[:, None]
    no_keys = tokens[..., :0, :]  # of keys and values that update would write there are none
    cache = no_keys if tokens.ndim == 4 else no_keys[None]
    batch = Cached(cu_seqlens_q, tokens.shape[-3], positions)
    update(no_keys, no_keys, cache, cache, batch, positions, rope, tokens, found, interleaved=interleaved, rope_tail=rope_tail)
    return turned


@fake_of(_apply_rope)
def _(x, rope, positions, cu_seqlens_q=None, interleaved=False, rope_tail=False, check=None):
    return torch.empty_like(x if x.stride(-1) == 1 else x.contiguous())


def _keep(ctx, inputs, output) -> None:
    x, rope, positions, cu_seqlens_q, ctx.interleaved, ctx.rope_tail, _ = inputs
    if rope.requires_grad:
        raise NotImplementedError(f"rope requires grad, but apply_rope has no gradient of it: pass rope.detach(), got {described(rope)}")
    ctx.save_for_backward(*map(savable, (rope, positions, cu_seqlens_q)))


def _differentiate(ctx, d_turned):
    """The gradient of x: pairs of d_turned, turned back."""
    rope, positions, cu_seqlens_q = ctx.saved_tensors
    back = torch.stack([rope[..., 0], -rope[..., 1]], dim=-1)
    d_x = torch.ops.flexpress.apply_rope(d_turned, back, positions, cu_seqlens_q, ctx.interleaved, ctx.rope_tail, False)
    return d_x, None, None, None, None, None, None


_apply_rope.register_autograd(_differentiate, setup_context=_keep)


def _check(x, rope, positions, cu_seqlens_q) -> None:
    """All but what positions and cu_seqlens_q hold."""
    check_plain("x", x, "(T, H, D)" if x.ndim == 3 else "(B, H, Q_LEN, D)")
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be float16, bfloat16 or float32, got {x.dtype}")
    check_rope(rope, "x", x)
    if cu_seqlens_q is None:
        return check_table("positions", positions, (x.shape[0],), torch.int32, x.device)
    if x.ndim == 4:
        raise ValueError(_FOR_TOKENS.format(described(x)))
    check_table("positions", positions, (None,), torch.int32, x.device)
    return check_table("cu_seqlens_q", cu_seqlens_q, (positions.shape[0] + 1,), torch.int32, x.device)


def _check_forms(x, rope, positions, cu_seqlens_q) -> None:
    """The same of tensors that a transform may have wrapped: what is asked of memory is left out."""
    fits = x.ndim in (3, 4) and x.dtype in DTYPES and rope.ndim == 3 and rope.dtype == torch.float32
    if not fits or not 1 <= rope.shape[1] <= x.shape[-1] // 2 or rope.shape[0] == 0 or rope.shape[2] != 2:
        raise ValueError(
            "apply_rope takes x (B, H, Q_LEN, D) or (T, H, D) of float16, bfloat16 or float32 and a float32 rope from rope_table "
            f"(positions, rope_dim / 2, 2) with rope_dim up to D, got {described(x)} and {described(rope)}"
        )
    of_sequences = cu_seqlens_q is not None
    if of_sequences and x.ndim == 4:
        raise ValueError(_FOR_TOKENS.format(described(x)))
    sequences = positions.shape[0] if positions.ndim else 0
    counts = (sequences,) if of_sequences else x.shape[:1]
    for name, tensor, shape in (("positions", positions, counts), ("cu_seqlens_q", cu_seqlens_q, (sequences + 1,) if of_sequences else ())):
        if tensor is not None and (tensor.dtype != torch.int32 or tensor.shape != shape):
            raise ValueError(f"{name} must be torch.int32 {tuple(shape)} on {x.device}, got {described(tensor)}")


def _check_contents(x, rope, positions, cu_seqlens_q) -> None:
    """Has rope a row for every position?"""
    firsts = positions.tolist()
    if cu_seqlens_q is not None:
        counts = check_counts(cu_seqlens_q.tolist(), x.shape[0])
    else:
        counts = [x.shape[2] if x.ndim == 4 else 1] * len(firsts)
    found = [(first, count) for first, count in zip(firsts, counts, strict=True) if count]
    if any(first < 0 for first, _ in found):
        raise ValueError(f"positions has {min(first for first, _ in found)}; they must be 0 or more")
    check_reached(rope, max((first + count for first, count in found), default=0))
