"""Prefill of many prompts of different lengths, against as much work in a batch of equal lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import common
import implementations
import torch
from common import Row
from reference import Batch, references
from serving import Run, page_table
from workloads import Mods, Workload, causal

from flexpress import mods

SHORTEST = 16
PAGE = 64
IMPLS = ("flexpress_varlen", "flexpress_cached", "flexpress_equal", "torch_flex_equal")
DEFAULT = IMPLS[:3]


@dataclass(frozen=True)
class Prefill(Workload):
    """`batch` prompts of SHORTEST to `length` tokens, one after another in (T, H, D) tensors."""

    batch: int = 64
    heads: int = 32
    kv_heads: int = 8

    def lengths(self, seed: int = 0) -> list[int]:
        """Return the tokens of every prompt."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(min(SHORTEST, self.length), self.length + 1, (self.batch,), generator=generator).tolist()

    def equal(self) -> Workload:
        """Return the batch of as many prompts of one length, with the same sum of squared lengths, to within rounding."""
        length = round(math.sqrt(sum(n * n for n in self.lengths()) / self.batch))
        return Workload("equal", "equal lengths", self.batch, self.heads, self.kv_heads, length, mask=causal, d_qk=self.d_qk, d_v=self.d_v)

    def flops(self, impl: str) -> int:
        """Operations of `impl`: those of unmasked pairs."""
        lengths = [self.equal().length] * self.batch if impl.endswith("_equal") else self.lengths()
        return replace(self, batch=1).forward_flops(sum(n * (n + 1) // 2 for n in lengths))

    def problem(self, device: str, l2: int) -> Packed:
        """Return the tensors on `device`.  They are so large that nothing of the last run is left in L2."""
        return Packed(self, device)


class Packed:
    """The tensors of a case: q (T, Hq, D), k and v (T, Hkv, D)."""

    def __init__(self, case: Prefill, device: str, seed: int = 0) -> None:
        self.case, self.device, self.lengths = case, device, case.lengths()
        generator = torch.Generator(device).manual_seed(seed)
        widths = ((case.heads, case.d_qk), (case.kv_heads, case.d_qk), (case.kv_heads, case.d_v))
        self.q, self.k, self.v = (
            torch.randn((sum(self.lengths), *width), generator=generator, device=device, dtype=torch.bfloat16) for width in widths
        )
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self.cu_seqlens = starts.to(device, torch.int32)
        more = [(b, b % case.kv_heads) for b in range(case.batch)]
        self.answers = references(case, [self.prompts(x) for x in (self.q, self.k, self.v)], Mods(mask=mods.causal), more=more)

    def prompts(self, x: torch.Tensor) -> Batch:
        """Return a packed tensor's prompts, (heads, length, head dim) each."""
        return [prompt.transpose(0, 1) for prompt in x.split(self.lengths)]

    def run(self, impl: str) -> Run:
        """Return what `impl` is to do."""
        builders: dict[str, Callable[[], Run]] = {
            "flexpress_varlen": self._varlen,
            "flexpress_cached": self._cached,
            "flexpress_equal": lambda: self._equal(implementations.flexpress),
            "torch_flex_equal": lambda: self._equal(implementations.torch_flex),
        }
        return builders[impl]()

    def _varlen(self) -> Run:
        from flexpress import varlen_attention

        return Run(lambda: [varlen_attention(self.q, self.k, self.v, self.cu_seqlens, mask_mod=mods.causal)], self.answers, self.prompts)

    def _cached(self) -> Run:
        """The prompts are the first that the cache holds of their sequences."""
        from flexpress import cached_attention, update_cache

        table = page_table(self.lengths, PAGE, self.device)
        pages = sum(math.ceil(n / PAGE) for n in self.lengths)
        k_cache, v_cache = (x.new_full((pages, PAGE, *x.shape[1:]), math.nan) for x in (self.k, self.v))
        kv_len = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        where = {"page_table": table, "cu_seqlens_q": self.cu_seqlens, "max_q_len": max(self.lengths)}

        def update() -> list[torch.Tensor]:
            update_cache(self.k, self.v, k_cache, v_cache, kv_len, **where)
            return []

        return Run(lambda: [cached_attention(self.q, k_cache, v_cache, kv_len, **where)], self.answers, self.prompts, update)

    def _equal(self, build: Callable[..., implementations.Attention]) -> Run:
        row = self.case.equal()
        q, k, v, _ = row.inputs(self.device)
        attention = build(row, Mods(mask=mods.causal), self.device)
        return Run(lambda: [attention(q, k, v)], references(row, (q, k, v), Mods(mask=mods.causal)))

    def figures(self, row: Row, copy_tb_s: float | None) -> None:
        """Complete a row of which the time of a graph is known."""
        row |= {"calls": 1, "tflops": common.tflops(self.case.flops(row["impl"]), row["us"] * 1e-3)}


CASES = (Prefill("ragged_prefill", "64 prompts of 16 to 4096 tokens", mask=causal),)
BY_NAME = {case.name: case for case in CASES}
