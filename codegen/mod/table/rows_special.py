"""Rows of the op table: functions of two and three operands and special functions, in terms of other rows (see op.py for the columns)."""

from __future__ import annotations

import math

import torch

from .op import Op, elementwise, kind
from .rows_composed import in_dtype_of, is_integral, is_number


def _counted(x):
    """A bool as 0 or 1, as torch subtracts no bools."""
    return x * 1 if kind(x.dtype) == "bool" else x


def _lerp(start, end, weight):
    near_start, near_end = start + weight * (end - start), end - (end - start) * (1 - weight)
    if is_number(weight):
        return near_start if abs(weight) < 0.5 else near_end
    return torch.where(torch.abs(weight) < 0.5, near_start, near_end)


def _logaddexp(x, y):
    larger, apart = _apart(x, y)
    return larger + torch.log1p(torch.exp(-apart))


def _logaddexp2(x, y):
    larger, apart = _apart(x, y)
    return larger + torch.log1p(torch.exp2(-apart)) / math.log(2)


def _apart(x, y):
    """The larger one, and by how much it is larger. Chosen, so that there is a derivative where both are the same."""
    x, y = _counted(x), _counted(y)
    first = x >= y
    larger, smaller = torch.where(first, x, y), torch.where(first, y, x)
    infinite = (x == y) & (torch.abs(x) == math.inf)  # their difference would be NaN
    return larger, torch.where(infinite, 0.0, larger - smaller)


def _xlogy(x, y):
    if type(y) in (bool, int, float) and 0 < y < math.inf:
        return x * math.log(y)  # not rounded to half precision, as a constant of x's dtype would be
    both = x + y
    dtype = torch.float32 if is_integral(both) else both.dtype  # of the result; torch rounds y to it before the logarithm
    y = torch.full_like(x, y, dtype=dtype) if is_number(y) else y.to(dtype)
    nothing, endless = (x == 0) & ((y <= 0) | (y == math.inf)), y == 0
    # at y = 0 no gradient: 0 of it times the logarithm would be NaN where torch has 0
    infinite = (x if is_number(x) else x.detach().to(dtype)) * -math.inf
    return torch.where(nothing, 0.0, torch.where(endless, infinite, x * torch.log(torch.where(nothing | endless, 1.0, y))))


def _sinc(x):
    turn = torch.where(x == 0, 1.0, x) * math.pi
    return torch.where(x == 0, 1.0, torch.sin(turn) / turn)


def _logit(x, eps=None):
    x = _counted(x) if eps is None else torch.clamp(x, eps, 1.0 - eps)
    return torch.log(x / (1.0 - x))


def _nan_to_num(x, nan=0.0, posinf=None, neginf=None):
    if is_integral(x):
        return x
    largest = torch.finfo(x.dtype).max
    posinf, neginf = largest if posinf is None else posinf, -largest if neginf is None else neginf
    x = torch.where(x == math.inf, posinf, torch.where(x == -math.inf, neginf, x))
    return torch.where(x != x, 0.0 if nan is None else nan, x)


def _isclose(x, y, rtol=1e-05, atol=1e-08, equal_nan=False):
    x, y = _counted(x), _counted(y)
    close = torch.abs(x - y) <= torch.abs(y) * rtol + atol
    close = (x == y) | (torch.isfinite(x) & torch.isfinite(y) & close)
    return close | ((x != x) & (y != y)) if equal_nan else close


def _addcmul(x, tensor1, tensor2, *, value=1):
    total = x + tensor1 + tensor2
    return torch.add(x, in_dtype_of(total, tensor1) * in_dtype_of(total, tensor2), alpha=value)


def _addcdiv(x, tensor1, tensor2, *, value=1):
    if all(map(is_integral, (x, tensor1, tensor2))):
        raise TypeError("addcdiv of integers: write x + value * (a / b)")
    return torch.add(x, tensor1 / tensor2, alpha=value)


SPECIAL = [
    Op("addcmul", torch.addcmul, elementwise("addcmul"), expand=_addcmul),
    Op("addcdiv", torch.addcdiv, elementwise("addcdiv"), expand=_addcdiv),
    Op("lerp", torch.lerp, elementwise("lerp"), expand=_lerp),
    Op("logaddexp", torch.logaddexp, elementwise("logaddexp"), expand=_logaddexp),
    Op("logaddexp2", torch.logaddexp2, elementwise("logaddexp2"), expand=_logaddexp2),
    Op("fmax", torch.fmax, elementwise("fmax"), expand=lambda x, y: torch.where((x >= y) | (y != y), x, y)),
    Op("fmin", torch.fmin, elementwise("fmin"), expand=lambda x, y: torch.where((x <= y) | (y != y), x, y)),
    Op("xlogy", torch.xlogy, elementwise("xlogy", "special.xlogy"), expand=_xlogy),
    Op("sinc", torch.sinc, elementwise("sinc", "special.sinc"), expand=_sinc),
    Op("logit", torch.logit, elementwise("logit", "special.logit"), expand=_logit),
    Op("frac", torch.frac, elementwise("frac"), expand=lambda x: x - torch.trunc(x)),
    Op("nan_to_num", torch.nan_to_num, elementwise("nan_to_num"), expand=_nan_to_num),
    Op("isclose", torch.isclose, elementwise("isclose"), expand=_isclose),
    Op("deg2rad", torch.deg2rad, elementwise("deg2rad"), expand=lambda x: x * (math.pi / 180)),
    Op("rad2deg", torch.rad2deg, elementwise("rad2deg"), expand=lambda x: x * (180 / math.pi)),
]
