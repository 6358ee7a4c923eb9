"""The kernel in C++ that looks at the probabilities themselves as a plan: from what is known of a call, and no tensor, to a KernelSpec."""

from __future__ import annotations

from ..mod.table.dtypes import dtype_name
from ..text.cpp import CPP
from ..text.parameters import numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .cpu import CpuPlan, tile_flags
from .forward import Mod, block_flags, list_numbers, list_tables, lowered, scale_names
from .geometry import STRIDES
from .statistics import StatisticsCase


def plan_cpu_statistics(case: StatisticsCase, score: Mod | None, mask: Mod | None) -> CpuPlan:
    """The plan of cpu_statistics. `case.rows`: columns are summed."""
    dtype, blocks = dtype_name(case.dtype), case.blocks
    score_text, mask_text = lowered(score, mask, Target("cpu", dtype, case.exact_indices, CPP))
    rows = "[Z, Hq, Q_LEN], written"
    parameters = (
        pointer("Q", dtype, "[Z, Hq, Q_LEN, D_QK]"),
        pointer("K", dtype, "[Zkv, Hkv, KV_LEN, D_QK]"),
        *([pointer("ENTROPIES", "float32", rows)] if case.entropy else []),
        *([pointer("TOP_INDICES", "int64", rows)] if case.top_index else []),
        *([pointer("SUMS", "float32", "[PARTS, Z, Hq, KV_LEN], added to")] if case.rows else []),
        *case.extras.of_sinks,
        *numbers("Z", "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "PARTS"),
        *numbers(*STRIDES["q"], *STRIDES["k"], *scale_names(True), *list_numbers(blocks)),
        *list_tables(blocks),
        *(p for m in (score_text, mask_text) if m for p in m.parameters),
    )
    flags = {
        "WRITTEN": ("ENTROPIES", "TOP_INDICES", "SUMS"),
        **tile_flags(case),
        **block_flags(blocks),
        "SINKS": bool(case.extras.sinks),
        "ENTROPY": case.entropy,
        "TOP_INDEX": case.top_index,
        "COLUMN_SUMS": case.rows,
    }
    spec = KernelSpec("cpu_statistics", (score_text, mask_text), tuple(flags.items()), "cpu", parameters)
    return CpuPlan(spec, score_text, mask_text, True)
