"""Where every operation of a mod arrives while it is traced, from torch functions and from Python operators.

What touches a symbol becomes a node of the graph, by the op table; what touches captured values alone runs on the host, now and at
every later call.
"""

from __future__ import annotations

import types

import torch
from torch.overrides import TorchFunctionMode

from . import ops
from .current import WEAK_DTYPE, Operations, Run, applied, running
from .errors import ModError
from .expr import Expr
from .program import NUMBERS, Untrackable
from .purity import FACTORIES
from .stand_ins import HostNumber, HostValue
from .symbols import Sym, TensorView
from .tensors import DTYPES


class Mode(TorchFunctionMode):
    """Sees every torch function the mod calls, those on captured tensors alone included."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if Run.current is None:  # an interrupt has left it behind
            return function(*args, **(kwargs or {}))
        return applied(function, args, kwargs or {})


def is_operation(function) -> bool:
    """Is this a function of torch, or an operator, that a mod may apply to symbols?"""
    try:
        if function in ops.FUNCTIONS or function in FACTORIES:
            return True
    except TypeError:  # not hashable
        return False
    return isinstance(function, types.BuiltinFunctionType) and (function.__module__ or "").partition(".")[0] == "torch"


def _symbolic(value) -> bool:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return any(map(_symbolic, value))
    return type(value) in (Sym, TensorView)


_PLAIN_ATTRIBUTES = {
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.dim,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.is_cuda.__get__,
    torch.Tensor.layout.__get__,
}
_FROM_NUMBER = {torch.tensor, torch.scalar_tensor, torch.as_tensor}


def dispatch(function, args: tuple, kwargs: dict):
    """One torch function or Python operator met while tracing: in the kernel if it touches a symbol, else on the host."""
    trace = running()
    in_kernel = _symbolic(args) or _symbolic(tuple(kwargs.values()))
    row = ops.METHODS.get(function) if isinstance(function, str) else ops.FUNCTIONS.get(function)
    if in_kernel and row is not None and row.expand is not None:
        return _expand(row, args, kwargs)
    with torch._C.DisableTorchFunction():
        if function in _FROM_NUMBER and args and isinstance(args[0], (*NUMBERS, HostNumber, Sym)):
            return _literal_tensor(args[0], kwargs.get("dtype"))
        if in_kernel:
            return _kernel_side(function, row, args, kwargs)
        if function in (torch.zeros, torch.ones, torch.full) and args and args[0] == ():
            fill = {torch.zeros: 0.0, torch.ones: 1.0}.get(function, kwargs.get("fill_value", args[1] if len(args) > 1 else None))
            return _literal_tensor(fill, kwargs.get("dtype"))
        if function in _PLAIN_ATTRIBUTES:  # guarded with the tensor itself
            return function(*args, **kwargs)
        return trace.host(function, args, kwargs, getattr(function, "__name__", "value"))


def _expand(row: ops.Op, args: tuple, kwargs: dict):
    """A row written in terms of others: run it, torch functions and all, on the symbols."""
    with torch._C.DisableTorchFunction():
        args = tuple(Sym(to_expr(a)) if isinstance(a, torch.Tensor) else a for a in args)
        kwargs = {k: Sym(to_expr(v)) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    _refuse_out(row.torch, kwargs)
    try:
        return row.expand(*args, **kwargs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ModError):
            raise
        raise Run.current.error(str(error)) from None


def _kernel_side(function, row: ops.Op | None, args: tuple, kwargs: dict):
    if function is torch.Tensor.__getitem__:
        return index_tensor(*args)
    _refuse_out(function, kwargs)
    for special, handler in ((_SPECIAL_METHODS, None), (_CASTS, _cast_method)):
        key = function if isinstance(function, str) else _method_names.get(function)
        if key in special:
            return handler(key, *args, **kwargs) if handler else special[key](*args, **kwargs)
    if row is None:
        raise unsupported(_name_of(function))
    return apply(row, args, kwargs)


def _refuse_out(function, kwargs: dict) -> None:
    if kwargs.pop("out", None) is not None:
        raise Run.current.error(f"{_name_of(function)} with out=", "A mod returns its result; drop out=.")


def _name_of(function) -> str:
    name = function if isinstance(function, str) else getattr(function, "__qualname__", None) or repr(function)
    return name.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")


def unsupported(name: str) -> ModError:
    return Run.current.error(f"{name} is not a supported operation", f"Supported are {ops.supported_operations()}.")


def apply(row: ops.Op, args: tuple, kwargs: dict) -> Sym:
    """Record one row of the op table on symbolic and plain operands."""
    trace = Run.current
    if kwargs:
        try:  # keywords that only name positional arguments (input=, other=)
            args = (*args, *(kwargs.pop(k) for k in ("condition", "input", "self", "other", "exponent") if k in kwargs))
        finally:
            if kwargs:
                raise trace.error(f"torch.{row.name} with {', '.join(kwargs)}=", "Drop that argument.")
    operands = [to_expr(a) for a in args]
    if len(operands) != row.arity:
        raise trace.error(f"{row.name} with {len(operands)} of its {row.arity} operands", f"Give it {row.arity}.")
    if row.name == "pow":
        simple = _simple_power(*operands)
        if simple is not None:
            return simple
    shorter = trace.simplified(row.name, operands)
    if shorter is not None:
        return Sym(shorter)
    dtype = result_dtype(row, operands)
    if isinstance(row.triton, dict) and row.operands == "result" and ops.kind(dtype) not in row.triton:
        raise trace.error(f"{row.name} of {dtype}", "Convert an operand first, for example with .int().")
    folded = _fold(row, operands, dtype)
    if folded is not None:
        return Sym(folded)
    return Sym(trace.made(trace.table.make(row.name, operands, dtype, source=trace.source())))


_dtype_cache: dict[tuple, torch.dtype] = {}


def result_dtype(row: ops.Op, operands: list[Expr]) -> torch.dtype:
    """torch's own rule: the function is run on 0-dim tensors (Python numbers where the operand is weak).

    On the CPU, not on meta: the first meta kernel of a process imports seconds of torch's compiler.
    """
    key = (row.name, torch.get_default_dtype(), tuple((o.dtype, o.weak) for o in operands))
    if key not in _dtype_cache:
        with torch._C.DisableTorchFunction():
            stand_ins = [_NUMBER_OF[ops.kind(o.dtype)] if o.weak else torch.ones((), dtype=o.dtype) for o in operands]
            try:
                result = row.torch(*stand_ins)
            except (TypeError, RuntimeError) as error:
                kinds = ", ".join(str(o.dtype).removeprefix("torch.") for o in operands)
                problem = str(error).strip().splitlines()[0]
                raise Run.current.error(f"torch refuses {row.name} on ({kinds}): {problem}") from None
            _dtype_cache[key] = result.dtype if isinstance(result, torch.Tensor) else torch.tensor(result).dtype
    return _dtype_cache[key]


_NUMBER_OF = {"bool": True, "int": 1, "float": 1.0}


def to_expr(value) -> Expr:
    """The expression for anything a mod may use as an operand."""
    trace = Run.current
    if type(value) is Sym:
        return value.expr
    if type(value) is TensorView:
        value.incomplete()
    if type(value) is HostValue:
        raise Untrackable("uses an object where a number is needed")
    if type(value) is HostNumber or type(value) in NUMBERS:
        return trace.number(value)
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise trace.error(
                f"a captured tensor of shape {tuple(value.shape)} is used where a scalar is needed",
                "Index it, for example with [h] or [q_idx].",
            )
        return index_tensor(value, ()).expr
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return to_expr(value.item())
    raise trace.error(
        f"{value!r} ({type(value).__name__}) is used where a number is needed", "Use symbols, Python numbers and captured tensors."
    )


def index_tensor(tensor: torch.Tensor, index) -> Sym | TensorView:
    """`tensor[index]` with at least one symbol among the indices (or a 0-dim tensor with none)."""
    trace = Run.current
    if not isinstance(tensor, torch.Tensor):
        raise trace.error(f"{type(tensor).__name__} is indexed by a symbol", "Capture a tensor and index that.")
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if i is Ellipsis]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        if len(index) - 1 < tensor.ndim:
            raise trace.error("`...` in the index leaves dimensions over", "Index every dimension by a number or a symbol.")
        index = index[:at] + index[at + 1 :]
    if len(index) > tensor.ndim:
        raise trace.error(f"{len(index)} indices for a captured tensor of shape {tuple(tensor.shape)}", f"Use at most {tensor.ndim}.")
    for i in index:
        if isinstance(i, slice) or i is None:
            raise trace.error(
                f"{'a slice' if isinstance(i, slice) else 'None'} in an index with symbols",
                "Slice the tensor before, or index every dimension by a number or a symbol.",
            )
    exprs = [to_expr(i) for i in index]
    for e in exprs:
        if ops.kind(e.dtype) != "int":
            raise trace.error(f"an index of {e.dtype}", "Indices are integers: add .int() or .long().")
    if len(index) < tensor.ndim:
        return TensorView(tensor, index)
    if tensor.dtype not in DTYPES and tensor.layout == torch.strided and not tensor.is_quantized:
        raise trace.error(f"a captured tensor of {tensor.dtype}", "Mods read real numbers: convert it before.")
    if tensor.ndim == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
        number = trace.host_scalar(tensor)
        return Sym(
            _folded_literal(number.attr, tensor.dtype)
            if number.is_literal
            else trace.table.make("cast", (number,), tensor.dtype, source=trace.source())
        )
    capture = trace.tensor_index(tensor)
    return Sym(trace.made(trace.table.make("load", exprs, tensor.dtype, attr=capture, source=trace.source())))


def _literal_tensor(value, dtype: torch.dtype | None) -> Sym:
    """torch.tensor(value): a number that takes part in type promotion as a tensor."""
    trace = Run.current
    expr = to_expr(value)
    if dtype is None:
        dtype = torch.get_default_dtype() if ops.kind(expr.dtype) == "float" else expr.dtype
    if expr.is_literal:
        return Sym(_folded_literal(expr.attr, dtype))
    return Sym(trace.table.make("cast", (expr,), dtype, source=trace.source()))


def _folded_literal(value, dtype: torch.dtype) -> Expr:
    with torch._C.DisableTorchFunction():
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None).to(dtype).item()
    return Run.current.table.make("literal", (), dtype, attr=value)


def _fold(row: ops.Op, operands: list[Expr], dtype: torch.dtype) -> Expr | None:
    """Constant operands are computed now, and `mask & True` is `mask`; None when there is nothing to fold."""
    if all(o.is_literal for o in operands) and not _may_trap(row, operands):
        with torch._C.DisableTorchFunction():
            plain = [o.attr if o.weak else torch.tensor(o.attr, dtype=o.dtype) for o in operands]
            try:
                result = row.torch(*plain)
            except (RuntimeError, ArithmeticError) as error:  # a division of integers by 0, a number that does not fit
                problem = str(error).strip().splitlines()[0]
                raise Run.current.error(f"torch refuses {row.name} of {' and '.join(str(o.attr) for o in operands)}: {problem}") from None
        value = result.item() if isinstance(result, torch.Tensor) else result
        if all(o.weak for o in operands) and not isinstance(result, torch.Tensor):
            return Run.current.table.make("literal", (), WEAK_DTYPE[type(value)], attr=value, weak=True)
        return _folded_literal(value, dtype)
    if row.name in ("and_", "logical_and", "or_", "logical_or") and dtype == torch.bool:
        absorbing = row.name in ("or_", "logical_or")  # True absorbs in |, False in &
        for constant, other in (operands, operands[::-1]):
            if constant.is_literal and other.dtype == torch.bool:
                return _folded_literal(absorbing, dtype) if bool(constant.attr) == absorbing else other
    return None


def _may_trap(row: ops.Op, operands: list[Expr]) -> bool:
    """Would torch's division of the least integer by -1 end the process? The kernel divides."""
    return row.name in ("floor_divide", "div_trunc", "remainder", "fmod") and operands[1].attr == -1 and operands[0].attr < 0


