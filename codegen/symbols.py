"""What a mod sees while it is traced: symbols for the score and the indices, views of captured tensors, and the run they
belong to. What is done to them goes to `dispatch`.
"""

from __future__ import annotations

import linecache
import operator
import sys
from contextlib import contextmanager

import torch

from .capture import CaptureReader, HostNumber, HostProgram
from .errors import ModError
from .expr import Expr, ExprTable, ScalarCapture, SourceLine, TensorCapture
from .tensors import check_kind


class Run:
    """What operations on symbols need while they become nodes: the table of nodes, and whom to blame for an error."""

    current: Run | None = None

    def __init__(self, kind: str, table: ExprTable) -> None:
        self.kind, self.table = kind, table

    @contextmanager
    def active(self):
        """Operations on symbols belong to this run."""
        previous, Run.current = Run.current, self
        try:
            yield self
        finally:
            Run.current = previous

    def source(self) -> SourceLine | None:
        """The user's line that a new node comes from."""
        return None

    def simplified(self, op: str, operands: list[Expr]) -> Expr | None:
        """A shorter expression for a new node; None if there is none."""
        return None

    def error(self, problem: str, remedy: str = "") -> ModError:
        return mod_error(problem, remedy, self.source(), self.kind)


class TracingRun(Run):
    """The state of one tracing run."""

    def __init__(self, mod, kind: str) -> None:
        super().__init__(kind, ExprTable())
        self.program = HostProgram(mod)
        self.reader = CaptureReader(self.program)
        self.tensors: dict[int, TensorCapture] = {}  # host node -> capture
        self.scalars: dict[int, ScalarCapture] = {}
        self._names: set[str] = set()

    def tensor_index(self, tensor: torch.Tensor, name: str) -> int:
        node = self.program.node_of(tensor)
        if node is None:
            raise self.error(f"a tensor of shape {tuple(tensor.shape)} that was not captured by the mod")
        if node not in self.tensors:
            describe = self.program.steps[node].describe
            check_kind(f"{self.kind}_mod captures {describe or name}, which", tensor)
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


def mod_error(problem: str, remedy: str, source: SourceLine | None, kind: str) -> ModError:
    where = f'\n  File "{source.file}", line {source.line}\n    {source.text}' if source else ""
    return ModError(f"{kind}_mod: {problem}{where}" + (f"\n{remedy}" if remedy else ""))


def dispatch(function, args: tuple, kwargs: dict):
    """dispatch.dispatch, which imports this module."""
    from .dispatch import dispatch

    return dispatch(function, args, kwargs)


class Sym:
    """A 0-dim tensor known only inside the kernel, while a mod is traced."""

    __slots__ = ("expr",)

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
            raise Run.current.error("a symbol is a scalar and has no dimensions", "Use it as a number.")
        return torch.Size(())

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def __getattr__(self, name):
        from .dispatch import METHOD_NAMES, unsupported

        if name in METHOD_NAMES:
            return lambda *args, **kwargs: dispatch(name, (self, *args), kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        raise unsupported(f"Tensor.{name}")

    def _refuse(self, what: str, remedy: str):
        raise Run.current.error(f"{what} needs the value of a symbol, which is only known inside the kernel", remedy)

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

    def __hash__(self):
        self._refuse("a key of a dict or a set", "Capture a tensor instead and index that.")

    def item(self):
        self._refuse(".item()", "Use the symbol itself.")

    tolist = item

    def __getitem__(self, index):
        raise Run.current.error("a symbol is a scalar and cannot be indexed", "Index a captured tensor instead.")

    def __setattr__(self, name, value):
        if name != "expr":
            raise Run.current.error(f"a symbol has no attribute {name!r} to set")
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
        from .dispatch import index_tensor

        return index_tensor(self.tensor, (*self.index, *(index if isinstance(index, tuple) else (index,))))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def __getattr__(self, name):
        raise self.incomplete()

    def incomplete(self, *_):
        raise Run.current.error(
            f"a captured tensor of shape {tuple(self.tensor.shape)} is indexed by {len(self.index)} of its "
            f"{self.tensor.ndim} dimensions, which gives a {self.ndim}-dimensional value where a scalar is needed",
            "Index every dimension.")

    __bool__ = __float__ = __int__ = __len__ = __iter__ = incomplete


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge",
              "radd", "rsub", "rmul", "rtruediv", "neg", "abs", "invert"):
    setattr(TensorView, f"__{_name}__", TensorView.incomplete)
