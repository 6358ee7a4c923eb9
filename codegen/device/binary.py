"""Compiled kernels: one binary per kernel and argument layout, kept on disk beside the printed file, launched directly.

Triton's own just-in-time call binds and specializes every argument at every launch, and before it compiles it hashes its whole
installation (0.4 s). Here a variant of a kernel is named by the few facts that change its code: element types, whether pointers
are 16-byte aligned, whether integers need 64 bits, the tl.constexpr values and the warp and stage counts; and the compiler's
stages are run one after another without Triton's cache.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import math
import os
import re
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars, ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import ptx_get_version
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from ..turn import Turn
from . import cuda, folder
from .interpret import LANGUAGE, restore

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
_WIDE = 1 << 31


class Numbers:
    """Integers and floats that are arguments of many calls: described once."""

    def __init__(self, values: list) -> None:
        self.layout, self.values = describe(tuple(values))


def one_by_one(args: tuple) -> list:
    """Arguments with the numbers among them apart."""
    return [value for arg in args for value in (arg.values if isinstance(arg, Numbers) else (arg,))]


def describe(args: tuple) -> tuple[tuple, list]:
    """The layout of a call's arguments (a variant's key), and the arguments as the launcher takes them."""
    layout, plain = [], []
    for arg in args:
        kind = type(arg)
        if kind is int:
            layout.append("i32" if -_WIDE <= arg < _WIDE else "i64")
            plain.append(arg)
        elif kind is float:
            layout.append("fp32")
            plain.append(arg)
        elif isinstance(arg, torch.Tensor):
            address = arg.data_ptr()
            layout.append((arg.dtype, address % 16 == 0))
            plain.append(address)
        elif kind is Numbers:
            layout += arg.layout
            plain += arg.values
        elif kind is bool:
            layout.append("u1")
            plain.append(arg)
        else:  # a TMA descriptor
            layout.append((arg.base.dtype, *arg.block_shape))
            plain.append(arg)
    return tuple(layout), plain


def type_of(entry, gluon: bool = False) -> str:
    """Triton's name for one entry of a layout. Descriptors of Gluon kernels tell how a block lies in shared memory, too."""
    if isinstance(entry, str):
        return entry
    if len(entry) == 2:
        return "*" + TYPES[entry[0]]
    return descriptor_type(TYPES[entry[0]], entry[0].itemsize, entry[1:], gluon)


def descriptor_type(element: str, itemsize: int, block: tuple[int, ...], gluon: bool = False) -> str:
    """Triton's name for a descriptor of blocks. In shared memory, 8 rows or more are swizzled in the widest pattern that they fill."""
    widths = (32, 64, 128) if math.prod(block[:-1]) >= 8 else ()
    width = max((w for w in widths if block[-1] * itemsize % w == 0), default=0)
    layout = f",NVMMASharedLayout({width}, {itemsize * 8}, {len(block)})" if gluon else ""
    return f"tensordesc<{element}[{', '.join(map(str, block))}]{layout}>"


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


class Compiled(NamedTuple):
    """What the compiler makes of a variant, and what a launch needs of it."""

    metadata: bytes  # Triton's, as JSON
    code: bytes
    extension: str  # "cubin" or "hsaco"
    signature: dict[str, str]  # Triton's types of the parameters


class Binary:
    """One compiled variant of a kernel, loaded on the current device."""

    def __init__(self, compiled: Compiled, constants: tuple, device_index: int) -> None:
        self.native = None
        if torch.version.hip:
            self.native, self.constants = _triton_kernel(compiled, constants), constants
            try:
                self.run = self.native.run  # loads the code
            except OutOfResources as error:
                raise cuda.DoesNotFit(str(error)) from error
        else:
            kinds = [t for t in compiled.signature.values() if t != "constexpr"]
            self.function = cuda.Function(compiled.code, json.loads(compiled.metadata), kinds, device_index)

    def launch(self, grid: tuple[int, ...], args: list, device_index: int) -> None:
        """Launch on the current stream of the current device."""
        x, y, z = (*grid, 1, 1)[:3]
        if self.native is None:
            self.function.launch(x, y, z, torch._C._cuda_getCurrentRawStream(device_index), args)
            return
        native = self.native
        self.run(
            x,
            y,
            z,
            driver.active.get_current_stream(device_index),
            native.function,
            native.packed_metadata,
            None,
            None,
            None,
            *args,
            *self.constants,
        )


