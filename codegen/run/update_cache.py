"""The driver of the kernel that writes new keys and values into a cache, and turns queries and keys by their positions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.cpp import CppKernel
from ..device.cpp_compiler import by_either
from ..device.devices import backend_of
from ..device.kernel import kernel_for
from ..plan.update_cache import BLOCK_T, UpdateCase, cpu_update_spec, update_spec
from ..registry import INFO, Table
from ..text.parameters import named_strides
from .call import Cached
from .launch import Launch

_ready: dict[tuple, Ready] = Table("cache updates", 1024)


class Pairing(NamedTuple):
    """Which elements of a head turn together."""

    interleaved: bool
    rope_tail: bool


class Ready(NamedTuple):
    """What is decided of updates of a kind."""

    launch: Launch
    names: tuple[str, ...]  # of its tensors
    grid: tuple[int, int]
    tokens: int  # of a program


def update(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cached: Cached,
    offsets: torch.Tensor | None,
    table: torch.Tensor | None,
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    *,
    interleaved: bool,
    rope_tail: bool,
) -> None:
    """Write k and v, and q turned to q_out. Shapes and dtypes are checked, contents need not be; all are [(Z,) tokens, heads, head dim]
    with a contiguous head dim. Ragged tokens after the last sequence get to q_out as they are.

    table   float32 [positions, rope_dim / 2, 2], contiguous in its last two dimensions; beyond its end its last row counts
    """
    turned = () if table is None else (table, q, q_out)
    pairing = Pairing(interleaved, rope_tail and table is not None and 2 * table.shape[1] < k.shape[-1])
    by_either(lambda in_cpp: (_update_in_cpp if in_cpp else _update)(k, v, k_cache, v_cache, cached, offsets, turned, pairing), k.device)


def _update_in_cpp(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cached: Cached,
    offsets: torch.Tensor | None,
    turned: tuple[torch.Tensor, ...],
    pairing: Pairing,
) -> None:
    case, numbers = _case_of(k, v, k_cache, v_cache, cached, offsets is not None, turned, pairing)
    tensors = {"K": k, "V": v, "K_CACHE": k_cache, "V_CACHE": v_cache, **cached.named}
    tensors |= {} if offsets is None else {"OFFSETS": offsets}
    tensors |= dict(zip(("TABLE", "Q", "Q_OUT"), turned, strict=False))
    kernel_for(cpu_update_spec(case), CppKernel).call({**numbers, "Hq": turned[1].shape[-2] if turned else 0, **tensors})


def _update(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cached: Cached,
    offsets: torch.Tensor | None,
    turned: tuple[torch.Tensor, ...],
    pairing: Pairing,
) -> None:
    tensors = [k, v, k_cache, v_cache, *(() if offsets is None else (offsets,)), *cached.tensors, *turned]
    layouts = tuple([(t.shape, t.stride()) for t in (k, v, k_cache, v_cache, *turned)])
    key = (layouts, k.dtype, k_cache.dtype, k.device, cached.structure, offsets is None, pairing)
    ready = _ready.get(key)
    if ready is None:
        ready = _ready[key] = _decide(k, v, k_cache, v_cache, cached, offsets is not None, turned, pairing)
    else:
        INFO.hits += 1
    if not ready.launch.again_with(tensors, k.device):
        ready.launch.with_constants((ready.tokens,), dict(zip(ready.names, tensors, strict=True)), [], ready.grid, k.device)


def _case_of(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cached: Cached,
    offsets: bool,
    turned: tuple[torch.Tensor, ...],
    pairing: Pairing,
) -> tuple[UpdateCase, dict[str, int]]:
    """What changes the kernel, and its numbers by the names of parameters."""
    ragged, paged = cached.cu_q is not None, cached.pages is not None
    Q_LEN = max(cached.max_q, 1) if ragged else k.shape[1]
    Z, Hkv = cached.kv_lens.shape[0], k.shape[-2]
    case = UpdateCase(
        k.dtype,
        k.shape[-1],
        v.shape[-1],
        ragged=ragged,
        located=cached.kv_locs is not None,
        page_size=k_cache.shape[1] if paged else 0,
        offsets=offsets,
        kv_dtype=k_cache.dtype if k_cache.dtype != k.dtype else None,
        scales=cached.k_scales is not None,
        rope_dim=2 * turned[0].shape[1] if turned else 0,
        interleaved=pairing.interleaved,
        rope_tail=pairing.rope_tail,
    )
    outer = "mh" if ragged else "zmh"
    numbers = {
        **{"Hkv": Hkv, "Q_LEN": Q_LEN, "CAPACITY": k_cache.shape[1] * (cached.pages.shape[1] if paged else 1)},
        **{"Z": Z, "T": k.shape[0], "ENTRIES": k_cache.shape[0], "stride_pages": cached.pages.stride(0) if paged else 0},
        **named_strides("k", outer, k.stride()),
        **named_strides("v", outer, v.stride()),
        **named_strides("kc", "zmh", k_cache.stride()),
        **named_strides("vc", "zmh", v_cache.stride()),
    }
    if turned:
        table, q, q_out = turned
        numbers |= {"TABLE_ROWS": table.shape[0], "stride_table": table.stride(0)}
        numbers |= {**named_strides("q", outer, q.stride()), **named_strides("o", outer, q_out.stride())}
    return case, numbers


def _decide(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cached: Cached,
    offsets: bool,
    turned: tuple[torch.Tensor, ...],
    pairing: Pairing,
) -> Ready:
    case, numbers = _case_of(k, v, k_cache, v_cache, cached, offsets, turned, pairing)
    Z, Hkv, Q_LEN = numbers["Z"], numbers["Hkv"], numbers["Q_LEN"]
    names = ("K", "V", "K_CACHE", "V_CACHE", *(["OFFSETS"] if offsets else []), *cached.named, *(["TABLE", "Q", "Q_OUT"] if turned else []))
    tokens = 1 if Q_LEN == 1 else BLOCK_T
    heads = turned[1].shape[-2] if turned else 0
    grid = -(-numbers["T"] // tokens) if case.ragged else -(-Q_LEN // tokens) * Z, Hkv + heads
    launch = Launch(update_spec(case, backend_of(k.device.type)), numbers, names)
    return Ready(launch, names, grid, tokens)
