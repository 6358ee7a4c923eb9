"""The kernel for Hopper over a cache: long packed queries of sequences whose keys it reads where the cache holds them."""

from __future__ import annotations

from ..device.devices import architecture_of, multiprocessors
from ..plan.forward import scales
from ..plan.hopper_forward import ROWS, SPILL_LIMIT, HopperPlan, enough_heads, fits, heads_per_group
from ..plan.tiles import BLOCK
from ..registry import Table
from ..text.mod_text import mod_values
from ..text.parameters import named_strides
from . import forward_kernels
from .block_lists import BlockLists
from .cached_call import CachedCall
from .launch import Launch, launch_nothing
from .status_lists import owned_starts

LEAST = 4 * BLOCK  # queries that sequences must have on average: each begins a tile of its own
_launches: dict[tuple, tuple[HopperPlan, Launch]] = Table("prefill plans", 1024)


class Prefill:
    """hopper_forward with a cache. It counts positions itself, so its mods are those of positions in a sequence."""

    name = "HOPPER"

    def fits(self, call: CachedCall) -> str | None:
        cached, tokens = call.cached, call.q.shape[2]
        if cached.cu_q is None or not call.masked or tokens < LEAST * call.extents[0]:
            return f"sequences have fewer than {LEAST} queries on average, or padded ones that do not lie one after another"
        if call.options.backend not in (None, self.name):
            return f"BACKEND is {call.options.backend}"
        if call.shared:
            return "sequences attend to what they share apart"
        if cached.invariant:
            return "batch_invariant: decode alone adds up the keys of a sequence in an order of its own"
        if call.k.dtype != call.q.dtype:
            return f"the cache holds {call.k.dtype}, not query's {call.q.dtype}"
        arch, aligned = architecture_of(call.q.device), (call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()) % 16 == 0
        return fits(call.case, call.geometry_in(call.q.element_size()), arch, aligned, call.own_mods[0])

    def worthwhile(self, call: CachedCall) -> str | None:
        head_dim = max(call.q.shape[3], call.v.shape[3])
        return forward_kernels.why_portable(call.q.shape[2], call.extents[3], call.extents[1], head_dim, True, call.q.device)

    def run(self, call: CachedCall, *, prepare: bool = False) -> None:
        """Fill out and lse; or, to prepare such calls, compile what does. Raises Unusable."""
        score, mask = call.own_mods
        # its tiles end with the sequence, not with max_q: the lists must hold for all rows of a block
        lists = call.lists(call.by_number("mask"), -(-call.cached.max_q // BLOCK) * BLOCK)
        case = call.case._replace(blocks=lists.blocks._replace(starts=True))
        plan, launch = forward_kernels.planned_for_any(_launches, case, call.own_keys)
        if prepare:
            launch = Launch(plan.spec, {})
            launch_nothing([launch])
        _, Hq, T, _ = call.q.shape
        starts, owners = owned_starts(call.cached.cu_q, T, 2 * ROWS)
        cached, found = call.cached, {"starts": starts, "sequences": owners, "q_offsets": call.q_offset}
        found |= {"cu_q": cached.cu_q, "kv_lens": cached.kv_lens, "kv_locs": cached.kv_locs, "pages": cached.pages}
        extras = call.extras.named if call.extras else {}
        tensors = {"K": call.k, "V": call.v, "Q": call.q, "O": call.out, "LSE": call.lse, **lists.tensors(), **extras}
        arguments = {**tensors, **{name: t for name, t in found.items() if t is not None}, **_numbers(call, plan, lists, len(owners))}
        limit = None if call.options.backend == self.name else SPILL_LIMIT
        captured = mod_values(plan, score and score[1], mask[1])
        forward_kernels.persistent(launch, arguments, captured, len(owners) * Hq, limit, multiprocessors(call.q.device))


def _numbers(call: CachedCall, plan: HopperPlan, lists: BlockLists, ranges: int) -> dict[str, int | float]:
    """All that the kernel takes, by the names of parameters."""
    (_, Hq, T, D_QK), (Zkv, Hkv, _, D_V) = call.q.shape, call.v.shape
    Z, _, _, KV_LEN = call.extents
    kv_bytes, group = KV_LEN * (D_QK + D_V) * call.q.element_size(), Hq // Hkv
    return {
        **{"Hq": Hq, "Zkv": Zkv, "GROUP_SIZE": group, "Q_LEN": T, "KV_LEN": KV_LEN},
        **{"HEADS": Hq, "HEADS_PER_GROUP": group * heads_per_group(Hkv, kv_bytes, enough_heads(Hkv, ranges * group, True))},
        **scales(call.scale, plan.scale_apart),
        **lists.numbers(),
        **named_strides("o", "zhm", call.out.stride()),
        **{"RANGES": ranges, "SEQUENCES": Z, "MAX_Q": call.cached.max_q, "stride_pages": call.stride_pages},
    }
