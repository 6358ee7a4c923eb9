"""Triton's compiler, stage by stage and without its cache: from a jitted function and its argument types to a GPU's code.

Triton's just-in-time call hashes its whole installation before it compiles (0.4 s). Here its stages are run one after another.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import ptx_get_version
from triton.compiler import ASTSource, make_backend
from triton.runtime.errors import PTXASError

from ..turn import Turn
from . import cuda
from .arguments import type_of
from .switching import LANGUAGE, restore


def ast_source(function, layout: tuple, constants: tuple) -> ASTSource:
    """What Triton compiles: the jitted function with its argument types; `constants` are the values of its last parameters."""
    names, gluon = function.arg_names, is_gluon(function)
    signature = {name: type_of(entry, gluon) for name, entry in zip(names, layout, strict=False)}
    signature.update({name: "constexpr" for name in names[len(layout) :]})
    constexprs = {(len(layout) + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, e in enumerate(layout) if not isinstance(e, str) and len(e) == 2 and e[1]}
    return source_class(function)(function, signature, constexprs, aligned)


def is_gluon(function) -> bool:
    """Is a jitted function written in Gluon?"""
    return getattr(function, "is_gluon", lambda: False)()


def source_class(function) -> type[ASTSource]:
    """What Triton wraps a jitted function in to compile it."""
    if not is_gluon(function):
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


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


def _assembled(ptx: str, tool, options: str | None) -> bytes:
    """The cubin. From 13 on the assembler gets the option that Triton gives it, too, since 3.7, against a fault of its."""
    arch = re.search(r"\.target (\w+)", ptx)[1]
    allocate = ["--regAllocOptLevel=2"] if int(tool.version.split(".")[0]) >= 13 else []
    with tempfile.TemporaryDirectory(prefix="flexpress-") as place:
        source, cubin = Path(place, "kernel.ptx"), Path(place, "kernel.cubin")
        source.write_text(ptx)
        command = [tool.path, "-lineinfo", *allocate, *(options or "").split(), f"--gpu-name={arch}", source, "-o", cubin]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise PTXASError(f"{tool.path} ended with {done.returncode}: {done.stdout}")
        return cubin.read_bytes()


_compiler = Turn(fork_waits=True)


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
    """Metadata, the module after all stages but the assembler's, that stage or None, and the binary's extension."""
    restore()
    backend = make_backend(target)
    # Products and sums are fused, whatever a Triton's default is. Kernels in Gluon have few registers to spare: Triton 3.9 can order
    # instructions for that, and has to, as it computes more addresses. Older ones know no such option, and pass over it
    options = {"enable_fp_fusion": True, "sched4reg": is_gluon(source.fn), **options, **source.parse_options()}
    newer = newer_assembler(target.arch) if target.backend == "cuda" else None
    if newer:  # else PTX is written for the assembler that TRITON_PTXAS_PATH names, which torch.compile may set at any time
        options["ptx_version"] = ptx_get_version(newer.version)
    parsed = backend.parse_options(options)
    stages: dict = {}
    backend.add_stages(stages, parsed, source.language)
    if newer:
        stages["cubin"] = lambda ptx, _: _assembled(ptx, newer, parsed.ptx_options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"target": target, **vars(parsed)}
    module = source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    assemble = stages.pop("cubin", None)
    names = list(stages)
    for name in names[names.index(source.ext) : names.index(last) + 1 if last else None]:
        module = stages[name](module, metadata)
        if name == "ptx":
            module = _wrapping(module)
        if texts is not None:
            texts[name] = module if isinstance(module, bytes) else str(module)
    return metadata, module, assemble if texts is None else None, backend.binary_ext


_NEG_OR_ABS = re.compile(r"\b(neg|abs)\.s16(\s+)(%\w+), (%\w+);")


def _wrapping(ptx: str) -> str:
    """PTX in which -x and abs(x) of int16 wrap around. The assembler takes them in 32 bits, and leaves the wrap out where int32 comes next:
    -(-32768) would be 32768. LLVM writes them for x * -1, ~x + 1 and the like, so no spelling in the kernel's own language avoids them."""

    def written(found: re.Match) -> str:
        name, space, to, of = found.groups()
        negated = f"not.b16{space}{to}, {of};\n\tadd.s16{space}{to}, {to}, 1;"
        return negated if name == "neg" else f"{negated}\n\tmax.s16{space}{to}, {to}, {of};"

    return _NEG_OR_ABS.sub(written, ptx)


@atexit.register
def _finish() -> None:
    """At the end of the process, wait for a thread that compiles: LLVM must not be torn down under it. Nobody compiles afterwards."""
    _compiler.close()
