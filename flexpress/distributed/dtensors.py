"""Attention of DTensors: every rank computes the batch entries and heads that it has, and what comes out is distributed as query is.

    query (B, Hq, Q_LEN, D_QK)      sharded over batch (dimension 0) and heads (1) or replicated, on a mesh of any dimensions
    key, value (B or 1, Hkv, ...)   as query is; replicated where they have one batch entry for all. Over ranks that split query's heads
                                    they may be replicated as well, and must be if they have fewer heads than there are ranks
    mods                            are told b and h of the whole batch and of all heads
    captured DTensors               are gathered, so a mod may read any element. Their gradients are summed over ranks. Captured ordinary
                                    tensors are taken as they are, and get the gradient of what this rank computes
    a block mask                    is that of the whole batch and all heads; a rank walks its part of the lists
    dropout                         drops what it drops of the whole, by a seed that is the same on all ranks; without one, the first rank's

Where a rank's part begins are numbers that its mods capture, so all ranks have the same kernels. Nothing is communicated but captured
DTensors that are not replicated, and a seed of dropout that was drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flexpress.calls.call import bound
from flexpress.calls.probabilities import attend_and_look
from flexpress.distributed.parts import Part, mask_of_part, score_of_part
from flexpress.inputs import checks
from flexpress.inputs.dropout import Dropout, of_first_rank, of_part
from flexpress.inputs.sinks import check_sinks
from flexpress.masks.block_lists import capturing, leave_out_entries
from flexpress.masks.block_mask import BlockMask
from flexpress.masks.foreign_masks import adopt, is_foreign_mask

from ..codegen.mod.captured.tensors import is_distributed
from ..codegen.mod.tracing.bind import graph_of
from ..codegen.run.call import Bound
from ..codegen.run.statistics import Wanted


class Shards:
    """The part of a call that this rank computes.

    local          its query, key and value
    batch, heads   which of query's batch entries and heads they are
    """

    def __init__(
        self,
        named: dict[str, torch.Tensor],
        batch_dim: int | None,
        heads_dim: int,
        of_sequence: Callable | None = None,
        sums_gradients: bool = False,
    ) -> None:
        """`named`: query, key and value. Raises TypeError, ValueError or NotImplementedError. Packed sequences have no batch_dim.

        of_sequence      from a mesh to those of its dimensions over which the sequence is sharded; none by default
        sums_gradients   over these, gradients of captured tensors are sums already
        """
        self._name, self._query = next(iter(named.items()))
        self._dims = batch_dim, heads_dim
        self._length_dim = 0 if batch_dim is None else heads_dim + 1
        self.mesh = self._query.device_mesh
        self._of_sequence = of_sequence(self.mesh) if of_sequence else ()
        self._summed_over = self._of_sequence if sums_gradients else ()
        for name, tensor in named.items():
            self._check_placements(name, tensor)
        self.placements = self._query.placements
        if self.mesh.get_coordinate() is None:
            raise ValueError(f"{self._name} is distributed over {self.mesh}, but this rank is not a member of it; call it on members only")
        for name, tensor in named.items():
            self._check_like_query(name, tensor)
            self._check_heads(name, tensor)
        self.batch, self.heads = (Part(None, 1) if dim is None else _part(self._query, dim) for dim in self._dims)
        self._has_all = self.batch.first is self.heads.first is None
        self.local = tuple(self._local(name, tensor) for name, tensor in named.items())

    def _check_placements(self, name: str, tensor) -> None:
        """A DTensor on query's mesh, which is replicated or split where attention may be."""
        if not is_distributed(tensor):
            raise TypeError(
                f"{self._name} is a DTensor but {name} is a {type(tensor).__name__}; make all of them DTensors (distribute_tensor, "
                "DTensor.from_local), or none (.to_local())"
            )
        if tensor.device_mesh != self.mesh:
            raise ValueError(f"{name} is distributed over {tensor.device_mesh}, but {self._name} over {self.mesh}; use one mesh")
        if tensor.dim() != (4 if self._dims[0] is not None else 3):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected are 3 dimensions if packed, else 4")
        for i, placement in enumerate(tensor.placements):
            if i in self._of_sequence:
                served = _splits(placement, self._length_dim)
            else:
                served = type(placement) is Replicate or any(_splits(placement, dim) for dim in self._dims)
            if not served:
                raise self._refusal(name, tensor.placements, i)

    def _refusal(self, name: str, placements: tuple, at: int) -> Exception:
        """Why placements[at] is not supported."""
        (batch, heads), length = self._dims, Shard(self._length_dim)
        over = repr((self.mesh.mesh_dim_names or range(self.mesh.ndim))[at])
        needed = length if at in self._of_sequence else Shard(heads)
        instead = [needed if i == at else p for i, p in enumerate(placements)]
        shown = f"{name} has placements {list(placements)}"
        remedy = f"redistribute it, for example {name}.redistribute(placements={instead})"
        if placements[at].is_partial():
            return ValueError(f"{shown}: sums that are still to be added up over ranks; {remedy}")
        if at in self._of_sequence:
            return ValueError(f"{shown}, but over mesh dimension {over} the context plan splits the sequence: {length}; {remedy}")
        if placements[at] == length:
            return NotImplementedError(
                f"{shown}: over mesh dimension {over} the sequence is sharded. Attention of that takes a plan, "
                f"context=ContextPlan(mesh[{over}], q_len=..., mask_mod=...) from flexpress.distributed, and rows in its order; "
                f"or {remedy}"
            )
        others = "" if batch is None else f" and batch ({batch})"
        return NotImplementedError(f"{shown}, and {placements[at]} is not supported: only heads ({heads}){others} may be sharded; {remedy}")

    def _check_like_query(self, name: str, tensor: torch.Tensor) -> None:
        """Key and value are sharded as query is, but where a rank needs other entries than its share of them."""
        batch, heads = self._dims
        alone = batch is not None and tensor.shape[batch] == 1
        for mine, theirs in zip(self.placements, tensor.placements, strict=True):
            if mine != theirs and not (theirs.is_replicate() and (_splits(mine, heads) or alone and _splits(mine, batch))):
                raise ValueError(
                    f"{name} has placements {list(tensor.placements)}, but {self._name} {list(self.placements)}; they must be alike: "
                    f"{name}.redistribute(placements={self._name}.placements)"
                )
        if batch is None or tensor.shape[batch] == self._query.shape[batch]:
            return
        if not alone or any(_splits(p, batch) for p in tensor.placements):
            raise ValueError(
                f"{name} must have the batch size of {self._name}, or 1 and be replicated, got {self._name} {tuple(self._query.shape)} "
                f"and {name} {tuple(tensor.shape)} with placements {list(tensor.placements)}"
            )

    def _check_heads(self, name: str, tensor: torch.Tensor) -> None:
        """Every rank has the heads of keys and values that its heads of query attend to: a condition that all ranks see alike."""
        heads = self._dims[1]
        over = [i for i, placement in enumerate(self.placements) if _splits(placement, heads)]
        kept = {_splits(tensor.placements[i], heads) for i in over}
        Hq, Hkv, ranks = self._query.shape[heads], tensor.shape[heads], _product(self.mesh.size(i) for i in over)
        if Hkv == 0 or Hq % Hkv or not over:
            return  # refused with the local tensors, or one head for each rank
        group, mine = Hq // Hkv, Hq // ranks
        if kept == {True}:
            fits = group == 1 or Hkv % ranks == 0
        else:
            fits = kept == {False} and Hq % ranks == 0 and (mine % group == 0 or group % mine == 0)
        if not fits:
            raise ValueError(
                f"{self._name} has {Hq} heads and {name} {Hkv} on {ranks} ranks, with placements {list(self.placements)} and "
                f"{list(tensor.placements)}: heads must be split evenly, so that ranks have whole groups of query heads, or, with "
                f"{name} replicated, even parts of a group"
            )

    def _local(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part; what ranks share gets the sum of their gradients."""
        if tensor.placements == self.placements:
            local = tensor.to_local()
        else:  # a step that redistributes nothing, but in the backward pass, to the tensor's placements
            pairs = zip(self.placements, tensor.placements, strict=True)
            partial = [theirs if theirs == mine else Partial() for mine, theirs in pairs]
            local = _Summed.apply(tensor.redistribute(placements=tensor.placements).to_local(grad_placements=partial))
        for dim in self._dims:
            if dim is not None and local.shape[dim] != _part(tensor, dim).count:
                raise ValueError(
                    f"{name} {tuple(tensor.shape)} with placements {list(tensor.placements)} is {tuple(local.shape)} on this rank, not "
                    "what distribute_tensor makes of it; redistribute it"
                )
        batch, heads = self._dims
        if self.heads.first is not None and not any(_splits(p, heads) for p in tensor.placements):
            group = self._query.shape[heads] // tensor.shape[heads]
            return local.narrow(heads, self.heads.first // group, -(-self.heads.count // group))
        return local

    def score_mod(self, mod: Callable | None) -> Callable | None:
        """A score_mod that is told this rank's b and h, of one that is told those of all."""
        return score_of_part(mod, self.batch, self.heads, self._query.device)

    def mask_mod(self, mod: Callable | None) -> Callable | None:
        """A mask_mod that is told this rank's b and h, of one that is told those of all."""
        return mask_of_part(mod, self.batch, self.heads, self._query.device)

    def block_mask(self, mask):
        """The BlockMask of this rank's part; what is none is left to be refused."""
        if not isinstance(mask, BlockMask) and is_foreign_mask(mask):
            mask = adopt(mask, (self._query.shape[2], self.local[1].shape[2]))
        if not isinstance(mask, BlockMask) or self._has_all:
            return mask
        chosen, whole = [], mask.as_lists()
        for name, part, dim, size in zip("BH", (self.batch, self.heads), self._dims, whole.kv_indices.shape[:2], strict=True):
            extent = self._query.shape[dim]
            if size not in (1, extent):
                raise ValueError(
                    f"block_mask of shape {tuple(mask.shape)} does not broadcast to {self._name} {tuple(self._query.shape)}: its {name} is "
                    f"{size}, which must be 1 or {extent}, also where {self._name} is sharded"
                )
            chosen.append(slice(None) if part.first is None or size == 1 else slice(part.first, part.first + part.count))
        found = mask._parts.get((self.batch, self.heads))
        if found is None or found[0] is not mask.mask_mod or found[2] is not whole:
            lists, mod = mask[tuple(chosen)]._lists, self.mask_mod(mask.mask_mod)
            found = mask.mask_mod, BlockMask._made(mask.seq_lengths, lists, mod, agrees=mask._decided, cuts=False, fixed=mask._fixed), whole
            if not capturing(lists):
                lists.kept()
                mask._parts[self.batch, self.heads] = found
        found[1]._lists.ready()
        return found[1]

    def leaves_out_entries(self, mask) -> bool:
        """Are a block mask's lists those of the first batch entry or head alone, which this rank may not have?"""
        if self._has_all or not isinstance(mask, BlockMask) or not mask._decided:
            return False
        return leave_out_entries(mask.as_lists(), graph_of(mask.mask_mod, "mask", self._query.device).symbols, tuple(self._query.shape[:2]))

    def gather(self, bound: tuple, where: str) -> None:
        """Gather the DTensors that a bound mod captures, in place."""
        graph, values = bound
        for i, capture in enumerate(graph.tensors):
            tensor = values[i]
            if is_distributed(tensor):
                self._check_mesh(tensor, f"{where} {graph.name} captures {capture.name}, a DTensor", capture.name)
                values[i] = self._gathered(tensor)

    def scale(self, scale):
        """A scale that may be a tensor, gathered if it is a DTensor."""
        if not is_distributed(scale):
            return scale
        self._check_mesh(scale, "scale is a DTensor", "scale")
        return self._gathered(scale)

    def sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's part of the sinks of all heads."""
        if sinks is None:
            return None
        self.check_sinks(sinks)
        if is_distributed(sinks):
            sinks = self._gathered(sinks)
        return sinks if self.heads.first is None else sinks.narrow(0, self.heads.first, self.heads.count)

    def dropout(self, dropout: Dropout | None) -> Dropout | None:
        """Dropout that drops what it drops of the whole: the seed with the first batch entry and head of this part."""
        if dropout is None:
            return None
        dropout = of_first_rank(dropout, self.groups)
        return dropout if self._has_all else of_part(dropout, self.batch.first or 0, self.heads.first or 0)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Of the mesh's dimensions."""
        return [self.mesh.get_group(dim) for dim in range(self.mesh.ndim)]

    def check_sinks(self, sinks) -> None:
        """Raises for what are no sinks of all heads."""
        check_sinks(sinks, self._query.shape[self._dims[1]], self._query.device)
        if is_distributed(sinks):
            self._check_mesh(sinks, "sinks are a DTensor", "sinks")

    def _check_mesh(self, tensor, what: str, name: str) -> None:
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"{what} on {tensor.device_mesh}, but {self._name} is on {self.mesh}; distribute it over that, or take "
                f"{name}.full_tensor(), which gets the gradient of this rank alone"
            )

    def _gathered(self, tensor) -> torch.Tensor:
        """All of a DTensor on the call's mesh, whose gradient is added up over ranks."""
        summed = [p.is_replicate() or i in self._summed_over for i, p in enumerate(self.placements)]
        of_parts = [Replicate() if there else Partial() for there in summed]
        return _Summed.apply(tensor.full_tensor(grad_placements=of_parts))

    def joined(self, *outputs: torch.Tensor | None) -> tuple:
        """Outputs, whose first dimensions are query's, as DTensors."""
        return tuple(t if t is None else self._joined(t) for t in outputs)

    def _joined(self, local: torch.Tensor) -> torch.Tensor:
        shape = list(local.shape)
        for dim in (*self._dims, *([self._length_dim] if self._of_sequence else ())):
            if dim is not None:
                shape[dim] = self._query.shape[dim]
        stride, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):  # in the order of dimensions in memory
            stride[dim], step = step, step * max(shape[dim], 1)
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


