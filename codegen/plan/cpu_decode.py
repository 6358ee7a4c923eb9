"""The kernel in C++ for few queries and for caches as a plan: from what is known of a call, and no tensor, to a KernelSpec."""

from __future__ import annotations

from ..mod.table.dtypes import dtype_name
from ..text.cpp import CPP, type_name
from ..text.parameters import numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .cpu import CpuPlan
from .decode import FIXED_SHARE, MIN_SHARE, DecodeCase, Parts, Rows, decode_parameters
from .forward import Mod, block_flags, lowered

TILE_ROWS = 16  # queries and heads of a tile
BLOCK_N = 64
TASKS = 16  # that a call has at least, if it has so many keys: the same for any number of threads, so that sums have one order


def plan_cpu_decode(case: DecodeCase, score: Mod | None, mask: Mod | None) -> CpuPlan:
    """The plan of cpu_decode, for calls without gradients that are not split or balanced in the sense of the other kernels."""
    dtype, kept = dtype_name(case.dtype), dtype_name(case.kv_dtype or case.dtype)
    score_text, mask_text = lowered(score, mask, Target("cpu", dtype, case.exact_indices, CPP))
    scale_apart = score is not None or not case.scale_is_positive or case.scales
    flags = {
        "LANGUAGE": CPP.name,
        "WRITTEN": ("O", "LSE", "MAX", "PART"),
        "DTYPE": dtype,
        "KEPT": type_name(kept),
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "TILE_ROWS": TILE_ROWS,
        "BLOCK_N": BLOCK_N,
        "Q_UNIT": case.units[0],
        "K_UNIT": case.units[1],
        "V_UNIT": case.units[2],
        **block_flags(case.blocks),
        "SCALE_FIRST": scale_apart,
        "OUTPUT_MAX": case.output_max,
        "RAGGED": case.ragged,
        "LENGTHS": case.lengths,
        "LOCATED": case.located,
        "PAGE_SIZE": case.page_size,
        "KV_SCALES": case.scales,
        **case.extras.flags,
    }
    own = decode_parameters(case, score_text, mask_text, scale_apart)
    part = pointer("PART", "float32", "[tiles, PARTS, TILE_ROWS, D_V + 3]: what parts leave; nothing where there is one part")
    parameters = (*own, part, *numbers("PARTS", "MIN_SHARE", "Z"))
    spec = KernelSpec("cpu_decode", (score_text, mask_text), tuple(flags.items()), "cpu", parameters)
    return CpuPlan(spec, score_text, mask_text, scale_apart)


def cpu_rows_of(q_len: int, group: int, q_block: int = 0) -> Rows:
    """The rows of tiles for up to `q_len` queries and groups of `group` heads; a tile's queries lie in one block of the lists."""
    pack = next(n for n in range(min(group, TILE_ROWS), 0, -1) if group % n == 0)
    queries = max(1, min(q_len, TILE_ROWS // pack))
    while q_block % queries:
        queries -= 1
    return Rows(queries, pack)


def cpu_parts_of(keys: int, tiles: int, invariant: bool) -> Parts:
    """Into how many parts to split the keys of so many tiles. `invariant`: a sequence's parts must not depend on the others."""
    if invariant:
        return Parts(max(1, -(-keys // FIXED_SHARE)), FIXED_SHARE)
    return Parts(max(1, min(-(-TASKS // max(tiles, 1)), keys // MIN_SHARE)))
