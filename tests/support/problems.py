"""Attention problems that tests draw: shapes, layouts, dtypes, score mods with and without learned tensors, masks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flexpress import and_masks, create_block_mask, mods, or_masks

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
        "hash": lambda score, b, h, q_idx, kv_idx: score + ((q_idx * 2654435761) ^ kv_idx) % 11 * 0.2,
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


@dataclass(kw_only=True)
class Problem:
    """q (B, Hkv * group, Q_LEN, D_QK), k (B, Hkv, KV_LEN, D_QK), v (B, Hkv, KV_LEN, D_V), names of mods, and how flex_attention is called.

    `layouts`: those of q, k and v. `one_kv_batch`: k and v have one batch entry. `mask_made`: "before" or "by the call".
    """

    dtype: torch.dtype
    B: int = 1
    Hkv: int = 1
    group: int = 2
    Q_LEN: int
    KV_LEN: int
    D_QK: int
    D_V: int
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    score: str
    mask: str
    one_kv_batch: bool = False
    BLOCK_SIZE: int | tuple[int, int] = 128
    separate_full_blocks: bool = True
    mask_made: str = "before"
    scale: float | None = None
    USE_TMA: bool | None = None
    seed: int = 0

    @property
    def Hq(self) -> int:
        return self.Hkv * self.group

    @property
    def length(self) -> int:
        """That of tensors which mods capture."""
        return max(self.Q_LEN, self.KV_LEN)

    def tensors(self, device: str) -> list[torch.Tensor]:
        """q, k and v."""
        Bkv = 1 if self.one_kv_batch else self.B
        shapes = [(self.B, self.Hq, self.Q_LEN, self.D_QK), (Bkv, self.Hkv, self.KV_LEN, self.D_QK), (Bkv, self.Hkv, self.KV_LEN, self.D_V)]
        return [
            tensor_of(shape, layout, self.dtype, device, self.seed + i)
            for i, (shape, layout) in enumerate(zip(shapes, self.layouts, strict=True))
        ]

    def mask_mod(self, device: str):
        return mask_mods(self.length, device)[self.mask]

    def options(self, device: str) -> dict:
        """How flex_attention is called: the mask, scale and kernel options."""
        mask_mod, masked = self.mask_mod(device), {}
        if mask_mod is None or self.mask_made == "by the call":
            masked["mask_mod"] = mask_mod
        else:
            extents = self.B, self.Hq, self.Q_LEN, self.KV_LEN
            masked["block_mask"] = create_block_mask(
                mask_mod, *extents, device, self.BLOCK_SIZE, separate_full_blocks=self.separate_full_blocks
            )
        use_tma = {} if self.USE_TMA is None else {"USE_TMA": self.USE_TMA}
        return {**masked, "scale": self.scale, "enable_gqa": True, "kernel_options": use_tma}


@st.composite
def problems(draw, device: str, kind: type[Problem] = Problem, **others):
    """Problems for a device. `others`: strategies of other fields, and in place of these."""
    Q_LEN = draw(st.sampled_from(LENGTHS[device]))
    D_QK = draw(st.sampled_from(HEAD_DIMS[device]))
    fields = {
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "B": st.sampled_from([1, 2]),
        "Hkv": st.sampled_from([1, 2]),
        "group": st.sampled_from([1, 2, 3, 7]),
        "KV_LEN": st.one_of(st.just(Q_LEN), st.sampled_from(LENGTHS[device])),
        "D_V": st.one_of(st.just(D_QK), st.sampled_from(HEAD_DIMS[device])),
        "layouts": st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
        "score": st.sampled_from(SCORE_MODS),
        "mask": st.sampled_from(MASK_MODS),
        "one_kv_batch": st.booleans(),
        "BLOCK_SIZE": st.sampled_from([128, 64, (32, 64), (64, 16), (256, 64)] if device == "cpu" else [128, 64, (64, 128), 256]),
        "separate_full_blocks": st.sampled_from([True, True, False]),
        "mask_made": st.sampled_from(["before", "before", "by the call"]),
        "scale": st.sampled_from([None, None, 0.3, 0.0, -0.5]),
        "USE_TMA": st.sampled_from([None, True, False]),
        "seed": st.integers(0, 99),
    }
    return kind(Q_LEN=Q_LEN, D_QK=D_QK, **{name: draw(strategy) for name, strategy in (fields | others).items()})


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
        "hash": (lambda: lambda s, b, h, m, n: s * (((m * 2654435761) ^ n) % 11 * 0.2 + 0.1), []),
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
