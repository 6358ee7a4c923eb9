"""Block lists from the status of every block, and where blocks of packed sequences begin: what needs no mask_mod."""

from __future__ import annotations

import torch

from ..device.cpp import CppKernel
from ..device.cpp_compiler import by_either
from ..device.devices import backend_of, on
from ..device.kernel import kernel_for
from ..device.memory import META
from ..plan.cpu_masks import cpu_lists_spec, cpu_starts_spec
from ..plan.masks import list_names, lists_spec, starts_spec

LISTS_CHUNK = 512  # blocks that one step of block_lists takes
STARTS_CHUNK = 128  # sequences, and blocks of one, that a step of block_starts takes

Starts = tuple[torch.Tensor, ...]


def empty_lists(lines: tuple[int, ...], widths: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Counts and indices for each width. Kernels may read the first index of an empty row, so no list has width 0."""
    made = []
    for width in widths:
        made.append(torch.zeros(lines, dtype=torch.int32, device=device))
        made.append(torch.zeros((*lines, max(width, 1)), dtype=torch.int32, device=device))
    return made


def begin_lists(separate_full: bool, starts: bool, device: torch.device) -> None:
    """Have the kernel of `lists_of_status` compiled beside this process, which compiles that of the status meanwhile. It is the same for
    all masks, so stand-ins of one element do for its arguments."""
    backend = backend_of(device.type)
    if backend == "cpu":
        return
    kernel = kernel_for(lists_spec(separate_full, backend, starts))
    tensors = {p.name: torch.empty(1, dtype=getattr(torch, p.type[1:]), device=META) for p in kernel.spec.parameters if p.type[0] == "*"}
    numbers = {p.name: 1 for p in kernel.spec.parameters if p.is_number}
    with on(device):
        kernel.begin(kernel.spec.arguments({**tensors, **numbers}), device, (LISTS_CHUNK,), num_warps=4, num_stages=1)


def lists_of_status(status: torch.Tensor, widths: list[int], separate_full: bool, starts: Starts = ()) -> list[torch.Tensor]:
    """The lists of a status; with first positions of its columns in `starts`, these instead of numbers."""
    Z, H, rows, columns = status.shape
    made = empty_lists((Z, H, rows), tuple(widths), status.device)
    if Z * H * rows:
        values = {
            **dict(zip(list_names(separate_full), made, strict=True)),
            **dict(zip(("starts",), starts, strict=False)),
            **{"status": status, "Zm": Z, "Hm": H, "rows": rows, "columns": columns},
            **dict(zip(("width", "full_width"), (max(w, 1) for w in widths), strict=False)),
            **dict(zip(("stride_z", "stride_h", "stride_row", "stride_column"), status.stride(), strict=True)),
        }

        def run(in_cpp: bool) -> None:
            if in_cpp:
                kernel_for(cpu_lists_spec(separate_full, bool(starts)), CppKernel).call(values)
            else:
                kernel = kernel_for(lists_spec(separate_full, backend_of(status.device.type), bool(starts)))
                kernel.launch((Z * H * rows,), kernel.spec.arguments(values), status.device, (LISTS_CHUNK,), num_warps=4, num_stages=1)

        by_either(run, status.device)
    return made


def block_starts(cu_seqlens: torch.Tensor, total: int, block: int) -> torch.Tensor:
    """Where blocks of at most `block` of the `total` positions begin so that none holds positions of two sequences, and where the last one
    ends; int32. cu_seqlens: int32 (sequences + 1)."""
    return _starts(cu_seqlens, total, block, 0)[0]


def owned_starts(cu_seqlens: torch.Tensor, total: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """starts and sequences, int32: the first token of each block, and the number of its sequence. Tokens after the last sequence get blocks
    of number n (how many sequences there are), and so do unused entries at the end. cu_seqlens [0, 5, 7], total 12, block 4:

        starts [0, 4, 5, 7, 11, 12, 12]    sequences [0, 0, 1, 2, 2, 2]
    """
    return _starts(cu_seqlens, total, block, 1)


def _starts(cu_seqlens: torch.Tensor, total: int, block: int, rest: int) -> tuple[torch.Tensor, ...]:
    """Those tensors; `rest` is 1 with the blocks' sequences."""
    sequences, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
    ranges = total // block + sequences + rest  # at most
    made = [torch.full((ranges + 1,), total, dtype=torch.int32, device=device)]
    if rest:
        made.append(torch.full((ranges,), sequences, dtype=torch.int32, device=device))
    values = {"cu_seqlens": cu_seqlens, "starts": made[0], "sequences": made[-1], "RANGES": ranges, "TOTAL": total, "COUNT": sequences}

    def run(in_cpp: bool) -> None:
        if in_cpp:
            kernel_for(cpu_starts_spec(block, bool(rest)), CppKernel).call(values)
        else:
            kernel = kernel_for(starts_spec(block, backend_of(device.type), bool(rest)))
            kernel.launch((sequences + rest,), kernel.spec.arguments(values), device, (STARTS_CHUNK,), num_warps=4, num_stages=1)

    by_either(run, device)
    return tuple(made)
