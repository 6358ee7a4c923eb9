"""Checks of packed sequences: one clear error each."""

from __future__ import annotations

import torch

from flexpress.inputs.cache_checks import forms_of
from flexpress.inputs.checks import MAX_HEAD_DIM, MAX_HEAD_DIM_QK, QUERY_DTYPES, autocasts, check_extents, check_rank

from ..codegen.mod.captured.tensors import check_memory, tracing
from ..codegen.registry import Table

_REMEDY = "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) makes it of lengths"
_passed: dict[tuple, bool] = Table("checked packed sequences", 4096)


def check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k) -> None:
    """Shapes, dtypes and devices, once for all that look alike; and on the CPU the values of cu_seqlens."""
    forms = forms_of(q, k, v, cu_seqlens_q, cu_seqlens_k, torch._C._is_any_autocast_enabled())
    try:
        passed = _passed.get(forms)
    except TypeError:  # while torch's compiler traces, with lengths that are symbols
        forms = passed = None
    if not passed:
        _check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
        if forms is not None:
            _passed[forms] = True
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts is not None:
            check_memory(name, starts)  # it may be freed between calls, and nobody asks again
    _check_values("cu_seqlens_q", cu_seqlens_q, "q", q)
    if cu_seqlens_k is not None:
        _check_values("cu_seqlens_k", cu_seqlens_k, "k", k)


def _check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k) -> None:
    for name, t, layout in (("q", q, "(total_q, Hq, D)"), ("k", k, "(total_k, Hkv, D)"), ("v", v, "(total_k, Hkv, Dv)")):
        check_rank(name, t, layout, may_stand=True)
    autocast = autocasts(q)  # which converts them
    if q.dtype not in QUERY_DTYPES and not autocast:
        supported = "float16, bfloat16 and float32, and without gradients float8_e4m3fn"
        raise TypeError(f"q has dtype {q.dtype}; supported are {supported}. Convert it with .to(...)")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype and not autocast:
            raise TypeError(f"q and {name} must have the same dtype, got {q.dtype} and {t.dtype}; convert one with .to(...)")
        if t.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {t.device}; move one with .to(...)")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must have the same tokens and heads, got k {tuple(k.shape)} and v {tuple(v.shape)}")
    check_heads_fit(q, "k", k)
    check_extents("q", q, MAX_HEAD_DIM_QK)
    check_extents("v", v, MAX_HEAD_DIM)
    if cu_seqlens_k is None and q.shape[0] != k.shape[0]:
        shapes = f"got q {tuple(q.shape)} and k {tuple(k.shape)}"
        raise ValueError(f"q and k must have the same number of tokens where cu_seqlens_k is left out, {shapes}; pass cu_seqlens_k")
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
    if cu_seqlens_k is not None:
        _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", k)
        check_same_sequences(cu_seqlens_q, cu_seqlens_k)


def check_heads_fit(q: torch.Tensor, name: str, k: torch.Tensor) -> None:
    """Have q (..., Hq, D) and keys (..., Hkv, D), whose name is given, one head dim, and is Hq a multiple of Hkv?"""
    shapes, (heads, kv_heads) = f"got q {tuple(q.shape)} and {name} {tuple(k.shape)}", (q.shape[-2], k.shape[-2])
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and {name} must have the same head dim, {shapes}")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"q's number of heads must be a multiple of {name}'s, {shapes}")


def check_same_sequences(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of as many sequences, and so of the same length, got shapes "
            f"{tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}; a sequence without tokens repeats the number before it"
        )


def check_cu_seqlens(name: str, cu_seqlens, packed_name: str, packed: torch.Tensor) -> None:
    """Where packed sequences start: its form, and on the CPU its values."""
    _check_cu_seqlens(name, cu_seqlens, packed_name, packed)
    _check_values(name, cu_seqlens, packed_name, packed)


def _check_cu_seqlens(name: str, cu_seqlens, packed_name: str, packed: torch.Tensor) -> None:
    if cu_seqlens is None:
        raise TypeError(f"{name} must say where sequences are; it is left out only with context=")
    check_rank(name, cu_seqlens, "(sequences + 1)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {cu_seqlens.dtype}, not int32 or int64; {_REMEDY}")
    if cu_seqlens.device != packed.device:
        raise ValueError(f"{packed_name} is on {packed.device} but {name} is on {cu_seqlens.device}; move it with .to(...)")
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} has shape (0,), but n sequences have n + 1 numbers; {_REMEDY}")


def _check_values(name: str, cu_seqlens: torch.Tensor, packed_name: str, packed: torch.Tensor) -> None:
    if packed.device.type != "cpu" or tracing():
        return
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != packed.shape[0] or values != sorted(values):
        shown = str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
        raise ValueError(
            f"{name} must be 0 and then the end of each sequence, never falling, up to the {packed.shape[0]} tokens of "
            f"{packed_name} {tuple(packed.shape)}, got {shown}; {_REMEDY}"
        )
