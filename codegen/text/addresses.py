"""Loads of captured tensors: addresses, and what must hold for them to lie inside."""

from __future__ import annotations

import functools

import torch

from ..mod.expr import Expr, ModGraph, symbols_in, walk
from ..mod.graphs.distance import sign_of_difference, sign_of_distance
from ..mod.graphs.loads import POSITIONS, loads_of
from ..mod.table.ops import row_of
from .code import Code
from .expressions import Expressions
from .language import Language
from .layouts import TensorLayout

Terms = list[tuple[int, Code]]  # of a sum, with their signs


def both(language: Language, *conditions: Code | None) -> Code | None:
    """Some conditions at once, of which None is always met."""
    found = [c for c in conditions if c is not None]
    return functools.reduce(lambda a, b: language.operate(a, "&", b), found) if found else None


class Addresses:
    """The loads of a mod whose indices are printed."""

    def __init__(
        self, graph: ModGraph, names: dict[str, str], layouts: tuple[TensorLayout, ...], axes: frozenset[str], expressions: Expressions
    ) -> None:
        self.graph, self.names, self.layouts, self.axes = graph, names, layouts, axes
        self.expressions, self.language, self.target = expressions, expressions.language, expressions.target
        self.loads = loads_of(graph)
        self.places: dict[int, tuple[Terms, Code | None]] = {}  # per load: its offset and what must hold for it

    def load(self, node: Expr) -> Code:
        """An element of a captured tensor; 0 where its indices do not lie inside."""
        capture = self.graph.tensors[node.attr]
        offset, inside = self.located(node)
        pointer = self.added(offset, self.pointer(node))
        bits = 8 * capture.dtype.itemsize
        if self.target.read_directly and bits <= 32 and any(symbols_in(index) >= POSITIONS for index in node.args):
            loaded = self.language.load_directly(pointer, inside, bits)
        else:
            loaded = self.language.load(pointer, inside)
        narrow = node.dtype.is_floating_point and node.dtype != torch.float32
        return self.language.cast(loaded, torch.float32) if narrow else loaded

    def located(self, node: Expr) -> tuple[Terms, Code | None]:
        """The offset of what is read, and what must hold for its indices."""
        offset, checks = [], []
        for dim, index in enumerate(node.args):
            code = self.expressions.codes[id(index)]
            if index.dtype.itemsize < 4:  # what it is multiplied with, and compared to, is no number of its dtype
                code = self.language.cast(code, torch.int32)
            if not self._is_inside(node, dim):
                code = self._checked(node, dim, code, checks)
            offset += self._offset(node, dim, code)
        self.places[id(node)] = found = offset, both(self.language, *checks)
        return found

    def pointer(self, load: Expr) -> Code:
        """Where the tensor of a load begins."""
        return self.language.argument(f"ptr_{self.graph.tensors[load.attr].name}", "value", load.attr)

    def _is_inside(self, load: Expr, dim: int) -> bool:
        return (self.loads.index(load), dim) in self.layouts[load.attr].inside

    def _checked(self, load: Expr, dim: int, code: Code, checks: list[Code]) -> Code:
        """An index that counts from the beginning; adds to `checks` what must hold for it."""
        index, language = load.args[dim], self.language
        size = language.argument(f"size_{self.graph.tensors[load.attr].name}_{dim}", "size", load.attr, dim)
        low, dtype = self.expressions.range_of(index)[0], index.dtype
        if low < 0 and self.layouts[load.attr].wide and not index.is_literal:  # its size may be more than an index's dtype holds
            code, dtype = language.cast(code, torch.int64), torch.int64
        if low < 0 or not index.is_literal:
            code = self.expressions.statement(code, load.source, dtype=dtype)
        if low < 0:  # negative indices count from the end, as in torch
            zero = language.literal(0)
            from_end = language.where(language.operate(code, "<", zero), language.operate(code, "+", size), code)
            code = self.expressions.statement(from_end, load.source, dtype=dtype)
            checks.append(language.operate(code, ">=", zero))
        checks.append(language.operate(code, "<", size))
        return code

    def _offset(self, load: Expr, dim: int, code: Code) -> Terms:
        """What an index adds to the address."""
        language, layout, index = self.language, self.layouts[load.attr], load.args[dim]
        stride, inside = layout.strides[dim], self._is_inside(load, dim)
        if stride == "0":  # what is checked must have the shape of the check
            return [] if inside or self.expressions.varies[id(index)] <= {"b", "h"} - self.axes else [(1, language.zeros_like(code))]
        near = self._near(index) if sign_of_distance(index) and code == self.expressions.codes[id(index)] else None
        if near:  # the compiler makes constants of the addresses' differences only where it need not mind an overflow
            sign = "+" if sign_of_distance(index) > 0 else "-"
            code = language.operate(language.cast(near, torch.int64), sign, language.symbol("far"))
        elif stride == "1" and inside and symbols_in(index) >= POSITIONS and index.dtype.itemsize >= 4:  # no term of uint8 is negative
            return self._sorted_terms(index)
        elif layout.wide and not index.is_literal:
            code = language.cast(code, torch.int64)
        return [(1, self.stepped(load, dim, code))]

    def stepped(self, load: Expr, dim: int, code: Code) -> Code:
        """An index times the stride of its dimension."""
        language, stride, capture = self.language, self.layouts[load.attr].strides[dim], self.graph.tensors[load.attr]
        if stride == "1":
            return code
        step = language.argument(f"stride_{capture.name}_{dim}", "vectors" if stride == "v" else "stride", load.attr, dim)
        if stride == "v":
            step = language.cast(step, torch.int64) if self.layouts[load.attr].wide else step
            step = language.operate(step, "*", language.literal(16 // capture.dtype.itemsize))
        return language.operate(code, "*", step)

    def _near(self, node: Expr) -> Code | None:
        """A distance and what is added to it, of `near` instead of `distance`; None if it is called by another name."""
        if sign_of_difference(node):
            return self.expressions.difference(node, "near") if self.expressions.by_distance else None
        if self.language.is_name(self.expressions.codes[id(node)]):
            return None
        near = {id(a): code for a in node.args if (code := self._near(a) if sign_of_distance(a) else None)}
        codes = self.expressions.codes
        self.expressions.codes = codes | near
        found = self.expressions.operation(node) if near else None
        self.expressions.codes = codes
        return found

    def _sorted_terms(self, index: Expr) -> Terms:
        """The terms of an index, to be added to a pointer one after another, positions last.

        As the sum of 32-bit numbers it would be, the compiler had to mind an overflow and compute every element's address: this way what
        differs from one element of a thread to the next is a constant.
        """
        terms = sorted(self._terms(index, 1), key=lambda t: (bool(POSITIONS & symbols_in(t[1])), t[0] < 0))
        return [(sign, self.expressions.operand(term, index.dtype)) for sign, term in terms]

    def _terms(self, node: Expr, sign: int) -> list[tuple[int, Expr]]:
        """The terms of a sum that is spelled where it is used, and their signs."""
        signs = row_of(node).signs
        if not signs or self.language.is_name(self.expressions.codes[id(node)]):
            return [(sign, node)]
        return [term for own, arg in zip(signs, node.args, strict=True) for term in self._terms(arg, own * sign)]

    def added(self, terms: Terms, first: Code | None = None) -> Code:
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
        return self.added(offset + self.spread(load)), checks

    def spread(self, load: Expr) -> Terms:
        """Zeros of the shapes of positions that a load's indices depend on and do not differ along."""
        same = POSITIONS & symbols_in(load) - self.differs_along(load)
        return [(1, self.language.zeros_like(self.language.symbol(self.names[name]))) for name in sorted(same)]

    def differs_along(self, root: Expr) -> frozenset[str]:
        """The symbols that a value differs along; an index of stride 0 that needs no check adds none."""
        found: dict[int, frozenset[str]] = {}
        for node in walk(root):
            args = node.args
            if node.op in ("load", "row"):
                strides = self.layouts[node.attr].strides
                args = [a for i, a in enumerate(args) if strides[i] != "0" or not self._is_inside(node, i)]
            own = {node.attr} if node.op == "symbol" else ()
            found[id(node)] = frozenset(own).union(*(found[id(a)] for a in args))
        return found[id(root)]
