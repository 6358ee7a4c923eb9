"""What of triton.language is another while a kernel is interpreted: Triton's patches, and what they get wrong or leave out, in NumPy."""

from __future__ import annotations

import types

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from .interpreter_numbers import mend
from .interpreter_types import keep_types


def patch():
    """Patch triton.language for interpretation, one attribute after another; returns Triton's record of it."""
    scope = interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    for module in (tl, tl.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and not name.startswith("_"):  # combine functions keep their identity
                scope.set_attr(module, name, value.fn)
    keep_types(scope)
    scope.set_attr(interpreter, "_get_np_dtype", _numpy_dtype)
    mend(scope)
    return scope


_find_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype] = {}


def _numpy_dtype(type):
    """As the interpreter's own function, which makes its table anew each time."""
    name = type.scalar.name
    found = _numpy_dtypes.get(name)
    if found is None:
        found = _numpy_dtypes[name] = _find_numpy_dtype(type)
    return found
