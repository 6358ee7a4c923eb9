"""The driver of the kernel for Hopper over a cache: long packed queries of sequences whose keys it reads where the cache holds them."""

from __future__ import annotations

import torch

from ..device.devices import architecture_of, multiprocessors
from ..mod.expr import INDEX_BOUND
from ..plan.forward import Cache, ForwardCase, Options, geometry_of, scales, wants_tma
from ..plan.hopper_forward import ROWS, SPILL_LIMIT, HopperPlan, fits, heads_per_group, plan_hopper_forward
from ..registry import INFO, Table
from ..text.mod_text import mod_values
from ..text.parameters import named_strides
from . import forward
from .block_lists import BlockLists
from .decode import Cached
from .forward import keys_of
from .launch import Launch, Unusable
from .masks import owned_starts

LONG = 4  # blocks of queries that sequences must have on average: each begins a tile of its own
BLOCK = 128  # queries and keys of a block of the lists
_plans: dict[tuple, HopperPlan] = Table("prefill plans", 1024)
_launches: dict[tuple, Launch] = Table("prefill calls", 1024)
_refused: dict[tuple, str] = Table("prefill kernels not used", 1024)  # what was compiled and is not used, and why


def serves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float, cached: Cached, offsets: bool, options: Options
) -> ForwardCase | None:
    """What the kernel depends on beside its mods, for a call of `prefill`; None if decode is to serve it. Found from shapes, strides and
    addresses alone."""
    if cached.cu_q is None or cached.invariant or k.dtype != q.dtype or options.backend == "PORTABLE":
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
    numbers = {
        **{"Hq": Hq, "Zkv": k.shape[0], "GROUP_SIZE": Hq // Hkv, "Q_LEN": T, "KV_LEN": room},
        **{"HEADS": Hq, "HEADS_PER_GROUP": heads_per_group(Hq, kv_bytes)},
        **scales(scale, plan.scale_apart),
        **lists.numbers(),
        **named_strides("o", "zhm", outputs[0].stride()),
        **{"RANGES": len(owners), "SEQUENCES": sequences, "MAX_Q": cached.max_q},
        "stride_pages": 0 if cached.pages is None else cached.pages.stride(0),
    }
    found = {
        **{"K": k, "V": v, "Q": q, "O": outputs[0], "LSE": outputs[1]},
        **{**lists.tensors(), "starts": starts, "sequences": owners},
        **{"cu_q": cached.cu_q, "kv_lens": cached.kv_lens, "q_offsets": q_offset, "kv_locs": cached.kv_locs, "pages": cached.pages},
    }
    tensors = {name: t for name, t in found.items() if t is not None}
    mods = mod_values(plan, score and score[1], mask[1])
    call = (plan, *numbers.values())
    launch = _launches.get(call)
    if launch is None:
        launch = _launches[call] = Launch(plan.spec, numbers)
    limit = None if case.options.backend == "HOPPER" else SPILL_LIMIT
    try:
        forward.persistent(launch, tensors, mods, len(owners) * Hq, limit, multiprocessors(q.device))
    except Unusable as why:
        _refused[key] = str(why)
        return False
    return True


def _room(k: torch.Tensor, cached: Cached) -> int:
    """How many keys a sequence can have."""
    return k.shape[2] * (1 if cached.pages is None else cached.pages.shape[1])
