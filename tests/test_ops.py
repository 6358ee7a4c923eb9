"""The op table against torch: every row, random compositions; casts and literals.

Each property runs on the CPU in Triton's interpreter, and with `-m gpu` compiled, at more positions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress.codegen.mod.table.ops import OPS
from flexpress.codegen.run.evaluate import evaluate_mod
from flexpress.codegen.run.preview_masks import evaluate_compilation
from support.compositions import LARGEST_INT, compositions
from support.devices import DEVICES
from support.evaluate import DTYPES, FLOATS, INTEGERS, SHAPES, check, make_mod, placed, torch_dtype, traced_dtype, values
from support.rows import DIVISIONS, FORMS, NUMBER_VALUES, legal_operands

ALL_FORMS = [(name, form) for name, forms in FORMS.items() for form in forms]
# Floating-point results that are exact, not rounded
EXACT = {
    "neg",
    "abs",
    "sign",
    "fmod",
    "remainder",
    "floor_divide",
    "minimum",
    "maximum",
    "floor",
    "ceil",
    "trunc",
    "rint",
    "heaviside",
    "copysign",
    "signbit",
    "real",
    "isreal",
    "prelu",
    "threshold",
    "where",
    "where_method",
    "clamp",
    "clamp_min",
    "clamp_max",
    "relu",
}


def test_every_row_has_a_test():
    assert set(FORMS) == set(OPS)


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
            number = draw(st.sampled_from([n for n in NUMBER_VALUES[kind] if n or not divides]))
            operands.append(draw(st.sampled_from([repr(number), f"x{i}"])))
            captured[f"x{i}"] = number
            continue
        symbols = {torch.float32: ["score"], torch.int32: ["q_idx", "kv_idx", "h"]}.get(kind, [])
        symbols = [] if divides or name in ("isclose", "heaviside") else symbols  # torch takes one dtype there, and its positions are int64
        sources = ["table", *symbols, *([] if i == symbolic else ["0-dim"])]
        source = draw(st.sampled_from(sources))
        found = values(kind, 24, draw(st.integers(0, 999)))
        if divides and not kind.is_floating_point:
            found = torch.where(found == 0, torch.ones_like(found), found)
        if (
            name in ("copysign", "xlogy")
            and not kind.is_floating_point
            and kind.itemsize > 1
            and any(getattr(k, "itemsize", 4) == 2 for k in kinds)
        ):
            found = found.clamp(-256, 256)  # which half precision has; the reference computes without rounding to it
        if (name, i) in (("copysign", 1), ("signbit", 0)):  # NaN has a sign, which depends on who made it
            found = torch.where(found.isnan(), torch.ones_like(found), found)
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


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
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


@pytest.mark.parametrize("name", FORMS)
def test_dtypes_of_a_row(name):
    """Of operands of all kinds that torch accepts."""
    for form in FORMS[name]:
        for kinds in legal_operands(form):
            operands = [repr(k(2)) if isinstance(k, type) else f"x{i}[q_idx]" for i, k in enumerate(kinds)]
            expression = form.format(*operands)
            captured = {f"x{i}": torch.ones(3, dtype=k) for i, k in enumerate(kinds) if not isinstance(k, type)}
            assert traced_dtype(expression, captured) == torch_dtype(expression, captured), (expression, kinds)


@st.composite
def constants(draw, name: str, form: str) -> str:
    """One form of tensors that hold a number written in the mod."""
    operands = []
    for i, kind in enumerate(draw(st.sampled_from(legal_operands(form)))):
        if isinstance(kind, type):
            operands.append(repr(draw(st.sampled_from([n for n in NUMBER_VALUES[kind] if n or name not in DIVISIONS or i != 1]))))
            continue
        number = draw(st.sampled_from([3, 1, 2, 5] if name in DIVISIONS or not kind.is_signed else [3, -2, 0, 1, 5]))
        number = name in DIVISIONS or number % 2 == 1 if kind == torch.bool else number + 0.25 * kind.is_floating_point
        operands.append(f"torch.full_like(score, {number}, dtype={kind})")
    return form.format(*operands)


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
@pytest.mark.parametrize("name", FORMS)
def test_row_of_constants(name):
    """What tracing computes, so that no kernel has to."""

    @settings(max_examples=3)
    @given(st.sampled_from(FORMS[name]).flatmap(lambda form: constants(name, form)))
    def run(expression):
        check(expression, torch.ones(1, 1, 2, 3), {}, exact=name in EXACT)

    run()


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_rows_compile_for_gpus(target, precision):
    """All rows in one mask_mod, each on a choice of the operands that torch accepts."""
    captured, lines = {}, ["allowed = q_idx >= kv_idx"]
    for place, (name, form) in enumerate(ALL_FORMS):
        kinds = legal_operands(form)[(7 * place + len(precision)) % len(legal_operands(form))]
        operands = []
        for i, kind in enumerate(kinds):
            if isinstance(kind, type):
                operands.append(repr(kind(2)))
            else:
                table = captured.setdefault(f"x_{str(kind).removeprefix('torch.')}", torch.ones(24, dtype=kind))
                operands.append(f"x_{str(table.dtype).removeprefix('torch.')}[{'q_idx' if i % 2 == 0 else 'kv_idx'}]")
        lines.append(f"allowed = allowed ^ (({form.format(*operands)}) != 0)  # {name}")
    namespace = {"torch": torch, "F": torch.nn.functional, **captured}
    exec("def mod(b, h, q_idx, kv_idx):\n    " + "\n    ".join([*lines, "return allowed"]), namespace)
    made = replace(evaluate_compilation(target, namespace["mod"], "mask", precision), constants={"TILE_M": 16, "TILE_N": 16}).compile()
    assert made.shared == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_tanh_is_as_exact_as_the_precision(precision, device):
    """The faster spellings are off by less than the rounding of attention's own dtype."""
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-9, "float32": 0.0}[precision]
    if device == "cpu":
        rounding = 0.0
    check("torch.tanh(score)", scores_for(device), {}, precision=precision, tolerance=rounding)
    scores = torch.randn(SHAPES[device], device=device) * 20
    check("torch.tanh(score / 50) * 50", scores, {}, precision=precision, tolerance=rounding)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize(
    "form", ["-{0}", "abs({0})", "~{0} + 1", "{0} * -1", "0 - {0}", "torch.where({0} < 0, -{0}, {0})", "{0} + 1", "{0} << 3"]
)
def test_small_integers_wrap_around_before_they_are_widened(form, dtype, device):
    """Every value there is."""
    low = torch.iinfo(dtype).min
    x = torch.arange(low, torch.iinfo(dtype).max + 1, dtype=torch.int32).to(dtype).reshape(-1, 16).to(device)
    cell = "x[q_idx, kv_idx]"
    found = evaluate_mod(make_mod(f"({form.format(cell)}).int() * 1.0", "score", {"x": x}), torch.zeros(1, 1, *x.shape, device=device))
    assert torch.equal(found[0, 0], eval(form.format("x"), {"torch": torch, "x": x}).float())


