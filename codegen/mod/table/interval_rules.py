"""Rules of the op table's column `interval`: the least and the greatest value of a row, from intervals of its operands.

They are written as in a mod, on bounds that are symbols; op.py says what they give and take, intervals.py what they are for.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import torch

from .op import div_trunc, kind


def _isfloat(x) -> bool:
    return kind(x.dtype) == "float"


def _surely(condition) -> bool:
    """Is a condition known to hold without the numbers of a block?"""
    return condition is True or (condition is not False and condition.expr.is_literal and bool(condition.expr.attr))


def outward(lo, hi, error=2**-20, tiny=1e-37):
    """Float bounds with room for rounding, contraction to fused operations and flushed denormals."""
    if not _isfloat(lo):
        return lo, hi
    return lo - (torch.abs(lo) * error + tiny), hi + (torch.abs(hi) * error + tiny)


def _no_nan(*operands):
    """Operands that are surely no NaN, or so known that NaN would show: points are what they are."""
    unsure = [x for x in operands if _isfloat(x) and not x.is_point]
    return _finite(*unsure) if unsure else True


def _finite(*operands):
    """Operands of which no value is infinite or NaN."""
    return functools.reduce(operator.and_, [(x.lo > -math.inf) & (x.hi < math.inf) for x in operands])


def _provided(known, lo, hi, like):
    """(lo, hi) if `known`, else the whole range of the dtype of the interval `like`."""
    if known is True:
        return lo, hi
    return torch.where(known, lo, like.least), torch.where(known, hi, like.greatest)


def _span(values):
    """The least and the greatest of some values; NaN if one is."""
    return functools.reduce(torch.minimum, values), functools.reduce(torch.maximum, values)


def _turned(up, lo, hi):
    """Images of the bounds under a function that rises if `up`, else falls."""
    return torch.where(up, lo, hi), torch.where(up, hi, lo)


def steps(function: Callable) -> Callable:
    """A rising function of floats that is exact, keeps infinities and NaN, and leaves integers alone."""
    return lambda x: (function(x.lo), function(x.hi)) if _isfloat(x) else (x.lo, x.hi)


def rising(function: Callable, error: float = 2**-16, tiny: float = 1e-37, low: float = -math.inf) -> Callable:
    """A rising function of floats, defined from `low` on and off by a relative `error` or by `tiny`."""

    def rule(x):
        known = _no_nan(x) if low == -math.inf else _no_nan(x) & (x.lo >= low)
        return _provided(known, *outward(function(x.lo), function(x.hi), error, tiny), x)

    return rule


def within(least: float, greatest: float) -> Callable:
    """A function of which only its range is known."""

    def rule(x, *more):
        known = _finite(x, *more)
        return torch.where(known, least, x.least), torch.where(known, greatest, x.greatest)

    return rule


def rsqrt_interval(x):
    return _provided(_no_nan(x) & (x.lo >= 1e-30), *outward(torch.rsqrt(x.hi), torch.rsqrt(x.lo), 2**-16), x)


def _nonnegative(x, y, lo, hi):
    """Bounds of a sum or product, which no rounding makes negative if both operands are surely not."""
    if _isfloat(lo) and _surely((x.lo >= 0) & (y.lo >= 0)):
        lo = torch.maximum(lo, torch.zeros_like(lo))
    return lo, hi


def add_interval(x, y):
    return _nonnegative(x, y, *outward(x.lo + y.lo, x.hi + y.hi))


def mul_interval(x, y):
    if x.dtype == torch.bool:
        return x.lo & y.lo, x.hi & y.hi
    if x is y:
        squares = x.lo * x.lo, x.hi * x.hi
        zero = torch.zeros_like(x.lo)
        lo = torch.where(x.lo >= 0, squares[0], torch.where(x.hi <= 0, squares[1], zero))
        lo, hi = outward(lo, torch.maximum(*squares))
        return torch.maximum(lo, zero) if _isfloat(x) else lo, hi
    x, y = (y, x) if x.is_point else (x, y)
    if y.is_point:
        return _nonnegative(x, y, *outward(*_turned(y.lo >= 0, x.lo * y.lo, x.hi * y.lo)))
    if not _isfloat(x) and _surely((x.lo >= 0) & (y.lo >= 0)):
        return x.lo * y.lo, x.hi * y.hi
    return _nonnegative(x, y, *outward(*_span([a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi)])))


def div_interval(x, y):
    known = ((y.lo >= 1e-30) & (y.hi <= 1e30)) | ((y.hi <= -1e-30) & (y.lo >= -1e30))  # beyond, GPUs divide carelessly
    every = [a / b for a in (x.lo, x.hi) for b in ((y.lo,) if y.is_point else (y.lo, y.hi))]
    return _provided(known, *outward(*(_turned(y.lo > 0, *every) if y.is_point else _span(every))), x)


def _nonzero(y):
    """Does an interval of integers leave out 0; and the interval's bounds, as divisors that are never 0."""
    known = (y.lo > 0) | (y.hi < 0)
    lo = torch.where(known, y.lo, torch.ones_like(y.lo))
    return known, lo, lo if y.is_point else torch.where(known, y.hi, torch.ones_like(y.hi))


