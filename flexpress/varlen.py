"""varlen_attention: sequences of any lengths, packed one after another, without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from flexpress.call import attend, bound
from flexpress.checks import check_are_tensors
from flexpress.dropout import read_dropout, refuse_over_devices
from flexpress.float8 import Quantised, refuse_float8_over_devices
from flexpress.in_graph import compilable
from flexpress.mods import MaskMod, ScoreMod
from flexpress.packed_checks import check_packed
from flexpress.packing import packing_of
from flexpress.parts import tell_ranks
from flexpress.recorded import Recorded
from flexpress.transformed import Transformed, without_levels

from .codegen.mod.tensors import ORDINARY, check_still, followed, is_distributed, read_captured, tracing, untransformed
from .codegen.run.call import Bound

if TYPE_CHECKING:
    from flexpress.distributed.plan import ContextPlan  # imports torch.distributed, which not everybody has


@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    scale: float | torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    deterministic: bool = False,
    context: None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    scale: float | torch.Tensor | None = None,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
    deterministic: bool = False,
    context: None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    deterministic: bool = False,
    context: None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: ScoreMod | None = None,
    scale: float | torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    deterministic: bool = False,
    context: ContextPlan,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: ScoreMod | None = None,
    scale: float | torch.Tensor | None = None,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
    deterministic: bool = False,
    context: ContextPlan,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: ScoreMod | None = None,
    scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    deterministic: bool = False,
    context: ContextPlan,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@compilable
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    scale: float | torch.Tensor | None = None,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    deterministic: bool = False,
    context: ContextPlan | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention within each of n packed sequences, with the user's own score and mask.

    q               (total_q, Hq, D), float16, bfloat16 or float32, or, without gradients, float8_e4m3fn; any strides
    k, v            (total_k, Hkv, D) and (total_k, Hkv, Dv), Hq a multiple of Hkv; D up to 576, Dv up to 512
    cu_seqlens_q    (n + 1,), int32 or int64, on q's device: 0, then the end of each sequence, never falling, total_q at last. Sequence s
                    is the tokens cu_seqlens_q[s] <= i < cu_seqlens_q[s + 1]; it may have none
    cu_seqlens_k    the same for k and v, n sequences too. Leave it out, or pass the same tensor, where both are the same: that gives better
                    kernels
    score_mod       score_mod(score, b, h, q_idx, kv_idx) -> score, as for flex_attention, but b is the number of the sequence, and q_idx
                    and kv_idx are positions inside it. It may index captured tensors by all of them
    mask_mod        mask_mod(b, h, q_idx, kv_idx) -> bool, with the same arguments; other sequences are hidden in any case. `causal` lets
                    token i of a sequence see tokens 0 to i, whatever their number. FlashAttention counts from the end instead:
                    lambda b, h, q_idx, kv_idx: q_idx + more[b] >= kv_idx, where more (n,) is by how much keys outnumber queries
    scale, kernel_options, deterministic   as for flex_attention
    context         a plan that ContextPlan.packed (flexpress.distributed) made of cu_seqlens and mask_mod, which are left out here: q, k
                    and v are this rank's tokens. A score_mod is told the same as without
    sinks           (Hq,), a logit for each head, as for flex_attention
    dropout_p, dropout_seed   as for flex_attention; b is the number of the sequence, q_idx and kv_idx are positions inside it
    q_scale, k_scale, v_scale, out_dtype   of float8_e4m3fn, as for flex_attention, for all sequences: one element or (Hkv,)

    Returns (total_q, Hq, Dv) in q's dtype (or out_dtype); with return_lse also lse (total_q, Hq), float32, natural logarithm. A query
    with nothing to attend to gives 0 and -inf. Differentiable as flex_attention is. Other lengths, or another number of sequences,
    compile nothing (but those of 256 tokens or more on average, or of 64 with dropout, whose blocks begin where sequences do, and those of
    fewer have kernels of their own, and so has, in a portable backward pass of the latter, a sum that is a multiple of the block size).

    DTensors as q, k and v, sharded over heads (dimension 1) or replicated, give DTensors: as for flex_attention.

    On a GPU the host does not wait for the device, so values of cu_seqlens are not checked there: with wrong ones results are wrong, but
    nothing outside a tensor is read. On the CPU they are checked. Raises ValueError, TypeError or NotImplementedError for arguments,
    ModError for a mod that cannot be traced.

    Source of the layout: flash_attn_varlen_func of FlashAttention (Dao 2023, arXiv 2307.08691).
    """
    arguments = q, k, v, cu_seqlens_q, cu_seqlens_k, score_mod, mask_mod, scale, kernel_options, deterministic
    try:
        drops = dropout_seed is not None or type(dropout_p) is not float or dropout_p != 0.0
        if drops or context is not None:  # which ask q something; what follows checks all of them
            check_are_tensors(q=q, k=k, v=v)
        dropout = read_dropout(dropout_p, dropout_seed, q.device) if drops else None
        refuse_over_devices(dropout, context, q)
        float8 = None
        if not q_scale is k_scale is v_scale is out_dtype is None:
            float8 = Quantised(q_scale, k_scale, v_scale, out_dtype)
        if context is not None or is_distributed(q):
            refuse_float8_over_devices(q, float8)
        if context is not None:
            check_still("varlen_attention with context=", q, k, v)
            from flexpress.distributed.varlen import attend_varlen_in_context

            out, lse = attend_varlen_in_context(context, *arguments, sinks)
        elif q.__class__ not in ORDINARY and is_distributed(q):
            out, lse = _attend_shards(*arguments, sinks)
        else:
            out, lse = _attend(*arguments, sinks=sinks, dropout=dropout, quantised=float8)
        return (out, lse) if return_lse else out
    except Exception as failure:
        tell_ranks(context, failure)
        raise


