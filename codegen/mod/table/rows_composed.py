"""Rows of the op table that are written in terms of others, as in a mod (see op.py for the columns)."""

from __future__ import annotations

import math
import operator

import torch

from ..captured.program import NUMBERS, UNKNOWN_NUMBERS
from ..captured.stand_ins import as_python
from .op import Op, div_trunc, elementwise, kind, rint


def _clamp(x, min=None, max=None):
    if min is None and max is None:
        raise TypeError("torch.clamp needs min, max or both")
    if min is not None and max is not None and not is_number(min) and not is_integral(min):
        min = torch.where(min < max, min, torch.detach(min))  # bounds that are the same have no gradient below them
    x = x if min is None else torch.where(x < min if is_integral(min) else (x < min) | _is_nan(min, x), min, x)
    return x if max is None else torch.where(x > max if is_integral(max) else (x > max) | _is_nan(max, x), max, x)


def _is_nan(bound, x):
    if type(bound) is torch.SymFloat:  # asked in the kernel: nobody knows it yet
        bound = torch.full_like(x, bound, dtype=torch.float32)
    return bound != bound


def _div(x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return operator.truediv(x, y)
    if rounding_mode == "floor":
        return torch.floor_divide(x, y)
    if rounding_mode == "trunc":
        return div_trunc(x, y)
    raise ValueError(f"rounding_mode is {rounding_mode!r}; write None, 'floor' or 'trunc'")


def is_integral(x) -> bool:
    x = as_python(x)
    return issubclass(UNKNOWN_NUMBERS.get(type(x), type(x)), int) if is_number(x) else kind(x.dtype) != "float"


def is_number(x) -> bool:
    return isinstance(as_python(x), (*NUMBERS, *UNKNOWN_NUMBERS))


def _isinf(x):
    return torch.zeros_like(x, dtype=torch.bool) if is_integral(x) else torch.abs(x) == math.inf


def _isfinite(x):
    return torch.ones_like(x, dtype=torch.bool) if is_integral(x) else torch.abs(x) < math.inf


def _add(x, y, *, alpha=1):
    return operator.add(x, _scaled(x, y, alpha))


def _sub(x, y, *, alpha=1):
    return operator.sub(x, _scaled(x, y, alpha))


def _scaled(x, y, alpha):
    """y * alpha, in the dtype of x + y."""
    if type(alpha) is int and alpha == 1:
        return y
    total = x + y
    if kind(total.dtype) == "bool" or (kind(total.dtype) == "int" and not is_integral(alpha)):
        raise TypeError(f"alpha is {as_python(alpha)}, but the operands are {total.dtype}: write the product yourself")
    if is_number(y):
        return y * alpha
    product = torch.mul(in_dtype_of(total, y), alpha)
    return product if kind(total.dtype) == "int" else product.to(total.dtype)


def in_dtype_of(total, y):
    """An operand in the dtype of a sum: a number like an index where the sum is one, so that what is computed of it is int64 wherever int32
    is too small."""
    return y + torch.zeros_like(total) if kind(total.dtype) == "int" else y.to(total.dtype)


def _round(x, *, decimals=0):
    decimals = int(decimals)
    if decimals == 0:
        return rint(x)
    if is_integral(x):
        raise TypeError(f"round of {x.dtype} with decimals: write .float() first")
    unit = 10.0 ** abs(decimals)
    return rint(x * unit) / unit if decimals > 0 else rint(x / unit) * unit


def _copysign(x, y):
    dtype = (x + y).dtype
    size = torch.abs(x * 1.0).to(dtype if dtype.is_floating_point else torch.get_default_dtype())
    if is_number(y):
        return size * math.copysign(1.0, float(y))
    return torch.where(_signbit(y), -size, size)


def _signbit(x):
    return (x < 0) if is_integral(x) else (x < 0) | ((x == 0) & (1.0 / x < 0))


def _heaviside(x, values):
    return torch.where(x == 0, values, (x > 0).to(x.dtype)).to(x.dtype)


def _masked_fill(x, mask, value):
    if kind(mask.dtype) != "bool":
        raise TypeError(f"masked_fill takes a mask of bools, not of {mask.dtype}: compare first")
    return torch.where(mask, value, x).to(x.dtype)


def _float_power(x, y):
    x, y = (float(v) if is_number(v) else v.double() for v in (x, y))
    return x**y


COMPOSED = [
    Op("add_alpha", torch.add, elementwise("add"), expand=_add),
    Op("sub_alpha", torch.sub, elementwise("sub", "torch.subtract", "Tensor.subtract"), expand=_sub),
    Op("div_mode", torch.div, (*elementwise("div"), *elementwise("divide"), *elementwise("true_divide")), expand=_div),
    Op("rsub", torch.rsub, ("torch.rsub",), expand=lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha)),
    Op("where_method", torch.Tensor.where, ("Tensor.where",), expand=lambda x, condition, y: torch.where(condition, x, y)),
    Op("masked_fill", torch.masked_fill, elementwise("masked_fill"), expand=_masked_fill),
    Op("clamp", torch.clamp, elementwise("clamp", "torch.clip", "Tensor.clip"), expand=_clamp),
    Op("clamp_min", torch.clamp_min, elementwise("clamp_min"), expand=lambda x, min: _clamp(x, min=min)),
    Op("clamp_max", torch.clamp_max, elementwise("clamp_max"), expand=lambda x, max: _clamp(x, max=max)),
    Op("float_power", torch.float_power, elementwise("float_power"), expand=_float_power),
    Op("round", torch.round, elementwise("round", "special.round"), expand=_round),
    Op("copysign", torch.copysign, elementwise("copysign"), expand=_copysign),
    Op("signbit", torch.signbit, elementwise("signbit"), expand=_signbit),
    Op("heaviside", torch.heaviside, elementwise("heaviside"), expand=_heaviside),
    Op("positive", torch.positive, elementwise("positive"), expand=lambda x: x),
    Op("real", torch.real, ("torch.real", *elementwise("conj"), *elementwise("conj_physical")), expand=lambda x: x),
    Op("isreal", torch.isreal, elementwise("isreal"), expand=lambda x: torch.ones_like(x, dtype=torch.bool)),
    Op("square", torch.square, elementwise("square"), expand=lambda x: x**2),
    Op("reciprocal", torch.reciprocal, elementwise("reciprocal"), expand=lambda x: 1.0 / x),
    Op("isnan", torch.isnan, elementwise("isnan"), expand=lambda x: x != x),
    Op("isinf", torch.isinf, elementwise("isinf"), expand=_isinf),
    Op("isposinf", torch.isposinf, elementwise("isposinf"), expand=lambda x: x == math.inf),
    Op("isneginf", torch.isneginf, elementwise("isneginf"), expand=lambda x: x == -math.inf),
    Op("isfinite", torch.isfinite, elementwise("isfinite"), expand=_isfinite),
]
