"""The driver of the forward kernels: from tensors and bound mods to a kernel, a grid and arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..device.arguments import plain_values
from ..device.counters import counter
from ..device.devices import architecture_of, backend_of, multiprocessors, on
from ..mod.expr import INDEX_BOUND, ModGraph
from ..mod.tensors import check_kind
from ..plan import hopper_forward
from ..plan.candidates import Choice, choose
from ..plan.forward import ForwardCase, Geometry, Mod, Options, Plan, geometry_of, plan_forward, scales, wants_tma
from ..plan.hopper_forward import SPILL_LIMIT, HopperPlan, fits, heads_per_group, plan_hopper_forward
from ..registry import INFO, Table
from ..text.layouts import LARGEST_BLOCK_N, layouts_of
from ..text.mod_text import mod_values
from . import decode
from .block_lists import BlockLists, tiles_of
from .launch import Launch, Unusable, launch_fitting
from .layouts import output_like, strides_like


class Rows(NamedTuple):
    """What the backward pass needs of every row.

    values   float32 (Z, Hq, Q_LEN, 2): the largest score, and log2 of its weight. lse cannot say both: beside a score of 1e9 the logarithm
             of a sum is lost
    raw      the scores of a score_mod are still without scale
    """

    values: torch.Tensor
    raw: bool


class Inputs:
    """Stands in keys for the shapes, strides, dtypes and devices of q, k and v, which are checked. Equal ones have one object, so that it
    is hashed and compared by identity."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor) -> None:
        self.extents = (*q.shape[:3], k.shape[2])  # Z, Hq, Q_LEN, KV_LEN
        self.head_dim, self.device = q.shape[3], q.device
        self.scale = self.head_dim**-0.5  # where the user gives none


class Call(NamedTuple):
    """A call as the choice of its kernel sees it: sizes, strides and structure; no address, and nothing of what lists hold."""

    case: ForwardCase
    geometry: Geometry
    extents: tuple[int, int, int, int]  # Z, Hq, Q_LEN, KV_LEN
    device: torch.device
    arch: str
    aligned: bool  # the addresses of q, k and v are multiples of 16 bytes
    scale: float
    score: Mod | None
    mask: Mod | None

    @property
    def key(self) -> tuple:
        """What changes the kernels."""
        return self.case, self.arch, self.score, self.mask


class Portable:
    """The forward kernel that serves any call, on any device."""

    name = "PORTABLE"

    def fits(self, call: Call) -> str | None:
        return None

    def worthwhile(self, call: Call) -> str | None:
        return None

    def prepare(self, call: Call, tensors: dict[str, torch.Tensor], lists: BlockLists | None) -> Runner:
        plan = planned(
            _plans, self.name, call, lambda: plan_forward(call.case, backend_of(call.device.type), call.arch, call.score, call.mask)
        )
        return Runner(plan, _numbers(call, plan, lists), call.extents, None)


class Hopper:
    """The one for sm_90 alone."""

    name = "HOPPER"

    def fits(self, call: Call) -> str | None:
        return fits(call.case, call.geometry, call.arch, call.aligned)

    def worthwhile(self, call: Call) -> str | None:
        Z, Hq, Q_LEN, _ = call.extents
        return worthwhile(Q_LEN, Z * Hq, multiprocessors(call.device))

    def prepare(self, call: Call, tensors: dict[str, torch.Tensor], lists: BlockLists | None) -> Runner:
        plan = planned(_plans, self.name, call, lambda: plan_hopper_forward(call.case, call.score, call.mask))
        limit = None if call.case.options.backend == self.name else SPILL_LIMIT
        return Runner(plan, _numbers(call, plan, lists), call.extents, limit, multiprocessors(call.device))


class Decode:
    """The kernels for few queries, which split the keys of a row."""

    name = "DECODE"

    def fits(self, call: Call) -> str | None:
        return decode.refuses(call.extents[2], call.case.options)

    def worthwhile(self, call: Call) -> str | None:
        return decode.worthwhile(call.extents[3])

    def prepare(self, call: Call, tensors: dict[str, torch.Tensor], lists: BlockLists | None) -> decode.Prepared:
        case, keys = call.case, (call.score, call.mask)
        outputs = {"output_max": case.output_max, "output_rows": case.output_rows}
        return decode.prepare(tensors, call.scale, keys, lists, case.options.float32_precision, decode.NOT_CACHED, **outputs)


worthwhile = hopper_forward.worthwhile
CANDIDATES = Decode(), Hopper(), Portable()

_plans: dict[tuple, Plan | HopperPlan] = Table("forward plans", 1024)
_refused: dict[tuple, str] = Table("forward kernels not used", 1024)  # that were compiled, and why
_ready: dict[tuple, Ready] = Table("forward calls", 1024)