def _attend_shards(q, k, v, cu_seqlens_q, cu_seqlens_k, score_mod, mask_mod, scale, kernel_options, deterministic, sinks) -> tuple:
    """out and lse of DTensors."""
    from flexpress.dtensors import Shards  # imports torch's, which takes long

    part = Shards({"q": q, "k": k, "v": v}, None, 1)
    mods = part.score_mod(score_mod), part.mask_mod(mask_mod)
    q, k, v = part.local
    found = _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *mods, scale, kernel_options, deterministic, part.read_captured, part.sinks(sinks))
    return part.joined(*found)


def _attend(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    score_mod,
    mask_mod,
    scale,
    kernel_options,
    deterministic,
    read=read_captured,
    sinks=None,
    dropout=None,
    quantised=None,
) -> tuple:
    """out and lse. `read` as for `bound`."""
    call = packed_call(q, k, v, cu_seqlens_q, cu_seqlens_k, score_mod, mask_mod, scale, kernel_options, read, sinks, dropout, quantised)
    out, lse, _ = attend(call, False, deterministic)
    return tuple(t.squeeze(0).transpose(0, 1) for t in (out, lse))  # out[0] would copy its gradient


def check_no_block_mask(block_mask) -> None:
    """Raises ValueError for a block mask beside cu_seqlens_q."""
    if block_mask is not None:
        raise ValueError("varlen_attention takes no block_mask: pass mask_mod, or leave cu_seqlens_q out")


def packed_call(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    score_mod=None,
    mask_mod=None,
    scale=None,
    kernel_options=None,
    read=read_captured,
    sinks=None,
    dropout=None,
    quantised=None,
) -> Bound | Recorded | Transformed:
    """The call of flex_attention that attends within packed sequences: of one batch entry, heads before tokens."""
    transformed = followed("varlen_attention")
    if transformed:
        shared, cu_seqlens_q = cu_seqlens_k is cu_seqlens_q, without_levels(cu_seqlens_q)
        cu_seqlens_k = cu_seqlens_q if shared else without_levels(cu_seqlens_k)
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_k is cu_seqlens_q and not tracing() and q.shape[0] == k.shape[0]:
        cu_seqlens_k = None  # as who comes from FlashAttention writes it
    lengths = cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]
    if transformed:
        with untransformed():
            packing = packing_of(*lengths)
    else:
        packing = packing_of(*lengths)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    score_mod = None if score_mod is None else packing.score_mod(score_mod)
    mask_mod, packed = packing.mask_mod(mask_mod), (packing.starts_q, packing.starts_k)
    return bound(q, k, v, score_mod, None, scale, True, kernel_options, mask_mod, packed, read, sinks, dropout, quantised)
