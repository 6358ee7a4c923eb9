"""Code: an expression as a kernel spells it, together with what it takes from around it. Nothing has to be looked for in its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..mod.expr import SourceLine


class Use(NamedTuple):
    """A name that an expression takes from around it.

    kind   "local" (a symbol or a temporary), "helper" (a function of templates/_helpers.jinja), "module" (what the kernel imports),
           or how to find a kernel argument at launch: the "value" of a captured tensor or number, or a tensor's "size", "stride" or
           "vectors" (a stride in units of 16 bytes)
    index  for arguments: the place among what the mod captures, tensors first
    dim    for sizes and strides: the dimension
    """

    name: str
    kind: str = "local"
    index: int = 0
    dim: int = 0


ARGUMENTS = ("value", "stride", "vectors", "size")


@dataclass(frozen=True, slots=True)
class Code:
    """An expression: its text, how tightly it binds (one of its language's levels), and the names in it, each once."""

    text: str
    binds: int
    uses: tuple[Use, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Statement:
    """`name = value`, the user's line that it comes from, and on which symbols the value depends."""

    name: str
    value: Code
    source: SourceLine | None
    varies: tuple[str, ...]  # sorted: a spec is the same in every process
    loads: bool = False  # does it read memory
    dtype: str = ""  # of the value, as compute_dtype names it; none for a result


def uses_of(codes: Iterable[Code | None]) -> tuple[Use, ...]:
    """The names in some expressions, each once, in order."""
    return tuple(dict.fromkeys(use for code in codes if code is not None for use in code.uses))


def named(uses: Iterable[Use], kind: str) -> tuple[str, ...]:
    """The names of one kind."""
    return tuple(use.name for use in uses if use.kind == kind)


def arguments(uses: Iterable[Use]) -> tuple[Use, ...]:
    """The kernel arguments among the names: capture by capture, each tensor's pointer, then strides and sizes of its dimensions."""
    return tuple(sorted((u for u in set(uses) if u.kind in ARGUMENTS), key=lambda u: (u.index, u.kind != "value", u.dim, u.kind == "size")))
