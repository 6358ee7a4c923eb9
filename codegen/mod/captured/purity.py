"""What of Python and its libraries a mod may call: functions that only compute, so that they may be repeated at every call."""

from __future__ import annotations

import functools
import operator
import re
import types

import numpy as np
import torch

from ..operators import BINARY, COMPARISONS, UNARY, function_of
from .program import NUMBERS

FACTORIES = {torch.tensor, torch.scalar_tensor, torch.as_tensor, torch.zeros, torch.ones, torch.full}  # of what may be a literal
CONSTANTS = {str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex, type(...), slice}
_IMPURE = re.compile(
    r"i(add|sub|mul|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift|concat)$|setitem|delitem|empty|seed|manual_seed|_*set_"
)
PURE_MODULES = {"math", "cmath", "operator", "_operator", "torch", "numpy"}
_PURE_BUILTINS = {
    abs,
    bool,
    bytes,
    callable,
    chr,
    complex,
    dict,
    divmod,
    float,
    format,
    frozenset,
    getattr,
    hasattr,
    hash,
    int,
    isinstance,
    issubclass,
    len,
    max,
    min,
    ord,
    pow,
    repr,
    round,
    set,
    slice,
    str,
    sum,
    type,
    torch.Size,
    torch.device,
}
_PURE_METHODS = {
    "get",
    "keys",
    "values",
    "items",
    "index",
    "count",
    "copy",
    "format",
    "join",
    "split",
    "startswith",
    "endswith",
    "lower",
    "upper",
    "strip",
    "replace",
    "bit_length",
    "is_integer",
    "conjugate",
    "most_common",
    "union",
    "intersection",
}
# C functions that only use the operators of their arguments: stand-ins see what they do
ITERATORS = (all, any, enumerate, filter, list, map, range, reversed, sorted, tuple, zip)
BY_OPERATORS = (
    abs,
    bool,
    divmod,
    float,
    int,
    len,
    max,
    min,
    pow,
    round,
    sum,
    functools.reduce,
    *map(function_of, (*BINARY, "matmul", *COMPARISONS, *UNARY)),
    operator.not_,
    operator.truth,
    operator.getitem,
    operator.contains,
    operator.index,
)
# functions whose value for constants is a constant
OF_CONSTANTS = (abs, bool, float, int, max, min, pow, round, torch.finfo, torch.iinfo)


def is_constant(value) -> bool:
    return type(value) in NUMBERS or type(value) in CONSTANTS


def is_pure(function) -> bool:
    """Does a function only compute, so that it may be repeated?"""
    try:
        if function in _PURE_BUILTINS:
            return True
    except TypeError:
        return False
    if _IMPURE.match(getattr(function, "__name__", "")):
        return False
    if isinstance(function, types.FunctionType):
        return library_of(function) is not None
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType) or owner is None:
        return library(getattr(function, "__module__", None)) in PURE_MODULES
    if isinstance(owner, type):
        return library(owner.__module__) == "torch" and isinstance(function, types.BuiltinFunctionType)
    return isinstance(function, types.BuiltinFunctionType) and function.__name__ in _PURE_METHODS


def library(module) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def library_of(function: types.FunctionType) -> str | None:
    """The library whose own code a Python function is, by where it looks up names: a decorator cannot claim that."""
    top = library(function.__globals__.get("__name__"))
    return top if top in ("torch", "numpy", "functools", "math") else None


def is_of_a_library(value) -> bool:
    """C functions and the classes of Python, torch and NumPy are known by identity."""
    if isinstance(value, type):
        return library(value.__module__) in ("builtins", "torch", "numpy", "math")
    if isinstance(value, types.BuiltinFunctionType):
        return getattr(value, "__self__", None) is None or isinstance(value.__self__, (types.ModuleType, type))
    if isinstance(value, types.FunctionType):
        return library_of(value) is not None and not value.__closure__ and "<locals>" not in value.__qualname__
    return (
        isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType))
        or type(value).__module__ == "numpy"
        and isinstance(value, np.ufunc)
    )


def changes_in_place(function, kwargs: dict) -> bool:
    """Does a torch function write into its first argument (or into out=), by its name?"""
    name = getattr(function, "__name__", "")
    if name == "__set__" or kwargs.get("out") is not None or kwargs.get("inplace") is True:
        return True
    if name.startswith("__") and name.endswith("__"):
        return name in ("__setitem__", "__delitem__") or (name[2] == "i" and name not in _NOT_IN_PLACE)
    return name.endswith("_") and not name.endswith("__")


_NOT_IN_PLACE = {"__invert__", "__index__", "__int__", "__iter__", "__init__", "__instancecheck__"}
