"""The tiles of the forward kernel for Hopper."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpus import round_up_head_dim
from .forward import ForwardCase

ROWS = 64  # of a consumer


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Consumers of 64 query rows each, K and V buffers, and registers of a consumer's and of the producer's threads."""

    consumers: int
    stages: int
    consumer_registers: int
    producer_registers: int
    BLOCK_N: int = 128
    output_in_q: bool = False  # the output leaves through Q's part of shared memory, as there is no room for one of its own

    @property
    def BLOCK_M(self) -> int:
        return ROWS * self.consumers


def padded(case: ForwardCase) -> tuple[int, int]:
    """Head dims as the kernel computes with them: 32, 64, 128 and 256, as tensors' sizes are powers of two, and 192, in three slices."""
    return tuple(192 if 128 < d <= 192 else max(32, round_up_head_dim(d)) for d in (case.d_qk, case.d_v))


def slices(padded_dim: int) -> int:
    """In how many parts of columns a padded head dim lies in shared memory."""
    return 3 if padded_dim == 192 else 1


def hopper_tile(d_qk: int, d_v: int, *, listed: bool, reads: bool) -> HopperTile:
    """The tile for padded head dims.

    listed    with block lists, whose blocks have 128 queries or a multiple
    reads     a mod loads elements of a tensor by key, or by query and key (it costs registers)
    """
    if max(d_qk, d_v) > 128:
        registers = (240, 24) if reads else (232, 40)
        if d_v > 128 or d_qk > 192:  # 128 keys are too many for the registers or for shared memory
            return HopperTile(2, 3 if max(d_qk, d_v) == 192 else 2, *registers, BLOCK_N=64, output_in_q=d_qk == d_v)
        return HopperTile(2, 2, *registers, output_in_q=d_v == 128)
    if max(d_qk, d_v) > 64:
        return HopperTile(2, 2, 240, 24)
    return HopperTile(2, 4, 240, 24) if listed or reads else HopperTile(3, 4, 160, 32)
