"""Statements of a mod as templates want them: by when they can run in a loop over blocks, and with an end that has a name of theirs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from .code import Code, Statement, uses_of
from .language import Language


class Stages(NamedTuple):
    """The lines of a mod by when a kernel can run them, and the names of what the first two stages leave for the rest."""

    once: tuple[str, ...]
    ahead: tuple[str, ...]
    rest: tuple[str, ...]
    once_names: tuple[str, ...]
    ahead_names: tuple[str, ...]
    ahead_dtypes: tuple[str, ...]
    apart: tuple[str, ...]  # `ahead`, for a warp that has not run `once`

    @property
    def handed(self) -> tuple[tuple[str, str], ...]:
        """What `ahead` leaves for the rest, with dtypes."""
        return tuple(zip(self.ahead_names, self.ahead_dtypes, strict=True))

    @property
    def handed_bytes(self) -> int:
        """How many bytes that is for a position: "int64" are 8, "int1" is 1."""
        return sum(max(1, int(re.sub(r"\D", "", dtype)) // 8) for dtype in self.ahead_dtypes)


def stages_of(
    language: Language,
    statements: tuple[Statement, ...],
    results: tuple[Code | None, ...],
    later: frozenset[str],
    fixed: str,
    moving: str | None = None,
    to: str | None = None,
) -> Stages:
    """For a loop over blocks in which `fixed`, q_idx or kv_idx, stays the same and `moving` does not: what reads memory by `fixed` can
    do so `once`, before the loop, and what reads by `moving` `ahead` of a block's scores. (Triton moves such loads by itself, Gluon
    does not.) A stage that reads nothing is empty.

    results   what the statements compute
    later     other names that are used after them: what the derivative mentions
    to        the name under which the last stage leaves the one result
    """

    def take(symbols: set[str], among: list[Statement]) -> list[Statement]:
        found = [s for s in among if symbols.issuperset(s.varies)]
        return found if any(s.loads for s in found) else []

    once = take({"b", "h", fixed}, list(statements))
    ahead = take({"b", "h", moving}, [s for s in statements if s not in once]) if moving else []
    once += [s for s in ahead if moving not in s.varies]
    ahead = [s for s in ahead if moving in s.varies]
    rest = [s for s in statements if s not in once and s not in ahead]
    used = later | {use.name for use in uses_of((*(s.value for s in rest), *results))}
    names = [tuple(s.name for s in stage if s.name in used) for stage in (once, ahead)]
    dtypes = tuple(s.dtype for s in ahead if s.name in used)
    apart = [s for s in once if fixed not in s.varies] + ahead
    rest = ending(tuple(rest), results[0], to, later) if to else rest
    once, ahead, rest, apart = map(language.lines, (once, ahead, rest, apart))
    return Stages(once, ahead, rest, *names, dtypes, apart)


def ending(statements: tuple[Statement, ...], result: Code, name: str, later: frozenset[str]) -> tuple[Statement, ...]:
    """Statements that leave the result under a name of the template's. What is used `later` keeps its own name, too."""
    *before, last = statements or (None,)
    if last is None or last.name != result.text or last.name in later:
        own = [] if result.text == name else [Statement(name, result, None, ())]
        return (*statements, *own)
    return (*before, replace(last, name=name))
