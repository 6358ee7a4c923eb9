"""Runs of a mod on symbols, and what they keep: what the mod reads, whose arguments of the kernel are in the order in which they are met.

`ReplayedRun` runs it on stand-ins for what it captures, `EagerRun` on the objects themselves.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import types
from dataclasses import replace

import torch

from ..captured.audit import audited
from ..captured.program import UNKNOWN_NUMBERS, HostProgram, Untrackable, fits_int32
from ..captured.purity import FACTORIES, changes_in_place
from ..captured.stand_ins import HostNumber, as_python, pinned, plain_place, value_of
from ..captured.tensors import check_kind, is_distributed, is_pending, is_transformed, tensors_in
from ..current import WEAK_DTYPE, Operations, Run, Symbolic, device_of_call
from ..errors import ModError, mod_error
from ..expr import Expr, ExprTable, ScalarCapture, SourceLine, TensorCapture
from ..graphs.loads import DETACHED
from .capture import CaptureReader


class TracingRun(Run):
    """The state of one tracing run: what the mod reads becomes arguments of the kernel, in the order in which it is met."""

    def __init__(self, kind: str, operations: Operations) -> None:
        super().__init__(kind, ExprTable(), operations)
        self.tensors: dict[object, TensorCapture] = {}  # by what finds the value again
        self.scalars: dict[object, ScalarCapture] = {}
        self.numbers: list = []
        self.codes: set[types.CodeType] = set()  # of the mod's functions that have made a node
        self._names: set[str] = set()
        self._sizes: dict[int, dict[int, int]] = {}  # that the graph depends on, by the tensor's identity and the dimension
        self._own: dict[int, object] = {}  # storages of tensors that were made in the mod
        self.definition: SourceLine | None = None  # the mod's first line, once it has returned

    def tensor_index(self, tensor: torch.Tensor) -> int:
        """The number of a captured tensor among the kernel's arguments."""
        raise NotImplementedError

    def note_size(self, tensor: torch.Tensor, dim: int, size: int) -> None:
        """The graph depends on a size of a captured tensor."""
        self._sizes.setdefault(id(tensor), {})[dim] = size

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
        if id(tensor) in self._sizes:
            self.tensors[key] = replace(self.tensors[key], fixed=tuple(sorted(self._sizes[id(tensor)].items())))
        return list(self.tensors).index(key)

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Raises ModError for a captured tensor that kernels cannot read, and that stands for none that they can."""
        if is_distributed(tensor) or is_pending(tensor) or is_transformed():
            return
        try:
            check_kind(f"captures {name}, which", tensor)
        except NotImplementedError as why:
            raise self.error(str(why)) from None

    def _scalar(self, key, value, name: str) -> Expr:
        kind = UNKNOWN_NUMBERS.get(type(value), type(value))
        if key not in self.scalars:
            self.scalars[key] = ScalarCapture(self._unique(name), kind)
        return self.table.make("scalar", (), WEAK_DTYPE[kind], attr=list(self.scalars).index(key), weak=True)

    def _unique(self, name: str) -> str:
        base = "".join(c if c.isalnum() and c.isascii() else "_" for c in name).strip("_").lower() or "captured"
        name, count = base, 1
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    @contextlib.contextmanager
    def reading(self, function, args: tuple, kwargs: dict):
        """A mod may write into tensors that it has made. How often it runs is not for it to know, so it changes nothing else."""
        foreign = [(t, t._version) for t in tensors_in((args, kwargs)) if not t.is_inference() and _storage_of(t) not in self._own]
        out = kwargs.get("out")
        written = set(map(id, args[:1] if out is None else tensors_in((out,)))) if changes_in_place(function, kwargs) else ()
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
            given = {_storage_of(a) for a in tensors_in((args, kwargs))} - set(self._own)
            self._own |= {_storage_of(t): t for t in made if _storage_of(t) not in given}

    def source(self) -> SourceLine | None:
        """The innermost line of the user's code that is being run."""
        frame = self.user_frame()
        return line_of(frame.f_code.co_filename, frame.f_lineno) if frame is not None else self.definition

    def user_frame(self) -> types.FrameType | None:
        """The innermost frame of the mod: outside Flexpress's workshop and, if there is one, outside torch."""
        frame, within_torch, found = sys._getframe(1), None, None
        while frame is not None and frame.f_code is not run_mod.__code__:
            file = frame.f_code.co_filename
            if file.startswith(_TORCH):
                within_torch = within_torch or frame
            elif found is None and not file.startswith(_WORKSHOP) and file != _CONTEXTS:
                found = frame
            frame = frame.f_back
        if found is not None and frame is not None:
            self.codes.add(found.f_code)
        return (found or within_torch) if frame is not None else None  # the mod has returned


