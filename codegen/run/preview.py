"""Kernels without a call: the KernelSpec that mods would get, and what a compiler must know of its arguments.

Nothing here needs a device or an input tensor. The command line prints kernels this way, and the committed
prints and the offline compilation tests are made this way. Specs come from the plans that calls have theirs from; which of two kernels
a call gets is for the caller to ask (`preview` and `compilation` give the portable one, `hopper_compilation` the one for Hopper).

    preview(alibi(slopes), causal, head_dim=64)                  the spec; render(...) prints it
    compilation("sm_90", alibi(slopes), causal).compile()        registers, shared memory, spills
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..device import offline
from ..gpus import architecture
from ..mod.bind import bind
from ..plan.backward import BackwardCase, Step, backward_geometry, delta_rows, plan_backward
from ..plan.decode import BLOCK_S, DecodeCase, DecodePlan, plan_decode, rows_of
from ..plan.forward import Blocks, Cache, ForwardCase, Geometry, Options, Plan, geometry_of, plan_forward, wants_tma
from ..plan.hopper_backward import fits as backward_fits
from ..plan.hopper_backward import plan_hopper_backward
from ..plan.hopper_forward import fits, plan_hopper_forward
from ..plan.masks import (
    SYMBOL_NAMES,
    dense_mask_spec,
    lists_spec,
    mask_texts,
    starts_spec,
    status_constants,
    status_spec,
    verdict_lists_spec,
    zones_spec,
)
from ..plan.update_cache import BLOCK_T, UpdateCase, update_spec
from ..text.layouts import layouts_of
from ..text.mod_text import ModText, mod_text
from ..text.snippet import Target
from ..text.spec import KernelSpec
from . import evaluate, masks
from .forward import keys_of
from .layouts import output_like

TARGETS = ("cpu", *offline.TARGETS)
EXTENTS = (4, 16, 4096, 4096)  # B, H, Q_LEN and KV_LEN of the call that is imagined


@dataclass(frozen=True)
class Compilation:
    """A kernel and the arguments of `offline.compile_for`, for one of TARGETS."""

    target: str
    spec: KernelSpec
    constants: dict[str, int]
    num_warps: int = 4
    num_stages: int = 1

    def compile(self, last: str | None = None) -> offline.Compiled:
        """What the compiler makes of the kernel (last: see `compile_for`). ValueError for the target "cpu", which compiles nothing."""
        if self.target not in offline.TARGETS:
            raise ValueError(f"{self.target!r} compiles nothing; targets are {', '.join(offline.TARGETS)}")
        return offline.compile_for(self.spec, self.target, self.constants, self.num_warps, self.num_stages, last)


def preview(
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    backend: str = "cuda",
    use_tma: bool | None = None,
    **details,
) -> KernelSpec:
    """The spec of the portable forward kernel for a score_mod and a mask_mod's block mask.

    dtype      "float16", "bfloat16" or "float32"
    backend    "cuda", "hip" or "cpu"
    use_tma    as the option USE_TMA: None is what the newest GPUs get, and no TMA on "hip" and "cpu"
    details    block_size=(128, 128)    of the block mask
               separate_full=True       full blocks are listed apart
               interior=True            no full block reaches past KV_LEN
               starts=False             blocks begin where a tensor says
               scale_is_positive=True
               output_max=False         max_scores are asked for
               output_rows=False        for a call whose gradients are wanted
               transposed=False         q, k and v lie in memory as (B, H, D, S), so the head dim is strided
               options=Options()        plan.forward.Options: the other kernel_options

    Raises ModError for a mod that cannot be traced, TypeError for an unknown detail.
    """
    target = {"cuda": "sm_90", "hip": "gfx942", "cpu": "cpu"}[backend]
    return _imagine(score_mod, mask_mod, dtype, head_dim, head_dim_v, target, use_tma, **details).spec


def compilation(
    target: str,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    use_tma: bool | None = None,
    **details,
) -> Compilation:
    """`preview` for one of TARGETS, with its default tile."""
    plan = _imagine(score_mod, mask_mod, dtype, head_dim, head_dim_v, target, use_tma, **details)
    return _tiled(target, plan)


def hopper_compilation(
    target: str = "sm_90",
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    *,
    cache: Cache | None = None,
    **details,
) -> Compilation:
    """The forward kernel in Gluon for sm_90, as `compilation` gives the portable one. ValueError, with the reason, where it does not serve.

    cache      where a cache holds the keys; with starts=True
    """
    if target != "sm_90":
        raise ValueError(f"the Hopper kernel is for sm_90, got {target!r}")
    case, geometry, bound = _imagined_case(score_mod, mask_mod, dtype, head_dim, head_dim_v, target, None, **details)
    case = case._replace(cache=cache)
    reason = fits(case, geometry)
    if reason:
        raise ValueError(reason)
    return _compilation(target, plan_hopper_forward(case, *keys_of(*bound, EXTENTS)).spec, {})


def backward_compilations(
    target: str,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    use_tma: bool | None = None,
    *,
    block_size: tuple[int, int] = (128, 128),
    separate_full: bool = True,
    interior: bool = True,
    captured: bool = False,
    deterministic: bool = False,
    lse_gradient: bool = False,
    starts: bool = False,
    whole: bool = True,
    scale_is_positive: bool = True,
    options: Options | None = None,
) -> dict[str, Compilation]:
    """The three kernels of the backward pass by name, as `compilation` gives the forward kernel.

    captured   the tensors that score_mod captures want gradients
    whole      Q_LEN and KV_LEN are whole blocks
    interior   no full block reaches past KV_LEN
    """
    d_v = head_dim if head_dim_v is None else head_dim_v
    B, H, Q_LEN, KV_LEN = EXTENTS
    bound = _bound(score_mod, mask_mod)
    score, mask = keys_of(*bound, EXTENTS)
    shapes = [(B, H, n, d) for n, d in ((Q_LEN, head_dim), (KV_LEN, head_dim), (KV_LEN, d_v), (Q_LEN, d_v))]
    shapes += [shapes[0], shapes[1], shapes[2]]
    layouts = [(H * n * d, n * d, d, 1) for _, _, n, d in shapes]
    geometry = backward_geometry(getattr(torch, dtype).itemsize, tuple(shapes), tuple(layouts))
    options = (options or Options())._replace(use_tma=use_tma)
    arch = architecture_for(target)
    tma = wants_tma(options, getattr(torch, dtype), arch)
    tensors = bound[0][1][: len(bound[0][0].tensors)] if captured and bound[0] else []
    case = BackwardCase(
        getattr(torch, dtype),
        head_dim,
        d_v,
        geometry.aligned,
        tuple(tma and fits for fits in geometry.tma),
        Blocks(separate_full, *block_size, interior, starts) if mask else None,
        options,
        scale_is_positive,
        deterministic=deterministic,
        lse_gradient=lse_gradient,
        captured=frozenset(i for i, t in enumerate(tensors) if t.is_floating_point()),
        whole=whole and not starts,
    )
    plan = plan_backward(case, backend_for(target), arch, score, mask)
    return {
        "delta": _compilation(target, plan.delta, {"BLOCK_M": delta_rows(d_v)}),
        "dkv": _tiled(target, plan.dkv),
        "dq": _tiled(target, plan.dq),
    }


def hopper_backward_compilations(
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    *,
    captured: bool = False,
    **details,
) -> dict[str, Compilation]:
    """The kernels of the backward pass in Gluon for sm_90 by name, "delta" and "fused". ValueError for what they do not serve.

    captured   the tensors that score_mod captures want gradients
    details    other fields of BackwardCase; blocks are Blocks(True, 128, 128) where there is a mask_mod
    """
    d_v = head_dim if head_dim_v is None else head_dim_v
    bound = _bound(score_mod, mask_mod)
    score, mask = keys_of(*bound, EXTENTS)
    tensors = bound[0][1][: len(bound[0][0].tensors)] if captured and bound[0] else []
    wanted = frozenset(i for i, t in enumerate(tensors) if t.is_floating_point())
    case = BackwardCase(
        getattr(torch, dtype),
        head_dim,
        d_v,
        use_tma=(True, True),
        captured=wanted,
        **{"blocks": Blocks(True, 128, 128) if mask else None, **details},
    )
    reason = backward_fits(case, score=score)
    if reason:
        raise ValueError(reason)
    plan = plan_hopper_backward(case, score, mask)
    return {"delta": _compilation("sm_90", plan.delta, {"BLOCK_M": delta_rows(d_v)}), "fused": _compilation("sm_90", plan.fused, {})}


def decode_compilations(
    target: str,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    *,
    q_len: int = 1,
    group: int = 4,
    kv_dtype: str | None = None,
    **details,
) -> dict[str, Compilation]:
    """The kernels for few queries and for caches by name, "decode" and "combine", as `compilation` gives the forward kernel.

    group     query heads that share a key/value head
    kv_dtype  "float8_e4m3fn" and so on: of K and V, with scales
    details   fields of DecodeCase: ragged, lengths, balanced, located, page_size, output_max, and split=False, which leaves "combine" out
    """
    d_v = head_dim if head_dim_v is None else head_dim_v
    bound = _bound(score_mod, mask_mod)
    kept = getattr(torch, kv_dtype) if kv_dtype else None
    geometry = _geometry(dtype, head_dim, d_v, False)
    blocks = Blocks(True, 128, 128) if mask_mod else None
    case = DecodeCase(
        getattr(torch, dtype), head_dim, d_v, geometry.units, geometry.aligned, blocks, kv_dtype=kept, scales=kept is not None, **details
    )
    rows = rows_of(q_len, group, 128 if blocks else 0).rows
    plan = plan_decode(case, backend_for(target), architecture_for(target), *keys_of(*bound, EXTENTS), rows)
    made = {"decode": _tiled(target, plan)}
    if plan.combine:
        made["combine"] = _compilation(target, plan.combine, {"BLOCK_S": BLOCK_S})
    return made


def update_cache_compilation(target: str, dtype: str = "bfloat16", cache_dtype: str | None = None, **details) -> Compilation:
    """The kernel that writes new keys and values into a cache. details: fields of UpdateCase beside d_qk and d_v, which are 128."""
    kept = getattr(torch, cache_dtype) if cache_dtype else None
    case = UpdateCase(getattr(torch, dtype), 128, 128, kv_dtype=kept, scales=kept is not None, **details)
    return _compilation(target, update_spec(case, backend_for(target)), {"BLOCK_T": BLOCK_T})


def mask_compilations(
    target: str, mask_mod: Callable, block_size: tuple[int, int] = (128, 128), starts: bool = False
) -> dict[str, Compilation]:
    """The kernels of create_block_mask and mask_mod= by name: "status", "lists", "transposed_lists" and, where a mask needs it, "zones"."""
    backend = backend_for(target)
    texts = mask_texts(bind(mask_mod, "mask"), EXTENTS, backend)
    chunk = {"CHUNK": masks.VERDICTS_CHUNK}
    made = {
        "status": (status_spec(texts, block_size, backend, starts), status_constants(block_size, backend)),
        "lists": (verdict_lists_spec(texts, block_size, backend, False, starts), chunk),
        "transposed_lists": (verdict_lists_spec(texts, block_size, backend, True, starts), chunk),
    }
    if texts.zones:
        made["zones"] = zones_spec(texts, block_size, backend, starts), {"TILE": masks.ZONE_TILE}
    return {name: _compilation(target, spec, constants) for name, (spec, constants) in made.items()}


def block_lists_compilation(target: str, separate_full: bool = True, starts: bool = False) -> Compilation:
    """The kernel that makes lists of classified blocks."""
    return _compilation(target, lists_spec(separate_full, backend_for(target), starts), {"CHUNK": masks.LISTS_CHUNK})


def block_starts_compilation(target: str, sequences: bool = False) -> Compilation:
    """The kernel that says where blocks of packed sequences begin, and which sequences they are of."""
    return _compilation(target, starts_spec(128, backend_for(target), sequences), {"CHUNK": masks.STARTS_CHUNK})


def dense_mask_compilation(target: str, mod: Callable, kind: str = "mask") -> Compilation:
    """The kernel of create_mask."""
    text = _text(mod, kind, Target(backend_for(target), "float32"))
    return _compilation(target, dense_mask_spec(text, backend_for(target)), {"TILE_M": masks.DENSE_TILE, "TILE_N": masks.DENSE_TILE})


def evaluate_compilation(target: str, mod: Callable, kind: str = "score", precision: str = "float32") -> Compilation:
    """The kernel that evaluates a mod on its own."""
    text = _text(mod, kind, Target(backend_for(target), precision))
    return _compilation(target, evaluate.evaluate_spec(text, backend_for(target)), {"TILE_M": 64, "TILE_N": 64})


def backend_for(target: str) -> str:
    """ "cpu", "cuda" or "hip". ValueError for what is not one of TARGETS."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    return "cpu" if target == "cpu" else offline.TARGETS[target].backend


