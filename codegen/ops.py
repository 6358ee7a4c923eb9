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
    approximate  spellings used instead for a (target, attention dtype): faster, and exact to that dtype's own rounding
    plainer      a shorter spelling and when it means the same: rule(result's dtype, (low, high) of each operand)
    expand       instead of `triton`: a function that writes the row in terms of other rows
    derivative   one function per operand, (result's gradient, operands..., result) -> operand's gradient, by torch.autograd's
                 conventions and written as in a mod; None for an operand whose gradient is zero, nothing where all are
    interval     bounds of the result from bounds of the operands; not filled yet

Helpers named in a spelling (`floor_div_int`) are printed into the kernel from templates/_helpers.jinja.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from .capture import NUMBERS, as_python


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


def _is_natural_division(dtype: torch.dtype, dividend: tuple, divisor: tuple) -> bool:
    """Triton's // and % round towards zero, which agrees with torch's rounding down here."""
    return kind(dtype) == "int" and dividend[0] >= 0 and divisor[0] >= 1


def _is_short_shift(dtype: torch.dtype, _, amount: tuple) -> bool:
    return amount[0] >= 0 and amount[1] < torch.iinfo(dtype).bits


def _unary(name: str, triton, *more: str, operands: str = "float", derivative: Callable | None = None, **columns) -> Op:
    function = getattr(torch, name, None) or getattr(torch.special, name)
    spellings = _elementwise(name, f"special.{name}", *more)
    return Op(name, function, spellings, triton, operands, derivative=(derivative,) if derivative else (), **columns)


def _compare(name: str, symbol: str, *more: str) -> Op:
    spellings = (*_elementwise(name), *(s for m in more for s in _elementwise(m)))
    return Op(name, getattr(operator, name), spellings, f"{{0}} {symbol} {{1}}", "common")


_ROWS = [
    # arithmetic
    Op("add", operator.add, (), {"float": "{0} + {1}", "int": "{0} + {1}", "bool": "{0} | {1}"},
       derivative=(lambda g, *_: g, lambda g, *_: g)),
    Op("sub", operator.sub, (), "{0} - {1}", derivative=(lambda g, *_: g, lambda g, *_: -g)),
    Op("mul", operator.mul, _elementwise("mul", "torch.multiply", "Tensor.multiply"),
       {"float": "{0} * {1}", "int": "{0} * {1}", "bool": "{0} & {1}"},
       derivative=(lambda g, x, y, r: g * y, lambda g, x, y, r: g * x)),
    Op("div", operator.truediv, (), "{0} / {1}", "float",
       derivative=(lambda g, x, y, r: g / y, lambda g, x, y, r: -g * (r / y))),
    Op("floor_divide", operator.floordiv, _elementwise("floor_divide"),
       {"float": "floor_div_float({0}, {1})", "int": "floor_div_int({0}, {1})"},
       plainer=("{0} // {1}", _is_natural_division)),
    Op("div_trunc", _div_trunc, (), {"float": "libdevice.trunc(tl.div_rn({0}, {1}))", "int": "{0} // {1}"}),
    Op("remainder", operator.mod, _elementwise("remainder"),
       {"float": "floor_mod_float({0}, {1})", "int": "floor_mod_int({0}, {1})"},
       plainer=("{0} % {1}", _is_natural_division),
       derivative=(lambda g, *_: g, lambda g, x, y, r: -g * (x // y))),
    Op("fmod", torch.fmod, _elementwise("fmod"), {"float": "libdevice.fmod({0}, {1})", "int": "{0} % {1}"},
       derivative=(lambda g, *_: g, lambda g, x, y, r: -g * _div_trunc(x, y))),
    Op("pow", operator.pow, _elementwise("pow"),
       {"float": "libdevice.pow({0}, {1})", "int": "int_pow({0}, {1})"},
       derivative=(_pow_base, _pow_exponent)),
    Op("neg", operator.neg, _elementwise("neg", "torch.negative", "Tensor.negative"),
       {"float": "{0} * -1.0", "int": "-{0}"},  # Triton's -x is 0 - x, which loses the sign of zero
       derivative=(lambda g, *_: -g,)),
    _unary("abs", "tl.abs({0})", "torch.absolute", "Tensor.absolute", "operator.abs", operands="result",
           derivative=lambda g, x, r: g * torch.sign(x)),
    _unary("sign", {"float": "sign_float({0})", "int": "sign_int({0})", "bool": "{0}"}, operands="result"),
    Op("minimum", torch.minimum, _elementwise("minimum"),
       {"float": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "int": "tl.minimum({0}, {1})",
        "bool": "{0} & {1}"},
       derivative=(lambda g, x, y, r: _split(g, x > y, x == y), lambda g, x, y, r: _split(g, y > x, x == y))),
    Op("maximum", torch.maximum, _elementwise("maximum"),
       {"float": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "int": "tl.maximum({0}, {1})",
        "bool": "{0} | {1}"},
       derivative=(lambda g, x, y, r: _split(g, x < y, x == y), lambda g, x, y, r: _split(g, y < x, x == y))),
    Op("atan2", torch.atan2, _elementwise("atan2", "torch.arctan2", "Tensor.arctan2"),
       "libdevice.atan2({0}, {1})", "float",
       derivative=(lambda g, y, x, r: g * _over_square(x, x, y), lambda g, y, x, r: -g * _over_square(y, x, y))),
    # exponentials, roots and circular functions
    _unary("exp", "tl.exp({0})", derivative=lambda g, x, r: g * r),
    _unary("exp2", "tl.exp2({0})", derivative=lambda g, x, r: g * r * math.log(2)),
    _unary("expm1", "libdevice.expm1({0})", derivative=lambda g, x, r: g * (r + 1)),
    _unary("log", "tl.log({0})", derivative=lambda g, x, r: g / x),
    _unary("log2", "tl.log2({0})", derivative=lambda g, x, r: g / (x * math.log(2))),
    _unary("log1p", "libdevice.log1p({0})", derivative=lambda g, x, r: g / (x + 1)),
    _unary("sqrt", "tl.sqrt({0})", derivative=lambda g, x, r: g / (2 * r)),
    _unary("rsqrt", "tl.rsqrt({0})", derivative=lambda g, x, r: -0.5 * g * r**3),
    _unary("sin", "tl.sin({0})", derivative=lambda g, x, r: g * torch.cos(x)),
    _unary("cos", "tl.cos({0})", derivative=lambda g, x, r: g * -torch.sin(x)),
    _unary("tan", "libdevice.tan({0})", derivative=lambda g, x, r: g * (1 + r * r)),
    _unary("atan", "libdevice.atan({0})", "torch.arctan", "Tensor.arctan", derivative=lambda g, x, r: g / (1 + x * x)),
    _unary("erf", "tl.erf({0})", derivative=lambda g, x, r: g * torch.exp(-(x * x)) * (2 / math.sqrt(math.pi))),
    _unary("sigmoid", "tl.sigmoid({0})", "F.sigmoid", "special.expit", derivative=lambda g, x, r: g * ((1 - r) * r)),
    # libdevice's tanh costs more than the whole attention around it. PTX tanh.approx is one instruction with relative
    # error 2**-11, below bfloat16's rounding (2**-9); the form by exp2 is good to float32's rounding of 1.
    _unary("tanh", "libdevice.tanh({0})", "F.tanh",
           approximate={("cuda", "bfloat16"): "tanh_approx({0})", ("cuda", "float16"): "tanh_by_exp2({0})",
                        ("hip", "bfloat16"): "tanh_by_exp2({0})", ("hip", "float16"): "tanh_by_exp2({0})"},
           derivative=lambda g, x, r: g * (1 - r * r)),
    # without a derivative
    _unary("detach", "{0}", operands="result"),
    _unary("floor", {"float": "tl.floor({0})", "int": "{0}"}, operands="result"),
    _unary("ceil", {"float": "tl.ceil({0})", "int": "{0}"}, operands="result"),
    _unary("trunc", {"float": "libdevice.trunc({0})", "int": "{0}"}, "torch.fix", "Tensor.fix", operands="result"),
    _unary("round", {"float": "libdevice.rint({0})", "int": "{0}"}, operands="result"),
    # comparisons, logic and bits
    _compare("eq", "=="),
    _compare("ne", "!=", "not_equal"),
    _compare("lt", "<", "less"),
    _compare("le", "<=", "less_equal"),
    _compare("gt", ">", "greater"),
    _compare("ge", ">=", "greater_equal"),
    Op("and_", operator.and_, _elementwise("bitwise_and"), "{0} & {1}"),
    Op("or_", operator.or_, _elementwise("bitwise_or"), "{0} | {1}"),
    Op("xor", operator.xor, _elementwise("bitwise_xor"), "{0} ^ {1}"),
    Op("invert", operator.invert, _elementwise("bitwise_not"), {"int": "~{0}", "bool": "{0} == 0"}),
    Op("lshift", operator.lshift, _elementwise("bitwise_left_shift"), "shift_left({0}, {1})",
       plainer=("{0} << {1}", _is_short_shift)),
    Op("rshift", operator.rshift, _elementwise("bitwise_right_shift"), "shift_right({0}, {1})",
       plainer=("{0} >> {1}", _is_short_shift)),
    Op("logical_and", torch.logical_and, _elementwise("logical_and"), "{0} & {1}", "bool"),
    Op("logical_or", torch.logical_or, _elementwise("logical_or"), "{0} | {1}", "bool"),
    Op("logical_xor", torch.logical_xor, _elementwise("logical_xor"), "{0} ^ {1}", "bool"),
    Op("logical_not", torch.logical_not, _elementwise("logical_not"), "{0} == 0", "bool"),
    Op("where", torch.where, (), "tl.where({0}, {1}, {2})", "where",
       derivative=(None, lambda g, c, x, y, r: torch.where(c, g, 0.0), lambda g, c, x, y, r: torch.where(c, 0.0, g))),
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
    spelling.removeprefix("Tensor."): row
    for row in reversed(_ROWS)
    for spelling in row.spellings
    if spelling.startswith("Tensor.")
}


def supported_operations() -> str:
    """The list that stands in the error for an operation which has no row."""
    names = sorted({s.rpartition(".")[2] for row in _ROWS for s in row.spellings})
    return ("Python's + - * / // % ** abs, comparisons, & | ^ ~ << >>, indexing of captured tensors, casts (.to, .float, "
            ".int, .long, .bool, .half, .bfloat16), torch.tensor(number), *_like, new_*, and " + ", ".join(names))
