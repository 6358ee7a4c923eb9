"""Block lists by torch's operations, while the kernels that make them are compiled beside this process.

What these give is what the kernels give, bit by bit: a mask_mod of integers and bools is evaluated everywhere, a part of it at a time, or
its bounds are (codegen/mod/graphs/compute.py).
"""

from __future__ import annotations

import torch

from ..mod.expr import ModGraph, walk
from ..mod.graphs.compute import compute
from ..mod.graphs.intervals import analyse
from ..mod.table.op import kind
from ..plan.masks import Bound

_AT_ONCE = 1 << 22  # positions that are evaluated at a time
_MOST = 1 << 28  # positions in all, beyond which the kernels are faster, their compilation included
_HOST = torch.device("cpu")


def is_exact(graph: ModGraph) -> bool:
    """Does torch compute what kernels do? Kernels may round floats once where torch does twice."""
    return all(kind(node.dtype) != "float" for node in walk(graph.result))


def is_small(extents: tuple[int, int, int, int], size: tuple[int, int]) -> bool:
    """Is evaluating all positions a matter of milliseconds?"""
    Z, H, Q_LEN, KV_LEN = extents
    return Z * H * size[0] * (KV_LEN + size[1]) <= _AT_ONCE and Z * H * (Q_LEN + size[0]) * (KV_LEN + size[1]) <= _MOST


def evaluated_status(
    bound: Bound, extents: tuple[int, int, int, int], device: torch.device, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What BlockGrid.status gives, of a mask that is exact and small.

    It lies on the host where little is to be evaluated, and nothing is captured on a device: a device's first use of an operation loads it.
    """
    on_host = not bound[0].tensors and is_exact(analyse(bound[0]).verdict)
    status = bounded_status(bound, extents, size).clone() if on_host else None
    if status is not None and int((status == 1).sum()) * size[0] * size[1] <= _AT_ONCE:
        _evaluate_undecided(status, bound, extents, size)
    else:
        status = _evaluated(bound, extents, device, size)
    return status, torch.stack([(status == value).sum(-1, dtype=torch.int32) for value in (1, 2)])


def _evaluate_undecided(status: torch.Tensor, bound: Bound, extents: tuple[int, int, int, int], size: tuple[int, int]) -> None:
    """Evaluate the blocks of a status that bounds do not decide."""
    graph, captured = bound
    b, h, row, column = ((t.to(torch.int32)[:, None, None]) for t in (status == 1).nonzero(as_tuple=True))
    q = row * size[0] + torch.arange(size[0], dtype=torch.int32, device=_HOST)[:, None]
    kv = column * size[1] + torch.arange(size[1], dtype=torch.int32, device=_HOST)
    symbols = {"b": b, "h": h, "q_idx": q.clamp(max=extents[2] - 1), "kv_idx": kv.clamp(max=extents[3] - 1)}
    attends = (compute(graph.result, symbols, [], captured) & (kv < extents[3])).expand(len(b), *size)
    some, all_of_them = (attends & (q < extents[2])).flatten(1).any(1), (attends | (q >= extents[2])).flatten(1).all(1)
    status[status == 1] = torch.where(all_of_them, 2, some.to(torch.int8)).to(torch.int8)


def _evaluated(bound: Bound, extents: tuple[int, int, int, int], device: torch.device, size: tuple[int, int]) -> torch.Tensor:
    """All blocks evaluated, some rows of them at a time."""
    (graph, captured), (Z, H, Q_LEN, KV_LEN), (q_block, kv_block) = bound, extents, size
    count = len(graph.tensors)
    rows, columns = -(-Q_LEN // q_block), -(-KV_LEN // kv_block)
    kv = torch.arange(columns * kv_block, dtype=torch.int32, device=device)
    symbols = {
        "b": torch.arange(Z, dtype=torch.int32, device=device)[:, None, None, None],
        "h": torch.arange(H, dtype=torch.int32, device=device)[:, None, None],
        "kv_idx": kv.clamp(max=KV_LEN - 1),
    }
    status = torch.empty((Z, H, rows, columns), dtype=torch.int8, device=device)
    step = max(1, _AT_ONCE // (Z * H * q_block * columns * kv_block))
    for first in range(0, rows, step):
        part = min(step, rows - first)
        q = torch.arange(first * q_block, (first + part) * q_block, dtype=torch.int32, device=device)[:, None]
        attends = compute(graph.result, symbols | {"q_idx": q.clamp(max=Q_LEN - 1)}, captured[:count], captured[count:]) & (kv < KV_LEN)
        attends = attends.expand(Z, H, part * q_block, columns * kv_block)
        counts, shape = q < Q_LEN, (Z, H, part, q_block, columns, kv_block)
        some = (attends & counts).view(shape).any(5).any(3)
        all_of_them = (attends | ~counts).view(shape).all(5).all(3)
        status[:, :, first : first + part] = torch.where(all_of_them, 2, some.to(torch.int8))
    return status


def bounded_status(bound: Bound, extents: tuple[int, int, int, int], size: tuple[int, int]) -> torch.Tensor:
    """The verdicts that BlockGrid.lists lists, int8 (Z, H, rows, columns) on the host, of a mask_mod that captures no tensors."""
    (graph, captured), (Z, H, *lengths) = bound, extents
    symbols = {
        "b": torch.arange(Z, dtype=torch.int32, device=_HOST)[:, None, None, None],
        "h": torch.arange(H, dtype=torch.int32, device=_HOST)[:, None, None],
    }
    for axis, length, block, shape in (("q", lengths[0], size[0], (-1, 1)), ("kv", lengths[1], size[1], (-1,))):
        first = torch.arange(0, length, block, dtype=torch.int32, device=_HOST).view(shape)
        symbols |= {f"{axis}_min": first, f"{axis}_max": (first + block).clamp(max=length) - 1}
    verdict = compute(analyse(graph).verdict.result, symbols, [], captured)
    verdict = torch.where(symbols["kv_min"] + size[1] > lengths[1], verdict.clamp(max=1), verdict).to(torch.int8)
    return verdict.expand(Z, H, *(-(-length // block) for length, block in zip(lengths, size, strict=True)))


def evaluated_lists(status: torch.Tensor, widths: list[int], separate_full: bool, *, device: torch.device) -> list[torch.Tensor]:
    """What lists_of_status gives, on a device."""
    made, columns = [], status.shape[-1]
    place = torch.arange(columns, dtype=torch.int32, device=status.device)
    for width, listed in zip(widths, (status == 1, status == 2) if separate_full else (status != 0,), strict=True):
        found = torch.where(listed, place, columns).sort(-1).values[..., : max(width, 1)]
        found = torch.nn.functional.pad(found, (0, max(width, 1) - found.shape[-1]), value=columns)
        made += [listed.sum(-1, dtype=torch.int32), torch.where(found < columns, found, 0).contiguous()]
    return [t.to(device) for t in made]
