"""The kernels that may serve a backward pass, and each in calls of a kind."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..device.arguments import plain_values
from ..device.counters import held_counter
from ..device.devices import multiprocessors, on
from ..device.memory import META
from ..plan import hopper_backward
from ..plan.backward import STATS_ALIGNMENT, BackwardCase, BackwardGeometry, BackwardPlan, Step, delta_rows, plan_backward, stats_copies
from ..plan.extras import dropout_numbers
from ..plan.forward import Mod, scales
from ..plan.hopper_backward import L2_BYTES, LISTED_BYTES, HopperBackwardPlan, enough_heads, fits, lacks_room, plan_hopper_backward
from ..plan.hopper_forward import heads_per_group
from ..plan.tiles import Tile
from ..registry import Table
from ..text.mod_text import mod_values
from ..text.spec import KernelSpec
from .block_lists import BlockLists, tiles_of
from .captured import Sums
from .forward_kernels import planned
from .launch import Launch, Unusable, addresses_of, launch_fitting
from .workspace import Workspace

worthwhile = hopper_backward.worthwhile
_plans: dict[tuple, BackwardPlan | HopperBackwardPlan] = Table("backward plans", 1024)


class Call(NamedTuple):
    """A backward pass as the choice of its kernels sees it."""

    case: BackwardCase
    geometry: BackwardGeometry
    backend: str
    arch: str
    score: Mod | None
    mask: Mod | None
    extents: tuple[int, int, int, int, int, int]  # Z, Hq, Q_LEN, Zkv, Hkv, KV_LEN
    device: torch.device

    @property
    def key(self) -> tuple:
        """What changes the kernels."""
        return self.case, self.arch, self.score, self.mask


class Portable:
    """backward_dkv and backward_dq, which serve any call, on any device."""

    name = "PORTABLE"

    def plan(self, call: Call) -> BackwardPlan:
        return plan_backward(call.case, call.backend, call.arch, call.score, call.mask)

    def prepare(self, call: Call, sizes: Sizes, names: tuple[str, ...], lists: BlockLists | None, transposed: BlockLists | None) -> TwoPass:
        return TwoPass(planned(_plans, self, call), call, sizes, names, lists, transposed)


class Hopper:
    """hopper_backward, one kernel for all gradients, for sm_90 alone."""

    name = "HOPPER"

    def fits(self, call: Call) -> str | None:
        reason = fits(call.case, call.arch, call.score)
        if reason is None and max(call.case.d_qk, call.case.d_v) > 128:  # a plan is asked only where room is short
            reason = lacks_room(planned(_plans, self, call))
        return reason

    def worthwhile(self, call: Call) -> str | None:
        if call.case.options.backend == self.name:
            return None
        Z, Hq, Q_LEN, Zkv, Hkv, KV_LEN = call.extents
        head_dim = max(call.case.d_qk, call.case.d_v)
        rows, listed = Z * Hq // (Zkv * Hkv) * Q_LEN, bool(call.case.blocks)
        return worthwhile(rows, KV_LEN, Zkv * Hkv, head_dim, listed, multiprocessors(call.device))

    def plan(self, call: Call) -> HopperBackwardPlan:
        return plan_hopper_backward(call.case, call.score, call.mask)

    def prepare(self, call: Call, sizes: Sizes, names: tuple[str, ...], lists: BlockLists | None, transposed: BlockLists | None) -> Fused:
        return Fused(planned(_plans, self, call), call, sizes, names, lists, transposed)


class Sizes(NamedTuple):
    """The sizes of a call, its scale, and the strides of out and dO."""

    extents: tuple[int, int, int, int]  # Z, Hq, Q_LEN, KV_LEN
    shared: tuple[int, int]  # Zkv, Hkv
    scale: float
    strides: dict[str, int]  # as backward_delta takes them
    dropout_p: float = 0.0

    def numbers(self, call: Call, plan, stats_len: int) -> dict[str, int | float]:
        """All that the kernels may take beside lists, by the names of parameters."""
        (Z, Hq, Q_LEN, KV_LEN), (Zkv, Hkv), case = self.extents, self.shared, call.case
        row_bytes = case.d_qk * (case.dtype.itemsize + 4) + case.d_v * case.dtype.itemsize
        listed = case.blocks is not None
        enough, cached = enough_heads(KV_LEN, listed), LISTED_BYTES if listed else L2_BYTES
        heads = heads_per_group(Zkv * Hkv, Q_LEN * row_bytes * (Z * Hq // (Zkv * Hkv)), enough, cached)
        inside = isinstance(plan, HopperBackwardPlan) and plan.fused.flag["BATCH_INSIDE"]
        return {
            **call.geometry.strides,
            **{"Z": Z, "Hq": Hq, "Zkv": Zkv, "Hkv": Hkv, "GROUP_SIZE": Hq // Hkv, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN},
            "STATS_LEN": stats_len,
            "HEADS_PER_GROUP": max(heads, Zkv) if inside else heads,
            **scales(self.scale, plan.scale_apart),
            **dropout_numbers(self.dropout_p),
        }


class Walk(NamedTuple):
    """A kernel that walks block lists: of queries ("q") for tiles of keys, or the other way round ("kv").

    step     its tile, its mods and what it gathers      heads, length      of what its tiles are made of
    """

    step: Step | HopperBackwardPlan
    launch: Launch
    axis: str
    heads: int
    length: int

    def tiles(self, lists: BlockLists | None) -> int:
        """Of a head, with the step's tile."""
        tile = self.step.tile
        if self.axis == "q":
            return tiles_of(self.length, tile.BLOCK_N, lists, "kv_block")
        return tiles_of(self.length, tile.BLOCK_M, lists, "q_block")