def _triton_kernel(compiled: Compiled, constants: tuple) -> CompiledKernel:
    """Triton's own kernel object and launcher, where there is no other. It takes files, so it gets some that nobody else can write to."""
    names = list(compiled.signature)
    first = len(names) - len(constants)
    source = types.SimpleNamespace(
        fn=types.SimpleNamespace(arg_names=names, launch_metadata=None),
        signature=compiled.signature,
        constants={(first + i,): value for i, value in enumerate(constants)},
    )
    with tempfile.TemporaryDirectory(prefix="flexpress-") as place:
        files = {"kernel.json": compiled.metadata, f"kernel.{compiled.extension}": compiled.code}
        for name, content in files.items():
            Path(place, name).write_bytes(content)
        return CompiledKernel(source, {name: str(Path(place, name)) for name in files}, "kernel.json")


def current_target() -> GPUTarget:
    """The current device as the compiler knows it."""
    if torch.version.hip:
        return driver.active.get_current_target()
    major, minor = torch.cuda.get_device_capability()
    return GPUTarget("cuda", major * 10 + minor, 32)


def obtain(stem: str, layout: tuple, constants: tuple, options: dict, device_index: int, load_function) -> tuple[Binary, bool]:
    """The binary of a variant from disk, or compiled now; the second value says whether it was compiled.

    stem            the printed file's name without .py: it holds the key of the kernel's text
    load_function   gives the jitted function when it must be compiled
    """
    target, newer = current_target(), newer_assembler()
    key = repr(
        (
            stem,
            [type_of(e) for e in layout],
            [e[1] for e in layout if not isinstance(e, str) and len(e) == 2],
            constants,
            sorted(options.items()),
            target,
            newer and newer.path,
            sorted(get_cache_invalidating_env_vars().items()),
        )
    )
    name = f"{stem}.{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    found = _read(name)
    if found is not None:
        return Binary(found, constants, device_index), False
    source = ast_source(load_function(), layout, constants)
    metadata, code, extension = compile_source(source, target, options)
    compiled = Compiled(json.dumps(metadata, default=vars).encode(), code, extension, source.signature)
    _write(name, compiled)
    return Binary(compiled, constants, device_index), True


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
    options = {**options, **source.parse_options()}
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


def _write(name: str, compiled: Compiled) -> None:
    """Keep metadata and code; the record that names them is written last, and carries their hashes."""
    hashes = {}
    for kind, content in (("metadata.json", compiled.metadata), (compiled.extension, compiled.code)):
        folder.write(f"{name}.{kind}", content)
        hashes[kind] = hashlib.sha256(content).hexdigest()
    folder.write(f"{name}.json", json.dumps({"hashes": hashes, "signature": compiled.signature}).encode())


def _read(name: str) -> Compiled | None:
    """A variant from disk; None if it is absent, truncated or edited. What is returned is what was hashed: no file is read twice."""
    try:
        record = json.loads(folder.read(f"{name}.json") or b"")
        (metadata_kind, metadata_hash), (extension, code_hash) = record["hashes"].items()
        contents = [folder.read(f"{name}.{kind}") or b"" for kind in (metadata_kind, extension)]
        if [hashlib.sha256(content).hexdigest() for content in contents] != [metadata_hash, code_hash]:
            return None
        return Compiled(*contents, extension, dict(record["signature"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
