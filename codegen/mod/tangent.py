"""Tangents of a score_mod: forward mode on the traced graph, and on the derivatives that grad.py makes of it.

A rule of the op table's `derivative` column is a product with what it is given, so it takes a tangent as well as a gradient. What a
tangent starts from are symbols, "score_tangent" and "grad_tangent", and elements of tensors that lie beside the captured ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..registry import remembered
from .dispatch import OPERATIONS
from .expr import Expr, ExprTable, ModGraph, TensorCapture, walk
from .grad import GradGraph, differentiate, rules_of
from .nodes import cast
from .rewriting import SimplifyingRun
from .symbols import Sym


@dataclass(frozen=True, eq=False)
class Tangents:
    """A score_mod with the tangents of what it captures, and what its kernels compute of that.

    graph        the mod, which captures the tangents of the `moving` tensors behind its own tensors, in their order
    result       the tangent of its result, float32; None if that is 0
    derived      d loss / d score, and d loss / d what is loaded of the `wanted` tensors
    of_score     the tangent of the first; None if that is 0
    of_loads     the tangents of the others: (load, tangent), for every one that there is
    """

    graph: ModGraph
    result: Expr | None
    derived: GradGraph
    of_score: Expr | None
    of_loads: tuple[tuple[Expr, Expr], ...]


@remembered("tangents of mods", 1024)
def tangents_of(graph: ModGraph, symbols: frozenset[str], moving: frozenset[int], wanted: frozenset[int]) -> Tangents:
    """The tangents of a score_mod where `symbols` ("score", "grad") and the captured tensors `moving` (indices of graph.tensors) do."""
    derived = differentiate(graph, wanted)
    gradients = [e for e in (derived.score, *(g for _, g in derived.loads)) if e is not None]
    nodes = list({id(n): n for root in (graph.result, *gradients) for n in walk(root)}.values())
    run = SimplifyingRun(graph.kind, ExprTable(nodes), OPERATIONS)
    places = {attr: len(graph.tensors) + i for i, attr in enumerate(sorted(moving))}
    found: dict[int, Expr | None] = {}
    with run.active():
        for node in nodes:
            run.line = node.source
            found[id(node)] = _tangent(run, node, found, symbols, places)
        known = {key: cast(Sym(t), torch.float32).expr for key in map(id, (graph.result, *gradients)) if (t := found[key]) is not None}
    loads = tuple((load, known[id(g)]) for load, g in derived.loads if id(g) in known)
    own = _with_tangents(graph, tuple(places), tuple(known.values()))
    return Tangents(own, known.get(id(graph.result)), derived, known.get(id(derived.score)), loads)


def _tangent(
    run: SimplifyingRun, node: Expr, found: dict[int, Expr | None], symbols: frozenset[str], places: dict[int, int]
) -> Expr | None:
    """The tangent of a node whose operands have theirs in `found`; None for 0."""
    if not node.dtype.is_floating_point:
        return None
    if node.op in ("symbol", "load"):
        attr = places.get(node.attr) if node.op == "load" else f"{node.attr}_tangent" if node.attr in symbols else None
        return None if attr is None else run.table.make(node.op, node.args, node.dtype, attr=attr, source=node.source)
    total, operands = None, [Sym(a) for a in node.args]
    for operand, rule in zip(node.args, rules_of(node), strict=True):
        if rule is not None and found[id(operand)] is not None:
            more = rule(Sym(found[id(operand)]), *operands, Sym(node))
            total = more if total is None else total + more
    return None if total is None or total.expr.is_literal and total.expr.attr == 0 else total.expr


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
