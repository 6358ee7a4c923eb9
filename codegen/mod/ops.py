"""The op table: one row per operation a mod may use. Tracing, lowering, differentiation, mask analysis and the
error "supported operations are ..." all read it; a new operation is a new row here and nothing else.

Columns of a row (`Op`):

    name         the row's key, as it stands in `Expr.op`
    torch        torch's (or Python's) own function: it defines the meaning and, run on 0-dim tensors, the result dtype
    spellings    what a mod may write for it, beside `torch` itself: "torch.x", "Tensor.x", "F.x", "special.x", "operator.x"
    triton       the Triton spelling, `{0}` `{1}` `{2}` for the operands; or one spelling per kind of operand
                 ("float", "int", "bool")
    operands     what operands are converted to first: "result" dtype, "float" (float32), "common" (their common dtype), "bool"
                 or "where" (the first "bool", the others to the "result" dtype)
    gluon        per kind of operand, the Gluon spelling where it is not Triton's with `gl.` for `tl.`
    approximate  spellings used instead for a (target, attention dtype): faster, and exact to that dtype's own rounding
    plainer      a shorter spelling and when it means the same: rule(result's dtype, (low, high) of each operand)
    expand       instead of `triton`: a function that writes the row in terms of other rows
    derivative   one function per operand, (result's gradient, operands..., result) -> operand's gradient, by torch.autograd's
                 conventions and written as in a mod; None for an operand whose gradient is zero, nothing where all are
    interval     (least, greatest) value of the result from an Interval (lo, hi, dtype; see intervals.py) per operand, in exact
                 integers and written as in a mod; a bool's are (must, can) be true. None, or no rule: nothing is known

Intervals of floats: one whose bounds are finite holds no NaN; with an infinite or NaN bound anything may be meant, NaN included.
Rules round outwards (`_outward`), by more than any spelling of the row is off at any precision.

Helpers named in a spelling (`floor_div_int`) are printed into the kernel from templates/_helpers.jinja.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from .program import NUMBERS
from .stand_ins import as_python


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    torch: Callable
    spellings: tuple[str, ...]
    triton: str | dict[str, str] | None = None
    operands: str = "result"
    approximate: dict[tuple[str, str], str] = field(default_factory=dict)
    plainer: tuple[str, Callable] | None = None
    expand: Callable | None = None
    derivative: tuple[Callable | None, ...] = ()
    interval: Callable | None = None
    gluon: dict[str, str] = field(default_factory=dict)

    @property
    def arity(self) -> int:
        """How many operands the Triton spelling takes."""
        text = self.triton if isinstance(self.triton, str) else next(iter(self.triton.values()))
        return sum(f"{{{i}}}" in text for i in range(3))


def kind(dtype: torch.dtype) -> str:
    """ "bool", "int" or "float": what decides between the spellings of a row."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def _clamp(x, min=None, max=None):
    if min is None and max is None:
        raise TypeError("torch.clamp needs min, max or both")
    x = x if min is None else torch.where(x < min if _is_integral(min) else (x < min) | (min != min), min, x)
    return x if max is None else torch.where(x > max if _is_integral(max) else (x > max) | (max != max), max, x)


