"""A call as the drivers of kernels take it: its arguments, checked and bound, and what of them changes a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..device.devices import architecture_of
from ..gpus import WIDEST_TILE
from ..mod.expr import ModGraph
from ..mod.table.dtypes import dtype_name
from ..plan.extras import ORDINARY, Extras, backward_needs_sinks
from ..plan.forward import Mod, Options
from ..plan.slices import lies_in
from ..plan.tiles import BLOCK, narrow_limit
from ..text.layouts import LARGEST_BLOCK_N, layouts_of
from .block_lists import BlockLists


class Inputs:
    """Stands in keys for the shapes, strides, dtypes and devices of q, k and v, which are checked. Equal ones have one object, so that it
    is hashed and compared by identity."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
        self.extents = (*q.shape[:3], k.shape[2])  # Z, Hq, Q_LEN, KV_LEN
        self.head_dim, self.device, self.enable_gqa = q.shape[3], q.device, enable_gqa
        self.scale = self.head_dim**-0.5  # where the user gives none
        self.is_float8 = q.dtype.itemsize == 1
        long = min(self.extents[2:]) >= 8 * BLOCK  # else no mask is narrow
        self.narrow_limit = narrow_limit(architecture_of(q.device), self.head_dim, v.shape[3], q.element_size()) if long else 0
        self.look_like(q, k, v)

    def look_like(self, *tensors: torch.Tensor) -> None:
        """From now on `alike` tells whether others, which are not nested, look as these do: class and kind, shape, strides, dtype, device,
        and whether they require grad. torch's compiler asks so before it runs what it compiled. In Python it takes six times as long."""
        try:
            sizes, strides = ([[*found] for found in map(kind, tensors)] for kind in (torch.Tensor.size, torch.Tensor.stride))
            self.alike = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        except (AttributeError, TypeError, ValueError):  # a torch that has another name for it
            self.alike = _never


def _never(*_) -> bool:
    return False