# Random compositions

LEAVES = {
    "f": ("score", "floats[kv_idx % 16]", "floats[q_idx % 16]", "(h * temperature)"),
    "i": ("q_idx", "kv_idx", "h", "b", "ints[q_idx % 16]", "(kv_idx - q_idx)"),
    "b": ("(q_idx >= kv_idx)", "flags[kv_idx % 16]", "(kv_idx > n)"),
    "a": ("score", "x", "2", "0.5", "n"),
}


@st.composite
def environments(draw) -> dict:
    """What compositions capture: tables of any dtype, a 0-dim tensor, and numbers."""
    seed = draw(st.integers(0, 999))
    floats, ints = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(INTEGERS))
    wide = draw(st.sampled_from((torch.float32, torch.float64)))
    return {
        "floats": values(floats, 16, seed),
        "ints": values(ints, 16, seed).clamp(-LARGEST_INT, LARGEST_INT) if ints.itemsize >= 4 else values(ints, 16, seed),
        "flags": values(torch.bool, 16, seed),
        "temperature": values(wide, 16, seed + 1)[0],
        "x": draw(st.sampled_from([0.5, -1.25, 3.0])),
        "n": draw(st.integers(0, 40)),
        "on": draw(st.booleans()),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["score", "mask"])
def test_compositions(kind, device):
    """Random score and mask mods; where rounding decides a comparison, either outcome will do."""
    shares = []

    def run(expression, captured, seed):
        scores = (
            scores_for(device, seed)
            if seed % 3 == 0
            else torch.randn(SHAPES[device], generator=torch.Generator().manual_seed(seed)).to(device) * 4
        )
        shares.append(check(expression, scores, placed(captured, device), infinities=False))

    leaves = LEAVES if kind == "score" else {**LEAVES, "f": LEAVES["f"][1:], "a": LEAVES["a"][1:]}
    of_kind = {"score": "f", "mask": "b"}[kind]
    depths = st.integers(1, 5).flatmap(lambda depth: compositions(of_kind, depth, leaves))
    examples = 160 if device == "cpu" else 60
    settings(max_examples=examples)(given(depths, environments(), st.integers(0, 99))(run))()
    assert sum(shares) / len(shares) > 0.7  # most positions have a certain answer


