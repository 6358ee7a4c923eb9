"""How large the integers of a mod may be at given lengths, and which of them torch's eager reference has in int64."""

from __future__ import annotations

import operator

import torch

from ..expr import INDEX_BOUND, LEAVES, MASK_SYMBOLS, Expr, walk
from ..table.ops import row_of

ANY_LENGTH = (1 << 16, 1 << 16, INDEX_BOUND, INDEX_BOUND)
USUAL = 1 << 30  # of numbers that are captured, and of elements of int32 tensors
WITHOUT_ROW = (*LEAVES, "row", "dot", "cast")  # in the op table

_HUGE = 1 << 64


def limits_of(result: Expr, extents: tuple[int, ...] = ANY_LENGTH, numbers: list[int] | None = None) -> dict[int, tuple[int, int]]:
    """The least and the largest that integers of an expression may be, by the ids of nodes. Elements of tensors are USUAL, or of a
    narrower dtype.

    extents   B, H, Q_LEN, KV_LEN
    numbers   how large the graph's scalars are at most; by default USUAL
    """
    found: dict[int, tuple[int, int]] = {}
    for node in walk(result):
        if node.dtype == torch.bool:
            limits = 0, 1
        elif node.dtype.is_floating_point:
            limits = 0, 0
        elif node.op == "symbol":
            limits = 0, extents[MASK_SYMBOLS.index(node.attr)] - 1
        elif node.op == "literal":
            limits = node.attr, node.attr
        elif node.op == "scalar":
            size = USUAL if numbers is None else numbers[node.attr]
            limits = -size, size
        elif node.op == "cast" and not node.args[0].dtype.is_floating_point:
            limits = _cast(found[id(node.args[0])], node.dtype)
        elif node.op in WITHOUT_ROW:
            limits = max(-USUAL, torch.iinfo(node.dtype).min), min(USUAL, torch.iinfo(node.dtype).max)
        else:
            limits = _result(node, [found[id(a)] for a in node.args])
        found[id(node)] = max(limits[0], -_HUGE), min(limits[1], _HUGE)
    return found


def leaves(limits: tuple[int, int], dtype: torch.dtype = torch.int32) -> bool:
    """Is a number of these limits perhaps none of an integer dtype?"""
    return limits[0] < torch.iinfo(dtype).min or limits[1] > torch.iinfo(dtype).max


def may_leave_int32(node: Expr) -> bool:
    """Is an int32 expression one of indices, which is int64 at some lengths?"""
    return id(node) in with_indices(node) and leaves(limits_of(node)[id(node)])


def too_large(result: Expr, limits: dict[int, tuple[int, int]]) -> set[int]:
    """Ids of the int32 nodes that an index is in, and that may leave int32 or are computed with a number that does."""
    of_indices = with_indices(result)
    return {id(n) for n in walk(result) if id(n) in of_indices and any(leaves(limits[id(x)]) for x in (n, *n.args))}


def with_indices(result: Expr) -> set[int]:
    """Ids of the int32 nodes that torch's eager reference has in int64, because an index is in them."""
    found: set[int] = set()
    for node in walk(result):
        if node.dtype != torch.int32:
            continue
        if node.op == "symbol" or (node.op not in WITHOUT_ROW and any(id(a) in found for a in node.args)):
            found.add(id(node))
    return found


def _cast(limits: tuple[int, int], dtype: torch.dtype) -> tuple[int, int]:
    return (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if leaves(limits, dtype) else limits


def _result(node: Expr, limits: list[tuple[int, int]]) -> tuple[int, int]:
    row, sizes = row_of(node), [max(map(abs, pair)) for pair in limits]
    if row.integers:
        return row.integers.range(*(limits[1:] if row.chooses else limits))
    if row.torch is operator.pow:
        size = sizes[0] ** min(sizes[1], 64)
    elif row.size:
        size = row.size(*sizes)
    else:  # of bits, such as those of a | b
        size = (1 << max(sizes).bit_length()) - 1
    return -size, size
