"""flex_attention: the front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch.nn.attention import flex_attention as torchs

from flexpress.calls.call import attend, bound
from flexpress.calls.probabilities import NOT_IN_CONTEXT, NOTHING, attend_and_look, wanted_of
from flexpress.calls.return_aux import AuxOutput, AuxRequest, AuxStatistics, asked_for, aux_of, checked_request, result_of
from flexpress.distributed.parts import tell_ranks
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.checks import check_are_tensors
from flexpress.inputs.dropout import Dropout, read_dropout
from flexpress.inputs.float8 import FLOAT8, NOT_OF_FLOAT8, Quantised, quantised, refuse_float8_over_devices
from flexpress.masks.opened_masks import mask_of_parts, parts_of_mask
from flexpress.mods import MaskMod, ScoreMod

from .codegen.mod.captured.tensors import ORDINARY, check_still, is_distributed
from .codegen.run.statistics import Statistics, Wanted

if TYPE_CHECKING:
    from flexpress.distributed.plan import ContextPlan  # imports torch.distributed, which not everybody has


class Extras(NamedTuple):
    """What changes the softmax beside scores and masks, or tensors' elements, as `bound` takes it."""

    sinks: torch.Tensor | None = None
    dropout: Dropout | None = None
    quantised: Quantised | None = None


def _opened(given: dict) -> dict:
    """flex_attention's arguments as `_with_statistics` takes them; torch's compiler traces this."""
    given = dict(given)
    del given["context"]  # with one, the call is outside of the graph
    block_mask, return_aux = given.pop("block_mask"), given["return_aux"]
    tables, facts = (), None
    if block_mask is not None:
        tables, facts, mod_of_lists = parts_of_mask(block_mask)
        if given["mask_mod"] is not None and given["mask_mod"] is not mod_of_lists:
            raise ValueError("inside torch.compile mask_mod must be the very function that block_mask was made of; pass one of them")
        given["mask_mod"] = mod_of_lists
    max_scores, wanted = asked_for(return_aux, given["return_lse"])
    taken = {name: given[name] for name in given if name not in ("return_lse", "return_aux")}
    return {**taken, "tables": tables, "facts": facts, "max_scores": max_scores, "wanted": tuple(wanted)}


def _with_statistics(
    query,
    key,
    value,
    score_mod,
    mask_mod,
    tables,
    facts,
    scale,
    enable_gqa,
    kernel_options,
    deterministic,
    sinks,
    dropout_p,
    dropout_seed,
    q_scale,
    k_scale,
    v_scale,
    out_dtype,
    max_scores,
    wanted,
) -> tuple[torch.Tensor, ...]:
    """out, lse and, if they are wanted, max_scores and statistics of the probabilities; `tables` and `facts` of a block mask, whose
    mask_mod is mask_mod."""
    block_mask = None
    if tables:
        block_mask, mask_mod = mask_of_parts(tables, facts, mask_mod), None
    arguments = query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod
    dropout = read_dropout(dropout_p, dropout_seed, query.device)
    extras = Extras(sinks, dropout, quantised(q_scale, k_scale, v_scale, out_dtype))
    out, lse, *others = _attend(arguments, max_scores, Wanted(*wanted), deterministic, None, extras)
    return out, lse, *(t for t in others if t is not None)


