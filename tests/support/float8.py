"""Problems of float8 and its scales, against dense float64 attention of what the tensors stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flexpress import AuxRequest, flex_attention
from support.dense import dense_attention, relative_error
from support.extras import with_sinks
from support.problems import Problem, problems, score_mods

FLOAT8 = torch.float8_e4m3fn
FLOORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


@dataclass(kw_only=True)
class Quantised(Problem):
    """`scales`: of q, k and v, "" for none, or one for "all", each "head" or each of a "batch". `spread`: how large those of keys are."""

    scales: tuple[str, str, str]
    out_dtype: torch.dtype | None
    sinks: bool
    spread: float

    def scale_of(self, i: int, device: str) -> torch.Tensor | None:
        if not self.scales[i]:
            return None
        shape = {"all": (), "head": (self.Hkv,), "batch": (self.B, self.Hkv)}[self.scales[i]]
        g = torch.Generator().manual_seed(self.seed + 7 * i)
        return (torch.rand(shape, generator=g) + 0.5).to(device) * (self.spread if i == 1 else 1.0)

    def named(self, device: str) -> dict:
        """What flex_attention takes of it by name."""
        scales = {f"{name}_scale": self.scale_of(i, device) for i, name in enumerate("qkv")}
        return {**scales, "out_dtype": self.out_dtype}

    def meant(self, device: str) -> list[torch.Tensor]:
        """q, k and v in float64."""
        return [meant(t, self.scale_of(i, device), self.Hkv) for i, t in enumerate(self.tensors(device))]


def meant(tensor: torch.Tensor, scale: torch.Tensor | None, kv_heads: int) -> torch.Tensor:
    """What a (B, H, S, D) tensor and its scale stand for, in float64."""
    if scale is None:
        return tensor.double()
    group = tensor.shape[1] // kv_heads
    factors = scale.double().reshape(1, 1) if scale.numel() == 1 else scale.double().reshape(-1, kv_heads).repeat_interleave(group, 1)
    return tensor.double() * factors[..., None, None]


def quantised_problems(device: str):
    return problems(
        device,
        Quantised,
        dtype=st.just(FLOAT8),
        scales=st.tuples(*[st.sampled_from(["", "all", "head", "batch"])] * 3),
        one_kv_batch=st.just(False),
        out_dtype=st.sampled_from([None, None, torch.bfloat16, torch.float16, torch.float32]),
        sinks=st.booleans(),
        spread=st.sampled_from([1.0, 4.0]),
        scale=st.sampled_from([None, None, 0.3, -0.5]),
    )


def plainly(q, k, v, score_mod, mask_mod, scale, sinks=None) -> torch.Tensor:
    """out by a plain computation from float64 tensors, but that weights, 2**8 times those whose largest is 1, are rounded to float8."""
    _, lse, highest = dense_attention(q, k, v, score_mod, mask_mod, scale)
    eye = torch.eye(k.shape[2], dtype=torch.float64, device=k.device).expand(*k.shape[:2], -1, -1)
    weights = dense_attention(q, k, eye, score_mod, mask_mod, scale)[0] * (lse - highest).exp().nan_to_num(0.0)[..., None]
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.double()[:, None] - highest).exp()[..., None]
    rounded = (weights * 256).float().to(FLOAT8).double() / 256
    v = v.expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (rounded / torch.where(total > 0, total, 1.0)) @ v


def check_quantised(p: Quantised, device: str) -> None:
    """Outputs, lse and highest scores: as exact as a plain computation that rounds weights alike."""
    q, k, v = p.tensors(device)
    score_mod, mask_mod = score_mods(p.Hq, p.length, device)[p.score], p.mask_mod(device)
    sinks = torch.linspace(-2, 3, p.Hq, device=device) if p.sinks else None
    out, aux = flex_attention(
        q, k, v, score_mod, **p.options(device), **p.named(device), sinks=sinks, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    assert out.shape == (p.B, p.Hq, p.Q_LEN, p.D_V) and out.dtype == (p.out_dtype or torch.bfloat16)
    exact, lse, highest = dense_attention(*p.meant(device), score_mod, mask_mod, p.scale)
    if sinks is not None:
        exact, lse, _ = with_sinks(*p.meant(device), sinks, score_mod, mask_mod, p.scale)
    plain = plainly(*p.meant(device), score_mod, mask_mod, p.scale, sinks)
    error, allowed = relative_error(out, exact), relative_error(plain, exact)
    limit = 1.2 * allowed + FLOORS[out.dtype] + (0 if device == "cpu" else 3e-3)  # Hopper adds products of 8 bits with 14 bits
    assert error <= limit, f"error {error:.2e}, plainly {allowed:.2e}"
    empty = lse == -math.inf
    assert torch.equal(aux.lse == -math.inf, empty)
    assert (out.masked_select(empty[..., None].expand_as(out)) == 0).all()
    rounding = 2e-5 if device == "cpu" else 2e-3
    for got, want in ((aux.lse, lse), (aux.max_scores, highest)):
        hidden = want == -math.inf
        difference = (got.double() - want).masked_fill(hidden, 0).abs()
        assert (difference <= rounding * (1 + want.masked_fill(hidden, 0).abs().amax())).all()
