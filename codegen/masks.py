"""Drivers of the mask kernels: block classification, block lists and the dense mask."""

from __future__ import annotations

import torch

from .cache import INFO
from .expr import INDEX_BOUND, ModGraph
from .kernel import Kernel, backend_of, kernel_for
from .lower import Target
from .spec import KernelSpec, ModText, layouts_of, mod_text

SYMBOL_NAMES = {"score": "score", "b": "z", "h": "h", "q_idx": "m", "kv_idx": "n"}
_TILE = 64  # rows and columns of a tile of the dense mask
_BLOCK_TILE = {"cpu": 128}  # the same of block_mask; elsewhere 32, the fastest of 32, 64, 128 on the H100
_CHUNK = 1024  # columns of the status that one step of block_lists reads

_plans: dict[tuple, tuple[Kernel, ModText]] = {}


def clear() -> None:
    """Forget every plan."""
    _plans.clear()


def _plan(template: str, bound: tuple[ModGraph, list], extents: tuple[int, int, int, int], device: torch.device, numbers: list[str],
          flags: dict) -> tuple[Kernel, ModText]:
    graph, captured = bound
    exact = max(extents[2:]) <= INDEX_BOUND
    layouts = layouts_of(graph, captured, extents)
    key = (template, graph, layouts, device, exact, *flags.items())
    if key in _plans:
        INFO.hits += 1
        return _plans[key]
    backend = backend_of(device.type)
    text = mod_text(graph, layouts, SYMBOL_NAMES, Target(backend, "float32", exact), shape="[TILE_M, TILE_N]")
    _plans[key] = kernel_for(mask_spec(template, text, backend, numbers, flags)), text
    return _plans[key]


def mask_spec(template: str, text: ModText, backend: str, numbers: list[str], flags: dict) -> KernelSpec:
    """The KernelSpec of block_mask or dense_mask."""
    return KernelSpec(template, (text,), (*flags.items(), ("numbers", (*numbers, *text.numbers))), backend)


def block_mask_flags(q_block: int, kv_block: int, backend: str) -> tuple[dict, int, int]:
    """The flags of block_mask for a block size, and its TILE_M and TILE_N."""
    tile = _BLOCK_TILE.get(backend, 32)
    tile_m, tile_n = min(tile, _power_of_two(q_block)), min(tile, _power_of_two(kv_block))
    return {"Q_BLOCK": q_block, "KV_BLOCK": kv_block, "RAGGED_M": q_block % tile_m != 0,
            "RAGGED_N": kv_block % tile_n != 0}, tile_m, tile_n


BLOCK_MASK_NUMBERS = ["Hm", "rows", "columns", "Q_LEN", "KV_LEN"]
DENSE_MASK_NUMBERS = ["Hm", "Q_LEN", "KV_LEN"]


def block_status(bound: tuple[ModGraph, list], Z: int, H: int, Q_LEN: int, KV_LEN: int, device: torch.device, q_block: int,
                 kv_block: int) -> torch.Tensor:
    """int8 (Z, H, rows, columns): 0 empty, 1 partial, 2 full."""
    rows, columns = -(-Q_LEN // q_block), -(-KV_LEN // kv_block)
    status = torch.empty((Z, H, rows, columns), dtype=torch.int8, device=device)
    if status.numel():
        flags, tile_m, tile_n = block_mask_flags(q_block, kv_block, backend_of(device.type))
        kernel, text = _plan("block_mask", bound, (Z, H, Q_LEN, KV_LEN), device, BLOCK_MASK_NUMBERS, flags)
        kernel.launch((status.numel(),), (status, H, rows, columns, Q_LEN, KV_LEN, *text.values(bound[1])), device,
                      (tile_m, tile_n), num_warps=8, num_stages=1)
    return status


def lists_spec(separate_full: bool, backend: str) -> KernelSpec:
    """The KernelSpec of block_lists."""
    return KernelSpec("block_lists", (), (("SEPARATE_FULL", separate_full),), backend)


def block_lists(status: torch.Tensor, separate_full: bool = True) -> list[torch.Tensor]:
    """kv_num_blocks, kv_indices and, if `separate_full`, full_kv_num_blocks, full_kv_indices of a status (any strides).

    int32 (Z, H, rows) and (Z, H, rows, columns), zero past each row's count.
    """
    Z, H, rows, columns = status.shape
    made = []
    for _ in range(2 if separate_full else 1):
        made.append(torch.empty((Z, H, rows), dtype=torch.int32, device=status.device))
        made.append(torch.zeros((Z, H, rows, columns), dtype=torch.int32, device=status.device))
    if Z * H * rows:
        kernel = kernel_for(lists_spec(separate_full, backend_of(status.device.type)))
        kernel.launch((Z * H * rows,), (status, *made, H, rows, columns, *status.stride()), status.device,
                      (min(_CHUNK, max(16, _power_of_two(columns))),), num_warps=4, num_stages=1)
    return made


def dense_mask(bound: tuple[ModGraph, list], Z: int, H: int, Q_LEN: int, KV_LEN: int, device: torch.device) -> torch.Tensor:
    """bool (Z, H, Q_LEN, KV_LEN): the mask_mod everywhere, or where a score_mod of zero scores is not -inf."""
    mask = torch.empty((Z, H, Q_LEN, KV_LEN), dtype=torch.bool, device=device)
    if mask.numel():
        kernel, text = _plan("dense_mask", bound, (Z, H, Q_LEN, KV_LEN), device, DENSE_MASK_NUMBERS, {})
        grid = (Z * H * -(-Q_LEN // _TILE) * -(-KV_LEN // _TILE),)
        kernel.launch(grid, (mask, H, Q_LEN, KV_LEN, *text.values(bound[1])), device, (_TILE, _TILE), num_warps=4, num_stages=1)
    return mask


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
