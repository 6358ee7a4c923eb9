"""The cases of features.py: the same attention problem with a feature, without it, and by what a user would do without it.

plain           flexpress without the feature
portable        the same by the portable kernels
feature         flexpress with it
by_hand         what does the same with flexpress, without the feature
torch           what does the same with torch: flex_attention compiled, scaled_dot_product_attention, or its FlashAttention-2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as torchs
from torch.nn.functional import scaled_dot_product_attention

from flexpress import AuxRequest, AuxStatistics, cached_attention, create_block_mask, dropout_mask, flex_attention, varlen_attention
from flexpress.mods import causal, sliding_window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there tests run it, with small shapes
DROPOUT = 0.1
PORTABLE = {"BACKEND": "PORTABLE"}


@dataclass
class Way:
    """One way to compute a case: `run` gives tensors, the first of which is compared with that of the way `same`."""

    run: Callable[[], tuple[torch.Tensor, ...]]
    same: str | None = None


@dataclass
class Case:
    """Ways by name. `leaves` get gradients in the timed backward pass; without any there is none."""

    ways: dict[str, Way]
    leaves: tuple[torch.Tensor, ...] = ()
    answer: Callable[[tuple[torch.Tensor, ...]], float] | None = None  # the error of "feature" where no other way computes the same
    limit: float = 0.02


def normal(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=grad)


def qkv(batch: int, heads: int, kv_heads: int, length: int, head_dim: int, grad: bool = True) -> tuple[torch.Tensor, ...]:
    return tuple(normal(batch, n, length, head_dim, grad=grad) for n in (heads, kv_heads, kv_heads))


def one(out: torch.Tensor) -> tuple[torch.Tensor]:
    return (out,)


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def torch_flex(**given: object) -> Callable[..., object]:
    """torch's flex_attention, compiled for one shape."""
    return torch.compile(lambda *tensors: torchs.flex_attention(*tensors, **given), dynamic=False)


def sinks_case(shape: Sequence[int], mask_mod: Callable[..., torch.Tensor]) -> Case:
    """By hand: without sinks, and the output times sigmoid(lse - sink)."""
    q, k, v = qkv(*shape)
    sinks = normal(shape[1], grad=True)
    mask = create_block_mask(mask_mod, None, None, shape[3], shape[3], DEVICE)
    theirs = torchs.create_block_mask(mask_mod, None, None, shape[3], shape[3], DEVICE)

    def fold(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(out.dtype)

    def torch_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fold(*torchs.flex_attention(q, k, v, block_mask=theirs, enable_gqa=True, return_lse=True))

    compiled = torch.compile(torch_by_hand, dynamic=False)
    given = {"block_mask": mask, "enable_gqa": True}
    ways = {
        "plain": Way(lambda: one(flex_attention(q, k, v, **given))),
        "feature": Way(lambda: one(flex_attention(q, k, v, sinks=sinks, **given))),
        "by_hand": Way(lambda: one(fold(*flex_attention(q, k, v, return_lse=True, **given))), "feature"),
        "torch": Way(lambda: one(compiled(q, k, v)), "feature"),
    }
    return Case(ways, (q, k, v))


def dropout_case(shape: Sequence[int], *, is_causal: bool) -> Case:
    """Torch's way is FlashAttention-2 in scaled_dot_product_attention, which draws other weights to drop."""
    q, k, v = qkv(*shape)
    mask_mod = causal if is_causal else None
    seed = torch.tensor([1234], device=DEVICE)
    mask = create_block_mask(causal, None, None, shape[3], shape[3], DEVICE) if is_causal else None

    def sdpa(dropout_p: float) -> tuple[torch.Tensor]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return one(scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=mask_mod is not None))

    def error(found: tuple[torch.Tensor, ...]) -> float:
        return error_of_dropout([t[0, 0] for t in (q, k, v)], [t[0, 0] for t in found], seed, is_causal)

    ways = {
        "plain": Way(lambda: one(flex_attention(q, k, v, block_mask=mask))),
        "portable": Way(lambda: one(flex_attention(q, k, v, block_mask=mask, kernel_options=PORTABLE)), "plain"),
        "feature": Way(lambda: one(flex_attention(q, k, v, block_mask=mask, dropout_p=DROPOUT, dropout_seed=seed))),
        "torch plain": Way(lambda: sdpa(0.0), "plain"),
        "torch": Way(lambda: sdpa(DROPOUT)),
    }
    return Case(ways, (q, k, v), error)


