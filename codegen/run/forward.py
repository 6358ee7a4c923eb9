"""The forward kernel's driver: from tensors and bound mods to a plan, a grid and arguments."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from ..device.arguments import plain_values
from ..device.counters import counter
from ..device.devices import architecture_of, backend_of, multiprocessors, on
from ..device.kernel import Kernel, kernel_for
from ..device.tma import descriptor
from ..mod.expr import INDEX_BOUND, ModGraph
from ..mod.tensors import check_kind
from ..plan.forward import LOG2_E, Blocks, ForwardCase, Geometry, Options, Plan, geometry_of, plan_forward, wants_tma
from ..plan.hopper_forward import SPILL_LIMIT, HopperPlan, fits, heads_per_group, plan_hopper_forward, worthwhile
from ..registry import INFO, Table, remembered
from ..text.spec import LARGEST_BLOCK_N, layouts_of, mod_values
from . import decode
from .launch import launch_fitting


@dataclass(frozen=True)
class BlockLists:
    """The block lists of a mask as kernels read them.

    kv_num_blocks (Zm, Hm, rows), kv_indices (Zm, Hm, rows, columns), both contiguous int32; Zm and Hm are 1 or Z and Hq. full_*: the
    same for blocks that need no mask_mod, or None. `interior`: no full block reaches past KV_LEN.

    starts   int32 (rows + 1), or None: blocks of the tiles' axis (queries; keys, in transposed lists) are the positions from starts[i] up
             to starts[i + 1], at most a block's size; the last ones may be empty. The lists then hold first positions of blocks instead
             of their numbers, a full block has all its positions, and mask_mod hides from a partial one all that is not in it
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None
    full_kv_indices: torch.Tensor | None
    q_block: int
    kv_block: int
    interior: bool
    starts: torch.Tensor | None = None

    @functools.cached_property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The lists in the order of the kernels' parameters."""
        full = () if self.full_kv_indices is None else (self.full_kv_num_blocks, self.full_kv_indices)
        return self.kv_num_blocks, self.kv_indices, *full, *(() if self.starts is None else (self.starts,))

    @functools.cached_property
    def fitting(self) -> set:
        """Inputs, with Options, that were found to fit these lists."""
        return set()

    @functools.cached_property
    def transposed(self) -> dict[int, BlockLists]:
        """The transposed lists, by KV_LEN, where they were made."""
        return {}

    @functools.cached_property
    def structure(self) -> tuple:
        """What a launch depends on beside addresses."""
        return (self.full_kv_indices is not None, self.q_block, self.kv_block, self.interior, self.starts is None, *self.numbers)

    @functools.cached_property
    def blocks(self) -> Blocks:
        """What of the lists changes a kernel."""
        return Blocks(self.full_kv_indices is not None, self.q_block, self.kv_block, self.interior, self.starts is not None)

    @functools.cached_property
    def addresses(self) -> tuple[int, ...] | None:
        """Of the tables; None if one is no multiple of 16 bytes."""
        found = tuple(t.data_ptr() for t in self.tables)
        return None if any(address % 16 for address in found) else found

    @functools.cached_property
    def numbers(self) -> list[int]:
        """mask_stride_z, mask_stride_h (in rows; 0 for a mask that all share), the widths of the index lists, and RANGES, their rows, with
        `starts`."""
        Zm, Hm, rows, _ = self.kv_indices.shape
        widths = [t.shape[-1] for t in (self.kv_indices, self.full_kv_indices) if t is not None]
        return [Hm * rows if Zm > 1 else 0, rows if Hm > 1 else 0, *widths, *([] if self.starts is None else [rows])]


class Rows(NamedTuple):
    """What the backward pass needs of every row.

    values   float32 (Z, Hq, Q_LEN, 2): the largest score, and log2 of its weight. lse cannot say both: beside a score of 1e9 the logarithm
             of a sum is lost
    raw      the scores of a score_mod are still without scale
    """

    values: torch.Tensor
    raw: bool


