"""All ways to write an operation: functions, methods, operators and keywords give one graph."""

from __future__ import annotations

import operator

import pytest
import torch

from flexpress.codegen.mod.bind import bind
from flexpress.codegen.mod.ops import OPS
from support.evaluate import check, make_mod, torch_dtype
from support.rows import FORMS, arity


def signature_of(node) -> tuple:
    """An expression's structure, to compare graphs of different traces."""
    return (node.op, node.dtype, repr(node.attr), *map(signature_of, node.args))


OPERANDS = [
    ("score", "(score + 1.0)", "(score - 1.0)"),
    ("q_idx", "kv_idx", "h"),
    ("(q_idx < kv_idx)", "score", "(score + 1.0)"),
    ("score", "(q_idx < kv_idx)", "(score + 1.0)"),
]


def accepted_operands(form: str) -> tuple[str, ...]:
    """The first of OPERANDS that torch accepts."""
    for operands in OPERANDS:
        try:
            torch_dtype(form.format(*operands), {})
        except (TypeError, RuntimeError):
            continue
        return operands
    raise AssertionError(f"torch accepts none of the operands for {form}")


HOMES = {"torch": torch, "Tensor": torch.Tensor, "F": torch.nn.functional, "special": torch.special, "operator": operator}


def spelled(spelling: str, operands: tuple[str, ...]) -> str | None:
    """A call by one of a row's spellings; None if this torch does not have it."""
    home, _, name = spelling.partition(".")
    if not hasattr(HOMES[home], name):
        return None
    if home == "Tensor":
        return f"{operands[0]}.{name}({', '.join(operands[1:])})"
    return f"{'torch.special' if home == 'special' else home}.{name}({', '.join(operands)})"


@pytest.mark.parametrize("name", FORMS)
def test_every_spelling_gives_the_same_graph(name):
    form = FORMS[name][0]
    operands = accepted_operands(form)
    expected = bind(make_mod(form.format(*operands), "score", {}), "score")[0]
    for spelling in OPS[name].spellings:
        expression = spelled(spelling, operands[: arity(form)])
        if expression is not None:
            graph = bind(make_mod(expression, "score", {"operator": operator}), "score")[0]
            assert signature_of(graph.result) == signature_of(expected.result), expression
            assert torch_dtype(expression, {"operator": operator}) == graph.result.dtype, expression


@pytest.mark.parametrize(
    "expression",
    [
        "torch.where(condition=q_idx < kv_idx, input=score, other=score + 1.0)",
        "torch.pow(input=score, exponent=h)",
        "torch.maximum(score, other=score * 2)",
    ],
)
def test_keywords_that_only_name_operands(expression):
    check(expression, torch.ones(1, 2, 5, 7), {})


@pytest.mark.parametrize("expression", ["add_alpha", "sub_alpha", "rsub"])
@pytest.mark.parametrize("number", [2, 0.5])
def test_alpha(expression, number):
    """x + alpha * y, alpha literal or captured."""
    name = expression.removesuffix("_alpha")
    for alpha in (number, "n"):
        check(f"torch.{name}(score, floats[kv_idx], alpha={alpha})", torch.randn(1, 1, 5, 7), {"n": number, "floats": torch.randn(7)})
