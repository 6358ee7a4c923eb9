"""Block lists that a user made: followed by the mask that is made of them, as torch's masks are views of theirs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexpress.masks.block_lists import capturing, check_tables, read_lists

from ..codegen.mod.captured.tensors import tracing
from ..codegen.run.block_lists import BlockLists


class GivenLists:
    """Tables that belong to a user, who may write to them later.

    tables   kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices; the last two may be None
    size     (Q block, KV block)

    Kernels get copies, in which nothing points outside. They are made at the first use, and again after torch has counted a write to one of
    the tables. Of tensors of inference mode it counts none: those are read at every use. While a CUDA graph is captured they are read for
    the graph, whose replays read them anew.
    """

    def __init__(self, tables: tuple, size: tuple[int, int]) -> None:
        self.tables, self.size = tables, size
        self._kept: tuple[tuple[int, ...], tuple[int, int], BlockLists] | None = None

    def lists(self, lengths: tuple[int, int]) -> BlockLists:
        """The lists as they are now, for a mask of these lengths. Raises what `read_lists` raises."""
        if torch.compiler.is_dynamo_compiling():
            return read_lists(*self.tables, self.size, lengths)
        counts, indices, full_counts, full_indices = self.tables
        kept = self._kept
        try:
            if full_counts is None:
                versions = counts._version, indices._version
            else:
                versions = counts._version, indices._version, full_counts._version, full_indices._version
        except (AttributeError, RuntimeError):  # no tensors, or of inference mode
            versions = None
        if kept is not None and kept[0] == versions and kept[1] == lengths and not (capturing(kept[2]) or tracing()):
            return kept[2].ready()
        made = read_lists(*self.tables, self.size, lengths)
        if versions is not None and not (tracing() or capturing(made)):
            self._kept = versions, lengths, made.kept()
        return made

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> GivenLists:
        """Lists of these tables, each of them changed."""
        return GivenLists(tuple(change(t) if isinstance(t, torch.Tensor) else t for t in self.tables), self.size)

    def with_batch_and_head(self) -> GivenLists:
        """Views of these tables that have all of ([B, [H,]] rows[, columns])."""
        check_tables(*self.tables)
        missing = 4 - self.tables[1].dim()
        return self.changed(lambda table: table[(None,) * missing])


def check_written(q_num_blocks, q_indices, full_q_num_blocks, full_q_indices) -> None:
    """Are these transposed lists, which no kernel reads? Raises TypeError or ValueError."""
    for counts, indices, names in (
        (q_num_blocks, q_indices, "q_num_blocks and q_indices"),
        (full_q_num_blocks, full_q_indices, "full_q_num_blocks and full_q_indices"),
    ):
        if (counts is None) != (indices is None):
            raise ValueError(f"{names} go together: give both or neither")
        if not (counts is None or (isinstance(counts, torch.Tensor) and isinstance(indices, torch.Tensor))):
            raise TypeError(f"{names} must be tensors, got {type(counts).__name__} and {type(indices).__name__}; BLOCK_SIZE comes later")


def orders_of(dq_write_order, dq_write_order_full, dq_kv_order) -> dict:
    """torch's orders of dQ's writes as BlockMask(...) takes them, of those that from_kv_blocks takes. Raises ValueError."""
    if not (dq_kv_order is None or isinstance(dq_kv_order, (bool, torch.Tensor))):
        raise ValueError(f"dq_kv_order must be a bool, a tensor or None, got {type(dq_kv_order).__name__}")
    named = isinstance(dq_kv_order, bool)
    return {
        "dq_write_order": dq_write_order,
        "dq_write_order_full": dq_write_order_full,
        "dq_kv_order": None if named else dq_kv_order,
        "dq_kv_order_spt": dq_kv_order if named else None,
    }
