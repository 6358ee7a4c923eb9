"""The languages that kernels for GPUs are printed in: Triton and Gluon. The op table has spellings for Triton, and for Gluon where those
differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..mod.errors import RenderError
from ..mod.table.dtypes import compute_dtype, dtype_name
from ..mod.table.op import Op
from .code import Code, Statement, Use
from .language import EXACT, Language
from .lines import one_line, provenance
from .parameters import Parameter, signature
from .parsing import without_comments
from .spelling import ATOM, NAME, UNARY, literal_text, read_spelling


@dataclass(frozen=True)
class Triton(Language):
    """Triton: also what Gluon shares with it."""

    name: str = "triton"
    module: str = "tl"
    jit: str = "triton.jit"
    suffix: str = "py"

    def symbol(self, name: str) -> Code:
        return Code(name, NAME, (Use(name),))

    def argument(self, name: str, kind: str, index: int, dim: int = 0) -> Code:
        return Code(name, NAME, (Use(name, kind, index, dim),))

    def literal(self, value) -> Code:
        text = literal_text(value)
        return Code(text, UNARY if text.startswith("-") else NAME if isinstance(value, bool) else ATOM)

    def is_name(self, code: Code) -> bool:
        return code.binds == NAME

    def write(self, spelling: str, *operands: Code) -> Code:
        """A spelling of Triton's with its operands."""
        return read_spelling(spelling, self.module).of(operands)

    def operate(self, left: Code, symbol: str, right: Code) -> Code:
        return self.write(f"{{0}} {symbol} {{1}}", left, right)

    def beside(self, symbol: str, value: Code) -> Code:
        return value if value.binds in read_spelling(f"{{0}} {symbol} 0").places[0][1] else Code(f"({value})", ATOM, value.uses)

    def negative(self, value: Code) -> Code:
        return self.write("-{0}", value)

    def plainer(self, row: Op, *values: Code) -> Code:
        return self.write(row.plainer[0], *values)

    def operation(self, row: Op, operands: str, backend: str, precision: str, *values: Code) -> Code:
        if precision == EXACT and row.rounded:
            return self.write(row.rounded, *values)
        approximate = row.approximate.get((backend, precision))
        return self.write(approximate or (row.triton if isinstance(row.triton, str) else row.triton[operands]), *values)

    def cast(self, value: Code, dtype: torch.dtype) -> Code:
        return self.write(f"{{0}}.to(tl.{compute_dtype(dtype)})", value)

    def rounded(self, value: Code, dtype: torch.dtype) -> Code:
        return self.write(f"{{0}}.to(tl.{dtype_name(dtype)}).to(tl.float32)", value)

    def where(self, condition: Code, yes: Code, no: Code) -> Code:
        return self.write("tl.where({0}, {1}, {2})", condition, yes, no)

    def load(self, pointer: Code, inside: Code | None) -> Code:
        return self.write("tl.load({0}, mask={1}, other=0)", pointer, inside) if inside else self.write("tl.load({0})", pointer)

    def load_directly(self, pointer: Code, inside: Code | None, bits: int) -> Code:
        if inside:
            return self.write(f"read_{bits}_bits_if({{0}}, {{1}})", inside, pointer)
        return self.write(f"read_{bits}_bits({{0}})", pointer)

    def float_difference(self, left: Code, right: Code) -> Code:
        return self.write("float_difference({0}, {1})", left, right)

    def number(self, value: Code, dtype: torch.dtype) -> Code:
        return self.write(f"tl.full([], {{0}}, tl.{compute_dtype(dtype)})", value)

    def column(self, vector: Code) -> Code:
        return self.write("{0}[:, None]", vector)

    def row(self, vector: Code) -> Code:
        return self.write("{0}[None, :]", vector)

    def zeros_like(self, value: Code) -> Code:
        return self.write("tl.zeros_like({0})", value)

    def full(self, value: Code, dtype: torch.dtype, tile: str) -> Code:
        return self.write(f"tl.full({{1}}, {{0}}, tl.{compute_dtype(dtype)})", value, self._shape(tile))

    def broadcast(self, value: Code, tile: str) -> Code:
        return self.write("tl.broadcast_to({0}, {1})", value, self._shape(tile))

    def numbers(self, count: int) -> Code:
        return self.write("tl.arange(0, {0})", self.literal(count))

    def transposed(self, tile: Code) -> Code:
        return self.write("tl.trans({0})", tile)

    def product(self, left: Code, right: Code, precision: str) -> Code:
        return self.write("tl.dot({0}, {1}%s)" % (f', input_precision="{precision}"' if precision else ""), left, right)

    def _shape(self, tile: str) -> Code:
        return self.write("{0}.shape", self.symbol(tile)) if tile.isidentifier() else Code(tile, ATOM)

    def lines(self, statements: Iterable[Statement]) -> tuple[str, ...]:
        lines, last = [], None
        for s in statements:
            if s.source is not None and s.source != last:
                lines.append(f"# {provenance(s.source)}")
                last = s.source
            lines.append(f"{s.name} = {s.value}")
        return tuple(lines)

    def signature(self, parameters: tuple[Parameter, ...], mods: Iterable, written: tuple[str, ...]) -> str:
        names = {"score_mod" if m.kind == "score" else "mask_mod": m.name for m in mods if m}
        return signature(parameters, names, self.module)

    def element(self, dtype: str) -> str:
        return ""

    def without_comments(self, source: str) -> str:
        return without_comments(source)

    def runs_on(self, source: str) -> bool:
        return False

    def check_syntax(self, source: str, template: str) -> None:
        try:
            compile(source, template, "exec", dont_inherit=True)  # no tree, which takes twice as long
        except (SyntaxError, ValueError) as error:
            line = source.split("\n")[(getattr(error, "lineno", None) or 1) - 1]
            raise RenderError(
                f"templates/{template}.py.jinja printed a line that is not Python ({error}):\n    {one_line(line.strip())}"
            ) from error


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
