"""Mods as data: a graph, and what its mod captures. They go where Python functions cannot, such as an operator's arguments."""

from __future__ import annotations

from ..current import running
from ..expr import MASK_SYMBOLS, SCORE_SYMBOLS, ModGraph, walk
from .long_dots import check_rows, settled
from .nodes import cast, index_tensor, to_expr
from .symbols import Sym


class GraphMod:
    """A mod made of a graph and the values of its tensors and numbers, in the graph's order."""

    __slots__ = ("__weakref__", "graph", "values")

    def __init__(self, graph: ModGraph, values: list) -> None:
        self.graph, self.values = graph, values

    @property
    def __name__(self) -> str:
        return self.graph.name

    def __call__(self, *symbols):
        """The graph once more, on other symbols: in a mod that is traced."""
        return replayed(self.graph, self.values, symbols)


def replayed(graph: ModGraph, values: list, symbols: tuple) -> Sym:
    """The nodes of a graph in the run of this thread, with `symbols` for its own and `values` for what it captures."""
    run, names, made = running(), SCORE_SYMBOLS if graph.kind == "score" else MASK_SYMBOLS, {}
    for node in walk(graph.result):
        args = tuple(made[id(a)] for a in node.args)
        if node.op == "symbol":
            found = to_expr(symbols[names.index(node.attr)])
            found = found if found.dtype == node.dtype and not found.weak else cast(Sym(found), node.dtype).expr
        elif node.op == "scalar":
            found = run.number(values[len(graph.tensors) + node.attr])
        elif node.op == "load":
            found = index_tensor(values[node.attr], tuple(map(Sym, args))).expr
        elif node.op == "row":
            found = run.table.make("row", settled(args), node.dtype, run.tensor_index(values[node.attr]))
        elif node.op == "dot":
            check_rows(*args)
            found = run.made(run.table.make("dot", args, node.dtype, node.attr))
        else:
            found = run.table.make(node.op, args, node.dtype, node.attr, node.weak)
            found = found if node.is_literal else run.made(found)
        made[id(node)] = found
    return Sym(made[id(graph.result)])
