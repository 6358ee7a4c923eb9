"""The kernel for Hopper over what sequences share: queries of groups, whose keys are the pages of a prefix, split into parts.

It leaves parts for the combine_splits that adds up those of each sequence's own keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..device.devices import architecture_of, multiprocessors
from ..mod.expr import INDEX_BOUND
from ..plan.extras import ORDINARY
from ..plan.forward import ForwardCase, Mod, scales
from ..plan.hopper_forward import SPILL_LIMIT, HopperPlan, fits
from ..registry import Table
from ..text.mod_text import mod_values
from ..text.parameters import named_strides
from . import forward_kernels
from .block_lists import BlockLists
from .cached_call import CachedCall
from .call import keys_of
from .launch import Launch, Unusable, launch_nothing
from .shared_tables import Laid
from .shared_tiles import Tiles

NAME = "HOPPER"
_launches: dict[tuple, tuple[HopperPlan, Launch]] = Table("prefix plans", 1024)
_refused: dict[tuple, str] = Table("prefix kernels not used", 1024)  # that were compiled, and why


@dataclass
class SharedParts:
    """What groups of sequences share, in a call of all of these.

    call     the groups as sequences, whose queries are rows: q is that of the batch, cached.kv_lens and pages those of the groups,
             by_number counts rows, and by_position gives mods of the batch's own sequences
    laid     which token, sequence and position each row is
    lay      makes tiles of rows and of parts of keys, for so many heads and programs
    extents  sequences of the batch, and how many positions one may have
    ragged   queries of the batch follow one another: q is (1, Hq, T, D)
    """

    call: CachedCall
    laid: Laid
    lay: Callable[[int, int], Tiles]
    extents: tuple[int, int]
    ragged: bool

    @functools.cached_property
    def tiles(self) -> Tiles:
        """The tiles. They are not made where the kernel does not serve."""
        return self.lay(self.call.extents[1], multiprocessors(self.call.q.device))

    @functools.cached_property
    def mods(self) -> tuple[tuple | None, tuple | None]:
        """The bound mods. Without a mask_mod nothing is hidden."""
        return self.call.by_position("score"), self.call.by_position("mask") if self.call.masked else None

    @functools.cached_property
    def keys(self) -> tuple[Mod | None, Mod | None]:
        """What of these changes the kernel."""
        Z, positions = self.extents
        return keys_of(*self.mods, (Z, self.call.extents[1], range(-(1 << 31), positions), self.call.extents[3]))

    @functools.cached_property
    def case(self) -> ForwardCase:
        """What else changes it, but lists."""
        found = self.call.case
        exact = max(*self.extents, self.laid.token.shape[0]) <= INDEX_BOUND
        return found._replace(cache=found.cache._replace(grouped=True, offsets=False), exact_indices=exact, extras=ORDINARY)  # type: ignore[union-attr]

    def refusal(self) -> str | None:
        """Why the kernel does not serve, or None if it does."""
        call = self.call
        if call.options.backend not in (None, NAME):
            return f"BACKEND is {call.options.backend}"
        if call.k.dtype != call.q.dtype or call.cached.k_scales is not None:
            return f"the cache holds {call.k.dtype}, not query's {call.q.dtype}, or has scales"
        aligned = (call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()) % 16 == 0
        reason = fits(self.case, call.geometry_in(call.q.element_size()), architecture_of(call.q.device), aligned, self.mods[0])
        return reason or _refused.get((self.case, *self.keys))

    def run(self, parts: dict[str, torch.Tensor], *, prepare: bool = False) -> None:
        """Write the parts: PART, PART_SHARE and PART_MAX; or, to prepare such calls, compile what does. Raises Unusable, and then `refusal`
        says why."""
        call, (score, mask) = self.call, self.mods
        lists = call.lists(call.by_number("mask"), self.laid.token.shape[0]) if mask else None  # type: ignore[arg-type]
        case = self.case._replace(blocks=lists and lists.blocks)
        plan, launch = forward_kernels.planned_for_any(_launches, case, self.keys)
        if prepare:
            launch = Launch(plan.spec, {})
            launch_nothing([launch])
        tiles, laid = self.tiles, self.laid
        tensors = {"K": call.k, "V": call.v, "Q": call.q, **parts, **(lists.tensors() if lists else {})}
        tensors |= {"tiles_of_groups": tiles.tiles, "count": tiles.count, "lengths": call.cached.kv_lens, "pages": call.cached.pages}
        tensors |= {"token": laid.token, "sequence": laid.sequence, "position": laid.position}
        limit = None if call.options.backend == NAME else SPILL_LIMIT
        captured = mod_values(plan, score and score[1], mask and mask[1])
        heads, programs = call.q.shape[1], multiprocessors(call.q.device)
        try:
            arguments = {**tensors, **self._numbers(plan, lists)}
            forward_kernels.persistent(launch, arguments, captured, tiles.tiles.shape[0] * heads, limit, programs)
        except Unusable as why:
            _refused[(self.case, *self.keys)] = str(why)
            raise

    def _numbers(self, plan: HopperPlan, lists: BlockLists | None) -> dict[str, int | float]:
        """All that the kernel takes, by the names of parameters."""
        call = self.call
        heads, (outer, of_head, inner) = call.q.shape[1], call.q.stride()[:3]
        queries, outer = (1, inner) if self.ragged else (call.q.shape[2], outer)
        return {
            **{"Hq": heads, "GROUP_SIZE": heads // call.k.shape[1], "KV_LEN": call.extents[3], "stride_pages": call.stride_pages},
            **{"QUERIES": queries, "SPLITS": self.tiles.most},
            **named_strides("q", "zhm", (outer, of_head, inner)),
            **scales(call.scale, plan.scale_apart),
            **(lists.numbers() if lists else {}),
        }
