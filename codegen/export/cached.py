"""A file with the kernels of cached_attention for few queries: decode and combine_splits, and those that make block lists."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.captured.origins import Origins
from ..mod.expr import INDEX_BOUND, ModGraph
from ..mod.table.dtypes import dtype_name
from ..plan import decode
from ..plan.decode import DecodeCase, Rows, parts_at_once, plan_decode, rows_of, vector_of
from ..plan.decode_tiles import most_rows
from ..plan.extras import SMALLEST_SCALE, Extras, factors_out
from ..plan.forward import LOG2_E, Blocks
from ..plan.tiles import BLOCK
from ..run.imagined import machine_of
from ..run.preview import Compilation
from ..text.parameters import stride_names
from ..text.spelling import literal_text
from .attention import MASKS, TOLERANCES, describe_mask
from .captures import Captured, Names, layouts_for_any, named
from .file import File, Kernel, TritonFile
from .kernels import EXTENTS, mask_compilations

Q_LEN = "exported_query_length"  # what a trace calls the number of a sequence's queries, which is no argument of the file's
_GRID = "tiles * Z"
VARIABLES = {**File.variables, "CU_Q": "cu_seqlens_q"}
_EXTENTS = {"b": "kv_len.shape[0]", "h": "query.shape[1]"}


class ExportedCache(NamedTuple):
    """What of a call its file holds.

    score, mask   the bound mods of the numbers of queries (see CachedCall), or None; mask is None for one query that sees all
    kv_len, q_offset, cu_q   the tensors that they capture as such; q_offset is None where queries are the last positions, cu_q (where the
                  queries of each sequence start) where all sequences have as many
    sinks         their dtype; "": there are none
    kv_dtype      of the cache, where it is not query's          scales    has it k_scale and v_scale
    page_size     0 for a contiguous cache                       located   does cache_loc say which entry is a sequence's
    group         query heads that share keys                    q_len     of the example's longest sequence, for which the tile is chosen
    shapes        of query (with cu_q (T, Hq, D_QK)), k_cache and v_cache, and pages of a sequence: the demo's
    origins       of what the mods capture
    """

    score: tuple[ModGraph, list] | None
    mask: tuple[ModGraph, list] | None
    kv_len: torch.Tensor
    q_offset: torch.Tensor | None
    cu_q: torch.Tensor | None
    sinks: str
    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    d_qk: int
    d_v: int
    scale: float
    target: str
    page_size: int
    located: bool
    scales: bool
    group: int
    q_len: int
    shapes: tuple[tuple, tuple, tuple, int]
    origins: tuple[Origins | None, Origins | None]

    ragged = property(lambda self: self.cu_q is not None)
    extras = property(lambda self: Extras(sinks=self.sinks))

    def case(self, **others) -> DecodeCase:
        """What decides the text of its kernel, with `others`."""
        return DecodeCase(
            *(self.dtype, self.d_qk, self.d_v),
            blocks=Blocks(True, BLOCK, BLOCK) if self.mask else None,
            scale_is_positive=factors_out(self.scale, self.extras),
            ragged=self.ragged,
            lengths=True,
            located=self.located,
            page_size=self.page_size,
            kv_dtype=self.kv_dtype,
            scales=self.scales,
            extras=self.extras,
            **others,
        )


def read_by(call: ExportedCache) -> tuple[tuple, tuple]:
    """Extents of captured tensors, as the example has them, and what a kernel depends on of either mod."""
    extents = len(call.kv_len), call.shapes[0][1], *EXTENTS[2:]
    return extents, tuple((bound[0], layouts_for_any(*bound, extents)) if bound else None for bound in call[:2])


class _Plans:
    """The kernels of a call by name, for one of the targets."""

    def __init__(self, call: ExportedCache, target: str) -> None:
        self.call, self.target, self.machine = call, target, machine_of(target)
        self.unit = vector_of(call.dtype, call.kv_dtype)
        self.extents, self.keys = read_by(call)
        self.rows = rows_in(call)

    def decode(self, split: bool):
        """decode with parts of keys, or without."""
        call = self.call
        widths = ("q", "zhm", call.d_qk), ("k", "zhn", call.d_qk), ("v", "zhn", call.d_v)
        aligned = tuple(name for tensor, dims, width in widths if width % self.unit == 0 for name in stride_names(tensor, dims))
        case = call.case(aligned=aligned, split=split, balanced=split and not call.mask, by_tokens=call.ragged)
        return plan_decode(case, *self.machine, *self.keys, self.rows.rows)

    def kernels(self) -> dict[str, Compilation]:
        """All of them, in the order of the file."""
        found = {}
        for name, split in (("decode", False), ("decode_parts", True)):
            plan = self.decode(split)
            tile = plan.tile
            constants = {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}
            found[name] = Compilation(self.target, plan.spec, constants, tile.num_warps, tile.num_stages)
        found["combine_splits"] = Compilation(self.target, plan.combine, {"BLOCK_S": parts_at_once(plan.combine.flag["D_V"])})
        return found | (mask_compilations(self.call.mask, self.extents, (BLOCK, BLOCK), self.target, False) if self.call.mask else {})


def rows_in(call: ExportedCache) -> Rows:
    """How queries and heads make up a tile."""
    by_head = call.mask is not None and "h" in call.mask[0].symbols  # heads with lists of their own do not share a tile
    itemsize = max((call.kv_dtype or call.dtype).itemsize, call.dtype.itemsize)
    most = most_rows(machine_of(call.target)[1], call.d_qk, call.d_v, itemsize)
    return rows_of(call.q_len, 1 if by_head else call.group, BLOCK if call.mask else 0, most)


class CachedFile(TritonFile):
    """What exported_cached.jinja asks for. `version` is the package's; captures have no names in `reserved`."""

    template = "exported_cached.jinja"
    backward = has_transposed = False
    variables = VARIABLES

    def __init__(self, call: ExportedCache, version: str, reserved: frozenset[str]) -> None:
        plans = _Plans(call, call.target)
        on_target, on_cpu = plans.kernels(), _Plans(call, "cpu").kernels()
        names = names_in(call, plans.keys, reserved)
        grid = "tiles" if call.ragged else _GRID
        table = {
            "decode": (grid, "", "decode"),
            "decode_parts": (f"{grid}, SPLITS" if call.mask else "tiles, PARTS + Z", "parts", "decode_parts"),
            "combine_splits": ("T * Hq" if call.ragged else "Z * Hq * Q_LEN", "", "combine"),
            **MASKS,
        }
        kernels = (Kernel(name, row[0], on_target[name], on_cpu[name], *row[1:]) for name, row in table.items() if name in on_target)
        super().__init__(tuple(kernels), names, call.score, call.mask, version)
        self.target, self.tma = call.target, False
        self.rows = plans.rows
        describe_cache(self, call, plans.extents, plans.unit, plans.decode(True).scale_apart)
        self.constants = {name: getattr(decode, name) for name in ("MAX_WAVES", "MIN_SHARE", "ROOM", "FIXED_SHARE")}
        self.divisions = decode.splits_of, decode.Parts, decode.parts_of


