"""varlen_attention: sequences of any lengths, packed one after another, without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.nn.attention import flex_attention as torchs

from flexpress.calls.packed_call import attend_packed
from flexpress.calls.probabilities import NOT_IN_CONTEXT, NOTHING
from flexpress.calls.return_aux import AuxOutput, AuxRequest, AuxStatistics, asked_for, aux_of, looked, opened, result_of
from flexpress.distributed.parts import tell_ranks
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.checks import check_are_tensors
from flexpress.inputs.dropout import read_dropout
from flexpress.inputs.float8 import Quantised, refuse_float8_over_devices
from flexpress.mods import MaskMod, ScoreMod

from .codegen.mod.captured.tensors import ORDINARY, check_still, is_distributed

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
    return_aux: None = None,
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
    return_aux: None = None,
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
    return_lse: Literal[False] = False,
    return_aux: AuxRequest | torchs.AuxRequest,
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
) -> tuple[torch.Tensor, AuxOutput | AuxStatistics]: ...
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
    return_aux: AuxRequest | torchs.AuxRequest | None = None,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput | AuxStatistics]: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: ScoreMod | None = None,
    scale: float | torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    return_aux: None = None,
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
    return_aux: None = None,
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
    return_aux: AuxRequest | torchs.AuxRequest | None = None,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput | AuxStatistics]: ...
@compilable(inner=lambda **given: looked(varlen_attention, **given), opened=opened, closed=result_of)
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
    return_aux: AuxRequest | torchs.AuxRequest | None = None,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput | AuxStatistics]:
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

    return_aux      AuxRequest(...), as for flex_attention, instead of return_lse: what belongs to rows is (total_q, Hq), column_sums are
                    (total_k, Hq), and top_index is the key's position inside the sequence

    Returns (total_q, Hq, Dv) in q's dtype (or out_dtype); with return_lse also lse (total_q, Hq), float32, natural logarithm; with
    return_aux an AuxOutput or AuxStatistics. A query with nothing to attend to gives 0 and -inf. Differentiable as flex_attention is.
    Other lengths, or another number of sequences, compile nothing (but those of 256 tokens or more on average, or of 64 with dropout, whose
    blocks begin where sequences do, and those of fewer have kernels of their own, and so has, in a portable backward pass of the latter, a
    sum that is a multiple of the block size).

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
        float8 = None
        if not q_scale is k_scale is v_scale is out_dtype is None:
            float8 = Quantised(q_scale, k_scale, v_scale, out_dtype)
        asked = max_scores, wanted = (False, NOTHING) if return_aux is None else asked_for(return_aux, return_lse)
        if context is not None or is_distributed(q):
            refuse_float8_over_devices(q, float8)
        if context is not None:
            if any(wanted):
                raise NotImplementedError(NOT_IN_CONTEXT)
            check_still("varlen_attention with context=", q, k, v)
            from flexpress.distributed.varlen import attend_varlen_in_context

            found = attend_varlen_in_context(context, arguments, sinks, max_scores, dropout)
        elif q.__class__ not in ORDINARY and is_distributed(q):
            found = _attend_shards(*arguments, sinks, dropout, asked)
        else:
            found = attend_packed(*arguments, sinks=sinks, dropout=dropout, quantised=float8, asked=asked)
        if return_aux is not None:
            return found[0], aux_of(return_aux, *found[1:])
        return found[:2] if return_lse else found[0]
    except Exception as failure:
        tell_ranks(context, failure)
        raise


def _attend_shards(
    q, k, v, cu_seqlens_q, cu_seqlens_k, score_mod, mask_mod, scale, kernel_options, deterministic, sinks, dropout, asked: tuple
) -> tuple:
    """As attend_packed, of DTensors."""
    from flexpress.distributed.dtensors import Shards  # imports torch's, which takes long

    part = Shards({"q": q, "k": k, "v": v}, None, 1)
    mods = part.score_mod(score_mod), part.mask_mod(mask_mod)
    q, k, v = part.local
    others = part.scale(scale), kernel_options, deterministic, part.gather, part.sinks(sinks), part.dropout(dropout)
    return part.joined(*attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *mods, *others, asked=asked))
