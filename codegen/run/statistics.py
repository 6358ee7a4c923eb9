"""The driver of the kernels that look at the probabilities: entropy and top index of each row, sums of columns."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from ..device.cpp import CppKernel
from ..device.cpp_compiler import by_either
from ..device.devices import architecture_of, backend_of
from ..device.kernel import kernel_for
from ..device.memory import contiguous
from ..plan.cpu import BLOCK_M, TASKS, CpuPlan
from ..plan.cpu_statistics import plan_cpu_statistics
from ..plan.extras import ORDINARY, Extras
from ..plan.forward import Blocks, Options, Plan, are_exact, scales
from ..plan.geometry import Geometry, geometry_of
from ..plan.statistics import StatisticsCase, plan_columns, plan_rows
from ..registry import INFO, Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists, tiles_of
from .call import Bound, keys_of, structure_of
from .cpu_decode import in_elements
from .launch import Launch, Unlaunched, launch_fitting, launch_nothing
from .layouts import strides_like
from .masks import automatic_lists
from .profiled import in_range, is_profiled, names_of


class Wanted(NamedTuple):
    """Which statistics of the probabilities are wanted."""

    entropy: bool = False
    top_index: bool = False
    column_sums: bool = False


class Statistics(NamedTuple):
    """entropy float32 and top_index int64 (Z, Hq, Q_LEN), column_sums float32 (Z, Hq, KV_LEN); None for what is not wanted."""

    entropy: torch.Tensor | None = None
    top_index: torch.Tensor | None = None
    column_sums: torch.Tensor | None = None


class _Pass(NamedTuple):
    """One kernel in calls of a kind: all is decided but addresses and what mods capture."""

    plan: Plan
    launch: Launch


_passes: dict[tuple, _Pass] = Table("passes over probabilities", 256)
_plans: dict[tuple, CpuPlan] = Table("plans of passes over probabilities in C++", 256)


def statistics(bound: Bound, wanted: Wanted, *, launches: bool = True) -> Statistics:
    """What is wanted of a call's probabilities: by one pass over K, and for column sums one more over Q. launches: else kernels are
    compiled, and nothing is computed."""
    (Z, Hq, Q_LEN, KV_LEN), device = bound.inputs.extents, bound.q.device
    bound = _with_even_blocks(bound)
    found = Statistics(
        contiguous((Z, Hq, Q_LEN), torch.float32, device) if wanted.entropy else None,
        contiguous((Z, Hq, Q_LEN), torch.int64, device) if wanted.top_index else None,
        contiguous((Z, Hq, KV_LEN), torch.float32, device) if wanted.column_sums else None,
    )
    if 0 in (Z, Hq, Q_LEN, KV_LEN, bound.q.shape[3]):
        return Statistics(*(t if t is None else t.fill_(of_nothing) for t, of_nothing in zip(found, (0.0, -1, 0.0), strict=True)))
    rows = contiguous((Z, Hq, Q_LEN, 2), torch.float32, device) if wanted.column_sums else None
    named = {
        "K": bound.k,
        "Q": bound.q,
        "ENTROPIES": found.entropy,
        "TOP_INDICES": found.top_index,
        "ROWS": rows,
        "SUMS": found.column_sums,
        "SINKS": bound.extras and bound.extras.sinks,
    }
    run = _by_either if not is_profiled() else in_range(_by_either, "statistics", names_of(bound.score, bound.mask))
    run(bound, wanted, {name: t for name, t in named.items() if t is not None}, launches)
    return found


def _with_even_blocks(bound: Bound) -> Bound:
    """The call, without blocks that begin where packed sequences do: these kernels know none."""
    if bound.lists is None or bound.lists.starts is None:
        return bound
    size = bound.lists.q_block, bound.lists.kv_block
    make = partial(automatic_lists, extents=bound.inputs.extents, device=bound.q.device, size=size)
    return bound._replace(lists=make(bound.mask), transposed=partial(make, transposed=True))


def _by_either(bound: Bound, wanted: Wanted, tensors: dict[str, torch.Tensor], launches: bool) -> None:
    device, named = bound.q.device, bound.options.backend
    by_either(lambda in_cpp: (_run_in_cpp if in_cpp else _run)(bound, wanted, tensors, launches), device, named)


def _run_in_cpp(bound: Bound, wanted: Wanted, tensors: dict[str, torch.Tensor], launches: bool) -> None:
    """As `_run`, in one pass over tiles that looks at rows and then at columns."""
    lists, (Z, Hq, Q_LEN, KV_LEN) = bound.lists, bound.inputs.extents
    case, geometry = case_of((bound.q, bound.k), lists and lists.blocks, bound.options, wanted, structure_of(bound.extras))
    keys = keys_of(bound.score, bound.mask, bound.inputs.extents, lists)
    plan = _plans.get((case, *keys))
    if plan is None:
        plan = _plans[(case, *keys)] = plan_cpu_statistics(case, *keys)
    tiles = tiles_of(Q_LEN, BLOCK_M, lists, "q_block")
    parts = max(1, min(tiles, -(-TASKS // (Z * Hq))))
    sums = torch.zeros((parts, Z, Hq, KV_LEN), dtype=torch.float32, device="cpu") if wanted.column_sums else None
    sizes = {"Z": Z, "PARTS": parts, **in_elements(geometry, case.dtype)}
    captured = [p.name for m in plan.spec.mods if m for p in m.parameters]
    values = mod_values(plan, bound.score and bound.score[1], bound.mask and bound.mask[1])
    given = {**tensors, "SUMS": sums, **sizes, **scales(bound.scale, True), **dict(zip(captured, values, strict=True))}
    kernel = kernel_for(plan.spec, CppKernel)
    (kernel if launches else Unlaunched(kernel)).call({**given, **({**lists.tensors(), **lists.numbers()} if lists else {})})
    if launches and sums is not None:
        torch.sum(sums, 0, out=tensors["SUMS"])


def _run(bound: Bound, wanted: Wanted, tensors: dict[str, torch.Tensor], launches: bool) -> None:
    """Fill the outputs among `tensors`, which have the names of parameters."""
    Z, Hq, Q_LEN, KV_LEN = bound.inputs.extents
    walks = [("kv", bound.lists)]
    if wanted.column_sums:
        walks.append(("q", bound.transposed(bound.mask) if bound.transposed else None))
    for axis, lists in walks:
        found = _pass_over(axis, bound, wanted, lists) if launches else _new_pass(axis, bound, wanted, lists)
        if not launches:
            launch_nothing([found.launch])
        given = {**tensors, **(lists.tensors(axis) if lists else {})}
        captured = mod_values(found.plan, bound.score and bound.score[1], bound.mask and bound.mask[1])

        def launch(tile, axis=axis, found=found, given=given, captured=captured):
            tiles = -(-Q_LEN // tile.BLOCK_M) if axis == "kv" else -(-KV_LEN // tile.BLOCK_N)
            found.launch.with_tile(tile, given, captured, (tiles * Z * Hq,), bound.q.device)

        launch_fitting(found.plan, launch)


def _pass_over(axis: str, bound: Bound, wanted: Wanted, lists: BlockLists | None) -> _Pass:
    """The kernel that walks keys ("kv") or queries ("q"), and `lists` of them."""
    keys, sinks = keys_of(bound.score, bound.mask, bound.inputs.extents, bound.lists), structure_of(bound.extras).sinks
    key = (axis, bound.inputs, bound.scale, keys, lists and lists.structure, bound.options, wanted, sinks)
    found = _passes.get(key)
    if found is None:
        found = _passes[key] = _new_pass(axis, bound, wanted, lists)
    else:
        INFO.hits += 1
    return found


def _new_pass(axis: str, bound: Bound, wanted: Wanted, lists: BlockLists | None) -> _Pass:
    q, keys = bound.q, keys_of(bound.score, bound.mask, bound.inputs.extents, bound.lists)
    case, geometry = case_of((q, bound.k), bound.lists and bound.lists.blocks, bound.options, wanted, structure_of(bound.extras))
    plan = (plan_rows if axis == "kv" else plan_columns)(case, backend_of(q.device.type), architecture_of(q.device), *keys)
    launch = Launch(plan.spec, {**geometry.numbers, **scales(bound.scale, True), **(lists.numbers(axis) if lists else {})})
    return _Pass(plan, launch)


def case_of(
    tensors: tuple[torch.Tensor, torch.Tensor], blocks: Blocks | None, options: Options, wanted: Wanted, extras: Extras = ORDINARY
) -> tuple[StatisticsCase, Geometry]:
    """What the kernels' text depends on beside mods; and sizes and strides.

    tensors   q and k, of which shapes, strides and dtype count
    """
    q, k = tensors
    shapes, strides = (q.shape, k.shape, k.shape), (q.stride(), k.stride(), k.stride())
    geometry = geometry_of(q.element_size(), shapes, strides, strides_like(q, q.shape[3]))
    kept = Options(prescale_qk=options.prescale_qk, float32_precision=options.float32_precision)
    case = StatisticsCase(
        q.dtype,
        q.shape[3],
        geometry.units[:2],
        geometry.aligned,
        blocks,
        kept,
        are_exact(q.shape[2], k.shape[2], blocks),
        wanted.entropy,
        wanted.top_index,
        wanted.column_sums,
        Extras(sinks=extras.sinks),  # probabilities are those before dropout
    )
    return case, geometry
