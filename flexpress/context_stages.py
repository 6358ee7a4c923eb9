"""A rank's attention in stages: what it attends to in its own keys, and in those that others send, with the mask of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from flexpress.block_mask import BlockMask
from flexpress.context import BLOCK, ContextPlan

from .codegen.mod.capture import name_of
from .codegen.run import masks
from .codegen.run.block_lists import lists_of


@dataclass(eq=False)
class Stage:
    """The keys that a rank attends to at once, and their way here.

    mask          of the local queries and these keys; None where nothing attends
    kv_positions  int32 (keys,) where they are in the whole sequence; those past its end are padding
    rows          which of the local keys this rank sends, by target; None for the stage of its own keys
    sent, received   how many keys go to and come from each rank
    """

    mask: BlockMask | None
    kv_positions: torch.Tensor
    rows: torch.Tensor | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def gather(self, k: torch.Tensor, v: torch.Tensor, group) -> Arriving:
        """The keys and values of this stage, on their way. k, v: those that this rank holds."""
        sending = torch.cat([_by_position(t).index_select(0, self.rows) for t in (k, v)], -1)
        found = sending.new_empty((sum(self.received), *sending.shape[1:]))
        work = dist.all_to_all_single(found, sending, list(self.received), list(self.sent), group=group, async_op=True)
        return Arriving(found, k.shape[3], work)

    def give_back(self, dk: torch.Tensor, dv: torch.Tensor, group) -> Arriving:
        """The gradients of what this rank sent, on their way. dk, dv: of what it got."""
        sending = torch.cat([_by_position(t) for t in (dk, dv)], -1)
        found = sending.new_empty((sum(self.sent), *sending.shape[1:]))
        work = dist.all_to_all_single(found, sending, list(self.sent), list(self.received), group=group, async_op=True)
        return Arriving(found, dk.shape[3], work)

    def add(self, gradients: Arriving, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add those to the gradients of this rank's keys and values, in the order of ranks."""
        dk, dv, found = _by_position(dk), _by_position(dv), gradients.pair()
        start = 0
        for count in self.sent:
            rows = self.rows[start : start + count]
            for total, part in zip((dk, dv), found, strict=True):
                total.index_add_(0, rows, _by_position(part)[start : start + count].to(total.dtype))
            start += count


@dataclass(eq=False)
class Arriving:
    """Keys and values, or their gradients, one behind the other: (positions, B, heads, D_QK + D_V)."""

    packed: torch.Tensor
    d_qk: int
    work: object

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, (B, heads, positions, D), once they are there."""
        self.work.wait()
        packed = self.packed.permute(1, 2, 0, 3)
        return packed[..., : self.d_qk], packed[..., self.d_qk :]


def _by_position(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(2, 0, 1, 3)


def stages_of(plan: ContextPlan, count: int) -> list[Stage]:
    """The stage of a rank's own keys, and `count` stages of those of other ranks, near ones first."""
    found = plan._stages.get(count)
    if found is None:
        found = [_local(plan)] + [_remote(plan, n, count) for n in range(count if plan.ranks > 1 else 0)]
        plan._stages[count] = found
    return found


def _local(plan: ContextPlan) -> Stage:
    blocks = plan.layout.kv_blocks[plan.rank]
    positions = plan.kv_position_ids.to(torch.int32)
    return Stage(_mask(plan, blocks, positions), positions)


def _remote(plan: ContextPlan, number: int, count: int) -> Stage:
    """What comes from the ranks at distances number + 1, number + 1 + count, ..."""
    layout, me = plan.layout, plan.rank

    def exchanged(source: int, target: int) -> np.ndarray:
        distance = (target - source) % layout.ranks
        return layout.sent(source, target) if distance % count == (number + 1) % count else layout.kv_blocks[source][:0]

    outgoing = [exchanged(me, rank) for rank in range(layout.ranks)]
    incoming = [exchanged(rank, me) for rank in range(layout.ranks)]
    local = np.full(-(-plan.kv_len // BLOCK) + 1, -1)
    local[layout.kv_blocks[me]] = np.arange(len(layout.kv_blocks[me]))
    rows = np.concatenate([(local[blocks][:, None] * BLOCK + np.arange(BLOCK)).reshape(-1) for blocks in outgoing])
    rows = rows.clip(max=max(len(plan.kv_position_ids) - 1, 0))  # padding repeats the last position; mask_mod hides it
    blocks = np.concatenate(incoming)
    positions = plan._on_device((blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)).to(torch.int32)
    sent, received = (tuple(len(b) * BLOCK for b in part) for part in (outgoing, incoming))
    return Stage(_mask(plan, blocks, positions), positions, plan._on_device(rows), sent, received)


def _mask(plan: ContextPlan, blocks: np.ndarray, kv_positions: torch.Tensor) -> BlockMask | None:
    """The mask of the local queries and the keys of some blocks."""
    rows = plan.layout.q_blocks[plan.rank]
    status = plan._status.index_select(2, plan._on_device(rows)).index_select(3, plan._on_device(blocks))
    if not status.numel():
        return None
    if len(kv_positions) == len(blocks) * BLOCK and plan.kv_len % BLOCK:  # with padding, which only mask_mod hides
        status = torch.where(plan._on_device(blocks) == plan.kv_len // BLOCK, status.clamp(max=1), status)
    lists = masks.block_lists(status, wait=False)
    lengths = len(plan.position_ids), len(kv_positions)
    return BlockMask._made(lengths, lists_of(lists, BLOCK, BLOCK, lengths[1] % BLOCK == 0), _mask_mod(plan, kv_positions))


def _mask_mod(plan: ContextPlan, kv_positions: torch.Tensor) -> Callable:
    """The plan's mask_mod, told positions in the whole sequence."""
    q_positions, mod, kv_len = plan.position_ids.to(torch.int32), plan.mask_mod, plan.kv_len

    def in_context(b, h, q_idx, kv_idx):
        kv = kv_positions[kv_idx]
        inside = kv < kv_len
        return inside if mod is None else inside & mod(b, h, q_positions[q_idx], kv)

    in_context.__name__ = f"context_{name_of(mod) if mod else 'everything'}"
    return in_context


def score_mod_of(plan: ContextPlan, score_mod: Callable | None, kv_positions: torch.Tensor) -> Callable | None:
    """A score_mod, told positions in the whole sequence."""
    if score_mod is None:
        return None
    q_positions = plan.position_ids.to(torch.int32)

    def in_context(score, b, h, q_idx, kv_idx):
        return score_mod(score, b, h, q_positions[q_idx], kv_positions[kv_idx])

    in_context.__name__ = f"context_{name_of(score_mod)}"
    return in_context
