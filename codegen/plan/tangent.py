"""The kernels of tangents as plans: that of the forward pass, and the two of the backward pass, which are second derivatives.

As plan/forward.py and plan/backward.py: from what is known of a call, and no tensor, to KernelSpecs and tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..mod.graphs.loads import widest_element, width_of_dots
from ..mod.graphs.tangent import Tangents, tangents_of
from ..mod.table.dtypes import dtype_name
from ..registry import remembered
from ..text.gradient_text import Differential
from ..text.mod_text import ModText, mod_text
from ..text.parameters import Parameter, constants, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from . import backward
from .backward import Step, strides
from .backward_tiles import tangent_tile
from .extras import ORDINARY, Extras
from .forward import Blocks, Mod, block_flags, element_flags, list_numbers, list_tables
from .geometry import in_units, known_strides
from .roles import buffers_of, gathered_in, roles_of
from .slices import padded
from .tiles import Tile

SYMBOLS = {**backward.SYMBOLS, "score_tangent": "qk_t", "grad_tangent": "grad_t"}
INPUTS = ("q", "k", "v")


class TangentCase(NamedTuple):
    """What changes the kernels of tangents, beside their mods.

    moves         which of q, k and v have a tangent
    captured      which captured tensors of score_mod have one
    wanted        of which the gradient has one that is asked for
    statistics    the kernels of second derivatives follow
    """

    dtype: torch.dtype
    d_qk: int
    d_v: int
    aligned: tuple[str, ...] = ()  # strides that are multiples of 16 bytes and are passed in that unit
    blocks: Blocks | None = None
    float32_precision: str = "ieee"
    exact_indices: bool = True
    moves: tuple[bool, bool, bool] = (True, True, True)
    captured: frozenset[int] = frozenset()
    output_max: bool = False
    output_rows: bool = False
    statistics: bool = False
    lse_gradient: bool = False
    wanted: frozenset[int] = frozenset()
    one_batch: bool = False
    one_head: bool = False
    deterministic: bool = False
    extras: Extras = ORDINARY  # dropout alone


class Moved(NamedTuple):
    """A score_mod with the tangents of what it captures."""

    tangents: Tangents
    mod: Mod


def moved(case: TangentCase, graph) -> Tangents:
    """The tangents of a score_mod."""
    symbols = {"score"} if case.moves[0] or case.moves[1] else set()
    symbols |= {"grad"} if case.statistics else set()
    return tangents_of(graph, frozenset(symbols), case.captured, case.wanted)


def plan_tangent(case: TangentCase, backend: str, arch: str, score: Mod | None, mask: Mod | None) -> Step:
    """The plan for a backend ("cuda", "hip", "cpu") and a row of the tile tables."""
    target, mask_text = _target(case, backend), None
    text = mod_text(*score.mod, SYMBOLS, target, tile="qk", tangent=score.tangents.result) if score else None
    if mask:
        mask_text = mod_text(*mask, SYMBOLS, target, tile="qk", beside=score and score.mod)
    tensors, sizes = tangent_parameters(case)
    tile = _tile("tangent", case, arch, score)
    return _step("tangent", case, backend, tile, (text, mask_text), tensors, sizes, flags=tangent_flags(case))


def tangent_flags(case: TangentCase) -> dict[str, object]:
    """What a template of `tangent` is told beside what all are told."""
    return {
        **{f"MOVES_{t.upper()}": moves for t, moves in zip(INPUTS, case.moves, strict=True)},
        "OUTPUT_MAX": case.output_max,
        "OUTPUT_ROWS": case.output_rows,
        "STATISTICS": case.statistics,
        "LSE_GRADIENT": case.lse_gradient,
    }


def tangent_parameters(case: TangentCase) -> tuple[list[Parameter], list[str]]:
    """Its tensors, and the names of its numbers, without those of the mods."""
    dtype, rows = dtype_name(case.dtype), "[Z, Hq, Q_LEN"
    inputs = [*INPUTS, *(f"{t}t" for t, moves in zip(INPUTS, case.moves, strict=True) if moves)]
    found = [pointer(t.upper(), dtype, SHAPES[t[0]]) for t in inputs]
    found += [pointer(t, dtype, f"{rows}, D_V], written") for t in ("O", "OT")]
    found += [pointer(t, "float32", f"{rows}], written") for t in ("LSE", "LSET", *(["MAX"] if case.output_max else []))]
    found += [pointer("ROWS", "float32", f"{rows}, 2], written")] if case.output_rows else []
    if case.statistics:
        found += [pointer("DO", dtype, f"{rows}, D_V]"), *([pointer("DLSE", "float32", f"{rows}]")] if case.lse_gradient else [])]
        found += [pointer("STATS", "float32", "[Z, Hq, 5, Q_LEN], written")]
    strided = [*inputs, "o", "ot", *(["do"] if case.statistics else [])]
    sizes = ["Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", *strides(*strided), "SM_SCALE", "TO_LOG2"]
    return [*found, *case.extras.of_dropout], [*sizes, *case.extras.numbers, *list_numbers(case.blocks)]


def plan_gradients(case: TangentCase, backend: str, arch: str, score: Moved | None, mask: Mod | None) -> tuple[Step, Step]:
    """The tangents of dK and dV, and of dQ, behind the statistics of `plan_tangent`; arguments as there."""
    target, dtype, roles, steps = _target(case, backend), dtype_name(case.dtype), (), []
    if score:
        roles = (*roles_of(score.mod, case, score.tangents.of_loads), *score.tangents.of_rows)
    mask_text = mod_text(*mask, SYMBOLS, target, tile="qk", beside=score and score.mod) if mask else None
    inputs = (*INPUTS, *(f"{t}t" for t in INPUTS), "do")
    for name, own, written in (("tangent_dkv", True, ("dk", "dv")), ("tangent_dq", False, ("dq",))):
        captured, text = tuple(r for r in roles if (r[0] == "column") is own), None
        lies = replace(target, transposed=own, ends_keys=not own)
        if score:
            precision = case.float32_precision
            derived = Differential(score.tangents.derived.score, captured, False, precision, score.tangents.of_score)
            text = mod_text(*score.mod, SYMBOLS, lies, tile="qk", differential=derived, tangent=score.tangents.result)
        gathered = gathered_in(text, captured)
        slabs = any(role == "slab" for role, _, _ in captured)
        found = [pointer(t.upper(), dtype, SHAPES[t[0]]) for t in inputs]
        found += [pointer("STATS", "float32", "[Z, Hq, 5, Q_LEN]")]
        found += [pointer(t.upper(), dtype, f"written: as {t[1].upper()}") for t in written] + [*case.extras.of_dropout]
        sizes = ["Z", "Hkv"] if own else ["Hq"]
        sizes += ["Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", *strides(*inputs, *written), "SM_SCALE", "TO_LOG2", *case.extras.numbers]
        sizes += [*list_numbers(case.blocks, "q" if own else "kv"), *(["first_tile"] if slabs else [])]
        buffers, axis = buffers_of(score and score.mod, gathered), "q" if own else "kv"
        tile, more = _tile(name, case, arch, score), {"flags": {"SLABS": slabs}, "buffers": buffers, "axis": axis}
        step = _step(name, case, backend, tile, (text, mask_text), found, sizes, **more)
        step.captured = gathered
        steps.append(step)
    return tuple(steps)


SHAPES = {"q": "[Z, Hq, Q_LEN, D_QK]", "k": "[Zkv, Hkv, KV_LEN, D_QK]", "v": "[Zkv, Hkv, KV_LEN, D_V]", "d": "[Z, Hq, Q_LEN, D_V]"}


def _target(case: TangentCase, backend: str) -> Target:
    return Target(backend, dtype_name(case.dtype), case.exact_indices, read_directly=backend == "cuda")


def _tile(name: str, case: TangentCase, arch: str, score: Moved | None) -> Tile:
    graph, blocks = score and score.mod[0], case.blocks or Blocks(False, 0, 0)
    width = max(padded(case.d_qk, width_of_dots(graph)), padded(case.d_v))
    return tangent_tile(name, arch, width, widest_element(case.dtype, graph), blocks.q_block, blocks.kv_block)


def _step(
    name: str,
    case: TangentCase,
    backend: str,
    tile: Tile,
    texts: tuple[ModText | None, ModText | None],
    tensors: list[Parameter],
    sizes: list[str],
    *,
    flags: dict,
    buffers: tuple[Parameter, ...] = (),
    axis: str = "kv",
) -> Step:
    """A kernel of its parameters and flags."""
    blocks, mods = case.blocks, tuple(p for m in texts if m for p in m.parameters)
    parameters = (*tensors, *numbers(*sizes), *list_tables(blocks, axis), *mods, *buffers, *constants("BLOCK_M", "BLOCK_N"))
    taken = {p.name for p in parameters}
    flags = {
        **element_flags(case, case.float32_precision),
        "aligned": tuple(a for a in case.aligned if a in taken),
        "ALIGNMENT": 16 // case.dtype.itemsize,
        **block_flags(blocks),
        "STARTS": blocks is not None and blocks.starts,
        **case.extras.dropout_flags,
        "PTX": backend == "cuda",
        **flags,
    }
    return Step(KernelSpec(name, texts, tuple(flags.items()), backend, parameters), tile, *texts)


@dataclass(frozen=True, slots=True)
class TangentGeometry:
    """What follows from shapes and strides alone: which strides are passed in units of 16 bytes, and all of them as passed."""

    aligned: tuple[str, ...]
    strides: dict[str, int]


_READ = frozenset((*INPUTS, *(f"{t}t" for t in INPUTS), "do"))


@remembered("geometries of tangents", 4096)
def tangent_geometry(itemsize: int, layouts: tuple[tuple[str, tuple, tuple], ...]) -> TangentGeometry:
    """Of tensors as (name, shape, strides); a dimension of size 1 has stride 0."""
    read, written = {}, {}
    for name, shape, layout in layouts:
        (read if name in _READ else written).update(zip(strides(name), known_strides(shape, layout), strict=False))
    aligned, found = in_units(read, 16 // itemsize)
    return TangentGeometry(aligned, found | written)
