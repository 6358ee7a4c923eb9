"""Tracing: run the user's mod once on symbols and record what it does to them.

`trace(mod, kind)` returns a `Traced`: the frozen graph and the host program that finds the mod's captured values again.
Torch functions reach the tracer through `__torch_function__` and a TorchFunctionMode, Python's operators through the
methods of `Sym`; both end in `apply`, which looks the operation up in the op table.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import sys
import types
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from . import ops
from .capture import NUMBERS, CaptureReader, HostNumber, HostProgram, adopt, host_call
from .errors import ModError
from .expr import MASK_SYMBOLS, SCORE_SYMBOLS, Expr, ExprTable, ModGraph, ScalarCapture, SourceLine, TensorCapture, walk

_SIGNATURES = {"score": f"score_mod({', '.join(SCORE_SYMBOLS)})", "mask": f"mask_mod({', '.join(MASK_SYMBOLS)})"}


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced mod with the program that finds its captured values again at every call."""

    graph: ModGraph
    program: HostProgram

    def bind(self, mod) -> list | None:
        """The values of graph.tensors followed by those of graph.scalars for `mod`; None if the trace does not fit it."""
        values = self.program.run(mod)
        if values is None:
            return None
        return [values[c.node + 1] for c in (*self.graph.tensors, *self.graph.scalars)]


