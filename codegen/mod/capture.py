"""What a mod captures, and how to find it again at the next call.

While a mod is traced, whatever it captures is a stand-in (`HostValue`, `HostNumber`). What Python does with stand-ins is recorded as
steps: a read (a closure cell, a global, an attribute, an item) or a computation on the host (`len(table)`, `isinstance(w, int)`,
`window // 2`, `slopes.exp()`). At a later call the steps are repeated on the mod that is passed then, on real objects. The trace is
valid if what decided anything while tracing is as it was; the values found are the kernel's arguments.

    a number that meets the mod's symbols     its type is compared; it becomes a run-time argument of the kernel
    a number that Python used (`if n`)        its value is compared
    a string, None, a dtype, an enum member   its value is compared
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
import functools
import math
import operator
import re
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .audit import audited

NUMBERS = (int, float, bool)
_CONSTANTS = {str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex, type(...), slice}
_TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_MOST_STEPS = 2000


class Symbolic:
    """What is known only inside the kernel: symbols, and captured tensors indexed by some."""

    __slots__ = ()


class Untrackable(Exception):
    """The mod does something that cannot be repeated step by step. The message says what, with its line."""


@dataclass(slots=True)
class Step:
    """One read or computation: `run(values)` gives its value, `guard(value)` says whether the trace still fits."""

    run: Callable
    guard: Callable
    describe: str


class HostProgram:
    """The recorded steps of one trace, in order. A step's place is the index of its value in `values`; the mod itself is at 0."""

    def __init__(self, root) -> None:
        self.steps: list[Step] = []
        self.values: list = [root]
        self.root_guard = _of_class(type(root))
        self.attributes: set[str] = set()  # names that the mod's code reads of objects
        self._aliases: dict[int, int] = {}  # id of a tensor -> the step that found it first

    def add(self, run: Callable, value, guard: Callable, describe: str) -> int:
        """Remember one step with the value that it gave during the trace; returns its place."""
        if len(self.steps) >= _MOST_STEPS:
            raise Untrackable(f"reads more than {_MOST_STEPS} captured values")
        self.steps.append(Step(run, guard, describe))
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
        self.guard(place, same_number(value) if isinstance(value, NUMBERS) else _equal_to(value))
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


def name_of(mod) -> str:
    """What a mod is called in errors, file names and pictures."""
    name = getattr(mod, "__name__", None)
    return name if isinstance(name, str) else type(mod).__name__


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


def _equal_to(expected) -> Callable:
    if expected is None:
        return lambda value: value is None
    kind = type(expected)
    if kind is slice:
        expected = _parts_of(expected)
        return lambda value: type(value) is slice and _parts_of(value) == expected
    return lambda value: type(value) is kind and value == expected


def _parts_of(value: slice) -> tuple:
    return tuple((type(part), part) for part in (value.start, value.stop, value.step))


def _same(expected) -> Callable:
    return lambda value: value is expected


def _of_class(kind: type) -> Callable:
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
        and attributes.isdisjoint(t.__dict__)
    )


# Stand-ins


@dataclass(slots=True)
class State:
    """What a stand-in stands for: the value at `place` of the program, or for a place of None a constant."""

    reader: CaptureReader
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
        from .dispatch import dispatch

        return dispatch(function, args, kwargs or {})

    def __getattribute__(self, name):
        if name in ("__class__", "__torch_function__"):  # isinstance and torch ask; a mod that does is refused by the audit
            return object.__getattribute__(self, name)
        return _attribute(_state_of(self), name)

    def __setattr__(self, name, value):
        raise Untrackable(f"sets {_state_of(self).name}.{name}")

    def __delattr__(self, name):
        raise Untrackable(f"deletes {_state_of(self).name}.{name}")

    def __call__(self, *args, **kwargs):
        return _call(_state_of(self), args, kwargs)

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
        raise Untrackable(f"uses {_state_of(self).name} as a key")

    def __iter__(self):
        state = _state_of(self)
        if type(state.value) in (list, tuple) or isinstance(state.value, tuple):
            return (self[i] for i in range(len(self)))
        if type(state.value) is dict:
            return iter(_keys(state))
        raise Untrackable(f"iterates over {state.name}, a {type(state.value).__name__}")


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
        state = _state_of(self)
        if not isinstance(state.value, int):
            raise TypeError(f"{state.name} is a float where Python needs an integer")
        return int(pinned(self))

    def __hash__(self):
        return hash(pinned(self))


