"""The driver of the kernels for few queries and for caches: from tensors and bound mods to a plan, two grids and arguments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from ..device.arguments import plain_values
from ..device.devices import architecture_of, backend_of, multiprocessors, on
from ..mod.expr import INDEX_BOUND
from ..plan.decode import BLOCK_S, MAX_ROWS, MIN_SHARE, DecodeCase, DecodePlan, parts_of, plan_decode, rows_of, vector_of
from ..plan.forward import geometry_of, scales
from ..plan.tiles import Tile, next_smaller
from ..registry import INFO, Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists
from .launch import Launch, addresses_of, launch_fitting

MAX_QUERIES = 16  # of a call without a cache; more of them keep the device busy without splitting keys
_INTERPRETED = 4  # multiprocessors of the interpreter: keys are split there, too
_plans: dict[tuple, DecodePlan] = Table("decode plans", 1024)
_prepared: dict[tuple, Prepared] = Table("decode calls", 1024)


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
    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of the kernels' parameters."""
        found = {
            "CU_Q": self.cu_q,
            "KV_LENS": self.kv_lens,
            "KV_LOCS": self.kv_locs,
            "PAGES": self.pages,
            "K_SCALES": self.k_scales,
            "V_SCALES": self.v_scales,
        }
        return {name: t for name, t in found.items() if t is not None}

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


def refuses(q_len: int, options) -> str | None:
    """Why decode does not serve a call of flex_attention, or None if it does."""
    if q_len > MAX_QUERIES:
        return f"query has {q_len} positions, more than {MAX_QUERIES}"
    if options.tile or options.prescale_qk:
        return f"{', '.join(name for name, _ in options.tile) or 'PRESCALE_QK'} is for the other kernels"
    return None


def worthwhile(kv_len: int) -> str | None:
    """Why another kernel is faster for a call that decode could serve, or None if it is not. With few keys there is nothing to split."""
    return None if kv_len >= MIN_SHARE else f"there are {kv_len} keys, too few to split"


class Parts(NamedTuple):
    """The memory for parts: elements of PART, PART_SHARE, PART_MAX and PART_COUNT, each a multiple of 16 bytes."""

    sizes: tuple[int, ...]

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """By the names of parameters."""
        part, share, largest, count = buffer.split(list(self.sizes))
        return {"PART": part, "PART_SHARE": share, "PART_MAX": largest, "PART_COUNT": count.view(torch.int32)}

    def addresses(self, start: int) -> dict[str, int]:
        """The same."""
        return dict(zip(_PARTS, accumulate(self.sizes[:-1], lambda at, size: at + 4 * size, initial=start), strict=True))


_PARTS = ("PART", "PART_SHARE", "PART_MAX", "PART_COUNT")


class Prepared:
    """decode, and combine_splits where keys are split, in calls of one kind.

    grid    of decode          ragged   queries of all sequences follow one another
    parts   None where keys are not split
    """

    raw = False

    def __init__(self, plan: DecodePlan, numbers: dict[str, int | float], combined: dict, grid: tuple, parts: Parts | None, ragged: bool):
        self.plan, self.grid, self.parts, self.ragged = plan, grid, parts, ragged
        self.room = sum(parts.sizes) if parts else 0
        self.launch = Launch(plan.spec, numbers)
        self.combine = Launch(plan.combine, combined) if parts else None

    def run(
        self,
        tensors: dict[str, torch.Tensor],
        addresses: dict[str, int] | None,
        score: list | None,
        mask: list | None,
        lists: BlockLists | None,
    ) -> None:
        """Fill the outputs among `tensors`, which have the names of parameters. `addresses`: theirs, if all are aligned."""
        out, lse = tensors["O"], tensors["LSE"]
        device, captured = out.device, mod_values(self.plan, score, mask)
        buffer = None
        if self.parts:
            buffer = torch.empty(self.room, dtype=torch.float32, device=device)
            if self.ragged:  # tokens after the last sequence's have no parts
                buffer[-self.parts.sizes[-1] :].zero_()
        elif self.ragged:
            lse.fill_(float("-inf"))
            out.zero_()
        if addresses is None or not self._again(tensors, addresses, buffer, captured, lists, device):
            self._first(tensors, buffer, captured, lists, device)

    def _again(
        self,
        tensors: dict[str, torch.Tensor],
        addresses: dict[str, int],
        buffer: torch.Tensor | None,
        captured: list,
        lists: BlockLists | None,
        device: torch.device,
    ) -> bool:
        """The short way. False if it does not serve these tensors and numbers."""
        if not self.launch.function or self.parts and not self.combine.function:
            return False
        plain, tables = plain_values(captured), lists.addresses if lists else {}
        if plain is None or tables is None:
            return False
        addresses.update(tables)
        if self.parts:
            addresses.update(self.parts.addresses(buffer.data_ptr()))
        with on(device):
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            self.launch.again(tensors, addresses, plain, stream)
            if self.parts:
                self.combine.again(tensors, addresses, [], stream)
        return True

    def _first(self, tensors: dict[str, torch.Tensor], buffer, captured: list, lists: BlockLists | None, device: torch.device) -> None:
        """The long way."""
        tensors = {**tensors, **(self.parts.tensors(buffer) if self.parts else {}), **(lists.tensors() if lists else {})}
        launch_fitting(self.plan, lambda tile: self.launch.with_tile(tile, tensors, captured, self.grid, device), _with_fewer_keys)
        if self.parts:
            rows = (tensors["LSE"].numel(),)
            variant = self.combine.with_constants((BLOCK_S,), tensors, [], rows, device)
            self.combine.remember(variant, rows, tensors, [], {})


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    score: tuple | None,
    mask: tuple | None,
    keys: tuple,
    lists: BlockLists | None,
    cached: Cached,
) -> None:
    """Fill out (Z, Hq, Q_LEN, D_V) and lse float32 (Z, Hq, Q_LEN) from a cache.

    q (Z, Hq, Q_LEN, D_QK), k (Zkv, Hkv, KV_LEN, D_QK), v (Zkv, Hkv, KV_LEN, D_V), any strides; with cached.cu_q q and out are (1, Hq, T, D)
    and lse (T, Hq), with cached.pages Zkv is the number of pages and KV_LEN their size.

    keys   what of the bound score_mod and mask_mod changes a kernel
    """
    call = (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        q.dtype,
        k.dtype,
        q.device,
        scale,
        *keys,
        lists and lists.structure,
        *cached.structure,
    )
    tensors = {"K": k, "V": v, "Q": q, "O": out, "LSE": lse, **cached.tensors}
    found = _prepared.get(call)
    if found is not None:
        INFO.hits += 1
    else:
        found = _prepared[call] = prepare(tensors, scale, keys, lists, "ieee", cached)
    found.run(tensors, addresses_of(tensors), score and score[1], mask and mask[1], lists)


