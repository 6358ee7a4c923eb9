"""The driver of the kernels for few queries: from tensors and bound mods to a plan, two grids and arguments."""

from __future__ import annotations

import torch

from .cache import INFO
from .cuda import DoesNotFit
from .decode_plan import BLOCK_S, MAX_QUERIES, DecodePlan, plan_decode, splits_of, without_lengths
from .forward_plan import ForwardCase, Geometry
from .kernel import backend_of, kernel_for, multiprocessors
from .spec import mod_values
from .tiles import next_smaller

_plans: dict[tuple, DecodePlan] = {}
INTERPRETED = 4  # multiprocessors of the interpreter: enough for keys to be split


def clear() -> None:
    """Forget every plan."""
    _plans.clear()


def serves(q: torch.Tensor, lists, options) -> bool:
    """Has a call few queries, which one block of the lists holds, and no options that ask for another kernel?"""
    few = q.shape[2] <= (min(MAX_QUERIES, lists.q_block) if lists else MAX_QUERIES)
    return few and not options.tile and not options.prescale_qk and options.backend is None


def decode(tensors: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...], case: ForwardCase, geometry: Geometry, arch: str,
           scales: tuple[float, float, float], score: tuple | None, mask: tuple | None, keys: tuple, lists) -> None:
    """Fill outputs (out, lse and max_scores, if asked for) from tensors (q, k, v).

    scales   scale, log2(e) and their product
    keys     what of the bound score_mod and mask_mod changes a kernel
    """
    q, k, v = tensors
    Z, Hq, Q_LEN, _ = q.shape
    group = Hq // k.shape[1]
    pack = 1 if lists and lists.kv_num_blocks.shape[1] > 1 else group  # heads with lists of their own do not share a tile
    heads, device = Hq // pack, q.device
    processors = multiprocessors(device) if device.type != "cpu" else INTERPRETED
    splits = splits_of(k.shape[2], Z * heads, processors)
    case = without_lengths(case)
    rows = min(Q_LEN * pack, 64)
    key = (case, arch, *keys, 1 << (rows - 1).bit_length(), splits > 1)
    plan = _plans.get(key)
    if plan is not None:
        INFO.hits += 1
    else:
        plan = _plans[key] = plan_decode(case, backend_of(device.type), arch, *keys, rows, splits > 1)
    numbers = [*geometry.numbers, *(scales[:2] if plan.scale_apart else scales[2:]), pack]
    parts = outputs
    if splits > 1:
        numbers.append(splits)
        D_V = v.shape[3]
        parts = (torch.empty((Z, Hq, Q_LEN, splits, D_V), dtype=torch.float32, device=device),
                 *(torch.empty((Z, Hq, Q_LEN, splits), dtype=torch.float32, device=device) for _ in outputs[1:]))
    tables = ()
    if lists is not None:
        numbers += lists.numbers
        tables = lists.tables
    mods = mod_values(plan, score and score[1], mask and mask[1])
    kernel = kernel_for(plan.spec)
    while True:
        tile = plan.tile
        grid = (splits, -(-Q_LEN * pack // tile.BLOCK_M) * Z * heads)
        try:
            kernel.launch(grid, (k, v, q, *parts, *numbers, *tables, *mods), device, (tile.BLOCK_M, tile.BLOCK_N),
                          num_warps=tile.num_warps, num_stages=tile.num_stages)
            break
        except DoesNotFit:
            if next_smaller(tile) is None:
                raise
            plan.tile = next_smaller(tile)
    if splits > 1:
        kernel_for(plan.combine).launch((Z * Hq * Q_LEN,), (*parts, *outputs, Hq, Q_LEN, splits, *outputs[0].stride()[:3]), device,
                                        (BLOCK_S,), num_warps=4, num_stages=1)
