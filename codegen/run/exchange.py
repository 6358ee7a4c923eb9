"""Drivers of the kernels that lay out what ranks of a context plan exchange.

On a CPU torch does their work, unless the interpreter is asked for.

k and v, or their gradients, are (Z, Hkv, positions, D_QK) and (Z, Hkv, positions, D_V), of one dtype; side by side they are contiguous
(positions, Z, Hkv, D_QK + D_V). Blocks are named by int32 numbers on the tensors' device.
"""

from __future__ import annotations

import torch

from ..device.cpp_compiler import torch_serves
from ..device.devices import backend_of
from ..plan.exchange import ExchangeCase, add_spec, copy_spec, positions_of_program
from ..plan.geometry import in_units, known_strides
from ..registry import INFO, Table
from ..text.parameters import named_strides
from .launch import Launch

_launches: dict[tuple, Launch] = Table("exchanges of keys", 1024)


def copy_blocks(k: torch.Tensor, v: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, out: torch.Tensor, block: int) -> None:
    """Block sources[i] of k and v, with zeros past their end, becomes block targets[i] of `out`."""
    if not sources.shape[0] or not out.numel():
        return
    if not torch_serves(k.device):
        k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (k, v))
        named = {"K": k, "V": v, "OUT": out, "sources": sources, "targets": targets}
        _launch(copy_spec, k, v, block, {"k": k, "v": v}, {"LEN": k.shape[2]}, named, sources.shape[0])
        return
    rows = _positions(sources, block)
    found = torch.cat([k, v], -1).permute(2, 0, 1, 3).index_select(0, rows.clamp(max=k.shape[2] - 1))
    out[_positions(targets, block)] = found.masked_fill_((rows >= k.shape[2])[:, None, None, None], 0)


def add_blocks(
    dk: torch.Tensor,
    dv: torch.Tensor,
    returned: torch.Tensor,
    own: torch.Tensor,
    places: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    block: int,
) -> None:
    """Block i of `sums`, of which the last one may be shorter, becomes block own[i] of dk and dv, and blocks places[i] of `returned`, added
    in float32 in their order. -1 is none."""
    dk_sum, dv_sum = sums
    if not own.shape[0] or not returned.shape[1] * returned.shape[2]:
        return
    if not torch_serves(dk.device):
        named = {"DK": dk, "DV": dv, "RETURNED": returned, "own": own, "places": places, "DK_SUM": dk_sum, "DV_SUM": dv_sum}
        strided = {"k": dk, "v": dv, "sk": dk_sum, "sv": dv_sum}
        _launch(add_spec, dk, dv, block, strided, {"LEN": dk_sum.shape[2], "MOST": places.shape[1]}, named, own.shape[0])
        return
    total = _taken(torch.cat([dk, dv], -1).permute(2, 0, 1, 3), own, block)
    for more in places.unbind(1):
        total += _taken(returned, more, block)
    total = total[: dk_sum.shape[2]].permute(1, 2, 0, 3)
    dk_sum.copy_(total[..., : dk.shape[3]])
    dv_sum.copy_(total[..., dk.shape[3] :])


def _positions(blocks: torch.Tensor, block: int) -> torch.Tensor:
    return (blocks.long()[:, None] * block + torch.arange(block, device=blocks.device)).flatten()


def _taken(tensor: torch.Tensor, blocks: torch.Tensor, block: int) -> torch.Tensor:
    """Blocks of a tensor in float32; zeros for -1."""
    found = tensor.new_zeros((blocks.shape[0] * block, *tensor.shape[1:]), dtype=torch.float32)
    there = (blocks >= 0).repeat_interleave(block)
    found[there] = tensor[_positions(blocks, block)[there]].float()
    return found


def _launch(
    make, k: torch.Tensor, v: torch.Tensor, block: int, strided: dict[str, torch.Tensor], sizes: dict, named: dict, blocks: int
) -> None:
    """Launch the kernel of a spec for so many blocks. strided: tensors (Z, Hkv, positions, D) by what their strides are called."""
    device, (Z, Hkv) = k.device, k.shape[:2]
    key = (make, k.dtype, block, blocks, device, *sizes.values(), *((t.shape, t.stride()) for t in strided.values()))
    launch = _launches.get(key)
    if launch is not None:
        INFO.hits += 1
    else:
        strides = {}
        for t, tensor in strided.items():
            strides |= named_strides(t, "zhn", known_strides(tensor.shape, tensor.stride()))
        aligned, strides = in_units(strides, 16 // k.element_size())
        spec = make(ExchangeCase(k.dtype, k.shape[3], v.shape[3], block, aligned), backend_of(device.type))
        launch = _launches[key] = Launch(spec, {"HEADS": Z * Hkv, "Hkv": Hkv, **sizes, **strides}, tuple(named))
    if not launch.again_with(list(named.values()), device):
        rows = positions_of_program(block, k.shape[3], v.shape[3])
        launch.with_constants((rows,), named, [], (blocks * (block // rows) * Z * Hkv,), device)
