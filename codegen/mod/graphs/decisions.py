"""What decides something is rounded alike in every kernel.

A compiler makes one multiply-add of `a * b - c`, which does not round the product, in one kernel and not in the next. Numbers that add up
may differ by a rounding, as everywhere. But `a * b - c * d == 0` would then attend in the forward pass and not in the backward pass, or
neither where torch does. So a product that is added to something on the way to a comparison, or to a conversion to integers, gets 0 added
first: the multiply-add is that of `a * b + 0`, which is the rounded product. IEEE 754 forbids compilers to leave out that addition, as it
makes 0 of -0. So it is on the way to a function with an edge: where torch has the root of 0, `sqrt(a * a + b * b - 2 * a * b)` had NaN.
"""

from __future__ import annotations

import math
import operator

from ..expr import Expr, ExprTable, walk
from ..table.ops import FUNCTIONS, last_step, row_of

_SUM, _PRODUCT = FUNCTIONS[operator.add], FUNCTIONS[operator.mul]


def with_rounded_products(result: Expr, table: ExprTable) -> Expr:
    """An expression in which sums that something is decided by have rounded products."""
    nodes = walk(result)
    either = deciding(nodes, edges=True)
    sums = {id(n) for n in nodes if id(n) in either and row_of(n).signs}
    if not sums:
        return result
    found, made = deciding(nodes), {}
    for node in nodes:
        args = [made[id(a)] for a in node.args]
        if id(node) in sums:
            rounds = _may_be_product if id(node) in found else _is_product
            args = [_rounded(new, table) if rounds(old) else new for new, old in zip(args, node.args, strict=True)]
        same = all(map(operator.is_, args, node.args))
        made[id(node)] = node if same else table.make(node.op, tuple(args), node.dtype, node.attr, node.weak, node.source)
    return made[id(result)]


def deciding(nodes: list[Expr], edges: bool = False) -> set[int]:
    """The floats whose rounding may change a result by more than a rounding; with `edges` beside the edge of a function, too."""
    found: set[int] = set()
    for node in reversed(nodes):
        floating, row = node.dtype.is_floating_point, row_of(node)
        if not floating or row.jumps or edges and row.edged or id(node) in found:
            found.update(id(a) for a in node.args if a.dtype.is_floating_point)
    return found


def _may_be_product(node: Expr) -> bool:
    """Is the last step of a float a multiplication that rounds? That of the score is the one with the scale."""
    node = last_step(node)
    if not node.args:
        return node.op == "symbol" and node.dtype.is_floating_point
    exact = row_of(node) is _PRODUCT and any(map(_is_power_of_2, node.args))
    return node.op != "load" and node.dtype.is_floating_point and bool(row_of(node).product) and not exact


def _is_product(node: Expr) -> bool:
    return row_of(node) is _PRODUCT and _may_be_product(node)


def _is_power_of_2(factor: Expr) -> bool:
    """Is it a factor that needs no rounding? One of 1 is left out, and then a compiler sees the other factor."""
    return factor.is_literal and abs(factor.attr) != 1 and math.frexp(factor.attr)[0] in (0.5, -0.5)


def _rounded(product: Expr, table: ExprTable) -> Expr:
    zero = table.make("literal", (), product.dtype, attr=0.0)
    return table.make(_SUM.name, (product, zero), product.dtype, source=product.source)
