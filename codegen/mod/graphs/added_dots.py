"""A score_mod that adds a dot product of rows to the score before all else: a kernel may have the product in the score from the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch

from ...registry import remembered
from ..expr import Expr, ModGraph, walk
from ..table.ops import row_of
from .loads import dots_of

_HALF, _WIDE = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)


class AddedDot(NamedTuple):
    """What is added to the score.

    dot       the product of two rows (see long_dots.py)
    rounded   the half precision that it is rounded to, if it is
    factor    by which it is then multiplied
    rest      what the score_mod makes of the sum, as a function of the score; None: nothing
    """

    dot: Expr
    rounded: torch.dtype | None
    factor: float
    rest: ModGraph | None


@remembered("dot products that are added", 256)
def added_dot(graph: ModGraph) -> AddedDot | None:
    """The dot product of a score_mod that uses one, and the score, in `score + product` alone, or in `score + number * product`; None for
    any other mod."""
    nodes, dots = walk(graph.result), dots_of(graph)
    scores = [n for n in nodes if n.op == "symbol" and n.attr == "score"]
    if len(dots) != 1 or len(scores) != 1 or graph.beside:
        return None
    uses, above = Counter(id(a) for n in nodes for a in n.args), {id(a): n for n in nodes for a in n.args}
    product, rounded, factor = dots[0], None, 1.0
    while uses[id(product)] == 1:
        node = above[id(product)]
        numbers = [a for a in node.args if a.is_literal]
        if node.op == "cast" and factor == 1.0 and rounded is None and node.dtype in _HALF + _WIDE:
            rounded = node.dtype if node.dtype in _HALF else None
        elif row_of(node).scales and len(node.args) == 2 and len(numbers) == 1 and node.dtype in _WIDE and factor == 1.0:
            if node.args.index(product) not in row_of(node).scales or row_of(node).torch(3.0, 2.0) != 6.0:
                return None
            factor = float(numbers[0].attr)
        else:
            break
        product = node
    total = above.get(id(product))
    if total is None or row_of(total).signs != (1, 1) or set(map(id, total.args)) != {id(product), id(scores[0])}:
        return None
    if uses[id(product)] != 1 or uses[id(scores[0])] != 1:
        return None
    return AddedDot(dots[0], rounded, factor, None if total is graph.result else _rest(graph, total, scores[0]))


def _rest(graph: ModGraph, total: Expr, score: Expr) -> ModGraph:
    """The graph with the score in place of a node."""
    made: dict[int, Expr] = {}
    for node in walk(graph.result, leaves={id(total)}):
        args = tuple(made.get(id(a), a) for a in node.args)
        made[id(node)] = score if node is total else node if args == node.args else replace(node, args=args)
    result = made[id(graph.result)]
    return replace(graph, result=result, symbols=frozenset(n.attr for n in walk(result) if n.op == "symbol"))
