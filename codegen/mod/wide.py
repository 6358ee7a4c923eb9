"""Arithmetic of indices that leaves int32, in int64.

Indices are int32 in kernels, and int64 in torch's eager reference. (q_idx - kv_idx) ** 2 tells them apart from 46342 positions on, and
q_idx * 1103515245 from the third. So operations whose results may not fit at a call's lengths, and what is computed of these, become
int64. The others stay as they are: a mod whose numbers fit has the same kernel as ever. What torch computes in int32 stays, too, such as
products of elements of an int32 tensor.
"""

from __future__ import annotations

import operator

import torch

from ..registry import Table
from .expr import INDEX_BOUND, MASK_SYMBOLS, Expr, ExprTable, ModGraph, walk
from .ops import row_of
from .trace import known_graph

_LARGEST = (1 << 31) - 1
_HUGE = 1 << 64
_USUAL = 1 << 30  # of numbers that are captured
_ANY = (1 << 16, 1 << 16, INDEX_BOUND, INDEX_BOUND)
_LEAVES = ("symbol", "literal", "scalar", "load", "row", "dot", "cast")

_fit: dict[ModGraph, bool] = Table("mods of small integers", 4096)
_suited: dict[tuple, ModGraph] = Table("mods in int64", 1024)


def may_leave_int32(mod: tuple[ModGraph, list], q_len: int, kv_len: int) -> bool:
    """Does a bound mod need int64 for sequences so long? Lengths that a compiler has as symbols are taken for any."""
    lengths = (q_len, kv_len) if type(q_len) is int is type(kv_len) else _ANY[2:]
    return in_wide_integers(mod, (*_ANY[:2], *lengths))[0] is not mod[0]


def at_any_length(mod: tuple[ModGraph, list]) -> tuple[ModGraph, list]:
    """A bound mod whose integers hold for lengths that are not known, such as those of an exported file's calls."""
    return in_wide_integers(mod, _ANY)


def in_wide_integers(mod: tuple[ModGraph, list], extents: tuple[int, ...]) -> tuple[ModGraph, list]:
    """A bound mod whose integers hold for (B, H, Q_LEN, KV_LEN): itself, unless an operation on indices may leave int32 there."""
    graph, values = mod
    fit = _fit.get(graph)
    if fit is None:
        fit = _fit[graph] = not _too_large(graph, _ranges(graph, _ANY, [_USUAL] * len(graph.scalars)))
    numbers = values[len(graph.tensors) :]
    if fit and max(extents[2], extents[3]) <= INDEX_BOUND and (not numbers or max(map(abs, numbers)) <= _USUAL):
        return mod
    numbers = [abs(v) if type(v) is int else 0 for v in numbers]
    bits = tuple(max(n - 1, 0).bit_length() for n in extents)
    key = graph, tuple(n.bit_length() for n in numbers), bits
    found = _suited.get(key)
    if found is None:
        limits = _ranges(graph, tuple(1 << n for n in bits), [(1 << n.bit_length()) - 1 for n in numbers])
        found = _suited[key] = _widened(graph, limits)
    return mod if found is graph else (found, values)


def _ranges(graph: ModGraph, extents: tuple[int, ...], numbers: list[int]) -> dict[int, tuple[int, int]]:
    """The least and the largest that the integers of a graph may be, by the ids of nodes. Elements of tensors are taken for indices.

    numbers   how large the graph's scalars are at most
    """
    found: dict[int, tuple[int, int]] = {}
    for node in walk(graph.result):
        if node.dtype == torch.bool:
            limits = 0, 1
        elif node.dtype.is_floating_point:
            limits = 0, 0
        elif node.op == "symbol":
            limits = 0, extents[MASK_SYMBOLS.index(node.attr)] - 1
        elif node.op == "literal":
            limits = node.attr, node.attr
        elif node.op == "scalar":
            limits = -numbers[node.attr], numbers[node.attr]
        elif node.op in _LEAVES and (node.op != "cast" or node.args[0].dtype.is_floating_point):
            limits = -max(extents), max(extents)
        else:
            limits = _range(node, [found[id(a)] for a in node.args])
        found[id(node)] = max(limits[0], -_HUGE), min(limits[1], _HUGE)
    return found


def _range(node: Expr, limits: list[tuple[int, int]]) -> tuple[int, int]:
    if node.op == "cast":
        return limits[0]
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


def _of_indices(graph: ModGraph) -> set[int]:
    """Ids of the int32 nodes that torch's eager reference has in int64, because an index is in them."""
    found: set[int] = set()
    for node in walk(graph.result):
        if node.dtype != torch.int32:
            continue
        if node.op == "symbol" or (node.op not in _LEAVES and any(id(a) in found for a in node.args)):
            found.add(id(node))
    return found


def _too_large(graph: ModGraph, limits: dict[int, tuple[int, int]]) -> bool:
    return any(_leaves_int32(limits[key]) for key in _of_indices(graph))


def _leaves_int32(limits: tuple[int, int]) -> bool:
    return limits[0] < -_LARGEST - 1 or limits[1] > _LARGEST


def _widened(graph: ModGraph, limits: dict[int, tuple[int, int]]) -> ModGraph:
    if not _too_large(graph, limits):
        return graph
    of_indices, table, made = _of_indices(graph), ExprTable(), {}
    for node in walk(graph.result):
        args, dtype = tuple(made[id(a)] for a in node.args), node.dtype
        wide = any(a.dtype == torch.int64 and not a.weak for a in args)
        if id(node) in of_indices and (wide or _leaves_int32(limits[id(node)])):
            dtype, wide = torch.int64, True
        if wide and node.op not in _LEAVES:
            args = tuple(table.make("cast", (a,), torch.int64) if a.dtype == torch.int32 and not a.weak else a for a in args)
        made[id(node)] = table.make(node.op, args, dtype, node.attr, node.weak, node.source)
    result = made[id(graph.result)]
    return known_graph(graph.kind, graph.name, graph.origin, result, graph.tensors, graph.scalars)
