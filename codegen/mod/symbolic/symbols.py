"""What a mod sees while it is traced: symbols for the score and the indices, and views of captured tensors. What is done to them
goes to the run they belong to.
"""

from __future__ import annotations

import math

import torch

from ..current import Run, Symbolic, applied, running
from ..expr import Expr
from ..operators import BINARY, COMPARISONS, UNARY, function_of


class Sym(Symbolic):
    """A 0-dim tensor known only inside the kernel, while a mod is traced: in one run."""

    __slots__ = ("expr", "run")
    _value = "expr"

    def __init__(self, expr: Expr) -> None:
        self.expr, self.run = expr, Run.current

    __array_ufunc__ = None  # a NumPy number leaves the operation to the symbol
    dtype = property(lambda self: self.expr.dtype)
    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)
    device = property(lambda self: running().device())
    is_cuda = property(lambda self: self.device.type == "cuda")
    requires_grad = property(lambda self: False)

    def dim(self):
        return 0

    def numel(self):
        return 1

    nelement = numel

    def size(self, dim=None):
        if dim is not None:
            raise running().error("a symbol is a scalar and has no dimensions", "Use it as a number.")
        return torch.Size(())

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return applied(function, args, kwargs or {})

    def _refuse(self, what: str, remedy: str):
        raise running().error(f"{what} needs the value of a symbol, which is only known inside the kernel", remedy)

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
        self._refuse("a key of a dict, a set or functools.lru_cache", "Capture a tensor instead and index that.")

    def item(self):
        self._refuse(".item()", "Use the symbol itself.")

    tolist = item

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is None or part is Ellipsis for part in parts) or sum(part is Ellipsis for part in parts) > 1:
            raise running().error("a symbol is a scalar and cannot be indexed", "Index a captured tensor instead.")
        found = self
        for _ in range(sum(part is None for part in parts)):
            found = found.unsqueeze(0)
        return found

    def __setattr__(self, name, value):
        if name not in Sym.__slots__:
            raise running().error(f"a symbol has no attribute {name!r} to set")
        object.__setattr__(self, name, value)

    def __pos__(self):
        return self

    def __repr__(self):
        return f"<{self.expr.attr if self.expr.op == 'symbol' else self.expr.op}: {self.expr.dtype}>"


def _in_place(function):
    """`x += y`: a new value, in x's dtype as torch has it. In torch whatever else is called x changes, so here that cannot be used any
    more."""

    def assigned(self, other):
        made = applied(function, (self, other), {})
        if not torch.can_cast(made.dtype, self.dtype):
            raise running().error(
                f"a value of {made.dtype} is assigned in place (+=, *= and the like) to one of {self.dtype}",
                "Write x = x + y, which makes a new value of another dtype.",
            )
        if (self.dtype, made.dtype) != (torch.int32, torch.int64):  # positions, which have int64 in torch
            made = made.to(self.dtype)
        changed(self)
        return made

    return assigned


def changed(value: Symbolic) -> None:
    """A value was changed in place. So are, in torch, all that share its memory: none of them can be used any more."""
    left = [value]
    while left:
        value = left.pop()
        if type(value) is Vector and not callable(value._make):
            left += value._make
        try:
            delattr(value, value._value)
        except AttributeError:  # it cannot be used already
            continue
        left += [b if a is value else a for a, b in running().shared if value is a or value is b]


def _missing(self, name: str):
    """An attribute that is no field, or the field of a value that was changed in place."""
    if name == self._value:
        raise running().error(
            "a value is used after it was changed in place (by +=, *=, inplace=True and the like) under another name, or as a part of "
            "another value",
            "Write x = x + y, which makes a new value and leaves the others; or use the changed name alone.",
        )
    if name.startswith("__"):
        raise AttributeError(name)
    return running().operations.method(self, name)


def _operator(function, reflected: bool):
    if reflected:
        return lambda self, other: applied(function, (other, self), {})
    return lambda self, *other: applied(function, (self, *other), {})


