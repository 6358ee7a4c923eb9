"""What lowering takes and gives: layouts of captured tensors, the target that spellings depend on, and a mod's statements as text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..mod.expr import SourceLine
from ..mod.op import Op
from .lines import one_line


class TensorLayout(NamedTuple):
    """What the text knows of a captured tensor's layout; the rest is known at launch.

    strides   per dimension "0", "1", "n" (a kernel argument) or "v" (an argument in units of 16 bytes, so that the compiler
              knows rows are aligned)
    wide      offsets may pass 2**31 elements: compute them in int64
    inside    the indices that are known to lie inside, for these lengths: (load, dimension), loads numbered as in `loads_of`
    """

    strides: tuple[str, ...]
    wide: bool = False
    inside: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Statement:
    """`name = value`, the user's line that it comes from, and on which symbols the value depends."""

    name: str
    value: str
    source: SourceLine | None
    varies: tuple[str, ...]  # sorted: a spec is the same in every process
    loads: bool = False  # does it read memory
    dtype: str = ""  # of the value, as compute_dtype names it; none for a result


@dataclass(frozen=True, slots=True)
class Snippet:
    """Statements that compute a mod, and what they need around them.

    gradient_lines compute `gradients`, one text per gradient that was asked for; they may use the temporaries of `statements`.
    """

    statements: tuple[Statement, ...]
    result: str
    helpers: tuple[str, ...]  # names of macros in templates/_helpers.jinja
    libdevice: bool
    gradient_lines: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = ()  # per load that was asked for: its offset in the tensor, and what must hold for it
    sum: SumText | None = None  # instead of `result`
    distance: DistanceText | None = None


@dataclass(frozen=True, slots=True)
class DistanceText:
    """What a score_mod reads by the distance between query and key: statements that take it as `distance`, or as `near` + `far`, of which
    the second is a 64-bit constant for every element of a thread; the `values`; and how the mod's own statements call these."""

    lines: tuple[str, ...]
    values: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return *self.lines, *self.values


@dataclass(frozen=True, slots=True)
class SumText:
    """What a score_mod adds to the score: a number per key, and `rate` times kv_idx - q_idx. Empty where there is none."""

    key: str
    rate: str

    @property
    def parts(self) -> tuple[str, str]:
        return self.key, self.rate


@dataclass(frozen=True, slots=True)
class Target:
    """What the spellings depend on beside the graph: "cuda", "hip" or "cpu", the dtype of q, k and v, and the kernel's language."""

    backend: str
    precision: str  # "float16", "bfloat16" or "float32"
    exact_indices: bool = True  # all lengths are at most INDEX_BOUND, so an index is exact in float32
    language: str = "triton"  # or "gluon"
    packed_heads: bool = False  # h is a column, as q_idx is: rows of a tile belong to several heads
    read_directly: bool = False  # elements that no other position shares, past Triton's pipelines and layouts (see _helpers.jinja)

    @property
    def module(self) -> str:
        """The language's name in a kernel."""
        return "gl" if self.language == "gluon" else "tl"

    def dtype(self, dtype: torch.dtype) -> str:
        """The dtype in which values of a torch dtype are computed, as the kernel names it."""
        return f"{self.module}.{compute_dtype(dtype)}"

    def spelling(self, row: Op, operands: str) -> str:
        """The spelling of a row of the op table for a kind of operands."""
        approximate = row.approximate.get((self.backend, self.precision))
        return self.spelled(approximate or (row.triton if isinstance(row.triton, str) else row.triton[operands]), row.gluon.get(operands))

    def spelled(self, triton: str, gluon: str | None = None) -> str:
        """A Triton spelling in the kernel's language."""
        if self.language == "triton":
            return triton
        return gluon or re.sub(r"\btl\.", "gl.", triton)


def compute_dtype(dtype: torch.dtype) -> str:
    """The name of the Triton dtype in which values of a torch dtype are computed."""
    if dtype.is_floating_point:
        return "float32"
    return "int1" if dtype == torch.bool else str(dtype).removeprefix("torch.")


def lines_of(statements: Iterable[Statement]) -> tuple[str, ...]:
    """Statements as they stand in a kernel, below the user's lines that they come from."""
    lines, last = [], None
    for s in statements:
        if s.source is not None and s.source != last:
            lines.append(f"# {provenance(s.source)}")
            last = s.source
        lines.append(f"{s.name} = {s.value}")
    return tuple(lines)


def provenance(source: SourceLine) -> str:
    """`folder/file.py:12: the user's line`, one printable line, short enough to read and free of machine paths."""
    parts = source.file.replace(os.sep, "/").split("/")
    return one_line(f"{'/'.join(parts[-2:])}:{source.line}: {source.text}")