def _attend(arguments: tuple, want_max: bool, wanted: Wanted, deterministic: bool, context: ContextPlan | None, extras: Extras) -> tuple:
    """out, lse, max_scores and Statistics, as one tuple, with None for what is not wanted, of query and what follows it in `bound`: on this
    device, or over several."""
    query, (sinks, dropout, float8) = arguments[0], extras
    if any(wanted) and query.dtype == FLOAT8:
        raise NotImplementedError(NOT_OF_FLOAT8)
    if context is not None or is_distributed(query):
        refuse_float8_over_devices(query, float8)
    if context is not None:
        if any(wanted):
            raise NotImplementedError(NOT_IN_CONTEXT)
        return *_attend_in_context(context, arguments, want_max, deterministic, sinks, dropout), *Statistics()
    if is_distributed(query):
        from flexpress.distributed.dtensors import attend_shards  # imports torch's module, which takes long

        return attend_shards(*arguments, output_max=want_max, wanted=wanted, deterministic=deterministic, sinks=sinks, dropout=dropout)
    return attend_and_look(bound(*arguments, **extras._asdict()), want_max, wanted, deterministic)


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    return_aux: None = None,
    deterministic: bool = False,
    context: ContextPlan | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
    mask_mod: MaskMod | None = None,
    return_aux: None = None,
    deterministic: bool = False,
    context: ContextPlan | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    return_aux: AuxRequest | torchs.AuxRequest,
    deterministic: bool = False,
    context: ContextPlan | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, AuxOutput | AuxStatistics]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    return_aux: AuxRequest | torchs.AuxRequest | None = None,
    deterministic: bool = False,
    context: ContextPlan | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput | AuxStatistics]: ...
