"""Kernels in C++: compiled by the system's compiler, kept on disk beside the print, loaded by ctypes.

The compiler is $CXX or c++, as for torch's own extensions. Code is named by the
kernel's text, the compiler's version, the flags and the CPU.

    FLEXPRESS_CPU        "cpp": these kernels serve wherever they can; else Triton's interpreter runs the portable ones, but for calls
                         with BACKEND="CPP"
    FLEXPRESS_CXXFLAGS   more flags, behind ours
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch

from .. import logs, progress
from ..registry import INFO, remembered
from ..text.cpp import c_type, captured_numbers
from ..text.spec import KernelSpec
from . import folder
from .kernel import Kernel

_INCLUDES = ("cpu.h", "cpu_tiles.h")  # of templates/
_CTYPES = {"float": ctypes.c_float, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}


def compiler() -> str | None:
    """The compiler's path; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "c++")


def asked_for() -> bool:
    """Are kernels in C++ to serve calls that do not name them?"""
    return os.environ.get("FLEXPRESS_CPU", "").lower() == "cpp"


def refusal() -> str | None:
    """Why nothing is compiled for CPUs unless a call names these kernels, or None."""
    if not asked_for():
        return "FLEXPRESS_CPU is not cpp"
    return None if compiler() else "there is no C++ compiler (g++ or clang++; CXX names another)"


@remembered("versions of the compiler", 16)
def version(path: str) -> str:
    """Its first line about itself; "" if it does not run."""
    try:
        found = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.split("\n")[0]


def flags() -> list[str]:
    """What kernels are compiled with."""
    arm, apple = platform.machine() in ("arm64", "aarch64"), sys.platform == "darwin"
    found = ["-std=gnu++17", "-O3", "-mcpu=native" if arm else "-march=native", "-fPIC", "-shared"]
    # g++ 12 loses roundings to half precision where the CPU has instructions for sums of such numbers, which no kernel wants
    found += [] if arm else ["-mprefer-vector-width=512", "-mno-avx512fp16"]
    # integers wrap around as torch's do; a * b + c is one operation; no function sets errno or traps
    found += ["-fwrapv", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
    found += ["-Xpreprocessor", "-fopenmp", "-lomp"] if apple else ["-fopenmp"]  # torch's own library, which the process has loaded
    libraries = Path(torch.__file__).parent / "lib"
    return [*found, f"-L{libraries}", "-ltorch_cpu", "-lc10", *shlex.split(os.environ.get("FLEXPRESS_CXXFLAGS", ""))]


@remembered("this CPU", 1)
def cpu() -> str:
    """What -march=native means here."""
    known = ""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n")
        known = " ".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}))
    return f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()} {known}"


class CppKernel(Kernel):
    """One printed kernel in C++. Its entry point has the template's name, and takes a struct of its parameters and a number of threads."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        captured = captured_numbers(spec.mods)
        kinds = [(p.name, c_type(p, captured)) for p in spec.parameters]
        names = [(name, ctypes.c_void_p if kind.endswith("*") else _CTYPES[kind]) for name, kind in kinds]
        self.arguments = type("Arguments", (ctypes.Structure,), {"_fields_": names})
        self._function = None

    def call(self, values: Mapping[str, object], threads: int | None = None) -> None:
        """Run with arguments by the names of parameters, by torch's threads or fewer."""
        function = self.function()
        plain = (values[name] for name, _ in self.arguments._fields_)
        given = self.arguments(*(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in plain))
        function(ctypes.byref(given), threads or torch.get_num_threads())

    def function(self):
        """The compiled function."""
        return self._function or self._turn.run(self._built)

    def _built(self):
        if self._function is None:
            start, name = time.perf_counter(), self._name()
            code, compiled = _read(name), False
            if code is None:
                code, compiled = self._compile(), True
                _write(name, code)
            self._function = getattr(_loaded(name, code), self.spec.template)
            self._function.restype = None
            seconds = time.perf_counter() - start
            if compiled:
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

    def _compile(self) -> bytes:
        with progress.shown(f"compiling {self.path.stem}"):
            return compiled(self.printed.source, str(self.path))


def compiled(source: str, name: str) -> bytes:
    """The library of a print. Raises RuntimeError if there is no compiler, or if it fails."""
    path = compiler()
    if path is None:
        raise RuntimeError("there is no C++ compiler; install g++ or clang++, or set CXX to one")
    with tempfile.TemporaryDirectory(prefix="flexpress-") as place:
        made = Path(place, "kernel.so")
        command = [path, "-x", "c++", "-", *flags(), "-o", str(made)]
        done = subprocess.run(command, input=whole(source), capture_output=True, text=True, cwd=place)
        if done.returncode:
            raise RuntimeError(f"{path} does not compile {name}:\n{done.stderr[:4000]}")
        return made.read_bytes()


def tried() -> None:
    """Compile the headers alone. Raises what `compiled` does."""
    compiled("".join(f'#include "{header}"\n' for header in _INCLUDES), "the headers of kernels")


def whole(source: str) -> str:
    """A print with the headers that it includes: one file."""
    import flexpress.templates

    for header in _INCLUDES:
        text = (resources.files(flexpress.templates) / header).read_text(encoding="utf-8").replace("#pragma once\n", "")
        source = source.replace(f'#include "{header}"\n', f'#line 1 "{header}"\n{text}')
    return source


def _write(name: str, code: bytes) -> None:
    folder.write(f"{name}.so", code)
    folder.write(f"{name}.json", json.dumps({"hashes": {"so": hashlib.sha256(code).hexdigest()}}).encode())


def _read(name: str) -> bytes | None:
    """Compiled code from disk; None if it is absent, truncated or edited."""
    try:
        noted = json.loads(folder.read(f"{name}.json") or b"")["hashes"]["so"]
        code = folder.read(f"{name}.so") or b""
        return code if hashlib.sha256(code).hexdigest() == noted else None
    except (ValueError, KeyError, TypeError):
        return None


def _loaded(name: str, code: bytes) -> ctypes.CDLL:
    """The library of these bytes: from the folder, where nobody else can write, or from a file of this process's own."""
    place = folder.path()
    if place is not None:
        try:
            return ctypes.CDLL(str(place / f"{name}.so"))
        except OSError:  # another process made room, or nothing there may be executed
            pass
    with tempfile.TemporaryDirectory(prefix="flexpress-") as own:
        file = Path(own, f"{name}.so")
        file.write_bytes(code)
        return ctypes.CDLL(str(file))
