"""Kernels without a call, as in preview: those that make block masks, and those that evaluate a mod on its own."""

from __future__ import annotations

from collections.abc import Callable

from ..mod.tracing.bind import bind
from ..plan.cpu_masks import blocks_spec, cpu_lists_spec, cpu_starts_spec
from ..plan.masks import (
    SYMBOL_NAMES,
    dense_mask_spec,
    lists_spec,
    mask_texts,
    starts_spec,
    status_constants,
    status_spec,
    verdict_lists_spec,
    zones_spec,
)
from ..text.cpp import CPP
from ..text.layouts import layouts_of
from ..text.mod_text import ModText, mod_text
from ..text.snippet import Target
from ..text.spec import KernelSpec
from . import block_grid, evaluate, masks, status_lists
from .imagined import EXTENTS, backend_for
from .preview import Compilation


def mask_compilations(
    target: str, mask_mod: Callable, block_size: tuple[int, int] = (128, 128), starts: bool = False
) -> dict[str, Compilation]:
    """The kernels of create_block_mask and mask_mod= by name: "status", "lists", "transposed_lists" and, where a mask needs it, "zones"."""
    backend = backend_for(target)
    texts = mask_texts(bind(mask_mod, "mask"), EXTENTS, backend)
    chunk = {"CHUNK": block_grid.VERDICTS_CHUNK}
    made = {
        "status": (status_spec(texts, block_size, backend, starts), status_constants(block_size, backend)),
        "lists": (verdict_lists_spec(texts, block_size, backend, False, starts), chunk),
        "transposed_lists": (verdict_lists_spec(texts, block_size, backend, True, starts), chunk),
    }
    if texts.zones:
        made["zones"] = zones_spec(texts, block_size, backend, starts), {"TILE": block_grid.ZONE_TILE}
    return {name: Compilation(target, spec, constants) for name, (spec, constants) in made.items()}


def cpu_mask_specs(mask_mod: Callable, starts: bool = False) -> dict[str, KernelSpec]:
    """The kernels in C++ that do the same, by name: "blocks", "lists", "starts" and "evaluate"."""
    texts = mask_texts(bind(mask_mod, "mask"), EXTENTS, "cpu", language=CPP)
    return {
        "blocks": blocks_spec(texts, (128, 128), starts, True, starts),
        "lists": cpu_lists_spec(True, starts),
        "starts": cpu_starts_spec(128, starts),
        "evaluate": evaluate.cpu_evaluate_spec(_text(mask_mod, "mask", Target("cpu", "float32", language=CPP))),
    }


def block_lists_compilation(target: str, separate_full: bool = True, starts: bool = False) -> Compilation:
    """The kernel that makes lists of classified blocks."""
    return Compilation(target, lists_spec(separate_full, backend_for(target), starts), {"CHUNK": status_lists.LISTS_CHUNK})


def block_starts_compilation(target: str, sequences: bool = False) -> Compilation:
    """The kernel that says where blocks of packed sequences begin, and which sequences they are of."""
    return Compilation(target, starts_spec(128, backend_for(target), sequences), {"CHUNK": status_lists.STARTS_CHUNK})


def dense_mask_compilation(target: str, mod: Callable, kind: str = "mask") -> Compilation:
    """The kernel of create_mask."""
    text = _text(mod, kind, Target(backend_for(target), "float32"))
    return Compilation(target, dense_mask_spec(text, backend_for(target)), {"TILE_M": masks.DENSE_TILE, "TILE_N": masks.DENSE_TILE})


def evaluate_compilation(target: str, mod: Callable, kind: str = "score", precision: str = "float32") -> Compilation:
    """The kernel that evaluates a mod on its own."""
    text = _text(mod, kind, Target(backend_for(target), precision))
    return Compilation(target, evaluate.evaluate_spec(text, backend_for(target)), {"TILE_M": 64, "TILE_N": 64})


def _text(mod: Callable, kind: str, target: Target) -> ModText:
    """A mod as a template sees it."""
    graph, captured = bind(mod, kind)
    return mod_text(graph, layouts_of(graph, captured, EXTENTS), SYMBOL_NAMES, target, tile="[TILE_M, TILE_N]")
