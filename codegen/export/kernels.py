"""The kernels of a call of flex_attention that goes into a file of its own.

What a kernel depends on is found as for a call, of tensors that have shapes and strides alone. Lengths and numbers of heads are odd
there, so that nothing is taken for a multiple of anything that it need not be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.captured.origins import Origins
from ..mod.expr import ModGraph
from ..mod.graphs.intervals import analyse
from ..mod.graphs.nan import are_ordinary
from ..mod.table.dtypes import dtype_name
from ..plan.backward import delta_rows
from ..plan.extras import ORDINARY, Extras
from ..plan.forward import Blocks, Options
from ..plan.masks import lists_spec, mask_texts, status_constants, status_spec, verdict_lists_spec, zones_spec
from ..run import backward, backward_kernels, block_grid, forward, forward_kernels, status_lists
from ..run.imagined import machine_of
from ..run.preview import Compilation
from .captures import layouts_for_any

EXTENTS = (3, 3, 1021, 1021)  # B, H, Q_LEN and KV_LEN


class Exported(NamedTuple):
    """What of a call its file holds.

    score, mask   the bound mods, or None           wanted   captured tensors of score_mod whose gradients kernels compute
    dtype, d_qk, d_v, scale, options, target        size     of the mask's blocks
    origins       of what the mods capture
    sinks         an example, or None; it requires grad where a kernel computes the gradient
    lengths       Q_LEN and KV_LEN of the example, heads its Hq and Hkv, and batch its Z and Zkv: the demo's
    """

    score: tuple[ModGraph, list] | None
    mask: tuple[ModGraph, list] | None
    wanted: frozenset[int]
    dtype: torch.dtype
    d_qk: int
    d_v: int
    scale: float
    options: Options
    target: str
    size: tuple[int, int]
    backward: bool
    batch: tuple[int, int]
    heads: tuple[int, int]
    lengths: tuple[int, int]
    origins: tuple[Origins | None, Origins | None]
    sinks: torch.Tensor | None = None

    @property
    def extras(self) -> Extras:
        """As forward kernels have them."""
        return Extras("" if self.sinks is None else dtype_name(self.sinks.dtype))

    @property
    def extras_backward(self) -> Extras:
        """As backward kernels have them: rows say all else that these need of sinks."""
        return self.extras if self.learns_sinks else ORDINARY

    @property
    def learns_sinks(self) -> bool:
        """Does a kernel compute the gradient of sinks?"""
        return self.sinks is not None and self.sinks.requires_grad


class Plans:
    """The kernels of a call by name, for one of the targets."""

    def __init__(self, call: Exported, target: str, use_tma: bool | None) -> None:
        self.call, self.target = call, target
        self.machine = machine_of(target)
        self.options = call.options if use_tma is None else call.options._replace(use_tma=use_tma)
        self.extents = call.batch[0], call.heads[0], *EXTENTS[2:]  # of captured tensors, as the example has them
        self.keys = tuple((bound[0], layouts_for_any(*bound, self.extents)) if bound else None for bound in call[:2])
        self.blocks = Blocks(True, *call.size) if call.mask else None
        shapes = (EXTENTS[2], call.d_qk), (EXTENTS[3], call.d_qk), (EXTENTS[3], call.d_v), (EXTENTS[2], call.d_v)
        self.tensors = [torch.empty((*EXTENTS[:2], *shape), dtype=call.dtype, device="meta") for shape in shapes]

    def forward_call(self, output_rows: bool) -> forward_kernels.Call:
        """The forward pass as its candidates see it."""
        case = (self.tensors[:3], self.call.scale, self.keys, self.blocks, self.options)
        return forward.case_of(*case, *self.machine, output_rows=output_rows, extras=self.call.extras)

    def backward_call(self, lse_gradient: bool, raw_tops: bool = False) -> backward_kernels.Call:
        """The backward pass as its candidates see it; `raw_tops` as in BackwardCase."""
        score, wanted = self.call.score, self.call.wanted
        ordinary = score is None or are_ordinary(score[1][len(score[0].tensors) :])
        details = backward.Details(self.options, False, lse_gradient, wanted, raw_tops, ordinary, self.call.extras_backward)
        return backward.case_of(self.tensors, self.call.scale, self.keys, self.blocks, details, *self.machine)

    def forward(self, output_rows: bool):
        """The portable forward kernel's plan."""
        return forward_kernels.Portable().plan(self.forward_call(output_rows))

    def backward(self, whole: bool, lse_gradient: bool, use_tma: tuple[bool, bool] | None):
        """The portable backward kernels' plan, and what of the case decides over loads by TMA."""
        call = self.backward_call(lse_gradient)
        case = call.case._replace(whole=whole, use_tma=call.case.use_tma if use_tma is None else use_tma)
        return backward_kernels.Portable().plan(call._replace(case=case)), case.use_tma

    def kernels(self, use_tma: tuple[bool, bool] | None = None) -> tuple[dict[str, Compilation], tuple[bool, bool] | None]:
        """All of them, in the order of the file."""
        plan = self.forward(False)
        found = {"forward": self._tiled(plan)}
        if self.call.backward:
            found["forward_with_rows"] = self._tiled(self.forward(True))
            constants = {"BLOCK_M": delta_rows(self.call.d_v)}
            for name, with_lse in (("backward_delta", False), ("backward_delta_with_lse", True)):
                found[name] = Compilation(self.target, self.backward(False, with_lse, use_tma)[0].delta, constants)
            for suffix, whole in (("", False), ("_whole", True)):
                steps, chosen = self.backward(whole, False, use_tma)
                found |= {f"backward_{n}{suffix}": self._tiled(getattr(steps, n)) for n in ("dkv", "dq")}
            use_tma = chosen
        return found | (self._masks() if self.call.mask else {}), use_tma

    def _tiled(self, step) -> Compilation:
        tile = step.tile
        return Compilation(self.target, step.spec, {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}, tile.num_warps, tile.num_stages)

    def _masks(self) -> dict[str, Compilation]:
        return mask_compilations(self.call.mask, self.extents, self.call.size, self.target, self.call.backward)


def mask_compilations(bound: tuple, extents: tuple, size: tuple[int, int], target: str, transposed: bool) -> dict[str, Compilation]:
    """The kernels that make block lists of a bound mask_mod, by name; with those of `transposed` lists."""
    backend = machine_of(target)[0]
    texts = mask_texts(bound, extents, backend, layouts_for_any)
    found = {}
    if texts.zones:
        found["block_zones"] = Compilation(target, zones_spec(texts, size, backend), {"TILE": block_grid.ZONE_TILE}, 1)
    if analyse(bound[0]).by_rules:
        for name, other in (("block_lists", False), ("transposed_block_lists", True)):
            if transposed or not other:
                found[name] = Compilation(target, verdict_lists_spec(texts, size, backend, other), {"CHUNK": block_grid.VERDICTS_CHUNK})
    else:
        found["block_status"] = Compilation(target, status_spec(texts, size, backend), status_constants(size, backend))
        found["block_lists"] = Compilation(target, lists_spec(True, backend), {"CHUNK": status_lists.LISTS_CHUNK})
    return found
