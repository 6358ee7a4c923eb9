"""What a mod captures, and how to find it again at the next call.

While a mod is traced, every captured value it can reach (closure cells, globals, defaults, attributes, items) is read
through a `HostProgram`, which remembers each read as a step with a guard. Running the program on a function at a later
call repeats the reads: if every guard holds, the traced graph is valid for that function too, whichever object it is
(a fresh lambda of the same code included), and the values found are the kernel's arguments. If one fails, the mod is
traced again. Nothing is keyed by guesswork: a value that was not read cannot have changed the trace, and one that was
read is compared.

    a number that only meets the mod's symbols   guarded by its type: it becomes a run-time argument of the kernel
    a number that Python itself used (`if n`)    guarded by its value
    a tensor                                     guarded by dtype, rank, device and requires_grad
    a function                                   guarded by its code; its own captures are read in turn
    a module, class or builtin                   guarded by identity
    a string, None, a dtype, ...                 guarded by its value
    list, tuple, dict, partial, bound method     guarded by type and length; their items are read in turn
    any other object                             guarded by its class; the attributes the mod reads are read in turn

Torch and Python operations on captured values alone run eagerly, as in torch, and are remembered as steps too.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .errors import ModError

MISSING = object()
_CONSTANTS = (str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex, type(...), slice)
NUMBERS = (int, float, bool)


@dataclass(slots=True)
class Step:
    """One read or eager computation: `run(values)` gives its value, `guard(value)` says whether the trace still fits."""

    run: Callable
    guard: Callable
    describe: str


class HostProgram:
    """The recorded reads of one trace, in order. `values` are those found while tracing."""

    def __init__(self, root) -> None:
        self.root = root
        self.steps: list[Step] = []
        self.values: list = []
        self._aliases: dict[int, int] = {}  # id of a tensor -> the step that found it first

    def add(self, run: Callable, value, guard: Callable, describe: str) -> int:
        """Remember one step with the value it gave during the trace; returns its index."""
        self.steps.append(Step(run, guard, describe))
        self.values.append(value)
        return len(self.steps) - 1

    def pin(self, node: int) -> object:
        """From now on the value of this step is part of the signature (Python itself used it)."""
        value = self.values[node]
        same = same_number if isinstance(value, NUMBERS) else _equal_to
        self.steps[node].guard = same(value)
        return value

    def add_tensor(self, run: Callable, tensor: torch.Tensor, describe: str) -> int:
        """A step that gives a tensor; finding the same tensor twice is remembered, and guarded, as the same one."""
        node = self.add(run, tensor, tensor_guard(tensor), describe)
        first = self._aliases.setdefault(id(tensor), node)
        if first != node:
            self.add(lambda values: values[node + 1] is values[first + 1], True, bool, f"{describe} is one tensor")
        return node

    def node_of(self, tensor: torch.Tensor) -> int | None:
        return self._aliases.get(id(tensor))

    @functools.cached_property
    def _pairs(self) -> list[tuple[Callable, Callable]]:
        """The steps of the finished program, as every later call goes through them."""
        return [(step.run, step.guard) for step in self.steps]

    def run(self, root) -> list | None:
        """Repeat every step for `root`: the values, or None if a guard fails and the trace does not fit."""
        values: list = [root]
        try:
            for run, guard in self._pairs:
                value = run(values)
                if not guard(value):
                    return None
                values.append(value)
        except (AttributeError, IndexError, KeyError, ValueError, TypeError):
            return None  # what was captured has another structure now
        return values


def name_of(mod) -> str:
    """What a mod is called in errors, file names and pictures."""
    return getattr(mod, "__name__", type(mod).__name__)


def fits_int32(value) -> bool:
    """May this number be an argument of a kernel? Of an int, that is."""
    return type(value) is not int or -(1 << 31) <= value < 1 << 31


def number_guard(number) -> Callable:
    """Guards the type of a number that stays symbolic, and that an int fits into 32 bits if it does now."""
    kind = type(number)
    if fits_int32(number):
        return lambda value: type(value) is kind and fits_int32(value)
    return lambda value: type(value) is kind


def same_number(expected) -> Callable:
    kind = type(expected)
    if expected != expected:
        return lambda value: type(value) is kind and value != value
    sign = math.copysign(1.0, expected) if kind is float else 0
    return lambda value: (type(value) is kind and value == expected
                          and (kind is not float or math.copysign(1.0, value) == sign))


def _equal_to(expected) -> Callable:
    kind = type(expected)
    return lambda value: type(value) is kind and value == expected


def tensor_guard(tensor: torch.Tensor) -> Callable:
    dtype, ndim, device, needs_grad = tensor.dtype, tensor.ndim, tensor.device, tensor.requires_grad
    return lambda t: (isinstance(t, torch.Tensor) and t.dtype is dtype and t.ndim == ndim and t.device == device
                      and t.requires_grad == needs_grad)


class HostNumber:
    """A captured number while a mod is traced: still symbolic, until Python itself asks for its value.

    Arithmetic between host numbers is remembered and repeated at every call, on the host, in Python's own precision.
    """

    __slots__ = ("program", "node", "name")

    def __init__(self, program: HostProgram, node: int, name: str) -> None:
        self.program, self.node, self.name = program, node, name

    @property
    def value(self):
        """The number found while tracing (for the result's type only: reading it pins nothing)."""
        return self.program.values[self.node]

    def pinned(self):
        return self.program.pin(self.node)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        from .dispatch import dispatch

        return dispatch(function, args, kwargs or {})

    def __bool__(self):
        return bool(self.pinned())

    def __int__(self):
        return int(self.pinned())

    def __float__(self):
        return float(self.pinned())

    def __index__(self):
        if not isinstance(self.value, int):
            raise TypeError(f"{self.name} is a float where Python needs an integer")
        return int(self.pinned())

    def __hash__(self):
        return hash(self.pinned())

    def __str__(self):
        return str(self.pinned())

    def __format__(self, spec):
        return format(self.pinned(), spec)

    __repr__ = __str__

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.pinned(), name)


