"""The keys that a rank's queries attend to, on their way to it, and their gradients on the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from flexpress.distributed.layout import whole_blocks
from flexpress.distributed.plan import BLOCK, ContextPlan
from flexpress.masks.block_mask import BlockMask

from ..codegen.mod.graphs.wide import part_in_wide_integers
from ..codegen.mod.tracing.bind import bind
from ..codegen.mod.tracing.capture import name_of
from ..codegen.run import masks
from ..codegen.run.block_lists import BlockLists, Shifts, lists_of
from ..codegen.run.exchange import add_blocks, copy_blocks


class Exchange:
    """What a rank sends and gets by a plan: blocks of keys and values. Its own stay where it is.

    blocks      the numbers of their blocks in the whole sequence, in the order in which they lie here (Layout.keys); keys past the end of
                the sequence are zeros
    sent, received   how many keys go to and come from each rank
    keeps       what came is kept for the backward pass, instead of this rank's own keys: on no rank is what others send more than what it
                has. Else it comes again. All ranks do the same
    """

    def __init__(self, plan: ContextPlan) -> None:
        layout, me = plan.layout, plan.rank
        mine, (first_own, *incoming, last_own) = layout.kv_blocks[me], layout.keys(me)
        kept = np.concatenate([first_own, last_own])
        outgoing = [kept[:0] if rank == me else layout.sent(me, rank) for rank in range(layout.ranks)]
        self.plan, self.blocks = plan, np.concatenate([first_own, *incoming, last_own])
        self.sent, self.received = ([len(blocks) * BLOCK for blocks in part] for part in (outgoing, incoming))
        self._nobody_sends = not layout.remote_blocks.any()
        self.keeps = all(n <= len(blocks) for n, blocks in zip(layout.remote_blocks, layout.kv_blocks, strict=True))
        remote = np.arange(len(first_own), len(self.blocks) - len(last_own))
        self._remote = slice(len(first_own) * BLOCK, (len(self.blocks) - len(last_own)) * BLOCK)
        # places of blocks: among those that this rank holds, among `blocks`, and among those that are sent and come back
        held, going = _places_of(mine, plan), np.concatenate(outgoing)
        here = np.delete(np.arange(len(self.blocks)), remote)
        own = np.full(len(mine), -1)
        own[held[kept]] = here
        self._going = self._on_device(held[going], np.arange(len(going)))
        self._staying = self._on_device(held[kept], here)
        self._returning = self._on_device(remote, np.arange(len(remote)))
        self._adding = self._on_device(own, _occurrences(held[going], len(mine)))
        self._lists: dict[tuple[int, int], BlockLists | None] = {}  # by heads
        self._masks: dict[tuple[int, int], BlockMask | None] = {}  # the same

    def _on_device(self, *numbers: np.ndarray) -> tuple[torch.Tensor, ...]:
        return tuple(self.plan.on_device(n.astype(np.int32)) for n in numbers)

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> Arriving:
        """The keys and values that this rank's queries attend to. k, v: those that it holds, (B, heads, positions, D)."""
        sending = self._side_by_side(k, v, sum(self.sent), self._going)
        found = sending.new_empty((BLOCK * len(self.blocks), *sending.shape[1:]))
        work = self._exchange(found[self._remote], sending, self.received, self.sent)
        copy_blocks(k, v, *self._staying, found, BLOCK)
        return Arriving(found, k.shape[3], work)

    def give_back(self, dk: torch.Tensor, dv: torch.Tensor) -> Arriving:
        """The gradients of what this rank sent. dk, dv: of what `gather` found."""
        sending = self._side_by_side(dk, dv, sum(self.received), self._returning)
        found = sending.new_empty((sum(self.sent), *sending.shape[1:]))
        return Arriving(found, dk.shape[3], self._exchange(found, sending, self.sent, self.received))

    def _side_by_side(self, k: torch.Tensor, v: torch.Tensor, positions: int, places: tuple) -> torch.Tensor:
        found = k.new_empty((positions, *k.shape[:2], k.shape[3] + v.shape[3]))
        copy_blocks(k, v, *places, found, BLOCK)
        return found

    def _exchange(self, found: torch.Tensor, sending: torch.Tensor, received: list[int], sent: list[int]) -> dist.Work | None:
        """Have what comes for what is sent written to `found`, if anybody sends anything."""
        if self._nobody_sends:
            return None
        return dist.all_to_all_single(found, sending, received, sent, group=self.plan.group, async_op=True)

    def add_up(self, dk: torch.Tensor, dv: torch.Tensor, returned: Arriving, sums: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write the gradients of this rank's keys and values, (B, heads, positions, D), to `sums`. dk, dv: of what `gather` found.

        What came back is added in the order of ranks: every run adds alike.
        """
        add_blocks(dk, dv, returned.arrived(), *self._adding, sums, BLOCK)

    def mask_of(self, heads: slice) -> BlockMask | None:
        """The mask of this rank's queries, in these heads, and the keys that it gets; None if there are none of either."""
        key = heads.start, heads.stop
        if key not in self._masks:
            lists = self._lists_of(heads if self.plan.status.shape[1] > 1 else slice(0, 1))
            lengths = len(self.plan.position_ids), BLOCK * len(self.blocks)
            self._masks[key] = None if lists is None else BlockMask._made(lengths, lists, self._mask_mod(heads.start))
        return self._masks[key]

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
        mod = part_in_wide_integers(mod, bind(mod, "score", self.plan.device), (self.plan.q_len, self.plan.kv_len))

        def in_context(score, b, h, q_idx, kv_idx):
            return mod(score, b, h + first_head, q_idx, kv_idx)

        in_context.__name__ = f"context_{name_of(mod)}"
        return in_context

    @functools.cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Packing.places of this rank's queries, and of the keys that it gets."""
        of_queries, of_keys = self.plan.packing.places
        keys = whole_blocks(self.blocks).clip(max=self.plan.kv_len - 1)  # padding is hidden
        return of_queries[:, self.plan.position_ids].contiguous(), of_keys[:, self.plan.on_device(keys)].contiguous()

    def _mask_mod(self, first_head: int) -> Callable:
        """The plan's mask_mod, told the same; it hides padding."""
        kv_len = self.plan.kv_len
        bound = bind(self.plan.mask_mod, "mask", self.plan.device)
        mod = part_in_wide_integers(self.plan.mask_mod, bound, (self.plan.q_len, kv_len))
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
    work: dist.Work | None = None

    def arrived(self) -> torch.Tensor:
        """Both, once they are there."""
        if self.work is not None:
            self.work.wait()
        return self.packed

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each, (B, heads, positions, D), once they are there."""
        packed = self.arrived().permute(1, 2, 0, 3)
        return packed[..., : self.d_qk], packed[..., self.d_qk :]


def lists_of_part(status: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor, q_len: int, kv_len: int) -> BlockLists:
    """The lists of some blocks of queries, and of keys, with these numbers in a sequence. status: theirs."""
    lists = lists_of(masks.block_lists(status), BLOCK, BLOCK, interior=True)
    return replace(lists, shifts=Shifts(_moved(rows), _moved(blocks), q_len, kv_len))


def _moved(blocks: torch.Tensor) -> torch.Tensor:
    """By how many blocks each lies further on in the whole sequence (see Shifts)."""
    return (blocks - torch.arange(len(blocks), device=blocks.device)).to(torch.int32)


def _places_of(blocks: np.ndarray, plan: ContextPlan) -> np.ndarray:
    """Where each block of the whole sequence stands in `blocks`; 0 for what does not."""
    found = np.zeros(-(-plan.kv_len // BLOCK) + 1, dtype=np.int64)
    found[blocks] = np.arange(len(blocks))
    return found


def _occurrences(places: np.ndarray, count: int) -> np.ndarray:
    """(count, most) Where each number up to `count` stands in `places`, ascending, and then -1; of one column at least."""
    counts = np.bincount(places, minlength=count)
    inside = np.arange(counts.max(initial=1)) < counts[:, None]
    found = np.full(inside.shape, -1)
    found[inside] = np.argsort(places, kind="stable")
    return found
