"""Decoding problems: new queries of every sequence against a cache, and the implementations that take them.

Every implementation finds the same keys and values in the layout that it is made for: (B, H, S, D) for
flex_attention and scaled_dot_product_attention, (B, S, H, D) or pages for cached_attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import implementations
import torch
from common import Row
from reference import Batch, Slice, references
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from workloads import Mods, Workload, alibi, causal, softcap, window

SHORTEST = 256  # of lengths that are mixed
L2_TIMES = 8  # a graph reads at least so much more than fits into L2 before it reads the same bytes again
CALLS = 8  # of a graph at least: gaps between graphs are then a small part
SCALE = 4.0  # of q, in the check and in the timed runs: at ordinary scores a lost softcap would hardly show


@dataclass(frozen=True)
class Decode(Workload):
    """`q_len` new queries a sequence, the last of its `length` positions; or of SHORTEST to `length` if they are `mixed`.

    Mods are in terms of positions in the sequence.  `size` is the window.
    """

    batch: int = 16
    heads: int = 32
    kv_heads: int = 8
    length: int = 8192
    q_len: int = 1
    mixed: bool = False

    @property
    def plain(self) -> bool:
        """True when a query sees all of its keys, and nothing changes the scores."""
        return self.plain_scores and self.mask is None and not self.mixed

    def lengths(self, seed: int = 0) -> list[int]:
        """Return the positions of every sequence."""
        if not self.mixed:
            return [self.length] * self.batch
        generator = torch.Generator().manual_seed(seed)
        least = min(SHORTEST, self.length)
        return torch.randint(least, self.length + 1, (self.batch,), generator=generator).tolist()

    def kv_bytes(self) -> int:
        """Bytes of bf16 keys and values that the queries see, each counted once."""
        most = self.size + self.q_len - 1 if self.mask is window else self.length
        return sum(min(n, most) for n in self.lengths()) * self.kv_heads * (self.d_qk + self.d_v) * 2

    def relative(self, mods: Mods) -> Mods:
        """Return the mods as functions of a q_idx that counts from the first new query, as flex_attention gives it."""
        score_mod, mask_mod = mods[:2]
        offset = self.length - self.q_len

        def score(score: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            return score_mod(score, b, h, q_idx + offset, kv_idx)

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            return mask_mod(b, h, q_idx + offset, kv_idx)

        return Mods(score if score_mod else None, mask if mask_mod else None)

    def problem(self, device: str, l2: int) -> Step:
        """Return the tensors on `device`, in so many copies that a cache of `l2` bytes is of no use."""
        return Step(self, device, max(2, math.ceil(L2_TIMES * l2 / self.kv_bytes())))


class Run(NamedTuple):
    """What an implementation does in one CUDA graph."""

    call: Callable[[], list[torch.Tensor]]  # returns every output
    answers: list[Slice]
    parts: Callable[[torch.Tensor], Batch] = lambda out: out  # an output as `answers` index it
    update: Callable[[], list[torch.Tensor]] | None = None  # to be done before, and timed apart


Caches = list[tuple[torch.Tensor, torch.Tensor]]


class Step:
    """The tensors of a case: copies of the caches in all layouts, made when they are asked for.

    q (B, Hq, q_len, D); dense k and v (B, Hkv, S, D).  In the caches of cached_attention NaN is where no sequence is.
    """

    def __init__(self, case: Decode, device: str, copies: int, seed: int = 0) -> None:
        self.case, self.device, self.copies = case, device, copies
        self.order = [i % copies for i in range(copies * math.ceil(CALLS / copies))]
        self.generator = torch.Generator(device).manual_seed(seed)
        self.q = SCALE * self._random(case.batch, case.heads, case.q_len, case.d_qk)
        self.k = self._random(case.batch, case.kv_heads, case.length, case.d_qk)
        self.v = self._random(case.batch, case.kv_heads, case.length, case.d_v)
        self.lengths = case.lengths()
        self.kv_len = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self.mods = case.make_mods(device)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def _copies(self, k: torch.Tensor, v: torch.Tensor) -> Caches:
        return [(k, v), *((k.clone(), v.clone()) for _ in range(self.copies - 1))]

    @cached_property
    def dense(self) -> Caches:
        return self._copies(self.k, self.v)

    @cached_property
    def contiguous(self) -> Caches:
        absent = torch.arange(self.case.length, device=self.device) >= self.kv_len[:, None]
        k, v = (x.transpose(1, 2).masked_fill(absent[:, :, None, None], math.nan).contiguous() for x in (self.k, self.v))
        return self._copies(k, v)

    def paged(self, size: int) -> tuple[torch.Tensor, Caches]:
        """Return the page table and caches of just as many pages of `size` positions as it takes, in random order."""
        table, caches = page_table(self.lengths, size, self.device), []
        count = sum(math.ceil(n / size) for n in self.lengths)
        for x in (self.k, self.v):
            cache = x.new_full((count, size, self.case.kv_heads, x.shape[3]), math.nan)
            for b, n in enumerate(self.lengths):
                pages = table[b, : math.ceil(n / size)].long()
                tokens = x.new_full((len(pages) * size, *cache.shape[2:]), math.nan)
                tokens[:n] = x[b, :, :n].transpose(0, 1)
                cache[pages] = tokens.view(-1, *cache.shape[1:])
            caches.append(cache)
        return table, self._copies(*caches)

    @cached_property
    def answers(self) -> list[Slice]:
        """The float64 answers: of every sequence, and of all key/value heads if there are enough sequences."""
        case, mods = self.case, self.case.relative(self.mods)
        if case.mixed:
            kv_len = self.kv_len
            mods = mods._replace(mask=lambda b, h, q_idx, kv_idx: kv_idx < kv_len[b])
        more = [(b, b % case.kv_heads) for b in range(case.batch)]
        return references(case, (self.q, self.k, self.v), mods, more=more)

    def run(self, impl: str) -> Run:
        """Return what `impl` is to do: a call for every copy, as layers of a model follow one another."""
        attention = IMPLEMENTATIONS[impl].build(self)
        return Run(lambda: [attention(i) for i in self.order], self.answers)

    def figures(self, row: Row, copy_tb_s: float | None) -> None:
        """Complete a row of which the time of a graph is known."""
        calls, read = len(self.order), self.case.kv_bytes()
        row |= {"us": row["us"] / calls, "us_rounds": [us / calls for us in row["us_rounds"]], "calls": calls, "bytes": read}
        row["tb_s"] = read / row["us"] * 1e-6
        row["of_copy"] = row["tb_s"] / copy_tb_s if copy_tb_s else None


def page_table(lengths: list[int], size: int, device: str, seed: int = 2) -> torch.Tensor:
    """Return an int32 page table (B, pages of the longest) of as many pages as it takes, in random order; 0 after a sequence's last."""
    counts = [math.ceil(n / size) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for b, pages in enumerate(order.split(counts)):
        table[b, : len(pages)] = pages
    return table.to(device)


Attention = Callable[[int], torch.Tensor]  # of the copy with this number


def cached(step: Step, page: int = 0) -> Attention:
    """cached_attention, which knows positions; its own mask where that is the one wanted."""
    from flexpress import cached_attention

    table, caches = step.paged(page) if page else (None, step.contiguous)
    score_mod, mask_mod = step.mods[:2]
    if step.case.mask is causal:
        mask_mod = None
    return lambda i: cached_attention(step.q, *caches[i], step.kv_len, page_table=table, score_mod=score_mod, mask_mod=mask_mod)


def dense(step: Step, build: Callable[..., implementations.Attention]) -> Attention:
    """An implementation that takes (B, H, S, D) tensors and mods which count from the first new query."""
    attention = build(step.case, step.case.relative(step.mods), step.device)
    caches = step.dense
    return lambda i: attention(step.q, *caches[i])


def flash(step: Step) -> Attention:
    """FlashAttention-2, also with a causal mask that ends in the lower right corner."""
    if step.case.mask is None:
        return dense(step, implementations.sdpa(SDPBackend.FLASH_ATTENTION))
    bias, caches = causal_lower_right(step.case.q_len, step.case.length), step.dense

    def attention(i: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(step.q, *caches[i], attn_mask=bias, enable_gqa=step.case.gqa)

    return attention


@dataclass(frozen=True)
class Implementation:
    """How to build an attention function for a Step, and which cases it takes."""

    build: Callable[[Step], Attention]
    takes: Callable[[Decode], bool] = lambda case: True


IMPLEMENTATIONS = {
    "flexpress": Implementation(partial(dense, build=implementations.flexpress), lambda case: not case.mixed),
    "flexpress_cached": Implementation(cached),
    **{f"flexpress_paged_{page}": Implementation(partial(cached, page=page)) for page in (16, 64, 128)},
    "torch_flex": Implementation(partial(dense, build=implementations.torch_flex), lambda case: not case.mixed),
    "cudnn": Implementation(partial(dense, build=implementations.sdpa(SDPBackend.CUDNN_ATTENTION)), lambda case: case.plain),
    "flash": Implementation(flash, lambda case: case.dense_or_causal and not case.mixed),
    "efficient": Implementation(
        partial(dense, build=implementations.sdpa(SDPBackend.EFFICIENT_ATTENTION)), lambda case: case.plain and not case.gqa
    ),
}

CASES = (
    Decode("b16_8k", "B 16, 8192 keys"),
    Decode("b16_4k", "B 16, 4096 keys", length=4096),
    Decode("b64_8k", "B 64, 8192 keys", batch=64),
    Decode("b64_4k", "B 64, 4096 keys", batch=64, length=4096),
    Decode("b1_8k", "B 1, 8192 keys", batch=1),
    Decode("b1_128k", "B 1, 131072 keys", batch=1, length=131072),
    Decode("b8_mha_8k", "B 8, 32:32 heads", batch=8, kv_heads=32),
    Decode("b16_alibi", "ALiBi", score=alibi),
    Decode("b16_softcap", "softcap 20", score=softcap),
    Decode("b16_window", "window 1024", mask=window, size=1024),
    Decode("b16_d64", "D 64", d_qk=64, d_v=64),
    Decode("b16_q4", "4 queries, causal", q_len=4, mask=causal),
    Decode("b64_mixed", "B 64, 256 to 8192 keys", batch=64, mixed=True),
)

BY_NAME = {case.name: case for case in CASES}
