"""The operators behind masks: what torch's compiler, exporter and counters see of them (see attention_operators.py).

flexpress::block_lists         create_block_mask
flexpress::transposed_lists    what a backward pass reads, once for all calls with a mask
flexpress::dense_mask          create_mask
"""

from __future__ import annotations

import torch

from flexpress.graphs.custom_ops import fake_of, operator, operator_of_mods
from flexpress.graphs.programs import bound_graph, on_device, read_graph_once
from flexpress.inputs.plain_arguments import resolve_device
from flexpress.masks.block_lists import made_transposed

from ..codegen.mod.captured.tensors import read_captured
from ..codegen.mod.graphs.wide import in_wide_integers
from ..codegen.run import masks
from ..codegen.run.block_lists import lists_of


@operator_of_mods("block_lists")
def block_lists(
    tensors: list[torch.Tensor],
    ints: list[int],
    floats: list[float],
    extents: list[int],
    size: list[int],
    separate_full: bool,
    capacity: int | None,
    device: torch.device,
    mask: str,
) -> list[torch.Tensor]:
    """kv_num_blocks, kv_indices and, if they are kept apart, full_kv_num_blocks and full_kv_indices of a mask_mod's text.

    extents    B, H, Q_LEN, KV_LEN
    capacity   how wide lists are; by default as wide as there are columns
    """
    capacity = -(-extents[3] // size[1]) if capacity is None else capacity
    device = resolve_device(device)  # torch's C++ wrapper gives the CPU a number
    return masks.create_lists(
        _mask(tensors, ints, floats, device, mask, extents), tuple(extents), device, tuple(size), separate_full, capacity
    )


def _mask(tensors: list[torch.Tensor], ints: list[int], floats: list[float], device: torch.device, text: str, extents: list[int]) -> tuple:
    """A bound mod of a text, whose integers hold for extents."""
    graph = read_graph_once(text)
    bound_mod = bound_graph(graph, iter(on_device(device, tensors)), iter(ints), iter(floats))
    read_captured(bound_mod, device, f"{graph.kind}_mod")
    return in_wide_integers(bound_mod, tuple(extents))


@fake_of(block_lists)
def _(tensors, ints, floats, extents, size, separate_full, capacity, device, mask):
    rows, columns = (-(-n // block) for n, block in zip(extents[2:], size, strict=True))
    counts, width = (*extents[:2], rows), columns if capacity is None else torch.sym_min(capacity, columns)
    shapes = (counts, (*counts, torch.sym_max(width, 1))) * (1 + separate_full)
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]


@operator("transposed_lists")
def transposed_lists(lists: list[torch.Tensor], KV_LEN: int, size: list[int], interior: bool) -> list[torch.Tensor]:
    """For each KV block the query blocks that visit it, in the fields of `lists` and as wide as there are."""
    return list(made_transposed(lists_of(lists, *size, interior), KV_LEN, wait=False).tables)


@fake_of(transposed_lists)
def _(lists, KV_LEN, size, interior):
    Z, H, rows = lists[0].shape
    counts = Z, H, -(-KV_LEN // size[1])
    shapes = (counts, (*counts, torch.sym_max(rows, 1))) * (len(lists) // 2)
    return [lists[0].new_empty(shape) for shape in shapes]


@operator_of_mods("dense_mask")
def dense_mask(
    tensors: list[torch.Tensor], ints: list[int], floats: list[float], extents: list[int], device: torch.device, mod: str
) -> torch.Tensor:
    """bool `extents`, (B, H, Q_LEN, KV_LEN): a mask_mod's text everywhere, or where a score_mod's of zero scores is not -inf."""
    device = resolve_device(device)  # torch's C++ wrapper gives the CPU a number
    return masks.dense_mask(_mask(tensors, ints, floats, device, mod, extents), *extents, device)


@fake_of(dense_mask)
def _(tensors, ints, floats, extents, device, mod):
    return torch.empty(extents, dtype=torch.bool, device=device)
