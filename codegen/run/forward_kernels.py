"""The kernels that may serve a forward pass, and each in calls of a kind."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.arguments import plain_values
from ..device.counters import counter
from ..device.devices import multiprocessors, on
from ..mod.graphs.loads import dots_of
from ..plan import hopper_forward
from ..plan.extras import SMALLEST_SCALE, extra_numbers
from ..plan.forward import ForwardCase, Mod, Plan, plan_forward, scales
from ..plan.geometry import Geometry
from ..plan.hopper_forward import (
    L2_BYTES,
    SPILL_LIMIT,
    UNEVEN_BYTES,
    HopperPlan,
    enough_heads,
    fits,
    heads_per_group,
    is_uneven,
    plan_hopper_forward,
    tiles_of_two,
)
from ..registry import INFO, Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists, tiles_of
from .launch import Launch, launch_fitting

worthwhile = hopper_forward.worthwhile
_plans: dict[tuple, Plan | HopperPlan] = Table("forward plans", 1024)


class Call(NamedTuple):
    """A call as the choice of its kernel sees it: sizes, strides and structure; no address, and nothing of what lists hold."""

    case: ForwardCase
    geometry: Geometry
    extents: tuple[int, int, int, int]  # Z, Hq, Q_LEN, KV_LEN
    device: torch.device
    backend: str
    arch: str
    aligned: bool  # the addresses of q, k and v are multiples of 16 bytes
    scale: float
    score: Mod | None
    mask: Mod | None
    extras: tuple[float, tuple[tuple[int, int], ...]] = (0.0, ())  # numbers: dropout_p, and strides of scales

    @property
    def key(self) -> tuple:
        """What changes the kernels."""
        return self.case, self.arch, self.score, self.mask


class Portable:
    """The forward kernel that serves any call, on any device."""

    name = "PORTABLE"

    def plan(self, call: Call) -> Plan:
        return plan_forward(call.case, call.backend, call.arch, call.score, call.mask)

    def prepare(self, call: Call, names: tuple[str, ...], lists: BlockLists | None) -> Runner:
        plan = planned(_plans, self, call)
        return Runner(plan, Launch(plan.spec, _numbers(call, plan, lists), names), names, call.extents, None)


class Hopper:
    """The one for sm_90 alone."""

    name = "HOPPER"

    def fits(self, call: Call) -> str | None:
        why = fits(call.case, call.geometry, call.arch, call.aligned, call.score)
        if not why and call.scale <= SMALLEST_SCALE and call.score and dots_of(call.score[0]):
            why = f"a scale of {call.scale}, by which a dot product of rows would be divided"
        return why

    def worthwhile(self, call: Call) -> str | None:
        (Z, Hq, Q_LEN, KV_LEN), case = call.extents, call.case
        return why_portable(Q_LEN, KV_LEN, Z * Hq, max(case.d_qk, case.d_v), bool(case.blocks), call.device)

    def plan(self, call: Call) -> HopperPlan:
        return plan_hopper_forward(call.case, call.score, call.mask)

    def prepare(self, call: Call, names: tuple[str, ...], lists: BlockLists | None) -> Runner:
        plan = planned(_plans, self, call)
        limit = None if call.case.options.backend == self.name else SPILL_LIMIT
        launch = Launch(plan.spec, _numbers(call, plan, lists), (*names, *(c.name for c in plan.copies), "COUNTER"))
        return Runner(plan, launch, names, call.extents, limit, multiprocessors(call.device))


def leaves_raw(candidate, call: Call) -> bool:
    """Does a candidate's kernel leave the largest scores of rows without scale?"""
    return isinstance(candidate, Hopper) and bool(planned(_plans, candidate, call).spec.flag["SUM_IS_RAW"])


def why_portable(q_len: int, kv_len: int, heads: int, head_dim: int, listed: bool, device: torch.device) -> str | None:
    """Why the portable kernel is faster on a device than the one for Hopper (see worthwhile), or None if it is not."""
    return worthwhile(q_len, kv_len, heads, head_dim, listed, multiprocessors(device))


def planned_for_any(launches: Table, case: ForwardCase, keys: tuple[Mod | None, Mod | None]) -> tuple[HopperPlan, Launch]:
    """The plan of the kernel for Hopper, and the kernel, of which all numbers change from call to call."""
    found = launches.get((case, *keys))
    if found is None:
        plan = plan_hopper_forward(case, *keys)
        found = launches[(case, *keys)] = plan, Launch(plan.spec, {})
    else:
        INFO.hits += 1
    return found


