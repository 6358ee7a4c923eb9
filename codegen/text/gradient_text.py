"""What backward kernels take of a score_mod: its lowered derivative, and how they gather the gradients of what it captures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..mod.expr import Expr, ModGraph
from ..mod.graphs.loads import dots_of, loads_of, read_in
from ..mod.graphs.nan import may_be_nan
from .code import Code, uses_of
from .language import Language
from .layouts import TensorLayout
from .long_dots import padded, precision_of
from .snippet import Snippet

_SUMMED = ("row", "head", "column")


@dataclass(frozen=True)
class Differential:
    """What a backward kernel asks of a score_mod: d loss / d score, and loads with their role and gradient."""

    score: Expr | None
    captured: tuple[tuple[str, Expr, Expr], ...] = ()  # (role, load or dot product of rows, gradient)
    ordinary: bool = True  # captured numbers are, see mod/nan.py
    float32_precision: str = "ieee"
    tangent: Expr | None = None  # of d loss / d score


@dataclass(frozen=True, slots=True)
class CapturedGradient:
    """How a kernel gathers the gradient of one load of a captured tensor.

    role      "row", "head": summed over the keys of a row, over a tile of one head (backward_dq); "column": summed over the queries of
              a key (backward_dkv); "store", "atomic": every position has a place in the gradient, of its own or shared (backward_dq);
              "slab": stored head by head and added up outside, without atomics
    load      which load of the mod it is (see mod/loads.py)
    text      the gradient of one position
    offset    for "store" and "atomic": the place in the buffer, which has the tensor's own strides, and the `checks` that it lies inside
    """

    role: str
    load: int
    name: str
    text: Code
    offset: Code | None = None
    checks: Code | None = None
    dot: int | None = None  # of a row: in which dot product it is a factor
    width: int = 0  # how many elements it has
    other: Code | None = None  # what its gradient in that product is multiplied by
    precision: str = ""  # of that multiplication

    @property
    def buffer(self) -> str:
        """The kernel argument that takes it."""
        return f"grad_{self._label}"

    _label = property(lambda self: f"{self.name}_{self.load}" + (f"_{self.dot}" if self.width else ""))
    value = property(lambda self: f"d_{self._label}")
    sum = property(lambda self: f"sum_{self._label}")
    columns = property(lambda self: padded(self.width))
    sums = property(lambda self: self.role in _SUMMED)

    @property
    def meaning(self) -> str:
        """For the glossary."""
        if self.width:
            shape = "Q_LEN" if self.role == "row" else "KV_LEN"
            return f"float32 [Z, Hq, {shape}, {self.width}]: summed over {'keys' if self.role == 'row' else 'queries'}"
        return {
            "row": "float32 [Z, Hq, Q_LEN]: summed over keys",
            "column": "float32 [Z, Hq, KV_LEN]: summed over queries",
            "head": "float32 [Z, Hq, tiles]: summed over a tile's positions",
            "store": "every position has its own element",
            "atomic": "float32: positions share elements and add up",
            "slab": "float32 [Q_LEN, KV_LEN]: one head's positions, added up on the host",
        }[self.role]


@dataclass(frozen=True, slots=True)
class GradientText:
    """A lowered derivative: statements, d loss / d score, what captured tensors get, and the names that all these mention.

    Where p, the softmax, is 0, nothing flows, whatever the derivative is there.
    """

    lines: tuple[str, ...]
    score: Code
    captured: tuple[CapturedGradient, ...]
    names: tuple[str, ...]
    tangent: Code | None = None  # of d loss / d score, if there is one


def gradient_text(
    graph: ModGraph, layouts: tuple[TensorLayout, ...], differential: Differential, snippet: Snippet, language: Language, grad: str
) -> GradientText:
    """The lowered derivative of a score_mod. `grad` is the kernel's name of d loss / d result."""
    texts, loads, dots = list(snippet.gradients), loads_of(graph), dots_of(graph)
    zero, ordinary = language.literal(0.0), differential.ordinary
    nothing_flows = language.operate(language.symbol("p"), "==", zero)

    def guarded(value: Code, gradient: Expr) -> Code:
        return language.where(nothing_flows, zero, value) if may_be_nan(gradient, ordinary) else value

    score, tangent = language.zeros_like(language.symbol(grad)), None
    if differential.score is not None:
        score = guarded(texts.pop(0), differential.score)
    if differential.tangent is not None:
        tangent = guarded(texts.pop(0), differential.tangent)
    captured = []
    for (role, load, gradient), (offset, checks) in zip(differential.captured, snippet.places, strict=True):
        text = texts.pop(0)
        if role in _SUMMED and checks and "0" in layouts[read_in(load, role).attr].strides:  # whose indices nobody looks at later
            text = language.where(checks, text, zero)
        read = read_in(load, role)
        found = CapturedGradient(role, loads.index(read), graph.tensors[read.attr].name, guarded(text, gradient))
        if load.op == "dot":
            precision = precision_of(load, differential.float32_precision)
            found = replace(found, dot=dots.index(load), width=load.attr, other=offset, precision=precision)
        elif role == "slab":
            rows = language.column(language.cast(language.symbol("offs_m"), torch.int64))
            start = language.operate(rows, "*", language.symbol("KV_LEN"))
            found = replace(found, offset=language.operate(start, "+", language.row(language.symbol("offs_n"))))
        elif role in ("store", "atomic"):
            found = replace(found, offset=language.beside("+", offset), checks=checks and language.beside("&", checks))
        captured.append(found)
    codes = (
        *(s.value for s in snippet.gradient_statements),
        score,
        tangent,
        *(code for c in captured for code in (c.text, c.offset, c.checks, c.other)),
    )
    names = tuple(sorted({use.name for use in uses_of(codes)}))  # not in a set, whose order is another one in each process: see cache.py
    return GradientText(language.lines(snippet.gradient_statements), score, tuple(captured), names, tangent)
