"""Kernels to own: a call of flex_attention as one file that needs torch, and triton or a C++ compiler, alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention as torchs

from flexpress.calls.arguments import block_size
from flexpress.exporting.exported_files import check_path, write
from flexpress.inputs import checks
from flexpress.inputs.float8 import FLOAT8
from flexpress.inputs.plain_arguments import flag
from flexpress.inputs.sinks import check_sinks
from flexpress.masks.block_mask import BlockMask
from flexpress.masks.foreign_masks import is_foreign_mask
from flexpress.masks.mask_creation import create_block_mask
from flexpress.masks.mask_mods import check_made_of
from flexpress.mods import MaskMod, ScoreMod

from ..codegen.device import offline
from ..codegen.device.cache import VERSION
from ..codegen.device.cpp_compiler import interpreter_asked_for
from ..codegen.device.devices import architecture_of, backend_of
from ..codegen.export.attention import AttentionFile
from ..codegen.export.cpu import CppFile
from ..codegen.export.file import beside
from ..codegen.export.kernels import Exported
from ..codegen.gpus import WIDEST_TILE
from ..codegen.mod.captured.origins import Origins
from ..codegen.mod.captured.tensors import read_captured
from ..codegen.mod.expr import ModGraph
from ..codegen.mod.graphs.loads import dots_of
from ..codegen.mod.graphs.wide import at_any_length
from ..codegen.mod.symbolic.long_dots import LONG
from ..codegen.mod.tracing.bind import bind_with_origins


def export(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    sinks: torch.Tensor | None = None,
    backward: bool | None = None,
    target: str | None = None,
    path: str | Path | None = None,
    layout: str = "file",
    overwrite: bool = False,
) -> str:
    """The kernels of a call of flex_attention as the text of a Python file that needs torch and triton alone, or, with those in C++ for
    CPUs, torch and a C++ compiler: the printed kernels, a function `attention` that checks its arguments and launches them, and a
    comparison with dense attention under `__main__`.

        flexpress.export(q, k, v, score_mod=alibi(slopes), mask_mod=sliding_window(1024), path="windowed.py")

    query, key, value   examples (they may be on the device "meta"): their dtype and head dims are the file's, and their device says what
                        it is tuned for. Batch size, numbers of heads, lengths and strides are free, but the head dim must be contiguous
    score_mod, mask_mod as for flex_attention. What they capture becomes arguments of `attention`: numbers with their value as default,
                        tensors with the strides (0, 1, multiples of 16 bytes) that they have here
    block_mask          its mask_mod and block size: the file makes the lists itself. They must be what create_block_mask makes of mask_mod
    sinks               an example, (Hq,): logits of attention sinks, as for flex_attention, which become an argument of `attention`
    scale               the default of `attention`, which takes others of the same sign
    kernel_options      as for flex_attention, but BACKEND. By default a file for sm_90 has the kernels for Hopper, too, where they can
                        serve, and takes them on such a GPU where they are faster. "PORTABLE" leaves them out. "HOPPER": they serve
                        every call on such a GPU, or export raises a ValueError that says why they cannot. "CPP" is for target="cpu"
    backward            with the kernels for gradients, of query, key, value, and of the captured tensors and sinks that require grad; by
                        default where one of these requires grad
    target              "sm_80", "sm_90", "sm_100" or "gfx942": whose tiles, warps, stages and loads (TMA from sm_90 on) the file has, which
                        runs on a CPU as well, in Triton's interpreter; or "cpu": kernels in C++. By default the query's GPU, "cpu" for
                        tensors on a CPU that calls in C++ serve (docs/cpu.md), and sm_90 for others
    path                where the file is written; with layout="kernels" a folder, in which it becomes a kernel in the layout of the Hugging
                        Face package kernels (build/torch-universal), named after the folder; not for the target "cpu"
    overwrite           replace what is there; nothing half-written is ever seen

    Returns the text. Raises ValueError, TypeError or NotImplementedError for arguments, ModError for a mod that cannot be traced,
    FileExistsError for what is there already.
    """
    enable_gqa, overwrite = flag("enable_gqa", enable_gqa), flag("overwrite", overwrite)
    backward = None if backward is None else flag("backward", backward)
    check_path(path)
    checks.check_tensors(query, key, value, enable_gqa)
    if query.dtype == FLOAT8:
        raise NotImplementedError(
            "query is float8, which exported files do not support; export with query, key and value of bfloat16, which holds it"
        )
    call = _call(query, key, value, score_mod, block_mask, scale, kernel_options, mask_mod, sinks, backward, target)
    refuse_layout(layout, call.target)
    kind = CppFile if call.target == "cpu" else AttentionFile
    text = beside(lambda reserved: kind(call, VERSION, reserved)).text
    write(text, path, layout, overwrite)
    return text


def _call(
    query, key, value, score_mod, block_mask, scale, kernel_options, mask_mod, sinks, backward: bool | None, target: str | None
) -> Exported:
    """What the file depends on."""
    if any(t.stride(3) != 1 and t.shape[3] > 1 for t in (query, key, value)):
        raise ValueError("exported kernels read contiguous head dims; pass query, key and value with a stride of 1 in the last dimension")
    options = checks.DEFAULT if kernel_options is None else checks.parse_options(kernel_options)
    target = asked_target(target, options.backend, query)
    if isinstance(scale, torch.Tensor):
        raise TypeError("export takes scale as a number; let the score_mod multiply by a tensor")
    scale = query.shape[3] ** -0.5 if scale is None else checks.check_scale(scale, query.shape[3])
    size = block_size(options)
    if block_mask is not None:
        mask_mod, size = _mask_of(block_mask, mask_mod)
        checks.check_tile_fits_mask(options, *size)
    score, of_score = bound_mod(score_mod, "score", query.device)
    mask, of_mask = bound_mod(mask_mod, "mask", query.device)
    captured = score[1][: len(score[0].tensors)] if score else []
    wanted = frozenset(i for i, t in enumerate(captured) if t.is_floating_point() and t.requires_grad)
    if sinks is not None:
        check_sinks(sinks, query.shape[1], query.device)
    if backward is None:
        backward = bool(wanted) or any(t.requires_grad for t in (query, key, value, sinks) if t is not None)
    wanted = wanted if backward else frozenset()
    if sinks is not None:  # an argument of its own, also where a mod captures it
        sinks = sinks.detach().requires_grad_(backward and sinks.requires_grad)
    for name, tensor in (("query", query), ("value", value)):
        if backward and target != "cpu" and tensor.shape[3] > WIDEST_TILE:
            raise NotImplementedError(
                f"{name} has head_dim {tensor.shape[3]} (shape {tuple(tensor.shape)}); exported files have backward kernels up to "
                f"{WIDEST_TILE}, pass backward=False"
            )
    for i in wanted:
        if not captured[i].is_contiguous():
            raise ValueError(f"score_mod captures {score[0].tensors[i].name}, whose gradient needs a contiguous tensor; pass .contiguous()")
    return Exported(
        *(score, mask, wanted, query.dtype, query.shape[3], value.shape[3], scale, options, target, size, backward),
        (query.shape[0], key.shape[0]),
        (query.shape[1], key.shape[1]),
        (query.shape[2], key.shape[2]),
        (of_score, of_mask),
        sinks,
    )


def refuse_layout(layout: str, target: str) -> None:
    """Raise ValueError for a layout that kernels for a target cannot have."""
    if target == "cpu" and layout == "kernels":
        raise ValueError("layout 'kernels' is for kernels in Triton, which need no C++ compiler; leave layout out, or pass target='sm_90'")


def asked_target(target: str | None, backend: str | None, query: torch.Tensor) -> str:
    """The target that is asked for, by its name or by kernel_options, or that of query's device."""
    if target is not None and not isinstance(target, str):
        raise TypeError(f"target must be one of {', '.join(offline.TARGETS)} and cpu, got {target!r}")
    if backend not in (None, "CPP", "PORTABLE", "HOPPER"):
        raise ValueError(f"kernel_options['BACKEND'] is {backend!r}; export knows 'CPP', 'PORTABLE' and 'HOPPER', or leave it out")
    if target is None and (backend == "CPP" or (backend is None and query.device.type == "cpu" and not interpreter_asked_for())):
        return "cpu"
    if target == "cpu" and backend in (None, "CPP"):
        return target
    if target == "cpu" or backend == "CPP":
        raise ValueError(f"kernel_options['BACKEND'] is {backend!r}, which has no kernels for target {target!r}; leave one of them out")
    return target_of(target, query)


