"""Masks by printed kernels: zone maps, block classification, block lists and the dense mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from ..device import workers
from ..device.counters import may_keep
from ..device.cpp_compiler import by_either
from ..device.devices import backend_of
from ..device.kernel import NotYet, kernel_for
from ..device.workers import Job
from ..mod.expr import INDEX_BOUND
from ..mod.graphs.compute import compute
from ..mod.graphs.intervals import analyse
from ..mod.graphs.loads import dots_of
from ..plan.forward import Options
from ..plan.masks import SYMBOL_NAMES, Bound, dense_mask_spec, power_of_two
from ..registry import INFO, Table
from ..text.layouts import layouts_of
from ..text.mod_text import mod_text
from ..text.snippet import Target
from .block_grid import BlockGrid, CppGrid
from .block_lists import BlockLists
from .evaluate import fill
from .evaluated_masks import bounded_status, evaluated_lists, evaluated_status, is_exact, is_small
from .meanwhile import begun_beside, must_wait
from .status_lists import Starts, begin_lists, empty_lists, lists_of_status

DENSE_TILE = 64  # rows and columns of a tile of the dense mask
_ROOMY = 1 << 20  # bytes of lists as wide as there are columns, below which nobody waits to learn how wide they must be
_KEPT_MASKS, _KEPT_BYTES = 64, 1 << 22  # block lists of masks that capture no tensors: how many, and the size of one

_plans: dict[tuple, object] = Table("dense mask plans", 1024)
_kept: dict[tuple, BlockLists] = Table("block lists", _KEPT_MASKS)
_begun: dict[tuple, list[Job]] = Table("mask kernels that are begun", 1024)
_visits: dict[tuple, int] = Table("blocks that masks visit", 1024)


def create_lists(
    bound: Bound,
    extents: tuple[int, int, int, int],
    device: torch.device,
    size: tuple[int, int],
    separate_full: bool = True,
    capacity: int | None = None,
) -> list[torch.Tensor]:
    """Block lists (see `block_lists`) of a mask_mod, exact: what bounds cannot decide is evaluated.

    capacity   the width of the lists, if there are so many columns; by default as in `block_lists`. A row with more makes the program fail,
               by torch._assert_async
    """
    size = tuple(_no_longer_than_needed(n, length) for n, length in zip(size, extents[2:], strict=True))
    if 0 in extents:
        lines = (*extents[:2], -(-extents[2] // size[0]))
        return empty_lists(lines, (capacity or 0,) * (1 + separate_full), device)
    status, counts, listed = by_either(lambda in_cpp: _status(bound, extents, device, size, separate_full, in_cpp=in_cpp), device)
    counts = counts if separate_full else counts.sum(0, keepdim=True)
    if capacity is None:
        large = _large(status.shape, len(counts))
        widths = counts.amax((1, 2, 3)).tolist() if large else [status.shape[-1]] * len(counts)
    else:
        if capacity < status.shape[-1]:
            torch._assert_async((counts.amax() <= capacity), f"create_block_mask: a row has more blocks than capacity={capacity}")
        widths = [min(capacity, status.shape[-1])] * len(counts)
    return listed(status, widths, separate_full)


def _status(
    bound: Bound,
    extents: tuple[int, int, int, int],
    device: torch.device,
    size: tuple[int, int],
    separate_full: bool = True,
    starts: Starts = (),
    *,
    in_cpp: bool,
) -> tuple[torch.Tensor, torch.Tensor, Callable[..., list[torch.Tensor]]]:
    """What BlockGrid.status gives, and what makes lists of it: kernels, or torch while these are compiled."""
    given = bound, extents, device, size
    if in_cpp:
        return *CppGrid(*given, starts).status(separate_full), lists_of_status
    if starts or not is_exact(bound[0]) or not is_small(extents, size) or _must_wait(device):
        return *BlockGrid(*given, starts).status(separate_full), lists_of_status
    try:
        return *BlockGrid(*given, waits=False).status(separate_full), lists_of_status
    except NotYet:
        if not _are_begun((bound[0], device, size, separate_full), lambda _: _begin_status(given, separate_full), device):
            return *BlockGrid(*given).status(separate_full), lists_of_status
        return *evaluated_status(*given), partial(evaluated_lists, device=device)


def _begin_status(given: tuple, separate_full: bool) -> None:
    BlockGrid(*given, begins=True).status(separate_full)
    begin_lists(separate_full, False, given[2])


def _are_begun(key: tuple, begin: Callable[[list[Job]], None], device: torch.device) -> bool:
    """Are kernels that are not compiled on their way? They are begun once; what is over, and did not come, is compiled here."""
    jobs = _begun.get(key)
    if jobs is None:
        _begun[key] = begun_beside(begin, device)
        return True
    return not jobs[0].over or bool(workers.POOL.awaited)


def _must_wait(device: torch.device) -> bool:
    """Are lists to be made by the kernels alone?"""
    return backend_of(device.type) == "cpu" or must_wait(device, Options(), False)


def _no_longer_than_needed(size: int, length: int) -> int:
    """The block size, or less where one block covers the whole length: kernels walk whole blocks. The smaller size is a power of two above
    the length and at least 128, so that there are few sizes, as each compiles its own kernels."""
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
    return lists_of_status(status, widths, separate_full)


def _large(shape: tuple[int, ...], lists: int) -> bool:
    """Are so many lists, as wide as there are columns, worth a wait for the densest row?"""
    return 4 * lists * math.prod(shape) > _ROOMY


def automatic_lists(
    bound: Bound,
    extents: tuple[int, int, int, int],
    device: torch.device,
    size: tuple[int, int],
    *,
    transposed: bool = False,
    starts: Starts = (),
    begins: bool = False,
) -> BlockLists | None:
    """The lists of a mask_mod for one call, without waiting for the device; transposed, those of the backward pass, in the same fields.
    `starts` is as for BlockGrid. With `begins` there are none: if kernels of their own make them, these are compiled beside this process.

    By bounds if they decide the mask, else by evaluation too. Those of a mask_mod that captures no tensors are kept, for the same
    stream, unless they are large; others are made anew for every call: captured tensors may have changed in ways that nobody is told of.
    """
    graph, captured = bound
    extents = (extents[0] if "b" in graph.symbols else 1, extents[1] if "h" in graph.symbols else 1, *extents[2:])
    if begins:
        if backend_of(device.type) != "cpu" and analyse(graph).by_rules:
            BlockGrid(bound, extents, device, size, starts, begins=True).lists(transposed=transposed)
        return None
    key, stream = None, torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    # what a CUDA graph captures is not there before its replay, and must not go while it lives; none captures stream 0
    if not graph.tensors and not starts and not (stream and torch.cuda.is_current_stream_capturing()):
        key = (graph, *map(repr, captured), extents, device, stream, size, transposed)  # 0.0 and -0.0 are equal, and are not the same
    lists = _kept.get(key)
    if lists is None:

        def run(in_cpp: bool) -> list[torch.Tensor]:
            given = bound, extents, device, size
            if analyse(graph).by_rules:
                return _bounded(given, starts, transposed, in_cpp)
            status, _, listed = _status(*given, starts=starts, in_cpp=in_cpp)
            status = status.transpose(-1, -2) if transposed else status
            return listed(status, [status.shape[-1]] * 2, True, *([(starts[not transposed],)] if starts else []))

        made = by_either(run, device)
        lists = BlockLists(*made, *size, interior=True, starts=starts[transposed] if starts else None)
        if key and may_keep(stream) and sum(t.nbytes for t in made) <= _KEPT_BYTES:
            _kept[key] = lists
    return lists


def _bounded(given: tuple, starts: Starts, transposed: bool, in_cpp: bool) -> list[torch.Tensor]:
    """What BlockGrid.lists gives, by kernels, or by torch while these are compiled."""
    graph, device = given[0][0], given[2]
    if in_cpp:
        return CppGrid(*given, starts).lists(transposed=transposed)
    if starts or graph.tensors or not is_exact(graph) or not is_exact(analyse(graph).verdict) or _must_wait(device):
        return BlockGrid(*given, starts).lists(transposed=transposed)
    try:
        return BlockGrid(*given, waits=False).lists(transposed=transposed)
    except NotYet:
        if not _are_begun(
            (graph, device, given[3], "transposed", transposed),
            lambda _: BlockGrid(*given, begins=True).lists(transposed=transposed),
            device,
        ):
            return BlockGrid(*given).lists(transposed=transposed)
        status = bounded_status(*given[:2], given[3])
        status = status.transpose(-1, -2) if transposed else status
        return evaluated_lists(status, [status.shape[-1]] * 2, True, device=device)


def visits(bound: Bound, lengths: tuple[int, int], block: int) -> int | None:
    """How many blocks of `block` keys a row of as many queries visits: the most of three rows in the last part of the sequence. None if
    it depends on more than positions and numbers. From bounds, on the host, once for a mask and its numbers."""
    graph, captured = bound
    if graph.tensors or graph.symbols & {"b", "h"}:
        return None
    key = (graph, *captured, lengths, block)
    found = _visits.get(key)
    if found is None:
        rows, columns = (-(-n // block) for n in lengths)
        m = torch.tensor([[rows // 2], [rows * 3 // 4], [rows - 1]], dtype=torch.int32, device="cpu") * block
        n = torch.arange(columns, dtype=torch.int32, device="cpu") * block
        positions = {
            f"{axis}_{end}": first if end == "min" else (first + block).clamp(max=length) - 1
            for axis, first, length in (("q", m, lengths[0]), ("kv", n, lengths[1]))
            for end in ("min", "max")
        }
        status = compute(analyse(graph).verdict.result, positions, [], captured)
        found = _visits[key] = int((status > 0).expand(3, columns).sum(-1).max())
    return found


def dense_mask(bound: Bound, Z: int, H: int, Q_LEN: int, KV_LEN: int, device: torch.device) -> torch.Tensor:
    """bool (Z, H, Q_LEN, KV_LEN): the mask_mod everywhere, or where a score_mod of zero scores is not -inf."""
    mask = torch.empty((Z, H, Q_LEN, KV_LEN), dtype=torch.bool, device=device)
    if not mask.numel():
        return mask
    by_either(lambda in_cpp: (_fill_in_cpp if in_cpp else _fill)(mask, bound), device)
    return mask


def _fill_in_cpp(mask: torch.Tensor, bound: Bound) -> None:
    """Write a dense mask, by the kernel that evaluates a mod."""
    if bound[0].kind == "mask":
        fill(mask, bound, None, "float32", in_cpp=True)
        return
    scores = torch.zeros(mask.shape, dtype=torch.float32, device="cpu")
    fill(scores, bound, scores, "float32", in_cpp=not dots_of(bound[0]))
    torch.ne(scores, float("-inf"), out=mask)


def _fill(mask: torch.Tensor, bound: Bound) -> None:
    graph, captured = bound
    extents, device = tuple(mask.shape), mask.device
    Z, H, Q_LEN, KV_LEN = extents
    exact = max(Q_LEN, KV_LEN) <= INDEX_BOUND
    layouts = layouts_of(graph, captured, extents)
    key = (graph, layouts, device, exact)
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
