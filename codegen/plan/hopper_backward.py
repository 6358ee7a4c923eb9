"""The fused backward kernel for Hopper as a plan: which calls it serves, and from what is known of one to its KernelSpecs.

The kernel (templates/_hopper_backward_consumer.jinja, which three templates extend, each with its way to share the work) is written in
Gluon, for sm_90 alone. It takes row statistics from backward_delta, which also zeroes its counts and, of the sums of dQ, those that it does
not zero itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gpus import round_up_head_dim
from ..mod.expr import ModGraph
from ..mod.graphs.grad import differentiate
from ..mod.graphs.loads import loads_of, weight_of
from ..mod.graphs.nan import padding_may_be_nan
from ..mod.table.dtypes import dtype_name
from ..registry import remembered
from ..text.gradient_text import Differential
from ..text.languages import GLUON
from ..text.layouts import TensorLayout
from ..text.mod_text import ModText, mod_text
from ..text.parameters import Parameter, descriptor_of, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .backward import SYMBOLS, BackwardCase, delta_spec, strides
from .forward import Mod, batch_inside, block_flags, list_numbers, list_tables, mask_of_runs
from .hopper_forward import HEAVY, HeadGroup, scores_are_raw
from .roles import Gathered, buffers_of, gathered_in, role_of, roles_of
from .slices import parts_of, summed_columns

BLOCK_N = 128  # keys of a program, 64 for each consumer
L2_BYTES = 24 << 20  # of Q, dO and dQ's sums that heads which are worked on at a time may take
LISTED_BYTES = 72 << 20  # the same with block lists
DQ_BLOCK = 128 << 10  # bytes of dQ's sums that a program reads at once, to finish them: as many as keep memory busy
# a derivative is linear in the gradient of its result: it is applied to p before dP is there, which is waited for with fewer registers
_SYMBOLS = {**SYMBOLS, "grad": "p"}
_ROOM = 600  # bytes of shared memory that tiles of 192 and 128, and of 256 columns leave


@dataclass(frozen=True, slots=True)
class HopperBackwardTile:
    """Query rows of a block, and registers of a consumer's and of the producer's threads."""

    BLOCK_M: int
    consumer_registers: int = 240
    producer_registers: int = 24
    BLOCK_N: int = BLOCK_N


@dataclass(eq=False, slots=True)
class HopperBackwardPlan:
    """The kernels of one backward pass, in the order of their launch."""

    delta: KernelSpec
    fused: KernelSpec
    tile: HopperBackwardTile
    score: ModText | None
    mask: ModText | None
    scale_apart: bool  # TO_LOG2 does not carry the scale
    captured: Gathered = ()  # by the fused kernel


def worthwhile(q_rows: int, kv_len: int, heads: int, head_dim: int, listed: bool, multiprocessors: int) -> str | None:
    """Why the portable kernels are faster for a backward pass that the one for Hopper could serve, or None if they are not: short programs
    are through before this one's have begun their work, and with few key tiles two kernels have more programs than one.

    q_rows     of all heads that share keys
    heads      of keys and values
    head_dim   the larger one of D_QK and D_V
    listed     there are block lists
    """
    tiles = -(-kv_len // BLOCK_N) * heads
    if head_dim <= 64:
        short = q_rows <= 512 and tiles <= (2 if listed else 1) * multiprocessors or q_rows <= 1024 and 2 * tiles < multiprocessors
    else:
        short = head_dim <= 128 and q_rows <= 256 and tiles <= multiprocessors
    return f"there are {q_rows} queries for {tiles} tiles of {BLOCK_N} keys, and {multiprocessors} multiprocessors" if short else None


def lacks_room(plan: HopperBackwardPlan) -> str | None:
    """Why a plan's kernel would need more shared memory than there is, or None."""
    if plan.fused.template not in ("hopper_backward_sliced", "hopper_backward_wide"):
        return None
    handed = sum(m.staged("kv_idx", "q_idx").handed_bytes for m in (plan.score, plan.mask) if m)
    if 2 * plan.tile.BLOCK_M * handed <= _ROOM:
        return None
    return f"mods read {handed} bytes of each query, and for more than 4 there is no shared memory; capture int32 in place of int64, say"