class Inputs:
    """Stands in keys for the shapes, strides, dtypes and devices of q, k and v, which are checked. Equal ones have one object, so that it
    is hashed and compared by identity."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor) -> None:
        self.extents = (*q.shape[:3], k.shape[2])  # Z, Hq, Q_LEN, KV_LEN
        self.head_dim, self.device = q.shape[3], q.device
        self.scale = self.head_dim**-0.5  # where the user gives none


_plans: dict[tuple, Plan | HopperPlan] = Table("forward plans", 1024)
# cases for which the kernel for Hopper was compiled and is not used, and why
_refused: dict[tuple, str] = Table("forward kernels not used", 1024)
_ready: dict[tuple, _Ready] = Table("forward calls", 1024)


class _Ready:
    """A forward kernel of which everything is decided but addresses and what the mods capture: found by the shapes of a call, it only packs
    arguments and launches. It serves calls whose tensors are 16-byte aligned and whose numbers fit into 32 bits."""

    def __init__(self, plan: Plan | HopperPlan, function, grid: int, numbers: list, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.plan, self.function, self.grid, self.numbers = plan, function, grid, numbers
        self.described, self.by_pointer, self.counts = len(plan.blocks), _first_by_pointer(plan), isinstance(plan, HopperPlan)
        self.new_out, self.new_stats = (
            functools.partial(torch.empty_strided, tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device) for t in (out, lse)
        )
        self.raw = _are_raw(plan)
        self.new_rows = functools.partial(torch.empty, (*lse.shape, 2), dtype=lse.dtype, device=lse.device)
        self.maps: dict[tuple[int, ...], list] = {}  # tensor maps by addresses

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        score: list | None,
        mask: list | None,
        lists: BlockLists | None,
        output_max: bool,
        output_rows: bool,
    ):
        """What `forward` returns; None if this call needs another variant of the kernel."""
        mods = plain_values(mod_values(self.plan, score, mask))
        tables = lists.addresses if lists else ()
        inputs = k.data_ptr(), v.data_ptr(), q.data_ptr()
        if mods is None or tables is None or (inputs[0] | inputs[1] | inputs[2]) % 16 or 0 in inputs:
            return None
        out, lse, max_scores = self.new_out(), self.new_stats(), self.new_stats() if output_max else None
        addresses = [*inputs, out.data_ptr(), lse.data_ptr()]
        if output_max:
            addresses.append(max_scores.data_ptr())
        rows = None
        if output_rows:
            rows = Rows(self.new_rows(), self.raw)
            addresses.append(rows.values.data_ptr())
        if self.described:
            key = tuple(addresses[: self.described])
            maps = self.maps.get(key)
            if maps is None:
                if len(self.maps) >= 64:
                    self.maps.clear()
                maps = self.maps[key] = self.function.expanded(_described(self.plan, (k, v, q, out)))
            addresses = [*maps, *addresses[self.by_pointer :]]
        device = q.device
        with on(device):
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            if self.counts:
                addresses.append(counter(device, stream).data_ptr())
            self.function.launch_plain(self.grid, 1, 1, stream, [*addresses, *self.numbers, *tables, *mods])
        return out, lse, max_scores, rows


def output_like(q: torch.Tensor, d_v: int) -> torch.Tensor:
    """An empty (Z, Hq, Q_LEN, D_V) tensor laid out as q is, so that (B, S, H, D) code gets (B, S, H, D) back."""
    return torch.empty_strided((*q.shape[:3], d_v), strides_like(q, d_v), dtype=q.dtype, device=q.device)


def strides_like(q: torch.Tensor, d_v: int) -> tuple[int, ...]:
    """The strides of that."""
    return _strides_like(q.shape[:3], q.stride(), d_v)


@remembered("strides of outputs", 4096)
def _strides_like(shape: tuple[int, ...], order: tuple[int, ...], d_v: int) -> tuple[int, ...]:
    strides, step = [0, 0, 0, 1], d_v
    for i in sorted(range(3), key=lambda i: order[i]):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Inputs,
    scale: float,
    score: tuple[ModGraph, list] | None,
    mask: tuple[ModGraph, list] | None,
    lists: BlockLists | None,
    options: Options,
    *,
    output_max: bool = False,
    output_rows: bool = False,
):
    """out (Z, Hq, Q_LEN, D_V), lse float32 (Z, Hq, Q_LEN), max_scores (the same, or None) and Rows (or None). Arguments are checked
    already.

    `mask` is the mask_mod of the partial blocks in `lists`; both None for dense attention.
    """
    score_key, mask_key = keys_of(score, mask, reached(inputs.extents, lists))
    call = (inputs, scale, score_key, mask_key, lists and lists.structure, options, output_max, output_rows)
    ready = _ready.get(call)
    if ready is not None:
        found = ready.run(q, k, v, score and score[1], mask and mask[1], lists, output_max, output_rows)
        if found is not None:
            INFO.hits += 1
            return found
    Z, Hq, Q_LEN, _ = q.shape
    KV_LEN, D_V = v.shape[2:]
    out = output_like(q, D_V)
    lse = torch.empty((Z, Hq, Q_LEN), dtype=torch.float32, device=q.device)
    max_scores = torch.empty_like(lse) if output_max else None
    rows = torch.empty((*lse.shape, 2), dtype=torch.float32, device=q.device) if output_rows else None
    if out.numel() == 0 or KV_LEN == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return out, lse, max_scores.fill_(float("-inf")) if output_max else None, Rows(rows, False) if output_rows else None

    stats = tuple(t for t in (lse, max_scores, rows) if t is not None)
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.data_ptr() == 0:  # of a kind that looks as others do
            check_kind(name, tensor)
    if decodes(q, k, options):
        decode.decode(
            q, k, v, (out, *stats), scale, score, mask, (score_key, mask_key), lists, options.float32_precision, output_max=output_max
        )
        return out, lse, max_scores, Rows(rows, False) if output_rows else None
    case, geometry, arch, reason = case_of(q, k, v, scale, lists, options, output_max, score_key, mask_key, output_rows=output_rows)
    key = (case, arch, score_key, mask_key, reason is None)
    plan = _plans.get(key)
    if plan is not None:
        INFO.hits += 1
    elif reason is None:
        plan = _plans[key] = plan_hopper_forward(case, score_key, mask_key)
    else:
        plan = _plans[key] = plan_forward(case, backend_of(q.device.type), arch, score_key, mask_key)
    numbers = _hopper_numbers(q, k, v) if reason is None else geometry.numbers
    numbers = [*numbers, *([scale, LOG2_E] if plan.scale_apart else [scale * LOG2_E])]
    tables = ()
    if lists is not None:
        numbers += lists.numbers
        tables = lists.tables
    if plan.spec.flag["STARTS"] and reason is None:
        numbers += out.stride()[:3]
    mods = mod_values(plan, score and score[1], mask and mask[1])
    try:
        variant, grid = launch(
            plan,
            (k, v, q, out),
            stats,
            (*numbers, *tables, *mods),
            lambda size: tiles_of(Q_LEN, size, lists, "q_block"),
            forced=options.backend == "GLUON",
        )
    except Unusable as why:
        _refused[case, arch, score_key, mask_key] = str(why)
        return forward(q, k, v, inputs, scale, score, mask, lists, options, output_max=output_max, output_rows=output_rows)
    if getattr(variant, "function", None) and plain_values((q, k, v, *tables, *numbers, *mods)) is not None:
        _ready[call] = _Ready(plan, variant.function, grid, numbers, out, lse)
    return out, lse, max_scores, Rows(rows, _are_raw(plan)) if output_rows else None


def _are_raw(plan: Plan | HopperPlan) -> bool:
    """Has a score_mod's kernel scores without scale?"""
    return isinstance(plan, HopperPlan) and plan.spec.flag["SUM_IS_RAW"]