def architecture_for(target: str) -> str:
    """The row of the tile tables for one of TARGETS."""
    capability = divmod(offline.TARGETS[target].arch, 10) if backend_for(target) == "cuda" else None
    return architecture(backend_for(target), capability)


def _imagine(score_mod, mask_mod, dtype: str, head_dim: int, head_dim_v: int | None, target: str, use_tma: bool | None, **details) -> Plan:
    case, _, bound = _imagined_case(score_mod, mask_mod, dtype, head_dim, head_dim_v, target, use_tma, **details)
    return plan_forward(case, backend_for(target), architecture_for(target), *keys_of(*bound, EXTENTS))


def _imagined_case(
    score_mod,
    mask_mod,
    dtype: str,
    head_dim: int,
    head_dim_v: int | None,
    target: str,
    use_tma: bool | None,
    block_size: tuple[int, int] = (128, 128),
    separate_full: bool = True,
    output_max: bool = False,
    output_rows: bool = False,
    transposed: bool = False,
    options: Options | None = None,
    starts: bool = False,
    interior: bool = True,
    scale_is_positive: bool = True,
) -> tuple[ForwardCase, Geometry, list]:
    """The case, its geometry, and the bound mods."""
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype!r}")
    d_v = head_dim if head_dim_v is None else head_dim_v
    bound = _bound(score_mod, mask_mod)
    geometry = _geometry(dtype, head_dim, d_v, transposed)
    options = (options or Options())._replace(**({} if use_tma is None else {"use_tma": use_tma}))
    arch = architecture_for(target)
    case = ForwardCase(
        getattr(torch, dtype),
        head_dim,
        d_v,
        geometry.units,
        geometry.aligned,
        geometry.tma and wants_tma(options, getattr(torch, dtype), arch),
        Blocks(separate_full, *block_size, interior, starts) if mask_mod else None,
        options,
        scale_is_positive,
        output_max=output_max,
        output_rows=output_rows,
    )
    return case, geometry, bound


