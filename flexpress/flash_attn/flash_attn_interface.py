"""flash_attn 2.8's functions for training, with its signatures and meaning. docs/flash_attn.md lists every argument.

Arguments that all share:

dropout_p          weights are dropped with this probability: see flex_attention. torch's generator gives the seed
softmax_scale      a number, 1 / sqrt(D) by default
causal             no query sees a key after its place. Places are counted from the end: of Sq queries and Skv keys, query i has the place
                   i + Skv - Sq among the keys, so the triangle ends in the bottom right corner
window_size        (left, right): a query sees the keys from `left` before its place to `right` after it; -1: no limit
softcap            above 0: scores s become softcap * tanh(s / softcap)
alibi_slopes       float32 (Hq,) or (B, Hq): slope * |i + Skv - Sq - j| is subtracted from the score of query i and key j, after the cap
deterministic      gradients are bitwise equal on every run
sinks              (Hq,): a logit for each head, the score of one more key whose value is 0; flash_attn 2.8 has none
return_attn_probs  return (out, softmax_lse, S_dmask): lse is float32, natural logarithm; S_dmask is empty, (0,)

A row that sees nothing gives 0 and lse -inf, or its sink. Differentiable with respect to q, k, v, alibi_slopes and sinks, through out and
lse. All take float16, bfloat16 or float32, any lengths and strides and head dims up to 512, and copy none of their inputs. Other lengths,
windows, slopes and caps compile nothing; as many queries as keys, and one query, have kernels of their own.

ValueError, TypeError or NotImplementedError names the argument that does not fit and shows the shapes.

Source of signatures and meaning: FlashAttention 2.8 (Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

from typing import Any

import torch

from flexpress.attention import flex_attention
from flexpress.codegen.mod.captured.tensors import followed
from flexpress.flash import check_together
from flexpress.flash_attn.kvcache import attend_pages, flash_attn_with_kvcache
from flexpress.flash_attn.meaning import mask_mod_of, placed_by_sequence, placed_last, read_options, same_place, score_mod_of
from flexpress.graphs.in_graph import compilable
from flexpress.inputs.checks import check_rank, refuse_dropout
from flexpress.inputs.packed_checks import check_packed
from flexpress.inputs.scales import softmax_scale_of
from flexpress.varlen import varlen_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


@compilable
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> Any:  # a tensor, or a tuple where more is asked for
    """Attention of q (B, Sq, Hq, D) to k and v (B, Skv, Hkv, D), Hq a multiple of Hkv. Returns (B, Sq, Hq, D); softmax_lse is (B, Hq, Sq).

    The other arguments and the errors are described at the top of this module.
    """
    followed("flash_attn_func")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tensor, "(B, S, H, D)", may_stand=True)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got k {tuple(k.shape)} and v {tuple(v.shape)}")
    check_together("q", q, "k", k, k.shape)
    check_together("q", q, "v", v, v.shape)
    meaning = causal, window_size, softcap, alibi_slopes
    return _attend(q, k, v, meaning, softmax_scale, deterministic, return_attn_probs, sinks, dropout_p)


@compilable
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> Any:  # a tensor, or a tuple where more is asked for
    """Attention of q (B, Sq, Hq, D) to kv (B, Skv, 2, Hkv, D), keys first. Results as of flash_attn_func.

    The other arguments and the errors are described at the top of this module.
    """
    followed("flash_attn_kvpacked_func")
    check_rank("q", q, "(B, S, H, D)", may_stand=True)
    check_rank("kv", kv, "(B, S, 2, H, D)", may_stand=True)
    k, v = kv.unbind(2)
    check_together("q", q, "kv", kv, k.shape)
    meaning = causal, window_size, softcap, alibi_slopes
    return _attend(q, k, v, meaning, softmax_scale, deterministic, return_attn_probs, sinks, dropout_p)


@compilable
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> Any:  # a tensor, or a tuple where more is asked for
    """Attention of qkv (B, S, 3, H, D), in this order, to itself. Results as of flash_attn_func.

    The other arguments and the errors are described at the top of this module.
    """
    followed("flash_attn_qkvpacked_func")
    check_rank("qkv", qkv, "(B, S, 3, H, D)", may_stand=True)
    q, k, v = qkv.unbind(2)
    check_together("qkv", qkv, "qkv", qkv, q.shape)
    meaning = causal, window_size, softcap, alibi_slopes
    return _attend(q, k, v, meaning, softmax_scale, deterministic, return_attn_probs, sinks, dropout_p)


@compilable
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> Any:  # a tensor, or a tuple where more is asked for
    """Attention within each of B packed sequences: q (total_q, Hq, D), k and v (total_k, Hkv, D). Returns (total_q, Hq, D); softmax_lse is
    (Hq, total_q).

    cu_seqlens_q, cu_seqlens_k   int32 (B + 1,): 0, then the end of each sequence; any may be empty. One for both gives better kernels
    max_seqlen_q, max_seqlen_k   the largest lengths, or more. Only max_seqlen_q is read, with a block_table
    block_table   int32 (B, n): k and v are pages (pages, page size, Hkv, D), and these are each sequence's. Without gradients

    The other arguments and the errors are described at the top of this module.
    """
    followed("flash_attn_varlen_func")
    meaning = causal, window_size, softcap, alibi_slopes
    if block_table is not None:
        refuse_dropout(dropout_p)
        out, lse = attend_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, meaning, softmax_scale, block_table, sinks)
        return _results(out, lse, return_attn_probs)
    return _attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, meaning, softmax_scale, deterministic, return_attn_probs, sinks, dropout_p)


@compilable
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> Any:  # a tensor, or a tuple where more is asked for
    """flash_attn_varlen_func of q (total_q, Hq, D) and kv (total_k, 2, Hkv, D), keys first."""
    followed("flash_attn_varlen_kvpacked_func")
    check_rank("q", q, "(total_q, H, D)", may_stand=True)
    check_rank("kv", kv, "(total_k, 2, H, D)", may_stand=True)
    check_together("q", q, "kv", kv, (q.shape[0], None, *kv.shape[2:]))
    meaning = causal, window_size, softcap, alibi_slopes
    return _attend_packed(
        q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, meaning, softmax_scale, deterministic, return_attn_probs, sinks, dropout_p
    )


@compilable
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> Any:  # a tensor, or a tuple where more is asked for
    """flash_attn_varlen_func of qkv (total, 3, H, D), in this order, to itself."""
    followed("flash_attn_varlen_qkvpacked_func")
    check_rank("qkv", qkv, "(total, 3, H, D)", may_stand=True)
    check_together("qkv", qkv, "qkv", qkv, (qkv.shape[0], None, *qkv.shape[2:]))
    meaning = causal, window_size, softcap, alibi_slopes
    return _attend_packed(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, meaning, softmax_scale, deterministic, return_attn_probs, sinks, dropout_p
    )


def _attend(q, k, v, meaning: tuple, softmax_scale, deterministic, return_attn_probs, sinks, dropout_p):
    """flex_attention on the (B, H, S, D) views of tensors that fit together; `meaning` as read_options takes it."""
    options = read_options(*meaning, q, q.shape[0])
    place, one_query = placed_last(q.shape[1], k.shape[1]), q.shape[1] == 1
    out, lse = flex_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        score_mod_of(options, place, one_query),
        scale=softmax_scale_of(softmax_scale),
        enable_gqa=True,
        return_lse=True,
        mask_mod=mask_mod_of(options, place, one_query),
        deterministic=deterministic,
        sinks=sinks,
        dropout_p=dropout_p,
    )
    return _results(out.transpose(1, 2), lse, return_attn_probs)


def _attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, meaning: tuple, softmax_scale, deterministic, return_attn_probs, sinks, dropout_p):
    """varlen_attention; `meaning` as read_options takes it."""
    if cu_seqlens_k is None:
        raise TypeError(
            "cu_seqlens_k must be a tensor (sequences + 1,), got None; where queries and keys have the same lengths, pass cu_seqlens_q"
        )
    shared = cu_seqlens_k is cu_seqlens_q
    batch, alibi_slopes = None, meaning[-1]
    if alibi_slopes is not None or not shared:  # what varlen_attention checks is read before
        check_packed(q, k, v, cu_seqlens_q, None if shared else cu_seqlens_k)
        batch = cu_seqlens_q.shape[0] - 1
    options = read_options(*meaning, q, batch)
    place = same_place
    if not shared and (alibi_slopes is not None or (options.left, options.right) != (None, None)):
        place = placed_by_sequence((cu_seqlens_k.diff() - cu_seqlens_q.diff()).to(torch.int32))
    out, lse = varlen_attention(
        *(q, k, v, cu_seqlens_q, None if shared else cu_seqlens_k),
        score_mod_of(options, place, False),
        mask_mod_of(options, place, False),
        scale=softmax_scale_of(softmax_scale),
        return_lse=True,
        deterministic=deterministic,
        sinks=sinks,
        dropout_p=dropout_p,
    )
    return _results(out, lse.transpose(0, 1), return_attn_probs)


def _results(out: torch.Tensor, lse: torch.Tensor, return_attn_probs):
    return (out, lse, out.new_empty(0)) if return_attn_probs else out
