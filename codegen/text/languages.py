"""The languages that kernels are printed in. Each says how it loads, chooses, converts and fills, and how tightly its operators bind.

Lowering asks a language for `Code` and knows no spelling of its own. The op table has a spelling per operation; a language reads it.
A new language is a class with the methods of `Triton`, its own levels, and a file of helpers.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..mod.dtypes import compute_dtype, dtype_name
from ..mod.ops import Op
from .code import Code, Statement, Use, uses_of
from .lines import provenance

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
    tree = ast.parse(source, mode="eval").body
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


@dataclass(frozen=True)
class Triton:
    """Triton: also what Gluon shares with it."""

    name: str = "triton"
    module: str = "tl"  # what kernels call the language
    jit: str = "triton.jit"

    # ---- expressions

    def symbol(self, name: str) -> Code:
        """A symbol, a temporary, or anything else that the kernel has under a name."""
        return Code(name, NAME, (Use(name),))

    def argument(self, name: str, kind: str, index: int, dim: int = 0) -> Code:
        """A kernel argument, and how to find it at launch (see `Use`)."""
        return Code(name, NAME, (Use(name, kind, index, dim),))

    def literal(self, value) -> Code:
        text = literal_text(value)
        return Code(text, UNARY if text.startswith("-") else NAME if isinstance(value, bool) else ATOM)

    def write(self, spelling: str, *operands: Code) -> Code:
        """A spelling of Triton's with its operands."""
        return read_spelling(spelling, self.module).of(operands)

    def operate(self, left: Code, symbol: str, right: Code) -> Code:
        """An operator between two expressions: + - * & == != < <= > >= mean the same in every language."""
        return self.write(f"{{0}} {symbol} {{1}}", left, right)

    def beside(self, symbol: str, value: Code) -> Code:
        """An expression as a template may put it on either side of an operator that is associative: + or &."""
        return value if value.binds in read_spelling(f"{{0}} {symbol} 0").places[0][1] else Code(f"({value})", ATOM, value.uses)

    def negative(self, value: Code) -> Code:
        return self.write("-{0}", value)

    def plainer(self, row: Op, *values: Code) -> Code:
        """An operation of the op table where its shorter spelling means the same."""
        return self.write(row.plainer[0], *values)

    def operation(self, row: Op, operands: str, backend: str, precision: str, *values: Code) -> Code:
        """An operation of the op table on a kind of operands, for a target (see `Op.approximate`)."""
        approximate = row.approximate.get((backend, precision))
        return self.write(approximate or (row.triton if isinstance(row.triton, str) else row.triton[operands]), *values)

    def cast(self, value: Code, dtype: torch.dtype) -> Code:
        """A value in what a torch dtype is computed in."""
        return self.write(f"{{0}}.to(tl.{compute_dtype(dtype)})", value)

    def rounded(self, value: Code, dtype: torch.dtype) -> Code:
        """A float32 value rounded to a narrower dtype."""
        return self.write(f"{{0}}.to(tl.{dtype_name(dtype)}).to(tl.float32)", value)

    def where(self, condition: Code, yes: Code, no: Code) -> Code:
        return self.write("tl.where({0}, {1}, {2})", condition, yes, no)

    def load(self, pointer: Code, inside: Code | None) -> Code:
        """An element of memory; where not `inside`, 0."""
        return self.write("tl.load({0}, mask={1}, other=0)", pointer, inside) if inside else self.write("tl.load({0})", pointer)

    def load_directly(self, pointer: Code, inside: Code | None, bits: int) -> Code:
        """The same past Triton's pipelines and layouts (see _helpers.jinja)."""
        if inside:
            return self.write(f"read_{bits}_bits_if({{0}}, {{1}})", inside, pointer)
        return self.write(f"read_{bits}_bits({{0}})", pointer)

    def float_difference(self, left: Code, right: Code) -> Code:
        """float(left - right) of two indices."""
        return self.write("float_difference({0}, {1})", left, right)

    def number(self, value: Code, dtype: torch.dtype) -> Code:
        """A literal as a value of a dtype, which a choice between two literals takes its own from."""
        return self.write(f"tl.full([], {{0}}, tl.{compute_dtype(dtype)})", value)

    def zeros_like(self, value: Code) -> Code:
        return self.write("tl.zeros_like({0})", value)

    # ---- tiles. A tile is given by the name of a tensor of its shape (and layout), or as a list of sizes

    def full(self, value: Code, dtype: torch.dtype, tile: str) -> Code:
        """A tile of one value."""
        return self.write(f"tl.full({{1}}, {{0}}, tl.{compute_dtype(dtype)})", value, self._shape(tile))

    def broadcast(self, value: Code, tile: str) -> Code:
        """A column or a row spread over a tile."""
        return self.write("tl.broadcast_to({0}, {1})", value, self._shape(tile))

    def _shape(self, tile: str) -> Code:
        return self.write("{0}.shape", self.symbol(tile)) if tile.isidentifier() else Code(tile, ATOM)

    # ---- lines

    def comment(self, text: str) -> str:
        return f"# {text}"

    def lines(self, statements: Iterable[Statement]) -> tuple[str, ...]:
        """Statements as they stand in a kernel, below the user's lines that they come from."""
        lines, last = [], None
        for s in statements:
            if s.source is not None and s.source != last:
                lines.append(self.comment(provenance(s.source)))
                last = s.source
            lines.append(f"{s.name} = {s.value}")
        return tuple(lines)


@dataclass(frozen=True)
class Gluon(Triton):
    """Gluon: Triton with layouts, and with spellings of its own for what it lacks."""

    name: str = "gluon"
    module: str = "gl"
    jit: str = "gluon.jit"

    def operation(self, row: Op, operands: str, backend: str, precision: str, *values: Code) -> Code:
        if (backend, precision) not in row.approximate and operands in row.gluon:
            return read_spelling(row.gluon[operands]).of(values)
        return super().operation(row, operands, backend, precision, *values)

    def full(self, value: Code, dtype: torch.dtype, tile: str) -> Code:
        return self.write(f"tl.full({{1}}.shape, {{0}}, tl.{compute_dtype(dtype)}, {{1}}.type.layout)", value, self.symbol(tile))

    def broadcast(self, value: Code, tile: str) -> Code:
        return self.write("tl.broadcast({0}, {1})[0]", value, self.symbol(tile))


TRITON, GLUON = Triton(), Gluon()
LANGUAGES = {language.name: language for language in (TRITON, GLUON)}


def literal_text(value) -> str:
    """A Python literal for a number, infinities and NaN included."""
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return f'float("{value}")'
    return repr(value)