def _div(x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return operator.truediv(x, y)
    if rounding_mode == "floor":
        return torch.floor_divide(x, y)
    if rounding_mode == "trunc":
        return _div_trunc(x, y)
    raise ValueError(f"rounding_mode is {rounding_mode!r}; write None, 'floor' or 'trunc'")


def _div_trunc(x, y):
    if has_torch_function((x, y)):
        return handle_torch_function(_div_trunc, (x, y), x, y)
    return torch.div(x, y, rounding_mode="trunc")


def _is_integral(x) -> bool:
    x = as_python(x)
    return isinstance(x, int) if isinstance(x, NUMBERS) else kind(x.dtype) != "float"


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
    return y * alpha if isinstance(as_python(y), NUMBERS) else torch.mul(y.to(dtype), alpha).to(dtype)


def _silu(x, inplace=False):
    return x * torch.sigmoid(x)


def _relu(x, inplace=False):
    return torch.where(x <= 0, torch.zeros_like(x), x)  # keeps NaN, as torch does


def _elementwise(name: str, *more: str) -> tuple[str, ...]:
    return (f"torch.{name}", f"Tensor.{name}", *more)


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


# Rules of the `interval` column


def _isfloat(x) -> bool:
    return kind(x.dtype) == "float"


def _surely(condition) -> bool:
    """Is a condition known to hold without the numbers of a block?"""
    return condition is True or (condition is not False and condition.expr.is_literal and bool(condition.expr.attr))


def _outward(lo, hi, error=2**-20, tiny=1e-37):
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


def _steps(function: Callable) -> Callable:
    """A rising function of floats that is exact, keeps infinities and NaN, and leaves integers alone."""
    return lambda x: (function(x.lo), function(x.hi)) if _isfloat(x) else (x.lo, x.hi)


def _rising(function: Callable, error: float = 2**-16, tiny: float = 1e-37, low: float = -math.inf) -> Callable:
    """A rising function of floats, defined from `low` on and off by a relative `error` or by `tiny`."""

    def rule(x):
        known = _no_nan(x) if low == -math.inf else _no_nan(x) & (x.lo >= low)
        return _provided(known, *_outward(function(x.lo), function(x.hi), error, tiny), x)

    return rule


def _within(least: float, greatest: float) -> Callable:
    """A function of which only its range is known."""

    def rule(x, *more):
        known = _finite(x, *more)
        return torch.where(known, least, x.least), torch.where(known, greatest, x.greatest)

    return rule


def _rsqrt_interval(x):
    return _provided(_no_nan(x) & (x.lo >= 1e-30), *_outward(torch.rsqrt(x.hi), torch.rsqrt(x.lo), 2**-16), x)


def _nonnegative(x, y, lo, hi):
    """Bounds of a sum or product, which no rounding makes negative if both operands are surely not."""
    if _isfloat(lo) and _surely((x.lo >= 0) & (y.lo >= 0)):
        lo = torch.maximum(lo, torch.zeros_like(lo))
    return lo, hi


def _add_interval(x, y):
    return _nonnegative(x, y, *_outward(x.lo + y.lo, x.hi + y.hi))


def _mul_interval(x, y):
    if x.dtype == torch.bool:
        return x.lo & y.lo, x.hi & y.hi
    if x is y:
        squares = x.lo * x.lo, x.hi * x.hi
        zero = torch.zeros_like(x.lo)
        lo = torch.where(x.lo >= 0, squares[0], torch.where(x.hi <= 0, squares[1], zero))
        lo, hi = _outward(lo, torch.maximum(*squares))
        return torch.maximum(lo, zero) if _isfloat(x) else lo, hi
    x, y = (y, x) if x.is_point else (x, y)
    if y.is_point:
        return _nonnegative(x, y, *_outward(*_turned(y.lo >= 0, x.lo * y.lo, x.hi * y.lo)))
    if not _isfloat(x) and _surely((x.lo >= 0) & (y.lo >= 0)):
        return x.lo * y.lo, x.hi * y.hi
    return _nonnegative(x, y, *_outward(*_span([a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi)])))


def _div_interval(x, y):
    known = ((y.lo >= 1e-30) & (y.hi <= 1e30)) | ((y.hi <= -1e-30) & (y.lo >= -1e30))  # beyond, GPUs divide carelessly
    every = [a / b for a in (x.lo, x.hi) for b in ((y.lo,) if y.is_point else (y.lo, y.hi))]
    return _provided(known, *_outward(*(_turned(y.lo > 0, *every) if y.is_point else _span(every))), x)


def _nonzero(y):
    """Does an interval of integers leave out 0; and the interval's bounds, as divisors that are never 0."""
    known = (y.lo > 0) | (y.hi < 0)
    lo = torch.where(known, y.lo, torch.ones_like(y.lo))
    return known, lo, lo if y.is_point else torch.where(known, y.hi, torch.ones_like(y.hi))


def _quotients(divide: Callable, round_float: Callable) -> Callable:
    """Division with a whole result."""

    def rule(x, y):
        if _isfloat(x):
            lo, hi = _div_interval(x, y)
            return _outward(round_float(lo), round_float(hi))
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


def _remainder_interval(x, y):
    if _isfloat(x):
        known = _finite(x, y) & _moderate(x, y)
        zero = torch.zeros_like(y.lo)
        return _provided(known, *_outward(torch.minimum(y.lo, zero), torch.maximum(y.hi, zero)), x)
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


