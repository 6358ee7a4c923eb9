"""The tiles of the forward kernel for Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..gpus import round_up_head_dim
from .forward import ForwardCase
from .slices import Columns, parts_of, summed_columns

ROWS = 64  # of a consumer
SLICE = 64  # columns of a slice, where a head dim lies in three
WIDE = 128  # columns of the wider part of V, where it lies in two


class HeadDims(NamedTuple):
    """Of q and k, and of v."""

    q_and_k: int
    v: int


WIDEST_8 = HeadDims(192, 128)  # of 8 bits: beside the accumulator there is a product that starts at 0


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Consumers of 64 query rows each, K and V buffers, and registers of a consumer's and of the producer's threads."""

    consumers: int
    stages: int
    consumer_registers: int
    producer_registers: int
    BLOCK_N: int = 128
    output_in_q: bool = False  # the output leaves through Q's part of shared memory, as there is no room for one of its own
    rest_stages: int = 0  # buffers of V's columns from 128 on, where V lies in two parts

    @property
    def BLOCK_M(self) -> int:
        return ROWS * self.consumers


def padded(case: ForwardCase) -> tuple[int, int]:
    """Head dims as the kernel computes with them: 32, 64, 128 and 256, as tensors' sizes are powers of two, and 192, in three slices."""
    return tuple(192 if 128 < d <= 192 else max(32, round_up_head_dim(d)) for d in (case.d_qk, case.d_v))


def slices(padded_dim: int) -> int:
    """In how many parts of columns a padded head dim lies in shared memory."""
    return 3 if padded_dim == 192 else 1


class OutputPart(NamedTuple):
    """Columns of the output that have an accumulator of their own.

    name     of the accumulator        start     the first of the columns
    values   the buffers of V that have them, and `at` where in these
    layout   what is appended to the names of layouts for tiles so wide
    """

    name: str
    start: int
    width: int
    values: str = "v"
    at: int = 0
    layout: str = ""


def output_parts(d_v: int, padded_dim: int) -> tuple[OutputPart, ...]:
    """The accumulators of the output: of 160 columns 128 and 32, as two products of 64 take longer than one of 128."""
    if padded_dim == 192:
        rest = round_up_head_dim(d_v - WIDE)
        return OutputPart("acc_0", 0, WIDE), OutputPart("acc_1", WIDE, rest, "v_rest", layout="_REST")
    first, *others = parts_of(d_v, padded_dim)
    if not others:
        return (OutputPart("acc", *first),)
    (rest,) = others
    return OutputPart("acc_0", *first), OutputPart("acc_1", *rest, at=rest.start, layout="_REST")


def qk_slices(d_qk: int, padded_dim: int, step: int) -> tuple[tuple[Columns, ...], ...]:
    """What a product of Q and K reads of each of the slices in which they lie: all of the first two, and of the third what there is."""
    if slices(padded_dim) == 1:
        return ()
    whole = (Columns(0, SLICE),)
    return whole, whole, summed_columns(d_qk - WIDE, SLICE, step)


def head_dim_flags(case: ForwardCase) -> dict[str, object]:
    """What the template knows of head dims. Products of 8 bits have one accumulator, and sum over 32 columns at a time."""
    d_qk, d_v = padded(case)
    step = 32 // case.dtype.itemsize
    return {
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "D_QK_ROUNDED": d_qk,
        "D_V_ROUNDED": d_v,
        "SLICES": slices(d_qk),
        "D_QK_SLICE": d_qk // slices(d_qk),
        "QK_COLUMNS": summed_columns(case.d_qk, d_qk, step),
        "QK_SLICES": qk_slices(case.d_qk, d_qk, step),
        "V_SLICES": slices(d_v),
        "D_V_SLICE": d_v // slices(d_v),
        "OUTPUT_PARTS": output_parts(d_v if case.dtype.itemsize == 1 else case.d_v, d_v),
    }


def has_larger_tiles(case: ForwardCase) -> bool:
    """Has the kernel for Hopper tiles of three consumers for a case, too?"""
    return case.blocks is None and case.dtype.itemsize == 2 and max(padded(case)) <= 64


def hopper_tile(d_qk: int, d_v: int, *, listed: bool, reads: bool, long: bool = False) -> HopperTile:
    """The tile for padded head dims.

    listed    with block lists, whose blocks have 128 queries or a multiple; or there are so few tiles that smaller ones are better
    reads     a mod loads elements of a tensor by key, or by query and key (it costs registers)
    long      blocks of 128 keys may be had for a smaller part of V with one buffer
    """
    if max(d_qk, d_v) > 128:
        if long and d_qk == d_v == 192 and not reads:
            return HopperTile(2, 2, 240, 24, output_in_q=True, rest_stages=1)
        registers = (240, 24) if reads else (232, 40)
        if d_v > 128 or d_qk > 192:  # 128 keys are too many for the registers or for shared memory
            stages = 3 if max(d_qk, d_v) == 192 else 2
            return HopperTile(2, stages, *registers, BLOCK_N=64, output_in_q=d_qk == d_v, rest_stages=stages if d_v == 192 else 0)
        return HopperTile(2, 2, *registers, output_in_q=d_v == 128)
    if max(d_qk, d_v) > 64:
        return HopperTile(2, 2, 240, 24)
    return HopperTile(2, 4, 240, 24) if listed or reads else HopperTile(3, 4, 160, 32)
