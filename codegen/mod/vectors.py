"""Vectors of captured tensors, computed with element by element: `(place[q_idx] - place[kv_idx]).pow(2).sum(-1)`.

A vector is what a tensor gives when all dimensions but its last are indexed. Each operation is done for each of its elements, and a
reduction makes a scalar of them, so a kernel has the whole in registers; that is why vectors are short.
"""

from __future__ import annotations

import functools
import operator

import torch

from .current import Run, running
from .nodes import cast, index_tensor
from .stand_ins import pinned
from .symbols import Sym, TensorView, Vector

LONGEST = 64


def has_vectors(values) -> bool:
    return any(type(v) in (Vector, TensorView) for v in values)


def apply_to_vectors(apply, function, args: tuple, kwargs: dict):
    """An operation with vectors among its operands, as `apply(function, args, kwargs)` does it for elements."""
    args, kwargs = tuple(map(_vector, args)), {k: _vector(v) for k, v in kwargs.items()}
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    if name in _REDUCTIONS and type(args[0]) is Vector:
        return _reduced(name, *args, **kwargs)
    if name in _PRODUCTS and len(args) == 2 and type(args[0]) is type(args[1]) is Vector:
        return _reduced("sum", apply_to_vectors(apply, operator.mul, args, {}))
    length = max(len(a) for a in (*args, *kwargs.values()) if type(a) is Vector)

    def element(value, i: int):
        if type(value) is not Vector:
            return value
        if len(value) not in (1, length):
            raise running().error(f"{name} of vectors of {len(value)} and {length} elements", "They must have as many elements.")
        return value.items[i if len(value) > 1 else 0]

    return Vector(
        [apply(function, tuple(element(a, i) for a in args), {k: element(v, i) for k, v in kwargs.items()}) for i in range(length)]
    )


def _vector(value):
    """A captured tensor with one dimension left as the vector that it is; everything else as it is."""
    if type(value) is TensorView:
        if value.ndim != 1:
            value.incomplete()
        tensor, index = value.tensor, value.index
    elif isinstance(value, torch.Tensor) and value.ndim == 1:
        tensor, index = value, ()
    else:
        return value
    run = Run.current
    length = pinned(run.host(torch.Tensor.size, (tensor, tensor.ndim - 1), {}, "size"))
    if not 0 < length <= LONGEST:
        raise run.error(
            f"a vector of {length} elements of a captured tensor of shape {tuple(tensor.shape)}",
            f"Vectors of 1 to {LONGEST} elements are computed in a kernel; index every dimension, or reduce the tensor before the call.",
        )
    return Vector([index_tensor(tensor, (*index, _literal(i))) for i in range(length)])


def _literal(number) -> Sym:
    """A number that is part of the kernel, whoever traces."""
    return Sym(Run.number(Run.current, number))


def _reduced(name: str, vector: Vector, dim=None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Sym:
    """torch's reduction of a vector: over its only dimension, in float32, and of integers and bools in int64."""
    if dim not in (None, 0, -1, (0,), (-1,), [0], [-1]) or keepdim:
        raise running().error(f"{name} with dim={dim}, keepdim={keepdim}", "A vector has one dimension: write dim=-1, without keepdim.")
    given, join = vector.dtype, _REDUCTIONS[name]
    if name in ("amax", "amin"):
        return functools.reduce(join, vector.items)
    if name == "mean" and not given.is_floating_point:
        raise running().error(f"the mean of {given}", "Write .float() before .mean().")
    wide = torch.promote_types(given, torch.float32) if given.is_floating_point else torch.int64
    total = functools.reduce(join, [cast(i, wide) for i in vector.items])
    if name == "mean":
        total = total / _literal(float(len(vector)))
    return cast(total, dtype or (given if given.is_floating_point else torch.int64))


_REDUCTIONS = {"sum": operator.add, "mean": operator.add, "prod": operator.mul, "amax": torch.maximum, "amin": torch.minimum}
_PRODUCTS = {"dot", "matmul", "vecdot", "__matmul__"}
REDUCTIONS = frozenset((*_REDUCTIONS, "dot", "matmul"))
