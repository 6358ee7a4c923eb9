"""Calls of captured functions: traced through, run on the host now and at every later call, or refused."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import operator
import types
from collections.abc import Callable

import torch
from torch.nn.modules import module as module_hooks

from ..captured.origins import made_of
from ..captured.program import HostProgram, Untrackable
from ..captured.purity import BY_OPERATORS, ITERATORS, OF_CONSTANTS, is_constant, is_pure
from ..captured.randomness import Watch, draws, may_draw, refusal
from ..captured.stand_ins import HostValue, Reader, State, is_stand_in, same_one, state_of
from ..captured.tensors import is_distributed, is_pending
from ..current import Symbolic
from ..symbolic.graph_mod import GraphMod, replayed

MEMOIZED = type(functools.lru_cache(len))  # what functools.lru_cache and functools.cache make of functions
_TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


def is_tensor(value) -> bool:
    """Is it a tensor with torch's own meaning in every operation? Others are looked at as Python objects are. Whether a kernel can read
    it, or the tensor that it stands for, is asked before a launch."""
    return type(value) in _TENSORS or is_distributed(value) or is_pending(value)


def stands_for_its_function(value) -> bool:
    """Is it a mod that a recipe has made, which pickles because it is an object (mods/_made.py)?"""
    return getattr(type(value), "stands_for_its_function", False)


def host_call(reader: Reader, function: Callable, args: tuple, kwargs: dict, name: str):
    """Run `function` on captured values now, and remember to run it again at every call. Returns what tracing goes on with."""
    program = reader.program
    positional = [_source(program, a) for a in args]
    named = {k: _source(program, v) for k, v in kwargs.items()}

    def call(values):
        return function(*[get(values) for get in positional], **{k: get(values) for k, get in named.items()})

    run = call if named else _quick_call(function, positional) or call
    with torch._C.DisableTorchFunction():
        result = call(program.values)
    is_item = function is operator.getitem and type(args[1]) in (int, str) and is_stand_in(args[0])
    found = reader.track(result, run, name, ("item", id(state_of(args[0]).value), args[1]) if is_item else None)
    place = state_of(found).place if is_stand_in(found) else program.place_of(found) if is_tensor(found) else None
    if place is not None and program.steps[place - 1].run is run:  # and it is no tensor that was captured before
        program.steps[place - 1].made = made_of(program, function, args, kwargs)
    return found


def _quick_call(function: Callable, sources: list) -> Callable | None:
    """A call of a function of one or two values, without the loops of a call in general, which take five times as long; None for others."""
    first, second = (*sources, None, None)[:2]
    kinds = tuple(map(type, sources))
    if kinds == (_Place,):
        at = first.place
        return lambda values: function(values[at])
    if kinds == (_Place, _Place):
        left, right = first.place, second.place
        return lambda values: function(values[left], values[right])
    if kinds == (_Place, _Constant):
        left, constant = first.place, second.value
        return lambda values: function(values[left], constant)
    if kinds == (_Constant, _Place):
        constant, right = first.value, second.place
        return lambda values: function(constant, values[right])
    return None


class _Place:
    """Finds a value of the program again."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, values):
        return values[self.place]


class _Constant:
    """A value that is the same at every call."""

    __slots__ = ("value",)

    def __init__(self, value) -> None:
        self.value = value

    def __call__(self, values):
        return self.value


def _source(program: HostProgram, arg) -> Callable:
    """What gives an argument of a host computation from the program's values."""
    kind = type(arg)
    if is_stand_in(arg):
        state = state_of(arg)
        value = state.value
        return _Place(state.place) if state.place is not None else _Constant(value)
    if is_tensor(arg):
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
    elif is_constant(arg) or isinstance(arg, enum.Enum):
        return _Constant(arg)
    raise Untrackable(f"passes a {kind.__name__} to a function on the host")


def _is_known(value) -> bool:
    """Is an argument known on the host, and found again at a later call? Symbols are not, nor what the mod itself has made of them."""
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        return all(map(_is_known, value))
    if kind is dict:
        return all(map(_is_known, value)) and all(map(_is_known, value.values()))
    return is_stand_in(value) or is_constant(value) or is_tensor(value) or isinstance(value, enum.Enum)


