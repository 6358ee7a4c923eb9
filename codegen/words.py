"""One launcher for all kernels, for Triton 3.6.

That version builds a C launcher with the host compiler for every new list of argument types, about 0.4 s each and more than a
small kernel takes to compile. But CUDA reads kernel parameters through pointers, so a launcher that passes 64-bit words can launch
any kernel: numbers and addresses as they are, floats as their bits, and zeros behind the last argument, where Triton's kernels
take their (unused) scratch pointers. TMA descriptors come first in a kernel's arguments, for they are no words.
Later versions of Triton launch without a compiler, and this module then does nothing.
"""

from __future__ import annotations

import functools
import struct
import threading

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

WORDS = 64
_BLOCK = "tensordesc<bf16[1, 1, 64, 64]>"  # any four-dimensional block: the launcher's code does not depend on it
_lock = threading.Lock()


@functools.cache
def _nvidia():
    """Triton's CUDA driver module if it builds launchers with a compiler, else None."""
    if torch.version.hip or not torch.cuda.is_available():
        return None
    from triton.backends.nvidia import driver as nvidia

    return nvidia if hasattr(nvidia, "make_launcher") and hasattr(nvidia, "compile_module_from_src") else None


def needed(compiled) -> bool:
    """Is this a kernel for the word launcher?"""
    scratch = compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size
    return _nvidia() is not None and not scratch and len(compiled.src.signature) < WORDS - 2


@functools.cache
def _module(descriptors: int):
    with _lock:
        nvidia = _nvidia()
        signature = {**{f"d{i}": _BLOCK for i in range(descriptors)}, **{f"w{i}": "i64" for i in range(WORDS)}}
        source = nvidia.make_launcher({}, signature, [{}] * descriptors or None)
        return nvidia.compile_module_from_src(src=source, name="__triton_launcher", library_dirs=nvidia.library_dirs(),
                                              include_dirs=nvidia.include_dirs, libraries=nvidia.libraries)


def build_ahead(signature: dict[str, str]) -> None:
    """Start building the launcher (once a machine) while the kernel itself compiles."""
    if _nvidia() is not None:
        count = sum(t.startswith("tensordesc") for t in signature.values())
        threading.Thread(target=_module, args=(count,), daemon=True).start()


class WordLauncher:
    """Loads a compiled kernel and launches it with words."""

    def __init__(self, compiled) -> None:
        metadata = compiled.metadata
        device = driver.active.get_current_device()
        limit = driver.active.utils.get_device_properties(device)["max_shared_mem"]
        if metadata.shared > limit:
            raise OutOfResources(metadata.shared, limit, "shared memory")
        self.module, self.function, *_ = driver.active.utils.load_binary(compiled.name, compiled.kernel, metadata.shared, device)
        self.packed = compiled.packed_metadata
        self.descriptors = list(getattr(metadata, "tensordesc_meta", None) or ())
        self.run = _module(len(self.descriptors)).launch

    def launch(self, x: int, y: int, z: int, stream: int, args: list) -> None:
        """Launch over a grid; `args` are those of `binary.describe`, descriptors first."""
        values = []
        count = len(self.descriptors)
        if count:
            for descriptor, how in zip(args, self.descriptors, strict=False):
                values += _expanded(descriptor, how)
        values += [a if type(a) is int else _bits(a) for a in args[count:]]
        values += _ZEROS[:WORDS - len(args) + count]
        hooks = knobs.runtime
        self.run(x, y, z, stream, self.function, False, False, None, None, self.packed, None, hooks.launch_enter_hook,
                 hooks.launch_exit_hook, *values)


_ZEROS = [0] * WORDS


def _expanded(descriptor, how: dict) -> list:
    """The tensor map of a descriptor with its sizes and strides; kept on the descriptor, which is used again."""
    kept = getattr(descriptor, "_expanded", None)
    if kept is None or kept[0] != how:
        kept = descriptor._expanded = how, _nvidia().make_tensordesc_arg(descriptor, how)
    return kept[1]


def _bits(value) -> int:
    """A float32 argument as its bits, a bool as 0 or 1."""
    return struct.unpack("<I", struct.pack("<f", value))[0] if type(value) is float else int(value)
