"""Dot products of long rows of captured tensors: products of tiles of rows, or of rows where a language has them; and what their gradients
take."""

from __future__ import annotations

import torch

from ..mod.expr import Expr, symbols_in
from ..mod.graphs.loads import POSITIONS
from .addresses import Addresses, both
from .code import Code


def padded(length: int) -> int:
    """Columns of a tile of rows: a power of two, as many as matrix units take at least."""
    return max(16, 1 << (length - 1).bit_length())


class Dots:
    """The dot products of a mod, as they are printed."""

    def __init__(self, addresses: Addresses) -> None:
        self.addresses, self.language, self.expressions = addresses, addresses.language, addresses.expressions
        self.column = "kv_idx" if addresses.target.transposed else "q_idx"  # the position that is a column
        self.tiles: dict[int, Code] = {}
        self.factors: dict[int, tuple[Code, Code]] = {}  # per dot product: the tile of the column's rows first, or the query's row

    def product(self, dot: Expr) -> Code:
        """A dot product of two rows at all positions of a tile."""
        if self.language.has_rows:
            self.factors[id(dot)] = one, other = tuple(self._row(row, dot.attr) for row in dot.args)
            return self.language.dot(one, other, dot.attr)
        rows = sorted(dot.args, key=lambda row: self.column not in symbols_in(row))
        tiles = [self._tile(row, dot.attr) for row in rows]
        precision = precision_of(dot, self.addresses.target.float32_precision)
        if precision:
            tiles = [self._widened(tile, row) for tile, row in zip(tiles, rows, strict=True)]
        self.factors[id(dot)] = tuple(tiles)
        return self.language.product(*tiles, precision)

    def place(self, dot: Expr, role: str) -> tuple[Code, Code | None]:
        """For the gradient of the rows of a role (see CapturedGradient): the factor of d loss / d product, and what must hold for them.
        Tiles serve the role of the column's."""
        if self.language.has_rows:
            own = ("row", "column").index(role)
            return self.factors[id(dot)][1 - own], self.addresses.places[id(dot.args[own])][1]
        row = next(row for row in dot.args if self.column in symbols_in(row))
        return self.language.transposed(self.factors[id(dot)][1]), self.addresses.places[id(row)][1]

    def _row(self, row: Expr, length: int) -> Code:
        """A row at one position or at LANES of them."""
        if id(row) not in self.tiles:
            language, addresses, before = self.language, self.addresses, self.expressions.node
            self.expressions.node = row
            offset, inside = addresses.located(row)
            pointer = addresses.added([*offset, *addresses.spread(row)], addresses.pointer(row))
            is_one = addresses.layouts[row.attr].strides[-1] == "0"
            step = language.literal(0) if is_one else addresses.stepped(row, len(row.args), language.literal(1))
            found = language.row_at(pointer, step, inside, length)
            self.tiles[id(row)] = self.expressions.statement(found, row.source, loads=True)
            self.expressions.node = before
        return self.tiles[id(row)]

    def _widened(self, tile: Code, row: Expr) -> Code:
        if row.dtype == torch.float32:
            return tile
        return self.expressions.statement(self.language.cast(tile, torch.float32), row.source)

    def _tile(self, row: Expr, length: int) -> Code:
        """Rows as a tile: [positions, elements] of the position that is a column, [elements, positions] of the other. Elements past the
        end are 0, and so are rows that are not there."""
        if id(row) in self.tiles:
            return self.tiles[id(row)]
        language, addresses, before = self.language, self.addresses, self.expressions.node
        self.expressions.node = row
        (position,) = POSITIONS & symbols_in(row)
        offset, inside = addresses.located(row)
        numbers = (language.row if position == self.column else language.column)(language.numbers(padded(length)))
        columns = self.expressions.statement(numbers, row.source, dtype=torch.int32)
        if padded(length) > length:
            inside = both(language, inside, language.operate(columns, "<", language.literal(length)))
        if addresses.target.ends_keys and position == "kv_idx":
            ends = language.operate(language.symbol("offs_n"), "<", language.symbol("KV_LEN"))
            inside = both(language, inside, language.row(ends))
        is_one = addresses.layouts[row.attr].strides[-1] == "0"
        last = language.zeros_like(columns) if is_one else addresses.stepped(row, len(row.args), columns)
        pointer = addresses.added([*offset, *addresses.spread(row), (1, last)], addresses.pointer(row))
        found = self.tiles[id(row)] = self.expressions.statement(language.load(pointer, inside), row.source, loads=True)
        self.expressions.node = before
        return found


def precision_of(dot: Expr, float32: str) -> str:
    """How a product is computed in float32; "" for rows of one half precision, whose products are exact."""
    one, other = (row.dtype for row in dot.args)
    return "" if one == other and one in (torch.float16, torch.bfloat16) else float32
