"""Numbers in a device's memory on which the programs of a kernel count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..registry import Table

_counters: dict[tuple, torch.Tensor] = Table("counters", 1024)


def counter(device: torch.device, stream: int) -> torch.Tensor:
    """Two int32 of zero for `stream`, the current one, on which one kernel after another may count: each leaves them zero. A CUDA graph
    gets some of its own, as graphs may run beside each other; none captures stream 0."""
    if stream and torch.cuda.is_current_stream_capturing():
        return _zeros(device)
    found = _counters.get((device, stream))
    if found is None:
        found = _counters[device, stream] = _zeros(device)
    return found


@contextlib.contextmanager
def held_counter(device: torch.device, stream: int) -> Iterator[torch.Tensor]:
    """`counter` for kernels of which one leaves word for the next: no other thread gets it in between, and nobody if they fail."""
    if stream and torch.cuda.is_current_stream_capturing():
        yield _zeros(device)
        return
    held = _counters.pop((device, stream), None)
    if held is None:
        held = _zeros(device)
    yield held
    _counters[device, stream] = held


def _zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)
