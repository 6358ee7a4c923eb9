"""Launching one kernel: with the largest tile that a device can hold, or if it is usable; and again, on a shorter way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import NoReturn

import torch
import triton

from ..device.arguments import Numbers, plain_values
from ..device.cuda import DoesNotFit
from ..device.devices import on
from ..device.kernel import Kernel, NotYet, kernel_for
from ..device.tma import descriptor, descriptor_at
from ..device.workers import Job
from ..mod.captured.tensors import LOWEST, check_address
from ..plan.tiles import Tile, next_smaller
from ..text.parameters import launcher, packer
from ..text.spec import KernelSpec

_MAPS = 256  # kept of each descriptor: those of a training step's layers


class Unusable(Exception):
    """The compiled kernel is not to be used: another is faster, or the only one that compiles."""


class OnlyBegun(Unusable):
    """It is not compiled here at all: another process was asked to (begin_only)."""


class Launch:
    """A kernel in calls of one kind: all is decided but addresses and what mods capture.

    numbers   by the names of parameters; what the kernel does not take is left out
    order     names of the tensors that later launches get, in their order; others than the kernel's may be among them. None: every launch
              is a first one

    The first launch finds the compiled variant. From then on, if its tensors were 16-byte aligned and its numbers fit into 32 bits, `again`
    is a function that launches it by packing arguments alone:

        again(stream, addresses, captured)     `addresses` of the tensors in their order, all 16-byte aligned, and `captured` as
                                               plain_values gives it. The device is the current one
    """

    def __init__(self, spec: KernelSpec, numbers: dict[str, int | float], order: tuple[str, ...] | None = None) -> None:
        self.spec, self.kernel = spec, kernel_for(spec)
        taken = {p.name for p in spec.parameters}
        numbers = {name: value for name, value in numbers.items() if name in taken}
        self._long = packer(spec.parameters, numbers, Numbers)
        self._descriptors = [p for p in spec.parameters if p.is_descriptor]
        self._order, self._numbers, self._repeats = order, numbers, order is not None and plain_values(numbers.values()) is not None
        self._blocks: dict[tuple[int, ...], list] = {}  # of descriptors, by constants
        self.again: Callable[[int, list, list], None] | None = None
        self.waits = True  # for the compiler; else a launch may raise NotYet

    @property
    def is_launched(self) -> bool:
        """False where the kernel is only compiled (launch_nothing)."""
        return not isinstance(self.kernel, Unlaunched)

    def arguments(self, tensors: dict[str, torch.Tensor], captured: Iterable, constants: dict[str, int]) -> list:
        """In the order of the kernel's parameters, without constants."""
        return self._long(tensors, self._described_by(tensors, constants), captured)

    def _described_by(self, tensors: dict[str, torch.Tensor], constants: dict[str, int]) -> list:
        if not self._descriptors:
            return []
        key = tuple(constants.values())
        blocks = self._blocks.get(key)
        if blocks is None:
            blocks = self._blocks[key] = [(p.of, *p.block(constants)) for p in self._descriptors]
        return [descriptor(tensors[name], rows, columns) for name, rows, columns in blocks]

    def with_constants(
        self, constants: tuple[int, ...], tensors: dict[str, torch.Tensor], captured: list, grid: tuple[int, ...], device: torch.device
    ) -> None:
        """Launch a kernel that takes no descriptors."""
        args = self.arguments(tensors, captured, {})
        variant = self.kernel.launch(grid, args, device, constants, waits=self.waits, num_warps=4, num_stages=1)
        self._remember(variant, grid, tensors, captured, {})

    def with_tile(self, tile: Tile, tensors: dict[str, torch.Tensor], captured: list, grid: tuple[int, ...], device: torch.device) -> None:
        """Launch a kernel whose constants are BLOCK_M and BLOCK_N. Raises DoesNotFit if the device cannot hold the tile."""
        constants = {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}
        args = self.arguments(tensors, captured, constants)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        variant = self.kernel.launch(grid, args, device, tuple(constants.values()), waits=self.waits, **options)
        self._remember(variant, grid, tensors, captured, constants)

    def if_usable(
        self,
        tensors: dict[str, torch.Tensor],
        captured: list,
        grid: tuple[int, ...],
        device: torch.device,
        limit: float | None,
        num_warps: int = 4,
    ) -> None:
        """Launch a kernel without constants. The device is the current one. Raises Unusable if it does not compile, or if a thread spills
        more than `limit` bytes; with None it raises what the compiler does. Raises NotYet, unless it waits, while it is being compiled."""
        if 0 in grid:
            return
        args = self.arguments(tensors, captured, {})
        if limit is None:
            variant, plain = self.kernel.variant(args, device, (), num_warps=num_warps)
        else:
            variant, plain = usable(self.kernel, args, device, limit, self.waits, num_warps)
        variant.launch(grid, plain, device.index)
        self._remember(variant, grid, tensors, captured, {})

    def again_with(self, tensors: list[torch.Tensor], device: torch.device) -> bool:
        """Launch on the shorter way a kernel that takes no captures, if there is one, and `tensors`, in their order, are aligned."""
        addresses = addresses_of(tensors)
        if self.again is None or addresses is None:
            return False
        with on(device):
            self.again(torch._C._cuda_getCurrentRawStream(device.index), addresses, [])
        return True

    def _remember(
        self, variant, grid: tuple[int, ...], tensors: dict[str, torch.Tensor], captured: list, constants: dict[str, int]
    ) -> None:
        """Later launches may take the short way."""
        function = getattr(variant, "function", None)
        if function and self._repeats and plain_values((*tensors.values(), *captured)) is not None:
            self.again = self._repeater(function, (*grid, 1, 1)[:3], tensors, constants)  # other threads take the short way at once

    def _repeater(
        self, function, grid: tuple[int, int, int], tensors: dict[str, torch.Tensor], constants: dict[str, int]
    ) -> Callable[[int, list, list], None]:
        """The short way."""
        launch = launcher(self.spec.parameters, self._numbers, self._order, function.launch_plain, grid)
        if not self._descriptors:
            return launch
        lying = [(tensors[p.of].dtype, tensors[p.of].shape, tensors[p.of].stride(), *p.block(constants)) for p in self._descriptors]
        maps = [(self._order.index(p.of), {}) for p in self._descriptors]  # what a launch takes, by address

        def again(stream: int, addresses: list, captured: list) -> None:
            expanded = [known.get(addresses[place]) for place, known in maps]
            if None in expanded:
                at = [addresses[place] for place, _ in maps]
                expanded = function.expanded([descriptor_at(address, *how) for address, how in zip(at, lying, strict=True)])
                for (_, known), address, found in zip(maps, at, expanded, strict=True):
                    if len(known) >= _MAPS:
                        known.clear()
                    known[address] = found
            launch(stream, addresses, captured, expanded)

        again.lying = {p.of: how[1:3] for p, how in zip(self._descriptors, lying, strict=True)}  # shapes and strides
        return again


