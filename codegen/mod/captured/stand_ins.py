"""Stand-ins for what a mod captures, while it is traced: whatever Python does with them is recorded, or refused.

What is read of a stand-in, computed from it or called is left to its reader (capture.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..current import Symbolic, applied
from ..operators import BINARY, COMPARISONS, UNARY, function_of
from .program import HostProgram, Made, Untrackable, number_guard, same_object


class Reader(Protocol):
    """Who answers what is asked of a stand-in, and makes the stand-ins of what is found: capture.CaptureReader.

    compute    a function of captured values: its value now, and again at every call
    host       the same, for a run to look at first
    call       a captured object is called
    attribute  one of a captured object
    keys       those of a captured dict
    is_the_same   whether a value is known by its identity
    track      the stand-in for a value that a step of the program finds again, from the `source` that is given
    constant   what stands for a value that is the same at every call
    """

    program: HostProgram
    is_operation: Callable[[object], bool]
    host: Callable

    def compute(self, function: Callable, args: tuple, kwargs: dict, name: str): ...
    def call(self, state: State, args: tuple, kwargs: dict): ...
    def attribute(self, state: State, name: str): ...
    def keys(self, state: State) -> list: ...
    def is_the_same(self, value) -> bool: ...
    def track(self, value, run: Callable, name: str, source: object = None): ...
    def constant(self, value, name: str): ...
    def stand_in_function(self, state: State) -> Callable: ...


@dataclass(slots=True)
class State:
    """What a stand-in stands for: the value at `place` of the program, or for a place of None a constant."""

    reader: Reader
    place: int | None
    name: str
    constant: object = None
    refused: str = ""
    function: Callable | None = None  # the function to run instead, once it was called

    @property
    def value(self):
        if self.refused:
            raise Untrackable(self.refused)
        return self.constant if self.place is None else self.reader.program.values[self.place]


class HostValue:
    """A captured object while a mod is traced. Every operation on it is recorded, or refused."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        _set_state(self, state)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return applied(function, args, kwargs or {})

    def __getattribute__(self, name):
        if name in ("__class__", "__torch_function__"):  # isinstance and torch ask; a mod that does is refused by the audit
            return object.__getattribute__(self, name)
        state = state_of(self)
        return state.reader.attribute(state, name)

    def __setattr__(self, name, value):
        raise Untrackable(f"sets {state_of(self).name}.{name}")

    def __delattr__(self, name):
        raise Untrackable(f"deletes {state_of(self).name}.{name}")

    def __call__(self, *args, **kwargs):
        state = state_of(self)
        return state.reader.call(state, args, kwargs)

    def __getitem__(self, key):
        return _step(self, operator.getitem, self, key)

    def __len__(self):
        return pinned(_step(self, len, self))

    def __contains__(self, item):
        return pinned(_step(self, operator.contains, self, item))

    def __bool__(self):
        return pinned(_step(self, bool, self))

    def __int__(self):
        return pinned(_step(self, int, self))

    def __float__(self):
        return pinned(_step(self, float, self))

    def __index__(self):
        return pinned(_step(self, operator.index, self))

    def __str__(self):
        return _step(self, str, self)

    def __repr__(self):
        return _step(self, repr, self)

    def __format__(self, spec):
        return _step(self, format, self, spec)

    def __hash__(self):
        raise Untrackable(f"uses {state_of(self).name} as a key")

    def __iter__(self):
        state = state_of(self)
        if isinstance(state.value, (list, tuple)) and _is_read_as_usual(type(state.value)):
            return (self[i] for i in range(len(self)))
        if type(state.value) is dict:
            return iter(state.reader.keys(state))
        raise Untrackable(f"iterates over {state.name}, a {type(state.value).__name__}")


def _is_read_as_usual(cls: type) -> bool:
    """Does iteration over such a list or tuple give what its indices do, one after another?"""
    own = [getattr(cls, name) for name in ("__iter__", "__getitem__", "__len__")]
    return any(own == [getattr(usual, name) for name in ("__iter__", "__getitem__", "__len__")] for usual in (list, tuple))


