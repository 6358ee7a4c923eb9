"""Printed expressions mean what was traced, with no more parentheses than a reader wants; what they take from around them is reported."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path

import pytest

from flexpress.codegen.mod.table.ops import OPS
from flexpress.codegen.text.code import Use, arguments, named
from flexpress.codegen.text.language import Language
from flexpress.codegen.text.languages import GLUON, TRITON
from flexpress.codegen.text.spelling import literal_text, read_spelling

SYMBOLS = ("+", "-", "*", "&", "==", "!=", "<", "<=", ">", ">=")
PLAIN = [s for row in OPS.values() if row.expand is None for s in ([row.triton] if isinstance(row.triton, str) else row.triton.values())]
SHORTER = [row.plainer[0] for row in OPS.values() if row.plainer]
OTHERS = ["-{0}", "{0} ^ {1}", "{0} | {1}", "{0} << {1}", "{0} >> {1}", "{0} // {1}", "{0} / {1}", "tl.load({0}, mask={1}, other=0)"]
ARITY = {s: 1 + max(int(i) for i in re.findall(r"{(\d)}", s)) for s in (*PLAIN, *SHORTER, *OTHERS)}


class Grown:
    """An expression twice: as a language prints it, and with all the parentheses there can be."""

    def __init__(self, rng: random.Random, language, depth: int) -> None:
        if depth == 0 or rng.random() < 0.1:
            value = rng.choice(("x", "y", "score_0", -1, 2, -0.5, 1e-9, True, float("inf"), float("-inf")))
            self.code = language.symbol(value) if isinstance(value, str) else language.literal(value)
            self.full = f"({value if isinstance(value, str) else literal_text(value)})"
            return
        kind = rng.random()
        spelling = rng.choice(list(ARITY)) if kind < 0.6 else f"{{0}} {rng.choice(SYMBOLS)} {{1}}"
        parts = [Grown(rng, language, depth - 1) for _ in range(ARITY.get(spelling, 2))]
        self.code = language.write(spelling, *(p.code for p in parts))
        spelling = re.sub(r"\btl\b", language.module, spelling)
        self.full = f"({spelling.format(*(p.full for p in parts))})"
        if kind > 0.95:
            self.code, self.full = language.write("{0}.to(tl.int32)", self.code), f"({self.full}).to({language.module}.int32)"


@pytest.mark.parametrize("language", [TRITON, GLUON], ids=lambda language: language.name)
def test_brackets_are_right(language):
    """Python reads a print as it reads the same expression with every operation in parentheses."""
    rng = random.Random(0)
    for _ in range(3000):
        grown = Grown(rng, language, rng.randint(1, 5))
        assert ast.dump(ast.parse(grown.code.text)) == ast.dump(ast.parse(grown.full)), grown.code


@pytest.mark.parametrize("language", [TRITON, GLUON], ids=lambda language: language.name)
def test_names_are_reported(language):
    """What is reported of an expression is what Python finds in it."""
    rng = random.Random(1)
    for _ in range(1000):
        code = Grown(rng, language, 4).code
        names = {node.id for node in ast.walk(ast.parse(code.text)) if isinstance(node, ast.Name)} - {"float"}
        assert {use.name for use in code.uses} == names and len(set(code.uses)) == len(code.uses)
        assert set(named(code.uses, "module")) <= {language.module, "libdevice"}
        assert all(use.kind in ("local", "helper", "module") for use in code.uses)


@pytest.mark.parametrize(
    "spelling, operands, expected",
    [
        ("{0} & {1}", ("{0} & {1}", "{0} >= {1}"), "x & y & (x >= y)"),
        ("{0} & {1}", ("{0} == {1}", "{0} == {1}"), "(x == y) & (x == y)"),
        ("{0} | {1}", ("{0} & {1}", "{0} | {1}"), "(x & y) | (x | y)"),
        ("{0} < {1}", ("{0} - {1}", "{0} & {1}"), "x - y < (x & y)"),
        ("{0} + {1}", ("{0} * {1}", "{0} + {1}"), "x * y + (x + y)"),
        ("{0} * {1}", ("{0} * {1}", "{0} / {1}"), "x * y * (x / y)"),
        ("{0} * {1}", ("{0} // {1}", "-{0}"), "(x // y) * -x"),
        ("{0} - {1}", ("{0} - {1}", "{0} - {1}"), "x - y - (x - y)"),
        ("-{0}", ("{0} * {1}",), "-(x * y)"),
        ("tl.where({0}, {1}, 0.0)", ("{0} > {1}", "{0} + {1}"), "tl.where(x > y, x + y, 0.0)"),
        ("{0}.to(tl.int64)", ("{0} - {1}",), "(x - y).to(tl.int64)"),
    ],
)
def test_brackets_are_few(spelling, operands, expected):
    x, y = TRITON.symbol("x"), TRITON.symbol("y")
    assert TRITON.write(spelling, *(TRITON.write(s, x, y) for s in operands)).text == expected


def test_an_operand_alone_stays_what_it_is():
    sum_of_two = TRITON.operate(TRITON.symbol("x"), "+", TRITON.symbol("y"))
    assert TRITON.write("{0}", sum_of_two) is sum_of_two


def test_a_template_may_go_on():
    """What a template puts beside + or & cannot fall apart."""
    x, y = TRITON.symbol("x"), TRITON.symbol("y")
    less, both, difference = (TRITON.operate(x, symbol, y) for symbol in ("<", "&", "-"))
    assert [TRITON.beside("&", code).text for code in (x, less, both)] == ["x", "(x < y)", "x & y"]
    assert [TRITON.beside("+", code).text for code in (x, both, difference)] == ["x", "(x & y)", "x - y"]


def test_gluon_reads_spellings_of_triton():
    x = GLUON.symbol("x")
    assert GLUON.write("tl.abs({0})", x).text == "gl.abs(x)"
    assert GLUON.write("libdevice.trunc(tl.div_rn({0}, {0}))", x).text == "libdevice.trunc(gl.div_rn(x, x))"
    least = GLUON.operation(OPS["minimum"], "float", "cuda", "float32", x, x)
    assert least.text == "gl.minimum(x, x, propagate_nan=tl.PropagateNan.ALL)" and named(least.uses, "module") == ("gl", "tl")
    assert read_spelling("floor_div_int({0}, {1})").uses == (Use("floor_div_int", "helper"),)


def test_arguments_come_tensor_by_tensor():
    """Each tensor's pointer first, then strides and sizes, dimension by dimension."""
    found = arguments(
        [Use("arg_c", "value", 2), Use("size_b_0", "size", 1), Use("stride_a_1", "vectors", 0, 1), Use("x"), Use("ptr_b", "value", 1)]
        + [Use("size_a_1", "size", 0, 1), Use("stride_a_0", "stride", 0, 0), Use("ptr_a", "value", 0), Use("tl", "module")]
    )
    assert [use.name for use in found] == ["ptr_a", "stride_a_0", "stride_a_1", "size_a_1", "ptr_b", "size_b_0", "arg_c"]


def test_a_language_offers_what_it_is_asked_for():
    """`Language` has every member that the workshop uses, and none that nobody does."""
    asked, codegen = set(), Path(__file__).parent.parent / "codegen"
    for path in (*(codegen / "text").glob("*.py"), *(codegen / "plan").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ("language", "TRITON", "GLUON"):
                asked.add(node.attr)
    assert asked == {name for name in (*vars(Language), *Language.__annotations__) if not name.startswith("_")}
