"""What of triton.language is another while a kernel is interpreted: Triton's patches, and what they get wrong or leave out, in NumPy."""

from __future__ import annotations

import functools
import types

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from .interpreter_direct import compute_directly
from .interpreter_numbers import mend
from .interpreter_operands import keep_operands
from .interpreter_types import keep_types


def patch():
    """Patch triton.language for interpretation, one attribute after another; returns Triton's record of it."""
    plain, interpreter._patch_attr = interpreter._patch_attr, _patch_directly
    try:
        scope = interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    finally:
        interpreter._patch_attr = plain
    for module in (tl, tl.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and not name.startswith("_"):  # combine functions keep their identity
                scope.set_attr(module, name, value.fn)
    keep_types(scope)
    keep_operands(scope)
    scope.set_attr(interpreter, "_get_np_dtype", _numpy_dtype)
    mend(scope)
    compute_directly(scope)
    return scope


def _patch_directly(owner, name, builtin, _, scope) -> None:
    """In place of Triton's own function: a builtin is called without the two around it, which look for what is always there."""
    semantic, function = interpreter.interpreter_semantic, getattr(builtin, "__wrapped__", builtin)

    def method(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, functools.partial(function, _semantic=semantic) if isinstance(owner, types.ModuleType) else method)


_find_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype] = {}


def _numpy_dtype(type):
    """As the interpreter's own function, which makes its table anew each time."""
    name = type.scalar.name
    found = _numpy_dtypes.get(name)
    if found is None:
        found = _numpy_dtypes[name] = _find_numpy_dtype(type)
    return found