def planned(plans: Table, name: str, call, make: Callable):
    """A candidate's plan for a call, as `make` gives it, kept in `plans`."""
    key = (name, *call.key)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = make()
    else:
        INFO.hits += 1
    return plan


def _numbers(call: Call, plan: Plan | HopperPlan, lists: BlockLists | None) -> dict[str, int | float]:
    """All that a forward kernel may take, by the names of parameters."""
    Z, Hq, _, KV_LEN = call.extents
    group, case = call.geometry.numbers["GROUP_SIZE"], call.case
    kv_bytes = KV_LEN * (case.d_qk + case.d_v) * case.dtype.itemsize // group
    return {
        **call.geometry.numbers,
        "HEADS": Z * Hq,
        "HEADS_PER_GROUP": heads_per_group(Z * Hq, kv_bytes),
        **scales(call.scale, plan.scale_apart),
        **(lists.numbers() if lists else {}),
    }


class Runner:
    """One forward kernel in calls of a kind.

    limit      bytes that its threads may spill; None: any number
    programs   how many run at once and take one tile after another; 0: each takes one
    """

    def __init__(
        self, plan: Plan | HopperPlan, numbers: dict[str, int | float], extents: tuple, limit: float | None, programs: int = 0
    ) -> None:
        self.plan, self.limit, self.programs = plan, limit, programs
        self.heads, self.length = extents[0] * extents[1], extents[2]
        self.launch = Launch(plan.spec, numbers)
        self.raw = bool(plan.spec.flag.get("SUM_IS_RAW"))

    def run(
        self,
        tensors: dict[str, torch.Tensor],
        addresses: dict[str, int] | None,
        score: list | None,
        mask: list | None,
        lists: BlockLists | None,
    ) -> None:
        """Fill the outputs among `tensors`, which have the names of parameters. `addresses`: theirs, if all are aligned."""
        device, captured = tensors["Q"].device, mod_values(self.plan, score, mask)
        if self.launch.function and addresses is not None:
            plain, tables = plain_values(captured), lists.addresses if lists else {}
            if plain is not None and tables is not None:
                addresses.update(tables)
                with on(device):
                    stream = torch._C._cuda_getCurrentRawStream(device.index)
                    if self.programs:
                        addresses["COUNTER"] = counter(device, stream).data_ptr()
                    self.launch.again(tensors, addresses, plain, stream)
                return
        if lists:
            tensors = {**tensors, **lists.tensors()}
        if self.programs:
            persistent(self.launch, tensors, captured, self._tiles(self.plan.tile, lists), self.limit, self.programs)
        else:
            launch_fitting(self.plan, lambda tile: self.launch.with_tile(tile, tensors, captured, (self._tiles(tile, lists),), device))

    def _tiles(self, tile, lists: BlockLists | None) -> int:
        return tiles_of(self.length, tile.BLOCK_M, lists, "q_block") * self.heads


def persistent(launch: Launch, tensors: dict[str, torch.Tensor], captured: list, tiles: int, limit: float | None, programs: int) -> None:
    """Launch a kernel whose programs count the tiles that are taken."""
    device = tensors["Q"].device
    with on(device):
        count = counter(device, torch._C._cuda_getCurrentRawStream(device.index))
        launch.if_usable({**tensors, "COUNTER": count}, captured, min(tiles, programs), device, limit)