class ReplayedRun(TracingRun):
    """The mod runs on stand-ins, and what it reads is recorded, to be read again at the next call."""

    def __init__(self, mod, kind: str, operations: Operations) -> None:
        super().__init__(kind, operations)
        self.program = HostProgram(mod)
        self.reader = CaptureReader(self.program, operations.is_operation, self._call)

    def device(self) -> torch.device:
        return self.reader.track(device_of_call(), device_of_call, "device")

    def _call(self, function, args: tuple, kwargs: dict, name: str):
        return self.operations.apply(function, args, kwargs) if function in FACTORIES else self.host(function, args, kwargs, name)

    def tensor_index(self, tensor: torch.Tensor) -> int:
        place = self.program.place_of(tensor)
        if place is None:
            raise Untrackable(f"uses a tensor of shape {tuple(tensor.shape)} that it has not captured")
        return self._tensor(place, tensor, self.program.steps[place - 1].describe)

    def host_scalar(self, tensor: torch.Tensor) -> Expr:
        place = self.program.place_of(tensor)
        name = self.program.steps[place - 1].describe if place else ""
        return self.number(self.reader.compute(torch.Tensor.item, (tensor,), {}, name))

    def number(self, value) -> Expr:
        if type(value) is not HostNumber:
            return super().number(value)
        if not fits_int32(as_python(value)):  # rare, and a literal keeps to torch's rules of integer overflow in every dtype
            return super().number(pinned(value))
        return self._scalar(place := plain_place(value), as_python(value), self.program.steps[place - 1].label)

    def host(self, function, args: tuple, kwargs: dict, name: str):
        if args and isinstance(args[0], torch.Tensor) and name in ("__get__", "size", "item"):
            place = self.program.place_of(args[0])
            name = (self.program.steps[place - 1].describe if place else "") + ("_size" if name != "item" else "")
        plain = tuple(map(value_of, args)), {k: value_of(v) for k, v in kwargs.items()}
        with torch._C.DisableTorchFunction():
            with self.reading(function, *plain):
                found = self.reader.compute(function, args, kwargs, name)
            self.note_made(value_of(found), *plain)
        return pinned(found) if name in _CONVERSIONS else found

    def values(self) -> list:
        found = self.program.finish()
        return [found[place] for place in (*self.tensors, *self.scalars)]


