"""What flash_attn's arguments mean, as a score_mod and a mask_mod.

Query i of Sq has the place i + Skv - Sq among the keys: the last query stands at the last key. Masks and ALiBi go by the distance of a key
to that place. Windows, lengths, slopes and caps are captured, so other ones compile nothing.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from flexpress import mods
from flexpress.inputs.checks import check_tensor, pair
from flexpress.masks.mask_mods import noop_mask

_FAR = 1 << 30  # beyond any length, and sums with positions stay in int32


class Options(NamedTuple):
    """What flash_attn's functions share, read and checked.

    causal        right is 0, because causal=True
    left, right   how many keys before and after its place a query sees; None: all
    """

    causal: bool
    left: int | None
    right: int | None
    softcap: float
    alibi_slopes: torch.Tensor | None


def plain(given):
    """Integers, also where tensors hold them, as flash_attn's operators take them. Those on a GPU, which a call would wait for, stay."""
    if isinstance(given, torch.Tensor) and given.device.type == "cpu" and not given.is_floating_point():
        return given.tolist()
    return [plain(each) for each in given] if isinstance(given, (tuple, list)) else given


def read_options(causal, window_size, softcap, alibi_slopes, q: torch.Tensor, batch: int) -> Options:
    """Those arguments of a call with `batch` sequences and queries q (..., Hq, D). Raises ValueError, TypeError or NotImplementedError."""
    left, right = pair("window_size", plain(window_size), -sys.maxsize, "a pair of integers (left, right), -1 for no limit")
    if isinstance(softcap, (bool, torch.Tensor)) or not isinstance(softcap, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"softcap must be a number, 0.0 for none, got {softcap!r}")
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, batch, q)
    return options_of(causal, left, right, softcap, alibi_slopes)


def options_of(causal: bool, left: int, right: int, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None) -> Options:
    """Those; left and right below 0 are no limit."""
    left, right = (None if n < 0 else min(n, _FAR) for n in (left, 0 if causal else right))
    return Options(bool(causal), left, right, softcap, alibi_slopes)


def _check_slopes(slopes, batch: int, q: torch.Tensor) -> None:
    heads = q.shape[-2]
    check_tensor("alibi_slopes", slopes, f"({heads},) or ({batch}, {heads})", may_stand=True)
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, got {slopes.dtype}; convert them with .float()")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}")
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes are on {slopes.device}, the queries on {q.device}; move them with .to(...)")


def same_place(b, q_idx):
    """The place of a query whose number is its position among the keys."""
    return q_idx


def placed_last(q_len: int, kv_len: int) -> Callable:
    """The places of queries of which the last stands at the last key. With as many queries as keys there is no offset to add: then ALiBi is
    the sum that kernels for Hopper look for."""
    if _known_equal(q_len, kv_len):
        return same_place
    offset = kv_len - q_len
    return lambda b, q_idx: q_idx + offset


def _known_equal(one: int, other: int) -> bool:
    """Are two lengths equal? For a compiler's symbols, are they so always: else an exported program would be for unequal ones alone."""
    if not torch.compiler.is_compiling():
        return one == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, which takes long

    return statically_known_true(one == other)


def placed_by_sequence(more: torch.Tensor) -> Callable:
    """The places of queries of which the last of each sequence stands at its last key. more: by how much its keys outnumber its queries."""
    return lambda b, q_idx: q_idx + more[b]


def score_mod_of(options: Options, place: Callable, one_query: bool) -> Callable | None:
    """The cap first, then ALiBi, as in flash_attn's kernels. One query stands at the last key, so it has no key after it."""
    cap = mods.softcap(options.softcap) if not options.softcap <= 0 else None
    if options.alibi_slopes is None:
        return cap
    bias = _alibi(options.alibi_slopes, place, one_query or options.causal)
    if cap is None:
        return bias

    def softcap_alibi(score, b, h, q_idx, kv_idx):
        return bias(cap(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    return softcap_alibi


def _alibi(slopes: torch.Tensor, place: Callable, backwards: bool) -> Callable:
    """ALiBi by distance; if queries only look backwards without an absolute value, which kernels for Hopper take as a sum."""

    def slope(b, h):
        return slopes[h] if slopes.ndim == 1 else slopes[b, h]

    if backwards:

        def alibi(score, b, h, q_idx, kv_idx):
            return score + slope(b, h) * (kv_idx - place(b, q_idx))

        return alibi

    def alibi_symmetric(score, b, h, q_idx, kv_idx):
        return score - slope(b, h) * torch.abs(place(b, q_idx) - kv_idx)

    return alibi_symmetric


def mask_mod_of(options: Options, place: Callable, one_query: bool) -> Callable | None:
    """The mask of causal and window_size; None if nothing is hidden."""
    ahead = None if one_query else _ahead(options, place)
    left = options.left
    if left is None:
        return ahead

    def window_before(b, h, q_idx, kv_idx):
        return kv_idx >= place(b, q_idx) - left

    if ahead is None:
        return window_before

    def window(b, h, q_idx, kv_idx):
        return window_before(b, h, q_idx, kv_idx) & ahead(b, h, q_idx, kv_idx)

    return window


def _ahead(options: Options, place: Callable) -> Callable | None:
    """The mask of causal and the right side of a window."""
    right = options.right
    if right is None:
        return None
    if not options.causal:

        def window_ahead(b, h, q_idx, kv_idx):
            return kv_idx <= place(b, q_idx) + right

        return window_ahead
    if place is same_place:
        return mods.causal

    def causal(b, h, q_idx, kv_idx):
        return kv_idx <= place(b, q_idx)

    return causal


def cache_mask_mod_of(options: Options, one_query: bool) -> Callable | None:
    """The mask_mod for cached_attention, by positions in the cache; None where that function's own, causal one will do."""
    if options.left is None and (one_query or options.right == 0):
        return None
    return mask_mod_of(options, same_place, one_query) or noop_mask
