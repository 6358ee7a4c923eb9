"""What a mod loads: in which order, and whether a load is a position's own."""

from __future__ import annotations

from .expr import Expr, ModGraph, symbols_in, walk

POSITIONS = frozenset({"q_idx", "kv_idx"})


def loads_of(graph: ModGraph) -> list[Expr]:
    """The loads of a graph, in order; each once."""
    loads = [n for n in walk(graph.result) if n.op == "load"]
    if graph.beside:
        beside = (n for root in graph.beside for n in walk(root) if n.op == "load")
        loads = list({id(n): n for n in (*loads, *beside)}.values())
    return loads


def gathers(graph: ModGraph) -> bool:
    """Does the mod load an element of its own for every position (a relative-position table, a full bias)?"""
    return any(map(is_gather, loads_of(graph)))


def is_gather(load: Expr) -> bool:
    """Do the indices of a load depend on both q_idx and kv_idx?"""
    return symbols_in(load) >= POSITIONS
