"""Triton's compiler in this process, and which assembler it takes; stages.py has what it runs."""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import ptx_get_version
from triton.compiler import ASTSource

from ..turn import Turn
from . import cuda
from .arguments import type_of
from .stages import is_gluon, load_code_generator, lowered, source_class
from .switching import LANGUAGE, restore


def ast_source(function, layout: tuple, constants: tuple) -> ASTSource:
    """What Triton compiles: the jitted function with its argument types; `constants` are the values of its last parameters."""
    names, gluon = function.arg_names, is_gluon(function)
    signature = {name: type_of(entry, gluon) for name, entry in zip(names, layout, strict=False)}
    signature.update({name: "constexpr" for name in names[len(layout) :]})
    constexprs = {(len(layout) + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, e in enumerate(layout) if not isinstance(e, str) and len(e) == 2 and e[1]}
    return source_class(function)(function, signature, constexprs, aligned)


@functools.cache
def newer_assembler(arch: int):
    """The assembler (path, version) for an NVIDIA GPU, of the two that come with Triton; None: whichever Triton itself takes.

    It is the oldest from 12.9 on that the driver here can follow (or there is no driver). Triton 3.6 and 3.7 would take 12.8 before
    Blackwell, which loses a shared-memory descriptor when it runs out of uniform registers: seen with head dims 192 and 8 on the H100, as
    an illegal address or a wrong product. Triton 3.8 and 3.9 would take 13.3 and 13.4 for Hopper, which let wgmma of head dim 192 run
    one after another for want of registers, and get an option against a fault of theirs that multiplies spills. The environment variable
    TRITON_PTXAS_PATH has its way, unless it was torch.compile that set it, to torch's own assembler.
    """
    chosen = os.environ.get("TRITON_PTXAS_PATH")
    if chosen and Path(chosen) != Path(torch.__file__).parent / "bin" / "ptxas":
        return None
    common = triton.knobs.NvidiaTool.from_path(str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"))
    try:
        newest = triton.knobs.nvidia.ptxas_blackwell
    except RuntimeError:  # a Triton without it
        newest = None
    runs = cuda.driver_version()
    for tool in (common, newest) if arch < 100 else (newest,):
        if tool and ptx_get_version(tool.version) >= ptx_get_version("12.9") and (runs is None or runs >= int(tool.version.split(".")[0])):
            return tool
    return None


_compiler = Turn(fork_waits=True)


def load_ahead() -> None:
    """Have there what the first compilation imports, by a thread that has nothing else to do. It takes functions from triton.language, and
    must not find them switched."""
    LANGUAGE.run(load_code_generator)


def compile_source(
    source: ASTSource, target: GPUTarget, options: dict, texts: dict | None = None, last: str | None = None
) -> tuple[dict, bytes, str]:
    """Run the compiler: the metadata that a launch needs, the GPU's code, and what such code is called ("cubin", "hsaco").

    texts   takes what each stage makes, by name ("ttgir", "ptx", ...); NVIDIA's assembler, the last stage, is then left out
    last    the stage to stop after, with texts; None: all

    One thread compiles at a time: Triton's front end reads triton.language, which the interpreter switches, and its passes and LLVM have
    options and tables that belong to the process and are set while they run, without a lock. The assembler is a process of its own.
    """
    metadata, module, assemble, extension = LANGUAGE.run(_compiler.run, _lowered, source, target, options, texts, last)
    return metadata, assemble(module, metadata) if assemble else module, extension


def _lowered(source: ASTSource, target: GPUTarget, options: dict, texts: dict | None, last: str | None) -> tuple:
    restore()
    return lowered(source, target, options, assembler_for(target), texts, last)


def assembler_for(target: GPUTarget) -> tuple[str, str] | None:
    """The path and version of newer_assembler's, if it has one for a target."""
    newer = newer_assembler(target.arch) if target.backend == "cuda" else None
    return newer and (newer.path, newer.version)


def is_busy() -> bool:
    """Does another thread compile, so that this one would wait for it?"""
    return not _compiler.is_free()


@atexit.register
def _finish() -> None:
    """At the end of the process, wait for a thread that compiles: LLVM must not be torn down under it. Nobody compiles afterwards."""
    _compiler.close()
