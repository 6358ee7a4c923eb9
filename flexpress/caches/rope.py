"""Rotary position embedding: tables of angles, and how they are scaled for longer contexts than a model was trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.types import Device

from flexpress.inputs.cache_checks import check_plain, described
from flexpress.inputs.checks import extent, positive, whole
from flexpress.inputs.plain_arguments import device_or_default

from ..codegen.mod.captured.tensors import check_memory


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: pairs that turn slowly turn `factor` times slower, fast ones as before. Fields are those of Hugging Face's configs.

    factor                            how many times slower
    original_max_position_embeddings  positions that the model was first trained on, L
    low_freq_factor                   pairs that turn less often than so many times in L positions are slowed down
    high_freq_factor                  those that turn more often are not; between, a mixture
    Raises TypeError or ValueError for what is not positive and finite, and for a high_freq_factor that is not above the low one.

    Source: Llama 3.1 (Llama Team 2024, arXiv 2407.21783) as released.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            positive(name, getattr(self, name))
        whole("original_max_position_embeddings", self.original_max_position_embeddings, 1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor, which is {self.low_freq_factor}"
            )

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def scaled(self, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
        """Angles per position of pairs that have those of `inv_freq` without scaling."""
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return inv_freq * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: pairs that turn rarely turn `factor` times slower, and scores are sharpened. Fields are those of Hugging Face's configs.

    factor                            how many times slower
    original_max_position_embeddings  positions that the model was first trained on, L
    beta_fast                         pairs that turn more often than so many times in L positions are as before
    beta_slow                         those that turn less often are slowed down; between, a mixture
    attention_factor                  cosines and sines are multiplied by it; None: 0.1 * ln(factor) + 1, or 1 for factors below 1
    truncate                          the first and the last pair of the mixture are rounded outwards to whole ones
    Raises TypeError or ValueError for what is not positive and finite, and for a beta_fast that is not above beta_slow.

    Source: YaRN (Peng et al. 2023, arXiv 2309.00071).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow", *(["attention_factor"] if self.attention_factor is not None else [])):
            positive(name, getattr(self, name))
        whole("original_max_position_embeddings", self.original_max_position_embeddings, 1)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast is {self.beta_fast}; it must be above beta_slow, which is {self.beta_slow}")
        if not isinstance(self.truncate, bool):
            raise TypeError(f"truncate must be a bool, got {self.truncate!r}")

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 0.1 * math.log(max(self.factor, 1.0)) + 1.0 if self.attention_factor is None else float(self.attention_factor)

    def scaled(self, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
        """Angles per position of pairs that have those of `inv_freq` without scaling. ValueError for a theta of 1 or less."""
        if theta <= 1:
            raise ValueError(f"theta is {theta}; with YarnScaling it must be above 1, so that later pairs turn slower")
        pairs = len(inv_freq)

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_max_position_embeddings / (2 * math.pi * times)) / math.log(theta)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        slowed = ((torch.arange(pairs, dtype=inv_freq.dtype, device=inv_freq.device) - first) / max(last - first, 0.001)).clamp(0, 1)
        return inv_freq * ((1 - slowed) + slowed / self.factor)


def rope_table(
    length: int,
    rope_dim: int,
    theta: float = 10000.0,
    scale: float = 1.0,
    *,
    inv_freq: torch.Tensor | None = None,
    scaling: Llama3Scaling | YarnScaling | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Cosine and sine of the angles of rotary position embedding, float32 (length, rope_dim / 2, 2), computed in float64.

    Dimension pair j of position p is turned by p / scale * theta ** (-2 j / rope_dim).

    theta      the base of the angles
    scale      linear scaling: positions are divided by it
    inv_freq   (rope_dim / 2,): angles per position, instead of theta's
    scaling    Llama3Scaling(...) or YarnScaling(...): how theta's angles change, instead of scale. YaRN multiplies cosines and sines by its
               attention factor, too
    device     of the table; by default torch's default device. inv_freq must be there, unless device is given

    Raises TypeError for a length or rope_dim that is no integer, for an inv_freq that is no tensor of floats and another scaling;
    ValueError for a negative length, an odd rope_dim, theta and scale that are not positive and finite, another shape of inv_freq, and
    scaling beside scale or inv_freq.

    Method: RoFormer (Su et al. 2021, arXiv 2104.09864).
    """
    length, rope_dim = extent("length", length), extent("rope_dim", rope_dim)
    if rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"rope_dim must be even and at least 2, got {rope_dim}")
    theta, scale, device = positive("theta", theta), positive("scale", scale), device_or_default(device)
    check_scaling("scaling", scaling, scale)
    if inv_freq is None:
        inv_freq = theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64, device=device) / rope_dim)
    elif not isinstance(inv_freq, torch.Tensor) or not inv_freq.is_floating_point():
        raise TypeError(f"inv_freq must be a floating-point tensor ({rope_dim // 2},), got {described(inv_freq)}")
    elif inv_freq.shape != (rope_dim // 2,):
        raise ValueError(f"inv_freq must have shape ({rope_dim // 2},) for rope_dim {rope_dim}, got {tuple(inv_freq.shape)}")
    elif scaling is not None:
        raise ValueError("inv_freq and scaling exclude each other: scaling is of theta's angles")
    if scaling is not None:
        inv_freq = scaling.scaled(inv_freq, theta)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] / scale * inv_freq.to(device, torch.float64)
    return (torch.stack([angles.cos(), angles.sin()], dim=-1) * (1.0 if scaling is None else scaling.table_factor)).float()


def rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool, rope_tail: bool = False) -> torch.Tensor:
    """x (..., D) as kernels turn it, in torch's operations. angles: rows of a rope_table, (..., rope_dim / 2, 2), that broadcast with x."""
    cos, sin = angles.unbind(-1)
    width = 2 * angles.shape[-2]
    first = x.shape[-1] - width if rope_tail else 0
    part = x[..., first : first + width].float()
    a, b = part.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    found = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([x[..., :first], found.to(x.dtype), x[..., first + width :]], -1)


def check_scaling(name: str, scaling, scale: float) -> None:
    """The argument `name`: a scaling, or None, and none beside a scale of positions."""
    if scaling is not None and not isinstance(scaling, (Llama3Scaling, YarnScaling)):
        raise TypeError(f"{name} must be a Llama3Scaling, a YarnScaling or None, got {scaling!r}")
    if scaling is not None and scale != 1:
        raise ValueError(f"{name} and a scale of positions ({scale}) exclude each other; leave the scale 1")


def check_rope(rope, name: str, tokens: torch.Tensor) -> None:
    """A table that `tokens`, an argument of that name (..., D), can be turned by."""
    check_plain("rope", rope, "(positions, rope_dim / 2, 2)")
    check_memory("rope", rope)
    fits = rope.shape[0] > 0 and rope.shape[2] == 2 and rope.dtype == torch.float32 and rope.device == tokens.device
    if not fits or not 1 <= rope.shape[1] <= tokens.shape[-1] // 2:
        raise ValueError(
            f"rope must be float32 (positions, rope_dim / 2, 2) on {tokens.device}, from rope_table, with rope_dim up to the "
            f"{tokens.shape[-1]} of {name}, got {described(rope)}"
        )
    if rope.stride(2) != 1 or rope.stride(1) != 2 and rope.shape[1] > 1:
        raise ValueError(f"rope {described(rope)} has strides {rope.stride()}, but a row of it must be contiguous; pass rope.contiguous()")


def check_reached(rope: torch.Tensor | None, reached: int) -> None:
    """Has rope a row for every one of the positions that are `reached`?"""
    if rope is not None and reached > rope.shape[0]:
        raise ValueError(
            f"rope {tuple(rope.shape)} has {rope.shape[0]} positions, but a new token has position {reached - 1}: make it "
            f"with rope_table({reached}, ...) or longer"
        )
