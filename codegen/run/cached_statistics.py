"""The driver of the kernels that look at the probabilities of keys in a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..device.devices import architecture_of, backend_of, multiprocessors
from ..device.memory import contiguous
from ..plan.cached_statistics import Looks, columns_at_once, plan_cached_columns, plan_cached_rows
from ..plan.decode import Rows, rows_of, splits_of, vector_of
from ..plan.decode_tiles import most_rows
from ..plan.forward import Plan, scales
from ..plan.tiles import BLOCK, next_smaller
from ..registry import INFO, Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists
from .cached_call import CachedCall
from .call import keys_of
from .decode import INTERPRETED
from .decode_kernels import by_tokens, tiles_of, with_fewer_keys
from .launch import Launch, launch_fitting
from .masks import automatic_lists
from .statistics import Statistics, Wanted

NO_KEY = 0x7FFFFFFF


class _Pass(NamedTuple):
    """One kernel in calls of a kind: all is decided but addresses and what mods capture. splits: parts of a row's keys."""

    plan: Plan
    launch: Launch
    rows: Rows
    splits: int


_passes: dict[tuple, _Pass] = Table("passes over probabilities of caches", 256)


def cached_statistics(call: CachedCall, wanted: Wanted) -> tuple[torch.Tensor, Statistics]:
    """The largest scores, and what is wanted of a call's probabilities, as it lies in memory: of rows as call.lse, sums of columns
    (Z, Hq, KV_LEN)."""
    score, mask = call.by_number("score"), call.by_number("mask")
    parts = _look_at_rows(call, score, mask, wanted)
    sinks = call.extras.sinks if call.extras else None
    if sinks is not None and call.cached.cu_q is None:
        sinks = sinks[:, None]
    max_scores, rows, entropy, top_index = merged(parts, sinks)
    sums = _sum_columns(call, score, mask, rows) if wanted.column_sums else None
    return max_scores, Statistics(entropy if wanted.entropy else None, top_index if wanted.top_index else None, sums)


class Parts(NamedTuple):
    """What is known of the parts of rows, in their last dimension: the largest score, log2 of its weight in the part, the mean of what
    scores are less than it, and the first key that has it. The last two may be missing."""

    largest: torch.Tensor
    share: torch.Tensor
    mean: torch.Tensor | None
    top: torch.Tensor | None


