"""Expressions of a mod as code: operands in the dtype that an operation computes in, operations in the spelling that is exact enough."""

from __future__ import annotations

import torch

from ..mod.expr import INDEX_BOUND, MASK_SYMBOLS, Expr, SourceLine
from ..mod.graphs.distance import sign_of_difference
from ..mod.graphs.index_range import value_range
from ..mod.table.dtypes import compute_dtype, operand_dtypes, wrapped
from ..mod.table.op import kind
from ..mod.table.ops import row_of
from .code import Code, Statement
from .language import EXACT
from .snippet import Target

_ANY_LENGTH = dict.fromkeys(MASK_SYMBOLS, (0, (1 << 31) - 1))


class Expressions:
    """What is known of a mod's expressions while they are printed one after another, and the statements so far.

    codes        per node that is printed: its code
    varies       per node: the symbols that it depends on
    node         which is being printed; None when it is the result
    by_distance  kv_idx - q_idx is `distance`, and the two do not occur otherwise
    deciding     nodes that something is decided by: not approximated, as other kernels decide the same
    """

    def __init__(self, target: Target, prefix: str, by_distance: bool = False, deciding: set[int] | None = None) -> None:
        self.target, self.language, self.prefix, self.by_distance = target, target.language, prefix, by_distance
        self.deciding = deciding or set()
        self.statements: list[Statement] = []
        self.codes: dict[int, Code] = {}
        self.varies: dict[int, frozenset[str]] = {}
        self.node: Expr | None = None
        self.count = 0  # of names

    def statement(self, code: Code, source: SourceLine | None, *, loads: bool = False, dtype: torch.dtype | None = None) -> Code:
        """Give an expression a name, unless it is one."""
        if self.language.is_name(code):
            return code
        name = f"{self.prefix}_{self.count}"
        self.count += 1
        varies = {*MASK_SYMBOLS, "score"} if self.node is None else self.varies[id(self.node)]
        self.statements.append(Statement(name, code, source, tuple(sorted(varies)), loads, compute_dtype(dtype) if dtype else ""))
        return self.language.symbol(name)

    def operand(self, node: Expr, dtype: torch.dtype) -> Code:
        """`node` converted to what an operation on `dtype` computes with."""
        have, want = compute_dtype(node.dtype), compute_dtype(dtype)
        if node.is_literal:
            value = node.attr
            value = float(value) if kind(dtype) == "float" else bool(value) if kind(dtype) == "bool" else wrapped(value, dtype)
            return self.language.literal(value)
        if node.op == "scalar" and kind(node.dtype) == "int":  # captured ints come in as int32; larger ones are literals
            have = "int32"
        code = self.codes[id(node)]
        if have == want:
            return code
        if kind(dtype) == "bool":
            return self.language.operate(code, "!=", self.language.literal(0))
        split = self._float_of_sum(node) if kind(node.dtype) == "int" and kind(dtype) == "float" else None
        return split or self.language.cast(code, dtype)

    def _float_of_sum(self, node: Expr) -> Code | None:
        """float(a - b) as float(a) - float(b): exact for indices below INDEX_BOUND, and q_idx's part is converted once."""
        difference = sign_of_difference(node)
        signs = row_of(node).signs
        if not self.target.exact_indices or len(signs) != 2 or self.by_distance and difference:
            return None
        if difference and not self.target.rows_before_first:  # it is one of positions from 0 on
            return self.language.float_difference(*(self.codes[id(a)] for a in node.args))
        for part in (node, *node.args):
            low, high = self.range_of(part)
            if max(abs(low), abs(high)) > INDEX_BOUND:
                return None
        left, right = (self.operand(a, torch.float32) for a in node.args)
        return self.language.operate(left, "+" if signs[1] > 0 else "-", right)

    def range_of(self, node: Expr) -> tuple[float, float]:
        """The least and the greatest value of an integer, for all lengths that the kernel serves."""
        symbols = {} if self.target.exact_indices else _ANY_LENGTH
        if self.target.rows_before_first:
            symbols = {**symbols, "q_idx": (-INDEX_BOUND, INDEX_BOUND - 1) if self.target.exact_indices else (-(1 << 31), (1 << 31) - 1)}
        return value_range(node, symbols)

    def cast(self, node: Expr) -> Code:
        """A cast that the mod asks for; half precision is rounded to, and goes on as float32."""
        code = self.operand(node.args[0], node.dtype)
        return self.language.rounded(code, node.dtype) if node.dtype in (torch.float16, torch.bfloat16) else code

    def operation(self, node: Expr) -> Code:
        """An operation of the op table on its operands."""
        row = row_of(node)
        wanted = operand_dtypes(node)
        operands = [self.operand(a, w) for a, w in zip(node.args, wanted, strict=True)]
        if row.chooses and all(a.is_literal for a in node.args[1:]):
            operands[1] = self.language.number(operands[1], node.dtype)
        if row.picks is not None and kind(node.dtype) == "int" and node.dtype.itemsize < 4:  # functions take a bare number for an int32
            operands = [self.language.number(o, node.dtype) if a.is_literal else o for o, a in zip(operands, node.args, strict=True)]
        if row.plainer is not None and row.plainer[1](node.dtype, *map(self.range_of, node.args)):
            return self.language.plainer(row, *operands)
        precision = EXACT if id(node) in self.deciding else self.target.precision
        return self.language.operation(row, kind(wanted[-1]), self.target.backend, precision, *operands)

    def difference(self, node: Expr, name: str) -> Code:
        """kv_idx - q_idx or q_idx - kv_idx, where the first is in the kernel under a name."""
        symbol = self.language.symbol(name)
        return symbol if sign_of_difference(node) > 0 else self.language.negative(symbol)
