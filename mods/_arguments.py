"""Argument checks that the recipes share: each names the argument, says what was got and what to do instead.

They look at types, dtypes and shapes only. No check reads the values of a tensor, so none waits for a device.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, q_idx, kv_idx) -> bool
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, b, h, q_idx, kv_idx) -> score
LONGEST, LARGEST = 64, 256  # elements of a captured vector, and of a matrix, with which mods compute


def whole_number(recipe: str, name: str, value: object, remedy: str, minimum: int | None = None) -> int:
    """`value` as a Python int; TypeError if it is not a whole number, ValueError if it is below `minimum`."""
    try:
        if isinstance(value, (bool, Tensor)):
            raise TypeError
        # of a compiler's symbol, an int or a SymInt, operator.index would make a number; that of an array or a class fails
        number: int = value if type(value) in (int, torch.SymInt) else operator.index(value)  # type: ignore[arg-type, assignment]
    except TypeError:
        raise TypeError(f"{recipe}(): {name} must be an int, got {_described(value)}; {remedy}") from None
    if minimum is not None and number < minimum:  # int(): torch's compiler formats no symbol
        raise ValueError(f"{recipe}(): {name} must be at least {minimum}, got {int(number)}; {remedy}")
    return number


def positive_number(recipe: str, name: str, value: object, remedy: str) -> float:
    """`value` as a Python float; TypeError if it is no real number, ValueError unless float32 has it and its reciprocal."""
    if isinstance(value, torch.SymFloat):  # torch's compiler traces, and has no number to look at
        return value  # type: ignore[return-value]  # it acts as one
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{recipe}(): {name} must be a number, got {_described(value)}; {remedy}")
    try:
        number, float32 = float(value), torch.finfo(torch.float32)
    except OverflowError:
        raise ValueError(f"{recipe}(): {name} must be finite in float32, got {type(value).__name__} too large for it; {remedy}") from None
    if not float32.tiny <= number <= float32.max:
        raise ValueError(f"{recipe}(): {name} must be finite and above 0 in float32, got {number}; {remedy}")
    return number


def float_tensor(recipe: str, name: str, value: object, *shapes: tuple[str, ...]) -> Tensor:
    """`value` itself, a floating-point tensor of a rank among `shapes`; else TypeError or ValueError."""
    tensor = _tensor(recipe, name, value, shapes)
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{recipe}(): {name} must have a floating-point dtype, got {tensor.dtype}; convert it with {name}.float()")
    return tensor


def integer_tensor(recipe: str, name: str, value: object, *shapes: tuple[str, ...]) -> Tensor:
    """`value` itself, an integer tensor of a rank among `shapes`; else TypeError or ValueError."""
    tensor = _tensor(recipe, name, value, shapes)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise TypeError(f"{recipe}(): {name} must have an integer dtype, got {tensor.dtype}; convert it with {name}.int()")
    return tensor


def short(recipe: str, name: str, extent: int, what: str) -> None:
    """ValueError for vectors that are longer than what a kernel computes element by element, or empty."""
    if not 1 <= extent <= LONGEST:
        raise ValueError(
            f"{recipe}(): {name} must have 1 to {LONGEST} {what}, got {extent}; pass as many, since a kernel has them in registers"
        )


def has_values(tensor: Tensor) -> bool:
    """Are there values to read in this tensor? Not where torch's compiler traces, and torch.func maps."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def as_flag(value: object) -> bool | None:
    """A bool, numpy's too, or 0 or 1 as a bool; None for all else."""
    if isinstance(value, bool):  # torch's compiler has a bool for what compares sizes, too, and asks no such one whether it is in (0, 1)
        return bool(value)
    if isinstance(value, torch.SymBool):  # torch's compiler traces, and has no bool to look at
        return value  # type: ignore[return-value]  # it acts as one
    is_whole = isinstance(value, numbers.Integral) or type(value).__name__ in ("bool", "bool_")  # numpy's, which is no number
    return bool(value) if is_whole and value in (0, 1) else None


def flag(recipe: str, name: str, value: object) -> bool:
    """`value` as a bool; TypeError for anything but bools, numpy's too, and 0 and 1: a tensor would be read, and a word counts as True."""
    if (found := as_flag(value)) is not None:
        return found
    raise TypeError(f"{recipe}(): {name} must be True or False, got {_described(value)}; pass one of them")


def function(recipe: str, name: str, value: object, remedy: str) -> Callable:
    """`value` itself if it can be called, else TypeError."""
    if not callable(value):
        raise TypeError(f"{recipe}(): {name} must be a function, got {_described(value)}; {remedy}")
    return value


def _tensor(recipe: str, name: str, value: object, shapes: tuple[tuple[str, ...], ...]) -> Tensor:
    wanted = " or ".join(f"({', '.join(shape)}{',' * (len(shape) == 1)})" for shape in shapes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{recipe}(): {name} must be a tensor of shape {wanted}, got {_described(value)}; make one with torch.tensor(...)")
    if value.is_nested or value.is_quantized:
        raise TypeError(
            f"{recipe}(): {name} must be a tensor of shape {wanted}, got {_described(value)}; give its numbers in a plain tensor"
        )
    if value.dim() not in {len(shape) for shape in shapes}:
        raise ValueError(f"{recipe}(): {name} must have shape {wanted}, got {tuple(value.shape)}; reshape or index it to that rank")
    return value


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        kind = "a nested tensor of" if value.is_nested else f"a tensor of shape {tuple(value.shape)} and"
        return f"{kind} dtype {value.dtype}"
    return f"{repr(value)[:80]} ({type(value).__name__})"