class _Trace:
    """The state of one tracing run."""

    current: _Trace | None = None

    def __init__(self, mod, kind: str) -> None:
        self.kind = kind
        self.program = HostProgram(mod)
        self.reader = CaptureReader(self.program)
        self.table = ExprTable()
        self.tensors: dict[int, TensorCapture] = {}  # host node -> capture
        self.scalars: dict[int, ScalarCapture] = {}
        self._names: set[str] = set()

    def tensor_index(self, tensor: torch.Tensor, name: str) -> int:
        node = self.program.node_of(tensor)
        if node is None:
            raise self.error(f"a tensor of shape {tuple(tensor.shape)} that was not captured by the mod")
        if node not in self.tensors:
            describe = self.program.steps[node].describe
            self.tensors[node] = TensorCapture(self._unique(describe or name), tensor.dtype, tensor.ndim, node)
        return list(self.tensors).index(node)

    def scalar_index(self, number: HostNumber) -> int:
        if number.node not in self.scalars:
            capture = ScalarCapture(self._unique(number.name), type(number.value), number.node)
            self.scalars[number.node] = capture
        return list(self.scalars).index(number.node)

    def _unique(self, name: str) -> str:
        base = "".join(c if c.isalnum() and c.isascii() else "_" for c in name).strip("_").lower() or "captured"
        name, count = base, 1
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    def source(self) -> SourceLine | None:
        """The innermost line of the user's code that is being run."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self.reader.codes:
                file, line = frame.f_code.co_filename, frame.f_lineno
                return SourceLine(file, line, linecache.getline(file, line).strip())
            frame = frame.f_back
        return None

    def error(self, problem: str, remedy: str = "") -> ModError:
        return _mod_error(problem, remedy, self.source(), self.kind)


def _mod_error(problem: str, remedy: str, source: SourceLine | None, kind: str) -> ModError:
    where = f'\n  File "{source.file}", line {source.line}\n    {source.text}' if source else ""
    return ModError(f"{kind}_mod: {problem}{where}" + (f"\n{remedy}" if remedy else ""))


class Sym:
    """A 0-dim tensor known only inside the kernel, while a mod is traced."""

    __slots__ = ("expr",)
    __hash__ = object.__hash__

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    dtype = property(lambda self: self.expr.dtype)
    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)
    device = property(lambda self: torch.device("meta"))
    requires_grad = property(lambda self: False)

    def dim(self):
        return 0

    def numel(self):
        return 1

    def size(self, dim=None):
        if dim is not None:
            raise _Trace.current.error("a symbol is a scalar and has no dimensions", "Use it as a number.")
        return torch.Size(())

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def __getattr__(self, name):
        if name in _CASTS or name in _SPECIAL_METHODS or name in ops.METHODS:
            return lambda *args, **kwargs: dispatch(name, (self, *args), kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported(f"Tensor.{name}")

    def _refuse(self, what: str, remedy: str):
        raise _Trace.current.error(f"{what} needs the value of a symbol, which is only known inside the kernel", remedy)

    def __bool__(self):
        self._refuse(
            "`if`, `and`, `or`, `not`, min(), max() or a chained comparison",
            "Write torch.where(condition, a, b) for `if`, `&` `|` `~` for `and` `or` `not`, (a <= x) & (x < b) for "
            "a <= x < b, torch.minimum / torch.maximum for min / max.")

    def __float__(self):
        self._refuse("a conversion to a Python float (math.exp and the like)", "Use torch's function (torch.exp), or .float().")

    def __int__(self):
        self._refuse("a conversion to a Python int", "Use .int() or .long(), which stay inside the kernel.")

    def __index__(self):
        self._refuse("an index into a Python list, or range()", "Capture a tensor instead of a list and index that.")

    def __iter__(self):
        self._refuse("iterating", "A mod computes one number from scalars.")

    def item(self):
        self._refuse(".item()", "Use the symbol itself.")

    tolist = item

    def __getitem__(self, index):
        raise _Trace.current.error("a symbol is a scalar and cannot be indexed", "Index a captured tensor instead.")

    def __setattr__(self, name, value):
        if name != "expr":
            raise _Trace.current.error(f"a symbol has no attribute {name!r} to set")
        object.__setattr__(self, name, value)

    def __pos__(self):
        return self

    def __repr__(self):
        return f"<{self.expr.attr if self.expr.op == 'symbol' else self.expr.op}: {self.expr.dtype}>"


def _operator(name: str, function, reflected: bool):
    if reflected:
        return lambda self, other: dispatch(function, (other, self), {})
    return lambda self, *other: dispatch(function, (self, *other), {})


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _function = getattr(operator, f"{_name}_", None) or getattr(operator, _name)
    setattr(Sym, f"__{_name}__", _operator(_name, _function, reflected=False))
    setattr(Sym, f"__r{_name}__", _operator(_name, _function, reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert"):
    setattr(Sym, f"__{_name}__", _operator(_name, getattr(operator, _name), reflected=False))


class TensorView:
    """A captured tensor with its first dimensions indexed by symbols; indexing all of them gives a Sym."""

    __slots__ = ("tensor", "index")

    def __init__(self, tensor: torch.Tensor, index: tuple) -> None:
        self.tensor, self.index = tensor, index

    shape = property(lambda self: self.tensor.shape[len(self.index):])
    ndim = property(lambda self: self.tensor.ndim - len(self.index))
    dtype = property(lambda self: self.tensor.dtype)

    def __getitem__(self, index):
        return _index(self.tensor, (*self.index, *(index if isinstance(index, tuple) else (index,))))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def __getattr__(self, name):
        raise self._incomplete()

    def _incomplete(self, *_):
        raise _Trace.current.error(
            f"a captured tensor of shape {tuple(self.tensor.shape)} is indexed by {len(self.index)} of its "
            f"{self.tensor.ndim} dimensions, which gives a {self.ndim}-dimensional value where a scalar is needed",
            "Index every dimension.")

    __bool__ = __float__ = __int__ = __len__ = __iter__ = _incomplete


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge",
              "radd", "rsub", "rmul", "rtruediv", "neg", "abs", "invert"):
    setattr(TensorView, f"__{_name}__", TensorView._incomplete)


class _Mode(TorchFunctionMode):
    """Sees every torch function the mod calls, those on captured tensors alone included."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})


def _symbolic(value) -> bool:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return any(map(_symbolic, value))
    return type(value) in (Sym, TensorView)


_PLAIN_ATTRIBUTES = {torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.ndim.__get__, torch.Tensor.dim,
                     torch.Tensor.requires_grad.__get__, torch.Tensor.is_cuda.__get__, torch.Tensor.layout.__get__}
