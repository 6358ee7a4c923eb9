"""torch's functions that look something up in a captured tensor, written as in a mod: embeddings, places in sorted rows, sets."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..captured.stand_ins import pinned
from ..captured.tensors import is_traced_kind, is_unseen
from ..current import Run, running
from .nodes import index_tensor, literal_tensor
from .symbols import Sym, TensorView, Vector
from .vectors import as_vector


def getitem(tensor: torch.Tensor, index):
    """tensor[index] of captured tensors. torch reads a place that is an integer tensor of no dimension as a number: that would wait for a
    GPU, and where operations are recorded nobody knows it. There the element is looked up."""
    parts = index if isinstance(index, tuple) else (index,)
    simple = all(part is None or part is Ellipsis or type(part) in (int, torch.SymInt, slice) or holds_place(part) for part in parts)
    if not simple or not any(holds_place(part) and _is_unknown(part) for part in parts):
        return tensor[index]
    dim, left = 0, tensor.ndim - sum(part is not None and part is not Ellipsis for part in parts)
    for part in parts:
        if holds_place(part):
            from_start = torch.where(part < 0, part + tensor.shape[dim], part)
            tensor = tensor.index_select(dim, from_start.reshape(1)).squeeze(dim)
        elif part is Ellipsis:
            dim += left
        elif type(part) in (int, torch.SymInt):
            tensor = tensor.select(dim, part)
        else:
            tensor = tensor[(slice(None),) * dim + (part,)]
            dim += 1
    return tensor


def holds_place(part) -> bool:
    """Is a part of an index a captured tensor of no dimension that holds an integer? (One of uint8 is a mask.)"""
    return isinstance(part, torch.Tensor) and not part.ndim and part.dtype not in (torch.bool, torch.uint8) and not part.is_floating_point()


def has_place(index) -> bool:
    """Does a part of an index hold one?"""
    return any(map(holds_place, index)) if isinstance(index, tuple) else holds_place(index)


def _is_unknown(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" or not is_unseen() or is_traced_kind(tensor)


def _embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    if max_norm is not None or scale_grad_by_freq:
        name = "scale_grad_by_freq" if max_norm is None else "max_norm"
        raise running().error(f"an embedding with {name}", "A kernel changes no weights, and counts no indices: index the weight.")
    if padding_idx is not None and weight.requires_grad:
        weight = Run.current.host(_learned_but_for, (weight, padding_idx), {}, "embedding")
    return weight[input]


def _learned_but_for(weight: torch.Tensor, row: int) -> torch.Tensor:
    """A weight that has no gradient in one of its rows."""
    fixed = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    fixed[row] = True
    return torch.where(fixed.unsqueeze(-1), weight.detach(), weight)


def _take(input, index):
    return (input if input.ndim == 1 else Run.current.host(torch.flatten, (input,), {}, "flatten"))[index]


def _gather(input, dim, index, *, sparse_grad=False):
    if input.ndim != 1:
        raise running().error(f"gather of a tensor of shape {tuple(input.shape)} by a scalar", "Index it: table[h, q_idx].")
    return input[index]


def _index_select(input, dim, index):
    if dim % max(input.ndim, 1) != 0:
        hint = "Index it: table[:, q_idx], or table[h, q_idx]."
        raise running().error(f"index_select along dimension {dim} of a tensor of shape {tuple(input.shape)}", hint)
    found, index = input[(index,)], as_vector(index)
    return found if type(index) is Vector else found.unsqueeze(0)


def _searchsorted(sorted_sequence, input, *, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        raise running().error("searchsorted with a sorter", "Sort the tensor before: a mod is called once for every score.")
    right = right if side is None else side == "right"

    def place(value):
        found = _place(sorted_sequence, value, right)
        return found if out_int32 else found.to(torch.int64)

    input = as_vector(input)
    return Vector(list(map(place, input.items)), input.shape) if type(input) is Vector else place(input)


def _bucketize(input, boundaries, *, out_int32=False, right=False):
    return _searchsorted(boundaries, input, out_int32=out_int32, right=right)


def _place(row, value, right: bool) -> Sym:
    """How many elements of an ascending row stand before a number: halving, with a load for every bit of their count."""
    tensor, index = (row.tensor, row.index) if type(row) is TensorView else (row, ())
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != len(index) + 1:
        raise running().error("a search in what is no row of a captured tensor", "Index all dimensions but the last: starts[b].")
    count = Run.current.host(torch.Tensor.size, (tensor, tensor.ndim - 1), {}, "size")
    bits, place = pinned(Run.current.host(_bits, (count,), {}, "bits")), literal_tensor(0, torch.int32)
    for step in (1 << bit for bit in reversed(range(bits))):
        other = index_tensor(tensor, (*index, place + (step - 1)))
        behind = ~(other > value) if right else ~(other >= value)
        place = torch.where((place + step <= count) & behind, place + step, place)
    return place


def _bits(count) -> int:
    return int(count).bit_length()


def _isin(elements=None, test_elements=None, *, element=None, test_element=None, assume_unique=False, invert=False):
    tests = as_vector(test_element if test_elements is None else test_elements)
    elements, found = as_vector(element if elements is None else elements), None
    for test in tests.items if type(tests) is Vector else [tests]:
        same = elements == test
        found = same if found is None else found | same
    return ~found if invert else found


LOOKUPS = {  # by function, or by the name of a method
    F.embedding: _embedding,
    torch.embedding: lambda weight, input, padding_idx=None, *_, **__: _embedding(
        input, weight, None if padding_idx == -1 else padding_idx
    ),
    **dict.fromkeys((torch.take, torch.Tensor.take, "take"), _take),
    **dict.fromkeys((torch.gather, torch.Tensor.gather, "gather"), _gather),
    **dict.fromkeys((torch.index_select, torch.Tensor.index_select, "index_select"), _index_select),
    torch.searchsorted: _searchsorted,
    torch.bucketize: _bucketize,
    **dict.fromkeys((torch.isin, "isin"), _isin),
}
