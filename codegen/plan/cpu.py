"""The kernels in C++ as plans: from what is known of a call, and no tensor, to a KernelSpec."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..mod.graphs.grad import differentiate
from ..mod.table.dtypes import dtype_name
from ..text.cpp import CPP, type_name
from ..text.gradient_text import Differential
from ..text.mod_text import ModText, mod_text
from ..text.parameters import Parameter, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .backward import SYMBOLS, BackwardCase, strides
from .forward import ForwardCase, Mod, block_flags, list_numbers, list_tables, lowered, scale_names, statistic_parameters, stride_names_of
from .roles import Gathered, buffers_of, gathered_in, numbers_of_copies, roles_of
from .statistics import StatisticsCase

BLOCK_M, BLOCK_N = 64, 128
BACKWARD_BLOCK_N = 64
ROWS = 16  # sums of dK and dV have rows of a multiple of this
TASKS = 16  # that a pass has at least, if it has so many tiles: the same for any number of threads, so that sums have one order


@dataclass(eq=False, slots=True)
class CpuPlan:
    """The kernel's text and how to find the mods' arguments."""

    spec: KernelSpec
    score: ModText | None
    mask: ModText | None
    scale_apart: bool  # SM_SCALE and TO_LOG2 are two arguments


def tile_flags(case: ForwardCase | StatisticsCase) -> dict[str, object]:
    """What templates are told of a tile of queries, and of how it and keys are read."""
    return {
        "LANGUAGE": CPP.name,
        "DTYPE": dtype_name(case.dtype),
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "Q_UNIT": case.units[0],
        "K_UNIT": case.units[1],
        "K_DIRECT": case.units[1] and case.dtype is torch.float32,
    }


def plan_cpu_forward(case: ForwardCase, score: Mod | None, mask: Mod | None) -> CpuPlan:
    """The plan of cpu_forward."""
    blocks = case.blocks
    score_text, mask_text = lowered(score, mask, Target("cpu", dtype_name(case.dtype), case.exact_indices, CPP))
    if set(case.extras.scales) & {"q", "k"}:  # what a kernel has as a constant of all heads is not theirs
        case = case._replace(scale_is_positive=False)
    scale_apart = score is not None or not case.scale_is_positive
    flags = {
        "WRITTEN": ("O", "LSE", "MAX", "ROWS"),
        "OUT": type_name(case.extras.out or dtype_name(case.dtype)),
        **tile_flags(case),
        "V_UNIT": case.units[2],
        "V_DIRECT": case.units[2] and case.dtype is torch.float32,
        **block_flags(blocks),
        "STARTS": blocks is not None and blocks.starts,
        "SCALE_IS_POSITIVE": case.scale_is_positive,
        "OUTPUT_MAX": case.output_max,
        "OUTPUT_ROWS": case.output_rows,
        **case.extras.flags,
    }
    spec = KernelSpec(
        "cpu_forward", (score_text, mask_text), tuple(flags.items()), "cpu", _parameters(case, score_text, mask_text, scale_apart)
    )
    return CpuPlan(spec, score_text, mask_text, scale_apart)


def _parameters(case: ForwardCase, score: ModText | None, mask: ModText | None, scale_apart: bool) -> tuple[Parameter, ...]:
    dtype = dtype_name(case.dtype)
    tensors = (
        pointer("Q", dtype, "[Z, Hq, Q_LEN, D_QK]"),
        pointer("K", dtype, "[Zkv, Hkv, KV_LEN, D_QK]"),
        pointer("V", dtype, "[Zkv, Hkv, KV_LEN, D_V]"),
        pointer("O", case.extras.out or dtype, "[Z, Hq, Q_LEN, D_V] in any strides, written"),
        *statistic_parameters("Z, Hq, Q_LEN", case.output_max, case.output_rows),
        *case.extras.of_sinks,
        *case.extras.of_dropout,
        *case.extras.of_scales,
    )
    sizes = ("Z", "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", *stride_names_of(case.units), *scale_names(scale_apart))
    sizes += case.extras.numbers
    mods = tuple(p for m in (score, mask) if m for p in m.parameters)
    return (*tensors, *numbers(*sizes, *list_numbers(case.blocks)), *list_tables(case.blocks), *mods)


@dataclass(eq=False, slots=True)
class CpuBackwardPlan:
    """The text of cpu_backward, how to find the mods' arguments, and what it gathers."""

    spec: KernelSpec
    score: ModText | None
    mask: ModText | None
    captured: Gathered