@remembered("roles of captured gradients", 256)
def _roles(case: BackwardCase, graph: ModGraph, layouts: tuple[TensorLayout, ...]) -> tuple[str, ...]:
    return tuple(role_of(load, layouts[load.attr], case) for load in loads_of(graph) if load.attr in case.captured)


def fits(case: BackwardCase, arch: str = "sm_90", score: Mod | None = None) -> str | None:
    """Why a call cannot be served, or None if it can. TMA must be able to load q, k, v and dO and to store dk and dv, too."""
    if arch != "sm_90":
        return f"the kernel for Hopper needs sm_90, this is {arch}"
    if score and weight_of(score[0]):
        return HEAVY[weight_of(score[0])]
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype_name(case.dtype)} has no wgmma of its precision"
    if not (17 <= case.d_qk <= 192 and 17 <= case.d_v <= 128 or 129 <= min(case.d_qk, case.d_v) <= max(case.d_qk, case.d_v) <= 256):
        return f"head dims are {case.d_qk} and {case.d_v}; there are tiles for 17 to 192 and 17 to 128, and for 129 to 256"
    if case.extras.dropout == "packed" and not (case.blocks and case.blocks.starts):
        return "dropout of packed sequences whose blocks do not begin where they do: the portable kernels have it"
    if case.extras.dropout and max(padded(case.d_qk, case.d_v)) > 128:
        return f"dropout with head dims {case.d_qk} and {case.d_v}: the kernels for more than 128 columns have none"
    if case.deterministic:
        return "deterministic: programs add to dQ in any order"
    widest = max(padded(case.d_qk, case.d_v))
    if case.captured and widest > 128:
        return f"gradients of captured tensors with head dims {case.d_qk} and {case.d_v}: no tile for more than 128 columns gathers them"
    roles = set(_roles(case, *score)) if case.captured else set()
    if "row" in roles:
        return "gradients of a captured tensor that varies with the query alone: the portable kernels are faster"
    if widest == 128 and roles - {"head"}:
        return "gradients of a captured tensor that is read by more than batch entry and head take too many registers at head dims above 64"
    if not all(case.use_tma):
        return "TMA cannot load q, k, v or the gradient of the output, or is not wanted"
    tile = [name for name, _ in case.options.tile if name.startswith(("dq_", "dkv_"))]
    if tile:
        return f"{', '.join(tile)}: this kernel has tiles of its own"
    if case.options.prescale_qk:
        return "PRESCALE_QK: q goes to shared memory as it is"
    rows = 64  # of the smallest tile
    if case.blocks and (case.blocks.q_block % rows or case.blocks.kv_block % BLOCK_N):
        return f"block sizes {case.blocks.q_block} and {case.blocks.kv_block} are no multiples of {rows} and {BLOCK_N}"
    if case.blocks and case.blocks.starts:
        tile = hopper_backward_tile(case, score, None)
        if case.blocks.kv_block != tile.BLOCK_N:
            return (
                f"blocks that begin where a tensor says are tiles: with head dims {case.d_qk} and {case.d_v} they must have "
                f"{tile.BLOCK_N} keys, these have {case.blocks.kv_block}"
            )
    return None


def padded(d_qk: int, d_v: int) -> tuple[int, int]:
    """Head dims as the kernel computes with them: 64, 128, 192 and 256. dV leaves through buffers of dQ, no narrower."""
    if d_v > 128:
        return (192, 192) if max(d_qk, d_v) <= 192 else (256, 256)
    if d_qk > 128:
        return 192, 128
    d_v = max(32, round_up_head_dim(d_v))
    return max(round_up_head_dim(d_qk), d_v), d_v


def head_group(listed: bool) -> HeadGroup:
    """A tile of 128 keys for every multiprocessor, as tiles wait for those of the group before to zero their sums; with block lists several
    heads, as tiles take different times."""
    return HeadGroup(128, least=4 if listed else 2)


