"""Derivatives of score_mods against torch.autograd, in float64: every row of the op table, random compositions, captured tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress.codegen.mod.expr import walk
from flexpress.codegen.mod.graphs.grad import differentiate
from flexpress.codegen.mod.table.ops import OPS
from flexpress.codegen.mod.tracing.bind import bind
from support.compositions import compositions
from support.derivatives import Derivatives, by_autograd, check_derivatives
from support.evaluate import FLOATS, make_mod, values
from support.rows import DIVISIONS, FORMS, NUMBER_VALUES, legal_operands

# Their results are integers or bools, or move in steps.
NOT_DIFFERENTIABLE = {
    "floor_divide",
    "div_trunc",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "rint",
    "detach",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and_",
    "or_",
    "xor",
    "invert",
    "lshift",
    "rshift",
    "logical_and",
    "logical_or",
    "logical_xor",
    "logical_not",
}
CONDITIONS = {"isreal", "signbit", "isnan", "isinf", "isposinf", "isneginf", "isfinite"}  # expand to comparisons
NOT_IN_TORCH = {"heaviside"}  # which refuses its derivative
SHAPE = (2, 3, 8, 10)


@pytest.mark.parametrize("name", OPS)
def test_every_row_has_a_derivative_or_needs_none(name):
    row = OPS[name]
    assert bool(row.derivative) + bool(row.expand) + (name in NOT_DIFFERENTIABLE) == 1
    if row.derivative:
        assert len(row.derivative) == row.arity


# Rows


def torch_differentiates(name: str, kinds: tuple) -> bool:
    """Is there a floating tensor among the operands, and can torch be trusted with them?"""
    floating = [not isinstance(k, type) and k.is_floating_point for k in kinds]
    if name == "remainder" and isinstance(kinds[0], type) or name == "pow" and {bool, torch.bool} & set(kinds):
        return False  # refused in the backward pass
    if name == "atan2":
        return all(floating)  # integers are squared as integers there, and wrap around
    if name in ("logaddexp", "logaddexp2") and torch.bool in kinds:
        return False  # refused in the backward pass
    if name == "xlogy" and {torch.float16, torch.bfloat16} & set(kinds) and not all(floating):
        return False  # the integer is rounded to half precision
    return any(floating)


@st.composite
def applications(draw, name: str) -> tuple[str, list]:
    """A form of a row, and operands that torch accepts: tables of 24 finite values, and numbers."""
    form = draw(st.sampled_from(FORMS[name]))
    kinds = draw(st.sampled_from([kinds for kinds in legal_operands(form) if torch_differentiates(name, kinds)]))
    operands = []
    for i, kind in enumerate(kinds):
        nonzero = name in DIVISIONS and i == 1
        if isinstance(kind, type):
            operands.append(draw(st.sampled_from([n for n in NUMBER_VALUES[kind] if n or not nonzero])))
        else:
            found = values(kind, 24, draw(st.integers(0, 3)))  # few seeds: operands are often equal
            if kind.is_floating_point:
                found = torch.where(found.isfinite(), found, torch.ones_like(found))
            operands.append(torch.where(found == 0, torch.ones_like(found), found) if nonzero else found)
    return form, operands


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
@pytest.mark.parametrize("name", [n for n in FORMS if n not in NOT_DIFFERENTIABLE | CONDITIONS | NOT_IN_TORCH])
def test_row(name):
    """Every pair of operands meets, equal ones and zeros included; torch's answer stands wherever it is finite."""

    @settings(max_examples=20)
    @given(applications(name))
    def run(application):
        form, operands = application
        captured, texts = {}, []
        for i, operand in enumerate(operands):
            if isinstance(operand, torch.Tensor):  # spread over both dimensions: each position has derivatives of its own
                captured[f"x{i}"] = (operand[:, None] if i % 2 == 0 else operand).expand(24, 24).contiguous()
            texts.append(f"x{i}[q_idx, kv_idx]" if f"x{i}" in captured else repr(operand))
        scores = torch.zeros(1, 1, 24, 24, dtype=torch.float64)
        text = form.format(*texts)
        check_derivatives(text, scores, captured)

    run()


@pytest.mark.parametrize("name", sorted(NOT_DIFFERENTIABLE | CONDITIONS))
def test_steps_have_no_derivative(name):
    form = FORMS[name][0]
    texts = {torch.float32: "score", torch.bool: "(score > 0)", torch.int32: "score.int()"}
    operands = [texts[k] for k in next(k for k in legal_operands(form) if set(k) <= set(texts))]
    graph = bind(make_mod(form.format(*operands), "score", {}), "score")[0]
    assert differentiate(graph, frozenset()).score is None


