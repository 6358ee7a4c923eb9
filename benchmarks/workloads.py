"""The attention problems that the benchmarks run, one row each.

A row names the shapes and how to make the mods.  The mods are recipes of `flexpress.mods`: plain Python
functions, so the same object goes to Flexpress, to torch's flex_attention and to the float64 reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import common  # noqa: F401 - before flexpress: calls then wait for the kernels that serve in the end
import torch

from flexpress import mods

Mod = Callable[..., torch.Tensor]
Factory = Callable[["Workload", str], Mod]
TensorFactory = Callable[["Workload", str], torch.Tensor]


class Mods(NamedTuple):
    """What an attention call is given beside q, k and v. None: it has none.

    `bias` is the learned tensor that `score` captures, `sinks` a learned logit (heads,). Both begin with the heads, and get gradients
    in the backward pass.
    """

    score: Mod | None = None
    mask: Mod | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def learned(self) -> tuple[torch.Tensor, ...]:
        """The learned tensors."""
        return tuple(x for x in (self.bias, self.sinks) if x is not None)


class Learned(NamedTuple):
    """A score_mod with a learned tensor: what makes the tensor, and what makes the score_mod of it."""

    tensor: TensorFactory
    score: Callable[[torch.Tensor], Mod]


@dataclass(frozen=True)
class Workload:
    """One self-attention problem.

    q is (batch, heads, length, d_qk), k (batch, kv_heads, length, d_qk) and v (batch, kv_heads, length, d_v).
    `score` and `mask` take the row and a device and make the mod (None: there is none).  No mask here depends
    on the batch or the head.  `size` is the number that the mask asks for: a window, a prefix length, or a
    number of documents.  A row has `score` or `learned`, not both.
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
    learned: Learned | None = None
    sinks: TensorFactory | None = None
    dtype: torch.dtype = torch.bfloat16

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
        return self.plain_scores and self.mask in (None, causal)

    @property
    def half(self) -> bool:
        """True when the tensors have 16 bits an element, which flash kernels want."""
        return self.dtype.itemsize == 2

    @property
    def plain_scores(self) -> bool:
        """True when nothing changes the scores."""
        return self.score is None and self.learned is None and self.sinks is None

    def make_mods(self, device: str) -> Mods:
        """Return the mods with their captured tensors on `device`, and the learned tensors."""
        mask_mod = self.mask(self, device) if self.mask else None
        sinks = self.sinks(self, device) if self.sinks else None
        if self.learned is None:
            return Mods(self.score(self, device) if self.score else None, mask_mod, sinks=sinks)
        bias = self.learned.tensor(self, device)
        return Mods(self.learned.score(bias), mask_mod, bias, sinks)

    def inputs(self, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Return q, k, v and the output's gradient, normally distributed, determined by seed and device."""
        generator = torch.Generator(device).manual_seed(seed)
        shapes = (
            (self.batch, self.heads, self.length, self.d_qk),
            (self.batch, self.kv_heads, self.length, self.d_qk),
            (self.batch, self.kv_heads, self.length, self.d_v),
            (self.batch, self.heads, self.length, self.d_v),
        )
        return tuple(torch.randn(s, generator=generator, device=device, dtype=self.dtype) for s in shapes)

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


CAP = 20.0


def softcap(row: Workload, device: str) -> Mod:
    return mods.softcap(CAP)


def relative_bias(row: Workload, device: str) -> Mod:
    generator = torch.Generator(device).manual_seed(1)
    table = torch.randn(row.heads, 2 * row.length - 1, generator=generator, device=device)
    return mods.relative_bias(table)


def slopes(row: Workload, device: str) -> torch.Tensor:
    return mods.alibi_slopes(row.heads, device)


def dense_bias(row: Workload, device: str) -> torch.Tensor:
    return normal(row.heads, row.length, row.length, device=device)


def sinks(row: Workload, device: str) -> torch.Tensor:
    return normal(row.heads, device=device)


def normal(*shape: int, device: str) -> torch.Tensor:
    """Return a learned tensor, normally distributed, in bfloat16 as those of models are."""
    generator = torch.Generator(device).manual_seed(2)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def full_bias(bias: torch.Tensor) -> Mod:
    """Add a number of its own to every score; `bias` is (heads, length, length)."""

    def full_bias(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return score + bias[h, q_idx, kv_idx]

    return full_bias


GPT_OSS = Workload(
    "gpt_oss_sinks",
    "window 128, GQA 64:8, S 16384, D 64, sinks",
    batch=1,
    heads=64,
    kv_heads=8,
    length=16384,
    d_qk=64,
    d_v=64,
    mask=window,
    size=128,
    sinks=sinks,
)

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
    Workload("full_d256", "full, D 256", heads=8, kv_heads=8, d_qk=256, d_v=256),
    Workload("causal_16k_d256", "causal, S 16384, D 256", batch=1, heads=8, kv_heads=8, length=16384, d_qk=256, d_v=256, mask=causal),
    Workload("causal_64k", "causal, S 65536", batch=1, length=65536, mask=causal),
    Workload("causal_128k", "causal, S 131072", batch=1, length=131072, mask=causal),
    *(Workload(f"window_{n}_16k", f"window {n}, S 16384", batch=1, length=16384, mask=window, size=n) for n in (128, 256, 512)),
    replace(GPT_OSS, name="gpt_oss", title="window 128, GQA 64:8, S 16384, D 64", sinks=None),
    GPT_OSS,
    Workload("learned_alibi", "learned ALiBi, causal", learned=Learned(slopes, mods.alibi), mask=causal),
    Workload("full_bias", "learned bias of every score", batch=2, learned=Learned(dense_bias, full_bias)),
    Workload("full_bias_d64", "learned bias of every score, D 64", batch=2, d_qk=64, d_v=64, learned=Learned(dense_bias, full_bias)),
    Workload("seed_003", "full, S 64, D 64, float32", 16, 12, 12, length=64, d_qk=64, d_v=64, dtype=torch.float32),
)

BY_NAME = {row.name: row for row in WORKLOADS}
