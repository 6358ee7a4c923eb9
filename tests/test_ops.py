"""The op table against torch: every row, every spelling, random compositions of rows; casts, literals and indexing.

Each property runs on the CPU in Triton's interpreter, and with `-m gpu` compiled, at more positions.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator

import pytest
import torch
from evaluate import DEVICES, DTYPES, FLOATS, INTEGERS, SHAPES, check, make_mod, torch_dtype, traced_dtype, values
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import ModError
from flexpress.codegen.evaluate import evaluate_mod
from flexpress.codegen.ops import OPS
from flexpress.codegen.signature import bind

# How each row is written. A row that is missing here fails test_every_row_has_a_test.
FORMS = {
    **{name: (f"{{0}} {symbol} {{1}}",) for name, symbol in {
        "add": "+", "sub": "-", "mul": "*", "div": "/", "floor_divide": "//", "remainder": "%", "pow": "**", "eq": "==",
        "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "&", "or_": "|", "xor": "^", "lshift": "<<",
        "rshift": ">>"}.items()},
    "neg": ("-{0}",), "abs": ("abs({0})",), "invert": ("~{0}",),
    **{name: (f"torch.{name}({{0}})",) for name in (
        "sign", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "atan", "erf",
        "sigmoid", "tanh", "floor", "ceil", "trunc", "round", "logical_not", "square", "reciprocal", "isnan", "isinf",
        "isposinf", "isneginf", "isfinite", "relu")},
    **{name: (f"torch.{name}({{0}}, {{1}})",) for name in (
        "fmod", "minimum", "maximum", "atan2", "logical_and", "logical_or", "logical_xor", "clamp_min", "clamp_max")},
    "where": ("torch.where({0}, {1}, {2})",),
    "where_method": ("{0}.where({1}, {2})",),
    "add_alpha": ("torch.add({0}, {1})", "torch.add({0}, {1}, alpha=3)"),
    "sub_alpha": ("torch.sub({0}, {1})", "torch.sub({0}, {1}, alpha=3)"),
    "rsub": ("torch.rsub({0}, {1})",),
    "div_mode": ("torch.div({0}, {1})", 'torch.div({0}, {1}, rounding_mode="floor")'),
    "div_trunc": ('torch.div({0}, {1}, rounding_mode="trunc")',),
    "clamp": ("torch.clamp({0}, {1}, {2})", "torch.clamp({0}, min={1})", "{0}.clamp(max={1})"),
    "gelu": ("F.gelu({0})", 'F.gelu({0}, approximate="tanh")'),
    "silu": ("F.silu({0})",),
    "softplus": ("F.softplus({0})", "F.softplus({0}, 2, 5)"),
    "logsigmoid": ("F.logsigmoid({0})",),
}
ALL_FORMS = [(name, form) for name, forms in FORMS.items() for form in forms]
# Floating-point results that are exact, not rounded
EXACT = {"neg", "abs", "sign", "fmod", "remainder", "floor_divide", "minimum", "maximum", "floor", "ceil", "trunc", "round",
         "where", "where_method", "clamp", "clamp_min", "clamp_max", "relu"}
DIVISIONS = ("floor_divide", "remainder", "fmod", "div_trunc", "div_mode")
NUMBERS = (bool, int, float)


def test_every_row_has_a_test():
    assert set(FORMS) == set(OPS)


def arity(form: str) -> int:
    """How many operands a form takes."""
    return sum(f"{{{i}}}" in form for i in range(3))


@functools.cache
def legal_operands(form: str) -> list[tuple]:
    """The kinds of operands that torch accepts: dtypes for tensors, bool, int or float for Python numbers."""
    found = []
    for kinds in itertools.product((*DTYPES, *NUMBERS), repeat=arity(form)):
        if all(isinstance(k, type) for k in kinds):
            continue
        operands = {f"x{i}": k(1) if isinstance(k, type) else torch.ones((), dtype=k) for i, k in enumerate(kinds)}
        try:
            eval(form.format(*operands), {"torch": torch, "F": torch.nn.functional, **operands})
        except (TypeError, RuntimeError):
            continue
        found.append(kinds)
    return found


NUMBER_VALUES = {bool: (True, False), int: (0, 1, 2, 3, 5, 31), float: (0.0, 0.5, -1.5, 2.0, 100.0)}


@st.composite
def applications(draw, name: str, form: str):
    """One form with operands of kinds that torch accepts: (expression, what it captures)."""
    kinds = draw(st.sampled_from(legal_operands(form)))
    tensors = [i for i, k in enumerate(kinds) if not isinstance(k, type)]
    symbolic = draw(st.sampled_from(tensors))  # at least one operand is known in the kernel only
    operands, captured = [], {}
    for i, kind in enumerate(kinds):
        divides = name in DIVISIONS and i == 1
        if isinstance(kind, type):
            number = draw(st.sampled_from(NUMBER_VALUES[kind]).filter(lambda n, divides=divides: n or not divides))
            operands.append(draw(st.sampled_from([repr(number), f"x{i}"])))
            captured[f"x{i}"] = number
            continue
        symbols = {torch.float32: ["score"], torch.int32: ["q_idx", "kv_idx", "h"]}.get(kind, [])
        sources = ["table", *([] if divides else symbols), *([] if i == symbolic else ["0-dim"])]
        source = draw(st.sampled_from(sources))
        found = values(kind, 24, draw(st.integers(0, 999)))
        if divides and not kind.is_floating_point:
            found = torch.where(found == 0, torch.ones_like(found), found)
        if source == "0-dim":
            captured[f"x{i}"] = found[0]
            operands.append(f"x{i}")
        elif source == "table":
            captured[f"x{i}"] = found
            operands.append(f"x{i}[{'q_idx' if i % 2 == 0 else 'kv_idx'} % 24]")
        else:
            operands.append(source)
    return form.format(*operands), captured


def scores_for(device: str, seed: int = 0) -> torch.Tensor:
    """Scores with every corner of float32 among them."""
    shape = SHAPES[device]
    return values(torch.float32, math.prod(shape), seed).reshape(shape).to(device)


def placed(captured: dict, device: str) -> dict:
    """What a mod captures, on `device`."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in captured.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMS)
def test_row(name, device):
    """A row's result has torch's dtype and torch's value."""

    @settings(max_examples=6)
    @given(st.sampled_from(FORMS[name]).flatmap(lambda form: applications(name, form)), st.integers(0, 99))
    def run(application, seed):
        expression, captured = application
        check(expression, scores_for(device, seed), placed(captured, device), exact=name in EXACT)

    run()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_tanh_is_as_exact_as_the_precision(precision, device):
    """The faster spellings are off by less than the rounding of attention's own dtype."""
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-9, "float32": 0.0}[precision]
    if device == "cpu":
        rounding = 0.0
    check("torch.tanh(score)", scores_for(device), {}, precision=precision, tolerance=rounding)
    check("torch.tanh(score / 50) * 50", torch.randn(SHAPES[device], device=device) * 20, {}, precision=precision,
          tolerance=rounding)
