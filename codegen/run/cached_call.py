"""A call of cached_attention as the kernels over a cache take it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..device.devices import architecture_of
from ..mod.expr import INDEX_BOUND
from ..plan.decode import DecodeCase
from ..plan.extras import factors_out
from ..plan.forward import Cache, ForwardCase, Mod, Options, wants_tma
from ..plan.geometry import Geometry, geometry_of
from ..plan.tiles import BLOCK
from .block_lists import BlockLists
from .call import Cached, ExtraInputs, keys_of, structure_of
from .masks import automatic_lists
from .shared_tiles import Tiles


class Beside(Protocol):
    """What sequences attend to beside their own keys, by a kernel that leaves parts for the same combine_splits (see SharedParts)."""

    @property
    def tiles(self) -> Tiles:
        """How many parts each query has."""

    def refusal(self) -> str | None:
        """Why the kernel does not serve, or None if it does."""

    def run(self, parts: dict[str, torch.Tensor], *, prepare: bool = False) -> None:
        """Write the parts; or, to prepare such calls, compile what does. Raises Unusable."""


@dataclass
class CachedCall:
    """Queries, a cache, and mods that are bound where a kernel asks for them.

    q, k, v       (Z, Hq, Q_LEN, D_QK), (Zkv, Hkv, KV_LEN, D_QK) and (Zkv, Hkv, KV_LEN, D_V), any strides; with cached.cu_q q is
                  (1, Hq, T, D_QK), with cached.pages Zkv is the number of pages and KV_LEN their size
    out, lse      to be filled: (Z, Hq, Q_LEN, D_V) and float32 (Z, Hq, Q_LEN); with cached.cu_q (1, Hq, T, D_V) and (T, Hq)
    extents       Z, Hq, the most queries of a sequence, and the most keys of one
    masked        False for one query a sequence that sees all that there is
    q_offset      int32 [Z], the position of each sequence's first query, or None: its queries are its last positions
    by_position   from "score" or "mask" to the bound mod, of positions in a sequence; None where there is no score_mod
    by_number     from "score" or "mask" to the bound mod, of the numbers of queries in a sequence. Its mask_mod also hides keys past the
                  sequence's end; None where the call is not masked
    extras        None for an ordinary softmax
    shared        what else sequences attend to, together with others; None if they do not
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    extents: tuple[int, int, int, int]
    scale: float
    cached: Cached
    masked: bool
    q_offset: torch.Tensor | None
    options: Options
    by_position: Callable[[str], tuple | None]
    by_number: Callable[[str], tuple | None]
    extras: ExtraInputs | None = None
    shared: Beside | None = None

    @property
    def layouts(self) -> tuple:
        """Shapes, strides, dtypes and the device."""
        q, k, v = self.q, self.k, self.v
        return q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), self.out.stride(), q.dtype, k.dtype, q.device

    @property
    def stride_pages(self) -> int:
        """Of the page table, from one sequence to the next."""
        return 0 if self.cached.pages is None else self.cached.pages.stride(0)

    def geometry_in(self, itemsize: int) -> Geometry:
        """The geometry, with strides that are multiples of 16 bytes of elements of this size."""
        q, k, v = self.q, self.k, self.v
        return geometry_of(itemsize, (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), self.out.stride())

    def decode_case(self, geometry: Geometry, lists: BlockLists | None, **others) -> DecodeCase:
        """What the kernels for few queries depend on beside their mods, with `others`."""
        q, k, cached = self.q, self.k, self.cached
        return DecodeCase(
            q.dtype,
            q.shape[3],
            self.v.shape[3],
            geometry.units,
            blocks=lists and lists.blocks._replace(interior=True),
            scale_is_positive=factors_out(self.scale, structure_of(self.extras)),
            exact_indices=max(self.extents[2:]) <= INDEX_BOUND,
            ragged=cached.cu_q is not None,
            lengths=cached.kv_lens is not None,
            located=cached.kv_locs is not None,
            page_size=0 if cached.pages is None else k.shape[2],
            kv_dtype=k.dtype if k.dtype != q.dtype else None,
            scales=cached.k_scales is not None,
            extras=structure_of(self.extras),
            **others,
        )

    def lists(self, mask: tuple, most_queries: int) -> BlockLists:
        """The block lists of the bound mask_mod of numbers, for sequences of so many queries."""
        Z, Hq, _, KV_LEN = self.extents
        return automatic_lists(mask, extents=(Z, Hq, most_queries, KV_LEN), device=self.q.device, size=(BLOCK, BLOCK))

    @functools.cached_property
    def own_mods(self) -> tuple[tuple | None, tuple]:
        """score_mod and mask_mod of positions."""
        return self.by_position("score"), self.by_position("mask")

    @functools.cached_property
    def own_keys(self) -> tuple[Mod | None, Mod | None]:
        """What of these changes a kernel. Of more queries than keys, the first ones' positions are negative."""
        Z, Hq, _, KV_LEN = self.extents
        return keys_of(*self.own_mods, (Z, Hq, range(-(1 << 31), KV_LEN), KV_LEN))

    @functools.cached_property
    def case(self) -> ForwardCase:
        """What the kernel for Hopper depends on beside its mods and lists."""
        q, k, v, cached = self.q, self.k, self.v, self.cached
        geometry = self.geometry_in(q.element_size())
        return ForwardCase(
            q.dtype,
            q.shape[3],
            v.shape[3],
            geometry.units,
            geometry.aligned,
            wants_tma(self.options, q.dtype, architecture_of(q.device)),
            options=self.options,
            scale_is_positive=factors_out(self.scale, structure_of(self.extras)),
            exact_indices=max(q.shape[2], self.extents[3]) <= INDEX_BOUND,
            cache=Cache(0 if cached.pages is None else k.shape[2], cached.kv_locs is not None, self.q_offset is not None),
            extras=structure_of(self.extras),
        )

    @property
    def key(self) -> tuple:
        """All that changes that kernel, but lists."""
        return self.case, *self.own_keys
