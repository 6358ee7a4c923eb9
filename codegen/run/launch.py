"""Launching one kernel: with the largest tile that a device can hold, or if it is usable; and again, on a shorter way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from operator import itemgetter

import torch
import triton

from ..device import binary
from ..device.arguments import Numbers, plain_values
from ..device.cuda import DoesNotFit
from ..device.kernel import Kernel, kernel_for
from ..device.tma import descriptor
from ..plan.tiles import Tile, next_smaller
from ..text.parameters import packer
from ..text.spec import KernelSpec

_MAPS = 64  # kept of a launch: those of a training step's layers


class Unusable(Exception):
    """The compiled kernel is not to be used: another is faster, or the only one that compiles."""


class Launch:
    """A kernel in calls of one kind: all is decided but addresses and what mods capture.

    numbers   by the names of parameters; what the kernel does not take is left out

    The first launch finds the compiled variant. Later ones, whose tensors are 16-byte aligned and whose numbers fit into 32 bits, only
    pack arguments (`again`).
    """

    def __init__(self, spec: KernelSpec, numbers: dict[str, int | float]) -> None:
        self.spec, self.kernel = spec, kernel_for(spec)
        taken = {p.name for p in spec.parameters}
        numbers = {name: value for name, value in numbers.items() if name in taken}
        self._long, self._short = packer(spec.parameters, numbers, Numbers), packer(spec.parameters, numbers)
        self._fits = plain_values(numbers.values()) is not None
        self._descriptors = [p for p in spec.parameters if p.is_descriptor]
        self._described = itemgetter(*(p.of for p in self._descriptors)) if self._descriptors else None
        self._blocks: dict[tuple[int, ...], list] = {}  # of descriptors, by constants
        self._maps: dict[tuple[int, ...], list] = {}  # by addresses
        self._constants: dict[str, int] = {}
        self._grid: tuple[int, int, int] = (0, 1, 1)
        self.function = None  # once it has run

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
    ) -> binary.Binary | None:
        """Launch a kernel that takes no descriptors; the variant that ran."""
        return self.kernel.launch(grid, self.arguments(tensors, captured, {}), device, constants, num_warps=4, num_stages=1)

    def with_tile(
        self,
        tile: Tile,
        tensors: dict[str, torch.Tensor],
        captured: list,
        grid: tuple[int, ...],
        device: torch.device,
        *,
        keep: bool = True,
    ) -> None:
        """Launch a kernel whose constants are BLOCK_M and BLOCK_N. Raises DoesNotFit if the device cannot hold the tile.

        keep   later launches may take the short way
        """
        constants = {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}
        args = self.arguments(tensors, captured, constants)
        variant = self.kernel.launch(grid, args, device, tuple(constants.values()), num_warps=tile.num_warps, num_stages=tile.num_stages)
        if keep:
            self.remember(variant, grid, tensors, captured, constants)

    def if_usable(
        self, tensors: dict[str, torch.Tensor], captured: list, grid: int, device: torch.device, limit: float | None, *, keep: bool = True
    ) -> None:
        """Launch a kernel without constants. The device is the current one. Raises Unusable if it does not compile, or if a thread spills
        more than `limit` bytes; with None it raises what the compiler does."""
        args = self.arguments(tensors, captured, {})
        if limit is None:
            variant, plain = self.kernel.variant(args, device, (), num_warps=4)
        else:
            variant, plain = usable(self.kernel, args, device, limit)
        variant.launch((grid,), plain, device.index)
        if keep:
            self.remember(variant, (grid,), tensors, captured, {})

    def remember(self, variant, grid: tuple[int, ...], tensors: dict[str, torch.Tensor], captured: list, constants: dict[str, int]) -> None:
        """Later launches may take the short way."""
        function = getattr(variant, "function", None)
        if function and self._fits and plain_values((*tensors.values(), *captured)) is not None:
            self._grid, self._constants = (*grid, 1, 1)[:3], constants
            self.function = function  # last: with it other threads take the short way

    def again(self, tensors: dict[str, torch.Tensor], addresses: dict[str, int], captured: list, stream: int) -> None:
        """The short way: `addresses` of all tensors, 16-byte aligned, and `captured` as plain_values gives it. The device is the current
        one."""
        maps = ()
        if self._described:
            key = self._described(addresses)
            maps = self._maps.get(key)
            if maps is None:
                if len(self._maps) >= _MAPS:
                    self._maps.clear()
                maps = self._maps[key] = self.function.expanded(self._described_by(tensors, self._constants))
        self.function.launch_plain(*self._grid, stream, self._short(addresses, maps, captured))


def addresses_of(tensors: dict[str, torch.Tensor]) -> dict[str, int] | None:
    """The tensors' addresses; None if one is no multiple of 16 bytes."""
    found, bits = {}, 0
    for name, tensor in tensors.items():
        found[name] = address = tensor.data_ptr()
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


def usable(kernel: Kernel, args: Iterable, device: torch.device, limit: float):
    """The variant of a kernel for Hopper, and its arguments. Raises Unusable if it does not compile, with a warning, as Gluon is
    experimental and may change with Triton; or if a thread spills more than `limit` bytes."""
    try:
        variant, plain = kernel.variant(args, device, (), num_warps=4)
    except Exception as error:
        text = f"{kernel.spec.template} does not compile with Triton {triton.__version__} ({type(error).__name__})"
        warnings.warn(f"flexpress: {text}; the portable kernel takes its place. {error}", RuntimeWarning, stacklevel=2)
        raise Unusable(text) from error
    if variant.function.local > limit:
        raise Unusable(f"its threads would spill {variant.function.local} bytes, more than {limit}")
    return variant, plain
