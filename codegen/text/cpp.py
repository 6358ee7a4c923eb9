"""C++ as a language of kernels: for CPUs, with the vectors of templates/cpu.h, whose lanes are queries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ..mod.table.dtypes import compute_dtype, dtype_name
from ..mod.table.op import Op
from .code import Code, Statement
from .languages import Triton
from .lines import provenance
from .parameters import Parameter
from .spelling import ATOM, NAME, UNARY, read_spelling

_TYPES = {"float32": "float", "float64": "double", "float16": "Float16", "bfloat16": "BFloat16", "float8_e4m3fn": "Float8"}
_TYPES |= {name: f"{name}_t" for name in ("int8", "int16", "int32", "int64", "uint8")} | {"bool": "bool"}


def type_name(dtype: str) -> str:
    """What C++ calls a torch dtype, given by its name."""
    return _TYPES[dtype]


@dataclass(frozen=True)
class Cpp(Triton):
    """C++. Values are numbers, or vectors of LANES queries, and what a template calls n is a number; functions are those of cpu.h."""

    name: str = "cpp"
    module: str = ""
    jit: str = ""
    suffix: str = "cpp"
    has_rows: bool = True

    def literal(self, value) -> Code:
        if isinstance(value, bool):
            return Code(str(value).lower(), NAME)
        if isinstance(value, int):
            text = str(value) if abs(value) < 1 << 31 else f"INT64_C({value})"
            text = {-(1 << 31): "INT32_MIN", -(1 << 63): "INT64_MIN"}.get(value, text)
        else:
            text = {"inf": "INFINITY", "-inf": "-INFINITY", "nan": "NAN"}.get(str(value), f"{value!r}f")
        return Code(text, UNARY if text.startswith("-") else ATOM)

    def write(self, spelling: str, *operands: Code) -> Code:
        code = read_spelling(spelling).of(operands)
        return replace(code, uses=tuple(use for use in code.uses if use.kind != "helper"))  # all functions are in the header

    def plainer(self, row: Op, *values: Code) -> Code:
        return self.write(_spelled(row.cpp, "plainer") or row.plainer[0], *values)

    def operation(self, row: Op, operands: str, backend: str, precision: str, *values: Code) -> Code:
        return self.write(_spelled(row.cpp, operands) or _spelled(row.triton, operands), *values)

    def cast(self, value: Code, dtype: torch.dtype) -> Code:
        return self.write(f"to_{compute_dtype(dtype)}({{0}})", value)

    def rounded(self, value: Code, dtype: torch.dtype) -> Code:
        return self.write(f"to_{dtype_name(dtype)}({{0}})", value)

    def number(self, value: Code, dtype: torch.dtype) -> Code:
        return self.cast(value, dtype)

    def where(self, condition: Code, yes: Code, no: Code) -> Code:
        return self.write("where({0}, {1}, {2})", condition, yes, no)

    def load(self, pointer: Code, inside: Code | None) -> Code:
        return self.write("load({0}, {1})", pointer, inside) if inside else self.write("load({0})", pointer)

    def row_at(self, pointer: Code, step: Code, inside: Code | None, length: int) -> Code:
        more = (inside,) if inside else ()
        return self.write(f"read_row<{length}>({{0}}, {{1}}{', {2}' if inside else ''})", pointer, step, *more)

    def dot(self, one: Code, other: Code, length: int) -> Code:
        return self.write(f"dot<{length}>({{0}}, {{1}})", one, other)

    def zeros_like(self, value: Code) -> Code:
        return self.write("zeros_like({0})", value)

    def full(self, value: Code, dtype: torch.dtype, tile: str) -> Code:
        return value  # wherever a template takes a vector it takes a number

    def broadcast(self, value: Code, tile: str) -> Code:
        return value

    def lines(self, statements: Iterable[Statement]) -> tuple[str, ...]:
        lines, last = [], None
        for s in statements:
            if s.source is not None and s.source != last:
                lines.append(comment(provenance(s.source)))
                last = s.source
            lines.append(f"const auto {s.name} = {s.value};")
        return tuple(lines)

    def signature(self, parameters: tuple[Parameter, ...], mods: Iterable, written: tuple[str, ...]) -> str:
        return fields(parameters, mods, written)

    def element(self, dtype: str) -> str:
        return _TYPES.get(dtype, "")

    def without_comments(self, source: str) -> str:
        return without_comments(source)

    def runs_on(self, source: str) -> bool:
        return any(map(_goes_on, source.split("\n")))

    def check_syntax(self, source: str, template: str) -> None:
        """The compiler does."""


def _spelled(column: str | dict[str, str], operands: str) -> str | None:
    return column if isinstance(column, str) else column.get(operands)


CPP = Cpp()


def comment(text: str) -> str:
    """A line of a comment. One that ended with a backslash, or a trigraph of it, would go on in the next line."""
    return f"// {text}|" if _goes_on(text) else f"// {text}"


def _goes_on(line: str) -> bool:
    return line.endswith(("\\", "??/"))


def without_comments(source: str) -> str:
    """The text without comments and blank lines. Kernels have comments to the end of a line alone, and no // in a literal."""
    lines = (line.partition("//")[0].rstrip() for line in source.split("\n"))
    return "\n".join(line for line in lines if line)


def fields(parameters: tuple[Parameter, ...], mods: Iterable, written: tuple[str, ...]) -> str:
    """The parameters as members of a struct, which a launch fills in this order (see device/cpp.py).

    written   names of the tensors that the kernel writes
    """
    captured = captured_numbers(mods)
    lines, numbers = [], []
    for p in parameters:
        kind = c_type(p, captured)
        if p.meaning or p.is_captured or kind.endswith("*"):
            lines += _joined(numbers)
            const = "" if p.name in written or not kind.endswith("*") else "const "
            meaning = p.meaning or (f"captured by {p.of} {p_name(p, mods)}" if p.is_captured else "")
            lines.append(f"{const}{kind} {p.name};" + (f"  {comment(meaning)}" if meaning else ""))
        else:
            if numbers and numbers[0][0] != kind:
                lines += _joined(numbers)
            numbers.append((kind, p.name))
    return "\n".join([*lines, *_joined(numbers)])


def captured_numbers(mods: Iterable) -> set[str]:
    """The names of parameters that are captured tensors and numbers, not their sizes and strides."""
    return {p.name for m in mods if m for p, (what, *_) in zip(m.parameters, m.recipe, strict=True) if what == "value"}


def p_name(p: Parameter, mods: Iterable) -> str:
    """The user's name of the mod that captures a parameter."""
    return next(m.name for m in mods if m and p in m.parameters)


def c_type(p: Parameter, captured: set[str]) -> str:
    """What a member of the struct is. Numbers that a mod captures are int32, as mods compute with them."""
    if p.type.startswith("*"):
        return "Byte*" if p.type == "*bool" and p.name in captured else f"{type_name(p.type[1:])}*"
    return "float" if p.type == "float" else "int32_t" if p.name in captured else "int64_t"


def _joined(numbers: list[tuple[str, str]], width: int = 110) -> list[str]:
    """Declarations of numbers of one type; empties the list."""
    lines, line = [], ""
    for kind, name in numbers:
        if line and len(line) + len(name) < width:
            line += f", {name}"
        else:
            lines += [f"{line};"] if line else []
            line = f"{kind} {name}"
    numbers.clear()
    return [*lines, *([f"{line};"] if line else [])]
