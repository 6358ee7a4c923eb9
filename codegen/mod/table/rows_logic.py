"""Rows of the op table: comparisons, logic, bits and choices (see op.py for the columns)."""

from __future__ import annotations

import operator

import torch

from . import interval_rules as rules
from . import ranges
from .op import Integers, Op, compare, elementwise


def _is_short_shift(dtype: torch.dtype, _, amount: tuple) -> bool:
    return amount[0] >= 0 and amount[1] < torch.iinfo(dtype).bits


LOGIC = [
    compare(
        "eq",
        "==",
        interval=rules.eq_interval,
        mirrored="eq",
        shows=lambda limit: (limit, limit),
        opposite="ne",
        decided=lambda a, b, c, d: (a == b == c == d, b < c or d < a),
    ),
    compare(
        "ne", "!=", "not_equal", interval=rules.ne_interval, opposite="eq", decided=lambda a, b, c, d: (b < c or d < a, a == b == c == d)
    ),
    compare(
        "lt",
        "<",
        "less",
        interval=rules.order(operator.lt, operator.ge, rises=False),
        mirrored="gt",
        shows=lambda limit: (None, limit - 1),
        opposite="ge",
        decided=lambda a, b, c, d: (b < c, a >= d),
    ),
    compare(
        "le",
        "<=",
        "less_equal",
        interval=rules.order(operator.le, operator.gt, rises=False),
        mirrored="ge",
        shows=lambda limit: (None, limit),
        opposite="gt",
        decided=lambda a, b, c, d: (b <= c, a > d),
    ),
    compare(
        "gt",
        ">",
        "greater",
        interval=rules.order(operator.gt, operator.le, rises=True),
        mirrored="lt",
        shows=lambda limit: (limit + 1, None),
        opposite="le",
        decided=lambda a, b, c, d: (a > d, b <= c),
    ),
    compare(
        "ge",
        ">=",
        "greater_equal",
        interval=rules.order(operator.ge, operator.lt, rises=True),
        mirrored="le",
        shows=lambda limit: (limit, None),
        opposite="lt",
        decided=lambda a, b, c, d: (a >= d, b < c),
    ),
    Op("and_", operator.and_, elementwise("bitwise_and"), "{0} & {1}", interval=rules.and_interval, absorbing=False, idempotent=True),
    Op("or_", operator.or_, elementwise("bitwise_or"), "{0} | {1}", interval=rules.or_interval, absorbing=True, idempotent=True),
    Op("xor", operator.xor, elementwise("bitwise_xor"), "{0} ^ {1}", interval=rules.xor_interval),
    Op(
        "invert",
        operator.invert,
        elementwise("bitwise_not"),
        {"int": "~{0}", "bool": "{0} == 0"},
        interval=rules.invert_interval,
        involution=True,
        integers=Integers(operator.invert, lambda a: (~a[1], ~a[0])),
    ),
    Op(
        "lshift",
        operator.lshift,
        elementwise("bitwise_left_shift"),
        "shift_left({0}, {1})",
        plainer=("{0} << {1}", _is_short_shift),
        interval=rules.lshift_interval,
        size=lambda x, bits: x * 2 ** min(bits, 64),
    ),
    Op(
        "rshift",
        operator.rshift,
        elementwise("bitwise_right_shift"),
        "shift_right({0}, {1})",
        plainer=("{0} >> {1}", _is_short_shift),
        interval=rules.rshift_interval,
        integers=Integers(lambda a, b: a >> b if b >= 0 else -(a < 0), ranges.between_zero_and),
    ),
    Op("logical_and", torch.logical_and, elementwise("logical_and"), "{0} & {1}", "bool", interval=rules.and_interval, absorbing=False),
    Op("logical_or", torch.logical_or, elementwise("logical_or"), "{0} | {1}", "bool", interval=rules.or_interval, absorbing=True),
    Op("logical_xor", torch.logical_xor, elementwise("logical_xor"), "{0} ^ {1}", "bool", interval=rules.xor_interval),
    Op("logical_not", torch.logical_not, elementwise("logical_not"), "{0} == 0", "bool", interval=rules.invert_interval),
    Op(
        "where",
        torch.where,
        (),
        "tl.where({0}, {1}, {2})",
        "choice",
        cpp="where({0}, {1}, {2})",
        derivative=(None, lambda g, c, x, y, r: torch.where(c, g, 0.0), lambda g, c, x, y, r: torch.where(c, 0.0, g)),
        interval=rules.where_interval,
        exact=True,
        product=False,
        integers=Integers(None, ranges.either),
        size=lambda _, x, y: max(x, y),
        of_infinity=True,
    ),
]
