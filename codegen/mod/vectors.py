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

from . import ops
from .current import Run, applied, running
from .long_dots import LONG, product_of, row_of_view, widened
from .nodes import Unrecorded, Unseen, cast, index_tensor, to_expr
from .stand_ins import is_stand_in, pinned
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


def indexed(tensor: torch.Tensor, index):
    """`tensor[index]` with symbols among the indices: an element, or a part of the tensor."""
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, torch.Tensor) or not any(i is None or i is Ellipsis or isinstance(i, slice) for i in index):
        return index_tensor(tensor, index)
    count = sum(i is not None and i is not Ellipsis for i in index)
    if count > tensor.ndim:
        return index_tensor(tensor, tuple(i for i in index if i is not None and i is not Ellipsis))  # which refuses so many
    whole = (slice(None),) * (tensor.ndim - count)
    index = tuple(itertools.chain.from_iterable(whole if i is Ellipsis else (i,) for i in index))
    while index and isinstance(index[-1], slice) and index[-1].start is index[-1].stop is index[-1].step is None:
        index = index[:-1]
    if not any(i is None or isinstance(i, slice) for i in index):
        return index_tensor(tensor, index)
    return _sliced(tensor, index)


def _sliced(tensor: torch.Tensor, index: tuple) -> Vector:
    """The part of a captured tensor that an index with slices and None names."""
    shape, places, dim = [], [], 0
    for i in (*index, *[slice(None)] * (tensor.ndim - sum(i is not None for i in index))):
        if i is None:
            shape.append(1)
            continue
        if isinstance(i, slice):
            if any(isinstance(part, (Sym, Vector, TensorView)) for part in (i.start, i.stop, i.step)):
                raise running().error(
                    "a slice that ends at a symbol", "Its length would not be static: slice the tensor before, or index every dimension."
                )
            found = range(*slice(*map(pinned_all, (i.start, i.stop, i.step))).indices(size_of(tensor, dim)))
            shape.append(len(found))
            places.append(found)
        else:
            places.append((i,))
        dim += 1
    check_size(tensor, torch.Size(shape))
    return Vector(
        [
            index_tensor(tensor, tuple(literal(i) if isinstance(found, range) else i for i, found in zip(place, places, strict=True)))
            for place in itertools.product(*places)
        ],
        shape,
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


# What moves elements

MOVES = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "unsqueeze", "squeeze", "expand", "expand_as"),
    *("broadcast_to", "t", "transpose", "swapaxes", "permute", "movedim", "flip", "roll", "narrow", "select", "diagonal", "repeat"),
    *("tile", "unbind", "split", "chunk", "atleast_1d", "stack", "cat", "concat", "hstack", "vstack", "__getitem__"),
}
JOINS = {"stack", "cat", "concat", "hstack", "vstack"}


def moved(name: str, args: tuple, kwargs: dict):
    """What torch's function gives for the elements: a vector, a Sym, or a tuple of them."""
    items: list[Sym] = []
    if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        raise running().error(f"Tensor.{name}(dtype) is not a supported operation", "Convert with .to(dtype).")
    if name == "__getitem__" and _has_symbols(args[1]):
        return _chosen(as_vector(args[0]), args[1] if isinstance(args[1], tuple) else (args[1],))
    given = tuple(_numbers(a, items) for a in args[:1]), tuple(map(_shape_like, args[1:])), {k: _shape_like(v) for k, v in kwargs.items()}
    function = getattr(torch if name in JOINS else torch.Tensor, name, None) or getattr(torch, name)
    with Unseen(), Unrecorded():
        try:
            found = function(*given[0], *given[1], **given[2])
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise running().error(f"torch refuses {name.strip('_')}: {str(error).strip().splitlines()[0]}") from None
        return _elements(found, items)


def _chosen(vector: Vector, index: tuple):
    """A vector indexed by symbols in its first dimensions: they are compared with all places. Outside it is 0, as captured tensors are."""
    index = tuple(map(pinned_all, index))
    if len(index) > vector.ndim or not all(type(i) in (Sym, int) for i in index):
        raise running().error("a vector is indexed by symbols beside others than numbers", "Index the captured tensor by them.")
    found = vector
    for place in index:
        parts = found.unbind(0)
        if type(place) is int:
            found = parts[place]
            continue
        place = torch.where(place < 0, place + len(parts), place)
        found = torch.zeros_like(parts[0])
        for i, part in enumerate(parts):
            found = torch.where(place == i, part, found)
    return found


