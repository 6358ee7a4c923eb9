"""Rows of the op table that are written in terms of others, as in a mod (see op.py for the columns)."""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F

from .op import Op, div_trunc, elementwise, kind
from .program import NUMBERS, UNKNOWN_NUMBERS
from .stand_ins import as_python


def _clamp(x, min=None, max=None):
    if min is None and max is None:
        raise TypeError("torch.clamp needs min, max or both")
    x = x if min is None else torch.where(x < min if _is_integral(min) else (x < min) | _is_nan(min, x), min, x)
    return x if max is None else torch.where(x > max if _is_integral(max) else (x > max) | _is_nan(max, x), max, x)


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


def _is_integral(x) -> bool:
    x = as_python(x)
    return issubclass(UNKNOWN_NUMBERS.get(type(x), type(x)), int) if _is_number(x) else kind(x.dtype) != "float"


def _is_number(x) -> bool:
    return isinstance(x, (*NUMBERS, *UNKNOWN_NUMBERS))


def _softplus(x, beta=1, threshold=20):
    scaled = x * beta
    linear = scaled > threshold
    return torch.where(linear, x, torch.log1p(torch.exp(torch.where(linear, 0.0, scaled))) / beta)  # no overflow, no 0 * inf


def _gelu(x, approximate="none"):
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + torch.tanh(inner))
    if approximate != "none":
        raise ValueError(f"approximate is {approximate!r}; write 'none' or 'tanh'")
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _logsigmoid(x):
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-torch.abs(x)))  # at 0 the derivatives are 1/2 and 0


def _isinf(x):
    return torch.zeros_like(x, dtype=torch.bool) if _is_integral(x) else torch.abs(x) == math.inf


def _isfinite(x):
    return torch.ones_like(x, dtype=torch.bool) if _is_integral(x) else torch.abs(x) < math.inf


def _add(x, y, *, alpha=1):
    return operator.add(x, _scaled(x, y, alpha))


def _sub(x, y, *, alpha=1):
    return operator.sub(x, _scaled(x, y, alpha))


def _scaled(x, y, alpha):
    """y * alpha, in the dtype of x + y."""
    if type(alpha) is int and alpha == 1:
        return y
    dtype = (x + y).dtype
    if kind(dtype) == "bool" or (kind(dtype) == "int" and not _is_integral(alpha)):
        raise TypeError(f"alpha is {as_python(alpha)}, but the operands are {dtype}: write the product yourself")
    return y * alpha if _is_number(as_python(y)) else torch.mul(y.to(dtype), alpha).to(dtype)


def _masked_fill(x, mask, value):
    if kind(mask.dtype) != "bool":
        raise TypeError(f"masked_fill takes a mask of bools, not of {mask.dtype}: compare first")
    return torch.where(mask, value, x).to(x.dtype)


def _silu(x, inplace=False):
    return x * torch.sigmoid(x)


def _leaky_relu(x, negative_slope=0.01, inplace=False):
    return torch.where(x > 0, x, x * negative_slope)


def _elu(x, alpha=1.0, scale=1, input_scale=1, inplace=False):
    return torch.where(x > 0, x * scale, torch.expm1(torch.where(x > 0, 0.0, x) * input_scale) * (alpha * scale))


def _hardtanh(x, min_val=-1.0, max_val=1.0, inplace=False):
    return torch.where(x <= min_val, min_val, torch.where(x >= max_val, max_val, x)).to(x.dtype)  # no gradient at a bound, unlike clamp


def _mish(x, inplace=False):
    return x * torch.tanh(_softplus(x))


def _relu(x, inplace=False):
    return torch.where(x <= 0, torch.zeros_like(x), x)  # keeps NaN, as torch does


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
    Op("square", torch.square, elementwise("square"), expand=lambda x: x**2),
    Op("reciprocal", torch.reciprocal, elementwise("reciprocal"), expand=lambda x: 1.0 / x),
    Op("isnan", torch.isnan, elementwise("isnan"), expand=lambda x: x != x),
    Op("isinf", torch.isinf, elementwise("isinf"), expand=_isinf),
    Op("isposinf", torch.isposinf, elementwise("isposinf"), expand=lambda x: x == math.inf),
    Op("isneginf", torch.isneginf, elementwise("isneginf"), expand=lambda x: x == -math.inf),
    Op("isfinite", torch.isfinite, elementwise("isfinite"), expand=_isfinite),
    Op("relu", torch.relu, elementwise("relu", "F.relu"), expand=_relu),
    Op("leaky_relu", F.leaky_relu, ("F.leaky_relu",), expand=_leaky_relu),
    Op("elu", F.elu, ("F.elu",), expand=_elu),
    Op("mish", F.mish, ("F.mish",), expand=_mish),
    Op("hardtanh", F.hardtanh, ("F.hardtanh",), expand=_hardtanh),
    Op("relu6", F.relu6, ("F.relu6",), expand=lambda x, inplace=False: _hardtanh(x, 0.0, 6.0)),
    Op("gelu", F.gelu, ("F.gelu",), expand=_gelu),
    Op("silu", F.silu, ("F.silu",), expand=_silu),
    Op("softplus", F.softplus, ("F.softplus",), expand=_softplus),
    Op("logsigmoid", F.logsigmoid, ("F.logsigmoid",), expand=_logsigmoid),
]
