"""The traced form of a mod: a frozen, typed expression DAG, free of any one target.

An `Expr` is an operation of the op table (`codegen/mod/table/ops.py`), or one of these: four kinds of leaves, a row of a captured tensor,
and a dot product of two rows.

    symbol    score, b, h, q_idx or kv_idx; grad in derivatives, and the
              tangents of score and grad in tangents                        attr = its name
    literal   a number written in the mod                                   attr = the number
    scalar    a number known at launch (captured, or computed from those)   attr = index into ModGraph.scalars
    load      one element of a captured tensor, args = one index per dim    attr = index into ModGraph.tensors
    row       its last dimension, args = one index per other dim            attr = the same
    dot       args = the row read by q_idx, the one read by kv_idx          attr = how many elements they have

`weak` marks Python numbers, which take part in torch's type promotion as numbers and not as tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

SCORE_SYMBOLS = ("score", "b", "h", "q_idx", "kv_idx")
MASK_SYMBOLS = SCORE_SYMBOLS[1:]
LEAVES = ("symbol", "literal", "scalar", "load")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where in the user's file an expression was written."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True, eq=False, slots=True)
class Expr:
    """One node. Nodes are shared: within a graph, equal expressions are the same object (see `ExprTable`)."""

    op: str
    args: tuple[Expr, ...]
    dtype: torch.dtype
    attr: object = None
    weak: bool = False
    source: SourceLine | None = None

    @property
    def is_literal(self) -> bool:
        return self.op == "literal"


def _key(op, args, dtype, attr, weak) -> tuple:
    # repr keeps 1, 1.0, True, 0.0 and -0.0 apart, and makes nan equal to itself.
    return op, tuple(id(a) for a in args), dtype, repr(attr), weak


class ExprTable:
    """Makes nodes, one object per distinct expression (hash-consing), so that lowering computes each value once.

    `nodes` are there from the start: the nodes of a graph that is continued.
    """

    def __init__(self, nodes: Iterable[Expr] = ()) -> None:
        self._nodes: dict[tuple, Expr] = {_key(n.op, n.args, n.dtype, n.attr, n.weak): n for n in nodes}

    def make(self, op, args, dtype, attr=None, weak=False, source=None) -> Expr:
        key = _key(op, args, dtype, attr, weak)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Expr(op, tuple(args), dtype, attr, weak, source)
        return node


@dataclass(frozen=True, slots=True)
class TensorCapture:
    """A tensor the mod indexes: a pointer, sizes and strides at launch. `fixed`: dimensions whose size is part of the graph, as vectors are
    made of their elements, with it."""

    name: str
    dtype: torch.dtype
    ndim: int
    fixed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ScalarCapture:
    """A number known at launch: an argument of the kernel, so that a new value compiles nothing."""

    name: str
    kind: type  # int, float or bool


@dataclass(frozen=True, eq=False)
class ModGraph:
    """A traced mod. Compared by identity: the tracing cache hands out one graph per mod signature."""

    kind: str  # "score" or "mask"; "zone" or "verdict" for what is made of a mask (intervals.py)
    name: str  # the user's name for it, used in file names and comments
    result: Expr
    tensors: tuple[TensorCapture, ...]
    scalars: tuple[ScalarCapture, ...]
    origin: SourceLine | None = None
    symbols: frozenset[str] = field(default_factory=frozenset)  # which of score, b, h, q_idx, kv_idx it reads
    beside: tuple[Expr, ...] = ()  # what kernels compute beside the result: tangents (tangent.py)


def walk(root: Expr, leaves: Collection[int] = ()) -> list[Expr]:
    """Every node below `root` once, arguments before the nodes that use them; nothing below the nodes whose ids are in `leaves`."""
    order: list[Expr] = []
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            if id(node) not in leaves:
                stack.extend((a, False) for a in reversed(node.args))
    return order


def symbols_in(root: Expr) -> frozenset[str]:
    """The symbols that an expression depends on."""
    return frozenset(n.attr for n in walk(root) if n.op == "symbol")


INDEX_BOUND = (1 << 23) - 4096  # of a sequence: its indices, and those of blocks that reach past its end, are mantissas of float32