def plan_cpu_backward(case: BackwardCase, score: Mod | None, mask: Mod | None) -> CpuBackwardPlan:
    """The plan of cpu_backward, which takes head dims that are contiguous."""
    dtype, blocks, roles, text = dtype_name(case.dtype), case.blocks, (), None
    target = Target("cpu", dtype, case.exact_indices, CPP)
    if score:
        found = differentiate(score[0], case.captured)
        atomic = case._replace(deterministic=False)  # every sum has an order here
        roles = roles_of(score, atomic, found.loads, found.dots)
        differential = Differential(found.score, roles, case.ordinary)
        text = mod_text(*score, SYMBOLS, target, tile="qk", differential=differential)
    mask_text = mod_text(*mask, SYMBOLS, target, tile="qk", beside=score) if mask else None
    gathered = gathered_in(text, roles)
    flags = {
        "LANGUAGE": CPP.name,
        "WRITTEN": ("DQ", "DK", "DV", "DK_SUMS", "DV_SUMS", "D_SINKS", *(c.buffer for c, _ in gathered)),
        "DTYPE": dtype,
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BACKWARD_BLOCK_N,
        "DIRECT": case.dtype is torch.float32,
        **block_flags(blocks),
        "STARTS": blocks is not None and blocks.starts,
        "SCALE_FIRST": score is not None or not case.scale_is_positive,
        "LSE_GRADIENT": case.lse_gradient,
        **case.extras.flags,
    }
    parameters = _backward_parameters(case, text, mask_text, score, gathered)
    return CpuBackwardPlan(
        KernelSpec("cpu_backward", (text, mask_text), tuple(flags.items()), "cpu", parameters), text, mask_text, gathered
    )


def _backward_parameters(
    case: BackwardCase, text: ModText | None, mask: ModText | None, score: Mod | None, gathered: Gathered
) -> tuple[Parameter, ...]:
    dtype = dtype_name(case.dtype)
    tensors = (
        pointer("Q", dtype, "[Z, Hq, Q_LEN, D_QK]"),
        pointer("K", dtype, "[Zkv, Hkv, KV_LEN, D_QK]"),
        pointer("V", dtype, "[Zkv, Hkv, KV_LEN, D_V]"),
        pointer("O", dtype, "[Z, Hq, Q_LEN, D_V]"),
        pointer("DO", dtype, "[Z, Hq, Q_LEN, D_V]"),
        pointer("ROWS", "float32", "[Z, Hq, Q_LEN, 2]: top and share as the forward kernel leaves them"),
        *([pointer("DLSE", "float32", "[Z, Hq, Q_LEN]")] if case.lse_gradient else []),
        pointer("DQ", dtype, "written: as Q"),
        pointer("DK", dtype, "written: as K"),
        pointer("DV", dtype, "written: as V"),
        pointer("DK_SUMS", "float32", "[PARTS, Zkv, Hkv, KV_LEN, QK_ROWS], written"),
        pointer("DV_SUMS", "float32", "[PARTS, Zkv, Hkv, KV_LEN, V_ROWS], written"),
        *case.extras.of_sinks,
        *([pointer("D_SINKS", "float32", "[Z, Hq, tiles], added to: what each tile gives the head's sink")] if case.extras.sinks else []),
        *case.extras.of_dropout,
    )
    sizes = [
        "Z",
        "Hq",
        "Zkv",
        "GROUP_SIZE",
        "Q_LEN",
        "KV_LEN",
        "PARTS",
        *strides("q", "k", "v", "o", "do", "dq", "dk", "dv"),
        "SM_SCALE",
        "TO_LOG2",
        *case.extras.numbers,
        *numbers_of_copies(gathered),
    ]
    mods = tuple(p for m in (text, mask) if m for p in m.parameters)
    return (*tensors, *numbers(*sizes, *list_numbers(case.blocks)), *list_tables(case.blocks), *mods, *buffers_of(score, gathered))