def prepare(
    tensors: dict[str, torch.Tensor],
    scale: float,
    keys: tuple,
    lists: BlockLists | None,
    precision: str,
    cached: Cached,
    *,
    output_max: bool = False,
    output_rows: bool = False,
) -> Prepared:
    """All that does not depend on addresses, for K, V, Q, O and LSE as in `decode`."""
    q, k, v, out, lse = (tensors[name] for name in ("Q", "K", "V", "O", "LSE"))
    device, arch = q.device, architecture_of(q.device)
    Hkv = k.shape[1]
    ragged, paged = cached.cu_q is not None, cached.pages is not None
    Z = cached.cu_q.shape[0] - 1 if ragged else q.shape[0]
    Hq, Q_LEN = q.shape[1], cached.max_q if ragged else q.shape[2]
    KV_LEN = k.shape[2] * (cached.pages.shape[1] if paged else 1)
    kv_dtype = k.dtype if k.dtype != q.dtype else None
    vector = vector_of(q.dtype, kv_dtype)
    geometry = geometry_of(16 // vector, (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), out.stride())
    by_head = lists is not None and lists.kv_num_blocks.shape[1] > 1  # heads with lists of their own do not share a tile
    rows = rows_of(2 * MAX_ROWS if cached.invariant else Q_LEN, 1 if by_head else Hq // Hkv, lists.q_block if lists else 0)
    tiles = -(-Q_LEN // rows.queries) * (Hq // rows.pack) * Z
    available = multiprocessors(device) if device.type != "cpu" else _INTERPRETED
    split = parts_of(KV_LEN, tiles, Z, available, lengths=cached.kv_lens is not None, listed=lists is not None, invariant=cached.invariant)
    case = DecodeCase(
        q.dtype,
        q.shape[3],
        v.shape[3],
        geometry.units,
        geometry.aligned,
        lists and lists.blocks._replace(interior=True),
        precision,
        scale > 0,
        output_max,
        output_rows,
        max(Q_LEN, KV_LEN) <= INDEX_BOUND,
        split.room > 0,
        split.of_all > 0,
        ragged,
        cached.kv_lens is not None,
        cached.kv_locs is not None,
        k.shape[2] if paged else 0,
        kv_dtype,
        cached.k_scales is not None,
    )
    key = (case, arch, *keys, rows.rows)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = plan_decode(case, backend_of(device.type), arch, *keys, rows.rows)
    numbers = {
        **geometry.numbers,
        **{"Q_LEN": Q_LEN, "KV_LEN": KV_LEN, "Zkv": k.shape[0], "Z": Z, "T": q.shape[2], "QUERIES": rows.queries, "PACK": rows.pack},
        **{"SPLITS": split.room, "MIN_SHARE": split.least, "PARTS": split.of_all},
        **scales(scale, plan.scale_apart),
        **(lists.numbers() if lists else {}),
        "stride_pages": cached.pages.stride(0) if paged else 0,
    }
    parts, combined = None, {}
    if split.room:
        parts = Parts(tuple(-(-n // 4) * 4 for n in (*(lse.numel() * split.room * n for n in (v.shape[3], 1, 1)), lse.numel())))
        outer, middle, inner = (0, out.stride(2), out.stride(1)) if ragged else out.stride()[:3]
        combined = {"stride_outer": outer, "stride_middle": middle, "stride_inner": inner, "MIDDLE": lse.shape[-2], "INNER": lse.shape[-1]}
    grid = (tiles // Z, split.of_all + Z) if split.of_all else (tiles, max(split.room, 1))
    return Prepared(plan, numbers, {**numbers, **combined}, grid, parts, ragged)


def _with_fewer_keys(tile: Tile) -> Tile | None:
    """The next smaller tile of as many rows."""
    smaller = next_smaller(tile)
    return smaller if smaller and smaller.BLOCK_M == tile.BLOCK_M else None
