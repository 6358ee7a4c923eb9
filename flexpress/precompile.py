"""Compiling ahead of the first call."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as torchs

from flexpress.caches.cached_prepare import prepare as prepare_cached
from flexpress.caches.shared_prefix import SharedPrefix
from flexpress.calls.call import bound
from flexpress.calls.packed_call import check_no_block_mask, packed_call
from flexpress.calls.return_aux import AuxRequest, asked_for
from flexpress.inputs.cache_checks import CacheTables
from flexpress.inputs.dropout import read_dropout
from flexpress.inputs.float8 import quantised
from flexpress.inputs.plain_arguments import device_or_default, flag
from flexpress.mods import MaskMod, ScoreMod

from .codegen.compiling import runs_uncompiled
from .codegen.device import workers
from .codegen.device.kernel import loaded
from .codegen.mod.captured.tensors import check_values
from .codegen.run import backward as backward_pass
from .codegen.run import forward as forward_pass
from .codegen.run.call import Bound, for_backward
from .codegen.run.captured import all_apart
from .codegen.run.meanwhile import waiting
from .codegen.run.statistics import statistics


class Precompiled(NamedTuple):
    """A kernel that was compiled (for the interpreter: loaded), its printed file, and how long that took."""

    path: Path
    seconds: float


@runs_uncompiled
def precompile(
    query: torch.Tensor | Sequence[int] | Sequence[Mapping[str, Any]],
    key: torch.Tensor | Sequence[int] | None = None,
    value: torch.Tensor | Sequence[int] | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: torchs.BlockMask | None = None,
    scale: float | torch.Tensor | None = None,
    enable_gqa: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    backward: bool = False,
    max_scores: bool = False,
    return_aux: torchs.AuxRequest | AuxRequest | None = None,
    deterministic: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sinks: torch.Tensor | Sequence[int] | None = None,
    dropout_p: float = 0.0,
    q_scale: torch.Tensor | Sequence[int] | None = None,
    k_scale: torch.Tensor | Sequence[int] | None = None,
    v_scale: torch.Tensor | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[Precompiled]:
    """Compile the kernels of a call of flex_attention or varlen_attention, and keep them on disk, without computing attention.

        shape = (8, 16, 4096, 64)
        precompile(shape, shape, shape, alibi(slopes), mask_mod=causal, dtype=torch.bfloat16, backward=True)
        precompile([{"query": shape, "key": shape, "value": shape, "score_mod": mod, "dtype": torch.bfloat16} for mod in mods])

    The second way takes the arguments of several calls, by name, and compiles them side by side, each in a thread of its own.

    query, key, value   tensors: on the call's device, which are not written, or on "meta"; or shapes (B, H, S, D), which need dtype=
    device              for shapes and meta tensors; by default that of block_mask or cu_seqlens_q, else "cuda" if there is a GPU, or "cpu"
    backward            as for tensors that want gradients: the forward kernel that keeps what a backward pass needs, and that pass, for
                        captured tensors with requires_grad, too. Without it: the kernel of a call without gradients
    max_scores          as for return_aux=AuxRequest(max_scores=True)
    return_aux          what the call asks for. Kernels of the gradients of its statistics are not compiled
    cu_seqlens_q, cu_seqlens_k   tensors on the device: the call is one of varlen_attention, with shapes (total, H, D)
    sinks               a tensor, or a shape (Hq,), which has `dtype` and wants a gradient with backward
    dropout_p           any number from 0 to 1: only whether it is 0 changes a kernel
    q_scale, k_scale, v_scale, out_dtype   of float8_e4m3fn; scales as tensors or shapes: what they hold changes no kernel

    The others are those of flex_attention. Memory for the call's tensors is taken from the device while this runs, and the small kernels
    that make block lists are run. Another length, batch size or window needs nothing more, but where docs/what_works.md says that kinds of
    calls have kernels of their own.

    Returns what this process has had compiled meanwhile: nothing, if all was there. Any thread may call this; what several threads ask for
    is compiled side by side, by processes beside this one. Raises what flex_attention raises.
    """
    if isinstance(query, Sequence) and (any(isinstance(call, Mapping) for call in query) or not query and key is None):
        return _side_by_side(query)
    device = _device_of(query, (getattr(block_mask, "kv_num_blocks", None), cu_seqlens_q), device)
    backward, max_scores = flag("backward", backward), flag("max_scores", max_scores)
    asked_max, wanted = asked_for(return_aux, False)
    enable_gqa, deterministic = flag("enable_gqa", enable_gqa), flag("deterministic", deterministic)
    tensors = [_real(name, t, dtype, device) for name, t in (("query", query), ("key", key), ("value", value))]
    check_values("precompile", query=tensors[0], key=tensors[1], value=tensors[2])
    before = _counts()
    if cu_seqlens_q is not None:
        check_no_block_mask(block_mask)
    named = (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale))
    float8 = quantised(*(_filled(name, t, torch.float32, device, 1) for name, t in named), out_dtype)
    # a seed of its own, as torch's generator must not go on
    dropout = read_dropout(dropout_p, torch.zeros(1, dtype=torch.int64, device=device), device)
    extras: dict[str, Any] = {"sinks": _sinks(sinks, dtype, device, backward), "dropout": dropout, "quantised": float8}
    with waiting():
        with torch.set_grad_enabled(backward):
            if cu_seqlens_q is None:
                call = bound(*tensors, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod, **extras)
            else:
                call = packed_call(*tensors, cu_seqlens_q, cu_seqlens_k, score_mod, mask_mod, scale, kernel_options, **extras)
        with torch.no_grad():
            _prepare(call, backward, max_scores or asked_max, deterministic or torch.are_deterministic_algorithms_enabled())
            if any(wanted):
                statistics(call, wanted, launches=False)
    return _compiled_since(before)


@runs_uncompiled
def precompile_cached(
    query: torch.Tensor | Sequence[int],
    k_cache: torch.Tensor | Sequence[int],
    v_cache: torch.Tensor | Sequence[int],
    kv_len: torch.Tensor | Sequence[int],
    *,
    page_table: torch.Tensor | Sequence[int] | None = None,
    cache_loc: torch.Tensor | Sequence[int] | None = None,
    cu_seqlens_q: torch.Tensor | Sequence[int] | None = None,
    max_q_len: int | None = None,
    q_offset: torch.Tensor | Sequence[int] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | torch.Tensor | None = None,
    q_scale: torch.Tensor | Sequence[int] | None = None,
    k_scale: torch.Tensor | Sequence[int] | None = None,
    v_scale: torch.Tensor | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    sinks: torch.Tensor | Sequence[int] | None = None,
    shared_prefix: SharedPrefix | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[Precompiled]:
    """Compile the kernels of a call of cached_attention, and keep them on disk, without computing attention.

        precompile_cached((64, 32, 1, 128), k_cache, v_cache, (64,), page_table=(64, 256), dtype=torch.bfloat16)

    query, k_cache, v_cache   tensors, on "meta" or not, of which none is written, or shapes, which all have `dtype`. For a cache of
                another dtype, as of float8_e4m3fn, pass tensors
    kv_len, page_table, cache_loc, cu_seqlens_q, q_offset, q_scale, k_scale, v_scale   tensors or shapes: what they hold changes no
                kernel
    sinks       a tensor, or a shape (Hq,), which has `dtype`
    shared_prefix   one of as many sequences, or (groups, pages): for how many groups and pages of a prefix it has room. Then both ways are
                compiled, with sharing and without, as it depends on the batch which one a call goes
    device      for shapes and meta tensors; by default that of a tensor among the others, else "cuda" if there is a GPU, or "cpu"

    The others are those of cached_attention. Few sequences split their keys, for which there are other kernels. Returns what this process
    has had compiled meanwhile: nothing, if all was there. Raises what cached_attention raises.
    """
    indices = {"kv_len": kv_len, "page_table": page_table, "cache_loc": cache_loc, "cu_seqlens_q": cu_seqlens_q, "q_offset": q_offset}
    factors = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    device = _device_of(query, (k_cache, v_cache, *indices.values()), device)
    batch_invariant = flag("batch_invariant", batch_invariant)
    tensors = [_real(name, t, dtype, device) for name, t in (("query", query), ("k_cache", k_cache), ("v_cache", v_cache))]
    check_values("precompile_cached", query=tensors[0], k_cache=tensors[1], v_cache=tensors[2])
    before = _counts()
    batch = {name: _filled(name, t, torch.int32, device, 0) for name, t in indices.items()}
    batch |= {name: _filled(name, t, torch.float32, device, 1) for name, t in factors.items()}
    of_query = batch.pop("q_scale"), out_dtype
    shared = None if shared_prefix is None else _shared(shared_prefix, batch, tensors[1])
    with waiting(), torch.no_grad():
        what = score_mod, mask_mod, scale, batch_invariant, _sinks(sinks, dtype, device, False)
        prepare_cached(*tensors, CacheTables(**batch, max_q_len=max_q_len), of_query, *what, shared)
    return _compiled_since(before)


@runs_uncompiled
def wait_for_kernels(timeout: float | None = None) -> bool:
    """Wait until no kernel is being compiled beside this process: the next call of a kind that was made before runs the kernels that serve
    it in the end.

        flex_attention(q, k, v, score_mod=mod)  # may be served by kernels that compile fast
        wait_for_kernels()
        flex_attention(q, k, v, score_mod=mod)  # loads the others: from here on times are those of every later call

    timeout   seconds; None: as long as it takes

    Returns whether nothing is being compiled any more. A compiled kernel that is refused, as it would spill too many registers, is
    replaced by one that is compiled from the next call on; `explain` says whether one is on its way. TypeError for another timeout.
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, numbers.Real)):
        raise TypeError(f"timeout must be a number of seconds, or None for as long as it takes, got {timeout!r}")
    return workers.wait(timeout)


