"""Which operators a serving stack calls for attention: an interface, a registry by name, and the two that flexpress brings.

attention = AttentionRegistry.get("flexpress_paged")
info = AttentionInfo(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
caches = [make(sequences) for make in attention.cache_initializers(info).values()]       # of every layer
buffers = [make(sequences) for make in attention.buffer_initializers(info).values()]     # of the model
metadata = attention.metadata_op(*sequences.args)                                         # once a step
options = {name: x(sequences) if callable(x) else x for name, x in attention.options(info).items()}         # of every layer
out = attention.attention_op(q, k, v, *metadata, *caches, *buffers, *attention.constants(info), **options)   # in every layer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import ClassVar

import torch

from flexpress import serving_ops
from flexpress.caches.rope import rope_table
from flexpress.sequences import AttentionInfo, SequenceInfo

Initializer = Callable[[SequenceInfo], torch.Tensor | None]


class AttentionDescriptor(ABC):
    """What a serving stack must know of an attention with a cache. Its operators are custom ops of torch.library.

    attention_op   (q, k, v, *metadata, *caches, *buffers, *constants, **options) -> out; it changes the caches
    metadata_op    (*SequenceInfo.args) -> list of `num_metadata` tensors, for all layers of a step
    is_paged       a sequence may have more than one page of the cache
    """

    attention_op: ClassVar[Callable]
    metadata_op: ClassVar[Callable]
    num_metadata: ClassVar[int]
    is_paged: ClassVar[bool]

    @classmethod
    @abstractmethod
    def cache_initializers(cls, info: AttentionInfo) -> dict[str, Initializer]:
        """By argument name, in the order of the operator's caches, what makes a layer's."""

    @classmethod
    def buffer_initializers(cls, info: AttentionInfo) -> dict[str, Initializer]:
        """By a name that layers with the same buffer share, in the order of the operator's buffers, what makes them."""
        return {}

    @classmethod
    def constants(cls, info: AttentionInfo) -> list[int | float | str | None]:
        """The arguments of the operator behind the buffers."""
        return []

    @classmethod
    def options(cls, info: AttentionInfo) -> dict[str, Initializer | int | float | str | None]:
        """What the operator takes by name, where it is not the default: constants, and what makes tensors of a layer, such as scales."""
        return {}


