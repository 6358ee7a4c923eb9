"""Functions of a vector as a whole, written as in a mod: softmax, variances, normalisation, running sums, where the largest element is."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..current import running
from .symbols import Sym, Vector
from .vector_dtypes import check_one_dtype, of_floats, rounded_once, summed_in
from .vectors import as_vector, pinned_all, reduced


class Extreme(NamedTuple):
    """What torch's max and min along a dimension give."""

    values: Sym | Vector
    indices: Sym | Vector


def _one_dim(x, dim) -> int:
    """The dimension of a softmax."""
    if dim is None and x.ndim > 1:
        raise running().error(f"a softmax of shape {tuple(x.shape)} without dim", "Name the dimension.")
    return 0 if dim is None else dim


def _most(x, dim) -> Vector:
    """The largest element along a dimension, which only keeps exponentials small: no gradient goes through it."""
    return reduced("amax", x, dim, True).detach()


def softmax(x, dim=None, dtype=None):
    return _softmax(of_floats("softmax", x, dtype), dim)


@rounded_once()
def _softmax(x, dim):
    dim = _one_dim(x, dim)
    weights = torch.exp(x - _most(x, dim))
    return weights / reduced("sum", weights, dim, True)


def log_softmax(x, dim=None, dtype=None):
    return _log_softmax(of_floats("log_softmax", x, dtype), dim)


@rounded_once()
def _log_softmax(x, dim):
    dim = _one_dim(x, dim)
    x = x - _most(x, dim)  # first: of huge numbers the logarithm would be lost beside it
    return x - torch.log(reduced("sum", torch.exp(x), dim, True))


def _functional(function, sign: int = 1):
    """The same as torch.nn.functional has it."""
    return lambda x, dim=None, _stacklevel=3, dtype=None: function(x if sign > 0 else -as_vector(x), dim, dtype)


def logsumexp(x, dim, keepdim=False):
    x = as_vector(x)
    return _logsumexp(x if x.dtype.is_floating_point else x.to(torch.get_default_dtype()), dim, keepdim)


@rounded_once()
def _logsumexp(x, dim, keepdim):
    most = _most(x, dim)
    most = torch.where(torch.isinf(most), 0.0, most)
    found = torch.log(reduced("sum", torch.exp(x - most), dim, True)) + most
    return found if keepdim else reduced("sum", found, dim)  # of one element


@rounded_once()
def var(x, dim=None, unbiased=None, keepdim=False, *, correction=None):
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    mean = reduced("mean", x, dim, True)
    count = x.numel() // max(1, as_vector(mean).numel())
    return reduced("sum", (x - mean) ** 2, dim, keepdim) / max(0, count - correction)


@rounded_once()
def std(x, *args, **kwargs):
    return power(var(x, *args, **kwargs), 0.5)


def power(x, p: float):
    """x ** p with the gradient 0 at 0 that torch's norms and standard deviations have there."""
    none = x == 0
    inside = torch.where(none, 1.0, x)
    return torch.where(none, 0.0, torch.sqrt(inside) if p == 0.5 else inside**p)


def extreme(x, dim, keepdim: bool = False, *, largest: bool) -> Extreme:
    """The largest (or smallest) elements along a dimension, and the first place of each; NaN is before any number."""
    x = as_vector(x)
    parts = x.unbind(pinned_all(dim))
    value, place = parts[0], torch.zeros_like(as_vector(parts[0]), dtype=torch.int64)
    for i, part in enumerate(parts[1:], 1):
        better = (part > value if largest else part < value) | ((part != part) & (value == value))
        value, place = torch.where(better, part, value), torch.where(better, i, place)
    return Extreme(value.unsqueeze(dim), place.unsqueeze(dim)) if keepdim else Extreme(value, place)


def _argument(largest: bool):
    def argument(x, dim=None, keepdim=False):
        x = as_vector(x)
        if x.dtype == torch.bool:
            raise running().error("argmax or argmin of bools", "Write .int() first.")
        if dim is None:
            if keepdim:
                raise running().error("argmax or argmin with keepdim, but without dim", "Name the dimension.")
            return extreme(x.flatten(), 0, largest=largest).indices
        return extreme(x, dim, keepdim, largest=largest).indices

    return argument


def cumsum(x, dim, *, dtype=None):
    x = as_vector(x)
    dtype = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    parts = list(x.to(dtype).to(summed_in(dtype)).unbind(pinned_all(dim)))
    for i in range(1, len(parts)):
        parts[i] = parts[i - 1] + parts[i]
    return torch.stack(parts, dim).to(dtype)


