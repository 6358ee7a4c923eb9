"""Compiling printed kernels for GPUs that are not there: what registers, shared memory and spills a kernel takes.

Triton needs no GPU to compile. Tests use this on every template; it is also how a kernel is read before it is tuned.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from ..text.parameters import Parameter
from ..text.render import render
from ..text.spec import KernelSpec
from . import cache
from .arguments import descriptor_type
from .compiler import compile_source, newer_assembler
from .stages import is_gluon, source_class

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_TRITON_TYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
    "int8": "i8",
    "float64": "fp64",
    "uint8": "u8",
    "int16": "i16",
    "float8_e4m3fn": "fp8e4nv",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made. registers and spilled bytes are None where the target's tools do not tell, shared where it stopped early."""

    signature: dict[str, str]  # Triton's types of the parameters
    assembly: dict
    shared: int | None
    registers: int | None
    spilled: int | None
    warnings: tuple[str, ...] = ()  # of the assembler: wgmma that it runs one after another, for example


def compile_for(
    spec: KernelSpec, target: str, constants: dict[str, int], num_warps: int = 4, num_stages: int = 2, last: str | None = None
) -> Compiled:
    """Compile `spec` for one of TARGETS.

    constants  the tl.constexpr parameters
    last       "ttgir": stop when Triton's own passes have run, which is a tenth of the work; None: go on to the assembler
    """
    function = getattr(cache.load_module(cache.store(render(spec), spec)), spec.template)
    return compile_function(function, spec, target, constants, num_warps, num_stages, last)


def compile_function(
    function, spec: KernelSpec, target: str, constants: dict[str, int], num_warps: int, num_stages: int, last: str | None = None
) -> Compiled:
    """Compile a kernel's function that is loaded already, as from an exported file; arguments as for compile_for."""
    signature = {p.name: _type_of(p, constants, is_gluon(function)) for p in spec.parameters}
    if list(signature) != list(function.arg_names):
        raise ValueError(f"{spec.template} takes {function.arg_names}, and its spec says {list(signature)}")
    constexprs = {(i,): constants[p.name] for i, p in enumerate(spec.parameters) if p.type == "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(spec.parameters) if p.type.startswith("*")}
    source = source_class(function)(function, signature, constexprs, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": spec.begins_early}
    return Compiled(signature, *made(source, target, options, last))


class Made(NamedTuple):
    """The compiler's part of Compiled."""

    texts: dict
    shared: int | None
    registers: int | None
    spilled: int | None
    warnings: tuple[str, ...]


def made(source, target: str, options: dict[str, int], last: str | None) -> Made:
    """What the compiler makes of what Triton takes (see stages.source_class). Tests put a function in its place that remembers."""
    texts: dict = {}
    metadata, _, _ = compile_source(source, TARGETS[target], options, texts, last)
    return Made(texts, metadata.get("shared"), *(_resources(texts["ptx"], target) if "ptx" in texts else (None, None, ())))


def _type_of(parameter: Parameter, constants: dict[str, int], gluon: bool) -> str:
    """Triton's type."""
    kind = parameter.type
    if kind.startswith("*"):
        return "*" + _TRITON_TYPES[kind[1:]]
    if parameter.is_descriptor:
        dtype = kind.split(":")[1]
        return descriptor_type(_TRITON_TYPES[dtype], getattr(torch, dtype).itemsize, (1, 1, *parameter.block(constants)), gluon)
    return {"int": "i32", "float": "fp32"}.get(kind, kind)


def _resources(ptx: str, target: str) -> tuple[int, int, tuple[str, ...]]:
    """Registers a thread, spilled bytes and warnings, as ptxas reports them."""
    found = re.search(r"\.target (\w+)", ptx)
    arch = found[1] if found else target
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = (newer_assembler(TARGETS[target].arch) or triton.knobs.nvidia.ptxas).path  # once: compile_source has left it out
        report = subprocess.run(
            [ptxas, "-v", f"--gpu-name={arch}", file.name, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    warnings = tuple(line for line in report.splitlines() if re.search(r"\(C7\d{3}\)|warning", line))
    return registers, int(re.search(r"(\d+) bytes spill stores", report)[1]), warnings
