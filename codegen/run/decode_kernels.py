"""The kernels for few queries and for caches in calls of one kind: what a call says of them, and what they leave for each other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch

from .. import logs
from ..device.arguments import plain_values
from ..device.devices import on
from ..device.memory import contiguous
from ..plan.decode import DecodeCase, DecodePlan, Rows, parts_at_once
from ..plan.decode import Parts as Split
from ..plan.forward import Mod, scales
from ..plan.geometry import STRIDES, Geometry
from ..plan.hopper_decode import fits
from ..plan.hopper_forward import SPILL_LIMIT
from ..plan.tiles import Tile, next_smaller
from ..registry import Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists
from .forward_kernels import planned
from .launch import Launch, OnlyBegun, Unusable, launch_fitting, launch_nothing

_PARTS = ("PART", "PART_SHARE", "PART_MAX", "PART_COUNT")
_plans: dict[tuple, DecodePlan] = Table("decode plans", 1024)
_refused: dict[tuple, str] = Table("decode kernels not used", 1024)  # for Hopper, that were compiled, and why


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
    for_hopper: bool = False  # by the kernel for Hopper

    @property
    def key(self) -> tuple:
        """What changes the kernels."""
        return self.case, self.arch, self.score, self.mask, self.rows.rows, self.for_hopper

    def fastest(self, aligned: bool, use_tma: bool | None) -> DecodeCall:
        """By the kernel for Hopper where it serves. aligned: the address of k is a multiple of 16 bytes."""
        why = fits(self.case, self.geometry, self.arch, aligned, self.rows.rows, self.score, self.mask)
        found = self._replace(for_hopper=why is None and use_tma is not False)
        return self if found.key in _refused else found

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


class Parts:
    """The memory for parts: elements of PART, PART_SHARE, PART_MAX and PART_COUNT, each a multiple of 16 bytes. Behind the parts of all
    rows there are `shared` of each that another kernel makes."""

    def __init__(self, rows: int, splits: int, d_v: int, shared: int = 0) -> None:
        self.first_shared, self.d_v = -(-rows * splits // 4) * 4, d_v
        slots = self.first_shared + rows * shared if shared else rows * splits
        self.sizes = [-(-n // 4) * 4 for n in (slots * d_v, slots, slots, rows)]
        self.room = sum(self.sizes)
        self._offsets = list(accumulate([4 * size for size in self.sizes[:-1]], initial=0))

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """By the names of parameters."""
        part, share, largest, count = buffer.split(self.sizes)
        return dict(zip(_PARTS, (part, share, largest, count.view(torch.int32)), strict=True))

    def shared_tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Those from the first shared part on."""
        found, first = self.tensors(buffer), self.first_shared
        return {name: found[name][first * (self.d_v if name == "PART" else 1) :] for name in _PARTS[:3]}

    def addresses(self, start: int) -> list[int]:
        """The addresses of `tensors`, of a buffer that begins at `start`."""
        return [start + offset for offset in self._offsets]


class Kernels:
    """decode, or its kernel for Hopper, and combine_splits where keys are split, in calls of one kind.

    names   of the tensors that `run` gets and, behind them, of the lists' tables
    shared  parts of each row for which there is room, beside those of its own keys (see SharedParts)
    """

    raw = False

    def __init__(self, candidate, call: DecodeCall, names: tuple[str, ...], lists: BlockLists | None, shared: int = 0) -> None:
        case, split = call.case, call.split
        self.candidate, self.names, self.ragged, self.grid = candidate, names, case.ragged, call.grid
        self.sinks = names.index("SINKS") if case.extras.sinks else None
        self.parts, self.shared = None, shared
        if split.room:
            self.rows = call.tokens * call.extents[1] * (1 if case.ragged else call.extents[0])
            self.parts = Parts(self.rows, split.room, case.d_v, shared)
        self._take(call, lists)

    def _take(self, call: DecodeCall, lists: BlockLists | None) -> None:
        """The kernels of a call."""
        (Z, Hq, Q_LEN, KV_LEN), split = call.extents, call.split
        self.call, self.plan = call, planned(_plans, self.candidate, call)
        numbers = {
            **call.geometry.numbers,
            **{"Q_LEN": Q_LEN, "KV_LEN": KV_LEN, "Z": Z, "T": call.tokens, "QUERIES": call.rows.queries, "PACK": call.rows.pack},
            **{"SPLITS": split.room, "MIN_SHARE": split.least, "PARTS": split.of_all, "stride_pages": call.stride_pages},
            **scales(call.scale, self.plan.scale_apart),
            **(lists.numbers() if lists else {}),
        }
        self.launch = Launch(self.plan.spec, numbers, (*self.names, *_PARTS))
        if self.parts:
            outer, *inner = [numbers[name] for name in STRIDES["o"]]  # of sequences, heads, queries
            middle, inner, sizes = (*inner[::-1], (call.tokens, Hq)) if self.ragged else (*inner, (Hq, Q_LEN))
            numbers |= {"stride_outer": outer, "stride_middle": middle, "stride_inner": inner, "MIDDLE": sizes[0], "INNER": sizes[1]}
            numbers |= {"MOST": self.shared, "FIRST_SHARED": self.parts.first_shared}
            self.combine = Launch(self.plan.combine, numbers, (*self.names, *_PARTS))

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What `run` launches."""
        return (self.launch, self.combine) if self.parts else (self.launch,)

    def run(
        self,
        tensors: list[torch.Tensor],
        addresses: list[int] | None,
        score: list | None,
        mask: list | None,
        lists: BlockLists | None,
        before: Callable[[dict[str, torch.Tensor]], None] | None = None,
    ) -> None:
        """Fill the outputs among `tensors`, the fourth and those after. `addresses`: theirs, if all are aligned. `before` leaves the shared
        parts."""
        out, lse = tensors[3:5]
        device, captured = out.device, mod_values(self.plan, score, mask)
        buffer = None
        if self.parts:
            buffer = contiguous((self.parts.room,), torch.float32, device)
            if self.ragged:  # tokens after the last sequence's have no parts, and -1 says that they have no sink
                counts = buffer[-self.parts.sizes[-1] :]
                counts.zero_() if self.sinks is None else counts.view(torch.int32).fill_(-1)
            if before is not None:
                before(self.parts.shared_tensors(buffer))
        elif self.ragged:
            lse.fill_(float("-inf"))
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
        self._launch(named, captured, lists, device)
        if self.parts:
            self.combine.with_constants((parts_at_once(self.call.case.d_v),), named, [], (self.rows,), device)

    def _launch(self, named: dict[str, torch.Tensor], captured: list, lists: BlockLists | None, device: torch.device) -> None:
        """The first of the kernels: the portable one, from now on, if that for Hopper is not usable."""
        if self.call.for_hopper:
            try:
                with on(device):
                    self.launch.if_usable(named, captured, self.grid, device, SPILL_LIMIT, self.plan.tile.num_warps)
                return
            except OnlyBegun:
                raise
            except Unusable as why:
                _refused[self.call.key] = str(why)
                logs.CHOICE.info("decode: the kernel for Hopper is not used: %s", why)
                is_launched = self.launch.is_launched
                self._take(self.call._replace(for_hopper=False), lists)
                if not is_launched:
                    launch_nothing(self.launches)
        launch_fitting(self.plan, lambda tile: self.launch.with_tile(tile, named, captured, self.grid, device), with_fewer_keys)


def with_fewer_keys(tile: Tile) -> Tile | None:
    """The next smaller tile of as many rows."""
    smaller = next_smaller(tile)
    return smaller if smaller and smaller.BLOCK_M == tile.BLOCK_M else None
