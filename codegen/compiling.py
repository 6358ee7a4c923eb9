"""Public functions under torch.compile: one graph break, and then they run as they are.

torch.compiler.disable does that too, but imports torch's compiler, which takes seconds. So functions get the two marks by which that
compiler knows what to leave alone: an attribute that it looks for where it would trace into a call, and for code that it would start with
(or be called back for, while a call runs) the order to skip it and all that it calls.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TypeVar

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # a torch that has other names for it: the attribute is left
    set_code_exec_strategy = None


T = TypeVar("T", bound=Callable)


def runs_uncompiled(function: T) -> T:
    """Mark a function, or all functions and properties of a class but those that it names in _TRACED, to be left alone by torch.compile.
    Returns it."""
    if isinstance(function, type):
        for name, member in vars(function).items():
            if name in getattr(function, "_TRACED", ()):
                continue
            for part in (member, getattr(member, "__func__", None), getattr(member, "fget", None), getattr(member, "fset", None)):
                if isinstance(part, types.FunctionType):
                    runs_uncompiled(part)
        return function
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "flexpress prints and launches kernels of its own"
    if set_code_exec_strategy is not None:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
