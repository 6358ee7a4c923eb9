"""What lowering takes and gives: the target that spellings depend on, and a mod's statements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..mod.expr import Expr
from .code import Code, Statement, Use, arguments
from .language import Language
from .languages import TRITON


@dataclass(frozen=True, slots=True)
class Snippet:
    """Statements that compute a mod, and what they need around them.

    tangent               of the result, if it was asked for
    uses                  every name in it: kernel arguments, helpers, modules, symbols and temporaries
    gradient_statements   compute `gradients`, one per gradient that was asked for; they may use the temporaries of `statements`
    places                per load that was asked for: its offset in the tensor, and what must hold for it, if anything; per dot product of
                          rows the other factor, transposed, and what must hold for the row
    """

    statements: tuple[Statement, ...]
    result: Code | None
    uses: tuple[Use, ...]
    gradient_statements: tuple[Statement, ...] = ()
    gradients: tuple[Code, ...] = ()
    places: tuple[tuple[Code, Code | None], ...] = ()
    sum: SumText | None = None  # instead of `result`
    distance: DistanceText | None = None
    tangent: Code | None = None
    copied: CopiedText | None = None


class Copied(NamedTuple):
    """A load that a template does for a tile at once. Its last two indices are q_idx and kv_idx.

    name      of what is read, float32 if the tensor has half precision
    indices   those before, integers of b and h; None is 0
    """

    load: Expr
    name: str
    indices: tuple[Expr | None, ...]


class CopiedText(NamedTuple):
    """Where a tile lies that is copied: statements, and what indexes the first two of four dimensions."""

    lines: tuple[str, ...]
    indices: tuple[Code, ...]

    @property
    def place(self) -> str:
        return ", ".join([*["0"] * (2 - len(self.indices)), *map(str, self.indices)])

    @property
    def reads(self) -> bool:
        """Are there captured values among them?"""
        return bool(self.lines) or any(arguments(index.uses) for index in self.indices)


@dataclass(frozen=True, slots=True)
class DistanceText:
    """What a score_mod reads by the distance between query and key: statements that take it as `distance`, or as `near` + `far`, of which
    the second is a 64-bit constant for every element of a thread; the `values`; and how the mod's own statements call these."""

    lines: tuple[str, ...]
    values: tuple[Code, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SumText:
    """What a score_mod adds to the score: a number per key, and `rate` times kv_idx - q_idx. None where there is none."""

    key: Code | None
    rate: Code | None


@dataclass(frozen=True, slots=True)
class Target:
    """What the spellings depend on beside the graph: "cuda", "hip" or "cpu", the dtype of q, k and v, and the kernel's language."""

    backend: str
    precision: str  # "float16", "bfloat16" or "float32"
    exact_indices: bool = True  # all lengths are at most INDEX_BOUND, so an index is exact in float32
    language: Language = TRITON
    packed_heads: bool = False  # h is a column, as q_idx is: rows of a tile belong to several heads
    packed_sequences: bool = False  # the same of b
    rows_before_first: bool = False  # q_idx may be negative: a sequence with more queries than keys
    transposed: bool = False  # kv_idx is a column and q_idx a row
    ends_keys: bool = False  # rows of captured tensors past KV_LEN are multiplied by gradients of 0, and must not be read
    float32_precision: str = "ieee"  # of products
    read_directly: bool = False  # elements that no other position shares, past Triton's pipelines and layouts (see _helpers.jinja)
