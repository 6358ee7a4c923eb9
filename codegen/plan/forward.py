"""The portable forward kernel as a plan: from what is known of a call, and no tensor, to a KernelSpec and a tile.

Calls, the command line and offline compilation all come through `plan_forward`, so all print the same kernel. Calls that the kernel for
Hopper serves (hopper_forward) or that have few queries (decode) have other plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..gpus import round_up_head_dim
from ..mod.expr import INDEX_BOUND, Expr, ModGraph, symbols_in
from ..mod.graphs.loads import POSITIONS, loads_of, takes_registers, width_of_dots
from ..mod.graphs.position_runs import POSITIONS_END, as_run
from ..mod.table.dtypes import dtype_name
from ..text.layouts import TensorLayout
from ..text.mod_text import ModText, mod_text
from ..text.parameters import Parameter, constants, descriptor_of, numbers, pointer
from ..text.snippet import Copied, Target
from ..text.spec import KernelSpec
from .extras import ORDINARY, Extras
from .geometry import STRIDES
from .slices import padded, slices_of
from .tiles import Tile, forward_tile

LOG2_E = 1.4426950408889634
_SYMBOLS = {"score": "score", "b": "z", "h": "h", "q_idx": "m", "kv_idx": "n", POSITIONS_END: "end_n"}


class Options(NamedTuple):
    """kernel_options that change the forward kernel's text or tile. `tile` holds BLOCK_M, BLOCK_N, num_warps, num_stages."""

    prescale_qk: bool = False
    use_tma: bool | None = None  # None: where the device has it and it is faster
    float32_precision: str = "ieee"
    backend: str | None = None  # "PORTABLE", "HOPPER", "DECODE" (few queries) or "CPP" (on a CPU); None: the fastest that serves
    tile: tuple[tuple[str, int], ...] = ()
    quick: bool = False  # the portable kernels are to compile fast: they serve while others compile


class Blocks(NamedTuple):
    """A block mask's structure.

    interior   no full block reaches past KV_LEN
    starts     blocks begin where a tensor says, and lists hold first positions (see BlockLists)
    shifted    blocks lie elsewhere in a longer sequence, where two tensors say (see Shifts)
    far        indices there may be above INDEX_BOUND
    """

    has_full: bool
    q_block: int
    kv_block: int
    interior: bool = True
    starts: bool = False
    shifted: bool = False
    far: bool = False


def block_flags(blocks: Blocks | None) -> dict[str, object]:
    """What every template that reads block lists knows of them."""
    return {
        "BLOCK_MASK": blocks is not None,
        "HAS_FULL_BLOCKS": blocks is not None and blocks.has_full,
        "SPARSE_Q_BLOCK_SIZE": blocks.q_block if blocks else 0,
        "SPARSE_KV_BLOCK_SIZE": blocks.kv_block if blocks else 0,
        "SHIFTED": blocks is not None and blocks.shifted,
    }


def are_exact(q_len: int, kv_len: int, blocks: Blocks | None) -> bool:
    """Is every index below INDEX_BOUND?"""
    return max(q_len, kv_len) <= INDEX_BOUND and not (blocks and blocks.far)


def element_flags(case, float32_precision: str) -> dict[str, object]:
    """What every portable template knows of its tensors' elements and head dims, from a case of any kind."""
    float32, size = case.dtype is torch.float32, case.dtype.itemsize
    return {
        "DTYPE": dtype_name(case.dtype),
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "D_QK_ROUNDED": round_up_head_dim(case.d_qk, size),
        "D_V_ROUNDED": round_up_head_dim(case.d_v, size),
        "QK_SLICES": slices_of(case.d_qk, size),
        "V_SLICES": slices_of(case.d_v, size),
        "FLOAT8": case.dtype is torch.float8_e4m3fn,
        "FLOAT32": float32,
        "FLOAT32_PRECISION": float32_precision if float32 else "",
    }


