"""DTensors in a context plan: sharded over the sequence by the plan's ranks, over batch and heads by others.

    query (B, Hq, Q_LEN, D_QK), key and value   Shard(2) over the mesh dimension of the plan's ranks, its rows in the plan's order, as
                                                `distribute_tensor(x[:, :, plan.order], mesh, placements)` makes them of a whole one where
                                                128 * ranks divides Q_LEN, and `DTensor.from_local` of plan.shard(x, 2) in any case
    over other mesh dimensions                  as without a plan (see dtensors.py)

Where the mesh has no dimension of the plan's ranks (q, k and v of tensor parallel projections), local tensors are this rank's parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from flexpress.distributed.attention import ALL, Arguments, Share, attend_in_context, attend_packed_in_context
from flexpress.distributed.dtensors import Shards
from flexpress.distributed.plan import ContextPlan
from flexpress.inputs.checks import check_heads

from ..codegen.mod.captured.tensors import is_distributed


def attend_shards_in_context(plan: ContextPlan, named: dict[str, torch.Tensor], score_mod, arguments: Arguments) -> tuple:
    """out, lse and max_scores, if asked for, DTensors as query is."""
    part = Shards(named, 0, 1, functools.partial(_dims_of, plan, named, 2), plan.sum_gradients)
    check_heads(*list(named.values())[:2], arguments.enable_gqa)  # a rank may have one head of each
    arguments, gather_sinks = _sinks_of(part, arguments)
    share = Share(part.batch, part.heads, part.gather, gather_sinks, part.groups)
    return part.joined(*attend_in_context(plan, part.local, score_mod, arguments, share))


def attend_packed_shards_in_context(plan: ContextPlan, named: dict[str, torch.Tensor], score_mod, arguments: Arguments) -> tuple:
    """out, lse and max_scores, if asked for, of packed sequences (total, H, D), DTensors as query is."""
    part = Shards(named, None, 1, functools.partial(_dims_of, plan, named, 0), plan.sum_gradients)
    arguments, gather_sinks = _sinks_of(part, arguments)
    share = Share(ALL, part.heads, part.gather, gather_sinks, part.groups)
    return part.joined(*attend_packed_in_context(plan, part.local, score_mod, arguments, share))


def _sinks_of(part: Shards, arguments: Arguments) -> tuple[Arguments, Callable | None]:
    """Arguments with the whole scale and this rank's sinks, or all of them, checked, and what gathers these: not before ranks have
    agreed."""
    arguments = arguments._replace(scale=part.scale(arguments.scale))
    if is_distributed(arguments.sinks):
        part.check_sinks(arguments.sinks)
        return arguments, part.sinks
    return arguments._replace(sinks=part.sinks(arguments.sinks)), None


def _dims_of(plan: ContextPlan, named: dict[str, torch.Tensor], sequence: int, mesh: dist.device_mesh.DeviceMesh) -> tuple[int, ...]:
    """The dimensions of a mesh whose ranks, along it, are those of the plan's groups; none if there are none. Of several with one rank that
    which has the group's name, or over which query is sharded by `sequence`, its dimension of positions."""
    coordinate, names = mesh.get_coordinate() or [], mesh.mesh_dim_names or [None] * mesh.ndim
    along = [[slice(None) if i == dim else at for i, at in enumerate(coordinate)] for dim in range(len(coordinate))]
    ranks = [mesh.mesh[tuple(place)].tolist() for place in along]
    placements = getattr(next(iter(named.values())), "placements", ())
    apart = {dim for dim, placement in enumerate(placements) if placement.is_shard(sequence)}
    dims: list[int] = []
    for group, name in zip(plan.groups, plan.mesh_dim_names, strict=False):
        alike = [dim for dim, found in enumerate(ranks) if found == dist.get_process_group_ranks(group) and dim not in dims]
        dims += sorted(alike, key=lambda dim: (names[dim] != name, dim not in apart))[:1]
    if dims != sorted(dims):
        raise ValueError(f"{mesh} has the ranks that split heads before those that split the sequence; make a mesh of the other order")
    return tuple(dims)
