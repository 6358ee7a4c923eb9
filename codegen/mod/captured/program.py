"""The recorded steps of a trace: what finds the values that a mod captures again, under guards that say whether the trace still fits."""

from __future__ import annotations

import enum
import math
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

NUMBERS = (int, float, bool)
UNKNOWN_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}  # of torch's compiler, and what they stand for
_LONGEST_LABEL = 24
_MOST_STEPS = 2000


class Untrackable(Exception):
    """The mod does something that cannot be repeated step by step. The message says what, with its line."""


@dataclass(slots=True)
class Step:
    """One read or computation: `run(values)` gives its value, `guard(value)` says whether the trace still fits.

    source   where a read finds a number: two reads of one source give one value
    made     what a computation computes, and of what; None for a read
    pinned   is the value part of the trace?
    """

    run: Callable
    guard: Callable
    describe: str
    source: object = None
    made: Made | None = None
    pinned: bool = False

    @property
    def called(self) -> str:
        """What its value is called: as what is captured, or a name that says what is made of that."""
        return self.made.name if self.made and self.made.name else self.describe

    @property
    def label(self) -> str:
        """What a kernel's argument is called: the same, if that is no long word."""
        return self.called if len(self.called) <= _LONGEST_LABEL else self.describe


@dataclass(frozen=True, slots=True)
class Made:
    """A computation: what its result is called, such as w_floordiv_2; the places of the values that it is of; and Python for it with a {}
    for each of these, or "" where there is none."""

    name: str
    places: tuple[int, ...]
    formula: str


class HostProgram:
    """The recorded steps of one trace, in order. A step's place is the index of its value in `values`; the mod itself is at 0."""

    def __init__(self, root) -> None:
        self.steps: list[Step] = []
        self.values: list = [root]
        self.root_guard = of_class(type(root))
        self.attributes: set[str] = set()  # names that the mod's code reads of objects
        self._aliases: dict[int, int] = {}  # id of a tensor -> the step that found it first
        self.computes = False  # tensors, of what is captured

    def add(self, run: Callable, value, guard: Callable, describe: str, source: object = None) -> int:
        """Remember one step with the value that it gave during the trace; returns its place."""
        if len(self.steps) >= _MOST_STEPS:
            raise Untrackable(f"reads more than {_MOST_STEPS} captured values")
        self.steps.append(Step(run, guard, describe, source))
        self.values.append(value)
        return len(self.steps)

    def guard(self, place: int, guard: Callable) -> None:
        """From now on the step at `place` must give what `guard` accepts."""
        if place:
            self.steps[place - 1].guard = guard
        else:
            self.root_guard = guard

    def pin(self, place: int) -> object:
        """From now on the value of this step is part of the signature (Python itself used it)."""
        value = self.values[place]
        self.steps[place - 1].pinned = True
        self.guard(place, same_number(value) if isinstance(value, NUMBERS) else equal_to(value))
        return value

    def add_tensor(self, run: Callable, tensor: torch.Tensor, describe: str) -> int:
        """A step that gives a tensor; finding the same tensor twice is remembered, and guarded, as the same one."""
        place = self.add(run, tensor, tensor_guard(tensor, self.attributes), describe)
        first = self._aliases.setdefault(id(tensor), place)
        if first != place:
            self.add(lambda values: values[place] is values[first], True, bool, f"{describe} is one tensor")
        return first

    def place_of(self, tensor: torch.Tensor) -> int | None:
        return self._aliases.get(id(tensor))

    def finish(self) -> list:
        """The values of the trace. The program outlives its first call; they must not."""
        values, self.values, self._aliases = self.values, [], {}
        if not self.root_guard(values[0]) or not all(step.guard(value) for step, value in zip(self.steps, values[1:], strict=True)):
            raise Untrackable("captures something that changes while it is read")
        self._pairs = [(step.run, step.guard) for step in self.steps]
        self.computes = any(step.made and isinstance(value, torch.Tensor) for step, value in zip(self.steps, values[1:], strict=True))
        return values

    def run(self, root) -> list | None:
        """Repeat every step for `root`: the values, or None if a guard fails and the trace does not fit."""
        if not self.root_guard(root):
            return None
        values: list = [root]
        try:
            for run, guard in self._pairs:
                value = run(values)
                if not guard(value):
                    return None
                values.append(value)
        except Exception:  # what was captured has another structure now, or a computation fails: tracing will tell
            return None
        return values