@pytest.mark.parametrize(
    "function",
    [
        "F.softplus({})",
        "F.softplus({}, 2, 5)",
        "F.logsigmoid({})",
        "F.gelu({})",
        "F.silu({})",
        'F.gelu({}, approximate="tanh")',
        "torch.sigmoid({})",
        "torch.tanh({})",
        "F.relu({})",
        "F.leaky_relu({})",
        "F.elu({}, 2.0)",
        "F.mish({})",
        "F.hardtanh({})",
        "F.celu({}, 2.0)",
        "F.selu({})",
        "F.hardsigmoid({})",
        "F.hardswish({})",
        "F.softsign({})",
        "F.tanhshrink({})",
        "F.softshrink({})",
        "F.hardshrink({})",
        "torch.logaddexp({}, -score)",
        "torch.asinh({} / 1e5)",
        "torch.sinc({})",
        "score.masked_fill({} > 3, 1.0)",
    ],
)
def test_activations_have_finite_derivatives(function):
    """Also where an exponential overflows in a branch that is not taken."""
    scores = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, 10.0, 20.0, -20.0, 88.0, 90.0, -90.0, 200.0, -200.0, 1e4, -1e4, 1e10, -1e10])
    scores = scores.double().reshape(1, 1, 1, -1)
    check_derivatives(function.format("score"), scores, {})
    low = Derivatives(function.format("score"), scores, {})
    low.symbols |= {"score": scores.float(), "grad": low.symbols["grad"].float()}
    torch.testing.assert_close(low.value(low.derived.score).double(), low.score, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("low, high", [("lower", "upper"), ("lower", "lower + 1.5"), ("lower", "lower"), ("-1.0", "1.0"), ("n", "4.0")])
def test_clamp_passes_the_gradient_at_its_bounds(low, high):
    """Bounds that are tensors have derivatives of their own."""
    steps = torch.arange(-8, 8, dtype=torch.float32) / 4
    captured = {"lower": steps[:10], "upper": steps[6:] + 0.25, "n": -1}
    text = f"torch.clamp(score, {low}, {high})".replace("lower", "lower[q_idx]").replace("upper", "upper[q_idx]")
    check_derivatives(text, steps.double().expand(1, 1, 10, 16), captured)


# Compositions

LEAVES = {
    "f": (
        "score",
        "score",
        "t0",
        "t1[kv_idx]",
        "t1[q_idx]",
        "t1[q_idx - kv_idx + 4]",
        "t1[kv_idx - q_idx]",
        "t1[ids[kv_idx]]",
        "t2[b, h]",
        "t2[h, kv_idx]",
        "t2[h, ids[q_idx]]",
        "t3[b, h, kv_idx]",
        "t3[b, h, ids[q_idx] - 1]",
    ),
    "i": ("q_idx", "kv_idx", "h", "b", "ids[kv_idx]", "(kv_idx - q_idx)"),
    "b": ("(q_idx >= kv_idx)", "(ids[kv_idx] > n)", "(kv_idx > n)", "(score > t0)"),
    "a": ("score", "x", "2", "0.5", "n"),
}


@st.composite
def environments(draw) -> dict:
    """Tables of ranks 0 to 3, integers and numbers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shapes = {"t0": (), "t1": (16,), "t2": (3, 16), "t3": (2, 3, 16), "floats": (16,)}
    tables = {name: (torch.randn(shape, generator=generator) * 2).to(draw(st.sampled_from(FLOATS))) for name, shape in shapes.items()}
    ids = torch.randint(-5, 6, (16,), generator=generator)
    return {
        **tables,
        "t0": tables["t0"].double().requires_grad_(),
        "ids": ids,
        "ints": ids,
        "flags": ids > 0,
        "x": draw(st.sampled_from([0.5, -1.25, 3.0])),
        "n": draw(st.integers(0, 40)),
        "on": draw(st.booleans()),
    }


def test_compositions():
    """Random score_mods: derivatives in the score and in every table, indexed in many ways."""
    shares = []

    def run(expression, captured, seed):
        expression = expression.replace(".float().half().float()", "")  # torch rounds the gradient too
        scores = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
        ours = Derivatives(expression, scores, captured)
        defined = ours.value(ours.graph.result).isfinite().all()
        shares.append(check_derivatives(expression, scores, captured) if defined else 0.0)

    depths = st.integers(1, 5).flatmap(lambda depth: compositions("f", depth, LEAVES))
    settings(max_examples=200)(given(depths, environments(), st.integers(0, 99))(run))()
    assert sum(shares) / len(shares) > 0.7


@pytest.mark.parametrize(
    "expression",
    [
        "score + table[h][q_idx]",
        "score * table[h, 1 - q_idx]",
        "score * (table * 2)[h, kv_idx]",
        "score - table.T[q_idx, h] ** 2",
        "score * table.sum()",
        "score * table[0][kv_idx]",
    ],
)
def test_tables_by_way_of_torch(expression):
    """What the host computes from a captured tensor has the derivatives; torch carries them on to the tensor."""
    table = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(SHAPE, dtype=torch.float64)
    ours = Derivatives(expression, scores, {"table": table}).captured["table"]
    expected = by_autograd(expression.replace("[h][", "[h, "), scores, {"table": table})["table"]
    torch.testing.assert_close(ours, expected)


def test_only_wanted_tensors_have_derivatives():
    captured = {"table": torch.randn(10), "bias": torch.randn(10), "ids": torch.arange(10)}
    graph, _ = bind(make_mod("score * table[kv_idx] + bias[ids[q_idx]] + ids[h]", "score", captured), "score")
    names = [t.name for t in graph.tensors]
    for wanted in (set(), {"table"}, {"bias"}, {"table", "bias", "ids"}):
        derived = differentiate(graph, frozenset(map(names.index, wanted)))
        assert {names[load.attr] for load, _ in derived.loads} == wanted - {"ids"}
        assert derived.score is not None


# What the derivatives look like


def derivative(expression: str, **captured) -> str:
    """The derivative in the score, written out."""
    graph = bind(make_mod(expression, "score", captured), "score")[0]
    found = differentiate(graph, frozenset()).score
    return "None" if found is None else written(found)


def written(node) -> str:
    if node.op in ("symbol", "literal"):
        return str(node.attr)
    return f"{node.op}({', '.join([*map(written, node.args), *([str(node.attr)] if node.attr is not None else [])])})"


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("score", "grad"),
        ("score + table[kv_idx]", "grad"),
        ("table[h] - (-score)", "grad"),
        ("score * 2.0", "mul(grad, 2.0)"),
        ("1.0 * score", "grad"),
        ("score / 1", "grad"),
        ("score ** 1", "grad"),
        ("score * 0.0", "None"),
        ("score * 0.0 + score", "grad"),
        ("score.half().double()", "grad"),
        ("-score", "neg(grad)"),
        ("score * n", "mul(grad, scalar(0))"),
        ("score / 8.0", "div(grad, 8.0)"),
        ("torch.where(q_idx >= kv_idx, score, -math.inf)", "where(ge(q_idx, kv_idx), grad, 0.0)"),
        ("q_idx * 2.0", "None"),
        ("torch.exp(score)", "mul(grad, exp(score))"),
        ("score.detach() + score", "grad"),
        ("score ** torch.tensor(1)", "grad"),
        ("(score > 0).float()", "None"),
        ("score + score", "add(grad, grad)"),
    ],
)
def test_derivatives_are_short(expression, expected):
    assert derivative(expression, table=torch.ones(10), n=3) == expected


def test_forward_nodes_are_shared():
    graph = bind(make_mod("20 * torch.tanh(score / 20)", "score", {}), "score")[0]
    forward = {id(n) for n in walk(graph.result)}
    found = differentiate(graph, frozenset()).score
    (tanh,) = (n for n in walk(found) if n.op == "tanh")
    assert id(tanh) in forward


def mod_of_two_lines(score, b, h, q_idx, kv_idx):
    bounded = torch.tanh(score * 0.5)
    return bounded * q_idx


def test_nodes_lead_back_to_the_users_lines():
    found = differentiate(bind(mod_of_two_lines, "score")[0], frozenset()).score
    lines = {n.op: n.source.text for n in walk(found) if n.op in ("sub", "mul") and "grad" in written(n) or n.op == "sub"}
    assert lines["sub"] == "bounded = torch.tanh(score * 0.5)"
    multiplied = [n.source.text for n in walk(found) if written(n) == "mul(grad, q_idx)"]
    assert multiplied == ["return bounded * q_idx"]
    assert all(n.source is not None for n in walk(found) if n.args)
