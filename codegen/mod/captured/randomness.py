"""Random numbers, which a mod may not draw: it is computed again in the backward pass, and once for many positions.

Those of torch are refused where its functions arrive (dispatch.py), those of Python and NumPy where a stand-in for one is called
(calls.py). A mod that runs on real objects is looked through before it runs: what its code names is followed from function to function.
"""

from __future__ import annotations

import dis
import functools
import linecache
import os
import random
import re
import sys
import types

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..current import running
from ..errors import ModError, mod_error
from ..expr import SourceLine
from .audit import audited
from .purity import library, library_of

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
_TORCHS = re.compile(
    r"(rand|randn|randint)(_like)?|randperm|multinomial|poisson|binomial|_?standard_gamma|_?sample_dirichlet|gumbel_softmax"
    r"|(bernoulli|cauchy|exponential|geometric|log_normal|normal|random|uniform)_?"
    r"|((alpha|feature|feature_alpha|native)_)?dropout[123]?d?_?|rrelu_?|scaled_dot_product_attention|fractional_max_pool[23]d(_with_indices)?"
    r"|((xavier|kaiming)_(uniform|normal)|trunc_normal|orthogonal|sparse)_"
)
_MOST = 512  # values that are looked through


def _is_function(value) -> bool:
    """Is this a function or class, of which attributes can be asked without running code of the user's?"""
    return isinstance(value, _FUNCTIONS) or type(value).__name__ == "cython_function_or_method"  # NumPy's


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    type,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)


