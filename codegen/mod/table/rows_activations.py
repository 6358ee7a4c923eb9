"""Rows of the op table: activations, as torch.nn.functional has them, written in terms of other rows (see op.py for the columns)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .op import Op, elementwise


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
    below = x < 0  # a choice of forms that agree at 0 in all derivatives, as the least of x and 0 would not
    small, large = torch.where(below, x, 0.0), torch.where(below, 0.0, x)
    return torch.where(below, x - torch.log1p(torch.exp(small)), -torch.log1p(torch.exp(-large)))


def _silu(x, inplace=False):
    return x * torch.sigmoid(x)


def _leaky_relu(x, negative_slope=0.01, inplace=False):
    return torch.where(x > 0, x, x * negative_slope)


def _prelu(x, weight):
    """With one weight, of any number of dimensions: there are no channels in one score."""
    return torch.where(x > 0, x, weight.reshape(()) * x)


def _elu(x, alpha=1.0, scale=1, input_scale=1, inplace=False):
    return torch.where(x > 0, x * scale, torch.expm1(torch.where(x > 0, 0.0, x) * input_scale) * (alpha * scale))


def _hardtanh(x, min_val=-1.0, max_val=1.0, inplace=False):
    return torch.where(x <= min_val, min_val, torch.where(x >= max_val, max_val, x)).to(x.dtype)  # no gradient at a bound, unlike clamp


def _mish(x, inplace=False):
    return x * torch.tanh(_softplus(x))


def _relu(x, inplace=False):
    return torch.where(x <= 0, torch.zeros_like(x), x)  # keeps NaN, as torch does


def _celu(x, alpha=1.0, inplace=False):
    return _elu(x, alpha, 1, 1 / alpha)


def _selu(x, inplace=False):
    return _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)  # arXiv:1706.02515


def _hardsigmoid(x, inplace=False):
    return _hardtanh(x + 3.0, 0.0, 6.0) / 6.0


def _hardswish(x, inplace=False):
    return x * _hardsigmoid(x)


def _softshrink(x, lambd=0.5):
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0.0))


def _hardshrink(x, lambd=0.5):
    return torch.where((x >= -lambd) & (x <= lambd), torch.zeros_like(x), x)


def _threshold(x, threshold, value, inplace=False):
    return torch.where(x <= threshold, value, x).to(x.dtype)


ACTIVATIONS = [
    Op("threshold", F.threshold, ("F.threshold", "torch.threshold"), expand=_threshold),
    Op("relu", torch.relu, elementwise("relu", "F.relu"), expand=_relu),
    Op("leaky_relu", F.leaky_relu, ("F.leaky_relu",), expand=_leaky_relu),
    Op("prelu", torch.prelu, elementwise("prelu", "F.prelu"), expand=_prelu),
    Op("elu", F.elu, ("F.elu",), expand=_elu),
    Op("mish", F.mish, ("F.mish",), expand=_mish),
    Op("hardtanh", F.hardtanh, ("F.hardtanh",), expand=_hardtanh),
    Op("relu6", F.relu6, ("F.relu6",), expand=lambda x, inplace=False: _hardtanh(x, 0.0, 6.0)),
    Op("gelu", F.gelu, ("F.gelu",), expand=_gelu),
    Op("silu", F.silu, ("F.silu",), expand=_silu),
    Op("softplus", F.softplus, ("F.softplus",), expand=_softplus),
    Op("logsigmoid", F.logsigmoid, ("F.logsigmoid",), expand=_logsigmoid),
    Op("celu", F.celu, ("F.celu", "torch.celu"), expand=_celu),
    Op("selu", F.selu, ("F.selu", "torch.selu"), expand=_selu),
    Op("hardsigmoid", F.hardsigmoid, ("F.hardsigmoid",), expand=_hardsigmoid),
    Op("hardswish", F.hardswish, ("F.hardswish",), expand=_hardswish),
    Op("softsign", F.softsign, ("F.softsign",), expand=lambda x: x / (torch.abs(x) + 1)),
    Op("tanhshrink", F.tanhshrink, ("F.tanhshrink",), expand=lambda x: x - torch.tanh(x)),
    Op("softshrink", F.softshrink, ("F.softshrink",), expand=_softshrink),
    Op("hardshrink", F.hardshrink, ("F.hardshrink",), expand=_hardshrink),
]