def _bound(score_mod: Callable | None, mask_mod: Callable | None) -> list:
    return [bind(mod, kind) if mod else None for mod, kind in ((score_mod, "score"), (mask_mod, "mask"))]


def _geometry(dtype: str, d_qk: int, d_v: int, transposed: bool):
    B, H, Q_LEN, KV_LEN = EXTENTS
    tensors = []
    for length, width in ((Q_LEN, d_qk), (KV_LEN, d_qk), (KV_LEN, d_v)):
        shape = (B, H, width, length) if transposed else (B, H, length, width)
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        tensors.append(tensor.transpose(2, 3) if transposed else tensor)
    out = output_like(tensors[0], d_v)
    return geometry_of(out.element_size(), tuple(t.shape for t in tensors), tuple(t.stride() for t in tensors), out.stride())


def _text(mod: Callable, kind: str, target: Target) -> ModText:
    """A mod as a template sees it."""
    graph, captured = bind(mod, kind)
    return mod_text(graph, layouts_of(graph, captured, EXTENTS), SYMBOL_NAMES, target, tile="[TILE_M, TILE_N]")


def _compilation(target: str, spec: KernelSpec, constants: dict[str, int], num_warps: int = 4, num_stages: int = 1) -> Compilation:
    return Compilation(target, spec, constants, num_warps, num_stages)


def _tiled(target: str, step: Plan | DecodePlan | Step) -> Compilation:
    """A kernel with its tile."""
    tile = step.tile
    return _compilation(target, step.spec, {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}, tile.num_warps, tile.num_stages)