def _shared(given: SharedPrefix | Sequence[int], batch: Mapping[str, torch.Tensor | None], k_cache: torch.Tensor) -> SharedPrefix:
    """As it is given, or one with room for (groups, pages) in which nothing is shared."""
    if batch["page_table"] is None or batch["kv_len"] is None:
        raise ValueError("shared_prefix is for caches in pages: pass kv_len and page_table, or leave shared_prefix out")
    if isinstance(given, SharedPrefix):
        return given
    if not isinstance(given, Sequence) or len(given) != 2:
        raise TypeError(f"shared_prefix must be a SharedPrefix, or (groups, pages), got {given!r}")
    (groups, pages), B = given, batch["kv_len"].shape[0]

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=k_cache.device)

    order = torch.arange(B, dtype=torch.int32, device=k_cache.device)
    return SharedPrefix(order, zeros(groups + 1), zeros(groups), zeros(groups, pages) - 1, zeros(B), k_cache.shape[1], 0)


def _side_by_side(calls: Sequence) -> list[Precompiled]:
    """What was compiled for all of them. Raises what the first that fails does."""
    if not all(isinstance(call, Mapping) for call in calls):
        raise TypeError("precompile takes the arguments of one call, or a list of dicts with the arguments of one call each")
    if not calls:
        return []
    before, index = _counts(), torch.cuda.current_device() if torch.cuda.is_available() else -1

    def compiled(call: Mapping[str, Any]) -> None:
        with torch.cuda.device(index):  # which belongs to a thread
            precompile(**call)

    with workers.POOL.all_awaited(), ThreadPoolExecutor(len(calls), thread_name_prefix="flexpress-precompile") as threads:
        for made in [threads.submit(compiled, call) for call in calls]:
            made.result()
    return _compiled_since(before)


