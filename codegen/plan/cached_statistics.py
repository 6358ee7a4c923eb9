"""The kernels that look at the probabilities of keys in a cache as plans: from what is known of a call, and no tensor, to KernelSpecs.

cached_rows walks the keys of each row, split among programs; cached_columns the queries of each key. Neither reads V.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..gpus import WIDEST_TILE
from ..mod.graphs.loads import width_of_dots
from ..mod.table.dtypes import dtype_name
from ..text.parameters import Parameter, constants, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .decode import DecodeCase, check_heads, place_parameters, vector_of
from .decode_tiles import decode_tile
from .forward import Mod, Plan, block_flags, element_flags, list_numbers, list_tables, lowered, scale_names
from .geometry import STRIDES
from .slices import padded
from .tiles import Tile

FEW, MANY = 16, 64  # rows that cached_columns takes at once: where heads that share keys have as few, and where they have more


class Looks(NamedTuple):
    """What cached_rows is to leave of a part, beside the largest score and its weight."""

    entropy: bool = False
    top_index: bool = False


def plan_cached_rows(case: DecodeCase, looks: Looks, backend: str, arch: str, score: Mod | None, mask: Mod | None, rows: int) -> Plan:
    """cached_rows, for a backend ("cuda", "hip", "cpu"), a row of the tile tables, and tiles of so many rows."""
    parts = "[T, Hq, SPLITS]" if case.ragged else "[Z, Hq, Q_LEN, SPLITS]"
    written = [
        pointer("PART_SHARE", "float32", f"{parts}: log2 of the weight of PART_MAX in the part"),
        pointer("PART_MAX", "float32", f"{parts}: the largest scores of the parts"),
        *([pointer("PART_MEAN", "float32", f"{parts}: mean of what scores are less than that")] if looks.entropy else []),
        *([pointer("PART_TOP", "int32", f"{parts}: which key has it")] if looks.top_index else []),
    ]
    block_args = ["K", *(["PAGES", "Zkv", "stride_kz"] if case.page_size else []), "stride_kn", *([] if case.units[1] else ["stride_kd"])]
    flags = {"SPLIT": True, "BALANCED": False, "BY_TOKENS": case.by_tokens, "ENTROPY": looks.entropy, "TOP_INDEX": looks.top_index}
    sizes = ("QUERIES", "PACK", "SPLITS", *(["Z"] if case.by_tokens else []))
    tile = _tile(case, arch, score, rows, paged=case.page_size > 0)
    return _plan("cached_rows", case, backend, tile, score, mask, written, {**flags, "k_params": ", ".join(block_args)}, sizes, "kv")


def plan_cached_columns(case: DecodeCase, pack: int, backend: str, arch: str, score: Mod | None, mask: Mod | None, rows: int) -> Plan:
    """cached_columns, of the same arguments; rows are of `pack` heads, a power of two."""
    of_rows = "[T, Hq, 2]" if case.ragged else "[Z, Hq, Q_LEN, 2]"
    tensors = [
        pointer("ROWS", "float32", f"{of_rows}: the largest score, log2 of its weight"),
        pointer("SUMS", "float32", "[Z, Hq, WIDTH], written"),
    ]
    tile = _tile(case, arch, score, rows, paged=False)
    tile = replace(tile, num_stages=min(tile.num_stages, 1 if rows == FEW else 2))  # queries are few, or come from L2
    return _plan("cached_columns", case, backend, tile, score, mask, tensors, {"PACK": pack}, ("WIDTH",), "q")


def columns_at_once(q_len: int, d_qk: int, group: int, by_head: bool) -> tuple[int, int]:
    """Heads and rows of a tile of cached_columns, for up to `q_len` queries of groups of `group` heads. by_head: heads have block lists of
    their own, and share no tile."""
    pack = 1 if by_head else next(n for n in (16, 8, 4, 2, 1) if group % n == 0)
    return pack, FEW if q_len * pack <= FEW or d_qk > WIDEST_TILE else MANY


def _tile(case: DecodeCase, arch: str, score: Mod | None, rows: int, *, paged: bool) -> Tile:
    """That of decode, whose values would be as wide as its keys. `paged`: pages are looked up in the loop."""
    check_heads(score and score[0])
    width, kv_block = padded(case.d_qk, width_of_dots(score and score[0])), case.blocks.kv_block if case.blocks else 0
    return decode_tile(arch, rows, width, padded(case.d_qk), case.itemsize, kv_block=kv_block, paged=paged)


def _plan(
    template: str,
    case: DecodeCase,
    backend: str,
    tile: Tile,
    score: Mod | None,
    mask: Mod | None,
    tensors: list[Parameter],
    flags: dict,
    sizes: tuple[str, ...],
    axis: str,
) -> Plan:
    columns = axis == "q"
    target = Target(backend, dtype_name(case.dtype), case.exact_indices, packed_heads=True, transposed=columns)
    score_text, mask_text = lowered(score, mask, target)
    kept, rows = dtype_name(case.kv_dtype or case.dtype), "T, Hq" if case.ragged else "Z, Hq, Q_LEN"
    places = f"pages, Hkv, {case.page_size}" if case.page_size else "Zkv, Hkv, KV_LEN"
    strides = (name for t, unit in zip("qk", case.units, strict=False) for name in (STRIDES[t][:3] if unit else STRIDES[t]))
    lengths = ("Hq", "Zkv", "GROUP_SIZE", "Q_LEN", *([] if columns else ["KV_LEN"]))
    further = (*(["stride_pages"] if case.page_size else []), *(["T"] if case.ragged else []))
    parameters = (
        pointer("K", kept, f"[{places}, D_QK]"),
        pointer("Q", dtype_name(case.dtype), f"[{rows}, D_QK]"),
        *tensors,
        *place_parameters(case),
        *([pointer("K_SCALES", "float32", "[Hkv]: to be multiplied by")] if case.scales else []),
        *numbers(*lengths, *strides, *scale_names(True), *sizes, *further, *list_numbers(case.blocks, axis)),
        *list_tables(case.blocks, axis),
        *(p for m in (score_text, mask_text) if m for p in m.parameters),
        *constants("BLOCK_M", "BLOCK_N"),
    )
    taken = {p.name for p in parameters}
    flags = {
        **element_flags(case, "ieee"),
        "Q_UNIT": case.units[0],
        "K_UNIT": case.units[1],
        "aligned": tuple(name for name in case.aligned if name in taken),
        "ALIGNMENT": vector_of(case.dtype, case.kv_dtype),
        **block_flags(case.blocks),
        "RAGGED": case.ragged,
        "LENGTHS": case.lengths,
        "LOCATED": case.located,
        "PAGE_SIZE": case.page_size,
        "KV_SCALES": case.scales,
        "CONVERTS": case.kv_dtype is not None,
        **flags,
    }
    spec = KernelSpec(template, (score_text, mask_text), tuple(flags.items()), backend, parameters)
    return Plan(spec, tile, score_text, mask_text, True)