def list_numbers(blocks: Blocks | None, axis: str = "kv") -> tuple[str, ...]:
    """The names of the numbers that go with block lists, of KV blocks or ("q") of query blocks."""
    if blocks is None:
        return ()
    width = "columns" if axis == "kv" else "rows"
    full = (f"full_mask_{width}",) if blocks.has_full else ()
    return "mask_stride_z", "mask_stride_h", f"mask_{width}", *full, *(("RANGES",) if blocks.starts else ())


def list_tables(blocks: Blocks | None, axis: str = "kv") -> tuple[Parameter, ...]:
    """The parameters that take the lists themselves."""
    if blocks is None:
        return ()
    kinds = ("", "full_") if blocks.has_full else ("",)
    names = tuple(f"{kind}{axis}_{what}" for kind in kinds for what in ("num_blocks", "indices"))
    names += ("starts",) if blocks.starts else ("q_shifts", "kv_shifts") if blocks.shifted else ()
    return tuple(Parameter(name, "*int32") for name in names)


class Cache(NamedTuple):
    """How a cache holds the keys of sequences whose queries are packed one after another (see decode.Cached).

    page_size   positions of a page; 0: a sequence has an entry of its own
    located     every sequence says which entry
    offsets     every sequence says at which position its queries begin; else they are its last positions
    grouped     the pages are prefixes that groups of sequences share, and tables say which sequence and position a group's queries have;
                what is left are parts for combine_splits
    """

    page_size: int = 0
    located: bool = False
    offsets: bool = False
    grouped: bool = False


class ForwardCase(NamedTuple):
    """What changes the forward kernel, beside its mods."""

    dtype: torch.dtype
    d_qk: int
    d_v: int
    units: tuple[bool, bool, bool] = (True, True, True)  # is the head dim of q, k, v contiguous
    aligned: tuple[str, ...] = ()  # strides that are multiples of 16 bytes and are passed in that unit
    use_tma: bool = False
    blocks: Blocks | None = None
    options: Options = Options()
    scale_is_positive: bool = True
    output_max: bool = False
    output_rows: bool = False  # what the backward pass needs of every row
    exact_indices: bool = True
    cache: Cache | None = None  # the kernel for Hopper alone
    extras: Extras = ORDINARY
    values_in_keys: bool = False  # V is the first columns of K, in the same memory; the portable kernel alone
    few_tiles: bool = False  # of queries, for the multiprocessors that there are; the kernel for Hopper alone
    copies: bool = False  # what score_mod reads for every pair of positions lies where TMA copies it; the kernel for Hopper alone


Mod = tuple[ModGraph, tuple[TensorLayout, ...]]


@dataclass(eq=False, slots=True)
class Plan:
    """The kernel's text, its tile and how to find the mods' arguments."""

    spec: KernelSpec
    tile: Tile
    score: ModText | None
    mask: ModText | None
    scale_apart: bool  # SM_SCALE and TO_LOG2 are two arguments


def wants_tma(options: Options, dtype: torch.dtype, arch: str) -> bool:
    """TMA is faster wherever it exists, but spills with float32 in full precision; in the interpreter only on request."""
    if arch in ("sm_90", "sm_100"):
        return options.use_tma if options.use_tma is not None else dtype is not torch.float32
    return arch == "cpu" and options.use_tma is True


def plan_forward(case: ForwardCase, backend: str, arch: str, score: Mod | None, mask: Mod | None) -> Plan:
    """The plan for a backend ("cuda", "hip", "cpu") and a row of the tile tables."""
    precision = case.options.float32_precision
    target = Target(backend, dtype_name(case.dtype), case.exact_indices, float32_precision=precision, read_directly=backend == "cuda")
    blocks = case.blocks
    checked = blocks and blocks.has_full and not blocks.interior  # where keys end, for full blocks and others alike
    shown = mask_of_runs(mask, "kv_idx", target, ends=not checked)
    score_text, mask_text = lowered(score, shown, target)
    tile = forward_tile(
        arch,
        padded(case.d_qk, width_of_dots(score and score[0])),
        padded(case.d_v),
        case.dtype.itemsize,
        gathers=any(takes_registers(m[0]) for m in (score, mask) if m),
        q_block=blocks.q_block if blocks else 0,
        kv_block=blocks.kv_block if blocks else 0,
        options=dict(case.options.tile),
        quick=case.options.quick,
        values_in_keys=case.values_in_keys,
    )
    scale_apart = score is not None or case.options.prescale_qk or not case.scale_is_positive
    spec = _spec(case, backend, score_text, mask_text, scale_apart, batch_inside(score, mask))
    return Plan(spec, tile, score_text, mask_text, scale_apart)