_state_of = HostValue.__dict__["_state"].__get__
_set_state = HostValue.__dict__["_state"].__set__


def _is_stand_in(value) -> bool:
    return type(value) in (HostValue, HostNumber)


def label_of(number: HostNumber) -> str:
    return _state_of(number).name


def as_python(value):
    """The plain Python number behind a HostNumber, without pinning it."""
    if type(value) is not HostNumber:
        return value
    number = _state_of(value).value
    return number.item() if isinstance(number, np.generic) else number


def plain_place(number: HostNumber) -> int:
    """The place of a HostNumber as a Python number, which kernels take."""
    state = _state_of(number)
    if not isinstance(state.value, np.generic):
        return state.place
    plain, at = state.value.item(), state.place
    return state.reader.program.add(lambda values: values[at].item(), plain, number_guard(plain), state.name)


def value_of(value):
    """What a stand-in stands for; anything else itself."""
    return _state_of(value).value if _is_stand_in(value) else value


def pinned(value):
    """The plain value behind a stand-in, from now on part of the signature."""
    if not _is_stand_in(value):
        return value  # a constant: compared already
    state = _state_of(value)
    if type(value) is HostValue:
        raise Untrackable(f"uses the value of {state.name}, a {type(state.value).__name__}")
    if isinstance(state.value, np.generic):
        raise Untrackable(f"uses the value of {state.name}, a NumPy number")
    return state.reader.program.pin(state.place)


def _step(stand_in: HostValue, function: Callable, *args):
    state = _state_of(stand_in)
    return host_call(state.reader, function, args, {}, state.name)


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
        raise Untrackable(f"changes {_state_of(self).name} in place ({name})")

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"):
    _function = getattr(operator, f"{_name}_", None) or getattr(operator, _name)
    setattr(HostValue, f"__{_name}__", _binary(_function, reflected=False))
    setattr(HostValue, f"__r{_name}__", _binary(_function, reflected=True))
    setattr(HostValue, f"__i{_name}__", _refusal(f"__i{_name}__"))
    setattr(HostNumber, f"__i{_name}__", _binary(_function, reflected=False))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(HostValue, f"__{_name}__", _binary(getattr(operator, _name), reflected=False))
HostValue.__divmod__ = _binary(divmod, reflected=False)
HostValue.__rdivmod__ = _binary(divmod, reflected=True)
for _name in ("neg", "pos", "abs", "invert"):
    setattr(HostValue, f"__{_name}__", _unary(getattr(operator, _name)))
