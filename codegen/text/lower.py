"""Lowering: a traced mod becomes Triton (or Gluon) statements, with comments that lead back to the user's own lines.

Index symbols may be scalars (b, h), columns [BLOCK_M, 1] (q_idx, in decode h) or rows [1, BLOCK_N] (kv_idx): every spelling in the op
table broadcasts, so an expression of q_idx alone stays a column and is computed once a program, not once an element.
All arithmetic is float32 or integer; half-precision and float64 captures are converted when loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..mod.distance import sign_of_difference, sign_of_distance
from ..mod.dtypes import operand_dtypes, wrapped
from ..mod.expr import INDEX_BOUND, MASK_SYMBOLS, Expr, ModGraph, SourceLine, symbols_in, walk
from ..mod.index_range import value_range
from ..mod.op import kind
from ..mod.ops import OPS, row_of
from .snippet import DistanceText, Snippet, Statement, SumText, Target, TensorLayout, compute_dtype, lines_of

if TYPE_CHECKING:
    from ..mod.sums import Sum

_ANY_LENGTH = dict.fromkeys(MASK_SYMBOLS, (1 << 31) - 1)
_WIDTH = 88  # longest statement that is still put on one line


def loads_of(graph: ModGraph) -> list[Expr]:
    """The loads of a graph, in order."""
    return [n for n in walk(graph.result) if n.op == "load"]


def gathers(graph: ModGraph) -> bool:
    """Does the mod load an element of its own for every position (a relative-position table, a full bias)?"""
    return any(map(is_gather, loads_of(graph)))


def is_gather(load: Expr) -> bool:
    """Do the indices of a load depend on both q_idx and kv_idx?"""
    return {"q_idx", "kv_idx"} <= symbols_in(load)


def literal_text(value) -> str:
    """A Python literal for a number, infinities and NaN included."""
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return f'float("{value}")'
    return repr(value)


class _Printer:
    def __init__(self, graph: ModGraph, names: dict[str, str], layouts: tuple[TensorLayout, ...], target: Target, prefix: str) -> None:
        self.graph, self.names, self.layouts, self.target, self.prefix = graph, names, layouts, target, prefix
        self.tl = target.module
        self.loads = loads_of(graph)
        self.statements: list[Statement] = []
        self.varies: dict[int, frozenset[str]] = {}  # per node: the symbols that it depends on
        self.node: Expr | None = None  # that is being printed
        self.helpers: dict[str, None] = {}
        self.libdevice = False
        self.text: dict[int, str] = {}
        self.count = 0
        self.places: dict[int, tuple[str, str]] = {}  # per load: its offset and what must hold for it
        self.known: dict[int, str] = {}  # names of nodes that are computed elsewhere
        self.by_distance = False  # kv_idx - q_idx is `distance`, and the two do not occur otherwise

    def statement(self, text: str, source: SourceLine | None, *, loads: bool = False, dtype: torch.dtype | None = None) -> str:
        name = f"{self.prefix}_{self.count}"
        self.count += 1
        varies = {*MASK_SYMBOLS, "score"} if self.node is None else self.varies[id(self.node)]
        self.statements.append(Statement(name, text, source, tuple(sorted(varies)), loads, compute_dtype(dtype) if dtype else ""))
        return name

    def operand(self, node: Expr, dtype: torch.dtype) -> str:
        """The text of `node` converted to what an operation on `dtype` computes with."""
        text = self.text[id(node)]
        have, want = compute_dtype(node.dtype), compute_dtype(dtype)
        if node.is_literal:
            value = node.attr
            value = float(value) if kind(dtype) == "float" else bool(value) if kind(dtype) == "bool" else wrapped(value, dtype)
            return literal_text(value)
        if node.op == "scalar" and kind(node.dtype) == "int":  # captured ints come in as int32; larger ones are literals
            have = "int32"
        if have == want:
            return text
        if kind(dtype) == "bool":
            return _paren(f"{_atom(text)} != 0")
        if kind(node.dtype) == "int" and kind(dtype) == "float":
            split = self._float_of_sum(node)
            if split is not None:
                return split
        return f"{_atom(text)}.to({self.tl}.{want})"

    def _float_of_sum(self, node: Expr) -> str | None:
        """float(a - b) as float(a) - float(b): exact for indices below INDEX_BOUND, and q_idx's part is converted once."""
        difference = sign_of_difference(node)
        signs = row_of(node).signs
        if not self.target.exact_indices or len(signs) != 2 or self.by_distance and difference:
            return None
        if difference:
            self.helpers["float_difference"] = None
            return f"float_difference({', '.join(self.text[id(a)] for a in node.args)})"
        for part in (node, *node.args):
            low, high = self.range_of(part)
            if max(abs(low), abs(high)) > INDEX_BOUND:
                return None
        left, right = (self.operand(a, torch.float32) for a in node.args)
        return f"({left} {'+' if signs[1] > 0 else '-'} {right})"

    def range_of(self, node: Expr) -> tuple[float, float]:
        return value_range(node, None if self.target.exact_indices else _ANY_LENGTH)

    def load(self, node: Expr) -> str:
        capture, layout = self.graph.tensors[node.attr], self.layouts[node.attr]
        number = self.loads.index(node)
        offset, checks = [], []
        for dim, index in enumerate(node.args):
            text = self.text[id(index)]
            size = f"size_{capture.name}_{dim}"
            low = self.range_of(index)[0]
            if (number, dim) not in layout.inside:
                if low < 0:  # negative indices count from the end, as in torch
                    text = self.statement(text, node.source, dtype=index.dtype) if not text.isidentifier() else text
                    text = self.statement(f"{self.tl}.where({text} < 0, {text} + {size}, {text})", node.source, dtype=index.dtype)
                    checks.append(f"({text} >= 0)")
                elif not text.isidentifier() and index.op != "literal":
                    text = self.statement(text, node.source, dtype=index.dtype)
                checks.append(f"({text} < {size})")
            stride = layout.strides[dim]
            if stride == "0":  # what is checked must have the shape of the check
                offset += [] if (number, dim) in layout.inside else [f"{_atom(text)} * 0"]
                continue
            near = re.sub(r"\bdistance\b", "near", text)
            sign = sign_of_distance(index) if near != text else 0
            if sign:  # the compiler makes constants of the addresses' differences only where it need not mind an overflow
                text = f"{_atom(near)}.to({self.tl}.int64) {'+' if sign > 0 else '-'} far"
            elif stride == "1" and (number, dim) in layout.inside and {"q_idx", "kv_idx"} <= symbols_in(index):
                offset.append(self.sum_of_terms(index))
                continue
            elif layout.wide and index.op != "literal":
                text = f"{_atom(text)}.to({self.tl}.int64)"
            name = f"stride_{capture.name}_{dim}"
            name = f"({name} * {16 // capture.dtype.itemsize})" if stride == "v" else name
            offset.append(_atom(text) if stride == "1" else f"{_atom(text)} * {name}")
        self.places[id(node)] = " + ".join(offset) or "0", " & ".join(checks)
        loaded = self.read(node, " + ".join([f"ptr_{capture.name}", *offset]), " & ".join(checks))
        if node.dtype.is_floating_point and node.dtype != torch.float32:
            loaded += f".to({self.tl}.float32)"
        return loaded

    def read(self, load: Expr, pointer: str, inside: str) -> str:
        """What reads memory: `inside` is what must hold, "" if nothing need be checked."""
        bits = 8 * self.graph.tensors[load.attr].dtype.itemsize
        if not self.target.read_directly or bits > 32 or not any({"q_idx", "kv_idx"} <= symbols_in(index) for index in load.args):
            return f"{self.tl}.load({pointer}{f', mask={inside}, other=0' if inside else ''})"
        helper = f"read_{bits}_bits{'_if' if inside else ''}"
        self.helpers[helper] = None
        return f"{helper}({f'{inside}, ' if inside else ''}{pointer})"

    def sum_of_terms(self, index: Expr) -> str:
        """An index, its terms to be added to a pointer one after another, positions last.

        As the sum of 32-bit numbers it would be, the compiler had to mind an overflow and compute every element's address: this way what
        differs from one element of a thread to the next is a constant.
        """
        terms = sorted(self._terms(index, 1), key=lambda t: (bool({"q_idx", "kv_idx"} & symbols_in(t[1])), t[0] < 0))
        signed = (f"{'+' if sign > 0 else '-'} {_atom(self.operand(term, index.dtype))}" for sign, term in terms)
        return " ".join(signed).removeprefix("+ ")

    def _terms(self, node: Expr, sign: int) -> list[tuple[int, Expr]]:
        """The terms of a sum that is spelled where it is used, and their signs."""
        signs = row_of(node).signs
        if not signs or self.text[id(node)].isidentifier():
            return [(sign, node)]
        return [term for own, arg in zip(signs, node.args, strict=True) for term in self._terms(arg, own * sign)]

    def cast(self, node: Expr) -> str:
        text = self.operand(node.args[0], node.dtype)
        if node.dtype in (torch.float16, torch.bfloat16):  # the cast rounds
            narrow = f"{self.tl}.{str(node.dtype).removeprefix('torch.')}"
            return f"{_atom(text)}.to({narrow}).to({self.tl}.float32)"
        return text

    def operation(self, node: Expr) -> str:
        row = OPS[node.op]
        wanted = operand_dtypes(node)
        operands = [self.operand(a, w) for a, w in zip(node.args, wanted, strict=True)]
        spelling = self.target.spelling(row, kind(wanted[-1]))
        if row.plainer is not None and row.plainer[1](node.dtype, *map(self.range_of, node.args)):
            spelling = self.target.spelled(row.plainer[0])
        if row.chooses and all(a.is_literal for a in node.args[1:]):
            operands[1] = f"{self.tl}.full([], {operands[1]}, {self.target.dtype(node.dtype)})"
        helper = re.match(r"(\w+)\(", spelling)
        if helper:
            self.helpers[helper[1]] = None
        self.libdevice |= "libdevice." in spelling
        return spelling.format(
            *(o if "(" in spelling and f"({{{i}}}" in spelling or f", {{{i}}}" in spelling else _atom(o) for i, o in enumerate(operands))
        )

    def run(self, shape: str, gradients: tuple[Expr, ...], places: tuple[Expr, ...]) -> Snippet:
        root = self.graph.result
        forward = walk(root, self.known)
        known = {id(n) for n in forward}
        backward = [n for g in gradients for n in walk(g) if id(n) not in known and not known.add(id(n))]
        uses = Counter(id(a) for n in (*forward, *backward) if id(n) not in self.known for a in n.args)
        uses.update(id(g) for g in gradients)
        if gradients:
            uses[id(root)] += 1
        self.print_nodes(forward, uses)
        self.node = None
        result = self.operand(root, torch.float32 if self.graph.kind == "score" else root.dtype)
        result = self._full_tile(root, result, shape)
        if not result.isidentifier():
            result = self.statement(_strip(result), root.source)
        statements, self.statements = self.statements, []
        self.print_nodes(backward, uses)
        found = tuple(self._full_tile(g, self.operand(g, torch.float32), shape) for g in gradients)
        where = tuple(self._place(load) for load in places)
        return Snippet(tuple(statements), result, tuple(self.helpers), self.libdevice, lines_of(self.statements), found, where)

    def _place(self, load: Expr) -> tuple[str, str]:
        """The offset of a load and what must hold for it. An index that another load gives need not differ along the axes it is made of, if
        that tensor is expanded; gradients do differ, so the offset gets their shape."""
        offset, checks = self.places[id(load)]
        same = {"q_idx", "kv_idx"} & symbols_in(load) - self._varies_with(load)
        return " + ".join([offset, *(f"{self.names[name]} * 0" for name in sorted(same))]), checks

    def print_all(self, roots: tuple[Expr, ...]) -> None:
        nodes = list({id(n): n for root in roots for n in walk(root)}.values())
        uses = Counter(id(a) for n in nodes for a in n.args)
        uses.update(map(id, roots))
        self.print_nodes(nodes, uses)

    def run_distances(self, roots: tuple[Expr, ...]) -> tuple[str, ...]:
        self.by_distance = True
        self.print_all(roots)
        return tuple(
            self.text[id(root)]
            if "kv_idx" in self._varies_with(root)
            else f"{self.tl}.full(distance.shape, {self.text[id(root)]}, {self.target.dtype(root.dtype)}, distance.type.layout)"
            for root in roots
        )

    def run_sum(self, terms: Sum) -> Snippet:
        self.print_all(terms.parts)
        found = SumText(*("" if part is None else self.operand(part, torch.float32) for part in (terms.key, terms.rate)))
        return Snippet(tuple(self.statements), "", tuple(self.helpers), self.libdevice, sum=found)

    def print_nodes(self, nodes: list[Expr], uses: Counter) -> None:
        for node in nodes:
            self.node = node
            if id(node) in self.known:
                self.text[id(node)], self.varies[id(node)] = self.known[id(node)], frozenset(MASK_SYMBOLS)
                continue
            self.varies[id(node)] = frozenset({node.attr} if node.op == "symbol" else ()).union(*(self.varies[id(a)] for a in node.args))
            if self.by_distance and sign_of_difference(node):
                self.text[id(node)] = "distance" if sign_of_difference(node) > 0 else "-distance"
            elif node.op == "symbol":
                self.text[id(node)] = self.names[node.attr]
            elif node.op == "literal":
                self.text[id(node)] = literal_text(node.attr)
            elif node.op == "scalar":
                self.text[id(node)] = f"arg_{self.graph.scalars[node.attr].name}"
            else:
                text = self.load(node) if node.op == "load" else self.cast(node) if node.op == "cast" else self.operation(node)
                if not text.isidentifier() and (uses[id(node)] > 1 or node.op == "load" or len(text) > _WIDTH):
                    text = self.statement(text, node.source, loads=node.op == "load", dtype=node.dtype)
                self.text[id(node)] = text

    def _full_tile(self, root: Expr, text: str, shape: str) -> str:
        """A result that does not depend on every index is spread over the whole tile; parts of masks stay as they are."""
        if self.graph.kind not in ("score", "mask"):
            return text
        symbols = self._varies_with(root)
        rows = {"q_idx", "h"} if self.target.packed_heads else {"q_idx"}
        if {"score", "grad"} & symbols or "kv_idx" in symbols and rows & symbols:
            return text
        dtype = self.target.dtype(torch.float32 if self.graph.kind == "score" else torch.bool)
        tile = shape.removesuffix(".shape")
        if {"kv_idx", *rows} & symbols:
            return f"tl.broadcast_to({text}, {shape})" if self.tl == "tl" else f"gl.broadcast({text}, {tile})[0]"
        return f"{self.tl}.full({shape}, {text}, {dtype}{'' if self.tl == 'tl' else f', {tile}.type.layout'})"

    def _varies_with(self, root: Expr) -> frozenset[str]:
        """The symbols that a value differs along; an index of stride 0 that needs no check adds none."""
        found: dict[int, frozenset[str]] = {}
        for node in walk(root):
            args = node.args
            if node.op == "load":
                layout, number = self.layouts[node.attr], self.loads.index(node)
                args = [a for i, a in enumerate(args) if layout.strides[i] != "0" or (number, i) not in layout.inside]
            own = {node.attr} if node.op == "symbol" else ()
            found[id(node)] = frozenset(own).union(*(found[id(a)] for a in args))
        return found[id(root)]


