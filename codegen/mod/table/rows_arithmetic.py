"""Rows of the op table: arithmetic (see op.py for the columns)."""

from __future__ import annotations

import operator

import torch

from ..current import applied, running
from . import interval_rules as rules
from . import ranges
from .op import Integers, Op, div_trunc, elementwise, kind, unary


def _split(g, other, tie):
    """The gradient of one operand of minimum or maximum: none where the `other` is taken, half where they are equal."""
    return torch.where(other, 0.0, torch.where(tie, 0.5 * g, g))


def _over_square(part, x, y):
    x, y = x.float(), y.float()
    square = x * x + y * y
    return torch.where(square == 0, 0.0, part / square)


def _pow_base(g, x, y, r):
    return torch.where(y == 0, 0.0, g * (y * x ** (y + -1)))  # y may be a bool, which torch does not subtract from


def _pow_exponent(g, x, y, r):
    return torch.where((x == 0) & (y >= 0), 0.0, g * (r * torch.log(x.float())))


def _simple_power(x, y):
    """Constant powers as products: exact for integers, and cheaper than pow."""
    base, exponent = x.expr, y.expr
    if not exponent.is_literal or base.weak or kind(base.dtype) == "bool":
        return None
    if not exponent.weak:
        is_one = exponent.attr == 0 and base.dtype.is_floating_point and torch.promote_types(base.dtype, exponent.dtype) == base.dtype
        return applied(torch.ones_like, (x,), {}) if is_one else None
    power = exponent.attr
    if kind(base.dtype) == "int":
        if isinstance(power, float):
            return None
        if power < 0:
            raise running().error("an integer to a negative power", "Convert the base first, with .float().")
    elif power == 0.5:
        return applied(torch.sqrt, (x,), {})
    elif power not in (0, 1, 2, 3, 4):
        return None
    result, square, bits = None, x, int(power)
    while bits:
        if bits & 1:
            result = square if result is None else result * square
        bits >>= 1
        square = square * square if bits else square
    return applied(torch.ones_like, (x,), {}) if result is None else result


def _is_natural_division(dtype: torch.dtype, dividend: tuple, divisor: tuple) -> bool:
    """Triton's // and % round towards zero, which agrees with torch's rounding down here. (What the dtype does not hold wraps around.)"""
    return kind(dtype) == "int" and dividend[0] >= 0 and divisor[0] >= 1 and max(dividend[1], divisor[1]) <= torch.iinfo(dtype).max


