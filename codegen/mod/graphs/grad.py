"""Derivatives of a score_mod: reverse mode on the traced graph.

`differentiate` walks the graph from its result to its leaves and applies the op table's `derivative` column. The derivatives are
traced like a mod, into the table of the graph's own nodes: what they need of the forward computation is the same object, which
lowering computes once, and a node of theirs leads back to the user's line whose derivative it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..expr import Expr, ExprTable, ModGraph, walk
from ..symbolic.dispatch import OPERATIONS
from ..symbolic.nodes import cast
from ..symbolic.symbols import Sym
from ..table.ops import row_of
from .rewriting import SimplifyingRun, is_number


@dataclass(frozen=True, eq=False)
class GradGraph:
    """Derivatives of a loss at one position, in float32, by the leaf `grad`: the loss's derivative in the mod's result.

    score   in the score; None if the result does not depend on it (or only through steps: comparisons, floor, casts to integers)
    loads   (load of the graph, derivative in the value loaded), for every wanted load with a derivative
    dots    the same for dot products of rows (see long_dots.py) of which a tensor is wanted: derivatives in the product
    """

    score: Expr | None
    loads: tuple[tuple[Expr, Expr], ...]
    dots: tuple[tuple[Expr, Expr], ...] = ()


def differentiate(graph: ModGraph, wanted: frozenset[int]) -> GradGraph:
    """The derivatives of a score_mod's result in the score, and in what it loads of the `wanted` tensors (indices of graph.tensors)."""
    nodes = walk(graph.result)
    varies = _differentiable(nodes, wanted)
    run = SimplifyingRun(graph.kind, ExprTable(nodes), OPERATIONS)
    gradients: dict[int, Expr] = {}
    if id(graph.result) in varies:
        gradients[id(graph.result)] = run.table.make("symbol", (), torch.float32, attr="grad", source=graph.result.source)
    with run.active():
        for node in reversed(nodes):
            if id(node) not in gradients:
                continue
            run.line = node.source
            g, operands = Sym(gradients[id(node)]), [Sym(a) for a in node.args]
            for operand, rule in zip(node.args, rules_of(node), strict=True):
                if rule is None or id(operand) not in varies:
                    continue
                more = rule(g, *operands, Sym(node))
                if not is_number(more.expr, 0):
                    sofar = gradients.get(id(operand))
                    gradients[id(operand)] = more.expr if sofar is None else (Sym(sofar) + more).expr
        found = {id(n): cast(Sym(gradients[id(n)]), torch.float32).expr for n in nodes if n.op in _LEFT and id(n) in gradients}
    score = next((n for n in nodes if n.op == "symbol" and n.attr == "score"), None)
    loads = tuple((n, found[id(n)]) for n in nodes if n.op == "load" and id(n) in found)
    dots = tuple((n, found[id(n)]) for n in nodes if n.op == "dot" and id(n) in found)
    return GradGraph(found.get(id(score)), loads, dots)


_LEFT = ("symbol", "load", "dot")  # where derivatives end


def rules_of(node: Expr) -> tuple:
    """How the gradient of a node passes to each of its operands."""
    if node.op == "cast":
        return (lambda g, *_: g,)
    return row_of(node).derivative or (None,) * len(node.args)


def _differentiable(nodes: list[Expr], wanted: frozenset[int]) -> set[int]:
    """The nodes that vary, in floating point, with the score or with a wanted load."""
    found: set[int] = set()
    for node in nodes:
        if not node.dtype.is_floating_point:
            continue
        if node.op in ("symbol", "load"):
            varies = node.attr in wanted if node.op == "load" else node.attr == "score"
        elif node.op == "dot":
            varies = any(row.attr in wanted for row in node.args)
        else:
            varies = any(rule and id(a) in found for a, rule in zip(node.args, rules_of(node), strict=True))
        if varies:
            found.add(id(node))
    return found
