"""What users read of a BlockMask: torch's attributes, and pictures."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable
from typing import overload

import torch
from torch.utils._pytree import GetAttrKey

from flexpress.block_lists import status_of, transposed_lists
from flexpress.checks import pair, whole

from .codegen.compiling import runs_uncompiled
from .codegen.mod.capture import name_of
from .codegen.run.block_lists import BlockLists


@runs_uncompiled
class MaskAttributes:
    """The base of BlockMask, which gives it these parts."""

    _seq_lengths: tuple[int, int]
    _lists: BlockLists
    _leading: tuple[int, ...]  # extents of the lists in front of the rows, (B, H) if they have both
    mask_mod: Callable

    @overload
    def _shown(self, tensor: torch.Tensor, width: int | None = None) -> torch.Tensor: ...
    @overload
    def _shown(self, tensor: torch.Tensor | None, width: int | None = None) -> torch.Tensor | None: ...
    def _shown(self, tensor, width=None):
        """A list as users get it: a copy, with B and H where the mask was made with them, and at least `width` entries in a row."""
        if tensor is None:
            return None
        tensor = tensor.reshape(*self._leading, *tensor.shape[2:])
        missing = 0 if width is None else width - tensor.shape[-1]
        return torch.nn.functional.pad(tensor, (0, missing)) if missing > 0 else tensor.clone()

    # torch's orders of dQ's writes, which no kernel here needs
    dq_write_order = dq_write_order_full = dq_kv_order = dq_kv_order_spt = None

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """(Q block, KV block), in positions."""
        return self._lists.q_block, self._lists.kv_block

    @property
    def kv_num_blocks(self) -> torch.Tensor:
        """int32 (B, H, rows): how many partial KV blocks each row of query blocks has."""
        return self._shown(self._lists.kv_num_blocks)

    @property
    def kv_indices(self) -> torch.Tensor:
        """int32 (B, H, rows, columns): which ones, ascending; entries past the count mean nothing."""
        return self._shown(self._lists.kv_indices, self._grid[1])

    @property
    def full_kv_num_blocks(self) -> torch.Tensor | None:
        """int32 (B, H, rows): how many full KV blocks each row has; None if they are not kept apart."""
        return self._shown(self._lists.full_kv_num_blocks)

    @property
    def full_kv_indices(self) -> torch.Tensor | None:
        """int32 (B, H, rows, columns): which ones, or None."""
        return self._shown(self._lists.full_kv_indices, self._grid[1])

    @property
    def q_num_blocks(self) -> torch.Tensor:
        """int32 (B, H, columns): how many partial query blocks each column of KV blocks has."""
        return self._shown(self.as_transposed_lists().kv_num_blocks)

    @property
    def q_indices(self) -> torch.Tensor:
        """int32 (B, H, columns, rows): which ones, ascending."""
        return self._shown(self.as_transposed_lists().kv_indices, self._grid[0])

    @property
    def full_q_num_blocks(self) -> torch.Tensor | None:
        """int32 (B, H, columns): how many full query blocks each column has, or None."""
        return self._shown(self.as_transposed_lists().full_kv_num_blocks)

    @property
    def full_q_indices(self) -> torch.Tensor | None:
        """int32 (B, H, columns, rows): which ones, or None."""
        return self._shown(self.as_transposed_lists().full_kv_indices, self._grid[0])

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

        Q_LEN, KV_LEN, four lists, four transposed lists, four times None (torch's orders of dQ writes, which no kernel here needs),
        Q block, KV block, mask_mod.
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
            None,
            None,
            None,
            None,
            *size,
            self.mask_mod,
        )

    # a mask as a node of a pytree, by torch's names: lists, and what else it is made of
    _TENSOR_ATTRS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    _CONTEXT_ATTRS = ("seq_lengths", "BLOCK_SIZE", "mask_mod")

    def _flatten(self) -> tuple[tuple, tuple]:
        return tuple(getattr(self, name) for name in self._TENSOR_ATTRS), tuple(getattr(self, name) for name in self._CONTEXT_ATTRS)

    @classmethod
    def _unflatten(cls, tensors, context):
        lengths, size, mask_mod = context
        return cls(lengths, *tensors, BLOCK_SIZE=size, mask_mod=mask_mod)

    def _flatten_with_keys(self) -> tuple[tuple, ...]:
        return tuple(
            tuple((GetAttrKey(name), value) for name, value in zip(names, values, strict=True))
            for names, values in zip((self._TENSOR_ATTRS, self._CONTEXT_ATTRS), self._flatten(), strict=True)
        )

    def as_lists(self) -> BlockLists:
        """The mask's own lists: 4-dimensional, contiguous, int32, not to be written to."""
        return self._lists

    def as_transposed_lists(self) -> BlockLists:
        """The transposed lists (query blocks for each KV block), in the fields of the others."""
        return transposed_lists(self._lists, self._seq_lengths[1])

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of blocks; lists may have fewer columns."""
        (Q_LEN, KV_LEN), (q_block, kv_block) = self._seq_lengths, self.BLOCK_SIZE
        return -(-Q_LEN // q_block), -(-KV_LEN // kv_block)

    def _status(self) -> torch.Tensor:
        """int8 (B, H, rows, columns): 0 empty, 1 partial, 2 full."""
        return status_of(self._lists, self._grid[1])

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """A picture of the blocks: full, partial (or mixed) and empty as `██`, `░░` and blanks, one batch and head each.

        grid_size is the largest number of (rows, columns) drawn, -1 for all of them; `limit` the number of pictures. Raises TypeError or
        ValueError for what is no such number.
        """
        status, limit = self._status().cpu(), whole("limit", limit)
        rows, columns = status.shape[-2:]
        if not isinstance(grid_size, numbers.Integral):
            limits = pair("grid_size", grid_size, 1, "-1, a number or a pair of numbers")
        else:
            limits = (rows, columns) if grid_size == -1 else (whole("grid_size", grid_size, 1),) * 2
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
        return (
            f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, sparsity={self.sparsity():.2f}%, "
            f"mask_mod={name_of(self.mask_mod)})"
        )

    def __str__(self) -> str:
        return f"{self!r}\n{self.to_string()}"