def _paren(text: str) -> str:
    return f"({text})"


_ATOM = re.compile(r"-?[\w.]+(\.\w+)?$")


def _atom(text: str) -> str:
    """`text`, in parentheses unless it already binds as one term."""
    if _ATOM.match(text) and not text.startswith("-"):
        return text
    depth = 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if depth == 0 and not (c.isalnum() or c in "._)]"):
            return f"({text})"
    return text


def _strip(text: str) -> str:
    return text[1:-1] if text.startswith("(") and text.endswith(")") and _matches(text) else text


def _matches(text: str) -> bool:
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i == len(text) - 1
    return False


def lower(
    graph: ModGraph,
    names: dict[str, str],
    layouts: tuple[TensorLayout, ...],
    target: Target,
    *,
    prefix: str,
    shape: str,
    gradients: tuple[Expr, ...] = (),
    places: tuple[Expr, ...] = (),
    distances: tuple[Expr, ...] = (),
) -> Snippet:
    """Triton or Gluon statements for a traced mod.

    names      the kernel's names of the symbols: {"score": "score", "b": "b", "q_idx": "m", ...}
    layouts    one per captured tensor of the graph
    prefix     of the temporaries' names
    shape      the tile's shape as the kernel spells it, "[BLOCK_M, BLOCK_N]"; for Gluon that of a tensor with the tile's layout, "qk.shape"
    gradients  expressions of the symbols and of "grad", d loss / d result, to be computed after it is known (see grad.py)
    places     loads whose offsets are asked for
    distances  expressions that get statements of their own, by the distance (see distance.py), without gradients
    """
    printer = _Printer(graph, names, layouts, target, prefix)
    printer.known = {id(part): f"{prefix}_distance_{i}" for i, part in enumerate(distances)}
    snippet = printer.run(shape, gradients, places)
    if not distances:
        return snippet
    other = _Printer(graph, names, layouts, target, "distance")
    values = other.run_distances(distances)
    text = DistanceText(lines_of(other.statements), values, tuple(printer.known.values()))
    return replace(
        snippet, helpers=tuple({**printer.helpers, **other.helpers}), libdevice=printer.libdevice or other.libdevice, distance=text
    )


def lower_sum(
    graph: ModGraph, terms: Sum, names: dict[str, str], layouts: tuple[TensorLayout, ...], target: Target, *, prefix: str
) -> Snippet:
    """Statements for what a score_mod adds, its result as a Sum. q_idx and kv_idx in `names` are vectors."""
    return _Printer(graph, names, layouts, target, prefix).run_sum(terms)
