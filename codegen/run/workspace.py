"""Memory that kernels need for the length of a call."""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from ..device.memory import empty

_STEP = 32  # elements: tensors begin at multiples of 128 bytes


class Workspace:
    """Contiguous tensors of 32-bit elements that live as long as a call, in one allocation.

    shapes   by the names of parameters      integers   names of those that are int32; others are float32
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], integers: tuple[str, ...] = ()) -> None:
        self.names, self._shapes, self._integers = tuple(shapes), shapes, integers
        *self._starts, self._room = accumulate((-(-math.prod(shape) // _STEP) * _STEP for shape in shapes.values()), initial=0)
        self._offsets = [4 * start for start in self._starts]

    def new(self, device: torch.device) -> torch.Tensor:
        """The memory, without values."""
        return empty((self._room,), (1,), torch.float32, device)

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """By the names of parameters."""
        return {name: self.tensor(memory, name) for name in self.names}

    def tensor(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """One of them."""
        start, shape = self._starts[self.names.index(name)], self._shapes[name]
        found = memory[start : start + math.prod(shape)].view(shape)
        return found.view(torch.int32) if name in self._integers else found

    def addresses(self, memory: torch.Tensor) -> list[int]:
        """All of theirs, in the order of `names`."""
        start = memory.data_ptr()
        return [start + offset for offset in self._offsets]
