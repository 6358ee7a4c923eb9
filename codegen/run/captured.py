"""The gradients of captured tensors: the buffers that kernels write, and how they become gradients."""

from __future__ import annotations

import torch

from ..mod.expr import Expr, ModGraph
from ..mod.graphs.compute import compute
from ..plan.backward import Step
from ..plan.hopper_backward import HopperBackwardPlan
from .block_lists import BlockLists
from .layouts import shares_memory

_CHUNK = 1 << 24  # positions whose gradient is added up at a time on the host


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A captured tensor as kernels read it: one that wants a gradient is `distinct`, also what autograd has expanded. Hooks and
    torch.autograd.grad see the gradient of each of its indices."""
    return distinct(tensor) if tensor.requires_grad else tensor


def all_apart(score: tuple[ModGraph, list]) -> tuple[ModGraph, list]:
    """A bound score_mod, all of whose tensors are `apart`."""
    graph, values = score
    count = len(graph.tensors)
    return graph, [*map(apart, values[:count]), *values[count:]]


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with an element of its own in memory for every index."""
    # a dimension of one index may have stride 0, too, and is contiguous to torch
    strides = tensor.stride()
    return tensor.clone(memory_format=torch.contiguous_format) if 0 in strides or shares_memory(tensor.shape, strides) else tensor


