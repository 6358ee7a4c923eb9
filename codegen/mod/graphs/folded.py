"""Mods of many calls as the mods of one: vmap's dimension becomes a part of the batch, behind the batch that mods know."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...registry import remembered
from ..current import WEAK_DTYPE
from ..expr import Expr, ExprTable, ModGraph, ScalarCapture, walk
from ..symbolic.dispatch import OPERATIONS
from ..symbolic.nodes import cast
from ..symbolic.symbols import Sym
from .known import known_graph
from .rewriting import SimplifyingRun


@remembered("folded mods", 1024)
def folded_graph(graph: ModGraph, mapped: frozenset[int]) -> ModGraph:
    """A mod of `examples` calls at once, a number that it captures behind its others: entry b of the batch is entry b // examples of call
    b % examples. Of the `mapped` tensors each call has its own, by a first dimension."""
    name = "examples"
    while name in {c.name for c in (*graph.tensors, *graph.scalars)}:
        name += "_"
    run, made = SimplifyingRun(graph.kind, ExprTable(), OPERATIONS), {}
    with run.active():
        for node in walk(graph.result):
            run.line = node.source
            made[id(node)] = _folded(run, node, tuple(made[id(a)] for a in node.args), graph, mapped)
    tensors = tuple(replace(c, ndim=c.ndim + 1) if i in mapped else c for i, c in enumerate(graph.tensors))
    scalars = (*graph.scalars, ScalarCapture(name, int))
    return known_graph(graph.kind, graph.name, graph.origin, made[id(graph.result)], tensors, scalars)


def _folded(run: SimplifyingRun, node: Expr, args: tuple[Expr, ...], graph: ModGraph, mapped: frozenset[int]) -> Expr:
    if node.op == "symbol" and node.attr == "b":
        quotient = Sym(node) // _examples(run, graph)
        return cast(quotient, node.dtype).expr
    if node.op in ("load", "row") and node.attr in mapped:
        b = run.table.make("symbol", (), torch.int32, attr="b", source=node.source)
        args = ((Sym(b) % _examples(run, graph)).expr, *args)
    return run.table.make(node.op, args, node.dtype, node.attr, node.weak, node.source)


def _examples(run: SimplifyingRun, graph: ModGraph) -> Sym:
    return Sym(run.table.make("scalar", (), WEAK_DTYPE[int], attr=len(graph.scalars), weak=True))
