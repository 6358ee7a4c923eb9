"""What a mod sees while it is traced: symbols for the score and the indices, views of captured tensors, and the run they
belong to. What is done to them goes to `dispatch`.
"""

from __future__ import annotations

import linecache
import operator
import os
import sys
import threading
import types
from contextlib import contextmanager

import torch

from .audit import audited
from .capture import (
    CaptureReader,
    HostNumber,
    HostProgram,
    Symbolic,
    Untrackable,
    as_python,
    changes_in_place,
    fits_int32,
    host_call,
    label_of,
    pinned,
    plain_place,
    value_of,
)
from .errors import ModError
from .expr import Expr, ExprTable, ScalarCapture, SourceLine, TensorCapture
from .tensors import check_kind

FACTORIES = {torch.tensor, torch.scalar_tensor, torch.as_tensor, torch.zeros, torch.ones, torch.full}  # of what may be a literal
WEAK_DTYPE = {bool: torch.bool, int: torch.int64, float: torch.float32}


class _Thread(threading.local):
    """Each thread traces on its own."""

    run: Run | None = None


_thread = _Thread()


class _RunType(type):
    @property
    def current(cls) -> Run | None:
        """The run of this thread."""
        return _thread.run


class Run(metaclass=_RunType):
    """What operations on symbols need while they become nodes: the table of nodes, and whom to blame for an error."""

    def __init__(self, kind: str, table: ExprTable) -> None:
        self.kind, self.table = kind, table

    @contextmanager
    def active(self):
        """Operations on symbols belong to this run."""
        previous, _thread.run = _thread.run, self
        try:
            yield self
        finally:
            _thread.run = previous

    def source(self) -> SourceLine | None:
        """The user's line that a new node comes from."""
        return None

    def simplified(self, op: str, operands: list[Expr]) -> Expr | None:
        """A shorter expression for a new node; None if there is none."""
        return None

    def number(self, value) -> Expr:
        """The expression of a Python number."""
        if type(value) is int and not -1 << 63 <= value < 1 << 63:
            raise self.error(
                f"an integer of {value.bit_length()} bits, which does not fit into 64 bits", "Write a float, or a smaller integer."
            )
        return self.table.make("literal", (), WEAK_DTYPE[type(value)], attr=value, weak=True)

    def made(self, node: Expr) -> Expr:
        """A new node, as operations go on with it."""
        return node

    def error(self, problem: str, remedy: str = "") -> ModError:
        return mod_error(problem, remedy, self.source(), self.kind)


