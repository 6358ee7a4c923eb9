"""Rows of tensors between ranks, and their gradients back: parts that are gathered, and positions that are exchanged for heads."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from flexpress.distributed.parts import Heads


class HeadSplit:
    """Ranks that hold one part of a sequence together, and attend to all of it, each by some of the heads (Ulysses, arXiv 2309.14509).

    Before attention each of them sends the others their heads of its positions, and afterwards gets all heads of its positions back.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def share(self, positions: np.ndarray) -> np.ndarray:
        """The positions of a part that this rank holds, next to each other."""
        return np.array_split(positions, self.ranks)[self.rank]

    def counts(self, length: int) -> list[int]:
        return [length // self.ranks + (rank < length % self.ranks) for rank in range(self.ranks)]

    def heads(self, Hq: int, Hkv: int) -> list[Heads]:
        """Which heads each rank attends by. Ranks share key heads where there are fewer of them. Raises ValueError for heads that cannot be
        split evenly."""
        mine, shared = Hq // self.ranks, Hq // Hkv if Hkv else 1
        if Hq % self.ranks or mine == 0 or (mine % shared and shared % mine):
            raise ValueError(
                f"query has {Hq} heads and key {Hkv}, which {self.ranks} ranks (heads= of the plan) cannot split: each must have as many "
                "query heads, and these be whole groups that share a key head, or even parts of one"
            )
        starts = [rank * mine for rank in range(self.ranks)]
        return [Heads(slice(at, at + mine), slice(at // shared, -(-(at + mine) // shared))) for at in starts]

    def all_to_heads(
        self, tensors: tuple, of_ranks: list[Heads], q_len: int, kv_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value of this rank's positions, as those of its heads. q_len, kv_len: positions of the part."""
        query, key, value = tensors
        q = self.to_heads(query, [heads.q for heads in of_ranks], q_len)
        k_and_v = self.to_heads(torch.cat((key, value), -1), [heads.kv for heads in of_ranks], kv_len)
        return q, *k_and_v.split((key.shape[3], value.shape[3]), -1)

    def to_heads(self, tensor: torch.Tensor, of_ranks: list[slice], length: int) -> torch.Tensor:
        """(B, H, own positions, D), all heads, to (B, heads of this rank, length, D), all positions of the part."""
        rows = torch.stack([tensor[:, heads] for heads in of_ranks])
        count = tensor.shape[2]
        rows = rows.permute(0, 3, 1, 2, 4).flatten(0, 1)
        return _Moved.apply(rows, self.counts(length), [count] * self.ranks, self.group).permute(1, 2, 0, 3)

    def to_positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, heads of this rank, length, D) to (B, H, own positions, D)."""
        counts = self.counts(tensor.shape[2])
        count = counts[self.rank]
        rows = _Moved.apply(tensor.permute(2, 0, 1, 3), [count] * self.ranks, counts, self.group)
        return rows.unflatten(0, (self.ranks, count)).permute(2, 0, 3, 1, 4).flatten(1, 2)


class _Moved(torch.autograd.Function):
    """Rows to other ranks, `sent` to each, and from them."""

    @staticmethod
    def forward(ctx, rows, received, sent, group):
        ctx.received, ctx.sent, ctx.group = received, sent, group
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx, gradient):
        return _Moved.apply(gradient, ctx.sent, ctx.received, ctx.group), None, None, None


class Gathered(torch.autograd.Function):
    """The parts of all ranks of a group along a dimension, `counts` of each, in the order of ranks. A rank gets the gradient of its part,
    summed over ranks."""

    @staticmethod
    def forward(ctx, tensor, dim, counts, group):
        ctx.dim, ctx.counts, ctx.group = dim, counts, group
        shape = list(tensor.shape)
        shape[dim] = max(counts)  # as gloo gathers tensors of one shape
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part.narrow(dim, 0, count) for part, count in zip(parts, counts, strict=True)], dim)

    @staticmethod
    def backward(ctx, gradient):
        return _PartOfSum.apply(gradient, ctx.dim, ctx.counts, ctx.group), None, None, None


class _PartOfSum(torch.autograd.Function):
    """This rank's part of a tensor that is summed over ranks: what Gathered is to the gradient."""

    @staticmethod
    def forward(ctx, tensor, dim, counts, group):
        ctx.dim, ctx.counts, ctx.group = dim, counts, group
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        rank = dist.get_rank(group)
        return summed.narrow(dim, sum(counts[:rank]), counts[rank])

    @staticmethod
    def backward(ctx, gradient):
        return Gathered.apply(gradient, ctx.dim, ctx.counts, ctx.group), None, None, None