def values_in_keys(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Are the values the first columns of the keys, in the same memory, so that a kernel's tiles of wide keys have those of the values?
    (Z, H, S, D); tensors on the meta device are asked for their storage."""
    if v.data_ptr() != k.data_ptr() or k.shape[3] <= WIDEST_TILE or not lies_in(v.shape[3], k.shape[3]):
        return False
    if k.is_meta and (v.untyped_storage()._cdata != k.untyped_storage()._cdata or v.storage_offset() != k.storage_offset()):
        return False
    return v.dtype == k.dtype and all(n == 1 or s == t for n, s, t in zip(k.shape, k.stride(), v.stride(), strict=True))


class Scales(NamedTuple):
    """What a tensor's elements are to be multiplied by: float32, at a multiple of 16 bytes, and its steps from one batch entry, and one
    head of keys, to the next."""

    tensor: torch.Tensor
    strides: tuple[int, int]


class ExtraInputs(NamedTuple):
    """What changes the softmax beside scores and masks, or tensors' elements.

    sinks      (Hq,), contiguous and at a multiple of 16 bytes
    dropout_p  which part of the weights is dropped, a multiple of one over DROPOUT_STEPS
    seed       int64 (1,), of dropout; or (3,), with the first batch entry and head of these, of all
    places     of packed sequences, int32, (3, total_q) and (3, total_k), as Packing.places
    scales     of "q", "k" and "v", those that have some
    out        the output's dtype; None: q's
    """

    sinks: torch.Tensor | None = None
    dropout_p: float = 0.0
    seed: torch.Tensor | None = None
    places: tuple[torch.Tensor, ...] = ()
    scales: tuple[tuple[str, Scales], ...] = ()
    out: torch.dtype | None = None

    @property
    def structure(self) -> Extras:
        """All but addresses and numbers."""
        sinks = "" if self.sinks is None else dtype_name(self.sinks.dtype)
        dropout = "" if self.seed is None else "packed" if self.places else "positions"
        scales, out = "".join(name for name, _ in self.scales), "" if self.out is None else dtype_name(self.out)
        return Extras(sinks, dropout, scales, out, self.seed is not None and self.seed.numel() > 1)

    @property
    def numbers(self) -> tuple[float, tuple[tuple[int, int], ...]]:
        """dropout_p, and the strides of scales."""
        return self.dropout_p, tuple(found.strides for _, found in self.scales)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Its tensors by the names of parameters."""
        tensors = {"SINKS": self.sinks, "SEED": self.seed, **dict(zip(("DROP_Q", "DROP_K"), self.places, strict=False))}
        tensors |= {f"{name.upper()}_SCALES": found.tensor for name, found in self.scales}
        return {name: t for name, t in tensors.items() if t is not None}


def structure_of(extras: ExtraInputs | None) -> Extras:
    """All of it but addresses."""
    return ORDINARY if extras is None else extras.structure


def output_dtype(q: torch.Tensor, extras: ExtraInputs | None) -> torch.dtype:
    """The output's."""
    return q.dtype if extras is None or extras.out is None else extras.out


class Bound(NamedTuple):
    """The arguments of a call, checked and bound.

    q, k, v       (Z, Hq, Q_LEN, D_QK), (Zkv, Hkv, KV_LEN, D_QK) and (Zkv, Hkv, KV_LEN, D_V)
    score, mask   a mod's graph and what it captures, or None. `mask` is the mask_mod of the partial blocks in `lists`
    lists         None for attention without a mask
    transposed    from the bound mask_mod to the lists of query blocks for each KV block, in the same fields. With begins=True there are
                  none, and kernels of their own, if they have any, are compiled beside this process
    extras        None for an ordinary softmax
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    inputs: Inputs
    scale: float
    score: tuple[ModGraph, list] | None = None
    mask: tuple[ModGraph, list] | None = None
    lists: BlockLists | None = None
    transposed: Callable[[tuple], BlockLists] | None = None
    options: Options = Options()
    extras: ExtraInputs | None = None

    @property
    def captured(self) -> list[torch.Tensor]:
        """The tensors that score_mod captures."""
        return self.score[1][: len(self.score[0].tensors)] if self.score else []

    @property
    def sinks(self) -> torch.Tensor | None:
        """Those among its extras."""
        return self.extras and self.extras.sinks


def for_backward(call: Bound, learns_sinks: bool) -> Bound:
    """The call as its backward pass gets it: without sinks where that pass does not need them."""
    extras = call.extras
    if extras is None or extras.sinks is None or backward_needs_sinks(learns_sinks, call.scale):
        return call
    return call._replace(extras=extras._replace(sinks=None))


class Rows(NamedTuple):
    """What the backward pass needs of every row.

    values   float32 (Z, Hq, Q_LEN, 2): the largest score, and log2 of its weight. lse cannot say both: beside a score of 1e9 the logarithm
             of a sum is lost
    raw      the scores of a score_mod are still without scale
    provisional   later calls get theirs of another kernel, which is being compiled
    """

    values: torch.Tensor
    raw: bool
    provisional: bool = False

    def scaled(self, scale: float) -> Rows:
        """With scores that have their scale, in place: where nothing but the values reaches the backward pass."""
        if self.raw:
            self.values.select(-1, 0).mul_(scale)
        return self._replace(raw=False)


@dataclass(frozen=True)
class Cached:
    """Where the queries and keys of a batch of sequences are. All tensors int32, but scales: float32.

    cu_q         [Z + 1]      where the sequences start in ragged queries, (1, Hq, T, D_QK); max_q is the largest length
    kv_lens      [Z]          keys of each sequence
    kv_locs      [Z]          which entry of k and v is each one's
    pages        [Z, n]       which entries of k and v, pages, hold each one's keys
    k_scales, v_scales [Hkv]  by which k and v are to be multiplied
    invariant    a sequence's result does not depend on the others
    """

    cu_q: torch.Tensor | None = None
    max_q: int = 0
    kv_lens: torch.Tensor | None = None
    kv_locs: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    invariant: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that there are."""
        return [t for t in self._fields if t is not None]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Those that there are, by the names of parameters."""
        names = "CU_Q", "KV_LENS", "KV_LOCS", "PAGES", "K_SCALES", "V_SCALES"
        return {name: t for name, t in zip(names, self._fields, strict=True) if t is not None}

    @property
    def _fields(self) -> tuple[torch.Tensor | None, ...]:
        return self.cu_q, self.kv_lens, self.kv_locs, self.pages, self.k_scales, self.v_scales

    @property
    def structure(self) -> tuple:
        """All but addresses."""
        pages = self.pages is not None and (self.pages.shape[1], self.pages.stride(0))
        return (
            self.cu_q is not None and self.cu_q.shape[0],
            self.max_q,
            self.kv_lens is None,
            self.kv_locs is None,
            pages,
            self.k_scales is None,
            self.invariant,
        )


NOT_CACHED = Cached()


def reached(extents: tuple[int, int, int, int], lists: BlockLists | None) -> tuple[int, int, int, int]:
    """How far a kernel's b, h, q_idx and kv_idx may reach: extents (Z, Hq, Q_LEN, KV_LEN), or of the longer sequence in which blocks lie;
    but past KV_LEN to the end of the last block, or of one that begins anywhere."""
    if lists is None or (lists.starts is lists.shifts is None and LARGEST_BLOCK_N % lists.kv_block == 0):  # layouts_of rounds up anyway
        return extents
    if lists.shifts is not None:
        extents = *extents[:2], lists.shifts.q_len, lists.shifts.kv_len
    if lists.starts is None:
        return *extents[:3], -(-extents[3] // lists.kv_block) * lists.kv_block
    return *extents[:3], extents[3] + lists.kv_block - 1


def keys_of(
    score: tuple | None, mask: tuple | None, extents: tuple[int, int, int, int], lists: BlockLists | None = None
) -> tuple[Mod | None, Mod | None]:
    """What of bound mods changes a kernel that walks `lists`. `extents`: Z, Hq, Q_LEN, KV_LEN."""
    extents = reached(extents, lists)
    if score:
        score = score[0], layouts_of(*score, extents) if score[0].tensors else ()
    if mask:
        mask = mask[0], layouts_of(*mask, extents) if mask[0].tensors else ()
    return score, mask
