"""Memory for what kernels write, on the shortest way to torch's allocator.

torch.empty_strided parses its arguments and passes torch's dispatcher, which on a GPU takes as long as starting a kernel. The code that
torch's own compiler writes calls the allocator directly; where a torch has that function, and for the current device, so do we. Nobody
records calls where this is used (are_plain), and where torch is to fill new memory with NaN (in deterministic mode) it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Shape = tuple[int, ...]
META = torch.device("meta")


def _found(device_type: str) -> Callable[[Shape, Shape, torch.dtype], torch.Tensor] | None:
    """Torch's function for the current device of a type. It takes tuples alone: a torch.Size is none."""
    if device_type == "cuda" and (torch.version.hip or not torch.backends.cuda.is_built()):
        return None
    return getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device_type}", None)


_ALLOCATE = {kind: _found(kind) for kind in ("cpu", "cuda")}
_fills = torch._C._get_deterministic_algorithms


def empty(shape: Shape, strides: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without values."""
    allocate = _ALLOCATE.get(device.type)
    if allocate is not None and not _fills() and (device.index is None or device.index == torch._C._cuda_getDevice()):
        return allocate(tuple(shape), strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def contiguous(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor without values."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return empty(shape, tuple(strides[::-1]), dtype, device)