_FACTORIES = {torch.tensor, torch.scalar_tensor, torch.as_tensor}


def dispatch(function, args: tuple, kwargs: dict):
    """One torch function or Python operator met while tracing: in the kernel if it touches a symbol, else on the host."""
    trace = _Trace.current
    if trace is None:
        raise RuntimeError("a symbol of a traced mod was used after the trace had ended")
    in_kernel = _symbolic(args) or _symbolic(tuple(kwargs.values()))
    row = ops.METHODS.get(function) if isinstance(function, str) else ops.FUNCTIONS.get(function)
    if in_kernel and row is not None and row.expand is not None:
        return _expand(row, args, kwargs)
    with torch._C.DisableTorchFunction():
        if function in _FACTORIES and args and isinstance(args[0], (*NUMBERS, HostNumber, Sym)):
            return _literal_tensor(args[0], kwargs.get("dtype"))
        if in_kernel:
            return _kernel_side(function, row, args, kwargs)
        if function in (torch.zeros, torch.ones, torch.full) and args and args[0] == ():
            fill = {torch.zeros: 0.0, torch.ones: 1.0}.get(function, kwargs.get("fill_value", args[1] if len(args) > 1 else None))
            return _literal_tensor(fill, kwargs.get("dtype"))
        if function in _PLAIN_ATTRIBUTES:  # guarded with the tensor itself
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "value")
        owner = args[0] if args and isinstance(args[0], torch.Tensor) else None
        known = trace.program.node_of(owner) if owner is not None else None
        if name in ("__get__", "size", "item") and known is not None:
            name = trace.program.steps[known].describe
        return host_call(trace.program, function, args, kwargs, name)


