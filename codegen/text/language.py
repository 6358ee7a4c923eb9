"""What a language of kernels offers to those who print in it: Triton and Gluon (languages.py), C++ (cpp.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from ..mod.table.op import Op
from .code import Code, Statement
from .parameters import Parameter

EXACT = "exact"  # in place of a dtype: of an operation that something is decided by, which all kernels compute alike


class Language(ABC):
    """Lowering asks a language for `Code` and knows no spelling of its own.

    A language has levels of its own for how tightly operators bind. Code that it returns says its level; code that it is given is put into
    parentheses where its place asks for that. All names in code are reported in `Code.uses`, those of functions in templates/_helpers.jinja
    as "helper": a kernel prints the ones that it uses. Values are scalars, columns, rows or tiles, and operators broadcast them.
    """

    name: str
    module: str  # what kernels call it, and templates `tl`
    jit: str  # the decorator of its functions, in templates `jit`
    suffix: str  # of its files, and before that of its templates
    has_rows: bool = False  # rows of captured tensors are values, `row_at`, and their products numbers, `dot`; else both are tiles

    # ---- names and numbers

    @abstractmethod
    def symbol(self, name: str) -> Code:
        """A symbol, a temporary, or anything else that the kernel has under a name."""

    @abstractmethod
    def argument(self, name: str, kind: str, index: int, dim: int = 0) -> Code:
        """A kernel argument, and how to find it at launch (see `Use`)."""

    @abstractmethod
    def literal(self, value: bool | int | float) -> Code:
        """A number, infinities and NaN included."""

    @abstractmethod
    def number(self, value: Code, dtype: torch.dtype) -> Code:
        """A literal as a value of a dtype, which a choice between two literals takes its own from."""

    @abstractmethod
    def is_name(self, code: Code) -> bool:
        """Is it a name (or True or False)? Then it may stand in several places, and nothing is computed twice."""

    # ---- operations

    @abstractmethod
    def operate(self, left: Code, symbol: str, right: Code) -> Code:
        """An operator between two expressions: + - * & == != < <= > >= mean the same in every language."""

    @abstractmethod
    def beside(self, symbol: str, value: Code) -> Code:
        """An expression as a template may put it on either side of an operator that is associative: + or &."""

    @abstractmethod
    def negative(self, value: Code) -> Code:
        """-value"""

    @abstractmethod
    def operation(self, row: Op, operands: str, backend: str, precision: str, *values: Code) -> Code:
        """An operation of the op table on a kind of operands ("float", "int", "bool"), for a target (see `Op.approximate`), or EXACT."""

    @abstractmethod
    def plainer(self, row: Op, *values: Code) -> Code:
        """An operation of the op table where its shorter spelling means the same (see `Op.plainer`)."""

    @abstractmethod
    def float_difference(self, left: Code, right: Code) -> Code:
        """float(left - right) of two indices below INDEX_BOUND."""

    @abstractmethod
    def where(self, condition: Code, yes: Code, no: Code) -> Code:
        """One of two values, position by position."""

    @abstractmethod
    def cast(self, value: Code, dtype: torch.dtype) -> Code:
        """A value in what a torch dtype is computed in (see `compute_dtype`)."""

    @abstractmethod
    def rounded(self, value: Code, dtype: torch.dtype) -> Code:
        """A float32 value rounded to a narrower dtype, as float32."""

    # ---- memory

    @abstractmethod
    def load(self, pointer: Code, inside: Code | None) -> Code:
        """An element of memory; where not `inside`, 0, and nothing is read."""

    @abstractmethod
    def load_directly(self, pointer: Code, inside: Code | None, bits: int) -> Code:
        """`load` by an instruction that the compiler leaves where it is, of elements of 8, 16 or 32 bits (see _helpers.jinja)."""

    def row_at(self, pointer: Code, step: Code, inside: Code | None, length: int) -> Code:
        """A row of so many elements, `step` apart; zeros where not `inside`. For a language that has rows."""
        raise NotImplementedError

    def dot(self, one: Code, other: Code, length: int) -> Code:
        """The dot product of two rows. For a language that has rows."""
        raise NotImplementedError

    # ---- shapes. A tile is given by the name of a tensor of its shape (and layout), or as a list of sizes

    @abstractmethod
    def column(self, vector: Code) -> Code:
        """A vector, one element a row of a tile."""

    @abstractmethod
    def row(self, vector: Code) -> Code:
        """A vector, one element a column of a tile."""

    @abstractmethod
    def zeros_like(self, value: Code) -> Code:
        """Zeros of a value's shape and dtype."""

    @abstractmethod
    def full(self, value: Code, dtype: torch.dtype, tile: str) -> Code:
        """A tile of one value."""

    @abstractmethod
    def broadcast(self, value: Code, tile: str) -> Code:
        """A column or a row spread over a tile."""

    @abstractmethod
    def numbers(self, count: int) -> Code:
        """A vector of the numbers from 0 on; `count` is a power of two."""

    @abstractmethod
    def transposed(self, tile: Code) -> Code:
        """A tile with rows for columns."""

    @abstractmethod
    def product(self, left: Code, right: Code, precision: str) -> Code:
        """The product of matrices [M, K] and [K, N] in float32; `precision` is of float32 factors, "" for others."""

    # ---- lines

    @abstractmethod
    def lines(self, statements: Iterable[Statement]) -> tuple[str, ...]:
        """Statements as they stand in a kernel, below comments with the user's lines that they come from."""

    @abstractmethod
    def signature(self, parameters: tuple[Parameter, ...], mods: Iterable, written: tuple[str, ...]) -> str:
        """The parameters as a kernel declares them. mods: those that capture some, or None; written: tensors that are not only read."""

    @abstractmethod
    def element(self, dtype: str) -> str:
        """What templates call a dtype, given by its name; "" where they take it from tensors, or there is none."""

    # ---- prints

    @abstractmethod
    def without_comments(self, source: str) -> str:
        """The text of a kernel without comments and blank lines."""

    @abstractmethod
    def runs_on(self, source: str) -> bool:
        """Does a line, which may be a comment, go on in the next one?"""

    @abstractmethod
    def check_syntax(self, source: str, template: str) -> None:
        """Raises RenderError for what is seen to be wrong without a compiler."""
