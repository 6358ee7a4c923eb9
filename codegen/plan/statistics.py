"""The kernels that look at the probabilities themselves, as plans: from what is known of a call, and no tensor, to KernelSpecs and tiles.

row_statistics walks the keys of each row, column_sums the queries of each key. Neither reads V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.graphs.loads import gathers, widest_element, width_of_dots
from ..mod.table.dtypes import dtype_name
from ..text.mod_text import ModText
from ..text.parameters import Parameter, constants, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .backward_tiles import backward_tile
from .extras import ORDINARY, Extras
from .forward import Blocks, Mod, Options, Plan, block_flags, element_flags, list_numbers, list_tables, lowered, scale_names
from .geometry import STRIDES
from .slices import padded
from .tiles import forward_tile


class StatisticsCase(NamedTuple):
    """What changes the kernels, beside their mods. Of `options` those that change scores, of `extras` sinks.

    entropy, top_index, rows   what row_statistics is to write; rows are what column_sums reads
    """

    dtype: torch.dtype
    d_qk: int
    units: tuple[bool, bool] = (True, True)  # is the head dim of q, k contiguous
    aligned: tuple[str, ...] = ()  # strides that are multiples of 16 bytes and are passed in that unit
    blocks: Blocks | None = None
    options: Options = Options()
    exact_indices: bool = True
    entropy: bool = False
    top_index: bool = False
    rows: bool = False
    extras: Extras = ORDINARY

    # what element_flags asks of a case
    @property
    def d_v(self) -> int:
        return self.d_qk


def plan_rows(case: StatisticsCase, backend: str, arch: str, score: Mod | None, mask: Mod | None) -> Plan:
    """row_statistics, for a backend ("cuda", "hip", "cpu") and a row of the tile tables."""
    width = padded(case.d_qk, width_of_dots(score and score[0]))
    reads = any(gathers(m[0]) for m in (score, mask) if m)
    blocks = case.blocks or Blocks(False, 0, 0)
    tile = forward_tile(
        arch, width, width, widest_element(case.dtype, score and score[0]), gathers=reads, q_block=blocks.q_block, kv_block=blocks.kv_block
    )
    rows = "[Z, Hq, Q_LEN], written"
    written = [pointer("ENTROPIES", "float32", rows)] if case.entropy else []
    written += [pointer("TOP_INDICES", "int64", rows)] if case.top_index else []
    written += [pointer("ROWS", "float32", "[Z, Hq, Q_LEN, 2], written")] if case.rows else []
    written += case.extras.of_sinks
    flags = {"SINKS": bool(case.extras.sinks), "ENTROPY": case.entropy, "TOP_INDEX": case.top_index, "OUTPUT_ROWS": case.rows}
    return _plan("row_statistics", case, backend, tile, score, mask, written, flags, "kv")


def plan_columns(case: StatisticsCase, backend: str, arch: str, score: Mod | None, mask: Mod | None) -> Plan:
    """column_sums, of the same arguments."""
    width, blocks = padded(case.d_qk, width_of_dots(score and score[0])), case.blocks or Blocks(False, 0, 0)
    heavy = "dots" if width_of_dots(score and score[0]) else ""
    sizes = {"q_block": blocks.q_block, "kv_block": blocks.kv_block}
    tile = backward_tile("dkv", arch, width, width, widest_element(case.dtype, score and score[0]), heavy=heavy, **sizes)
    tensors = [pointer("ROWS", "float32", "[Z, Hq, Q_LEN, 2], read"), pointer("SUMS", "float32", "[Z, Hq, KV_LEN], written")]
    return _plan("column_sums", case, backend, tile, score, mask, tensors, {}, "q")


def _plan(
    template: str, case: StatisticsCase, backend: str, tile, score: Mod | None, mask: Mod | None, tensors: list, flags: dict, axis: str
) -> Plan:
    target = Target(backend, dtype_name(case.dtype), case.exact_indices, read_directly=backend == "cuda", transposed=axis == "q")
    score_text, mask_text = lowered(score, mask, target)
    parameters = _parameters(case, score_text, mask_text, tensors, axis)
    taken = {p.name for p in parameters}
    flags = {
        **element_flags(case, case.options.float32_precision),
        "Q_UNIT": case.units[0],
        "K_UNIT": case.units[1],
        "aligned": tuple(name for name in case.aligned if name in taken),
        "ALIGNMENT": 16 // case.dtype.itemsize,
        **block_flags(case.blocks),
        "PRESCALE_QK": case.options.prescale_qk,
        **flags,
    }
    spec = KernelSpec(template, (score_text, mask_text), tuple(flags.items()), backend, parameters)
    return Plan(spec, tile, score_text, mask_text, True)


def _parameters(
    case: StatisticsCase, score: ModText | None, mask: ModText | None, tensors: list[Parameter], axis: str
) -> tuple[Parameter, ...]:
    dtype = dtype_name(case.dtype)
    found = [pointer("K", dtype, "[Zkv, Hkv, KV_LEN, D_QK]"), pointer("Q", dtype, "[Z, Hq, Q_LEN, D_QK]"), *tensors]
    strides = (name for t, unit in zip("qk", case.units, strict=True) for name in (STRIDES[t][:3] if unit else STRIDES[t]))
    sizes = "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", *strides, *scale_names(True), *list_numbers(case.blocks, axis)
    mods = tuple(p for m in (score, mask) if m for p in m.parameters)
    return (*found, *numbers(*sizes), *list_tables(case.blocks, axis), *mods, *constants("BLOCK_M", "BLOCK_N"))
