"""What only moves elements, done by torch to a tensor of their numbers: views, stacks, and parts that an index names."""

from __future__ import annotations

import functools
import itertools

import torch

from ..captured.stand_ins import HostValue, pinned
from ..captured.tensors import is_traced_kind
from ..current import Run, running
from .integers import with_indices
from .lookups import holds_place
from .nodes import Unrecorded, Unseen, cast, index_tensor, to_expr
from .symbols import Sym, TensorView, Vector
from .vectors import LARGEST, as_vector, check_size, literal, pinned_all, size_of

# Parts of captured tensors


def indexed(tensor: torch.Tensor, index):
    """`tensor[index]` with symbols among the indices: an element, or a part of the tensor."""
    if isinstance(index, list):
        raise running().error("a tensor is indexed by a list of symbols, which torch takes for a tuple", "Write torch.stack([...]).")
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, torch.Tensor) or not any(i is Ellipsis or _is_part(i) for i in index):
        return index_tensor(tensor, index)
    count = sum(i is not None and i is not Ellipsis for i in index)
    if count > tensor.ndim:
        return index_tensor(tensor, tuple(i for i in index if i is not None and i is not Ellipsis))  # which refuses so many
    whole = (slice(None),) * (tensor.ndim - count)
    index = tuple(itertools.chain.from_iterable(whole if i is Ellipsis else (i,) for i in index))
    while index and isinstance(index[-1], slice) and index[-1].start is index[-1].stop is index[-1].step is None:
        index = index[:-1]
    if not any(map(_is_part, index)):
        return index_tensor(tensor, index)
    return _part(tensor, index)


def _is_part(i) -> bool:
    """Does an index leave more than one element of its dimension, or make one?"""
    return i is None or isinstance(i, (slice, list, Vector, TensorView)) or isinstance(i, torch.Tensor) and i.ndim > 0


def _part(tensor: torch.Tensor, index: tuple) -> Vector:
    """The part of a captured tensor that an index with slices, None and lists names. Which elements these are torch says, of their numbers
    along each dimension."""
    index = (*index, *[slice(None)] * (tensor.ndim - sum(i is not None for i in index)))
    asked, places = [], []  # the index, and what its numbers stand for along each dimension
    for i in index:
        if i is None:
            asked.append(None)
            continue
        found, at = _along(tensor, len(places), i)
        asked.append(at)
        places.append(found)
    sizes = tuple(map(len, places))
    with Unseen(), Unrecorded():
        try:
            along = [_numbers_along(sizes, dim)[tuple(asked)] for dim in range(len(sizes))]
        except (RuntimeError, IndexError) as error:
            raise running().error(f"torch refuses an index: {str(error).strip().splitlines()[0]}") from None
        shape, elements = along[0].shape, list(zip(*(numbers.flatten().tolist() for numbers in along), strict=True))
    check_size(tensor, shape)
    exact = [tuple(found[n] for found, n in zip(places, element, strict=True)) for element in elements]
    return Vector([index_tensor(tensor, tuple(literal(i) if type(i) is int else i for i in element)) for element in exact], shape)


def _numbers_along(sizes: tuple[int, ...], dim: int) -> torch.Tensor:
    """Of each element of a tensor of these sizes: its number along a dimension."""
    shape = [sizes[dim] if d == dim else 1 for d in range(len(sizes))]
    return torch.arange(sizes[dim], device="cpu").view(shape).expand(sizes)


def _along(tensor: torch.Tensor, dim: int, i) -> tuple[tuple | range, object]:
    """The indices that an index means along a dimension, numbers and symbols, and what asks for all of these by their numbers."""
    if isinstance(i, slice):
        if any(isinstance(part, (Sym, Vector, TensorView)) for part in (i.start, i.stop, i.step)):
            raise running().error(
                "a slice that ends at a symbol", "Its length would not be static: slice the tensor before, or index every dimension."
            )
        return range(*slice(*map(pinned_all, (i.start, i.stop, i.step))).indices(size_of(tensor, dim))), slice(None)
    if not _is_part(i):
        return (i,), 0
    found, shape = listed(i)
    size = size_of(tensor, dim) if any(type(n) is int for n in found) else 0  # which is part of the trace only where numbers meet it
    if any(type(n) is int and not -size <= n < size for n in found):
        raise running().error(f"an index of {found} into a dimension of {size} elements", "It has no such element.")
    with Unseen(), Unrecorded():
        return tuple(n % size if type(n) is int else n for n in found), torch.arange(len(found), device="cpu").view(shape)