class TensorView(Symbolic):
    """A captured tensor with its first dimensions indexed by symbols; indexing all of them gives a Sym. With short dimensions left it is
    computed with element by element (vectors.py)."""

    __slots__ = ("tensor", "index")
    _value = "tensor"

    def __init__(self, tensor: torch.Tensor, index: tuple) -> None:
        self.tensor, self.index = tensor, index

    __array_ufunc__ = None
    shape = property(lambda self: self.tensor.shape[len(self.index) :])  # recorded, as any read of a captured tensor
    ndim = property(lambda self: self.tensor.ndim - len(self.index))
    dtype = property(lambda self: self.tensor.dtype)
    device = property(lambda self: running().device())
    is_cuda = property(lambda self: self.device.type == "cuda")
    T = property(lambda self: applied("t", (self,), {}))
    mT = property(lambda self: applied("transpose", (self, -1, -2), {}))

    def dim(self):
        return self.ndim

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def numel(self):
        return math.prod(self.shape)

    nelement = numel

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, index):
        return applied(torch.Tensor.__getitem__, (self.tensor, (*self.index, *(index if isinstance(index, tuple) else (index,)))), {})

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return applied(function, args, kwargs or {})

    def incomplete(self, *_):
        raise running().error(
            f"a captured tensor of shape {tuple(self.tensor.shape)} is indexed by {len(self.index)} of its "
            f"{self.tensor.ndim} dimensions, which gives a {self.ndim}-dimensional value where a scalar is needed",
            "Index every dimension.",
        )

    __bool__ = __float__ = __int__ = __index__ = incomplete


class Vector(Symbolic):
    """A small tensor of one dimension or more as its elements, each a Sym: what operations on parts of captured tensors give.

    shape   sizes, as of any tensor
    rows    of a long row of a captured tensor, or of the product of two: what it is a product of (see long_dots.Row)

    Elements are made when they are first asked for: those of a long row may never be.
    """

    __slots__ = ("shape", "rows", "_make", "_dtype")
    _value = "_make"

    def __init__(self, items, shape=None, rows: tuple = (), dtype: torch.dtype | None = None) -> None:
        self.shape = torch.Size((len(items),) if shape is None else shape)
        self.rows, self._make, self._dtype = rows, items, dtype

    __array_ufunc__ = None
    ndim = property(lambda self: len(self.shape))
    device = property(lambda self: running().device())
    is_cuda = property(lambda self: self.device.type == "cuda")
    requires_grad = property(lambda self: False)
    T = property(lambda self: applied("t", (self,), {}))
    mT = property(lambda self: applied("transpose", (self, -1, -2), {}))

    @property
    def items(self) -> list[Sym]:
        """The elements, the last dimension's first."""
        if callable(self._make):
            self._make = self._make()
        return self._make

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype or self.items[0].dtype

    def dim(self):
        return len(self.shape)

    def numel(self):
        return self.shape.numel()

    nelement = numel

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        return applied(torch.Tensor.__getitem__, (self, index), {})

    def __iter__(self):
        return iter([self[i] for i in range(len(self))])

    __torch_function__ = TensorView.__torch_function__

    def incomplete(self, *_):
        what = f"a vector of {len(self)} elements" if self.ndim == 1 else f"a tensor of shape {tuple(self.shape)}"
        raise running().error(f"{what} is used where a scalar is needed", "Sum it, or index it with a number.")

    __bool__ = __float__ = __int__ = __index__ = incomplete


for _kind in (Sym, TensorView, Vector):
    _kind.__getattr__ = _missing
    for _name in BINARY:
        setattr(_kind, f"__i{_name}__", _in_place(function_of(_name)))
    for _name in BINARY if _kind is Sym else (*BINARY, "matmul"):
        setattr(_kind, f"__{_name}__", _operator(function_of(_name), reflected=False))
        setattr(_kind, f"__r{_name}__", _operator(function_of(_name), reflected=True))
    for _name in {*COMPARISONS, *UNARY} - {"pos"}:
        setattr(_kind, f"__{_name}__", _operator(function_of(_name), reflected=False))
