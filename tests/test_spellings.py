"""All ways to write an operation: functions, methods, operators and keywords give one graph."""

from __future__ import annotations

import inspect
import operator
import re

import pytest
import torch

from flexpress import ModError, evaluate_mod
from flexpress.codegen.mod.table.ops import OPS
from flexpress.codegen.mod.tracing.bind import bind
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
    numbers = re.findall(r"(?<=, )(?:\d[\d.]*|torch\.tensor\([\d.]+\))(?=[,)])", form)  # that the form gives beside its operands
    for spelling in OPS[name].spellings:
        expression = spelled(spelling, (*operands[: arity(form)], *numbers))
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


def keywords_of(form: str):
    """torch's names for the operands of a function, of each of its overloads."""
    home, name = re.match(r"(torch|F)\.(\w+)\(", form).groups()
    if home == "F" and inspect.isfunction(getattr(torch.nn.functional, name)):
        yield [*inspect.signature(getattr(torch.nn.functional, name)).parameters]
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        names = ["input" if a.name == "self" else a.name for a in schema.arguments]
        yield names
        yield [{"input": "a", "other": "x2"}.get(name, name) for name in names]  # NumPy's, which torch takes as well


CALLS = [form for forms in FORMS.values() for form in forms if re.fullmatch(r"(torch|F)\.\w+\(\{0\}(, (\w+=[^,]+|\{.\}))*\)", form)]


@pytest.mark.parametrize("form", CALLS)
def test_operands_by_keyword(form):
    operands, compared = accepted_operands(form), 0
    expected = bind(make_mod(form.format(*operands), "score", {}), "score")[0]
    for names in keywords_of(form):
        if "out" in names or len(names) < arity(form):
            continue
        named = re.sub(r"(?<!=)\{(\d)\}", lambda m, names=names: f"{names[int(m[1])]}={{{m[1]}}}", form)
        try:
            torch_dtype(named.format(*operands), {})
        except (TypeError, RuntimeError, SyntaxError):
            continue
        compared += 1
        assert signature_of(bind(make_mod(named.format(*operands), "score", {}), "score")[0].result) == signature_of(expected.result)
    assert compared or form.startswith("F."), form  # some of torch's functions in C take no keywords


@pytest.mark.parametrize(
    "expression",
    [
        "torch.sum(input=v, dim=0)",
        "torch.amax(input=v)",
        "torch.softmax(input=v, dim=0)[1]",
        "F.softmax(input=v, dim=0)[1]",
        "torch.cumsum(input=v, dim=0)[1]",
        "torch.logsumexp(input=v, dim=0)",
        "torch.argmax(input=v) * 1.0",
        "torch.max(input=v)",
        "torch.max(input=v, dim=0).values",
        "torch.maximum(input=v, other=v)[0]",
        "torch.max(input=v, other=score)[0]",
        "torch.dot(input=v, tensor=v)",
        "torch.vdot(input=v, other=v)",
        "torch.mv(input=m, vec=v)[0]",
        "torch.mm(input=m, mat2=m)[0, 1]",
        "torch.bmm(input=m[None], mat2=m[None])[0, 0, 1]",
        "torch.matmul(input=m, other=v)[0]",
        "torch.outer(input=v, vec2=v)[0, 1]",
        "torch.inner(input=v, other=v)",
        "torch.linalg.vecdot(x=v, y=v)",
        "torch.cross(input=v, other=m[1], dim=0)[0]",
        "torch.linalg.cross(input=v, other=m[1])[0]",
        "torch.norm(input=v)",
        "torch.norm(input=v, p=1, dim=0, keepdim=True)[0]",
        "torch.linalg.norm(input=v, ord=1)",
        "torch.linalg.vector_norm(x=v, ord=3)",
        "torch.dist(input=v, other=m[1])",
        "torch.cdist(x1=m, x2=m)[0, 1]",
        "F.pairwise_distance(x1=v, x2=m[1])",
        "F.cosine_similarity(x1=v, x2=m[1], dim=0)",
        "F.linear(input=v, weight=m, bias=v)[0]",
        "F.layer_norm(input=v, normalized_shape=(3,), weight=v)[0]",
        "F.rms_norm(input=v, normalized_shape=(3,), eps=1e-6)[0]",
        "F.normalize(input=v, dim=0)[0]",
        "torch.stack(tensors=[v, v])[1, 0]",
        "torch.cat(tensors=(v, v), dim=0)[4]",
        "torch.unsqueeze(input=v, dim=0)[0, 1]",
        "torch.reshape(input=v, shape=(3, 1))[0, 0]",
        "torch.isin(elements=q_idx, test_element=2) * 1.0",
        "torch.searchsorted(sorted_sequence=row, input=score) * 1.0",
        "torch.bucketize(input=score, boundaries=row) * 1.0",
        "F.embedding(input=q_idx, weight=m)[1]",
        "torch.count_nonzero(input=v) * 1.0",
        "torch.var(input=v, dim=0, correction=0)",
        "torch.sum(v, axis=0, keepdims=True)[0]",
        "torch.softmax(v, axis=0)[1]",
        "v.var(axis=0, keepdims=True)[0]",
        "torch.sum(a=v)",
        "torch.sum(v, dim=0, out=None)",
        "torch.add(score, v, out=None)[0]",
    ],
)
def test_operands_of_functions_of_vectors_by_keyword(expression):
    captured = {"matrix": torch.randn(1, 3, 3), "row": torch.tensor([-1.0, 0.0, 2.0])}
    text = re.sub(r"\bm\b", "matrix[b]", re.sub(r"\bv\b", "matrix[b, 0]", expression)).replace("weight=matrix[b])", "weight=matrix[0])")
    index = {name: torch.tensor(0) for name in ("b", "h", "q_idx", "kv_idx")}
    exact = eval(text, {"torch": torch, "F": torch.nn.functional, "score": torch.tensor(0.5), **index, **captured})
    found = evaluate_mod(make_mod(text, "score", captured), torch.full((1, 1, 1, 1), 0.5))
    torch.testing.assert_close(found.squeeze(), exact.float())


