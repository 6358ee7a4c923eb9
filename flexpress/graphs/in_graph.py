"""Public functions inside what torch.compile traces: each call becomes a node of the graph, which calls the function.

torch's compiler (Dynamo) traces Python, and makes of a mod a graph of its own with the tensors and numbers that it captures as inputs,
be they from outside or computed in between. That graph is a mod as any other. The node runs where torch goes on, with values or while it
traces and records, and there the function finds its operator (recorded.py).

Dynamo has no public way to hand functions to it, so dynamo.py does as torch's own flex_attention. Where that has other names in a version
of torch, and for a mod that Dynamo cannot trace, the call is a graph break: the function runs as it is, outside of what is compiled.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

import torch
from torch._ops import HigherOrderOperator

from flexpress.inputs.plain_arguments import flag

from ..codegen.compiling import runs_uncompiled

_compiling = torch.compiler.is_dynamo_compiling
P = ParamSpec("P")
R = TypeVar("R")


@overload
def compilable(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def compilable(
    *, inner: Callable | None = None, opened: Callable | None = None, closed: Callable | None = None, left_out: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def compilable(function=None, *, inner=None, opened=None, closed=None, left_out=()):
    """Decorator of a public function that torch.compile may meet. Its arguments named score_mod and mask_mod are mods. Signature and
    docstring stay, for type checkers and for `help`. A call with context= is a graph break.

    inner    called instead, with what `opened(arguments by name)` makes of them by name: tensors, numbers, mods and tuples of these.
             Returns tensors
    closed   (what `inner` returns, arguments by name) -> the function's result
    left_out arguments that nodes do not have: those that change how fast a call is, and not its result
    """
    if function is None:
        return functools.partial(compilable, inner=inner, opened=opened, closed=closed, left_out=left_out)
    called = f"{function.__module__}.{function.__name__}"
    CALL.functions[called] = inner or function

    def node(**given):
        found = CALL(called, **(given if opened is None else opened(given)))
        return found if closed is None else closed(found, given)

    public = functools.wraps(function)(_caller(function, node, left_out))
    runs_uncompiled(function)  # after its attributes were copied
    return public


@runs_uncompiled
def _outside(function, *args, **kwargs):
    """A call that breaks the graph."""
    return function(*args, **kwargs)


_OUTSIDE = "with context= ranks send each other keys, which is outside of graphs: compile without fullgraph=True"
_outside._torchdynamo_disable_msg = _OUTSIDE  # type: ignore[attr-defined]


def _caller(function: Callable, node: Callable, left_out: tuple[str, ...]) -> Callable:
    """What calls `node` in torch.compile, and `function` elsewhere. It is printed with their parameters: one that took *args and **kwargs
    would need a third of a microsecond for each call."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    taken = [p.name if p.default is p.empty else f"{p.name}=None" for p in parameters]  # their values are copied below
    if named:
        taken.insert(len(taken) - len(named), "*")
    passed = ", ".join([p.name for p in parameters][: len(parameters) - len(named)] + [f"{name}={name}" for name in named])
    flags = "".join(_flag_text(p) for p in parameters if p.annotation in ("bool", "bool | None"))
    with_context = f"if context is not None:\n            return in_graph._outside(function, {passed})" if "context" in named else "pass"
    made: dict[str, Callable] = {}
    text = f"""
def {function.__name__}({", ".join(taken)}):
{flags}    if compiling() and in_graph._is_known():
        {with_context}
        return node({", ".join(f"{p.name}={p.name}" for p in parameters if p.name not in left_out)})
    return function({passed})
"""
    exec(text, {"compiling": _compiling, "flag": flag, "in_graph": sys.modules[__name__], "node": node, "function": function}, made)
    public = made[function.__name__]
    public.__defaults__, public.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return public


def _flag_text(parameter: inspect.Parameter) -> str:
    """Statements that look at a flag. Of one that is a bool they only ask for its identity, as every call does so."""
    name, default = parameter.name, parameter.default
    usual = [default, True, False] if default is None else [default, not default]
    asked = " and ".join(f"{name} is not {value}" for value in usual)
    return f"    if {asked}:\n        {name} = flag({name!r}, {name})\n"


class _Call(HigherOrderOperator):
    """What Dynamo finds in `compilable`. It is run where the graph broke at it."""

    def __init__(self) -> None:
        super().__init__("flexpress_call")
        self.functions: dict[str, Callable] = {}  # what nodes call

    @runs_uncompiled
    def __call__(self, name: str, *args, **kwargs):
        return self.functions[name](*args, **kwargs)


CALL = _Call()


def _is_known() -> bool:
    """Does Dynamo know what to do with CALL? It asks when it first traces one."""
    try:
        from flexpress.graphs import dynamo

        dynamo.know(CALL)
    except (ImportError, AttributeError):  # a torch whose compiler has other names
        return False
    return True


_is_known._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo runs it, instead of tracing it
