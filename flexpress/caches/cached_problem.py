"""A call of cached_attention between its checks and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..codegen.run.call import Cached


@dataclass(slots=True)
class CachedProblem:
    """Arguments of cached_attention that are checked, but scale, sinks and the mods.

    where      where the sequences are: kv_len, page_table, cache_loc, cu_seqlens_q, max_q_len, k_scale and v_scale
    sees_all   without a mask_mod, no key is hidden
    """

    query: torch.Tensor
    where: Cached
    q_offset: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    score_mod: Callable | None
    mask_mod: Callable | None
    scale: float | torch.Tensor | None
    sinks: torch.Tensor | None = None
    batch_invariant: bool = False
    sees_all: bool = False

    @property
    def is_ragged(self) -> bool:
        """Do the queries of all sequences follow one another?"""
        return self.where.cu_q is not None

    @property
    def queries(self) -> int:
        """Of all sequences if they follow one another, else of each one."""
        return self.query.shape[0 if self.is_ragged else 2]

    @property
    def tokens(self) -> int:
        """Queries of all sequences."""
        return self.queries if self.is_ragged else self.query.shape[0] * self.queries
