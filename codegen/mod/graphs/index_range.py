"""What integers of a mod may be: offsets, distances and indices of captured tensors, as far as the op table's column `range` says."""

from __future__ import annotations

import torch

from ..expr import INDEX_BOUND, MASK_SYMBOLS, Expr, walk
from ..table import ranges
from ..table.ops import row_of


def value_range(node: Expr, symbols: dict | None = None, scalars: tuple = ()) -> tuple[float, float]:
    """Bounds of an integer expression; (-inf, inf) when unknown, and when it may wrap around.

    symbols   least and largest value of index symbols; 0 and INDEX_BOUND - 1 where they are not given
    scalars   values of ModGraph.scalars, where they are known
    """
    found: dict[int, tuple[float, float]] = {}
    for n in walk(node):
        found[id(n)] = _value_range(n, [found[id(a)] for a in n.args], symbols or {}, scalars)
    return found[id(node)]


def _value_range(node: Expr, args: list[tuple[float, float]], symbols: dict, scalars: tuple) -> tuple[float, float]:
    if node.op == "symbol":
        return symbols.get(node.attr, (0, INDEX_BOUND - 1)) if node.attr in MASK_SYMBOLS else ranges.UNKNOWN
    if node.op == "literal":
        return (node.attr, node.attr) if isinstance(node.attr, (int, bool)) else ranges.UNKNOWN
    if node.op == "scalar" and scalars and isinstance(scalars[node.attr], int):
        return (scalars[node.attr], scalars[node.attr])
    rule = ranges.same if node.op == "cast" else row_of(node).range
    if rule is None or node.dtype.is_floating_point or node.dtype == torch.bool:
        return ranges.UNKNOWN
    limits = torch.iinfo(node.dtype)
    if any(a.weak and not (limits.min <= low and high <= limits.max) for a, (low, high) in zip(node.args, args, strict=True)):
        return ranges.UNKNOWN  # a Python number wraps around before the operation
    low, high = rule(*args)
    return (low, high) if limits.min <= low and high <= limits.max else ranges.UNKNOWN
