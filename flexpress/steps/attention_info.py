"""What a layer's attention is: heads, dtypes, how its cache is stored and how positions are told."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from flexpress.caches.rope import Llama3Scaling, YarnScaling, check_scaling
from flexpress.inputs.checks import CACHE_DTYPES, DTYPES, check_scale, positive, whole


@dataclass(frozen=True)
class CacheConfig:
    """How a cache is stored.

    dtype             of its elements: float16, bfloat16, float32 or float8_e4m3fn; None for that of the keys and values
    k_scale, v_scale  what a cache of float8_e4m3fn is to be multiplied by: a number, or a tuple of one for each key/value head; None: 1
    Raises TypeError for another dtype, for what is no number and for scales of another cache; ValueError for scales that are not positive
    and finite, and for one without the other.
    """

    dtype: torch.dtype | None = None
    k_scale: float | tuple[float, ...] | None = None
    v_scale: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in CACHE_DTYPES:
            raise TypeError(f"dtype of a cache is {self.dtype!r}; it must be float16, bfloat16, float32, float8_e4m3fn or None")
        if (self.k_scale is None) != (self.v_scale is None):
            raise ValueError("k_scale and v_scale go together; pass 1.0 for the one that is not scaled")
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name)
            for number in () if scale is None else scale if isinstance(scale, tuple) else (scale,):
                positive(name, number)
        if self.k_scale is not None and self.dtype != torch.float8_e4m3fn:
            raise TypeError(f"k_scale and v_scale are for caches of float8_e4m3fn, got dtype {self.dtype}; leave them out")


@dataclass(frozen=True)
class PositionalEmbeddingConfig:
    """How queries and keys are told their positions.

    mode              None (not here), or "rope": rotary embedding (Su et al. 2021, arXiv:2104.09864)
    rope_theta        pair i of rope_dim / 2 turns by (position / rope_scale) * rope_theta ** (-2 i / rope_dim) radians
    rope_scale        positions are divided by it (linear position interpolation)
    rope_dim          how many of a head's first elements turn; 0: all
    rope_tail         they are a head's last elements
    rope_interleaved  a pair is elements (2 i, 2 i + 1); else (i, i + rope_dim / 2)
    rope_scaling      flexpress.Llama3Scaling(...) or YarnScaling(...), instead of rope_scale
    Raises ValueError for another mode, for theta or scale that are not positive and finite, for an odd or negative rope_dim and for
    rope_scaling beside rope_scale; TypeError for what is no number, or no scaling.
    """

    mode: str | None = None
    rope_theta: float = 10000.0
    rope_scale: float = 1.0
    rope_dim: int = 0
    rope_interleaved: bool = False
    rope_scaling: Llama3Scaling | YarnScaling | None = None
    rope_tail: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (None, "rope"):
            raise ValueError(f"mode is {self.mode!r}; it must be None or 'rope'")
        for name in ("rope_theta", "rope_scale"):
            positive(name, getattr(self, name))
        if whole("rope_dim", self.rope_dim) % 2:
            raise ValueError(f"rope_dim is {self.rope_dim}; it must be even: elements turn in pairs")
        for name in ("rope_interleaved", "rope_tail"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        check_scaling("rope_scaling", self.rope_scaling, self.rope_scale)


@dataclass(frozen=True)
class AttentionInfo:
    """One attention layer: query heads, key/value heads, elements of a head, dtype of q, k and v, its cache and its positions.

    v_head_dim      elements of a value's head; 0: head_dim. From here on by keyword; how many elements turn is in pos_embd_config
    scale           of scores; None: 1 / sqrt(head_dim)
    sliding_window  how many positions a token sees, its own included; 0: all
    softcap         scores s become softcap * tanh(s / softcap); 0: they stay
    Raises ValueError if num_heads is no multiple of num_kv_heads, if more elements turn than a head has, if float8 scales are not one for
    each key/value head, and for a scale or softcap that is not finite; TypeError for another dtype than float16, bfloat16 and float32.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_config: CacheConfig = CacheConfig()
    pos_embd_config: PositionalEmbeddingConfig = PositionalEmbeddingConfig()
    _: KW_ONLY
    v_head_dim: int = 0
    scale: float | None = None
    sliding_window: int = 0
    softcap: float = 0.0

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
        whole("v_head_dim", self.v_head_dim)
        whole("sliding_window", self.sliding_window)
        if self.scale is not None:
            check_scale(self.scale, self.head_dim)
        if self.softcap != 0:
            positive("softcap", self.softcap)
        for name in ("k_scale", "v_scale"):
            scale = getattr(self.cache_config, name)
            if isinstance(scale, tuple) and len(scale) != self.num_kv_heads:
                raise ValueError(f"{name} of the cache has {len(scale)} numbers; it needs one, or {self.num_kv_heads}: num_kv_heads")

    @property
    def value_dim(self) -> int:
        """Elements of a value's head."""
        return self.v_head_dim or self.head_dim

    @property
    def cache_dtype(self) -> torch.dtype:
        """dtype of the cache's elements."""
        return self.cache_config.dtype or self.dtype

    @property
    def rope_dim(self) -> int:
        """How many of a head's elements turn; 0 without rotary embedding."""
        return (self.pos_embd_config.rope_dim or self.head_dim) if self.pos_embd_config.mode == "rope" else 0