class Sums:
    """The gradients of captured tensors: the buffers that kernels write, and how they become gradients."""

    def __init__(
        self, steps: tuple[Step | HopperBackwardPlan, ...], score, extents: tuple, device: torch.device, lists: BlockLists | None
    ) -> None:
        self.steps, self.score, self.extents, self.device, self.lists = steps, score, extents, device, lists
        self.buffers: dict[str, torch.Tensor] = {}
        self.totals: dict[int, torch.Tensor] = {}

    def _tensor(self, load: Expr) -> torch.Tensor:
        return self.score[1][load.attr]

    def tensors(self, step: Step | HopperBackwardPlan, tiles: int) -> dict[str, torch.Tensor]:
        """Buffers by the names of a kernel's parameters."""
        Z, Hq, Q_LEN, KV_LEN = self.extents
        shapes = {"row": (Z, Hq, Q_LEN), "column": (Z, Hq, KV_LEN), "head": (Z, Hq, tiles), "slab": (Q_LEN, KV_LEN)}
        for captured, load in step.captured:
            shape = (*shapes.get(captured.role, ()), *([captured.width] if captured.width else []))
            buffer = self.buffers.get(captured.buffer)  # there already if an earlier launch wrote other heads, or the tile was too large
            if captured.role in ("store", "atomic"):
                if buffer is None:
                    tensor = self._tensor(load)
                    dtype = tensor.dtype if captured.role == "store" else torch.float32
                    buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self.device).zero_()
            elif buffer is None or buffer.shape != shape:
                buffer = torch.empty(shape, dtype=torch.float32, device=self.device)
            self.buffers[captured.buffer] = buffer.zero_() if captured.role == "slab" else buffer
        return {captured.buffer: self.buffers[captured.buffer] for captured, _ in step.captured}

    def add_slabs(self, step: Step, head: tuple[int, int]) -> None:
        """Add one head's stored positions to their places, a chunk of rows at a time."""
        _, _, Q_LEN, KV_LEN = self.extents
        rows = max(1, _CHUNK // KV_LEN)
        for captured, load in step.captured:
            if captured.role == "slab":
                q_idx, kv_idx = self._positions("q")[:, None], self._positions("kv")[None, :]
                for start in range(0, Q_LEN, rows):
                    part = self.buffers[captured.buffer][start : start + rows]
                    heads = {s: torch.full((1, 1), n, dtype=torch.int32, device=self.device) for s, n in zip("bh", head, strict=True)}
                    self._add(load, part, {"q_idx": q_idx[start : start + rows], "kv_idx": kv_idx, **heads})

    def _range(self, n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.int32, device=self.device)

    def _positions(self, axis: str) -> torch.Tensor:
        """Where queries ("q") or keys ("kv") are, as mods are told."""
        length = self.extents[2 if axis == "q" else 3]
        if self.lists is None or self.lists.shifts is None:
            return self._range(length)
        return self.lists.shifts.positions(getattr(self.lists, f"{axis}_block"), axis, length)

    def _add(self, load: Expr, values: torch.Tensor, symbols: dict) -> None:
        """Add `values`, one or a row of them for each position of the symbols' grid, to the elements that the load reads there."""
        tensor = self._tensor(load)
        grid = values.shape[:-1] if load.op == "row" else values.shape
        count = len(self.score[0].tensors)
        inside = torch.ones(grid, dtype=torch.bool, device=self.device)
        indices = []
        for index, size in zip(load.args, tensor.shape, strict=False):
            at = compute(index, symbols, self.score[1][:count], self.score[1][count:]).long().expand(grid)
            at = torch.where(at < 0, at + size, at)
            inside &= (at >= 0) & (at < size)
            indices.append(at.clamp(0, size - 1))
        total = self.totals.get(load.attr)
        if total is None:
            total = self.totals[load.attr] = torch.zeros(tensor.shape, dtype=torch.float32, device=self.device)
        elif total.dtype != torch.float32:  # what another load of this tensor stored
            total = self.totals[load.attr] = total.float()
        if total.numel() == 0:
            return  # every index lies outside
        if load.op == "row":
            inside = inside.unsqueeze(-1)
        values = torch.where(inside, values.float(), 0.0)
        if indices and self.device.type == "cpu":  # where index_put_ adds many values in any order
            total = self.totals[load.attr] = total.contiguous()
            flat, width = 0, values.shape[len(grid) :]
            for at, size in zip(indices, total.shape, strict=False):
                flat = flat * size + at
            total.view(-1, *width).index_add_(0, flat.reshape(-1), values.reshape(-1, *width))
        elif indices:
            total.index_put_(tuple(indices), values, accumulate=True)
        else:
            total += values.sum()

    def _add_over(self, axis: str, load: Expr, values: torch.Tensor) -> None:
        """Add values for all of b, h and `axis`: positions ("q_idx", "kv_idx"), or "part", of which a head has several. A load whose
        indices are these themselves, as in `slopes[h]`, has sums as its gradient: one kernel in place of some thirty."""
        tensor, axes = self._tensor(load), {"b": "b", "h": "h", axis: "n"}
        own = [index.attr if index.op == "symbol" else "" for index in load.args]
        moved = axis != "part" and self.lists is not None and self.lists.shifts is not None
        if moved or len(set(own)) < len(own) or not axes.keys() >= set(own):
            grid = {"b": self._range(self.extents[0])[:, None, None], "h": self._range(self.extents[1])[None, :, None]}
            if axis == "part":
                values = values.sum(2, keepdim=True)
            else:
                grid[axis] = self._positions(axis.removesuffix("_idx"))[None, None, :]
            self._add(load, values, grid)
            return
        kept = [axes[name] for name in own]
        if summed := [dim for dim, axis in enumerate("bhn") if axis not in kept]:
            values = values.sum(summed)
        left = [axis for axis in "bhn" if axis in kept]  # no einsum, which autocast would have in half precision
        values = values.permute([*map(left.index, kept), *range(len(left), values.ndim)]).contiguous()
        values = values[tuple(map(slice, tensor.shape))]  # what lies behind the tensor's end has no element
        if values.shape != tensor.shape:
            found, values = values, values.new_zeros(tensor.shape)
            values[tuple(map(slice, found.shape))] = found
        total = self.totals.get(load.attr)
        self.totals[load.attr] = values if total is None else total.float() + values

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradient of every captured tensor that wants one, in its shape and dtype."""
        if not self.buffers:
            return {}
        axes = {"head": "part", "row": "q_idx", "column": "kv_idx"}
        for step in self.steps:
            for captured, load in step.captured:
                buffer = self.buffers[captured.buffer]
                if captured.role in ("store", "atomic"):
                    found = self.totals.get(load.attr)
                    self.totals[load.attr] = buffer if found is None else found + buffer
                elif captured.role in axes:
                    self._add_over(axes[captured.role], load, buffer)
        return {i: total.to(self.score[1][i].dtype) for i, total in self.totals.items()}