def target_of(target: str | None, query: torch.Tensor) -> str:
    """The GPU that is asked for, or that of query's device."""
    if target is None:
        if query.device.type != "cuda":
            return "sm_90"
        found = architecture_of(query.device)
        return found if found in offline.TARGETS else "sm_80" if backend_of("cuda") == "cuda" else "gfx942"
    if target not in offline.TARGETS:
        raise ValueError(f"target must be one of {', '.join(offline.TARGETS)} and cpu, got {target!r}")
    return target


def refuse_rows(graph: ModGraph) -> None:
    """Raise NotImplementedError for a mod with dot products of long rows, which exported files cannot check."""
    if dots_of(graph):
        raise NotImplementedError(
            f"{graph.kind}_mod {graph.name} has a dot product of {dots_of(graph)[0].attr} elements of captured rows, which is a product of "
            "matrices of its own; exported files have none. Write the rows behind query and key, as further columns, or use rows of up to "
            f"{LONG} elements"
        )


def bound_mod(mod: Callable | None, kind: str, device: torch.device) -> tuple[tuple | None, Origins | None]:
    """A mod's graph and what it captures, and where that comes from."""
    if mod is None:
        return None, None
    bound, origins = bind_with_origins(mod, kind, device)
    bound = at_any_length(bound)
    refuse_rows(bound[0])
    if device.type != "meta":
        read_captured(bound, device, f"{kind}_mod")
    return bound, origins


def _mask_of(block_mask, mask_mod) -> tuple[Callable, tuple[int, int]]:
    """The mask_mod and the block size of a BlockMask whose lists are those of its mask_mod."""
    if not isinstance(block_mask, BlockMask):
        what = "torch's BlockMask" if is_foreign_mask(block_mask) else type(block_mask).__name__
        raise TypeError(f"block_mask must be made by flexpress.create_block_mask, got {what}; or pass mask_mod=")
    check_made_of(block_mask, mask_mod)
    size = tuple(block_mask.BLOCK_SIZE)
    device, apart = block_mask.kv_num_blocks.device, block_mask.full_kv_num_blocks is not None
    grid = (*block_mask.shape[:2], *block_mask.seq_lengths)
    made = create_block_mask(block_mask.mask_mod, *grid, device=device, BLOCK_SIZE=size, separate_full_blocks=apart)
    if made != block_mask:
        raise ValueError(
            "block_mask holds other lists than create_block_mask makes of its mask_mod, and the file makes them anew; pass mask_mod="
        )
    return block_mask.mask_mod, size