def packed_dropout_case(lengths: Sequence[int], heads: int, head_dim: int, *, is_causal: bool) -> Case:
    """Sequences of these lengths. Torch's way is its FlashAttention-2, which draws other weights to drop."""
    total = sum(lengths)
    q, k, v = (normal(total, heads, head_dim, grad=True) for _ in range(3))
    mask_mod = causal if is_causal else None
    seed = torch.tensor([1234], device=DEVICE)
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()

    def flash(dropout_p: float) -> tuple[torch.Tensor]:
        of_sequences = ends, ends, max(lengths), max(lengths)
        return one(torch.ops.aten._flash_attention_forward(q, k, v, *of_sequences, dropout_p, is_causal, False)[0])

    def error(found: tuple[torch.Tensor, ...]) -> float:
        return error_of_dropout([t[: lengths[0], 0] for t in (q, k, v)], [t[: lengths[0], 0] for t in found], seed, is_causal)

    def packed(**given: object) -> tuple[torch.Tensor]:
        return one(varlen_attention(q, k, v, ends, mask_mod=mask_mod, **given))

    ways = {
        "plain": Way(packed),
        "portable": Way(lambda: packed(kernel_options=PORTABLE), "plain"),
        "feature": Way(lambda: packed(dropout_p=DROPOUT, dropout_seed=seed)),
    }
    if DEVICE == "cuda":
        ways |= {"torch plain": Way(lambda: flash(0.0), "plain"), "torch": Way(lambda: flash(DROPOUT))}
    return Case(ways, (q, k, v), error)


def error_of_dropout(given: Sequence[torch.Tensor], found: Sequence[torch.Tensor], seed: torch.Tensor, is_causal: bool) -> float:
    """The largest one of output and gradients of one head of one sequence: `given` q, k and v (length, head_dim), what was `found`."""
    inputs = [t.detach().double().requires_grad_() for t in given]
    length, head_dim = inputs[0].shape
    scores = inputs[0] @ inputs[1].T / math.sqrt(head_dim)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    kept = dropout_mask(seed, (1, 1, length, length), DROPOUT)[0, 0]
    p = round(DROPOUT * 16384) / 16384
    out = scores.softmax(-1) * kept / (1 - p) @ inputs[2]
    exact = (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))
    return max(map(difference, found, exact))


def math_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def jvp_case(shape: Sequence[int], *, is_causal: bool) -> Case:
    """Torch's way is the only back end of scaled_dot_product_attention that has forward derivatives: the dense one."""
    tensors, directions = qkv(*shape, grad=False), qkv(*shape, grad=False)
    mask = create_block_mask(causal, None, None, shape[3], shape[3], DEVICE) if is_causal else None

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    def of_query(q: torch.Tensor) -> torch.Tensor:
        return attention(q, *tensors[1:])

    def torchs_way() -> tuple[torch.Tensor, ...]:
        return torch.func.jvp(lambda *given: math_attention(*given, is_causal=is_causal), tensors, directions)[::-1]

    ways = {
        "plain": Way(lambda: one(attention(*tensors))),
        "portable": Way(lambda: one(flex_attention(*tensors, block_mask=mask, kernel_options=PORTABLE)), "plain"),
        "feature": Way(lambda: torch.func.jvp(attention, tensors, directions)[::-1]),
        "feature, query alone": Way(lambda: torch.func.jvp(of_query, tensors[:1], directions[:1])[::-1]),
        "torch": Way(torchs_way, "feature"),
    }
    return Case(ways)


