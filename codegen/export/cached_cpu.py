"""A file with the kernel of cached_attention in C++, and those that make block lists."""

from __future__ import annotations

from ..plan.cpu_decode import plan_cpu_decode
from ..plan.tiles import BLOCK
from .cached import VARIABLES, ExportedCache, describe_cache, names_in, read_by
from .cpp import FileInCpp, mask_specs


class CachedCppFile(FileInCpp):
    """What exported_cached_cpu.jinja asks for. `version` is the package's; captures have no names in `reserved`."""

    template, backward = "exported_cached_cpu.jinja", False
    variables = {**FileInCpp.variables, **VARIABLES}

    def __init__(self, call: ExportedCache, version: str, reserved: frozenset[str]) -> None:
        extents, keys = read_by(call)
        names = names_in(call, keys, reserved)
        super().__init__(names, call.score, call.mask, version)
        plan = plan_cpu_decode(call.case(split=False), *keys)
        describe_cache(self, call, extents, 1, plan.scale_apart)
        self.hold({"decode": plan.spec, **(mask_specs(call.mask, extents, (BLOCK, BLOCK)) if call.mask else {})})