ARITHMETIC = [
    Op(
        "add",
        operator.add,
        (),
        {"float": "{0} + {1}", "int": "{0} + {1}", "bool": "{0} | {1}"},
        derivative=(lambda g, *_: g, lambda g, *_: g),
        interval=rules.add_interval,
        signs=(1, 1),
        product=False,
        neutral=(0, 0),
        range=ranges.sums,
        integers=Integers(operator.add, ranges.sums),
        size=operator.add,
    ),
    Op(
        "sub",
        operator.sub,
        (),
        "{0} - {1}",
        derivative=(lambda g, *_: g, lambda g, *_: -g),
        interval=lambda x, y: rules.outward(x.lo - y.hi, x.hi - y.lo),
        signs=(1, -1),
        product=False,
        neutral=(None, 0),
        range=ranges.differences,
        integers=Integers(operator.sub, ranges.differences),
        size=operator.add,
    ),
    Op(
        "mul",
        operator.mul,
        elementwise("mul", "torch.multiply", "Tensor.multiply"),
        {"float": "{0} * {1}", "int": "{0} * {1}", "bool": "{0} & {1}"},
        derivative=(lambda g, x, y, r: g * y, lambda g, x, y, r: g * x),
        interval=rules.mul_interval,
        scales=(0, 1),
        neutral=(1, 1),
        absorbing=0,
        range=ranges.products,
        integers=Integers(operator.mul, ranges.products),
        size=operator.mul,
    ),
    Op(
        "div",
        operator.truediv,
        (),
        "{0} / {1}",
        "float",
        rounded="tl.div_rn({0}, {1})",
        edged=True,
        derivative=(lambda g, x, y, r: g / y, lambda g, x, y, r: -g * (r / y)),
        interval=rules.div_interval,
        scales=(0,),
        neutral=(None, 1),
    ),
    Op(
        "floor_divide",
        operator.floordiv,
        elementwise("floor_divide"),
        {"float": "floor_div_float({0}, {1})", "int": "floor_div_int({0}, {1})"},
        cpp={"plainer": "quotient({0}, {1})"},
        plainer=("{0} // {1}", _is_natural_division),
        interval=rules.quotients(operator.floordiv, torch.floor),
        jumps=True,
        divides=True,
        neutral=(None, 1),
        range=ranges.quotients_of_indices,
        integers=Integers(operator.floordiv, ranges.quotients(operator.floordiv)),
    ),
    Op(
        "div_trunc",
        div_trunc,
        (),
        {"float": "libdevice.trunc(tl.div_rn({0}, {1}))", "int": "{0} // {1}"},
        cpp={"float": "trunc({0} / {1})", "int": "quotient({0}, {1})"},
        interval=rules.quotients(div_trunc, torch.trunc),
        jumps=True,
        divides=True,
        integers=Integers(ranges.towards_zero, ranges.quotients(ranges.towards_zero)),
    ),
    Op(
        "remainder",
        operator.mod,
        elementwise("remainder"),
        {"float": "floor_mod_float({0}, {1})", "int": "floor_mod_int({0}, {1})"},
        cpp={"plainer": "fmod_int({0}, {1})"},
        plainer=("{0} % {1}", _is_natural_division),
        derivative=(lambda g, *_: g, lambda g, x, y, r: -g * (x // y)),
        interval=rules.remainder_interval,
        jumps=True,
        divides=True,
        range=ranges.remainders_of_indices,
        integers=Integers(operator.mod, ranges.remainders),
    ),
    Op(
        "fmod",
        torch.fmod,
        elementwise("fmod"),
        {"float": "libdevice.fmod({0}, {1})", "int": "{0} % {1}"},
        cpp={"float": "fmod({0}, {1})", "int": "fmod_int({0}, {1})"},
        derivative=(lambda g, *_: g, lambda g, x, y, r: -g * div_trunc(x, y)),
        interval=rules.fmod_interval,
        jumps=True,
        divides=True,
        integers=Integers(lambda a, b: a - b * ranges.towards_zero(a, b), ranges.between_zero_and),
    ),
    Op(
        "pow",
        operator.pow,
        elementwise("pow"),
        {"float": "libdevice.pow({0}, {1})", "int": "int_pow({0}, {1})"},
        cpp={"float": "pow({0}, {1})"},
        edged=True,
        derivative=(_pow_base, _pow_exponent),
        simpler=_simple_power,
        neutral=(None, 1),
    ),
    Op(
        "neg",
        operator.neg,
        elementwise("neg", "torch.negative", "Tensor.negative"),
        {"float": "{0} * -1.0", "int": "-{0}"},  # Triton's -x is 0 - x, which loses the sign of zero
        cpp="-{0}",
        derivative=(lambda g, *_: -g,),
        interval=lambda x: (-x.hi, -x.lo),
        exact=True,
        signs=(-1,),
        product=None,
        involution=True,
        range=ranges.negatives,
        integers=Integers(operator.neg, ranges.negatives),
        size=abs,
        of_infinity=True,
    ),
    unary(
        "abs",
        "tl.abs({0})",
        "torch.absolute",
        "Tensor.absolute",
        "operator.abs",
        cpp="abs({0})",
        operands="result",
        derivative=lambda g, x, r: g * torch.sign(x),
        interval=rules.abs_interval,
        exact=True,
        product=False,
        unchanged=0,
        range=ranges.sizes,
        integers=Integers(abs, ranges.sizes),
        size=abs,
        of_infinity=True,
    ),
    unary(
        "sign",
        {"float": "sign_float({0})", "int": "sign_int({0})", "bool": "{0}"},
        "torch.sgn",
        "Tensor.sgn",
        cpp={"float": "sign({0})", "int": "sign({0})"},
        operands="result",
        interval=rules.sign_interval,
        exact=True,
        jumps=True,
        integers=Integers(lambda a: (a > 0) - (a < 0), lambda a: (-1, 1)),
    ),
    Op(
        "minimum",
        torch.minimum,
        elementwise("minimum", "torch.min", "Tensor.min"),
        {"float": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "int": "tl.minimum({0}, {1})", "bool": "{0} & {1}"},
        gluon={"float": "gl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"},
        cpp={"float": "minimum({0}, {1})", "int": "minimum({0}, {1})"},
        derivative=(lambda g, x, y, r: _split(g, x > y, x == y), lambda g, x, y, r: _split(g, y > x, x == y)),
        interval=rules.picked(torch.minimum),
        exact=True,
        product=False,
        idempotent=True,
        picks=min,
        range=ranges.least,
        integers=Integers(min, ranges.least),
        size=max,
        of_infinity=True,
    ),
    Op(
        "maximum",
        torch.maximum,
        elementwise("maximum", "torch.max", "Tensor.max"),
        {"float": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "int": "tl.maximum({0}, {1})", "bool": "{0} | {1}"},
        gluon={"float": "gl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"},
        cpp={"float": "maximum({0}, {1})", "int": "maximum({0}, {1})"},
        derivative=(lambda g, x, y, r: _split(g, x < y, x == y), lambda g, x, y, r: _split(g, y < x, x == y)),
        interval=rules.picked(torch.maximum),
        exact=True,
        product=False,
        idempotent=True,
        picks=max,
        range=ranges.greatest,
        integers=Integers(max, ranges.greatest),
        size=max,
        of_infinity=True,
    ),
    Op(
        "hypot",
        torch.hypot,
        elementwise("hypot"),
        "libdevice.hypot({0}, {1})",
        "float",
        cpp="hypot({0}, {1})",
        derivative=(lambda g, x, y, r: g * (x / r), lambda g, x, y, r: g * (y / r)),
    ),
    Op(
        "atan2",
        torch.atan2,
        elementwise("atan2", "torch.arctan2", "Tensor.arctan2"),
        "libdevice.atan2({0}, {1})",
        "float",
        cpp="atan2({0}, {1})",
        derivative=(lambda g, y, x, r: g * _over_square(x, x, y), lambda g, y, x, r: -g * _over_square(y, x, y)),
        interval=rules.within(-3.15, 3.15),
    ),
]