def _numbers(value, items: list[Sym]):
    """Numbers in place of elements, which are put behind `items`; of all that is joined in one list."""
    value = as_vector(value)
    if type(value) in (list, tuple):
        return type(value)(_numbers(v, items) for v in value)
    if isinstance(value, torch.Tensor):
        value = Sym(to_expr(value))
    if type(value) not in (Vector, Sym):
        return pinned_all(value)
    found, shape = (value.items, value.shape) if type(value) is Vector else ([value], ())
    items.extend(found)
    with Unseen(), Unrecorded():
        return torch.arange(len(items) - len(found), len(items), device="cpu").view(tuple(shape))


def _shape_like(value):
    """An argument beside what is moved: a tensor there says a shape."""
    value = as_vector(value)
    if isinstance(value, (Vector, Sym)):
        with Unseen(), Unrecorded():
            return torch.empty(tuple(value.shape), device="cpu")
    return pinned_all(value)


def _elements(numbers, items: list[Sym]):
    if isinstance(numbers, (tuple, list)):
        return tuple(_elements(n, items) for n in numbers)
    if not numbers.numel():
        raise running().error("a vector without elements", "Vectors have at least one.")
    if not numbers.ndim:
        return items[numbers.item()]
    return Vector([items[i] for i in numbers.flatten().tolist()], numbers.shape)


def _has_symbols(index) -> bool:
    parts = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(p, (Sym, Vector, TensorView)) for p in parts)


def pinned_all(value):
    """An argument as Python has it: numbers in it are part of the trace from now on."""
    if type(value) in (list, tuple):
        return type(value)(map(pinned_all, value))
    if isinstance(value, slice):
        return slice(*map(pinned_all, (value.start, value.stop, value.step)))
    if isinstance(value, torch.SymInt):
        return int(value)
    return pinned(value) if is_stand_in(value) else value


# Reductions


def reduced(name: str, vector, dim=None, keepdim: bool = False, *, axis=None, dtype: torch.dtype | None = None):
    """torch's reduction: over one dimension, some or all of them; sums in float32, and of integers and bools in int64."""
    vector, dims = as_vector(vector), pinned_all(axis if dim is None else dim)
    dims = range(vector.ndim) if dims is None or dims in ((), []) else dims if isinstance(dims, (tuple, list)) else (dims,)
    if not all(-vector.ndim <= d < vector.ndim for d in dims):
        raise running().error(f"{name} with dim={dim} of a tensor of shape {tuple(vector.shape)}", "It has no such dimension.")
    dims = sorted({d % vector.ndim for d in dims})
    if name == "sum" and vector.rows and dtype is None:
        found = vector.rows[0].dot(vector.rows[1:], vector.dtype)
        if found is not None:
            return Vector([found], (1,)) if keepdim else found
    shape = [1 if d in dims else n for d, n in enumerate(vector.shape) if keepdim or d not in dims]
    kept = [d for d in range(vector.ndim) if d not in dims]
    with Unseen(), Unrecorded():
        numbers = torch.arange(vector.numel(), device="cpu").view(vector.shape).permute(*kept, *dims)
        groups = numbers.reshape(max(1, torch.Size(shape).numel()), -1).tolist()
    found = [_joined(name, [vector.items[i] for i in group], dtype) for group in groups]
    return Vector(found, shape) if shape else found[0]


def _joined(name: str, items: list[Sym], dtype: torch.dtype | None) -> Sym:
    """The reduction of some elements."""
    given, join = items[0].dtype, _JOINED[name]
    if name in ("any", "all"):
        return functools.reduce(join, [cast(i, torch.bool) for i in items])
    if name in _PICKS:
        return functools.reduce(join, items)
    if name == "mean" and not given.is_floating_point:
        raise running().error(f"the mean of {given}", "Write .float() before .mean().")
    wide = torch.promote_types(given, torch.float32) if given.is_floating_point else torch.int64
    total = functools.reduce(join, [cast(i, wide) for i in items])
    if name == "mean":
        total = total / literal(float(len(items)))
    return cast(total, dtype or (given if given.is_floating_point else torch.int64))


_PICKS = {"amax": torch.maximum, "amin": torch.minimum, "max": torch.maximum, "min": torch.minimum}
_JOINED = {"sum": operator.add, "mean": operator.add, "prod": operator.mul, "any": operator.or_, "all": operator.and_, **_PICKS}
REDUCTIONS = frozenset(_JOINED)
