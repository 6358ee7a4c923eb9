"""Expressions of a traced mod as statements of torch, for files that must say on the host what their kernels compute."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.expr import Expr, walk
from ..mod.operators import SYMBOLS
from ..mod.table.dtypes import dtype_name, operand_dtypes, wrapped
from ..mod.table.op import div_trunc, kind
from ..mod.table.ops import OPS
from ..text.spelling import literal_text


class TorchText(NamedTuple):
    """Statements, and the names or numbers that hold the values of what was asked for."""

    lines: tuple[str, ...]
    results: tuple[str, ...]


class _Value(NamedTuple):
    """An expression as text; a `number` is Python's own."""

    text: str
    dtype: torch.dtype
    number: bool = False


def torch_text(roots: tuple[Expr, ...], tensors: tuple[str, ...], scalars: tuple[str, ...], prefix: str, precision: str) -> TorchText:
    """Statements that compute `roots` of b, h, q_idx, kv_idx (and score), integers or floats that broadcast against each other.

    tensors, scalars   the names of graph.tensors and graph.scalars
    prefix             of the names of statements
    precision          of floats: "float64"

    As in a kernel, a negative index counts from the end, and an index outside reads 0: a function `element(tensor, *places)` does that.
    """
    lines: list[str] = []
    values: dict[int, _Value] = {}

    def converted(value: _Value, dtype: torch.dtype, *, as_tensor: bool = False) -> str:
        if value.number:
            wanted = precision if kind(dtype) == "float" else dtype_name(dtype)
            return f"torch.tensor({value.text}, dtype=torch.{wanted}, device=q_idx.device)" if as_tensor else value.text
        if kind(dtype) == "float":
            return value.text if kind(value.dtype) == "float" else f"{value.text}.to(torch.{precision})"
        return value.text if value.dtype == dtype else f"{value.text}.to(torch.{dtype_name(dtype)})"

    for node in (n for root in roots for n in walk(root)):
        if id(node) in values:
            continue
        operands = [values[id(a)] for a in node.args]
        if node.op == "symbol":
            values[id(node)] = _Value(node.attr, node.dtype)
            continue
        if node.op == "literal":
            number = wrapped(node.attr, node.dtype) if kind(node.dtype) == "int" else node.attr
            values[id(node)] = _Value(literal_text(number), node.dtype, number=True)
            continue
        if node.op == "scalar":
            values[id(node)] = _Value(scalars[node.attr], node.dtype, number=True)
            continue
        if node.op == "load":
            places = [converted(o, torch.int64, as_tensor=True) for o in operands]
            text = f"element({', '.join((tensors[node.attr], *places))})"
            text += f".to(torch.{precision})" if kind(node.dtype) == "float" else ""
        elif node.op == "cast":
            text = converted(operands[0], node.dtype, as_tensor=True)
            if node.dtype in (torch.float16, torch.bfloat16):  # the cast rounds
                text += f".to(torch.{dtype_name(node.dtype)}).to(torch.{precision})"
        else:
            text = _operation(node, operands, converted)
        name = f"{prefix}_{len(lines)}"
        lines.append(f"{name} = {text}")
        values[id(node)] = _Value(name, node.dtype)
    return TorchText(tuple(lines), tuple(converted(values[id(root)], root.dtype, as_tensor=True) for root in roots))


def _operation(node: Expr, operands: list[_Value], converted) -> str:
    """An operation of the op table, by its own torch function."""
    function, wanted = OPS[node.op].torch, operand_dtypes(node)
    symbol = SYMBOLS.get(getattr(function, "__name__", "")) if getattr(function, "__module__", "") == "_operator" else None
    numbers = all(o.number for o in operands)
    texts = [converted(o, d, as_tensor=numbers or symbol is None) for o, d in zip(operands, wanted, strict=True)]
    if symbol is None:
        if function is div_trunc:
            return f'torch.div({", ".join(texts)}, rounding_mode="trunc")'
        return f"torch.{function.__name__}({', '.join(texts)})"
    return f"{texts[0]} {symbol} {texts[1]}" if len(texts) == 2 else f"{symbol}{texts[0]}"