def merged(parts: Parts, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The largest scores; rows, (..., 2): the largest score or sink, and log2 of its weight; entropy, and top index. sinks: as many as
    there are heads, so that they broadcast to rows."""
    most = parts.largest.amax(-1)
    highest = most if sinks is None else torch.maximum(most, sinks.float())
    base = torch.where(highest == -math.inf, 0.0, highest)
    less = parts.largest - base[..., None]
    weights = torch.exp2(less * math.log2(math.e) - parts.share)
    total = weights.sum(-1)
    if sinks is not None:
        behind = sinks.float() - base
        of_sink = torch.exp2(behind * math.log2(math.e))
        total = total + of_sink
    share = torch.where(total == 0.0, 0.0, -torch.log2(total))
    entropy = top_index = None
    if parts.mean is not None:
        mean = torch.where(weights > 0.0, weights * (parts.mean + less), 0.0).sum(-1)
        if sinks is not None:
            mean = mean + torch.where(of_sink > 0.0, of_sink * behind, 0.0)
        entropy = (-share * math.log(2.0) - mean / torch.where(total == 0.0, 1.0, total)).clamp(min=0.0) + 0.0  # not -0.0
    if parts.top is not None:
        first = torch.where(parts.largest == most[..., None], parts.top, NO_KEY).amin(-1)
        top_index = torch.where(first == NO_KEY, -1, first.long())
    return most, torch.stack((highest, share), -1), entropy, top_index


def _look_at_rows(call: CachedCall, score: tuple | None, mask: tuple | None, wanted: Wanted) -> Parts:
    (Z, Hq, Q_LEN, _), q, ragged = call.extents, call.q, call.cached.cu_q is not None
    lists = mask and call.lists(mask, Q_LEN)
    found = _pass_over("kv", call, score, mask, lists, wanted)
    splits = found.splits
    shape = (*((q.shape[2], Hq) if ragged else (Z, Hq, Q_LEN)), splits)
    count = 3 if wanted.entropy else 2
    kept = contiguous((count, *shape), torch.float32, q.device)
    top = contiguous(shape, torch.int32, q.device) if wanted.top_index else None
    if ragged:  # tokens that belong to no sequence
        kept.zero_()[0].fill_(-math.inf)
        if top is not None:
            top.fill_(NO_KEY)
    parts = Parts(kept[0], kept[1], kept[2] if wanted.entropy else None, top)
    named = {"PART_MAX": parts.largest, "PART_SHARE": parts.share, "PART_MEAN": parts.mean, "PART_TOP": parts.top}
    tiles = tiles_of(call.extents, found.rows, q.shape[2] if ragged else None)
    _launch(found, call, named, lists, "kv", (score, mask), lambda _: (tiles * (Hq // found.rows.pack), splits))
    return parts


def _sum_columns(call: CachedCall, score: tuple | None, mask: tuple | None, rows: torch.Tensor) -> torch.Tensor:
    Z, Hq, Q_LEN, KV_LEN = call.extents
    lists, size = None, (BLOCK, BLOCK)
    if mask:
        lists = automatic_lists(mask, (Z, Hq, Q_LEN, KV_LEN), call.q.device, size, transposed=True)
    found = _pass_over("q", call, score, mask, lists, Wanted())
    sums = contiguous((Z, Hq, KV_LEN), torch.float32, call.q.device)
    heads = Z * call.k.shape[1]
    _launch(found, call, {"ROWS": rows, "SUMS": sums}, lists, "q", (score, mask), lambda tile: (-(-KV_LEN // tile.BLOCK_N) * heads,))
    return sums


def _launch(found: _Pass, call: CachedCall, outputs: dict, lists: BlockLists | None, axis: str, mods: tuple, grid: Callable) -> None:
    named = {"K": call.k, "Q": call.q, **call.cached.named, **outputs, **(lists.tensors(axis) if lists else {})}
    named = {name: t for name, t in named.items() if t is not None}
    captured = mod_values(found.plan, *(mod and mod[1] for mod in mods))
    smaller = with_fewer_keys if axis == "kv" else next_smaller  # rows of the one have their place by the grid
    launch_fitting(found.plan, lambda tile: found.launch.with_tile(tile, named, captured, grid(tile), call.q.device), smaller)


def _pass_over(axis: str, call: CachedCall, score: tuple | None, mask: tuple | None, lists: BlockLists | None, wanted: Wanted) -> _Pass:
    """The kernel that walks keys ("kv") or queries ("q"), and `lists` of them."""
    keys = keys_of(score, mask, call.extents)
    key = (axis, *call.layouts, call.extents, call.scale, *keys, lists and lists.structure, *call.cached.structure, wanted[:2])
    found = _passes.get(key)
    if found is not None:
        INFO.hits += 1
        return found
    (_, _, Q_LEN, KV_LEN), tokens = call.extents, None if call.cached.cu_q is None else call.q.shape[2]
    geometry = call.geometry_in(16 // vector_of(call.q.dtype, call.k.dtype))
    rows, splits = _division(call, geometry.numbers["GROUP_SIZE"], lists, tokens)
    case = call.decode_case(geometry, lists, aligned=geometry.aligned, by_tokens=by_tokens(Q_LEN, rows, tokens))
    machine = backend_of(call.q.device.type), architecture_of(call.q.device)
    if axis == "kv":
        plan = plan_cached_rows(case, Looks(wanted.entropy, wanted.top_index), *machine, *keys, rows.rows)
    else:
        pack, many = columns_at_once(Q_LEN, call.q.shape[3], geometry.numbers["GROUP_SIZE"], bool(lists and lists.by_head))
        plan = plan_cached_columns(case, pack, *machine, *keys, many)
    numbers = {
        **geometry.numbers,
        **{"Q_LEN": Q_LEN, "KV_LEN": KV_LEN, "WIDTH": KV_LEN, "Z": call.extents[0], "T": tokens or 0, "QUERIES": rows.queries},
        **{"PACK": rows.pack, "SPLITS": splits, "stride_pages": call.stride_pages},
        **scales(call.scale, True),
        **(lists.numbers(axis) if lists else {}),
    }
    found = _passes[key] = _Pass(plan, Launch(plan.spec, numbers), rows, splits)
    return found


def _division(call: CachedCall, group: int, lists: BlockLists | None, tokens: int | None) -> tuple[Rows, int]:
    """How queries and heads make up the tiles of cached_rows, and into how many parts keys are split."""
    _, Hq, Q_LEN, KV_LEN = call.extents
    q, k = call.q, call.k
    most = most_rows(architecture_of(q.device), q.shape[3], q.shape[3], max(q.element_size(), k.element_size()))
    rows = rows_of(Q_LEN, 1 if lists and lists.by_head else group, lists.q_block if lists else 0, most)
    programs = max(tiles_of(call.extents, rows, tokens), 1) * (Hq // rows.pack)
    return rows, splits_of(KV_LEN, programs, multiprocessors(q.device) if q.device.type != "cpu" else INTERPRETED)