def second_case(shape: Sequence[int], *, is_causal: bool) -> Case:
    """Gradients of gradients: of the sum of squares of all three. The first way is forward and backward pass alone."""
    tensors = qkv(*shape)
    weights = normal(*tensors[0].shape)
    mask = create_block_mask(causal, None, None, shape[3], shape[3], DEVICE) if is_causal else None

    def ours() -> torch.Tensor:
        return flex_attention(*tensors, block_mask=mask)

    def first() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(ours(), tensors, weights)

    def twice(attention: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        gradients = torch.autograd.grad(attention(), tensors, weights, create_graph=True)
        return torch.autograd.grad(gradients, tensors, [g.detach() for g in gradients])

    ways = {
        "plain": Way(first),
        "feature": Way(lambda: twice(ours)),
        "torch": Way(lambda: twice(lambda: math_attention(*tensors, is_causal=is_causal)), "feature"),
    }
    return Case(ways, limit=0.1)


def dots_case(shape: Sequence[int], width: int = 64) -> Case:
    """A dot product of captured rows in the score. By hand: rows beside those of query and key, so a head dim of 192.

    Torch's way is that, too. Unrolled: four vectors of 16, which are multiplied element by element.
    """
    batch, heads, _, length, head_dim = shape
    q, k, v = qkv(*shape, grad=False)
    q_rows, k_rows = normal(batch, heads, length, width), normal(batch, length, width)
    scale = 1 / math.sqrt(head_dim)
    parts = [(q_rows[..., i : i + 16].contiguous(), k_rows[..., i : i + 16].contiguous()) for i in range(0, width, 16)]
    (q0, k0), (q1, k1), (q2, k2), (q3, k3) = parts

    def dot(score, b, h, q_idx, kv_idx):
        return score + torch.dot(q_rows[b, h, q_idx], k_rows[b, kv_idx])

    def unrolled(score, b, h, q_idx, kv_idx):
        first = torch.dot(q0[b, h, q_idx], k0[b, kv_idx]) + torch.dot(q1[b, h, q_idx], k1[b, kv_idx])
        return score + first + torch.dot(q2[b, h, q_idx], k2[b, kv_idx]) + torch.dot(q3[b, h, q_idx], k3[b, kv_idx])

    def beside() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.cat([q, q_rows / scale], -1), torch.cat([k, k_rows[:, None].expand(-1, heads, -1, -1)], -1), v

    compiled = torch_flex(scale=scale)
    ways = {
        "plain": Way(lambda: one(flex_attention(q, k, v))),
        "portable": Way(lambda: one(flex_attention(q, k, v, kernel_options=PORTABLE)), "plain"),
        "feature": Way(lambda: one(flex_attention(q, k, v, dot))),
        "by_hand": Way(lambda: one(flex_attention(*beside(), scale=scale)), "feature"),
        "unrolled": Way(lambda: one(flex_attention(q, k, v, unrolled)), "feature"),
        "torch": Way(lambda: one(compiled(*beside())), "feature"),
    }
    return Case(ways, limit=0.05)


def statistics_case(shape: Sequence[int]) -> Case:
    """What return_aux gives beyond lse."""
    q, k, v = qkv(*shape, grad=False)
    mask = create_block_mask(causal, None, None, shape[3], shape[3], DEVICE)

    def asked(**names: bool) -> tuple[torch.Tensor]:
        return one(flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(**names))[0])

    ways = {
        "plain": Way(lambda: one(flex_attention(q, k, v, block_mask=mask))),
        "portable": Way(lambda: one(flex_attention(q, k, v, block_mask=mask, kernel_options=PORTABLE)), "plain"),
        "lse": Way(lambda: asked(lse=True), "plain"),
        "entropy and top_index": Way(lambda: asked(entropy=True, top_index=True), "plain"),
        "column_sums": Way(lambda: asked(column_sums=True), "plain"),
        "feature": Way(lambda: asked(entropy=True, top_index=True, column_sums=True), "plain"),
    }
    return Case(ways)


def statistics_gradient_case(shape: Sequence[int], statistic: str) -> Case:
    """Gradients of q and k through "entropy" or "column_sums". By hand: dense attention in torch."""
    q, k, v = qkv(*shape)
    mask = create_block_mask(causal, None, None, shape[3], shape[3], DEVICE)
    hidden = torch.ones(shape[3], shape[3], dtype=torch.bool, device=DEVICE).triu(1)

    def asked() -> torch.Tensor:
        request = AuxRequest(**{statistic: True})
        return getattr(flex_attention(q, k, v, block_mask=mask, return_aux=request)[1], statistic)

    def dense() -> torch.Tensor:
        scores = ((q @ k.mT).float() * shape[4] ** -0.5).masked_fill(hidden, -math.inf)
        weights = scores.softmax(-1)
        if statistic == "column_sums":
            return weights.sum(-2)
        return -(weights * scores.log_softmax(-1).masked_fill(hidden, 0.0)).sum(-1)

    ways = {
        "plain": Way(lambda: one(flex_attention(q, k, v, block_mask=mask))),
        "feature": Way(lambda: one(asked().square())),
        "by_hand": Way(lambda: one(dense().square()), "feature"),
    }
    return Case(ways, (q, k), limit=0.05)


