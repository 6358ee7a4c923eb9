"""Nodes of a traced graph, made of operands: by a row of the op table, a cast, a number, or an element of a captured tensor."""

from __future__ import annotations

import torch

from ..captured.program import NUMBERS, UNKNOWN_NUMBERS, Untrackable
from ..captured.stand_ins import HostNumber, HostValue
from ..captured.tensors import DTYPES, is_moving, tracing
from ..current import WEAK_DTYPE, Run
from ..expr import Expr
from ..table.op import Op, kind
from .symbols import Sym, TensorView, Vector

# around small computations of our own, which nobody is to record
Unseen, Unrecorded = torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch


def apply(row: Op, args: tuple, kwargs: dict) -> Sym:
    """Record one row of the op table on symbolic and plain operands."""
    trace = Run.current
    args = with_named(args, kwargs)
    if kwargs:
        raise trace.error(f"torch.{row.name} with {', '.join(kwargs)}=", "Drop that argument.")
    operands = [to_expr(a) for a in args]
    if len(operands) != row.arity:
        raise trace.error(f"{row.name} with {len(operands)} of its {row.arity} operands", f"Give it {row.arity}.")
    simpler = row.simpler(*map(Sym, operands)) if row.simpler is not None else None
    if simpler is not None:
        return simpler
    shorter = trace.simplified(row.name, operands)
    if shorter is not None:
        return Sym(shorter)
    dtype = result_dtype(row, operands)
    if isinstance(row.triton, dict) and row.operands == "result" and kind(dtype) not in row.triton:
        raise trace.error(f"{row.name} of {dtype}", "Convert an operand first, for example with .int().")
    folded = _fold(row, operands, dtype)
    if folded is not None:
        return Sym(folded)
    return Sym(trace.table.make(row.name, operands, dtype, source=trace.source()))


def with_named(args: tuple, kwargs: dict) -> tuple:
    """The operands of a row, with those that are given by torch's names for them, which leave `kwargs`."""
    return (*args, *(kwargs.pop(k) for k in _OPERANDS if k in kwargs)) if kwargs else args


_OPERANDS = ("condition", "input", "self", "x", "a", "x1", "other", "x2", "exponent")  # x, a, x1 and x2 are NumPy's, which torch takes, too


_dtype_cache: dict[tuple, torch.dtype] = {}


def result_dtype(row: Op, operands: list[Expr]) -> torch.dtype:
    """torch's own rule: the function is run on 0-dim tensors (Python numbers where the operand is weak).

    On the CPU, not on meta: the first meta kernel of a process imports seconds of torch's compiler.
    """
    key = (row.name, torch.get_default_dtype(), tuple((o.dtype, o.weak) for o in operands))
    if key not in _dtype_cache:
        with Unseen(), Unrecorded():
            stand_ins = [_NUMBER_OF[kind(o.dtype)] if o.weak else torch.ones((), dtype=o.dtype, device="cpu") for o in operands]
            try:
                result = row.torch(*stand_ins)
            except (TypeError, RuntimeError) as error:
                kinds = ", ".join(str(o.dtype).removeprefix("torch.") for o in operands)
                problem = str(error).strip().splitlines()[0]
                raise Run.current.error(f"torch refuses {row.name} on ({kinds}): {problem}") from None
            _dtype_cache[key] = result.dtype if isinstance(result, torch.Tensor) else torch.tensor(result, device="cpu").dtype
    return _dtype_cache[key]


_NUMBER_OF = {"bool": True, "int": 1, "float": 1.0}


def to_expr(value) -> Expr:
    """The expression for anything a mod may use as an operand."""
    trace = Run.current
    if type(value) is Sym:
        return value.expr if value.run is trace or trace.numbers is None else _kept(value, trace)
    if type(value) in (TensorView, Vector):
        value.incomplete()
    if type(value) is HostValue:
        raise Untrackable("uses an object where a number is needed")
    if type(value) is HostNumber or type(value) in NUMBERS or type(value) in UNKNOWN_NUMBERS:
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
    if isinstance(value, NUMBERS):  # of an enumeration
        return trace.number(next(t for t in (bool, int, float) if isinstance(value, t))(value))
    raise trace.error(
        f"{value!r} ({type(value).__name__}) is used where a number is needed", "Use symbols, Python numbers and captured tensors."
    )


def _kept(symbol: Sym, trace: Run) -> Expr:
    """A symbol of an earlier run. A mod may make a tensor of a number once, and keep it."""
    expr, numbers = symbol.expr, symbol.run and symbol.run.numbers
    number = expr.args[0] if expr.op == "cast" else expr
    if number.is_literal:
        found = trace.table.make(number.op, (), number.dtype, number.attr, number.weak)
    elif number.op == "scalar" and numbers:
        found = trace.number(numbers[number.attr])
    else:
        raise trace.error(
            "a value that was computed in an earlier call, and kept",
            "A mod computes its values anew at every call. Keep what they are computed of: numbers and tensors.",
        )
    return found if number is expr else trace.table.make(expr.op, (found,), expr.dtype, source=trace.source())