def _expand(row: ops.Op, args: tuple, kwargs: dict):
    """A row written in terms of others: run it, torch functions and all, on the symbols."""
    with torch._C.DisableTorchFunction():
        args = tuple(Sym(to_expr(a)) if isinstance(a, torch.Tensor) else a for a in args)
        kwargs = {k: Sym(to_expr(v)) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    try:
        return row.expand(*args, **kwargs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ModError):
            raise
        raise _Trace.current.error(str(error)) from None


def _kernel_side(function, row: ops.Op | None, args: tuple, kwargs: dict):
    trace = _Trace.current
    if function is torch.Tensor.__getitem__:
        return _index(*args)
    if kwargs.pop("out", None) is not None:
        raise trace.error(f"{_name_of(function)} with out=", "A mod returns its result; drop out=.")
    for special, handler in ((_SPECIAL_METHODS, None), (_CASTS, _cast_method)):
        key = function if isinstance(function, str) else _method_names.get(function)
        if key in special:
            return handler(key, *args, **kwargs) if handler else special[key](*args, **kwargs)
    if row is None:
        raise _unsupported(_name_of(function))
    return apply(row, args, kwargs)


def _name_of(function) -> str:
    return function if isinstance(function, str) else getattr(function, "__qualname__", None) or repr(function)


def _unsupported(name: str) -> ModError:
    return _Trace.current.error(f"{name} is not a supported operation", f"Supported are {ops.supported_operations()}.")


def apply(row: ops.Op, args: tuple, kwargs: dict) -> Sym:
    """Record one row of the op table on symbolic and plain operands."""
    trace = _Trace.current
    if kwargs:
        try:  # keywords that only name positional arguments (input=, other=)
            args = (*args, *(kwargs.pop(k) for k in ("condition", "input", "self", "other", "exponent") if k in kwargs))
        finally:
            if kwargs:
                raise trace.error(f"torch.{row.name} with {', '.join(kwargs)}=", "Drop that argument.")
    operands = [to_expr(a) for a in args]
    if row.name == "pow":
        simple = _simple_power(*operands)
        if simple is not None:
            return simple
    dtype = result_dtype(row, operands)
    if isinstance(row.triton, dict) and row.operands == "result" and ops.kind(dtype) not in row.triton:
        raise trace.error(f"{row.name} of {dtype}", "Convert an operand first, for example with .int().")
    folded = _fold(row, operands, dtype)
    if folded is not None:
        return Sym(folded)
    return Sym(trace.table.make(row.name, operands, dtype, source=trace.source()))


_dtype_cache: dict[tuple, torch.dtype] = {}


def result_dtype(row: ops.Op, operands: list[Expr]) -> torch.dtype:
    """torch's own rule: the function is run on 0-dim tensors (Python numbers where the operand is weak).

    On the CPU, not on meta: the first meta kernel of a process imports seconds of torch's compiler.
    """
    key = (row.name, tuple((o.dtype, o.weak) for o in operands))
    if key not in _dtype_cache:
        with torch._C.DisableTorchFunction():
            stand_ins = [_NUMBER_OF[ops.kind(o.dtype)] if o.weak else torch.ones((), dtype=o.dtype)
                         for o in operands]
            try:
                result = row.torch(*stand_ins)
            except (TypeError, RuntimeError) as error:
                kinds = ", ".join(str(o.dtype).removeprefix("torch.") for o in operands)
                problem = str(error).strip().splitlines()[0]
                raise _Trace.current.error(f"torch refuses {row.name} on ({kinds}): {problem}") from None
            _dtype_cache[key] = result.dtype if isinstance(result, torch.Tensor) else torch.tensor(result).dtype
    return _dtype_cache[key]


_NUMBER_OF = {"bool": True, "int": 1, "float": 1.0}
_WEAK_DTYPE = {bool: torch.bool, int: torch.int64, float: torch.float32}


def to_expr(value) -> Expr:
    """The expression for anything a mod may use as an operand."""
    trace = _Trace.current
    if type(value) is Sym:
        return value.expr
    if type(value) is TensorView:
        value._incomplete()
    if isinstance(value, HostNumber):
        dtype = _WEAK_DTYPE[type(value.value)]
        return trace.table.make("scalar", (), dtype, attr=trace.scalar_index(value), weak=True)
    if isinstance(value, NUMBERS):
        return trace.table.make("literal", (), _WEAK_DTYPE[type(value)], attr=value, weak=True)
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise trace.error(f"a captured tensor of shape {tuple(value.shape)} is used where a scalar is needed",
                              "Index it, for example with [h] or [q_idx].")
        return _index(value, ()).expr
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return to_expr(value.item())
    raise trace.error(f"{value!r} ({type(value).__name__}) is used where a number is needed",
                      "Use symbols, Python numbers and captured tensors.")


def _index(tensor: torch.Tensor, index) -> Sym | TensorView:
    """`tensor[index]` with at least one symbol among the indices (or a 0-dim tensor with none)."""
    trace = _Trace.current
    if not isinstance(tensor, torch.Tensor):
        raise trace.error(f"{type(tensor).__name__} is indexed by a symbol", "Capture a tensor and index that.")
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if i is Ellipsis]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        if len(index) - 1 < tensor.ndim:
            raise trace.error("`...` in the index leaves dimensions over", "Index every dimension by a number or a symbol.")
        index = index[:at] + index[at + 1:]
    if len(index) > tensor.ndim:
        raise trace.error(f"{len(index)} indices for a captured tensor of shape {tuple(tensor.shape)}",
                          f"Use at most {tensor.ndim}.")
    for i in index:
        if isinstance(i, slice) or i is None:
            raise trace.error(f"{'a slice' if isinstance(i, slice) else 'None'} in an index with symbols",
                              "Slice the tensor before, or index every dimension by a number or a symbol.")
    exprs = [to_expr(i) for i in index]
    for e in exprs:
        if ops.kind(e.dtype) != "int":
            raise trace.error(f"an index of {e.dtype}", "Indices are integers: add .int() or .long().")
    if len(index) < tensor.ndim:
        return TensorView(tensor, index)
    if tensor.ndim == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
        return _host_scalar(tensor)
    capture = trace.tensor_index(tensor, "captured")
    return Sym(trace.table.make("load", exprs, tensor.dtype, attr=capture, source=trace.source()))