class TracingRun(Run):
    """The state of one tracing run: what the mod reads becomes arguments of the kernel, in the order in which it is met."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, ExprTable())
        self.tensors: dict[object, TensorCapture] = {}  # by what finds the value again
        self.scalars: dict[object, ScalarCapture] = {}
        self.codes: set[types.CodeType] = set()  # of the mod's functions that have made a node
        self._names: set[str] = set()
        self._own: dict[int, object] = {}  # storages of tensors that were made in the mod

    def tensor_index(self, tensor: torch.Tensor) -> int:
        """The number of a captured tensor among the kernel's arguments."""
        raise NotImplementedError

    def host_scalar(self, tensor: torch.Tensor) -> Expr:
        """The number in a 0-dim tensor in host memory, as an argument of the kernel: torch allows such tensors on any device."""
        raise NotImplementedError

    def host(self, function, args: tuple, kwargs: dict, name: str):
        """A torch function of captured values alone: run it now, and at every call."""
        raise NotImplementedError

    def values(self) -> list:
        """The values of the tensors, then of the scalars."""
        raise NotImplementedError

    def _tensor(self, key, tensor: torch.Tensor, name: str) -> int:
        if key not in self.tensors:
            self.check(tensor, name)
            self.tensors[key] = TensorCapture(self._unique(name), tensor.dtype, tensor.ndim)
        return list(self.tensors).index(key)

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Raises ModError for a captured tensor that kernels cannot read."""
        try:
            check_kind(f"captures {name}, which", tensor)
        except NotImplementedError as why:
            raise self.error(str(why)) from None

    def _scalar(self, key, value, name: str) -> Expr:
        if key not in self.scalars:
            self.scalars[key] = ScalarCapture(self._unique(name), type(value))
        return self.table.make("scalar", (), WEAK_DTYPE[type(value)], attr=list(self.scalars).index(key), weak=True)

    def _unique(self, name: str) -> str:
        base = "".join(c if c.isalnum() and c.isascii() else "_" for c in name).strip("_").lower() or "captured"
        name, count = base, 1
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    @contextmanager
    def reading(self, function, args: tuple, kwargs: dict):
        """A mod may write into tensors that it has made. How often it runs is not for it to know, so it changes nothing else."""
        foreign = [(t, t._version) for t in _tensors_in((args, kwargs)) if not t.is_inference() and _storage_of(t) not in self._own]
        out = kwargs.get("out")
        written = set(map(id, args[:1] if out is None else _tensors_in((out,)))) if changes_in_place(function, kwargs) else ()
        if not any(id(t) in written for t, _ in foreign):
            yield
            written = ()
        if any(id(t) in written or t._version != version for t, version in foreign):
            raise self.error(
                f"{getattr(function, '__qualname__', function)} changes a captured tensor",
                "A mod may read what it captures, not change it. Work on a copy, for example tensor.clone().",
            )

    def note_made(self, result, args: tuple, kwargs: dict) -> None:
        """Remember the storages of tensors that a function has made."""
        made = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(t, torch.Tensor)]
        if made:
            given = {_storage_of(a) for a in _tensors_in((args, kwargs))} - set(self._own)
            self._own |= {_storage_of(t): t for t in made if _storage_of(t) not in given}

    def source(self) -> SourceLine | None:
        """The innermost line of the user's code that is being run."""
        frame = self.user_frame()
        return line_of(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None

    def user_frame(self) -> types.FrameType | None:
        """The innermost frame of the mod: outside Flexpress's workshop and, if there is one, outside torch."""
        frame, within_torch = sys._getframe(1), None
        while frame is not None and frame.f_code is not run_mod.__code__:
            file = frame.f_code.co_filename
            if file.startswith(_TORCH):
                within_torch = within_torch or frame
            elif not file.startswith(_WORKSHOP):
                self.codes.add(frame.f_code)
                return frame
            frame = frame.f_back
        return within_torch


class ReplayedRun(TracingRun):
    """The mod runs on stand-ins, and what it reads is recorded, to be read again at the next call."""

    def __init__(self, mod, kind: str, is_operation) -> None:
        super().__init__(kind)
        self.program = HostProgram(mod)
        self.reader = CaptureReader(self.program, is_operation, self._call)

    def _call(self, function, args: tuple, kwargs: dict, name: str):
        return dispatch(function, args, kwargs) if function in FACTORIES else self.host(function, args, kwargs, name)

    def tensor_index(self, tensor: torch.Tensor) -> int:
        place = self.program.place_of(tensor)
        if place is None:
            raise Untrackable(f"uses a tensor of shape {tuple(tensor.shape)} that it has not captured")
        return self._tensor(place, tensor, self.program.steps[place - 1].describe)

    def host_scalar(self, tensor: torch.Tensor) -> Expr:
        place = self.program.place_of(tensor)
        name = self.program.steps[place - 1].describe if place else ""
        return self.number(host_call(self.reader, torch.Tensor.item, (tensor,), {}, name))

    def number(self, value) -> Expr:
        if type(value) is not HostNumber:
            return super().number(value)
        if not fits_int32(as_python(value)):  # rare, and a literal keeps to torch's rules of integer overflow in every dtype
            return super().number(pinned(value))
        return self._scalar(plain_place(value), as_python(value), label_of(value))

    def host(self, function, args: tuple, kwargs: dict, name: str):
        if args and isinstance(args[0], torch.Tensor) and name in ("__get__", "size", "item"):
            place = self.program.place_of(args[0])
            name = self.program.steps[place - 1].describe if place else name
        plain = tuple(map(value_of, args)), {k: value_of(v) for k, v in kwargs.items()}
        with torch._C.DisableTorchFunction():
            with self.reading(function, *plain):
                found = host_call(self.reader, function, args, kwargs, name)
            self.note_made(value_of(found), *plain)
        return pinned(found) if name in _CONVERSIONS else found

    def values(self) -> list:
        found = self.program.finish()
        return [found[place] for place in (*self.tensors, *self.scalars)]


class EagerRun(TracingRun):
    """The mod runs on the objects that it captures, as in Python: for what stand-ins cannot record. It is traced at every call.

    A number that does not stand in the code itself is an argument of the kernel, so that another value compiles nothing.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.with_grad = torch.is_grad_enabled()
        self._tensors: list[torch.Tensor] = []
        self._numbers: list = []

    def tensor_index(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self.tensors:
            self._tensors.append(tensor)
        return self._tensor(id(tensor), tensor, _name_in(self.user_frame(), tensor))

    def host_scalar(self, tensor: torch.Tensor) -> Expr:
        name = _name_in(self.user_frame(), tensor)
        self.check(tensor, name)
        return self._argument(tensor.item(), name)

    def number(self, value) -> Expr:
        if value != value or value in (float("inf"), float("-inf")) or self._stands_in_code(value):
            return super().number(value)
        return self._argument(value, "number")

    def _argument(self, value, name: str) -> Expr:
        if not fits_int32(value):
            return super().number(value)
        self._numbers.append(value)
        return self._scalar(len(self._numbers), value, name)

    def _stands_in_code(self, value) -> bool:
        frame = sys._getframe(1)
        while frame is not None and (frame.f_code.co_filename in _MACHINERY or frame.f_code.co_filename.startswith(_TORCH)):
            frame = frame.f_back
        return frame is not None and (type(value), repr(value)) in audited(frame.f_code).numbers

    def host(self, function, args: tuple, kwargs: dict, name: str):
        with self.reading(function, args, kwargs):
            found = function(*args, **kwargs)
        self.note_made(found, args, kwargs)
        return found

    def made(self, node: Expr) -> Expr:
        """Within torch.no_grad() no gradient flows through an operation."""
        if self.with_grad and node.dtype.is_floating_point and not torch.is_grad_enabled():
            return self.table.make("detach", (node,), node.dtype, source=node.source)
        return node

    def user_frame(self) -> types.FrameType | None:
        found = super().user_frame()
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not run_mod.__code__:
            if frame.f_code is _APPLY:
                where = line_of(found.f_code.co_filename, found.f_lineno) if found is not None else None
                raise mod_error(
                    "an autograd.Function: its own backward would not be run",
                    "Write the computation without it; its gradient "
                    "is then derived. For one that passes a gradient through, x + (f(x) - x).detach().",
                    where,
                    self.kind,
                )
            frame = frame.f_back
        return found

    def values(self) -> list:
        return [*self._tensors, *self._numbers]


# what Python takes for a plain value: as part of the trace it is compared
_CONVERSIONS = {"__bool__", "__int__", "__float__", "__index__", "__len__", "__contains__", "__complex__"}
_APPLY = torch.autograd.Function.apply.__func__.__code__
_HERE = os.path.dirname(os.path.abspath(__file__))
_WORKSHOP = os.path.dirname(_HERE) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_MACHINERY = {os.path.join(_HERE, name) for name in ("symbols.py", "dispatch.py", "capture.py", "trace.py")}


def is_machinery(file: str) -> bool:
    """Is a file part of the workshop or of torch, and not of the mod?"""
    return file.startswith((_WORKSHOP, _TORCH))


def run_mod(mod, symbols: list):
    """Call the mod. Frames below this one are the mod's."""
    return mod(*symbols)


def line_of(file: str, line: int) -> SourceLine:
    """A line of the user's code."""
    return SourceLine(file, line, linecache.getline(file, line).strip())


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # it has none
        return None


def _tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _name_in(frame: types.FrameType | None, value) -> str:
    """What the mod calls a value."""
    if frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            for name, found in list(names.items()):
                if found is value:
                    return name
    return "captured"


def mod_error(problem: str, remedy: str, source: SourceLine | None, kind: str) -> ModError:
    where = f'\n  File "{source.file}", line {source.line}\n    {source.text}' if source else ""
    return ModError(f"{kind}_mod: {problem}{where}" + (f"\n{remedy}" if remedy else ""))


def dispatch(function, args: tuple, kwargs: dict):
    """dispatch.dispatch, which imports this module."""
    from .dispatch import dispatch

    return dispatch(function, args, kwargs)


class Sym(Symbolic):
    """A 0-dim tensor known only inside the kernel, while a mod is traced."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    __array_ufunc__ = None  # a NumPy number leaves the operation to the symbol
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
            "a <= x < b, torch.minimum / torch.maximum for min / max.",
        )

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


class TensorView(Symbolic):
    """A captured tensor with its first dimensions indexed by symbols; indexing all of them gives a Sym."""

    __slots__ = ("tensor", "index")

    def __init__(self, tensor: torch.Tensor, index: tuple) -> None:
        self.tensor, self.index = tensor, index

    __array_ufunc__ = None
    shape = property(lambda self: self.tensor.shape[len(self.index) :])
    ndim = property(lambda self: self.tensor.ndim - len(self.index))
    dtype = property(lambda self: self.tensor.dtype)

    def __getitem__(self, index):
        return dispatch(torch.Tensor.__getitem__, (self.tensor, (*self.index, *(index if isinstance(index, tuple) else (index,)))), {})

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def __getattr__(self, name):
        raise self.incomplete()

    def incomplete(self, *_):
        raise Run.current.error(
            f"a captured tensor of shape {tuple(self.tensor.shape)} is indexed by {len(self.index)} of its "
            f"{self.tensor.ndim} dimensions, which gives a {self.ndim}-dimensional value where a scalar is needed",
            "Index every dimension.",
        )

    __bool__ = __float__ = __int__ = __len__ = __iter__ = incomplete


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "radd",
    "rsub",
    "rmul",
    "rtruediv",
    "neg",
    "abs",
    "invert",
):
    setattr(TensorView, f"__{_name}__", TensorView.incomplete)
