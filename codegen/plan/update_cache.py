"""The kernel that writes new keys and values into a cache as a plan: from what is known of a call to its KernelSpec."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..mod.table.dtypes import dtype_name
from ..text.cpp import CPP, type_name
from ..text.parameters import Parameter, constants, numbers, pointer, stride_names
from ..text.spec import KernelSpec
from .masks import power_of_two

BLOCK_T = 16  # tokens of a program; for a single new token of every sequence 1


class UpdateCase(NamedTuple):
    """What changes the kernel."""

    dtype: torch.dtype
    d_qk: int
    d_v: int
    ragged: bool = False
    located: bool = False
    page_size: int = 0
    offsets: bool = False
    kv_dtype: torch.dtype | None = None  # the cache's, where it is another
    scales: bool = False
    rope_dim: int = 0  # 0: nothing is turned
    interleaved: bool = False
    rope_tail: bool = False  # the last dimensions turn, not the first


def update_spec(case: UpdateCase, backend: str) -> KernelSpec:
    """The kernel's KernelSpec."""
    rest = case.d_qk - case.rope_dim
    flags = {
        **_flags(case),
        "D_V_ROUNDED": power_of_two(case.d_v),
        "REST_ROUNDED": power_of_two(rest),
        "HALF": case.rope_dim // 2,
        "HALF_ROUNDED": power_of_two(case.rope_dim // 2),
        "CONVERTS": case.kv_dtype is not None,
    }
    return KernelSpec("update_cache", (), tuple(flags.items()), backend, (*_parameters(case), *constants("BLOCK_T")))


def cpu_update_spec(case: UpdateCase) -> KernelSpec:
    """The KernelSpec of the same in C++."""
    parameters = _parameters(case)
    flags = {
        **_flags(case),
        "LANGUAGE": CPP.name,
        "WRITTEN": ("K_CACHE", "V_CACHE", "Q_OUT"),
        "KEPT": type_name(dtype_name(case.kv_dtype or case.dtype)),
    }
    more = numbers("Hq", *([] if case.ragged else ["Z"]))
    return KernelSpec("cpu_update_cache", (), tuple(flags.items()), "cpu", (*parameters, *more))


def _flags(case: UpdateCase) -> dict[str, object]:
    """What both templates know of a case."""
    return {
        "DTYPE": dtype_name(case.dtype),
        "D_QK": case.d_qk,
        "D_V": case.d_v,
        "ROPE_DIM": case.rope_dim,
        "INTERLEAVED": case.interleaved,
        "ROPE_TAIL": case.rope_tail,
        "RAGGED": case.ragged,
        "LOCATED": case.located,
        "PAGE_SIZE": case.page_size,
        "OFFSETS": case.offsets,
        "KV_SCALES": case.scales,
    }


def _parameters(case: UpdateCase) -> tuple[Parameter, ...]:
    dtype, kept = dtype_name(case.dtype), dtype_name(case.kv_dtype or case.dtype)
    tokens = "T" if case.ragged else "Z, Q_LEN"
    places = f"pages, {case.page_size}" if case.page_size else "entries, CAPACITY"
    pointers = [
        pointer("K", dtype, f"[{tokens}, Hkv, D_QK]: new, in any strides"),
        pointer("V", dtype, f"[{tokens}, Hkv, D_V]: new, in any strides"),
        pointer("K_CACHE", kept, f"[{places}, Hkv, D_QK]: written"),
        pointer("V_CACHE", kept, f"[{places}, Hkv, D_V]: written"),
        pointer("KV_LENS", "int32", "[Z]: positions of each sequence, the new ones included: its new tokens are the last ones"),
    ]
    if case.ragged:
        pointers.append(pointer("CU_Q", "int32", "[Z + 1]: where each sequence's tokens start among all T, and where the last one's end"))
    if case.located:
        pointers.append(pointer("KV_LOCS", "int32", "[Z]: which of ENTRIES entries of the cache is the sequence's"))
    if case.page_size:
        meaning = f"[Z, pages]: which of ENTRIES pages of {case.page_size} positions hold the sequence, in order"
        pointers.append(pointer("PAGES", "int32", meaning))
    if case.offsets:
        pointers.append(pointer("OFFSETS", "int32", "[Z]: the position of each sequence's first new token"))
    if case.scales:
        pointers += [pointer(name, "float32", "[Hkv]: what is kept is divided by it") for name in ("K_SCALES", "V_SCALES")]
    outer = "" if case.ragged else "z"
    sizes = ["Hkv", *([] if case.ragged else ["Q_LEN"]), "CAPACITY", *(["Z", "T"] if case.ragged else [])]
    sizes += ["ENTRIES"] if case.page_size or case.located else []
    sizes += [name for t in "kv" for name in stride_names(t, f"{outer}mh")]
    sizes += [name for t in ("kc", "vc") for name in stride_names(t, "zmh")]
    sizes += ["stride_pages"] if case.page_size else []
    if case.rope_dim:
        rest = f"before {case.d_qk - case.rope_dim}" if case.rope_tail else f"from {case.rope_dim} on"
        turned = f"cosine and sine of every position's angles; dimensions {rest} are not turned"
        pointers += [
            pointer("TABLE", "float32", f"[TABLE_ROWS, {case.rope_dim // 2}, 2]: {turned}"),
            pointer("Q", dtype, f"[{tokens}, Hq, D_QK]: new, in any strides"),
            pointer("Q_OUT", dtype, f"[{tokens}, Hq, D_QK]: written"),
        ]
        sizes += ["TABLE_ROWS", "stride_table", *(name for t in "qo" for name in stride_names(t, f"{outer}mh"))]
    return (*pointers, *numbers(*sizes))
