"""Mods of positions in a sequence as mods of what kernels over a cache count: queries, rows of a group, keys behind a prefix."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..codegen.mod.expr import INDEX_BOUND
from ..codegen.mod.graphs.wide import part_in_wide_integers
from ..codegen.mod.tracing.bind import bind
from ..codegen.mod.tracing.capture import name_of, plain


def causal(b, h, q_idx, kv_idx):
    """What cached_attention masks by default."""
    return kv_idx <= q_idx


def position_from(q_offset: torch.Tensor | None, kv_len: torch.Tensor, cu_seqlens_q: torch.Tensor | None, q_len: int) -> Callable:
    """From a sequence's number and the number of a query in it to the query's position."""
    if q_offset is not None:
        return lambda b, q_idx: q_idx + q_offset[b]
    if cu_seqlens_q is None:
        return lambda b, q_idx: q_idx + (kv_len[b] - q_len)
    return lambda b, q_idx: q_idx + (kv_len[b] - (cu_seqlens_q[b + 1] - cu_seqlens_q[b]))


def of_own_queries(position: Callable, cu_seqlens_q: torch.Tensor) -> Callable:
    """The same, where a query that a sequence has not is its last one: then what blocks are visited follows from its own queries alone."""
    return lambda b, q_idx: position(b, torch.minimum(q_idx, cu_seqlens_q[b + 1] - cu_seqlens_q[b] - 1))


def score_from(score_mod: Callable, position: Callable) -> Callable:
    """The score_mod of the numbers of queries."""
    score_mod = plain(score_mod)

    def score_from(score, b, h, q_idx, kv_idx):
        return score_mod(score, b, h, position(b, q_idx), kv_idx)

    return score_from


def mask_from(mask_mod: Callable, position: Callable, kv_len: torch.Tensor) -> Callable:
    """The mask_mod of the numbers of queries, which also hides keys past the sequence's end."""
    mask_mod = plain(mask_mod)

    def mask_from(b, h, q_idx, kv_idx):
        return mask_mod(b, h, position(b, q_idx), kv_idx) & (kv_idx < kv_len[b])

    return mask_from


def causal_from(position: Callable, kv_len: torch.Tensor) -> Callable:
    """The default mask_mod, of the numbers of queries: later keys are hidden, and those past the sequence's end."""

    def causal_from(b, h, q_idx, kv_idx):
        return (kv_idx <= position(b, q_idx)) & (kv_idx < kv_len[b])

    return causal_from


def score_of_rows(score_mod: Callable, sequence: torch.Tensor, position: torch.Tensor) -> Callable:
    """The score_mod of rows, each with a sequence and a position of its own, and keys from position 0 on."""
    mod = part_of(score_mod, "score", position.device)

    def of_rows(score, b, h, q_idx, kv_idx):
        return mod(score, sequence[q_idx], h, position[q_idx], kv_idx)

    return _named(of_rows, score_mod)


def mask_of_rows(mask_mod: Callable, sequence: torch.Tensor, position: torch.Tensor) -> Callable:
    """The mask_mod of rows, each with a sequence and a position of its own, and keys from position 0 on."""
    mod = part_of(mask_mod, "mask", position.device)

    def of_rows(b, h, q_idx, kv_idx):
        return mod(sequence[q_idx], h, position[q_idx], kv_idx)

    return _named(of_rows, mask_mod)


def score_behind(score_mod: Callable, shift: torch.Tensor) -> Callable:
    """The score_mod of positions of queries and keys behind the first shift[b] of their sequence."""
    mod = part_of(score_mod, "score", shift.device)

    def behind(score, b, h, q_idx, kv_idx):
        return mod(score, b, h, q_idx + shift[b], kv_idx + shift[b])

    return _named(behind, score_mod)


def mask_behind(mask_mod: Callable, shift: torch.Tensor) -> Callable:
    """The mask_mod of positions of queries and keys behind the first shift[b] of their sequence."""
    mod = part_of(mask_mod, "mask", shift.device)

    def behind(b, h, q_idx, kv_idx):
        return mod(b, h, q_idx + shift[b], kv_idx + shift[b])

    return _named(behind, mask_mod)


def part_of(mod: Callable, kind: str, device: torch.device, reach: int = INDEX_BOUND) -> Callable:
    """A mod of positions, up to `reach`, as a part of another one; by default of one whose call does not say how far they reach."""
    return part_in_wide_integers(plain(mod), bind(mod, kind, device), (reach, reach))


def _named(made: Callable, mod: Callable) -> Callable:
    made.__name__ = f"cached_{name_of(mod)}"
    return made
