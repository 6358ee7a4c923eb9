"""A kernel ready to launch: printed, stored, loaded for a GPU or for the interpreter, compiled at its first launch.

Threads may ask for the same kernel at once: it is printed once, and each variant of it is compiled once, while the others wait.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch

from ..gpus import architecture
from ..mod.program import fits_int32
from ..registry import INFO, Bounded, Table
from ..text.render import render
from ..text.spec import KernelSpec
from ..turn import Turn
from . import binary, cache, interpret
from .arguments import describe, one_by_one


class Kernel:
    """One printed kernel. Its entry point has the template's name."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.printed = cache.recall(spec)
        if self.printed is None:
            self.printed = cache.store(render(spec), spec)
            INFO.prints += 1
        self._variants: dict[tuple, binary.Binary] = Bounded(256)
        self._interpreted = None
        self._turn = Turn()  # who obtains a variant

    @property
    def path(self):
        """The printed file."""
        return self.printed.path

    def launch(self, grid: tuple[int, ...], args: tuple, device: torch.device, constants: tuple, **options: int) -> binary.Binary | None:
        """Run over `grid`. `constants` are the values of the last, tl.constexpr, parameters; `options` are num_warps and num_stages.

        Returns the compiled variant that ran; None if none did.
        """
        if 0 in grid:
            return None
        if self.spec.backend == "cpu":
            self._interpret(grid, (*args, *constants))
            return None
        with on(device):
            variant, plain = self.variant(args, device, constants, **options)
            variant.launch(grid, plain, device.index)
        return variant

    def variant(self, args: tuple, device: torch.device, constants: tuple, **options: int) -> tuple[binary.Binary, list]:
        """The compiled variant for these arguments, and the arguments as it takes them. The device is the current one."""
        layout, plain = describe(args)
        key = (layout, constants, device.index, *options.values())
        variant = self._variants.get(key)
        if variant is None:
            variant = self._turn.run(self._obtained, key, layout, constants, options, device.index)
        return variant, plain

    def _obtained(self, key: tuple, layout: tuple, constants: tuple, options: dict, device_index: int) -> binary.Binary:
        variant = self._variants.get(key)
        if variant is None:
            variant, compiled = binary.obtain(self.path.stem, layout, constants, options, device_index, self._function)
            INFO.compiles += compiled
            self._variants[key] = variant
        return variant

    def _interpret(self, grid, args) -> None:
        (self._interpreted or self._turn.run(self._loaded))[grid](*one_by_one(args))

    def _loaded(self):
        """The kernel for the interpreter."""
        if self._interpreted is None:
            module = interpret.load(str(self.path), self.printed.source)
            self._interpreted = getattr(module, self.spec.template)
            INFO.compiles += 1
        return self._interpreted

    def _function(self):
        return getattr(cache.load_module(self.printed), self.spec.template)


_NOTHING = contextlib.nullcontext()


def on(device: torch.device):
    """The device's context, where it is not the current one already. It has tensors, so CUDA is initialized."""
    if device.index is None or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)


_kernels: dict[KernelSpec, Kernel] = Table("kernels", 2048)  # code on a device stays there: a CUDA graph may launch it at any time
_counters: dict[tuple, torch.Tensor] = Table("counters", 1024)
_printing = Turn(fork_waits=True)


def kernel_for(spec: KernelSpec) -> Kernel:
    """The kernel of `spec`, printed at its first use."""
    return _kernels.get(spec) or _printing.run(_printed, spec)


def _printed(spec: KernelSpec) -> Kernel:
    kernel = _kernels.get(spec)
    if kernel is None:
        kernel = _kernels[spec] = Kernel(spec)
    return kernel


@functools.cache
def backend_of(device_type: str) -> str:
    """ "cpu", "cuda" or "hip"."""
    if device_type == "cpu":
        return "cpu"
    return "hip" if torch.version.hip else "cuda"


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def architecture_of(device: torch.device) -> str:
    """The row of the tile tables for a device."""
    backend = backend_of(device.type)
    return architecture(backend, capability_of(device) if backend == "cuda" else None)


def plain_values(args: Iterable) -> list | None:
    """Arguments as `launch_plain` takes them, addresses for tensors; None if an address is no multiple of 16 bytes, or an integer has more
    than 32 bits."""
    values = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg = arg.data_ptr()
            if arg % 16:
                return None
        elif not fits_int32(arg):
            return None
        values.append(arg)
    return values


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def counter(device: torch.device, stream: int) -> torch.Tensor:
    """Two int32 of zero for `stream`, the current one, on which one kernel after another may count: each leaves them zero. A CUDA graph
    gets some of its own, as graphs may run beside each other; none captures stream 0."""
    if stream and torch.cuda.is_current_stream_capturing():
        return _zeros(device)
    found = _counters.get((device, stream))
    if found is None:
        found = _counters[device, stream] = _zeros(device)
    return found


@contextlib.contextmanager
def held_counter(device: torch.device, stream: int) -> Iterator[torch.Tensor]:
    """`counter` for kernels of which one leaves word for the next: no other thread gets it in between, and nobody if they fail."""
    if stream and torch.cuda.is_current_stream_capturing():
        yield _zeros(device)
        return
    held = _counters.pop((device, stream), None)
    if held is None:
        held = _zeros(device)
    yield held
    _counters[device, stream] = held


def _zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def loaded() -> list[Kernel]:
    """The kernels of this process, in the order of their first use."""
    return list(_kernels.values())
