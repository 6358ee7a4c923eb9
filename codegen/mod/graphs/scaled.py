"""A score_mod of which what is above a base of each row is multiplied by a factor: derivatives for factors are those of a row's scores that
grow alike."""

from __future__ import annotations

import torch

from ...registry import remembered
from ..expr import ExprTable, ModGraph, TensorCapture, walk
from ..symbolic.dispatch import OPERATIONS
from ..symbolic.symbols import Sym
from .known import known_graph
from .rewriting import SimplifyingRun


@remembered("scaled mods", 256)
def scaled_graph(graph: ModGraph) -> ModGraph:
    """The score_mod as base + (score - base) * factor, of captured float32 tensors factor and base (B, Hq, Q_LEN), which come behind its
    others."""
    names, taken = ["factor", "base"], {c.name for c in (*graph.tensors, *graph.scalars)}
    while not taken.isdisjoint(names):
        names = [f"{name}_" for name in names]
    run = SimplifyingRun(graph.kind, ExprTable(walk(graph.result)), OPERATIONS)
    with run.active():
        row = tuple(run.table.make("symbol", (), torch.int32, attr=name) for name in ("b", "h", "q_idx"))
        factor, base = (Sym(run.table.make("load", row, torch.float32, attr=len(graph.tensors) + i)) for i in range(2))
        result = (base + (Sym(graph.result) - base) * factor).expr
    tensors = *graph.tensors, *(TensorCapture(name, torch.float32, 3) for name in names)
    return known_graph(graph.kind, graph.name, graph.origin, result, tensors, graph.scalars)
