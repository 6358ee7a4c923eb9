"""Lowering: a traced mod becomes statements of a kernel's language, with comments that lead back to the user's own lines.

Index symbols may be scalars (b, h), columns [BLOCK_M, 1] (q_idx, in decode h) or rows [1, BLOCK_N] (kv_idx): every spelling in the op
table broadcasts, so an expression of q_idx alone stays a column and is computed once a program, not once an element.
All arithmetic is float32 or integer; half-precision and float64 captures are converted when loaded.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import torch

from ..mod.distance import sign_of_difference, sign_of_distance
from ..mod.dtypes import compute_dtype, operand_dtypes, wrapped
from ..mod.expr import INDEX_BOUND, MASK_SYMBOLS, Expr, ModGraph, SourceLine, symbols_in, walk
from ..mod.index_range import value_range
from ..mod.loads import loads_of
from ..mod.op import kind
from ..mod.ops import OPS, row_of
from ..mod.sums import Sum
from .code import Code, Statement, uses_of
from .languages import NAME
from .layouts import TensorLayout
from .snippet import DistanceText, Snippet, SumText, Target

_ANY_LENGTH = dict.fromkeys(MASK_SYMBOLS, (1 << 31) - 1)
_POSITIONS = frozenset({"q_idx", "kv_idx"})
_WIDTH = 88  # longest statement that is still put on one line

Terms = list[tuple[int, Code]]  # of a sum, with their signs


class _Printer:
    def __init__(self, graph: ModGraph, names: dict[str, str], layouts: tuple[TensorLayout, ...], target: Target, prefix: str) -> None:
        self.graph, self.names, self.layouts, self.target, self.prefix = graph, names, layouts, target, prefix
        self.language = target.language
        self.axes = _POSITIONS | {"h"} if target.packed_heads else _POSITIONS  # symbols that differ within a tile
        self.loads = loads_of(graph)
        self.statements: list[Statement] = []
        self.varies: dict[int, frozenset[str]] = {}  # per node: the symbols that it depends on
        self.node: Expr | None = None  # that is being printed
        self.codes: dict[int, Code] = {}
        self.count = 0
        self.places: dict[int, tuple[Terms, Code | None]] = {}  # per load: its offset and what must hold for it
        self.known: dict[int, str] = {}  # names of nodes that are computed elsewhere
        self.by_distance = False  # kv_idx - q_idx is `distance`, and the two do not occur otherwise

    def statement(self, code: Code, source: SourceLine | None, *, loads: bool = False, dtype: torch.dtype | None = None) -> Code:
        """Give an expression a name, unless it is one."""
        if code.binds == NAME:
            return code
        name = f"{self.prefix}_{self.count}"
        self.count += 1
        varies = {*MASK_SYMBOLS, "score"} if self.node is None else self.varies[id(self.node)]
        self.statements.append(Statement(name, code, source, tuple(sorted(varies)), loads, compute_dtype(dtype) if dtype else ""))
        return self.language.symbol(name)

    def operand(self, node: Expr, dtype: torch.dtype) -> Code:
        """`node` converted to what an operation on `dtype` computes with."""
        have, want = compute_dtype(node.dtype), compute_dtype(dtype)
        if node.is_literal:
            value = node.attr
            value = float(value) if kind(dtype) == "float" else bool(value) if kind(dtype) == "bool" else wrapped(value, dtype)
            return self.language.literal(value)
        if node.op == "scalar" and kind(node.dtype) == "int":  # captured ints come in as int32; larger ones are literals
            have = "int32"
        code = self.codes[id(node)]
        if have == want:
            return code
        if kind(dtype) == "bool":
            return self.language.operate(code, "!=", self.language.literal(0))
        split = self._float_of_sum(node) if kind(node.dtype) == "int" and kind(dtype) == "float" else None
        return split or self.language.cast(code, dtype)

    def _float_of_sum(self, node: Expr) -> Code | None:
        """float(a - b) as float(a) - float(b): exact for indices below INDEX_BOUND, and q_idx's part is converted once."""
        difference = sign_of_difference(node)
        signs = row_of(node).signs
        if not self.target.exact_indices or len(signs) != 2 or self.by_distance and difference:
            return None
        if difference:
            return self.language.float_difference(*(self.codes[id(a)] for a in node.args))
        for part in (node, *node.args):
            low, high = self.range_of(part)
            if max(abs(low), abs(high)) > INDEX_BOUND:
                return None
        left, right = (self.operand(a, torch.float32) for a in node.args)
        return self.language.operate(left, "+" if signs[1] > 0 else "-", right)

    def range_of(self, node: Expr) -> tuple[float, float]:
        return value_range(node, None if self.target.exact_indices else _ANY_LENGTH)

    def load(self, node: Expr) -> Code:
        capture = self.graph.tensors[node.attr]
        offset, checks = [], []
        for dim, index in enumerate(node.args):
            code = self.codes[id(index)]
            if not self._is_inside(node, dim):
                code = self._checked(node, dim, code, checks)
            offset += self._offset(node, dim, code)
        inside = functools.reduce(lambda a, b: self.language.operate(a, "&", b), checks) if checks else None
        self.places[id(node)] = offset, inside
        pointer = self._sum(offset, self.language.argument(f"ptr_{capture.name}", "value", node.attr))
        bits = 8 * capture.dtype.itemsize
        if self.target.read_directly and bits <= 32 and any(symbols_in(index) >= _POSITIONS for index in node.args):
            loaded = self.language.load_directly(pointer, inside, bits)
        else:
            loaded = self.language.load(pointer, inside)
        narrow = node.dtype.is_floating_point and node.dtype != torch.float32
        return self.language.cast(loaded, torch.float32) if narrow else loaded

    def _is_inside(self, load: Expr, dim: int) -> bool:
        return (self.loads.index(load), dim) in self.layouts[load.attr].inside

    def _checked(self, load: Expr, dim: int, code: Code, checks: list[Code]) -> Code:
        """An index that counts from the beginning; adds to `checks` what must hold for it."""
        index, language = load.args[dim], self.language
        size = language.argument(f"size_{self.graph.tensors[load.attr].name}_{dim}", "size", load.attr, dim)
        low = self.range_of(index)[0]
        if low < 0 or not index.is_literal:
            code = self.statement(code, load.source, dtype=index.dtype)
        if low < 0:  # negative indices count from the end, as in torch
            zero = language.literal(0)
            from_end = language.where(language.operate(code, "<", zero), language.operate(code, "+", size), code)
            code = self.statement(from_end, load.source, dtype=index.dtype)
            checks.append(language.operate(code, ">=", zero))
        checks.append(language.operate(code, "<", size))
        return code

    def _offset(self, load: Expr, dim: int, code: Code) -> Terms:
        """What an index adds to the address."""
        language, layout, index = self.language, self.layouts[load.attr], load.args[dim]
        capture, stride, inside = self.graph.tensors[load.attr], layout.strides[dim], self._is_inside(load, dim)
        if stride == "0":  # what is checked must have the shape of the check
            return [] if inside or self.varies[id(index)] <= {"b", "h"} - self.axes else [(1, language.zeros_like(code))]
        near = self._near(index) if sign_of_distance(index) and code == self.codes[id(index)] else None
        if near:  # the compiler makes constants of the addresses' differences only where it need not mind an overflow
            sign = "+" if sign_of_distance(index) > 0 else "-"
            code = language.operate(language.cast(near, torch.int64), sign, language.symbol("far"))
        elif stride == "1" and inside and symbols_in(index) >= _POSITIONS:
            return self._sorted_terms(index)
        elif layout.wide and not index.is_literal:
            code = language.cast(code, torch.int64)
        if stride == "1":
            return [(1, code)]
        step = language.argument(f"stride_{capture.name}_{dim}", "vectors" if stride == "v" else "stride", load.attr, dim)
        if stride == "v":
            step = language.operate(step, "*", language.literal(16 // capture.dtype.itemsize))
        return [(1, language.operate(code, "*", step))]

    def _near(self, node: Expr) -> Code | None:
        """A distance and what is added to it, of `near` instead of `distance`; None if it is called by another name."""
        if sign_of_difference(node):
            return self._difference(node, "near") if self.by_distance else None
        if self.codes[id(node)].binds == NAME:
            return None
        near = {id(a): code for a in node.args if (code := self._near(a) if sign_of_distance(a) else None)}
        codes = self.codes
        self.codes = codes | near
        found = self.operation(node) if near else None
        self.codes = codes
        return found

    def _difference(self, node: Expr, name: str) -> Code:
        symbol = self.language.symbol(name)
        return symbol if sign_of_difference(node) > 0 else self.language.negative(symbol)

    def _sorted_terms(self, index: Expr) -> Terms:
        """The terms of an index, to be added to a pointer one after another, positions last.

        As the sum of 32-bit numbers it would be, the compiler had to mind an overflow and compute every element's address: this way what
        differs from one element of a thread to the next is a constant.
        """
        terms = sorted(self._terms(index, 1), key=lambda t: (bool(_POSITIONS & symbols_in(t[1])), t[0] < 0))
        return [(sign, self.operand(term, index.dtype)) for sign, term in terms]

    def _terms(self, node: Expr, sign: int) -> list[tuple[int, Expr]]:
        """The terms of a sum that is spelled where it is used, and their signs."""
        signs = row_of(node).signs
        if not signs or self.codes[id(node)].binds == NAME:
            return [(sign, node)]
        return [term for own, arg in zip(signs, node.args, strict=True) for term in self._terms(arg, own * sign)]

    def _sum(self, terms: Terms, first: Code | None = None) -> Code:
        """Terms added up one after another, to `first` if there is one."""
        found = first
        for sign, term in terms:
            signed = term if sign > 0 else self.language.negative(term)
            found = self.language.operate(found, "+" if sign > 0 else "-", term) if found else signed
        return found or self.language.literal(0)

    def place(self, load: Expr) -> tuple[Code, Code | None]:
        """The offset of a load and what must hold for it. An index that another load gives need not differ along the axes it is made of, if
        that tensor is expanded; gradients do differ, so the offset gets their shape."""
        offset, checks = self.places[id(load)]
        same = _POSITIONS & symbols_in(load) - self.differs_along(load)
        shapes = [(1, self.language.zeros_like(self.language.symbol(self.names[name]))) for name in sorted(same)]
        return self._sum(offset + shapes), checks

    def cast(self, node: Expr) -> Code:
        code = self.operand(node.args[0], node.dtype)
        return self.language.rounded(code, node.dtype) if node.dtype in (torch.float16, torch.bfloat16) else code

    def operation(self, node: Expr) -> Code:
        row = OPS[node.op]
        wanted = operand_dtypes(node)
        operands = [self.operand(a, w) for a, w in zip(node.args, wanted, strict=True)]
        if row.chooses and all(a.is_literal for a in node.args[1:]):
            operands[1] = self.language.number(operands[1], node.dtype)
        if row.plainer is not None and row.plainer[1](node.dtype, *map(self.range_of, node.args)):
            return self.language.plainer(row, *operands)
        return self.language.operation(row, kind(wanted[-1]), self.target.backend, self.target.precision, *operands)

    def print_all(self, roots: tuple[Expr, ...]) -> None:
        nodes = list({id(n): n for root in roots for n in walk(root)}.values())
        uses = Counter(id(a) for n in nodes for a in n.args)
        uses.update(map(id, roots))
        self.print_nodes(nodes, uses)

    def print_nodes(self, nodes: list[Expr], uses: Counter) -> None:
        for node in nodes:
            self.node = node
            if id(node) in self.known:
                self.varies[id(node)] = frozenset(MASK_SYMBOLS)
            else:
                self.varies[id(node)] = frozenset({node.attr} if node.op == "symbol" else ()).union(
                    *(self.varies[id(a)] for a in node.args)
                )
            self.codes[id(node)] = self._printed(node, uses[id(node)])

    def _printed(self, node: Expr, uses: int) -> Code:
        if id(node) in self.known:
            return self.language.symbol(self.known[id(node)])
        if self.by_distance and sign_of_difference(node):
            return self._difference(node, "distance")
        if node.op == "symbol":
            return self.language.symbol(self.names[node.attr])
        if node.op == "literal":
            return self.language.literal(node.attr)
        if node.op == "scalar":
            return self.language.argument(f"arg_{self.graph.scalars[node.attr].name}", "value", len(self.graph.tensors) + node.attr)
        code = self.load(node) if node.op == "load" else self.cast(node) if node.op == "cast" else self.operation(node)
        if uses > 1 or node.op == "load" or len(code.text) > _WIDTH:
            return self.statement(code, node.source, loads=node.op == "load", dtype=node.dtype)
        return code

    def full_tile(self, root: Expr, code: Code, tile: str) -> Code:
        """A result that does not depend on every index is spread over the whole tile; parts of masks stay as they are."""
        if self.graph.kind not in ("score", "mask"):
            return code
        symbols, rows = self.differs_along(root), self.axes - {"kv_idx"}
        if {"score", "grad"} & symbols or ("kv_idx" in symbols and rows & symbols):
            return code
        if self.axes & symbols:
            return self.language.broadcast(code, tile)
        return self.language.full(code, torch.float32 if self.graph.kind == "score" else torch.bool, tile)

    def differs_along(self, root: Expr) -> frozenset[str]:
        """The symbols that a value differs along; an index of stride 0 that needs no check adds none."""
        found: dict[int, frozenset[str]] = {}
        for node in walk(root):
            args = node.args
            if node.op == "load":
                strides = self.layouts[node.attr].strides
                args = [a for i, a in enumerate(args) if strides[i] != "0" or not self._is_inside(node, i)]
            own = {node.attr} if node.op == "symbol" else ()
            found[id(node)] = frozenset(own).union(*(found[id(a)] for a in args))
        return found[id(root)]


def lower(
    graph: ModGraph,
    names: dict[str, str],
    layouts: tuple[TensorLayout, ...],
    target: Target,
    *,
    prefix: str,
    tile: str,
    gradients: tuple[Expr, ...] = (),
    places: tuple[Expr, ...] = (),
    distances: tuple[Expr, ...] = (),
) -> Snippet:
    """Statements of the target's language for a traced mod.

    names      the kernel's names of the symbols: {"score": "score", "b": "b", "q_idx": "m", ...}
    layouts    one per captured tensor of the graph
    prefix     of the temporaries' names
    tile       the kernel's name of a tensor with the tile's shape (and layout), "qk"; or the shape, "[BLOCK_M, BLOCK_N]"
    gradients  expressions of the symbols and of "grad", d loss / d result, to be computed after it is known (see grad.py)
    places     loads whose offsets are asked for
    distances  expressions that get statements of their own, by the distance (see distance.py), without gradients
    """
    root = graph.result
    printer = _Printer(graph, names, layouts, target, prefix)
    printer.known = {id(part): f"{prefix}_distance_{i}" for i, part in enumerate(distances)}
    forward = walk(root, printer.known)
    before = {id(n) for n in forward}
    backward = [n for n in {id(n): n for g in gradients for n in walk(g)}.values() if id(n) not in before]
    uses = Counter(id(a) for n in (*forward, *backward) if id(n) not in printer.known for a in n.args)
    uses.update(id(g) for g in gradients)
    uses[id(root)] += bool(gradients)
    printer.print_nodes(forward, uses)
    printer.node = None
    result = printer.full_tile(root, printer.operand(root, torch.float32 if graph.kind == "score" else root.dtype), tile)
    result = printer.statement(result, root.source)
    statements, printer.statements = tuple(printer.statements), []
    printer.print_nodes(backward, uses)
    found = tuple(printer.full_tile(g, printer.operand(g, torch.float32), tile) for g in gradients)
    where = tuple(printer.place(load) for load in places)
    behind = tuple(printer.statements)
    codes = [*(s.value for s in (*statements, *behind)), result, *found, *(code for place in where for code in place)]
    snippet = Snippet(statements, result, uses_of(codes), behind, found, where)
    return _with_distances(snippet, _Printer(graph, names, layouts, target, "distance"), distances, printer) if distances else snippet


def _with_distances(snippet: Snippet, apart: _Printer, distances: tuple[Expr, ...], printer: _Printer) -> Snippet:
    """A snippet with what it takes by the distance, printed `apart`."""
    apart.by_distance = True
    apart.print_all(distances)
    values = []
    for root in distances:
        code = apart.codes[id(root)]
        values.append(code if "kv_idx" in apart.differs_along(root) else apart.language.full(code, root.dtype, "distance"))
    text = DistanceText(apart.language.lines(apart.statements), tuple(values), tuple(printer.known.values()))
    uses = dict.fromkeys((*snippet.uses, *uses_of((*(s.value for s in apart.statements), *values))))
    return replace(snippet, uses=tuple(uses), distance=text)


def lower_sum(
    graph: ModGraph, terms: Sum, names: dict[str, str], layouts: tuple[TensorLayout, ...], target: Target, *, prefix: str
) -> Snippet:
    """Statements for what a score_mod adds, its result as a Sum. q_idx and kv_idx in `names` are vectors."""
    printer = _Printer(graph, names, layouts, target, prefix)
    printer.print_all(terms.parts)
    found = SumText(*(None if part is None else printer.operand(part, torch.float32) for part in (terms.key, terms.rate)))
    uses = uses_of((*(s.value for s in printer.statements), found.key, found.rate))
    return Snippet(tuple(printer.statements), None, uses, sum=found)
