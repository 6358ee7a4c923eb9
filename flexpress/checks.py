"""Argument checks of the front door: each failure is one error that names the argument, shows both shapes and says what to do."""

from __future__ import annotations

import math
import operator

import torch

from flexpress.codegen.forward_plan import Options

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPES = (*DTYPES, torch.float8_e4m3fn)
MAX_HEAD_DIM = 256

_TILE_OPTIONS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
_SWITCHES = {"PRESCALE_QK": "prescale_qk", "ROWS_GUARANTEED_SAFE": "rows_guaranteed_safe",
             "BLOCKS_ARE_CONTIGUOUS": "blocks_are_contiguous", "USE_TMA": "use_tma"}
# options of torch's module that have nothing to choose here, or that belong to the backward pass
_ACCEPTED = {"OUTPUT_LOGSUMEXP", "OUTPUT_MAX", "FORCE_USE_FLEX_ATTENTION", "WRITE_DQ", "IS_DIVISIBLE", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2",
             "BLOCK_N2"}


def check_rank(name: str, tensor, layout: str) -> None:
    """A tensor with the rank of `layout`, and with the extent that it gives as a number."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {layout}, got {type(tensor).__name__}")
    extents = layout.strip("()").split(", ")
    if tensor.dim() != len(extents) or any(e.isdigit() and int(e) != n for e, n in zip(extents, tensor.shape, strict=True)):
        raise ValueError(f"{name} must have shape {layout}, got {_shape(tensor)}")


def check_tensors(query, key, value, enable_gqa: bool) -> None:
    """Shapes, dtypes and devices of query (B, Hq, Q_LEN, D_QK), key (Bkv, Hkv, KV_LEN, D_QK), value (Bkv, Hkv, KV_LEN, D_V)."""
    named = {"query": query, "key": key, "value": value}
    for name, t in named.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.is_nested:
            raise NotImplementedError(f"{name} is a nested tensor; pack the sequences and pass a document mask instead")
        if t.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, heads, length, head_dim), got shape {_shape(t)}")
    if query.dtype not in DTYPES:
        raise TypeError(f"query has dtype {query.dtype}; supported are float16, bfloat16 and float32. Convert with query.to(...).")
    for name in ("key", "value"):
        if named[name].dtype != query.dtype:
            raise TypeError(f"{name} has dtype {named[name].dtype} but query has {query.dtype}; convert one with .to(...)")
        if named[name].device != query.device:
            raise ValueError(f"{name} is on {named[name].device} but query is on {query.device}; move one with .to(...)")
    if query.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"query is on {query.device}; kernels run on CUDA or ROCm GPUs ('cuda') and, interpreted, on 'cpu'")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have the same head_dim, got query {_shape(query)} and key {_shape(key)}")
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"key and value must have the same length, got key {_shape(key)} and value {_shape(value)}")
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"key and value must have the same number of heads, got key {_shape(key)} and value {_shape(value)}")
    if key.shape[0] != value.shape[0]:
        raise ValueError(f"key and value must have the same batch size, got key {_shape(key)} and value {_shape(value)}")
    if key.shape[0] not in (1, query.shape[0]):
        raise ValueError(f"key and value must have query's batch size or 1, got query {_shape(query)} and key {_shape(key)}")
    _check_heads(query, key, enable_gqa)
    for name, t in named.items():
        if t.shape[3] == 0 or t.shape[3] > MAX_HEAD_DIM:
            raise NotImplementedError(f"{name} has head_dim {t.shape[3]} (shape {_shape(t)}); supported are 1 to {MAX_HEAD_DIM}")


def _check_heads(query, key, enable_gqa: bool) -> None:
    hq, hkv = query.shape[1], key.shape[1]
    if hq == hkv:
        return
    if not enable_gqa:
        raise ValueError(f"query has {hq} heads and key/value have {hkv} (query {_shape(query)}, key {_shape(key)}); for "
                         "grouped-query attention pass enable_gqa=True")
    if hkv == 0 or hq % hkv:
        raise ValueError(f"query heads must be a multiple of key/value heads, got query {_shape(query)} and key {_shape(key)}")


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def whole(name: str, value, least: int = 0) -> int:
    """The argument `name` as an int. TypeError if it is no integer, ValueError if it is less than `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


def positive(name: str, value) -> float:
    """The argument `name` as a float. TypeError if it is no number, ValueError if it is not positive and finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {str(value)[:40]}; it must be positive and finite")
    return number


def check_scale(scale, head_dim: int) -> float:
    """The scale as a float; 1 / sqrt(head_dim) by default."""
    if scale is None:
        return head_dim ** -0.5
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise ValueError(f"scale must be a number, got a tensor of shape {_shape(scale)}")
        return float(scale)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    return float(scale)


def check_mask_fits(lists, seq_lengths, query, key, mask_shape) -> None:
    """A block mask must be made for these lengths, this device and a batch and head extent that broadcasts."""
    Q_LEN, KV_LEN = query.shape[2], key.shape[2]
    if tuple(seq_lengths) != (Q_LEN, KV_LEN):
        raise ValueError(f"block_mask was made for lengths {tuple(seq_lengths)} (shape {tuple(mask_shape)}) but query is {_shape(query)} "
                         f"and key {_shape(key)}; make one with create_block_mask(..., Q_LEN={Q_LEN}, KV_LEN={KV_LEN})")
    if lists.kv_indices.device != query.device:
        raise ValueError(f"block_mask is on {lists.kv_indices.device} but query is on {query.device}; use block_mask.to(query.device)")
    for name, size, extent in (("B", lists.kv_indices.shape[0], query.shape[0]), ("H", lists.kv_indices.shape[1], query.shape[1])):
        if size not in (1, extent):
            raise ValueError(f"block_mask of shape {tuple(mask_shape)} does not broadcast to query {_shape(query)}: its {name} is {size}, "
                             f"which must be 1 or {extent}")
    for name, size in (("Q", lists.q_block), ("KV", lists.kv_block)):
        if size % 16:
            raise ValueError(f"block_mask has a {name} block size of {size}; attention kernels need a multiple of 16: pass "
                             "BLOCK_SIZE=128 to create_block_mask")
    rows = -(-Q_LEN // lists.q_block)
    if lists.kv_indices.shape[2] < rows:
        raise ValueError(f"block_mask lists {lists.kv_indices.shape[2]} rows of blocks, but {Q_LEN} queries in blocks of "
                         f"{lists.q_block} need {rows}")


def parse_options(kernel_options: dict | None) -> Options:
    """kernel_options as torch names them (with or without the prefix fwd_). Raises ValueError for what is not known."""
    if not kernel_options:
        return DEFAULT
    switches, tile = {}, {}
    precision, backend = "ieee", DEFAULT.backend
    for name, value in kernel_options.items():
        key = name.removeprefix("fwd_")
        backward = _BACKWARD_OPTIONS.get(key.removeprefix("bwd_") if "BLOCK" in key else key)
        if backward is not None:
            tile.update(dict.fromkeys(backward, _tile_number(key, value)))
            continue
        if key.startswith("bwd_") or key in _ACCEPTED:
            continue
        if key in _TILE_OPTIONS:
            tile[key] = _tile_number(key, value)
        elif key in _SWITCHES:
            switches[_SWITCHES[key]] = None if value is None else bool(value)
        elif key == "FLOAT32_PRECISION":
            precision = str(value).strip("'\"").lower()
            if precision not in ("ieee", "tf32"):
                raise ValueError(f"kernel_options['FLOAT32_PRECISION'] is {value!r}; write 'ieee' or 'tf32'")
        elif key == "BACKEND":
            if value not in _BACKENDS:
                raise ValueError(f"kernel_options['BACKEND'] is {value!r}; write {', '.join(map(repr, _BACKENDS))}")
            backend = _BACKENDS[value]
        else:
            known = ", ".join((*_TILE_OPTIONS, *_SWITCHES, "FLOAT32_PRECISION", "BACKEND"))
            raise ValueError(f"kernel_options has no {name!r}; known are {known}")
    return Options(**switches, float32_precision=precision, backend=backend, tile=tuple(sorted(tile.items())))


DEFAULT = Options()
_BACKENDS = {"AUTO": None, "TRITON": "TRITON", "GLUON": "GLUON", "FLASH": None, "TRITON_DECODE": "DECODE"}  # torch's, and ours


def _tile_number(key: str, value) -> int:
    if not isinstance(value, int) or value < 1 or (key.startswith("BLOCK_") and (value < 16 or value & (value - 1))):
        raise ValueError(f"kernel_options[{key!r}] is {value!r}; " + ("BLOCK sizes are powers of two from 16" if key.startswith("BLOCK_")
                                                                     else "it must be a positive integer"))
    return value


# torch's names: 1 is the kernel of dK and dV, 2 that of dQ
_BACKWARD_OPTIONS = {
    "BLOCK_M1": ("dkv_BLOCK_M",), "BLOCK_N1": ("dkv_BLOCK_N",), "BLOCK_M2": ("dq_BLOCK_M",), "BLOCK_N2": ("dq_BLOCK_N",),
    "bwd_num_warps": ("dkv_num_warps", "dq_num_warps"), "bwd_num_stages": ("dkv_num_stages", "dq_num_stages"),
}


def check_tile_fits_mask(options: Options, q_block: int, kv_block: int) -> None:
    """A tile that the user asks for must divide the block mask's blocks."""
    tile = dict(options.tile)
    for name, size in ((name, q_block if name.endswith("M") else kv_block) for name in tile if "BLOCK" in name):
        if size % tile[name]:
            raise ValueError(f"kernel_options[{name!r}] = {tile[name]} does not divide the block mask's block size {size}; "
                             "choose a divisor or make the mask with another BLOCK_SIZE")
