"""A mask_mod over a grid of blocks: what each block is, by printed kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..device.cpp import CppKernel
from ..device.devices import backend_of, on
from ..device.kernel import Kernel, kernel_for
from ..device.memory import META, contiguous
from ..device.workers import SETTING
from ..mod.expr import INDEX_BOUND
from ..plan.cpu_masks import blocks_spec
from ..plan.masks import Bound, MaskTexts, list_names, mask_texts, parts_of, status_constants, status_spec, verdict_lists_spec, zones_spec
from ..registry import INFO, Table
from ..text.cpp import CPP
from ..text.language import Language
from ..text.languages import TRITON
from ..text.layouts import layouts_of
from .status_lists import Starts, begin_lists, lists_of_status

ZONE_TILE = 128  # positions that one step of block_zones takes
VERDICTS_CHUNK = 128  # blocks that one step of block_lists takes

plans: dict[tuple, object] = Table("mask plans", 1024)


@dataclass(frozen=True)
class _MaskPlan:
    """A mask_mod's texts, and its kernels so far."""

    texts: MaskTexts
    kernels: dict = field(default_factory=dict)

    def kernel(self, kind: type[Kernel], make, *details) -> Kernel:
        """The kernel of the spec that `make` gives."""
        key = make, details
        kernel = self.kernels.get(key)
        if kernel is None:
            kernel = self.kernels[key] = kernel_for(make(self.texts, *details), kind)
        return kernel


class BlockGrid:
    """A bound mask_mod over a grid of blocks: (Z, H) masks of Q_LEN x KV_LEN positions, in blocks of `size`. Not one of them is empty.

    starts   where the blocks of queries, and those of keys, begin, or nothing (see BlockLists)
    begins   kernels are compiled beside this process, and nothing is launched or written
    waits    for the compiler; else NotYet is raised where a kernel is not compiled

    Nothing here waits for the device.
    """

    language: Language = TRITON

    def __init__(
        self,
        bound: Bound,
        extents: tuple[int, int, int, int],
        device: torch.device,
        size: tuple[int, int],
        starts: Starts = (),
        *,
        begins: bool = False,
        waits: bool = True,
    ) -> None:
        graph, self.captured = bound
        self.begins, self.waits, self.place = begins, waits, META if begins else device
        self.device, self.size, self.backend = device, size, backend_of(device.type)
        Z, H, Q_LEN, KV_LEN = extents
        rows, columns = (t.shape[0] - 1 for t in starts) if starts else (-(-Q_LEN // size[0]), -(-KV_LEN // size[1]))
        self.starts, self.shape = starts, (Z, H, rows, columns)
        layouts = tuple(layouts_of(part, self.captured, extents, graph) for part in parts_of(graph))
        key = ("blocks", graph, layouts, device, size, max(Q_LEN, KV_LEN) <= INDEX_BOUND, self.language.name)
        plan = plans.get(key)
        if plan is not None:
            INFO.hits += 1
        else:
            plan = plans[key] = _MaskPlan(mask_texts(bound, extents, self.backend, language=self.language))
        self.plan: _MaskPlan = plan
        self.values = plan.texts.named(self.captured)
        self.values |= {"Hm": H, "rows": rows, "columns": columns, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
        if starts:
            self.values["q_starts"], self.values["kv_starts"] = starts
        self.values |= self._measured()

    def _launch(self, kernel: Kernel, grid: int, constants: tuple[int, ...], num_warps: int = 4, **tensors) -> None:
        arguments = kernel.spec.arguments({**self.values, **tensors})
        if self.begins:
            with on(self.device):
                kernel.begin(arguments, self.device, constants, num_warps=num_warps, num_stages=1)
            return
        kernel.launch((grid,), arguments, self.device, constants, waits=self.waits, num_warps=num_warps, num_stages=1)

    def _zone_maps(self) -> dict[str, torch.Tensor]:
        """Memory for the least and the greatest value of every zone, (Z, H, rows or columns) each, by the names of parameters."""
        Z, H, rows, columns = self.shape
        zones = [(zone, name) for zone in self.plan.texts.zones for name in zone.names]
        return {
            name: contiguous((Z, H, rows if zone.axis == "q_idx" else columns), getattr(torch, zone.dtype), self.place)
            for zone, name in zones
        }

    def _measured(self) -> dict[str, torch.Tensor]:
        """These maps, filled."""
        Z, H, rows, columns = self.shape
        maps = self._zone_maps()
        if maps:
            kernel = self.plan.kernel(Kernel, zones_spec, self.size, self.backend, bool(self.starts))
            self._launch(kernel, Z * H * (rows + columns), (ZONE_TILE,), num_warps=1, **maps)
        return maps

    def status(self, separate_full: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 (Z, H, rows, columns): 0 empty, 1 partial, 2 full; and int32 (2, Z, H, rows): how many are partial, and full.

        separate_full   what lists are to be made of it: their kernel may be compiled at the same time
        """
        Z, H, rows, columns = self.shape
        status = contiguous(self.shape, torch.int8, self.place)
        counts = torch.zeros((2, Z, H, rows), dtype=torch.int32, device=self.place)
        details = self.size, self.backend, bool(self.starts)
        if self.waits and not SETTING["waits"] and (status_spec, details) not in self.plan.kernels:
            begin_lists(separate_full, bool(self.starts), self.device)
        kernel = self.plan.kernel(Kernel, status_spec, *details)
        constants = status_constants(self.size, self.backend)
        grid = Z * H * rows * -(-columns // constants["CHUNK"])
        self._launch(kernel, grid, tuple(constants.values()), status=status, num_blocks=counts[0], num_full=counts[1])
        return status, counts

    def lists(self, *, transposed: bool = False) -> list[torch.Tensor]:
        """Block lists (see `block_lists`) by bounds alone: what they cannot decide is partial. As wide as there are columns."""
        Z, H, rows, columns = self.shape
        lines, width = (columns, rows) if transposed else (rows, columns)
        shapes = ((Z, H, lines), (Z, H, lines, width)) * 2
        made = {name: contiguous(shape, torch.int32, self.place) for name, shape in zip(list_names(True), shapes, strict=True)}
        kernel = self.plan.kernel(Kernel, verdict_lists_spec, self.size, self.backend, transposed, bool(self.starts))
        self._launch(kernel, Z * H * lines, (VERDICTS_CHUNK,), width=width, **made)
        return list(made.values())


class CppGrid(BlockGrid):
    """A BlockGrid by one kernel in C++, which measures zones, asks for bounds and evaluates."""

    language = CPP

    def _measured(self) -> dict[str, torch.Tensor]:
        """The maps, which the kernel fills first."""
        return {"Zm": self.shape[0], **self._zone_maps()}

    def status(self, separate_full: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return self._classified(evaluates=True, whole_queries=bool(self.starts))

    def lists(self, *, transposed: bool = False) -> list[torch.Tensor]:
        status, _ = self._classified(evaluates=False, whole_queries=bool(self.starts) and transposed)
        status = status.transpose(-1, -2) if transposed else status
        return lists_of_status(status, [status.shape[-1]] * 2, True, self.starts and (self.starts[not transposed],))

    def _classified(self, evaluates: bool, whole_queries: bool) -> tuple[torch.Tensor, torch.Tensor]:
        status = contiguous(self.shape, torch.int8, self.device)
        counts = contiguous((2, *self.shape[:3]), torch.int32, self.device)
        kernel = self.plan.kernel(CppKernel, blocks_spec, self.size, bool(self.starts), evaluates, whole_queries)
        kernel.call({**self.values, "status": status, "num_blocks": counts[0], "num_full": counts[1]})
        return status, counts
