"""A kernel's arguments as data: each is spelled once, in the order in which the kernel takes them.

From a spec's parameters come the signature that its template prints, what Triton must not compile anew for, the types of offline
compilation, and the arguments of a launch, which are found by name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

from ..registry import remembered


class Parameter(NamedTuple):
    """One argument of a kernel.

    type      "int" or "float"; "constexpr"; "*bfloat16": a pointer to such elements; "desc:bfloat16:BLOCK_Nx128": a TMA descriptor of
              blocks of such elements, whose sizes may be constants of the kernel
    meaning   a comment beside it in the printed kernel: its shape, and what it holds
    of        "score_mod" or "mask_mod": which captures it; of a descriptor the parameter that would take its tensor by pointer
    """

    name: str
    type: str = "int"
    meaning: str = ""
    of: str = ""

    @property
    def is_captured(self) -> bool:
        """Does a mod capture it?"""
        return self.of in ("score_mod", "mask_mod")

    @property
    def is_descriptor(self) -> bool:
        """Is it a TMA descriptor?"""
        return self.type.startswith("desc:")

    def block(self, constants: dict[str, int]) -> tuple[int, int]:
        """Rows and columns of what a descriptor copies at once."""
        return tuple(constants[size] if size in constants else int(size) for size in self.type.split(":")[2].split("x"))

    @property
    def is_number(self) -> bool:
        """Must Triton not compile anew for another value?"""
        return self.type in ("int", "float")


FLOATS = ("SM_SCALE", "TO_LOG2", "KEPT_SCALE")


def numbers(*names: str) -> tuple[Parameter, ...]:
    """Integers, but for the scales."""
    return tuple(Parameter(name, "float" if name in FLOATS else "int") for name in names)


def constants(*names: str) -> tuple[Parameter, ...]:
    """What is compiled into a variant of the kernel."""
    return tuple(Parameter(name, "constexpr") for name in names)


def pointer(name: str, dtype: str, meaning: str = "") -> Parameter:
    """A tensor's address."""
    return Parameter(name, f"*{dtype}", meaning)


def descriptor_of(tensor: str, dtype: str, rows: int | str, columns: int | str, meaning: str = "", name: str = "") -> Parameter:
    """A TMA descriptor of blocks of a tensor that is known as `tensor`."""
    return Parameter(name or f"desc_{tensor.lower()}", f"desc:{dtype}:{rows}x{columns}", meaning, tensor)


def stride_names(tensor: str, dims: str) -> tuple[str, ...]:
    """stride_qz, stride_qh and so on."""
    return tuple(f"stride_{tensor}{d}" for d in dims)


def named_strides(tensor: str, dims: str, values: Iterable[int]) -> dict[str, int]:
    """Strides by the names of their parameters, as many as there are letters in `dims`."""
    return dict(zip(stride_names(tensor, dims), values, strict=False))


def signature(parameters: tuple[Parameter, ...], mods: dict[str, str], tl: str = "tl", width: int = 110) -> str:
    """The parameters as a kernel declares them: a line for each that has a meaning, the others together.

    mods   names of the score_mod and the mask_mod
    """

    def line_of(p: Parameter) -> tuple:
        return p.name if p.meaning else "", p.of if p.is_captured else "", p.is_number and not p.is_captured, p.type == "constexpr"

    lines = []
    for (alone, captor, _, constant), group in groupby(parameters, line_of):
        found = list(group)
        text = ", ".join(f"{p.name}: {tl}.constexpr" if constant else p.name for p in found) + ","
        if alone:
            element = found[0].type.removeprefix("*") + " " if found[0].type.startswith("*") else ""
            lines += _beside(text, f"{element}{found[0].meaning}")
        elif captor:
            lines += _beside(text, f"captured by {captor} {mods[captor]}")
        else:
            lines += textwrap.wrap(text, width, break_long_words=False)
    return "\n".join(lines)


def _beside(text: str, comment: str, width: int = 116) -> list[str]:
    """A line with a comment, or below it, where both are too long for one line."""
    line = f"{text}  # {comment}"
    return [line] if len(line) <= width else [*textwrap.wrap(comment, width, initial_indent="# ", subsequent_indent="# "), text]


def packer(parameters: tuple[Parameter, ...], fixed: dict[str, object], whole: Callable) -> Callable:
    """A function of a dict of arguments by names, a list of descriptors, and a list of what mods capture: all of a kernel's arguments in
    its order.

    fixed   numbers that are the same in every call; those that the kernel does not take are left out
    whole   makes one argument of a run of them
    """
    fields, runs = _fields(parameters, fixed, lambda name: f"given[{name!r}]")
    known = {place: whole(run) for place, run in runs.items()}
    return _compiled(f"lambda {', '.join(known)}: lambda given, descriptors, captured: [{', '.join(fields)}]")(*known.values())


def launcher(
    parameters: tuple[Parameter, ...], fixed: dict[str, object], order: tuple[str, ...], launch: Callable, grid: tuple
) -> Callable:
    """f(stream, given, captured, descriptors=()): as packer's, but `given` is a list in the order `order`. It calls
    launch(*grid, stream, arguments)."""
    fields, known = _fields(parameters, fixed, lambda name: f"given[{order.index(name)}]")
    fields = [f"*{field}" if field in known else field for field in fields]
    inner = f"lambda stream, given, captured, descriptors=(): launch(x, y, z, stream, [{', '.join(fields)}])"
    return _compiled(f"lambda {', '.join(('launch', 'x', 'y', 'z', *known))}: {inner}")(launch, *grid, *known.values())


def _fields(parameters: tuple[Parameter, ...], fixed: dict, given: Callable[[str], str]) -> tuple[list[str], dict[str, tuple]]:
    """The arguments as Python, and runs of fixed numbers by the names that they have in it."""

    def kind_of(p: Parameter) -> str:
        return "descriptors" if p.is_descriptor else "captured" if p.is_captured else "fixed" if p.name in fixed else "given"

    fields, runs = [], {}
    for kind, group in groupby((p for p in parameters if p.type != "constexpr"), kind_of):
        names = [p.name for p in group]
        if kind == "fixed":
            place = f"fixed_{len(runs)}"
            runs[place] = tuple(fixed[name] for name in names)
            fields.append(place)
        else:
            fields += map(given, names) if kind == "given" else [f"*{kind}"]
    return fields, runs


@remembered("argument lists", 1024)
def _compiled(text: str) -> Callable:
    """A function of fixed runs of numbers, which makes the function that lists arguments: calls of other lengths share it."""
    return eval(text, {})