def _simple_power(base: Expr, exponent: Expr) -> Sym | None:
    """Constant powers as products: exact for integers, and cheaper than pow."""
    if not (exponent.is_literal and exponent.weak) or base.weak or ops.kind(base.dtype) == "bool":
        return None
    power, symbol = exponent.attr, Sym(base)
    if ops.kind(base.dtype) == "int":
        if isinstance(power, float):
            return None
        if power < 0:
            raise Run.current.error("an integer to a negative power", "Convert the base first, with .float().")
    elif power == 0.5:
        return dispatch(torch.sqrt, (symbol,), {})
    elif power not in (0, 1, 2, 3, 4):
        return None
    result, square, bits = dispatch(torch.ones_like, (symbol,), {}), symbol, int(power)
    while bits:
        if bits & 1:
            result = square if result.expr.is_literal else result * square
        bits >>= 1
        square = square * square if bits else square
    return result


def cast(symbol, dtype: torch.dtype) -> Sym:
    trace = Run.current
    expr = to_expr(symbol)
    if not isinstance(dtype, torch.dtype):
        raise trace.error(f"a cast to {dtype!r}", "Cast to a torch dtype; symbols stay on their device.")
    if dtype.is_complex:
        raise trace.error(f"a cast to {dtype}", "Mods are real-valued.")
    if expr.dtype == dtype and not expr.weak:
        return symbol if isinstance(symbol, Sym) else Sym(expr)
    if expr.is_literal:
        return Sym(_folded_literal(expr.attr, dtype))
    return Sym(trace.table.make("cast", (expr,), dtype, source=trace.source()))


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


