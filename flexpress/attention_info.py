"""What a layer's attention is: heads, dtypes, how its cache is stored and how positions are told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexpress.checks import CACHE_DTYPES, DTYPES, positive, whole


@dataclass(frozen=True)
class CacheConfig:
    """How a cache is stored. dtype: of its elements, float16, bfloat16, float32 or float8_e4m3fn; None for that of the keys and values.

    Raises TypeError for another dtype.
    """

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in CACHE_DTYPES:
            raise TypeError(f"dtype of a cache is {self.dtype!r}; it must be float16, bfloat16, float32, float8_e4m3fn or None")


@dataclass(frozen=True)
class PositionalEmbeddingConfig:
    """How queries and keys are told their positions.

    mode              None (not here), or "rope": rotary embedding (Su et al. 2021, arXiv:2104.09864)
    rope_theta        pair i of rope_dim / 2 turns by (position / rope_scale) * rope_theta ** (-2 i / rope_dim) radians
    rope_scale        positions are divided by it (linear position interpolation)
    rope_dim          how many of a head's first elements turn; 0: all
    rope_interleaved  a pair is elements (2 i, 2 i + 1); else (i, i + rope_dim / 2)
    Raises ValueError for another mode, for theta or scale that are not positive and finite, and for an odd or negative rope_dim; TypeError
    for what is no number.
    """

    mode: str | None = None
    rope_theta: float = 10000.0
    rope_scale: float = 1.0
    rope_dim: int = 0
    rope_interleaved: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (None, "rope"):
            raise ValueError(f"mode is {self.mode!r}; it must be None or 'rope'")
        for name in ("rope_theta", "rope_scale"):
            positive(name, getattr(self, name))
        if whole("rope_dim", self.rope_dim) % 2:
            raise ValueError(f"rope_dim is {self.rope_dim}; it must be even: elements turn in pairs")
        if not isinstance(self.rope_interleaved, bool):
            raise TypeError(f"rope_interleaved must be a bool, got {self.rope_interleaved!r}")


@dataclass(frozen=True)
class AttentionInfo:
    """One attention layer: query heads, key/value heads, elements of a head, dtype of q, k and v, its cache and its positions.

    Raises ValueError if num_heads is no multiple of num_kv_heads, or if more elements turn than a head has; TypeError for another dtype
    than float16, bfloat16 and float32.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_config: CacheConfig = CacheConfig()
    pos_embd_config: PositionalEmbeddingConfig = PositionalEmbeddingConfig()

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            whole(name, getattr(self, name), 1)
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype is {self.dtype!r}; q, k and v must be float16, bfloat16 or float32")
        for name, kind in (("cache_config", CacheConfig), ("pos_embd_config", PositionalEmbeddingConfig)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}")
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            raise ValueError(f"rope_dim is {self.rope_dim}; it must be even and at most head_dim, which is {self.head_dim}")

    @property
    def cache_dtype(self) -> torch.dtype:
        """dtype of the cache's elements."""
        return self.cache_config.dtype or self.dtype

    @property
    def rope_dim(self) -> int:
        """How many of a head's first elements turn; 0 without rotary embedding."""
        return (self.pos_embd_config.rope_dim or self.head_dim) if self.pos_embd_config.mode == "rope" else 0