class EagerRun(TracingRun):
    """The mod runs on the objects that it captures, as in Python: for what stand-ins cannot record. It is traced at every call.

    A number that does not stand in the code itself is an argument of the kernel, so that another value compiles nothing.
    """

    def __init__(self, kind: str, operations: Operations, watches: bool) -> None:
        super().__init__(kind, operations)
        self.watches, self.with_grad = watches, torch.is_grad_enabled()
        self._applying: list[SourceLine] = []  # the lines where autograd.Functions that run are applied, if apply is no Python
        self._tensors: list[torch.Tensor] = []

    def tensor_index(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self.tensors:
            self._tensors.append(tensor)
        return self._tensor(id(tensor), tensor, _name_in(self.user_frame(), tensor))

    def host_scalar(self, tensor: torch.Tensor) -> Expr:
        name = _name_in(self.user_frame(), tensor)
        self.check(tensor, name)
        return self._argument(tensor.item(), name)

    def number(self, value) -> Expr:
        if type(value) in UNKNOWN_NUMBERS:
            return self._argument(value, "number")
        if value != value or value in (float("inf"), float("-inf")) or self._stands_in_code(value):
            return super().number(value)
        return self._argument(value, "number")

    def _argument(self, value, name: str) -> Expr:
        if not fits_int32(value):
            return super().number(value)
        self.numbers.append(value)
        return self._scalar(len(self.numbers), value, name)

    def _stands_in_code(self, value) -> bool:  # the user's, or ours, which may do it element by element
        frame = sys._getframe(1)
        while frame is not None and (frame.f_code.co_filename in _MACHINERY or frame.f_code.co_filename.startswith(_TORCH)):
            frame = frame.f_back
        return any(f and (type(value), repr(value)) in audited(f.f_code).numbers for f in (frame, super().user_frame()))

    def host(self, function, args: tuple, kwargs: dict, name: str):
        with self.reading(function, args, kwargs):
            found = function(*args, **kwargs)
        self.note_made(found, args, kwargs)
        return found

    def hides_gradients(self) -> bool:
        return self.with_grad and not torch.is_grad_enabled()

    def made(self, node: Expr) -> Expr:
        hidden = node.dtype.is_floating_point and self.hides_gradients() and node.op != DETACHED
        return self.table.make(DETACHED, (node,), node.dtype, source=node.source) if hidden else node

    @contextlib.contextmanager
    def active(self):
        """With autograd.Functions in reach, calls are watched (but not under a profiler): some make no node, and are met as applied."""
        with super().active():
            if not self.watches or sys.getprofile() is not None:
                yield self
                return
            sys.setprofile(self._called)
            try:
                yield self
            finally:
                sys.setprofile(None)

    def _called(self, frame: types.FrameType, event: str, called) -> None:
        if Run.current is not self:  # an interrupt has left it behind
            sys.setprofile(None)
        elif event == "call":
            if (frame.f_code is _APPLY or self._applying) and any(_is_symbolic(v) for v in frame.f_locals.values()):
                raise self._autograd_function()
        elif event != "return" and _APPLY is None and _is_apply(called):
            if event == "c_call":
                self._applying.append(line_of(frame.f_code.co_filename, frame.f_lineno))
            else:
                self._applying.pop()

    def user_frame(self) -> types.FrameType | None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not run_mod.__code__:
            if frame.f_code is _APPLY:
                raise self._autograd_function()
            frame = frame.f_back
        return super().user_frame()

    def _autograd_function(self) -> ModError:
        where, found = next(iter(self._applying), None), super().user_frame()
        if where is None and found is not None:
            where = line_of(found.f_code.co_filename, found.f_lineno)
        return mod_error(
            "an autograd.Function: its own backward would not be run",
            "Write the computation without it; its gradient is then derived. For one that passes a gradient through, "
            "x + (f(x) - x).detach().",
            where,
            self.kind,
        )

    def values(self) -> list:
        return [*self._tensors, *self.numbers]


_CONVERSIONS = {"__bool__", "__int__", "__float__", "__index__", "__len__", "__contains__", "__complex__"}  # to what Python compares
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)  # None where it is no Python
_MOD = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WORKSHOP = os.path.dirname(_MOD) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_CONTEXTS = contextlib.contextmanager.__code__.co_filename  # whose frames end contexts of the workshop
_MACHINERY = {
    os.path.join(_MOD, *folder, f"{name}.py")
    for folder, names in {
        (): "current",
        ("captured",): "stand_ins",
        ("symbolic",): "symbols dispatch methods nodes graph_mod",
        ("tracing",): "runs trace capture calls",
    }.items()
    for name in names.split()
}


def _is_apply(called) -> bool:
    """Is this the apply of an autograd.Function? From torch 2.15 on it is no Python, and what it calls has its arguments."""
    owner = getattr(called, "__self__", None)
    return called.__name__ == "apply" and isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _is_symbolic(value) -> bool:
    return isinstance(value, Symbolic) or type(value) is tuple and any(isinstance(v, Symbolic) for v in value)


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


def _name_in(frame: types.FrameType | None, value) -> str:
    """What the mod calls a value."""
    if frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            for name, found in list(names.items()):
                if found is value:
                    return name
    return "captured"
