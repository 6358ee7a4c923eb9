"""Rows of the op table: exponentials, roots, circular functions and roundings (see op.py for the columns)."""

from __future__ import annotations

import math

import torch

from . import interval_rules as rules
from . import ranges
from .op import unary

FUNCTIONS = [
    unary("exp", "tl.exp({0})", cpp="exp({0})", derivative=lambda g, x, r: g * r, interval=rules.rising(torch.exp, 2**-14)),
    unary(
        "exp2", "tl.exp2({0})", cpp="exp2({0})", derivative=lambda g, x, r: g * r * math.log(2), interval=rules.rising(torch.exp2, 2**-14)
    ),
    unary(
        "expm1",
        "libdevice.expm1({0})",
        cpp="expm1({0})",
        derivative=lambda g, x, r: g * (r + 1),
        interval=rules.rising(torch.expm1, 2**-14),
    ),
    unary("log", "tl.log({0})", cpp="log({0})", derivative=lambda g, x, r: g / x, interval=rules.rising(torch.log, tiny=2**-16, low=1e-30)),
    unary(
        "log2",
        "tl.log2({0})",
        cpp="log2({0})",
        derivative=lambda g, x, r: g / (x * math.log(2)),
        interval=rules.rising(torch.log2, tiny=2**-16, low=1e-30),
    ),
    unary(
        "log10",
        "libdevice.log10({0})",
        cpp="log10({0})",
        derivative=lambda g, x, r: g / (x * math.log(10)),
        interval=rules.rising(torch.log10, tiny=2**-16, low=1e-30),
    ),
    unary(
        "log1p",
        "libdevice.log1p({0})",
        cpp="log1p({0})",
        derivative=lambda g, x, r: g / (x + 1),
        interval=rules.rising(torch.log1p, low=-0.99),
    ),
    unary(
        "sqrt",
        "tl.sqrt({0})",
        cpp="sqrt({0})",
        derivative=lambda g, x, r: g / (2 * r),
        interval=rules.rising(torch.sqrt, tiny=1e-18, low=0),
    ),
    unary("rsqrt", "tl.rsqrt({0})", cpp="rsqrt({0})", derivative=lambda g, x, r: -0.5 * g * r**3, interval=rules.rsqrt_interval),
    unary(
        "sin",
        "tl.sin({0})",
        cpp="sin({0})",
        derivative=lambda g, x, r: g * torch.cos(x),
        interval=rules.within(-1.001, 1.001),
        size=lambda x: 1.0,
    ),
    unary(
        "cos",
        "tl.cos({0})",
        cpp="cos({0})",
        derivative=lambda g, x, r: g * -torch.sin(x),
        interval=rules.within(-1.001, 1.001),
        size=lambda x: 1.0,
    ),
    unary("tan", "libdevice.tan({0})", cpp="tan({0})", derivative=lambda g, x, r: g * (1 + r * r)),
    unary(
        "atan",
        "libdevice.atan({0})",
        "torch.arctan",
        "Tensor.arctan",
        cpp="atan({0})",
        derivative=lambda g, x, r: g / (1 + x * x),
        interval=rules.rising(torch.atan),
    ),
    unary(
        "asin",
        "libdevice.asin({0})",
        "torch.arcsin",
        "Tensor.arcsin",
        cpp="asin({0})",
        derivative=lambda g, x, r: g * torch.rsqrt(1 - x * x),
    ),
    unary(
        "acos",
        "libdevice.acos({0})",
        "torch.arccos",
        "Tensor.arccos",
        cpp="acos({0})",
        derivative=lambda g, x, r: -g * torch.rsqrt(1 - x * x),
    ),
    unary(
        "sinh",
        "libdevice.sinh({0})",
        cpp="sinh({0})",
        derivative=lambda g, x, r: g * torch.cosh(x),
        interval=rules.rising(torch.sinh, 2**-14),
    ),
    unary("cosh", "libdevice.cosh({0})", cpp="cosh({0})", derivative=lambda g, x, r: g * torch.sinh(x)),
    unary(
        "asinh",
        "libdevice.asinh({0})",
        "torch.arcsinh",
        "Tensor.arcsinh",
        cpp="asinh({0})",
        derivative=lambda g, x, r: g * torch.rsqrt(1 + x * x),
        interval=rules.rising(torch.asinh),
    ),
    unary(
        "acosh",
        "libdevice.acosh({0})",
        "torch.arccosh",
        "Tensor.arccosh",
        cpp="acosh({0})",
        derivative=lambda g, x, r: g * torch.rsqrt(x * x - 1),
    ),
    unary("atanh", "libdevice.atanh({0})", "torch.arctanh", "Tensor.arctanh", cpp="atanh({0})", derivative=lambda g, x, r: g / (1 - x * x)),
    unary(
        "erf",
        "tl.erf({0})",
        cpp="erf({0})",
        derivative=lambda g, x, r: g * torch.exp(-(x * x)) * (2 / math.sqrt(math.pi)),
        interval=rules.rising(torch.erf),
        size=lambda x: 1.0,
        of_infinity=True,
    ),
    unary(
        "sigmoid",
        "tl.sigmoid({0})",
        "F.sigmoid",
        "special.expit",
        cpp="sigmoid({0})",
        derivative=lambda g, x, r: g * ((1 - r) * r),
        interval=rules.rising(torch.sigmoid, 2**-14),
        gluon={"float": "1.0 / (1.0 + gl.exp({0} * -1.0))"},
        size=lambda x: 1.0,
        of_infinity=True,
    ),
    # libdevice's tanh costs more than the whole attention around it. PTX tanh.approx is one instruction with relative
    # error 2**-11, below bfloat16's rounding (2**-9); the form by exp2 is good to float32's rounding of 1.
    unary(
        "tanh",
        "libdevice.tanh({0})",
        "F.tanh",
        cpp="tanh({0})",
        approximate={
            ("cuda", "bfloat16"): "tanh_approx({0})",
            ("cuda", "float8_e4m3fn"): "tanh_approx({0})",
            ("cuda", "float16"): "tanh_by_exp2({0})",
            ("hip", "bfloat16"): "tanh_by_exp2({0})",
            ("hip", "float16"): "tanh_by_exp2({0})",
        },
        derivative=lambda g, x, r: g * (1 - r * r),
        interval=rules.rising(torch.tanh, 2**-10),
        size=lambda x: 1.0,
        of_infinity=True,
    ),
]

