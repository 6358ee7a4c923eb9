"""What exported kernels capture: arguments of their launches, with what must hold for the texts of these kernels."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..mod.captured.origins import Origin, Origins, roots
from ..mod.captured.program import NUMBERS
from ..mod.expr import INDEX_BOUND, MASK_SYMBOLS, Expr, ModGraph
from ..mod.graphs.index_range import value_range
from ..mod.graphs.loads import loads_of
from ..mod.table.dtypes import dtype_name
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
    formula  of a number that the file computes, of others: Python; with the `roots` that are in it
    beside   captures that it is made of in another way, by name
    of_kernels   do kernels take it, or formulas alone?
    told     what it is, in a docstring, where it is no capture of a mod
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
    formula: str = ""
    roots: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    of_kernels: bool = True
    told: str = ""

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
        captured = f"captured: made of {' and '.join(self.beside)}, so pass both" if self.beside else "captured"
        if self.told:
            return f"{self.dtype} {self.told}{', with its gradient' if self.wanted else ''}"
        if not self.is_tensor:
            return f"{self.dtype}, {captured}"
        return f"{self.dtype} {tuple(self.value.shape)} in the example, {captured}{', with its gradient' if self.wanted else ''}"

    @property
    def example(self) -> str:
        """A tensor for the demo, of the example's shape."""
        shape, count = tuple(self.value.shape), max(self.value.numel(), 1)
        if self.is_floating:
            return f"torch.rand({shape}, device=device).to(torch.{self.dtype})"
        steps = min(4, count)
        return f"(torch.arange({count}, device=device) * {steps} // {count}).reshape({shape}).to(torch.{self.dtype})"


def sinks_of(sinks: torch.Tensor | None) -> tuple[Captured, ...]:
    """Sinks, if there are any, as an argument of the file's functions."""
    if sinks is None:
        return ()
    told = "(Hq,): of each query head, the score of one more key, whose value is 0"
    return (Captured("sinks", dtype_name(sinks.dtype), sinks, ("0",), (1,), wanted=sinks.requires_grad, told=told),)


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


@dataclass(frozen=True)
class Names:
    """What a call captures, as arguments of the file's functions.

    captured           each tensor, and each number, once; what formulas take before what they give
    of_score, of_mask  the names of what each mod captures, in its order
    pinned             for either mod, what Python decided while it was traced: an expression, and its value, which is part of the kernels
    """

    captured: tuple[Captured, ...]
    of_score: tuple[str, ...]
    of_mask: tuple[str, ...]
    pinned: tuple[tuple[tuple[str, object], ...], ...]


def named(
    mods: tuple[tuple | None, tuple | None],
    origins: tuple[Origins | None, Origins | None],
    wanted: frozenset[int],
    keys: tuple[Mod | None, Mod | None],
    reserved: frozenset[str],
    given: tuple[Captured, ...] = (),
    extents: Mapping[str, str] = _EXTENTS,
) -> Names:
    """The arguments of a file for bound mods, whose captures have these origins.

    given   arguments of the call itself, and what the mods get from it: tensors, and numbers by the names that a trace gives them, with
            theirs in the file
    extents   how the file finds out how many b and h there are
    """
    naming, names = _Naming(reserved, given), []
    for which, (bound, origin, key) in enumerate(zip(mods, origins, keys, strict=True)):
        of_mod = []
        if bound is not None:
            graph, values = bound
            count = len(graph.tensors)
            for i, (capture, value) in enumerate(zip((*graph.tensors, *graph.scalars), values, strict=True)):
                if i < count:
                    made, add = _of_tensor(graph, key[1][i], i, value, which == 0 and i in wanted, extents), naming.of_tensor
                else:
                    made, add = Captured("", capture.kind.__name__, capture.kind(value)), naming.of_number
                of_mod.append(add(origin.captured[i], capture.name, made))
        names.append(tuple(of_mod))
    pinned = tuple(tuple(naming.pinned(origin)) if origin else () for origin in origins)
    return Names(tuple(naming.all()), *names, pinned)


PREFIX = "flexpress_apart_"
APART = frozenset({PREFIX})  # instead of names that captures cannot have: all of them begin so, as nothing else in a file does


