"""Running printed kernels on a CPU, in Triton's interpreter, with no environment variable.

Triton decides when it is imported whether functions are interpreted, and its library (`tl.sum`, `tl.max`, ...) is compiled
from then on. Here a printed file is loaded with its functions as plain Python, and while one runs `triton.language` is
switched over: its builtins by the interpreter's own patches, its library functions to their Python bodies, libdevice to
NumPy. Everything is switched back afterwards, so the same process can compile for a GPU.
"""

from __future__ import annotations

import ast
import contextvars
import operator
import sys
import time
import types
import warnings

import numpy as np
from triton.runtime import interpreter

from .. import progress
from ..text.parsing import parse
from .interpreter_numbers import Libdevice, argument
from .switching import LANGUAGE, at_once, restore, switches

_NOTICE_AFTER = 3.0  # seconds of running before the rest is estimated
_SLOW = 60.0  # an estimate longer than this is worth a word


def load(path: str, source: str) -> types.SimpleNamespace:
    """The functions of a printed kernel file as plain Python functions for the interpreter."""
    tree = parse(source, path)
    signatures = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            names = [a.arg for a in node.args.args]
            constants = {a.arg for a in node.args.args if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)}
            signatures[node.name] = (names, constants)
            _convert_numbers(node.body)
    namespace = {"__name__": "flexpress_kernel", "__file__": path, "interpreter_semantic": interpreter.interpreter_semantic}
    exec(compile(tree, path, "exec"), namespace)
    if "libdevice" in namespace:
        namespace["libdevice"] = Libdevice()
    return types.SimpleNamespace(**{name: _Interpreted(namespace[name], *signature) for name, signature in signatures.items()})


def _convert_numbers(statements: list[ast.stmt]) -> None:
    """`x = 1` becomes `x = interpreter_semantic.to_tensor(1, False)`, as Triton's interpreter has it: a name's number is a tensor."""
    for statement in statements:
        if isinstance(statement, ast.Assign):
            value, semantic = statement.value, ast.Name("interpreter_semantic", ast.Load())
            no_check = ast.Constant(False)
            to_tensor = ast.Attribute(semantic, "to_tensor", ast.Load())
            statement.value = ast.Call(to_tensor, [value, no_check], [])
            for new in (semantic, no_check, to_tensor, statement.value):
                ast.copy_location(new, value)
        for block in ("body", "orelse"):
            _convert_numbers(getattr(statement, block, []))


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
            at_once(again)  # should an interrupt have struck where nothing below would see it

    def _switched(self, grid, args) -> None:
        given = dict(zip(self.names, args, strict=True))
        sizes = (*grid, 1, 1)[:3]
        slow = _Progress(sizes[0] * sizes[1] * sizes[2], self.function.__name__)
        restore()
        # tensors become their addresses; constexprs stay as they are
        values = {k: v if k in self.constants else argument(v) for k, v in given.items()}
        there, back = switches()
        try:
            at_once(there)
            interpreter.interpreter_builder.set_grid_dim(*sizes)
            with np.errstate(all="ignore"):
                for x in range(sizes[0]):
                    for y in range(sizes[1]):
                        for z in range(sizes[2]):
                            interpreter.interpreter_builder.set_grid_idx(x, y, z)
                            self.function(**values)
                            slow.step()
            slow.close()
        finally:
            at_once(back)


class _Progress:
    """Says once that a run on the CPU will take minutes, and then, on a terminal, how far it is."""

    def __init__(self, total: int, name: str) -> None:
        self.total, self.name, self.done = total, name, 0
        self.start = self.last = time.monotonic()
        self.announced = self.shown = False

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
                f"{expected / 60:.1f} minutes for {self.total} programs. For real sizes install a C++ compiler (`python -m flexpress "
                "doctor` looks for one; docs/cpu.md says what it serves), or move the tensors to a GPU.",
                stacklevel=9,
            )
        if self.announced and (now - self.last > 2.0 or self.done == self.total):
            self.last = now
            if progress.wanted():
                left = f"\rflexpress: {self.name} {self.done}/{self.total}, {max(expected - elapsed, 0):.0f} s left  "
                print(left, end="", file=sys.stderr, flush=True)
                self.shown = True

    def close(self) -> None:
        if self.shown:
            print(file=sys.stderr)
