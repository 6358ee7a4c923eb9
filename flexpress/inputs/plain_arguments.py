"""Arguments that are no tensors, as users write them: flags and devices."""

from __future__ import annotations

import torch

from ..mods._arguments import as_flag


def flag(name: str, value) -> bool:
    """The argument `name` as a bool. TypeError for anything but bools, numpy's too, and the integers 0 and 1: a word would count as True,
    and an array has no truth."""
    if (found := as_flag(value)) is not None:
        return found
    raise TypeError(f"{name} must be True or False, got {type(value).__name__} {repr(value)[:80]}")


def named_device(device) -> torch.device:
    """The argument `device` as a torch.device. TypeError for what names none: a dtype or a tensor, to which `.to` would convert."""
    try:
        if isinstance(device, bool):
            raise TypeError
        found = torch.device(device)
        return torch.device("cpu") if found.type == "cpu" else found  # cpu:0 is no other one, but unequal
    except (TypeError, RuntimeError, ValueError) as error:
        raise TypeError(f"device must be a torch.device or its name, got {repr(device)[:80]}") from error


def device_or_default(device) -> torch.device | None:
    """The same, where None is the function's default."""
    return None if device is None else named_device(device)


def resolve_device(device) -> torch.device:
    """A device with its index, so that it compares equal to a tensor's. Raises TypeError for what is none, NotImplementedError for one
    without kernels."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = named_device(device)
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device is {str(device)!r}; kernels run on CUDA or ROCm GPUs ('cuda') and on 'cpu'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
