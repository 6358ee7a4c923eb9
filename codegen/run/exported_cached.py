"""A file with the kernels of cached_attention for few queries: decode and combine_splits, and those that make block lists."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.dtypes import dtype_name
from ..mod.expr import INDEX_BOUND, ModGraph
from ..plan import decode
from ..plan.decode import DecodeCase, Rows, parts_at_once, plan_decode, rows_of, vector_of
from ..plan.decode_tiles import most_rows
from ..plan.forward import LOG2_E, Blocks
from ..text.parameters import stride_names
from ..text.spelling import literal_text
from .cached_call import BLOCK
from .exported import EXTENTS, mask_compilations
from .exported_attention import MASKS, TOLERANCES, describe_mask
from .exported_captures import Captured, layouts_for_any, named
from .exported_file import Kernel, TritonFile, reserved
from .imagined import machine_of
from .preview import Compilation

Q_LEN = "exported_query_length"  # what a trace calls the number of a sequence's queries, which is no argument of the file's
_TEMPLATES = "exported_cached.jinja", "_exported_masks.jinja", "_exported_lists.jinja"
_GRID = "tiles * Z"


class ExportedCache(NamedTuple):
    """What of a call its file holds.

    score, mask   the bound mods of the numbers of queries (see CachedCall), or None; mask is None for one query that sees all
    kv_len        the tensor that they capture as such
    kv_dtype      of the cache, where it is not query's          scales    has it k_scale and v_scale
    page_size     0 for a contiguous cache                       located   does cache_loc say which entry is a sequence's
    group         query heads that share keys                    q_len     of the example, for which the tile is chosen
    shapes        of query, k_cache and v_cache, and pages of a sequence: the demo's
    """

    score: tuple[ModGraph, list] | None
    mask: tuple[ModGraph, list] | None
    kv_len: torch.Tensor
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


class _Plans:
    """The kernels of a call by name, for one of the targets."""

    def __init__(self, call: ExportedCache, target: str) -> None:
        self.call, self.target, self.machine = call, target, machine_of(target)
        self.unit = vector_of(call.dtype, call.kv_dtype)
        self.extents = *call.shapes[0][:2], *EXTENTS[2:]  # of captured tensors, as the example has them
        self.keys = tuple((bound[0], layouts_for_any(*bound, self.extents)) if bound else None for bound in call[:2])
        self.rows = rows_in(call)

    def decode(self, split: bool):
        """decode with parts of keys, or without."""
        call = self.call
        widths = ("q", "zhm", call.d_qk), ("k", "zhn", call.d_qk), ("v", "zhn", call.d_v)
        aligned = tuple(name for tensor, dims, width in widths if width % self.unit == 0 for name in stride_names(tensor, dims))
        case = DecodeCase(
            *(call.dtype, call.d_qk, call.d_v),
            aligned=aligned,
            blocks=Blocks(True, BLOCK, BLOCK) if call.mask else None,
            scale_is_positive=call.scale > 0,
            split=split,
            balanced=split and not call.mask,
            lengths=True,
            located=call.located,
            page_size=call.page_size,
            kv_dtype=call.kv_dtype,
            scales=call.scales,
        )
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
    """What exported_cached.jinja asks for. `version` is that of the package that writes the file."""

    template = _TEMPLATES[0]
    backward = has_transposed = False

    def __init__(self, call: ExportedCache, version: str) -> None:
        plans = _Plans(call, call.target)
        on_target, on_cpu = plans.kernels(), _Plans(call, "cpu").kernels()
        lengths = Captured("kv_len", "int32", call.kv_len, ("0",), (1,), given=True)
        given = lengths, Captured("Q_LEN", "int", Q_LEN, given=True)
        names = named(call.score, call.mask, frozenset(), plans.keys, reserved(*_TEMPLATES), given)
        table = {
            "decode": (_GRID, "", "decode"),
            "decode_parts": (f"{_GRID}, SPLITS" if call.mask else "tiles, PARTS + Z", "parts", "decode_parts"),
            "combine_splits": ("Z * Hq * Q_LEN", "", "combine"),
            **MASKS,
        }
        kernels = (Kernel(name, row[0], on_target[name], on_cpu[name], *row[1:]) for name, row in table.items() if name in on_target)
        super().__init__(tuple(kernels), *names, call.score, call.mask, version)
        self.call, self.target, self.tma, self.ordinary = call, call.target, False, False
        self.dtype, self.kv_dtype = dtype_name(call.dtype), dtype_name(call.kv_dtype or call.dtype)
        self.d_qk, self.d_v, self.group, self.page_size = call.d_qk, call.d_v, call.group, call.page_size
        self.located, self.scales = call.located, call.scales
        self.q_unit, self.v_unit = (plans.unit if d % plans.unit == 0 else 1 for d in (call.d_qk, call.d_v))
        self.longest, self.log2_e, self.tolerance = INDEX_BOUND, LOG2_E, TOLERANCES[self.dtype]
        self.scale, self.scale_is_positive = literal_text(call.scale), call.scale > 0
        self.scale_apart = plans.decode(True).scale_apart
        self.rows, self.q_block, self.kv_block = plans.rows, BLOCK, BLOCK
        names = self.symbols_of_mods.split(", ") if self.symbols_of_mods else ["_"] * 4
        self.symbols_of_mods = ", ".join([*names[:3], "kv_idx"])  # which hides what is past a sequence's end
        if self.mask:
            describe_mask(self, call.mask, plans.extents)
        self._places()

    def _places(self) -> None:
        """Where a sequence's keys are, as arguments; and the demo's sizes."""
        call, Z = self.call, self.call.shapes[0][0]
        self.tables = ", page_table" if self.page_size else ", cache_loc" if self.located else ""
        self.factors = ", k_scale, v_scale" if self.scales else ""
        (self.demo_query, self.demo_keys, self.demo_values, self.demo_pages), self.demo_batch = call.shapes, Z
        self.constants = {name: getattr(decode, name) for name in ("MAX_WAVES", "MIN_SHARE", "ROOM", "FIXED_SHARE")}
        self.divisions = decode.splits_of, decode.Parts, decode.parts_of