for _name, _function in (("round", round), ("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil), ("reversed", reversed)):
    setattr(HostValue, f"__{_name}__", _unary(_function))
for _name in ("setitem", "delitem", "enter", "exit", "next", "await"):
    setattr(HostValue, f"__{_name}__", _refusal(f"__{_name}__"))


# Operations on captured values alone


def host_call(reader: CaptureReader, function: Callable, args: tuple, kwargs: dict, name: str):
    """Run `function` on captured values now, and remember to run it again at every call. Returns what tracing goes on with."""
    program = reader.program
    positional = [_source(program, a) for a in args]
    named = {k: _source(program, v) for k, v in kwargs.items()}

    def call(values):
        return function(*[get(values) for get in positional], **{k: get(values) for k, get in named.items()})

    places = [getattr(get, "place", None) for get in positional]
    run = call
    if not named and None not in places:
        if len(places) == 1:
            (first,) = places
            run = lambda values: function(values[first])
        elif len(places) == 2:
            first, second = places
            run = lambda values: function(values[first], values[second])
    with torch._C.DisableTorchFunction():
        result = call(program.values)
    return reader.track(result, run, name)


class _Place:
    """Finds a value of the program again."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, values):
        return values[self.place]


def _source(program: HostProgram, arg) -> Callable:
    """What gives an argument of a host computation from the program's values."""
    kind = type(arg)
    if _is_stand_in(arg):
        state = _state_of(arg)
        value = state.value
        return _Place(state.place) if state.place is not None else lambda _: value
    if isinstance(arg, torch.Tensor) and type(arg) in _TENSORS:
        place = program.place_of(arg)
        if place is not None:
            return _Place(place)
    elif kind in (list, tuple, torch.Size):
        items = [_source(program, a) for a in arg]
        return lambda values: kind(get(values) for get in items)
    elif kind is dict:
        pairs = [(_source(program, k), _source(program, v)) for k, v in arg.items()]
        return lambda values: {k(values): v(values) for k, v in pairs}
    elif kind is slice:
        start, stop, step = (_source(program, a) for a in (arg.start, arg.stop, arg.step))
        return lambda values: slice(start(values), stop(values), step(values))
    elif _is_constant(arg) or isinstance(arg, enum.Enum):
        return lambda _: arg
    raise Untrackable(f"passes a {kind.__name__} to a function on the host")


_IMPURE = re.compile(
    r"i(add|sub|mul|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift|concat)$|setitem|delitem|rand|normal"
    r"|bernoulli|multinomial|poisson|binomial|dropout|rrelu|gumbel|empty|seed|manual_seed|set_"
)
_PURE_MODULES = {"math", "cmath", "operator", "_operator", "torch", "numpy"}
_PURE_BUILTINS = {
    abs,
    bool,
    bytes,
    callable,
    chr,
    complex,
    dict,
    divmod,
    float,
    format,
    frozenset,
    getattr,
    hasattr,
    hash,
    int,
    isinstance,
    issubclass,
    len,
    max,
    min,
    ord,
    pow,
    repr,
    round,
    set,
    slice,
    str,
    sum,
    type,
    torch.Size,
    torch.device,
}
_PURE_METHODS = {
    "get",
    "keys",
    "values",
    "items",
    "index",
    "count",
    "copy",
    "format",
    "join",
    "split",
    "startswith",
    "endswith",
    "lower",
    "upper",
    "strip",
    "replace",
    "bit_length",
    "is_integer",
    "conjugate",
    "most_common",
    "union",
    "intersection",
}
# C functions that only use the operators of their arguments: stand-ins see what they do
_ITERATORS = (all, any, enumerate, filter, list, map, range, reversed, sorted, tuple, zip)
_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "neg",
    "pos",
    "abs",
    "invert",
    "not_",
    "truth",
    "getitem",
    "contains",
    "index",
)
_BY_OPERATORS = (
    abs,
    bool,
    divmod,
    float,
    int,
    len,
    max,
    min,
    pow,
    round,
    sum,
    functools.reduce,
    *(getattr(operator, name) for name in _OPERATORS),
)
# functions whose value for constants is a constant
_OF_CONSTANTS = (abs, bool, float, int, max, min, pow, round, torch.finfo, torch.iinfo)


def _is_constant(value) -> bool:
    return type(value) in NUMBERS or type(value) in _CONSTANTS


def _is_pure(function) -> bool:
    """Does a function only compute, so that it may be repeated?"""
    try:
        if function in _PURE_BUILTINS:
            return True
    except TypeError:
        return False
    if _IMPURE.match(getattr(function, "__name__", "")):
        return False
    if isinstance(function, types.FunctionType):
        return _library_of(function) is not None
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType) or owner is None:
        return _top(getattr(function, "__module__", None)) in _PURE_MODULES
    if isinstance(owner, type):
        return _top(owner.__module__) == "torch" and isinstance(function, types.BuiltinFunctionType)
    return isinstance(function, types.BuiltinFunctionType) and function.__name__ in _PURE_METHODS


def _top(module) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _library_of(function: types.FunctionType) -> str | None:
    """The library whose own code a Python function is, by where it looks up names: a decorator cannot claim that."""
    top = _top(function.__globals__.get("__name__"))
    return top if top in ("torch", "numpy", "functools", "math") else None


def _is_known(value) -> bool:
    """Is an argument known on the host, and found again at a later call? Symbols are not, nor what the mod itself has made of them."""
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        return all(map(_is_known, value))
    if kind is dict:
        return all(map(_is_known, value)) and all(map(_is_known, value.values()))
    return _is_stand_in(value) or _is_constant(value) or kind in _TENSORS or isinstance(value, enum.Enum)