def batch_inside(score: Mod | None, mask: Mod | None) -> bool:
    """Do programs of all batch entries for one head and tile come beside each other?

    So they do where batch entries share elements that every position has of its own (a bias of a head). One entry brings them to the L2
    cache for all, and what is added to their gradients meets there. The whole tensor is too large for it.
    """
    return any(not any("b" in symbols_in(a) for a in indices) for indices in own_elements(score, mask))


def own_elements(*mods: Mod | None) -> list[list[Expr]]:
    """The indices of each load of an element that every position has of its own."""
    loads = (indices_of(load, m[1][load.attr]) for m in mods if m for load in loads_of(m[0]))
    return [indices for indices in loads if {a.attr for a in indices if a.op == "symbol"} >= POSITIONS]


def indices_of(load: Expr, layout: TensorLayout) -> list[Expr]:
    """The indices of a load that matter: a dimension of stride 0 is one element, whatever its index."""
    return [a for i, a in enumerate(load.args) if layout.strides[i] != "0"]


def lowered(
    score: Mod | None,
    mask: Mod | None,
    target: Target,
    vectors: dict[str, str] | None = None,
    *,
    by_distance: bool = False,
    copied: Copied | None = None,
) -> tuple[ModText | None, ModText | None]:
    """The mods as a forward kernel sees them; where both capture something of one name, the mask's gets another (vectors, by_distance,
    copied: see mod_text)."""
    details = {"vectors": vectors, "by_distance": by_distance, "copied": copied}
    score_text = mod_text(*score, _SYMBOLS, target, tile="qk", **details) if score else None
    mask_text = mod_text(*mask, _SYMBOLS, target, tile="qk", beside=score) if mask else None
    return score_text, mask_text


def mask_of_runs(mask: Mod | None, axis: str, target: Target, ends: bool = False) -> Mod | None:
    """A mask as runs along an axis (see as_run), where positions are small enough for that."""
    return (as_run(mask[0], axis, ends), mask[1]) if mask and target.exact_indices else mask


def _spec(case: ForwardCase, backend: str, score: ModText | None, mask: ModText | None, scale_apart: bool, inside: bool) -> KernelSpec:
    options, blocks, units = case.options, case.blocks, case.units
    read = [("K", "k", units[1]), *([] if case.values_in_keys else [("V", "v", units[2])])]
    tensors, strides = [name for name, _, _ in read], [f"stride_{t}{d}" for _, t, unit in read for d in ("n" if unit else "nd")]
    parameters = _parameters(case, score, mask, scale_apart)
    taken = {p.name for p in parameters}
    float32 = case.dtype is torch.float32
    flags = {
        **element_flags(case, options.float32_precision),
        "Q_UNIT": units[0],
        "K_UNIT": units[1],
        "V_UNIT": units[2],
        "VALUES_IN_KEYS": case.values_in_keys,
        "aligned": tuple(name for name in case.aligned if name in taken),
        "ALIGNMENT": 16 // case.dtype.itemsize,
        **block_flags(blocks),
        "CHECK_FULL_BLOCKS": blocks is not None and not blocks.interior,
        "STARTS": blocks is not None and blocks.starts,
        "BATCH_INSIDE": inside,
        "PEEL_TAIL": not float32,  # a second copy of the dot makes float32 kernels spill
        "SCALE_IS_POSITIVE": case.scale_is_positive,
        "OUTPUT_MAX": case.output_max,
        "OUTPUT_ROWS": case.output_rows,
        **case.extras.flags,
        "PTX": backend == "cuda",
        "PRESCALE_QK": options.prescale_qk,
        "USE_TMA": case.use_tma,
        "kv_params": ", ".join(["desc_k", "desc_v", "z_kv", "h_kv"] if case.use_tma else [*tensors, *strides]),
    }
    return KernelSpec("forward", (score, mask), tuple(flags.items()), backend, parameters)


