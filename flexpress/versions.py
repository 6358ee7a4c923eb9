"""The versions that Flexpress runs with. Asked before anything else is imported, so that a wrong one is told in words."""

from __future__ import annotations

import warnings
from importlib import import_module

MINIMUM = {"torch": (2, 10), "triton": (3, 6), "jinja2": (3, 1)}
NEWEST_TRITON = (3, 9)  # that was tested
WRITES_OPERATORS = (2, 13)  # torch whose AOTInductor and C++ wrapper take our operators; earlier ones end the process


def written(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def too_old(name: str, version: str) -> str | None:
    """What to do about a version, or None if it will do."""
    minimum = MINIMUM[name]
    return f"{version} is too old; install {name}>={written(minimum)}" if _first_two(version) < minimum else None


def too_new(name: str, version: str) -> str | None:
    """A word about a Triton that nobody has tried; None for others."""
    if name != "triton" or _first_two(version) <= NEWEST_TRITON:
        return None
    return f"{version} is newer than what was tested ({written(MINIMUM['triton'])} to {written(NEWEST_TRITON)}); kernels may not compile"


def torch_writes_operators() -> bool:
    """May models with attention be written out in C++ by this torch?"""
    return _first_two(import_module("torch").__version__) >= WRITES_OPERATORS


def check_versions() -> None:
    """ImportError if torch or Triton is missing or too old; a warning if Triton is newer than what was tested."""
    for name in ("torch", "triton"):
        try:
            version = import_module(name).__version__
        except ImportError as error:
            raise ImportError(f"flexpress needs {name}: {error}; install {name}>={written(MINIMUM[name])}", name=name) from error
        if problem := too_old(name, version):
            raise ImportError(f"flexpress cannot run with this {name}: {problem}", name=name)
        if remark := too_new(name, version):
            warnings.warn(f"flexpress: triton {remark}", stacklevel=3)


def _first_two(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