def _call(state: State, args: tuple, kwargs: dict):
    """A captured callable is called: traced through, run on the host now and later, or refused."""
    value, reader = state.value, state.reader
    if isinstance(value, types.MethodType):
        owner = _attribute(state, "__self__")
        return _attribute(state, "__func__")(owner, *args, **kwargs)
    if type(value) is functools.partial:
        function, first, named = (_attribute(state, name) for name in ("func", "args", "keywords"))
        return function(*first, *args, **{**{k: named[k] for k in named}, **kwargs})
    if any(value is f for f in _ITERATORS):
        return value(*args, **kwargs)
    known = all(map(_is_known, args)) and all(map(_is_known, kwargs.values()))
    if (
        known
        and args
        and not kwargs
        and all(map(_is_constant, args))
        and (any(value is f for f in _OF_CONSTANTS) or isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math")
    ):
        return reader.constant(value(*args), state.name)  # float("-inf") is as constant as what stands in the code
    if known and _is_pure(value):
        name = getattr(value, "__name__", state.name)
        if isinstance(getattr(value, "__self__", None), (types.ModuleType, type, types.NoneType)):
            return reader.host(value, args, kwargs, name)
        return reader.host(_called, (HostValue(state), *args), kwargs, name)  # a method, of what may be another object next time
    if not known and (reader.is_operation(value) or any(value is f for f in _BY_OPERATORS)):
        return value(*args, **kwargs)
    if isinstance(value, types.FunctionType):
        if state.function is None:
            state.function = reader.stand_in_function(state)
        return state.function(*args, **kwargs)
    if isinstance(value, torch.nn.Module):
        return _call_module(state, args, kwargs)
    own = None if isinstance(value, type) else _found_on_class(value, "__call__")
    if isinstance(own, types.FunctionType):
        at = state.place
        function = reader.track(own, lambda values: _found_on_class(values[at], "__call__"), state.name)
        return function(HostValue(state), *args, **kwargs)
    raise Untrackable(f"calls {state.name}, a {type(value).__name__}")


def _called(function, *args, **kwargs):
    return function(*args, **kwargs)


def _found_on_class(value, name: str):
    return next((base.__dict__[name] for base in type(value).__mro__ if name in base.__dict__), None)


def _has_hooks(module: torch.nn.Module) -> bool:
    from torch.nn.modules import module as registry

    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or registry._global_forward_hooks
        or registry._global_forward_pre_hooks
        or registry._global_backward_hooks
        or registry._global_backward_pre_hooks
        or module._compiled_call_impl is not None
    )


def _call_module(state: State, args: tuple, kwargs: dict):
    """nn.Module's own __call__ runs hooks around forward: without hooks it is forward."""
    module, program, at = state.value, state.reader.program, state.place
    if type(module).__call__ is not torch.nn.Module.__call__ or _has_hooks(module):
        raise Untrackable(f"calls {state.name}, a module with hooks or a __call__ of its own")
    program.add(
        lambda values: type(values[at]).__call__ is torch.nn.Module.__call__ and not _has_hooks(values[at]),
        True,
        bool,
        f"{state.name} without hooks",
    )
    return _attribute(state, "forward")(*args, **kwargs)


def _attribute(state: State, name: str):
    """An attribute of a captured object: read now, and again at every call."""
    value, reader, at = state.value, state.reader, state.place
    if type(value) is dict and name == "keys":
        return lambda: _keys(state)
    with torch._C.DisableTorchFunction():
        found = getattr(value, name)
    if at is None and isinstance(value, (torch.finfo, torch.iinfo)):
        return reader.constant(found, name)
    constant = state.constant
    run = (lambda values: getattr(values[at], name)) if at is not None else (lambda values: getattr(constant, name))
    if isinstance(value, types.ModuleType) and _top(value.__name__) in _PURE_MODULES | {"functools", "itertools"}:
        key = id(value), name
        if key not in reader.members:
            member = reader.track(found, run, name)
            reader.members[key] = pinned(member) if type(found) in NUMBERS else member  # math.inf is a constant
        return reader.members[key]
    if isinstance(found, types.MethodType) and found.__self__ is value and isinstance(found.__func__, types.FunctionType):
        place = reader.program.add(run, found, _of_class(types.MethodType), name)
        reader.program.add(lambda values: values[place].__self__ is values[at], True, bool, f"{name} is its own method")
        function = reader.track(found.__func__, lambda values: values[place].__func__, name)
        return _Method(function, HostValue(state))
    return reader.track(found, run, name)


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