class HostNumber(HostValue):
    """A captured number while a mod is traced: still symbolic, until Python itself asks for its value.

    Arithmetic between host numbers is repeated at every call, on the host, in Python's own precision.
    """

    __slots__ = ()

    def __bool__(self):
        return bool(pinned(self))

    def __int__(self):
        return int(pinned(self))

    def __float__(self):
        return float(pinned(self))

    def __index__(self):
        state = state_of(self)
        if not isinstance(state.value, int):
            raise TypeError(f"{state.name} is a float where Python needs an integer")
        return int(pinned(self))

    def __hash__(self):
        return hash(pinned(self))


state_of = HostValue.__dict__["_state"].__get__
_set_state = HostValue.__dict__["_state"].__set__


def is_stand_in(value) -> bool:
    return type(value) in (HostValue, HostNumber)


def as_python(value):
    """The plain Python number behind a HostNumber, without pinning it, or of a NumPy scalar."""
    number = state_of(value).value if type(value) is HostNumber else value
    return number.item() if isinstance(number, np.generic) else number


def plain_place(number: HostNumber) -> int:
    """The place of a HostNumber as a Python number, which kernels take."""
    state = state_of(number)
    if not isinstance(state.value, np.generic):
        return state.place
    plain, at, program = state.value.item(), state.place, state.reader.program
    step = program.steps[at - 1]
    place = program.add(lambda values: values[at].item(), plain, number_guard(plain), state.name, step.source or ("number", at))
    program.steps[place - 1].made = Made(step.called, (at,), "")
    return place


def value_of(value):
    """What a stand-in stands for; anything else itself."""
    return state_of(value).value if is_stand_in(value) else value


def pinned(value):
    """The plain value behind a stand-in, from now on part of the signature."""
    if not is_stand_in(value):
        return value  # a constant: compared already
    state = state_of(value)
    if type(value) is HostValue:
        raise Untrackable(f"uses the value of {state.name}, a {type(state.value).__name__}")
    if isinstance(state.value, np.generic):
        raise Untrackable(f"uses the value of {state.name}, a NumPy number")
    return state.reader.program.pin(state.place)


def same_one(value):
    """The object behind a stand-in, from now on this very object; anything else itself."""
    if not is_stand_in(value):
        return value
    state = state_of(value)
    if state.place is not None:
        state.reader.program.guard(state.place, same_object(state.value))
    return state.value


def _step(stand_in: HostValue, function: Callable, *args):
    state = state_of(stand_in)
    return state.reader.compute(function, args, {}, state.name)


def _binary(function: Callable, reflected: bool) -> Callable:
    def method(self, other):
        if isinstance(other, (Symbolic, torch.Tensor)):
            return NotImplemented  # a symbol or a tensor takes over from here
        return _step(self, function, *((other, self) if reflected else (self, other)))

    return method


def _unary(function: Callable) -> Callable:
    return lambda self, *args: _step(self, function, self, *args)


def _refusal(name: str) -> Callable:
    def method(self, *_):
        raise Untrackable(f"changes {state_of(self).name} in place ({name})")

    return method


for _name in (*BINARY, "matmul"):
    setattr(HostValue, f"__{_name}__", _binary(function_of(_name), reflected=False))
    setattr(HostValue, f"__r{_name}__", _binary(function_of(_name), reflected=True))
    setattr(HostValue, f"__i{_name}__", _refusal(f"__i{_name}__"))
    setattr(HostNumber, f"__i{_name}__", _binary(function_of(_name), reflected=False))
for _name in COMPARISONS:
    setattr(HostValue, f"__{_name}__", _binary(function_of(_name), reflected=False))
HostValue.__divmod__ = _binary(divmod, reflected=False)
HostValue.__rdivmod__ = _binary(divmod, reflected=True)
for _name in UNARY:
    setattr(HostValue, f"__{_name}__", _unary(function_of(_name)))
for _function in (round, math.trunc, math.floor, math.ceil, reversed):
    setattr(HostValue, f"__{_function.__name__}__", _unary(_function))
for _name in ("setitem", "delitem", "enter", "exit", "next", "await"):
    setattr(HostValue, f"__{_name}__", _refusal(f"__{_name}__"))
