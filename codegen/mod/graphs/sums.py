"""score_mods that add: to the score, a number for every key, and a multiple of the distance between query and key.

A kernel need not compute such a sum for every pair: what a key adds goes into one fused multiply-add with the scale of the products, and
so does the slope of distances. ALiBi is slope * distance, a padding bias a number for every key. What a query adds is no such sum: all
scores of its row are rounded with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...registry import remembered
from ..expr import INDEX_BOUND, Expr, ExprTable, ModGraph, symbols_in, walk
from ..symbolic.dispatch import OPERATIONS
from ..symbolic.nodes import cast
from ..symbolic.symbols import Sym
from ..table.ops import row_of
from .distance import sign_of_difference
from .index_range import value_range
from .rewriting import SimplifyingRun


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
    run = SimplifyingRun(graph.kind, ExprTable(nodes), OPERATIONS)
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
    row = row_of(node)
    if sign_of_difference(node):
        return _Terms(rate=float(sign_of_difference(node)))
    if row.signs:
        scores = [sign for term, sign in zip(args, row.signs, strict=True) if term.score]
        parts = zip(*([_as_computed(part, node) for part in term[1:]] for term in args), strict=True)
        return _Terms(bool(scores), *(_total(part, row.signs) for part in parts)) if scores in ([], [1]) else None
    for this in row.scales:
        terms, other = args[this], 1 - this
        if theirs[other] & _PAIR or terms.score or terms.key is not None:
            continue
        if terms.query is not None and _PAIR & symbols_in(terms.query.expr):
            continue  # it may be infinite, where a product of sums is not the sum of products
        factor = Sym(node.args[other])
        return _Terms(False, *(None if part is None else row.torch(part, factor) for part in terms[1:]))
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


def _as_computed(part: Sym | float | None, node: Expr) -> Sym | float | None:
    """A part of a sum in the dtype in which it is added up: not that of narrow integers, or of bools, that it may have."""
    dtype = torch.float32 if node.dtype.is_floating_point else node.dtype
    return cast(part, dtype) if isinstance(part, Sym) and not part.expr.dtype.is_floating_point else part


def _total(parts: tuple, signs: tuple[int, ...]) -> Sym | float | None:
    """A sum of parts, each with its sign; None is 0."""
    total = None
    for part, sign in zip(parts, signs, strict=True):
        if part is not None and total is None:
            total = part if sign > 0 else -part
        elif part is not None:
            total = total + part if sign > 0 else total - part
    return total