# Casts and literals


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_casts(source, device):
    """.to(dtype) between all dtypes: integers wrap around, floats are rounded, to integers towards zero."""
    found = values(source, 24, 1)
    if source.is_floating_point:  # what lies outside an integer's range has no meaning there
        whole = torch.linspace(0, 120, 24).to(source) + 0.4
    for target in DTYPES:
        safe = whole if source.is_floating_point and target in INTEGERS else found
        captured = placed({"x": safe}, device)
        check(f"x[kv_idx % 24].to({target})", scores_for(device), captured, exact=target != torch.float64)


@pytest.mark.parametrize(
    "expression, dtype",
    [
        ("score.int()", torch.int32),
        ("score.long()", torch.int64),
        ("score.short()", torch.int16),
        ("score.char()", torch.int8),
        ("score.byte()", torch.uint8),
        ("score.bool()", torch.bool),
        ("score.half()", torch.float16),
        ("score.bfloat16()", torch.bfloat16),
        ("q_idx.float()", torch.float32),
        ("q_idx.double()", torch.float64),
        ("score.to(torch.int32)", torch.int32),
        ("score.to(dtype=torch.int32)", torch.int32),
        ("score.type(torch.int32)", torch.int32),
        ("score.type_as(q_idx)", torch.int32),
        ("score.to(q_idx)", torch.int32),
        ("score.to(q_idx.dtype)", torch.int32),
        ("q_idx.to(torch.int32)", torch.int32),
        ("score.to(score.device)", torch.float32),
    ],
)
def test_cast_spellings(expression, dtype):
    assert torch_dtype(expression, {}) == dtype
    check(expression, torch.rand(1, 1, 5, 7) * 100, {}, exact=True)


