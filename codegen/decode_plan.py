"""The kernels for few queries as a plan: from what is known of a call, and no tensor, to two KernelSpecs and a tile.

decode splits the keys of a row among programs, so that one query against many keys fills the device; combine_splits adds the parts up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .forward_plan import STRIDES, ForwardCase, Mod, lowered
from .lower import Target
from .spec import KernelSpec, ModText, dtype_name
from .tiles import Tile, decode_tile, round_up_head_dim

MAX_QUERIES = 16  # more of them keep the device busy without splitting keys
MIN_SHARE = 256  # keys of a part at least: adding up parts costs as much as reading some tens of keys
BLOCK_S = 16  # parts that combine_splits reads at a time


@dataclass(eq=False, slots=True)
class DecodePlan:
    """The kernels' text, their tile and how to find the mods' arguments. `combine` is None where keys are not split."""

    spec: KernelSpec
    combine: KernelSpec | None
    tile: Tile
    score: ModText | None
    mask: ModText | None
    scale_apart: bool  # SM_SCALE and TO_LOG2 are two arguments


def splits_of(keys: int, programs: int, multiprocessors: int) -> int:
    """Into how many parts to split `keys` keys, of which each one's `programs` programs would read all without splitting.

    Two waves of one program a multiprocessor: enough loads in flight, and few parts to add up.
    """
    return max(1, min(2 * multiprocessors // programs, keys // MIN_SHARE))


def plan_decode(case: ForwardCase, backend: str, arch: str, score: Mod | None, mask: Mod | None, rows: int, split: bool) -> DecodePlan:
    """The plan for a backend ("cuda", "hip", "cpu") and a row of the tile tables. rows: of a tile, queries times heads that share keys."""
    target = Target(backend, dtype_name(case.dtype), case.exact_indices, packed_heads=True)
    score_text, mask_text = lowered(score, mask, target)
    blocks = case.blocks
    tile = decode_tile(arch, rows, round_up_head_dim(case.d_qk), round_up_head_dim(case.d_v), case.dtype.itemsize,
                       kv_block=blocks.kv_block if blocks else 0)
    scale_apart = score is not None or not case.scale_is_positive
    return DecodePlan(_spec(case, backend, score_text, mask_text, scale_apart, split), _combine(case, backend) if split else None, tile,
                      score_text, mask_text, scale_apart)


def _spec(case: ForwardCase, backend: str, score: ModText | None, mask: ModText | None, scale_apart: bool, split: bool) -> KernelSpec:
    options, blocks, units = case.options, case.blocks, case.units
    numbers = ["Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN"]
    for t, unit in zip("qkv", units, strict=True):
        numbers += STRIDES[t][:3] if unit else STRIDES[t]
    numbers += STRIDES["o"]
    numbers += ["SM_SCALE", "TO_LOG2"] if scale_apart else ["TO_LOG2"]
    numbers += ["PACK"] + (["SPLITS"] if split else [])
    if blocks:
        numbers += ["mask_stride_z", "mask_stride_h", "mask_columns"] + (["full_mask_columns"] if blocks.has_full else [])
    strides = ["stride_kn", *([] if units[1] else ["stride_kd"]), "stride_vn", *([] if units[2] else ["stride_vd"])]
    float32 = case.dtype.itemsize == 4
    flags = {
        "DTYPE": dtype_name(case.dtype), "D_QK": case.d_qk, "D_V": case.d_v,
        "D_QK_ROUNDED": round_up_head_dim(case.d_qk), "D_V_ROUNDED": round_up_head_dim(case.d_v),
        "FLOAT32": float32, "FLOAT32_PRECISION": options.float32_precision if float32 else "",
        "Q_UNIT": units[0], "K_UNIT": units[1], "V_UNIT": units[2],
        "aligned": case.aligned, "ALIGNMENT": 16 // case.dtype.itemsize,
        "BLOCK_MASK": blocks is not None, "HAS_FULL_BLOCKS": blocks is not None and blocks.has_full,
        "SPARSE_KV_BLOCK_SIZE": blocks.kv_block if blocks else 0,
        "SCALE_IS_POSITIVE": case.scale_is_positive, "OUTPUT_MAX": case.output_max, "SPLIT": split,
        "kv_params": ", ".join(["K", "V", *strides]),
        "numbers": tuple(numbers) + tuple(n for m in (score, mask) if m for n in m.numbers), "parameters": tuple(numbers),
    }
    return KernelSpec("decode", (score, mask), tuple(flags.items()), backend)


def _combine(case: ForwardCase, backend: str) -> KernelSpec:
    numbers = ("Hq", "Q_LEN", "SPLITS", *STRIDES["o"])
    flags = {"D_V": case.d_v, "D_V_ROUNDED": round_up_head_dim(case.d_v), "OUTPUT_MAX": case.output_max, "numbers": numbers,
             "parameters": numbers}
    return KernelSpec("combine_splits", (), tuple(flags.items()), backend)


def without_lengths(case: ForwardCase) -> ForwardCase:
    """The case as decode depends on it: options for other kernels do not change its text."""
    options = replace(case.options, prescale_qk=False, rows_guaranteed_safe=False, blocks_are_contiguous=False, use_tma=None, backend=None,
                      tile=())
    blocks = case.blocks and case.blocks._replace(q_block=0, interior=True)
    return case._replace(options=options, blocks=blocks, use_tma=False)
