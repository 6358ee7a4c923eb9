"""The keys that a rank's queries attend to, on their way to it, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from flexpress.block_mask import BlockMask
from flexpress.context import BLOCK, ContextPlan, positions_of, whole_blocks

from .codegen.mod.capture import name_of
from .codegen.run import masks
from .codegen.run.block_lists import BlockLists, Shifts, lists_of


class Exchange:
    """What a rank sends and gets by a plan: blocks of keys and values. Its own stay where it is.

    blocks      the numbers of their blocks in the whole sequence, its own first, then those of rank 0; keys past its end are padding
    rows        which of this rank's keys it sends, by target
    sent, received   how many keys go to and come from each rank
    """

    def __init__(self, plan: ContextPlan) -> None:
        layout, me = plan.layout, plan.rank
        mine, kept = layout.kv_blocks[me], layout.sent(me, me)
        nothing = kept[:0]  # what it sends to itself
        outgoing = [nothing if rank == me else layout.sent(me, rank) for rank in range(layout.ranks)]
        incoming = [nothing if rank == me else layout.sent(rank, me) for rank in range(layout.ranks)]
        place = np.zeros(-(-plan.kv_len // BLOCK) + 1, dtype=np.int64)
        place[mine] = np.arange(len(mine))
        held = len(plan.kv_position_ids)
        # padding of a last block repeats the last position; mask_mod hides it
        rows = whole_blocks(np.concatenate([place[blocks] for blocks in outgoing])).clip(max=max(held - 1, 0))
        touched, places = np.unique(rows, return_inverse=True)
        self.plan, self.blocks = plan, np.concatenate([kept, *incoming])
        self.rows, self._touched, self._places = (plan.on_device(numbers) for numbers in (rows, touched, places.reshape(-1)))
        self.sent, self.received = ([len(blocks) * BLOCK for blocks in part] for part in (outgoing, incoming))
        self._nobody_sends = not layout.remote_blocks.any()
        own = positions_of(place[kept], held)  # the rows of this rank's keys that its queries attend to
        self._own, self._own_count, self._own_places = None if len(own) == held else plan.on_device(own), len(own), len(kept) * BLOCK
        self._lists: dict[tuple[int, int], BlockLists | None] = {}  # by heads

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> Arriving:
        """The keys and values that this rank's queries attend to. k, v: those that it holds, (B, heads, positions, D)."""
        k, v = _by_position(k), _by_position(v)
        sending = torch.cat([t.index_select(0, self.rows) for t in (k, v)], -1)
        arriving = self._exchanged(sending, self.received, self.sent, k.shape[3], self._own_places)
        for part, held in zip(arriving.packed.split((k.shape[3], v.shape[3]), -1), (k, v), strict=True):
            part[: self._own_count] = held if self._own is None else held.index_select(0, self._own)
            part[self._own_count : self._own_places] = 0
        return arriving

    def give_back(self, dk: torch.Tensor, dv: torch.Tensor) -> Arriving:
        """The gradients of what this rank sent. dk, dv: of what `gather` found."""
        sending = torch.cat([_by_position(t)[self._own_places :] for t in (dk, dv)], -1)
        return self._exchanged(sending, self.sent, self.received, dk.shape[3])

    def _exchanged(self, sending: torch.Tensor, received: list[int], sent: list[int], d_qk: int, before: int = 0) -> Arriving:
        """What comes for what is sent, with room for so many positions before it."""
        found, work = sending.new_empty((before + sum(received), *sending.shape[1:])), None
        if not self._nobody_sends:
            work = dist.all_to_all_single(found[before:], sending, received, sent, group=self.plan.group, async_op=True)
        return Arriving(found, d_qk, work)

    def totals(self, dk: torch.Tensor, dv: torch.Tensor, returned: Arriving) -> list[torch.Tensor]:
        """The gradients of this rank's keys and values, (B, heads, positions, D). dk, dv: of what `gather` found; may be written to.

        What came back is added in the order of ranks: every run adds alike.
        """
        found = []
        for gradient, parts in zip((dk, dv), returned.pair(), strict=True):
            total = _by_position(gradient)[: self._own_count]
            if self._own is not None:
                total = total.new_zeros((len(self.plan.kv_position_ids), *total.shape[1:])).index_copy_(0, self._own, total)
            sums, start = total.index_select(0, self._touched).float(), 0
            for count in self.sent:
                sums.index_add_(0, self._places[start : start + count], _by_position(parts)[start : start + count].float())
                start += count
            total.index_copy_(0, self._touched, sums.to(total.dtype))
            found.append(total.permute(1, 2, 0, 3))
        return found

    def mask_of(self, heads: slice) -> BlockMask | None:
        """The mask of this rank's queries, in these heads, and the keys that it gets; None if there are none of either."""
        lists = self._lists_of(heads if self.plan.status.shape[1] > 1 else slice(0, 1))
        if lists is None:
            return None
        return BlockMask._made((len(self.plan.position_ids), BLOCK * len(self.blocks)), lists, self._mask_mod(heads.start))

    def _lists_of(self, heads: slice) -> BlockLists | None:
        plan, key = self.plan, (heads.start, heads.stop)
        if key not in self._lists:
            blocks, rows = plan.on_device(self.blocks), plan.on_device(plan.layout.q_blocks[plan.rank])
            status = plan.status[:, heads].index_select(2, rows).index_select(3, blocks)
            if plan.kv_len % BLOCK:  # with padding, which mask_mod alone hides
                status = torch.where(blocks == plan.kv_len // BLOCK, status.clamp(max=1), status)
            self._lists[key] = lists_of_part(status, rows, blocks, plan.q_len, plan.kv_len) if status.numel() else None
        return self._lists[key]

    def score_mod(self, mod: Callable | None, first_head: int) -> Callable | None:
        """A score_mod, told heads of all."""
        if mod is None:
            return None

        def in_context(score, b, h, q_idx, kv_idx):
            return mod(score, b, h + first_head, q_idx, kv_idx)

        in_context.__name__ = f"context_{name_of(mod)}"
        return in_context

    def _mask_mod(self, first_head: int) -> Callable:
        """The plan's mask_mod, told the same; it hides padding."""
        mod, kv_len = self.plan.mask_mod, self.plan.kv_len
        padded = kv_len % BLOCK != 0

        def in_context(b, h, q_idx, kv_idx):
            seen = mod(b, h + first_head, q_idx, kv_idx)
            return (kv_idx < kv_len) & seen if padded else seen

        in_context.__name__ = f"context_{name_of(mod)}"
        return in_context


@dataclass(eq=False)
class Arriving:
    """Keys and values, or their gradients, side by side: (positions, B, heads, D_QK + D_V)."""

    packed: torch.Tensor
    d_qk: int
    work: dist.Work | None

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, (B, heads, positions, D), once they are there."""
        if self.work is not None:
            self.work.wait()
        packed = self.packed.permute(1, 2, 0, 3)
        return packed[..., : self.d_qk], packed[..., self.d_qk :]


def lists_of_part(status: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor, q_len: int, kv_len: int) -> BlockLists:
    """The lists of some blocks of queries, and of keys, with these numbers in a sequence. status: theirs."""
    lists = lists_of(masks.block_lists(status), BLOCK, BLOCK, interior=True)
    return replace(lists, shifts=Shifts(_moved(rows), _moved(blocks), q_len, kv_len))


def _moved(blocks: torch.Tensor) -> torch.Tensor:
    """By how many blocks each lies further on in the whole sequence (see Shifts)."""
    return (blocks - torch.arange(len(blocks), device=blocks.device)).to(torch.int32)


def _by_position(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(2, 0, 1, 3)
