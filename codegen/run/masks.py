"""Masks by printed kernels: zone maps, block classification, block lists and the dense mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..device.kernel import Kernel, backend_of, kernel_for
from ..mod.expr import INDEX_BOUND, ModGraph
from ..mod.intervals import analyse
from ..mod.ops import kind
from ..registry import INFO, Table
from ..text.snippet import Target
from ..text.spec import KernelSpec, ModText, layouts_of, mod_text
from .forward import BlockLists

SYMBOL_NAMES = {"score": "score", "b": "z", "h": "h", "q_idx": "m", "kv_idx": "n"}
DENSE_MASK_NUMBERS = ["Hm", "Q_LEN", "KV_LEN"]
DENSE_TILE = 64  # rows and columns of a tile of the dense mask
ZONE_TILE = 128  # positions that one step of block_zones takes
STATUS_CHUNK = {"cpu": 1024}  # blocks of a program of block_status; elsewhere 64
EVALUATED_TILE = {"cpu": 128}  # rows and columns of a tile of a block that it evaluates; elsewhere 32
LISTS_CHUNK, VERDICTS_CHUNK = 1024, 128  # blocks that one step of block_lists takes: from a status, by bounds
STARTS_CHUNK = 128  # sequences, and blocks of one, that a step of block_starts takes
_KEPT_MASKS, _KEPT_BYTES = 64, 1 << 22  # block lists of masks that capture no tensors: how many, and the size of one

Bound = tuple[ModGraph, list]
Starts = tuple[torch.Tensor, ...]

_plans: dict[tuple, object] = Table("mask plans", 1024)
_kept: dict[tuple, BlockLists] = Table("block lists", _KEPT_MASKS)


@dataclass(frozen=True, slots=True)
class ZoneText:
    """A zone as templates see it: a part of the mask along `axis`, and in what its least and greatest value are kept and computed."""

    name: str
    axis: str
    dtype: str
    computed: str
    text: ModText


_ZONE_DTYPES = {"bool": ("int8", "int32"), "float": ("float32", "float32"), "int": ("int64", "int64")}


@dataclass(frozen=True)
class MaskTexts:
    """A mask_mod lowered for its kernels: itself, its verdict on blocks and the zones that the verdict reads.

    All have their captures in common, so an argument's name means the same in each.
    """

    mask: ModText
    verdict: ModText
    zones: tuple[ZoneText, ...]


def _parts(graph: ModGraph) -> tuple[ModGraph, ...]:
    """A mask_mod, its verdict and its zones."""
    analysis = analyse(graph)
    return graph, analysis.verdict, *(zone.graph for zone in analysis.zones)


def mask_texts(bound: Bound, extents: tuple[int, int, int, int], backend: str) -> MaskTexts:
    """Lower a mask_mod for its kernels. `extents` are Z, H, Q_LEN and KV_LEN."""
    graph, captured = bound
    target = Target(backend, "float32", max(extents[2:]) <= INDEX_BOUND)
    zones = analyse(graph).zones
    names = {name: name for name in ("q_min", "q_max", "kv_min", "kv_max")} | {"b": "z", "h": "h"}
    for i in range(len(zones)):
        names |= {f"zone{i}_min": f"zone{i}_low", f"zone{i}_max": f"zone{i}_high"}
    mask, verdict, *parts = (
        mod_text(
            part, layouts_of(part, captured, extents), names if part.kind == "verdict" else SYMBOL_NAMES, target, tile="[TILE_M, TILE_N]"
        )
        for part in _parts(graph)
    )
    return MaskTexts(
        mask,
        verdict,
        tuple(
            ZoneText(f"zone{i}", zone.axis, *_ZONE_DTYPES[kind(zone.graph.result.dtype)], text)
            for i, (zone, text) in enumerate(zip(zones, parts, strict=True))
        ),
    )


def _args(texts: tuple[ModText, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for text in texts for name in text.args))


def _values(texts: tuple[ModText, ...], captured: list) -> list:
    """The kernel arguments, in the order of `_args`."""
    found: dict[str, object] = {}
    for text in texts:
        found |= zip(text.args, text.values(captured), strict=True)
    return list(found.values())


def _spec(template: str, texts: tuple[ModText, ...], numbers: list[str], backend: str, **flags) -> KernelSpec:
    args = _args(texts)
    flags |= {"args": args, "numbers": (*numbers, *(a for a in args if not a.startswith("ptr_")))}
    return KernelSpec(template, texts, tuple(flags.items()), backend)


_SIZES = ["Hm", "rows", "columns", "Q_LEN", "KV_LEN"]


def zones_spec(texts: MaskTexts, size: tuple[int, int], backend: str, starts: bool = False) -> KernelSpec:
    """The KernelSpec of block_zones, for blocks of `size`. `starts`: see BlockGrid."""
    parts = tuple(zone.text for zone in texts.zones)
    return _spec("block_zones", parts, _SIZES, backend, Q_BLOCK=size[0], KV_BLOCK=size[1], STARTS=starts, zones=texts.zones)


def status_constants(size: tuple[int, int], backend: str) -> dict[str, int]:
    """CHUNK, TILE_M and TILE_N of block_status."""
    tile_m, tile_n = (min(EVALUATED_TILE.get(backend, 32), _power_of_two(n)) for n in size)
    return {"CHUNK": STATUS_CHUNK.get(backend, 64), "TILE_M": tile_m, "TILE_N": tile_n}


def status_spec(texts: MaskTexts, size: tuple[int, int], backend: str, starts: bool = False) -> KernelSpec:
    """The KernelSpec of block_status."""
    tile = status_constants(size, backend)
    parts = texts.mask, texts.verdict
    return _spec(
        "block_status",
        parts,
        _SIZES,
        backend,
        Q_BLOCK=size[0],
        KV_BLOCK=size[1],
        STARTS=starts,
        zones=texts.zones,
        RAGGED_M=size[0] % tile["TILE_M"] != 0,
        RAGGED_N=size[1] % tile["TILE_N"] != 0,
    )


def lists_spec(separate_full: bool, backend: str, starts: bool = False) -> KernelSpec:
    """The KernelSpec of block_lists from a status."""
    widths = ["width", "full_width"] if separate_full else ["width"]
    numbers = [*widths, "Hm", "rows", "columns", "stride_z", "stride_h", "stride_row", "stride_column"]
    return _spec("block_lists", (), numbers, backend, TRANSPOSED=False, SEPARATE_FULL=separate_full, STARTS=starts)


def verdict_lists_spec(texts: MaskTexts, size: tuple[int, int], backend: str, transposed: bool, starts: bool = False) -> KernelSpec:
    """The KernelSpec of block_lists straight from verdicts."""
    return _spec(
        "block_lists",
        (texts.verdict,),
        ["width", *_SIZES],
        backend,
        Q_BLOCK=size[0],
        KV_BLOCK=size[1],
        zones=texts.zones,
        TRANSPOSED=transposed,
        SEPARATE_FULL=True,
        STARTS=starts,
    )


def starts_spec(block: int, backend: str, sequences: bool = False) -> KernelSpec:
    """The KernelSpec of block_starts, which may write the blocks' sequences too."""
    flags = ("BLOCK", block), ("SEQUENCES", sequences), ("numbers", ("RANGES", "TOTAL"))
    return KernelSpec("block_starts", (), flags, backend)