def fits_int32(value) -> bool:
    """May this number be an argument of a kernel? Of an int, that is."""
    return type(value) is not int or -(1 << 31) <= value < 1 << 31


# Guards


def number_guard(number) -> Callable:
    """Guards the type of a number that stays symbolic, and that an int fits into 32 bits if it does now."""
    kind = type(number)
    if kind is not int:
        return lambda value: type(value) is kind
    if fits_int32(number):
        return lambda value: type(value) is int and -2147483648 <= value <= 2147483647
    return lambda value: type(value) is int


def same_number(expected) -> Callable:
    kind = type(expected)
    if expected != expected:
        return lambda value: type(value) is kind and value != value
    sign = math.copysign(1.0, expected) if kind is float else 0
    return lambda value: type(value) is kind and value == expected and (kind is not float or math.copysign(1.0, value) == sign)


def equal_to(expected) -> Callable:
    if expected is None:
        return lambda value: value is None
    kind = type(expected)
    if kind is complex:
        parts = same_number(expected.real), same_number(expected.imag)
        return lambda value: type(value) is complex and parts[0](value.real) and parts[1](value.imag)
    if kind is slice:
        expected = _parts_of(expected)
        return lambda value: type(value) is slice and _parts_of(value) == expected
    return lambda value: type(value) is kind and value == expected


def member_guard(member: enum.Enum, attributes: set[str]) -> Callable:
    """Guards a member of an enumeration. It is no stand-in, so the mod must use nothing of it that is computed or may be set.

    attributes   names that the mod reads of objects
    """
    kind, own, operators = type(member), {name for name in vars(member) if not name.startswith("_")}, False
    for base in kind.__mro__:
        if base.__module__ not in ("enum", "builtins"):
            own |= {name for name in vars(base) if not name.startswith("_") and name not in kind.__members__}
            operators |= any(map(_is_operator, vars(base).values()))
    if not _is_plain(member._value_):
        own |= {"value", "_value_"}
    return lambda value: value is member and not operators and own.isdisjoint(attributes)


def _is_operator(found) -> bool:
    """Is it a user's function that Python calls by itself, and not to make or to show the member?"""
    if not isinstance(found, types.FunctionType) or found.__module__ == "enum":
        return False
    return found.__name__.startswith("__") and found.__name__ not in _MAKING_OR_SHOWING


_MAKING_OR_SHOWING = {"__new__", "__init__", "__init_subclass__", "__repr__", "__str__", "__format__", "__hash__"}


def _is_plain(value) -> bool:
    """Is it a value that nobody can change?"""
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in (*NUMBERS, str, bytes, complex, type(None))


def _parts_of(value: slice) -> tuple:
    return tuple((type(part), part) for part in (value.start, value.stop, value.step))


def same_object(expected) -> Callable:
    return lambda value: value is expected


def of_class(kind: type) -> Callable:
    """The class is compared, and not kept alive: it may hold anything."""
    if kind.__module__ == "builtins":
        return lambda value: type(value) is kind
    reference = weakref.ref(kind)
    return lambda value: type(value) is reference()


def tensor_guard(tensor: torch.Tensor, attributes: set[str]) -> Callable:
    """attributes   names that the mod reads of objects: a tensor must not carry one of its own, which nobody would see it read"""
    kind, dtype, ndim, device, needs_grad = type(tensor), tensor.dtype, tensor.ndim, tensor.device, tensor.requires_grad
    return lambda t: (
        type(t) is kind
        and t.dtype is dtype
        and t.ndim == ndim
        and t.device == device
        and t.requires_grad == needs_grad
        and (not attributes or attributes.isdisjoint(t.__dict__))
    )
