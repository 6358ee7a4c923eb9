"""Triton's compiler, stage by stage and without its cache: from a jitted function and its argument types to a GPU's code.

Triton's just-in-time call hashes its whole installation before it compiles (0.4 s). Here its stages are run one after another.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
from pathlib import Path

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import ptx_get_version
from triton.compiler import ASTSource, make_backend

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
def newer_assembler():
    """The assembler (path, version) that Triton ships for its newest GPUs, if the driver here takes what it makes (or there is no driver).

    For other NVIDIA GPUs Triton 3.6 and 3.7 use ptxas 12.8, which loses a shared-memory descriptor when it runs out of uniform
    registers: seen with head dims 192 and 8 on the H100, as an illegal address or a wrong product. 12.9 and 13.1 do not. The
    environment variable TRITON_PTXAS_PATH has its way, unless it was torch.compile that set it, to torch's own assembler.
    """
    chosen = os.environ.get("TRITON_PTXAS_PATH")
    if chosen and Path(chosen) != Path(torch.__file__).parent / "bin" / "ptxas":
        return None
    try:
        tool, runs = triton.knobs.nvidia.ptxas_blackwell, cuda.driver_version()
    except RuntimeError:  # a Triton without it
        return None
    return tool if runs is None or runs >= int(tool.version.split(".")[0]) else None


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
    # products and sums are fused, also where Triton's default is another one, and its environment variables
    options = {"enable_fp_fusion": True, **options, **source.parse_options()}
    newer = newer_assembler() if target.backend == "cuda" else None
    if newer:  # else PTX is written for the assembler that TRITON_PTXAS_PATH names, which torch.compile may set at any time
        options["ptx_version"] = ptx_get_version(newer.version)
    parsed = backend.parse_options(options)
    stages: dict = {}
    backend.add_stages(stages, parsed, source.language)
    if newer:
        newest = make_backend(GPUTarget("cuda", 100, 32))  # it decides which assembler runs, and nothing else
        stages["cubin"] = lambda ptx, metadata: newest.make_cubin(ptx, metadata, parsed, target.arch)
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