@pytest.mark.parametrize("expression", ["torch.add(score, 1, out=score)", "torch.sum(row, 0, out=score)", "torch.norm(row, out=score)"])
def test_another_out_is_refused(expression):
    with pytest.raises(ModError, match="with out=") as caught:
        bind(make_mod(expression.replace("row", "row[b]"), "score", {"row": torch.randn(1, 3)}), "score")
    assert "drop out=" in str(caught.value)


@pytest.mark.parametrize("expression", ["add_alpha", "sub_alpha", "rsub"])
@pytest.mark.parametrize("number", [2, 0.5])
def test_alpha(expression, number):
    """x + alpha * y, alpha literal or captured."""
    name = expression.removesuffix("_alpha")
    for alpha in (number, "n"):
        check(f"torch.{name}(score, floats[kv_idx], alpha={alpha})", torch.randn(1, 1, 5, 7), {"n": number, "floats": torch.randn(7)})


TABLE = torch.arange(20.0).reshape(5, 4)


@pytest.mark.parametrize(
    "expression",
    [
        *("(kv_idx / 2).to(int)", "(kv_idx * 2).to(bool)", '(kv_idx / 2).to("cpu", int)', "(kv_idx / 2).to(dtype=int)", "score.to(float)"),
        *("(kv_idx / 2).type(torch.LongTensor)", '(kv_idx / 2).type("torch.IntTensor")', "(kv_idx / 2).type(torch.int32)"),
        *("(table[kv_idx] / 4).to(int).sum()", "(table[kv_idx] / 4).sum(dtype=int)", "table[kv_idx].cumsum(0, dtype=float)[1]"),
        *("torch.zeros_like(score, dtype=int)", "score.new_tensor(2.5, dtype=int)", "score.new_full((), 2, dtype=float)"),
        *("torch.tensor(2.5, dtype=float)", "torch.scalar_tensor(2) ** (-kv_idx)", "table[kv_idx].softmax(0, float)[1]"),
        *("kv_idx.type_as(table[kv_idx])", "(score + 0.5).to(table[kv_idx].long())", "(score + 0.5).type_as(kv_idx)", "kv_idx.to(table)"),
        *("(table[kv_idx] / 4).type_as(kv_idx).sum()", "table.to(kv_idx).sum()", "torch.as_tensor(score) + 1"),
    ],
)
def test_dtypes_by_other_names(expression):
    """Python's types, tensors' types of old, and tensors that have the dtype: as torch takes them, a row's shape not."""
    names = {"torch": torch, "table": TABLE}
    mod = eval(f"lambda score, b, h, q_idx, kv_idx: score + ({expression}) * 1.0", names)
    found = evaluate_mod(mod, torch.full((1, 1, 1, 5), 0.75)).flatten()
    for j in range(5):
        wanted = 0.75 + eval(expression, names, {"score": torch.tensor(0.75), "kv_idx": torch.tensor(j)}) * 1.0
        assert found[j] == wanted.float() and wanted.ndim == 0, j


def test_another_type_is_another_trace():
    holder = {"kind": int}
    halves = torch.full((1, 1, 1, 1), 1.5)
    found = []
    for kind in (int, float, torch.BoolTensor, int):
        holder["kind"] = kind
        found.append(evaluate_mod(lambda score, b, h, q_idx, kv_idx: score.to(holder["kind"]) * 1.0, halves).item())
    assert found == [1.0, 1.5, 1.0, 1.0]
