"""Operations on vectors: what moves their elements, reduces them, or is written with other operations, as in a mod."""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F

from ..current import running
from ..errors import call_problem
from .long_dots import promised, same_where_seen
from .lookups import LOOKUPS
from .symbols import Sym, TensorView, Vector
from .vector_dtypes import check_one_dtype, of_floats, rounded_once, summed_in
from .vector_moves import JOINS, MOVES, moved
from .vector_statistics import STATISTICAL, STATISTICS, extreme, power
from .vectors import REDUCTIONS, apply_to_elements, as_vector, is_vector, pinned_all, reduced


def _product(name: str, *ndims: int):
    """A product of matrices of these numbers of dimensions."""

    def product(a, b):
        a, b = as_vector(a), as_vector(b)
        if (a.ndim, b.ndim) != ndims:
            words = " and ".join(f"{n}-D" for n in ndims)
            raise running().error(
                f"{name} of shapes {tuple(a.shape)} and {tuple(b.shape)}", f"It takes {words}; torch.matmul takes others."
            )
        return _matmul(a, b)

    return product


def _matmul(a, b):
    a, b = as_vector(a), as_vector(b)
    if not (type(a) is type(b) is Vector):
        raise running().error("a product of matrices with a scalar", "Write * for a product with a number.")
    check_one_dtype("a product", a, b)
    inner = a.shape[-1], b.shape[-2 if b.ndim > 1 else 0]
    if inner[0] != inner[1]:
        raise running().error(f"a product of shapes {tuple(a.shape)} and {tuple(b.shape)}", "The inner sizes must be equal.")
    given = a.dtype
    if given == torch.bool:
        raise running().error("a product of matrices of bools", "Write .int() first.")
    wide = summed_in(given)  # integers stay in their dtype, and wrap around
    a, b = a.to(wide), b.to(wide)
    if b.ndim == 1:
        found = (a * b).sum(-1, dtype=wide)
    elif a.ndim == 1:
        found = (a.unsqueeze(-1) * b).sum(-2, dtype=wide)
    else:
        found = (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2, dtype=wide)
    return found.to(given)


@rounded_once(2, alike="vecdot")
def _vecdot(a, b, *, dim=-1):
    return (of_floats("vecdot", a) * of_floats("vecdot", b)).sum(dim)


def _inner(a, b):
    a, b = as_vector(a), as_vector(b)
    return _matmul(a, b) if b.ndim == 1 else _matmul(a, b.mT)


def _outer(a, b):
    a, b = as_vector(a), as_vector(b)
    if not a.ndim == b.ndim == 1:
        raise running().error(f"outer of shapes {tuple(a.shape)} and {tuple(b.shape)}", "Both must be 1-D.")
    return a.unsqueeze(-1) * b


def _linear(x, weight, bias=None):
    check_one_dtype("linear", x, weight, *(() if getattr(as_vector(bias), "ndim", 0) == 0 else (bias,)))
    return _turned(x, weight, bias)


@rounded_once()
def _turned(x, weight, bias):
    found = _inner(x, weight)
    return found if bias is None else found + bias


def _cross(a, b, *, dim=-1):
    a, b = as_vector(a), as_vector(b)
    check_one_dtype("cross", a, b)
    if not (tuple(a.shape) == tuple(b.shape) == (3,)) or dim not in (-1, 0, None):
        raise running().error(f"cross of shapes {tuple(a.shape)} and {tuple(b.shape)}", "Both must be vectors of 3 elements.")
    return torch.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


def _norm(x, p=None, dim=None, keepdim=False, *, ord=None, dtype=None):
    x, p = as_vector(x), pinned_all(ord if p is None else p)
    given = dtype or x.dtype
    if not (x.dtype.is_floating_point and torch.promote_types(x.dtype, given) == given):
        raise running().error(f"the norm of {x.dtype}" + (f" in {given}" if dtype else ""), "Convert first, for example with .float().")
    x = x.to(summed_in(given))
    p = 2.0 if p in (None, "fro") else p
    if isinstance(p, str):
        raise running().error(f"a norm of order {p!r}", "Write a number, or 'fro'.")
    if p == math.inf or p == -math.inf:
        found = reduced("amax" if p > 0 else "amin", torch.abs(x), dim, keepdim)
    elif p == 0:
        found = reduced("sum", x != 0, dim, keepdim)
    elif p == 1:
        found = reduced("sum", torch.abs(x), dim, keepdim)
    elif p < 0:
        none = reduced("any", x == 0, dim, keepdim)
        found = reduced("sum", torch.where(x == 0, 1.0, torch.abs(x)) ** p, dim, keepdim) ** (1.0 / p)
        found = torch.where(none, 0.0, found)
    else:
        powers = x * x if p == 2 else power(torch.abs(x), p)
        found = power(reduced("sum", powers, dim, keepdim), 1.0 / p)
    return found.to(given)


def _matrix_norm(x, ord=None, dim=None, keepdim=False, *, dtype=None):
    x = as_vector(x)
    if ord is not None and (x.ndim if dim is None else len(dim) if isinstance(dim, (tuple, list)) else 1) > 1 and ord != "fro":
        raise running().error(f"a matrix norm of order {ord}", "Write torch.linalg.vector_norm, or 'fro'.")
    return _norm(x, ord, dim, keepdim, dtype=dtype)


