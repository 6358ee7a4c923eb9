"""Attention problems that tests draw: shapes, layouts, dtypes, score mods with and without learned tensors, masks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from flexpress import and_masks, create_block_mask, mods, or_masks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = {"cpu": [1, 2, 15, 16, 17, 63, 64, 65, 100, 129], "cuda": [1, 15, 64, 129, 257, 1025, 2046]}
HEAD_DIMS = {"cpu": [1, 8, 16, 31, 40, 64, 72], "cuda": [8, 16, 31, 64, 72, 80, 96, 128, 192, 256]}


def score_mods(heads: int, length: int, device: str) -> dict:
    """Score mods of every kind: arithmetic, captured per head, gathered by relative position, by batch and by both indices."""
    generator = torch.Generator().manual_seed(heads * 1000 + length)
    slopes = torch.rand(heads, generator=generator).to(device)
    table = torch.randn(heads, 2 * length, generator=generator).to(device)
    bias = torch.randn(1, heads, length, length, generator=generator).to(device=device, dtype=torch.float16)
    weight = torch.randn(32, heads, generator=generator).to(device)
    temperature = torch.tensor(0.7, device=device)
    return {
        "none": None,
        "alibi": mods.alibi(slopes),
        "softcap": mods.softcap(3.0),
        "distance": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
        "scaled": lambda score, b, h, q_idx, kv_idx: score * temperature + temperature,
        "table": lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + length],
        "full_bias": lambda score, b, h, q_idx, kv_idx: score + bias[0, h, q_idx, kv_idx],
        "t5": mods.t5_bias(weight),
        "hidden": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -math.inf),
        "constant": lambda score, b, h, q_idx, kv_idx: torch.zeros_like(score),
    }


def mask_mods(length: int, device: str) -> dict:
    """Mask mods: the recipes, regions by // and %, rows and columns that see nothing, and a mask per batch entry and head."""
    ids = (torch.arange(length, device=device) * 3) // max(length, 1)
    prefix = torch.tensor([3, 0], dtype=torch.int32, device=device)
    return {
        "none": None,
        "causal": mods.causal,
        "window": mods.sliding_window(7),
        "document": mods.document(ids, mods.causal),
        "dilated": mods.dilated_window(4, 3),
        "global": mods.global_sliding(5, 2),
        "tiles": lambda b, h, q_idx, kv_idx: (q_idx // 5) % 3 != (kv_idx // 7) % 2,
        "empty_rows": lambda b, h, q_idx, kv_idx: (q_idx % 3 == 1) & (kv_idx != 2),
        "nothing": lambda b, h, q_idx, kv_idx: q_idx < 0,
        "per_batch": mods.prefix_lm(prefix),
        "per_head": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (h % 2 == 1),
        "joined": or_masks(and_masks(mods.causal, mods.sliding_window(9)), lambda b, h, q_idx, kv_idx: kv_idx == 0),
    }


def mask_arguments(p: dict, mask_mod, heads: int, device: str) -> dict:
    """How a problem's mask is passed to flex_attention."""
    if mask_mod is None or p["mask_made"] == "by the call":
        return {"mask_mod": mask_mod}
    return {
        "block_mask": create_block_mask(
            mask_mod, p["B"], heads, p["Q_LEN"], p["KV_LEN"], device, p["BLOCK_SIZE"], separate_full_blocks=p["separate_full_blocks"]
        )
    }


SCORE_MODS = sorted(score_mods(1, 1, "cpu"))
MASK_MODS = sorted(mask_mods(1, "cpu"))
LAYOUTS = ["contiguous", "bshd", "sliced", "wide_head_dim", "shared_batch"]


def tensor_of(shape, layout: str, dtype, device: str, seed: int):
    """A random (B, H, S, D) tensor in one of LAYOUTS."""
    generator = torch.Generator(device=device).manual_seed(seed)
    B, H, S, D = shape

    def random(*sizes):
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    if layout == "bshd":
        return random(B, S, H, D).transpose(1, 2)
    if layout == "sliced":
        return random(B, H + 1, S + 3, D + 5)[:, 1:, 2 : S + 2, 3 : D + 3]
    if layout == "wide_head_dim":
        return random(B, H, S, 2 * D)[..., ::2]
    if layout == "shared_batch":
        return random(1, H, S, D).expand(B, H, S, D)
    return random(B, H, S, D)


@st.composite
def problems(draw, device):
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    Q_LEN = draw(st.sampled_from(LENGTHS[device]))
    KV_LEN = draw(st.one_of(st.just(Q_LEN), st.sampled_from(LENGTHS[device])))
    D_QK = draw(st.sampled_from(HEAD_DIMS[device]))
    return {
        "dtype": dtype,
        "B": draw(st.sampled_from([1, 2])),
        "Hkv": draw(st.sampled_from([1, 2])),
        "group": draw(st.sampled_from([1, 2, 3, 7])),
        "Q_LEN": Q_LEN,
        "KV_LEN": KV_LEN,
        "D_QK": D_QK,
        "D_V": draw(st.one_of(st.just(D_QK), st.sampled_from(HEAD_DIMS[device]))),
        "layouts": draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
        "score": draw(st.sampled_from(SCORE_MODS)),
        "mask": draw(st.sampled_from(MASK_MODS)),
        "one_kv_batch": draw(st.booleans()),
        "BLOCK_SIZE": draw(st.sampled_from([128, 64, (32, 64), (64, 16), (256, 64)] if device == "cpu" else [128, 64, (64, 128), 256])),
        "separate_full_blocks": draw(st.sampled_from([True, True, False])),
        "mask_made": draw(st.sampled_from(["before", "before", "by the call"])),
        "scale": draw(st.sampled_from([None, None, 0.3, 0.0, -0.5])),
        "USE_TMA": draw(st.sampled_from([None, True, False])),
        "seed": draw(st.integers(0, 99)),
    }


def learned_mods(batch: int, heads: int, length: int, device: str, dtype=torch.float32, seed: int = 0) -> dict:
    """Score mods with tensors that want gradients, by name: (function from the tensors to the mod, the tensors).

    One for every way in which indices may depend on b, h, q_idx and kv_idx, and for derivatives that need the score.
    """
    generator = torch.Generator().manual_seed(seed)
    buckets = torch.randint(0, 7, (length,), generator=generator).to(device)

    whole = torch.zeros(heads, length, device=device)

    def learned(*shape):
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    return {
        "none": (lambda: None, []),
        "softcap": (lambda: mods.softcap(3.0), []),
        "distance": (lambda: lambda s, b, h, m, n: s + (m - n) * 0.01, []),
        "slopes": (lambda t: mods.alibi(t), [learned(heads)]),
        "temperature": (lambda t: lambda s, b, h, m, n: s * t + t, [learned()]),
        "constant": (lambda t: lambda s, b, h, m, n: torch.zeros_like(s) + t[0] * 0.5, [learned(3)]),
        "per_query": (lambda t: lambda s, b, h, m, n: s * t[b, m], [learned(batch, length)]),
        "per_key": (lambda t, u: lambda s, b, h, m, n: torch.tanh(s) * u[h, n] + t[0, n], [learned(1, length), learned(heads, length)]),
        "table": (lambda t: lambda s, b, h, m, n: s + t[h, m - n + length], [learned(heads, 2 * length)]),
        "bias": (lambda t: lambda s, b, h, m, n: s + t[b, h, m, n], [learned(batch, heads, length, length)]),
        "head_bias": (lambda t: lambda s, b, h, m, n: s + t[h, m, n], [learned(heads, length, length)]),
        "windows": (lambda t: lambda s, b, h, m, n: s + t.unfold(0, length, 1)[m, n], [learned(2 * length)]),
        "table_and_rows": (
            lambda t, u: lambda s, b, h, m, n: s * u[h, m] + t[h, m - n + length] + u[0, 0],
            [learned(heads, 2 * length), learned(heads, length)],
        ),
        "bias_twice": (lambda t: lambda s, b, h, m, n: t[b, h, m, n] + s * t[b, h, m, 0], [learned(batch, heads, length, length)]),
        "turned": (lambda t: lambda s, b, h, m, n: s + t.transpose(0, 2)[b, m, n], [learned(length, length, batch)]),
        "buckets": (lambda t: lambda s, b, h, m, n: s + t[h, buckets[m]] * t[h, buckets[n]], [learned(heads, 7)]),
        "expanded": (lambda t: lambda s, b, h, m, n: s * t.expand_as(whole)[h, m], [learned(1, 1)]),
    }


LEARNED_MODS = sorted(learned_mods(1, 1, 1, "cpu"))
