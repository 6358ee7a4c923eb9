"""Parts of a batch and of heads that a rank computes, and mods for them: told its b and h, they are what mods of all are told theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..codegen.mod.tracing.bind import graph_of
from ..codegen.mod.tracing.capture import name_of, plain


class Part(NamedTuple):
    """The entries of one dimension that a rank has: `count` from `first` on. `first` is None where all ranks have all of them."""

    first: int | None
    count: int


class Heads(NamedTuple):
    """Heads that are computed at once: of queries, and of keys and values."""

    q: slice
    kv: slice


def score_of_part(mod: Callable | None, batch: Part, heads: Part, device: torch.device) -> Callable | None:
    """A score_mod that is told b and h of a part, of one that is told those of all."""
    batch_of, head_of = _indices(mod, "score", batch, heads, device)
    if batch_of is head_of is _same:
        return mod
    mod = plain(mod)

    def sharded(score, b, h, q_idx, kv_idx):
        return mod(score, batch_of(b), head_of(h), q_idx, kv_idx)

    sharded.__name__ = name_of(mod)
    return sharded


def mask_of_part(mod: Callable | None, batch: Part, heads: Part, device: torch.device) -> Callable | None:
    """A mask_mod that is told b and h of a part, of one that is told those of all."""
    batch_of, head_of = _indices(mod, "mask", batch, heads, device)
    if batch_of is head_of is _same:
        return mod
    mod = plain(mod)

    def sharded(b, h, q_idx, kv_idx):
        return mod(batch_of(b), head_of(h), q_idx, kv_idx)

    sharded.__name__ = name_of(mod)
    return sharded


def _indices(mod: Callable | None, kind: str, batch: Part, heads: Part, device: torch.device) -> tuple[Callable, Callable]:
    """From a part's b and h to those of all. A mod that uses neither keeps the kernel, and the block lists, that it has anywhere."""
    if mod is None or batch.first is heads.first is None:
        return _same, _same
    used = graph_of(mod, kind, device).symbols
    return tuple(_index(part) if name in used else _same for name, part in (("b", batch), ("h", heads)))


def _same(index):
    return index


def _index(part: Part) -> Callable:
    """From an index of the part to that of the whole, to be traced."""
    if part.first is None:
        return _same
    first = part.first
    return lambda i: i + first


def tell_ranks(context, failure: Exception) -> None:
    """Other ranks of a context plan, which may wait in their first call, learn of what this one raises."""
    agreement = getattr(context, "agreement", None)
    if agreement is not None:
        agreement.tell(failure)