class Unlaunched:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.spec = kernel, kernel.spec

    def launch(
        self, grid: tuple[int, ...], args: Iterable, device: torch.device, constants: tuple, *, waits: bool = True, **options: int
    ) -> None:
        if self.spec.backend == "cpu":
            self.kernel.interpreted()
            return
        with on(device):
            self.kernel.variant(args, device, constants, **options)

    def call(self, values: dict, threads: int | None = None) -> None:
        self.kernel.function()

    def variant(self, *args, waits: bool = True, **options) -> tuple[SimpleNamespace, list]:
        variant, plain = self.kernel.variant(*args, **options)
        return SimpleNamespace(function=variant.function, launch=lambda *_: None), plain


def launch_nothing(launches: Iterable[Launch]) -> None:
    """Have kernels compiled where they would be launched. Nobody else may have them yet."""
    for launch in launches:
        launch.kernel = Unlaunched(launch.kernel)


class _Begun:
    """A kernel that another process compiles where it would be launched. `jobs` takes those that are not there yet."""

    def __init__(self, kernel: Kernel, jobs: list[Job]) -> None:
        self.kernel, self.spec, self.jobs = kernel, kernel.spec, jobs

    def launch(
        self, grid: tuple[int, ...], args: Iterable, device: torch.device, constants: tuple, *, waits: bool = True, **options: int
    ) -> None:
        with on(device):
            job = self.kernel.begin(args, device, constants, **options)
        if job is not None:
            self.jobs.append(job)

    def variant(self, args: Iterable, device: torch.device, constants: tuple, *, waits: bool, **options) -> NoReturn:
        self.launch((), args, device, constants, **options)
        raise OnlyBegun("it is only begun")


def begin_only(launches: Iterable[Launch], jobs: list[Job]) -> None:
    """Have kernels compiled beside this process where they would be launched. Nobody else may have the launches yet."""
    for launch in launches:
        launch.kernel = _Begun(launch.kernel, jobs)


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int] | None:
    """The tensors' addresses; None if one is no multiple of 16 bytes."""
    found, bits = [], 0
    for tensor in tensors:
        address = tensor.data_ptr()
        if address < LOWEST:
            check_address(tensor)
        found.append(address)
        bits |= address
    return None if bits % 16 else found


def launch_fitting(holder, launch: Callable[[Tile], object], smaller: Callable[[Tile], Tile | None] = next_smaller):
    """`launch(tile)` with the holder's tile, or with the next smaller one that the device can hold; the holder keeps it."""
    while True:
        try:
            return launch(holder.tile)
        except DoesNotFit:
            tile = smaller(holder.tile)
            if tile is None:
                raise
            holder.tile = tile


def usable(kernel: Kernel, args: Iterable, device: torch.device, limit: float, waits: bool = True, num_warps: int = 4):
    """The variant of a kernel for Hopper, and its arguments. Raises Unusable if it does not compile, with a warning, as Gluon is
    experimental and may change with Triton; or if a thread spills more than `limit` bytes. Raises NotYet as Kernel.variant does."""
    try:
        variant, plain = kernel.variant(args, device, (), waits=waits, num_warps=num_warps)
    except (NotYet, Unusable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = f"{kernel.spec.template} does not compile with Triton {triton.__version__} ({type(error).__name__})"
        warnings.warn(f"flexpress: {text}; the portable kernel takes its place. {error}", RuntimeWarning, stacklevel=2)
        raise Unusable(text) from error
    if variant.function.local > limit:
        raise Unusable(f"its threads would spill {variant.function.local} bytes, more than {limit}")
    return variant, plain
