"""Names in profiles: while a profiler is active, what a call launches lies in a range `flexpress: alibi+causal forward`.

torch.profiler shows it, and torch.autograd.profiler.emit_nvtx makes an NVTX range of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # 30 ns where none is active: asked in every call


def in_range(run: Callable, what: str, mods: Iterable[str]) -> Callable:
    """`run` in a range that names the mods and a pass."""
    name = f"flexpress: {'+'.join(mods)} {what}".replace("  ", " ")

    def ranged(*args):
        with torch.autograd.profiler.record_function(name):
            return run(*args)

    return ranged


def names_of(*bound: tuple | None) -> list[str]:
    """What the user calls bound mods."""
    return [mod[0].name for mod in bound if mod]
