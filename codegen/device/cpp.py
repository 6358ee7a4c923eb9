"""Kernels in C++: compiled by the system's compiler, kept on disk beside the print, loaded by ctypes.

Code is named by the kernel's text, the compiler's version, the flags and the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from .. import logs, progress
from ..mod.captured.tensors import LOWEST, check_address
from ..registry import INFO
from ..text.cpp import c_type, captured_numbers
from ..text.spec import KernelSpec
from . import folder
from .cpp_build import CannotLoad, CompilerError, CompilerStopped, flags
from .cpp_compiler import compiled, compiler, cpu, version
from .kernel import Kernel

_CTYPES = {"float": ctypes.c_float, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}


_began: list[int] = []  # the process that first ran a kernel in several threads, which OpenMP keeps


def _there(threads: int) -> int:
    """How many of so many threads there are: a forked child has none of those that its parent began, and would wait for them for ever."""
    if threads > 1 and not _began:
        _began.append(os.getpid())
    return threads if threads == 1 or _began[0] == os.getpid() else 1


class CppKernel(Kernel):
    """One printed kernel in C++. Its entry point has the template's name, and takes a struct of its parameters and a number of threads."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        captured = captured_numbers(spec.mods)
        kinds = [(p.name, c_type(p, captured)) for p in spec.parameters]
        names = [(name, ctypes.c_void_p if kind.endswith("*") else _CTYPES[kind]) for name, kind in kinds]
        self.arguments = type("Arguments", (ctypes.Structure,), {"_fields_": names})
        self._function = None
        self._failed = "", CompilerError, ""  # the name under which it did not compile or load, and why

    def call(self, values: Mapping[str, object], threads: int | None = None) -> None:
        """Run with arguments by the names of parameters, by torch's threads or fewer."""
        function = self.function()
        plain = (values[name] for name, _ in self.arguments._fields_)
        given = (v if not isinstance(v, torch.Tensor) else at if (at := v.data_ptr()) >= LOWEST else _low(v) for v in plain)
        function(ctypes.byref(self.arguments(*given)), _there(threads or torch.get_num_threads()))

    def function(self):
        """The compiled function."""
        return self._function or self._turn.run(self._built)

    def _built(self):
        if self._function is None:
            start, name = time.perf_counter(), self._name()
            kept = self._kept(name)
            self._function = kept or self._compiled(name)
            seconds = time.perf_counter() - start
            if not kept:
                INFO.compiles += 1
                self.compiled.append(seconds)
                logs.COMPILE.info("compiled %s in %.2f s", self.path.stem, seconds)
            else:
                logs.COMPILE.debug("found %s compiled, loaded in %.0f ms", self.path.stem, 1e3 * seconds)
        return self._function

    def _name(self) -> str:
        path = compiler()
        key = repr((self.path.stem, path, path and version(path), flags(), cpu(), torch.__version__))
        return f"{self.path.stem}.{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def _kept(self, name: str):
        """The function from disk; None if it is not there. What cannot be loaded, as a compiler left it half written, is made anew."""
        code = _read(name)
        with contextlib.suppress(CannotLoad):
            return code and _loaded(name, code, self.spec.template)

    def _compiled(self, name: str):
        if self._failed[0] == name:
            raise self._failed[1](self._failed[2])
        try:
            with progress.shown(f"compiling {self.path.stem}"):
                code = compiled(self.printed.source, str(self.path))
            _write(name, code)
            return _loaded(name, code, self.spec.template)
        except CompilerStopped:
            raise
        except CompilerError as why:
            self._failed = name, type(why), str(why)
            raise


def _low(tensor: torch.Tensor) -> int:
    """The address of a tensor that is below LOWEST. Raises NotImplementedError if it has no memory."""
    check_address(tensor)
    return tensor.data_ptr()


def _write(name: str, code: bytes) -> None:
    folder.write(f"{name}.so", code)
    folder.write(f"{name}.json", json.dumps({"hashes": {"so": hashlib.sha256(code).hexdigest()}}).encode())


def _read(name: str) -> bytes | None:
    """Compiled code from disk; None if it is absent, truncated or edited."""
    try:
        noted = folder.note(f"{name}.json")["hashes"]["so"]
        code = folder.read(f"{name}.so") or b""
        return code if hashlib.sha256(code).hexdigest() == noted else None
    except (KeyError, TypeError):
        return None


def _loaded(name: str, code: bytes, entry: str):
    """A function of these bytes' library: from the folder, where nobody else can write, or from a file of this process's own."""
    place = folder.path()
    if place is not None:
        try:
            return _function(place / f"{name}.so", entry)
        except (OSError, AttributeError):  # another process made room, or nothing there may be executed
            pass
    try:
        with tempfile.TemporaryDirectory(prefix="flexpress-") as own:
            file = Path(own, f"{name}.so")
            file.write_bytes(code)
            return _function(file, entry)
    except (OSError, AttributeError) as error:
        raise CannotLoad(
            f"compiled code cannot be loaded: {error}. The compiler must make a whole library, and FLEXPRESS_CACHE_DIR or TMPDIR be a "
            "folder where files may be executed"
        ) from error


def _function(file: Path, entry: str):
    function = getattr(ctypes.CDLL(str(file)), entry)
    function.restype = None
    return function