ROUNDINGS = [
    unary(
        "detach",
        "{0}",
        operands="result",
        interval=lambda x: (x.lo, x.hi),
        exact=True,
        product=None,
        range=ranges.same,
        size=abs,
        of_infinity=True,
    ),
    unary(
        "floor",
        {"float": "tl.floor({0})", "int": "{0}"},
        cpp={"float": "floor({0})"},
        operands="result",
        interval=rules.steps(torch.floor),
        exact=True,
        jumps=True,
        range=ranges.rounded,
    ),
    unary(
        "ceil",
        {"float": "tl.ceil({0})", "int": "{0}"},
        cpp={"float": "ceil({0})"},
        operands="result",
        interval=rules.steps(torch.ceil),
        exact=True,
        jumps=True,
        range=ranges.rounded,
    ),
    unary(
        "trunc",
        {"float": "libdevice.trunc({0})", "int": "{0}"},
        "torch.fix",
        "Tensor.fix",
        cpp={"float": "trunc({0})"},
        operands="result",
        interval=rules.steps(torch.trunc),
        exact=True,
        jumps=True,
        range=ranges.rounded,
    ),
    unary(
        "round",
        {"float": "libdevice.rint({0})", "int": "{0}"},
        cpp={"float": "round({0})"},
        operands="result",
        interval=rules.steps(torch.round),
        exact=True,
        jumps=True,
        range=ranges.rounded,
    ),
]
