"""Operations of Triton's interpreter in one step: NumPy's, on what tensors hold.

Each operation there goes through half a dozen functions that ask for types, which takes five times as long as NumPy does for a small
tile. The first one for given types goes that way, and gives the type of the result. Those that follow compute alone.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from ..registry import Table
from .interpreter_operands import NUMBERS, is_constant

# how an operation is computed, by its name and the types of its operands; None: by Triton's own functions
_ways: dict[tuple, tuple | None] = Table("operations of the interpreter", 4096)
_UFUNCS = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "__lshift__": np.left_shift,
    "__rshift__": np.right_shift,
}
_TURNED = {"__radd__": "__add__", "__rsub__": "__sub__", "__rmul__": "__mul__"}  # the other operand is the left one
_ORDER = ("int32", "int64", "fp32", "fp64")  # of two of these, the later one is what both are cast to
_UNSIGNED = {"uint32": np.uint32, "uint64": np.uint64}  # these are computed directly beside their own kind and numbers
_INTEGERS = {name: NUMBERS[name] for name in ("int32", "int64")} | _UNSIGNED
_HINTS = {"eviction_policy", "cache_modifier"}  # arguments that change nothing here
_new = object.__new__


def compute_directly(scope) -> None:
    """Until `scope` is restored, operations on tensors of usual types go past Triton's functions once their results' types are known."""
    tensor = core.tensor
    for name in (*_UFUNCS, *_TURNED):
        scope.set_attr(tensor, name, _operator(name, getattr(tensor, name)))
    scope.set_attr(tensor, "__getitem__", _with_new_dimensions(tensor.__getitem__))
    scope.set_attr(tensor, "to", _cast(tensor.to))
    scope.set_attr(tl, "where", _where(tl.where))
    scope.set_attr(tl, "dot", _dot(tl.dot))
    scope.set_attr(tl, "arange", _arange(tl.arange))
    scope.set_attr(tl, "load", _load(tl.load))
    scope.set_attr(tl, "store", _store(tl.store))
    scope.set_attr(interpreter.TensorHandle, "__init__", _hold)


def _hold(self, data, dtype, attr=None) -> None:
    """In place of a TensorHandle's own: operations give what their types say, so nothing is left to check."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _like(tensor) -> dict:
    """What tensors of a type hold, but for their elements."""
    return {name: value for name, value in vars(tensor).items() if name != "handle"}


