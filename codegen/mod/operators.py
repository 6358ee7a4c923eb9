"""Python's operators: of symbols and of stand-ins for captured values, which have a method for each."""

from __future__ import annotations

import operator
from collections.abc import Callable

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY = ("neg", "pos", "abs", "invert")


def function_of(name: str) -> Callable:
    """The function of the module operator for the method `__name__`."""
    return getattr(operator, f"{name}_", None) or getattr(operator, name)


SYMBOLS = {  # how an expression writes a function of the module operator
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "neg": "-", "invert": "~"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}