def decodes(q: torch.Tensor, k: torch.Tensor, options: Options) -> bool:
    """Is the kernel for few queries to serve a call? Raises ValueError if it cannot and the user asks for it."""
    if options.backend == "DECODE":
        reason = decode.refuses(q, options)
        if reason:
            raise ValueError(f"kernel_options['BACKEND'] is 'TRITON_DECODE', but {reason}; leave BACKEND out")
        return True
    return options.backend is None and decode.suits(q, k, options)


def case_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    lists: BlockLists | None,
    options: Options,
    output_max: bool,
    score_key: tuple | None,
    mask_key: tuple | None,
    *,
    output_rows: bool = False,
) -> tuple[ForwardCase, Geometry, str, str | None]:
    """What the forward kernel depends on beside its mods, the device's architecture, and why it is not the one for Hopper (None if it is).
    Raises ValueError if that does not serve the call and the user asks for it."""
    geometry = geometry_of(q.element_size(), (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), strides_like(q, v.shape[3]))
    arch = architecture_of(q.device)
    aligned = (k.data_ptr() | v.data_ptr()) % 16 == 0
    use_tma = geometry.tma and wants_tma(options, q.dtype, arch) and aligned
    case = ForwardCase(
        q.dtype,
        q.shape[3],
        v.shape[3],
        geometry.units,
        geometry.aligned,
        use_tma,
        lists and lists.blocks,
        options,
        scale > 0,
        output_max,
        output_rows,
        max(q.shape[2], k.shape[2]) <= INDEX_BOUND,
    )
    reason = fits(case, geometry, arch, aligned and q.data_ptr() % 16 == 0)
    if options.backend == "GLUON" and reason is not None:
        raise ValueError(f"kernel_options['BACKEND'] is 'GLUON', but {reason}; leave BACKEND out")
    if options.backend == "TRITON":
        reason = "BACKEND is TRITON"
    elif reason is None and options.backend is None:
        reason = _refused.get((case, arch, score_key, mask_key))
        reason = reason or worthwhile(q.shape[2], q.shape[0] * q.shape[1], multiprocessors(q.device))
    return case, geometry, arch, reason


class Unusable(Exception):
    """The compiled kernel for Hopper is not to be used: the portable one is faster, or the only one that compiles."""