def names_in(call: ExportedCache, keys: tuple, reserved: frozenset[str]) -> Names:
    """What a call's mods capture, and their names (see named): lengths and the number of queries are arguments of the file's own."""
    lengths = Captured("kv_len", "int32", call.kv_len, ("0",), (1,), given=True)
    given = lengths, Captured("Q_LEN", "int", Q_LEN, given=True)
    if call.cu_q is not None:
        given += (Captured("cu_seqlens_q", "int32", call.cu_q, ("0",), (1,), given=True),)
    if call.q_offset is not None:
        given += (Captured("q_offset", "int32", call.q_offset, ("0",), (1,), given=True),)
    return named(call[:2], call.origins, frozenset(), keys, reserved, given, _EXTENTS)


def describe_cache(file: File, call: ExportedCache, extents: tuple, unit: int, scale_apart: bool) -> None:
    """What exported_cached.jinja asks for, whatever kernels are written in: where a sequence's keys are, as arguments; the demo's sizes.

    extents   of captured tensors          unit   elements of which strides are multiples, where a head dim is
    """
    file.call, file.ordinary = call, False
    file.dtype, file.kv_dtype = dtype_name(call.dtype), dtype_name(call.kv_dtype or call.dtype)
    file.d_qk, file.d_v, file.group, file.page_size = call.d_qk, call.d_v, call.group, call.page_size
    file.located, file.scales, file.ragged = call.located, call.scales, call.ragged
    file.q_unit, file.v_unit = (unit if d % unit == 0 else 1 for d in (call.d_qk, call.d_v))
    file.longest, file.log2_e, file.tolerance = INDEX_BOUND, LOG2_E, TOLERANCES[file.dtype]
    file.scale, file.scale_factors_out, file.scale_apart = literal_text(call.scale), factors_out(call.scale, call.extras), scale_apart
    file.least_scale = literal_text(SMALLEST_SCALE)
    file.offsets, file.sinks = call.q_offset is not None, call.sinks
    file.q_block, file.kv_block = BLOCK, BLOCK
    names = file.symbols_of_mods.split(", ") if file.symbols_of_mods else ["_"] * 4
    file.symbols_of_mods = ", ".join([*names[:3], "kv_idx"])  # which hides what is past a sequence's end
    if file.mask:
        describe_mask(file, call.mask, extents)
    file.tables = ", page_table" if call.page_size else ", cache_loc" if call.located else ""
    file.tables += (", cu_seqlens_q" if file.ragged else "") + (", q_offset" if file.offsets else "")
    file.factors = (", k_scale, v_scale" if call.scales else "") + (", sinks" if call.sinks else "")
    (file.demo_query, file.demo_keys, file.demo_values, file.demo_pages), file.demo_batch = call.shapes, len(call.kv_len)
