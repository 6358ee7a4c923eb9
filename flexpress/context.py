"""ContextPlan: which rank holds which positions of a sequence that is split over ranks, and who needs whose keys."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.types import Device

from flexpress.assignment import assign, imbalance
from flexpress.checks import whole
from flexpress.mask_creation import create_block_mask
from flexpress.mask_mods import noop_mask
from flexpress.mods import MaskMod

from .codegen.mod.capture import name_of

BLOCK = 128  # positions that stay together


class Layout:
    """What a plan decides, for all ranks; the same on each of them. It needs no process group, so any number of ranks can be looked at.

    q_blocks, kv_blocks   for each rank the numbers of its blocks of BLOCK positions, ascending; one object where Q_LEN is KV_LEN
    needed                bool (ranks, KV blocks): which ones a rank's queries attend to
    imbalance             largest over mean work of a rank, counted in blocks that are visited
    """

    def __init__(self, status: np.ndarray, q_len: int, kv_len: int, ranks: int) -> None:
        """status: int8 (B, H, rows, columns), 0 empty, 1 partial, 2 full."""
        visited = status != 0
        work = visited.sum((0, 1, 3), dtype=np.float64)
        self.q_len, self.kv_len, self.ranks = q_len, kv_len, ranks
        self.q_blocks = assign(work, ranks)
        equal = np.ones(visited.shape[3])
        self.kv_blocks = self.q_blocks if q_len == kv_len else assign(equal, ranks)
        self.imbalance = imbalance(work, _owners(self.q_blocks, len(work)), ranks)
        by_row = visited.any((0, 1))
        self.needed = np.stack([by_row[blocks].any(0) for blocks in self.q_blocks])

    def sent(self, source: int, target: int) -> np.ndarray:
        """The blocks of keys that one rank has and another needs, ascending."""
        blocks = self.kv_blocks[source]
        return blocks[self.needed[target, blocks]]

    @property
    def remote_blocks(self) -> np.ndarray:
        """(ranks,) How many blocks of keys each rank gets from others: as few as its queries need."""
        return np.array([self.needed[rank].sum() - len(self.sent(rank, rank)) for rank in range(self.ranks)])

    def digest(self) -> int:
        """A number that two layouts share only if they are the same."""
        parts = (self.q_len, self.kv_len, self.ranks, *(b.tolist() for b in (*self.q_blocks, *self.kv_blocks)), self.needed.tobytes())
        return digest_of(parts)


def digest_of(value: object) -> int:
    """A number of 7 bytes of what a value shows."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _owners(parts: list[np.ndarray], blocks: int) -> np.ndarray:
    owners = np.zeros(blocks, dtype=np.int64)
    for rank, part in enumerate(parts):
        owners[part] = rank
    return owners


def positions_of(blocks: np.ndarray, length: int) -> np.ndarray:
    """The positions in blocks of BLOCK, in their order; the last block of a sequence ends with it."""
    positions = whole_blocks(blocks)
    return positions[positions < length]


def whole_blocks(blocks: np.ndarray) -> np.ndarray:
    """The same, past the end of the sequence, too."""
    return (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)