@compilable(inner=_with_statistics, opened=_opened, closed=result_of)
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    return_aux: AuxRequest | torchs.AuxRequest | None = None,
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
    """Attention with the user's own score and mask, by a kernel printed for them. No torch.compile, no dense scores.

        out[b, h, i] = sum_j softmax_j(score_mod(query[b, h, i] . key[b, h', j] * scale, b, h, i, j)) value[b, h', j]

    over the positions j that block_mask or mask_mod allows, with h' = h // (Hq / Hkv).

    query           (B, Hq, Q_LEN, D_QK), float16, bfloat16 or float32, or, without gradients, float8_e4m3fn; any strides. DTensors
                    give DTensors: see dtensors.py
    key, value      (B or 1, Hkv, KV_LEN, D_QK) and (B or 1, Hkv, KV_LEN, D_V); head dims up to 512, D_QK up to 576
    score_mod       score_mod(score, b, h, q_idx, kv_idx) -> score, on scalars: score is float32, the others int32. It may index
                    captured tensors; an index outside a tensor reads zero
    block_mask      from create_block_mask, flexpress's or torch's
    mask_mod        mask_mod(b, h, q_idx, kv_idx) -> bool, instead of a block mask: which blocks are empty or full follows from bounds of
                    mask_mod, on the device and in microseconds, so the mask may be another one at every call. With both, block_mask
                    must have been made of this mask_mod
    scale           a number, 1 / sqrt(D_QK) by default, or a tensor of one: it may be learned, and on a GPU it is not waited for
    enable_gqa      allows Hq to be a multiple of Hkv
    return_lse      also return lse; return_aux=AuxRequest(lse=True, ...) is the newer form: it gives an AuxOutput or AuxStatistics
    kernel_options  BLOCK_M, BLOCK_N, num_warps, num_stages, PRESCALE_QK, USE_TMA, with or without the prefix fwd_;
                    FLOAT32_PRECISION ("ieee" or "tf32"), BACKEND ("AUTO"; "PORTABLE" or torch's "TRITON" for the portable kernels;
                    "HOPPER" for the forward kernel for Hopper, or an error; "DECODE" or torch's "TRITON_DECODE" for that of up to 16
                    queries, which splits keys among programs; "CPP" for the kernels in C++ on a CPU, or an error);
                    for the backward pass BLOCK_M1, BLOCK_N1 (of dK and dV), BLOCK_M2, BLOCK_N2 (of dQ), with or without bwd_,
                    bwd_num_warps, bwd_num_stages. Torch's BLOCKS_ARE_CONTIGUOUS, FORCE_USE_FLEX_ATTENTION, IS_DIVISIBLE,
                    ROWS_GUARANTEED_SAFE, WRITE_DQ and hints for other back ends change nothing (logged at DEBUG). Others are refused, and
                    so is torch's BACKEND "FLASH"
    deterministic   gradients are bitwise equal on every run (also with torch.use_deterministic_algorithms); captured ones may cost more
    context         a ContextPlan (flexpress.distributed), which has the mask: query, key and value are this rank's parts of the whole
    sinks           (Hq,), float16, bfloat16 or float32: a logit for each head, which takes part in the softmax as the score of one more
                    key whose value is 0 (attention sinks, arXiv 2309.17453; learned ones: gpt-oss, arXiv 2508.10925). lse has it in it,
                    max_scores has not. A row with nothing to attend to gives output 0, and its sink as lse
    dropout_p       weights are dropped with this probability, rounded to a multiple of 2**-14, and others divided by 1 - p. Which ones
                    follows from the seed, b, h, q_idx and kv_idx: see dropout_mask. lse and max_scores are those without
    dropout_seed    int64 (1,), on query's device; by default torch's generator gives one, also in a CUDA graph. The same on all ranks, of
                    DTensors and with context=; by default the first rank's
    q_scale, k_scale, v_scale   float32, positive: what query, key and value of float8_e4m3fn are to be multiplied by; by default 1.
                    One element for all, (Hkv,) for the heads of key and those of query that share each, or (B, Hkv). score_mod sees
                    scores with them
    out_dtype       the output's dtype where query is float8_e4m3fn: bfloat16 by default, float16 or float32

    Returns the output (B, Hq, Q_LEN, D_V), in query's dtype (or out_dtype) and order of dimensions; (out, lse) with return_lse; (out,
    AuxOutput or AuxStatistics) with return_aux. lse is the natural logarithm of the softmax's denominator, float32 (B, Hq, Q_LEN). A
    row with nothing to attend to gives output 0 and lse -inf.

    Raises ValueError, TypeError or NotImplementedError for arguments, ModError for a mod that cannot be traced.
    Differentiable twice, in reverse and in forward mode, with respect to query, key, value, sinks and every floating-point tensor that
    score_mod captures, through the output, lse and column_sums; once through entropy.
    torch.func follows (docs/derivatives.md).
    Meaning: torch.nn.attention.flex_attention (arXiv 2412.05496). Method: FlashAttention-2 (arXiv 2307.08691) with block lists.
    """
    arguments = query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod
    try:
        drops = dropout_seed is not None or type(dropout_p) is not float or dropout_p != 0.0
        if drops or context is not None or return_aux is not None:  # which ask query something; what follows checks all of them
            check_are_tensors(query=query, key=key, value=value)
        dropout = read_dropout(dropout_p, dropout_seed, query.device) if drops else None
        float8 = None
        if not q_scale is k_scale is v_scale is out_dtype is None:
            float8 = Quantised(q_scale, k_scale, v_scale, out_dtype)
        if return_aux is not None:
            request = checked_request(return_aux, return_lse)
            extras = Extras(sinks, dropout, float8)
            out, lse, *others = _attend(arguments, request.max_scores, wanted_of(request), deterministic, context, extras)
            return out, aux_of(request, lse, *others)
        usual = context is None and query.__class__ in ORDINARY  # so no detour
        if usual:
            found = attend(bound(*arguments, sinks=sinks, dropout=dropout, quantised=float8), False, deterministic)
        else:
            found = _attend(arguments, False, NOTHING, deterministic, context, Extras(sinks, dropout, float8))
        return found[:2] if return_lse else found[0]
    except Exception as failure:
        tell_ranks(context, failure)
        raise


def _attend_in_context(
    context, arguments: tuple, want_max: bool, deterministic: bool, sinks: torch.Tensor | None, dropout: Dropout | None
) -> tuple:
    """out, lse and max_scores, or None, of this rank's parts, by a ContextPlan."""
    from flexpress.distributed.attention import Arguments, attend_in_context
    from flexpress.distributed.plan import check_plan

    check_plan(context)
    query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod = arguments
    check_still("flex_attention with context=", query, key, value)
    if block_mask is not None or mask_mod is not None:
        raise ValueError(
            "with context= the plan has the mask: make it as ContextPlan(..., mask_mod=...), and leave block_mask and mask_mod out"
        )
    given = Arguments(scale, enable_gqa, kernel_options, deterministic, want_max, sinks, dropout)
    if query.__class__ in ORDINARY or not is_distributed(query):
        return attend_in_context(context, (query, key, value), score_mod, given)
    from flexpress.distributed.shards import attend_shards_in_context

    return attend_shards_in_context(context, {"query": query, "key": key, "value": value}, score_mod, given)
