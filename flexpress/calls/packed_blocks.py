"""Blocks of packed sequences."""

from __future__ import annotations

import torch

from ..codegen.plan.decode import MAX_QUERIES
from ..codegen.run.status_lists import Starts, block_starts

LONG = 2  # blocks that packed sequences must have on average for blocks of their own
WITH_DROPOUT = 0.25  # of LONG: with dropout fewer blocks are enough, as kernels for Hopper draw dropout for whole blocks


def starts_of(
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    total_q: int,
    total_k: int,
    q_block: int,
    kv_block: int,
    *,
    dropout: bool = False,
    float8: bool = False,
) -> Starts:
    """Where blocks begin, if each sequence has blocks of its own: no block holds two sequences, and causal masks visit as few as for each
    sequence alone. () for short sequences, whose blocks would be mostly padding, for few queries, and for float8: its values lie by keys,
    and TMA copies them from multiples of 16 keys on. Then blocks are of packed positions, as for any mask."""
    if float8:
        return ()
    least = LONG * WITH_DROPOUT if dropout else LONG
    # kernels for few queries take no blocks that begin anywhere
    if total_q <= MAX_QUERIES or min(total_q, total_k) < least * q_block * (starts_q.shape[0] - 1):
        return ()
    starts = block_starts(starts_q, total_q, q_block)
    shared = starts_q is starts_k and q_block == kv_block
    return starts, starts if shared else block_starts(starts_k, total_k, kv_block)