class AttentionRegistry:
    """Descriptors by name. What is entered is complete: see `register`."""

    _known: ClassVar[dict[str, type[AttentionDescriptor]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type[AttentionDescriptor]], type[AttentionDescriptor]]:
        """A decorator that enters a descriptor. ValueError if there is one of that name, TypeError for what is no subclass of
        AttentionDescriptor with all its parts."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"an attention is registered by a name, as in @AttentionRegistry.register('mine'); got {name!r}")

        def enter(descriptor: type[AttentionDescriptor]) -> type[AttentionDescriptor]:
            if name in cls._known:
                raise ValueError(f"an attention named {name!r} is registered already: {cls._known[name].__name__}")
            _check_descriptor(name, descriptor)
            cls._known[name] = descriptor
            return descriptor

        return enter

    @classmethod
    def get(cls, name: str) -> type[AttentionDescriptor]:
        """The descriptor of that name, or KeyError with the names that there are."""
        if name not in cls._known:
            raise KeyError(f"no attention is named {name!r}; there are {', '.join(map(repr, cls.names()))}")
        return cls._known[name]

    @classmethod
    def has(cls, name: str) -> bool:
        """Is there a descriptor of that name?"""
        return name in cls._known

    @classmethod
    def names(cls) -> list[str]:
        """All names, in the order of registration."""
        return list(cls._known)


_OF_INFO = "cache_initializers", "buffer_initializers", "constants", "options"


def _check_descriptor(name: str, descriptor) -> None:
    """TypeError that names the part which is missing or no such part."""
    if not isinstance(descriptor, type) or not issubclass(descriptor, AttentionDescriptor):
        raise TypeError(f"{name!r} must be a subclass of AttentionDescriptor, got {descriptor!r}")
    parts: dict[str, tuple[Callable, str]] = {
        "attention_op": (callable, "an operator"),
        "metadata_op": (callable, "an operator"),
        "num_metadata": (lambda n: type(n) is int and n >= 0, "an int of 0 or more"),
        "is_paged": (lambda x: type(x) is bool, "a bool"),
        **dict.fromkeys(_OF_INFO, (callable, "a classmethod of info")),
    }
    for part, (fits, what) in parts.items():
        if not hasattr(descriptor, part) or part in descriptor.__abstractmethods__:
            raise TypeError(f"{descriptor.__name__}, to be registered as {name!r}, has no {part}: {what}, see AttentionDescriptor")
        value = getattr(descriptor, part)
        if not fits(value):
            raise TypeError(f"{descriptor.__name__}.{part} must be {what}, got {value!r}")
        if part in _OF_INFO and getattr(value, "__self__", None) is not descriptor:
            raise TypeError(f"{descriptor.__name__}.{part} must be {what}: write @classmethod above it")


class _WithCache(AttentionDescriptor):
    """Caches (pages, page size, num_kv_heads, head_dim), and v_head_dim of values, and the table of rotary embedding.

    Caches may have another dtype than q, k and v have. Those of float8_e4m3fn hold what fits (up to 448) unless the CacheConfig has scales.
    """

    num_metadata = 3

    @classmethod
    def cache_initializers(cls, info: AttentionInfo) -> dict[str, Initializer]:
        def cache(sequences: SequenceInfo, width: int) -> torch.Tensor:
            if sequences.is_paged and not cls.is_paged:
                raise ValueError(
                    f"{cls.__name__} keeps a sequence in one entry of the cache, but page_size {sequences.page_size} is less "
                    f"than max_seq_len {sequences.max_seq_len}; make the SequenceInfo without page_size"
                )
            shape = (sequences.num_pages, sequences.page_size, info.num_kv_heads, width)
            return torch.zeros(shape, dtype=info.cache_dtype, device=sequences.device)

        return {"k_cache": partial(cache, width=info.head_dim), "v_cache": partial(cache, width=info.value_dim)}

    @classmethod
    def buffer_initializers(cls, info: AttentionInfo) -> dict[str, Initializer]:
        rope = info.pos_embd_config

        def table(sequences: SequenceInfo) -> torch.Tensor | None:
            if not info.rope_dim:
                return None
            positions = sequences.max_pages_per_seq * sequences.page_size
            return rope_table(
                positions, info.rope_dim, rope.rope_theta, rope.rope_scale, scaling=rope.rope_scaling, device=sequences.device
            )

        # all digits: layers share what has one name
        numbers: list[float | str | None] = [info.rope_dim, float(rope.rope_theta), float(rope.rope_scale)]
        if rope.rope_scaling is not None:
            numbers += [type(rope.rope_scaling).__name__, *(n if n is None else float(n) for n in astuple(rope.rope_scaling))]
        name = "_".join(["rope", *(n if isinstance(n, str) else repr(n) for n in numbers)])
        return {name.replace(".", "_").replace("-", "m").replace("+", ""): table}

    @classmethod
    def constants(cls, info: AttentionInfo) -> list[int | float | str | None]:
        scale = None if info.scale is None else float(info.scale)
        return [info.pos_embd_config.rope_interleaved, scale, info.sliding_window, float(info.softcap)]

    @classmethod
    def options(cls, info: AttentionInfo) -> dict[str, Initializer | int | float | str | None]:
        def scale(sequences: SequenceInfo, numbers: float | tuple[float, ...]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.float32, device=sequences.device).expand(info.num_kv_heads).contiguous()

        found: dict[str, Initializer | int | float | str | None] = {"rope_tail": True} if info.pos_embd_config.rope_tail else {}
        for name in ("k_scale", "v_scale"):
            if (numbers := getattr(info.cache_config, name)) is not None:
                found[name] = partial(scale, numbers=numbers)
        return found


@AttentionRegistry.register("flexpress_flattened")
class Flattened(_WithCache):
    """One entry of the cache for each sequence; prefill and decoding in one batch."""

    attention_op = serving_ops.flattened_mha_with_cache
    metadata_op = serving_ops.prepare_flattened_metadata
    is_paged = False


@AttentionRegistry.register("flexpress_paged")
class Paged(_WithCache):
    """Sequences in pages; prefill and decoding in one batch."""

    attention_op = serving_ops.mha_with_paged_cache
    metadata_op = serving_ops.prepare_metadata
    is_paged = True
