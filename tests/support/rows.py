"""How the rows of the op table are written, and with what operands."""

from __future__ import annotations

import functools
import itertools

import torch

from support.evaluate import DTYPES

# How each row is written. A row that is missing here fails test_every_row_has_a_test.
FORMS = {
    **{
        name: (f"{{0}} {symbol} {{1}}",)
        for name, symbol in {
            "add": "+",
            "sub": "-",
            "mul": "*",
            "div": "/",
            "floor_divide": "//",
            "remainder": "%",
            "pow": "**",
            "eq": "==",
            "ne": "!=",
            "lt": "<",
            "le": "<=",
            "gt": ">",
            "ge": ">=",
            "and_": "&",
            "or_": "|",
            "xor": "^",
            "lshift": "<<",
            "rshift": ">>",
        }.items()
    },
    "neg": ("-{0}",),
    "abs": ("abs({0})",),
    "invert": ("~{0}",),
    **{
        name: (f"torch.{name}({{0}})",)
        for name in (
            "sign",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log1p",
            "sqrt",
            "rsqrt",
            "sin",
            "cos",
            "tan",
            "atan",
            "asin",
            "acos",
            "sinh",
            "cosh",
            "asinh",
            "acosh",
            "atanh",
            "log10",
            "sinc",
            "frac",
            "signbit",
            "real",
            "isreal",
            "deg2rad",
            "rad2deg",
            "erf",
            "erfc",
            "sigmoid",
            "tanh",
            "floor",
            "ceil",
            "trunc",
            "logical_not",
            "square",
            "reciprocal",
            "isnan",
            "isinf",
            "isposinf",
            "isneginf",
            "isfinite",
            "relu",
        )
    },
    **{
        name: (f"torch.{name}({{0}}, {{1}})",)
        for name in (
            "float_power",
            "fmod",
            "atan2",
            "logical_and",
            "logical_or",
            "logical_xor",
            "clamp_min",
            "clamp_max",
            "logaddexp",
            "logaddexp2",
            "hypot",
            "copysign",
            "heaviside",
            "fmax",
            "fmin",
            "xlogy",
        )
    },
    "minimum": ("torch.minimum({0}, {1})", "torch.min({0}, {1})", "{0}.min({1})"),
    "maximum": ("torch.maximum({0}, {1})", "torch.max({0}, {1})", "{0}.max({1})"),
    "where": ("torch.where({0}, {1}, {2})",),
    "where_method": ("{0}.where({1}, {2})",),
    "masked_fill": ("{0}.masked_fill({1}, {2})",),
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
    "leaky_relu": ("F.leaky_relu({0})", "F.leaky_relu({0}, 0.25)"),
    "prelu": ("F.prelu({0}, torch.tensor(0.25))",),  # one weight, of the operand's dtype
    "elu": ("F.elu({0})", "F.elu({0}, 2.0)"),
    "mish": ("F.mish({0})",),
    "hardtanh": ("F.hardtanh({0})", "F.hardtanh({0}, -2.0, 3.0)"),
    "relu6": ("F.relu6({0})",),
    "celu": ("F.celu({0})", "F.celu({0}, 2.0)"),
    "selu": ("F.selu({0})",),
    "hardsigmoid": ("F.hardsigmoid({0})",),
    "hardswish": ("F.hardswish({0})",),
    "softsign": ("F.softsign({0})",),
    "tanhshrink": ("F.tanhshrink({0})",),
    "softshrink": ("F.softshrink({0})", "F.softshrink({0}, 2.0)"),
    "hardshrink": ("F.hardshrink({0})", "F.hardshrink({0}, 2.0)"),
    "addcmul": ("torch.addcmul({0}, {1}, {2})", "torch.addcmul({0}, {1}, {2}, value=3)"),
    "addcdiv": ("torch.addcdiv({0}, {1}, {2})", "torch.addcdiv({0}, {1}, {2}, value=0.5)"),
    "positive": ("torch.positive({0})",),
    "lerp": ("torch.lerp({0}, {1}, {2})",),
    "logit": ("torch.logit({0})", "torch.logit({0}, 0.01)"),
    "nan_to_num": ("torch.nan_to_num({0})", "torch.nan_to_num({0}, 1.0, 2.0, -3.0)"),
    # at every position: torch writes whether both are NaN into a tensor of the shape of the first operand
    "isclose": ("torch.isclose({0}, {1})", "torch.isclose(torch.where({1} == {1}, {0}, {0}), {1}, rtol=0.5, equal_nan=True)"),
    "rint": ("torch.round({0})",),
    "round": ("torch.round({0}, decimals=0)", "torch.round({0}, decimals=2)", "torch.round({0}, decimals=-1)"),
    "threshold": ("F.threshold({0}, 0.5, 2)",),
    "detach": ("{0}.detach()",),
}


DIVISIONS = ("floor_divide", "remainder", "fmod", "div_trunc", "div_mode")


NUMBERS = (bool, int, float)


NUMBER_VALUES = {bool: (True, False), int: (0, 1, 2, 3, 5, 31), float: (0.0, 0.5, -1.5, 2.0, 100.0)}


def arity(form: str) -> int:
    """How many operands a form takes."""
    return sum(f"{{{i}}}" in form for i in range(3))


@functools.cache
def legal_operands(form: str) -> list[tuple]:
    """The kinds of operands that torch accepts: dtypes for tensors, bool, int or float for Python numbers."""
    found = []
    for kinds in itertools.product((*DTYPES, *NUMBERS), repeat=arity(form)):
        dtypes = [k for k in kinds if not isinstance(k, type)]
        if not dtypes:
            continue
        if ("alpha=" in form or ".addc" in form) and (torch.bool in kinds or len({k.is_floating_point for k in dtypes}) == 2):
            continue  # refused here; torch rounds an integer to half precision before the product
        if form == "{0} ** {1}" and kinds == (torch.bool, bool):
            continue  # refused here
        ones = [k(1) if isinstance(k, type) else torch.ones(1, dtype=k) for k in kinds]
        operands = {f"x{i}": one for i, one in enumerate(ones)}
        try:
            eval(form.format(*operands), {"torch": torch, "F": torch.nn.functional, **operands})
        except (AttributeError, IndexError, TypeError, RuntimeError):  # torch.max(x, 1) is of a dimension
            continue
        found.append(kinds)
    return found
