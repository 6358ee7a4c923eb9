"""In which dtypes functions of vectors compute. torch's kernels sum half precision in float32 and round their result alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..current import running
from .symbols import Sym, Vector
from .vectors import as_vector


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum that is rounded to `dtype` in the end."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def check_one_dtype(name: str, *values) -> None:
    """ModError for operands of several dtypes, which torch's products refuse."""
    dtypes = list(dict.fromkeys(as_vector(value).dtype for value in values))
    if len(dtypes) > 1:
        said = " and ".join(map(str, dtypes))
        raise running().error(f"{name} of {said}", "Its operands must have one dtype: convert them, for example with .float().")


def rounded_once(count: int | None = 1, alike: str = "") -> Callable:
    """For a function of vectors that is made of reductions: half precision is float32 until the result, which gets the common dtype of the
    first `count` arguments. alike: what the function is called, if these must have one dtype."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def computed(*args, **kwargs):
            args, kwargs = tuple(map(as_vector, args)), {k: as_vector(v) for k, v in kwargs.items()}
            if alike:
                check_one_dtype(alike, *args[:count])
            given = functools.reduce(torch.promote_types, (a.dtype for a in args[:count]))
            found = function(*map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})
            return found.to(given) if given.is_floating_point else found

        return computed

    return decorate


def _wide(value):
    return value.to(summed_in(value.dtype)) if isinstance(value, (Sym, Vector)) else value


def of_floats(name: str, x, dtype: torch.dtype | None = None):
    """The operand of a function that torch has of floats alone, in `dtype` if one is given."""
    x = as_vector(x) if dtype is None else as_vector(x).to(dtype)
    if not x.dtype.is_floating_point:
        raise running().error(f"{name} of {x.dtype}", "Write .float() first.")
    return x
