"""What a mod captures, and how to find it again at the next call.

While a mod is traced, whatever it captures is a stand-in (`HostValue`, `HostNumber`). What Python does with stand-ins is recorded as
steps: a read (a closure cell, a global, an attribute, an item) or a computation on the host (`len(table)`, `isinstance(w, int)`,
`window // 2`, `slopes.exp()`). At a later call the steps are repeated on the mod that is passed then, on real objects. The trace is
valid if what decided anything while tracing is as it was; the values found are the kernel's arguments.

    a number that meets the mod's symbols     its type is compared; it becomes a run-time argument of the kernel
    a number that Python used (`if n`)        its value is compared
    a string, None, a dtype                   its value is compared
    an enum member                            its identity is compared, and that the mod reads nothing of it that may change
    a tensor                                  dtype, rank, device and requires_grad are compared
    a function                                its code is compared; what it captures is read in turn
    a function or module of a library         its identity is compared
    any other object                          its class is compared; what the mod reads of it is read in turn

Soundness does not rest on a list of what Python might ask. A stand-in either records an operation or refuses it (`Untrackable`); what
cannot be seen by a stand-in (`is`, `try`, `match`, `import`, ...) is found in the mod's bytecode before it runs (audit.py). A mod that
is refused here is no error: it is traced at every call, on real objects (see trace.py).
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable

import numpy as np
import torch

from ..captured.audit import audited
from ..captured.program import NUMBERS, HostProgram, Untrackable, equal_to, member_guard, number_guard, of_class, same_object
from ..captured.purity import CONSTANTS, PURE_MODULES, is_constant, is_of_a_library, library, library_of
from ..captured.stand_ins import HostNumber, HostValue, State, pinned
from .calls import MEMOIZED, call, host_call, is_tensor, stands_for_its_function


def name_of(mod) -> str:
    """What a mod is called in errors, file names and pictures."""
    name = getattr(mod, "__name__", None)
    return name if isinstance(name, str) else type(mod).__name__


def plain(mod):
    """The function itself of a mod that a recipe has made (mods/_made.py), or that keeps its results; any other mod is itself."""
    if type(mod) is MEMOIZED:
        return plain(mod.__wrapped__)
    return mod.function if stands_for_its_function(mod) else mod


class _Method:
    """A method of a captured object, with the stand-in as its self."""

    __slots__ = ("_function", "_owner")

    def __init__(self, function: HostValue, owner: HostValue) -> None:
        object.__setattr__(self, "_function", function)
        object.__setattr__(self, "_owner", owner)

    def __call__(self, *args, **kwargs):
        return _method_function(self)(_method_owner(self), *args, **kwargs)

    def __getattribute__(self, name):
        raise Untrackable(f"reads {name} of a method")

    def __eq__(self, other):
        raise Untrackable("compares a method")

    def __hash__(self):
        raise Untrackable("uses a method as a key")

    def __bool__(self):
        return True


_method_function = _Method.__dict__["_function"].__get__
_method_owner = _Method.__dict__["_owner"].__get__


class CaptureReader:
    """Gives the mod as a function whose every captured value is a stand-in.

    is_operation   whether a function is one that a mod may apply to its symbols (the op table knows)
    host           runs a function of captured values: (function, args, kwargs, name), by host_call in the end
    """

    def __init__(self, program: HostProgram, is_operation: Callable[[object], bool], host: Callable) -> None:
        self.program, self.is_operation, self.host = program, is_operation, host
        self.members: dict[tuple[int, str], object] = {}  # what was read of library modules

    def root(self):
        """The stand-in of the mod itself (the program's value 0)."""
        return HostValue(State(self, 0, name_of(self.program.values[0])))

    def track(self, value, run: Callable, name: str, source: object = None):
        """The stand-in, or the tensor or constant itself, for a captured `value` that `run(values)` finds again, from `source`."""
        kind = type(value)
        if kind in NUMBERS:
            return HostNumber(State(self, self.program.add(run, value, number_guard(value), name, source), name))
        if isinstance(value, (np.integer, np.floating, np.bool_)):
            return HostNumber(State(self, self.program.add(run, value, of_class(kind), name, source), name))
        if isinstance(value, torch.Tensor):
            if not is_tensor(value):
                return self._refused(f"captures {name}, a {kind.__name__}", name)
            self.program.add_tensor(run, value, name)
            return value
        if isinstance(value, enum.Enum):
            self.program.add(run, value, member_guard(value, self.program.attributes), name)
            return value
        if kind in CONSTANTS:
            self.program.add(run, value, equal_to(value), name)
            return value
        guard = same_object(value) if self.is_the_same(value) else of_class(kind)
        return HostValue(State(self, self.program.add(run, value, guard, name), name))

    def constant(self, value, name: str):
        """What stands for a value that is the same at every call, or is compared elsewhere."""
        return value if is_constant(value) else HostValue(State(self, None, name, constant=value))

    def is_the_same(self, value) -> bool:
        """Is it known by its identity, so that at a later call it is this very object?"""
        if isinstance(value, types.ModuleType) or is_of_a_library(value):
            return True
        return isinstance(value, types.FunctionType) and self.is_operation(value)

    def _refused(self, reason: str, name: str) -> HostValue:
        return HostValue(State(self, None, name, refused=reason))

    def compute(self, function: Callable, args: tuple, kwargs: dict, name: str):
        """A function of captured values: its value now, and again at every call."""
        return host_call(self, function, args, kwargs, name)

    def call(self, state: State, args: tuple, kwargs: dict):
        """A captured object is called."""
        return call(state, args, kwargs)

    def attribute(self, state: State, name: str):
        """An attribute of a captured object: read now, and again at every call."""
        value, at = state.value, state.place
        if type(value) is dict and name == "keys":
            return lambda: self.keys(state)
        with torch._C.DisableTorchFunction():
            found = getattr(value, name)
        if at is None and isinstance(value, (torch.finfo, torch.iinfo)):
            return self.constant(found, name)
        constant = state.constant
        run = (lambda values: getattr(values[at], name)) if at is not None else (lambda values: getattr(constant, name))
        if isinstance(value, types.ModuleType) and library(value.__name__) in PURE_MODULES | {"functools", "itertools"}:
            key = id(value), name
            if key not in self.members:
                member = self.track(found, run, name)
                self.members[key] = pinned(member) if type(found) in NUMBERS else member  # math.inf is a constant
            return self.members[key]
        if isinstance(found, types.MethodType) and found.__self__ is value and isinstance(found.__func__, types.FunctionType):
            place = self.program.add(run, found, of_class(types.MethodType), name)
            self.program.add(lambda values: values[place].__self__ is values[at], True, bool, f"{name} is its own method")
            function = self.track(found.__func__, lambda values: values[place].__func__, name)
            return _Method(function, HostValue(state))
        return self.track(found, run, name, ("attribute", id(value), name))

    def keys(self, state: State) -> list:
        """The keys of a captured dict, which are compared."""
        keys, at = list(state.value), state.place
        if not all(type(k) in (str, int, bool, float, type(None)) for k in keys):
            raise Untrackable(f"iterates over {state.name}, a dict with keys that are not strings or numbers")
        expected = [(type(k), k) for k in keys]
        self.program.add(
            lambda values: [(type(k), k) for k in values[at]], expected, lambda found: found == expected, f"keys of {state.name}"
        )
        return keys

    def stand_in_function(self, state: State) -> types.FunctionType:
        """A function with the code of a captured one, whose cells, globals and defaults are stand-ins."""
        function, at = state.value, state.place
        code, facts = function.__code__, audited(function.__code__)
        if facts.refused:
            raise Untrackable(facts.refused)
        self.program.attributes |= facts.attributes
        count = len(function.__defaults__ or ())
        self.program.guard(
            at,
            lambda f: type(f) is types.FunctionType and (f.__code__ is code or f.__code__ == code) and len(f.__defaults__ or ()) == count,
        )
        cells = tuple(types.CellType() for _ in code.co_freevars)
        namespace: dict[str, object] = {"__builtins__": {}}
        tracked = types.FunctionType(code, namespace, function.__name__, None, cells)
        for i, name in enumerate(code.co_freevars):
            try:
                value = function.__closure__[i].cell_contents
            except ValueError:
                continue  # not assigned yet: reading it raises NameError in the mod, as in Python
            source = "cell", id(function.__closure__[i])
            cells[i].cell_contents = self.track(value, lambda values, i=i: values[at].__closure__[i].cell_contents, name, source)
        builtins = _builtins_of(function)
        others = {}
        for name in sorted(facts.globals):
            if name in function.__globals__:
                source = "global", id(function.__globals__), name
                namespace[name] = self.track(function.__globals__[name], lambda values, g=name: values[at].__globals__[g], name, source)
            else:
                others[name] = builtins.get(name, _builtins_of)  # a name that is nowhere: reading it raises NameError in the mod
                if name in builtins:
                    namespace[name] = self.constant(builtins[name], name)
        if others:  # builtins today: they must not be hidden by globals, or be others, tomorrow
            self.program.add(lambda values: _finds_builtins(values[at], others), True, bool, f"{state.name} builtins")
        names = code.co_varnames[code.co_argcount - count : code.co_argcount]
        tracked.__defaults__ = (
            tuple(
                self.track(value, lambda values, i=i: values[at].__defaults__[i], names[i])
                for i, value in enumerate(function.__defaults__ or ())
            )
            or None
        )
        if function.__kwdefaults__:
            named = function.__kwdefaults__
            keys = list(named)
            self.program.add(lambda values: list(values[at].__kwdefaults__ or ()), keys, lambda found: found == keys, "keyword defaults")
            tracked.__kwdefaults__ = {k: self.track(v, lambda values, k=k: values[at].__kwdefaults__[k], k) for k, v in named.items()}
        return tracked


def check_methods(attributes: set[str]) -> None:
    """Raises Untrackable if one of these is what the program itself has put into torch.Tensor: captured tensors are no stand-ins."""
    for name in attributes & vars(torch.Tensor).keys():
        found = vars(torch.Tensor)[name]
        function = found.fget if isinstance(found, property) else found
        if not hasattr(found, "__get__") or isinstance(function, types.FunctionType) and library_of(function) != "torch":
            raise Untrackable(f"reads {name} of tensors, which is not torch's own")


def _builtins_of(function: types.FunctionType) -> dict:
    found = function.__globals__.get("__builtins__", {})
    return found if isinstance(found, dict) else vars(found)


def _finds_builtins(function: types.FunctionType, expected: dict) -> bool:
    """Does a function find these values under their names, and not among its globals?"""
    names, builtins = function.__globals__, _builtins_of(function)
    return all(name not in names and builtins.get(name, _builtins_of) is value for name, value in expected.items())
