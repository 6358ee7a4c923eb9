"""The driver of the kernels for few queries and for caches: from tensors and bound mods to a plan, two grids and arguments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from ..device.kernel import architecture_of, backend_of, kernel_for, multiprocessors, on, plain_values
from ..mod.expr import INDEX_BOUND
from ..plan.decode import BLOCK_S, MAX_ROWS, MIN_SHARE, DecodeCase, DecodePlan, parts_of, plan_decode, rows_of, vector_of
from ..plan.forward import LOG2_E, geometry_of
from ..plan.tiles import Tile, next_smaller
from ..registry import INFO, Table
from ..text.spec import mod_values
from .launch import launch_fitting

MAX_QUERIES = 16  # of a call without a cache; more of them keep the device busy without splitting keys
_INTERPRETED = 4  # multiprocessors of the interpreter: keys are split there, too
_plans: dict[tuple, DecodePlan] = Table("decode plans", 1024)
_prepared: dict[tuple, _Prepared] = Table("decode calls", 1024)


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


def refuses(q: torch.Tensor, options) -> str | None:
    """Why decode does not serve a call of flex_attention that asks for it, or None if it does."""
    if q.shape[2] > MAX_QUERIES:
        return f"query {tuple(q.shape)} has more than {MAX_QUERIES} positions"
    if options.tile or options.prescale_qk:
        return f"{', '.join(name for name, _ in options.tile) or 'PRESCALE_QK'} is for the other kernels"
    return None


def suits(q: torch.Tensor, k: torch.Tensor, options) -> bool:
    """Is decode the kernel for a call of flex_attention that asks for none? With few keys there is nothing to split."""
    return q.shape[2] <= MAX_QUERIES and k.shape[2] >= MIN_SHARE and refuses(q, options) is None


@dataclass
class _Prepared:
    """What is decided of a call by everything but addresses and what its mods capture."""

    plan: DecodePlan
    grid: tuple[int, int]
    numbers: list
    sizes: list[int]  # elements of PART, PART_SHARE, PART_MAX and PART_COUNT; none if keys are not split
    combine_numbers: tuple[int, ...]
    functions: tuple = ()  # the compiled kernels for aligned tensors and numbers of 32 bits, once they have run

    def launch(self, read: tuple, buffer: torch.Tensor | None, outputs: tuple[torch.Tensor, ...], rest: tuple) -> bool:
        """The short way: pack addresses and launch. False if `functions` do not serve these tensors and numbers.

        read    k, v, q and the tensors that say where sequences are; buffer, the memory for parts, stands behind the first three
        rest    block lists and what mods capture
        """
        addresses, written, start, values = map(plain_values, (read, outputs, (buffer,) if self.sizes else (), rest))
        if None in (addresses, written, start, values):
            return False
        parts = [*accumulate(self.sizes[:-1], lambda at, size: at + 4 * size, initial=start[0])] if self.sizes else written
        device = outputs[0].device
        with on(device):
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            self.functions[0].launch_plain(*self.grid, 1, stream, [*addresses[:3], *parts, *addresses[3:], *self.numbers, *values])
            if self.sizes:
                self.functions[1].launch_plain(outputs[1].numel(), 1, 1, stream, [*parts, *written, *self.combine_numbers])
        return True


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    scale: float,
    score: tuple | None,
    mask: tuple | None,
    keys: tuple,
    lists,
    precision: str = "ieee",
    cached: Cached = NOT_CACHED,
    *,
    output_max: bool = False,
) -> None:
    """Fill outputs: out (Z, Hq, Q_LEN, D_V), lse float32 (Z, Hq, Q_LEN), max_scores like it with output_max, and (Z, Hq, Q_LEN, 2) for
    forward.Rows if that is asked for.

    q (Z, Hq, Q_LEN, D_QK), k (Zkv, Hkv, KV_LEN, D_QK), v (Zkv, Hkv, KV_LEN, D_V), any strides; with cached.cu_q q and out are (1, Hq, T, D)
    and lse (T, Hq), with cached.pages Zkv is the number of pages and KV_LEN their size.

    keys   what of the bound score_mod and mask_mod changes a kernel
    """
    out, device = outputs[0], q.device
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
        device,
        scale,
        *keys,
        lists and lists.structure,
        precision,
        len(outputs),
        output_max,
        *cached.structure,
    )
    found = _prepared.get(call)
    if found is not None:
        INFO.hits += 1
    else:
        found = _prepared[call] = _prepare(q, k, v, outputs, scale, keys, lists, precision, cached, output_max)
    plan, ragged = found.plan, cached.cu_q is not None
    buffer = torch.empty(sum(found.sizes), dtype=torch.float32, device=device) if found.sizes else None
    if ragged and found.sizes:  # tokens after the last sequence's have no parts
        buffer[-found.sizes[-1] :].zero_()
    elif ragged:
        outputs[1].fill_(float("-inf"))
        out.zero_()
    rest = (*(lists.tables if lists else ()), *mod_values(plan, score and score[1], mask and mask[1]))
    if found.functions and found.launch((k, v, q, *cached.tensors.values()), buffer, outputs, rest):
        return
    parts = outputs
    if found.sizes:
        *sums, count = buffer.split(found.sizes)
        parts = (*sums, count.view(torch.int32))
    args = (k, v, q, *parts, *cached.tensors.values(), *found.numbers, *rest)
    kernel, combine = kernel_for(plan.spec), plan.combine and kernel_for(plan.combine)
    variants = [
        launch_fitting(
            plan,
            lambda tile: kernel.launch(
                found.grid, args, device, (tile.BLOCK_M, tile.BLOCK_N), num_warps=tile.num_warps, num_stages=tile.num_stages
            ),
            _with_fewer_keys,
        )
    ]
    if found.sizes:
        variants.append(
            combine.launch((outputs[1].numel(),), (*parts, *outputs, *found.combine_numbers), device, (BLOCK_S,), num_warps=4, num_stages=1)
        )
    if all(getattr(variant, "function", None) for variant in variants) and plain_values((*args, out, *found.combine_numbers)) is not None:
        found.functions = tuple(variant.function for variant in variants)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    scale: float,
    keys: tuple,
    lists,
    precision: str,
    cached: Cached,
    output_max: bool,
) -> _Prepared:
    out, device, arch = outputs[0], q.device, architecture_of(q.device)
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
        len(outputs) - output_max > 2,
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
    numbers = [
        Hq,
        k.shape[0],
        Hq // Hkv,
        Q_LEN,
        KV_LEN,
        *geometry.numbers[5:],
        *((scale, LOG2_E) if plan.scale_apart else (scale * LOG2_E,)),
        rows.queries,
        rows.pack,
    ]
    sizes, combine_numbers = [], ()
    if split.room:
        numbers += [split.room, split.least, *((Z, split.of_all) if split.of_all else ())]
        count = outputs[1].numel()
        sizes = [count * split.room * n for n in (v.shape[3], 1, 1)] + [count]
        sizes = [-(-n // 4) * 4 for n in sizes]  # each aligned to 16 bytes
        strides = (0, out.stride(2), out.stride(1)) if ragged else out.stride()[:3]
        combine_numbers = (*outputs[1].shape[-2:], split.room, *strides, LOG2_E if plan.scale_apart else scale * LOG2_E)
    if paged:
        numbers.append(cached.pages.stride(0))
    if ragged:
        numbers.append(q.shape[2])
    if lists is not None:
        numbers += lists.numbers
    grid = (tiles // Z, split.of_all + Z) if split.of_all else (tiles, max(split.room, 1))
    return _Prepared(plan, grid, numbers, sizes, combine_numbers)


def _with_fewer_keys(tile: Tile) -> Tile | None:
    """The next smaller tile of as many rows."""
    smaller = next_smaller(tile)
    return smaller if smaller and smaller.BLOCK_M == tile.BLOCK_M else None
