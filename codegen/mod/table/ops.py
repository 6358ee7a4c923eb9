"""The op table: one row per operation a mod may use. Tracing, lowering, differentiation, mask analysis and the
error "supported operations are ..." all read it; a new operation is a new row and nothing else. op.py says what a row may say.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..expr import Expr
from .op import Op
from .rows_activations import ACTIVATIONS
from .rows_arithmetic import ARITHMETIC
from .rows_composed import COMPOSED
from .rows_functions import FUNCTIONS as FUNCTION_ROWS
from .rows_functions import ROUNDINGS
from .rows_logic import LOGIC
from .rows_runs import BOUNDED, WITHIN
from .rows_special import SPECIAL

_ROWS = (*ARITHMETIC, *FUNCTION_ROWS, *ROUNDINGS, *LOGIC, *COMPOSED, *SPECIAL, *ACTIVATIONS)
OPS: dict[str, Op] = {row.name: row for row in _ROWS}
_MADE = {row.name: row for row in (WITHIN, BOUNDED)}
_NO_ROW = Op("", None, (), exact=True)


def row_of(node: Expr) -> Op:
    """The row of a node; for leaves and casts one that knows nothing, but that they do not round."""
    return OPS.get(node.op) or _MADE.get(node.op, _NO_ROW)


def last_step(node: Expr) -> Expr:
    """The node that another one is, but for casts and signs (`Op.product` None): may it end in a multiplication?"""
    while node.op == "cast" or row_of(node).product is None:
        node = node.args[0]
    return node


_HOMES = {"torch": torch, "Tensor": torch.Tensor, "F": F, "special": torch.special, "operator": operator}


def _spelled(spelling: str):
    home, _, name = spelling.partition(".")
    return getattr(_HOMES[home], name, None)


def _method_of(row: Op):
    """What Python calls for a row's operator on a tensor: Tensor.__and__ for operator.and_."""
    name = row.torch.__name__.strip("_") if getattr(row.torch, "__module__", "") == "_operator" else ""
    return getattr(torch.Tensor, f"__{name}__", None)


def _index_functions() -> dict:
    table = {}
    for row in _ROWS:
        for function in (row.torch, _method_of(row), *map(_spelled, row.spellings)):
            # `torch.floor_divide` and `operator.floordiv` name the same row; the first row to claim a spelling has it.
            if function is not None:
                table.setdefault(function, row)
    return table


FUNCTIONS: dict[Callable, Op] = _index_functions()
METHODS: dict[str, Op] = {
    spelling.removeprefix("Tensor."): row for row in reversed(_ROWS) for spelling in row.spellings if spelling.startswith("Tensor.")
}


def supported_operations() -> str:
    """The list that stands in the error for an operation which has no row."""
    names = sorted({s.rpartition(".")[2] for row in _ROWS for s in row.spellings})
    return (
        "Python's + - * / // % ** abs, comparisons, & | ^ ~ << >>, indexing of captured tensors, casts (.to, .float, "
        ".int, .long, .bool, .half, .bfloat16), torch.tensor(number), *_like, new_*, and "
        + ", ".join(names)
        + "; of vectors, too: sum, mean, prod, amax, amin, any, all, var, std, dot, @, einsum, norm, cdist, softmax, logsumexp, argmax, "
        "cumsum, normalize, layer_norm, view, unsqueeze, flatten, stack, cat; of captured tensors: embedding, take, bucketize, "
        "searchsorted, isin"
    )
