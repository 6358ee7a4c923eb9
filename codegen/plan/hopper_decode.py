"""The decode kernel for Hopper as a plan: which calls it serves, and from what is known of one to a KernelSpec.

The kernel (templates/hopper_decode.py.jinja) is written in Gluon, for sm_90 alone. It is for values that are the first columns of the keys,
as in absorbed multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434), whose head dims are wide. What it leaves for
combine_splits is what decode leaves.
"""

from __future__ import annotations

import torch

from ..mod.graphs.loads import weight_of
from ..mod.table.dtypes import dtype_name
from ..text.languages import GLUON
from ..text.mod_text import ModText
from ..text.parameters import Parameter, descriptor_of
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .decode import DecodeCase, DecodePlan, call_flags, combine_spec, decode_parameters, vector_of
from .forward import Mod, lowered
from .geometry import Geometry
from .hopper_forward import HEAVY, ROWS
from .slices import padded, slices_of
from .tiles import Tile

TILE = Tile(ROWS, 64, 8, 2)  # the warps that have the output, and buffers of K
# of a thread, of the softmax and of the producer: what is left has the output. Where pages are small, the producer needs more
REGISTERS, REGISTERS_SMALL_PAGES = (160, 32), (152, 40)
SLABS_IN_REGISTERS = 2  # of Q, 16 registers each: products read their left operand from shared memory for 64 columns alone


def fits(case: DecodeCase, geometry: Geometry, arch: str, aligned: bool, rows: int, score: Mod | None, mask: Mod | None) -> str | None:
    """Why a call cannot be served, or None if it can.

    aligned   the address of k is a multiple of 16 bytes
    rows      of a tile
    """
    if arch != "sm_90":
        return f"the kernel for Hopper needs sm_90, this is {arch}"
    if not case.values_in_keys:
        return "values are no view of the keys"
    if case.dtype not in (torch.bfloat16, torch.float16) or case.kv_dtype or case.scales:
        return "queries and keys are not of one dtype that has wgmma of its precision"
    widths = [s.width for s in slices_of(case.d_v)], [s.width for s in slices_of(case.d_qk)]
    if widths[0] not in ([256], [512]) or widths[1][1:] not in ([], [64]):
        return f"head dims are {case.d_qk} and {case.d_v}; there are tiles for 256 and 512, and 64 columns of keys more"
    if not (geometry.wide_tma and aligned):
        return "TMA cannot load k: a head dim that is not contiguous, or an address or strides that are no multiples of 16 bytes"
    if rows > ROWS:
        return f"tiles have {rows} rows, more than {ROWS}"
    if case.page_size % 64 and case.page_size not in (8, 16, 32):
        return f"pages have {case.page_size} keys; TMA copies pages of 8, 16, 32 and of multiples of 64"
    if case.blocks and (case.blocks.kv_block % 64 or case.blocks.starts or case.blocks.shifted):
        return f"blocks have {case.blocks.kv_block} keys, or do not lie at multiples of that"
    for mod in (score, mask):
        if mod and weight_of(mod[0]):
            return HEAVY[weight_of(mod[0])]
    return None


def plan_hopper_decode(case: DecodeCase, score: Mod | None, mask: Mod | None) -> DecodePlan:
    """The plan for a case that `fits`."""
    target = Target("cuda", dtype_name(case.dtype), case.exact_indices, GLUON, packed_heads=True)
    score_text, mask_text = lowered(score, mask, target)
    scale_apart = score is not None or not case.scale_is_positive
    combine = combine_spec(case, "cuda", scale_apart) if case.split else None
    return DecodePlan(_spec(case, score_text, mask_text, scale_apart), combine, TILE, score_text, mask_text, scale_apart)


def _spec(case: DecodeCase, score: ModText | None, mask: ModText | None, scale_apart: bool) -> KernelSpec:
    blocks, mods = case.blocks, [m for m in (score, mask) if m]
    rows = min(case.page_size or TILE.BLOCK_N, TILE.BLOCK_N)  # that TMA copies at once
    parameters = _parameters(case, rows, score, mask, scale_apart)
    taken = {p.name for p in parameters}
    registers = REGISTERS if rows >= 16 else REGISTERS_SMALL_PAGES
    by_key = any(s.loads and "kv_idx" in s.varies for mod in mods for s in mod.statements)  # which takes registers of the softmax
    flags = {
        "LANGUAGE": GLUON.name,
        "DTYPE": dtype_name(case.dtype),
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "D_QK_ROUNDED": padded(case.d_qk),
        "D_V_ROUNDED": padded(case.d_v),
        "BLOCK_N": TILE.BLOCK_N,
        "STAGES": TILE.num_stages,
        "SOFTMAX_REGISTERS": registers[0],
        "PRODUCER_REGISTERS": registers[1],
        "SLABS_IN_REGISTERS": 0 if by_key or rows < 16 else SLABS_IN_REGISTERS,
        "PAGE_ROWS": rows,
        "Q_UNIT": case.units[0],
        "aligned": tuple(name for name in case.aligned if name in taken),
        "ALIGNMENT": vector_of(case.dtype, None),
        "STEPS": blocks.kv_block // TILE.BLOCK_N if blocks else 1,
        **call_flags(case, scale_apart),
        "imports_triton": any("tl" in m.modules for m in mods),
    }
    return KernelSpec("hopper_decode", (score, mask), tuple(flags.items()), "cuda", parameters)


def _parameters(case: DecodeCase, rows: int, score: ModText | None, mask: ModText | None, scale_apart: bool) -> tuple[Parameter, ...]:
    """Those of decode, with a descriptor in the place of K and its strides."""
    places = f"pages, Hkv, {case.page_size}" if case.page_size else "Zkv, Hkv, KV_LEN"
    meaning = f"of [{places}, D_QK], V the first D_V columns"
    first = descriptor_of("K", dtype_name(case.dtype), rows, 64, meaning)
    rest = decode_parameters(case, score, mask, scale_apart)[1:]
    return (first, *(p for p in rest if not p.name.startswith("stride_k")))
