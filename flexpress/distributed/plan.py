"""ContextPlan: a sequence that is split over ranks, by positions and by a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.types import Device

from flexpress.calls.packing import Packing, packing_of
from flexpress.distributed.agreement import Agreement, digest_of, numbers_of
from flexpress.distributed.heads import Gathered, HeadSplit
from flexpress.distributed.layout import BLOCK, Layout, positions_of
from flexpress.distributed.parts import Part, mask_of_part
from flexpress.inputs.checks import check_are_tensors, check_dim, extent, whole
from flexpress.inputs.packed_checks import check_cu_seqlens, check_same_sequences
from flexpress.inputs.plain_arguments import flag, resolve_device
from flexpress.masks.mask_creation import create_block_mask
from flexpress.masks.mask_mods import noop_mask
from flexpress.mods import MaskMod

from ..codegen.mod.graphs.graph_text import text_of
from ..codegen.mod.tracing.bind import bind
from ..codegen.mod.tracing.capture import name_of


class ContextPlan:
    """A sequence split over the ranks of a group, for attention by a mask_mod.

    position_ids       int64 (local length,) on the plan's device: the positions that this rank holds, ascending
    kv_position_ids    int64 (local kv length,), also there: the positions of keys and values that this rank holds, ascending
    layout             of all ranks (see Layout)

    Every rank makes its plan alone, of the same mask, and waits for nobody; that plans agree is checked when one is first used.
    Positions are dealt out in blocks of 128, so that all ranks visit as many blocks of the mask: neighbours stay together as far as that
    allows.
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
        heads: dist.ProcessGroup | dist.DeviceMesh | None = None,
        device: Device = None,
        head_groups: int = 1,
        sum_gradients: bool = True,
    ) -> None:
        """group     a process group, a device mesh of one dimension (`mesh["context"]` of a larger one), or None for all ranks
        q_len, kv_len   of the whole sequence; kv_len is q_len by default
        mask_mod     mask_mod(b, h, q_idx, kv_idx) of positions in the whole sequence; None: every position attends to every other
        B, H         extents of the mask, if it is not the same for every batch entry or head
        heads        a second dimension of the mesh: its ranks hold a part of the sequence together, and attend to all of it by some of the
                     heads each
        device       where attention runs; by default as in create_block_mask
        head_groups  keys and values come in so many groups of heads, those of one while another is computed. That hides a slow network;
                     a fast one (NVLink) takes less time than what more kernels of less work each lose
        sum_gradients   gradients of what score_mod captures, of a learned scale and of sinks are summed over ranks. False: each rank gets
                     what its own queries give, as for any parameter; for FSDP and DDP, which add these up, and for tensors that `unshard`
                     made
        """
        self.q_len = extent("q_len", q_len)
        self.kv_len = self.q_len if kv_len is None else extent("kv_len", kv_len)
        self.group = _group_of("group", group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is no member of the plan's group; make the plan on members only")
        self.mask_mod = noop_mask if mask_mod is None else mask_mod
        self.sum_gradients = flag("sum_gradients", sum_gradients)
        mask = create_block_mask(self.mask_mod, B, H, self.q_len, self.kv_len, device, BLOCK)
        self.status = mask._status()
        self.device = self.status.device
        self.layout = Layout(self.status.cpu().numpy(), self.q_len, self.kv_len, self.ranks)
        self.head_groups = whole("head_groups", head_groups)
        self.head_split = None if heads is None else HeadSplit(_group_of("heads", heads))
        mine, keys = self.layout.q_blocks[self.rank], self.layout.kv_blocks[self.rank]
        self._held = self._positions_held(positions_of(mine, self.q_len))
        self._kv_held = self._held if keys is mine else self._positions_held(positions_of(keys, self.kv_len))
        self.position_ids, self.kv_position_ids = self._held[0], self._kv_held[0]
        self.packing: Packing | None = None  # of packed sequences
        self.exchange: Any = None  # made by the first call
        self.passed: dict[tuple, Any] = {}  # Inputs of the latest calls that were checked, by their kinds
        self._parts: dict[tuple[Part, Part], ContextPlan] = {}
        self.groups = [self.group, *([self.head_split.group] if self.head_split else [])]
        self.mesh_dim_names = [_name_of_dim(mesh) for mesh in (group, heads)]
        self.agreement = Agreement(self.groups, self.device)

    def _positions_held(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a part of the sequence: what this rank holds, and what its kernels attend by."""
        whole_part = self.on_device(positions)
        return (self.on_device(self.head_split.share(positions)) if self.head_split else whole_part), whole_part

    @classmethod
    def packed(
        cls,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor | None = None,
        mask_mod: MaskMod | None = None,
        *,
        group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        H: int | None = None,
        heads: dist.ProcessGroup | dist.DeviceMesh | None = None,
        device: Device = None,
        head_groups: int = 1,
        sum_gradients: bool = True,
    ) -> ContextPlan:
        """The plan of packed sequences, for varlen_attention(q, k, v, score_mod=..., context=plan).

        cu_seqlens_q, cu_seqlens_k, mask_mod   of all sequences, as for varlen_attention; the others as for ContextPlan

        position_ids are those of tokens among all tokens; positions_in_sequence are what rotary embeddings want. Sequences may have any
        lengths, and are cut where work is equal.
        """
        device = resolve_device(device)
        starts_q, total_q = _own_starts("cu_seqlens_q", cu_seqlens_q, device)
        starts_k, total_k = None, total_q
        if cu_seqlens_k is not None:
            starts_k, total_k = _own_starts("cu_seqlens_k", cu_seqlens_k, device)
            check_same_sequences(starts_q, starts_k)
        packing = packing_of(starts_q, starts_k, total_q, total_k)
        plan = cls(
            group,
            total_q,
            total_k,
            packing.mask_mod(mask_mod),
            H=H,
            heads=heads,
            device=device,
            head_groups=head_groups,
            sum_gradients=sum_gradients,
        )
        plan.packing = packing
        return plan

    @property
    def positions_in_sequence(self) -> torch.Tensor:
        """int64 (local length,): of packed sequences the position of each token that this rank holds in its own sequence."""
        if self.packing is None:
            raise ValueError(
                "this plan is of one sequence, whose positions are position_ids; ContextPlan.packed makes plans of packed ones"
            )
        return self.packing.local_q[self.position_ids].long()

    @property
    def order(self) -> torch.Tensor:
        """int64 (q_len,): the positions as ranks hold them, those of the first rank first. `x[:, plan.order]` is how a DTensor of the whole
        lies that is sharded over the sequence."""
        return self.on_device(np.concatenate([positions_of(blocks, self.q_len) for blocks in self.layout.q_blocks]))

    @property
    def kv_order(self) -> torch.Tensor:
        """int64 (kv_len,): the positions of keys and values as ranks hold them, those of the first rank first."""
        return self.on_device(np.concatenate([positions_of(blocks, self.kv_len) for blocks in self.layout.kv_blocks]))

    def on_device(self, numbers: np.ndarray) -> torch.Tensor:
        """A numpy array as a tensor on the plan's device, where attention runs; its dtype stays."""
        return torch.from_numpy(numbers).to(self.device)

    def shard(self, tensor: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """This rank's part of a tensor with q_len (or kv_len) positions in `dim`. ValueError for another number."""
        check_dim(tensor, dim)
        return tensor.index_select(dim, self._positions(tensor.shape[dim], (self.q_len, self.kv_len), f"dimension {dim} has"))

    def _positions(self, length: int, lengths: tuple[int, int], said: str) -> torch.Tensor:
        for expected, positions in zip(lengths, (self.position_ids, self.kv_position_ids), strict=True):
            if length == expected:
                return positions
        raise ValueError(f"{said} {length} positions, but this plan is for {' or '.join(map(str, dict.fromkeys(lengths)))}")

    def unshard(self, tensor: torch.Tensor, dim: int = -2, length: int | None = None) -> torch.Tensor:
        """The whole tensor of all ranks' parts, on each of them. Differentiable: a rank gets the gradient of its part, summed over ranks.

        dim      which dimension is the sequence; by default the last but one
        length   of the whole; q_len by default. kv_len is for parts of keys and values

        Raises ValueError for another length than the plan's, and for a tensor of other positions than this rank holds.
        """
        with self.agreement.telling_failures():
            length = self.q_len if length is None else whole("length", length)
            check_dim(tensor, dim)
            held = len(self._positions(length, (self.q_len, self.kv_len), "length of the whole is"))
            if tensor.shape[dim] != held:
                raise ValueError(
                    f"dimension {dim} of tensor {tuple(tensor.shape)} has {tensor.shape[dim]} positions, but this rank holds {held} of "
                    f"{length}: pass its part, as plan.shard makes it of the whole"
                )
        self.agreement.check("plan", self.facts)
        parts = [positions_of(blocks, length) for blocks in (self.layout.q_blocks if length == self.q_len else self.layout.kv_blocks)]
        if self.head_split:
            tensor = Gathered.apply(tensor, dim, self.head_split.counts(len(parts[self.rank])), self.head_split.group)
        gathered = Gathered.apply(tensor, dim, [len(part) for part in parts], self.group)
        return gathered.index_select(dim, self.on_device(np.concatenate(parts).argsort()))

    def facts(self) -> dict[str, object]:
        """What must be the same on all ranks, by what it is called in errors."""
        graph, _ = mask = bind(self.mask_mod, "mask", self.device)
        return {
            "q_len, kv_len": (self.q_len, self.kv_len),
            "head_groups": self.head_groups,
            "sum_gradients": self.sum_gradients,
            "mask_mod": f"{graph.name} ({digest_of(text_of(graph)):x})",
            **numbers_of(mask, "mask_mod"),
            "layout of blocks": f"{self.layout.digest():x}",
            "number of ranks that split heads": self.head_split and self.head_split.ranks,
        }

    def check_lengths(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """ValueError for tensors of other lengths than this rank holds."""
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

    def of_part(self, batch: Part, heads: Part) -> ContextPlan:
        """The plan as kernels for some batch entries and heads of the mask need it: of all positions that they attend by."""
        if batch.first is heads.first is None:
            return self
        if (batch, heads) not in self._parts:
            part = self._parts[batch, heads] = object.__new__(ContextPlan)
            vars(part).update(vars(self))
            part.mask_mod, part.exchange = mask_of_part(self.mask_mod, batch, heads, self.device) or noop_mask, None
            part.position_ids, part.kv_position_ids = self._held[1], self._kv_held[1]
            for dim, (first, count) in enumerate((batch, heads)):
                if first is not None and part.status.shape[dim] > 1:
                    part.status = part.status.narrow(dim, first, count)
        return self._parts[batch, heads]

    def __copy__(self) -> ContextPlan:
        return self

    def __deepcopy__(self, memo: dict) -> ContextPlan:
        """Itself, as a module's copy attends over the same ranks, which have agreed on this plan."""
        return self

    def __reduce_ex__(self, protocol):
        raise TypeError("a ContextPlan is of one rank, so it is not pickled: make it anew on each rank, and keep what it is made of")

    def __repr__(self) -> str:
        return (
            f"ContextPlan({self.q_len} x {self.kv_len}, {name_of(self.mask_mod)}, rank {self.rank} of {self.ranks}: "
            f"{len(self.position_ids)} queries, imbalance {self.layout.imbalance:.3f})"
        )


def check_plan(plan) -> None:
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"context must be a ContextPlan (from flexpress.distributed), got {type(plan).__name__}")


def _own_starts(name: str, cu_seqlens, device: torch.device) -> tuple[torch.Tensor, int]:
    """A copy, as the user's may be written to while the plan lives, and how many tokens packed sequences have. Raises as varlen_attention
    does, on any device."""
    check_are_tensors(**{name: cu_seqlens})
    ends = cu_seqlens.cpu()
    total = max(int(ends[-1]), 0) if ends.numel() and ends.ndim == 1 and ends.dtype in (torch.int32, torch.int64) else 0
    check_cu_seqlens(name, ends, "the sequences", ends.new_empty(total))
    return cu_seqlens.to(device, copy=True), total


def _name_of_dim(mesh) -> str | None:
    """What a mesh calls its one dimension; None for what is no mesh."""
    names = mesh.mesh_dim_names if isinstance(mesh, dist.device_mesh.DeviceMesh) else None
    return names[0] if names else None


def _group_of(name: str, group) -> dist.ProcessGroup | None:
    """The process group of a mesh of one dimension, or what is none."""
    if not isinstance(group, dist.device_mesh.DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(f"{name} is {group}; pass one of its dimensions, such as mesh[{(group.mesh_dim_names or ('context',))[0]!r}]")
    return group.get_group()
