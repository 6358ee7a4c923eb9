"""mask_mods: the one that hides nothing, several as one, and whether two are the same."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexpress.mods import MaskMod

from .codegen.mod.bind import bind
from .codegen.mod.capture import name_of
from .codegen.mod.errors import ModError
from .mods._made import picklable


def noop_mask(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """The mask that hides nothing."""
    return b.new_ones((), dtype=torch.bool)


@picklable
def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that is true where all of `mask_mods` are. Source: torch.nn.attention.flex_attention.and_masks."""
    return _combined(mask_mods, "and", lambda b: b.new_ones((), dtype=torch.bool), lambda x, y: x & y)


@picklable
def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that is true where any of `mask_mods` is. Source: torch.nn.attention.flex_attention.or_masks."""
    return _combined(mask_mods, "or", lambda b: b.new_zeros((), dtype=torch.bool), lambda x, y: x | y)


def _combined(mask_mods: tuple, word: str, start: Callable, join: Callable) -> Callable:
    for i, mod in enumerate(mask_mods):
        if not callable(mod):
            raise TypeError(f"{word}_masks: argument {i} must be a mask_mod, got {type(mod).__name__}")

    def combined(b, h, q_idx, kv_idx):
        result = start(b)
        for mod in mask_mods:
            result = join(result, mod(b, h, q_idx, kv_idx))
        return result

    combined.__name__ = f"_{word}_".join(map(name_of, mask_mods)) or f"{word}_masks"
    return combined


def same_mod(mod, other, kind: str) -> bool:
    """Whether two mods are one function, or have the same code and capture equal values: one trace, which fits both."""
    if mod is other:
        return True
    try:
        (graph, values), (other_graph, other_values) = bind(mod, kind), bind(other, kind)
    except (ModError, TypeError):  # not for tracing, so known by identity only
        return False
    return graph is other_graph and all(_same_value(x, y) for x, y in zip(values, other_values, strict=True))


def _same_value(value, other) -> bool:
    if isinstance(value, torch.Tensor):
        return value is other or (value.device == other.device and torch.equal(value, other))
    return value == other or (value != value and other != other)
