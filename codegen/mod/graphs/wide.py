"""Arithmetic of indices that leaves int32, in int64.

Indices are int32 in kernels, and int64 in torch's eager reference. (q_idx - kv_idx) ** 2 tells them apart from 46342 positions on, and
q_idx * 1103515245 from the third. So operations whose results may not fit at a call's lengths, and what is computed of these, become
int64. The others stay as they are: a mod whose numbers fit has the same kernel as ever. What torch computes in int32 stays, too, such as
products of elements of an int32 tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...registry import Table
from ..captured.program import fits_int32
from ..expr import INDEX_BOUND, ExprTable, ModGraph, walk
from ..symbolic.graph_mod import GraphMod
from ..symbolic.integers import ANY_LENGTH, USUAL, WITHOUT_ROW, limits_of, too_large, with_indices
from .known import known_graph

_fit: dict[ModGraph, bool] = Table("mods of small integers", 4096)
_suited: dict[tuple, ModGraph] = Table("mods in int64", 1024)
_literal: dict[tuple, ModGraph] = Table("mods with large numbers", 256)


def part_in_wide_integers(mod: Callable, bound: tuple[ModGraph, list], lengths: tuple[int, int] = ANY_LENGTH[2:]) -> Callable:
    """A mod that becomes a part of another one, which gives it positions of its own: itself, or its graph in int64.

    lengths   how many positions of queries and keys it may be given; any where a compiler has them as symbols
    """
    if not all(type(n) is int for n in lengths):
        lengths = ANY_LENGTH[2:]
    wide = in_wide_integers(bound, (*ANY_LENGTH[:2], *lengths))
    return mod if wide is bound else GraphMod(*wide)


def at_any_length(mod: tuple[ModGraph, list]) -> tuple[ModGraph, list]:
    """A bound mod whose integers hold for lengths and captured numbers that are not known, such as those of an exported file's calls."""
    graph, values = mod
    suited, _ = in_wide_integers((graph, [torch.iinfo(torch.int32).max if type(v) is int else v for v in values]), ANY_LENGTH)
    return suited, values


def in_wide_integers(mod: tuple[ModGraph, list], extents: tuple[int, ...]) -> tuple[ModGraph, list]:
    """A bound mod whose integers hold for (B, H, Q_LEN, KV_LEN): itself, unless an operation on indices may leave int32 there."""
    graph, values = mod
    fit = _fit.get(graph)
    if fit is None:
        fit = _fit[graph] = not too_large(graph.result, limits_of(graph.result))
    numbers = values[len(graph.tensors) :]
    B, H, Q_LEN, KV_LEN = extents
    usual = Q_LEN <= INDEX_BOUND and KV_LEN <= INDEX_BOUND and ANY_LENGTH[0] >= B and ANY_LENGTH[1] >= H
    if fit and usual and (not numbers or max(map(abs, numbers)) <= USUAL):
        return mod
    numbers = [abs(v) if type(v) is int else 0 for v in numbers]
    bits = tuple(max(n - 1, 0).bit_length() for n in extents)
    key = graph, tuple(n.bit_length() for n in numbers), bits
    found = _suited.get(key)
    if found is None:
        limits = limits_of(graph.result, tuple(1 << n for n in bits), [(1 << n.bit_length()) - 1 for n in numbers])
        found = _suited[key] = _widened(graph, limits)
    return mod if found is graph else (found, values)


def with_fitting_numbers(graph: ModGraph, values: list) -> tuple[ModGraph, list]:
    """A bound mod whose integers beyond int32, which no kernel takes, are part of its graph. Where a mod is traced they are so already; a
    graph that torch's compiler recorded with a symbol gets any."""
    first = len(graph.tensors)
    large = {i: value for i, value in enumerate(values[first:]) if not fits_int32(value)}
    if not large:
        return graph, values
    kept = [i for i in range(len(graph.scalars)) if i not in large]
    key = graph, tuple(large.items())
    found = _literal.get(key)
    if found is None:
        table, made = ExprTable(), {}
        for node in walk(graph.result):
            args, op, attr = tuple(made[id(a)] for a in node.args), node.op, node.attr
            if op == "scalar":
                op, attr = ("literal", large[attr]) if attr in large else (op, kept.index(attr))
            made[id(node)] = table.make(op, args, node.dtype, attr, node.weak, node.source)
        scalars = tuple(graph.scalars[i] for i in kept)
        result = made[id(graph.result)]
        found = _literal[key] = known_graph(graph.kind, graph.name, graph.origin, result, graph.tensors, scalars)
    return in_wide_integers((found, [*values[:first], *(values[first + i] for i in kept)]), ANY_LENGTH)


def _widened(graph: ModGraph, limits: dict[int, tuple[int, int]]) -> ModGraph:
    large = too_large(graph.result, limits)
    if not large:
        return graph
    of_indices, table, made = with_indices(graph.result), ExprTable(), {}
    for node in walk(graph.result):
        args, dtype = tuple(made[id(a)] for a in node.args), node.dtype
        wide = any(a.dtype == torch.int64 and not a.weak for a in args)
        if id(node) in of_indices and (wide or id(node) in large):
            dtype, wide = torch.int64, True
        if wide and node.op not in WITHOUT_ROW:
            args = tuple(table.make("cast", (a,), torch.int64) if a.dtype == torch.int32 and not a.weak else a for a in args)
        made[id(node)] = table.make(node.op, args, dtype, node.attr, node.weak, node.source)
    result = made[id(graph.result)]
    return known_graph(graph.kind, graph.name, graph.origin, result, graph.tensors, graph.scalars)
