"""Where every operation of a mod arrives while it is traced, from torch functions and from Python operators.

What touches a symbol becomes a node of the graph, by the op table; what touches captured values alone runs on the host, now and at
every later call.
"""

from __future__ import annotations

import types

import torch
from torch.overrides import TorchFunctionMode

from . import ops
from .current import Operations, Run, applied, running
from .errors import ModError, call_problem
from .methods import METHOD_OF, METHODS, unsupported
from .nodes import apply, literal_tensor, to_expr, with_named
from .op import Op
from .program import NUMBERS
from .purity import FACTORIES
from .randomness import draws_in_torch, is_off, refused, title
from .stand_ins import HostNumber
from .symbols import Sym, TensorView, Vector
from .vector_functions import FUNCTIONS as VECTOR_FUNCTIONS
from .vector_functions import apply_to_vectors, takes_vectors
from .vector_moves import MOVES, indexed


class Mode(TorchFunctionMode):
    """Sees every torch function the mod calls, those on captured tensors alone included."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if Run.current is None:  # an interrupt has left it behind
            return function(*args, **(kwargs or {}))
        return applied(function, args, kwargs or {})


def is_operation(function) -> bool:
    """Is this a function of torch, or an operator, that a mod may apply to symbols?"""
    try:
        if function in ops.FUNCTIONS or function in FACTORIES or function in VECTOR_FUNCTIONS:
            return True
    except TypeError:  # not hashable
        return False
    return isinstance(function, types.BuiltinFunctionType) and (function.__module__ or "").partition(".")[0] == "torch"


def _symbolic(value) -> bool:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return any(map(_symbolic, value))
    return type(value) in (Sym, TensorView, Vector)


_PLAIN_ATTRIBUTES = {
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.dim,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.is_cuda.__get__,
    torch.Tensor.layout.__get__,
}
_LIKE = (torch.Tensor.to, torch.Tensor.type_as)  # a captured tensor on the device, and in the dtype, of a symbol
_FROM_NUMBER = {torch.tensor, torch.scalar_tensor, torch.as_tensor}


def dispatch(function, args: tuple, kwargs: dict):
    """One torch function or Python operator met while tracing: in the kernel if it touches a symbol, else on the host."""
    trace = running()
    if draws_in_torch(function):
        if not is_off(function, args, kwargs):
            raise refused(title(function), trace.source(), trace.kind)
        if _symbolic(args) or _symbolic(tuple(kwargs.values())):
            return args[0] if args else kwargs["input"]
    in_kernel = _symbolic(args) or _symbolic(tuple(kwargs.values()))
    if function in _LIKE and len(args) == 2 and isinstance(args[0], torch.Tensor) and isinstance(args[1], (Sym, TensorView, Vector)):
        function, args, in_kernel = torch.Tensor.to, (args[0], args[1].device, args[1].dtype), False
    row = ops.METHODS.get(function) if isinstance(function, str) else ops.FUNCTIONS.get(function)
    if in_kernel and takes_vectors(function, args, kwargs, row is not None):
        _refuse_out(function, kwargs)
        return apply_to_vectors(function, args, kwargs)
    if in_kernel and row is not None and row.expand is not None:
        return _expand(row, args, kwargs)
    with torch._C.DisableTorchFunction():
        if function in _FROM_NUMBER and args and isinstance(args[0], (*NUMBERS, HostNumber, Sym)):
            return literal_tensor(args[0], kwargs.get("dtype"))
        if in_kernel:
            return _kernel_side(function, row, args, kwargs)
        if function in (torch.zeros, torch.ones, torch.full) and args and args[0] == ():
            fill = {torch.zeros: 0.0, torch.ones: 1.0}.get(function, kwargs.get("fill_value", args[1] if len(args) > 1 else None))
            return literal_tensor(fill, kwargs.get("dtype"))
        if function in _PLAIN_ATTRIBUTES:  # guarded with the tensor itself
            return function(*args, **kwargs)
        return trace.host(function, args, kwargs, getattr(function, "__name__", "value"))


def _expand(row: Op, args: tuple, kwargs: dict):
    """A row written in terms of others: run it, torch functions and all, on the symbols."""
    with torch._C.DisableTorchFunction():
        args = tuple(Sym(to_expr(a)) if isinstance(a, torch.Tensor) else a for a in args)
        kwargs = {k: Sym(to_expr(v)) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    _refuse_out(row.torch, kwargs)
    try:
        return row.expand(*with_named(args, kwargs), **kwargs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ModError):
            raise
        raise Run.current.error(call_problem(error, row.name)) from None


def _kernel_side(function, row: Op | None, args: tuple, kwargs: dict):
    if function is torch.Tensor.__getitem__:
        return indexed(*args)
    _refuse_out(function, kwargs)
    method = METHODS.get(function if isinstance(function, str) else METHOD_OF.get(function))
    if method is not None:
        return method(*args, **kwargs)
    if row is None:
        raise unsupported(_name_of(function))
    return apply(row, args, kwargs)


def _refuse_out(function, kwargs: dict) -> None:
    if kwargs.pop("out", None) is not None:
        raise Run.current.error(f"{_name_of(function)} with out=", "A mod returns its result; drop out=.")


def _name_of(function) -> str:
    name = function if isinstance(function, str) else getattr(function, "__qualname__", None) or repr(function)
    return name.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")


def _method(symbol: Sym | TensorView | Vector, name: str):
    if draws_in_torch(name):
        raise refused(title(name), running().source(), running().kind)
    for_vectors = name in (MOVES if type(symbol) is Sym else VECTOR_FUNCTIONS)
    if not (for_vectors or name in METHODS or name in ops.METHODS):
        raise unsupported(f"Tensor.{name}")
    return lambda *args, **kwargs: dispatch(name, (symbol, *args), kwargs)


OPERATIONS = Operations(dispatch, _method, is_operation)