def planned(plans: Table, candidate, call):
    """A candidate's plan for a call, kept in `plans`."""
    key = (candidate.name, *call.key)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = candidate.plan(call)
    else:
        INFO.hits += 1
    return plan


def _numbers(call: Call, plan: Plan | HopperPlan, lists: BlockLists | None) -> dict[str, int | float]:
    """All that a forward kernel may take, by the names of parameters."""
    Z, Hq, Q_LEN, KV_LEN = call.extents
    group, case = call.geometry.numbers["GROUP_SIZE"], call.case
    kv_bytes = KV_LEN * (case.d_qk + case.d_v) * case.dtype.itemsize
    uneven = lists is not None and is_uneven(call.mask)
    at_a_time = enough_heads(Z * Hq // group, tiles_of_two(Q_LEN, group), lists is not None, uneven)
    heads = group * heads_per_group(Z * Hq // group, kv_bytes, at_a_time, UNEVEN_BYTES if uneven else L2_BYTES)
    return {
        **call.geometry.numbers,
        "HEADS": Z * Hq,
        "HEADS_PER_GROUP": max(heads, Z) if plan.spec.flag["BATCH_INSIDE"] else heads,
        **scales(call.scale, plan.scale_apart),
        **(lists.numbers() if lists else {}),
        **extra_numbers(case.extras, *call.extras),
    }


class Runner:
    """One forward kernel in calls of a kind.

    names      of the tensors that `run` gets and, behind them, of the lists' tables
    limit      bytes that its threads may spill; None: any number
    programs   how many run at once and take one tile after another; 0: each takes one
    """

    def __init__(
        self, plan: Plan | HopperPlan, launch: Launch, names: tuple[str, ...], extents: tuple, limit: float | None, programs: int = 0
    ) -> None:
        self.plan, self.launch, self.names, self.limit, self.programs, self.waits = plan, launch, names, limit, programs, True
        self.heads, self.length = extents[0] * extents[1], extents[2]
        self.raw = bool(plan.spec.flag.get("SUM_IS_RAW"))
        self.copies = getattr(plan, "copies", ())  # what a kernel for Hopper copies of what score_mod captures

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What `run` launches."""
        return (self.launch,)

    def run(
        self, tensors: list[torch.Tensor], addresses: list[int] | None, score: list | None, mask: list | None, lists: BlockLists | None
    ) -> None:
        """Fill the outputs among `tensors`. `addresses`: theirs, if all are aligned."""
        device, captured, again = tensors[0].device, mod_values(self.plan, score, mask), self.launch.again
        copied = [c.lying(score) for c in self.copies]
        if again and any(again.lying[c.name] != (t.shape, t.stride()) for c, t in zip(self.copies, copied, strict=True)):
            again = None  # descriptors on the short way are those of tensors that lie as others do
        if again and addresses is not None:
            if device.index != torch._C._cuda_getDevice():
                with torch.cuda.device(device):
                    self.run(tensors, addresses, score, mask, lists)
                return
            plain, tables, of_copied = plain_values(captured), lists.addresses if lists else (), plain_values(copied)
            if plain is not None and tables is not None and of_copied is not None:
                addresses += tables
                addresses += of_copied
                stream = torch._C._cuda_getCurrentRawStream(device.index)
                if self.programs:
                    addresses.append(counter(device, stream).data_ptr())
                again(stream, addresses, plain)
                return
        named = dict(zip(self.names, (*tensors, *(lists.tables if lists else ())), strict=True))
        named |= {c.name: t for c, t in zip(self.copies, copied, strict=True)}
        self.launch.waits = self.waits
        if self.programs:
            persistent(self.launch, named, captured, self._tiles(self.plan.tile, lists), self.limit, self.programs)
        else:
            launch_fitting(self.plan, lambda tile: self.launch.with_tile(tile, named, captured, (self._tiles(tile, lists),), device))

    def _tiles(self, tile, lists: BlockLists | None) -> int:
        return tiles_of(self.length, tile.BLOCK_M, lists, "q_block") * self.heads


def persistent(launch: Launch, tensors: dict[str, torch.Tensor], captured: list, tiles: int, limit: float | None, programs: int) -> None:
    """Launch a kernel whose programs count the tiles that are taken."""
    device = tensors["Q"].device
    with on(device):
        count = counter(device, torch._C._cuda_getCurrentRawStream(device.index))
        launch.if_usable({**tensors, "COUNTER": count}, captured, (min(tiles, programs),), device, limit)
