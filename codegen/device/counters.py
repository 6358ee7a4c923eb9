"""Numbers in a device's memory on which the programs of a kernel count, and when memory may be kept at all."""

from __future__ import annotations

import contextlib
import threading

import torch

from ..registry import Table
from .cuda import capture_number, unrestricted

_counters: dict[tuple, torch.Tensor] = Table("counters", 1024)
_SPARE = 4096  # counters of CUDA graphs for each device, 16 bytes each


class _Thread(threading.local):
    keeps = True


_thread = _Thread()


class nothing_kept:  # noqa: N801  # a context manager, without a generator's time
    """In here no memory is kept for later calls: of what runs an operator, torch's compiler takes what is allocated on a stream of its own
    for part of a CUDA graph."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _thread.keeps = _thread.keeps, False

    def __exit__(self, *_: object) -> None:
        _thread.keeps = self._before


def may_keep(stream: int) -> bool:
    """May memory that is allocated now on this stream serve later calls on it? None captures stream 0."""
    return not stream or (_thread.keeps and not torch.cuda.is_current_stream_capturing())


def counter(device: torch.device, stream: int) -> torch.Tensor:
    """Two int32 of zero for `stream`, the current one, on which one kernel after another may count: each leaves them zero. A CUDA graph
    gets some of its own, as graphs may run beside each other."""
    if stream and torch.cuda.is_current_stream_capturing():
        return _of_graph(device, stream)
    found = _counters.get((device, stream))
    if found is None:
        found = _first(device)
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
            self._kept, self._held = False, _of_graph(device, stream)
            return self._held
        held = _counters.pop(self._key, None)
        self._kept = held is not None or may_keep(stream)
        self._held = _first(device) if held is None else held
        return self._held

    def __exit__(self, failed: object, *_: object) -> None:
        if self._kept and failed is None:
            _counters[self._key] = self._held


class _Spare:
    """Counters of one device for CUDA graphs, each for the kernels that one graph runs on one stream. To set a graph's own memory to zero
    would be a kernel more at every call of attention in it, of a microsecond. None is used again, as nothing says when a graph ends."""

    def __init__(self, counters: torch.Tensor) -> None:
        self.left = iter(counters)
        self.of_stream: dict[int, tuple[int, torch.Tensor]] = {}  # the graph that was captured there last, and its counter


_spare: dict[torch.device, _Spare] = {}  # never cleared: graphs may outlive everything else
_lock = threading.Lock()


def _first(device: torch.device) -> torch.Tensor:
    """Zeros for a stream that is not captured; the first time, counters for graphs are allocated, too."""
    if device.type == "cuda" and device not in _spare:
        thread = threading.Thread(target=_set_aside, args=(device,))
        thread.start()
        thread.join()
    return _zeros(device)


def _set_aside(device: torch.device) -> None:
    """Allocate counters for graphs. In a thread and on a stream of their own, as memory of the caller's thread, or of the current stream,
    may be taken for a graph's now."""
    torch.cuda.set_device(device)
    with _lock, unrestricted(), contextlib.suppress(torch.OutOfMemoryError):
        if device in _spare:
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            counters = torch.zeros(_SPARE, 4, dtype=torch.int32, device=device)
        stream.synchronize()  # whatever stream a graph runs on finds them zero
        _spare[device] = _Spare(counters)


def _of_graph(device: torch.device, stream: int) -> torch.Tensor:
    """The counter of the graph that is captured on `stream`; zeros of this call, if there are no more."""
    spare = _spare.get(device)
    number = capture_number(stream) if spare else None
    if number is None:
        return _zeros(device)
    with _lock:
        last, found = spare.of_stream.get(stream, (None, None))
        if last != number:
            found = next(spare.left, None)
            if found is None:
                return _zeros(device)
            spare.of_stream[stream] = number, found
    return found


def _zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)
