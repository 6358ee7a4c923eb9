"""mask_mods: the one that hides nothing, several as one, that of a tensor, and whether two are the same."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexpress.mods import MaskMod

from ..codegen.mod.captured.tensors import check_memory, tracing
from ..codegen.mod.errors import ModError
from ..codegen.mod.tracing.bind import bind
from ..codegen.mod.tracing.capture import name_of
from ..mods._made import picklable


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


def without_ones(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable]:
    """A tensor of 4 dimensions without those of extent 1, which broadcast, and at(b, h, q_idx, kv_idx), the index of its element."""
    varies = tuple(extent != 1 for extent in tensor.shape)

    def at(*indices):
        return tuple(index for index, used in zip(indices, varies, strict=True) if used)

    ones = [i for i, used in enumerate(varies) if not used]  # no others, in a graph either, where they may be 1 later
    for i in reversed(ones):  # one by one, as DTensors of torch 2.11 know it
        tensor = tensor.squeeze(i)
    return tensor, at


def check_made_of(block_mask, mask_mod: MaskMod | None) -> None:
    """Raises ValueError for a mask_mod beside a block mask that was made of another one. None beside it is right."""
    if mask_mod is None or same_mod(block_mask.mask_mod, mask_mod, "mask", block_mask.kv_indices.device):
        return
    names = name_of(block_mask.mask_mod), name_of(mask_mod)
    raise ValueError(
        f"block_mask was made of {names[0]}, not of the mask_mod {names[1]}; pass one of them, or and_masks(...) of both as mask_mod"
    )


def same_mod(mod, other, kind: str, device: torch.device) -> bool:
    """Whether two mods are one function, or have the same code and capture equal values: one trace, which fits both."""
    if mod is other:
        return True
    try:
        (graph, values), (other_graph, other_values) = bind(mod, kind, device), bind(other, kind, device)
    except (ModError, TypeError):  # not for tracing, so known by identity only
        return False
    return graph is other_graph and all(_same_value(x, y) for x, y in zip(values, other_values, strict=True))


def _same_value(value, other) -> bool:
    if isinstance(value, torch.Tensor):
        return value is other or (_has_values(value) and _has_values(other) and value.device == other.device and torch.equal(value, other))
    return value == other or (value != value and other != other)


def _has_values(tensor: torch.Tensor) -> bool:
    """May it be compared with another one here?"""
    if tensor.device.type == "meta" or tracing():
        return False
    try:
        check_memory("a captured tensor", tensor)
    except NotImplementedError:
        return False
    return True
