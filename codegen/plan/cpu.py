"""The kernels in C++ as plans: from what is known of a call, and no tensor, to a KernelSpec."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..mod.dtypes import dtype_name
from ..text.cpp import CPP
from ..text.mod_text import ModText
from ..text.parameters import Parameter, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .forward import ForwardCase, Mod, block_flags, list_numbers, list_tables, lowered, scale_names, statistic_parameters, stride_names_of

BLOCK_M, BLOCK_N = 64, 128


@dataclass(eq=False, slots=True)
class CpuPlan:
    """The kernel's text and how to find the mods' arguments."""

    spec: KernelSpec
    score: ModText | None
    mask: ModText | None
    scale_apart: bool  # SM_SCALE and TO_LOG2 are two arguments


def plan_cpu_forward(case: ForwardCase, score: Mod | None, mask: Mod | None) -> CpuPlan:
    """The plan of cpu_forward. Strides in `case` are in elements."""
    dtype, blocks, units = dtype_name(case.dtype), case.blocks, case.units
    score_text, mask_text = lowered(score, mask, Target("cpu", dtype, case.exact_indices, CPP))
    scale_apart = score is not None or not case.scale_is_positive
    flags = {
        "LANGUAGE": CPP.name,
        "WRITTEN": ("O", "LSE", "MAX", "ROWS"),
        "DTYPE": dtype,
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "Q_UNIT": units[0],
        "K_UNIT": units[1],
        "V_UNIT": units[2],
        "K_DIRECT": units[1] and case.dtype is torch.float32,
        "V_DIRECT": units[2] and case.dtype is torch.float32,
        **block_flags(blocks),
        "STARTS": blocks is not None and blocks.starts,
        "SCALE_IS_POSITIVE": case.scale_is_positive,
        "OUTPUT_MAX": case.output_max,
        "OUTPUT_ROWS": case.output_rows,
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
        pointer("O", dtype, "[Z, Hq, Q_LEN, D_V] in any strides, written"),
        *statistic_parameters("Z, Hq, Q_LEN", case.output_max, case.output_rows),
    )
    sizes = ("Z", "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", *stride_names_of(case.units), *scale_names(scale_apart))
    mods = tuple(p for m in (score, mask) if m for p in m.parameters)
    return (*tensors, *numbers(*sizes, *list_numbers(case.blocks)), *list_tables(case.blocks), *mods)