def index_exprs(index: tuple) -> tuple[Expr, ...]:
    """The expressions of indices, which are integers."""
    exprs = tuple(map(to_expr, index))
    for e in exprs:
        if kind(e.dtype) != "int":
            raise Run.current.error(f"an index of {e.dtype}", "Indices are integers: add .int() or .long().")
    return exprs


def index_tensor(tensor: torch.Tensor, index: tuple) -> Sym | TensorView:
    """`tensor[index]` where all indices are scalars; a view if there are dimensions left."""
    trace = Run.current
    if not isinstance(tensor, torch.Tensor):
        raise trace.error(f"{type(tensor).__name__} is indexed by a symbol", "Capture a tensor and index that.")
    if len(index) > tensor.ndim:
        raise trace.error(f"{len(index)} indices for a captured tensor of shape {tuple(tensor.shape)}", f"Use at most {tensor.ndim}.")
    exprs = index_exprs(index)
    if len(index) < tensor.ndim:
        return TensorView(tensor, index)
    if tensor.dtype not in DTYPES and tensor.layout == torch.strided and not tensor.is_quantized:
        raise trace.error(f"a captured tensor of {tensor.dtype}", "Mods read real numbers: convert it, or capture .real and .imag.")
    if tensor.ndim == 0 and tensor.device.type == "cpu" and not tensor.requires_grad and not (tracing() or is_moving(tensor)):
        number = trace.host_scalar(tensor)
        return Sym(
            _folded_literal(number.attr, tensor.dtype)
            if number.is_literal
            else trace.table.make("cast", (number,), tensor.dtype, source=trace.source())
        )
    capture = trace.tensor_index(tensor)
    return Sym(trace.table.make("load", exprs, tensor.dtype, attr=capture, source=trace.source()))


def literal_tensor(value, dtype: torch.dtype | None) -> Sym:
    """torch.tensor(value): a number that takes part in type promotion as a tensor."""
    trace = Run.current
    expr = to_expr(value)
    if dtype is None:
        dtype = torch.get_default_dtype() if kind(expr.dtype) == "float" else expr.dtype
    if expr.is_literal:
        return Sym(_folded_literal(expr.attr, dtype))
    return Sym(trace.table.make("cast", (expr,), dtype, source=trace.source()))


def _folded_literal(value, dtype: torch.dtype) -> Expr:
    with Unseen(), Unrecorded():
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu").to(dtype).item()
    return Run.current.table.make("literal", (), dtype, attr=value)


def _fold(row: Op, operands: list[Expr], dtype: torch.dtype) -> Expr | None:
    """Constant operands are computed now, and `mask & True` is `mask`; None when there is nothing to fold."""
    if all(o.is_literal for o in operands) and not _may_trap(row, operands):
        with Unseen(), Unrecorded():
            plain = [o.attr if o.weak else torch.tensor(o.attr, dtype=o.dtype, device="cpu") for o in operands]
            try:
                result = row.torch(*plain)
                value = result.item() if isinstance(result, torch.Tensor) else result
            except (RuntimeError, ArithmeticError) as error:  # a division of integers by 0, a number that does not fit
                problem = str(error).strip().splitlines()[0]
                raise Run.current.error(f"torch refuses {row.name} of {' and '.join(str(o.attr) for o in operands)}: {problem}") from None
        if all(o.weak for o in operands) and not isinstance(result, torch.Tensor):
            return Run.current.table.make("literal", (), WEAK_DTYPE[type(value)], attr=value, weak=True)
        return _folded_literal(value, dtype)
    if type(row.absorbing) is bool and dtype == torch.bool:  # True absorbs in |, False in &
        for constant, other in (operands, operands[::-1]):
            if constant.is_literal and other.dtype == torch.bool:
                return _folded_literal(row.absorbing, dtype) if bool(constant.attr) == row.absorbing else other
    return None


def _may_trap(row: Op, operands: list[Expr]) -> bool:
    """Would torch's division of the least integer by -1 end the process? The kernel divides."""
    return row.divides and operands[1].attr == -1 and operands[0].attr < 0


def cast(symbol, dtype: torch.dtype) -> Sym:
    trace = Run.current
    expr = to_expr(symbol)
    if not isinstance(dtype, torch.dtype):
        raise trace.error(f"a cast to {dtype!r}", "Cast to a torch dtype; symbols stay on their device.")
    if dtype.is_complex:
        raise trace.error(f"a cast to {dtype}", "Mods are real-valued.")
    if dtype not in DTYPES:
        raise trace.error(f"a cast to {dtype}", f"Cast to one of {', '.join(sorted(str(d).removeprefix('torch.') for d in DTYPES))}.")
    if expr.dtype == dtype and not expr.weak:
        return symbol if isinstance(symbol, Sym) else Sym(expr)
    if expr.is_literal:
        return Sym(_folded_literal(expr.attr, dtype))
    return Sym(trace.table.make("cast", (expr,), dtype, source=trace.source()))
