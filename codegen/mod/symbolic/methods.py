"""Methods of tensors that a mod may call on a symbol, and that are no operations: casts, and what makes a 0-dim tensor."""

from __future__ import annotations

import torch

from ..captured.stand_ins import same_one, value_of
from ..current import running
from ..errors import ModError
from ..expr import walk
from ..table.ops import supported_operations
from .integers import may_leave_int32, with_indices
from .nodes import cast, literal_tensor, to_expr
from .symbols import Sym

_BEFORE = "Call it before attention, and capture what it returns."
_INSTEAD = {
    **dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "median", "mode", "unique"), _BEFORE),
    **dict.fromkeys(("tril", "triu"), "Compare q_idx with kv_idx."),
    "one_hot": "Compare with torch.arange(n).",
}


def unsupported(name: str) -> ModError:
    """What is said of a function or method that has no row and is none of these."""
    instead = _INSTEAD.get(name.rpartition(".")[2])
    return running().error(f"{name} is not a supported operation", instead or f"Supported are {supported_operations()}.")


_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}


def _cast(symbol, dtype: torch.dtype) -> Sym:
    """A cast that a mod asks for. One of int32 to int32 is kept where what is cast may leave int32, and is then computed in int64."""
    found = cast(symbol, dtype)
    expr = to_expr(found)
    if dtype != torch.int32 or not may_leave_int32(expr):
        return found
    run = running()
    return Sym(run.table.make("cast", (expr,), dtype, source=run.source()))


def _cast_to(dtype: torch.dtype):
    return lambda symbol, **_: _cast(symbol, dtype)


_PYTHONS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def with_dtypes(function, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a function with dtypes in place of what torch takes for these: Python's types, and those of tensors of old."""
    if any(map(_is_type, (*args[1:], *kwargs.values()))):
        args, kwargs = (*args[:1], *map(_as_dtype, args[1:])), {k: _as_dtype(v) for k, v in kwargs.items()}
    if function in ("type", torch.Tensor.type) and len(args) > 1 and isinstance(args[1], str):
        kind = getattr(torch, args[1].rpartition(".")[2], None)
        args = (args[0], _as_dtype(kind), *args[2:]) if _is_type(kind) else args
    return args, kwargs


def _is_type(value) -> bool:
    value = value_of(value)
    return isinstance(value, type) and (value in _PYTHONS or isinstance(value, _OF_OLD))


def _as_dtype(value):
    if not _is_type(value):
        return value
    value = same_one(value)
    return _PYTHONS.get(value) or value.dtype


_OF_OLD = type(torch.FloatTensor)


def _to(symbol, *args, dtype=None, **_):
    dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
    return symbol if dtype is None else _cast(symbol, dtype)


def _type(symbol, dtype=None, *_, **__):
    if not isinstance(dtype, torch.dtype):
        raise running().error(f"type({'' if dtype is None else repr(dtype)})", "Write .to(dtype), and .dtype for what it has.")
    return _cast(symbol, dtype)


def _like(fill):
    return lambda symbol, dtype=None, **_: _number_like(symbol, fill, dtype)


def _number_like(symbol, value, dtype: torch.dtype | None) -> Sym:
    """A number in the dtype of a symbol. Like an index it is one, so that what is computed of it is int64 wherever int32 is too small."""
    expr, number = to_expr(symbol), to_expr(value)
    if dtype is None and number.weak and number.dtype == torch.int64 and id(expr) in with_indices(expr):
        return Sym(next(n for n in walk(expr) if n.op == "symbol" and n.dtype == torch.int32)) * 0 + value
    return literal_tensor(value, dtype or expr.dtype)


def _full_like(symbol, fill_value, dtype=None, **_):
    return _number_like(symbol, fill_value, dtype)


def _new(fill):
    def make(symbol, *size, dtype=None, **_):
        _scalar_shape(size)
        return _number_like(symbol, fill, dtype)

    return make


def _new_full(symbol, size, fill_value, dtype=None, **_):
    _scalar_shape((size,))
    return _number_like(symbol, fill_value, dtype)


def _scalar_shape(shape: tuple) -> None:
    if any(s not in ((), []) for s in shape):
        raise running().error(f"a value of shape {shape[0] if len(shape) == 1 else shape}", "A mod computes with scalars: the shape is ().")


METHODS = {
    **{name: _cast_to(dtype) for name, dtype in _CASTS.items()},
    "to": _to,
    "type": _type,
    "type_as": _to,
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": _new_full,
    "new_tensor": lambda s, value, dtype=None, **_: _number_like(s, value, dtype),
    "is_floating_point": lambda symbol: to_expr(symbol).dtype.is_floating_point,
    "contiguous": lambda symbol, *_, **__: symbol,
    "clone": lambda symbol, **_: Sym(to_expr(symbol)),
}
METHOD_OF = {  # torch's functions that are these methods
    getattr(home, name): name
    for name in METHODS
    for home in (torch.Tensor, torch)
    if callable(getattr(home, name, None)) and not isinstance(getattr(home, name), torch.dtype)
}