def enough_heads(kv_len: int, listed: bool) -> int:
    """How many heads of K and V are worked on at a time."""
    return head_group(listed).heads(1, -(-kv_len // BLOCK_N))


def hopper_backward_tile(case: BackwardCase, score: Mod | None, mask: Mod | None) -> HopperBackwardTile:
    """The tile for a case. Up to head dim 64, 128 query rows halve the number of barriers: 9 % faster under a causal mask. At 64 a
    score_mod would spill up to 1900 bytes, and is as fast with 64 rows; at 32 only gradients of captured tensors would. Dropout takes
    registers, too."""
    widest = padded(case.d_qk, case.d_v)[0]
    if widest == 256:
        return HopperBackwardTile(64, BLOCK_N=64)
    light = not case.captured if widest == 32 else not score and not (mask and mask[0].tensors)
    whole = not case.blocks or case.blocks.q_block % 128 == 0
    return HopperBackwardTile(128 if widest <= 64 and light and whole and not case.extras.dropout else 64)


def plan_hopper_backward(
    case: BackwardCase, score: Mod | None, mask: Mod | None, tile: HopperBackwardTile | None = None
) -> HopperBackwardPlan:
    """The plan for a case that `fits`; `tile` instead of its own, to measure another."""
    target = Target("cuda", dtype_name(case.dtype), case.exact_indices, GLUON)
    score_text = mask_text = None
    roles = ()
    check_padding = score is not None and padding_may_be_nan(score[0].result, case.ordinary)
    if score:
        found = differentiate(score[0], case.captured)
        derivative = found.score
        roles = roles_of(score, case, found.loads)
        names = SYMBOLS if roles else _SYMBOLS
        score_text = mod_text(
            *score,
            names,
            target,
            tile="qk",
            differential=Differential(derivative, roles, case.ordinary),
            vectors={**names, "q_idx": "rows", "kv_idx": "keys"} if not check_padding else None,
        )
    shown = mask_of_runs(mask, "q_idx", target)
    if shown:
        mask_text = mod_text(*shown, _SYMBOLS, target, tile="qk", beside=score)
    tile = tile or hopper_backward_tile(case, score, mask)
    scale_apart = score is not None or not case.scale_is_positive
    # share is read while S is computed: 5 % faster where that does not spill
    early = tile.BLOCK_M == 64 and not score and not (mask and mask[0].tensors)
    inside, gathered = batch_inside(score, mask), gathered_in(score_text, roles)
    fused = _spec(case, tile, score_text, mask_text, scale_apart, inside, check_padding, early, buffers_of(score, gathered))
    delta = delta_spec(case, "cuda", "first" if fused.flag["ZERO_AHEAD"] else "all", fused.flag["SUM_IS_RAW"], inside)
    return HopperBackwardPlan(delta, fused, tile, score_text, mask_text, scale_apart, gathered)


def _spec(
    case: BackwardCase,
    tile: HopperBackwardTile,
    score: ModText | None,
    mask: ModText | None,
    scale_apart: bool,
    inside: bool,
    check_padding: bool,
    early_share: bool,
    buffers: tuple[Parameter, ...],
) -> KernelSpec:
    blocks, mods, (d_qk, d_v) = case.blocks, [m for m in (score, mask) if m], padded(case.d_qk, case.d_v)
    raw = case.raw_tops and score is not None and scores_are_raw(score.sum, case.scale_is_positive)  # as the forward kernel had them
    starts = blocks is not None and blocks.starts
    columns = tile.BLOCK_M == 64  # which way consumers share a block's dQ; each computes 64 rows
    slices = 3 if d_qk == 192 else 1
    dq_columns = 32 if slices > 1 else min(64, d_qk // 2) if columns else d_qk
    least = dq_columns if d_v == 256 else 16  # where a consumer has one part, its dQ is so wide, and fills a buffer
    flags = {
        "LANGUAGE": GLUON.name,
        "DTYPE": dtype_name(case.dtype),
        "WIDE": d_v == 256,
        "TWICE": d_v == 192,
        **_head_dims("QK", case.d_qk, d_qk),
        **_head_dims("V", case.d_v, d_v),
        "SLICES": slices,
        "QK_COLUMNS": summed_columns(case.d_qk, d_qk),
        "V_COLUMNS": summed_columns(case.d_v, d_v),
        "DK_PARTS": parts_of(case.d_qk, d_qk, least),
        "DV_PARTS": parts_of(case.d_v, d_v, least),
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "SPLIT_COLUMNS": columns,
        "DQ_COLUMNS": dq_columns,
        "DQ_ROWS": DQ_BLOCK // (4 * round_up_head_dim(d_qk)),
        "ZERO_AHEAD": slices == 1,  # else no shared memory is left for zeroes
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
        **block_flags(blocks),
        "STEPS": blocks.q_block // tile.BLOCK_M if blocks else 1,
        "STARTS": starts,
        "BATCH_INSIDE": inside,
        "SCALE_FIRST": scale_apart,
        "SUM_IS_RAW": raw,
        "CHECK_PADDING": check_padding,
        "EARLY_SHARE": early_share,
        **case.extras.dropout_flags,
        "imports_triton": any("tl" in m.modules for m in mods),
    }
    template = "hopper_backward" + ("_wide" if flags["WIDE"] else "_twice" if flags["TWICE"] else "_sliced" if slices > 1 else "")
    parameters = _parameters(case, tile, dq_columns, mods, buffers)
    return KernelSpec(template, (score, mask), tuple(flags.items()), "cuda", parameters)


def _head_dims(name: str, d: int, padded_dim: int) -> dict[str, int]:
    """The flags of a head dim. 192 columns lie in slices of 64, of which the last one has a REST that is not all padding."""
    in_slices = padded_dim == 192
    return {
        f"D_{name}": d,
        f"D_{name}_ROUNDED": padded_dim,
        f"D_{name}_SLICE": 64 if in_slices else padded_dim,
        f"{name}_REST": round_up_head_dim(d - 128) if in_slices else 0,
    }


def _parameters(
    case: BackwardCase, tile: HopperBackwardTile, dq_columns: int, mods: list[ModText], buffers: tuple[Parameter, ...]
) -> tuple[Parameter, ...]:
    blocks, dtype, M, N = case.blocks, dtype_name(case.dtype), tile.BLOCK_M, tile.BLOCK_N
    starts = blocks is not None and blocks.starts
    d_qk, d_v = (64 if d == 192 else d for d in padded(case.d_qk, case.d_v))  # of a slice
    sizes = ["Z", "Zkv", "Hq", "Hkv", "GROUP_SIZE", "HEADS_PER_GROUP", "Q_LEN", "KV_LEN", *strides("dq"), "SM_SCALE", "TO_LOG2"]
    sizes += [*case.extras.numbers, *list_numbers(blocks, "q"), *(strides("dk", "dv") if starts else [])]
    return (
        descriptor_of("Q", dtype, M, d_qk),
        descriptor_of("DO", dtype, M, d_v),
        descriptor_of("K", dtype, N, d_qk),
        descriptor_of("V", dtype, N, d_v),
        descriptor_of("TOPS", "float32", 1, M),
        descriptor_of("DELTA", "float32", 1, M),
        descriptor_of("DQ_SUM", "float32", 64, dq_columns, name="desc_dq"),
        descriptor_of("DK", dtype, 64, min(d_qk, 128)),
        descriptor_of("DV", dtype, 64, min(d_v, 128)),
        pointer("DQ_SUM", "float32"),
        *(pointer(name, dtype) for name in ("DQ", *(("DK", "DV") if starts else ()))),
        pointer("DONE", "int32"),
        pointer("COUNTER", "int32"),
        *case.extras.of_dropout,
        *numbers(*sizes),
        *list_tables(blocks, "q"),
        *(p for m in mods for p in m.parameters),
        *buffers,
    )
