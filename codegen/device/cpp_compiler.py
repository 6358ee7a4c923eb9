"""The system's C++ compiler, which kernels for CPUs are compiled with: $CXX or c++, as for torch's own extensions.

FLEXPRESS_CPU        "interpreter": Triton's interpreter runs the portable kernels, but for calls with BACKEND="CPP"; "cpp", or nothing:
                     kernels in C++ serve wherever they can
FLEXPRESS_CXXFLAGS   more flags, behind ours
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TypeVar

import torch

from ..registry import Table, remembered

_INCLUDES = ("cpu.h", "cpu_tiles.h", "cpu_dropout.h")  # of templates/
_given_up: dict[tuple, str] = Table("compilers that failed", 16)  # and why
T = TypeVar("T")


class CompilerError(RuntimeError):
    """There is no C++ compiler, or it does not compile a kernel."""


def compiler() -> str | None:
    """The compiler's path; None if there is none."""
    return _found(os.environ.get("CXX") or "c++", os.environ.get("PATH", ""))


@remembered("compilers", 16)
def _found(name: str, path: str) -> str | None:
    return shutil.which(name, path=path)


def interpreter_asked_for() -> bool:
    """Is Triton's interpreter to serve calls that do not name kernels in C++? Raises ValueError if FLEXPRESS_CPU holds another word."""
    word = os.environ.get("FLEXPRESS_CPU", "").lower()
    if word not in ("", "cpp", "interpreter"):
        raise ValueError(f"FLEXPRESS_CPU is {word!r}; write 'cpp' or 'interpreter'")
    return word == "interpreter"


def refusal(named: str | None = None) -> str | None:
    """Why no kernels in C++ serve a call on CPU tensors that asks for the BACKEND `named`, or None."""
    if named == "CPP" and compiler():
        return None
    return "FLEXPRESS_CPU is interpreter" if interpreter_asked_for() else _unusable()


def _unusable() -> str | None:
    if compiler() is None:
        return "there is no C++ compiler (g++ or clang++; CXX names another)"
    return _given_up.get(_kind())


def _kind() -> tuple:
    return compiler(), os.environ.get("FLEXPRESS_CXXFLAGS")


def give_up(why: CompilerError) -> None:
    """The compiler failed: from now on the interpreter serves calls that do not name kernels in C++."""
    _given_up[_kind()] = f"{compiler()} failed before"
    warnings.warn(f"flexpress: kernels for the CPU do not compile and run in Triton's interpreter. {why}", RuntimeWarning, stacklevel=2)


def note_interpreter() -> None:
    """Say that the interpreter runs kernels because there is no compiler, unless it was asked for. (Python shows a warning once.)"""
    if compiler() is None and not interpreter_asked_for():
        warnings.warn(
            "flexpress: no C++ compiler was found, so kernels on the CPU run in Triton's interpreter: right, and thousands of times "
            "slower. `python -m flexpress doctor` says how to get one; FLEXPRESS_CPU=interpreter silences this.",
            RuntimeWarning,
            stacklevel=2,
        )


def by_either(run: Callable[[bool], T], device: torch.device, named: str | None = None) -> T:
    """`run(True)`, which takes kernels in C++, on a CPU that has a compiler, else `run(False)`.

    named   the BACKEND that the user asks for: for "CPP" the compiler must not fail, and for "PORTABLE" it is not asked
    """
    if device.type == "cpu" and named != "PORTABLE" and refusal(named) is None:
        try:
            return run(True)
        except CompilerError as why:
            if named == "CPP":
                raise
            give_up(why)
    return run(False)


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


def compiled(source: str, name: str) -> bytes:
    """The library of a print. Raises CompilerError if there is no compiler, or if it fails."""
    path = compiler()
    if path is None:
        raise CompilerError("there is no C++ compiler; install g++ or clang++, or set CXX to one")
    with tempfile.TemporaryDirectory(prefix="flexpress-") as place:
        made = Path(place, "kernel.so")
        command = [path, "-x", "c++", "-", *flags(), "-o", str(made)]
        done = subprocess.run(command, input=whole(source), capture_output=True, text=True, cwd=place)
        if done.returncode:
            raise CompilerError(f"{path} does not compile {name}:\n{done.stderr[:4000]}")
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
