"""The driver of the backward kernels: from tensors, bound mods and grad_output to the gradients of q, k, v and captured tensors."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ..device.counters import held_counter
from ..device.devices import architecture_of, backend_of, multiprocessors, on
from ..mod.expr import INDEX_BOUND, ModGraph
from ..mod.nan import are_ordinary
from ..plan.backward import (
    STATS_ALIGNMENT,
    BackwardCase,
    BackwardGeometry,
    BackwardPlan,
    Step,
    backward_geometry,
    delta_rows,
    delta_unit,
    plan_backward,
    stats_copies,
    whole_blocks,
)
from ..plan.candidates import Choice, choose
from ..plan.forward import Mod, Options, scales, wants_tma
from ..plan.hopper_backward import L2_BYTES, HopperBackwardPlan, fits, plan_hopper_backward
from ..plan.hopper_forward import heads_per_group
from ..plan.tiles import Tile
from ..registry import INFO, Table
from ..text.mod_text import mod_values
from ..text.parameters import named_strides
from .block_lists import BlockLists, tiles_of
from .captured import Sums
from .forward import Rows, keys_of, planned, reached
from .launch import Launch, Unusable, launch_fitting
from .layouts import output_like, strides_like, with_rows

_plans: dict[tuple, BackwardPlan | HopperBackwardPlan] = Table("backward plans", 1024)
_refused: dict[tuple, str] = Table("backward kernels not used", 1024)  # that were compiled, and why
_ready: dict[tuple, TwoPass | Fused] = Table("backward calls", 1024)


class Call(NamedTuple):
    """A backward pass as the choice of its kernels sees it."""

    case: BackwardCase
    geometry: BackwardGeometry
    arch: str
    score: Mod | None
    mask: Mod | None

    @property
    def key(self) -> tuple:
        """What changes the kernels."""
        return self.case, self.arch, self.score, self.mask


class Details(NamedTuple):
    """What of a call beside tensors changes its kernels."""

    options: Options
    deterministic: bool
    lse_gradient: bool
    wanted: frozenset[int]  # captured tensors that want a gradient
    raw_tops: bool = False  # see BackwardCase
    ordinary: bool = True


class Portable:
    """backward_dkv and backward_dq, which serve any call, on any device."""

    name = "PORTABLE"

    def fits(self, call: Call) -> str | None:
        return None

    def worthwhile(self, call: Call) -> str | None:
        return None

    def prepare(self, call: Call, device: torch.device, sizes: Sizes, lists: BlockLists | None, transposed: BlockLists | None) -> TwoPass:
        plan = planned(_plans, self.name, call, lambda: plan_backward(call.case, backend_of(device.type), call.arch, call.score, call.mask))
        return TwoPass(plan, call, sizes, lists, transposed)


class Hopper:
    """hopper_backward, one kernel for all gradients, for sm_90 alone."""

    name = "HOPPER"

    def fits(self, call: Call) -> str | None:
        return fits(call.case, call.arch, call.score)

    def worthwhile(self, call: Call) -> str | None:
        return None

    def prepare(self, call: Call, device: torch.device, sizes: Sizes, lists: BlockLists | None, transposed: BlockLists | None) -> Fused:
        plan = planned(_plans, self.name, call, lambda: plan_hopper_backward(call.case, call.score, call.mask))
        return Fused(plan, call, sizes, lists, transposed)


CANDIDATES = Hopper(), Portable()


class Sizes(NamedTuple):
    """The sizes of a call, its scale, and the strides of out and dO."""

    extents: tuple[int, int, int, int]  # Z, Hq, Q_LEN, KV_LEN
    shared: tuple[int, int]  # Zkv, Hkv
    scale: float
    strides: dict[str, int]  # as backward_delta takes them

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
        }


class _Kernels:
    """The kernels of one pass in calls of a kind: all is decided but addresses and what mods capture."""

    def __init__(self, plan, call: Call, sizes: Sizes, lists: BlockLists | None, walked: int, copies: int) -> None:
        Q_LEN = sizes.extents[2]
        whole = math.lcm(STATS_ALIGNMENT, lists.q_block if lists else walked)  # backward_dkv walks whole query blocks
        self.stats_len = -(-Q_LEN // whole) * whole
        if lists and lists.starts is not None:
            self.stats_len += whole  # the last block may begin anywhere
        self.plan, self.sizes, self.copies = plan, sizes, copies
        self.key = call.key
        self.numbers = sizes.numbers(call, plan, self.stats_len)
        self.delta = Launch(plan.delta, {**self.numbers, **sizes.strides})
        self.delta_rows = delta_rows(call.case.d_v)

    def statistics(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Memory for what backward_delta leaves."""
        Z, Hq = self.sizes.extents[:2]
        return {
            "TOPS": torch.empty((Z, Hq, 2 * self.copies, self.stats_len), dtype=torch.float32, device=device),
            "DELTA": torch.empty((Z, Hq, self.copies, self.stats_len), dtype=torch.float32, device=device),
        }

    def describe_rows(self, tensors: dict[str, torch.Tensor]) -> None:
        """The rows' maxima, shares and delta, and for the fused kernel what it counts on."""
        Z, Hq = self.sizes.extents[:2]
        grid = (Z * Hq * self.stats_len // self.delta_rows,)
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

    def _launch(self, step: Step, lists: BlockLists | None, axis: str) -> Launch:
        return Launch(step.spec, {**self.numbers, **(lists.numbers(axis) if lists else {})})

    def run(self, tensors: dict[str, torch.Tensor], score, mask, lists: BlockLists | None, transposed: BlockLists | None) -> dict:
        """Fill DQ, DK and DV among `tensors`, which have the names of parameters; the gradients of captured tensors."""
        self.describe_rows(tensors)
        sums = Sums(tuple(step for step, *_ in self.passes), score, self.sizes.extents, tensors["Q"].device)
        for step, launch, axis, heads, length in self.passes:
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
            launch.with_tile(tile, {**tensors, **sums.tensors(step, tiles)}, captured, (tiles * heads,), device, keep=False)
            return
        for head in range(heads):
            given = {**tensors, **sums.tensors(step, tiles), "first_tile": head * tiles}
            launch.with_tile(tile, given, captured, (tiles,), device, keep=False)
            sums.add_slabs(step, divmod(head, self.sizes.extents[1]))


class Fused(_Kernels):
    """hopper_backward: a program for each multiprocessor, unless there are fewer tiles and blocks of dQ to finish."""

    name = Hopper.name

    def __init__(self, plan: HopperBackwardPlan, call: Call, sizes: Sizes, lists: BlockLists | None, transposed: BlockLists | None) -> None:
        super().__init__(plan, call, sizes, lists, 1, stats_copies(call.case))
        self.fused = Launch(plan.fused, {**self.numbers, **(transposed.numbers("q") if transposed else {})})

    def run(self, tensors: dict[str, torch.Tensor], score, mask, lists: BlockLists | None, transposed: BlockLists | None) -> dict:
        """As TwoPass.run. Raises Unusable."""
        Z, Hq, Q_LEN, KV_LEN = self.sizes.extents
        Zkv, Hkv = self.sizes.shared
        plan, device = self.plan, tensors["Q"].device
        sums = Sums((plan,), score, self.sizes.extents, device)
        tiles = tiles_of(KV_LEN, plan.tile.BLOCK_N, transposed, "kv_block")
        work = max(tiles * Zkv * Hkv, -(-Q_LEN // plan.fused.flag["DQ_ROWS"]) * Z * Hq)
        captured = mod_values(plan, score and score[1], mask and mask[1])
        given = {
            **tensors,
            **(transposed.tensors("q") if transposed else {}),
            **sums.tensors(plan, 2 * tiles),
            "DQ_SUM": torch.empty(tensors["Q"].shape, dtype=torch.float32, device=device),
            "DONE": torch.empty((2, Z, Hq), dtype=torch.int32, device=device),
        }
        with on(device), held_counter(device, torch._C._cuda_getCurrentRawStream(device.index)) as count:
            given["COUNTER"] = count
            self.describe_rows(given)
            self.fused.if_usable(given, captured, min(work, multiprocessors(device)), device, math.inf, keep=False)
        return sums.gradients()


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    rows: Rows,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    score: tuple[ModGraph, list] | None,
    mask: tuple[ModGraph, list] | None,
    lists: BlockLists | None,
    transposed: BlockLists | None,
    options: Options,
    *,
    wanted: frozenset[int] = frozenset(),
    deterministic: bool = False,
):
    """dq, dk, dv (shaped, typed and laid out as q, k, v) and {index of a captured tensor of score_mod in `wanted`: its gradient}.

    out, rows      what the forward pass returned      do, dlse   gradients of out and lse; dlse may be None
    lists          block lists of the forward pass     transposed the lists of query blocks for each KV block, in the same fields
    """
    q, k, v, do = map(with_rows, (q, k, v, do))
    dq, dk, dv = output_like(q, q.shape[3]), output_like(k, k.shape[3]), output_like(v, v.shape[3])
    if out.numel() == 0 or v.shape[2] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), {i: torch.zeros_like(score[1][i]) for i in wanted}

    keys = keys_of(score, mask, reached((*q.shape[:3], k.shape[2]), lists))
    ordinary = score is None or are_ordinary(score[1][len(score[0].tensors) :])
    details = Details(options, deterministic, dlse is not None, wanted, rows.raw, ordinary)
    layouts = tuple([(t.shape, t.stride(), t.data_ptr() % 16) for t in (q, k, v, do)])
    structures = lists and lists.structure, transposed and transposed.structure
    kind = (q.device, q.dtype, layouts, out.stride(), scale, details, *keys, *structures)
    tensors = {"Q": q, "K": k, "V": v, "O": out, "DO": do, "ROWS": rows.values, "DQ": dq, "DK": dk, "DV": dv}
    if dlse is not None:
        tensors["DLSE"] = dlse.contiguous()
    while True:  # until kernels are usable
        ready = _ready.get(kind)
        if ready is None:
            ready = _ready[kind] = _decide(q, k, v, out, do, scale, keys, lists, transposed, details)
        else:
            INFO.hits += 1
        try:
            gradients = ready.run({**tensors, **ready.statistics(q.device)}, score, mask, lists, transposed)
            return dq, dk, dv, gradients
        except Unusable as why:
            _refused[(ready.name, *ready.key)] = str(why)
            _ready.clear()  # others of this case have other lengths


def _decide(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    do: torch.Tensor,
    scale: float,
    keys: tuple[Mod | None, Mod | None],
    lists: BlockLists | None,
    transposed: BlockLists | None,
    details: Details,
) -> TwoPass | Fused:
    """All that does not depend on addresses."""
    choice, call = choice_of(q, k, v, do, scale, keys, lists, details)
    unit = delta_unit(call.case)
    strides = {}
    for name, t in (("o", out), ("do", do)):
        strides |= named_strides(name, "zhm", (stride // unit if n > 1 else 0 for stride, n in zip(t.stride(), t.shape, strict=True)))
    sizes = Sizes((*q.shape[:3], k.shape[2]), tuple(k.shape[:2]), scale, strides)
    return choice.candidate.prepare(call, q.device, sizes, lists, transposed)


def choice_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    scale: float,
    keys: tuple[Mod | None, Mod | None],
    lists: BlockLists | None,
    details: Details,
) -> tuple[Choice, Call]:
    """Which kernels serve a backward pass, and what is known of that. A BACKEND that does not fit is no error here."""
    options = details.options
    shapes = tuple(t.shape for t in (q, k, v, do, q, k, v))  # and dq, dk and dv
    strides = (*(t.stride() for t in (q, k, v, do)), *(strides_like(t, t.shape[3]) for t in (q, k, v)))
    geometry = backward_geometry(q.element_size(), shapes, strides)
    arch = architecture_of(q.device)
    tma = wants_tma(options, q.dtype, arch) and backend_of(q.device.type) != "cpu"
    use_tma = tuple(
        tma and possible and all(t.data_ptr() % 16 == 0 for t in pair)
        for possible, pair in zip(geometry.tma, ((k, v), (q, do)), strict=True)
    )
    blocks = lists and lists.blocks
    case = BackwardCase(
        q.dtype,
        q.shape[3],
        v.shape[3],
        geometry.aligned,
        use_tma,
        blocks,
        options,
        scale > 0,
        exact_indices=max(q.shape[2], k.shape[2]) <= INDEX_BOUND,
        one_batch=q.shape[0] == 1,
        one_head=q.shape[1] == 1,
        deterministic=details.deterministic,
        lse_gradient=details.lse_gradient,
        captured=details.wanted,
        ordinary=details.ordinary,
        raw_tops=details.raw_tops,
        whole=whole_blocks(q.shape[2], k.shape[2], blocks),
    )
    call = Call(case, geometry, arch, *keys)
    named = options.backend if options.backend == Portable.name else None
    return choose(CANDIDATES, call, named, _refused), call
