"""A kernel ready to launch: printed, stored, loaded for a GPU or for the interpreter, compiled at its first launch."""

from __future__ import annotations

import functools

import torch

from . import cache, interpret
from .cache import INFO
from .render import render
from .spec import KernelSpec


class Kernel:
    """One printed kernel. Its entry point has the template's name."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.printed = cache.store(render(spec), spec)
        INFO.prints += 1
        if spec.backend == "cpu":
            module = interpret.load(str(self.printed.path), self.printed.source)
            INFO.compiles += 1
        else:
            module = cache.load_module(self.printed)
        self.function = getattr(module, spec.template)
        self._compiled = 0
        self.tiles: dict = {}  # a tile that did not fit -> the one that did

    @property
    def path(self):
        """The printed file."""
        return self.printed.path

    def launch(self, grid: tuple[int, ...], args: tuple, device: torch.device, **constants) -> None:
        """Run over `grid`; `constants` are the tl.constexpr parameters and, on a GPU, num_warps and num_stages."""
        if self.spec.backend == "cpu":
            self.function[grid](*args, **constants)
            return
        with _on(device):
            self.function[grid](*args, **constants)
        compiled = sum(len(entry[0]) for entry in self.function.device_caches.values())
        INFO.compiles += compiled - self._compiled
        self._compiled = compiled


class _Nothing:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


def _on(device: torch.device):
    """The device's context, where it is not the current one already."""
    if device.index is None or device.index == torch.cuda.current_device():
        return _Nothing()
    return torch.cuda.device(device)


_kernels: dict[KernelSpec, Kernel] = {}


def kernel_for(spec: KernelSpec) -> Kernel:
    """The kernel of `spec`, printed at its first use."""
    kernel = _kernels.get(spec)
    if kernel is None:
        kernel = _kernels[spec] = Kernel(spec)
    return kernel


def clear() -> None:
    """Forget every loaded kernel (files stay)."""
    _kernels.clear()


@functools.cache
def backend_of(device_type: str) -> str:
    """ "cpu", "cuda" or "hip"."""
    if device_type == "cpu":
        return "cpu"
    return "hip" if torch.version.hip else "cuda"


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def loaded() -> list[Kernel]:
    """The kernels of this process, in the order of their first use."""
    return list(_kernels.values())
