"""What exported kernels capture: arguments of their launches, with what must hold for the texts of these kernels."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..mod.dtypes import dtype_name
from ..mod.expr import INDEX_BOUND, MASK_SYMBOLS, Expr, ModGraph
from ..mod.index_range import value_range
from ..mod.loads import loads_of
from ..plan.forward import Mod
from ..text.layouts import TensorLayout, layouts_of
from ..text.spelling import literal_text

_ANY = (INDEX_BOUND,) * 4
_LARGEST = dict.fromkeys(MASK_SYMBOLS, (0, (1 << 23) - 1))  # of an index, past the end of the longest sequences, too
_OWN = re.compile("score_|mask_|place_|grad_|span_|d_")
_EXTENTS = {"b": "query.shape[0]", "h": "query.shape[1]"}


@dataclass(frozen=True)
class Captured:
    """A captured tensor or number as an argument of the file's functions.

    sizes    of a tensor, per dimension: how large it is at least, as an expression
    fixed    dimensions of a tensor whose size is as in the example, with it: a mod takes vectors along them
    strides  per dimension what the kernels' texts know: 0, 1, or of how many elements it is a multiple, as a text
    value    the example's; of a number, the default
    given    it is one of the function's own arguments, and no other
    """

    name: str
    dtype: str
    value: object
    sizes: tuple[str, ...] = ()
    strides: tuple = ()
    wide: bool = False
    wanted: bool = False
    given: bool = False
    fixed: tuple[tuple[int, int], ...] = ()

    is_tensor = property(lambda self: isinstance(self.value, torch.Tensor))
    is_floating = property(lambda self: self.value.is_floating_point())
    largest = property(lambda self: "1 << 62" if self.wide else "1 << 31")
    unit = property(lambda self: 16 // self.value.element_size())

    @property
    def parameter(self) -> str:
        """In a signature."""
        return self.name if self.is_tensor else f"{self.name}={literal_text(self.value)}"

    @property
    def meaning(self) -> str:
        """In a docstring."""
        if not self.is_tensor:
            return f"{self.dtype}, captured"
        return f"{self.dtype} {tuple(self.value.shape)} in the example, captured{', with its gradient' if self.wanted else ''}"

    @property
    def example(self) -> str:
        """A tensor for the demo, of the example's shape."""
        shape, count = tuple(self.value.shape), max(self.value.numel(), 1)
        if self.is_floating:
            return f"torch.rand({shape}, device=device).to(torch.{self.dtype})"
        steps = min(4, count)
        return f"(torch.arange({count}, device=device) * {steps} // {count}).reshape({shape}).to(torch.{self.dtype})"


def layouts_for_any(graph: ModGraph, captured: list, extents: tuple[int, ...], whole: ModGraph | None = None) -> tuple[TensorLayout, ...]:
    """What a kernel's text may know of captured tensors in calls of any lengths and numbers: strides as they are; of indices, what does not
    depend on lengths and numbers, and that b and h lie inside (which launches check), if they do for the first two `extents`."""
    most = dict(zip(_EXTENTS, extents, strict=False))
    layouts = layouts_of(graph, captured, _ANY, whole)
    inside: list[set] = [set() for _ in layouts]
    for number, load in enumerate(loads_of(graph)):
        for dim, index in enumerate(load.args):
            size = captured[load.attr].shape[dim]
            is_direct = index.op == "symbol" and index.attr in most
            if most[index.attr] <= size if is_direct else _is_inside(index, size):
                inside[load.attr].add((number, dim))
    return tuple(layout._replace(inside=frozenset(known)) for layout, known in zip(layouts, inside, strict=True))


def _is_inside(index: Expr, size: int) -> bool:
    """Does an index lie inside, whatever lengths and numbers are?"""
    low, high = value_range(index, _LARGEST)
    return low >= 0 and high < size


def named(
    score: tuple | None,
    mask: tuple | None,
    wanted: frozenset[int],
    keys: tuple[Mod | None, Mod | None],
    reserved: frozenset[str],
    given: tuple[Captured, ...] = (),
    extents: Mapping[str, str] = _EXTENTS,
) -> tuple[tuple[Captured, ...], tuple[str, ...], tuple[str, ...]]:
    """What a call captures, each tensor once; and the names of that of score_mod and of mask_mod, in their order.

    given   what the mods get from the call itself: tensors, and numbers by the names that a trace gives them, with theirs in the file
    extents   how the file finds out how many b and h there are
    """
    found: dict[str, Captured] = {c.name: c for c in given if c.is_tensor}
    numbers = {c.value: c for c in given if not c.is_tensor}
    names: list[list[str]] = [[], []]
    for which, (bound, key) in enumerate(zip((score, mask), keys, strict=True)):
        if bound is None:
            continue
        graph, values = bound
        count = len(graph.tensors)
        for i, (capture, value) in enumerate(zip((*graph.tensors, *graph.scalars), values, strict=True)):
            if i < count:
                made = _of_tensor(graph, key[1][i], i, value, which == 0 and i in wanted, extents)
                known = next((c for c in found.values() if c.value is value), None)
            else:
                made, known = Captured("", capture.kind.__name__, capture.kind(value)), None
                if capture.name in numbers:
                    known = numbers[capture.name]
                    found[known.name] = known
            if known is None:
                name = f"captured_{capture.name}" if _is_spoken_for(capture.name) else capture.name
                while name in reserved or name in found:
                    name += "_"
                found[name] = replace(made, name=name)
            else:
                name, sizes = known.name, tuple(map(_larger, known.sizes, made.sizes))
                strides = tuple(map(_stricter, known.strides, made.strides))
                fixed = tuple(sorted({*known.fixed, *made.fixed}))
                found[name] = replace(known, sizes=sizes, strides=strides, wanted=known.wanted or made.wanted, fixed=fixed)
            names[which].append(name)
    return tuple(found.values()), tuple(names[0]), tuple(names[1])


def _is_spoken_for(name: str) -> bool:
    """Does Python, or what the file calls its own statements, use a name?"""
    return keyword.iskeyword(name) or not name.isidentifier() or name in vars(builtins) or bool(_OWN.match(name))


def _larger(a: str, b: str) -> str:
    """An expression of the larger of two sizes."""
    return a if a == b or b == "0" else b if a == "0" else f"max({a}, {b})"


def _stricter(a: int | str, b: int | str) -> int | str:
    """What both of two mods know of a stride: one may read rows in units of 16 bytes, and the other element by element."""
    return b if a == "1" else a


def _of_tensor(
    graph: ModGraph, layout: TensorLayout, place: int, tensor: torch.Tensor, wanted: bool, extents: Mapping[str, str]
) -> Captured:
    """What the text of a kernel supposes of a captured tensor."""
    sizes = ["0"] * tensor.dim()
    for number, load in enumerate(loads_of(graph)):
        for dim, index in enumerate(load.args if load.attr == place else ()):
            if (number, dim) in layout.inside:
                least = extents[index.attr] if index.op == "symbol" else str(int(value_range(index, _LARGEST)[1]) + 1)
                sizes[dim] = _larger(sizes[dim], least)
    unit = str(16 // tensor.element_size())
    strides = tuple({"0": 0, "1": 1, "v": unit, "n": "1"}[kind] for kind in layout.strides)
    fixed = graph.tensors[place].fixed
    return Captured("", dtype_name(tensor.dtype), tensor, tuple(sizes), strides, layout.wide, wanted, fixed=fixed)