class Ready:
    """What is decided of calls of a kind: the kernels, and how their outputs lie in memory."""

    def __init__(self, choice: Choice, call: Call, tensors: dict[str, torch.Tensor], lists: BlockLists | None) -> None:
        self.refusal = (choice.candidate.name, *call.key)
        self.runner = choice.candidate.prepare(call, tensors, lists)
        self.new_out, self.new_stats = (
            functools.partial(torch.empty_strided, tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device)
            for t in (tensors["O"], tensors["LSE"])
        )
        self.new_rows = functools.partial(torch.empty, (*tensors["LSE"].shape, 2), dtype=torch.float32, device=call.device)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Inputs,
    scale: float,
    score: tuple[ModGraph, list] | None,
    mask: tuple[ModGraph, list] | None,
    lists: BlockLists | None,
    options: Options,
    *,
    output_max: bool = False,
    output_rows: bool = False,
):
    """out (Z, Hq, Q_LEN, D_V), lse float32 (Z, Hq, Q_LEN), max_scores (the same, or None) and Rows (or None). Arguments are checked
    already.

    `mask` is the mask_mod of the partial blocks in `lists`; both None for dense attention.
    """
    score_key, mask_key = keys_of(score, mask, reached(inputs.extents, lists))
    k_at, v_at, q_at = k.data_ptr(), v.data_ptr(), q.data_ptr()
    kv_beside, q_beside = (k_at | v_at) % 16, q_at % 16  # 0 for what TMA can load
    key = (inputs, kv_beside, q_beside, scale, score_key, mask_key, lists and lists.structure, options, output_max, output_rows)
    ready = _ready.get(key)
    if ready is not None and k_at and v_at and q_at:
        INFO.hits += 1
    else:
        if 0 in (*inputs.extents, v.shape[3]):
            return _nothing(q, v, output_max, output_rows)
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            if tensor.data_ptr() == 0:  # of a kind that looks as others do
                check_kind(name, tensor)
        ready = _ready[key] = _decide(q, k, v, scale, (score_key, mask_key), lists, options, output_max, output_rows)
    out, lse, max_scores, rows = ready.new_out(), ready.new_stats(), None, None
    tensors = {"K": k, "V": v, "Q": q, "O": out, "LSE": lse}
    addresses = {"K": k_at, "V": v_at, "Q": q_at, "O": out.data_ptr(), "LSE": lse.data_ptr()}
    if output_max:
        max_scores = tensors["MAX"] = ready.new_stats()
        addresses["MAX"] = max_scores.data_ptr()
    if output_rows:
        rows = Rows(ready.new_rows(), ready.runner.raw)
        tensors["ROWS"], addresses["ROWS"] = rows.values, rows.values.data_ptr()
    try:
        ready.runner.run(tensors, None if kv_beside or q_beside else addresses, score and score[1], mask and mask[1], lists)
    except Unusable as why:
        _refused[ready.refusal] = str(why)
        _ready.clear()  # others of this case have other lengths
        return forward(q, k, v, inputs, scale, score, mask, lists, options, output_max=output_max, output_rows=output_rows)
    return out, lse, max_scores, rows


def _nothing(q: torch.Tensor, v: torch.Tensor, output_max: bool, output_rows: bool):
    """What `forward` returns where there are no queries, no keys, or no columns."""
    out, lse = output_like(q, v.shape[3]).zero_(), torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
    rows = torch.empty((*lse.shape, 2), dtype=torch.float32, device=q.device)
    return out, lse, lse.clone() if output_max else None, Rows(rows, False) if output_rows else None


def _decide(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    keys: tuple[Mod | None, Mod | None],
    lists: BlockLists | None,
    options: Options,
    output_max: bool,
    output_rows: bool,
) -> Ready:
    choice, call = choice_of(q, k, v, scale, keys, lists, options, output_max, output_rows)
    tensors = {
        "K": k,
        "V": v,
        "Q": q,
        "O": output_like(q, v.shape[3]),
        "LSE": torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
    }
    return Ready(choice, call, tensors, lists)


def choice_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    keys: tuple[Mod | None, Mod | None],
    lists: BlockLists | None,
    options: Options,
    output_max: bool = False,
    output_rows: bool = False,
) -> tuple[Choice, Call]:
    """Which kernel serves a call, and what is known of that. Raises ValueError if the one that the user asks for does not fit."""
    geometry = geometry_of(q.element_size(), (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), strides_like(q, v.shape[3]))
    arch = architecture_of(q.device)
    aligned = (k.data_ptr() | v.data_ptr()) % 16 == 0
    case = ForwardCase(
        q.dtype,
        q.shape[3],
        v.shape[3],
        geometry.units,
        geometry.aligned,
        geometry.tma and wants_tma(options, q.dtype, arch) and aligned,
        lists and lists.blocks,
        options,
        scale > 0,
        output_max,
        output_rows,
        max(q.shape[2], k.shape[2]) <= INDEX_BOUND,
    )
    aligned = aligned and q.data_ptr() % 16 == 0
    call = Call(case, geometry, (*q.shape[:3], k.shape[2]), q.device, arch, aligned, scale, *keys)
    return choose(CANDIDATES, call, options.backend, _refused), call


def reached(extents: tuple[int, int, int, int], lists: BlockLists | None) -> tuple[int, int, int, int]:
    """How far a kernel's b, h, q_idx and kv_idx may reach: extents (Z, Hq, Q_LEN, KV_LEN), but past KV_LEN to the end of the last block,
    or of one that begins anywhere."""
    if lists is None or (lists.starts is None and LARGEST_BLOCK_N % lists.kv_block == 0):  # to which layouts_of rounds up anyway
        return extents
    if lists.starts is None:
        return *extents[:3], -(-extents[3] // lists.kv_block) * lists.kv_block
    return *extents[:3], extents[3] + lists.kv_block - 1


def keys_of(score: tuple | None, mask: tuple | None, extents: tuple[int, int, int, int]) -> tuple[tuple | None, tuple | None]:
    """What of bound mods changes a kernel."""
    return score and (score[0], layouts_of(*score, extents)), mask and (mask[0], layouts_of(*mask, extents))
