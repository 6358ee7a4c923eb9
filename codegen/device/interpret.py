"""Running printed kernels on a CPU, in Triton's interpreter, with no environment variable.

Triton decides when it is imported whether functions are interpreted, and its library (`tl.sum`, `tl.max`, ...) is compiled
from then on. Here a printed file is loaded with its functions as plain Python, and while one runs `triton.language` is
switched over: its builtins by the interpreter's own patches, its library functions to their Python bodies, libdevice to
NumPy. Everything is switched back afterwards, so the same process can compile for a GPU.

The whole process shares triton.language, so one kernel runs or compiles at a time (`LANGUAGE`). An interrupt may strike anywhere: switching
is one call that no bytecode divides, there and back, and whoever comes next switches back what is still switched.
"""

from __future__ import annotations

import ast
import contextvars
import dataclasses
import functools
import importlib
import itertools
import operator
import os
import sys
import time
import types
import warnings
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from ..turn import Turn
from .interpreter_types import keep_types

LANGUAGE = Turn()  # who runs or compiles a kernel
_NOTICE_AFTER = 3.0  # seconds of running before the rest is estimated
_SLOW = 60.0  # an estimate longer than this is worth a word


def load(path: str, source: str) -> types.SimpleNamespace:
    """The functions of a printed kernel file as plain Python functions for the interpreter."""
    tree = ast.parse(source, path)
    signatures = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            names = [a.arg for a in node.args.args]
            constants = {a.arg for a in node.args.args if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)}
            signatures[node.name] = (names, constants)
            interpreter.ASTTransformer().visit(node)
    ast.fix_missing_locations(tree)
    namespace = {"__name__": "flexpress_kernel", "__file__": path, "interpreter_semantic": _semantic()}
    exec(compile(tree, path, "exec"), namespace)
    if "libdevice" in namespace:
        namespace["libdevice"] = _Libdevice()
    return types.SimpleNamespace(**{name: _Interpreted(namespace[name], *signature) for name, signature in signatures.items()})


def _semantic():
    return interpreter.interpreter_semantic


class _Interpreted:
    """One kernel: `kernel[grid](*args)`, constants last."""

    def __init__(self, function, names, constants) -> None:
        self.function, self.names, self.constants = function, names, constants

    def __getitem__(self, grid):
        return lambda *args: self.run(grid, args)

    def run(self, grid, args) -> None:
        # NumPy's error state belongs to a context: in a copy of it, nothing that happens here outlasts the call
        LANGUAGE.run(contextvars.copy_context().run, self._run, grid, args)

    def _run(self, grid, args) -> None:
        if LANGUAGE.depth > 1:
            raise RuntimeError(
                f"the kernel {self.function.__name__} was started on the CPU from a signal handler or finalizer while "
                "another kernel ran in the same thread; start it when that one is done"
            )
        again = map(operator.methodcaller("__call__"), [restore])
        try:
            self._switched(grid, args)
        finally:
            _at_once(again)  # should an interrupt have struck where nothing below would see it

    def _switched(self, grid, args) -> None:
        given = dict(zip(self.names, args, strict=True))
        sizes = (*grid, 1, 1)[:3]
        progress = _Progress(sizes[0] * sizes[1] * sizes[2], self.function.__name__)
        restore()
        # tensors become their addresses; constexprs stay as they are
        values = {k: v if k in self.constants else _argument(v) for k, v in given.items()}
        there, back = _switches()
        try:
            _at_once(there)
            interpreter.interpreter_builder.set_grid_dim(*sizes)
            with np.errstate(all="ignore"):
                for x in range(sizes[0]):
                    for y in range(sizes[1]):
                        for z in range(sizes[2]):
                            interpreter.interpreter_builder.set_grid_idx(x, y, z)
                            self.function(**values)
                            progress.step()
            progress.close()
        finally:
            _at_once(back)


def _argument(value):
    """A kernel argument; numbers become scalars of the type that they have on a GPU."""
    if type(value) in (bool, float):
        dtype, numpy_dtype = (tl.int1, np.bool_) if type(value) is bool else (tl.float32, np.float32)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=numpy_dtype), dtype), dtype)
    return interpreter._implicit_cvt(value)


