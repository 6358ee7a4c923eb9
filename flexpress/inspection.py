"""Looking behind the front door: counters of the caches, and where the printed kernels lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .codegen import registry
from .codegen.device import kernel
from .codegen.device.cache import cache_dir
from .codegen.registry import INFO, CacheInfo

__all__ = ["CacheInfo", "cache_clear", "cache_dir", "cache_info", "printed_kernels"]


def cache_info() -> CacheInfo:
    """How many mods were traced, kernels printed and compiled, and look-ups found a plan or a kind of call ready, since the process started
    (or `cache_clear`). A repeated call adds a hit for each kernel or list that it looks up: 2 with a mask_mod that captures a tensor."""
    return replace(INFO)


def cache_clear() -> None:
    """Forget traces, plans, loaded kernels and everything else that the process remembers, and set the counters to zero. Files on disk
    stay."""
    registry.clear()
    for name in vars(CacheInfo()):
        setattr(INFO, name, 0)


def printed_kernels() -> list[Path]:
    """The files of the kernels this process has used, oldest first."""
    return [k.path for k in kernel.loaded()]
