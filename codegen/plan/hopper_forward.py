"""The forward kernel for Hopper as a plan: which calls it serves, and from what is known of one to a KernelSpec.

The kernel (templates/hopper_forward.py.jinja) is written in Gluon, for sm_90 alone. Its snippets are those of every other template.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..mod.expr import symbols_in
from ..mod.graphs.added_dots import AddedDot, added_dot
from ..mod.graphs.loads import POSITIONS, gathers, is_gather, loads_of, weight_of
from ..mod.graphs.sums import Sum
from ..mod.table.dtypes import dtype_name
from ..text.languages import GLUON
from ..text.mod_text import ModText
from ..text.parameters import Parameter, descriptor_of, numbers, pointer
from ..text.snippet import SumText, Target
from ..text.spec import KernelSpec
from .forward import (
    Cache,
    ForwardCase,
    Mod,
    batch_inside,
    block_flags,
    list_numbers,
    list_tables,
    lowered,
    mask_of_runs,
    scale_names,
    statistic_parameters,
)
from .geometry import STRIDES, Geometry
from .hopper_dots import DotRows, dot_flags, rest_of, rows_of, why_no_dot
from .hopper_elements import Elements, copied_flags, copied_load, elements_of, with_elements
from .hopper_tiles import ROWS, WIDEST_8, HopperTile, head_dim_flags, hopper_tile, padded, slices

HEAVY = {
    "dots": "a dot product of rows of captured tensors is a further product of matrices, which this kernel has not",
    "vectors": "vectors of captured tensors take more registers than its tiles leave",
}
L2_BYTES = 32 << 20  # of K and V that heads which are worked on at a time may take
UNEVEN_BYTES = 128 << 20  # the same under a mask that is_uneven, of which little is visited at a time
FEW_KEYS = 256  # which the portable kernel is through with before this one's programs have begun their work
SPILL_LIMIT = 1024  # bytes of a thread; a mod of a dozen library calls spills 20 times that, and the portable kernel is then twice as fast


Copies = tuple[DotRows | Elements, ...]  # captured tensors that TMA copies from


@dataclass(eq=False, slots=True)
class HopperPlan:
    """The kernel's text, its tile and how to find the mods' arguments."""

    spec: KernelSpec
    tile: HopperTile
    score: ModText | None
    mask: ModText | None
    scale_apart: bool  # SM_SCALE and TO_LOG2 are two arguments
    copies: Copies = ()


def fits(case: ForwardCase, geometry: Geometry, arch: str = "sm_90", aligned: bool = True, score: tuple | None = None) -> str | None:
    """Why a call cannot be served, or None if it can. `score` begins with the score_mod's graph.

    aligned   the addresses of q, k and v are multiples of 16 bytes
    """
    if arch != "sm_90":
        return f"the kernel for Hopper needs sm_90, this is {arch}"
    if score and weight_of(score[0]):
        why = why_no_dot(case, padded(case), *score) if weight_of(score[0]) == "dots" else HEAVY["vectors"]
        if why:
            return why
    if case.dtype is torch.float8_e4m3fn:
        if case.cache or case.d_qk > WIDEST_8.q_and_k or case.d_v > WIDEST_8.v:
            return f"head dims are {case.d_qk} and {case.d_v}; for float8 there are tiles for up to 192 and 128, without a cache"
        if case.blocks and case.blocks.starts:
            return "blocks begin anywhere, and TMA copies values by keys from multiples of 16 keys on"
    elif case.dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype_name(case.dtype)} has no wgmma of its precision"
    elif case.extras.out:
        return f"query became {dtype_name(case.dtype)} and the output is {case.extras.out}, which does not go into query's shared memory"
    least = 33 if case.cache else 17
    if not all(least <= d <= 256 for d in (case.d_qk, case.d_v)):
        return f"head dims are {case.d_qk} and {case.d_v}; there are tiles for {least} to 256"
    if not (geometry.tma and geometry.q_tma and aligned):
        return "TMA cannot load q, k or v: a head dim that is not contiguous, or an address or strides that are no multiples of 16 bytes"
    if case.options.use_tma is False:
        return "USE_TMA is False"
    if case.extras.dropout == "packed" and not (case.blocks and case.blocks.starts):
        return "dropout of packed sequences whose blocks do not begin where they do: the portable kernels have it"
    if case.options.prescale_qk:
        return "PRESCALE_QK: q goes to shared memory as it is"
    tile = [name for name, _ in case.options.tile if name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]
    if tile:
        return f"{', '.join(tile)}: this kernel has tiles of its own"
    if case.blocks:
        tile = hopper_tile(*padded(case), listed=True, reads=False)
        if case.blocks.q_block % tile.BLOCK_M or case.blocks.kv_block % tile.BLOCK_N:
            return f"block sizes {case.blocks.q_block} and {case.blocks.kv_block} are no multiples of {tile.BLOCK_M} and {tile.BLOCK_N}"
        if case.blocks.starts and case.blocks.q_block != tile.BLOCK_M:
            return (
                f"blocks that begin where a tensor says are tiles: they must have {tile.BLOCK_M} queries, these have {case.blocks.q_block}"
            )
    size = case.cache.page_size if case.cache else 0
    if size % 128 and size not in (8, 16, 32, 64):
        return f"pages have {size} keys; TMA copies pages of 8, 16, 32 or 64 and whole blocks of pages of multiples of 128"
    return None


def worthwhile(q_len: int, kv_len: int, heads: int, head_dim: int, listed: bool, multiprocessors: int) -> str | None:
    """Why the portable kernel is faster for a call that the one for Hopper could serve, or None if it is not.

    head_dim   the larger one of D_QK and D_V
    listed     there are block lists
    """
    if q_len <= ROWS:
        return f"there are {q_len} queries, which is half of a tile or less"
    tiles, few = tiles_of_two(q_len, heads), few_keys(head_dim, listed)
    if 2 * tiles < multiprocessors and not (gains_alone(head_dim, listed) and kv_len > few):
        return f"there are {tiles} tiles of {2 * ROWS} queries, for {multiprocessors} multiprocessors"
    if tiles <= few // max(kv_len, FEW_KEYS) * multiprocessors:
        return f"there are {kv_len} keys and {tiles} tiles of {2 * ROWS} queries, for {multiprocessors} multiprocessors"
    return None


def tiles_of_two(q_len: int, heads: int) -> int:
    """How many tiles of two consumers there are."""
    return -(-q_len // (2 * ROWS)) * heads


def few_keys(head_dim: int, listed: bool) -> int:
    """Up to so many keys the portable kernel is faster, if every multiprocessor has a tile. With two tiles for each, up to half as many."""
    return 0 if head_dim > 128 else 2 * FEW_KEYS if head_dim <= 64 and listed else FEW_KEYS


def gains_alone(head_dim: int, listed: bool) -> bool:
    """Is a tile of this kernel through sooner than smaller ones of the portable kernel, even with a multiprocessor for each of those?"""
    return head_dim <= 64 and not listed


def are_few(q_len: int, heads: int, multiprocessors: int) -> bool:
    """Are there so few tiles that larger ones would leave multiprocessors idle in their last round? 192 tiles of 128 rows take two rounds
    on 132 multiprocessors, and 128 tiles of 192 rows one that is half as long again; 256 take two, and 171 of 192 rows two longer ones."""
    return tiles_of_two(q_len, heads) <= 2 * multiprocessors


def scores_are_raw(terms: Sum | SumText | None, scale_is_positive: bool) -> bool:
    """Does a kernel for Hopper keep the scores of a score_mod with these terms without scale? One operation less a score, where distances
    alone are added."""
    return bool(terms and terms.rate and not terms.key and scale_is_positive)


def heads_per_group(heads: int, bytes_each: int, enough: int, cached: int = L2_BYTES) -> int:
    """How many heads are worked on at a time, if each reads so many bytes again and again: `enough`, but no more than have theirs among the
    `cached` bytes that stay in the L2 cache."""
    groups = -(-heads // max(1, min(enough, cached // max(1, bytes_each))))
    return -(-heads // groups)


def is_uneven(mask: Mod | None) -> bool:
    """Does a mask read what queries, or keys, have of their own, as of documents? Then long rows may lie anywhere."""
    return mask is not None and any(symbols_in(load) & POSITIONS and not is_gather(load) for load in loads_of(mask[0]))


class HeadGroup(NamedTuple):
    """How many heads of K and V are worked on at a time.

    tiles   of queries that these heads have together
    least   so many heads, even if that is more tiles
    whole   up to so many tiles of all heads, all heads are one group
    """

    tiles: int
    least: int = 1
    whole: int = 0

    def heads(self, heads: int, tiles: int) -> int:
        """How many of `heads`, each with so many tiles."""
        return heads if heads * tiles <= self.whole else max(self.least, -(-self.tiles // tiles))


def head_group(listed: bool, uneven: bool = False) -> HeadGroup:
    """Without lists few heads: programs that all begin with another head wait for memory together and then leave it idle. With lists the
    longest rows of a group go first, so a group has a tile for every multiprocessor, and several heads. Uneven masks may have their longest
    rows anywhere: groups are large, so that the last one is a small part of the whole."""
    if not listed:
        return HeadGroup(32)
    return HeadGroup(2048) if uneven else HeadGroup(128, least=4, whole=512)


def enough_heads(heads: int, tiles: int, listed: bool, uneven: bool = False) -> int:
    """How many of `heads` of K and V, each with so many tiles of queries, are worked on at a time."""
    return head_group(listed, uneven).heads(heads, tiles)


def plan_hopper_forward(case: ForwardCase, score: Mod | None, mask: Mod | None) -> HopperPlan:
    """The plan for a case that `fits`."""
    added = added_dot(score[0]) if score and weight_of(score[0]) == "dots" else None
    score = rest_of(added, score) if added else score
    grouped = bool(case.cache and case.cache.grouped)
    cached = {"rows_before_first": case.cache is not None, "packed_sequences": grouped}
    target = Target("cuda", dtype_name(case.dtype), case.exact_indices, GLUON, **cached)
    # the short way of distances counts on positions from 0 on, and those in a cache may be negative
    shown, vectors = mask_of_runs(mask, "kv_idx", target), {"b": "z", "h": "h", "q_idx": "rows", "kv_idx": "offs_n"}
    copied = copied_load(score) if score and case.copies else None
    score_text, mask_text = lowered(score, shown, target, vectors, by_distance=case.cache is None, copied=copied)
    handed = sum(m.staged("q_idx", "kv_idx").handed_bytes for m in (score_text, mask_text) if m)
    reads = handed > 0 or any(gathers(m[0]) for m in (score, mask) if m)
    long = case.cache is None and not case.extras.dropout and not (case.blocks and case.blocks.kv_block % 128)
    tile = hopper_tile(*padded(case), listed=case.blocks is not None or grouped or case.few_tiles, reads=reads, long=long)
    if case.dtype.itemsize == 1:
        wide = case.d_qk > 128 and case.extras.out == "float32"  # which leaves no room for a fourth stage
        tile = HopperTile(2, 3 if wide else 4, 240, 24)
    if added:
        wide = max(padded(case)) > 64
        tile = HopperTile(2, 2 if wide else 3, 240, 24, output_in_q=wide)
    if case.cache:  # the producer looks up pages
        tile = replace(tile, consumer_registers=232, producer_registers=40)
    elements = None
    if score and copied:
        found = with_elements(case, tile, elements_of(score[0], copied), handed)
        if found is None:
            return plan_hopper_forward(case._replace(copies=False), score, mask)
        tile, elements = found
    scale_apart = score is not None or not case.scale_is_positive
    spec = _spec(case, tile, score_text, mask_text, scale_apart, batch_inside(score, mask), added, elements)
    return HopperPlan(spec, tile, score_text, mask_text, scale_apart, _copies(added, elements))


def _copies(added: AddedDot | None, elements: Elements | None) -> Copies:
    """Those of a dot product that is added, or the elements of scores."""
    return (elements,) if elements else rows_of(added) if added else ()


def _spec(
    case: ForwardCase,
    tile: HopperTile,
    score: ModText | None,
    mask: ModText | None,
    scale_apart: bool,
    inside: bool,
    added: AddedDot | None,
    elements: Elements | None,
) -> KernelSpec:
    blocks, mods = case.blocks, [m for m in (score, mask) if m]
    starts = blocks is not None and blocks.starts
    cache = case.cache or Cache()
    flags = {
        "LANGUAGE": GLUON.name,
        "DTYPE": dtype_name(case.dtype),
        "FLOAT8": case.dtype is torch.float8_e4m3fn,
        **head_dim_flags(case),
        "OUTPUT_IN_Q": tile.output_in_q,
        "CONSUMERS": tile.consumers,
        "STAGES": tile.stages,
        "REST_STAGES": tile.rest_stages,
        "BLOCK_N": tile.BLOCK_N,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
        **block_flags(blocks),
        "STEPS": blocks.kv_block // tile.BLOCK_N if blocks else 1,
        "CHECK_FULL_BLOCKS": blocks is not None and not blocks.interior,
        "STARTS": starts,
        "BATCH_INSIDE": inside,
        "CACHED": case.cache is not None,
        "GROUPED": cache.grouped,
        "PAGE_SIZE": cache.page_size,
        "LOCATED": cache.located,
        "OFFSETS": cache.offsets,
        "SCALE_FIRST": scale_apart,
        # combine_splits knows scores with a score_mod by their scale
        "SUM_IS_RAW": scores_are_raw(score and score.sum, case.scale_is_positive and not case.extras.scales and not cache.grouped)
        or bool(added and not score),
        **dot_flags(added),
        **copied_flags(elements),
        "OUTPUT_MAX": case.output_max,
        "OUTPUT_ROWS": case.output_rows,
        **case.extras.flags,
        "SCALED": bool({"q", "k"} & set(case.extras.scales)),  # scores have a factor of each head
        "imports_triton": any("tl" in m.modules for m in mods),
    }
    parameters = _parameters(case, tile, tuple(p for m in mods for p in m.parameters), scale_apart, _copies(added, elements))
    return KernelSpec("hopper_forward", (score, mask), tuple(flags.items()), "cuda", parameters)


def _parameters(
    case: ForwardCase, tile: HopperTile, mods: tuple[Parameter, ...], scale_apart: bool, copies: Copies
) -> tuple[Parameter, ...]:
    blocks, cache, dtype, N = case.blocks, case.cache, dtype_name(case.dtype), tile.BLOCK_N
    starts, out = blocks is not None and blocks.starts, case.extras.out or dtype
    d_qk, d_v = (d // slices(d) for d in padded(case))
    pieces = cache is not None and 0 < cache.page_size < N  # of a block, which TMA copies apart
    if cache and cache.grouped:
        return _parameters_of_groups(case, N, pieces, mods, scale_apart)
    found = [
        descriptor_of("K", dtype, *((cache.page_size, 64) if pieces else (N, d_qk))),
        descriptor_of("V", dtype, *((cache.page_size, 64) if pieces else (d_v, N) if case.dtype.itemsize == 1 else (N, d_v))),
        descriptor_of("Q", dtype, ROWS, d_qk),
        descriptor_of("O", out, ROWS, d_v),
        *(descriptor_of(c.name, *c.block(dtype, N)) for c in copies),
        *([pointer("O", out)] if starts else []),
        *statistic_parameters("T, Hq" if cache else "Z, Hq, Q_LEN", case.output_max, case.output_rows),
        *case.extras.of_sinks,
        *case.extras.of_dropout,
        *case.extras.of_scales,
        pointer("COUNTER", "int32"),
    ]
    sizes = [
        "Hq",
        "Zkv",
        "GROUP_SIZE",
        "Q_LEN",
        "KV_LEN",
        "HEADS",
        "HEADS_PER_GROUP",
        *scale_names(scale_apart),
        *case.extras.numbers,
        *list_numbers(blocks),
    ]
    sizes += STRIDES["o"] if starts else ()
    tables = list_tables(blocks)
    if cache:
        sizes += ["SEQUENCES", "MAX_Q", *(["stride_pages"] if cache.page_size else [])]
        where = ["pages"] if cache.page_size else ["kv_locs"] if cache.located else []
        places = ("sequences", "cu_q", "kv_lens", *(["q_offsets"] if cache.offsets else []), *where)
        tables += tuple(pointer(name, "int32") for name in places)
    return (*found, *numbers(*sizes), *tables, *mods)


def _parameters_of_groups(case: ForwardCase, N: int, pieces: bool, mods: tuple[Parameter, ...], scale_apart: bool) -> tuple[Parameter, ...]:
    """Those of the kernel that reads prefixes of groups, and leaves parts."""
    dtype, size, (d_qk, d_v) = dtype_name(case.dtype), case.cache.page_size, (d // slices(d) for d in padded(case))  # type: ignore[union-attr]
    found = [descriptor_of(name, dtype, *((size, 64) if pieces else (N, width))) for name, width in (("K", d_qk), ("V", d_v))]
    found += [pointer("Q", dtype), *(pointer(name, "float32") for name in ("PART", "PART_SHARE", "PART_MAX")), pointer("COUNTER", "int32")]
    sizes = ["Hq", "GROUP_SIZE", "KV_LEN", "QUERIES", "SPLITS", *STRIDES["q"][:3], "stride_pages"]
    tables = "tiles_of_groups", "count", "lengths", "pages", "token", "sequence", "position"
    numbers_of_lists = list_numbers(case.blocks)
    return (
        *found,
        *numbers(*sizes, *scale_names(scale_apart), *numbers_of_lists),
        *list_tables(case.blocks),
        *(pointer(name, "int32") for name in tables),
        *mods,
    )