class _Progress:
    """Says once that a run on the CPU will take minutes, and then how far it is."""

    def __init__(self, total: int, name: str) -> None:
        self.total, self.name, self.done = total, name, 0
        self.start = self.last = time.monotonic()
        self.announced = False

    def step(self) -> None:
        self.done += 1
        now = time.monotonic()
        elapsed = now - self.start
        if elapsed < _NOTICE_AFTER:
            return
        expected = elapsed * self.total / self.done
        if not self.announced and expected > _SLOW:
            self.announced = True
            warnings.warn(
                f"the tensors are on the CPU, so the kernel `{self.name}` runs in Triton's interpreter: about "
                f"{expected / 60:.1f} minutes for {self.total} programs. Move the tensors to a GPU for real sizes.",
                stacklevel=9,
            )
        if self.announced and (now - self.last > 2.0 or self.done == self.total):
            self.last = now
            print(
                f"\rflexpress: {self.name} {self.done}/{self.total}, {max(expected - elapsed, 0):.0f} s left  ",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self.announced:
            print(file=sys.stderr)


_MISSING = object()
_OWNERS = (
    tl,
    tl.core,
    tl.math,
    tl.standard,
    tl.tensor,
    tl.dtype,
    tl.core.block_type,
    tl.core.tensor_descriptor_base,
    interpreter,
    interpreter.InterpreterBuilder,
    interpreter.interpreter_builder,
)
_unchanged: list[tuple[object, dict]] = []  # those with their attributes, before the first switch
_changes: list[tuple[object, str, object, object]] = []  # what differs while a kernel runs: of what, its name, before and then
_at_once = deque(maxlen=0).extend  # goes through an iterator of C's own without a bytecode in between, at which an interrupt could strike


def _changed(changes: Iterable[tuple], column: int) -> Iterable:
    """An iterator that sets every attribute to its value in a column of `changes`."""
    steps = [
        functools.partial(delattr, owner, name) if value is _MISSING else functools.partial(setattr, owner, name, value)
        for owner, name, value in ((change[0], change[1], change[column]) for change in changes)
    ]
    return map(operator.methodcaller("__call__"), steps)


def restore() -> None:
    """Switch back what an interrupt, or a fork in the middle of another thread's kernel, has left switched. Asked for under LANGUAGE."""
    left = [change for change in _changes or _differences() if vars(change[0]).get(change[1], _MISSING) is change[3]]
    if left:
        _at_once(_changed(left, 2))


def _switches() -> tuple[Iterable, Iterable]:
    """Iterators that switch triton.language to the interpreter, and back."""
    if not _changes:
        _changes.extend(_found_by_switching())
    # others may patch triton.language, too: what is there now is what comes back
    _changes[:] = [(owner, name, vars(owner).get(name, _MISSING), then) for owner, name, _, then in _changes]
    there = _changed(_changes, 3)
    return there, itertools.chain(there, _changed(_changes, 2))  # back comes after all of `there`, if an interrupt came before it


def _found_by_switching() -> list[tuple]:
    """The changes that Triton's interpreter and the functions below make, found by making them once."""
    importlib.import_module("triton.experimental.gluon")  # it takes functions from triton.language, and must not find them switched
    _unchanged[:] = [(owner, dict(vars(owner))) for owner in _OWNERS]
    try:
        _patch()
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
        and name != "__annotations__"
    ]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: LANGUAGE.depth or restore())


def _patch():
    """Patch triton.language for interpretation, one attribute after another; returns Triton's record of it."""
    scope = interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    for module in (tl, tl.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and not name.startswith("_"):  # combine functions keep their identity
                scope.set_attr(module, name, value.fn)
    keep_types(scope)
    builder = interpreter.InterpreterBuilder
    plain_dot = builder.create_dot

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        # the interpreter keeps bfloat16 as its bits, which NumPy would multiply as integers
        a, b = (_widened(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    def create_fma(self, x, y, z):
        # one rounding: the exact product is what the softmax's shift is taken from
        data = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(data.astype(z.data.dtype), z.dtype.scalar)

    def get_all_ones_value(self, type):  # NumPy refuses -1 for unsigned types
        return interpreter.TensorHandle(np.array([-1]).astype(interpreter._get_np_dtype(type)), type.scalar)

    plain_cast, plain_splat, plain_convert = builder.cast_impl, builder.create_splat, builder.create_fp_to_fp

    def create_splat(self, type, value):
        # the interpreter gives a comparison the dtype of its operands
        if value.data.dtype == np.bool_:
            value = interpreter.TensorHandle(value.data, tl.int1)
        return plain_splat(self, type, value)

    def cast_impl(self, source, type):
        # the interpreter cuts bits off; hardware rounds to the nearest
        if source.dtype.scalar == tl.float32 and type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_narrowed(source.data), tl.bfloat16)
        return plain_cast(self, source, type)

    def create_fp_to_fp(self, source, type, rounding_mode):
        # the interpreter loses the carry where rounding reaches the next power of two
        if source.dtype.scalar == tl.float32 and type.scalar == tl.float8e4nv:
            return interpreter.TensorHandle(_float8(source.data), tl.float8e4nv)
        return plain_convert(self, source, type, rounding_mode)

    scope.set_attr(interpreter, "_get_np_dtype", _numpy_dtype)
    # Triton would compute every integer sum and product again in 64 bits, and do nothing with it
    options = interpreter.interpreter_builder.options
    scope.set_attr(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))
    scope.set_attr(builder, "create_dot", create_dot)
    scope.set_attr(builder, "create_fma", create_fma)
    scope.set_attr(builder, "create_fp_to_fp", create_fp_to_fp)
    scope.set_attr(builder, "cast_impl", cast_impl)
    # Triton 3.6 leaves scalars as arrays of one element, which NumPy 2.4 no longer takes for numbers
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
    scope.set_attr(builder, "create_splat", create_splat)
    scope.set_attr(builder, "get_all_ones_value", get_all_ones_value)
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


def _widened(handle):
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def _narrowed(data):
    """float32 as the bits of the nearest bfloat16, ties to even."""
    bits = data.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _float8(data):
    """float32 as the bits of the nearest float8_e4m3fn; what is too large becomes its largest number, as on a GPU."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return torch.from_numpy(np.clip(data, -limit, limit)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


class _Libdevice:
    """libdevice's functions, which NumPy has under the same names."""

    def __getattr__(self, name: str):
        return functools.partial(_applied, getattr(np, name))


def _applied(function, *operands):
    """A function of NumPy on the interpreter's tensors and numbers."""
    semantic = _semantic()
    tensors = [x if isinstance(x, tl.tensor) else semantic.to_tensor(x, False) for x in operands]
    if len(tensors) == 2:
        tensors = list(semantic.binary_op_type_checking_impl(*tensors))
    data = function(*(t.handle.data for t in tensors))
    like = tensors[0]
    return tl.tensor(interpreter.TensorHandle(np.asarray(data, dtype=like.handle.data.dtype), like.dtype.scalar), like.type)
