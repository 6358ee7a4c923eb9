"""Expressions in Python's syntax: spellings with places for operands, and parentheses where operators bind less tightly than these want."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from typing import NamedTuple

from .code import Code, Use, uses_of
from .parsing import parse

# How tightly Python's operators bind. All are grouped from the left, but comparisons are not grouped at all. (// and % bind as * and /
# do; a reader need not know.)
COMPARE, BITOR, XOR, BITAND, SHIFT, SUM, QUOTIENT, PRODUCT, UNARY, ATOM, NAME = range(11)
_LEVELS = {
    ast.BitOr: BITOR,
    ast.BitXor: XOR,
    ast.BitAnd: BITAND,
    **dict.fromkeys((ast.LShift, ast.RShift), SHIFT),
    **dict.fromkeys((ast.Add, ast.Sub), SUM),
    **dict.fromkeys((ast.FloorDiv, ast.Mod), QUOTIENT),
    **dict.fromkeys((ast.Mult, ast.Div), PRODUCT),
}


class Spelling(NamedTuple):
    """A spelling, read: the text between operands; per place between them which operand stands there, and what it may be without
    parentheses; how tightly the whole binds, None for an operand alone; and the names that it mentions."""

    texts: tuple[str, ...]
    places: tuple[tuple[int, frozenset[int]], ...]
    binds: int | None
    uses: tuple[Use, ...]

    def of(self, operands: tuple[Code, ...]) -> Code:
        """The spelling with its operands, in parentheses where these bind less tightly than their place wants."""
        if self.binds is None:
            return operands[self.places[0][0]]
        parts = [self.texts[0]]
        for (number, plain), text in zip(self.places, self.texts[1:], strict=True):
            operand = operands[number]
            parts += [operand.text if operand.binds in plain else f"({operand.text})", text]
        ordered = dict.fromkeys(number for number, _ in self.places)
        return Code("".join(parts), self.binds, tuple(dict.fromkeys((*uses_of(operands[i] for i in ordered), *self.uses))))


@functools.cache
def read_spelling(spelling: str, module: str | None = None) -> Spelling:
    """Read a spelling in Python's syntax, `{0}` `{1}` `{2}` for operands. `module`: what `tl` is called."""
    source = spelling
    for i in range(3):
        source = source.replace(f"{{{i}}}", f"_{i}_")  # as long as it was: columns stay
    tree = parse(source, mode="eval").body
    found, uses = [], {}  # found: where an operand or a module stands, and which
    for parent, node in _with_parents(tree):
        if not isinstance(node, ast.Name):
            continue
        if node.id in ("_0_", "_1_", "_2_"):
            found.append((node.col_offset, node.end_col_offset, int(node.id[1]), _plain(parent, node)))
        elif isinstance(parent, ast.Call) and parent.func is node:
            uses[Use(node.id, "helper")] = None
        else:
            name = module if module and node.id == "tl" else node.id
            uses[Use(name, "module")] = None
            found.append((node.col_offset, node.end_col_offset, name, frozenset()))
    texts, places, text, end = [], [], "", 0
    for start, stop, what, plain in sorted(found, key=lambda f: f[0]):
        text += source[end:start]
        end = stop
        if isinstance(what, str):
            text += what
        else:
            texts.append(text)
            places.append((what, plain))
            text = ""
    return Spelling((*texts, text + source[end:]), tuple(places), _binds(tree), tuple(uses))


def _with_parents(tree: ast.expr) -> Iterable[tuple[ast.AST | None, ast.AST]]:
    yield None, tree
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            yield parent, child


def _binds(node: ast.expr) -> int | None:
    if isinstance(node, ast.Name):  # an operand alone
        return None
    if isinstance(node, ast.BinOp):
        return _LEVELS[type(node.op)]
    return COMPARE if isinstance(node, ast.Compare) else UNARY if isinstance(node, ast.UnaryOp) else ATOM


def _plain(parent: ast.AST | None, node: ast.expr) -> frozenset[int]:
    """What may stand in place of `node` without parentheses. Sums, products and comparisons read as they do at school; whatever else is
    mixed has parentheses, though Python may not need them."""
    least = ATOM
    if isinstance(parent, ast.BinOp):
        level = _LEVELS[type(parent.op)]
        least = QUOTIENT if level == SUM else UNARY
        if parent.left is node and level not in (SHIFT, QUOTIENT):
            return frozenset({level, *range(least, NAME + 1)})
    elif isinstance(parent, ast.Compare):
        least = SUM
    elif isinstance(parent, ast.UnaryOp):
        least = UNARY
    elif (
        parent is None
        or isinstance(parent, (ast.keyword, ast.Tuple, ast.List))
        or (isinstance(parent, ast.Call) and parent.func is not node)
    ):
        least = COMPARE
    return frozenset(range(least, NAME + 1))


def literal_text(value) -> str:
    """A Python literal for a number, infinities and NaN included."""
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return f'float("{value}")'
    return repr(value)