def _tensor(data, like: dict):
    """A tensor that holds `data`, without the calls of two constructors."""
    handle = _new(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, like["dtype"], {}
    made = _new(core.tensor)
    made.__dict__.update(like, handle=handle)
    return made


def _number(value, dtype, beside):
    """A number as an operand of NumPy's beside an array: one of no dimension, for which NumPy takes half as long as for one element."""
    return np.array(value if beside.ndim else [value], dtype)  # two arrays of no dimension would give no array


def _numpy_common(name: str, left: str, right: str):
    """What NumPy computes in for these element types; None where Triton's own functions do."""
    if left == right == "int1":
        return np.dtype(bool) if name in ("__and__", "__or__") else None
    if name in ("__lshift__", "__rshift__") or left in _UNSIGNED:
        return np.dtype(_INTEGERS[left]) if left == right and left in _INTEGERS else None
    if left not in _ORDER or right not in _ORDER:
        return None
    return np.dtype(NUMBERS[max(left, right, key=_ORDER.index)])


def _operator(name: str, plain):
    """The method `name` of tensors."""
    turned, ufunc = name in _TURNED, _UFUNCS[_TURNED.get(name, name)]

    def operator(self, other, **_):
        if type(other) is core.tensor:
            key = name, self.type.name, other.type.name
        elif is_constant(other, self) or type(other) is int and 0 <= other < 1 << 32 and self.dtype.name in _UNSIGNED:
            key = name, self.type.name
        else:
            return plain(self, other)
        way = _ways.get(key, _ways)
        if way is _ways:
            made = plain(self, other)
            elements = self.dtype, other.dtype if len(key) == 3 else self.dtype
            _ways[key] = _way(name, *elements, _like(made))
            return made
        if way is None:
            return plain(self, other)
        dtype, result, size = way
        left = self.handle.data
        right = other.handle.data if len(key) == 3 else _number(other, dtype, left)
        if size:
            return _tensor(left + size * right.astype(np.uint64), result)
        if left.dtype is not dtype:
            left = left.astype(dtype)
        if right.dtype is not dtype:
            right = right.astype(dtype)
        return _tensor(ufunc(right, left) if turned else ufunc(left, right), result)

    return operator


def _way(name: str, left, right, result: dict) -> tuple | None:
    """What NumPy computes in, what the result is like, and the bytes of an element where an integer is added to a pointer, else 0."""
    if name == "__add__" and left.is_ptr() and right.name in ("int32", "int64"):
        return None, result, max(1, left.element_ty.primitive_bitwidth // 8)
    dtype = _numpy_common(name, left.name, right.name)
    return dtype and (dtype, result, 0)


def _with_new_dimensions(plain):
    """`x[:, None]` and such."""

    def getitem(self, slices):
        if type(slices) is not tuple or not self.type.is_block() or any(s is not None and s != slice(None) for s in slices):
            return plain(self, slices)
        key = "[]", self.type.name, *[s is None for s in slices]
        result = _ways.get(key)
        if result is None:
            made = plain(self, slices)
            _ways[key] = _like(made)
            return made
        return _tensor(self.handle.data[slices], result)

    return getitem


def _cast(plain):
    def to(self, dtype, *more, **options):
        if more or options or type(dtype) is not core.dtype:
            return plain(self, dtype, *more, **options)
        was, name = self.dtype.name, dtype.name
        if was == name:
            return self
        kinds = _INTEGERS if was in _UNSIGNED or name in _UNSIGNED else NUMBERS
        if name not in kinds or was not in kinds and was != "int1":
            return plain(self, dtype)
        key = "to", self.type.name, name
        result = _ways.get(key)
        if result is None:
            made = plain(self, dtype)
            _ways[key] = _like(made)
            return made
        return _tensor(self.handle.data.astype(kinds[name]), result)

    return to


def _where(plain):
    def where(condition, x, y):
        tensors = core.tensor
        if type(condition) is not tensors or condition.dtype.name != "int1":
            return plain(condition, x, y)
        of_x, of_y = type(x) is tensors, type(y) is tensors
        if not (of_x or of_y) or not (of_x or is_constant(x, y)) or not (of_y or is_constant(y, x)):
            return plain(condition, x, y)
        key = "where", condition.type.name, x.type.name if of_x else None, y.type.name if of_y else None
        way = _ways.get(key, _ways)
        if way is _ways:
            made = plain(condition, x, y)
            dtype = _numpy_common("where", (x if of_x else y).dtype.name, (y if of_y else x).dtype.name)
            _ways[key] = dtype and (dtype, _like(made))
            return made
        if way is None:
            return plain(condition, x, y)
        dtype, result = way
        x, y = (t.handle.data.astype(dtype, copy=False) if known else np.array([t], dtype) for t, known in ((x, of_x), (y, of_y)))
        return _tensor(np.where(condition.handle.data, x, y), result)

    return where


def _dot(plain):
    def dot(input, other, acc=None, **options):
        precision = options.get("input_precision")
        if not (type(precision) is str and len(options) == 1 or not options) or not (acc is None or type(acc) is core.tensor):
            return plain(input, other, acc, **options)
        key = "dot", input.type.name, other.type.name, None if acc is None else acc.type.name, precision
        way = _ways.get(key)
        if way is None:
            made = plain(input, other, acc, **options)
            _ways[key] = _like(made), made.handle.data.dtype
            return made
        result, dtype = way
        sums = interpreter.TensorHandle(np.zeros(result["type"].shape, dtype), result["dtype"]) if acc is None else acc.handle
        # the builder's, which knows bfloat16. The precision and how exact sums of float8 are change nothing here
        return _tensor(interpreter.interpreter_builder.create_dot(input.handle, other.handle, sums, None, 0).data, result)

    return dot


def _arange(plain):
    def arange(start, end):
        if type(start) is not int or type(end) is not int:
            return plain(start, end)
        key = "arange", start, end
        result = _ways.get(key)
        if result is None:
            made = plain(start, end)
            _ways[key] = _like(made)
            return made
        return _tensor(np.arange(start, end, dtype=np.int32), result)

    return arange


def _spread(data, shape: tuple):
    """What a tensor holds, in a shape that it broadcasts to."""
    if data.shape == shape:
        return data
    found = np.empty(shape, data.dtype)
    found[...] = data
    return found


def _is_mask(mask) -> bool:
    return mask is None or type(mask) is core.tensor and mask.dtype.name == "int1"


def _spread_mask(mask, shape: tuple):
    return np.ones(shape, bool) if mask is None else _spread(mask.handle.data, shape)


def _load(plain):
    def load(pointer, mask=None, other=None, *more, **options):
        simple = type(pointer) is core.tensor and pointer.dtype.is_ptr() and _is_mask(mask) and not more and options.keys() <= _HINTS
        # zeros of any type are zero bits; a mask that nothing stands for leaves zeros here
        if not simple or not (other is None or type(other) in (int, float) and other == 0 and mask is not None):
            return plain(pointer, mask, other, *more, **options)
        key = "load", pointer.type.name, None if mask is None else mask.type.name
        way = _ways.get(key, _ways)
        if way is _ways:
            made = plain(pointer, mask, other, **options)
            _ways[key] = None if made.dtype == core.int1 else (_like(made), made.handle.data.dtype, made.handle.data.shape)
            return made
        if way is None:
            return plain(pointer, mask, other, **options)
        result, dtype, shape = way
        addresses, zeros = _spread(pointer.handle.data, shape), np.zeros(shape, dtype)
        return _tensor(interpreter._interpreter.load(addresses, _spread_mask(mask, shape), zeros, dtype), result)

    return load


def _store(plain):
    def store(pointer, value, mask=None, *more, **options):
        simple = type(pointer) is core.tensor and pointer.dtype.is_ptr() and type(value) is core.tensor and _is_mask(mask)
        if not simple or more or not options.keys() <= _HINTS or pointer.dtype.element_ty.name != value.dtype.name:
            return plain(pointer, value, mask, *more, **options)
        key = "store", pointer.type.name, value.type.name, None if mask is None else mask.type.name
        if key not in _ways or value.dtype.name == "int1":
            made = plain(pointer, value, mask, **options)
            _ways[key] = ()
            return made
        addresses = pointer.handle.data
        interpreter._interpreter.store(addresses, _spread(value.handle.data, addresses.shape), _spread_mask(mask, addresses.shape))
        return None

    return store
