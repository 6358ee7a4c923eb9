"""What a device is: its backend, its row of the tables, how many programs it runs at once; and making it the current one."""

from __future__ import annotations

import contextlib
import functools

import torch

from ..gpus import architecture

_NOTHING = contextlib.nullcontext()


def on(device: torch.device):
    """The device's context, where it is not the current one already. It has tensors, so CUDA is initialized."""
    if device.index is None or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)


@functools.cache
def backend_of(device_type: str) -> str:
    """ "cpu", "cuda" or "hip"."""
    if device_type == "cpu":
        return "cpu"
    return "hip" if torch.version.hip else "cuda"


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def architecture_of(device: torch.device) -> str:
    """The row of the tile tables for a device."""
    backend = backend_of(device.type)
    return architecture(backend, capability_of(device) if backend == "cuda" else None)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
