"""Masks by printed kernels: zone maps, block classification, block lists and the dense mask."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..device.counters import may_keep
from ..device.devices import backend_of
from ..device.kernel import Kernel, kernel_for
from ..device.memory import contiguous
from ..mod.expr import INDEX_BOUND
from ..mod.intervals import analyse
from ..plan.masks import (
    SYMBOL_NAMES,
    Bound,
    MaskTexts,
    dense_mask_spec,
    list_names,
    lists_spec,
    mask_texts,
    parts_of,
    power_of_two,
    starts_spec,
    status_constants,
    status_spec,
    verdict_lists_spec,
    zones_spec,
)
from ..registry import INFO, Table
from ..text.layouts import layouts_of
from ..text.mod_text import mod_text
from ..text.snippet import Target
from .block_lists import BlockLists

DENSE_TILE = 64  # rows and columns of a tile of the dense mask
ZONE_TILE = 128  # positions that one step of block_zones takes
LISTS_CHUNK, VERDICTS_CHUNK = 512, 128  # blocks that one step of block_lists takes: from a status, by bounds
_ROOMY = 1 << 20  # bytes of lists as wide as there are columns, below which nobody waits to learn how wide they must be
STARTS_CHUNK = 128  # sequences, and blocks of one, that a step of block_starts takes
_KEPT_MASKS, _KEPT_BYTES = 64, 1 << 22  # block lists of masks that capture no tensors: how many, and the size of one

Starts = tuple[torch.Tensor, ...]

_plans: dict[tuple, object] = Table("mask plans", 1024)
_kept: dict[tuple, BlockLists] = Table("block lists", _KEPT_MASKS)


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
        rows, columns = (t.shape[0] - 1 for t in starts) if starts else (-(-Q_LEN // size[0]), -(-KV_LEN // size[1]))
        self.starts, self.shape = starts, (Z, H, rows, columns)
        layouts = tuple(layouts_of(part, self.captured, extents) for part in parts_of(graph))
        key = ("blocks", graph, layouts, device, size, max(Q_LEN, KV_LEN) <= INDEX_BOUND)
        plan = _plans.get(key)
        if plan is not None:
            INFO.hits += 1
        else:
            plan = _plans[key] = _MaskPlan(mask_texts(bound, extents, self.backend))
        self.plan: _MaskPlan = plan
        self.values = plan.texts.named(self.captured)
        self.values |= {"Hm": H, "rows": rows, "columns": columns, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
        if starts:
            self.values["q_starts"], self.values["kv_starts"] = starts
        self.values |= self._measured()

    def _launch(self, kernel: Kernel, grid: int, constants: tuple[int, ...], num_warps: int = 4, **tensors) -> None:
        arguments = kernel.spec.arguments({**self.values, **tensors})
        kernel.launch((grid,), arguments, self.device, constants, num_warps=num_warps, num_stages=1)

    def _measured(self) -> dict[str, torch.Tensor]:
        """Least and greatest value of every zone, (Z, H, rows or columns) each, by the names of parameters."""
        Z, H, rows, columns = self.shape
        zones = self.plan.texts.zones
        if not zones:
            return {}
        maps = {}
        for zone in zones:
            for name in zone.names:
                length = rows if zone.axis == "q_idx" else columns
                maps[name] = contiguous((Z, H, length), getattr(torch, zone.dtype), self.device)
        kernel = self.plan.kernel(zones_spec, self.size, self.backend, bool(self.starts))
        self._launch(kernel, Z * H * (rows + columns), (ZONE_TILE,), num_warps=1, **maps)
        return maps

    def status(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 (Z, H, rows, columns): 0 empty, 1 partial, 2 full; and int32 (2, Z, H, rows): how many are partial, and full."""
        Z, H, rows, columns = self.shape
        status = contiguous(self.shape, torch.int8, self.device)
        counts = torch.zeros((2, Z, H, rows), dtype=torch.int32, device=self.device)
        kernel = self.plan.kernel(status_spec, self.size, self.backend, bool(self.starts))
        constants = status_constants(self.size, self.backend)
        grid = Z * H * rows * -(-columns // constants["CHUNK"])
        self._launch(kernel, grid, tuple(constants.values()), status=status, num_blocks=counts[0], num_full=counts[1])
        return status, counts

    def lists(self, *, transposed: bool = False) -> list[torch.Tensor]:
        """Block lists (see `block_lists`) by bounds alone: what they cannot decide is partial. As wide as there are columns."""
        Z, H, rows, columns = self.shape
        lines, width = (columns, rows) if transposed else (rows, columns)
        shapes = ((Z, H, lines), (Z, H, lines, width)) * 2
        made = {name: contiguous(shape, torch.int32, self.device) for name, shape in zip(list_names(True), shapes, strict=True)}
        kernel = self.plan.kernel(verdict_lists_spec, self.size, self.backend, transposed, bool(self.starts))
        self._launch(kernel, Z * H * lines, (VERDICTS_CHUNK,), width=width, **made)
        return list(made.values())


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

    capacity   the width of the lists; by default as in `block_lists`. A row with more makes the program fail, by torch._assert_async
    """
    size = tuple(_no_longer_than_needed(n, length) for n, length in zip(size, extents[2:], strict=True))
    if 0 in extents:
        lines = (*extents[:2], -(-extents[2] // size[0]))
        return _empty_lists(lines, (capacity or 0,) * (1 + separate_full), device)
    status, counts = BlockGrid(bound, extents, device, size).status()
    counts = counts if separate_full else counts.sum(0, keepdim=True)
    if capacity is None:
        large = _large(status.shape, len(counts))
        widths = counts.amax((1, 2, 3)).tolist() if large else [status.shape[-1]] * len(counts)
    else:
        if capacity < status.shape[-1]:
            torch._assert_async((counts.amax() <= capacity), f"create_block_mask: a row has more blocks than capacity={capacity}")
        widths = [capacity] * len(counts)
    return _listed(status, widths, separate_full)


def _no_longer_than_needed(size: int, length: int) -> int:
    """A block's positions, or fewer where one block reaches past all of them: kernels walk whole blocks. It still reaches past them, and is
    one of few sizes, since each has kernels of its own."""
    return min(size, max(128, power_of_two(length + 1)))


def block_lists(status: torch.Tensor, separate_full: bool = True, *, wait: bool = True) -> list[torch.Tensor]:
    """kv_num_blocks, kv_indices and, if `separate_full`, full_kv_num_blocks, full_kv_indices of a status (any strides).

    int32 (Z, H, rows) and (Z, H, rows, width), zero past each row's count; as wide as there are columns. With `wait`, large ones are only
    as wide as the densest row needs, for which the host waits.
    """
    widths = [status.shape[-1]] * (1 + separate_full)
    if wait and _large(status.shape, len(widths)):
        kinds = (status == 1, status == 2) if separate_full else (status != 0,)
        widths = torch.stack([kind.sum(-1).amax() for kind in kinds]).tolist()
    return _listed(status, widths, separate_full)


def _large(shape: tuple[int, ...], lists: int) -> bool:
    """Are so many lists, as wide as there are columns, worth a wait for the densest row?"""
    return 4 * lists * math.prod(shape) > _ROOMY


def _listed(status: torch.Tensor, widths: list[int], separate_full: bool, starts: Starts = ()) -> list[torch.Tensor]:
    """The lists of a status; with first positions of its columns in `starts`, these instead of numbers."""
    Z, H, rows, columns = status.shape
    made = _empty_lists((Z, H, rows), tuple(widths), status.device)
    if Z * H * rows:
        kernel = kernel_for(lists_spec(separate_full, backend_of(status.device.type), bool(starts)))
        values = {
            **dict(zip(list_names(separate_full), made, strict=True)),
            **dict(zip(("starts",), starts, strict=False)),
            **{"status": status, "Hm": H, "rows": rows, "columns": columns},
            **dict(zip(("width", "full_width"), (max(w, 1) for w in widths), strict=False)),
            **dict(zip(("stride_z", "stride_h", "stride_row", "stride_column"), status.stride(), strict=True)),
        }
        kernel.launch((Z * H * rows,), kernel.spec.arguments(values), status.device, (LISTS_CHUNK,), num_warps=4, num_stages=1)
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
    sequences, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
    ranges = total // block + sequences + rest  # at most
    made = [torch.full((ranges + 1,), total, dtype=torch.int32, device=device)]
    if rest:
        made.append(torch.full((ranges,), sequences, dtype=torch.int32, device=device))
    kernel = kernel_for(starts_spec(block, backend_of(device.type), bool(rest)))
    values = {"cu_seqlens": cu_seqlens, "starts": made[0], "sequences": made[-1], "RANGES": ranges, "TOTAL": total}
    kernel.launch((sequences + rest,), kernel.spec.arguments(values), device, (STARTS_CHUNK,), num_warps=4, num_stages=1)
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
        if key and may_keep(stream) and sum(t.nbytes for t in made) <= _KEPT_BYTES:
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
    values = {"mask": mask, "Hm": H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN, **text.named(captured)}
    kernel.launch(grid, kernel.spec.arguments(values), device, (DENSE_TILE, DENSE_TILE), num_warps=4, num_stages=1)
    return mask