class _Naming:
    """Arguments, as they are found; `of_origin`, `of_source`: their names."""

    def __init__(self, reserved: frozenset[str], given: tuple[Captured, ...]) -> None:
        self.reserved = reserved
        self.found: dict[str, Captured] = {c.name: c for c in given if c.is_tensor}
        self.given = {c.value: c for c in given if not c.is_tensor}
        self.of_origin: dict[Origin, str] = {}
        self.of_source: dict[object, str] = {}

    def all(self):
        """All of them, with what must be passed along with some."""
        origins = {name: origin for origin, name in self.of_origin.items()}
        for name, captured in self.found.items():
            beside = origins[name].beside if name in origins else ()
            yield replace(captured, beside=tuple(dict.fromkeys(self.of_origin[one] for one in beside if one in self.of_origin)))

    def of_tensor(self, origin: Origin, capture: str, made: Captured) -> str:
        known = next((c for c in self.found.values() if c.value is made.value), None)
        if known is None:
            return self._add(origin, capture, made)
        sizes, strides = tuple(map(_larger, known.sizes, made.sizes)), tuple(map(_stricter, known.strides, made.strides))
        fixed = tuple(sorted({*known.fixed, *made.fixed}))
        self.found[known.name] = replace(known, sizes=sizes, strides=strides, wanted=known.wanted or made.wanted, fixed=fixed)
        self.of_origin[origin] = known.name
        return known.name

    def of_number(self, origin: Origin, capture: str, made: Captured) -> str:
        if capture in self.given:
            known = self.given[capture]
            self.found[known.name], self.of_origin[origin] = known, known.name
        elif name := self._known(origin):
            self.found[name] = replace(self.found[name], of_kernels=True)
        elif origin.formula:
            formula, taken = self._formula(origin), tuple(dict.fromkeys(self._taken(root) for root in roots(origin)))
            self._add(origin, origin.name, replace(made, formula=formula, roots=taken))
        else:
            self._add(origin, capture, made)
        return self.of_origin[origin]

    def _add(self, origin: Origin, capture: str, made: Captured) -> str:
        base = capture if capture.startswith(origin.name.lower()) else origin.name
        base = re.sub(r"[^a-z0-9]+", "_", base.lower()).strip("_") or "captured"
        name = f"captured_{base}" if _is_spoken_for(base) else base
        if self.reserved is APART:
            name = PREFIX + name
        while name in self.reserved:
            name += "_"
        first, count = name, 1
        while name in self.found:
            count += 1
            name = f"{first}_{count}"
        self.found[name], self.of_origin[origin] = replace(made, name=name), name
        if origin.source is not None:
            self.of_source[origin.source] = name
        return name

    def _known(self, origin: Origin) -> str | None:
        """The name of a number that is there already, perhaps by the other mod."""
        name = self.of_origin.get(origin) or self.of_source.get(origin.source)
        if name:
            self.of_origin[origin] = name
        return name

    def _taken(self, root: Origin) -> str:
        """The name of what a formula takes."""
        if not self._known(root):
            if root.name in self.given:
                return self.of_number(root, root.name, self.given[root.name])
            self._add(root, root.name, Captured("", type(root.value).__name__, root.value, of_kernels=False))
        return self.of_origin[root]

    def _formula(self, origin: Origin) -> str:
        if not origin.formula:
            return self._taken(origin)
        return origin.formula.format(*map(self._formula, origin.parts))

    def pinned(self, origins: Origins):
        """What Python decided by the values of arguments, as expressions."""
        for origin in origins.pinned:
            if any(self._decider(root) for root in roots(origin)) and isinstance(origin.value, NUMBERS):
                yield self._with_values(origin), origin.value

    def _decider(self, root: Origin) -> str | None:
        """The name of a number that decides. One that an object has may be an argument for the other mod."""
        known = self._known(root)
        if known or root.source is not None:
            return known
        alike = (name for other, name in self.of_origin.items() if other.source is None and not other.formula and _are_alike(root, other))
        return next(alike, None)

    def _with_values(self, origin: Origin) -> str:
        """As _formula, of arguments alone: what is none has its value in the kernels."""
        if not origin.formula:
            return self._decider(origin) or literal_text(origin.value)
        return origin.formula.format(*map(self._with_values, origin.parts))


def _are_alike(one: Origin, other: Origin) -> bool:
    return one.name == other.name and type(one.value) is type(other.value) and one.value == other.value


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
