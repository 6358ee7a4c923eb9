"""KernelSpec: everything that changes the text of a kernel, and nothing that does not.

Lengths, strides, batch and head counts, window sizes and slopes are not here: they are arguments at launch.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import itemgetter

from ..mod.expr import SourceLine
from .mod_text import ModText
from .parameters import Parameter

# kernels of few queries and of caches: a call may take 10 us, and is two of them or more
_BEGIN_EARLY = {"decode", "hopper_decode", "combine_splits", "update_cache", "shared_tables", "shared_tiles"}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: a template, the mods spliced into it, the structure flags that its Jinja reads, and what it takes, in order."""

    template: str
    mods: tuple[ModText, ...]
    flags: tuple[tuple[str, object], ...]
    backend: str  # "cuda", "hip" or "cpu"
    parameters: tuple[Parameter, ...] = ()

    @functools.cached_property
    def flag(self) -> dict:
        """The flags by name."""
        return dict(self.flags)

    def arguments(self, values: dict[str, object]) -> tuple:
        """What a launch takes, two at least, by name, in the order of the parameters; without constants."""
        return self._taken(values)

    @functools.cached_property
    def _taken(self) -> itemgetter:
        return itemgetter(*(p.name for p in self.parameters if p.type != "constexpr"))

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.template, self.mods, self.flags, self.backend))

    def __hash__(self) -> int:  # asked for at every launch, and long to compute
        return self._hash

    @property
    def begins_early(self) -> bool:
        """Is it launched before the kernel before has ended? It waits for that end, and saves the time that a launch takes."""
        return self.template in _BEGIN_EARLY

    @property
    def mod_names(self) -> tuple[str, ...]:
        """What the user calls the mods, each once."""
        return tuple(dict.fromkeys(m.name for m in self.mods if m))

    @property
    def name(self) -> str:
        """What the file is called: template, mods, then the flags that a reader would look for."""
        flags = self.flag
        parts = [self.template, *dict.fromkeys(map(_identifier, self.mod_names))]
        if "D_QK" in flags:
            parts.append(f"d{flags['D_QK']}" + (f"x{flags['D_V']}" if flags["D_V"] != flags["D_QK"] else ""))
        if "DTYPE" in flags:
            parts.append({"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "fp8"}[flags["DTYPE"]])
        return "_".join(parts)


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_").lower() or "mod"


def without_texts(value):
    """A spec, or a part of one, without the texts that come from the user: source lines and names, which a kernel shows in comments."""
    if isinstance(value, SourceLine):
        return None
    if isinstance(value, str):
        return "#" if value.startswith("#") else value
    if isinstance(value, tuple):
        parts = map(without_texts, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: without_texts(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **parts | ({"name": "mod"} if isinstance(value, ModText) else {}))
    return value