def statistics_packed_case(lengths: Sequence[int], heads: int, head_dim: int) -> Case:
    """Column sums of packed sequences. By hand: dense attention in torch, one sequence after another."""
    q, k, v = (normal(sum(lengths), heads, head_dim) for _ in range(3))
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()

    def asked(**names: bool) -> tuple[torch.Tensor, AuxStatistics]:
        return varlen_attention(q, k, v, ends, mask_mod=causal, return_aux=AuxRequest(**names))

    def dense() -> torch.Tensor:
        sums = []
        for a, b in zip(*(t.split(list(lengths)) for t in (q, k)), strict=True):
            scores = torch.einsum("mhd,nhd->hmn", a, b).float() * head_dim**-0.5
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE).triu(1)
            sums.append(scores.masked_fill_(hidden, -math.inf).softmax(-1).sum(1).T)
        return torch.cat(sums)

    ways = {
        "plain": Way(lambda: one(varlen_attention(q, k, v, ends, mask_mod=causal))),
        "feature": Way(lambda: one(asked(entropy=True, top_index=True, column_sums=True)[0]), "plain"),
        "column_sums": Way(lambda: one(asked(column_sums=True)[1].column_sums)),
        "by_hand": Way(lambda: one(dense()), "column_sums"),
    }
    return Case(ways)


def statistics_cache_case(batch: int, heads: int, kv_heads: int, keys: int, head_dim: int, queries: int, page_size: int) -> Case:
    """Column sums of the last queries of sequences in pages. By hand: torch gathers the keys and computes all weights."""
    pages = batch * keys // page_size
    k, v = (normal(pages, page_size, kv_heads, head_dim) for _ in range(2))
    q, table = normal(batch, heads, queries, head_dim), torch.randperm(pages, device=DEVICE).int().view(batch, -1)
    lengths = torch.full((batch,), keys, device=DEVICE, dtype=torch.int32)

    def asked(**names: bool) -> tuple[torch.Tensor, AuxStatistics]:
        return cached_attention(q, k, v, lengths, page_table=table, return_aux=AuxRequest(**names))

    def dense() -> torch.Tensor:
        kept = k[table].flatten(1, 2).transpose(1, 2)
        scores = (q.view(batch, kv_heads, -1, head_dim) @ kept.mT).float().view(batch, heads, queries, keys) * head_dim**-0.5
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).triu(keys - queries + 1)
        return scores.masked_fill_(hidden, -math.inf).softmax(-1).sum(-2)

    ways = {
        "plain": Way(lambda: one(cached_attention(q, k, v, lengths, page_table=table))),
        "feature": Way(lambda: one(asked(entropy=True, top_index=True, column_sums=True)[0]), "plain"),
        "entropy and top_index": Way(lambda: one(asked(entropy=True, top_index=True)[0]), "plain"),
        "column_sums": Way(lambda: one(asked(column_sums=True)[1].column_sums)),
        "by_hand": Way(lambda: one(dense()), "column_sums"),
    }
    return Case(ways)


PACKED = (4001, 7999, 2000, 10000, 8768) * 2
SHAPE, NARROW = (4, 16, 16, 4096, 128), (4, 16, 16, 4096, 64)
CASES: dict[str, Callable[[], Case]] = {
    "sinks_causal": lambda: sinks_case(SHAPE, causal),
    "sinks_gpt_oss": lambda: sinks_case((1, 64, 8, 16384, 64), sliding_window(128)),
    "dropout_causal": lambda: dropout_case(SHAPE, is_causal=True),
    "dropout_full_d64": lambda: dropout_case(NARROW, is_causal=False),
    "dropout_packed": lambda: packed_dropout_case(PACKED, 16, 128, is_causal=True),
    "dropout_packed_d64": lambda: packed_dropout_case(PACKED, 16, 64, is_causal=False),
    "jvp_causal": lambda: jvp_case(SHAPE, is_causal=True),
    "jvp_full": lambda: jvp_case(SHAPE, is_causal=False),
    "jvp_full_d64": lambda: jvp_case(NARROW, is_causal=False),
    "second_causal": lambda: second_case((1, 16, 16, 4096, 128), is_causal=True),
    "second_full_d64": lambda: second_case((1, 16, 16, 4096, 64), is_causal=False),
    "dots_full": lambda: dots_case(SHAPE),
    "statistics_causal": lambda: statistics_case(SHAPE),
    "statistics_packed": lambda: statistics_packed_case(PACKED[:5], 16, 128),
    "statistics_decode": lambda: statistics_cache_case(64, 32, 8, 8192, 128, 1, 64),
    "statistics_window": lambda: statistics_cache_case(4, 32, 8, 32768, 128, 32, 64),
    "entropy_gradient": lambda: statistics_gradient_case((1, *SHAPE[1:]), "entropy"),
    "column_sums_gradient": lambda: statistics_gradient_case((1, *SHAPE[1:]), "column_sums"),
}
