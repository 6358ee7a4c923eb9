"""Compiled kernels: one binary per kernel and argument layout, kept on disk beside the printed file, launched directly.

Triton's own just-in-time call binds and specializes every argument at every launch. Here a variant of a kernel is named by the few
facts that change its code: element types, whether pointers are 16-byte aligned, whether integers need 64 bits, the tl.constexpr values
and the warp and stage counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import types
from pathlib import Path
from typing import NamedTuple

import torch
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from .. import logs, progress
from . import cache, cuda, folder, workers
from .arguments import type_of
from .compiler import assembler_for, ast_source, compile_source
from .stages import Request, metadata_text


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
    target = current_target()
    name = _name_of(stem, layout, constants, options, target)
    found = _read(name)
    if found is not None:
        return Binary(found, constants, device_index), False
    source = ast_source(load_function(), layout, constants)
    with progress.shown(f"compiling {stem}"):
        metadata, code, extension = compile_source(source, target, options)
    compiled = Compiled(metadata_text(metadata), code, extension, source.signature)
    _write(name, compiled)
    return Binary(compiled, constants, device_index), True


def begin(printed: cache.PrintedKernel, entry: str, layout: tuple, constants: tuple, options: dict) -> workers.Job | None:
    """Have another process compile a variant, and put it on disk; None if it is there. Its `found` is the seconds that took, and what it
    compiled."""
    target, stem = current_target(), printed.path.stem
    name = _name_of(stem, layout, constants, options, target)
    if _read(name) is not None:
        return None
    source = ast_source(getattr(cache.load_module(printed), entry), layout, constants)
    request = Request(
        printed.source,
        str(printed.path),
        entry,
        source.signature,
        source.constants,
        source.attrs,
        (target.backend, target.arch, target.warp_size),
        options,
        assembler_for(target),
        dict(os.environ),
    )
    start = time.perf_counter()

    def keep(metadata: bytes, code: bytes, extension: str) -> tuple[float, Compiled]:
        compiled = Compiled(metadata, code, extension, source.signature)
        _write(name, compiled)
        seconds = time.perf_counter() - start
        logs.COMPILE.info("compiled %s beside this process in %.2f s, %.2f of them in the compiler", stem, seconds, job.seconds)
        return seconds, compiled

    logs.COMPILE.debug("compiling %s beside this process", stem)
    job = workers.Job(request, keep)
    return workers.POOL.submit(job)


def _name_of(stem: str, layout: tuple, constants: tuple, options: dict, target: GPUTarget) -> str:
    """What the files of a variant are called."""
    assembler = assembler_for(target)
    key = repr(
        (
            stem,
            [type_of(e) for e in layout],
            [e[1] for e in layout if not isinstance(e, str) and len(e) == 2],
            constants,
            sorted(options.items()),
            target,
            assembler and assembler[0],
            sorted(get_cache_invalidating_env_vars().items()),
        )
    )
    return f"{stem}.{hashlib.sha256(key.encode()).hexdigest()[:12]}"


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
        record = folder.note(f"{name}.json")
        (metadata_kind, metadata_hash), (extension, code_hash) = record["hashes"].items()
        contents = [folder.read(f"{name}.{kind}") or b"" for kind in (metadata_kind, extension)]
        if [hashlib.sha256(content).hexdigest() for content in contents] != [metadata_hash, code_hash]:
            return None
        return Compiled(*contents, extension, dict(record["signature"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
