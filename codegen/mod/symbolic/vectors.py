"""Vectors and small matrices of captured tensors, computed with element by element: `(place[q_idx] - place[kv_idx]).pow(2).sum(-1)`.

A vector is what a tensor gives when not all of its dimensions are indexed. What only moves elements (view, stack, a slice) is done by torch
to a tensor of their numbers, so it means what torch means. Every other operation is done for each element, and a reduction makes a scalar
of them. So a kernel has the whole in registers; that is why vectors are short. A long row is one of two in a dot product (long_dots.py).
"""

from __future__ import annotations

import functools
import itertools
import operator

import torch

from ..captured.stand_ins import is_stand_in, pinned
from ..current import Run, applied, running
from ..table import ops
from .long_dots import LONG, product_of, row_of_view, widened
from .nodes import Unrecorded, Unseen, cast, index_tensor
from .symbols import Sym, TensorView, Vector

LONGEST = 64  # elements along a dimension
LARGEST = 256  # elements of a small matrix


def is_vector(value) -> bool:
    return type(value) in (Vector, TensorView)


def literal(number) -> Sym:
    """A number that is part of the kernel, whoever traces."""
    return Sym(Run.number(Run.current, number))


# What a vector is


def as_vector(value):
    """A captured tensor with dimensions left as the small tensor that it is; everything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(as_vector, value))
    if type(value) is TensorView:
        return _of_captured(value.tensor, value.index)
    if isinstance(value, torch.Tensor) and value.ndim:
        return _of_captured(value, ())
    return value


def _of_captured(tensor: torch.Tensor, index: tuple) -> Vector:
    """A captured tensor indexed in its first dimensions by scalars."""
    if tensor.is_nested:  # it has no sizes, and is refused as one that is read
        Run.current.tensor_index(tensor)
    shape = torch.Size(size_of(tensor, dim) for dim in range(len(index), tensor.ndim))
    row = row_of_view(tensor, index, shape[0]) if len(shape) == 1 and shape[0] > LONG else None

    def items() -> list[Sym]:
        check_size(tensor, shape)
        return [index_tensor(tensor, (*index, *map(literal, place))) for place in itertools.product(*map(range, shape))]

    return Vector(items, shape, (row,), tensor.dtype) if row else Vector(items(), shape)


def size_of(tensor: torch.Tensor, dim: int) -> int:
    """A size of a captured tensor, which is part of the trace from now on."""
    size = int(pinned(Run.current.host(torch.Tensor.size, (tensor, dim), {}, "size")))  # a SymInt of torch's compiler: for this size alone
    Run.current.note_size(tensor, dim, size)
    return size


def pinned_all(value):
    """An argument as Python has it: numbers in it, those in captured tensors, too, are part of the trace from now on."""
    if type(value) in (list, tuple):
        return type(value)(map(pinned_all, value))
    if isinstance(value, slice):
        return slice(*map(pinned_all, (value.start, value.stop, value.step)))
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.Tensor) and not value.ndim:
        value = Run.current.host(torch.Tensor.item, (value,), {}, "item")
    return pinned(value) if is_stand_in(value) else value


def check_size(tensor: torch.Tensor, shape: torch.Size) -> None:
    """Raise ModError for a part of a captured tensor that is too large to be computed with element by element, or empty."""
    if all(0 < n <= LONGEST for n in shape) and shape.numel() <= LARGEST:
        return
    what = f"a vector of {shape[0]} elements" if len(shape) == 1 else f"a part of shape {tuple(shape)}"
    raise running().error(
        f"{what} of a captured tensor of shape {tuple(tensor.shape)} is used where a scalar is needed",
        f"Index it, for example with [h] or [q_idx], or reduce the tensor before the call. Vectors of 1 to {LONGEST} elements and matrices "
        f"of up to {LARGEST} are computed element by element. A longer row of floats may be in a score_mod's dot product with another, one "
        "read by q_idx and one by kv_idx: torch.dot(a[h, q_idx], b[kv_idx]) or (a[h, q_idx] * b[kv_idx]).sum(-1).",
    )


# Element by element


def apply_to_elements(name: str, function, args: tuple, kwargs: dict) -> Vector:
    """An operation of scalars, done for each element of vectors that broadcast against each other."""
    args, kwargs = tuple(map(as_vector, args)), {k: as_vector(v) for k, v in kwargs.items()}
    kept = _kept_long(name, function, args, kwargs)
    if kept is not None:
        return kept
    vectors = [v for v in (*args, *kwargs.values()) if type(v) is Vector]
    shape = _common_shape(name, [v.shape for v in vectors])
    items = {id(v): _spread(v, shape) for v in vectors}

    def element(value, i: int):
        return items[id(value)][i] if type(value) is Vector else value

    return Vector(
        [
            applied(function, tuple(element(a, i) for a in args), {k: element(v, i) for k, v in kwargs.items()})
            for i in range(shape.numel())
        ],
        shape,
    )


def _kept_long(name: str, function, args: tuple, kwargs: dict) -> Vector | None:
    """What is done to long rows and keeps them factors of a dot product."""
    if not args or type(args[0]) is not Vector or not args[0].rows:
        return None
    row = ops.METHODS.get(function) if isinstance(function, str) else ops.FUNCTIONS.get(function)
    if row is not None:
        return product_of(*args) if row.scales == (0, 1) and len(args) == 2 and not kwargs else None
    return widened(name, *args, **kwargs)


def _common_shape(name: str, shapes: list[torch.Size]) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        listed = " and ".join(str(tuple(s)) for s in dict.fromkeys(shapes))
        raise running().error(f"{name} of vectors of shapes {listed}", "Their sizes must be equal, or 1.") from None


def _spread(vector: Vector, shape: torch.Size) -> list[Sym]:
    with Unseen(), Unrecorded():
        places = torch.arange(vector.numel(), device="cpu").view(vector.shape).expand(shape).flatten().tolist()
    return [vector.items[i] for i in places]


# Reductions


def reduced(name: str, vector, dim=None, keepdim: bool = False, *, dtype: torch.dtype | None = None):
    """torch's reduction: over one dimension, some or all of them; sums in float32, and of integers and bools in int64. With a dtype the
    elements are converted first, and integers stay in it."""
    vector, dims = as_vector(vector), pinned_all(dim)
    vector = vector if dtype is None else vector.to(dtype)
    if dims is None or dims in ((), []) and name not in ("any", "all"):  # which torch lets reduce nothing
        dims = range(vector.ndim)
    elif not isinstance(dims, (tuple, list)):
        dims = (dims,)
    if type(vector) is Sym and set(dims) <= {0, -1}:
        return _joined(name, [vector], dtype)
    if not all(-vector.ndim <= d < vector.ndim for d in dims):
        raise running().error(f"{name} with dim={dim} of a tensor of shape {tuple(vector.shape)}", "It has no such dimension.")
    dims = sorted(d % vector.ndim for d in dims)
    if len(set(dims)) < len(dims):
        raise running().error(f"{name} with dim={dim}, a dimension twice", "Name each dimension once.")
    if name == "sum" and vector.rows:
        found = vector.rows[0].dot(vector.rows[1:], vector.dtype)
        if found is not None:
            return Vector([found], (1,)) if keepdim else found
    shape = [1 if d in dims else n for d, n in enumerate(vector.shape) if keepdim or d not in dims]
    kept = [d for d in range(vector.ndim) if d not in dims]
    with Unseen(), Unrecorded():
        numbers = torch.arange(vector.numel(), device="cpu").view(vector.shape).permute(*kept, *dims)
        groups = numbers.reshape(max(1, torch.Size(shape).numel()), -1).tolist()
    found = [Sym(_joined(name, [vector.items[i] for i in group], dtype).expr) for group in groups]
    return Vector(found, shape) if shape else found[0]


def _joined(name: str, items: list[Sym], dtype: torch.dtype | None) -> Sym:
    """The reduction of some elements."""
    given, join = items[0].dtype, _JOINED[name]
    if name in ("any", "all"):
        found = functools.reduce(join, [cast(i, torch.bool) for i in items])
        return cast(found, given) if given == torch.uint8 else found  # as torch has it, of uint8 alone
    if name in _PICKS:
        return functools.reduce(join, items)
    if name == "mean" and not given.is_floating_point:
        raise running().error(f"the mean of {given}", "Write .float() before .mean(), or dtype=torch.float32.")
    result = given if dtype or given.is_floating_point else torch.int64
    wide = torch.promote_types(result, torch.float32) if result.is_floating_point else result
    total = functools.reduce(join, [cast(i, wide) for i in items])
    if name == "mean":
        total = total / literal(float(len(items)))
    return cast(total, result)


_PICKS = {"amax": torch.maximum, "amin": torch.minimum, "max": torch.maximum, "min": torch.minimum}
_JOINED = {"sum": operator.add, "mean": operator.add, "prod": operator.mul, "any": operator.or_, "all": operator.and_, **_PICKS}
REDUCTIONS = frozenset(_JOINED)