def _host_scalar(tensor: torch.Tensor) -> Sym:
    """A 0-dim tensor in host memory: its value becomes an argument of the kernel, as torch allows on any device."""
    trace = _Trace.current
    node = trace.program.node_of(tensor)
    number = adopt(trace.program, lambda values: values[node + 1].item(), tensor.item(), trace.program.steps[node].describe)
    return _literal_tensor(number, tensor.dtype)


def _literal_tensor(value, dtype: torch.dtype | None) -> Sym:
    """torch.tensor(value): a number that takes part in type promotion as a tensor."""
    trace = _Trace.current
    expr = to_expr(value)
    if dtype is None:
        dtype = torch.get_default_dtype() if ops.kind(expr.dtype) == "float" else expr.dtype
    if expr.is_literal:
        return Sym(_folded_literal(expr.attr, dtype))
    return Sym(trace.table.make("cast", (expr,), dtype, source=trace.source()))


def _folded_literal(value, dtype: torch.dtype) -> Expr:
    with torch._C.DisableTorchFunction():
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None).to(dtype).item()
    return _Trace.current.table.make("literal", (), dtype, attr=value)


def _fold(row: ops.Op, operands: list[Expr], dtype: torch.dtype) -> Expr | None:
    """Constant operands are computed now, and `mask & True` is `mask`; None when there is nothing to fold."""
    if all(o.is_literal for o in operands):
        with torch._C.DisableTorchFunction():
            plain = [o.attr if o.weak else torch.tensor(o.attr, dtype=o.dtype) for o in operands]
            result = row.torch(*plain)
        value = result.item() if isinstance(result, torch.Tensor) else result
        if all(o.weak for o in operands) and not isinstance(result, torch.Tensor):
            return _Trace.current.table.make("literal", (), _WEAK_DTYPE[type(value)], attr=value, weak=True)
        return _folded_literal(value, dtype)
    if row.name in ("and_", "logical_and", "or_", "logical_or") and dtype == torch.bool:
        absorbing = row.name in ("or_", "logical_or")  # True absorbs in |, False in &
        for constant, other in (operands, operands[::-1]):
            if constant.is_literal and other.dtype == torch.bool:
                return _folded_literal(absorbing, dtype) if bool(constant.attr) == absorbing else other
    return None


def _simple_power(base: Expr, exponent: Expr) -> Sym | None:
    """Constant powers as products: exact for integers, and cheaper than pow."""
    if not (exponent.is_literal and exponent.weak) or base.weak or ops.kind(base.dtype) == "bool":
        return None
    power, symbol = exponent.attr, Sym(base)
    if ops.kind(base.dtype) == "int":
        if isinstance(power, float):
            return None
        if power < 0:
            raise _Trace.current.error("an integer to a negative power", "Convert the base first, with .float().")
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
    trace = _Trace.current
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


_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16, "int": torch.int32,
          "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "bool": torch.bool}


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
    def make(symbol, *args, dtype=None, **_):
        value = args[-1] if fill is None else fill
        return _literal_tensor(value, dtype or to_expr(symbol).dtype)

    return make


def _full(symbol, *args, fill_value=None, dtype=None, **_):
    value = fill_value if fill_value is not None else args[-1]
    return _literal_tensor(value, dtype or to_expr(symbol).dtype)


_SPECIAL_METHODS = {
    "to": _to, "type": _to, "type_as": _to,
    "zeros_like": _like(0), "ones_like": _like(1), "new_zeros": _like(0), "new_ones": _like(1),
    "full_like": _full, "new_full": _full, "new_tensor": lambda s, value, dtype=None, **_: _literal_tensor(value, dtype or s.dtype),
    **{name: lambda symbol, *_, **__: symbol for name in ("clone", "contiguous", "detach", "view", "reshape", "squeeze")},
}
_method_names = {getattr(home, name): name for name in (*_SPECIAL_METHODS, *_CASTS) for home in (torch.Tensor, torch)
                 if callable(getattr(home, name, None)) and not isinstance(getattr(home, name), torch.dtype)}


