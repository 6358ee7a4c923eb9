"""Graphs made of traced graphs: derivatives, tangents, folded and scaled mods, runs of positions."""

from __future__ import annotations

import torch

from ..current import Run
from ..expr import Expr, SourceLine
from ..table.ops import OPS


class RewriteRun(Run):
    """Nodes made of a traced graph's, marked with the line of the node at hand."""

    line: SourceLine | None = None

    def source(self) -> SourceLine | None:
        return self.line


class SimplifyingRun(RewriteRun):
    """As derivatives are made: what is known without computing it is left out."""

    def simplified(self, op: str, operands: list[Expr]) -> Expr | None:
        row = OPS[op]
        if row.chooses and operands[0].is_literal:
            return operands[1] if operands[0].attr else operands[2]
        if row.involution and operands[0].op == op:
            return operands[0].args[0]
        if len(operands) != 2 or all(o.is_literal for o in operands):
            return None
        if type(row.absorbing) is int and any(is_number(o, row.absorbing) for o in operands):
            return self.table.make("literal", (), torch.float32, attr=float(row.absorbing))
        for neutral, o, other in zip(row.neutral, operands, operands[::-1], strict=True):
            if neutral is not None and is_number(o, neutral) and other.dtype.is_floating_point and not row.jumps:
                return other
        return None


def is_number(node: Expr, number: int) -> bool:
    """Is it this literal?"""
    return node.is_literal and node.attr == number