def _keys(state: State) -> list:
    """The keys of a captured dict, which are compared."""
    keys, at = list(state.value), state.place
    if not all(type(k) in (str, int, bool, float, type(None)) for k in keys):
        raise Untrackable(f"iterates over {state.name}, a dict with keys that are not strings or numbers")
    expected = [(type(k), k) for k in keys]
    state.reader.program.add(
        lambda values: [(type(k), k) for k in values[at]], expected, lambda found: found == expected, f"keys of {state.name}"
    )
    return keys


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

    def track(self, value, run: Callable, name: str):
        """The stand-in, or the tensor or constant itself, for a captured `value` that `run(values)` finds again."""
        kind = type(value)
        if kind in NUMBERS:
            return HostNumber(State(self, self.program.add(run, value, number_guard(value), name), name))
        if isinstance(value, (np.integer, np.floating, np.bool_)):
            return HostNumber(State(self, self.program.add(run, value, _of_class(kind), name), name))
        if isinstance(value, torch.Tensor):
            if kind not in _TENSORS:
                return self._refused(f"captures {name}, a {kind.__name__}", name)
            self.program.add_tensor(run, value, name)
            return value
        if kind in _CONSTANTS or isinstance(value, enum.Enum):
            self.program.add(run, value, _equal_to(value), name)
            return value
        if isinstance(value, types.ModuleType) or _is_of_a_library(value) or self._is_operation(value):
            guard = _same(value)
        else:
            guard = _of_class(kind)
        return HostValue(State(self, self.program.add(run, value, guard, name), name))

    def constant(self, value, name: str):
        """What stands for a value that is the same at every call, or is compared elsewhere."""
        return value if _is_constant(value) else HostValue(State(self, None, name, constant=value))

    def _is_operation(self, value) -> bool:
        return isinstance(value, types.FunctionType) and self.is_operation(value)

    def _refused(self, reason: str, name: str) -> HostValue:
        return HostValue(State(self, None, name, refused=reason))

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
            cells[i].cell_contents = self.track(value, lambda values, i=i: values[at].__closure__[i].cell_contents, name)
        builtins = _builtins_of(function)
        others = {}
        for name in sorted(facts.globals):
            if name in function.__globals__:
                namespace[name] = self.track(function.__globals__[name], lambda values, g=name: values[at].__globals__[g], name)
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


def _builtins_of(function: types.FunctionType) -> dict:
    found = function.__globals__.get("__builtins__", {})
    return found if isinstance(found, dict) else vars(found)


def _finds_builtins(function: types.FunctionType, expected: dict) -> bool:
    """Does a function find these values under their names, and not among its globals?"""
    names, builtins = function.__globals__, _builtins_of(function)
    return all(name not in names and builtins.get(name, _builtins_of) is value for name, value in expected.items())


def _is_of_a_library(value) -> bool:
    """C functions and the classes of Python, torch and NumPy are known by identity."""
    if isinstance(value, type):
        return _top(value.__module__) in ("builtins", "torch", "numpy", "math")
    if isinstance(value, types.BuiltinFunctionType):
        return getattr(value, "__self__", None) is None or isinstance(value.__self__, (types.ModuleType, type))
    if isinstance(value, types.FunctionType):
        return _library_of(value) is not None and not value.__closure__ and "<locals>" not in value.__qualname__
    return (
        isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType))
        or type(value).__module__ == "numpy"
        and isinstance(value, np.ufunc)
    )


def changes_in_place(function, kwargs: dict) -> bool:
    """Does a torch function write into its first argument (or into out=), by its name?"""
    name = getattr(function, "__name__", "")
    if name == "__set__" or kwargs.get("out") is not None or kwargs.get("inplace") is True:
        return True
    if name.startswith("__") and name.endswith("__"):
        return name in ("__setitem__", "__delitem__") or (name[2] == "i" and name not in _NOT_IN_PLACE)
    return name.endswith("_") and not name.endswith("__")


_NOT_IN_PLACE = {"__invert__", "__index__", "__int__", "__iter__", "__init__", "__instancecheck__"}