def quotients(divide: Callable, round_float: Callable) -> Callable:
    """Division with a whole result."""

    def rule(x, y):
        if _isfloat(x):
            lo, hi = div_interval(x, y)
            return outward(round_float(lo), round_float(hi))
        known, least, greatest = _nonzero(y)
        if y.is_point:
            bounds = _turned(least > 0, divide(x.lo, least), divide(x.hi, least))
        else:
            bounds = _span([divide(a, b) for a in (x.lo, x.hi) for b in (least, greatest)])
        return _provided(known, *bounds, x)

    return rule


def _moderate(x, y):
    """Is no float quotient so large that an implementation of fmod may give up?"""
    size = torch.maximum(torch.abs(x.lo), torch.abs(x.hi)) * 2**-20
    return ((y.lo >= 1e-30) & (y.lo >= size)) | ((y.hi <= -1e-30) & (-y.hi >= size))


def remainder_interval(x, y):
    if _isfloat(x):
        known = _finite(x, y) & _moderate(x, y)
        zero = torch.zeros_like(y.lo)
        return _provided(known, *outward(torch.minimum(y.lo, zero), torch.maximum(y.hi, zero)), x)
    known, least, greatest = _nonzero(y)
    zero = torch.zeros_like(y.lo)
    lo, hi = torch.where(least > 0, zero, least + 1), torch.where(least > 0, greatest - 1, zero)
    if y.is_point:  # as long as the quotient stays the same, the remainder rises with x
        same = x.lo // least == x.hi // least
        lo, hi = torch.where(same, x.lo % least, lo), torch.where(same, x.hi % least, hi)
    else:
        small = (x.lo >= 0) & (x.hi < least)
        lo, hi = torch.where(small, x.lo, lo), torch.where(small, x.hi, hi)
    return _provided(known, lo, hi, x)


def fmod_interval(x, y):
    if _isfloat(x):
        known, reach = _finite(x, y) & _moderate(x, y), torch.maximum(y.hi, -y.lo)
        zero = torch.zeros_like(reach)
        return _provided(known, *outward(torch.where(x.lo >= 0, zero, -reach), torch.where(x.hi <= 0, zero, reach)), x)
    known, least, greatest = _nonzero(y)
    reach = torch.maximum(greatest, -least) - 1
    zero = torch.zeros_like(reach)
    lo = torch.where(x.lo >= 0, zero, torch.maximum(x.lo, -reach))
    hi = torch.where(x.hi <= 0, zero, torch.minimum(x.hi, reach))
    if y.is_point:
        same = div_trunc(x.lo, least) == div_trunc(x.hi, least)
        lo, hi = torch.where(same, torch.fmod(x.lo, least), lo), torch.where(same, torch.fmod(x.hi, least), hi)
    return _provided(known, lo, hi, x)