def _dist(a, b, p=2):
    return _norm(as_vector(a) - b, p)


def _pairwise_distance(a, b, p=2.0, eps=1e-6, keepdim=False):
    return _norm(as_vector(a) - b + eps, p, -1, keepdim)


@rounded_once(2, alike="cdist")
def _cdist(a, b, p=2.0, compute_mode=None):
    return _norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


@rounded_once(2)
def _cosine_similarity(a, b, dim=1, eps=1e-8):
    sizes = [torch.clamp_min(_norm(x, 2, dim), eps) for x in (a, b)]
    return (a * b).sum(dim) / (sizes[0] * sizes[1])


def _reduction(name: str):
    def reduction(x, *args, **kwargs):
        with_other = args and (isinstance(args[0], torch.Tensor) or not isinstance(pinned_all(args[0]), int))
        if name in ("max", "min") and (with_other or "other" in kwargs):
            return getattr(torch, f"{name}imum")(x, *args, *kwargs.values())
        if name in ("max", "min") and (args or "dim" in kwargs):
            return extreme(x, *args, **kwargs, largest=name == "max")
        return reduced(name, x, *args, **kwargs)

    return reduction


def _move(name: str):
    return lambda *args, **kwargs: moved(name, args, kwargs)


_METHODS = {  # of tensors, by name; torch has those of the same names, too
    **{name: _reduction(name) for name in REDUCTIONS},
    **{name: _move(name) for name in MOVES},
    **STATISTICS,
    **dict.fromkeys(("matmul", "__matmul__"), _matmul),
    **{name: _product(name, *ndims) for name, *ndims in (("dot", 1, 1), ("vdot", 1, 1), ("mv", 2, 1), ("mm", 2, 2), ("bmm", 3, 3))},
    **{"vecdot": _vecdot, "inner": _inner, "outer": _outer, "ger": _outer, "cross": _cross, "norm": _norm, "dist": _dist, "cdist": _cdist},
}
FUNCTIONS = {  # and their names, for vectors, which have them as methods
    **{getattr(home, name): f for name, f in _METHODS.items() for home in (torch.Tensor, torch) if callable(getattr(home, name, None))},
    **_METHODS,
    **dict.fromkeys((operator.matmul, torch.linalg.matmul), _matmul),
    **{torch.linalg.vecdot: _vecdot, torch.linalg.cross: _cross, torch.linalg.norm: _matrix_norm, torch.linalg.vector_norm: _norm},
    **LOOKUPS,
    **STATISTICAL,
    same_where_seen: promised,
    **{F.linear: _linear, F.pairwise_distance: _pairwise_distance, F.cosine_similarity: _cosine_similarity},
}
# what torch calls the operands of these functions, in the order in which they are given
_OPERANDS = ("input", "tensors", "a", "x1", "x", "other", "tensor", "vec", "vec2", "mat2", "x2", "y")


def _and_functions(names) -> set:
    """Names, and torch's methods and functions that are called so."""
    return {*names} | {getattr(home, name, None) for name in names for home in (torch.Tensor, torch)}


_JOINING, _REDUCING, _MOVING = map(_and_functions, (JOINS, REDUCTIONS, MOVES))


def takes_vectors(function, args: tuple, kwargs: dict, is_row: bool) -> bool:
    """Is this an operation on vectors? `is_row`: it has a row in the op table.

    A captured tensor that meets a symbol is one, too, and so is a scalar that gets dimensions.
    """
    if function is torch.Tensor.__getitem__:
        return type(args[0]) is Vector
    values = (*args, *kwargs.values())
    if any(map(is_vector, values)):
        return True
    if function is same_where_seen:
        return True
    if function in _JOINING or function is torch.einsum:
        return any(isinstance(a, (Sym, Vector, TensorView)) for v in values if isinstance(v, (list, tuple)) for a in v)
    if not any(type(v) is Sym for v in values):
        return False
    if function in _MOVING or function is torch.isin:
        return True
    if function in _REDUCING and (len(values) == 1 or not is_row):  # max and min of two are rows
        return True
    return (is_row or function in FUNCTIONS) and any(isinstance(v, torch.Tensor) and v.ndim for v in values)


def apply_to_vectors(function, args: tuple, kwargs: dict):
    """An operation on vectors: by a function of ours, or for each element."""
    written = FUNCTIONS.get(function)
    if written is None:
        name = function if isinstance(function, str) else getattr(function, "__name__", "")
        return apply_to_elements(name, function, args, kwargs)
    if function not in LOOKUPS:
        args = (*args, *(kwargs.pop(k) for k in _OPERANDS if k in kwargs))
        kwargs = {{"axis": "dim", "keepdims": "keepdim"}.get(k, k): v for k, v in kwargs.items()}
    try:
        return written(*args, **kwargs)
    except TypeError as error:
        name = function if isinstance(function, str) else getattr(function, "__name__", "it")
        raise running().error(call_problem(error, name)) from None
