"""Dot products of long rows of captured tensors, one read by q_idx and one by kv_idx: a further product of matrices in a kernel.

`torch.dot(qr[b, h, q_idx], kr[b, kv_idx])` and `(qr[b, h, q_idx] * kr[b, kv_idx]).sum(-1)` are such products, as decoupled positions have
them (DeepSeek-V2, section 2.1.3). In the graph they are a node "dot" of two nodes "row".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ..current import running
from ..expr import Expr, symbols_in
from .nodes import cast, index_exprs
from .symbols import Sym, Vector

LONG = 16  # elements that are computed with one by one in any case
WIDEST = 256  # elements of a row: a tile of them is in shared memory


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """A row of a captured tensor: all dimensions but the last are indexed."""

    tensor: torch.Tensor
    index: tuple[Expr, ...]
    length: int

    def settled(self) -> Row:
        """The row with indices of one position, if there are such."""
        return replace(self, index=settled(self.index))

    def dot(self, others: tuple[Row, ...], dtype: torch.dtype) -> Sym | None:
        """The dot product with one other row, as a product of matrices has it; None if it is none."""
        run, rows = running(), {axis_of(row.index): row for row in (self.settled(), *(row.settled() for row in others))}
        if run.kind != "score" or len(others) != 1 or set(rows) != {"q_idx", "kv_idx"}:
            return None
        if self.length > WIDEST:
            raise run.error(f"a dot product of rows of {self.length} elements", f"Kernels have tiles for rows of {WIDEST} at most.")
        nodes = tuple(rows[axis].node() for axis in ("q_idx", "kv_idx"))
        return cast(Sym(run.table.make("dot", nodes, torch.float32, attr=self.length, source=run.source())), dtype)

    def node(self) -> Expr:
        run = running()
        return run.table.make("row", self.index, self.tensor.dtype, attr=run.tensor_index(self.tensor), source=run.source())


def axis_of(index: tuple[Expr, ...]) -> str:
    """Which of the two positions a row is read by; "" for none or both."""
    found = {"score", "q_idx", "kv_idx"} & frozenset().union(*map(symbols_in, index))
    return found.pop() if len(found) == 1 else ""


def are_rows(one: Expr, other: Expr) -> bool:
    """May these be factors of a dot product in a kernel: a row read by q_idx, and one read by kv_idx?"""
    return one.op == other.op == "row" and (axis_of(one.args), axis_of(other.args)) == ("q_idx", "kv_idx")


def check_rows(one: Expr, other: Expr) -> None:
    """Raises ModError for rows of a graph that were found so, and are not any more where other symbols take the place of its own."""
    if not are_rows(one, other):
        raise running().error("a dot product of rows whose positions depend on both q_idx and kv_idx here", "Kernels have no tile for it.")


def same_where_seen(one, other):
    """`one`, which a mod reads by q_idx, with its word that `other`, read by kv_idx, equals it wherever a key is not hidden: the sequences
    of a query and of a key. Then the row of a key may be read by it."""
    if has_torch_function((one, other)):
        return handle_torch_function(same_where_seen, (one, other), one, other)
    return one


def promised(one: Sym, other: Sym) -> Sym:
    """`one`, with the promise of same_where_seen noted for the mod that is being traced."""
    running().twins[id(one.expr)] = other.expr
    return one


def settled(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Indices of both positions as those of kv_idx alone, where they equal them; others as they are."""
    run = running()
    if axis_of(index) or not run.twins:
        return index

    def swapped(node: Expr) -> Expr:
        if id(node) in run.twins:
            return run.twins[id(node)]
        args = tuple(map(swapped, node.args))
        return run.table.make(node.op, args, node.dtype, node.attr, node.weak, node.source) if args else node

    found = tuple(map(swapped, index))
    return found if axis_of(found) == "kv_idx" else index


def row_of_view(tensor: torch.Tensor, index: tuple, length: int) -> Row | None:
    """The row that a captured tensor gives when all dimensions but its last are indexed by scalars; None if it has no floats."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        return None
    return Row(tensor, index_exprs(index), length)


def product_of(one: Vector, other) -> Vector | None:
    """The product, element by element, of two rows; None for anything else."""
    if len(one.rows) != 1 or type(other) is not Vector or len(other.rows) != 1 or one.shape != other.shape:
        return None
    dtype = torch.promote_types(one.dtype, other.dtype)
    return Vector(lambda: [a * b for a, b in zip(one.items, other.items, strict=True)], one.shape, (*one.rows, *other.rows), dtype)


_WIDE = {"float": torch.float32, "double": torch.float64}


def widened(name: str, vector: Vector, *args, **kwargs) -> Vector | None:
    """A row, or the product of two, converted to a dtype that holds its values; None for anything else."""
    if name in _WIDE:
        dtype = _WIDE[name]
    elif name in ("to", "type") and len(args) + len(kwargs) == 1:
        dtype = args[0] if args else kwargs.get("dtype")
    else:
        return None
    if not isinstance(dtype, torch.dtype) or torch.promote_types(vector.dtype, dtype) != dtype:
        return None
    return Vector(lambda: [cast(item, dtype) for item in vector.items], vector.shape, vector.rows, dtype)
