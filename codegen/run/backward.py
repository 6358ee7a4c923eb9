"""The backward kernels' driver: from tensors, bound mods and grad_output to the gradients of q, k, v and captured tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..device.arguments import Numbers
from ..device.kernel import architecture_of, backend_of, held_counter, kernel_for, multiprocessors, on
from ..device.tma import descriptor
from ..mod.compute import compute
from ..mod.expr import INDEX_BOUND, Expr, ModGraph
from ..plan.backward import (
    STATS_ALIGNMENT,
    BackwardCase,
    BackwardGeometry,
    BackwardPlan,
    Step,
    backward_geometry,
    delta_rows,
    delta_unit,
    plan_backward,
    stats_copies,
    whole_blocks,
)
from ..plan.forward import LOG2_E, Options, wants_tma
from ..plan.hopper_backward import L2_BYTES, HopperBackwardPlan, fits, plan_hopper_backward
from ..plan.hopper_forward import heads_per_group
from ..registry import INFO, Table, remembered
from ..text.spec import are_ordinary, mod_values
from .forward import BlockLists, Rows, Unusable, keys_of, output_like, reached, strides_like, tiles_of, usable
from .launch import launch_fitting

_plans: dict[tuple, BackwardPlan | HopperBackwardPlan] = Table("backward plans", 1024)
_ready: dict[tuple, _Ready] = Table("backward calls", 1024)
# cases for which the fused kernel was compiled and is not used, and why
_refused: dict[tuple, str] = Table("backward kernels not used", 1024)
_CHUNK = 1 << 24  # positions whose gradient is added up at a time on the host


class _Ready(NamedTuple):
    """What is the same in every backward pass of a kind: found by shapes, strides, alignment, graphs and options."""

    plan: BackwardPlan | HopperBackwardPlan
    case: tuple  # its key in _refused
    stats: tuple[int, int]  # copies and length of the row statistics
    known: dict[str, int | float]  # numbers, by parameter
    numbers: dict[str, Numbers]  # those of each kernel


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    rows: Rows,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    score: tuple[ModGraph, list] | None,
    mask: tuple[ModGraph, list] | None,
    lists: BlockLists | None,
    transposed: BlockLists | None,
    options: Options,
    *,
    wanted: frozenset[int] = frozenset(),
    deterministic: bool = False,
):
    """dq, dk, dv (shaped, typed and laid out as q, k, v) and {index of a captured tensor of score_mod in `wanted`: its gradient}.

    out, rows      what the forward pass returned      do, dlse   gradients of out and lse; dlse may be None
    lists          block lists of the forward pass     transposed the lists of query blocks for each KV block, in the same fields
    """
    q, k, v, do = map(with_rows, (q, k, v, do))
    Z, Hq, Q_LEN, D_QK = q.shape
    KV_LEN, D_V = v.shape[2:]
    dq, dk, dv = output_like(q, D_QK), output_like(k, D_QK), output_like(v, D_V)
    if out.numel() == 0 or KV_LEN == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), {i: torch.zeros_like(score[1][i]) for i in wanted}

    tensors = (q, k, v, do, dq, dk, dv)
    extents = (Z, Hq, Q_LEN, KV_LEN)
    keys = keys_of(score, mask, reached(extents, lists))
    ordinary = score is None or are_ordinary(score[1][len(score[0].tensors) :])
    layouts = tuple([(t.shape, t.stride(), t.data_ptr() % 16) for t in tensors[:4]])
    kind = (
        q.device,
        q.dtype,
        layouts,
        out.stride(),
        scale,
        options,
        deterministic,
        dlse is None,
        rows.raw,
        ordinary,
        wanted,
        *keys,
        lists and lists.structure,
        transposed and transposed.structure,
    )
    ready = _ready.get(kind)
    if ready is None:
        ready = _ready[kind] = _decide(
            q, k, v, out, do, scale, lists, transposed, options, deterministic, dlse is not None, rows.raw, ordinary, wanted, keys
        )
    else:
        INFO.hits += 1

    plan = ready.plan
    copies, stats_len = ready.stats
    tops = torch.empty((Z, Hq, 2 * copies, stats_len), dtype=torch.float32, device=q.device)
    delta = torch.empty((Z, Hq, copies, stats_len), dtype=torch.float32, device=q.device)
    stats = (rows.values, dlse.contiguous(), tops, delta) if dlse is not None else (rows.values, tops, delta)

    def describe_rows(*fused) -> None:
        """The rows' maxima, shares and delta, and for the fused kernel what it counts on."""
        kernel_for(plan.delta).launch(
            (Z * Hq * stats_len // delta_rows(D_V),),
            (out, do, *stats, *fused, ready.numbers["delta"]),
            q.device,
            (delta_rows(D_V),),
            num_warps=4,
            num_stages=1,
        )

    if isinstance(plan, HopperBackwardPlan):
        dq_sum = torch.empty((Z, Hq, Q_LEN, D_QK), dtype=torch.float32, device=q.device)
        done = torch.empty((2, Z, Hq), dtype=torch.int32, device=q.device)
        sums = _Sums((plan,), score, extents, q.device)
        try:
            with on(q.device), held_counter(q.device, torch._C._cuda_getCurrentRawStream(q.device.index)) as count:
                describe_rows(dq_sum, done, count)
                _launch_fused(ready, tensors, tops, delta, dq_sum, done, count, transposed, score, mask, sums)
        except Unusable as why:
            _refused[ready.case] = str(why)
            _ready.clear()  # others of this case have other lengths
            return backward(
                q, k, v, out, rows, do, dlse, scale, score, mask, lists, transposed, options, wanted=wanted, deterministic=deterministic
            )
        return dq, dk, dv, sums.gradients()
    describe_rows()
    sums = _Sums((plan.dkv, plan.dq), score, extents, q.device)
    _launch(ready, "dkv", (q, do), (k, v, tops, delta, dk, dv), transposed, score, mask, sums)
    _launch(ready, "dq", (k, v), (q, do, tops, delta, dq), lists, score, mask, sums)
    return dq, dk, dv, sums.gradients()


def _decide(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    do: torch.Tensor,
    scale: float,
    lists: BlockLists | None,
    transposed: BlockLists | None,
    options: Options,
    deterministic: bool,
    lse_gradient: bool,
    raw_tops: bool,
    ordinary: bool,
    wanted: frozenset[int],
    keys: tuple,
) -> _Ready:
    """All that does not depend on addresses."""
    Z, Hq, Q_LEN, D_QK = q.shape
    Zkv, Hkv, KV_LEN, _ = v.shape
    case, geometry, arch, reason = case_of(
        q, k, v, do, scale, lists, options, deterministic, lse_gradient, wanted, *keys, raw_tops=raw_tops, ordinary=ordinary
    )
    key = (case, arch, *keys, reason is None)
    plan = _plans.get(key)
    if plan is not None:
        INFO.hits += 1
    elif reason is None:
        plan = _plans[key] = plan_hopper_backward(case, *keys)
    else:
        plan = _plans[key] = plan_backward(case, backend_of(q.device.type), arch, *keys)

    walked = lists.q_block if lists else plan.dkv.tile.BLOCK_M if isinstance(plan, BackwardPlan) else 1
    whole = math.lcm(STATS_ALIGNMENT, walked)  # backward_dkv walks whole query blocks
    stats_len = -(-Q_LEN // whole) * whole
    if lists and lists.starts is not None:
        stats_len += whole  # the last block may begin anywhere
    copies = stats_copies(case) if reason is None else 1
    known = {
        **geometry.strides,
        "Z": Z,
        "Hq": Hq,
        "Zkv": Zkv,
        "Hkv": Hkv,
        "GROUP_SIZE": Hq // Hkv,
        "Q_LEN": Q_LEN,
        "KV_LEN": KV_LEN,
        "STATS_LEN": stats_len,
        "SM_SCALE": scale,
        "TO_LOG2": LOG2_E if plan.scale_apart else scale * LOG2_E,
    }
    if reason is None:
        heads = Zkv * Hkv
        row_bytes = D_QK * (q.element_size() + 4) + do.shape[3] * do.element_size()
        known["HEADS_PER_GROUP"] = heads_per_group(heads, Q_LEN * row_bytes * (Z * Hq // heads), L2_BYTES)
        kernels = {"fused": (plan.fused, transposed, "rows")}
    else:
        kernels = {"dkv": (plan.dkv.spec, transposed, "rows"), "dq": (plan.dq.spec, lists, "columns")}
    unit = delta_unit(case)
    rows = {
        f"stride_{name}{dim}": stride // unit if size > 1 else 0
        for name, t in (("o", out), ("do", do))
        for dim, stride, size in zip("zhm", t.stride(), t.shape, strict=False)
    }
    numbers = {
        name: Numbers(_numbers(spec, _with_lists({"first_tile": 0, **known}, part, width))) for name, (spec, part, width) in kernels.items()
    }
    numbers["delta"] = Numbers(_numbers(plan.delta, {**known, **rows}))
    return _Ready(plan, key[:-1], (copies, stats_len), known, numbers)


def case_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    scale: float,
    lists: BlockLists | None,
    options: Options,
    deterministic: bool,
    lse_gradient: bool,
    wanted: frozenset[int],
    score_key: tuple | None,
    mask_key: tuple | None,
    *,
    raw_tops: bool = False,
    ordinary: bool = True,
) -> tuple[BackwardCase, BackwardGeometry, str, str | None]:
    """What the backward kernels depend on beside their mods, the device's architecture, and why the fused kernel does not serve (None if
    it does)."""
    shapes = tuple(t.shape for t in (q, k, v, do, q, k, v))  # and dq, dk and dv
    strides = (*(t.stride() for t in (q, k, v, do)), *(strides_like(t, t.shape[3]) for t in (q, k, v)))
    geometry = backward_geometry(q.element_size(), shapes, strides)
    arch = architecture_of(q.device)
    tma = wants_tma(options, q.dtype, arch) and arch != "cpu"
    use_tma = tuple(
        tma and possible and all(t.data_ptr() % 16 == 0 for t in pair)
        for possible, pair in zip(geometry.tma, ((k, v), (q, do)), strict=True)
    )
    case = BackwardCase(
        q.dtype,
        q.shape[3],
        v.shape[3],
        geometry.aligned,
        use_tma,
        lists and lists.blocks,
        options,
        scale > 0,
        max(q.shape[2], k.shape[2]) <= INDEX_BOUND,
        q.shape[0] == 1,
        q.shape[1] == 1,
        deterministic,
        lse_gradient,
        wanted,
        ordinary,
        raw_tops,
        whole_blocks(q.shape[2], k.shape[2], lists and lists.blocks),
    )
    reason = "BACKEND is TRITON" if options.backend == "TRITON" else fits(case, arch, score_key)
    return case, geometry, arch, reason or _refused.get((case, arch, score_key, mask_key))


def with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its rows are contiguous and 16-byte steps apart where they can be, else a copy."""
    return tensor if _has_rows(tensor.shape, tensor.stride(), 16 // tensor.element_size()) else tensor.contiguous()


@remembered("checked strides of the backward pass", 4096)
def _has_rows(shape: tuple, strides: tuple, vector: int) -> bool:
    if strides[3] != 1 and shape[3] > 1:
        return False
    return shape[3] % vector != 0 or not any(s % vector for s, n in zip(strides[:3], shape, strict=False) if n > 1)


def _numbers(spec, known: dict) -> list:
    return [known[name] for name in spec.flag["parameters"]]


def _with_lists(known: dict, lists: BlockLists | None, width: str) -> dict:
    """Known numbers with those of the block lists, whose rows are `width` ("columns" or "rows") wide."""
    if lists is None:
        return known
    full = [] if lists.full_kv_indices is None else [f"full_mask_{width}"]
    names = ("mask_stride_z", "mask_stride_h", f"mask_{width}", *full, *([] if lists.starts is None else ["RANGES"]))
    return {**known, **dict(zip(names, lists.numbers, strict=True))}


def _launch_fused(
    ready: _Ready,
    tensors: tuple,
    tops: torch.Tensor,
    delta: torch.Tensor,
    dq_sum: torch.Tensor,
    done: torch.Tensor,
    count: torch.Tensor,
    lists: BlockLists | None,
    score,
    mask,
    sums: _Sums,
) -> None:
    """Launch hopper_backward: a program for each multiprocessor, unless there are fewer tiles and blocks of dQ to finish."""
    plan = ready.plan
    q, k, v, do, dq, dk, dv = tensors
    described = {"q": q, "do": do, "k": k, "v": v, "tops": tops, "delta": delta, "dq": dq_sum, "dk": dk, "dv": dv}
    mods = mod_values(plan, score and score[1], mask and mask[1])
    blocks = plan.blocks
    descriptors = [descriptor(t, *blocks[f"desc_{name}"]) for name, t in described.items()]
    heads = k.shape[0] * k.shape[1]
    tiles = tiles_of(k.shape[2], plan.tile.BLOCK_N, lists, "kv_block")
    stored = (dq_sum, dq, *((dk, dv) if plan.fused.flag["STARTS"] else ()), done)
    args = (*descriptors, *stored, count, ready.numbers["fused"], *(lists.tables if lists else ()), *mods, *sums.arguments(plan, 2 * tiles))
    variant, plain = usable(kernel_for(plan.fused), args, q.device, math.inf)
    work = max(tiles * heads, -(-q.shape[2] // plan.fused.flag["DQ_ROWS"]) * q.shape[0] * q.shape[1])
    variant.launch((min(work, multiprocessors(q.device)),), plain, q.device.index)


def _launch(ready: _Ready, name: str, streamed: tuple, rest: tuple, lists: BlockLists | None, score, mask, sums) -> None:
    """Launch backward_dq or backward_dkv with the step's tile, or with the next smaller one that the device can hold."""
    step, known = getattr(ready.plan, name), ready.known
    flags = step.spec.flag
    tables = lists.tables if lists else ()
    mods = mod_values(step, score and score[1], mask and mask[1])
    kernel = kernel_for(step.spec)
    heads = known["Z"] * known["Hq"] if name == "dq" else known["Zkv"] * known["Hkv"]

    def launch(tile) -> None:
        walked = tile.BLOCK_N if name == "dq" else tile.BLOCK_M
        first = tuple(descriptor(t, walked) for t in streamed) if flags["USE_TMA"] else streamed
        own = (known["Q_LEN"], tile.BLOCK_M, lists, "q_block") if name == "dq" else (known["KV_LEN"], tile.BLOCK_N, lists, "kv_block")
        tiles = tiles_of(*own)
        runs = [(head, 1) for head in range(heads)] if flags["SLABS"] else [(0, heads)]
        for head, count in runs:
            numbers = ready.numbers[name]
            if flags["SLABS"]:
                numbers = Numbers(_numbers(step.spec, _with_lists({**known, "first_tile": head * tiles}, lists, "columns")))
            captured = sums.arguments(step, tiles)
            kernel.launch(
                (tiles * count,),
                (*first, *rest, numbers, *tables, *mods, *captured),
                rest[0].device,
                (tile.BLOCK_M, tile.BLOCK_N),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
            if flags["SLABS"]:
                sums.add_slabs(step, divmod(head, known["Hq"]))

    launch_fitting(step, launch)


class _Sums:
    """The gradients of captured tensors: the buffers that kernels write, and how they become gradients."""

    def __init__(self, steps: tuple[Step | HopperBackwardPlan, ...], score, extents: tuple, device: torch.device) -> None:
        self.steps, self.score, self.extents, self.device = steps, score, extents, device
        self.buffers: dict[str, torch.Tensor] = {}
        self.totals: dict[int, torch.Tensor] = {}

    def _tensor(self, load: Expr) -> torch.Tensor:
        return self.score[1][load.attr]

    def arguments(self, step: Step | HopperBackwardPlan, tiles: int) -> list:
        """Buffers in the order of the kernel's parameters."""
        Z, Hq, Q_LEN, KV_LEN = self.extents
        shapes = {"row": (Z, Hq, Q_LEN), "column": (Z, Hq, KV_LEN), "head": (Z, Hq, tiles), "slab": (Q_LEN, KV_LEN)}
        made = []
        for captured, load in step.captured:
            buffer = self.buffers.get(captured.buffer)  # there already if an earlier launch wrote other heads, or the tile was too large
            if captured.role in ("store", "atomic"):
                if buffer is None:
                    tensor = self._tensor(load)
                    dtype = tensor.dtype if captured.role == "store" else torch.float32
                    buffer = torch.empty_strided(_own_shape(tensor), tensor.stride(), dtype=dtype, device=self.device).zero_()
            elif buffer is None or buffer.shape != shapes[captured.role]:
                buffer = torch.empty(shapes[captured.role], dtype=torch.float32, device=self.device)
            made.append(buffer.zero_() if captured.role == "slab" else buffer)
            self.buffers[captured.buffer] = buffer
        return made

    def add_slabs(self, step: Step, head: tuple[int, int]) -> None:
        """Add one head's stored positions to their places, a chunk of rows at a time."""
        _, _, Q_LEN, KV_LEN = self.extents
        rows = max(1, _CHUNK // KV_LEN)
        for captured, load in step.captured:
            if captured.role == "slab":
                for start in range(0, Q_LEN, rows):
                    part = self.buffers[captured.buffer][start : start + rows]
                    q_idx = torch.arange(start, start + len(part), device=self.device, dtype=torch.int32)[:, None]
                    self._add(
                        load,
                        part,
                        {
                            "q_idx": q_idx,
                            "kv_idx": self._range(KV_LEN)[None, :],
                            **{
                                s: torch.full((1, 1), n, dtype=torch.int32, device=self.device)
                                for s, n in zip(("b", "h"), head, strict=True)
                            },
                        },
                    )

    def _range(self, n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.int32, device=self.device)

    def _add(self, load: Expr, values: torch.Tensor, symbols: dict) -> None:
        """Add `values`, one for each position of the symbols' grid, to the elements that the load reads there."""
        tensor = self._tensor(load)
        count = len(self.score[0].tensors)
        shape = _own_shape(tensor)
        inside = torch.ones_like(values, dtype=torch.bool)
        indices = []
        for index, size, stride in zip(load.args, tensor.shape, tensor.stride(), strict=True):
            if stride == 0:  # one element; the kernel has seen to what lies outside
                indices.append(torch.zeros(values.shape, dtype=torch.int64, device=self.device))
                continue
            at = compute(index, symbols, self.score[1][:count], self.score[1][count:]).long().expand(values.shape)
            at = torch.where(at < 0, at + size, at)
            inside &= (at >= 0) & (at < size)
            indices.append(at.clamp(0, size - 1))
        total = self.totals.get(load.attr)
        if total is None:
            total = self.totals[load.attr] = torch.zeros(shape, dtype=torch.float32, device=self.device)
        elif total.dtype != torch.float32:  # what another load of this tensor stored
            total = self.totals[load.attr] = total.float()
        values = torch.where(inside, values.float(), 0.0)
        if indices:
            total.index_put_(tuple(indices), values, accumulate=True)
        else:
            total += values.sum()

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradient of every captured tensor that wants one, in its shape and dtype."""
        if not self.buffers:
            return {}
        Z, Hq, Q_LEN, KV_LEN = self.extents
        grid = {"b": self._range(Z)[:, None, None], "h": self._range(Hq)[None, :, None]}
        for step in self.steps:
            for captured, load in step.captured:
                buffer = self.buffers[captured.buffer]
                if captured.role in ("store", "atomic"):
                    found = self.totals.get(load.attr)
                    self.totals[load.attr] = buffer if found is None else found + buffer
                elif captured.role == "head":
                    self._add(load, buffer.sum(-1, keepdim=True), grid)
                elif captured.role == "row":
                    self._add(load, buffer, {**grid, "q_idx": self._range(Q_LEN)[None, None, :]})
                elif captured.role == "column":
                    self._add(load, buffer, {**grid, "kv_idx": self._range(KV_LEN)[None, None, :]})
        return {i: _spread(total, self.score[1][i]) for i, total in self.totals.items()}


def _own_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's shape with every dimension of stride 0, which holds one element, of size 1."""
    return tuple(1 if s == 0 else n for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _spread(total: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A gradient with the tensor's shape: where elements share memory, each gets an equal part of their sum."""
    shared = tensor.numel() // max(total.numel(), 1)
    return (total if shared <= 1 else total.float() / shared).to(tensor.dtype).expand(tensor.shape)