def _fmod_interval(x, y):
    if _isfloat(x):
        known, reach = _finite(x, y) & _moderate(x, y), torch.maximum(y.hi, -y.lo)
        zero = torch.zeros_like(reach)
        return _provided(known, *_outward(torch.where(x.lo >= 0, zero, -reach), torch.where(x.hi <= 0, zero, reach)), x)
    known, least, greatest = _nonzero(y)
    reach = torch.maximum(greatest, -least) - 1
    zero = torch.zeros_like(reach)
    lo = torch.where(x.lo >= 0, zero, torch.maximum(x.lo, -reach))
    hi = torch.where(x.hi <= 0, zero, torch.minimum(x.hi, reach))
    if y.is_point:
        same = _div_trunc(x.lo, least) == _div_trunc(x.hi, least)
        lo, hi = torch.where(same, torch.fmod(x.lo, least), lo), torch.where(same, torch.fmod(x.hi, least), hi)
    return _provided(known, lo, hi, x)


def _abs_interval(x):
    return torch.maximum(torch.maximum(x.lo, -x.hi), torch.zeros_like(x.lo)), torch.maximum(-x.lo, x.hi)


def _picked(function: Callable) -> Callable:
    """minimum or maximum; a NaN may hide behind an infinite bound that is not picked."""
    return lambda x, y: _provided(_no_nan(x, y), function(x.lo, y.lo), function(x.hi, y.hi), x)


def _sign_interval(x):
    return _provided(_no_nan(x), torch.sign(x.lo), torch.sign(x.hi), x)


def _order(compare: Callable, otherwise: Callable, rises: bool) -> Callable:
    """lt or le, or if it `rises` gt or ge; `otherwise` holds where it does not, except for NaN."""

    def rule(x, y):
        if x.dtype == torch.bool:
            x, y = (y, x) if rises else (x, y)  # whether x is below y
            strict = compare in (operator.lt, operator.gt)
            return (~x.hi & y.lo, ~x.lo & y.hi) if strict else (~x.hi | y.lo, ~x.lo | y.hi)
        sure, best = ((x.lo, y.hi), (x.hi, y.lo)) if rises else ((x.hi, y.lo), (x.lo, y.hi))
        return _no_nan(x, y) & compare(*sure), ~otherwise(*best) if _isfloat(x) else compare(*best)

    return rule


def _eq_interval(x, y):
    if x.dtype == torch.bool:
        must, can = _xor_interval(x, y)
        return ~can, ~must
    must = _no_nan(x, y) & (x.lo == y.lo)
    for one in (x, y):
        must = must if one.is_point else must & (one.lo == one.hi)
    if _isfloat(x):
        return must, ~((x.lo > y.hi) | (y.lo > x.hi))
    return must, (x.lo <= y.hi) & (y.lo <= x.hi)


def _ne_interval(x, y):
    must, can = _eq_interval(x, y)
    return ~can, ~must


def _and_interval(x, y):
    if x.dtype == torch.bool:
        return x.lo & y.lo, x.hi & y.hi
    hi = torch.where(x.lo >= 0, torch.where(y.lo >= 0, torch.minimum(x.hi, y.hi), x.hi), y.hi)
    return _provided((x.lo >= 0) | (y.lo >= 0), torch.zeros_like(hi), hi, x)


def _or_interval(x, y):
    if x.dtype == torch.bool:
        return x.lo | y.lo, x.hi | y.hi
    known = (x.lo >= 0) & (y.lo >= 0)
    return _provided(known, torch.maximum(x.lo, y.lo), torch.minimum(x.hi + y.hi, x.greatest), x)


def _xor_interval(x, y):
    if x.dtype == torch.bool:
        return (x.lo & ~y.hi) | (~x.hi & y.lo), (x.hi & ~y.lo) | (~x.lo & y.hi)
    hi = torch.minimum(x.hi + y.hi, x.greatest)
    return _provided((x.lo >= 0) & (y.lo >= 0), torch.zeros_like(hi), hi, x)


def _invert_interval(x):
    if x.dtype == torch.uint8:
        return 255 - x.hi, 255 - x.lo
    return ~x.hi, ~x.lo