def _cast_method(name: str, symbol, **_):
    return cast(symbol, _CASTS[name])


def _to(symbol, *args, dtype=None, **_):
    for a in args:
        if isinstance(a, torch.dtype):
            dtype = a
        elif isinstance(a, (Sym, torch.Tensor)):
            dtype = a.dtype
    return symbol if dtype is None else cast(symbol, dtype)


def _like(fill):
    return lambda symbol, dtype=None, **_: _literal_tensor(fill, dtype or to_expr(symbol).dtype)


def _full_like(symbol, fill_value, dtype=None, **_):
    return _literal_tensor(fill_value, dtype or to_expr(symbol).dtype)


def _new(fill):
    def make(symbol, *size, dtype=None, **_):
        _scalar_shape(size)
        return _literal_tensor(fill, dtype or to_expr(symbol).dtype)

    return make


def _new_full(symbol, size, fill_value, dtype=None, **_):
    _scalar_shape((size,))
    return _literal_tensor(fill_value, dtype or to_expr(symbol).dtype)


def _reshape(symbol, *shape, **_):
    if any(isinstance(s, torch.dtype) for s in shape):
        raise unsupported("Tensor.view(dtype)")
    _scalar_shape(shape)
    return symbol


def _scalar_shape(shape: tuple) -> None:
    if any(s not in ((), []) for s in shape):
        raise Run.current.error(
            f"a value of shape {shape[0] if len(shape) == 1 else shape}", "A mod computes with scalars: the shape is ()."
        )


_SPECIAL_METHODS = {
    "to": _to,
    "type": _to,
    "type_as": _to,
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": _new_full,
    "view": _reshape,
    "reshape": _reshape,
    "new_tensor": lambda s, value, dtype=None, **_: _literal_tensor(value, dtype or s.dtype),
    **{name: lambda symbol, *_, **__: symbol for name in ("clone", "contiguous", "squeeze")},
}
_method_names = {
    getattr(home, name): name
    for name in (*_SPECIAL_METHODS, *_CASTS)
    for home in (torch.Tensor, torch)
    if callable(getattr(home, name, None)) and not isinstance(getattr(home, name), torch.dtype)
}
_METHODS = {*_CASTS, *_SPECIAL_METHODS, *ops.METHODS}


def _method(symbol: Sym, name: str):
    if name not in _METHODS:
        raise unsupported(f"Tensor.{name}")
    return lambda *args, **kwargs: dispatch(name, (symbol, *args), kwargs)


OPERATIONS = Operations(dispatch, _method, is_operation)
