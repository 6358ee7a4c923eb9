"""The forward kernel's driver: from tensors and bound mods to a KernelSpec, a grid and arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from .cache import INFO
from .expr import INDEX_BOUND, ModGraph
from .kernel import Kernel, backend_of, capability_of, kernel_for
from .lower import Target, gathers
from .spec import KernelSpec, ModText, dtype_name, layouts_of, mod_text
from .tiles import Tile, architecture, forward_tile, next_smaller

LOG2_E = 1.4426950408889634
TILE_SHAPE = "qk.shape"
SYMBOL_NAMES = {"score": "score", "b": "z", "h": "h", "q_idx": "m", "kv_idx": "n"}


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


@dataclass(frozen=True)
class Options:
    """kernel_options that change the forward kernel's text or tile. `tile` holds BLOCK_M, BLOCK_N, num_warps, num_stages."""

    prescale_qk: bool = False
    rows_guaranteed_safe: bool = False
    blocks_are_contiguous: bool = False
    use_tma: bool | None = None  # None: where the device has it
    float32_precision: str = "ieee"
    tile: tuple[tuple[str, int], ...] = ()


@dataclass(eq=False, slots=True)
class _Plan:
    """What a repeated call needs: the kernel, its tile and how to find the mods' arguments."""

    kernel: Kernel
    tile: Tile
    score: ModText | None
    mask: ModText | None
    use_tma: bool
    scale_apart: bool  # SM_SCALE and TO_LOG2 are two arguments


_plans: dict[tuple, _Plan] = {}


def clear() -> None:
    """Forget every plan."""
    _plans.clear()


def round_up_head_dim(d: int) -> int:
    """Triton's tiles are powers of two, and a dot needs at least 16."""
    return max(16, 1 << (d - 1).bit_length())


_NAMES = {"score": "score", "b": "z", "h": "h", "q_idx": "m", "kv_idx": "n"}


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


@dataclass(frozen=True)
class Options:
    """kernel_options that change the forward kernel's text or tile. `tile` holds BLOCK_M, BLOCK_N, num_warps, num_stages."""

    prescale_qk: bool = False
    rows_guaranteed_safe: bool = False
    blocks_are_contiguous: bool = False
    use_tma: bool | None = None  # None: where the device has it
    float32_precision: str = "ieee"
    tile: tuple[tuple[str, int], ...] = ()


@dataclass(eq=False, slots=True)
class _Plan:
    """What a repeated call needs: the kernel, its tile and how to find the mods' arguments."""

    kernel: Kernel
    tile: Tile
    score: ModText | None
    mask: ModText | None
    use_tma: bool
    scale_apart: bool  # SM_SCALE and TO_LOG2 are two arguments


_plans: dict[tuple, _Plan] = {}


def clear() -> None:
    """Forget every plan."""
    _plans.clear()


def round_up_head_dim(d: int) -> int:
    """Triton's tiles are powers of two, and a dot needs at least 16."""
    return max(16, 1 << (d - 1).bit_length())


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides with 0 for dimensions of size 1, whose stride says nothing."""
    return tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


_NAMES = {t: tuple(f"stride_{t}{d}" for d in dims) for t, dims in (("q", "zhmd"), ("k", "zhnd"), ("v", "zhnd"), ("o", "zhm"))}


def output_like(q: torch.Tensor, d_v: int) -> torch.Tensor:
    """An empty (Z, Hq, Q_LEN, D_V) tensor laid out as q is, so that (B, S, H, D) code gets (B, S, H, D) back."""
    shape = (*q.shape[:3], d_v)
    order = sorted(range(3), key=lambda i: q.stride(i), reverse=True)
    storage = torch.empty([shape[i] for i in order] + [d_v], dtype=q.dtype, device=q.device)
    return storage.permute(*[order.index(i) for i in range(3)], 3)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What follows from the shapes and strides of q, k, v and out alone."""

    units: tuple[bool, bool, bool]  # is the head dim of q, k, v contiguous
    aligned: tuple[str, ...]  # strides that are multiples of 16 bytes and are passed in that unit
    numbers: tuple[int, ...]  # the kernel's first scalar arguments
    tma: bool  # shapes and strides that TMA can load


