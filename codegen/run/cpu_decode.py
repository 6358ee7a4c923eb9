"""The kernel in C++ for few queries and for caches: which calls it serves, and each in calls of a kind."""

from __future__ import annotations

import torch

from ..device.cpp import CppKernel
from ..device.cpp_compiler import refusal
from ..device.kernel import kernel_for
from ..plan.cpu import CpuPlan
from ..plan.cpu_decode import TILE_ROWS, cpu_parts_of, cpu_rows_of, plan_cpu_decode
from ..plan.decode import DecodeCase, case_of_few, check_heads, not_few
from ..plan.forward import Mod, scales
from ..plan.geometry import Geometry
from ..registry import INFO, Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists
from .cached_call import CachedCall
from .call import Cached, keys_of
from .forward_kernels import Call

_plans: dict[tuple, CpuPlan] = Table("plans of decoding in C++", 1024)


def is_few(call: Call) -> bool:
    """Does this kernel serve a call without a cache that kernels in C++ serve? Not one with gradients: it adds up products in an order of
    its own, and the backward pass must find the forward pass's scores again."""
    blocks = call.case.blocks
    return not (call.case.output_rows or (blocks and blocks.starts) or not_few(call.extents[2], call.case))


def few_plan(call: Call) -> CpuPlan:
    """The plan for such a call."""
    return _planned(case_of_few(call.case, aligned=(), output_rows=False, split=False, values_in_keys=False), call.score, call.mask)


def _planned(case: DecodeCase, score: Mod | None, mask: Mod | None) -> CpuPlan:
    key = case, score, mask
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = plan_cpu_decode(case, score, mask)
    else:
        INFO.hits += 1
    return plan


def in_elements(geometry: Geometry, dtype: torch.dtype) -> dict[str, int]:
    """Sizes and strides by the names of parameters."""
    unit = 16 // dtype.itemsize
    return {name: n * unit if name in geometry.aligned else n for name, n in geometry.numbers.items()}


def division(
    extents: tuple[int, int, int, int], geometry: Geometry, d_v: int, lists: BlockLists | None, cached: Cached
) -> tuple[dict[str, int], int]:
    """How queries and heads make up tiles and into how many parts keys are split, by the names of parameters; and the elements of PART."""
    Z, Hq, Q_LEN, KV_LEN = extents
    rows = cpu_rows_of(Q_LEN, 1 if lists and lists.by_head else geometry.numbers["GROUP_SIZE"], lists.q_block if lists else 0)
    tiles = -(-Q_LEN // rows.queries) * (Hq // rows.pack) * Z
    parts = cpu_parts_of(KV_LEN, tiles, cached.invariant)
    numbers = {"Q_LEN": Q_LEN, "KV_LEN": KV_LEN, "QUERIES": rows.queries, "PACK": rows.pack, "PARTS": parts.room, "MIN_SHARE": parts.least}
    return numbers, tiles * parts.room * TILE_ROWS * (d_v + 3) if parts.room > 1 else 0


def serves(call: CachedCall) -> bool:
    """Does the kernel serve a call with a cache?"""
    return call.q.device.type == "cpu" and refusal() is None


def attend_cached(call: CachedCall, *, prepare: bool = False) -> None:
    """Fill out and lse; or, to prepare such calls, compile what does."""
    score, mask = call.by_number("score"), call.by_number("mask")
    lists = mask and call.lists(mask, call.extents[2])
    keys = keys_of(score, mask, call.extents)
    check_heads(score and score[0])
    q, k, cached = call.q, call.k, call.cached
    geometry = call.geometry_in(q.element_size())
    case = call.decode_case(geometry, lists, split=False)
    plan = _planned(case, *keys)
    kernel = kernel_for(plan.spec, CppKernel)
    if prepare:
        kernel.function()
        return
    if case.ragged:  # tokens of no sequence
        call.out.zero_()
        call.lse.fill_(float("-inf"))
    numbers, room = division(call.extents, geometry, case.d_v, lists, cached)
    numbers |= {**in_elements(geometry, q.dtype), **numbers, "Z": call.extents[0], "T": q.shape[2], "stride_pages": call.stride_pages}
    tensors = {"K": k, "V": call.v, "Q": q, "O": call.out, "LSE": call.lse, **cached.named, **(lists.tensors() if lists else {})}
    tensors |= call.extras.named if call.extras else {}
    captured = [p.name for m in plan.spec.mods if m for p in m.parameters]
    values = dict(zip(captured, mod_values(plan, score and score[1], mask and mask[1]), strict=True))
    part = {"PART": torch.empty(room, dtype=torch.float32, device="cpu")}
    kernel.call({**numbers, **scales(call.scale, plan.scale_apart), **(lists.numbers() if lists else {}), **tensors, **values, **part})