def draws_in_torch(function) -> bool:
    """Does a function or method of torch, or one of this name, draw random numbers?"""
    if isinstance(function, torch._ops.OpOverloadPacket):
        function = getattr(function, function.overloads()[0])
    if isinstance(function, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in function.tags
    name = function if isinstance(function, str) else getattr(function, "__name__", None)
    return isinstance(name, str) and _TORCHS.fullmatch(name) is not None


def draws_in_python(function) -> bool:
    """Does a function of Python's random or of numpy.random draw random numbers, or make or seed what draws them?"""
    if not _is_function(function):
        return False
    home = getattr(function, "__module__", None)
    return isinstance(getattr(function, "__self__", None), _GENERATORS) or (
        isinstance(home, str) and (home in ("random", "secrets") or home.startswith("numpy.random") or function is os.urandom)
    )


def draws(function, args: tuple, kwargs: dict) -> bool:
    """Does a captured function draw random numbers, one of torch's, Python's or NumPy's?"""
    if not _is_function(function):
        return False
    of_torch = library(getattr(function, "__module__", None) or "torch") == "torch"
    return draws_in_python(function) or (of_torch and draws_in_torch(function) and not is_off(function, args, kwargs))


def is_off(function, args: tuple, kwargs: dict) -> bool:
    """Is this a dropout outside training, or attention without one?"""
    name = getattr(function, "__name__", "")
    if name == "scaled_dot_product_attention":
        return not kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if "dropout" not in name:
        return False
    training = next((kwargs[name] for name in ("training", "train") if name in kwargs), args[2] if len(args) > 2 else True)
    return not training


def may_draw(function) -> bool:
    """Is this a function of Python code in torch that may call others which draw?"""
    home = _is_function(function) and getattr(function, "__module__", None)
    return isinstance(home, str) and home.startswith(("torch.distributions", "torch.nn.init"))


class Watch(TorchDispatchMode):
    """While captured Python code runs: refuses operations of torch that draw random numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if draws_in_torch(function):
            raise refusal(function)
        return function(*args, **(kwargs or {}))


def title(function) -> str:
    """What a function is called in an error: random.random, numpy.random.rand, torch.rand."""
    if isinstance(function, str):
        return f"Tensor.{function}"
    owner = getattr(function, "__self__", None)
    home = type(owner).__module__ if isinstance(owner, _GENERATORS) else getattr(function, "__module__", None) or "torch"
    home = next((h for h in ("numpy.random", "random", "torch.nn.functional") if home.startswith(h)), "torch")
    return f"{home}.{getattr(function, '__name__', type(function).__name__)}"


def refused(name: str, source: SourceLine | None, kind: str) -> ModError:
    """What is said of a function that draws."""
    return mod_error(
        f"{name} draws random numbers",
        "A mod is computed again in the backward pass, where it must give the same. Draw them before the call and capture the tensor: "
        "noise = torch.rand(Q_LEN, KV_LEN, device=...), then noise[q_idx, kv_idx].",
        source,
        kind,
    )


def refusal(function) -> ModError:
    """The same, of a function that the run of this thread comes to."""
    run = running()
    return refused(title(function), run.source(), run.kind)


class Search:
    """Looks through a mod without running it. What its code would not come to counts as well.

    drawn       a function of Python or NumPy that draws, and the line that names it; None if there is none
    functions   whether there are autograd.Functions
    """

    def __init__(self, mod) -> None:
        self.drawn: tuple[object, SourceLine] | None = None
        self.functions = False
        self._waiting, self._seen = [mod], {}
        while self._waiting and len(self._seen) < _MOST:
            value = self._waiting.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._follow(value)

    def _follow(self, value) -> None:
        if isinstance(value, types.FunctionType):
            self._through(value, None)
        elif isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
            self._waiting.append(value.__self__)
            self._through(value.__func__, value.__self__)
        elif type(value) is functools.partial:
            given = [*value.args, *value.keywords.values()]
            drawing = [v for v in given if draws_in_python(v)]
            code = getattr(value.func, "__code__", None)
            if drawing and isinstance(code, types.CodeType):
                self.drawn = self.drawn or (drawing[0], _line_naming(code, ""))
            self._waiting += [value.func, *given]
        elif isinstance(value, torch.nn.Module):
            self._waiting.append(value.forward)
        elif isinstance(value, types.BuiltinMethodType):
            self._waiting.append(value.__self__)  # of Function.apply, where it is no Python
        elif isinstance(value, type):
            self.functions = self.functions or issubclass(value, torch.autograd.Function)
        else:
            self._waiting += _member(value, "__call__")

    def _through(self, function: types.FunctionType, owner) -> None:
        """What a function's code names: what it captures, globals, imports, and attributes of all of these."""
        if library_of(function) is not None:
            return
        code = function.__code__
        facts, seen = audited(code), set()
        named = [("self", owner), *(("", value) for value in function.__defaults__ or ())]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                named.append((name, cell.cell_contents))
            except ValueError:  # not assigned yet
                continue
        named += [(name, function.__globals__[name]) for name in facts.globals if name in function.__globals__]
        named += [(name, sys.modules[name]) for name in facts.imports if name in sys.modules]
        for name, value in named:  # which grows
            if id(value) in seen or isinstance(value, torch.Tensor):
                continue
            seen.add(id(value))
            if draws_in_python(value) or isinstance(value, _GENERATORS):
                self.drawn = self.drawn or (value, _line_naming(code, name))
            named += [(a, member) for a in facts.attributes for member in _member(value, a)]
        self._waiting += [value for _, value in named]


def _member(value, name: str) -> list:
    """The attribute of an object, if it has it, found without running its code."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    classes = () if isinstance(value, (types.ModuleType, type)) else type(value).__mro__[:-1]
    home = next((home for home in (own, *(c.__dict__ for c in classes)) if name in home), None)
    if home is None:
        return []
    found = home[name]
    if isinstance(found, (staticmethod, classmethod)):
        return [found.__func__]
    return [types.MethodType(found, value)] if home is not own and isinstance(found, types.FunctionType) else [found]


def _line_naming(code: types.CodeType, name: str) -> SourceLine:
    """The first line on which code names something."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line if type(instruction.starts_line) is int else getattr(instruction, "line_number", None) or line
        if instruction.argval == name:
            break
    else:
        line = code.co_firstlineno
    return SourceLine(code.co_filename, line, linecache.getline(code.co_filename, line).strip())
