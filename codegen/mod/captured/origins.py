"""Where the values that a mod captures come from: what steps are called, and which of them Python can repeat elsewhere.

A mod that captures w and reads `w // 2` has a kernel with an argument w_floordiv_2. An exported file takes w, and computes it.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..operators import SYMBOLS, UNARY
from .program import NUMBERS, HostProgram, Made
from .stand_ins import is_stand_in, state_of

_LONGEST_NAME = 40
_IN_PYTHON = (abs, bool, float, int, len, max, min, pow, round)
_OF_TYPES = (callable, hasattr, isinstance, issubclass, type)  # which are compared elsewhere
_SHAPE = torch.Tensor.shape.__get__
_SILENT = {"call", "getitem", "item", "called"}  # what these give is called as what they are given


def made_of(program: HostProgram, function: Callable, args: tuple, kwargs: dict) -> Made:
    """What a computation computes, and of what."""
    every = () if function in _OF_TYPES else (*args, *kwargs.values())
    words = [_operand(program, arg) for arg in args]
    formula = "" if kwargs or "" in words else _formula(function, words)
    return Made(_name(program, function, every), tuple(_places(program, every)), formula)


def _name(program: HostProgram, function: Callable, args: tuple) -> str:
    """What a result is called: w_floordiv_2, ls_exp, cfg_window, cap_reciprocal; mul_2_c, as names begin with letters."""
    if function is operator.truediv and type(args[0]) in NUMBERS and args[0] == 1:
        return f"{_word(program, args[1])}_reciprocal"
    verb = getattr(function, "__name__", "")
    verb = (function.__self__.__name__ if verb == "__get__" else verb).strip("_")
    words = [word for word in (_word(program, arg) for arg in args) if word]
    first = words[:1] if words and words[0][0].isalpha() else []
    words = [*first, *([] if verb in _SILENT else [verb]), *words[len(first) :]]
    return "_".join(words)[:_LONGEST_NAME].strip("_").lower()


def _word(program: HostProgram, arg) -> str:
    if is_stand_in(arg):
        place = state_of(arg).place
        return program.steps[place - 1].called if place else state_of(arg).name
    if isinstance(arg, torch.Tensor):
        place = program.place_of(arg)
        return program.steps[place - 1].called if place else ""
    if isinstance(arg, (tuple, list)):
        return "_".join(filter(None, (_word(program, a) for a in arg)))
    return re.sub(r"\W+", "_", str(arg)).strip("_") if isinstance(arg, (str, *NUMBERS)) else ""


def _operand(program: HostProgram, arg) -> str:
    """An argument as Python; "" for one that is neither a number nor a value of the program."""
    if next(_places(program, (arg,)), None) is not None and not isinstance(arg, (tuple, list, dict)):
        return "{}"
    if type(arg) not in NUMBERS or not math.isfinite(arg):
        return ""
    return f"({arg!r})" if arg < 0 else repr(arg)


def _places(program: HostProgram, args):
    """Where in the program values are that arguments hold."""
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from _places(program, arg)
        elif isinstance(arg, dict):
            yield from _places(program, (*arg, *arg.values()))
        elif isinstance(arg, slice):
            yield from _places(program, (arg.start, arg.stop, arg.step))
        else:
            place = state_of(arg).place if is_stand_in(arg) else program.place_of(arg) if isinstance(arg, torch.Tensor) else None
            if place is not None:
                yield place


def _formula(function: Callable, words: list[str]) -> str:
    """Python for a function of numbers, the sizes of a tensor, or an element of its shape; "" for any other."""
    name = getattr(function, "__name__", "")
    if function is operator.getitem and words[1] != "{}":
        return f"{{}}[{words[1]}]"
    if getattr(operator, name, None) is function:
        if name in SYMBOLS:
            return f"({words[0]} {SYMBOLS[name]} {words[1]})" if len(words) == 2 else f"({SYMBOLS[name]}{words[0]})"
        return f"{name}({words[0]})" if name in UNARY and hasattr(builtins, name) else ""
    if function == _SHAPE:
        return "{}.shape"
    if function is torch.Tensor.size and len(words) > 1:
        return f"{{}}.size({words[1]})"
    if function is torch.Tensor.__len__:
        return "len({})"
    library = "math." if getattr(math, name, None) is function else "" if getattr(builtins, name, None) is function else None
    return "" if library is None or (not library and function not in _IN_PYTHON) else f"{library}{name}({', '.join(words)})"


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a value comes from: it is captured, or made by `formula` of `parts`, a {} for each. One capture has one Origin.

    beside   of a captured one: captures that it is made of in another way than by a formula
    source   the variable that it is read from, of all mods
    """

    name: str
    value: object
    formula: str = ""
    parts: tuple[Origin, ...] = ()
    beside: tuple[Origin, ...] = ()
    source: object = None


@dataclass(frozen=True)
class Origins:
    """Of the tensors and numbers of a graph, in its order; and what a trace decided by the values of others, as a captured number that an
    `if` asks for: origins whose value must stay as it is."""

    captured: tuple[Origin, ...]
    pinned: tuple[Origin, ...] = ()


def origins_of(program: HostProgram, values: list, tensors: tuple[int, ...], numbers: tuple[int, ...]) -> Origins:
    """Of what is at these places of a trace's program, with its values."""
    return _Search(program, values, frozenset(tensors)).all(tensors, numbers)


class _Search:
    def __init__(self, program: HostProgram, values: list, tensors: frozenset[int]) -> None:
        self.steps, self.values, self.tensors = program.steps, values, tensors
        self.found: dict[int, Origin | None] = {}
        self.by_source: dict[object, Origin] = {}

    def all(self, tensors: tuple[int, ...], numbers: tuple[int, ...]) -> Origins:
        captured = tuple(self.of(place) for place in (*tensors, *numbers))
        pinned: dict[int, Origin] = {}
        for place, step in enumerate(self.steps, 1):
            if step.pinned:
                origin = self.of(place)
                for one in (origin, *origin.beside):
                    pinned[id(one)] = one
        return Origins(captured, tuple(pinned.values()))

    def of(self, place: int) -> Origin | None:
        """The origin of a number, of a tensor that is a kernel's argument, or of the shape of one; None for any other value."""
        if place not in self.found:
            self.found[place] = self._of(place)
        return self.found[place]

    def _of(self, place: int) -> Origin | None:
        step, value = self.steps[place - 1], self.values[place]
        parts = tuple(self.of(part) for part in step.made.places) if step.made else ()
        if step.made and step.made.formula and None not in parts:
            return Origin(step.called, value, step.made.formula, parts)
        if place not in self.tensors and type(value) not in NUMBERS:
            return None
        # what is found by an object's id is the same while this trace lasts; variables outlive it
        variable = step.source if step.source is not None and step.source[0] in ("cell", "global") else None
        made = Origin(step.called, value, beside=tuple(self._captures(place)), source=variable)
        return made if step.source is None else self.by_source.setdefault(step.source, made)

    def _captures(self, place: int):
        """The captured numbers and tensors that a value is made of."""
        made = self.steps[place - 1].made
        for part in made.places if made else ():
            origin = self.of(part)
            for root in roots(origin) if origin else ():
                yield from root.beside or (root,)
            if origin is None:
                yield from self._captures(part)


def roots(origin: Origin):
    """What its formula takes, and those of its parts: itself, if it has none."""
    if not origin.formula:
        yield origin
    for part in origin.parts:
        yield from roots(part)
