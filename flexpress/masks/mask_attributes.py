"""What users read of a BlockMask: torch's attributes, and pictures."""

from __future__ import annotations

import itertools
import numbers
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import GetAttrKey

from flexpress.inputs.checks import block_size, pair, whole
from flexpress.masks.block_lists import permuted, transposed_lists, without_values
from flexpress.masks.given_lists import GivenLists
from flexpress.masks.mask_lists import MaskLists, settable

from ..codegen.compiling import runs_uncompiled
from ..codegen.mod.captured.tensors import is_traced_kind
from ..codegen.mod.tracing.capture import name_of
from ..codegen.run.block_lists import BlockLists

ORDERS = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")
KV_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
Q_LISTS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def _kv_list(at: int, doc: str) -> property:
    """The attribute of a list of KV blocks, `at` its place among them."""

    def get(self) -> torch.Tensor | None:
        return self._kv_list(at)

    def put(self, table: torch.Tensor | None) -> None:
        self._put(at, table)

    return property(get, put, doc=doc)


def _q_list(at: int, doc: str) -> property:
    """The attribute of a list of query blocks, `at` its place among them."""

    def get(self) -> torch.Tensor | None:
        return self._q_list(at)

    def put(self, table: torch.Tensor | None) -> None:
        self._written[Q_LISTS[at]] = table

    return property(get, put, doc=doc)


