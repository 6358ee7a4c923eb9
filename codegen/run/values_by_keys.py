"""The driver of the kernel that lays values of 8 bits out by keys. On a CPU torch does its work, unless the interpreter is asked for."""

from __future__ import annotations

import torch

from ..device.cpp_compiler import torch_serves
from ..device.devices import backend_of
from ..plan.geometry import in_units, known_strides
from ..plan.values_by_keys import OUT_STRIDES, ByKeysCase, by_keys_spec, keys_of_program
from ..registry import INFO, Table
from ..text.parameters import named_strides
from .launch import Launch

_launches: dict[tuple, Launch] = Table("values by keys", 1024)


def by_keys(v: torch.Tensor) -> torch.Tensor:
    """v (Z, H, KV_LEN, D) of a dtype of 8 bits, in memory as (Z, H, D, KV_LEN) with rows of whole 16 bytes. A copy, unless it lies so."""
    Z, H, KV_LEN, D = v.shape
    if v.stride(2) == 1 and not any(v.stride(i) % 16 for i in (0, 1, 3) if v.shape[i] > 1):
        return v
    whole = torch.empty((Z, H, D, -(-KV_LEN // 16) * 16), dtype=torch.uint8, device=v.device)
    given = v.view(torch.uint8)
    if not whole.numel():
        pass
    elif torch_serves(v.device):
        whole[..., :KV_LEN].copy_(given.transpose(2, 3))
    else:
        _turn(given, whole)
    return whole[..., :KV_LEN].view(v.dtype).transpose(2, 3)


def _turn(v: torch.Tensor, out: torch.Tensor) -> None:
    """Launch the kernel."""
    (Z, H, KV_LEN, D), device = v.shape, v.device
    key = v.shape, v.stride(), device
    launch, named = _launches.get(key), {"V": v, "OUT": out}
    if launch is not None:
        INFO.hits += 1
    else:
        *rows, column = known_strides(v.shape, v.stride())
        unit = column == 1 or D == 1
        aligned, rows = in_units(named_strides("v", "zhn", rows), 16)
        numbers = {"H": H, "KV_LEN": KV_LEN, "stride_vd": column, **rows}
        numbers |= {name: stride // 16 for name, stride in zip(OUT_STRIDES, out.stride(), strict=False)}
        launch = _launches[key] = Launch(by_keys_spec(ByKeysCase(D, unit, aligned), backend_of(device.type)), numbers, tuple(named))
    if not launch.again_with(list(named.values()), device):
        block = keys_of_program(D)
        launch.with_constants((block,), named, [], (Z * H * -(-KV_LEN // block),), device)
