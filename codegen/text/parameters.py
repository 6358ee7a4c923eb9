"""A kernel's arguments as data: each is spelled once, in the order in which the kernel takes them.

From a spec's parameters come the signature that its template prints, what Triton must not compile anew for, the types of offline
compilation, and the arguments of a launch, which are found by name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple


class Parameter(NamedTuple):
    """One argument of a kernel.

    type      "int" or "float"; "constexpr"; "*bfloat16": a pointer to such elements; "desc:bfloat16:BLOCK_Nx128": a TMA descriptor of
              blocks of such elements, whose sizes may be constants of the kernel
    meaning   a comment beside it in the printed kernel: its shape, and what it holds
    of        "score_mod" or "mask_mod": which captures it
    """

    name: str
    type: str = "int"
    meaning: str = ""
    of: str = ""

    @property
    def is_number(self) -> bool:
        """Must Triton not compile anew for another value?"""
        return self.type in ("int", "float")


FLOATS = ("SM_SCALE", "TO_LOG2")


def numbers(*names: str) -> tuple[Parameter, ...]:
    """Integers, but for the scales."""
    return tuple(Parameter(name, "float" if name in FLOATS else "int") for name in names)


def constants(*names: str) -> tuple[Parameter, ...]:
    """What is compiled into a variant of the kernel."""
    return tuple(Parameter(name, "constexpr") for name in names)


def pointer(name: str, dtype: str, meaning: str = "") -> Parameter:
    """A tensor's address."""
    return Parameter(name, f"*{dtype}", meaning)


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
        return p.name if p.meaning else "", p.of, p.is_number and not p.of, p.type == "constexpr"

    lines = []
    for (alone, captor, _, constant), group in groupby(parameters, line_of):
        found = list(group)
        text = ", ".join(f"{p.name}: {tl}.constexpr" if constant else p.name for p in found) + ","
        if alone:
            element = found[0].type.removeprefix("*") + " " if found[0].type.startswith("*") else ""
            lines.append(f"{text}  # {element}{found[0].meaning}")
        elif captor:
            lines.append(f"{text}  # captured by {captor} {mods[captor]}")
        else:
            lines += textwrap.wrap(text, width, break_long_words=False)
    return "\n".join(lines)


def packer(parameters: tuple[Parameter, ...], fixed: dict[str, object], whole: object = None) -> Callable[[dict, list], list]:
    """A function that lists a kernel's arguments in its order, from the other arguments by name and what mods capture, in their order.

    fixed   numbers that are the same in every call
    whole   (if given) makes one argument of a run of them
    """
    fields, known = [], {}
    for kind, group in groupby((p for p in parameters if p.type != "constexpr"), lambda p: "mods" if p.of else p.name in fixed):
        names = [p.name for p in group]
        if kind == "mods":
            fields.append("*mods")
        elif kind:
            run = tuple(fixed[name] for name in names)
            place = f"fixed_{len(known)}"
            known[place] = whole(run) if whole else run
            fields.append(place if whole else f"*{place}")
        else:
            fields += [f"given[{name!r}]" for name in names]
    return eval(f"lambda given, mods: [{', '.join(fields)}]", known)
