"""What a mod sees while it is traced: symbols for the score and the indices, and views of captured tensors. What is done to them
goes to the run they belong to.
"""

from __future__ import annotations

import torch

from .current import Symbolic, applied, running
from .expr import Expr
from .operators import BINARY, COMPARISONS, UNARY, function_of


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
            raise running().error("a symbol is a scalar and has no dimensions", "Use it as a number.")
        return torch.Size(())

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return applied(function, args, kwargs or {})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return running().operations.method(self, name)

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
        self._refuse("a key of a dict or a set", "Capture a tensor instead and index that.")

    def item(self):
        self._refuse(".item()", "Use the symbol itself.")

    tolist = item

    def __getitem__(self, index):
        raise running().error("a symbol is a scalar and cannot be indexed", "Index a captured tensor instead.")

    def __setattr__(self, name, value):
        if name != "expr":
            raise running().error(f"a symbol has no attribute {name!r} to set")
        object.__setattr__(self, name, value)

    def __pos__(self):
        return self

    def __repr__(self):
        return f"<{self.expr.attr if self.expr.op == 'symbol' else self.expr.op}: {self.expr.dtype}>"


def _operator(function, reflected: bool):
    if reflected:
        return lambda self, other: applied(function, (other, self), {})
    return lambda self, *other: applied(function, (self, *other), {})


class TensorView(Symbolic):
    """A captured tensor with its first dimensions indexed by symbols; indexing all of them gives a Sym. With one short dimension left it is
    a vector, computed with element by element (vectors.py)."""

    __slots__ = ("tensor", "index")

    def __init__(self, tensor: torch.Tensor, index: tuple) -> None:
        self.tensor, self.index = tensor, index

    __array_ufunc__ = None
    shape = property(lambda self: self.tensor.shape[len(self.index) :])
    ndim = property(lambda self: self.tensor.ndim - len(self.index))
    dtype = property(lambda self: self.tensor.dtype)

    def __getitem__(self, index):
        return applied(torch.Tensor.__getitem__, (self.tensor, (*self.index, *(index if isinstance(index, tuple) else (index,)))), {})

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return applied(function, args, kwargs or {})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return running().operations.method(self, name)

    def incomplete(self, *_):
        raise running().error(
            f"a captured tensor of shape {tuple(self.tensor.shape)} is indexed by {len(self.index)} of its "
            f"{self.tensor.ndim} dimensions, which gives a {self.ndim}-dimensional value where a scalar is needed",
            "Index every dimension.",
        )

    __bool__ = __float__ = __int__ = __len__ = __iter__ = incomplete


class Vector(Symbolic):
    """A 1-dimensional tensor as its elements, each a Sym: what operations on vectors of captured tensors give."""

    __slots__ = ("items",)

    def __init__(self, items: list[Sym]) -> None:
        self.items = items

    __array_ufunc__ = None
    shape = property(lambda self: torch.Size((len(self.items),)))
    ndim = property(lambda self: 1)
    dtype = property(lambda self: self.items[0].dtype)

    def __getitem__(self, index):
        found = self.items[index]
        return Vector(found) if isinstance(found, list) else found

    def __len__(self):
        return len(self.items)

    __torch_function__ = TensorView.__torch_function__
    __getattr__ = TensorView.__getattr__

    def incomplete(self, *_):
        raise running().error(
            f"a vector of {len(self.items)} elements is used where a scalar is needed", "Sum it, or index it with a number."
        )

    __bool__ = __float__ = __int__ = incomplete


for _kind in (Sym, TensorView, Vector):
    for _name in BINARY if _kind is Sym else (*BINARY, "matmul"):
        setattr(_kind, f"__{_name}__", _operator(function_of(_name), reflected=False))
        setattr(_kind, f"__r{_name}__", _operator(function_of(_name), reflected=True))
    for _name in {*COMPARISONS, *UNARY} - {"pos"}:
        setattr(_kind, f"__{_name}__", _operator(function_of(_name), reflected=False))