def count_nonzero(x, dim=None):
    return reduced("sum", as_vector(x) != 0, dim)


def normalize(x, p=2.0, dim=1, eps=1e-12):
    x = as_vector(x)
    return x / torch.clamp_min(torch.linalg.vector_norm(x, p, dim, True), eps)


@rounded_once()
def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-05):
    x = rms_norm(x - reduced("mean", x, _last(x, normalized_shape), True), normalized_shape, weight, eps)
    return x if bias is None else x + bias


@rounded_once()
def rms_norm(x, normalized_shape, weight=None, eps=None):
    eps = torch.finfo(x.dtype).eps if eps is None else eps  # float32's for half precision, too: torch adds it there
    x = x * torch.rsqrt(reduced("mean", x * x, _last(x, normalized_shape), True) + eps)
    return x if weight is None else x * weight


def _last(x, shape) -> tuple[int, ...]:
    shape = pinned_all(tuple(shape) if isinstance(shape, (tuple, list, torch.Size)) else (shape,))
    if tuple(x.shape[-len(shape) :]) != tuple(shape):
        raise running().error(f"a norm of the last dimensions {tuple(shape)} of shape {tuple(x.shape)}", "They must be the same.")
    return tuple(range(-len(shape), 0))


def einsum(equation, *operands):
    """Sums of products, by the letters of dimensions: "i,i->" or "i,ij->j"."""
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    left, arrow, result = str(equation).replace(" ", "").partition("->")
    terms, operands = left.split(","), [as_vector(x) for x in operands]
    letters = sorted(set(left) - {","})
    if not all(c.isalpha() for c in letters + list(result)) or len(terms) != len(operands) or not set(result) <= set(letters):
        raise running().error(f"einsum {equation!r} of {len(operands)} operands", "Write a letter for every dimension: 'i,ij->j'.")
    result = result if arrow else "".join(c for c in letters if left.count(c) == 1)
    for term, x in zip(terms, operands, strict=True):
        if len(set(term)) < len(term) or len(term) != getattr(x, "ndim", 0):
            raise running().error(f"einsum's {term!r} of a shape {tuple(x.shape)}", "Write another letter for every dimension.")
    summed = set(terms[0]).intersection(*terms[1:]) - set(result) if len(terms) == 2 else ()  # torch multiplies more two by two
    if any(operands[0].shape[terms[0].index(c)] > 1 for c in summed):
        check_one_dtype("an einsum that sums products", *operands)
    return _contracted(*operands, terms=terms, result=result)


@rounded_once(None)
def _contracted(*operands, terms: list[str], result: str):
    """Operands with a letter for each of their dimensions, multiplied, and summed over the letters that `result` has not."""
    operands, terms, count = list(operands), list(terms), Counter("".join(terms))
    for i, term in enumerate(terms):  # what one operand alone has is summed before the product, of integers in int64
        alone = tuple(place for place, c in enumerate(term) if c not in result and count[c] == 1)
        if alone:
            operands[i], terms[i] = reduced("sum", operands[i], alone), "".join(c for c in term if c in result or count[c] > 1)
    order = result + "".join(sorted(set("".join(terms)) - set(result)))
    if len(order) > len(result) and any(x.dtype == torch.bool for x in operands):
        raise running().error("an einsum of bools that sums products", "Write .int() first.")
    total = None
    for term, x in zip(terms, operands, strict=True):
        if len(order) > 1 and term:
            places = [order.index(c) for c in term]
            x = x.permute(*sorted(range(len(term)), key=places.__getitem__))
            for place in range(len(order)):
                x = x if place in places else x.unsqueeze(place)
        total = x if total is None else total * x
    summed = tuple(range(len(result), len(order)))
    return reduced("sum", total, summed, dtype=total.dtype) if summed else total


STATISTICS = {  # of tensors, by name; torch has those of the same names, too
    **{f.__name__: f for f in (softmax, log_softmax, logsumexp, var, std, cumsum, count_nonzero)},
    "argmax": _argument(True),
    "argmin": _argument(False),
}
STATISTICAL = {  # and functions that are no methods
    **{F.softmax: _functional(softmax), F.softmin: _functional(softmax, -1), F.log_softmax: _functional(log_softmax)},
    **{torch.special.softmax: softmax, torch.special.log_softmax: log_softmax, torch.special.logsumexp: logsumexp},
    **{F.normalize: normalize, F.layer_norm: layer_norm, F.rms_norm: rms_norm},
    **{torch.layer_norm: layer_norm, torch.rms_norm: rms_norm, torch.einsum: einsum},
}
