"""The kernels of masks as a plan: a mask_mod lowered for them, and their KernelSpecs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..mod.expr import INDEX_BOUND, ModGraph
from ..mod.graphs.intervals import analyse
from ..mod.table.op import kind
from ..registry import remembered
from ..text.language import Language
from ..text.languages import TRITON
from ..text.layouts import layouts_of
from ..text.mod_text import ModText, mod_text, values_of
from ..text.parameters import Parameter, constants, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec

SYMBOL_NAMES = {"score": "score", "b": "z", "h": "h", "q_idx": "m", "kv_idx": "n"}
STATUS_CHUNK = {"cpu": 1024}  # blocks of a program of block_status; elsewhere 64
EVALUATED_TILE = {"cpu": 128}  # rows and columns of a tile of a block that it evaluates; elsewhere 32

Bound = tuple[ModGraph, list]


@dataclass(frozen=True, slots=True)
class ZoneText:
    """A zone as templates see it: a part of the mask along `axis`, and in what its least and greatest value are kept and computed."""

    name: str
    axis: str
    dtype: str
    computed: str
    text: ModText

    @property
    def names(self) -> tuple[str, str]:
        """Of the tensors in which its values are kept."""
        return f"{self.name}_min", f"{self.name}_max"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Which take them."""
        shape = f"[Zm, Hm, {'rows' if self.axis == 'q_idx' else 'columns'}], of a part of {self.axis}"
        return tuple(pointer(name, self.dtype, shape) for name in self.names)


_ZONE_DTYPES = {"bool": ("int8", "int32"), "float": ("float32", "float32"), "int": ("int64", "int64")}


@dataclass(frozen=True)
class MaskTexts:
    """A mask_mod lowered for its kernels: itself, its verdict on blocks and the zones that the verdict reads.

    All have their captures in common, so a parameter's name means the same in each.
    """

    mask: ModText
    verdict: ModText
    zones: tuple[ZoneText, ...]

    def named(self, captured: list) -> dict[str, object]:
        """The kernels' arguments by name, from what the mask_mod captures."""
        return dict(zip(self._recipe, values_of(self._recipe.values(), captured), strict=True))

    @functools.cached_property
    def _recipe(self) -> dict[str, tuple]:
        """Of all texts, which share most of it."""
        found: dict[str, tuple] = {}
        for text in (self.mask, self.verdict, *(zone.text for zone in self.zones)):
            for name, step in zip(text.args, text.recipe, strict=True):
                if found.setdefault(name, step) != step:
                    raise AssertionError(f"{name} has two meanings in the texts of one mask_mod")
        return found


def parts_of(graph: ModGraph) -> tuple[ModGraph, ...]:
    """A mask_mod, its verdict and its zones."""
    analysis = analyse(graph)
    return graph, analysis.verdict, *(zone.graph for zone in analysis.zones)


def mask_texts(
    bound: Bound, extents: tuple[int, int, int, int], backend: str, layouts: Callable = layouts_of, language: Language = TRITON
) -> MaskTexts:
    """Lower a mask_mod for its kernels. `extents` are Z, H, Q_LEN and KV_LEN; `layouts` says what texts may know of captured tensors."""
    graph, captured = bound
    target = Target(backend, "float32", max(extents[2:]) <= INDEX_BOUND, language)
    zones = analyse(graph).zones
    names = {name: name for name in ("q_min", "q_max", "kv_min", "kv_max")} | {"b": "z", "h": "h"}
    for i in range(len(zones)):
        names |= {f"zone{i}_min": f"zone{i}_low", f"zone{i}_max": f"zone{i}_high"}

    def text_of(part: ModGraph) -> ModText:
        known = layouts(part, captured, extents, graph)
        return mod_text(part, known, names if part.kind == "verdict" else SYMBOL_NAMES, target, tile="[TILE_M, TILE_N]")

    mask, verdict, *parts = map(text_of, parts_of(graph))
    return MaskTexts(
        mask,
        verdict,
        tuple(
            ZoneText(f"zone{i}", zone.axis, *_ZONE_DTYPES[kind(zone.graph.result.dtype)], text)
            for i, (zone, text) in enumerate(zip(zones, parts, strict=True))
        ),
    )


def _spec(
    template: str, texts: tuple[ModText, ...], own: tuple[Parameter, ...], chosen: tuple[str, ...], backend: str, **flags
) -> KernelSpec:
    """A kernel that takes its `own` arguments, then what its texts capture, each once, and constants."""
    captured = tuple({p.name: p for text in texts for p in text.parameters}.values())
    flags["args"] = tuple(p.name for p in captured)
    return KernelSpec(template, texts, tuple(flags.items()), backend, (*own, *captured, *constants(*chosen)))


def begins(starts: bool) -> tuple[Parameter, ...]:
    """Where the blocks of a grid begin."""
    meaning = "first positions of blocks, and then the end of the last"
    names = (("q_starts", "[rows + 1]"), ("kv_starts", "[columns + 1]")) if starts else ()
    return tuple(pointer(name, "int32", f"{shape}: {meaning}") for name, shape in names)


_SIZES = numbers("Hm", "rows", "columns", "Q_LEN", "KV_LEN")


def zones_spec(texts: MaskTexts, size: tuple[int, int], backend: str, starts: bool = False) -> KernelSpec:
    """The KernelSpec of block_zones, for blocks of `size`. `starts`: see masks.BlockGrid."""
    parts = tuple(zone.text for zone in texts.zones)
    own = (*(p for zone in texts.zones for p in zone.parameters), *begins(starts), *_SIZES)
    return _spec("block_zones", parts, own, ("TILE",), backend, Q_BLOCK=size[0], KV_BLOCK=size[1], STARTS=starts, zones=texts.zones)


