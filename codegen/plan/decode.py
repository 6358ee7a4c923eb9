"""The kernels for few queries and for caches as a plan: from what is known of a call, and no tensor, to two KernelSpecs and a tile.

decode splits the keys of a row among programs, so that one query against many keys fills the device; combine_splits adds the parts up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..gpus import round_up_head_dim
from ..mod.errors import mod_error
from ..mod.expr import Expr, ModGraph, symbols_in
from ..mod.graphs.loads import dots_of, width_of_dots
from ..mod.table.dtypes import dtype_name
from ..text.mod_text import ModText
from ..text.parameters import Parameter, constants, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .decode_tiles import decode_tile
from .extras import ORDINARY, Extras
from .forward import (
    Blocks,
    ForwardCase,
    Mod,
    block_flags,
    element_flags,
    list_numbers,
    list_tables,
    lowered,
    scale_names,
    statistic_parameters,
    stride_names_of,
)
from .slices import padded
from .tiles import Tile

MAX_QUERIES = 16  # of a call without a cache; more of them keep the device busy without splitting keys
MAX_ROWS = 64  # of a tile, where it has so many
MIN_SHARE = 256  # keys of a part at least: adding up parts costs as much as reading some tens of keys
FIXED_SHARE = 1024  # keys of a part where the result must not depend on other sequences
MAX_WAVES = 8  # of programs; keys are not split where there would be more
ROOM = 32  # parts for which there is room where the lengths of sequences decide how many parts each one has
PART_ELEMENTS = 2048  # that combine_splits reads at a time: few, as there are seldom more parts than two or three


class DecodeCase(NamedTuple):
    """What changes the kernels, beside their mods."""

    dtype: torch.dtype
    d_qk: int
    d_v: int
    units: tuple[bool, bool, bool] = (True, True, True)  # is the head dim of q, k, v contiguous
    aligned: tuple[str, ...] = ()  # strides that are multiples of 16 bytes and are passed in that unit
    blocks: Blocks | None = None
    float32_precision: str = "ieee"
    scale_is_positive: bool = True
    output_max: bool = False
    output_rows: bool = False  # what the backward pass needs of every row
    exact_indices: bool = True
    split: bool = True
    balanced: bool = False  # sequences have parts by their lengths
    ragged: bool = False  # queries of all sequences follow one another
    by_tokens: bool = False  # and have tiles by their number, not by that of the longest sequence
    lengths: bool = False  # every sequence has a number of keys of its own
    located: bool = False  # every sequence says which entry of K and V it reads
    page_size: int = 0  # of paged K and V
    kv_dtype: torch.dtype | None = None  # of K and V where it is not that of q
    scales: bool = False  # K and V are to be multiplied by
    extras: Extras = ORDINARY
    values_in_keys: bool = False  # V is the first columns of K, in the same memory
    shared: bool = False  # another kernel leaves parts of keys that sequences share, for the same combine_splits

    @property
    def itemsize(self) -> int:
        """Of the wider of q and k: K and V are converted."""
        return max((self.kv_dtype or self.dtype).itemsize, self.dtype.itemsize)


def not_few(q_len: int, known: ForwardCase) -> str | None:
    """Why no kernel for few queries, in Triton or C++, serves a call without a cache; None if one may."""
    if q_len > MAX_QUERIES:
        return f"query has {q_len} positions, more than {MAX_QUERIES}"
    if known.dtype.itemsize == 1 or known.extras.scales:
        return "float8: other kernels have it"
    if known.extras.dropout:
        return "dropout: the portable kernels have it"
    if known.blocks and known.blocks.shifted:
        return "blocks lie in a longer sequence"
    return None


def case_of_few(known: ForwardCase, **others) -> DecodeCase:
    """The case of a call without a cache, from that of its forward pass, with `others`."""
    return DecodeCase(
        known.dtype,
        known.d_qk,
        known.d_v,
        known.units,
        known.aligned,
        known.blocks and known.blocks._replace(interior=True),
        known.options.float32_precision,
        known.scale_is_positive,
        known.output_max,
        known.output_rows,
        known.exact_indices,
        extras=known.extras,
        values_in_keys=known.values_in_keys,
    )._replace(**others)


def vector_of(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> int:
    """Elements of the narrower of q and k that are 16 bytes."""
    return 16 // min((kv_dtype or dtype).itemsize, dtype.itemsize)


@dataclass(eq=False, slots=True)
class DecodePlan:
    """The kernels' text, their tile and how to find the mods' arguments. `combine` is None where keys are not split."""

    spec: KernelSpec
    combine: KernelSpec | None
    tile: Tile
    score: ModText | None
    mask: ModText | None
    scale_apart: bool  # SM_SCALE and TO_LOG2 are two arguments


class Rows(NamedTuple):
    """How queries and heads that share keys make up the rows of a tile."""

    queries: int
    pack: int  # heads

    @property
    def rows(self) -> int:
        """A power of two, 16 at least."""
        return max(16, 1 << (self.queries * self.pack - 1).bit_length())


def rows_of(q_len: int, group: int, q_block: int = 0, most: int = 2 * MAX_ROWS) -> Rows:
    """The rows for up to `q_len` queries of every head and groups of `group` heads; a tile's queries lie in one block of the lists, and it
    has at most `most` rows (most_rows)."""
    pack = next(n for n in range(min(group, most), 0, -1) if group % n == 0)
    room = max(1, min(MAX_ROWS, most) // pack)
    queries = min(1 << (q_len - 1).bit_length(), 1 << room.bit_length() - 1)  # powers of two
    while q_block and q_block % queries:
        queries //= 2
    return Rows(queries, pack)


def splits_of(keys: int, programs: int, multiprocessors: int) -> int:
    """Into how many parts to split `keys` keys, which `programs` programs would read without splitting, for the shortest time.

    One program has enough loads in flight for its multiprocessor and tiles leave no room for a second, so time goes by whole waves. Adding
    parts up takes a second kernel, and a little for every part.
    """

    def time(splits: int) -> float:
        waves = programs * splits / multiprocessors
        return math.ceil(waves) / waves + (0.02 if splits > 1 else 0.0) + 0.004 * splits

    return min(range(1, max(1, min(MAX_WAVES * multiprocessors // programs, keys // MIN_SHARE)) + 1), key=time)


class Parts(NamedTuple):
    """Into how many parts keys are split."""

    room: int  # of one sequence at most; 0: not split
    least: int = MIN_SHARE  # keys of a part
    of_all: int = 0  # of all sequences together, where their lengths decide


def parts_of(keys: int, programs: int, sequences: int, multiprocessors: int, *, lengths: bool, listed: bool, invariant: bool) -> Parts:
    """How to split. `lengths`: sequences have numbers of keys of their own; `listed`: block lists say which; `invariant`: a sequence's
    parts must not depend on the others."""
    if invariant:
        return Parts(-(-keys // FIXED_SHARE), FIXED_SHARE)
    splits = splits_of(keys, programs, multiprocessors)
    if lengths and not listed and programs <= MAX_WAVES * multiprocessors:
        room = max(splits, min(ROOM, keys // MIN_SHARE))
        return Parts(room, of_all=sequences * splits) if room > 1 else Parts(0)
    return Parts(splits if splits > 1 else 0)


def differs_by_head(score: ModGraph | None) -> Expr | None:
    """A dot product of rows that have another row of a key for each head: heads are rows of one tile here, and share all that is by key."""
    dots = dots_of(score) if score else ()
    return next((dot for dot in dots if "h" in symbols_in(dot.args[1])), None)


def check_heads(score: ModGraph | None) -> None:
    """Raises ModError for a dot product that decode has no tile for. cpu_decode has no need of one, and refuses what other devices do."""
    dot = differs_by_head(score)
    if dot is not None:
        raise mod_error(
            f"a dot product of {dot.attr} elements with a row read by kv_idx and h",
            "With a cache, heads that share keys share such rows, too, on all devices: read it by b and kv_idx alone.",
            dot.source,
            "score",
        )


def plan_decode(case: DecodeCase, backend: str, arch: str, score: Mod | None, mask: Mod | None, rows: int) -> DecodePlan:
    """The plan for a backend ("cuda", "hip", "cpu"), a row of the tile tables, and tiles of so many rows."""
    check_heads(score and score[0])
    precision = case.float32_precision
    target = Target(backend, dtype_name(case.dtype), case.exact_indices, packed_heads=True, float32_precision=precision)
    score_text, mask_text = lowered(score, mask, target)
    tile = decode_tile(
        arch,
        rows,
        padded(case.d_qk, width_of_dots(score and score[0])),
        padded(case.d_v),
        case.itemsize,
        kv_block=case.blocks.kv_block if case.blocks else 0,
        paged=case.page_size > 0,
        values_in_keys=case.values_in_keys,
    )
    scale_apart = score is not None or not case.scale_is_positive or case.scales
    combine = combine_spec(case, backend, scale_apart) if case.split else None
    return DecodePlan(_spec(case, backend, score_text, mask_text, scale_apart), combine, tile, score_text, mask_text, scale_apart)


def _spec(case: DecodeCase, backend: str, score: ModText | None, mask: ModText | None, scale_apart: bool) -> KernelSpec:
    units = case.units
    block_args = ["K", *(["PAGES", "Zkv", "stride_kz"] if case.page_size else []), "stride_kn", *([] if units[1] else ["stride_kd"])]
    if not case.values_in_keys:
        block_args += ["V", *(["stride_vz"] if case.page_size else []), "stride_vn", *([] if units[2] else ["stride_vd"])]
    parameters = (*decode_parameters(case, score, mask, scale_apart), *constants("BLOCK_M", "BLOCK_N"))
    taken = {p.name for p in parameters}
    flags = {
        **element_flags(case, case.float32_precision),
        "Q_UNIT": units[0],
        "K_UNIT": units[1],
        "V_UNIT": units[2],
        "VALUES_IN_KEYS": case.values_in_keys,
        "aligned": tuple(name for name in case.aligned if name in taken),
        "ALIGNMENT": vector_of(case.dtype, case.kv_dtype),
        **call_flags(case, scale_apart),
        "KV_SCALES": case.scales,
        "CONVERTS": case.kv_dtype is not None,
        "kv_params": ", ".join(block_args),
    }
    return KernelSpec("decode", (score, mask), tuple(flags.items()), backend, parameters)


def call_flags(case: DecodeCase, scale_apart: bool) -> dict[str, object]:
    """What decode and its kernel for Hopper alike know of a call: its lists, outputs, sequences and parts."""
    return {
        **block_flags(case.blocks),
        "SCALE_FIRST": scale_apart,
        "OUTPUT_MAX": case.output_max,
        "OUTPUT_ROWS": case.output_rows,
        **(ORDINARY if case.split else case.extras).flags,
        "SPLIT": case.split,
        "BALANCED": case.balanced,
        "RAGGED": case.ragged,
        "BY_TOKENS": case.by_tokens,
        "LENGTHS": case.lengths,
        "LOCATED": case.located,
        "PAGE_SIZE": case.page_size,
    }


def decode_parameters(case: DecodeCase, score: ModText | None, mask: ModText | None, scale_apart: bool) -> tuple[Parameter, ...]:
    """What decode takes, but constants."""
    dtype, kept = dtype_name(case.dtype), dtype_name(case.kv_dtype or case.dtype)
    places = f"pages, Hkv, {case.page_size}" if case.page_size else "Zkv, Hkv, KV_LEN"
    rows = "T, Hq" if case.ragged else "Z, Hq, Q_LEN"
    found = [pointer("K", kept, f"[{places}, D_QK]{', V the first D_V columns' if case.values_in_keys else ''}")]
    found += [] if case.values_in_keys else [pointer("V", kept, f"[{places}, D_V]")]
    found.append(pointer("Q", dtype, f"[{rows}, D_QK]"))
    if case.split:
        found += _part_parameters(rows)
    else:
        found.append(pointer("O", dtype, f"[{rows}, D_V] in any strides, written"))
        found += statistic_parameters(rows, case.output_max, case.output_rows)
        found += case.extras.of_sinks
    found += place_parameters(case)
    if case.scales:
        found += [pointer(name, "float32", "[Hkv]: to be multiplied by") for name in ("K_SCALES", "V_SCALES")]
    sizes = ["Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", *stride_names_of(case.units, case.values_in_keys)]
    sizes += scale_names(scale_apart)
    sizes += ["QUERIES", "PACK", *(["SPLITS", "MIN_SHARE"] if case.split else []), *(["Z"] if case.balanced or case.by_tokens else [])]
    sizes += ["PARTS"] if case.balanced else []
    sizes += [*(["stride_pages"] if case.page_size else []), *(["T"] if case.ragged else []), *list_numbers(case.blocks)]
    mods = tuple(p for m in (score, mask) if m for p in m.parameters)
    return (*found, *numbers(*sizes), *list_tables(case.blocks), *mods)


def place_parameters(case) -> list[Parameter]:
    """Where the queries and keys of sequences are, as a case's `ragged`, `lengths`, `located` and `page_size` say."""
    found = []
    if case.ragged:
        starts = "where each sequence's queries start among the T tokens, and the last one's end. Q_LEN is the largest"
        found.append(pointer("CU_Q", "int32", f"[Z + 1]: {starts} length: of a longer sequence, that many queries are computed"))
    if case.lengths:
        found.append(pointer("KV_LENS", "int32", "[Z]: keys of each sequence, at most KV_LEN"))
    if case.located:
        found.append(pointer("KV_LOCS", "int32", "[Z]: which of Zkv entries of K and V is the sequence's; another has no keys"))
    if case.page_size:
        meaning = f"[Z, pages]: which of Zkv pages of {case.page_size} keys hold the sequence's keys, in order; another holds zeros"
        found.append(pointer("PAGES", "int32", meaning))
    return found


