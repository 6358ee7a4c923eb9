"""The backward kernels as a plan: from what is known of a call, and no tensor, to their KernelSpecs and tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..gpus import WIDEST_TILE, round_up_head_dim
from ..mod.graphs.grad import differentiate
from ..mod.graphs.loads import weight_of, width_of_dots
from ..mod.graphs.nan import padding_may_be_nan
from ..mod.table.dtypes import dtype_name
from ..registry import remembered
from ..text.gradient_text import Differential
from ..text.mod_text import ModText, mod_text
from ..text.parameters import Parameter, constants, descriptor_of, numbers, pointer, stride_names
from ..text.snippet import Target
from ..text.spec import KernelSpec
from .backward_tiles import backward_tile
from .extras import ORDINARY, Extras
from .forward import Blocks, Mod, Options, batch_inside, block_flags, element_flags, list_numbers, list_tables, own_elements
from .geometry import in_units, known_strides
from .roles import Gathered, buffers_of, gathered_in, roles_of
from .slices import padded
from .tiles import BLOCK, Tile

STATS_ALIGNMENT = 128  # backward_delta pads its rows to a multiple of this; query tiles divide it
SYMBOLS = {"score": "qk", "b": "z", "h": "h", "q_idx": "m", "kv_idx": "n", "grad": "grad"}  # in kernels that differentiate


def whole_blocks(q_len: int, kv_len: int, blocks: Blocks | None) -> bool:
    """Does every block end inside the sequence? Then no tile of it has a position that does not exist, and none needs a check."""
    if blocks is None:
        return q_len % BLOCK == 0 and kv_len % BLOCK == 0
    return not blocks.starts and q_len % blocks.q_block == 0 and kv_len % blocks.kv_block == 0


def delta_rows(d_v: int) -> int:
    """BLOCK_M of backward_delta: 4096 elements a program."""
    return max(16, min(STATS_ALIGNMENT, 4096 // round_up_head_dim(d_v)))


class BackwardCase(NamedTuple):
    """What changes the backward kernels, beside their mods."""

    dtype: torch.dtype
    d_qk: int
    d_v: int
    aligned: tuple[str, ...] = ()  # strides that are multiples of 16 bytes and are passed in that unit
    use_tma: tuple[bool, bool] = (False, False)  # of K and V in backward_dq; of Q and dO in backward_dkv
    blocks: Blocks | None = None
    options: Options = Options()
    scale_is_positive: bool = True
    exact_indices: bool = True
    one_batch: bool = False  # Z is 1: no two batch entries share an element of a captured tensor
    one_head: bool = False  # the same for Hq
    deterministic: bool = False
    lse_gradient: bool = False
    captured: frozenset[int] = frozenset()  # the captured tensors of score_mod that want a gradient
    ordinary: bool = True  # captured numbers of score_mod are, see mod/nan.py
    raw_tops: bool = False  # the forward kernel left largest scores without scale, of a score_mod that adds distances
    extras: Extras = ORDINARY  # sinks are there if their gradient is wanted
    whole: bool = False  # Q_LEN and KV_LEN are whole blocks, see `whole_blocks`


@dataclass(eq=False, slots=True)
class Step:
    """One kernel: its text, its tile, its mods."""

    spec: KernelSpec
    tile: Tile
    score: ModText | None = None
    mask: ModText | None = None
    captured: Gathered = ()


@dataclass(eq=False, slots=True)
class BackwardPlan:
    """The kernels of one backward pass.

    walks         in the order of their launch, by what they write: "dkv" or, of wide heads, "dk" and "dv"; and "dq"
    scale_apart   TO_LOG2 does not carry the scale
    """

    delta: KernelSpec
    walks: dict[str, Step]
    scale_apart: bool

    @property
    def dkv(self) -> Step:
        """What gathers the gradients of captured columns."""
        return next(iter(self.walks.values()))

    @property
    def dq(self) -> Step:
        return self.walks["dq"]


def plan_backward(case: BackwardCase, backend: str, arch: str, score: Mod | None, mask: Mod | None) -> BackwardPlan:
    """The plan for a backend ("cuda", "hip", "cpu") and a row of the tile tables."""
    precision = case.options.float32_precision
    target = Target(backend, dtype_name(case.dtype), case.exact_indices, float32_precision=precision, read_directly=backend == "cuda")
    roles, derivative = (), None
    if score:
        found = differentiate(score[0], case.captured)
        derivative = found.score
        roles = roles_of(score, case, found.loads, found.dots)
    columns = tuple(r for r in roles if r[0] == "column")
    others = tuple(r for r in roles if r[0] != "column")
    mask_text = mod_text(*mask, SYMBOLS, target, tile="qk", beside=score) if mask else None
    check_padding = score is not None and padding_may_be_nan(score[0].result, case.ordinary)
    sizes, added = case.blocks or Blocks(False, 0, 0), width_of_dots(score and score[0])
    wide = max(case.d_qk, case.d_v) > WIDEST_TILE  # no program has the registers for dK and dV
    heavy = (weight_of(score[0]) or ("own elements" if own_elements(score) else "")) if score else ""
    walks = {}
    for name, captured in ((("dk", columns), ("dv", ())) if wide else (("dkv", columns),)) + (("dq", others),):
        text = None
        if score:
            lies = replace(target, transposed=name != "dq", ends_keys=name == "dq" and not case.whole)
            differential = Differential(derivative, captured, case.ordinary, precision) if name != "dv" else None
            text = mod_text(*score, SYMBOLS, lies, tile="qk", differential=differential)
        tile = backward_tile(
            name,
            arch,
            padded(case.d_qk, added),
            padded(case.d_v),
            case.dtype.itemsize,
            heavy=heavy,
            q_block=sizes.q_block,
            kv_block=sizes.kv_block,
            options=dict(case.options.tile),
            quick=case.options.quick,
        )
        slabs = any(role == "slab" for role, _, _ in captured)
        gathered = gathered_in(text, captured)
        whole = case.whole and (case.blocks is not None or BLOCK % tile.BLOCK_M == 0 and BLOCK % tile.BLOCK_N == 0)
        parameters = _parameters(name, case, text, mask_text, buffers_of(score, gathered), slabs)
        inside = batch_inside(score, mask) and not slabs
        spec = _spec(name, case, backend, text, mask_text, slabs, inside, check_padding, whole, parameters)
        walks[name] = Step(spec, tile, text, mask_text, gathered)
    return BackwardPlan(delta_spec(case, backend), walks, score is not None or not case.scale_is_positive or case.options.prescale_qk)


def strides(*tensors: str) -> list[str]:
    """The strides of (Z, H, S, D) tensors that are kernel arguments, of gradients and tangents ("dq", "qt"), too; the last is 1."""
    return [name for t in tensors for name in stride_names(t, "zhn" if t.strip("dt") in ("k", "v") else "zhm")]


def statistics_read(delta: bool = True) -> tuple[Parameter, ...]:
    """What backward_delta leaves for the other kernels."""
    tops = pointer("TOPS", "float32", "[Z, Hq, 2, STATS_LEN]: top and share")
    return (tops, pointer("DELTA", "float32", "[Z, Hq, STATS_LEN]")) if delta else (tops,)


def delta_unit(case: BackwardCase) -> int:
    """In how many elements backward_delta takes strides: 16 bytes where rows are whole ones."""
    vector = 16 // case.dtype.itemsize
    return vector if case.d_v % vector == 0 else 1


def stats_copies(case: BackwardCase) -> int:
    """How many copies of row statistics the fused kernel wants, each shifted by a row more: TMA reads from whole 16 bytes on."""
    return 4 if case.blocks and case.blocks.starts else 1


def delta_spec(case: BackwardCase, backend: str, zero_dq: str = "", raw: bool = False, inside: bool = False) -> KernelSpec:
    """The KernelSpec of backward_delta; before the fused kernel it zeroes counts and sums of dQ as well: "all", or those of the "first"
    group of heads. `raw`: the next kernel's scores are without scale where the forward kernel's were. `inside`: see batch_inside."""
    fused = bool(zero_dq)
    sizes = ["Hq", "Q_LEN", "STATS_LEN", *strides("o", "do"), *(["Zkv", "GROUP_SIZE", "HEADS_PER_GROUP"] if zero_dq == "first" else [])]
    sizes += [*(["SM_SCALE"] if case.raw_tops else []), *(["TO_LOG2"] if fused or case.extras.sinks else [])]
    unit = delta_unit(case)
    lies = f"[Z, Hq, Q_LEN, D_V] in {f'strides of {unit} elements' if unit > 1 else 'any strides'}"
    parameters = [pointer("O", dtype_name(case.dtype), lies), pointer("DO", dtype_name(case.dtype), lies)]
    parameters.append(pointer("ROWS", "float32", "[Z, Hq, Q_LEN, 2]: top and share as the forward kernel leaves them"))
    parameters += [pointer("DLSE", "float32", "[Z, Hq, Q_LEN]")] if case.lse_gradient else []
    parameters += [pointer("TOPS", "float32", "written"), pointer("DELTA", "float32", "written")]
    if case.extras.sinks:
        parameters += [*case.extras.of_sinks, pointer("D_SINKS", "float32", "[Z, Hq, STATS_LEN / BLOCK_M], written")]
    if fused:
        parameters += [
            pointer("DQ_SUM", "float32", "[Z, Hq, Q_LEN, D_QK], zeroed"),
            pointer("DONE", "int32", "[2, Z, Hq], zeroed"),
            pointer("COUNTER", "int32", "[2], of which the second is written"),
        ]
    flags = {
        "D_V": case.d_v,
        "D_V_ROUNDED": round_up_head_dim(case.d_v),
        "UNIT": unit,
        "LSE_GRADIENT": case.lse_gradient,
        **case.extras.flags,
        "ROWS_ARE_RAW": case.raw_tops,
        "SCALE_TOPS": case.raw_tops and not raw,
        "RAW": raw,
        "ZERO_DQ": zero_dq,
        "BATCH_INSIDE": inside,
        "SHIFTS": stats_copies(case) if fused else 1,
    }
    if fused:
        flags |= {"D_QK": case.d_qk, "D_QK_ROUNDED": round_up_head_dim(case.d_qk)}
    return KernelSpec("backward_delta", (), tuple(flags.items()), backend, (*parameters, *numbers(*sizes), *constants("BLOCK_M")))


def _spec(
    name: str,
    case: BackwardCase,
    backend: str,
    score: ModText | None,
    mask: ModText | None,
    slabs: bool,
    inside: bool,
    check_padding: bool,
    whole: bool,
    parameters: tuple[Parameter, ...],
) -> KernelSpec:
    blocks, options = case.blocks, case.options
    taken = {p.name for p in parameters}
    tma = case.use_tma[0 if name == "dq" else 1]
    float32 = case.dtype is torch.float32
    flags = {
        **element_flags(case, options.float32_precision),
        "aligned": tuple(a for a in case.aligned if a in taken),
        "ALIGNMENT": 16 // case.dtype.itemsize,
        **block_flags(blocks),
        "WHOLE": whole,
        "CHECK_FULL_BLOCKS": not (blocks is None or blocks.interior or whole),
        "STARTS": blocks is not None and blocks.starts,
        "PEEL_TAIL": not float32,
        "CHECK_PADDING": check_padding and not whole,
        "SCALE_FIRST": score is not None or not case.scale_is_positive,
        "PRESCALE_QK": options.prescale_qk,
        **case.extras.dropout_flags,
        "PTX": backend == "cuda",
        "USE_TMA": tma,
        "SLABS": slabs,
        "BATCH_INSIDE": inside,
    }
    if name == "dq":
        flags["kv_params"] = "desc_k, desc_v, z_kv, h_kv" if tma else "K, V, stride_kn, stride_vn"
    else:
        flags |= {"WRITES_DK": name != "dv", "WRITES_DV": name != "dk"}
        flags["q_params"] = "desc_q, desc_do" if tma else "Q, DO, stride_qm, stride_dom"
        flags["q_args"] = "desc_q, desc_do" if tma else "q_head, do_head, stride_qm, stride_dom"
    return KernelSpec("backward_dq" if name == "dq" else "backward_dkv", (score, mask), tuple(flags.items()), backend, parameters)


def _parameters(
    name: str, case: BackwardCase, score: ModText | None, mask: ModText | None, buffers: tuple[Parameter, ...], slabs: bool
) -> tuple[Parameter, ...]:
    dtype, blocks = dtype_name(case.dtype), case.blocks
    d_qk, d_v = round_up_head_dim(case.d_qk), round_up_head_dim(case.d_v)
    queries = (("Q", d_qk, "[Z, Hq, Q_LEN, D_QK]"), ("DO", d_v, "[Z, Hq, Q_LEN, D_V]"))
    keys = (("K", d_qk, "[Zkv, Hkv, KV_LEN, D_QK]"), ("V", d_v, "[Zkv, Hkv, KV_LEN, D_V]"))
    written = name.removeprefix("d").upper()
    if name == "dq":
        streamed, kept, walked, tma = keys, queries, "BLOCK_N", case.use_tma[0]
        sizes = ["Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "STATS_LEN"]
    else:
        streamed, kept, walked, tma = queries, keys[:1] if name == "dv" else keys, "BLOCK_M", case.use_tma[1]
        sizes = ["Z", "Zkv", "Hkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "STATS_LEN"]
    sizes += strides("q", *(t.lower() for t, _, _ in keys if name != "dv" or t == "K"), "do", *(f"d{t.lower()}" for t in written))
    sizes += ["SM_SCALE", "TO_LOG2", *list_numbers(blocks, "kv" if name == "dq" else "q"), *(["first_tile"] if slabs else [])]
    sizes += case.extras.numbers
    if tma:
        found = [descriptor_of(t, dtype, walked, width, f"{shape} as TMA descriptor") for t, width, shape in streamed]
    else:
        found = [pointer(t, dtype, shape) for t, _, shape in streamed]
    found += [pointer(t, dtype, shape) for t, _, shape in kept]
    found += [
        *case.extras.of_dropout,
        *statistics_read(delta=name != "dv"),
        *(pointer(f"D{t}", dtype, f"written: as {t}") for t in written),
    ]
    mods = (p for m in (score, mask) if m for p in m.parameters)
    tables = list_tables(blocks, "kv" if name == "dq" else "q")
    return (*found, *numbers(*sizes), *tables, *mods, *buffers, *constants("BLOCK_M", "BLOCK_N"))


_READ = ("q", "k", "v", "do")


@dataclass(frozen=True, slots=True)
class BackwardGeometry:
    """What follows from shapes and strides alone: which strides are passed in units of 16 bytes, and all of them as passed."""

    aligned: tuple[str, ...]
    strides: dict[str, int]
    tma: tuple[bool, bool]  # can TMA load K and V, and Q and dO


@remembered("geometries of the backward pass", 4096)
def backward_geometry(itemsize: int, shapes: tuple, layouts: tuple) -> BackwardGeometry:
    """Of q, k, v, do, dq, dk, dv; a dimension of size 1 has stride 0."""
    names = (*_READ, "dq", "dk", "dv")
    vector, read, written, fits = 16 // itemsize, {}, {}, {}
    for name, shape, layout in zip(names, shapes, layouts, strict=True):
        known = known_strides(shape, layout)
        (read if name in _READ else written).update(zip(strides(name), known, strict=False))
        fits[name] = all(s % vector == 0 and (s or n == 1) for s, n in zip(known[:3], shape[:3], strict=True)) and shape[3] % vector == 0
        fits[name] = fits[name] and shape[3] <= WIDEST_TILE
    aligned, found = in_units(read, vector)
    return BackwardGeometry(aligned, found | written, (fits["k"] and fits["v"], fits["q"] and fits["do"]))
