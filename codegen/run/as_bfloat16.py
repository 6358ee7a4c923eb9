"""The driver of the kernel that makes bfloat16 of float8. torch does its work where elements have gaps between them or are no multiple of
16, and on a CPU, unless the interpreter is asked for."""

from __future__ import annotations

import torch

from ..device.cpp_compiler import torch_serves
from ..device.devices import backend_of
from ..plan.as_bfloat16 import ELEMENTS, as_bfloat16_spec
from ..registry import INFO, Table
from .launch import Launch

_launches: dict[tuple, Launch] = Table("float8 as bfloat16", 1024)


def as_bfloat16(t: torch.Tensor) -> torch.Tensor:
    """t, of float8_e4m3fn, in bfloat16. Elements lie in the same order in memory."""
    count, device = t.numel(), t.device
    if torch_serves(device) or not 0 < count < 2**31 - ELEMENTS or count % 16 or not _is_dense(t):
        return t.to(torch.bfloat16)
    out = torch.empty_strided(t.shape, t.stride(), dtype=torch.bfloat16, device=device)
    named = {"ELEMENTS": t.view(torch.uint8), "OUT": out}
    launch = _launches.get((count, device))
    if launch is not None:
        INFO.hits += 1
    else:
        launch = _launches[count, device] = Launch(as_bfloat16_spec(backend_of(device.type)), {"SIXTEENS": count // 16}, tuple(named))
    if not launch.again_with(list(named.values()), device):
        launch.with_constants((ELEMENTS,), named, [], (-(-count // ELEMENTS),), device)
    return out


def _is_dense(t: torch.Tensor) -> bool:
    """Are all elements in memory one after another, in any order of dimensions?"""
    expected = 1
    for stride, n in sorted((stride, n) for stride, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= n
    return True
