"""Kernels without a call: the KernelSpec that a call would get, and what a compiler must know of its arguments.

Nothing here needs a device or memory for tensors. The command line prints kernels this way, and the committed prints and the offline
compilation tests are made this way. What a kernel depends on is found as for a call (`case_of` of the drivers), of tensors that have
shapes and strides alone; which of two kernels a call gets is for the caller to ask.

    preview(alibi(slopes), causal, head_dim=64)                  the spec; render(...) prints it
    compilation("sm_90", alibi(slopes), causal).compile()        registers, shared memory, spills
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device import offline
from ..plan import hopper_decode
from ..plan.as_bfloat16 import ELEMENTS, as_bfloat16_spec
from ..plan.backward import Step, delta_rows
from ..plan.cached_statistics import Looks, columns_at_once, plan_cached_columns, plan_cached_rows
from ..plan.cpu import plan_cpu_backward, plan_cpu_forward
from ..plan.cpu_statistics import plan_cpu_statistics
from ..plan.cpu_tangent import plan_cpu_gradients, plan_cpu_tangent
from ..plan.decode import DecodePlan, case_of_few, parts_at_once, plan_decode, rows_of
from ..plan.decode_tiles import most_rows
from ..plan.exchange import ExchangeCase, add_spec, copy_spec, positions_of_program
from ..plan.forward import Cache, Plan
from ..plan.merge_parts import MergeCase, merge_spec, rows_of_program
from ..plan.shared_tables import BLOCK_T as SHARED_BLOCK_T
from ..plan.shared_tables import SharedCase, shared_spec
from ..plan.shared_tiles import BLOCK as SHARED_BLOCK
from ..plan.shared_tiles import tiles_spec
from ..plan.statistics import plan_columns, plan_rows
from ..plan.tangent import plan_gradients, plan_tangent
from ..plan.update_cache import BLOCK_T, UpdateCase, update_spec
from ..plan.values_by_keys import ByKeysCase, by_keys_spec, keys_of_program
from ..text.spec import KernelSpec
from . import backward_kernels, cpu_decode, forward_kernels, statistics
from .imagined import Imagined, backend_for, machine_of


@dataclass(frozen=True)
class Compilation:
    """A kernel and the arguments of `offline.compile_for`, for one of TARGETS."""

    target: str
    spec: KernelSpec
    constants: dict[str, int]
    num_warps: int = 4
    num_stages: int = 1

    def compile(self, last: str | None = None) -> offline.Compiled:
        """What the compiler makes of the kernel (last: see `compile_for`). ValueError for the target "cpu", which compiles nothing."""
        if self.target not in offline.TARGETS:
            raise ValueError(f"{self.target!r} compiles nothing; targets are {', '.join(offline.TARGETS)}")
        return offline.compile_for(self.spec, self.target, self.constants, self.num_warps, self.num_stages, last)


def preview(*call, backend: str = "cuda", **details) -> KernelSpec:
    """The spec of the portable forward kernel for "cuda", "hip" or "cpu"; other arguments are those of Imagined."""
    return compilation({"cuda": "sm_90", "hip": "gfx942", "cpu": "cpu"}[backend], *call, **details).spec


def compilation(target: str, *call, **details) -> Compilation:
    """The portable forward kernel for one of TARGETS, with its default tile."""
    return _tiled(target, forward_kernels.Portable().plan(Imagined(*call, **details).forward(target)))


def cpu_specs(*call, **details) -> dict[str, KernelSpec]:
    """The kernels in C++ by name: "forward", "decode" for few queries, "backward", "statistics" of the probabilities, "tangent" with what
    "tangent_backward" needs, and that. Arguments are those of Imagined."""
    imagined = Imagined(*call, **details)
    forward, backward = imagined.forward("cpu"), imagined.backward("cpu")
    moved, _, _, *mods = imagined.tangent("cpu")
    looks, _ = statistics.case_of(imagined.tensors()[:2], forward.case.blocks, forward.case.options, statistics.Wanted(True, True, True))
    return {
        "forward": plan_cpu_forward(forward.case, forward.score, forward.mask).spec,
        "decode": cpu_decode.few_plan(forward).spec,
        "backward": plan_cpu_backward(backward.case, backward.score, backward.mask).spec,
        "statistics": plan_cpu_statistics(looks, forward.score, forward.mask).spec,
        "tangent": plan_cpu_tangent(moved, *mods).spec,
        "tangent_backward": plan_cpu_gradients(moved, *mods).spec,
    }


def hopper_compilation(target: str = "sm_90", *call, cache: Cache | None = None, few_tiles: bool = False, **details) -> Compilation:
    """The forward kernel for Hopper. ValueError, with the reason, where it does not serve.

    cache       where a cache holds the keys; with starts=True, unless it is grouped
    few_tiles   of queries, for the multiprocessors that there are
    """
    imagined = Imagined(*call, **details).forward(target)
    imagined = imagined._replace(case=imagined.case._replace(cache=cache, few_tiles=few_tiles))
    return Compilation(target, _fitting(forward_kernels.Hopper(), imagined).spec, {})


def backward_compilations(target: str, *call, **details) -> dict[str, Compilation]:
    """The kernels of the backward pass by name: "delta", "dkv" or, of wide heads, "dk" and "dv", and "dq"."""
    imagined = Imagined(*call, **details).backward(target)
    plan = backward_kernels.Portable().plan(imagined)
    delta = Compilation(target, plan.delta, {"BLOCK_M": delta_rows(imagined.case.d_v)})
    return {"delta": delta, **{name: _tiled(target, step) for name, step in plan.walks.items()}}


def tangent_compilations(target: str, *call, **details) -> dict[str, Compilation]:
    """The kernels of tangents by name, in a direction in which all moves: "tangent" with what the others, of second derivatives, need, and
    "dkv" and "dq"."""
    imagined = Imagined(*call, **details).tangent(target)
    steps = plan_tangent(*imagined), *plan_gradients(*imagined)
    return {name: _tiled(target, step) for name, step in zip(("tangent", "dkv", "dq"), steps, strict=True)}


def hopper_backward_compilations(*call, captured: bool = False, **changes) -> dict[str, Compilation]:
    """The kernels of the backward pass for Hopper by name, "delta" and "fused". ValueError for what they do not serve.

    call      score_mod, mask_mod, dtype and head dims, as in Imagined      captured   as there
    changes   the same by name, and fields of BackwardCase
    """
    imagined, changes = _imagined(call, changes, captured=captured)
    imagined = imagined.backward("sm_90", **changes)
    plan = _fitting(backward_kernels.Hopper(), imagined)
    delta = Compilation("sm_90", plan.delta, {"BLOCK_M": delta_rows(imagined.case.d_v)})
    return {"delta": delta, "fused": Compilation("sm_90", plan.fused, {})}


def decode_compilations(
    target: str, *call, q_len: int = 1, group: int = 4, kv_dtype: str | None = None, **changes
) -> dict[str, Compilation]:
    """The kernels for few queries and for caches by name, "decode" and "combine".

    call      score_mod, mask_mod, dtype and head dims, as in Imagined
    group     query heads that share a key/value head
    kv_dtype  "float8_e4m3fn" and so on: of K and V, with scales
    changes   the former by name, and fields of DecodeCase: ragged, lengths, balanced, located, page_size, output_max, and split=False,
              which leaves "combine" out
    """
    imagined, case, rows = _decode_case(target, call, q_len, group, kv_dtype, changes)
    plan = plan_decode(case, *machine_of(target), imagined.score, imagined.mask, rows)
    combine = {"combine": Compilation(target, plan.combine, {"BLOCK_S": parts_at_once(case.d_v)})} if plan.combine else {}
    return {"decode": _tiled(target, plan), **combine}


def hopper_decode_compilation(*call, q_len: int = 1, group: int = 4, **changes) -> Compilation:
    """The decode kernel for Hopper, of values that are a view of the keys; arguments are those of decode_compilations. ValueError, with the
    reason, where it does not serve."""
    imagined, case, rows = _decode_case("sm_90", call, q_len, group, None, {"values_in_keys": True, **changes})
    reason = hopper_decode.fits(case, imagined.geometry, "sm_90", True, rows, imagined.score, imagined.mask)
    if reason:
        raise ValueError(reason)
    plan = hopper_decode.plan_hopper_decode(case, imagined.score, imagined.mask)
    return Compilation("sm_90", plan.spec, {}, plan.tile.num_warps)


def _decode_case(target: str, call: tuple, q_len: int, group: int, kv_dtype: str | None, changes: dict) -> tuple:
    """The call, as a forward pass, its DecodeCase, and the rows of a tile."""
    imagined, changes = _imagined(call, changes)
    imagined = imagined.forward(target)
    kept, blocks = getattr(torch, kv_dtype) if kv_dtype else None, imagined.case.blocks
    case = case_of_few(imagined.case, kv_dtype=kept, scales=kept is not None, **changes)
    most = most_rows(machine_of(target)[1], case.d_qk, case.d_v, case.itemsize)
    return imagined, case, rows_of(q_len, group, blocks.q_block if blocks else 0, most).rows


def statistics_compilations(target: str, *call, **details) -> dict[str, Compilation]:
    """The kernels that look at the probabilities by name, "rows" and "columns"; other arguments are those of Imagined."""
    imagined = Imagined(*call, **details)
    known = imagined.forward(target)
    tensors = imagined.tensors()[:2]
    case, _ = statistics.case_of(tensors, known.case.blocks, known.case.options, statistics.Wanted(True, True, True), known.case.extras)
    plans = {"rows": plan_rows, "columns": plan_columns}
    return {name: _tiled(target, plan(case, *machine_of(target), known.score, known.mask)) for name, plan in plans.items()}


def cached_statistics_compilations(
    target: str, *call, q_len: int = 1, group: int = 4, kv_dtype: str | None = None, **changes
) -> dict[str, Compilation]:
    """The kernels that look at the probabilities of keys in a cache by name, "rows" and "columns"; arguments are those of
    decode_compilations."""
    imagined, case, rows = _decode_case(target, call, q_len, group, kv_dtype, {"lengths": True, **changes})
    machine, mods = machine_of(target), (imagined.score, imagined.mask)
    found = {"rows": plan_cached_rows(case, Looks(True, True), *machine, *mods, rows)}
    pack, many = columns_at_once(q_len, case.d_qk, group, False)
    found["columns"] = plan_cached_columns(case, pack, *machine, *mods, many)
    return {name: _tiled(target, plan) for name, plan in found.items()}


def update_cache_compilation(target: str, dtype: str = "bfloat16", cache_dtype: str | None = None, **details) -> Compilation:
    """The kernel that writes new keys and values into a cache. details: fields of UpdateCase beside d_qk and d_v, which are 128."""
    kept = getattr(torch, cache_dtype) if cache_dtype else None
    case = UpdateCase(getattr(torch, dtype), 128, 128, kv_dtype=kept, scales=kept is not None, **details)
    return Compilation(target, update_spec(case, backend_for(target)), {"BLOCK_T": BLOCK_T})


def exchange_compilations(
    target: str, dtype: str = "bfloat16", d_qk: int = 128, d_v: int = 128, aligned: bool = True
) -> dict[str, Compilation]:
    """The kernels that lay out what ranks of a context plan exchange, "copy_blocks" and "add_blocks".

    aligned   all strides are multiples of 16 bytes
    """
    case = ExchangeCase(getattr(torch, dtype), d_qk, d_v)
    found = {}
    for make in (copy_spec, add_spec):
        strides = (p.name for p in make(case, backend_for(target)).parameters if p.name.startswith("stride_"))
        spec = make(case._replace(aligned=tuple(strides) if aligned else ()), backend_for(target))
        found[spec.template] = Compilation(target, spec, {"BLOCK_T": positions_of_program(case.block, d_qk, d_v)})
    return found


def merge_parts_compilation(target: str, dtype: str = "bfloat16", d_v: int = 128) -> Compilation:
    """The kernel that puts attention to two sets of keys together."""
    spec = merge_spec(MergeCase(getattr(torch, dtype), d_v), backend_for(target))
    return Compilation(target, spec, {"BLOCK_R": rows_of_program(d_v)})


def values_by_keys_compilation(target: str, d_v: int = 128, **details) -> Compilation:
    """The kernel that lays values of 8 bits out by keys. details: fields of ByKeysCase."""
    spec = by_keys_spec(ByKeysCase(d_v, **details), backend_for(target))
    return Compilation(target, spec, {"BLOCK_T": keys_of_program(d_v)})


def as_bfloat16_compilation(target: str) -> Compilation:
    """The kernel that makes bfloat16 of float8."""
    return Compilation(target, as_bfloat16_spec(backend_for(target)), {"BLOCK_T": ELEMENTS})


def shared_tables_compilation(target: str, **details) -> Compilation:
    """The kernel that lays out a step of sequences that share pages. details: fields of SharedCase."""
    return Compilation(target, shared_spec(SharedCase(**details), backend_for(target)), {"BLOCK_T": SHARED_BLOCK_T})


def shared_tiles_compilation(target: str) -> Compilation:
    """The kernel that says which tiles the prefixes of groups make."""
    return Compilation(target, tiles_spec(backend_for(target)), {"BLOCK": SHARED_BLOCK})


def _imagined(call: tuple, changes: dict, **details) -> tuple[Imagined, dict]:
    """The call, and what is left of `changes`."""
    named = {
        name: changes[name] for name in ("score_mod", "mask_mod", "dtype", "head_dim", "head_dim_v", "values_in_keys") if name in changes
    }
    return Imagined(*call, **named, **details), {name: value for name, value in changes.items() if name not in named}


def _fitting(candidate, call):
    """A candidate's plan."""
    reason = candidate.fits(call)
    if reason:
        raise ValueError(reason)
    return candidate.plan(call)


def _tiled(target: str, step: Plan | DecodePlan | Step) -> Compilation:
    """A kernel with its tile."""
    tile = step.tile
    return Compilation(target, step.spec, {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}, tile.num_warps, tile.num_stages)
