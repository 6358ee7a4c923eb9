"""The kernels for few queries and for caches, which split the keys of a row: which calls they serve, and both in calls of a kind."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from ..device.arguments import plain_values
from ..device.devices import architecture_of, backend_of, multiprocessors, on
from ..device.memory import contiguous
from ..mod.expr import INDEX_BOUND
from ..plan.decode import (
    BLOCK_S,
    MAX_ROWS,
    MIN_SHARE,
    DecodeCase,
    DecodePlan,
    Rows,
    differs_by_head,
    parts_of,
    plan_decode,
    rows_of,
    vector_of,
)
from ..plan.decode import Parts as Split
from ..plan.decode_tiles import most_rows
from ..plan.extras import factors_out
from ..plan.forward import Mod, scales
from ..plan.geometry import STRIDES, Geometry
from ..plan.tiles import Tile, next_smaller
from ..registry import INFO, Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists
from .cached_call import CachedCall
from .call import NOT_CACHED, Cached, keys_of, structure_of, values_in_keys
from .forward_kernels import Call, planned
from .launch import Launch, addresses_of, launch_fitting, launch_nothing

MAX_QUERIES = 16  # of a call without a cache; more of them keep the device busy without splitting keys
_INTERPRETED = 4  # multiprocessors of the interpreter: keys are split there, too
_PARTS = ("PART", "PART_SHARE", "PART_MAX", "PART_COUNT")
_plans: dict[tuple, DecodePlan] = Table("decode plans", 1024)
_ready: dict[tuple, Kernels] = Table("decode calls", 1024)


class DecodeCall(NamedTuple):
    """A call as these kernels see it: sizes, strides and structure."""

    case: DecodeCase
    geometry: Geometry
    extents: tuple[int, int, int, int]  # Z, Hq, Q_LEN (of the longest sequence), KV_LEN
    tokens: int  # of all sequences together, where queries are ragged; else Q_LEN
    rows: Rows
    split: Split
    stride_pages: int
    backend: str
    arch: str
    scale: float
    score: Mod | None
    mask: Mod | None

    @property
    def key(self) -> tuple:
        """What changes the kernels."""
        return self.case, self.arch, self.score, self.mask, self.rows.rows

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of all sequences and parts of a tile's keys; or tiles of one sequence, and parts of all where their lengths decide."""
        Z, _, Q_LEN, _ = self.extents
        heads = self.extents[1] // self.rows.pack
        if self.split.of_all:
            return -(-Q_LEN // self.rows.queries) * heads, self.split.of_all + Z
        return tiles_of(self.extents, self.rows, self.tokens if self.case.ragged else None) * heads, max(self.split.room, 1)


def by_tokens(q_len: int, rows: Rows, tokens: int | None) -> bool:
    """Do sequences of up to q_len queries have tiles by their own number of queries, `tokens` all together (None: q_len each)?"""
    return tokens is not None and q_len > rows.queries


def tiles_of(extents: tuple[int, int, int, int], rows: Rows, tokens: int | None) -> int:
    """Of a head, for all sequences."""
    Z, _, Q_LEN, _ = extents
    return tokens // rows.queries + Z if by_tokens(Q_LEN, rows, tokens) else -(-Q_LEN // rows.queries) * Z


class _Planned:
    name = "DECODE"

    def plan(self, call: DecodeCall) -> DecodePlan:
        return plan_decode(call.case, call.backend, call.arch, call.score, call.mask, call.rows.rows)


class Decode(_Planned):
    """decode and combine_splits, for a call without a cache."""

    def fits(self, call: Call) -> str | None:
        q_len, options = call.extents[2], call.case.options
        if q_len > MAX_QUERIES:
            return f"query has {q_len} positions, more than {MAX_QUERIES}"
        if options.tile or options.prescale_qk:
            return f"{', '.join(name for name, _ in options.tile) or 'PRESCALE_QK'} is for the other kernels"
        if call.case.dtype.itemsize == 1 or call.case.extras.scales:
            return "float8: other kernels have it"
        if call.case.extras.dropout:
            return "dropout: the portable kernels have it"
        if call.case.blocks and call.case.blocks.shifted:
            return "blocks lie in a longer sequence"
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
        case = DecodeCase(
            known.dtype,
            known.d_qk,
            known.d_v,
            known.units,
            known.aligned,
            known.blocks and known.blocks._replace(interior=True),
            known.options.float32_precision,
            known.scale_is_positive,
            known.output_max,
            known.output_rows,
            known.exact_indices,
            split.room > 0,
            split.of_all > 0,
            extras=known.extras,
            values_in_keys=known.values_in_keys,
        )
        machine = call.backend, call.arch
        made = DecodeCall(case, call.geometry, call.extents, Q_LEN, rows, split, 0, *machine, call.scale, call.score, call.mask)
        return Kernels(planned(_plans, self, made), made, names, lists)


class DecodeCached(_Planned):
    """The same for any call with one."""

    def run(self, call: CachedCall, *, prepare: bool = False) -> None:
        """Fill out and lse; or, to prepare such calls, compile what does."""
        score, mask = call.by_number("score"), call.by_number("mask")
        lists = mask and call.lists(mask, call.extents[2])
        keys = keys_of(score, mask, call.extents)
        key = (*call.layouts, call.scale, *keys, lists and lists.structure, *call.cached.structure, structure_of(call.extras))
        key += (values_in_keys(call.k, call.v),)
        extras = call.extras.named if call.extras else {}
        tensors = [call.k, call.v, call.q, call.out, call.lse, *call.cached.tensors, *extras.values()]
        kernels = None if prepare else _ready.get(key)
        if kernels is None:
            made = self._call(call, keys, lists)
            names = ("K", "V", "Q", "O", "LSE", *call.cached.named, *extras, *(lists.tensors() if lists else ()))
            kernels = Kernels(planned(_plans, self, made), made, names, lists)
            if prepare:
                launch_nothing(kernels.launches)
            else:
                _ready[key] = kernels
        else:
            INFO.hits += 1
        kernels.run(tensors, addresses_of(tensors), score and score[1], mask and mask[1], lists)

    def _call(self, call: CachedCall, keys: tuple[Mod | None, Mod | None], lists: BlockLists | None) -> DecodeCall:
        q, k, v, cached = call.q, call.k, call.v, call.cached
        kv_dtype = k.dtype if k.dtype != q.dtype else None
        geometry = call.geometry_in(16 // vector_of(q.dtype, kv_dtype))
        tokens = None if cached.cu_q is None else q.shape[2]
        widths = q.shape[3], v.shape[3], max(q.element_size(), k.element_size())
        rows, split = _division(call.extents, geometry, q.device, lists, cached, widths, tokens)
        case = DecodeCase(
            q.dtype,
            q.shape[3],
            v.shape[3],
            geometry.units,
            geometry.aligned,
            lists and lists.blocks._replace(interior=True),
            scale_is_positive=factors_out(call.scale, structure_of(call.extras)),
            exact_indices=max(call.extents[2:]) <= INDEX_BOUND,
            split=split.room > 0,
            balanced=split.of_all > 0,
            ragged=tokens is not None,
            by_tokens=by_tokens(call.extents[2], rows, tokens) and not split.of_all,
            lengths=cached.kv_lens is not None,
            located=cached.kv_locs is not None,
            page_size=0 if cached.pages is None else k.shape[2],
            kv_dtype=kv_dtype,
            scales=cached.k_scales is not None,
            extras=structure_of(call.extras),
            values_in_keys=values_in_keys(k, v),
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
    by_head = lists is not None and lists.kv_num_blocks.shape[1] > 1  # heads with lists of their own do not share a tile
    group = 1 if by_head else geometry.numbers["GROUP_SIZE"]
    most = most_rows(architecture_of(device), *widths)
    rows = rows_of(2 * MAX_ROWS if cached.invariant else Q_LEN, group, lists.q_block if lists else 0, most)
    programs = tiles_of(extents, rows, tokens) * (Hq // rows.pack)
    available = multiprocessors(device) if device.type != "cpu" else _INTERPRETED
    structure = {"lengths": cached.kv_lens is not None, "listed": lists is not None, "invariant": cached.invariant}
    return rows, parts_of(KV_LEN, programs, Z, available, **structure)


class Parts:
    """The memory for parts: elements of PART, PART_SHARE, PART_MAX and PART_COUNT, each a multiple of 16 bytes."""

    def __init__(self, rows: int, splits: int, d_v: int) -> None:
        self.sizes = [-(-rows * n // 4) * 4 for n in (splits * d_v, splits, splits, 1)]
        self.room = sum(self.sizes)
        self._offsets = list(accumulate([4 * size for size in self.sizes[:-1]], initial=0))

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """By the names of parameters."""
        part, share, largest, count = buffer.split(self.sizes)
        return dict(zip(_PARTS, (part, share, largest, count.view(torch.int32)), strict=True))

    def addresses(self, start: int) -> list[int]:
        """The same."""
        return [start + offset for offset in self._offsets]


class Kernels:
    """decode, and combine_splits where keys are split, in calls of one kind.

    names   of the tensors that `run` gets and, behind them, of the lists' tables
    """

    raw = False

    def __init__(self, plan: DecodePlan, call: DecodeCall, names: tuple[str, ...], lists: BlockLists | None) -> None:
        (Z, Hq, Q_LEN, KV_LEN), case, split = call.extents, call.case, call.split
        self.plan, self.names, self.ragged = plan, names, case.ragged
        self.sinks = names.index("SINKS") if case.extras.sinks else None
        numbers = {
            **call.geometry.numbers,
            **{"Q_LEN": Q_LEN, "KV_LEN": KV_LEN, "Z": Z, "T": call.tokens, "QUERIES": call.rows.queries, "PACK": call.rows.pack},
            **{"SPLITS": split.room, "MIN_SHARE": split.least, "PARTS": split.of_all, "stride_pages": call.stride_pages},
            **scales(call.scale, plan.scale_apart),
            **(lists.numbers() if lists else {}),
        }
        self.grid = call.grid
        self.launch = Launch(plan.spec, numbers, (*names, *_PARTS))
        self.parts = None
        if split.room:
            self.rows = call.tokens * Hq * (1 if case.ragged else Z)
            self.parts = Parts(self.rows, split.room, case.d_v)
            outer, *inner = [numbers[name] for name in STRIDES["o"]]  # of sequences, heads, queries
            middle, inner, sizes = (*inner[::-1], (call.tokens, Hq)) if case.ragged else (*inner, (Hq, Q_LEN))
            numbers |= {"stride_outer": outer, "stride_middle": middle, "stride_inner": inner, "MIDDLE": sizes[0], "INNER": sizes[1]}
            self.combine = Launch(plan.combine, numbers, (*names, *_PARTS))

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What `run` launches."""
        return (self.launch, self.combine) if self.parts else (self.launch,)

    def run(
        self, tensors: list[torch.Tensor], addresses: list[int] | None, score: list | None, mask: list | None, lists: BlockLists | None
    ) -> None:
        """Fill the outputs among `tensors`, the fourth and those after. `addresses`: theirs, if all are aligned."""
        out, lse = tensors[3:5]
        device, captured = out.device, mod_values(self.plan, score, mask)
        buffer = None
        if self.parts:
            buffer = contiguous((self.parts.room,), torch.float32, device)
            if self.ragged:  # tokens after the last sequence's have no parts
                buffer[-self.parts.sizes[-1] :].zero_()
        elif self.ragged:
            if self.sinks is None:
                lse.fill_(float("-inf"))
            else:
                lse.copy_(tensors[self.sinks])  # [T, Hq]
            out.zero_()
        if addresses is None or not self._again(addresses, buffer, captured, lists, device):
            self._first(tensors, buffer, captured, lists, device)

    def _again(
        self, addresses: list[int], buffer: torch.Tensor | None, captured: list, lists: BlockLists | None, device: torch.device
    ) -> bool:
        """The short way. False if it does not serve these tensors and numbers."""
        if not self.launch.again or self.parts and not self.combine.again:
            return False
        plain, tables = plain_values(captured), lists.addresses if lists else ()
        if plain is None or tables is None:
            return False
        addresses += tables
        if self.parts:
            addresses += self.parts.addresses(buffer.data_ptr())
        with on(device):
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            self.launch.again(stream, addresses, plain)
            if self.parts:
                self.combine.again(stream, addresses, [])
        return True

    def _first(self, tensors: list[torch.Tensor], buffer, captured: list, lists: BlockLists | None, device: torch.device) -> None:
        """The long way."""
        named = dict(zip(self.names, (*tensors, *(lists.tables if lists else ())), strict=True))
        if self.parts:
            named |= self.parts.tensors(buffer)
        launch_fitting(self.plan, lambda tile: self.launch.with_tile(tile, named, captured, self.grid, device), _with_fewer_keys)
        if self.parts:
            self.combine.with_constants((BLOCK_S,), named, [], (self.rows,), device)


def _with_fewer_keys(tile: Tile) -> Tile | None:
    """The next smaller tile of as many rows."""
    smaller = next_smaller(tile)
    return smaller if smaller and smaller.BLOCK_M == tile.BLOCK_M else None
