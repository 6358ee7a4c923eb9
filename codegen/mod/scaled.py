"""A score_mod whose result is multiplied by one more captured tensor: derivatives for that tensor are those of a row's scores growing
alike."""

from __future__ import annotations

import torch

from ..registry import remembered
from .dispatch import OPERATIONS
from .expr import ExprTable, ModGraph, TensorCapture, walk
from .rewriting import SimplifyingRun
from .symbols import Sym
from .trace import known_graph


@remembered("scaled mods", 256)
def scaled_graph(graph: ModGraph) -> ModGraph:
    """The score_mod times a captured float32 tensor (B, Hq, Q_LEN), which comes behind its others."""
    name = "factor"
    while name in {c.name for c in (*graph.tensors, *graph.scalars)}:
        name += "_"
    run = SimplifyingRun(graph.kind, ExprTable(walk(graph.result)), OPERATIONS)
    with run.active():
        row = tuple(run.table.make("symbol", (), torch.int32, attr=name) for name in ("b", "h", "q_idx"))
        factor = Sym(run.table.make("load", row, torch.float32, attr=len(graph.tensors)))
        result = (Sym(graph.result) * factor).expr
    return known_graph(graph.kind, graph.name, graph.origin, result, (*graph.tensors, TensorCapture(name, torch.float32, 3)), graph.scalars)
