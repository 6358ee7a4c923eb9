"""The drivers of the kernels of tangents: from a bound call and a direction to the tangents of its outputs, or of its gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.cpp import CppKernel
from ..device.cpp_compiler import by_either
from ..device.devices import architecture_of, backend_of
from ..device.kernel import kernel_for
from ..gpus import WIDEST_TILE
from ..mod.expr import ModGraph
from ..plan.backward import Step
from ..plan.cpu import CpuBackwardPlan, CpuPlan
from ..plan.cpu_tangent import plan_cpu_gradients, plan_cpu_tangent
from ..plan.extras import dropout_numbers
from ..plan.forward import are_exact, scales
from ..plan.tangent import Moved, TangentCase, TangentGeometry, moved, plan_gradients, plan_tangent, strides, tangent_geometry
from ..plan.tiles import Tile
from ..registry import Table
from ..text.layouts import layouts_of
from ..text.mod_text import mod_values
from .backward_kernels import Walk, launch_gathering
from .block_lists import BlockLists, tiles_of
from .call import Bound, keys_of, reached, structure_of
from .captured import Sums
from .cpu_backward import Buffers, parted
from .forward import nothing
from .launch import Launch, launch_fitting
from .layouts import output_like, with_rows

_plans: dict[tuple, Step | tuple[Step, Step] | CpuPlan | CpuBackwardPlan] = Table("plans of tangents", 1024)


class Direction(NamedTuple):
    """What q, k, v and the tensors that score_mod captures change by, shaped and typed as they are; None is 0."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    captured: tuple[torch.Tensor | None, ...] = ()


class Outputs(NamedTuple):
    """What a forward pass returns, and the tangents of out and lse. max_scores, rows: None where they are not asked for; rows as in Rows,
    not raw."""

    out: torch.Tensor
    lse: torch.Tensor
    out_tangent: torch.Tensor
    lse_tangent: torch.Tensor
    max_scores: torch.Tensor | None = None
    rows: torch.Tensor | None = None


def tangent(bound: Bound, direction: Direction, *, output_max: bool = False, output_rows: bool = False) -> Outputs:
    """out, lse and what they change by in a direction, in one pass. Raises NotImplementedError for head dims beyond 256."""
    _check_served(bound)
    if 0 in (*bound.inputs.extents, bound.v.shape[3]):
        return _nothing(bound, output_max, output_rows)
    return _Pass(bound, direction, output_max=output_max, output_rows=output_rows).outputs()


def gradient_tangents(
    bound: Bound, direction: Direction, do: torch.Tensor, dlse: torch.Tensor | None, *, wanted: frozenset[int], deterministic: bool
):
    """What the gradients of a loss change by in a direction: those of q, k and v, {index of a captured tensor in `wanted`: that of it}, and
    the tangents of out and lse.

    do, dlse   gradients of the loss in out and lse, which do not change; dlse may be None
    """
    _check_served(bound)
    q, k, v, _, _, score = bound[:6]
    if 0 in (*bound.inputs.extents, v.shape[3]):
        of_captured = {i: torch.zeros_like(score[1][i]) for i in wanted}
        found = _nothing(bound, False, False)
        return *(output_like(t, t.shape[3]).zero_() for t in (q, k, v)), of_captured, found.out_tangent, found.lse_tangent
    direction = Direction(*(_zeros(d, t) for d, t in zip(direction[:3], (q, k, v), strict=True)), direction.captured)
    details = {"do": do, "dlse": dlse, "wanted": wanted, "deterministic": deterministic}
    second = _Pass(bound, direction, statistics=True, **details)
    found = second.outputs()
    return *second.gradients(), found.out_tangent, found.lse_tangent


def _check_served(bound: Bound) -> None:
    for name, tensor in (("query", bound.q), ("value", bound.v)):
        if tensor.shape[3] > WIDEST_TILE:
            raise NotImplementedError(
                f"{name} has head_dim {tensor.shape[3]} (shape {tuple(tensor.shape)}); forward mode and second derivatives have kernels up "
                f"to {WIDEST_TILE}"
            )


