"""Graphs that are there: equal ones are one object, so that none is compiled twice."""

from __future__ import annotations

from ...registry import Table
from ...turn import Turn
from ..expr import Expr, ModGraph, SourceLine, walk


def known_graph(kind: str, name: str, origin: SourceLine | None, result: Expr, tensors: tuple, scalars: tuple) -> ModGraph:
    """The graph of these parts: the one that is there, if it is equal."""
    nodes = walk(result)
    numbers = {id(n): i for i, n in enumerate(nodes)}
    key = (
        kind,
        name,
        origin,
        tensors,
        scalars,
        tuple((n.op, tuple(numbers[id(a)] for a in n.args), n.dtype, repr(n.attr), n.weak, n.source) for n in nodes),
    )
    used = frozenset(n.attr for n in nodes if n.op == "symbol")
    return _finding.run(_graphs.setdefault, key, ModGraph(kind, name, result, tensors, scalars, origin, used))


_graphs: dict[tuple, ModGraph] = Table("graphs", 4096)
_finding = Turn()