def usable(kernel: Kernel, args: tuple, device: torch.device, limit: float):
    """The variant of a kernel for Hopper, and its arguments. Raises Unusable if it does not compile, with a warning, as Gluon is
    experimental and may change with Triton; or if a thread spills more than `limit` bytes."""
    try:
        variant, plain = kernel.variant(args, device, (), num_warps=4)
    except Exception as error:
        text = f"{kernel.spec.template} does not compile with Triton {triton.__version__} ({type(error).__name__})"
        warnings.warn(f"flexpress: {text}; the portable kernel takes its place. {error}", RuntimeWarning, stacklevel=2)
        raise Unusable(text) from error
    if variant.function.local > limit:
        raise Unusable(f"its threads would spill {variant.function.local} bytes, more than {limit}")
    return variant, plain


def reached(extents: tuple[int, int, int, int], lists: BlockLists | None) -> tuple[int, int, int, int]:
    """How far a kernel's b, h, q_idx and kv_idx may reach: extents (Z, Hq, Q_LEN, KV_LEN), but past KV_LEN to the end of the last block,
    or of one that begins anywhere."""
    if lists is None or (lists.starts is None and LARGEST_BLOCK_N % lists.kv_block == 0):  # to which layouts_of rounds up anyway
        return extents
    if lists.starts is None:
        return *extents[:3], -(-extents[3] // lists.kv_block) * lists.kv_block
    return *extents[:3], extents[3] + lists.kv_block - 1


def keys_of(score: tuple | None, mask: tuple | None, extents: tuple[int, int, int, int]) -> tuple[tuple | None, tuple | None]:
    """What of bound mods changes a kernel."""
    return score and (score[0], layouts_of(*score, extents)), mask and (mask[0], layouts_of(*mask, extents))


def _hopper_numbers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[int]:
    Z, Hq, Q_LEN, D_QK = q.shape
    Zkv, Hkv, KV_LEN, D_V = v.shape
    kv_bytes = KV_LEN * (D_QK + D_V) * q.element_size() * Hkv // Hq
    return [Hq, Zkv, Hq // Hkv, Q_LEN, KV_LEN, Z * Hq, heads_per_group(Z * Hq, kv_bytes)]


def tiles_of(length: int, size: int, lists: BlockLists | None, axis: str) -> int:
    """How many tiles of `size` positions of the lists' rows there are; `axis` is the attribute that says how large a block is."""
    if lists is None or lists.starts is None:
        return -(-length // size)
    return (len(lists.starts) - 1) * (getattr(lists, axis) // size)


def _described(plan: Plan | HopperPlan, tensors: tuple) -> list:
    """Descriptors of the first of k, v, q and out, as many as the plan's kernel takes."""
    return [descriptor(t, *block) for t, block in zip(tensors, plan.blocks, strict=False)]


def _first_by_pointer(plan: Plan | HopperPlan) -> int:
    """From which of k, v, q and out on the plan's kernel takes pointers: what has no descriptor, and out where a tile may end anywhere."""
    return 3 if isinstance(plan, HopperPlan) and plan.spec.flag["STARTS"] else len(plan.blocks)


def launch(
    plan: Plan | HopperPlan, tensors: tuple, stats: tuple, rest: tuple, tiles: Callable[[int], int], *, forced: bool = False
) -> tuple:
    """Launch on k, v, q and out with the plan's tile, or with the next smaller one that the device can hold. `tiles` says how many tiles of
    so many queries a head has. Returns the variant and its programs."""
    q = tensors[2]
    Z, Hq = q.shape[:2]
    kernel = kernel_for(plan.spec)

    def prepared(tile) -> tuple[int, tuple]:
        args = (*_described(plan, tensors), *tensors[_first_by_pointer(plan) :], *stats)
        return tiles(tile.BLOCK_M) * Z * Hq, args

    if isinstance(plan, HopperPlan):
        grid, args = prepared(plan.tile)
        grid = min(grid, multiprocessors(q.device))
        with on(q.device):
            args = (*args, counter(q.device, torch._C._cuda_getCurrentRawStream(q.device.index)), *rest)
            variant, plain = kernel.variant(args, q.device, (), num_warps=4) if forced else usable(kernel, args, q.device, SPILL_LIMIT)
            variant.launch((grid,), plain, q.device.index)
        return variant, grid

    def launched(tile) -> tuple:
        grid, args = prepared(tile)
        return kernel.launch(
            (grid,), (*args, *rest), q.device, (tile.BLOCK_M, tile.BLOCK_N), num_warps=tile.num_warps, num_stages=tile.num_stages
        ), grid

    return launch_fitting(plan, launched)
