"""Graphs of mods as texts, which an operator's argument, an exported program or another process can hold.

They have no lines of the user's file: equal mods have equal texts.
"""

from __future__ import annotations

import json

import torch

from ...registry import remembered
from ..expr import LEAVES, MASK_SYMBOLS, SCORE_SYMBOLS, Expr, ExprTable, ModGraph, ScalarCapture, TensorCapture, walk
from ..symbolic.long_dots import WIDEST, are_rows
from ..table.op import kind
from ..table.ops import OPS
from .known import known_graph

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype) and not d.is_complex}
_NAMES = {d: name for name, d in _DTYPES.items()}
_NUMBERS = {"int": int, "float": float, "bool": bool}


@remembered("texts of mods", 1024)
def text_of(graph: ModGraph) -> str:
    """The text of a score_mod's or mask_mod's graph."""
    nodes = walk(graph.result)
    numbers = {id(n): i for i, n in enumerate(nodes)}
    return json.dumps(
        {
            "kind": graph.kind,
            "name": graph.name,
            "tensors": [[t.name, _NAMES[t.dtype], t.ndim] for t in graph.tensors],
            "scalars": [[s.name, s.kind.__name__] for s in graph.scalars],
            "nodes": [[n.op, [numbers[id(a)] for a in n.args], _NAMES[n.dtype], n.attr, int(n.weak)] for n in nodes],
        },
        separators=(",", ":"),
    )


def read_graph(text: str) -> ModGraph:
    """The graph of a text.

    Raises ValueError for a text that `text_of` did not write: it may come from a file.
    """
    try:
        parts = json.loads(text)
        tensors = tuple(TensorCapture(_word(name), _DTYPES[dtype], _count(ndim)) for name, dtype, ndim in parts["tensors"])
        scalars = tuple(ScalarCapture(_word(name), _NUMBERS[number]) for name, number in parts["scalars"])
        table, nodes = ExprTable(), []
        for op, args, dtype, attr, weak in parts["nodes"]:
            node = table.make(op, tuple(nodes[_count(i)] for i in args), _DTYPES[dtype], attr, bool(weak))
            _check(node, parts["kind"], tensors, scalars)
            nodes.append(node)
        return known_graph(parts["kind"], str(parts["name"]), None, nodes[-1], tensors, scalars)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"this is no mod that flexpress {_SAYS}: {error!r}") from None


_SAYS = "wrote (the program may be damaged, or of another version)"


def _word(name) -> str:
    """The name of an argument, which stands in printed kernels."""
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        raise ValueError(f"{name!r} is no name")
    return name


def _count(n) -> int:
    if type(n) is not int or n < 0:
        raise ValueError(f"{n!r} counts nothing")
    return n


def _check(node: Expr, mod_kind: str, tensors: tuple, scalars: tuple) -> None:
    """Is this a node as tracing makes them?"""
    symbols = {"score": SCORE_SYMBOLS, "mask": MASK_SYMBOLS}[mod_kind]
    arity = {"symbol": 0, "literal": 0, "scalar": 0, "cast": 1}.get(node.op)
    if node.op == "load":
        arity = tensors[_count(node.attr)].ndim
    elif node.op == "row":
        arity = tensors[_count(node.attr)].ndim - 1
    elif node.op == "dot":
        arity = 2
    elif arity is None:
        arity = OPS[node.op].arity
    right = len(node.args) == arity
    if node.op == "symbol":
        right = right and node.attr in symbols
    elif node.op == "scalar":
        right = right and _count(node.attr) < len(scalars)
    elif node.op == "literal":
        right = right and type(node.attr) in (float, bool) or type(node.attr) is int and -(1 << 63) <= node.attr < 1 << 63
    elif node.op in ("load", "row"):
        right = right and all(kind(a.dtype) == "int" for a in node.args)
    elif node.op == "dot":
        right = right and mod_kind == "score" and are_rows(*node.args) and 0 < _count(node.attr) <= WIDEST
    elif node.op not in LEAVES:
        right = right and node.attr is None
    if not right:
        raise ValueError(f"node {node.op}({', '.join(a.op for a in node.args)}) [{node.attr!r}]")