@settable
@runs_uncompiled
class MaskAttributes(MaskLists):
    """The base of BlockMask, which gives it these parts."""

    _TRACED: tuple[str, ...] = (
        *KV_LISTS,
        *Q_LISTS,
        "_kv_list",
        "_q_list",
        "_shown",
        "_put",
        "_give",
        "BLOCK_SIZE",
        "shape",
        "numel",
        "to_dense",
        "as_tuple",
        "_flatten",
        "_unflatten",
    )  # by torch.compile

    # torch's orders of dQ's writes, which no kernel here needs: what a user gives
    dq_write_order: torch.Tensor | None = None
    dq_write_order_full: torch.Tensor | None = None
    dq_kv_order: torch.Tensor | None = None
    dq_kv_order_spt: bool | None = None

    if TYPE_CHECKING:
        kv_num_blocks: torch.Tensor
        kv_indices: torch.Tensor
        full_kv_num_blocks: torch.Tensor | None
        full_kv_indices: torch.Tensor | None
        q_num_blocks: torch.Tensor
        q_indices: torch.Tensor
        full_q_num_blocks: torch.Tensor | None
        full_q_indices: torch.Tensor | None
    else:
        kv_num_blocks = _kv_list(0, "int32 (B, H, rows): how many partial KV blocks each row of query blocks has.")
        kv_indices = _kv_list(1, "int32 (B, H, rows, columns): which ones, ascending, and then all others.")
        full_kv_num_blocks = _kv_list(2, "int32 (B, H, rows): how many full KV blocks each row has; None if they are not kept apart.")
        full_kv_indices = _kv_list(3, "int32 (B, H, rows, columns): which ones, ascending, and then all others; or None.")
        q_num_blocks = _q_list(0, "int32 (B, H, columns): how many partial query blocks each column of KV blocks has.")
        q_indices = _q_list(1, "int32 (B, H, columns, rows): which ones, ascending, and then all others.")
        full_q_num_blocks = _q_list(2, "int32 (B, H, columns): how many full query blocks each column has, or None.")
        full_q_indices = _q_list(3, "int32 (B, H, columns, rows): which ones, ascending, and then all others; or None.")

    def _kv_list(self, at: int) -> torch.Tensor | None:
        if self._given is not None:
            return self._given.tables[at]
        return self._shown(self._as_made(self._cuts), at, -(-self._whole_lengths[1] // self._size[1]))

    def _q_list(self, at: int) -> torch.Tensor | None:
        name = Q_LISTS[at]
        if name in self._written:
            return self._written[name]
        if self._given is None:
            lists, (Q_LEN, KV_LEN) = self._as_made(self._cuts), self._whole_lengths
        else:
            lists, (Q_LEN, KV_LEN) = self._current(False), self._seq_lengths
        return self._shown(transposed_lists(lists, KV_LEN), at, -(-Q_LEN // self._size[0]))

    def _shown(self, lists: BlockLists, at: int, width: int) -> torch.Tensor | None:
        """A table as users get it: a copy, with B and H where the mask was made with them, and `width` entries in a row, as torch's."""
        counts, indices = (lists.kv_num_blocks, lists.kv_indices) if at < 2 else (lists.full_kv_num_blocks, lists.full_kv_indices)
        if counts is None or indices is None:
            return None
        table = permuted(counts, indices, width) if at % 2 else counts.clone()
        return table.reshape(*self._leading, *table.shape[2:])

    def _put(self, at: int, table: torch.Tensor | None) -> None:
        """Have lists of KV blocks that a user sets in place of the mask's own: read at the next use, as more may be set before."""
        tables = [self._kv_list(i) for i in range(4)]
        tables[at] = table
        self._give(tables, self._size)

    def _give(self, tables, size: tuple[int, int]) -> None:
        if isinstance(tables[1], torch.Tensor):
            self._leading = tuple(tables[1].shape[:-2])
        self._given, self._whole, self._size = GivenLists(tuple(tables), size), None, size
        self._partial = None
        self._agreed = self._agrees = self._cuts = self._changed = False
        self._forget()

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """(Q block, KV block), in positions."""
        return self._size

    @BLOCK_SIZE.setter
    def BLOCK_SIZE(self, value: int | tuple[int, int]) -> None:
        self._give([self._kv_list(i) for i in range(4)], block_size(value))

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN)"""
        return (*self._leading, *self._seq_lengths)

    def numel(self) -> int:
        """Positions in the mask, hidden ones included."""
        return torch.Size(self.shape).numel()

    def sparsity(self) -> float:
        """The percentage of blocks that are empty."""
        status = self._status()
        return 100.0 * (1.0 - torch.count_nonzero(status).item() / status.numel()) if status.numel() else 0.0

    def to_dense(self) -> torch.Tensor:
        """int32 (B, H, rows, columns): 1 where a block is partial or full."""
        status = self._status()
        return (status != 0).to(torch.int32).reshape(*self._leading, *status.shape[-2:])

    def as_tuple(self, flatten: bool = True) -> tuple:
        """The attributes in the order of torch 2.13's as_tuple; flatten=False keeps seq_lengths and BLOCK_SIZE as pairs.

        Q_LEN, KV_LEN, four lists, four transposed lists, four orders of dQ's writes (None unless they were given), Q block, KV block,
        mask_mod.
        """
        lengths, size = (self._seq_lengths, self.BLOCK_SIZE) if flatten else ((self._seq_lengths,), (self.BLOCK_SIZE,))
        return (
            *lengths,
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
            self.q_num_blocks,
            self.q_indices,
            self.full_q_num_blocks,
            self.full_q_indices,
            self.dq_write_order,
            self.dq_write_order_full,
            self.dq_kv_order,
            self.dq_kv_order_spt,
            *size,
            self.mask_mod,
        )

    # a mask as a node of a pytree, by torch's names: lists, and what else it is made of
    _TENSOR_ATTRS = KV_LISTS
    _CONTEXT_ATTRS = ("seq_lengths", "BLOCK_SIZE", "mask_mod")

    def _flatten(self) -> tuple[tuple, tuple]:
        return tuple(getattr(self, name) for name in self._TENSOR_ATTRS), tuple(getattr(self, name) for name in self._CONTEXT_ATTRS)

    @classmethod
    def _unflatten(cls, tensors, context):
        lengths, size, mask_mod = context
        if any(map(is_traced_kind, tensors)):  # while torch exports: the call looks at lists
            return cls._made(lengths, GivenLists(tuple(tensors), size), mask_mod)
        return cls(lengths, *tensors, BLOCK_SIZE=size, mask_mod=mask_mod)

    def _flatten_with_keys(self) -> tuple[tuple, ...]:
        return tuple(
            tuple((GetAttrKey(name), value) for name, value in zip(names, values, strict=True))
            for names, values in zip((self._TENSOR_ATTRS, self._CONTEXT_ATTRS), self._flatten(), strict=True)
        )

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """A picture of the blocks: full, partial (or mixed) and empty as `██`, `░░` and blanks, one batch and head each.

        grid_size is the largest number of (rows, columns) drawn, -1 for all of them, of either or of both; `limit` the
        number of pictures. Raises TypeError or ValueError for what is no such number.
        """
        status, limit = self._status().cpu(), whole("limit", limit)
        rows, columns = status.shape[-2:]
        if isinstance(grid_size, numbers.Integral):
            grid_size = (-1, -1) if grid_size == -1 else (whole("grid_size", grid_size, 1),) * 2
        asked = pair("grid_size", grid_size, -1, "-1, a number or a pair of numbers")
        limits = [
            n if most == -1 else whole(f"grid_size[{i}]", most, 1) for i, (n, most) in enumerate(zip((rows, columns), asked, strict=True))
        ]
        step_r, step_c = (max(1, -(-n // most)) for n, most in zip((rows, columns), limits, strict=True))
        pictures: list[str] = []
        for z, h in itertools.product(range(status.shape[0]), range(status.shape[1])):
            if len(pictures) == limit:
                pictures.append(f"... {status.shape[0] * status.shape[1] - limit} more; raise limit= to see them")
                break
            lines = [f"({z}, {h})"]
            for r in range(0, rows, step_r):
                cells = (status[z, h, r : r + step_r, c : c + step_c] for c in range(0, columns, step_c))
                lines.append("".join("  " if not cell.any() else "██" if bool((cell == 2).all()) else "░░" for cell in cells))
            pictures.append("\n".join(lines))
        return "\n\n".join(pictures)

    def __repr__(self) -> str:
        sparsity = "" if without_values() else f"sparsity={self.sparsity():.2f}%, "
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, {sparsity}mask_mod={name_of(self.mask_mod)})"

    def __str__(self) -> str:
        return repr(self) if without_values() else f"{self!r}\n{self.to_string()}"
