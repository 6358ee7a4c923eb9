"""Where every operation of a mod arrives while it is traced, from torch functions and from Python operators.

What touches a symbol becomes a node of the graph, by the op table; what touches captured values alone runs on the host, now and at
every later call.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.overrides import TorchFunctionMode

from ..captured.program import NUMBERS
from ..captured.purity import FACTORIES
from ..captured.randomness import draws_in_torch, is_off, refusal
from ..captured.stand_ins import HostNumber
from ..current import Operations, Run, applied, running
from ..errors import ModError, call_problem
from ..table import ops
from ..table.op import Op
from .lookups import getitem, has_place
from .methods import METHOD_OF, METHODS, unsupported, with_dtypes
from .nodes import apply, literal_tensor, to_expr, with_named
from .symbols import Sym, TensorView, Vector, changed
from .vector_functions import FUNCTIONS as VECTOR_FUNCTIONS
from .vector_functions import apply_to_vectors, takes_vectors
from .vector_moves import MOVES, indexed
from .vectors import REDUCTIONS


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
_LIKE = (torch.Tensor.to, torch.Tensor.type_as, "to", "type_as")  # with a tensor: on the device of that, and in its dtype
_DETACH = ops.FUNCTIONS[torch.detach]
_FROM_NUMBER = {torch.tensor, torch.scalar_tensor, torch.as_tensor}


def dispatch(function, args: tuple, kwargs: dict):
    """One torch function or Python operator met while tracing: in the kernel if it touches a symbol, else on the host.

    Within torch.no_grad() no gradient flows through what it gives, also where no node is made; what it gives back as it was keeps its own.
    """
    found = _dispatched(function, args, kwargs)
    if not running().hides_gradients() or any(found is a for a in args):
        return found
    return _without_gradient(found)


def _without_gradient(found):
    if type(found) in (list, tuple):
        return type(found)(map(_without_gradient, found))
    if type(found) is TensorView:
        return TensorView(_detached(found.tensor), found.index)
    if type(found) is Vector and found.rows:  # whose elements may never be made, and later than this
        rows = tuple(replace(row, tensor=_detached(row.tensor)) for row in found.rows)
        return Vector(lambda: [apply(_DETACH, (item,), {}) for item in found.items], found.shape, rows, found.dtype)
    if type(found) is Vector:
        return Vector([_without_gradient(item) for item in found.items], found.shape)
    return Sym(running().made(found.expr)) if type(found) is Sym else found


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return running().host(torch.Tensor.detach, (tensor,), {}, "detached") if tensor.dtype.is_floating_point else tensor


def _dispatched(function, args: tuple, kwargs: dict):
    trace = running()
    if draws_in_torch(function):
        if not is_off(function, args, kwargs):
            raise refusal(function)
        if _symbolic(args) or _symbolic(tuple(kwargs.values())):
            return args[0] if args else kwargs["input"]
    in_kernel = _symbolic(args) or _symbolic(tuple(kwargs.values()))
    args, kwargs = with_dtypes(function, args, kwargs)
    if in_kernel and function in _LIKE:
        args, kwargs = _with_dtype_of(args, kwargs)
        function, in_kernel = torch.Tensor.to, _symbolic(args[:1])
    row = ops.METHODS.get(function) if isinstance(function, str) else ops.FUNCTIONS.get(function)
    if row is _DETACH and args and type(args[0]) is Sym:
        with torch._C.DisableTorchFunction():
            found = apply(row, args, kwargs)
        trace.shared.append((args[0], found))
        return found
    if in_kernel and takes_vectors(function, args, kwargs, row is not None):
        _refuse_out(function, kwargs)
        return apply_to_vectors(function, args, kwargs)
    if in_kernel and row is not None and row.expand is not None:
        return _expand(row, args, kwargs)
    with torch._C.DisableTorchFunction():
        if function in _FROM_NUMBER and args and isinstance(args[0], (*NUMBERS, HostNumber, Sym)):
            return _number_tensor(function, args[0], kwargs.get("dtype"))
        if in_kernel:
            return _kernel_side(function, row, args, kwargs)
        if function in (torch.zeros, torch.ones, torch.full) and args and args[0] == ():
            fill = {torch.zeros: 0.0, torch.ones: 1.0}.get(function, kwargs.get("fill_value", args[1] if len(args) > 1 else None))
            return literal_tensor(fill, kwargs.get("dtype"))
        if function in _PLAIN_ATTRIBUTES:  # guarded with the tensor itself
            return function(*args, **kwargs)
        if function is torch.Tensor.__getitem__ and has_place(args[1]):
            function = getitem
        return trace.host(function, args, kwargs, getattr(function, "__name__", "value"))


def _with_dtype_of(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of `x.to(...)` or `x.type_as(...)`, with the dtype of a tensor in place of that, and its device where x is captured."""
    like = next((v for v in (*args[1:], *kwargs.values()) if isinstance(v, (torch.Tensor, Sym, TensorView, Vector))), None)
    if like is None:
        return args, kwargs
    return (args[0], *(() if _symbolic(args[:1]) else (like.device,)), like.dtype), {}


def _number_tensor(function, value, dtype: torch.dtype | None) -> Sym:
    """A number, or a symbol, as a tensor of no dimension."""
    if type(value) is Sym and function is torch.as_tensor and dtype in (None, value.dtype):
        return value
    return literal_tensor(value, dtype or (torch.get_default_dtype() if function is torch.scalar_tensor else None))


def _expand(row: Op, args: tuple, kwargs: dict):
    """A row written in terms of others: run it, torch functions and all, on the symbols."""
    with torch._C.DisableTorchFunction():
        args = tuple(Sym(to_expr(a)) if isinstance(a, torch.Tensor) else a for a in args)
        kwargs = {k: Sym(to_expr(v)) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    _refuse_out(row.torch, kwargs)
    args, place = with_named(args, kwargs), _place_of_inplace(row.expand)
    in_place = kwargs.get("inplace") or place is not None and len(args) > place and args[place]
    try:
        found = row.expand(*args, **kwargs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ModError):
            raise
        raise Run.current.error(call_problem(error, row.name)) from None
    if in_place and found is not args[0]:
        changed(args[0])
    return found


def _place_of_inplace(expand: Callable) -> int | None:
    """Which argument of a function says whether it changes its operand in place."""
    names = list(inspect.signature(expand).parameters)
    return names.index("inplace") if "inplace" in names else None


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
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{function}"
    name = function if isinstance(function, str) else getattr(function, "__qualname__", None) or repr(function)
    return name.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")


def _method(symbol: Sym | TensorView | Vector, name: str):
    if draws_in_torch(name):
        raise refusal(name)
    for_vectors = name in (MOVES | REDUCTIONS if type(symbol) is Sym else VECTOR_FUNCTIONS)
    if not (for_vectors or name in METHODS or name in ops.METHODS):
        raise unsupported(f"Tensor.{name}")
    return lambda *args, **kwargs: dispatch(name, (symbol, *args), kwargs)


OPERATIONS = Operations(dispatch, _method, is_operation)