def abs_interval(x):
    return torch.maximum(torch.maximum(x.lo, -x.hi), torch.zeros_like(x.lo)), torch.maximum(-x.lo, x.hi)


def picked(function: Callable) -> Callable:
    """minimum or maximum; a NaN may hide behind an infinite bound that is not picked."""
    return lambda x, y: _provided(_no_nan(x, y), function(x.lo, y.lo), function(x.hi, y.hi), x)


def sign_interval(x):
    return _provided(_no_nan(x), torch.sign(x.lo), torch.sign(x.hi), x)


def order(compare: Callable, otherwise: Callable, rises: bool) -> Callable:
    """lt or le, or if it `rises` gt or ge; `otherwise` holds where it does not, except for NaN."""

    def rule(x, y):
        if x.dtype == torch.bool:
            x, y = (y, x) if rises else (x, y)  # whether x is below y
            strict = compare in (operator.lt, operator.gt)
            return (~x.hi & y.lo, ~x.lo & y.hi) if strict else (~x.hi | y.lo, ~x.lo | y.hi)
        sure, best = ((x.lo, y.hi), (x.hi, y.lo)) if rises else ((x.hi, y.lo), (x.lo, y.hi))
        return _no_nan(x, y) & compare(*sure), ~otherwise(*best) if _isfloat(x) else compare(*best)

    return rule


def eq_interval(x, y):
    if x.dtype == torch.bool:
        must, can = xor_interval(x, y)
        return ~can, ~must
    must = _no_nan(x, y) & (x.lo == y.lo)
    for one in (x, y):
        must = must if one.is_point else must & (one.lo == one.hi)
    if _isfloat(x):
        return must, ~((x.lo > y.hi) | (y.lo > x.hi))
    return must, (x.lo <= y.hi) & (y.lo <= x.hi)


def ne_interval(x, y):
    must, can = eq_interval(x, y)
    return ~can, ~must


def and_interval(x, y):
    if x.dtype == torch.bool:
        return x.lo & y.lo, x.hi & y.hi
    hi = torch.where(x.lo >= 0, torch.where(y.lo >= 0, torch.minimum(x.hi, y.hi), x.hi), y.hi)
    return _provided((x.lo >= 0) | (y.lo >= 0), torch.zeros_like(hi), hi, x)


def or_interval(x, y):
    if x.dtype == torch.bool:
        return x.lo | y.lo, x.hi | y.hi
    known = (x.lo >= 0) & (y.lo >= 0)
    return _provided(known, torch.maximum(x.lo, y.lo), torch.minimum(x.hi + y.hi, x.greatest), x)


def xor_interval(x, y):
    if x.dtype == torch.bool:
        return (x.lo & ~y.hi) | (~x.hi & y.lo), (x.hi & ~y.lo) | (~x.lo & y.hi)
    hi = torch.minimum(x.hi + y.hi, x.greatest)
    return _provided((x.lo >= 0) & (y.lo >= 0), torch.zeros_like(hi), hi, x)


def invert_interval(x):
    if x.dtype == torch.uint8:
        return 255 - x.hi, 255 - x.lo
    return ~x.hi, ~x.lo


def lshift_interval(x, y):
    if not (y.is_point and y.lo.expr.is_literal):
        return None
    amount = y.lo.expr.attr
    factor = 1 << amount if 0 <= amount < torch.iinfo(x.dtype).bits else 0
    return x.lo * factor, x.hi * factor


def rshift_interval(x, y):
    lo = torch.where(x.lo >= 0, x.lo >> y.hi, x.lo >> y.lo)
    return _provided(y.lo >= 0, lo, torch.where(x.hi >= 0, x.hi >> y.lo, x.hi >> y.hi), x)


def where_interval(c, x, y):
    if x.dtype == torch.bool:
        return (~c.hi | x.lo) & (c.lo | y.lo), (c.hi & x.hi) | (~c.lo & y.hi)
    return tuple(
        torch.where(c.lo, a, torch.where(c.hi, function(a, b), b))
        for function, a, b in ((torch.minimum, x.lo, y.lo), (torch.maximum, x.hi, y.hi))
    )