def _lshift_interval(x, y):
    if not (y.is_point and y.lo.expr.is_literal):
        return None
    amount = y.lo.expr.attr
    factor = 1 << amount if 0 <= amount < torch.iinfo(x.dtype).bits else 0
    return x.lo * factor, x.hi * factor


def _rshift_interval(x, y):
    lo = torch.where(x.lo >= 0, x.lo >> y.hi, x.lo >> y.lo)
    return _provided(y.lo >= 0, lo, torch.where(x.hi >= 0, x.hi >> y.lo, x.hi >> y.hi), x)


def _where_interval(c, x, y):
    if x.dtype == torch.bool:
        return (~c.hi | x.lo) & (c.lo | y.lo), (c.hi & x.hi) | (~c.lo & y.hi)
    return tuple(
        torch.where(c.lo, a, torch.where(c.hi, function(a, b), b))
        for function, a, b in ((torch.minimum, x.lo, y.lo), (torch.maximum, x.hi, y.hi))
    )


def _is_natural_division(dtype: torch.dtype, dividend: tuple, divisor: tuple) -> bool:
    """Triton's // and % round towards zero, which agrees with torch's rounding down here. (What the dtype does not hold wraps around.)"""
    return kind(dtype) == "int" and dividend[0] >= 0 and divisor[0] >= 1 and max(dividend[1], divisor[1]) <= torch.iinfo(dtype).max


def _is_short_shift(dtype: torch.dtype, _, amount: tuple) -> bool:
    return amount[0] >= 0 and amount[1] < torch.iinfo(dtype).bits


def _unary(name: str, triton, *more: str, operands: str = "float", derivative: Callable | None = None, **columns) -> Op:
    function = getattr(torch, name, None) or getattr(torch.special, name)
    spellings = _elementwise(name, f"special.{name}", *more)
    return Op(name, function, spellings, triton, operands, derivative=(derivative,) if derivative else (), **columns)


def _compare(name: str, symbol: str, *more: str, interval: Callable) -> Op:
    spellings = (*_elementwise(name), *(s for m in more for s in _elementwise(m)))
    return Op(name, getattr(operator, name), spellings, f"{{0}} {symbol} {{1}}", "common", interval=interval)