class _Summed(torch.autograd.Function):
    """A tensor whose gradient is added up over ranks: where a rank has none, autograd hands over zeros. Else others would wait for it."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def bound_shard(
    query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod, sinks=None, dropout=None
) -> tuple[Shards, Bound]:
    """`bound` for this rank's part of flex_attention's arguments, query a DTensor."""
    part = Shards({"query": query, "key": key, "value": value}, 0, 1)
    checks.check_heads(query, key, enable_gqa)  # a rank may have one head of each
    mask, own_mask_mod = part.block_mask(block_mask), part.mask_mod(mask_mod)
    if part.leaves_out_entries(block_mask):
        checks.check_mask_fits(mask.as_lists(), mask.seq_lengths, *part.local[:2], mask.shape)
        mask, own_mask_mod = None, mask.mask_mod  # which makes lists of its own
    mods = part.score_mod(score_mod), mask, part.scale(scale), enable_gqa, kernel_options, own_mask_mod
    return part, bound(*part.local, *mods, gather=part.gather, sinks=part.sinks(sinks), dropout=part.dropout(dropout))


def attend_shards(*arguments, output_max: bool, wanted: Wanted, deterministic: bool, sinks, dropout: Dropout | None) -> tuple:
    """out, lse, max_scores and Statistics, as one tuple of DTensors, with None for what is not wanted."""
    part, call = bound_shard(*arguments, sinks, dropout)
    return part.joined(*attend_and_look(call, output_max, wanted, deterministic))


def _part(tensor: torch.Tensor, dim: int) -> Part:
    """Of a DTensor: as torch.chunk splits, over one dimension of the mesh after the other."""
    mesh, first, count, split = tensor.device_mesh, 0, tensor.shape[dim], False
    coordinate = mesh.get_coordinate()
    for i, placement in enumerate(tensor.placements):
        if _splits(placement, dim):
            size = -(-count // mesh.size(i))
            start = min(size * coordinate[i], count)
            first, count, split = first + start, min(size, count - start), True
    return Part(first if split else None, count)


def _splits(placement, dim: int | None) -> bool:
    return type(placement) is Shard and placement.dim == dim


def _product(numbers) -> int:
    found = 1
    for number in numbers:
        found *= number
    return found