def _counts() -> dict[int, int]:
    """How many variants of each kernel were compiled here."""
    return {id(kernel): len(kernel.compiled) for kernel in loaded()}


def _compiled_since(before: dict[int, int]) -> list[Precompiled]:
    return [Precompiled(kernel.path, seconds) for kernel in loaded() for seconds in kernel.compiled[before.get(id(kernel), 0) :]]


def _filled(name: str, given, dtype: torch.dtype, device: torch.device, value: int) -> torch.Tensor | None:
    """What describes a batch, as it is given or, of a shape or on "meta", with memory that holds a value."""
    if given is None:
        return None
    made = _real(name, given, dtype, device)
    return made if made is given else made.fill_(value)


def _sinks(given, dtype: torch.dtype | None, device: torch.device, learned: bool) -> torch.Tensor | None:
    """As they are given; of a shape or on "meta" with memory. learned: those of a shape want a gradient."""
    if given is None:
        return None
    made = _real("sinks", given, dtype, device)
    return made if made is given else made.zero_().requires_grad_(given.requires_grad if isinstance(given, torch.Tensor) else learned)


def _prepare(call: Bound, backward: bool, max_scores: bool, deterministic: bool) -> None:
    if backward and call.score:  # as autograd keeps it
        call = call._replace(score=all_apart(call.score))
    wanted = frozenset(i for i, t in enumerate(call.captured) if t.requires_grad)
    later = for_backward(call, call.sinks is not None and call.sinks.requires_grad)
    before = partial(backward_pass.begin, later, wanted, deterministic) if backward else None
    found = forward_pass.prepare(call, output_max=max_scores, output_rows=backward, before=before)
    if backward and found is not None:
        backward_pass.prepare(later, *found, wanted=wanted, deterministic=deterministic)


def _device_of(query, others: tuple, device) -> torch.device:
    device = device_or_default(device)
    if isinstance(query, torch.Tensor) and not query.is_meta:
        if device is not None and device.type != query.device.type:
            raise ValueError(f"query is on {query.device}, but device is {device}; leave device out, or pass query.to('meta')")
        return query.device
    if device is None:
        known = [t.device for t in others if isinstance(t, torch.Tensor) and not t.is_meta]
        device = known[0] if known else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "meta":
        raise ValueError("device is 'meta', for which nothing can be compiled: pass the device of the later calls")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def _real(name: str, given, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """A tensor with memory, of which a kernel depends on what it does of the given one."""
    if isinstance(given, torch.Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=device) if given.is_meta else given
    if not isinstance(given, Sequence) or not all(isinstance(n, int) for n in given):
        raise TypeError(f"{name} must be a torch.Tensor or a shape, a tuple of integers, got {given!r}")
    if any(n < 0 for n in given):
        raise ValueError(f"{name} is a shape, whose extents must be 0 or more, got {given!r}")
    if not isinstance(dtype, torch.dtype):
        got = "" if dtype is None else f", got {dtype!r}"
        raise TypeError(f"{name} is a shape, so dtype is needed: pass dtype=torch.bfloat16, for example{got}")
    return torch.empty(tuple(given), dtype=dtype, device=device)