def _check_parameters(mod, kind: str) -> None:
    expected = SCORE_SYMBOLS if kind == "score" else MASK_SYMBOLS
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return  # a builtin without a signature: calling it will tell
    try:
        signature.bind(*expected)
    except TypeError:
        code = getattr(mod, "__code__", None)
        where = SourceLine(code.co_filename, code.co_firstlineno,
                           linecache.getline(code.co_filename, code.co_firstlineno).strip()) if code else None
        name = getattr(mod, "__name__", type(mod).__name__)
        hint = ""
        other = "mask" if kind == "score" else "score"
        try:
            signature.bind(*(MASK_SYMBOLS if kind == "score" else SCORE_SYMBOLS))
            hint = f" This looks like a {other}_mod: " + (
                "pass it through block_mask=create_block_mask(...)." if other == "mask" else "pass it as score_mod=.")
        except TypeError:
            pass
        raise _mod_error(f"{name}{signature} does not take {len(expected)} positional arguments",
                         f"Write it as {_SIGNATURES[kind]}.{hint}", where, kind) from None


def trace(mod, kind: str) -> Traced:
    """Trace a score_mod (`kind="score"`) or mask_mod (`kind="mask"`).

    Symbols are 0-dim: score is float32, b, h, q_idx and kv_idx are int32. Raises ModError with the user's own line.
    """
    if not callable(mod):
        raise TypeError(f"{kind}_mod must be a function, got {type(mod).__name__}")
    _check_parameters(mod, kind)
    run = _Trace(mod, kind)
    names = SCORE_SYMBOLS if kind == "score" else MASK_SYMBOLS
    symbols = [Sym(run.table.make("symbol", (), torch.float32 if n == "score" else torch.int32, attr=n)) for n in names]
    previous, _Trace.current = _Trace.current, run
    try:
        tracked = run.reader.root(mod)
        with _Mode():
            result = tracked(*symbols)
        expr = _checked_result(result, run)
    finally:
        _Trace.current = previous
    nodes = walk(expr)
    code = next(iter(run.reader.codes), None) if not isinstance(mod, types.FunctionType) else mod.__code__
    origin = SourceLine(code.co_filename, code.co_firstlineno, "") if code else None
    name = getattr(mod, "__name__", None) or type(mod).__name__
    used = frozenset(n.attr for n in nodes if n.op == "symbol")
    graph = ModGraph(kind, name, expr, tuple(run.tensors.values()), tuple(run.scalars.values()), origin, used)
    run.program.values.clear()  # the trace outlives its first call; the captured values must not
    run.program.root = None
    return Traced(graph, run.program)


def _checked_result(result, run: _Trace) -> Expr:
    where = run.kind + "_mod"
    if isinstance(result, (tuple, list, dict, str)) or result is None:
        got = "nothing (a `return` is missing)" if result is None else f"a {type(result).__name__}"
        raise _result_error(run, f"returns {got}", f"Return one scalar from {where}.")
    if isinstance(result, torch.Tensor) and result.ndim:
        raise _result_error(run, f"returns a tensor of shape {tuple(result.shape)}", f"{where} returns one scalar per position.")
    if type(result) is TensorView:
        raise _result_error(run, f"returns a tensor of shape {tuple(result.shape)}: a captured tensor of shape "
                                 f"{tuple(result.tensor.shape)} indexed by {len(result.index)} of its dimensions",
                            "Index every dimension.")
    expr = to_expr(result)
    if run.kind == "mask" and expr.dtype != torch.bool:
        raise _result_error(run, f"returns {expr.dtype}, not torch.bool",
                            "A mask_mod says which positions may attend: return a comparison, or add `!= 0`.", expr.source)
    return expr


def _result_error(run: _Trace, problem: str, remedy: str, source: SourceLine | None = None) -> ModError:
    if source is None:
        code = getattr(run.program.root, "__code__", None)
        if code is not None:
            source = SourceLine(code.co_filename, code.co_firstlineno,
                                linecache.getline(code.co_filename, code.co_firstlineno).strip())
    return _mod_error(problem, remedy, source, run.kind)