@functools.lru_cache(maxsize=4096)
def _geometry(itemsize: int, shapes: tuple, strides: tuple, out_strides: tuple) -> _Geometry:
    (_, Hq, Q_LEN, _), (_, Hkv, KV_LEN, _), (Zkv, *_) = shapes
    known = [tuple(0 if n == 1 else s for n, s in zip(shape, stride, strict=True)) for shape, stride in zip(shapes, strides, strict=True)]
    units = tuple(s[3] == 1 or shape[3] == 1 for s, shape in zip(known, shapes, strict=True))
    vector = 16 // itemsize
    aligned, numbers = [], [Hq, Zkv, Hq // Hkv, Q_LEN, KV_LEN]
    for t, s, unit in zip("qkv", known, units, strict=True):
        for name, stride in zip(_NAMES[t][:3], s[:3], strict=True):
            if stride % vector == 0:
                aligned.append(name)
                stride //= vector
            numbers.append(stride)
        if not unit:
            numbers.append(s[3])
    numbers += out_strides[:3]
    tma = all(s[3] == 1 and shape[3] % vector == 0 and all(x % vector == 0 and (x or n == 1) for x, n in zip(s[:3], shape[:3], strict=True))
              for s, shape in zip(known[1:], shapes[1:], strict=True))
    return _Geometry(units, tuple(aligned), tuple(numbers), tma)


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

    geometry = _geometry(q.element_size(), (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), out.stride())
    extents = (Z, Hq, Q_LEN, KV_LEN)
    exact = max(Q_LEN, KV_LEN) <= INDEX_BOUND
    use_tma = geometry.tma and _wants_tma(options, q.device) and k.data_ptr() % 16 == 0 and v.data_ptr() % 16 == 0
    score_key = (score[0], layouts_of(*score, extents)) if score else None
    mask_key = (mask[0], layouts_of(*mask, extents)) if mask else None
    list_key = (lists.full_kv_indices is not None, lists.q_block, lists.kv_block, lists.interior) if lists else None
    key = (q.dtype, D_QK, D_V, q.device, geometry.units, geometry.aligned, use_tma, scale > 0, output_max, options, exact, score_key,
           mask_key, list_key)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make_plan(q.dtype, D_QK, D_V, q.device, geometry, use_tma, scale > 0, output_max, options, exact, score_key,
                                        mask_key, lists)
    else:
        INFO.hits += 1
    numbers = [*geometry.numbers, *([scale, LOG2_E] if plan.scale_apart else [scale * LOG2_E])]
    tables = ()
    if lists is not None:
        Zm, Hm, rows, columns = lists.kv_indices.shape
        numbers += [Hm * rows if Zm > 1 else 0, rows if Hm > 1 else 0, columns]
        tables = (lists.kv_num_blocks, lists.kv_indices)
        if lists.full_kv_indices is not None:
            numbers.append(lists.full_kv_indices.shape[-1])
            tables += (lists.full_kv_num_blocks, lists.full_kv_indices)
    mods = [*(plan.score.values(score[1]) if score else ()), *(plan.mask.values(mask[1]) if mask else ())]
    stats = (lse, max_scores) if output_max else (lse,)
    _launch(plan, q, k, v, (out, *stats, *numbers, *tables, *mods))
    return out, lse, max_scores


def _launch(plan: _Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: tuple) -> None:
    """Launch with the plan's tile, or with the next smaller one that the device can hold."""
    Z, Hq, Q_LEN, _ = q.shape
    while True:
        tile = plan.tile
        keys, values = (_descriptor(k, tile.BLOCK_N), _descriptor(v, tile.BLOCK_N)) if plan.use_tma else (k, v)
        grid = (-(-Q_LEN // tile.BLOCK_M) * Z * Hq,)
        try:
            plan.kernel.launch(grid, (keys, values, q, *rest), q.device, (tile.BLOCK_M, tile.BLOCK_N), num_warps=tile.num_warps,
                               num_stages=tile.num_stages)
            return
        except OutOfResources:
            if next_smaller(tile) is None:
                raise
            plan.tile = next_smaller(tile)


def _wants_tma(options: Options, device: torch.device) -> bool:
    """TMA is faster wherever it exists (Hopper and later); in the interpreter only on request."""
    backend = backend_of(device.type)
    if backend == "cuda":
        return options.use_tma is not False and capability_of(device)[0] in (9, 10)
    return backend == "cpu" and options.use_tma is True


def _descriptor(tensor: torch.Tensor, rows: int):
    """A TMA descriptor of (Z, H, S, D) that loads [rows, D] of one head; what lies outside the tensor reads as zero."""
    if tensor.device.type == "cpu":
        return _make_descriptor(tensor, tensor.shape, tensor.stride(), rows)
    return _known_descriptor(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), rows)


@functools.lru_cache(maxsize=1024)
def _known_descriptor(address: int, dtype: torch.dtype, shape: tuple, strides: tuple, rows: int):
    """Descriptors are made once for an address and a layout; they keep no tensor alive."""
    return _make_descriptor(_Memory(address, dtype), shape, strides, rows)


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a descriptor needs of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _make_descriptor(base, shape: tuple, strides: tuple, rows: int):
    from triton.tools.tensor_descriptor import TensorDescriptor

    outer = [s if n > 1 else max(shape[3], 16) for s, n in zip(strides[:3], shape[:3], strict=True)]
    return TensorDescriptor(base, list(shape), [*outer, 1], [1, 1, rows, round_up_head_dim(shape[3])])


def _make_plan(dtype: torch.dtype, d_qk: int, d_v: int, device: torch.device, geometry: _Geometry, use_tma: bool, scale_is_positive: bool,
               output_max: bool, options: Options, exact: bool, score: tuple | None, mask: tuple | None, lists: BlockLists | None) -> _Plan:
    backend = backend_of(device.type)
    target = Target(backend, dtype_name(dtype), exact)
    score_text = mask_text = None
    taken = frozenset()
    if score:
        score_text = mod_text(*score, SYMBOL_NAMES, target, shape=TILE_SHAPE)
        taken = frozenset(c.name for c in (*score[0].tensors, *score[0].scalars))
    if mask:
        mask_text = mod_text(*mask, SYMBOL_NAMES, target, shape=TILE_SHAPE, taken=taken)
    blocks = {"q_block": lists.q_block, "kv_block": lists.kv_block} if lists else {}
    spec = forward_spec(
        backend=backend, dtype=dtype_name(dtype), d_qk=d_qk, d_v=d_v, units=geometry.units, aligned=geometry.aligned, score=score_text,
        mask=mask_text, has_lists=lists is not None, has_full=lists is not None and lists.full_kv_indices is not None,
        interior=lists is None or lists.interior, scale_is_positive=scale_is_positive, output_max=output_max, options=options,
        use_tma=use_tma, **blocks)
    arch = architecture(backend, capability_of(device) if backend == "cuda" else None)
    tile = forward_tile(arch, round_up_head_dim(d_qk), round_up_head_dim(d_v), dtype.itemsize, options=dict(options.tile),
                        gathers=any(gathers(m[0]) for m in (score, mask) if m), **blocks)
    scale_apart = score is not None or options.prescale_qk or not scale_is_positive
    return _Plan(kernel_for(spec), tile, score_text, mask_text, use_tma, scale_apart)


def forward_spec(*, backend: str, dtype: str, d_qk: int, d_v: int, score: ModText | None = None, mask: ModText | None = None,
                 units=(True, True, True), aligned: tuple[str, ...] = (), has_lists: bool = False, has_full: bool = False, q_block: int = 0,
                 kv_block: int = 0, interior: bool = True, scale_is_positive: bool = True, output_max: bool = False,
                 options: Options | None = None, use_tma: bool = False) -> KernelSpec:
    """The forward kernel's KernelSpec from structure alone: what `_make_plan`, offline compilation and `render` share."""
    options = options or Options()
    scale_first = score is not None or not scale_is_positive
    numbers = ["Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN"]
    for t, unit in zip("qkv", units, strict=True):
        numbers += _NAMES[t][:3] if unit else _NAMES[t]
    numbers += _NAMES["o"]
    numbers += ["SM_SCALE", "TO_LOG2"] if scale_first or options.prescale_qk else ["TO_LOG2"]
    if has_lists:
        numbers += ["mask_stride_z", "mask_stride_h", "mask_columns"] + (["full_mask_columns"] if has_full else [])
    strides = ["stride_kn", *([] if units[1] else ["stride_kd"]), "stride_vn", *([] if units[2] else ["stride_vd"])]
    kv_params = ["desc_k", "desc_v", "z_kv", "h_kv"] if use_tma else ["K", "V", *strides]
    flags = {
        "DTYPE": dtype, "D_QK": d_qk, "D_V": d_v, "D_QK_ROUNDED": round_up_head_dim(d_qk), "D_V_ROUNDED": round_up_head_dim(d_v),
        "FLOAT32": dtype == "float32", "FLOAT32_PRECISION": options.float32_precision if dtype == "float32" else "",
        "Q_UNIT": units[0], "K_UNIT": units[1], "V_UNIT": units[2],
        "aligned": aligned, "ALIGNMENT": 4 if dtype == "float32" else 8,
        "BLOCK_MASK": has_lists, "HAS_FULL_BLOCKS": has_full, "SPARSE_Q_BLOCK_SIZE": q_block, "SPARSE_KV_BLOCK_SIZE": kv_block,
        "CHECK_FULL_BLOCKS": not interior, "SCALE_IS_POSITIVE": scale_is_positive, "OUTPUT_MAX": output_max,
        "PRESCALE_QK": options.prescale_qk, "ROWS_GUARANTEED_SAFE": options.rows_guaranteed_safe,
        "BLOCKS_ARE_CONTIGUOUS": options.blocks_are_contiguous and has_lists, "USE_TMA": use_tma, "kv_params": ", ".join(kv_params),
        "numbers": tuple(numbers) + tuple(n for m in (score, mask) if m for n in m.numbers),
        "numbers_text": _wrapped(numbers),
    }
    return KernelSpec("forward", (score, mask), tuple(flags.items()), backend)


def _wrapped(names: list[str], width: int = 100) -> str:
    """Parameter names in lines of at most `width` columns."""
    lines, line = [], ""
    for name in names:
        if line and len(line) + len(name) > width:
            lines.append(line)
            line = ""
        line += ("" if not line else " ") + name + ","
    return "\n    ".join([*lines, line]).rstrip(",")
