"""The kernels in C++ of tangents as plans: from what is known of a call, and no tensor, to KernelSpecs."""

from __future__ import annotations

from ..mod.table.dtypes import dtype_name
from ..text.cpp import CPP
from ..text.gradient_text import Differential
from ..text.mod_text import mod_text
from ..text.parameters import numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .backward import strides
from .cpu import BLOCK_M, CpuBackwardPlan, CpuPlan
from .forward import Mod, block_flags, list_numbers, list_tables
from .roles import buffers_of, gathered_in, numbers_of_copies, roles_of
from .tangent import INPUTS, SHAPES, SYMBOLS, Moved, TangentCase, tangent_flags, tangent_parameters

BLOCK_N = 64


def plan_cpu_tangent(case: TangentCase, score: Moved | None, mask: Mod | None) -> CpuPlan:
    """The plan of cpu_tangent."""
    target = _target(case)
    score_text = mod_text(*score.mod, SYMBOLS, target, tile="qk", tangent=score.tangents.result) if score else None
    mask_text = mod_text(*mask, SYMBOLS, target, tile="qk", beside=score and score.mod) if mask else None
    tensors, sizes = tangent_parameters(case)
    mods = tuple(p for m in (score_text, mask_text) if m for p in m.parameters)
    flags = {"WRITTEN": ("O", "OT", "LSE", "LSET", "MAX", "ROWS", "STATS"), **_flags(case), **tangent_flags(case)}
    parameters = (*tensors, *numbers("Z", *sizes), *list_tables(case.blocks), *mods)
    return CpuPlan(KernelSpec("cpu_tangent", (score_text, mask_text), tuple(flags.items()), "cpu", parameters), score_text, mask_text, True)


def plan_cpu_gradients(case: TangentCase, score: Moved | None, mask: Mod | None) -> CpuBackwardPlan:
    """The plan of cpu_tangent_backward, behind the statistics of `plan_cpu_tangent`."""
    target, dtype, roles, text = _target(case), dtype_name(case.dtype), (), None
    if score:
        ordered = case._replace(deterministic=False)  # every sum has an order here
        roles = (*roles_of(score.mod, ordered, score.tangents.of_loads), *score.tangents.of_rows)
        derived = Differential(score.tangents.derived.score, roles, False, tangent=score.tangents.of_score)
        text = mod_text(*score.mod, SYMBOLS, target, tile="qk", differential=derived, tangent=score.tangents.result)
    mask_text = mod_text(*mask, SYMBOLS, target, tile="qk", beside=score and score.mod) if mask else None
    gathered = gathered_in(text, roles)
    inputs = (*INPUTS, *(f"{t}t" for t in INPUTS), "do")
    tensors = [pointer(t.upper(), dtype, SHAPES[t[0]]) for t in inputs]
    tensors += [pointer("STATS", "float32", "[Z, Hq, 5, Q_LEN]")]
    tensors += [pointer(t.upper(), dtype, f"written: as {t[1].upper()}") for t in ("dq", "dk", "dv")]
    tensors += case.extras.of_dropout
    tensors += [
        pointer(f"D{t}_SUMS", "float32", f"[PARTS, Zkv, Hkv, KV_LEN, {rows}_ROWS], written") for t, rows in (("K", "QK"), ("V", "V"))
    ]
    sizes = ["Z", "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "PARTS", *strides(*inputs, "dq", "dk", "dv"), "SM_SCALE", "TO_LOG2"]
    sizes += [*case.extras.numbers, *list_numbers(case.blocks), *numbers_of_copies(gathered)]
    mods = tuple(p for m in (text, mask_text) if m for p in m.parameters)
    flags = {"WRITTEN": ("DQ", "DK", "DV", "DK_SUMS", "DV_SUMS", *(c.buffer for c, _ in gathered)), **_flags(case)}
    parameters = (*tensors, *numbers(*sizes), *list_tables(case.blocks), *mods, *buffers_of(score and score.mod, gathered))
    spec = KernelSpec("cpu_tangent_backward", (text, mask_text), tuple(flags.items()), "cpu", parameters)
    return CpuBackwardPlan(spec, text, mask_text, gathered)


def _target(case: TangentCase) -> Target:
    return Target("cpu", dtype_name(case.dtype), case.exact_indices, CPP)


def _flags(case: TangentCase) -> dict[str, object]:
    return {
        "LANGUAGE": CPP.name,
        "DTYPE": dtype_name(case.dtype),
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        **block_flags(case.blocks),
        "STARTS": case.blocks is not None and case.blocks.starts,
        **case.extras.dropout_flags,
    }