class ContextPlan:
    """A sequence split over the ranks of a group, for attention by a mask_mod.

    position_ids       int64 (local length,) on the plan's device: the positions that this rank holds, ascending
    kv_position_ids    the same of keys and values
    layout             of all ranks (see Layout)

    Every rank makes its plan alone, of the same mask; that plans agree is checked once. Positions are dealt out in blocks of 128, so that
    all ranks visit as many blocks of the mask: neighbours stay together as far as that allows.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        q_len: int = 0,
        kv_len: int | None = None,
        mask_mod: MaskMod | None = None,
        *,
        B: int | None = None,
        H: int | None = None,
        device: Device = None,
        head_groups: int = 2,
    ) -> None:
        """group     a process group, a device mesh of one dimension, or None for all ranks
        q_len, kv_len   of the whole sequence; kv_len is q_len by default
        mask_mod     mask_mod(b, h, q_idx, kv_idx) of positions in the whole sequence; None: every position attends to every other
        B, H         extents of the mask, if it is not the same for every batch entry or head
        device       where attention runs; by default as in create_block_mask
        head_groups  keys and values come in so many groups of heads, those of one while another is computed: more of them hide a slower
                     network, and kernels have less to do at once

        Raises ValueError for a plan that is not that of the group's other ranks, naming them.
        """
        self.q_len = whole("q_len", q_len)
        self.kv_len = self.q_len if kv_len is None else whole("kv_len", kv_len)
        self.group = group.get_group() if isinstance(group, dist.device_mesh.DeviceMesh) else group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is no member of the plan's group; make the plan on members only")
        self.mask_mod, self.head_groups = mask_mod or noop_mask, whole("head_groups", head_groups)
        mask = create_block_mask(self.mask_mod, B, H, self.q_len, self.kv_len, device, BLOCK)
        self.status = mask._status()
        self.device = self.status.device
        self.layout = Layout(self.status.cpu().numpy(), self.q_len, self.kv_len, self.ranks)
        mine, keys = self.layout.q_blocks[self.rank], self.layout.kv_blocks[self.rank]
        self.position_ids = self.on_device(positions_of(mine, self.q_len))
        self.kv_position_ids = self.position_ids if keys is mine else self.on_device(positions_of(keys, self.kv_len))
        self.exchange: Any = None  # made by the first call
        self._agreed = False
        self.check_agreement("plan", self.layout.digest())

    def on_device(self, numbers: np.ndarray) -> torch.Tensor:
        """A host array as a tensor on the device where attention runs."""
        return torch.from_numpy(numbers).to(self.device)

    def shard(self, tensor: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """This rank's part of a tensor with q_len (or kv_len) positions in `dim`."""
        return tensor.index_select(dim, self._positions(tensor.shape[dim], dim, (self.q_len, self.kv_len)))

    def _positions(self, length: int, dim: int, lengths: tuple[int, int]) -> torch.Tensor:
        for expected, positions in zip(lengths, (self.position_ids, self.kv_position_ids), strict=True):
            if length == expected:
                return positions
        raise ValueError(f"dimension {dim} has {length} positions, but this plan is for {' or '.join(map(str, dict.fromkeys(lengths)))}")

    def unshard(self, tensor: torch.Tensor, dim: int = -2, length: int | None = None) -> torch.Tensor:
        """The whole tensor of all ranks' parts, on each of them. Differentiable: a rank gets the gradient of its part, summed over ranks.

        length   of the whole; q_len by default
        """
        length = self.q_len if length is None else length
        blocks = self.layout.q_blocks if length == self.q_len else self.layout.kv_blocks
        return _Unshard.apply(tensor, dim, length, blocks, self)

    def check_agreement(self, what: str, digest: int) -> None:
        """ValueError on every rank if one has another number."""
        mine = torch.tensor([digest], dtype=torch.int64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(found, mine, group=self.group)
        numbers = torch.cat(found).tolist()
        usual = max(set(numbers), key=numbers.count)
        if others := [rank for rank, number in enumerate(numbers) if number != usual]:
            raise ValueError(
                f"ranks {', '.join(map(str, others))} of the group have another {what} than the rest; lengths, mask_mod and what it "
                "captures, shapes and dtypes must be the same on all ranks"
            )

    def check_inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Local lengths, and, once, that ranks agree on all other extents."""
        for name, tensor, positions in (
            ("query", query, self.position_ids),
            ("key", key, self.kv_position_ids),
            ("value", value, self.kv_position_ids),
        ):
            if tensor.dim() != 4 or tensor.shape[2] != len(positions):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, but this rank holds {len(positions)} of its positions: pass "
                    f"plan.shard(...) of the whole {name}, (B, H, {len(positions)}, D)"
                )
        if not self._agreed:
            shown = [(t.shape[0], t.shape[1], t.shape[3], str(t.dtype)) for t in (query, key, value)]
            self.check_agreement("query, key or value", digest_of(shown))
            self._agreed = True

    def __repr__(self) -> str:
        return (
            f"ContextPlan({self.q_len} x {self.kv_len}, {name_of(self.mask_mod)}, rank {self.rank} of {self.ranks}: "
            f"{len(self.position_ids)} queries, imbalance {self.layout.imbalance:.3f})"
        )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim, length, blocks, plan):
        positions = [positions_of(mine, length) for mine in blocks]
        ctx.dim, ctx.plan, ctx.positions = dim, plan, plan.on_device(positions[plan.rank])
        counts = [len(part) for part in positions]
        shape = list(tensor.shape)
        shape[dim] = max(counts)  # as gloo gathers tensors of one shape
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        parts = [torch.empty_like(padded) for _ in blocks]
        dist.all_gather(parts, padded, group=plan.group)
        parts = [part.narrow(dim, 0, count) for part, count in zip(parts, counts, strict=True)]
        order = plan.on_device(np.concatenate(positions))
        whole_one = torch.cat(parts, dim)
        return torch.empty_like(whole_one).index_copy_(dim, order, whole_one)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.plan.group)
        return gradient.index_select(ctx.dim, ctx.positions), None, None, None, None