def _zeros(tangent: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tangent is None else tangent


def _nothing(bound: Bound, output_max: bool, output_rows: bool) -> Outputs:
    """Where there are no queries, no keys, or no columns."""
    out, lse, max_scores, rows = nothing(bound, output_max, output_rows)
    return Outputs(out, lse, torch.zeros_like(out), torch.zeros_like(lse), max_scores, rows and rows.values)


def with_tangents(
    case: TangentCase, score: tuple[ModGraph, list] | None, tangents: tuple[torch.Tensor | None, ...], extents: tuple
) -> tuple[Moved | None, list]:
    """A bound score_mod with the tangents of its tensors, and all that it captures then. extents: how far indices reach."""
    if score is None:
        return None, []
    graph, values = score
    found, count = moved(case, graph), len(graph.tensors)
    values = [*values[:count], *(t for t in tangents if t is not None), *values[count:]]
    return Moved(found, (found.graph, layouts_of(found.graph, values, extents))), values


def geometry_of(tensors: dict[str, torch.Tensor]) -> TangentGeometry:
    """The strides of tensors by name, as kernels take them."""
    return tangent_geometry(tensors["q"].element_size(), tuple((name, t.shape, t.stride()) for name, t in tensors.items()))


class _Pass:
    """One call in one direction: its tensors by the names of parameters, and what changes its kernels."""

    def __init__(
        self,
        bound: Bound,
        direction: Direction,
        *,
        output_max: bool = False,
        output_rows: bool = False,
        statistics: bool = False,
        do: torch.Tensor | None = None,
        dlse: torch.Tensor | None = None,
        wanted: frozenset[int] = frozenset(),
        deterministic: bool = False,
    ) -> None:
        q, k, v = map(with_rows, (bound.q, bound.k, bound.v))
        (Z, Hq, Q_LEN, _), (Zkv, Hkv, KV_LEN, _), lists = q.shape, k.shape, bound.lists
        self.bound, self.device, self.extents, self.shared = bound, q.device, (Z, Hq, Q_LEN, KV_LEN), (Zkv, Hkv)
        inputs = {"q": q, "k": k, "v": v, "qt": direction.q, "kt": direction.k, "vt": direction.v, "do": do}
        inputs = {name: with_rows(t) for name, t in inputs.items() if t is not None}
        self.outs = {"o": output_like(q, v.shape[3]), "ot": output_like(q, v.shape[3])}
        self.grads = {f"d{name}": output_like(t, t.shape[3]) for name, t in (("q", q), ("k", k), ("v", v))} if statistics else {}
        named = {**inputs, **self.outs, **self.grads}
        geometry = geometry_of(named)
        tangents = direction.captured or (None,) * len(bound.captured)
        self.case = TangentCase(
            q.dtype,
            q.shape[3],
            v.shape[3],
            geometry.aligned,
            lists and lists.blocks,
            bound.options.float32_precision,
            are_exact(Q_LEN, KV_LEN, lists and lists.blocks),
            tuple(t is not None for t in direction[:3]),
            frozenset(i for i, t in enumerate(tangents) if t is not None),
            output_max,
            output_rows,
            statistics,
            dlse is not None,
            wanted,
            Z == 1,
            Hq == 1,
            deterministic,
            structure_of(bound.extras),
        )
        _, self.mask = keys_of(None, bound.mask, self.extents, lists)
        self.score, self.values = with_tangents(self.case, bound.score, tangents, reached(self.extents, lists))
        self.machine = backend_of(q.device.type), architecture_of(q.device)
        self.tensors = {name.upper(): t for name, t in named.items()}
        self.tensors |= self._statistics(dlse) | (bound.extras.named if bound.extras else {})
        sizes = {"Z": Z, "Hq": Hq, "Zkv": Zkv, "Hkv": Hkv, "GROUP_SIZE": Hq // Hkv, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
        self.numbers = {**geometry.strides, **sizes, **scales(bound.scale, True)}
        self.numbers |= dropout_numbers(bound.extras.dropout_p) if bound.extras else {}

    def _statistics(self, dlse: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Numbers of every row that kernels write, and the gradient of lse."""
        case, rows = self.case, self.extents[:3]
        shapes = {"LSE": rows, "LSET": rows}
        shapes |= {"MAX": rows} if case.output_max else {}
        shapes |= {"ROWS": (*rows, 2)} if case.output_rows else {}
        shapes |= {"STATS": (*rows[:2], 5, rows[2])} if case.statistics else {}
        made = {name: torch.empty(shape, dtype=torch.float32, device=self.device) for name, shape in shapes.items()}
        return made | ({"DLSE": dlse.contiguous()} if dlse is not None else {})

    def _planned(self, plan):
        key = plan.__name__, self.case, self.machine, self.score, self.mask
        found = _plans.get(key)
        if found is None:
            found = _plans[key] = plan(self.case, *self.machine, self.score, self.mask)
        return found

    def _launch(self, step: Step, lists: BlockLists | None, axis: str = "kv") -> Launch:
        return Launch(step.spec, {**self.numbers, **(lists.numbers(axis) if lists else {})})

    def _captured(self, step: Step | CpuPlan | CpuBackwardPlan) -> list:
        mask = self.bound.mask
        return mod_values(step, self.values if self.score else None, mask and mask[1])

    def outputs(self) -> Outputs:
        """The forward pass."""
        by_either(lambda in_cpp: self._attend_in_cpp() if in_cpp else self._attend(), self.device, self.bound.options.backend)
        t = self.tensors
        return Outputs(t["O"], t["LSE"], t["OT"], t["LSET"], t.get("MAX"), t.get("ROWS"))

    def _attend_in_cpp(self) -> None:
        self._call_in_cpp(self._planned_in_cpp(plan_cpu_tangent), {})

    def _planned_in_cpp(self, plan):
        key = plan.__name__, self.case, self.score, self.mask
        found = _plans.get(key)
        if found is None:
            found = _plans[key] = plan(self.case._replace(aligned=()), self.score, self.mask)
        return found

    def _call_in_cpp(self, plan: CpuPlan | CpuBackwardPlan, more: dict[str, object], threads: int | None = None) -> None:
        lists = self.bound.lists
        captured = [p.name for m in plan.spec.mods if m for p in m.parameters]
        given = {**self.numbers, **self.tensors, **dict(zip(captured, self._captured(plan), strict=True)), **more}
        for name, tensor in self.tensors.items():
            if tensor.dim() == 4:
                given |= dict(zip(strides(name.lower()), tensor.stride(), strict=False))  # all but the last one, which is 1
        kernel_for(plan.spec, CppKernel).call({**given, **({**lists.tensors(), **lists.numbers()} if lists else {})}, threads)

    def _attend(self) -> None:
        lists, step = self.bound.lists, self._planned(plan_tangent)
        launch, given = self._launch(step, lists), {**self.tensors, **(lists.tensors() if lists else {})}
        Z, Hq, Q_LEN, _ = self.extents

        def with_tile(tile: Tile) -> None:
            grid = (tiles_of(Q_LEN, tile.BLOCK_M, lists, "q_block") * Z * Hq,)
            launch.with_tile(tile, given, self._captured(step), grid, self.device)

        launch_fitting(step, with_tile)

    def gradients(self) -> tuple:
        """The backward pass, behind `outputs`: dq, dk, dv and those of captured tensors."""
        found = by_either(
            lambda in_cpp: self._differentiate_in_cpp() if in_cpp else self._differentiate(), self.device, self.bound.options.backend
        )
        of_captured = {i: found[i] if i in found else torch.zeros_like(self.values[i]) for i in self.case.wanted}
        return *self.grads.values(), of_captured

    def _differentiate_in_cpp(self) -> dict[int, torch.Tensor]:
        plan, lists = self._planned_in_cpp(plan_cpu_gradients), self.bound.lists
        parting = parted(self.extents, self.shared, (self.case.d_qk, self.case.d_v), lists)
        score = self.score and (self.score.mod[0], self.values)
        sums = Sums((plan,), score, self.extents, self.device, lists)
        buffers = Buffers(plan, parting, sums)
        self._call_in_cpp(plan, {**parting.numbers, **buffers.named}, threads=1 if buffers.one_copy else None)
        buffers.add_up()
        return sums.gradients()

    def _differentiate(self) -> dict[int, torch.Tensor]:
        (Z, Hq, Q_LEN, KV_LEN), (Zkv, Hkv), bound = self.extents, self.shared, self.bound
        dkv, dq = self._planned(plan_gradients)
        score = self.score and (self.score.mod[0], self.values)
        sums = Sums((dkv, dq), score, self.extents, self.device, bound.lists)
        transposed = bound.transposed(bound.mask) if bound.transposed else None
        for step, lists, axis, heads, length in ((dkv, transposed, "q", Zkv * Hkv, KV_LEN), (dq, bound.lists, "kv", Z * Hq, Q_LEN)):
            walk = Walk(step, self._launch(step, lists, axis), axis, heads, length)
            given = {**self.tensors, **(lists.tensors(axis) if lists else {})}
            launch_gathering(walk, lists, given, self._captured(step), sums, self.device)
        return sums.gradients()
