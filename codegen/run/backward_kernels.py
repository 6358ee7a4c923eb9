"""The kernels that may serve a backward pass, and each in calls of a kind."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ..device.counters import held_counter
from ..device.devices import multiprocessors, on
from ..device.memory import contiguous
from ..plan.backward import STATS_ALIGNMENT, BackwardCase, BackwardGeometry, BackwardPlan, Step, delta_rows, plan_backward, stats_copies
from ..plan.extras import dropout_numbers
from ..plan.forward import Mod, scales
from ..plan.hopper_backward import L2_BYTES, HopperBackwardPlan, fits, plan_hopper_backward
from ..plan.hopper_forward import heads_per_group
from ..plan.tiles import Tile
from ..registry import Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists, tiles_of
from .captured import Sums
from .forward_kernels import planned
from .launch import Launch, launch_fitting

_plans: dict[tuple, BackwardPlan | HopperBackwardPlan] = Table("backward plans", 1024)


class Call(NamedTuple):
    """A backward pass as the choice of its kernels sees it."""

    case: BackwardCase
    geometry: BackwardGeometry
    backend: str
    arch: str
    score: Mod | None
    mask: Mod | None

    @property
    def key(self) -> tuple:
        """What changes the kernels."""
        return self.case, self.arch, self.score, self.mask


class Portable:
    """backward_dkv and backward_dq, which serve any call, on any device."""

    name = "PORTABLE"

    def plan(self, call: Call) -> BackwardPlan:
        return plan_backward(call.case, call.backend, call.arch, call.score, call.mask)

    def prepare(self, call: Call, sizes: Sizes, lists: BlockLists | None, transposed: BlockLists | None) -> TwoPass:
        return TwoPass(planned(_plans, self, call), call, sizes, lists, transposed)


class Hopper:
    """hopper_backward, one kernel for all gradients, for sm_90 alone."""

    name = "HOPPER"

    def fits(self, call: Call) -> str | None:
        return fits(call.case, call.arch, call.score)

    def worthwhile(self, call: Call) -> str | None:
        return None

    def plan(self, call: Call) -> HopperBackwardPlan:
        return plan_hopper_backward(call.case, call.score, call.mask)

    def prepare(self, call: Call, sizes: Sizes, lists: BlockLists | None, transposed: BlockLists | None) -> Fused:
        return Fused(planned(_plans, self, call), call, sizes, lists, transposed)


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
        return {
            **call.geometry.strides,
            **{"Z": Z, "Hq": Hq, "Zkv": Zkv, "Hkv": Hkv, "GROUP_SIZE": Hq // Hkv, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN},
            "STATS_LEN": stats_len,
            "HEADS_PER_GROUP": heads_per_group(Zkv * Hkv, Q_LEN * row_bytes * (Z * Hq // (Zkv * Hkv)), L2_BYTES),
            **scales(self.scale, plan.scale_apart),
            **dropout_numbers(self.dropout_p),
        }


class _Kernels:
    """The kernels of one pass in calls of a kind: all is decided but addresses and what mods capture."""

    def __init__(self, plan, call: Call, sizes: Sizes, lists: BlockLists | None, walked: int, copies: int) -> None:
        Q_LEN = sizes.extents[2]
        whole = math.lcm(STATS_ALIGNMENT, lists.q_block if lists else walked)  # backward_dkv walks whole query blocks
        self.stats_len = -(-Q_LEN // whole) * whole
        if lists and lists.starts is not None:
            self.stats_len += whole  # the last block may begin anywhere
        self.plan, self.sizes, self.copies, self.waits = plan, sizes, copies, True
        self.key, self.sinks = call.key, bool(call.case.extras.sinks)
        self.numbers = sizes.numbers(call, plan, self.stats_len)
        self.delta = Launch(plan.delta, {**self.numbers, **sizes.strides})
        self.delta_rows = delta_rows(call.case.d_v)

    def statistics(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Memory for what backward_delta leaves."""
        Z, Hq = self.sizes.extents[:2]
        found = {
            "TOPS": contiguous((Z, Hq, 2 * self.copies, self.stats_len), torch.float32, device),
            "DELTA": contiguous((Z, Hq, self.copies, self.stats_len), torch.float32, device),
        }
        if self.sinks:
            found["D_SINKS"] = contiguous((Z, Hq, self.stats_len // self.delta_rows), torch.float32, device)
        return found

    def describe_rows(self, tensors: dict[str, torch.Tensor]) -> None:
        """The rows' maxima, shares and delta, and for the fused kernel what it counts on."""
        Z, Hq = self.sizes.extents[:2]
        grid = (Z * Hq * self.stats_len // self.delta_rows,)
        self.delta.waits = self.waits
        self.delta.with_constants((self.delta_rows,), tensors, [], grid, tensors["Q"].device)


class TwoPass(_Kernels):
    """backward_dkv, then backward_dq."""

    name = Portable.name

    def __init__(self, plan: BackwardPlan, call: Call, sizes: Sizes, lists: BlockLists | None, transposed: BlockLists | None) -> None:
        super().__init__(plan, call, sizes, lists, plan.dkv.tile.BLOCK_M, 1)
        (Z, Hq, Q_LEN, KV_LEN), (Zkv, Hkv) = sizes.extents, sizes.shared
        self.passes = (
            (plan.dkv, self._launch(plan.dkv, transposed, "q"), "q", Zkv * Hkv, KV_LEN),
            (plan.dq, self._launch(plan.dq, lists, "kv"), "kv", Z * Hq, Q_LEN),
        )

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What `run` launches."""
        return self.delta, *(launch for _, launch, *_ in self.passes)

    def _launch(self, step: Step, lists: BlockLists | None, axis: str) -> Launch:
        return Launch(step.spec, {**self.numbers, **(lists.numbers(axis) if lists else {})})

    def run(self, tensors: dict[str, torch.Tensor], score, mask, lists: BlockLists | None, transposed: BlockLists | None) -> dict:
        """Fill DQ, DK and DV among `tensors`, which have the names of parameters; the gradients of captured tensors."""
        self.describe_rows(tensors)
        sums = Sums(tuple(step for step, *_ in self.passes), score, self.sizes.extents, tensors["Q"].device, lists)
        for step, launch, axis, heads, length in self.passes:
            launch.waits = self.waits
            walked = transposed if axis == "q" else lists
            given = {**tensors, **(walked.tensors(axis) if walked else {})}
            captured = mod_values(step, score and score[1], mask and mask[1])
            launch_fitting(step, functools.partial(self._pass, step, launch, axis, heads, length, walked, given, captured, sums))
        return sums.gradients()

    def _pass(
        self, step: Step, launch: Launch, axis: str, heads: int, length: int, lists, tensors, captured, sums: Sums, tile: Tile
    ) -> None:
        tiles = tiles_of(length, tile.BLOCK_N, lists, "kv_block") if axis == "q" else tiles_of(length, tile.BLOCK_M, lists, "q_block")
        device = tensors["Q"].device
        if not step.spec.flag["SLABS"]:
            launch.with_tile(tile, {**tensors, **sums.tensors(step, tiles)}, captured, (tiles * heads,), device)
            return
        for head in range(heads):
            given = {**tensors, **sums.tensors(step, tiles), "first_tile": head * tiles}
            launch.with_tile(tile, given, captured, (tiles,), device)
            sums.add_slabs(step, divmod(head, self.sizes.extents[1]))


class Fused(_Kernels):
    """hopper_backward: a program for each multiprocessor, unless there are fewer tiles and blocks of dQ to finish."""

    name = Hopper.name

    def __init__(self, plan: HopperBackwardPlan, call: Call, sizes: Sizes, lists: BlockLists | None, transposed: BlockLists | None) -> None:
        super().__init__(plan, call, sizes, lists, 1, stats_copies(call.case))
        self.fused = Launch(plan.fused, {**self.numbers, **(transposed.numbers("q") if transposed else {})})

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What `run` launches."""
        return self.delta, self.fused

    def run(self, tensors: dict[str, torch.Tensor], score, mask, lists: BlockLists | None, transposed: BlockLists | None) -> dict:
        """As TwoPass.run. Raises Unusable."""
        Z, Hq, Q_LEN, KV_LEN = self.sizes.extents
        Zkv, Hkv = self.sizes.shared
        plan, device = self.plan, tensors["Q"].device
        sums = Sums((plan,), score, self.sizes.extents, device, lists)
        tiles = tiles_of(KV_LEN, plan.tile.BLOCK_N, transposed, "kv_block")
        work = max(tiles * Zkv * Hkv, -(-Q_LEN // plan.fused.flag["DQ_ROWS"]) * Z * Hq)
        captured = mod_values(plan, score and score[1], mask and mask[1])
        given = {
            **tensors,
            **(transposed.tensors("q") if transposed else {}),
            **sums.tensors(plan, 2 * tiles),
            "DQ_SUM": contiguous(tensors["Q"].shape, torch.float32, device),
            "DONE": contiguous((2, Z, Hq), torch.int32, device),
        }
        self.fused.waits = self.waits
        with on(device), held_counter(device, torch._C._cuda_getCurrentRawStream(device.index)) as count:
            given["COUNTER"] = count
            self.describe_rows(given)
            self.fused.if_usable(given, captured, min(work, multiprocessors(device)), device, math.inf)
        return sums.gradients()
