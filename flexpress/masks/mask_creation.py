"""create_block_mask and create_mask: the mask of a mask_mod, as lists of blocks and position by position."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch.types import Device

from flexpress.graphs.bound_mods import bound_mod, graph_and_values
from flexpress.graphs.in_graph import compilable
from flexpress.graphs.programs import argument_of, captures_of
from flexpress.inputs.checks import block_size, extent, whole
from flexpress.inputs.plain_arguments import resolve_device
from flexpress.masks.block_mask import DEFAULT_BLOCK_SIZE, BlockMask
from flexpress.mods import MaskMod, ScoreMod

from ..codegen.compiling import runs_uncompiled
from ..codegen.mod.captured.levels import of_all_calls, untransformed
from ..codegen.mod.captured.tensors import check_surroundings, followed, read_captured, recording
from ..codegen.mod.graphs.graph_text import text_of
from ..codegen.mod.graphs.wide import in_wide_integers
from ..codegen.mod.tracing.bind import bind
from ..codegen.run import masks
from ..codegen.run.block_lists import lists_of
from ..codegen.run.meanwhile import is_capturing


def _closed(tables, given: dict) -> BlockMask:
    """The mask of these tables, for create_block_mask's arguments; torch's compiler traces this."""
    mask_mod, size = given["mask_mod"], given["BLOCK_SIZE"]
    q_block, kv_block = size if isinstance(size, (tuple, list)) else (size, size)
    lists = lists_of(tables, q_block, kv_block, interior=True)
    return BlockMask._made((given["Q_LEN"], given["KV_LEN"]), lists, mask_mod, agrees=True)


def _tables(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks, capacity, **_) -> tuple[torch.Tensor, ...]:
    """The lists of a mask, as wide as there are columns unless there is a capacity: nothing waits for their values."""
    extents, size = _extents(B, H, Q_LEN, KV_LEN), block_size(BLOCK_SIZE)
    capacity = capacity if capacity is None else whole("capacity", capacity)
    graph, values = bound_mod(mask_mod, "mask", resolve_device(device))
    captures = captures_of((graph, values))
    return tuple(
        torch.ops.flexpress.block_lists(
            *captures, list(extents), list(size), separate_full_blocks, capacity, resolve_device(device), argument_of(text_of(graph))
        )
    )


@compilable(inner=_tables, closed=_closed)
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    capacity: int | None = None,
) -> BlockMask:
    """The BlockMask of `mask_mod(b, h, q_idx, kv_idx) -> bool` for B x H masks of Q_LEN x KV_LEN.

    B, H                  None (or 1) if the mask is the same for every batch entry or head. The lists are those of the first one, and a
                          call with more entries, which mask_mod tells apart, makes lists of its own, as with mask_mod=
    device                of the lists; the current accelerator by default, else the CPU
    Q_LEN, KV_LEN         positions, 0 or more. An integer in a tensor without dimensions is waited for; inside torch.compile pass a number
    BLOCK_SIZE            one size or (Q, KV), of any number of positions. Attention is fastest with 128; under a narrow mask
                          calls walk blocks of 64 in its place. Where no tile of 16 positions divides a size, kernels walk blocks of
                          128 made of these
    separate_full_blocks  False: list full blocks as partial ones too, so that mask_mod is evaluated everywhere
    _compile, compute_dq_write_order, dq_kv_order   torch's; kernels make the lists, and write dQ, whatever they say: no order is made
    capacity              most partial (and most full) blocks that a row may have. By default the lists are as wide as there are columns
                          or, above a MiB, as the densest row needs, for which the host waits (not inside torch.compile and a CUDA
                          graph). With a capacity it never waits; a row with more blocks stops the program (a device-side assertion)

    Printed kernels decide whole blocks by bounds of mask_mod where bounds tell, and evaluate it position by position in the others; no
    mask of Q_LEN x KV_LEN is ever in memory. Raises ModError if the mod cannot be traced, ValueError or TypeError for other arguments.
    """
    extents, size = _extents(B, H, Q_LEN, KV_LEN), block_size(BLOCK_SIZE)
    if recording():
        check_surroundings("create_block_mask")
        tables = _tables(mask_mod, *extents, device, size, separate_full_blocks, capacity)
        return _closed(tables, {"mask_mod": mask_mod, "BLOCK_SIZE": size, "Q_LEN": extents[2], "KV_LEN": extents[3]})
    capacity = capacity if capacity is None else whole("capacity", capacity)
    device = resolve_device(device)
    if capacity is None and is_capturing(device):
        capacity = -(-extents[3] // size[1])  # nobody can wait
    with _bound(mask_mod, "mask", device, extents, "create_block_mask") as bound:
        lists = masks.create_lists(bound, extents, device, size, separate_full_blocks, capacity)
    return BlockMask._made(extents[2:], lists_of(lists, *size, interior=True), mask_mod, agrees=True, fixed=not bound[1])


@runs_uncompiled
def create_mask(mod_fn: MaskMod | ScoreMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Device = None) -> torch.Tensor:
    """The dense mask, bool (B, H, Q_LEN, KV_LEN), of a mask_mod; or of a score_mod, where it does not turn a zero score into -inf.

    B, H            extents of the mask; None is 1
    Q_LEN, KV_LEN   its positions, 0 or more
    device          of the mask, and where the kernel runs; the current accelerator by default, else the CPU

    For looking at and for tests: attention never needs it. Raises ModError if the mod cannot be traced, ValueError or TypeError for other
    arguments, NotImplementedError for a device without kernels.
    """
    if not callable(mod_fn):
        raise TypeError(f"mod_fn must be a mask_mod or a score_mod, got {type(mod_fn).__name__}")
    extents, device = _extents(B, H, Q_LEN, KV_LEN), resolve_device(device)
    kind = "score" if _positional(mod_fn) == 5 else "mask"
    if recording():
        check_surroundings("create_mask")
        graph, values = bound_mod(mod_fn, kind, device)
        return torch.ops.flexpress.dense_mask(*captures_of((graph, values)), list(extents), device, argument_of(text_of(graph)))
    with _bound(mod_fn, kind, device, extents, "create_mask") as bound:
        return masks.dense_mask(bound, *extents, device)


@contextlib.contextmanager
def _bound(mod, kind: str, device: torch.device, extents: tuple, function: str) -> Iterator[tuple]:
    """A bound mod as kernels read it, to make its mask in here: outside of transforms of torch.func, which it has nothing to do with."""
    inside = followed(function)
    if inside:
        graph, values = graph_and_values(mod, kind, device)
        names = [f"{kind}_mod {graph.name} captures {capture.name}, which" for capture in graph.tensors]
        bound = graph, [*map(of_all_calls, names, values), *values[len(names) :]]
    else:
        bound = bind(mod, kind, device)
    with untransformed() if inside else contextlib.nullcontext():
        bound = in_wide_integers(bound, extents)
        read_captured(bound, device, f"{kind}_mod")
        yield bound


def _positional(mod) -> int:
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: tracing will tell
        return 4
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _extents(B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> tuple[int, int, int, int]:
    """(B, H, Q_LEN, KV_LEN) of a mask, checked; None stands for 1."""
    Z, heads = (1 if n is None else extent(name, n) for name, n in (("B", B), ("H", H)))
    return Z, heads, _length("Q_LEN", Q_LEN), _length("KV_LEN", KV_LEN)


def _length(name: str, value) -> int:
    """A length, also as a tensor of one integer, as torch takes it: on a device the host waits for it."""
    if isinstance(value, torch.Tensor) and not (
        value.dim() or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    ):
        value = value.item()
    return extent(name, value)