def call(state: State, args: tuple, kwargs: dict):
    """A captured callable is called: traced through, run on the host now and later, or refused."""
    value, reader = state.value, state.reader
    if draws(value, args, kwargs):
        raise refusal(value)
    if may_draw(value):
        raise Untrackable(f"calls {state.name}, which may draw random numbers")
    if isinstance(value, types.MethodType):
        owner = reader.attribute(state, "__self__")
        return reader.attribute(state, "__func__")(owner, *args, **kwargs)
    if type(value) is functools.partial:
        first, named = (_items_of_partial(state, name) for name in ("args", "keywords"))
        return reader.attribute(state, "func")(*first.values(), *args, **{**named, **kwargs})
    if type(value) is MEMOIZED:  # symbols are no keys
        return reader.attribute(state, "__wrapped__")(*args, **kwargs)
    if value is isinstance and len(args) == 2 and isinstance(args[0], Symbolic):
        return _would_be_instance(args[1])
    if any(value is f for f in ITERATORS):
        return value(*args, **kwargs)
    known = all(map(_is_known, args)) and all(map(_is_known, kwargs.values()))
    if (
        known
        and args
        and not kwargs
        and all(map(is_constant, args))
        and (any(value is f for f in OF_CONSTANTS) or isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math")
    ):
        return reader.constant(value(*args), state.name)  # float("-inf") is as constant as what stands in the code
    if known and is_pure(value):
        name = getattr(value, "__name__", state.name)
        # `draws` knows builtins by their names
        with contextlib.nullcontext() if isinstance(value, types.BuiltinFunctionType) else Watch():
            if state.place is None or reader.is_the_same(value):
                return reader.host(value, args, kwargs, name)
            return reader.host(_called, (HostValue(state), *args), kwargs, name)  # it may be another object next time
    if not known and (reader.is_operation(value) or any(value is f for f in BY_OPERATORS)):
        return same_one(HostValue(state))(*args, **kwargs)
    if type(value) is GraphMod:
        return _call_graph(state, args)
    if stands_for_its_function(value):
        return reader.attribute(state, "function")(*args, **kwargs)
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


def _would_be_instance(classes) -> bool:
    """Is what symbols stand for, a tensor in torch's flex_attention, an instance of one of these classes?"""
    kind = same_one(classes)
    return any(map(_would_be_instance, kind)) if isinstance(kind, tuple) else issubclass(torch.Tensor, kind)


def _items_of_partial(state: State, which: str) -> dict:
    """What a functools.partial holds as "args" or "keywords", by the names of parameters, which kernels have for it, too."""
    held, found = state.reader.attribute(state, which), getattr(state.value, which)
    if which == "keywords":
        keys = {name: name for name in held}
    else:
        names = _parameters_of(state.value.func)
        keys = {(names[i] if i < len(names) else f"argument_{i}"): i for i in range(len(held))}
    at = state_of(held).place
    return {
        name: state.reader.track(found[key], lambda values, key=key: values[at][key], name, ("item", id(found), key))
        for name, key in keys.items()
    }


def _parameters_of(function: Callable) -> list[str]:
    """The names of its positional parameters, as far as they are known."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        return [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]
    except (TypeError, ValueError):
        return []


def _call_graph(state: State, args: tuple):
    """A mod that is a graph: what it captures is found again in its values."""
    mod, reader, at = state.value, state.reader, state.place
    graph = mod.graph
    reader.program.guard(at, lambda found: type(found) is GraphMod and found.graph is graph)
    captures = (*graph.tensors, *graph.scalars)
    values = [reader.track(v, lambda values, i=i: values[at].values[i], captures[i].name) for i, v in enumerate(mod.values)]
    return replayed(graph, values, args)


def _called(function, *args, **kwargs):
    return function(*args, **kwargs)


def _found_on_class(value, name: str):
    return next((base.__dict__[name] for base in type(value).__mro__ if name in base.__dict__), None)


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
        or module_hooks._global_backward_hooks
        or module_hooks._global_backward_pre_hooks
        or module._compiled_call_impl is not None
    )


def _call_module(state: State, args: tuple, kwargs: dict):
    """nn.Module's own __call__ runs hooks around forward: without hooks it is forward."""
    module, reader, at = state.value, state.reader, state.place
    if type(module).__call__ is not torch.nn.Module.__call__ or _has_hooks(module):
        raise Untrackable(f"calls {state.name}, a module with hooks or a __call__ of its own")
    reader.program.add(
        lambda values: type(values[at]).__call__ is torch.nn.Module.__call__ and not _has_hooks(values[at]),
        True,
        bool,
        f"{state.name} without hooks",
    )
    return reader.attribute(state, "forward")(*args, **kwargs)
