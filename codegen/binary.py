"""Compiled kernels: one binary per kernel and argument layout, kept on disk beside the printed file, launched directly.

Triton's own just-in-time call binds and specializes every argument at every launch, and finds its cache again in a new process by
hashing its whole installation. Here a variant of a kernel is named by the few facts that change its code: element types,
whether pointers are 16-byte aligned, whether integers need 64 bits, the tl.constexpr values and the warp and stage counts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import types
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

from . import cache, words

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1", torch.uint8: "u8",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}
_WIDE = 1 << 31


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
        elif kind is bool:
            layout.append("u1")
            plain.append(arg)
        else:  # a TMA descriptor
            layout.append((arg.base.dtype, *arg.block_shape))
            plain.append(arg)
    return tuple(layout), plain


def type_of(entry) -> str:
    """Triton's name for one entry of a layout."""
    if isinstance(entry, str):
        return entry
    if len(entry) == 2:
        return "*" + TYPES[entry[0]]
    return f"tensordesc<{TYPES[entry[0]]}[{', '.join(map(str, entry[1:]))}]>"


def ast_source(function, layout: tuple, constants: tuple) -> ASTSource:
    """What Triton compiles: the jitted function with its argument types; `constants` are the values of its last parameters."""
    names = function.arg_names
    signature = {name: type_of(entry) for name, entry in zip(names, layout, strict=False)}
    signature.update({name: "constexpr" for name in names[len(layout):]})
    constexprs = {(len(layout) + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, e in enumerate(layout) if not isinstance(e, str) and len(e) == 2 and e[1]}
    return ASTSource(function, signature, constexprs, aligned)


class Binary:
    """One compiled variant of a kernel."""

    def __init__(self, compiled: CompiledKernel, constants: tuple) -> None:
        self.compiled, self.constants = compiled, constants
        if words.needed(compiled):
            self.launcher = words.WordLauncher(compiled)
        else:
            self.launcher = None
            self.run = compiled.run  # loads the code; raises OutOfResources if it does not fit the device
            self.function, self.metadata = compiled.function, compiled.packed_metadata

    def launch(self, grid: tuple[int, ...], args: list, device_index: int) -> None:
        """Launch on the current stream of the current device."""
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device_index)
        if self.launcher is not None:
            self.launcher.launch(x, y, z, stream, args)
            return
        hooks = knobs.runtime
        self.run(x, y, z, stream, self.function, self.metadata, None, hooks.launch_enter_hook, hooks.launch_exit_hook, *args,
                 *self.constants)


def obtain(stem: str, layout: tuple, constants: tuple, options: dict, load_function) -> tuple[Binary, bool]:
    """The binary of a variant from disk, or compiled now; the second value says whether it was compiled.

    stem            the printed file's name without .py: it holds the key of the kernel's text
    load_function   gives the jitted function when it must be compiled
    """
    target = driver.active.get_current_target()
    key = repr((stem, [type_of(e) for e in layout], [e[1] for e in layout if not isinstance(e, str) and len(e) == 2], constants,
                sorted(options.items()), target))
    base = cache.cache_dir() / f"{stem}.{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    found = _read(base, constants)
    if found is not None:
        return Binary(found, constants), False
    source = ast_source(load_function(), layout, constants)
    words.build_ahead(source.signature)
    warm_up().join()
    compiled = triton.compile(source, target=target, options=options)
    _write(base, compiled, source)
    return Binary(compiled, constants), True


def _record(base: Path) -> Path:
    return base.with_name(base.name + ".json")


def _write(base: Path, compiled: CompiledKernel, source: ASTSource) -> None:
    """Keep metadata and code; the record that names them is written last, and carries their hashes."""
    files = {}
    for name, path in compiled.metadata_group.items():
        suffix = Path(name).suffix
        if suffix == ".json" or suffix.lstrip(".") in ("cubin", "hsaco"):
            content = Path(path).read_bytes()
            kept = base.name + (".metadata.json" if suffix == ".json" else suffix)
            cache.write_atomically(base.with_name(kept), content)
            files[kept] = hashlib.sha256(content).hexdigest()
    record = {"files": files, "signature": source.signature, "hash": compiled.hash}
    cache.write_atomically(_record(base), json.dumps(record).encode())


def _read(base: Path, constants: tuple) -> CompiledKernel | None:
    try:
        record = json.loads(_record(base).read_bytes())
        for name, digest in record["files"].items():
            if hashlib.sha256(cache.read_own(base.with_name(name)) or b"").hexdigest() != digest:
                return None
        names = list(record["signature"])
        first = len(names) - len(constants)
        source = types.SimpleNamespace(
            fn=types.SimpleNamespace(arg_names=names, launch_metadata=None), signature=record["signature"],
            constants={(first + i,): value for i, value in enumerate(constants)})
        group = {name: str(base.with_name(name)) for name in record["files"]}
        return CompiledKernel(source, group, record["hash"]) if len(group) == 2 else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent, truncated or edited: compile again


@functools.cache
def warm_up() -> threading.Thread:
    """Start, in the background, what the first kernel of a process needs: the templates, the imports of Triton's compiler and a
    hash of its installation (0.4 s of reading). Nothing here touches a GPU."""

    def prepare():
        from triton.runtime.cache import triton_key

        from .render import environment

        triton_key()
        for name in ("forward.py.jinja", "block_mask.py.jinja", "_helpers.jinja", "_mod.jinja"):
            environment().get_template(name)

    thread = threading.Thread(target=prepare, daemon=True)
    thread.start()
    return thread
