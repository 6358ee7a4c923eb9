"""The kernels for few queries and for caches, which split the keys of a row: which calls they serve, and both in calls of a kind."""

from __future__ import annotations

import functools

import torch

from ..device.devices import architecture_of, backend_of, multiprocessors
from ..plan.decode import (
    MAX_ROWS,
    MIN_SHARE,
    DecodePlan,
    Rows,
    case_of_few,
    differs_by_head,
    not_few,
    parts_of,
    plan_decode,
    rows_of,
    vector_of,
)
from ..plan.decode import Parts as Split
from ..plan.decode_tiles import most_rows, programs_at_once
from ..plan.forward import Mod
from ..plan.geometry import Geometry
from ..plan.hopper_decode import plan_hopper_decode
from ..registry import INFO, Table
from .block_lists import BlockLists
from .cached_call import CachedCall
from .call import NOT_CACHED, Cached, keys_of, structure_of, values_in_keys
from .decode_kernels import DecodeCall, Kernels, by_tokens, tiles_of
from .forward_kernels import Call
from .launch import addresses_of, launch_nothing

INTERPRETED = 4  # multiprocessors of the interpreter: keys are split there, too
_ready: dict[tuple, Kernels] = Table("decode calls", 1024)


class _Planned:
    name = "DECODE"

    def plan(self, call: DecodeCall) -> DecodePlan:
        if call.for_hopper:
            return plan_hopper_decode(call.case, call.score, call.mask)
        return plan_decode(call.case, call.backend, call.arch, call.score, call.mask, call.rows.rows)


class Decode(_Planned):
    """decode and combine_splits, for a call without a cache."""

    def fits(self, call: Call) -> str | None:
        options, reason = call.case.options, not_few(call.extents[2], call.case)
        if reason:
            return reason
        if options.tile or options.prescale_qk:
            return f"{', '.join(name for name, _ in options.tile) or 'PRESCALE_QK'} is for the other kernels"
        if call.score and differs_by_head(call.score[0]):
            return "a dot product reads a row of a key for each head"
        return None

    def worthwhile(self, call: Call) -> str | None:
        keys = call.extents[3]
        return None if keys >= MIN_SHARE else f"there are {keys} keys, too few to split"

    def prepare(self, call: Call, names: tuple[str, ...], lists: BlockLists | None) -> Kernels:
        Q_LEN, known = call.extents[2], call.case
        widths = known.d_qk, known.d_v, known.dtype.itemsize
        rows, split = _division(call.extents, call.geometry, call.device, lists, NOT_CACHED, widths, None)
        case = case_of_few(known, split=split.room > 0, balanced=split.of_all > 0)
        machine = call.backend, call.arch
        made = DecodeCall(case, call.geometry, call.extents, Q_LEN, rows, split, 0, *machine, call.scale, call.score, call.mask)
        return Kernels(self, made.fastest(call.aligned, known.options.use_tma), names, lists)


class DecodeCached(_Planned):
    """decode and combine_splits, for any call with a cache."""

    def run(self, call: CachedCall, *, prepare: bool = False) -> None:
        """Fill out and lse; or, to prepare such calls, compile what does."""
        score, mask = call.by_number("score"), call.by_number("mask")
        lists = mask and call.lists(mask, call.extents[2])
        keys = keys_of(score, mask, call.extents)
        key = (*call.layouts, call.scale, *keys, lists and lists.structure, *call.cached.structure, structure_of(call.extras))
        aligned = call.k.data_ptr() % 16 == 0
        shared = call.shared
        key += (values_in_keys(call.k, call.v), aligned, call.options.use_tma, shared and shared.tiles.most)
        extras = call.extras.named if call.extras else {}
        if shared:
            extras = {**extras, "SHARED_PARTS": shared.tiles.parts}
        tensors = [call.k, call.v, call.q, call.out, call.lse, *call.cached.tensors, *extras.values()]
        kernels = None if prepare else _ready.get(key)
        if kernels is None:
            made = self._call(call, keys, lists).fastest(aligned, call.options.use_tma)
            names = ("K", "V", "Q", "O", "LSE", *call.cached.named, *extras, *(lists.tensors() if lists else ()))
            kernels = Kernels(self, made, names, lists, shared.tiles.most if shared else 0)
            if prepare:
                launch_nothing(kernels.launches)
            else:
                _ready[key] = kernels
        else:
            INFO.hits += 1
        before = None if shared is None else functools.partial(shared.run, prepare=prepare)
        kernels.run(tensors, addresses_of(tensors), score and score[1], mask and mask[1], lists, before)

    def _call(self, call: CachedCall, keys: tuple[Mod | None, Mod | None], lists: BlockLists | None) -> DecodeCall:
        q, k, v, cached = call.q, call.k, call.v, call.cached
        geometry = call.geometry_in(16 // vector_of(q.dtype, k.dtype))
        tokens = None if cached.cu_q is None else q.shape[2]
        widths = q.shape[3], v.shape[3], max(q.element_size(), k.element_size())
        rows, split = _division(call.extents, geometry, q.device, lists, cached, widths, tokens)
        if call.shared and not split.room:  # combine_splits adds the shared parts
            split = Split(1)
        case = call.decode_case(
            geometry,
            lists,
            aligned=geometry.aligned,
            split=split.room > 0,
            balanced=split.of_all > 0,
            by_tokens=by_tokens(call.extents[2], rows, tokens) and not split.of_all,
            values_in_keys=values_in_keys(k, v),
            shared=call.shared is not None,
        )
        machine = backend_of(q.device.type), architecture_of(q.device)
        return DecodeCall(case, geometry, call.extents, q.shape[2], rows, split, call.stride_pages, *machine, call.scale, *keys)


def _division(
    extents: tuple[int, int, int, int],
    geometry: Geometry,
    device: torch.device,
    lists: BlockLists | None,
    cached: Cached,
    widths: tuple[int, int, int],
    tokens: int | None,
) -> tuple[Rows, Split]:
    """How queries and heads make up tiles, and into how many parts keys are split. widths: D_QK, D_V and bytes of an element; tokens: of
    ragged queries."""
    Z, Hq, Q_LEN, KV_LEN = extents
    group = 1 if lists and lists.by_head else geometry.numbers["GROUP_SIZE"]
    arch = architecture_of(device)
    most = most_rows(arch, *widths)
    rows = rows_of(2 * MAX_ROWS if cached.invariant else Q_LEN, group, lists.q_block if lists else 0, most)
    tiles = tiles_of(extents, rows, tokens)
    if by_tokens(Q_LEN, rows, tokens):
        tiles -= Z - (Z - 1) // 2  # that are there: the last one of a sequence is half full on average
    programs = max(tiles, 1) * (Hq // rows.pack)
    available = multiprocessors(device) * programs_at_once(arch, rows.rows, *widths) if device.type != "cpu" else INTERPRETED
    structure = {"lengths": cached.kv_lens is not None, "listed": lists is not None, "invariant": cached.invariant}
    return rows, parts_of(KV_LEN, programs, Z, available, **structure)
