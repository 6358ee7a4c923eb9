"""Numbers in a device's memory on which the programs of a kernel count, and when memory may be kept at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from ..registry import Table

_counters: dict[tuple, torch.Tensor] = Table("counters", 1024)


class _Thread(threading.local):
    keeps = True


_thread = _Thread()


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """In here no memory is kept for later calls: of what runs an operator, torch's compiler takes what is allocated on a stream of its own
    for part of a CUDA graph."""
    before, _thread.keeps = _thread.keeps, False
    try:
        yield
    finally:
        _thread.keeps = before


def may_keep(stream: int) -> bool:
    """May memory that is allocated now on this stream serve later calls on it? None captures stream 0."""
    return not stream or (_thread.keeps and not torch.cuda.is_current_stream_capturing())


def counter(device: torch.device, stream: int) -> torch.Tensor:
    """Two int32 of zero for `stream`, the current one, on which one kernel after another may count: each leaves them zero. A CUDA graph
    gets some of its own, as graphs may run beside each other."""
    if stream and torch.cuda.is_current_stream_capturing():
        return _zeros(device)
    found = _counters.get((device, stream))
    if found is None:
        found = _zeros(device)
        if may_keep(stream):
            _counters[device, stream] = found
    return found


class held_counter:  # noqa: N801  # a context manager, without a generator's time
    """`counter` for kernels of which one leaves word for the next: no other thread gets it in between, and nobody if they fail."""

    __slots__ = ("_key", "_kept", "_held")

    def __init__(self, device: torch.device, stream: int) -> None:
        self._key = device, stream

    def __enter__(self) -> torch.Tensor:
        device, stream = self._key
        if stream and torch.cuda.is_current_stream_capturing():
            self._kept, self._held = False, _zeros(device)
            return self._held
        held = _counters.pop(self._key, None)
        self._kept = held is not None or may_keep(stream)
        self._held = _zeros(device) if held is None else held
        return self._held

    def __exit__(self, failed: object, *_: object) -> None:
        if self._kept and failed is None:
            _counters[self._key] = self._held


def _zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)