LITERALS = [
    "torch.zeros_like(score)",
    "torch.ones_like(q_idx)",
    "torch.full_like(score, 2.5)",
    "torch.full_like(score, 3.0) ** 3 * score",
    "torch.full_like(q_idx, 3) ** 7 + q_idx",
    "torch.full_like(q_idx, 3) ** 0",
    "torch.full_like(q_idx, n)",
    "torch.zeros_like(score, dtype=torch.int32)",
    "score.new_zeros(())",
    "score.new_ones(()) + q_idx",
    "score.new_full((), 3)",
    "q_idx.new_full((), n)",
    "q_idx.new_tensor(3)",
    "score.new_zeros((), dtype=torch.bool)",
    "torch.tensor(3.5) + q_idx",
    "torch.tensor(3) + q_idx",
    "torch.tensor(n) + q_idx",
    "torch.tensor(x) * score",
    "torch.tensor(2, dtype=torch.float16) * q_idx",
    "torch.tensor(True) & (q_idx > kv_idx)",
    "torch.scalar_tensor(2.5) * score",
    "torch.zeros(()) + score",
    "torch.full((), 2.0)",
    "torch.ones((), dtype=torch.int32) + q_idx",
    "torch.tensor(300).to(torch.int8) + q_idx",
    "torch.where(q_idx > kv_idx, 1.0, 0.0)",
    "torch.where(q_idx > kv_idx, 3, 4)",
    "torch.where(q_idx > kv_idx, True, False)",
    "torch.where(q_idx > kv_idx, n, 4)",
    "torch.where(q_idx > kv_idx, n, x)",
    "torch.where(q_idx > kv_idx, score, -math.inf)",
    "torch.where(q_idx > kv_idx, -math.inf, score)",
    "torch.where(q_idx > kv_idx, score, math.nan)",
    "torch.where(q_idx > kv_idx, 2, score)",
    "torch.where(q_idx > kv_idx, torch.tensor(1.0), 2)",
    "q_idx + 1000000 * 1000",
    "q_idx.long() * 2**33 // 2**31",
    "q_idx // 2**31",
    "(q_idx % 100).to(torch.int8) % 200",
    "(q_idx % 100).to(torch.uint8) // 300",
    "q_idx % (2**32 + 5)",
    "score * 1e30 * 1e30",
    "score * 1e-300",
    "q_idx * True",
    "-n * q_idx",
    "math.pi * score",
    "score + (1 if True else 2)",
    "+score",
    "q_idx ** 3",
    "q_idx ** 0",
    "q_idx ** 7",
    "score ** 0",
    "score ** 0.5",
    "score ** -1",
    "2 ** q_idx",
    "n ** h",
    "score ** n",
    "torch.where(q_idx > kv_idx, n, 70000) * 100000 // 100000",
    "torch.where(q_idx > kv_idx, n, n) * 2**30 // 3",
    "torch.full_like(q_idx.long(), n) * 2**30 // 3",
    "torch.where(q_idx > kv_idx, n, 2**40) // 1000",
    "q_idx.new_tensor(n).long() * 2**30",
    "score ** torch.tensor(2)",
    "q_idx.clone()",
    "score.detach()",
    "1.0 / -(score * 0)",
    "torch.minimum((q_idx * 40).to(torch.uint8), torch.tensor(200, dtype=torch.uint8)) + 100",
    "torch.max(torch.full_like(kv_idx.to(torch.int8), 100), kv_idx.to(torch.int8)) * 2",
    "(torch.maximum((q_idx * 9000).to(torch.int16), torch.tensor(20000, dtype=torch.int16)) + 20000 > 30000) * 1.0",
    "1.0 / ((kv_idx * -0.0) // -3.0) + 1.0 / ((kv_idx * -0.0) // 2.0)",
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("expression", LITERALS)
def test_literals(expression, device):
    """Numbers written in the mod, factories, and `where` with numbers for arms."""
    check(expression, torch.randn(1, 2, 9, 11, device=device), {"n": 3, "x": 2.5, "on": True})


@pytest.mark.parametrize(
    "expression",
    [
        "score",
        "score * 0 + 1.5",
        "h * 2.0",
        "q_idx + 0.5",
        "kv_idx",
        "b",
        "1",
        "2.5",
        "n",
        "x",
        "on",
        "table[h]",
        "table[q_idx % 3]",
        "zero",
        "torch.zeros_like(score)",
    ],
)
def test_results_that_depend_on_few_symbols(expression):
    """A result fills the whole tile whatever it reads."""
    table, zero = torch.randn(3), torch.tensor(0.25)
    captured = {"n": 3, "x": 2.5, "on": True, "table": table, "zero": zero}
    scores = torch.randn(2, 3, 70, 5)
    out = evaluate_mod(make_mod(expression, "score", captured), scores)
    b, h, q_idx, kv_idx = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    names = {"score": scores, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "torch": torch, **captured}
    torch.testing.assert_close(out, torch.as_tensor(eval(expression, names)).float().expand(scores.shape))
