"""Lowering: a traced mod becomes statements of a kernel's language, with comments that lead back to the user's own lines.

Index symbols may be scalars (b, h), columns [BLOCK_M, 1] (q_idx, in decode h) or rows [1, BLOCK_N] (kv_idx): every spelling in the op
table broadcasts, so an expression of q_idx alone stays a column and is computed once a program, not once an element.
All arithmetic is float32 or integer; half-precision and float64 captures are converted when loaded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ..mod.expr import MASK_SYMBOLS, Expr, ModGraph, walk
from ..mod.graphs.decisions import deciding
from ..mod.graphs.distance import sign_of_difference
from ..mod.graphs.loads import POSITIONS
from ..mod.graphs.sums import Sum
from .addresses import Addresses
from .code import Code, uses_of
from .expressions import Expressions
from .layouts import TensorLayout
from .long_dots import Dots
from .snippet import Copied, CopiedText, DistanceText, Snippet, SumText, Target

_WIDTH = 88  # longest statement that is still put on one line


class _Printer:
    """Prints the nodes of a mod, arguments before the nodes that use them.

    known        names of nodes that are computed elsewhere
    by_distance  what is printed takes kv_idx - q_idx as `distance`
    """

    def __init__(
        self,
        graph: ModGraph,
        names: dict[str, str],
        layouts: tuple[TensorLayout, ...],
        target: Target,
        prefix: str,
        *,
        known: dict[int, str] | None = None,
        by_distance: bool = False,
    ) -> None:
        self.graph, self.names, self.language, self.known = graph, names, target.language, known or {}
        # symbols that differ within a tile
        self.axes = POSITIONS.union({"h"} if target.packed_heads else (), {"b"} if target.packed_sequences else ())
        nodes = walk(graph.result)
        decided = {id(n) for n in nodes} if graph.kind == "zone" else deciding(nodes)  # a zone is compared in the verdict
        self.expressions = Expressions(target, prefix, by_distance, decided)
        self.addresses = Addresses(graph, names, layouts, self.axes, self.expressions)
        self.dots = Dots(self.addresses)

    def print_all(self, roots: tuple[Expr, ...]) -> None:
        """All below some roots."""
        nodes = list({id(n): n for root in roots for n in walk(root)}.values())
        uses = Counter(id(a) for n in nodes for a in n.args)
        uses.update(map(id, roots))
        self.print_nodes(nodes, uses)

    def print_nodes(self, nodes: list[Expr], uses: Counter) -> None:
        """Nodes in this order; what is used more than once gets a name."""
        varies = self.expressions.varies
        for node in nodes:
            self.expressions.node = node
            if id(node) in self.known:
                varies[id(node)] = frozenset(MASK_SYMBOLS)
            else:
                own = {node.attr} if node.op == "symbol" else ()
                varies[id(node)] = frozenset(own).union(*(varies[id(a)] for a in node.args))
            self.expressions.codes[id(node)] = self._printed(node, uses[id(node)])

    def _printed(self, node: Expr, uses: int) -> Code:
        expressions = self.expressions
        if id(node) in self.known:
            return self.language.symbol(self.known[id(node)])
        if expressions.by_distance and sign_of_difference(node):
            return expressions.difference(node, "distance")
        if node.op == "symbol":
            return self.language.symbol(self.names[node.attr])
        if node.op == "literal":
            return self.language.literal(node.attr)
        if node.op == "scalar":
            return self.language.argument(f"arg_{self.graph.scalars[node.attr].name}", "value", len(self.graph.tensors) + node.attr)
        if node.op == "row":
            return self.language.literal(0)  # the product that it is a factor of reads it
        if node.op == "dot":
            return expressions.statement(self.dots.product(node), node.source, dtype=node.dtype)
        loads = node.op == "load"
        code = self.addresses.load(node) if loads else expressions.cast(node) if node.op == "cast" else expressions.operation(node)
        if uses > 1 or loads or len(code.text) > _WIDTH:
            return expressions.statement(code, node.source, loads=loads, dtype=node.dtype)
        return code

    def full_tile(self, root: Expr, code: Code, tile: str) -> Code:
        """A result that does not depend on every index is spread over the whole tile; parts of masks stay as they are."""
        if self.graph.kind not in ("score", "mask"):
            return code
        symbols, rows = self.addresses.differs_along(root), self.axes - {"kv_idx"}
        if {"score", "grad", "score_tangent", "grad_tangent"} & symbols or ("kv_idx" in symbols and rows & symbols):
            return code
        if self.axes & symbols:
            return self.language.broadcast(code, tile)
        return self.language.full(code, torch.float32 if self.graph.kind == "score" else torch.bool, tile)


def lower(
    graph: ModGraph,
    names: dict[str, str],
    layouts: tuple[TensorLayout, ...],
    target: Target,
    *,
    prefix: str,
    tile: str,
    gradients: tuple[Expr, ...] = (),
    places: tuple[tuple[str, Expr], ...] = (),
    tangent: Expr | None = None,
    distances: tuple[Expr, ...] = (),
    copied: Copied | None = None,
) -> Snippet:
    """Statements of the target's language for a traced mod.

    names      the kernel's names of the symbols: {"score": "score", "b": "b", "q_idx": "m", ...}
    layouts    one per captured tensor of the graph
    prefix     of the temporaries' names
    tile       the kernel's name of a tensor with the tile's shape (and layout), "qk"; or the shape, "[BLOCK_M, BLOCK_N]"
    gradients  expressions of the symbols and of "grad", d loss / d result, to be computed after it is known (see grad.py)
    places     loads whose offsets are asked for, with their roles
    tangent    of the result, of the symbols and of "score_tangent", to be computed with it (see tangent.py)
    distances  expressions that get statements of their own, by the distance (see distance.py), without gradients
    copied     a load that the template does, without gradients
    """
    root = graph.result
    apart = {id(part): f"{prefix}_distance_{i}" for i, part in enumerate(distances)}
    known = {**apart, id(copied.load): copied.name} if copied else apart
    printer = _Printer(graph, names, layouts, target, prefix, known=known)
    expressions = printer.expressions
    forward = walk(root, known)
    if tangent is not None:
        forward = list({id(n): n for n in (*forward, *walk(tangent, known))}.values())
    before = {id(n) for n in forward}
    backward = [n for n in {id(n): n for g in gradients for n in walk(g)}.values() if id(n) not in before]
    uses = Counter(id(a) for n in (*forward, *backward) if id(n) not in known for a in n.args)
    uses.update(id(g) for g in gradients)
    uses[id(root)] += bool(gradients) or tangent is not None
    printer.print_nodes(forward, uses)
    expressions.node = None
    result = printer.full_tile(root, expressions.operand(root, torch.float32 if graph.kind == "score" else root.dtype), tile)
    result, moved = expressions.statement(result, root.source), None
    if tangent is not None:
        moved = printer.full_tile(tangent, expressions.operand(tangent, torch.float32), tile)
    statements, expressions.statements = tuple(expressions.statements), []
    printer.print_nodes(backward, uses)
    found = tuple(printer.full_tile(g, expressions.operand(g, torch.float32), tile) for g in gradients)
    where = tuple(printer.dots.place(load, role) if load.op == "dot" else printer.addresses.place(load) for role, load in places)
    behind = tuple(expressions.statements)
    codes = [*(s.value for s in (*statements, *behind)), result, moved, *found, *(code for place in where for code in place)]
    snippet = Snippet(statements, result, uses_of(codes), behind, found, where, tangent=moved)
    if copied:
        snippet = _with_copied(snippet, _Printer(graph, names, layouts, target, copied.name), copied)
    if not distances:
        return snippet
    by_distance = _Printer(graph, names, layouts, target, "distance", by_distance=True)
    return _with_distances(snippet, by_distance, distances, tuple(apart.values()))


def _with_distances(snippet: Snippet, apart: _Printer, distances: tuple[Expr, ...], names: tuple[str, ...]) -> Snippet:
    """A snippet with what it takes by the distance under `names`, printed `apart`."""
    apart.print_all(distances)
    statements, values = apart.expressions.statements, []
    for root in distances:
        code = apart.expressions.codes[id(root)]
        values.append(code if "kv_idx" in apart.addresses.differs_along(root) else apart.language.full(code, root.dtype, "distance"))
    text = DistanceText(apart.language.lines(statements), tuple(values), names)
    uses = dict.fromkeys((*snippet.uses, *uses_of((*(s.value for s in statements), *values))))
    return replace(snippet, uses=tuple(uses), distance=text)


def _with_copied(snippet: Snippet, apart: _Printer, copied: Copied) -> Snippet:
    """A snippet with the indices of what the template reads, printed `apart`."""
    apart.print_all(tuple(index for index in copied.indices if index is not None))
    expressions, zero = apart.expressions, apart.language.literal(0)
    indices = tuple(zero if index is None else expressions.operand(index, torch.int32) for index in copied.indices)
    text = CopiedText(apart.language.lines(expressions.statements), indices)
    uses = dict.fromkeys((*snippet.uses, *uses_of((*(s.value for s in expressions.statements), *indices))))
    return replace(snippet, uses=tuple(uses), copied=text)


def lower_sum(
    graph: ModGraph, terms: Sum, names: dict[str, str], layouts: tuple[TensorLayout, ...], target: Target, *, prefix: str
) -> Snippet:
    """Statements for what a score_mod adds, its result as a Sum. q_idx and kv_idx in `names` are vectors."""
    printer = _Printer(graph, names, layouts, target, prefix)
    printer.print_all(terms.parts)
    expressions = printer.expressions
    found = SumText(*(None if part is None else expressions.operand(part, torch.float32) for part in (terms.key, terms.rate)))
    uses = uses_of((*(s.value for s in expressions.statements), found.key, found.rate))
    return Snippet(tuple(expressions.statements), None, uses, sum=found)
