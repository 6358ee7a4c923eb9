"""Blocks of packed sequences."""

from __future__ import annotations

import torch

from .codegen.plan.decode import MAX_QUERIES
from .codegen.run.status_lists import Starts, block_starts

LONG = 2  # blocks that packed sequences must have on average for blocks of their own
WITH_DROPOUT = 0.25  # of that is enough with dropout, as kernels for Hopper draw what is kept of whole blocks


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
    """Blocks that begin where sequences do, so that none holds two, and causal ones are as few as for each sequence alone. With short
    sequences they would be many, mostly padding: then blocks of packed positions, as in any mask. So for float8, whose values lie by keys:
    TMA copies rows of keys from multiples of 16 bytes on."""
    if float8:
        return ()
    least = LONG * WITH_DROPOUT if dropout else LONG
    if total_q <= MAX_QUERIES or min(total_q, total_k) < least * q_block * (starts_q.shape[0] - 1):
        return ()
    starts = block_starts(starts_q, total_q, q_block)
    shared = starts_q is starts_k and q_block == kv_block
    return starts, starts if shared else block_starts(starts_k, total_k, kv_block)