def status_constants(size: tuple[int, int], backend: str) -> dict[str, int]:
    """CHUNK, TILE_M and TILE_N of block_status."""
    tile_m, tile_n = (min(EVALUATED_TILE.get(backend, 32), power_of_two(n)) for n in size)
    return {"CHUNK": STATUS_CHUNK.get(backend, 64), "TILE_M": tile_m, "TILE_N": tile_n}


def status_spec(texts: MaskTexts, size: tuple[int, int], backend: str, starts: bool = False) -> KernelSpec:
    """The KernelSpec of block_status."""
    tile = status_constants(size, backend)
    own = (
        pointer("status", "int8", "[Zm, Hm, rows, columns]: 0 empty, 1 partial, 2 full; written"),
        pointer("num_blocks", "int32", "[Zm, Hm, rows], zero before: how many are partial"),
        pointer("num_full", "int32", "[Zm, Hm, rows], zero before: how many are full"),
        *begins(starts),
        *_SIZES,
        *(p for zone in texts.zones for p in zone.parameters),
    )
    return _spec(
        "block_status",
        (texts.mask, texts.verdict),
        own,
        tuple(tile),
        backend,
        Q_BLOCK=size[0],
        KV_BLOCK=size[1],
        STARTS=starts,
        zones=texts.zones,
        RAGGED_M=size[0] % tile["TILE_M"] != 0,
        RAGGED_N=size[1] % tile["TILE_N"] != 0,
    )


def list_names(separate_full: bool) -> tuple[str, ...]:
    """The parameters of block_lists that take the lists, in the order of BlockLists."""
    return "num_blocks", "indices", *(("full_num_blocks", "full_indices") if separate_full else ())


def _lists(separate_full: bool, lines: str, what: str) -> tuple[Parameter, ...]:
    shapes = (f"[Zm, Hm, {lines}]", f"[Zm, Hm, {lines}, width]") * 2
    meanings = (f": {what}", "", ": full blocks", "")
    return tuple(
        pointer(name, "int32", f"{shape}{meaning}")
        for name, shape, meaning in zip(list_names(separate_full), shapes, meanings, strict=False)
    )


def lists_parameters(separate_full: bool, starts: bool) -> tuple[Parameter, ...]:
    """What makes lists from a status takes."""
    meaning = "first positions of blocks, which the lists hold instead of their numbers, and then the end of the last"
    return (
        *_lists(separate_full, "rows", "partial blocks" if separate_full else "partial blocks and full ones"),
        *([pointer("starts", "int32", meaning)] if starts else []),
        pointer(
            "status", "int8", "0 empty, 1 partial, 2 full; through strides, so that a transposed view gives the lists of a backward pass"
        ),
        *numbers("width", *(["full_width"] if separate_full else []), "Hm", "rows", "columns"),
        *numbers("stride_z", "stride_h", "stride_row", "stride_column"),
    )


@remembered("specs of block_lists", 64)
def lists_spec(separate_full: bool, backend: str, starts: bool = False) -> KernelSpec:
    """The KernelSpec of block_lists from a status."""
    own = lists_parameters(separate_full, starts)
    return _spec("block_lists", (), own, ("CHUNK",), backend, TRANSPOSED=False, SEPARATE_FULL=separate_full, STARTS=starts)


def verdict_lists_spec(texts: MaskTexts, size: tuple[int, int], backend: str, transposed: bool, starts: bool = False) -> KernelSpec:
    """The KernelSpec of block_lists straight from verdicts."""
    own = (
        *_lists(True, "columns" if transposed else "rows", "partial blocks, and undecided ones"),
        *begins(starts),
        *numbers("width"),
        *_SIZES,
        *(p for zone in texts.zones for p in zone.parameters),
    )
    return _spec(
        "block_lists",
        (texts.verdict,),
        own,
        ("CHUNK",),
        backend,
        Q_BLOCK=size[0],
        KV_BLOCK=size[1],
        zones=texts.zones,
        TRANSPOSED=transposed,
        SEPARATE_FULL=True,
        STARTS=starts,
    )


def starts_parameters(sequences: bool) -> tuple[Parameter, ...]:
    """What says where blocks of packed sequences begin takes, and of which sequences they are."""
    owners = "each block's sequence, or n (how many there are) after the last; holds n before; written"
    return (
        pointer("cu_seqlens", "int32", "[sequences + 1]: 0, then the end of each sequence"),
        pointer("starts", "int32", "[RANGES + 1]: written; TOTAL before, and where no block is left"),
        *([pointer("sequences", "int32", f"[RANGES]: {owners}")] if sequences else []),
        *numbers("RANGES", "TOTAL"),
    )


@remembered("specs of block_starts", 64)
def starts_spec(block: int, backend: str, sequences: bool = False) -> KernelSpec:
    """The KernelSpec of block_starts, which may write the blocks' sequences too."""
    return _spec("block_starts", (), starts_parameters(sequences), ("CHUNK",), backend, BLOCK=block, SEQUENCES=sequences)


def dense_mask_spec(text: ModText, backend: str) -> KernelSpec:
    """The KernelSpec of dense_mask."""
    own = (pointer("mask", "bool", "[Z, Hm, Q_LEN, KV_LEN], contiguous; written"), *numbers("Hm", "Q_LEN", "KV_LEN"))
    return _spec("dense_mask", (text,), own, ("TILE_M", "TILE_N"), backend)


def power_of_two(n: int) -> int:
    """The next one."""
    return 1 << max(n - 1, 0).bit_length()
