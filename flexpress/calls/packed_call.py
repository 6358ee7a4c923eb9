"""The call of flex_attention that attends within packed sequences, and its outputs by token."""

from __future__ import annotations

import torch

from flexpress.calls.call import bound
from flexpress.calls.packing import Packing, packing_of
from flexpress.calls.probabilities import NOTHING, attend_and_look
from flexpress.calls.recorded import Recorded
from flexpress.calls.transformed import Transformed
from flexpress.inputs.float8 import FLOAT8, NOT_OF_FLOAT8
from flexpress.inputs.packed_checks import check_packed

from ..codegen.mod.captured.levels import untransformed, without_levels
from ..codegen.mod.captured.tensors import followed, tracing
from ..codegen.run.call import Bound
from ..codegen.run.statistics import Wanted


def attend_packed(
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
    gather=None,
    sinks=None,
    dropout=None,
    quantised=None,
    asked: tuple[bool, Wanted] = (False, NOTHING),
) -> tuple:
    """out, lse, max_scores and Statistics, as one tuple, with None for what is not `asked` for. `gather` as for `bound`."""
    max_scores, wanted = asked
    call = packed_call(q, k, v, cu_seqlens_q, cu_seqlens_k, score_mod, mask_mod, scale, kernel_options, gather, sinks, dropout, quantised)
    if any(wanted) and q.dtype == FLOAT8:
        raise NotImplementedError(NOT_OF_FLOAT8)
    found = _of_tokens(attend_and_look(call, max_scores, wanted, deterministic))
    if wanted.top_index:
        found[4] = in_sequences(found[4], cu_seqlens_q, cu_seqlens_k, k.shape[0])
    return tuple(found)


def _of_tokens(found: tuple) -> list:
    """Tensors of one batch entry with heads before tokens, or None, with tokens before heads."""
    return [t if t is None else t.squeeze(0).transpose(0, 1) for t in found]  # t[0] would copy its gradient


def in_sequences(top_index: torch.Tensor, cu_seqlens_q, cu_seqlens_k, total_k: int) -> torch.Tensor:
    """Packed positions of keys (total_q, Hq) as positions in the query's sequence; -1 as it is."""
    packing = _packing_of(cu_seqlens_q, None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k, top_index.shape[0], total_k)
    starts = packing.starts_k.index_select(0, packing.sequence_q)
    return torch.where(top_index < 0, top_index, top_index - starts[:, None])


def _packing_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None, total_q: int, total_k: int) -> Packing:
    """The packing, which is one for all calls of a transform."""
    if not followed("varlen_attention"):
        return packing_of(cu_seqlens_q, cu_seqlens_k, total_q, total_k)
    with untransformed():
        return packing_of(without_levels(cu_seqlens_q), without_levels(cu_seqlens_k), total_q, total_k)


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
    gather=None,
    sinks=None,
    dropout=None,
    quantised=None,
) -> Bound | Recorded | Transformed:
    """The call of flex_attention that attends within packed sequences: of one batch entry, heads before tokens."""
    if followed("varlen_attention"):
        shared, cu_seqlens_q = cu_seqlens_k is cu_seqlens_q, without_levels(cu_seqlens_q)
        cu_seqlens_k = cu_seqlens_q if shared else without_levels(cu_seqlens_k)
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_k is cu_seqlens_q and not tracing() and q.shape[0] == k.shape[0]:
        cu_seqlens_k = None  # as who comes from FlashAttention writes it
    lengths = cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]
    packing = _packing_of(*lengths)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    score_mod = None if score_mod is None else packing.score_mod(score_mod)
    mask_mod, packed = packing.mask_mod(mask_mod), (packing.starts_q, packing.starts_k)
    return bound(q, k, v, score_mod, None, scale, True, kernel_options, mask_mod, packed, gather, sinks, dropout, quantised)