def _part_parameters(rows: str) -> tuple[Parameter, ...]:
    """What decode leaves for combine_splits; rows as in lse."""
    return (
        pointer("PART", "float32", f"[{rows}, SPLITS, D_V]: outputs of the parts"),
        pointer("PART_SHARE", "float32", f"[{rows}, SPLITS]: log2 of the weight of PART_MAX in the part"),
        pointer("PART_MAX", "float32", f"[{rows}, SPLITS]: the largest scores of the parts"),
        pointer("PART_COUNT", "int32", f"[{rows}]: how many parts there are"),
    )


def parts_at_once(d_v: int) -> int:
    """How many parts combine_splits reads at a time, BLOCK_S."""
    return min(16, PART_ELEMENTS // round_up_head_dim(d_v))


def combine_spec(case: DecodeCase, backend: str, scale_apart: bool) -> KernelSpec:
    """combine_splits, for what the kernels leave of parts."""
    flags = {
        "D_V": case.d_v,
        "D_V_ROUNDED": round_up_head_dim(case.d_v),
        "RAW": not scale_apart,
        "OUTPUT_MAX": case.output_max,
        "OUTPUT_ROWS": case.output_rows,
        "RAGGED": case.ragged,
        "SHARED": case.shared,
        **case.extras.flags,
    }
    shared = "[queries]: how many of the shared keys' parts there are"
    parameters = (
        *_part_parameters("rows"),
        *([pointer("SHARED_PARTS", "int32", shared)] if case.shared else []),
        pointer("O", dtype_name(case.dtype), "[rows, D_V] in any strides, written"),
        *statistic_parameters("rows", case.output_max, case.output_rows),
        *case.extras.of_sinks,
        *numbers("MIDDLE", "INNER", "SPLITS", *(["MOST", "FIRST_SHARED"] if case.shared else [])),
        *numbers("stride_outer", "stride_middle", "stride_inner", "TO_LOG2"),
        *constants("BLOCK_S"),
    )
    return KernelSpec("combine_splits", (), tuple(flags.items()), backend, parameters)
