"""Random expressions, composed of the forms of all rows."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from support.evaluate import FLOATS, INTEGERS

LARGEST_INT = 2**30  # of a captured tensor, beside an index (docs/mods.md)

FLOAT_FORMS = (
    "{f} + {f}",
    "{f} - {a}",
    "{f} * {a}",
    "{f} / {f}",
    "{i} / {i}",
    "{f} - {i}",
    "-{f}",
    "abs({f})",
    "{f} ** 2",
    "{f} ** 3",
    "torch.exp(torch.clamp({f}, max=20))",
    "torch.exp2({f} * 0.125)",
    "torch.log1p(abs({f}))",
    "torch.sqrt(abs({f}))",
    "torch.rsqrt({f} * {f} + 1)",
    "torch.sin({f})",
    "torch.cos({i})",
    "torch.tanh({f})",
    "torch.sigmoid({f})",
    "torch.erf({f})",
    "torch.atan({f})",
    "torch.floor({f})",
    "torch.round({f})",
    "torch.minimum({f}, {f})",
    "torch.maximum({f}, {f})",
    "torch.clamp({f}, -3, 5)",
    "torch.clamp({f}, max={f})",
    "F.relu({f})",
    "F.gelu(torch.clamp({f}, -50, 50))",
    "F.silu({f})",
    "F.softplus({f})",
    "F.logsigmoid({f})",
    "torch.where({b}, {f}, {f})",
    "torch.where({b}, {f}, 0.0)",
    "({i}).float()",
    "{f} % 3.0",
    "torch.fmod({f}, 2.5)",
    "({f}).float().half().float()",
    "({b}) * {f}",
    "torch.sign({f})",
    "torch.log(abs({f}) + x)",
    "torch.zeros_like({f})",
    "floats[({i} % 16).long()]",
)


INT_FORMS = (
    "{i} + {i}",
    "{i} - {i}",
    "{i} * {i}",
    "-{i}",
    "abs({i})",
    "{i} // 3",
    "{i} // -2",
    "{i} % 5",
    "{i} % -7",
    "torch.fmod({i}, 3)",
    'torch.div({i}, 4, rounding_mode="trunc")',
    "{i} & {i}",
    "{i} | {i}",
    "{i} ^ {i}",
    "~({i})",
    "{i} << 2",
    "{i} >> 1",
    "({i}) ** 2",
    "torch.minimum({i}, {i})",
    "torch.maximum({i}, {i})",
    "torch.where({b}, {i}, {i})",
    "torch.where({b}, {i}, 1)",
    "torch.clamp({i}, 2, 9)",
    "torch.sign({i})",
    "({b}).int()",
    "({i}).long()",
    "ints[({i} % 16).long()]",
    "{i} + n",
    "torch.clamp(torch.where(torch.isfinite({f}), {f}, 0.0), -99, 99).int()",
)


BOOL_FORMS = (
    "{f} < {f}",
    "{i} < {i}",
    "{i} >= {i}",
    "{f} == {f}",
    "{i} == {i}",
    "{i} != n",
    "{i} <= {f}",
    "({b}) & ({b})",
    "({b}) | ({b})",
    "({b}) ^ ({b})",
    "~({b})",
    "torch.logical_and({i}, {f})",
    "torch.logical_or({b}, {i})",
    "torch.logical_xor({f}, {b})",
    "torch.logical_not({i})",
    "torch.isnan({f})",
    "torch.isinf({f})",
    "torch.isfinite({f})",
    "({i}).bool()",
    "flags[({i} % 16).long()]",
    "({b}) & on",
)


@st.composite
def compositions(draw, kind: str, depth: int, leaves: dict) -> str:
    """A random expression of kind "f", "i" or "b" ("a": of any kind, or a number)."""
    if depth == 0 or kind == "a":
        return draw(st.sampled_from(leaves[kind]))
    form = draw(st.sampled_from({"f": FLOAT_FORMS, "i": INT_FORMS, "b": BOOL_FORMS}[kind]))
    operands = {k: draw(compositions(k, depth - 1, leaves)) for k in "fiba" if f"{{{k}}}" in form}
    # a form's further operands of the same kind
    second = {k: draw(compositions(k, draw(st.integers(0, min(depth - 1, 1))), leaves)) for k in operands}
    for k, text in operands.items():
        form = form.replace(f"{{{k}}}", f"({text})", 1).replace(f"{{{k}}}", f"({second[k]})")
    return form


MASK_LEAVES = {
    "f": ("floats[kv_idx]", "floats[q_idx]", "(q_idx * 0.5)", "(h * x)", "table[q_idx, kv_idx]", "floats[h]", "kv_idx.float()"),
    "i": (
        "q_idx",
        "kv_idx",
        "q_idx",
        "kv_idx",
        "h",
        "b",
        "ints[q_idx]",
        "(kv_idx - q_idx)",
        "(q_idx - kv_idx)",
        "ids[kv_idx]",
        "ids[q_idx - 7]",
        "(h + n)",
        "(q_idx + n)",
        "(b - big)",
        "grid[q_idx, h]",
        "grid[b, kv_idx]",
        "ids[n - kv_idx]",
    ),
    "b": (
        "(q_idx >= kv_idx)",
        "flags[kv_idx]",
        "(kv_idx > n)",
        "(q_idx - kv_idx < n)",
        "(ids[q_idx] == ids[kv_idx])",
        "flags[q_idx // 2]",
        "(kv_idx < ids[b])",
    ),
    "a": ("x", "2", "0.5", "n", "q_idx", "kv_idx", "big"),
}


@st.composite
def mask_captures(draw) -> dict:
    """What masks of MASK_LEAVES capture."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    integer = draw(st.sampled_from(INTEGERS))
    spread = draw(st.sampled_from((1, 5, 40, LARGEST_INT)))
    limits = torch.iinfo(integer)
    floats = torch.randn(40, generator=generator) * draw(st.sampled_from((1.0, 50.0)))
    if draw(st.integers(0, 4)) == 0:
        floats[draw(st.integers(0, 39))] = draw(st.sampled_from((math.nan, math.inf, -math.inf, 3e38)))
    return {
        "floats": floats.to(draw(st.sampled_from(FLOATS))),
        "flags": torch.rand(30, generator=generator) < draw(st.sampled_from((0.1, 0.9))),
        "ints": torch.randint(max(-spread, limits.min), min(spread, limits.max), (50,), generator=generator).to(integer),
        "ids": torch.randint(0, 4, (60,), generator=generator).sort().values,
        "table": torch.randn(64, 64, generator=generator),
        "grid": torch.randint(-9, 9, (64, 64), generator=generator),
        "x": draw(st.sampled_from((0.5, -1.25, 3.0))),
        "n": draw(st.sampled_from((0, 1, 5, 17, 40, -3, 2**31 - 1, -(2**31), 2**31, 2**40))),
        "big": draw(st.sampled_from((2**31 - 1, -(2**31), 2**30, 100, 2**33))),
        "on": draw(st.booleans()),
    }