def _binary(function: Callable, reflected: bool) -> Callable:
    def method(self, other):
        if not isinstance(other, (*NUMBERS, HostNumber)):
            return NotImplemented  # a symbol or a tensor takes over from here
        args = (other, self) if reflected else (self, other)
        return host_call(self.program, function, args, {}, self.name)

    return method


def _unary(function: Callable) -> Callable:
    return lambda self: host_call(self.program, function, (self,), {}, self.name)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _function = getattr(operator, f"{_name}_", None) or getattr(operator, _name)
    setattr(HostNumber, f"__{_name}__", _binary(_function, reflected=False))
    setattr(HostNumber, f"__r{_name}__", _binary(_function, reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(HostNumber, f"__{_name}__", _binary(getattr(operator, _name), reflected=False))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(HostNumber, f"__{_name}__", _unary(getattr(operator, _name)))


def as_python(value):
    """The plain Python value behind a HostNumber, without pinning it."""
    return value.value if isinstance(value, HostNumber) else value


def host_call(program: HostProgram, function: Callable, args: tuple, kwargs: dict, name: str):
    """Run `function` on captured values now, and remember to run it again at every call. Returns what tracing goes on with."""
    sources: list[tuple] = []

    def source(arg):
        if isinstance(arg, HostNumber):
            sources.append(("node", arg.node))
            return arg.value
        if isinstance(arg, torch.Tensor):
            node = program.node_of(arg)
            if node is not None:
                sources.append(("node", node))
                return arg
        if isinstance(arg, (list, tuple)) and type(arg) in (list, tuple):
            start = len(sources)
            items = [source(a) for a in arg]
            inner = sources[start:]
            del sources[start:]
            sources.append(("items", type(arg), inner))
            return type(arg)(items)
        sources.append(("constant", arg))
        return arg

    plain = [source(a) for a in args]
    positional = list(sources)
    sources.clear()
    plain_kwargs = {k: source(v) for k, v in kwargs.items()}
    named = dict(zip(kwargs, list(sources), strict=True))

    def rebuild(spec, values):
        if spec[0] == "node":
            return values[spec[1] + 1]
        if spec[0] == "items":
            return spec[1](rebuild(s, values) for s in spec[2])
        return spec[1]

    def run(values):
        return function(*(rebuild(s, values) for s in positional), **{k: rebuild(s, values) for k, s in named.items()})

    return adopt(program, run, function(*plain, **plain_kwargs), name)


def adopt(program: HostProgram, run: Callable, result, name: str):
    """Take the result of a host step into the trace: numbers stay symbolic, tensors are known again by identity."""
    if type(result) in NUMBERS:
        return HostNumber(program, program.add(run, result, number_guard(result), name), name)
    if isinstance(result, torch.Tensor):
        program.add_tensor(run, result, name)
        return result
    if isinstance(result, tuple):
        kind, size = type(result), len(result)
        node = program.add(run, result, lambda v: type(v) is kind and len(v) == size, name)
        items = [adopt(program, lambda values, i=i: values[node + 1][i], item, f"{name}[{i}]")
                 for i, item in enumerate(result)]
        return kind(items) if kind.__module__ == "torch.return_types" else tuple(items)
    program.add(run, result, _equal_to(result), name)
    return result


class CaptureReader:
    """Gives a function whose every captured value is a tracked one, and so traces through it safely."""

    def __init__(self, program: HostProgram) -> None:
        self.program = program
        self.codes: set[types.CodeType] = set()  # user code seen: where errors look for the user's own line
        self._functions: dict[int, object] = {}

    def _add(self, run, value, guard, name) -> int:
        return self.program.add(run, value, guard, name)

    def track(self, value, run: Callable, name: str):
        """The tracked form of a captured `value` that `run(values)` finds again."""
        kind = type(value)
        if kind in NUMBERS:
            node = self._add(run, value, number_guard(value), name)
            return HostNumber(self.program, node, name)
        if isinstance(value, torch.Tensor):
            self.program.add_tensor(run, value, name)
            return value
        if isinstance(value, (*_CONSTANTS, enum.Enum)):
            self._add(run, value, _equal_to(value), name)
            return value
        if isinstance(value, types.FunctionType) and not _is_library(value):
            return self._function(value, run, name)
        if isinstance(value, types.MethodType):
            return self._method(value, run, name)
        if kind is functools.partial:
            return self._partial(value, run, name)
        if kind in (list, tuple, dict) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return self._container(value, run, name)
        if isinstance(value, types.ModuleType) and not _is_library(value):
            node = self._add(run, value, lambda v: v is value, name)
            return TrackedObject(self, value, node, name)
        if isinstance(value, (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType,
                              types.MethodDescriptorType, types.WrapperDescriptorType)) or _is_library(value):
            self._add(run, value, lambda v: v is value, name)
            return value
        if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy number
            return self.track(value.item(), lambda values: run(values).item(), name)
        node = self._add(run, value, lambda v: type(v) is kind, name)
        return TrackedObject(self, value, node, name)

    def root(self, function):
        """The tracked form of the mod itself (the program's value 0)."""
        return self.track(function, lambda values: values[0], name_of(function))

    def _function(self, function: types.FunctionType, run: Callable, name: str):
        if id(function) in self._functions:
            return self._functions[id(function)]
        code = function.__code__
        defaults = function.__defaults__ or ()
        count = len(defaults)
        node = self._add(run, function, lambda f: (type(f) is types.FunctionType and (f.__code__ is code or f.__code__ == code)
                                                   and len(f.__defaults__ or ()) == count), name)
        at = node + 1  # values[0] is the root
        self.codes.add(code)
        for constant in code.co_consts:  # functions defined inside the mod
            if isinstance(constant, types.CodeType):
                self.codes.add(constant)
        cells = tuple(types.CellType() for _ in code.co_freevars)
        namespace = {"__builtins__": function.__globals__.get("__builtins__", __builtins__),
                     "__name__": function.__globals__.get("__name__", "mod")}
        tracked = types.FunctionType(code, namespace, function.__name__, None, cells)
        self._functions[id(function)] = tracked
        for i, cell_name in enumerate(code.co_freevars):
            cell = function.__closure__[i]
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # not assigned yet: reading it raises NameError in the mod, as in Python
            cells[i].cell_contents = self.track(
                value, lambda values, i=i: values[at].__closure__[i].cell_contents, cell_name)
        others = []
        for global_name in _global_names(code):
            if global_name in function.__globals__:
                namespace[global_name] = self.track(
                    function.__globals__[global_name],
                    lambda values, g=global_name: values[at].__globals__[g], global_name)
            else:
                others.append(global_name)
        if others:  # builtins today: they must not be hidden by globals tomorrow
            self._add(lambda values: values[at].__globals__.keys().isdisjoint(others), True, bool, f"{name} builtins")
        names = code.co_varnames[code.co_argcount - count:code.co_argcount]
        tracked.__defaults__ = tuple(
            self.track(value, lambda values, i=i: values[at].__defaults__[i], names[i]) for i, value in enumerate(defaults)
        ) or None
        if function.__kwdefaults__:
            tracked.__kwdefaults__ = self.track(function.__kwdefaults__, lambda values: values[at].__kwdefaults__,
                                                f"{name} keyword defaults")
        return tracked

    def _method(self, method: types.MethodType, run: Callable, name: str):
        at = self._add(run, method, lambda m: isinstance(m, types.MethodType), name) + 1
        owner = self.track(method.__self__, lambda values: values[at].__self__, f"{name}.__self__")
        function = self.track(method.__func__, lambda values: values[at].__func__, name)
        return functools.partial(function, owner)

    def _partial(self, partial: functools.partial, run: Callable, name: str):
        at = self._add(run, partial, lambda p: type(p) is functools.partial, name) + 1
        function = self.track(partial.func, lambda values: values[at].func, name)
        args = self.track(partial.args, lambda values: values[at].args, f"{name} arguments")
        keywords = self.track(partial.keywords, lambda values: values[at].keywords, f"{name} keywords")
        return functools.partial(function, *args, **keywords)

    def _container(self, value, run: Callable, name: str):
        kind = type(value)
        if isinstance(value, dict):
            keys = list(value)
            if not all(isinstance(k, (*_CONSTANTS, int)) for k in keys):
                raise ModError(f"{name} is a dict with keys of {[type(k).__name__ for k in keys]}: use strings or ints as keys")
            at = self._add(run, value, lambda v: type(v) is dict and list(v) == keys, name) + 1
            return {k: self.track(v, lambda values, k=k: values[at][k], k if isinstance(k, str) else f"{name}_{k}")
                    for k, v in value.items()}
        size = len(value)
        at = self._add(run, value, lambda v: type(v) is kind and len(v) == size, name) + 1
        items = [self.track(v, lambda values, i=i: values[at][i], f"{name}_{i}") for i, v in enumerate(value)]
        return kind(*items) if hasattr(value, "_fields") else kind(items)


class TrackedObject:
    """Stands for a captured object (a callable object, an nn.Module, a config): each attribute the mod reads is tracked."""

    def __init__(self, reader: CaptureReader, value, node: int, name: str) -> None:
        self.__dict__.update(_reader=reader, _value=value, _at=node + 1, _name=name)

    @property
    def __class__(self):
        return type(self._value)

    def __getattr__(self, name):
        value, at, program = getattr(self._value, name), self._at, self._reader.program
        if not isinstance(value, types.MethodType) or value.__self__ is not self._value:
            return self._reader.track(value, lambda values: getattr(values[at], name), name)
        method = program.add(lambda values: getattr(values[at], name), value, lambda m: type(m) is types.MethodType, name) + 1
        program.add(lambda values: values[method].__self__ is values[at], True, bool, f"{name} is its own method")
        return functools.partial(self._reader.track(value.__func__, lambda values: values[method].__func__, name), self)

    def __setattr__(self, name, value):
        raise ModError(f"the mod sets {self._name}.{name}: a mod may read what it captures, not change it")

    def _own_function(self, function):
        """A function found on the object's class. The class is guarded, and so is the function's code."""
        at, name = self._at, function.__name__
        return self._reader.track(function, lambda values: getattr(type(values[at]), name), name)

    def __call__(self, *args, **kwargs):
        if isinstance(self._value, torch.nn.Module):
            return self.forward(*args, **kwargs)
        return self._own_function(type(self._value).__call__)(self, *args, **kwargs)

    def __getitem__(self, key):
        key = key.pinned() if isinstance(key, HostNumber) else key
        at = self._at
        return self._reader.track(self._value[key], lambda values: values[at][key], f"{self._name}_{key}")

    def __len__(self):
        at = self._at
        size = len(self._value)
        self._reader.program.add(lambda values: len(values[at]), size, _equal_to(size), f"len({self._name})")
        return size

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def _global_names(code: types.CodeType) -> list[str]:
    """Names that `code`, or a function defined inside it, may look up in its globals."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return list(names)


def _is_library(value) -> bool:
    """Code of torch, numpy, math and the standard library: called as it is, known by identity."""
    name = getattr(value, "__module__", None) if not isinstance(value, types.ModuleType) else value.__name__
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES and not isinstance(value, torch.nn.Module)


_LIBRARIES = {"torch", "numpy", "math", "cmath", "operator", "functools", "builtins", "itertools", "typing",
              "collections", "einops", "_operator"}

