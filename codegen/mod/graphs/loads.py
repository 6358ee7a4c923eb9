"""What a mod loads: in which order, and whether a load is a position's own."""

from __future__ import annotations

import torch

from ...registry import remembered
from ..expr import Expr, ModGraph, symbols_in, walk
from ..table.ops import FUNCTIONS

MANY = 8  # loads of a mod: each is as wide as a tile, and what is made of it as large
DETACHED = FUNCTIONS[torch.detach].name
POSITIONS = frozenset({"q_idx", "kv_idx"})


def loads_of(graph: ModGraph) -> list[Expr]:
    """The loads of a graph, of elements and of rows, in order; each once."""
    return _found(graph, ("load", "row"))


def _found(graph: ModGraph, ops: tuple[str, ...]) -> list[Expr]:
    found = [n for n in walk(graph.result) if n.op in ops]
    if graph.beside:
        beside = (n for root in graph.beside for n in walk(root) if n.op in ops)
        found = list({id(n): n for n in (*found, *beside)}.values())
    return found


@remembered("tensors that gradients reach", 256)
def reached_by_gradients(graph: ModGraph) -> frozenset[int]:
    """Which captured tensors autograd would go back to, maybe with zeros: not those that are only detached or compared."""
    ends = {id(n) for n in walk(graph.result) if n.op == DETACHED or not n.dtype.is_floating_point}
    return frozenset(n.attr for n in walk(graph.result, ends) if n.op in ("load", "row"))


def dots_of(graph: ModGraph) -> list[Expr]:
    """The dot products of rows (see long_dots.py), in order; each once."""
    return _found(graph, ("dot",))


def width_of_dots(graph: ModGraph | None) -> int:
    """How many columns those of the mod itself add to a product of queries and keys."""
    return sum(n.attr for n in walk(graph.result) if n.op == "dot") if graph else 0


def widest_element(dtype: torch.dtype, graph: ModGraph | None) -> int:
    """Bytes of the widest elements that are multiplied: rows of captured tensors may be wider than q, whose dtype is given."""
    rows = (row.dtype.itemsize for dot in (dots_of(graph) if graph else ()) for row in dot.args)
    return min(max(dtype.itemsize, *rows, 0), 4)


def read_in(load: Expr, role: str) -> Expr:
    """What is read where a gradient is gathered in a role: of a dot product the query's row or the key's."""
    return load.args[0 if role == "row" else 1] if load.op == "dot" else load


def gathers(graph: ModGraph) -> bool:
    """Does the mod load an element of its own for every position (a relative-position table, a full bias)?"""
    return any(map(is_gather, loads_of(graph)))


def takes_registers(graph: ModGraph) -> bool:
    """Are there no registers left for the largest tiles? So it is with such elements, and with vectors of queries and keys."""
    return gathers(graph) or len(loads_of(graph)) > MANY


def weight_of(graph: ModGraph) -> str:
    """What takes registers in the backward pass: "dots" of rows, "vectors", or nothing out of the ordinary."""
    return "dots" if dots_of(graph) else "vectors" if len(loads_of(graph)) > MANY else ""


def is_gather(load: Expr) -> bool:
    """Do the indices of a load depend on both q_idx and kv_idx?"""
    return symbols_in(load) >= POSITIONS