_ROWS = [
    # arithmetic
    Op(
        "add",
        operator.add,
        (),
        {"float": "{0} + {1}", "int": "{0} + {1}", "bool": "{0} | {1}"},
        derivative=(lambda g, *_: g, lambda g, *_: g),
        interval=_add_interval,
    ),
    Op(
        "sub",
        operator.sub,
        (),
        "{0} - {1}",
        derivative=(lambda g, *_: g, lambda g, *_: -g),
        interval=lambda x, y: _outward(x.lo - y.hi, x.hi - y.lo),
    ),
    Op(
        "mul",
        operator.mul,
        _elementwise("mul", "torch.multiply", "Tensor.multiply"),
        {"float": "{0} * {1}", "int": "{0} * {1}", "bool": "{0} & {1}"},
        derivative=(lambda g, x, y, r: g * y, lambda g, x, y, r: g * x),
        interval=_mul_interval,
    ),
    Op(
        "div",
        operator.truediv,
        (),
        "{0} / {1}",
        "float",
        derivative=(lambda g, x, y, r: g / y, lambda g, x, y, r: -g * (r / y)),
        interval=_div_interval,
    ),
    Op(
        "floor_divide",
        operator.floordiv,
        _elementwise("floor_divide"),
        {"float": "floor_div_float({0}, {1})", "int": "floor_div_int({0}, {1})"},
        plainer=("{0} // {1}", _is_natural_division),
        interval=_quotients(operator.floordiv, torch.floor),
    ),
    Op(
        "div_trunc",
        _div_trunc,
        (),
        {"float": "libdevice.trunc(tl.div_rn({0}, {1}))", "int": "{0} // {1}"},
        interval=_quotients(_div_trunc, torch.trunc),
    ),
    Op(
        "remainder",
        operator.mod,
        _elementwise("remainder"),
        {"float": "floor_mod_float({0}, {1})", "int": "floor_mod_int({0}, {1})"},
        plainer=("{0} % {1}", _is_natural_division),
        derivative=(lambda g, *_: g, lambda g, x, y, r: -g * (x // y)),
        interval=_remainder_interval,
    ),
    Op(
        "fmod",
        torch.fmod,
        _elementwise("fmod"),
        {"float": "libdevice.fmod({0}, {1})", "int": "{0} % {1}"},
        derivative=(lambda g, *_: g, lambda g, x, y, r: -g * _div_trunc(x, y)),
        interval=_fmod_interval,
    ),
    Op(
        "pow",
        operator.pow,
        _elementwise("pow"),
        {"float": "libdevice.pow({0}, {1})", "int": "int_pow({0}, {1})"},
        derivative=(_pow_base, _pow_exponent),
    ),
    Op(
        "neg",
        operator.neg,
        _elementwise("neg", "torch.negative", "Tensor.negative"),
        {"float": "{0} * -1.0", "int": "-{0}"},  # Triton's -x is 0 - x, which loses the sign of zero
        derivative=(lambda g, *_: -g,),
        interval=lambda x: (-x.hi, -x.lo),
    ),
    _unary(
        "abs",
        "tl.abs({0})",
        "torch.absolute",
        "Tensor.absolute",
        "operator.abs",
        operands="result",
        derivative=lambda g, x, r: g * torch.sign(x),
        interval=_abs_interval,
    ),
    _unary("sign", {"float": "sign_float({0})", "int": "sign_int({0})", "bool": "{0}"}, operands="result", interval=_sign_interval),
    Op(
        "minimum",
        torch.minimum,
        _elementwise("minimum"),
        {"float": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "int": "tl.minimum({0}, {1})", "bool": "{0} & {1}"},
        gluon={"float": "gl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"},
        derivative=(lambda g, x, y, r: _split(g, x > y, x == y), lambda g, x, y, r: _split(g, y > x, x == y)),
        interval=_picked(torch.minimum),
    ),
    Op(
        "maximum",
        torch.maximum,
        _elementwise("maximum"),
        {"float": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "int": "tl.maximum({0}, {1})", "bool": "{0} | {1}"},
        gluon={"float": "gl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"},
        derivative=(lambda g, x, y, r: _split(g, x < y, x == y), lambda g, x, y, r: _split(g, y < x, x == y)),
        interval=_picked(torch.maximum),
    ),
    Op(
        "atan2",
        torch.atan2,
        _elementwise("atan2", "torch.arctan2", "Tensor.arctan2"),
        "libdevice.atan2({0}, {1})",
        "float",
        derivative=(lambda g, y, x, r: g * _over_square(x, x, y), lambda g, y, x, r: -g * _over_square(y, x, y)),
        interval=_within(-3.15, 3.15),
    ),
    # exponentials, roots and circular functions
    _unary("exp", "tl.exp({0})", derivative=lambda g, x, r: g * r, interval=_rising(torch.exp, 2**-14)),
    _unary("exp2", "tl.exp2({0})", derivative=lambda g, x, r: g * r * math.log(2), interval=_rising(torch.exp2, 2**-14)),
    _unary("expm1", "libdevice.expm1({0})", derivative=lambda g, x, r: g * (r + 1), interval=_rising(torch.expm1, 2**-14)),
    _unary("log", "tl.log({0})", derivative=lambda g, x, r: g / x, interval=_rising(torch.log, tiny=2**-16, low=1e-30)),
    _unary("log2", "tl.log2({0})", derivative=lambda g, x, r: g / (x * math.log(2)), interval=_rising(torch.log2, tiny=2**-16, low=1e-30)),
    _unary("log1p", "libdevice.log1p({0})", derivative=lambda g, x, r: g / (x + 1), interval=_rising(torch.log1p, low=-0.99)),
    _unary("sqrt", "tl.sqrt({0})", derivative=lambda g, x, r: g / (2 * r), interval=_rising(torch.sqrt, tiny=1e-18, low=0)),
    _unary("rsqrt", "tl.rsqrt({0})", derivative=lambda g, x, r: -0.5 * g * r**3, interval=_rsqrt_interval),
    _unary("sin", "tl.sin({0})", derivative=lambda g, x, r: g * torch.cos(x), interval=_within(-1.001, 1.001)),
    _unary("cos", "tl.cos({0})", derivative=lambda g, x, r: g * -torch.sin(x), interval=_within(-1.001, 1.001)),
    _unary("tan", "libdevice.tan({0})", derivative=lambda g, x, r: g * (1 + r * r)),
    _unary(
        "atan",
        "libdevice.atan({0})",
        "torch.arctan",
        "Tensor.arctan",
        derivative=lambda g, x, r: g / (1 + x * x),
        interval=_rising(torch.atan),
    ),
    _unary(
        "erf", "tl.erf({0})", derivative=lambda g, x, r: g * torch.exp(-(x * x)) * (2 / math.sqrt(math.pi)), interval=_rising(torch.erf)
    ),
    _unary(
        "sigmoid",
        "tl.sigmoid({0})",
        "F.sigmoid",
        "special.expit",
        derivative=lambda g, x, r: g * ((1 - r) * r),
        interval=_rising(torch.sigmoid, 2**-14),
        gluon={"float": "1.0 / (1.0 + gl.exp({0} * -1.0))"},
    ),
    # libdevice's tanh costs more than the whole attention around it. PTX tanh.approx is one instruction with relative
    # error 2**-11, below bfloat16's rounding (2**-9); the form by exp2 is good to float32's rounding of 1.
    _unary(
        "tanh",
        "libdevice.tanh({0})",
        "F.tanh",
        approximate={
            ("cuda", "bfloat16"): "tanh_approx({0})",
            ("cuda", "float16"): "tanh_by_exp2({0})",
            ("hip", "bfloat16"): "tanh_by_exp2({0})",
            ("hip", "float16"): "tanh_by_exp2({0})",
        },
        derivative=lambda g, x, r: g * (1 - r * r),
        interval=_rising(torch.tanh, 2**-10),
    ),
    # without a derivative
    _unary("detach", "{0}", operands="result", interval=lambda x: (x.lo, x.hi)),
    _unary("floor", {"float": "tl.floor({0})", "int": "{0}"}, operands="result", interval=_steps(torch.floor)),
    _unary("ceil", {"float": "tl.ceil({0})", "int": "{0}"}, operands="result", interval=_steps(torch.ceil)),
    _unary(
        "trunc", {"float": "libdevice.trunc({0})", "int": "{0}"}, "torch.fix", "Tensor.fix", operands="result", interval=_steps(torch.trunc)
    ),
    _unary("round", {"float": "libdevice.rint({0})", "int": "{0}"}, operands="result", interval=_steps(torch.round)),
    # comparisons, logic and bits
    _compare("eq", "==", interval=_eq_interval),
    _compare("ne", "!=", "not_equal", interval=_ne_interval),
    _compare("lt", "<", "less", interval=_order(operator.lt, operator.ge, rises=False)),
    _compare("le", "<=", "less_equal", interval=_order(operator.le, operator.gt, rises=False)),
    _compare("gt", ">", "greater", interval=_order(operator.gt, operator.le, rises=True)),
    _compare("ge", ">=", "greater_equal", interval=_order(operator.ge, operator.lt, rises=True)),
    Op("and_", operator.and_, _elementwise("bitwise_and"), "{0} & {1}", interval=_and_interval),
    Op("or_", operator.or_, _elementwise("bitwise_or"), "{0} | {1}", interval=_or_interval),
    Op("xor", operator.xor, _elementwise("bitwise_xor"), "{0} ^ {1}", interval=_xor_interval),
    Op("invert", operator.invert, _elementwise("bitwise_not"), {"int": "~{0}", "bool": "{0} == 0"}, interval=_invert_interval),
    Op(
        "lshift",
        operator.lshift,
        _elementwise("bitwise_left_shift"),
        "shift_left({0}, {1})",
        plainer=("{0} << {1}", _is_short_shift),
        interval=_lshift_interval,
    ),
    Op(
        "rshift",
        operator.rshift,
        _elementwise("bitwise_right_shift"),
        "shift_right({0}, {1})",
        plainer=("{0} >> {1}", _is_short_shift),
        interval=_rshift_interval,
    ),
    Op("logical_and", torch.logical_and, _elementwise("logical_and"), "{0} & {1}", "bool", interval=_and_interval),
    Op("logical_or", torch.logical_or, _elementwise("logical_or"), "{0} | {1}", "bool", interval=_or_interval),
    Op("logical_xor", torch.logical_xor, _elementwise("logical_xor"), "{0} ^ {1}", "bool", interval=_xor_interval),
    Op("logical_not", torch.logical_not, _elementwise("logical_not"), "{0} == 0", "bool", interval=_invert_interval),
    Op(
        "where",
        torch.where,
        (),
        "tl.where({0}, {1}, {2})",
        "where",
        derivative=(None, lambda g, c, x, y, r: torch.where(c, g, 0.0), lambda g, c, x, y, r: torch.where(c, 0.0, g)),
        interval=_where_interval,
    ),
    # written in terms of the rows above
    Op("add_alpha", torch.add, _elementwise("add"), expand=_add),
    Op("sub_alpha", torch.sub, _elementwise("sub", "torch.subtract", "Tensor.subtract"), expand=_sub),
    Op("div_mode", torch.div, (*_elementwise("div"), *_elementwise("divide"), *_elementwise("true_divide")), expand=_div),
    Op("rsub", torch.rsub, ("torch.rsub",), expand=lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha)),
    Op("where_method", torch.Tensor.where, ("Tensor.where",), expand=lambda x, condition, y: torch.where(condition, x, y)),
    Op("clamp", torch.clamp, _elementwise("clamp", "torch.clip", "Tensor.clip"), expand=_clamp),
    Op("clamp_min", torch.clamp_min, _elementwise("clamp_min"), expand=lambda x, min: _clamp(x, min=min)),
    Op("clamp_max", torch.clamp_max, _elementwise("clamp_max"), expand=lambda x, max: _clamp(x, max=max)),
    Op("square", torch.square, _elementwise("square"), expand=lambda x: x**2),
    Op("reciprocal", torch.reciprocal, _elementwise("reciprocal"), expand=lambda x: 1.0 / x),
    Op("isnan", torch.isnan, _elementwise("isnan"), expand=lambda x: x != x),
    Op("isinf", torch.isinf, _elementwise("isinf"), expand=_isinf),
    Op("isposinf", torch.isposinf, _elementwise("isposinf"), expand=lambda x: x == math.inf),
    Op("isneginf", torch.isneginf, _elementwise("isneginf"), expand=lambda x: x == -math.inf),
    Op("isfinite", torch.isfinite, _elementwise("isfinite"), expand=_isfinite),
    Op("relu", torch.relu, _elementwise("relu", "F.relu"), expand=_relu),
    Op("gelu", F.gelu, ("F.gelu",), expand=_gelu),
    Op("silu", F.silu, ("F.silu",), expand=_silu),
    Op("softplus", F.softplus, ("F.softplus",), expand=_softplus),
    Op("logsigmoid", F.logsigmoid, ("F.logsigmoid",), expand=_logsigmoid),
]

OPS: dict[str, Op] = {row.name: row for row in _ROWS}

_HOMES = {"torch": torch, "Tensor": torch.Tensor, "F": F, "special": torch.special, "operator": operator}


def _spelled(spelling: str):
    home, _, name = spelling.partition(".")
    return getattr(_HOMES[home], name, None)


def _method_of(row: Op):
    """What Python calls for a row's operator on a tensor: Tensor.__and__ for operator.and_."""
    name = row.torch.__name__.strip("_") if getattr(row.torch, "__module__", "") == "_operator" else ""
    return getattr(torch.Tensor, f"__{name}__", None)


def _index_functions() -> dict:
    table = {}
    for row in _ROWS:
        for function in (row.torch, _method_of(row), *map(_spelled, row.spellings)):
            # `torch.floor_divide` and `operator.floordiv` name the same row; the first row to claim a spelling has it.
            if function is not None:
                table.setdefault(function, row)
    return table


FUNCTIONS: dict[Callable, Op] = _index_functions()
METHODS: dict[str, Op] = {
    spelling.removeprefix("Tensor."): row for row in reversed(_ROWS) for spelling in row.spellings if spelling.startswith("Tensor.")
}


def supported_operations() -> str:
    """The list that stands in the error for an operation which has no row."""
    names = sorted({s.rpartition(".")[2] for row in _ROWS for s in row.spellings})
    return (
        "Python's + - * / // % ** abs, comparisons, & | ^ ~ << >>, indexing of captured tensors, casts (.to, .float, "
        ".int, .long, .bool, .half, .bfloat16), torch.tensor(number), *_like, new_*, and " + ", ".join(names)
    )
