"""The system's C++ compiler, which kernels for CPUs are compiled with: $CXX or c++, as for torch's own extensions.

FLEXPRESS_CPU        "interpreter": Triton's interpreter runs the portable kernels, but for calls with BACKEND="CPP"; "cpp", or nothing:
                     kernels in C++ serve wherever they can
How kernels are compiled is in cpp_build.py.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import TypeVar

import torch

from ..registry import Table, remembered
from ..turn import Turn
from .cpp_build import CannotLoad, CompilerError, CompilerStopped, compiler_command, library, missing, native_cpu, version_of, whole

_INCLUDES = ("cpu.h", "cpu_tiles.h", "cpu_dropout.h")  # of templates/, by prints
_PARTS = ("cpu_vectors.h", "cpu_captured.h", "cpu_functions.h", "cpu_products.h", "cpu_factors.h", "cpu_results.h")  # by these, once each
_given_up: dict[tuple, str] = Table("compilers that failed", 16)  # and why
_beginning = Turn(fork_waits=True)
T = TypeVar("T")
cpu = remembered("this CPU", 1)(native_cpu)


def compiler() -> tuple[str, ...] | None:
    """The compiler's path, and the words that CXX has behind it; None if there is none. Raises ValueError for an open quote in CXX."""
    return _found(os.environ.get("CXX"), os.environ.get("PATH"))


@remembered("compilers", 16)
def _found(name: str | None, path: str | None) -> tuple[str, ...] | None:
    """With these in the environment."""
    return compiler_command()


@remembered("versions of the compiler", 16)
def version(command: tuple[str, ...]) -> str:
    """A compiler's first line about itself; "" if it does not run."""
    return version_of(command, _begun)


def interpreter_asked_for() -> bool:
    """Is Triton's interpreter to serve calls that do not name kernels in C++? Raises ValueError if FLEXPRESS_CPU holds another word."""
    word = os.environ.get("FLEXPRESS_CPU", "").lower()
    if word not in ("", "cpp", "interpreter"):
        raise ValueError(f"FLEXPRESS_CPU is {word!r}; write 'cpp' or 'interpreter'")
    return word == "interpreter"


def torch_serves(device: torch.device) -> bool:
    """Does torch do what small kernels of Triton's do elsewhere? On a CPU, unless the interpreter is asked for."""
    return device.type == "cpu" and not interpreter_asked_for()


def refusal(named: str | None = None) -> str | None:
    """Why no kernels in C++ serve a call on CPU tensors that asks for the BACKEND `named`, or None."""
    if named == "CPP" and compiler():
        return None
    return "FLEXPRESS_CPU is interpreter" if interpreter_asked_for() else _unusable()


def _unusable() -> str | None:
    if compiler() is None:
        return missing()
    return _given_up.get(_kind())


def _kind() -> tuple:
    return compiler(), os.environ.get("FLEXPRESS_CXXFLAGS")


def give_up(why: CompilerError) -> None:
    """The compiler failed: from now on the interpreter serves calls that do not name kernels in C++. If it was stopped, for this once, and
    where it compiles what all kernels include, calls that need this kernel."""
    if isinstance(why, CannotLoad):
        _given_up[_kind()] = "compiled kernels could not be loaded before"
        told = "compiled kernels for the CPU cannot be loaded, and run in Triton's interpreter"
    elif isinstance(why, CompilerStopped):
        told = "a kernel for the CPU was not compiled. Triton's interpreter runs it for this once, and the next call tries again"
    elif _works():
        told = "a kernel for the CPU does not compile, a fault of Flexpress: please report it. Triton's interpreter runs it, slowly"
    else:
        _given_up[_kind()] = f"{shlex.join(compiler() or ())} failed before"
        told = "kernels for the CPU do not compile and run in Triton's interpreter"
    warnings.warn(f"flexpress: {told}. {why}", RuntimeWarning, stacklevel=2)


def _works() -> bool:
    try:
        tried()
    except CompilerStopped:  # which says nothing
        return True
    except CompilerError:
        return False
    return True


def note_interpreter() -> None:
    """Say that the interpreter runs kernels because there is no compiler, unless it was asked for. (Python shows a warning once.)"""
    if compiler() is None and not interpreter_asked_for():
        warnings.warn(
            f"flexpress: {missing()}. Until then kernels on the CPU run in Triton's interpreter: right, and thousands of times "
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


def compiled(source: str, name: str) -> bytes:
    """The library of a print. Raises CompilerError if there is no compiler, or if it fails."""
    return library(compiler(), whole(source, headers()), name, _begun)


def _begun(*arguments, **options) -> subprocess.Popen:
    """A process. Python waits at the end of a pipe until it has begun, and a fork would take that end along."""
    return _beginning.run(partial(subprocess.Popen, *arguments, **options))


def tried() -> None:
    """Compile the headers alone. Raises what `compiled` does."""
    compiled("".join(f'#include "{header}"\n' for header in _INCLUDES), "the headers of kernels")


@remembered("headers of kernels", 1)
def headers() -> dict[str, str]:
    """The texts of what prints include, by name, and then of what these include."""
    import flexpress.templates

    return {name: (resources.files(flexpress.templates) / name).read_text(encoding="utf-8") for name in _INCLUDES + _PARTS}