def _parameters(case: ForwardCase, score: ModText | None, mask: ModText | None, scale_apart: bool) -> tuple[Parameter, ...]:
    dtype, blocks = dtype_name(case.dtype), case.blocks
    keys, values = "[Zkv, Hkv, KV_LEN, D_QK]", "[Zkv, Hkv, KV_LEN, D_V]"
    if case.use_tma:
        found = [
            descriptor_of("K", dtype, "BLOCK_N", round_up_head_dim(case.d_qk, case.dtype.itemsize), f"{keys} as TMA descriptor"),
            _values_descriptor(case, values),
        ]
    else:
        found = [pointer("K", dtype, f"{keys}{', V the first D_V columns' if case.values_in_keys else ''}")]
        found += [] if case.values_in_keys else [pointer("V", dtype, values)]
    found.append(pointer("Q", dtype, "[Z, Hq, Q_LEN, D_QK]"))
    found.append(pointer("O", case.extras.out or dtype, "[Z, Hq, Q_LEN, D_V] in any strides, written"))
    sizes = ("Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", *stride_names_of(case.units, case.values_in_keys))
    sizes += *scale_names(scale_apart), *list_numbers(blocks)
    sizes += case.extras.numbers
    mods = tuple(p for m in (score, mask) if m for p in m.parameters)
    statistics = statistic_parameters("Z, Hq, Q_LEN", case.output_max, case.output_rows)
    found += statistics
    return (
        *found,
        *case.extras.of_sinks,
        *case.extras.of_dropout,
        *case.extras.of_scales,
        *numbers(*sizes),
        *list_tables(blocks),
        *mods,
        *constants("BLOCK_M", "BLOCK_N"),
    )


def _values_descriptor(case: ForwardCase, values: str) -> Parameter:
    """V as TMA loads it. What is summed over is contiguous in products of 8 bits, and that is the keys."""
    dtype, width = dtype_name(case.dtype), round_up_head_dim(case.d_v, case.dtype.itemsize)
    if case.dtype.itemsize == 1:
        return descriptor_of("V", dtype, width, "BLOCK_N", "[Zkv, Hkv, D_V, KV_LEN], V transposed, as TMA descriptor")
    return descriptor_of("V", dtype, "BLOCK_N", width, f"{values} as TMA descriptor")


def stride_names_of(units: tuple[bool, bool, bool], values_in_keys: bool = False) -> tuple[str, ...]:
    """Strides of q, k, v and out: of their head dims only where they are not contiguous, and of v unless it is read with k."""
    read = zip("qk" if values_in_keys else "qkv", units, strict=False)
    inputs = (name for t, unit in read for name in (STRIDES[t][:3] if unit else STRIDES[t]))
    return *inputs, *STRIDES["o"]


def scale_names(scale_apart: bool) -> tuple[str, ...]:
    """The scale and the factor to base 2, or the latter with the scale in it."""
    return ("SM_SCALE", "TO_LOG2") if scale_apart else ("TO_LOG2",)


def scales(scale: float, scale_apart: bool) -> dict[str, float]:
    """Their values."""
    return {"SM_SCALE": scale, "TO_LOG2": LOG2_E if scale_apart else scale * LOG2_E}


def statistic_parameters(rows: str, output_max: bool, output_rows: bool) -> tuple[Parameter, ...]:
    """What is written of every row beside the output."""
    found = [pointer("LSE", "float32", f"[{rows}], written")]
    found += [pointer("MAX", "float32", f"[{rows}], written")] if output_max else []
    found += [pointer("ROWS", "float32", f"[{rows}, 2], written")] if output_rows else []
    return tuple(found)
