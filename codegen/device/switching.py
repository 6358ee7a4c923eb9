"""triton.language, switched to the interpreter and back.

The whole process shares triton.language, so one kernel runs or compiles at a time (`LANGUAGE`). An interrupt may strike anywhere: switching
is one call that no bytecode divides, there and back, and whoever comes next switches back what is still switched.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import os
import types
from collections import deque
from collections.abc import Iterable

import triton.language as tl
from triton.runtime import interpreter

from ..turn import Turn
from .interpreter_patches import patch

LANGUAGE = Turn()  # who runs or compiles a kernel
_MISSING = object()
_OWNERS = (
    tl,
    tl.core,
    tl.math,
    tl.standard,
    tl.tensor,
    tl.dtype,
    tl.condition,
    tl.core.block_type,
    tl.core.tensor_descriptor_base,
    interpreter,
    interpreter.InterpreterBuilder,
    interpreter.TensorHandle,
    interpreter.interpreter_builder,
    interpreter.interpreter_semantic,
)
_unchanged: list[tuple[object, dict]] = []  # those with their attributes, before the first switch
_changes: list[tuple[object, str, object, object]] = []  # what differs while a kernel runs: of what, its name, before and then
_setters: list[list] = []  # what makes all changes, and what takes them back
at_once = deque(maxlen=0).extend  # goes through an iterator of C's own without a bytecode in between, at which an interrupt could strike


def _setters_of(changes: Iterable[tuple], column: int) -> list:
    """Functions that set every attribute to its value in a column of `changes`."""
    return [
        functools.partial(delattr, owner, name) if value is _MISSING else functools.partial(setattr, owner, name, value)
        for owner, name, value in ((change[0], change[1], change[column]) for change in changes)
    ]


def _calls(functions: list) -> Iterable:
    """An iterator that calls each of them."""
    return map(operator.methodcaller("__call__"), functions)


def restore() -> None:
    """Switch back what an interrupt, or a fork in the middle of another thread's kernel, has left switched. Asked for under LANGUAGE."""
    left = [change for change in _changes or _differences() if vars(change[0]).get(change[1], _MISSING) is change[3]]
    if left:
        at_once(_calls(_setters_of(left, 2)))


def switches() -> tuple[Iterable, Iterable]:
    """Iterators that switch triton.language to the interpreter, and back."""
    if not _changes:
        _changes.extend(_found_by_switching())
    # others may patch triton.language, too: what is there now is what comes back
    if not _setters or any(vars(owner).get(name, _MISSING) is not before for owner, name, before, _ in _changes):
        _setters.clear()  # should an interrupt strike, they are made anew
        _changes[:] = [(owner, name, vars(owner).get(name, _MISSING), then) for owner, name, _, then in _changes]
        _setters[:] = _setters_of(_changes, 3), _setters_of(_changes, 2)
    there = _calls(_setters[0])
    return there, itertools.chain(there, _calls(_setters[1]))  # back comes after all of `there`, if an interrupt came before it


def _found_by_switching() -> list[tuple]:
    """The changes that Triton's interpreter and the functions below make, found by making them once."""
    importlib.import_module("triton.experimental.gluon")  # it takes functions from triton.language, and must not find them switched
    _unchanged[:] = [(owner, dict(vars(owner))) for owner in _OWNERS]
    try:
        patch()
        return _differences()
    finally:
        restore()


def _differences() -> list[tuple]:
    """What is not as it was before the first switch."""
    return [
        (owner, name, attributes.get(name, _MISSING), value)
        for owner, attributes in _unchanged
        for name, value in list(vars(owner).items())
        if attributes.get(name, _MISSING) is not value
        # a submodule that somebody imports, and what Python makes when it is asked for, are nobody's switching
        and not isinstance(value, types.ModuleType)
        and name not in ("__annotations__", "__warningregistry__")
    ]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: LANGUAGE.depth or restore())
