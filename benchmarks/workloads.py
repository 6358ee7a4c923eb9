"""The attention problems that the benchmarks run, one row each.

A row names the shapes and how to make the mods.  The mods are recipes of `flexpress.mods`: plain Python
functions, so the same object goes to Flexpress, to torch's flex_attention and to the float64 reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexpress import mods

Mod = Callable[..., torch.Tensor]
Factory = Callable[["Workload", str], Mod]


@dataclass(frozen=True)
class Workload:
    """One self-attention problem.

    q is (batch, heads, length, d_qk), k (batch, kv_heads, length, d_qk) and v (batch, kv_heads, length, d_v).
    `score` and `mask` take the row and a device and make the mod (None: there is none).  No mask here depends
    on the batch or the head.  `size` is the number that the mask asks for: a window, a prefix length, or a
    number of documents.
    """

    name: str
    title: str
    batch: int = 4
    heads: int = 16
    kv_heads: int = 16
    length: int = 4096
    d_qk: int = 128
    d_v: int = 128
    score: Factory | None = None
    mask: Factory | None = None
    size: int = 0

    @property
    def gqa(self) -> bool:
        """True when several query heads share one key/value head."""
        return self.heads != self.kv_heads

    @property
    def q_len(self) -> int:
        """The number of queries."""
        return self.length

    @property
    def dense_or_causal(self) -> bool:
        """True when scaled_dot_product_attention can express the row (`is_causal` is `mask is not None`)."""
        return self.score is None and self.mask in (None, causal)

    def make_mods(self, device: str) -> tuple[Mod | None, Mod | None]:
        """Return (score_mod, mask_mod) with their captured tensors on `device`."""
        score_mod = self.score(self, device) if self.score else None
        mask_mod = self.mask(self, device) if self.mask else None
        return score_mod, mask_mod

    def inputs(self, device: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        """Return q, k, v and the output's gradient, normally distributed, determined by seed and device."""
        generator = torch.Generator(device).manual_seed(seed)
        shapes = (
            (self.batch, self.heads, self.length, self.d_qk),
            (self.batch, self.kv_heads, self.length, self.d_qk),
            (self.batch, self.kv_heads, self.length, self.d_v),
            (self.batch, self.heads, self.length, self.d_v),
        )
        return tuple(torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)

    def forward_flops(self, pairs: int) -> int:
        """Operations of the two products, for `pairs` unmasked pairs per batch and query head."""
        return 2 * (self.d_qk + self.d_v) * pairs * self.batch * self.heads

    def backward_flops(self, pairs: int) -> float:
        """Operations of the backward: five matrix products where the forward has two."""
        return 2.5 * self.forward_flops(pairs)


def count_pairs(mask_mod: Mod | None, length: int, device: str = "cpu", chunk: int = 1024) -> int:
    """Count the (query, key) pairs that `mask_mod` keeps, a `chunk` of query rows at a time.

    The mask is called for batch 0 and head 0; with None every pair counts.
    """
    if mask_mod is None:
        return length * length
    zero = torch.zeros((), dtype=torch.int32, device=device)
    index = torch.arange(length, dtype=torch.int32, device=device)
    pairs = 0
    for rows in index.split(chunk):
        kept = mask_mod(zero, zero, rows[:, None], index[None, :])
        pairs += int(kept.expand(len(rows), length).sum())
    return pairs


def document_ids(length: int, count: int, device: str, seed: int = 0) -> torch.Tensor:
    """Return the document of every position, int32 (length,): `count` documents of uneven random lengths."""
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))[: count - 1].sort().values
    return torch.bucketize(torch.arange(length), cuts, out_int32=True).to(device)


def causal(row: Workload, device: str) -> Mod:
    return mods.causal


def window(row: Workload, device: str) -> Mod:
    return mods.sliding_window(row.size)


def prefix(row: Workload, device: str) -> Mod:
    return mods.prefix_lm(row.size)


def documents(row: Workload, device: str) -> Mod:
    return mods.document(document_ids(row.length, row.size, device), mask_mod=mods.causal)


def alibi(row: Workload, device: str) -> Mod:
    return mods.alibi(mods.alibi_slopes(row.heads, device))


def softcap(row: Workload, device: str) -> Mod:
    return mods.softcap(20.0)


def relative_bias(row: Workload, device: str) -> Mod:
    generator = torch.Generator(device).manual_seed(1)
    table = torch.randn(row.heads, 2 * row.length - 1, generator=generator, device=device)
    return mods.relative_bias(table)


WORKLOADS = (
    Workload("full_d128", "full, D 128"),
    Workload("full_d64", "full, D 64", d_qk=64, d_v=64),
    Workload("causal_d128", "causal, D 128", mask=causal),
    Workload("causal_d64", "causal, D 64", d_qk=64, d_v=64, mask=causal),
    Workload("causal_16k", "causal, S 16384", batch=1, length=16384, mask=causal),
    Workload("causal_gqa", "causal, GQA 32:8", heads=32, kv_heads=8, mask=causal),
    Workload("causal_4001", "causal, S 4001", length=4001, mask=causal),
    Workload("window_16k", "window 1024, S 16384", batch=1, length=16384, mask=window, size=1024),
    Workload("alibi_causal_d128", "ALiBi, causal, D 128", score=alibi, mask=causal),
    Workload("alibi_full_d64", "ALiBi, full, D 64", d_qk=64, d_v=64, score=alibi),
    Workload("softcap_causal_d128", "softcap, causal, D 128", score=softcap, mask=causal),
    Workload(
        "softcap_window_d256",
        "softcap, window 4096, S 8192, D 256",
        batch=2,
        heads=8,
        kv_heads=8,
        length=8192,
        d_qk=256,
        d_v=256,
        score=softcap,
        mask=window,
        size=4096,
    ),
    Workload("documents_16k", "12 documents, causal, S 16384", batch=1, length=16384, mask=documents, size=12),
    Workload("prefix_d128", "prefix 1024, D 128", mask=prefix, size=1024),
    Workload("relative_bias_d128", "relative-bias table, full, D 128", score=relative_bias),
    Workload("mla_causal", "MLA 192/128, causal", batch=2, d_qk=192, d_v=128, mask=causal),
)

BY_NAME = {row.name: row for row in WORKLOADS}
