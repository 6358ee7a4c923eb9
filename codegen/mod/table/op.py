"""What a row of the op table says. The rows stand in rows_*.py; ops.py finds them.

Columns of a row (`Op`):

    name         the row's key, as it stands in `Expr.op`
    torch        torch's (or Python's) own function: it defines the meaning and, run on 0-dim tensors, the result dtype
    spellings    what a mod may write for it, beside `torch` itself: "torch.x", "Tensor.x", "F.x", "special.x", "operator.x"
    triton       the Triton spelling, `{0}` `{1}` `{2}` for the operands; or one spelling per kind of operand
                 ("float", "int", "bool")
    operands     what operands are converted to first: "result" dtype, "float" (float32), "common" (their common dtype), "bool"
                 or "choice" (the first "bool", the others to the "result" dtype: a condition and two values)
    gluon        per kind of operand, the Gluon spelling where it is not Triton's with `gl.` for `tl.`
    cpp          the C++ spelling, with functions of templates/cpu_functions.h, where it is not Triton's: for any operands, or per kind of
                 operand, and "plainer" where that is not the one of `plainer`
    approximate  spellings used instead for a (target, attention dtype): faster, and exact to that dtype's own rounding
    rounded      the Triton spelling whose result is the nearest float, for what something is decided by
    plainer      a shorter spelling and when it means the same: rule(result's dtype, (low, high) of each operand)
    expand       instead of `triton`: a function that writes the row in terms of other rows
    simpler      a function that writes the row in terms of other rows for some operands, None for others
    derivative   one function per operand, (result's gradient, operands..., result) -> operand's gradient, by torch.autograd's
                 conventions and written as in a mod; None for an operand whose gradient is zero, nothing where all are
    interval     (least, greatest) value of the result from an Interval (lo, hi, dtype; see intervals.py) per operand, in exact
                 integers and written as in a mod; a bool's are (must, can) be true. None, or no rule: nothing is known

Traits, which simplification and analysis ask for:

    exact        a float is not rounded: it is an operand, up to its sign, or a whole number
    jumps        a rounding of an operand may change the result by more than a rounding
    edged        beside an operand that has a value there may be one that has none, or an infinite one
    divides      the second operand is a divisor: of integers, anything may come of a division by 0
    signs        a sum: with which sign each operand enters it, 1 or -1
    scales       operands that the result is a multiple of while the other stays the same
    product      may the last step be a multiplication, which a compiler fuses with a sum that follows? None: as for the operand
    neutral      per operand, the number that leaves the other as it is (where the row jumps: among integers alone), or None
    absorbing    the number that decides the result, whatever the other operand is: itself
    idempotent   two equal operands give that operand
    involution   applied twice, it gives the operand
    unchanged    from this number on the result is the operand
    picks        min or max, if it gives one of its operands
    opposite     of a comparison: the row that holds where this one does not, except for NaN
    mirrored     of a comparison: the row that says the same with its operands exchanged
    shows        of a comparison of whole numbers: rule(limit) -> the first and the last number of which it holds, None for no end
    decided      of a comparison of a number in [a, b] with one in [c, d]: rule(a, b, c, d) -> is it (always, never) true
    range        (low, high) of the result from those of the operands, whose ends may be infinite; floats are not rounded yet
    integers     the row on Python's integers, and on ranges of integers whose ends are finite
    size         what the result is at most, signs aside, from what the operands are at most; no rule: it may be infinite or NaN
    of_infinity  an infinite operand gives no NaN

Intervals of floats: one whose bounds are finite holds no NaN; with an infinite or NaN bound anything may be meant, NaN included.
Rules round outwards (`outward`), by more than any spelling of the row is off at any precision.

Helpers named in a spelling (`floor_div_int`) are printed into the kernel from templates/_helpers.jinja.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function


class Integers(NamedTuple):
    """A row on Python's integers, where nothing wraps around."""

    compute: Callable | None
    range: Callable


@dataclass(frozen=True, slots=True)
class Op:
    """One row."""

    name: str
    torch: Callable | None
    spellings: tuple[str, ...]
    triton: str | dict[str, str] | None = None
    operands: str = "result"
    approximate: dict[tuple[str, str], str] = field(default_factory=dict)
    rounded: str = ""
    plainer: tuple[str, Callable] | None = None
    expand: Callable | None = None
    simpler: Callable | None = None
    derivative: tuple[Callable | None, ...] = ()
    interval: Callable | None = None
    gluon: dict[str, str] = field(default_factory=dict)
    cpp: str | dict[str, str] = field(default_factory=dict)
    exact: bool = False
    jumps: bool = False
    edged: bool = False
    divides: bool = False
    signs: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()
    product: bool | None = True
    neutral: tuple[float | None, float | None] = (None, None)
    absorbing: float | None = None
    idempotent: bool = False
    involution: bool = False
    unchanged: float | None = None
    picks: Callable | None = None
    opposite: str = ""
    mirrored: str = ""
    shows: Callable | None = None
    decided: Callable | None = None
    range: Callable | None = None
    integers: Integers | None = None
    size: Callable | None = None
    of_infinity: bool = False

    @property
    def arity(self) -> int:
        """How many operands the Triton spelling takes."""
        text = self.triton if isinstance(self.triton, str) else next(iter(self.triton.values()))
        return sum(f"{{{i}}}" in text for i in range(3))

    @property
    def chooses(self) -> bool:
        """Has it a condition, and two values to choose from?"""
        return self.operands == "choice"


def kind(dtype: torch.dtype) -> str:
    """ "bool", "int" or "float": what decides between the spellings of a row."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def elementwise(name: str, *more: str) -> tuple[str, ...]:
    """The spellings of a function that torch and its tensors have."""
    return (f"torch.{name}", f"Tensor.{name}", *more)


def unary(name: str, triton, *more: str, operands: str = "float", derivative: Callable | None = None, **columns) -> Op:
    """A row with one operand."""
    function = getattr(torch, name, None) or getattr(torch.special, name)
    spellings = elementwise(name, f"special.{name}", *more)
    return Op(name, function, spellings, triton, operands, derivative=(derivative,) if derivative else (), **columns)


def compare(name: str, symbol: str, *more: str, **columns) -> Op:
    """A row that compares two operands."""
    spellings = (*elementwise(name), *(s for m in more for s in elementwise(m)))
    return Op(name, getattr(operator, name), spellings, f"{{0}} {symbol} {{1}}", "common", **columns)


def div_trunc(x, y):
    """torch's division that rounds towards zero."""
    if has_torch_function((x, y)):
        return handle_torch_function(div_trunc, (x, y), x, y)
    return torch.div(x, y, rounding_mode="trunc")


def rint(x):
    """The nearest whole number, the even one of two."""
    return handle_torch_function(rint, (x,), x) if has_torch_function((x,)) else torch.round(x)
