"""The driver of the kernel for Hopper over a cache: long packed queries of sequences whose keys it reads where the cache holds them."""

from __future__ import annotations

import torch

from ..device.devices import architecture_of, multiprocessors
from ..mod.expr import INDEX_BOUND
from ..plan.forward import LOG2_E, Cache, ForwardCase, Options, geometry_of, wants_tma
from ..plan.hopper_forward import ROWS, HopperPlan, fits, heads_per_group, plan_hopper_forward
from ..registry import INFO, Table
from ..text.spec import mod_values
from . import forward
from .decode import Cached
from .forward import BlockLists, Unusable, keys_of
from .masks import owned_starts

LONG = 4  # blocks of queries that sequences must have on average: each begins a tile of its own
BLOCK = 128  # queries and keys of a block of the lists
_plans: dict[tuple, HopperPlan] = Table("prefill plans", 1024)
_refused: dict[tuple, str] = Table("prefill kernels not used", 1024)  # what was compiled and is not used, and why


def serves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float, cached: Cached, offsets: bool, options: Options
) -> ForwardCase | None:
    """What the kernel depends on beside its mods, for a call of `prefill`; None if decode is to serve it. Found from shapes, strides and
    addresses alone."""
    if cached.cu_q is None or cached.invariant or k.dtype != q.dtype or options.backend == "TRITON":
        return None
    arch, tokens, sequences = architecture_of(q.device), q.shape[2], cached.cu_q.shape[0] - 1
    if arch != "sm_90" or tokens < LONG * BLOCK * sequences:
        return None
    if options.backend is None and forward.worthwhile(tokens, q.shape[1], multiprocessors(q.device)):
        return None
    geometry = geometry_of(q.element_size(), (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), out.stride())
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    cache = Cache(0 if cached.pages is None else k.shape[2], cached.kv_locs is not None, offsets)
    case = ForwardCase(
        q.dtype,
        q.shape[3],
        v.shape[3],
        geometry.units,
        geometry.aligned,
        wants_tma(options, q.dtype, arch),
        options=options,
        scale_is_positive=scale > 0,
        exact_indices=max(tokens, _room(k, cached)) <= INDEX_BOUND,
        cache=cache,
    )
    return case if fits(case, geometry, arch, aligned) is None else None


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    scale: float,
    score: tuple | None,
    mask: tuple,
    lists: BlockLists,
    cached: Cached,
    q_offset: torch.Tensor | None,
    case: ForwardCase,
) -> bool:
    """Fill outputs, out (1, Hq, T, D_V) and lse float32 (T, Hq), from q (1, Hq, T, D_QK) and a cache. False if the kernel is not for use.

    score, mask   bound mods on positions in a sequence; a key past the sequence's end is hidden in any case
    lists         of every sequence's own blocks of queries and keys, in which full blocks have no such key
    q_offset      int32 [Z], the position of each sequence's first query, or None: its queries are its last positions
    case          what `serves` has found
    """
    Hq, T, D_QK = q.shape[1:]
    Hkv, room = k.shape[1], _room(k, cached)
    sequences = cached.cu_q.shape[0] - 1
    keys = keys_of(score, mask, (sequences, Hq, room, room))
    case = case._replace(blocks=lists.blocks._replace(starts=True))
    key = (case, *keys)
    if key in _refused:
        return False
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = plan_hopper_forward(case, *keys)
    else:
        INFO.hits += 1
    starts, owners = owned_starts(cached.cu_q, T, 2 * ROWS)
    kv_bytes = room * (D_QK + v.shape[3]) * q.element_size() * Hkv // Hq
    numbers = [
        Hq,
        k.shape[0],
        Hq // Hkv,
        T,
        room,
        Hq,
        heads_per_group(Hq, kv_bytes),
        *((scale, LOG2_E) if plan.scale_apart else (scale * LOG2_E,)),
        *lists.numbers,
        len(owners),
        *outputs[0].stride()[:3],
        sequences,
        cached.max_q,
        *(() if cached.pages is None else (cached.pages.stride(0),)),
    ]
    places = [t for t in (cached.cu_q, cached.kv_lens, q_offset, cached.kv_locs, cached.pages) if t is not None]
    mods = mod_values(plan, score and score[1], mask[1])
    try:
        forward.launch(
            plan,
            (k, v, q, outputs[0]),
            outputs[1:],
            (*numbers, *lists.tables, starts, owners, *places, *mods),
            lambda _: len(owners),
            forced=case.options.backend == "GLUON",
        )
    except Unusable as why:
        _refused[key] = str(why)
        return False
    return True


def _room(k: torch.Tensor, cached: Cached) -> int:
    """How many keys a sequence can have."""
    return k.shape[2] * (1 if cached.pages is None else cached.pages.shape[1])
