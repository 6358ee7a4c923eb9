"""Which of three Tritons compiles which kernels for GPUs that are not here, and how far (`make test`).

Kernels are compiled until Triton's own passes have run ("ttgir"), where Tritons differ and fail, and a change of a template shows. What can
break is a template under one of its flags, and what a mod is spelled with: of many cases that differ in these, `chosen` ones have each of
them once, and the others are left out. LLVM and the assembler, which says what spills, take four fifths of the time: they meet
few kernels from every Triton (`by_all`), and from the pinned one every sixth of the others.
--every-kernel: every Triton brings all to the assembler.

For other GPUs than Hopper the pinned Triton alone compiles: a kernel of every template for all of them, to the end for one (`further`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import triton

from flexpress.codegen.device.offline import TARGETS
from flexpress.codegen.text.spec import KernelSpec

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLDER, NEWER = _VERSION < (3, 7), _VERSION > (3, 7)
PINNED = not (OLDER or NEWER)


def my_turn(number: int) -> bool:
    """Does this Triton bring the kernel with this number to the assembler?"""
    return PINNED and number % 6 == 0


def by_pinned(every_kernel: bool) -> str | None:
    """How far a Triton compiles what the pinned one alone brings to the assembler: None, to the end, or "ttgir"."""
    return None if every_kernel or PINNED else "ttgir"


def further(target: str, number: int) -> bool:
    """Does a kernel with this number that is compiled for every GPU reach the assembler for this one? For Hopper, and one other in turn."""
    others = [name for name in TARGETS if name != "sm_90"]
    return target == "sm_90" or target == others[number % len(others)]


def features(spec: KernelSpec) -> set:
    """A template's flags with their values, its mods, and what of theirs is read along which indices, stands apart or gets a gradient."""
    found = {(name, repr(value)) for name, value in spec.flags}
    for mod in filter(None, spec.mods):
        found |= {(mod.kind, mod.name), (mod.kind, mod.sum is None, mod.distance is None, mod.tangent is None, mod.ends, mod.is_product)}
        found |= {(mod.kind, "reads", s.varies) for s in mod.statements if s.loads}
        found |= {("gradient of", c.role) for c in (mod.gradient.captured if mod.gradient else ())}
    return {(spec.template, *feature) for feature in found}


def chosen(specs: Mapping[str, Iterable[KernelSpec]], first: Iterable[str] = ()) -> list[str]:
    """Few of some cases, of a kernel or more each, `first` among them, that have all features which any of them has."""
    has = {name: set().union(*map(features, kernels)) for name, kernels in specs.items()}
    names = list(first)
    left = set().union(*has.values()).difference(*(has[name] for name in names))
    while left:
        names.append(max(has, key=lambda name: len(has[name] & left)))
        left -= has[names[-1]]
    return names


def last_stage(name: str, few: list[str], by_all: Iterable[str], every_kernel: bool) -> str | None:
    """How far this Triton compiles a case of which `few` are `chosen`: None, to the end, or "ttgir". Skips the test of one that is left
    out."""
    if every_kernel or name in by_all or (name in few and my_turn(few.index(name))):
        return None
    if name not in few:
        pytest.skip("its features are those of other kernels; --every-kernel compiles it")
    return "ttgir"
