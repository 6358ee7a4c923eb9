"""Expressions of a traced mod on torch tensors, by the op table's own torch functions: what a kernel computes, computed on the host."""

from __future__ import annotations

import torch

from ..expr import Expr, walk
from ..table.dtypes import operand_dtypes, wrapped
from ..table.op import kind
from ..table.ops import row_of


def compute(expr: Expr, symbols: dict[str, torch.Tensor], tensors: list[torch.Tensor], scalars: list) -> torch.Tensor:
    """The value of an expression where its symbols have the values `symbols`, which broadcast against each other.

    tensors, scalars   the values of graph.tensors and graph.scalars

    Floats are computed in the dtype of the score or the gradient if one is given, else in float32; integers in their own dtype. As
    in a kernel, a negative index counts from the end, and an index outside reads 0.
    """
    precision = next((symbols[name].dtype for name in ("score", "grad") if name in symbols), torch.float32)
    device = next((t.device for t in (*symbols.values(), *tensors)), None)

    def converted(value, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            value = wrapped(value, dtype) if kind(dtype) == "int" else value
            return torch.tensor(value, dtype=precision if kind(dtype) == "float" else dtype, device=device)
        return value.to(precision if kind(dtype) == "float" else dtype)

    values: dict[int, object] = {}
    for node in walk(expr):
        operands = [values[id(a)] for a in node.args]
        if node.op == "symbol":
            value = symbols[node.attr]
        elif node.op == "literal":
            value = node.attr
        elif node.op == "scalar":
            value = scalars[node.attr]
        elif node.op == "dot":
            value = (operands[0] * operands[1]).sum(-1)
        elif node.op in ("load", "row"):
            value = converted(_load(tensors[node.attr], [converted(i, torch.int64) for i in operands]), node.dtype)
        elif node.op == "cast":
            value = converted(operands[0], node.dtype)
            if node.dtype in (torch.float16, torch.bfloat16):  # the cast rounds
                value = value.to(node.dtype).to(precision)
        else:
            operands = [converted(o, dtype) for o, dtype in zip(operands, operand_dtypes(node), strict=True)]
            row = row_of(node)
            if row.divides and kind(node.dtype) == "int":
                # anything may come of a division by 0, but no exception; the least number by -1 is the same as by 1, and ends the process
                traps = (operands[1] == 0) | (operands[1] == -1) & (operands[0] == torch.iinfo(node.dtype).min)
                operands[1] = torch.where(traps, 1, operands[1])
            value = converted(row.torch(*operands), node.dtype)
        values[id(node)] = value
    return converted(values[id(expr)], expr.dtype)


def _load(tensor: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
    if not places:
        return tensor
    inside = torch.ones((), dtype=torch.bool, device=tensor.device)
    wrapped_places = []
    for place, size in zip(places, tensor.shape, strict=False):
        place = torch.where(place < 0, place + size, place)
        inside = inside & (place >= 0) & (place < size)
        wrapped_places.append(place.clamp(0, max(size - 1, 0)))
    whole = tensor.shape[len(places) :]  # of a row
    inside = inside.reshape((*inside.shape, *(1 for _ in whole))).expand((*inside.shape, *whole))
    if not tensor.numel():
        return torch.zeros(inside.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.where(inside, tensor[tuple(wrapped_places)], torch.zeros((), dtype=tensor.dtype, device=tensor.device))
