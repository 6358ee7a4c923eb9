"""score_mods that add: to the score, a number for every key, and a multiple of the distance between query and key.

A kernel need not compute such a sum for every pair: what a key adds goes into one fused multiply-add with the scale of the products, and
so does the slope of distances. ALiBi is slope * distance, a padding bias a number for every key. What a query adds is no such sum: all
scores of its row are rounded with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..registry import remembered
from .dispatch import OPERATIONS, cast
from .distance import sign_of_difference
from .expr import INDEX_BOUND, Expr, ExprTable, ModGraph, symbols_in, value_range, walk
from .grad import DerivedRun
from .symbols import Sym


@dataclass(frozen=True, eq=False)
class Sum:
    """score + key + rate * (kv_idx - q_idx), in float32; None is 0. `key` does not depend on q_idx, `rate` on neither."""

    key: Expr | None = None
    rate: Expr | None = None

    @property
    def parts(self) -> tuple[Expr, ...]:
        return tuple(part for part in (self.key, self.rate) if part is not None)


@remembered("mods that are sums", 1024)
def as_sum(graph: ModGraph) -> Sum | None:
    """A score_mod's result as a Sum, or None if it is none."""
    nodes = walk(graph.result)
    run = DerivedRun(graph.kind, ExprTable(nodes), OPERATIONS)
    symbols: dict[int, frozenset[str]] = {}
    found: dict[int, _Terms | None] = {}
    with run.active():
        for node in nodes:
            run.line = node.source
            symbols[id(node)] = frozenset({node.attr} if node.op == "symbol" else ()).union(*(symbols[id(a)] for a in node.args))
            found[id(node)] = _terms(node, [found[id(a)] for a in node.args], [symbols[id(a)] for a in node.args], symbols[id(node)])
        terms = found[id(graph.result)]
        if terms is None or not terms.score or terms.query is not None:
            return None
        return Sum(*(None if part is None else cast(part, torch.float32).expr for part in (terms.key, terms.rate)))


class _Terms(NamedTuple):
    """Of an expression: is the score one of its terms, and the others as in a Sum; `query` does not depend on kv_idx."""

    score: bool = False
    query: Sym | None = None
    key: Sym | None = None
    rate: Sym | float | None = None


_PAIR = frozenset({"score", "q_idx", "kv_idx"})  # what may differ between pairs of a tile
_EXACT = 2 * INDEX_BOUND  # integers up to this are float32 numbers


def _terms(node: Expr, args: list[_Terms | None], theirs: list[frozenset[str]], symbols: frozenset[str]) -> _Terms | None:
    """The terms of a node, from those of its operands; `theirs` and `symbols` are what the operands and the node depend on."""
    if node.op == "symbol" and node.attr == "score":
        return _Terms(score=True)
    if "kv_idx" not in symbols and "score" not in symbols:
        return _Terms(query=Sym(node))
    if "q_idx" not in symbols and "score" not in symbols:
        return _Terms(key=Sym(node))
    if None in args or not _keeps_value(node):
        return None
    if node.op == "cast":
        return args[0]
    if node.op == "neg" and not args[0].score:
        return _Terms(False, *(None if part is None else -part for part in args[0][1:]))
    if node.op == "add" and not (args[0].score and args[1].score):
        return _Terms(args[0].score or args[1].score, *map(_plus, args[0][1:], args[1][1:]))
    if sign_of_difference(node):
        return _Terms(rate=float(sign_of_difference(node)))
    if node.op == "sub" and not args[1].score:
        return _Terms(args[0].score, *map(_minus, args[0][1:], args[1][1:]))
    if node.op in ("mul", "div"):
        for this, other in ((0, 1), (1, 0)):
            terms, factor = args[this], node.args[other]
            if theirs[other] & _PAIR or terms.score or terms.key is not None or (node.op == "div" and this == 1):
                continue
            if terms.query is not None and _PAIR & symbols_in(terms.query.expr):
                continue  # it may be infinite, where a product of sums is not the sum of products
            factor = Sym(factor)
            return _Terms(False, *(None if part is None else part * factor if node.op == "mul" else part / factor for part in terms[1:]))
    return None


def _keeps_value(node: Expr) -> bool:
    """Are the node and its terms the same whether computed in its own dtype or in float32?"""
    if node.dtype == torch.bool or node.op == "cast" and node.dtype in (torch.float16, torch.bfloat16):
        return False
    if node.dtype.is_floating_point:
        return True
    if node.op == "cast" and node.args[0].dtype.is_floating_point:
        return False
    low, high = value_range(node)
    return low >= -_EXACT and high <= _EXACT


def _plus(x: Sym | float | None, y: Sym | float | None) -> Sym | float | None:
    return x if y is None else y if x is None else x + y


def _minus(x: Sym | float | None, y: Sym | float | None) -> Sym | float | None:
    return x if y is None else -y if x is None else x - y
