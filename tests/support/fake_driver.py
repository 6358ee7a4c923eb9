"""Triton's own launches without a GPU: its just-in-time calls compile for a Hopper GPU, and a launch is noted."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flexpress.codegen.device import cuda


class Driver:
    """What Triton asks of a driver.

    launches        the grid, the kernel's name and the arguments of every launch
    cache_configs   what a kernel was told to prefer, shared memory or cache, by its name
    """

    def __init__(self, spills: int = 0) -> None:
        self.launches: list[tuple] = []
        self.cache_configs: dict[str, int] = {}
        self.spills, self.names = spills, {1: "a stand-in"}
        self.utils = SimpleNamespace(
            load_binary=self.load_binary, get_device_properties=lambda _: {"max_shared_mem": 232_448, "multiprocessor_count": 132}
        )

    def load_binary(self, name: str, *_) -> tuple:
        self.names[len(self.names) + 1] = name
        return "module", len(self.names), 100, self.spills, 1024

    def set_cache_config(self, function: ctypes.c_void_p, config: int) -> None:
        self.cache_configs[self.names[function.value]] = config

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed, about, enter, leave, *args) -> None:
            self.launches.append(((x, y, z), self.names[function], args))

        return launch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _give_version(place) -> None:
    place._obj.value = 13000


def fake_driver(monkeypatch, tmp_path, **options) -> Driver:
    """From now on, Triton's and torch's current device is a Hopper GPU."""
    found = Driver(**options)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    libraries = ctypes.CDLL

    def library(name, *args):
        given = {"cuDriverGetVersion": _give_version, "cuFuncSetCacheConfig": found.set_cache_config}
        return SimpleNamespace(**given) if name == "libcuda.so.1" else libraries(name, *args)

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(cuda, "driver_version", lambda: 13)  # the library keeps what it opens
    monkeypatch.setattr(driver, "_active", found)
    return found
