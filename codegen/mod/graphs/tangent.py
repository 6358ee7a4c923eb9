"""Tangents of a score_mod: forward mode on the traced graph, and on the derivatives that grad.py makes of it.

A rule of the op table's `derivative` column is a product with what it is given, so it takes a tangent as well as a gradient. What a
tangent starts from are symbols, "score_tangent" and "grad_tangent", and elements of tensors that lie beside the captured ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...registry import remembered
from ..expr import Expr, ExprTable, ModGraph, TensorCapture, walk
from ..symbolic.dispatch import OPERATIONS
from ..symbolic.nodes import cast
from ..symbolic.symbols import Sym
from .grad import GradGraph, differentiate, rules_of
from .rewriting import SimplifyingRun


@dataclass(frozen=True, eq=False)
class Tangents:
    """A score_mod with the tangents of what it captures, and what its kernels compute of that.

    graph        the mod, which captures the tangents of the `moving` tensors behind its own tensors, in their order
    result       the tangent of its result, float32; None if that is 0
    derived      d loss / d score, and d loss / d what is loaded of the `wanted` tensors
    of_score     the tangent of the first; None if that is 0
    of_loads     the tangents of the others: (load, tangent), for every one that there is
    of_rows      what tangents of gradients of rows in dot products (see long_dots.py) add up: (role, dot product, what its other row is
                 multiplied by). A row a of a product a c gets G c, so the tangent is G' c + G c', and a c' a product of its own
    """

    graph: ModGraph
    result: Expr | None
    derived: GradGraph
    of_score: Expr | None
    of_loads: tuple[tuple[Expr, Expr], ...]
    of_rows: tuple[tuple[str, Expr, Expr], ...] = ()


@remembered("tangents of mods", 1024)
def tangents_of(graph: ModGraph, symbols: frozenset[str], moving: frozenset[int], wanted: frozenset[int]) -> Tangents:
    """The tangents of a score_mod where `symbols` ("score", "grad") and the captured tensors `moving` (indices of graph.tensors) do."""
    derived = differentiate(graph, wanted)
    gradients = [e for e in (derived.score, *(g for _, g in (*derived.loads, *derived.dots))) if e is not None]
    nodes = list({id(n): n for root in (graph.result, *gradients) for n in walk(root)}.values())
    run = SimplifyingRun(graph.kind, ExprTable(nodes), OPERATIONS)
    places = {attr: len(graph.tensors) + i for i, attr in enumerate(sorted(moving))}
    found: dict[int, Expr | None] = {}
    with run.active():
        for node in nodes:
            run.line = node.source
            found[id(node)] = _tangent(run, node, found, symbols, places)
        known = {key: cast(Sym(t), torch.float32).expr for key in map(id, (graph.result, *gradients)) if (t := found[key]) is not None}
        moved = {id(dot): _moved(run, dot, places) for dot, _ in derived.dots}
    loads = tuple((load, known[id(g)]) for load, g in derived.loads if id(g) in known)
    rows = []
    for dot, gradient in derived.dots:
        for role, row, product in zip(("row", "column"), dot.args, reversed(moved[id(dot)]), strict=True):
            if row.attr in wanted:
                rows += [(role, dot, known[id(gradient)])] if id(gradient) in known else []
                rows += [(role, product, gradient)] if product is not None else []
    products = [product for both in moved.values() for product in both if product is not None]
    own = _with_tangents(graph, tuple(places), (*known.values(), *products))
    return Tangents(own, known.get(id(graph.result)), derived, known.get(id(derived.score)), loads, tuple(rows))


def _tangent(
    run: SimplifyingRun, node: Expr, found: dict[int, Expr | None], symbols: frozenset[str], places: dict[int, int]
) -> Expr | None:
    """The tangent of a node whose operands have theirs in `found`; None for 0."""
    if not node.dtype.is_floating_point or node.op == "row":
        return None
    if node.op == "dot":
        terms = [Sym(product) for product in _moved(run, node, places) if product is not None]
        return sum(terms[1:], terms[0]).expr if terms else None
    if node.op in ("symbol", "load"):
        attr = places.get(node.attr) if node.op == "load" else f"{node.attr}_tangent" if node.attr in symbols else None
        return None if attr is None else run.table.make(node.op, node.args, node.dtype, attr=attr, source=node.source)
    total, operands = None, [Sym(a) for a in node.args]
    for operand, rule in zip(node.args, rules_of(node), strict=True):
        if rule is not None and found[id(operand)] is not None:
            more = rule(Sym(found[id(operand)]), *operands, Sym(node))
            total = more if total is None else total + more
    return None if total is None or total.expr.is_literal and total.expr.attr == 0 else total.expr


def _moved(run: SimplifyingRun, dot: Expr, places: dict[int, int]) -> tuple[Expr | None, Expr | None]:
    """A dot product with the tangent in place of its first row, and of its second one; None where that does not move."""
    found = []
    for i, row in enumerate(dot.args):
        product = None
        if row.attr in places:
            moved = run.table.make("row", row.args, row.dtype, attr=places[row.attr], source=row.source)
            args = (moved, dot.args[1]) if i == 0 else (dot.args[0], moved)
            product = run.table.make("dot", args, dot.dtype, attr=dot.attr, source=dot.source)
        found.append(product)
    return tuple(found)


def _with_tangents(graph: ModGraph, moving: tuple[int, ...], beside: tuple[Expr, ...]) -> ModGraph:
    """The graph with the tangents of tensors, and the expressions that read them."""
    names = {c.name for c in (*graph.tensors, *graph.scalars)}
    added = []
    for place in moving:
        name = f"{graph.tensors[place].name}_tangent"
        while name in names:
            name += "_"
        names.add(name)
        added.append(TensorCapture(name, graph.tensors[place].dtype, graph.tensors[place].ndim))
    return replace(graph, tensors=(*graph.tensors, *added), beside=beside)
