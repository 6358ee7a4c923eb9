"""A kernel ready to launch: printed, stored, loaded for a GPU or for the interpreter, compiled at its first launch.

Threads may ask for the same kernel at once: it is printed once, and each variant of it is compiled once, while the others wait.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from .. import logs, progress
from ..mod.captured.tensors import LOWEST, check_address
from ..registry import INFO, Bounded, Table
from ..text.render import render
from ..text.spec import KernelSpec
from ..turn import Turn
from . import binary, cache, compiler, interpret, workers
from .arguments import describe, one_by_one, plain_values
from .cpp_compiler import note_interpreter
from .devices import on


class NotYet(Exception):
    """A kernel is not compiled. `begin()` has that done beside this process, and is the job that ends when it is there; None if it is."""

    def __init__(self, begin: Callable[[], workers.Job | None]) -> None:
        self.begin = begin


class Kernel:
    """One printed kernel. Its entry point has the template's name."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec, self._printed = spec, cache.recall(spec)
        if self._printed is not None:
            logs.PRINT.debug("found the print %s", self.path)
        elif workers.SETTING["waits"]:
            self._print()  # else when it is needed: another thread may have it compiled
        self._variants: dict[tuple, binary.Binary] = Bounded(256)
        self._usual: dict[tuple, binary.Binary] = Bounded(256)  # for aligned tensors and numbers of 32 bits: their types are the spec's
        self._interpreted = None
        self.compiled: list[float] = []  # seconds that each variant took that this process had compiled
        self._jobs: dict[tuple, workers.Job] = {}  # variants that are compiled beside
        self._turn = Turn()  # who obtains a variant

    @property
    def printed(self) -> cache.PrintedKernel:
        """The file and its text."""
        if self._printed is None:
            _printing.run(self._print)
        return self._printed

    def _print(self) -> None:
        if self._printed is None:
            if not workers.SETTING["waits"] and self.spec.backend != "cpu":
                workers.POOL.start()  # it takes as long as this
            start, self._printed = time.perf_counter(), cache.store(render(self.spec), self.spec)
            INFO.prints += 1
            logs.PRINT.info("printed %s in %.0f ms", self.path, 1e3 * (time.perf_counter() - start))

    @property
    def is_known(self) -> bool:
        """Is it compiled for any arguments, or on its way?"""
        return bool(self._variants or self._jobs)

    @property
    def path(self):
        """The printed file."""
        return self.printed.path

    def launch(
        self, grid: tuple[int, ...], args: tuple, device: torch.device, constants: tuple, *, waits: bool = True, **options: int
    ) -> binary.Binary | None:
        """Run over `grid`. `constants` are the values of the last, tl.constexpr, parameters; `options` are num_warps and num_stages.

        Returns the compiled variant that ran; None if none did. Raises NotYet as `variant` does.
        """
        if 0 in grid:
            return None
        if self.spec.backend == "cpu":
            self._interpret(grid, (*args, *constants))
            return None
        with on(device):
            variant, plain = self.variant(args, device, constants, waits=waits, **options)
            variant.launch(grid, plain, device.index)
        return variant

    def variant(
        self, args: tuple, device: torch.device, constants: tuple, *, waits: bool = True, **options: int
    ) -> tuple[binary.Binary, list]:
        """The compiled variant for these arguments, and the arguments as it takes them. The device is the current one. Where it must be
        compiled and nobody `waits`, NotYet is raised."""
        key, plain = (constants, device.index, *options.values()), plain_values(args)
        variant = self._usual.get(key) if plain is not None else None
        if variant is None:
            usual = plain is not None
            layout, plain = describe(args)
            variant = self._variants.get((layout, *key))
            if variant is None:
                if not waits:
                    self._raise_unless_there((layout, *key), layout, constants, options)
                variant = self._turn.run(self._obtained, (layout, *key), layout, constants, options, device.index)
            if usual:
                self._usual[key] = variant
        return variant, plain

    def begin(self, args: tuple, device: torch.device, constants: tuple, **options: int) -> workers.Job | None:
        """Have the variant for these arguments compiled beside this process; None if it is there. The device is the current one."""
        layout, _ = describe(args, unmade=True)
        return self._turn.run(self._begun, (layout, constants, device.index, *options.values()), layout, constants, options)

    def _begun(self, key: tuple, layout: tuple, constants: tuple, options: dict) -> workers.Job | None:
        if key not in self._variants and key not in self._jobs:
            try:
                job = binary.begin(self.printed, self.spec.template, layout, constants, self._compiled_with(options))
            except Exception as error:  # whoever needs the kernel is told
                job = workers.Job()
                job.end(f"{type(error).__name__}: {error}")
            if job is not None:
                self._jobs[key] = job
        return self._jobs.get(key)

    def _compiled_with(self, options: dict) -> dict:
        return {**options, "launch_pdl": self.spec.begins_early}

    def _raise_unless_there(self, key: tuple, layout: tuple, constants: tuple, options: dict) -> None:
        begin = functools.partial(self._turn.run, self._begun, key, layout, constants, options)
        job = self._jobs.get(key)
        if job is None:
            if self._printed is None:
                raise NotYet(begin)
            job = begin()
        if job is not None and not job.over:
            raise NotYet(begin)

    def _obtained(self, key: tuple, layout: tuple, constants: tuple, options: dict, device_index: int) -> binary.Binary:
        variant = self._variants.get(key)
        if variant is None:
            busy = compiler.is_busy()
            if (busy or workers.POOL.is_better) and workers.POOL.has_room:
                self._begun(key, layout, constants, options)
            job = self._jobs.pop(key, None)
            if job is not None and (workers.POOL.hasten(job) if busy else not workers.POOL.withdraw(job)):
                with progress.shown(f"compiling {self.path.stem}"):
                    job.wait()
                if job.found:
                    return self._compiled_beside(key, job, constants, device_index)
                logs.COMPILE.info("%s did not compile beside this process: %s", self.path.stem, job.why)
            start = time.perf_counter()
            with_all = self._compiled_with(options)
            variant, compiled = binary.obtain(self.path.stem, layout, constants, with_all, device_index, self._function)
            INFO.compiles += compiled
            seconds, numbers = time.perf_counter() - start, ", ".join(map(str, (*constants, *(f"{k}={v}" for k, v in options.items()))))
            if compiled:
                self.compiled.append(seconds)
                logs.COMPILE.info("compiled %s (%s) in %.2f s", self.path.stem, numbers, seconds)
            else:
                logs.COMPILE.debug("found %s (%s) compiled, loaded in %.0f ms", self.path.stem, numbers, 1e3 * seconds)
            self._variants[key] = variant
        return variant

    def _compiled_beside(self, key: tuple, job: workers.Job, constants: tuple, device_index: int) -> binary.Binary:
        seconds, compiled = job.found
        variant = self._variants[key] = binary.Binary(compiled, constants, device_index)
        INFO.compiles += 1
        self.compiled.append(seconds)
        return variant

    def _interpret(self, grid, args) -> None:
        args = one_by_one(args)
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.data_ptr() < LOWEST:
                check_address(arg)
        self.interpreted()[grid](*args)

    def interpreted(self):
        """The kernel for the interpreter."""
        return self._interpreted or self._turn.run(self._loaded)

    def _loaded(self):
        if self._interpreted is None:
            note_interpreter()
            start, module = time.perf_counter(), interpret.load(str(self.path), self.printed.source)
            self._interpreted = getattr(module, self.spec.template)
            INFO.compiles += 1
            self.compiled.append(time.perf_counter() - start)
            logs.COMPILE.info("loaded %s for the interpreter", self.path.stem)
        return self._interpreted

    def _function(self):
        return getattr(cache.load_module(self.printed), self.spec.template)


_kernels: dict[KernelSpec, Kernel] = Table("kernels", 2048)  # code on a device stays there: a CUDA graph may launch it at any time
_printing = Turn(fork_waits=True)


def kernel_for(spec: KernelSpec, kind: type[Kernel] = Kernel) -> Kernel:
    """The kernel of `spec`, printed at its first use. `kind`: of its language."""
    return _kernels.get(spec) or _printing.run(_printed, spec, kind)


def _printed(spec: KernelSpec, kind: type[Kernel]) -> Kernel:
    kernel = _kernels.get(spec)
    if kernel is None:
        kernel = _kernels[spec] = kind(spec)
    return kernel


def loaded() -> list[Kernel]:
    """The kernels of this process, in the order of their first use."""
    return list(_kernels.values())