def launch_gathering(walk: Walk, lists: BlockLists | None, tensors: dict, captured: list, sums: Sums, device: torch.device) -> None:
    """Launch a kernel that gathers gradients of captured tensors: once, or where positions of one head are stored, head by head."""
    step, heads = walk.step, walk.heads

    def launch(tile: Tile) -> None:
        tiles = walk.tiles(lists)
        if not step.spec.flag["SLABS"]:
            walk.launch.with_tile(tile, {**tensors, **sums.tensors(step, tiles)}, captured, (tiles * heads,), device)
            return
        for head in range(heads):
            given = {**tensors, **sums.tensors(step, tiles), "first_tile": head * tiles}
            walk.launch.with_tile(tile, given, captured, (tiles,), device)
            if sums.device is META:
                return
            sums.add_slabs(step, divmod(head, sums.extents[1]))

    launch_fitting(step, launch)


class _Kernels:
    """The kernels of one pass in calls of a kind: all is decided but addresses and what mods capture.

    names       of the tensors that `run` gets, in their order
    writes_to   the device of memory for what lives as long as `run`; None: that of the tensors. On "meta" nothing can be launched
    """

    writes_to: torch.device | None = None
    halves = 1  # of a tile, which sum the gradients of captured tensors apart

    def __init__(
        self, plan, call: Call, sizes: Sizes, names: tuple[str, ...], lists: BlockLists | None, walked: int, copies: int, apart: dict
    ) -> None:
        (Z, Hq, Q_LEN, _), sinks = sizes.extents, call.case.extras.sinks
        whole = math.lcm(STATS_ALIGNMENT, lists.q_block if lists else walked)  # backward_dkv walks whole query blocks
        stats_len = -(-Q_LEN // whole) * whole
        if lists and lists.starts is not None:
            stats_len += whole  # the last block may begin anywhere
        self.plan, self.sizes, self.key, self.sinks, self.waits = plan, sizes, call.key, bool(sinks), True
        self.delta_rows = delta_rows(call.case.d_v)
        self.delta_grid = (Z * Hq * stats_len // self.delta_rows,)
        shapes = {"TOPS": (Z, Hq, 2 * copies, stats_len), "DELTA": (Z, Hq, copies, stats_len), **apart}
        if sinks:
            shapes["D_SINKS"] = Z, Hq, stats_len // self.delta_rows
        self.workspace = Workspace(shapes, ("DONE",))
        self.order, self.numbers = (*names, *shapes), sizes.numbers(call, plan, stats_len)
        self.delta = Launch(plan.delta, {**self.numbers, **sizes.strides}, self.order)
        self.walks: tuple[Walk, ...] = ()
        self.launches: tuple[Launch, ...] = (self.delta,)  # by `run`

    def add(self, spec: KernelSpec, step: Step | HopperBackwardPlan, lists: BlockLists | None, axis: str) -> None:
        """One more of the kernels. Where each head is launched alone, no launch is like the one before."""
        (Z, Hq, Q_LEN, KV_LEN), (Zkv, Hkv) = self.sizes.extents, self.sizes.shared
        order = (*self.order, *(lists.tensors(axis) if lists else ()), *dict.fromkeys(c.buffer for c, _ in step.captured))
        numbers = {**self.numbers, **(lists.numbers(axis) if lists else {})}
        launch = Launch(spec, numbers, None if spec.flag.get("SLABS") else order)
        self.walks += (Walk(step, launch, axis, *((Zkv * Hkv, KV_LEN) if axis == "q" else (Z * Hq, Q_LEN))),)
        self.launches += (launch,)

    def run(
        self, tensors: dict[str, torch.Tensor], score, mask, lists: BlockLists | None, transposed: BlockLists | None
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
        """Fill DQ, DK and DV among `tensors`. The gradients of captured tensors, and of sinks (Z, Hq, n), in n parts. Raises Unusable."""
        device = tensors["Q"].device
        place = self.writes_to or device
        memory = self.workspace.new(place)
        sums = Sums(tuple([walk.step for walk in self.walks]), score, self.sizes.extents, place, lists)
        found = [
            (walk, mod_values(walk.step, score and score[1], mask and mask[1]), transposed if walk.axis == "q" else lists)
            for walk in self.walks
        ]
        if not self._again([*tensors.values()], memory, found, sums, device):
            self._first({**tensors, **self.workspace.tensors(memory)}, found, sums, device)
        if place is META:
            raise Unusable("it is only begun")
        return sums.gradients(), self.workspace.tensor(memory, "D_SINKS") if self.sinks else None

    def _again(self, tensors: list[torch.Tensor], memory: torch.Tensor, found: list[tuple], sums: Sums, device: torch.device) -> bool:
        """The short way. False if it does not serve these tensors and numbers."""
        if not all([launch.again for launch in self.launches]):
            return False
        addresses, calls = addresses_of(tensors), []
        if addresses is None:
            return False
        addresses += self.workspace.addresses(memory)
        for walk, captured, lists in found:
            plain, tables = plain_values(captured), lists.addresses if lists else ()
            if plain is None or tables is None:
                return False
            buffers = sums.tensors(walk.step, self.halves * walk.tiles(lists)) if walk.step.captured else {}
            calls.append((walk.launch.again, [*addresses, *tables, *[t.data_ptr() for t in buffers.values()]], plain))
        with on(device):
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            self.delta.again(stream, addresses, [])
            for again, given, plain in calls:
                again(stream, given, plain)
        return True

    def _first(self, tensors: dict[str, torch.Tensor], found: list[tuple], sums: Sums, device: torch.device) -> None:
        """The long way."""
        self.delta.waits = self.waits
        self.delta.with_constants((self.delta_rows,), tensors, [], self.delta_grid, device)
        for walk, captured, lists in found:
            walk.launch.waits = self.waits
            given = {**tensors, **(lists.tensors(walk.axis) if lists else {})}
            self._launch(walk, lists, given, captured, sums, device)

    def _launch(self, walk: Walk, lists: BlockLists | None, tensors: dict, captured: list, sums: Sums, device: torch.device) -> None:
        raise NotImplementedError


class TwoPass(_Kernels):
    """backward_dkv, which of wide heads is two kernels, then backward_dq."""

    name = Portable.name

    def __init__(
        self, plan: BackwardPlan, call: Call, sizes: Sizes, names: tuple[str, ...], lists: BlockLists | None, transposed: BlockLists | None
    ) -> None:
        super().__init__(plan, call, sizes, names, lists, plan.dkv.tile.BLOCK_M, 1, {})
        for name, step in plan.walks.items():
            self.add(step.spec, step, *((lists, "kv") if name == "dq" else (transposed, "q")))

    def _launch(self, walk: Walk, lists: BlockLists | None, tensors: dict, captured: list, sums: Sums, device: torch.device) -> None:
        launch_gathering(walk, lists, tensors, captured, sums, device)


class Fused(_Kernels):
    """hopper_backward: a program for each multiprocessor, unless there are fewer tiles and blocks of dQ to finish."""

    name, halves = Hopper.name, 2

    def __init__(
        self,
        plan: HopperBackwardPlan,
        call: Call,
        sizes: Sizes,
        names: tuple[str, ...],
        lists: BlockLists | None,
        transposed: BlockLists | None,
    ) -> None:
        Z, Hq, Q_LEN, _ = sizes.extents
        apart = {"DQ_SUM": (Z, Hq, Q_LEN, call.case.d_qk), "DONE": (2, Z, Hq)}
        super().__init__(plan, call, sizes, ("COUNTER", *names), lists, 1, stats_copies(call.case), apart)
        self.add(plan.fused, plan, transposed, "q")

    def run(
        self, tensors: dict[str, torch.Tensor], score, mask, lists: BlockLists | None, transposed: BlockLists | None
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
        device = tensors["Q"].device
        if self.writes_to is META:
            return super().run({"COUNTER": torch.empty(2, dtype=torch.int32, device=META), **tensors}, score, mask, lists, transposed)
        with on(device), held_counter(device, torch._C._cuda_getCurrentRawStream(device.index)) as count:
            return super().run({"COUNTER": count, **tensors}, score, mask, lists, transposed)

    def _launch(self, walk: Walk, lists: BlockLists | None, tensors: dict, captured: list, sums: Sums, device: torch.device) -> None:
        Z, Hq, Q_LEN, _ = self.sizes.extents
        tiles = walk.tiles(lists)
        work = max(tiles * walk.heads, -(-Q_LEN // self.plan.fused.flag["DQ_ROWS"]) * Z * Hq)
        given = {**tensors, **sums.tensors(self.plan, self.halves * tiles)}
        walk.launch.if_usable(given, captured, (min(work, multiprocessors(device)),), device, math.inf)