def listed(index) -> tuple[list, torch.Size]:
    """The integers in a list, a vector or a tensor by which a dimension is indexed, and its shape. What lies in host memory is part of the
    trace, what lies elsewhere is read in the kernel."""
    if isinstance(index, (torch.Tensor, Vector, TensorView)) and index.dtype in (torch.uint8, torch.bool):
        raise running().error(f"an index of {index.dtype}, which torch takes for a mask", "Write .long(), or torch.where.")
    if isinstance(index, torch.Tensor) and index.device.type == "cpu" and index.numel() <= LARGEST and not is_traced_kind(index):
        index = _of_stand_in(Run.current.host(torch.Tensor.tolist, (index,), {}, "tolist"))
    index = as_vector(index)
    if type(index) is list:
        parts = [listed(i) if isinstance(i, (list, Vector)) else ([pinned_all(i)], torch.Size()) for i in index]
        shape = torch.Size((len(parts), *(parts[0][1] if parts else ())))
        found = [n for part, _ in parts for n in part]
    else:
        found, shape = index.items, index.shape
    if not found or len(found) != shape.numel() or not all(type(n) in (int, Sym) for n in found):
        raise running().error(f"an index of {found}", "Indices are integers, in lists of equal lengths.")
    return found, shape


def _of_stand_in(value):
    """A list of numbers behind a stand-in, which are part of the trace from now on."""
    return [_of_stand_in(value[i]) for i in range(len(value))] if type(value) in (HostValue, list) else pinned(value)


# Vectors

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
    if name == "__getitem__" and (_has_symbols(args[1]) or _is_place(args[1])):
        return _chosen(as_vector(args[0]), args[1] if isinstance(args[1], tuple) else (args[1],))
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)  # torch takes lists in a list that stands alone for one
        args = (args[0], _by_numbers(index))
    shape_like = _tensor_like if name.endswith("_as") else _shape_like
    given = tuple(_numbers(a, items) for a in args[:1]), tuple(map(shape_like, args[1:])), {k: shape_like(v) for k, v in kwargs.items()}
    items = [Sym(i.expr) for i in _alike(items)] if name in JOINS else items  # new ones, which share no memory with those
    function = getattr(torch if name in JOINS else torch.Tensor, name, None) or getattr(torch, name)
    with Unseen(), Unrecorded():
        try:
            found = function(*given[0], *given[1], **given[2])
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise running().error(f"torch refuses {name.strip('_')}: {str(error).strip().splitlines()[0]}") from None
        return _elements(found, items)


def _chosen(vector: Vector, index: tuple):
    """A vector indexed by symbols in its first dimensions: they are compared with all places. Outside it is 0, as captured tensors are."""
    index = tuple(Sym(to_expr(i)) if holds_place(i) else pinned_all(i) for i in index)
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


def _by_numbers(index):
    """An index with lists in place of tensors."""
    if isinstance(index, torch.Tensor) and index.ndim:
        found, shape = listed(index)
        if not all(type(n) is int for n in found):
            what = "a vector is indexed by a tensor on another device than the CPU, or one of a compiler, which has no values"
            raise running().error(what, "Index it by a list.")
        with Unseen(), Unrecorded():
            return torch.tensor(found, device="cpu").view(shape).tolist()
    return tuple(map(_by_numbers, index)) if type(index) is tuple else index


def _alike(items: list[Sym]) -> list[Sym]:
    """What is joined, in one dtype. Where an index is among it, all are numbers like an index, which are int64 where int32 is too small."""
    dtype = functools.reduce(torch.promote_types, (i.dtype for i in items))
    items = [cast(i, dtype) for i in items]
    indices = {id(i.expr) for i in items if id(i.expr) in with_indices(i.expr)}
    zero = next((torch.zeros_like(i) for i in items if id(i.expr) in indices), None)
    return items if zero is None else [i if id(i.expr) in indices else i + zero for i in items]


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
    """An argument beside what is moved: a tensor with dimensions says a shape there, one without is a number."""
    value = as_vector(value)
    return _tensor_like(value) if isinstance(value, (Vector, Sym)) else pinned_all(value)


def _tensor_like(value) -> torch.Tensor:
    """A tensor that has a shape alone."""
    with Unseen(), Unrecorded():
        return torch.empty(tuple(value.shape), dtype=torch.float32, device="cpu")


def _elements(numbers, items: list[Sym]):
    if isinstance(numbers, (tuple, list)):
        return tuple(_elements(n, items) for n in numbers)
    if not numbers.numel():
        raise running().error("a vector without elements", "Vectors have at least one.")
    if not numbers.ndim:
        item = items[numbers.item()]
        view = Sym(item.expr)  # another tensor of the same memory, as in torch
        running().shared.append((item, view))
        return view
    return Vector([items[i] for i in numbers.flatten().tolist()], numbers.shape)


def _is_place(index) -> bool:
    """Is it the place of an element that captured tensors say? A kernel reads those, so that another place compiles nothing."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(map(holds_place, parts)) and all(holds_place(i) or type(i) is int for i in parts)


def _has_symbols(index) -> bool:
    parts = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(p, (Sym, Vector, TensorView)) for p in parts)
