"""The forward kernel's driver: from tensors and bound mods to a plan, a grid and arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cache import INFO
from .cuda import DoesNotFit
from .expr import INDEX_BOUND, ModGraph
from .forward_plan import Blocks, ForwardCase, Options, Plan, geometry_of, plan_forward, wants_tma
from .kernel import backend_of, capability_of, kernel_for
from .spec import layouts_of
from .tiles import architecture, next_smaller
from .tma import descriptor

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class BlockLists:
    """The block lists of a mask as kernels read them.

    kv_num_blocks (Zm, Hm, rows), kv_indices (Zm, Hm, rows, columns), both contiguous int32; Zm and Hm are 1 or Z and Hq. full_*: the
    same for blocks that need no mask_mod, or None. `interior`: no full block reaches past KV_LEN.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None
    full_kv_indices: torch.Tensor | None
    q_block: int
    kv_block: int
    interior: bool

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The lists in the order of the kernels' parameters."""
        full = () if self.full_kv_indices is None else (self.full_kv_num_blocks, self.full_kv_indices)
        return self.kv_num_blocks, self.kv_indices, *full

    @property
    def numbers(self) -> list[int]:
        """mask_stride_z, mask_stride_h (in rows; 0 for a mask that all share), and the widths of the index lists."""
        Zm, Hm, rows, _ = self.kv_indices.shape
        return [Hm * rows if Zm > 1 else 0, rows if Hm > 1 else 0, *(t.shape[-1] for t in self.tables[1::2])]


_plans: dict[tuple, Plan] = {}


def clear() -> None:
    """Forget every plan."""
    _plans.clear()


def output_like(q: torch.Tensor, d_v: int) -> torch.Tensor:
    """An empty (Z, Hq, Q_LEN, D_V) tensor laid out as q is, so that (B, S, H, D) code gets (B, S, H, D) back."""
    shape = (*q.shape[:3], d_v)
    order = sorted(range(3), key=lambda i: q.stride(i), reverse=True)
    storage = torch.empty([shape[i] for i in order] + [d_v], dtype=q.dtype, device=q.device)
    return storage.permute(*[order.index(i) for i in range(3)], 3)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, score: tuple[ModGraph, list] | None,
            mask: tuple[ModGraph, list] | None, lists: BlockLists | None, options: Options, *, output_max: bool = False):
    """out (Z, Hq, Q_LEN, D_V), lse float32 (Z, Hq, Q_LEN) and max_scores (the same, or None). Arguments are checked already.

    `mask` is the mask_mod of the partial blocks in `lists`; both None for dense attention.
    """
    Z, Hq, Q_LEN, D_QK = q.shape
    KV_LEN, D_V = v.shape[2:]
    out = output_like(q, D_V)
    lse = torch.empty((Z, Hq, Q_LEN), dtype=torch.float32, device=q.device)
    max_scores = torch.empty_like(lse) if output_max else None
    if out.numel() == 0 or KV_LEN == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return out, lse, max_scores.fill_(float("-inf")) if output_max else None

    geometry = geometry_of(q.element_size(), (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), out.stride())
    extents = (Z, Hq, Q_LEN, KV_LEN)
    arch = architecture_of(q.device)
    use_tma = geometry.tma and wants_tma(options, q.dtype, arch) and k.data_ptr() % 16 == 0 and v.data_ptr() % 16 == 0
    blocks = Blocks(lists.full_kv_indices is not None, lists.q_block, lists.kv_block, lists.interior) if lists else None
    case = ForwardCase(q.dtype, D_QK, D_V, geometry.units, geometry.aligned, use_tma, blocks, options, scale > 0, output_max,
                       max(Q_LEN, KV_LEN) <= INDEX_BOUND)
    score_key = (score[0], layouts_of(*score, extents)) if score else None
    mask_key = (mask[0], layouts_of(*mask, extents)) if mask else None
    key = (case, arch, score_key, mask_key)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = plan_forward(case, backend_of(q.device.type), arch, score_key, mask_key)
    else:
        INFO.hits += 1
    numbers = [*geometry.numbers, *([scale, LOG2_E] if plan.scale_apart else [scale * LOG2_E])]
    tables = ()
    if lists is not None:
        numbers += lists.numbers
        tables = lists.tables
    mods = [*(plan.score.values(score[1]) if score else ()), *(plan.mask.values(mask[1]) if mask else ())]
    stats = (lse, max_scores) if output_max else (lse,)
    _launch(plan, q, k, v, (out, *stats, *numbers, *tables, *mods))
    return out, lse, max_scores


def _launch(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: tuple) -> None:
    """Launch with the plan's tile, or with the next smaller one that the device can hold."""
    Z, Hq, Q_LEN, _ = q.shape
    kernel = kernel_for(plan.spec)
    while True:
        tile = plan.tile
        keys, values = (descriptor(k, tile.BLOCK_N), descriptor(v, tile.BLOCK_N)) if plan.use_tma else (k, v)
        grid = (-(-Q_LEN // tile.BLOCK_M) * Z * Hq,)
        try:
            kernel.launch(grid, (keys, values, q, *rest), q.device, (tile.BLOCK_M, tile.BLOCK_N), num_warps=tile.num_warps,
                               num_stages=tile.num_stages)
            return
        except DoesNotFit:
            if next_smaller(tile) is None:
                raise
            plan.tile = next_smaller(tile)


def architecture_of(device: torch.device) -> str:
    """The row of the tile tables for a device."""
    backend = backend_of(device.type)
    return architecture(backend, capability_of(device) if backend == "cuda" else None)