def dense_mask_spec(text: ModText, backend: str) -> KernelSpec:
    """The KernelSpec of dense_mask."""
    return KernelSpec("dense_mask", (text,), (("numbers", (*DENSE_MASK_NUMBERS, *text.numbers)),), backend)


@dataclass(frozen=True)
class _MaskPlan:
    """A mask_mod's texts, and its kernels so far."""

    texts: MaskTexts
    kernels: dict = field(default_factory=dict)

    def kernel(self, make, *details) -> Kernel:
        """The kernel of the spec that `make` gives."""
        key = make, details
        kernel = self.kernels.get(key)
        if kernel is None:
            kernel = self.kernels[key] = kernel_for(make(self.texts, *details))
        return kernel


class BlockGrid:
    """A bound mask_mod over a grid of blocks: (Z, H) masks of Q_LEN x KV_LEN positions, in blocks of `size`. Not one of them is empty.

    starts   where the blocks of queries, and those of keys, begin, or nothing (see BlockLists)

    Nothing here waits for the device.
    """

    def __init__(
        self, bound: Bound, extents: tuple[int, int, int, int], device: torch.device, size: tuple[int, int], starts: Starts = ()
    ) -> None:
        graph, self.captured = bound
        self.device, self.size, self.backend = device, size, backend_of(device.type)
        Z, H, Q_LEN, KV_LEN = extents
        rows, columns = (len(t) - 1 for t in starts) if starts else (-(-Q_LEN // size[0]), -(-KV_LEN // size[1]))
        self.starts = starts
        self.shape, self.numbers = (Z, H, rows, columns), (H, rows, columns, Q_LEN, KV_LEN)
        layouts = tuple(layouts_of(part, self.captured, extents) for part in _parts(graph))
        key = ("blocks", graph, layouts, device, size, max(Q_LEN, KV_LEN) <= INDEX_BOUND)
        plan = _plans.get(key)
        if plan is not None:
            INFO.hits += 1
        else:
            plan = _plans[key] = _MaskPlan(mask_texts(bound, extents, self.backend))
        self.plan: _MaskPlan = plan
        self.zones = self._measured()

    def _measured(self) -> list[torch.Tensor]:
        """Least and greatest value of every zone, (Z, H, rows or columns) each."""
        Z, H, rows, columns = self.shape
        zones = self.plan.texts.zones
        if not zones:
            return []
        maps = [
            torch.empty((Z, H, rows if zone.axis == "q_idx" else columns), dtype=getattr(torch, zone.dtype), device=self.device)
            for zone in zones
            for _ in range(2)
        ]
        kernel = self.plan.kernel(zones_spec, self.size, self.backend, bool(self.starts))
        parts = _values(tuple(z.text for z in zones), self.captured)
        kernel.launch(
            (Z * H * (rows + columns),), (*maps, *self.starts, *self.numbers, *parts), self.device, (ZONE_TILE,), num_warps=1, num_stages=1
        )
        return maps

    def status(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 (Z, H, rows, columns): 0 empty, 1 partial, 2 full; and int32 (2, Z, H, rows): how many are partial, and full."""
        Z, H, rows, columns = self.shape
        status = torch.empty(self.shape, dtype=torch.int8, device=self.device)
        counts = torch.zeros((2, Z, H, rows), dtype=torch.int32, device=self.device)
        kernel = self.plan.kernel(status_spec, self.size, self.backend, bool(self.starts))
        constants = status_constants(self.size, self.backend)
        texts = self.plan.texts
        kernel.launch(
            (Z * H * rows * -(-columns // constants["CHUNK"]),),
            (status, counts[0], counts[1], *self.starts, *self.numbers, *self.zones, *_values((texts.mask, texts.verdict), self.captured)),
            self.device,
            tuple(constants.values()),
            num_warps=4,
            num_stages=1,
        )
        return status, counts

    def lists(self, *, transposed: bool = False) -> list[torch.Tensor]:
        """Block lists (see `block_lists`) by bounds alone: what they cannot decide is partial. As wide as there are columns."""
        Z, H, rows, columns = self.shape
        lines, width = (columns, rows) if transposed else (rows, columns)
        made = [torch.empty(shape, dtype=torch.int32, device=self.device) for shape in ((Z, H, lines), (Z, H, lines, width)) * 2]
        kernel = self.plan.kernel(verdict_lists_spec, self.size, self.backend, transposed, bool(self.starts))
        verdict = _values((self.plan.texts.verdict,), self.captured)
        kernel.launch(
            (Z * H * lines,),
            (*made, *self.starts, width, *self.numbers, *self.zones, *verdict),
            self.device,
            (VERDICTS_CHUNK,),
            num_warps=4,
            num_stages=1,
        )
        return made


def _empty_lists(lines: tuple[int, ...], widths: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Counts and indices for each width. Kernels may read the first index of an empty row, so no list has width 0."""
    made = []
    for width in widths:
        made.append(torch.zeros(lines, dtype=torch.int32, device=device))
        made.append(torch.zeros((*lines, max(width, 1)), dtype=torch.int32, device=device))
    return made


def create_lists(
    bound: Bound,
    extents: tuple[int, int, int, int],
    device: torch.device,
    size: tuple[int, int],
    separate_full: bool = True,
    capacity: int | None = None,
) -> list[torch.Tensor]:
    """Block lists (see `block_lists`) of a mask_mod, exact: what bounds cannot decide is evaluated.

    capacity   the width of the lists; by default that of the densest row, for which the host waits. A row with more makes the
               program fail, by torch._assert_async
    """
    size = tuple(_no_longer_than_needed(n, length) for n, length in zip(size, extents[2:], strict=True))
    if 0 in extents:
        lines = (*extents[:2], -(-extents[2] // size[0]))
        return _empty_lists(lines, (capacity or 0,) * (1 + separate_full), device)
    status, counts = BlockGrid(bound, extents, device, size).status()
    counts = counts if separate_full else counts.sum(0, keepdim=True)
    if capacity is None:
        widths = counts.amax((1, 2, 3)).tolist()
    else:
        torch._assert_async((counts.amax() <= capacity), f"create_block_mask: a row has more blocks than capacity={capacity}")
        widths = [capacity] * len(counts)
    return _listed(status, widths, separate_full)


def _no_longer_than_needed(size: int, length: int) -> int:
    """A block's positions, or fewer where one block reaches past all of them: kernels walk whole blocks. It still reaches past them, and is
    one of few sizes, since each has kernels of its own."""
    return min(size, max(128, _power_of_two(length + 1)))


def block_lists(status: torch.Tensor, separate_full: bool = True, *, wait: bool = True) -> list[torch.Tensor]:
    """kv_num_blocks, kv_indices and, if `separate_full`, full_kv_num_blocks, full_kv_indices of a status (any strides).

    int32 (Z, H, rows) and (Z, H, rows, width), zero past each row's count; as wide as the densest row needs, for which the host waits, or
    without `wait` as wide as there are columns.
    """
    if not wait:
        return _listed(status, [status.shape[-1]] * (1 + separate_full), separate_full)
    counts = [(status == 1).sum(-1), (status == 2).sum(-1)] if separate_full else [(status != 0).sum(-1)]
    widths = [int(c.amax()) if c.numel() else 0 for c in counts]
    return _listed(status, widths, separate_full)


def _listed(status: torch.Tensor, widths: list[int], separate_full: bool, starts: Starts = ()) -> list[torch.Tensor]:
    """The lists of a status; with first positions of its columns in `starts`, these instead of numbers."""
    Z, H, rows, columns = status.shape
    made = _empty_lists((Z, H, rows), tuple(widths), status.device)
    if Z * H * rows:
        kernel = kernel_for(lists_spec(separate_full, backend_of(status.device.type), bool(starts)))
        numbers = (*(max(w, 1) for w in widths), H, rows, columns, *status.stride())
        kernel.launch((Z * H * rows,), (*made, *starts, status, *numbers), status.device, (LISTS_CHUNK,), num_warps=4, num_stages=1)
    return made


def block_starts(cu_seqlens: torch.Tensor, total: int, block: int) -> torch.Tensor:
    """Where blocks of at most `block` of the `total` positions begin so that none holds positions of two sequences, and where the last one
    ends; int32. cu_seqlens: int32 (sequences + 1)."""
    return _starts(cu_seqlens, total, block, 0)[0]


def owned_starts(cu_seqlens: torch.Tensor, total: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`block_starts`, where positions after the last sequence have blocks as well, and the number of each block's sequence: as many as
    there are for those, and where no block is left."""
    return _starts(cu_seqlens, total, block, 1)


def _starts(cu_seqlens: torch.Tensor, total: int, block: int, rest: int) -> tuple[torch.Tensor, ...]:
    """Those tensors; `rest` is 1 with the blocks' sequences."""
    sequences, device = len(cu_seqlens) - 1, cu_seqlens.device
    ranges = total // block + sequences + rest  # at most
    made = [torch.full((ranges + 1,), total, dtype=torch.int32, device=device)]
    if rest:
        made.append(torch.full((ranges,), sequences, dtype=torch.int32, device=device))
    kernel_for(starts_spec(block, backend_of(device.type), bool(rest))).launch(
        (sequences + rest,), (cu_seqlens, *made, ranges, total), device, (STARTS_CHUNK,), num_warps=4, num_stages=1
    )
    return tuple(made)


def automatic_lists(
    bound: Bound,
    extents: tuple[int, int, int, int],
    device: torch.device,
    size: tuple[int, int],
    *,
    transposed: bool = False,
    starts: Starts = (),
) -> BlockLists:
    """The lists of a mask_mod for one call, without waiting for the device; transposed, those of the backward pass, in the same fields.
    `starts` is as for BlockGrid.

    By bounds if they decide the mask, else by evaluation too. Those of a mask_mod that captures no tensors are kept, for the same
    stream, unless they are large; others are made anew for every call: captured tensors may have changed in ways that nobody is told of.
    """
    graph, captured = bound
    extents = (extents[0] if "b" in graph.symbols else 1, extents[1] if "h" in graph.symbols else 1, *extents[2:])
    key, stream = None, torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    # what a CUDA graph captures is not there before its replay, and must not go while it lives; none captures stream 0
    if not graph.tensors and not starts and not (stream and torch.cuda.is_current_stream_capturing()):
        key = (graph, *captured, extents, device, stream, size, transposed)
    lists = _kept.get(key)
    if lists is None:
        grid = BlockGrid(bound, extents, device, size, starts)
        if analyse(graph).by_rules:
            made = grid.lists(transposed=transposed)
        else:
            status, _ = grid.status()
            status = status.transpose(-1, -2) if transposed else status
            made = _listed(status, [status.shape[-1]] * 2, separate_full=True, starts=starts and (starts[not transposed],))
        lists = BlockLists(*made, *size, interior=True, starts=starts[transposed] if starts else None)
        if key and sum(t.nbytes for t in made) <= _KEPT_BYTES:
            _kept[key] = lists
    return lists


def dense_mask(bound: Bound, Z: int, H: int, Q_LEN: int, KV_LEN: int, device: torch.device) -> torch.Tensor:
    """bool (Z, H, Q_LEN, KV_LEN): the mask_mod everywhere, or where a score_mod of zero scores is not -inf."""
    mask = torch.empty((Z, H, Q_LEN, KV_LEN), dtype=torch.bool, device=device)
    if not mask.numel():
        return mask
    graph, captured = bound
    extents = (Z, H, Q_LEN, KV_LEN)
    exact = max(Q_LEN, KV_LEN) <= INDEX_BOUND
    layouts = layouts_of(graph, captured, extents)
    key = ("dense", graph, layouts, device, exact)
    plan = _plans.get(key)
    if plan is not None:
        INFO.hits += 1
    else:
        backend = backend_of(device.type)
        text = mod_text(graph, layouts, SYMBOL_NAMES, Target(backend, "float32", exact), tile="[TILE_M, TILE_N]")
        plan = _plans[key] = kernel_for(dense_mask_spec(text, backend)), text
    kernel, text = plan
    grid = (Z * H * -(-Q_LEN // DENSE_TILE) * -(-KV_LEN // DENSE_TILE),)
    kernel.launch(grid, (mask, H, Q_LEN, KV_LEN, *text.values(captured)), device, (DENSE_TILE, DENSE_TILE), num_warps=4, num_stages=1)
    return mask


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
