"""Packed sequences that tests draw, and varlen_attention against dense attention within each of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from flexpress import and_masks, dropout_mask, mods, or_masks, varlen_attention
from flexpress.calls import packed_blocks
from support.dense import dense_attention, factors_of, relative_error
from support.gradients import assert_gradients, error_times, gradients_of

LENGTHS = {"cpu": [0, 0, 1, 2, 15, 16, 40, 65, 130], "cuda": [0, 1, 17, 128, 300, 777, 1024]}
HEAD_DIMS = {"cpu": [1, 8, 16, 31, 40], "cuda": [16, 31, 64, 80, 128, 192]}
LAYOUTS = ["contiguous", "heads_first", "sliced", "wide_head_dim", "packed"]
FLOORS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def offsets(lengths, device=None, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def score_mods(n: int, heads: int, longest: int, device: str) -> dict:
    """By name: (function from learned tensors to the score_mod, the tensors). b is the sequence, m and k are positions inside it."""
    generator = torch.Generator().manual_seed(n)

    def learned(*shape):
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    return {
        "none": (lambda: None, []),
        "alibi": (mods.alibi, [learned(heads)]),
        "softcap": (lambda: mods.softcap(3.0), []),
        "position": (lambda: lambda s, b, h, m, k: s + 0.02 * m - 0.01 * k, []),
        "hash": (lambda: lambda s, b, h, m, k: s + ((m * 2654435761) ^ k) % 11 * 0.2, []),
        "sequence": (lambda t: lambda s, b, h, m, k: s * t[b, h] + t[b, 0], [learned(n, heads)]),
        "rows": (lambda t: lambda s, b, h, m, k: s * t[b, m], [learned(n, longest)]),
        "columns": (lambda t: lambda s, b, h, m, k: torch.tanh(s) + t[h, k], [learned(heads, longest)]),
        "table": (lambda t: lambda s, b, h, m, k: s + t[h, m - k + longest], [learned(heads, 2 * longest + 1)]),
        "bias": (lambda t: lambda s, b, h, m, k: s + t[b, h, m, k], [learned(n, heads, longest, longest)]),
    }


def mask_mods(n: int, device: str) -> dict:
    sizes = torch.arange(n, device=device) * 3 + 1
    return {
        "none": None,
        "causal": mods.causal,
        "window": mods.sliding_window(9),
        "prefix": mods.prefix_lm(sizes.int()),
        "sequence_window": lambda b, h, m, k: (m - k).abs() < sizes[b],
        "shifted": lambda b, h, m, k: m + sizes[b] - 7 >= k,
        "first_tokens": or_masks(and_masks(mods.causal, mods.sliding_window(5)), lambda b, h, m, k: k < 2),
        "hash": lambda b, h, m, k: (m * 1103515245 + k * 12345) % 7 < 5,
        "chunks": lambda b, h, m, k: m // 7 == k // 7,
        "heads": lambda b, h, m, k: (m >= k) | (h % 2 == 1),
        "some_sequences": lambda b, h, m, k: b % 2 == 0,
        "nothing": lambda b, h, m, k: m < 0,
    }


SCORE_MODS, MASK_MODS = sorted(score_mods(1, 1, 1, "cpu")), sorted(mask_mods(1, "cpu"))


def tensor_of(shape, layout: str, dtype, device: str, generator) -> torch.Tensor:
    """A random (tokens, heads, head_dim) tensor in one of LAYOUTS."""

    def random(*sizes):
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    T, H, D = shape
    if layout == "heads_first":
        return random(H, T, D).transpose(0, 1)
    if layout == "sliced":
        return random(T + 3, H + 1, D + 5)[2 : T + 2, 1:, 3 : D + 3]
    if layout == "wide_head_dim":
        return random(T, H, 2 * D)[..., ::2]
    if layout == "packed":
        return random(T, 3, H, D)[:, 1]
    return random(T, H, D)


def by_sequence(q, k, v, lengths_q, lengths_k, score_mod, mask_mod, scale, precision, factors=None):
    """out (total_q, Hq, Dv) and lse (total_q, Hq) by dense attention within each sequence, of probabilities times `factors` (sequences, Hq,
    longest of lengths_q, longest of lengths_k)."""
    outs, rows = [], []
    pieces = [t.split(lengths) for t, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]
    for b, parts in enumerate(zip(*pieces, strict=True)):
        if not len(parts[0]):
            continue
        x, y, z = (t.transpose(0, 1)[None] for t in parts)
        if not len(parts[1]):
            outs.append(parts[0].new_zeros((*parts[0].shape[:2], v.shape[2]), dtype=precision))
            rows.append(torch.full(parts[0].shape[:2], -math.inf, dtype=torch.promote_types(precision, torch.float32), device=q.device))
            continue
        score = None if score_mod is None else lambda s, _, h, m, n, b=b: score_mod(s, torch.full_like(h, b), h, m, n)
        mask = None if mask_mod is None else lambda _, h, m, n, b=b: mask_mod(torch.full_like(h, b), h, m, n)
        times = None if factors is None else factors[b : b + 1, :, : lengths_q[b], : lengths_k[b]]
        out, lse, _ = dense_attention(x, y, z, score, mask, scale, precision, factors=times)
        outs.append(out[0].transpose(0, 1))
        rows.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(rows)


@dataclass(kw_only=True)
class Problem:
    """q (sum of lengths, Hkv * group, D), k (sum of kv_lengths, Hkv, D), v (sum of kv_lengths, Hkv, Dv); kv_lengths None: as `lengths`.

    `offsets`: the dtype of cu_seqlens. `apart`: blocks begin where sequences do, however short these are.
    """

    lengths: list[int]
    kv_lengths: list[int] | None = None
    Hkv: int = 1
    group: int = 2
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = torch.float32
    offsets: torch.dtype = torch.int32
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    score: str = "none"
    mask: str = "causal"
    backward: bool = True
    scale: float | None = None
    deterministic: bool = False
    seed: int = 0
    apart: bool = False
    dropout: float = 0.0


@st.composite
def problems(draw, device):
    lengths = draw(st.lists(st.sampled_from(LENGTHS[device]), min_size=1, max_size=5).filter(any))
    kv_lengths = None
    if draw(st.booleans()):
        size = len(lengths)
        kv_lengths = draw(st.lists(st.sampled_from(LENGTHS[device]), min_size=size, max_size=size).filter(any))
    D = draw(st.sampled_from(HEAD_DIMS[device]))
    return Problem(
        lengths=lengths,
        kv_lengths=kv_lengths,
        Hkv=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3])),
        D=D,
        Dv=draw(st.one_of(st.just(D), st.sampled_from(HEAD_DIMS[device]))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        offsets=draw(st.sampled_from([torch.int32, torch.int64])),
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
        score=draw(st.sampled_from(SCORE_MODS)),
        mask=draw(st.sampled_from(MASK_MODS)),
        backward=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.3])),
        deterministic=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        apart=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )


def check_problem(p: Problem, device: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if p.apart:
            patch.setattr(packed_blocks, "LONG", 0)
        _check_problem(p, device)


def _check_problem(p: Problem, device: str) -> None:
    lengths, kv_lengths = p.lengths, p.kv_lengths or p.lengths
    n, Hq, Tq, Tk = len(lengths), p.Hkv * p.group, sum(lengths), sum(kv_lengths)
    generator = torch.Generator(device=device).manual_seed(p.seed)
    shapes = (Tq, Hq, p.D), (Tk, p.Hkv, p.D), (Tk, p.Hkv, p.Dv)
    inputs = [
        tensor_of(shape, layout, p.dtype, device, generator).requires_grad_() for shape, layout in zip(shapes, p.layouts, strict=True)
    ]
    make, learned = score_mods(n, Hq, max(*lengths, *kv_lengths), device)[p.score]
    mask_mod = mask_mods(n, device)[p.mask]
    cu_q = offsets(lengths, device, p.offsets)
    cu_k = None if p.kv_lengths is None else offsets(kv_lengths, device, p.offsets)
    given, factors = dict(scale=p.scale, return_lse=True, deterministic=p.deterministic), None
    if p.dropout:
        seed = torch.tensor([p.seed - 50], device=device)
        given |= dict(dropout_p=p.dropout, dropout_seed=seed)
        kept = dropout_mask(seed, (n, Hq, max(lengths), max(kv_lengths)), p.dropout)
        factors = factors_of(kept, p.dropout)
    out, lse = varlen_attention(*inputs, cu_q, cu_k, make(*learned), mask_mod, **given)
    assert out.shape == (Tq, Hq, p.Dv) and lse.shape == (Tq, Hq) and out.dtype == p.dtype and lse.dtype == torch.float32

    def reference(precision):
        leaves = [
            t.detach().to(precision if i < 3 else torch.promote_types(precision, torch.float32)).requires_grad_()
            for i, t in enumerate((*inputs, *learned))
        ]
        return leaves, *by_sequence(*leaves[:3], lengths, kv_lengths, make(*leaves[3:]), mask_mod, p.scale, precision, factors)

    exact, plain = reference(torch.float64), reference(p.dtype)
    error, allowed = (relative_error(t, exact[1]) for t in (out, plain[1]))
    assert error <= max(2 * allowed, FLOORS[p.dtype]), f"error {error:.2e}, a plain computation has {allowed:.2e}"
    seen = exact[2] > -math.inf
    assert torch.equal(lse > -math.inf, seen) and (out[~seen] == 0).all()
    # on Hopper, distances from the middle of a tile cancel in float32, up to 64 times a slope
    atol = 4e-5 if p.score == "alibi" and device == "cuda" else 2e-5
    torch.testing.assert_close(lse[seen].double(), exact[2][seen], rtol=2e-6, atol=atol)
    if not p.backward:
        return
    weights = tuple(torch.randn(t.shape, generator=generator, device=device) for t in (out, lse))
    weights = weights[0].to(p.dtype), weights[1]
    grads = torch.autograd.grad((out, lse), (*inputs, *learned), weights, allow_unused=True)

    def heads_first(found):
        return [g if i >= 3 or g is None else g.transpose(0, 1)[None] for i, g in enumerate(found)]

    fused = gradients_of(*exact, seen, weights, error_times(weights[0], out, exact[1]))
    found = [heads_first(each) for each in (grads, *(gradients_of(*one, seen, weights) for one in (exact, plain)), fused)]
    assert_gradients(*found[:3], [p.dtype] * (3 + len(learned)), lse=lse.detach(), fused=found[3])
