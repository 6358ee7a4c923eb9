"""Argument checks of the front door: each failure is one error that names the argument, shows both shapes and says what to do."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping

import torch

from ..codegen import logs
from ..codegen.mod.captured.tensors import ORDINARY, check_kind, is_distributed, is_moving, is_pending
from ..codegen.plan.forward import Options
from ..codegen.text.layouts import LARGEST_BLOCK_N

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPES = (*DTYPES, torch.float8_e4m3fn)
QUERY_DTYPES = (*DTYPES, torch.float8_e4m3fn)  # of calls without gradients
MAX_HEAD_DIM = 512  # of values
MAX_HEAD_DIM_QK = 576  # of queries and keys: latent attention has 64 columns beside its values
MOST = 2**31 - 1  # positions and lengths are int32 in kernels


def check_rank(name: str, tensor, layout: str, *, may_stand: bool = False) -> None:
    """A tensor that is ordinary memory, or with `may_stand` stands for such (a DTensor, a pending collective, one that torch.func maps or
    differentiates), with the rank of `layout` and the extents that it gives as numbers."""
    check_tensor(name, tensor, layout, may_stand=may_stand)
    extents = layout.strip("()").split(", ")
    if tensor.dim() != len(extents) or any(e.isdigit() and int(e) != n for e, n in zip(extents, tensor.shape, strict=True)):
        raise ValueError(f"{name} must have shape {layout}, got {_shape(tensor)}")


def check_tensor(name: str, tensor, layout: str, *, may_stand: bool = False) -> None:
    """A tensor of any rank, as for check_rank."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {layout}, got {type(tensor).__name__}")
    if not may_stand or not (is_moving(tensor) if tensor.__class__ in ORDINARY else is_distributed(tensor) or is_pending(tensor)):
        check_kind(name, tensor)


def autocasts(tensor: torch.Tensor) -> bool:
    """Is autocast on for the tensor's device, so that calls convert it?"""
    device = tensor.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def check_are_tensors(**named) -> None:
    """TypeError for what is no tensor, by its name."""
    for name, given in named.items():
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
        if given.is_nested:
            check_kind(name, given)


def check_dim(tensor, dim) -> None:
    """A tensor that has a dimension `dim`, which may be counted from its end."""
    check_are_tensors(tensor=tensor)
    if not -tensor.dim() <= whole("dim", dim, -tensor.dim()) < tensor.dim():
        raise ValueError(f"dim is {dim}, but tensor {_shape(tensor)} has {tensor.dim()} dimensions; pass that of the sequence")


def check_tensors(query, key, value, enable_gqa: bool, kinds: bool = True) -> None:
    """Shapes, dtypes and devices of query (B, Hq, Q_LEN, D_QK), key (Bkv, Hkv, KV_LEN, D_QK), value (Bkv, Hkv, KV_LEN, D_V). `kinds`: they
    must be ordinary memory, too."""
    named = {"query": query, "key": key, "value": value}
    check_are_tensors(**named)
    for name, t in named.items():
        if kinds:
            check_kind(name, t)
        if t.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, heads, length, head_dim), got shape {_shape(t)}")
    if query.dtype not in QUERY_DTYPES:
        supported = "float16, bfloat16 and float32, and without gradients float8_e4m3fn"
        raise TypeError(f"query has dtype {query.dtype}; supported are {supported}. Convert with query.to(...).")
    for name in ("key", "value"):
        if named[name].dtype != query.dtype:
            raise TypeError(f"{name} has dtype {named[name].dtype} but query has {query.dtype}; convert one with .to(...)")
        if named[name].device != query.device:
            raise ValueError(f"{name} is on {named[name].device} but query is on {query.device}; move one with .to(...)")
    if query.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"query is on {query.device}; kernels run on CUDA or ROCm GPUs ('cuda') and on 'cpu'")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have the same head_dim, got query {_shape(query)} and key {_shape(key)}")
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"key and value must have the same length, got key {_shape(key)} and value {_shape(value)}")
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"key and value must have the same number of heads, got key {_shape(key)} and value {_shape(value)}")
    if key.shape[0] != value.shape[0]:
        raise ValueError(f"key and value must have the same batch size, got key {_shape(key)} and value {_shape(value)}")
    if key.shape[0] != query.shape[0] and key.shape[0] != 1:  # in this order, as a batch that a compiler does not know is no number
        raise ValueError(f"key and value must have query's batch size or 1, got query {_shape(query)} and key {_shape(key)}")
    check_heads(query, key, enable_gqa)
    for name, t in named.items():
        check_extents(name, t, MAX_HEAD_DIM if name == "value" else MAX_HEAD_DIM_QK)


def check_extents(name: str, tensor, most: int) -> None:
    """The last extent of a tensor of queries, keys or values, of which kernels take `most`, and the others, which they count in 32 bits."""
    if any(type(n) is int and n > MOST for n in tensor.shape):
        raise ValueError(f"{name} has shape {_shape(tensor)}; kernels count in 32 bits, to {MOST}")
    if not 1 <= tensor.shape[-1] <= most:
        raise NotImplementedError(f"{name} has head_dim {tensor.shape[-1]} (shape {_shape(tensor)}); supported are 1 to {most}")


def check_heads(query, key, enable_gqa: bool) -> None:
    """The numbers of heads of query (B, Hq, Q_LEN, D_QK) and key (Bkv, Hkv, KV_LEN, D_QK)."""
    hq, hkv = query.shape[1], key.shape[1]
    if hq == hkv:
        return
    if not enable_gqa:
        raise ValueError(
            f"query has {hq} heads and key/value have {hkv} (query {_shape(query)}, key {_shape(key)}); for "
            "grouped-query attention pass enable_gqa=True"
        )
    if hkv == 0 or hq % hkv:
        raise ValueError(f"query heads must be a multiple of key/value heads, got query {_shape(query)} and key {_shape(key)}")


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def whole(name: str, value, least: int = 0) -> int:
    """The argument `name` as an int. TypeError if it is no integer, ValueError if it is less than `least`."""
    try:
        if isinstance(value, (bool, torch.Tensor)):  # a tensor's number would have to be waited for
            raise TypeError
        # torch's compiler has symbols whose type is int; of these operator.index makes numbers
        number = value if type(value) in (int, torch.SymInt) else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


def extent(name: str, value, least: int = 0) -> int:
    """A length or a number of heads, as for `whole`. Kernels count it in 32 bits: ValueError if it is more than that."""
    number = whole(name, value, least)
    if type(number) is int and number > MOST:
        raise ValueError(f"{name} is {number}; it must be at most {MOST}, as kernels count in 32 bits")
    return number


def positive(name: str, value) -> float:
    """The argument `name` as a float. TypeError if it is no number, ValueError if it is not positive and finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {str(value)[:40]}; it must be positive and finite")
    return number


def refuse_dropout(dropout_p) -> None:
    """Raises NotImplementedError for any but 0."""
    if not isinstance(dropout_p, numbers.Real) or dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; there is no dropout in this attention, pass 0.0")


def pair(name: str, value, least: int, what: str) -> tuple[int, int]:
    """The argument `name`, two integers of at least `least`; `what` says what they are. Raises TypeError or ValueError."""
    if isinstance(value, (str, bytes, torch.Tensor)):
        raise TypeError(f"{name} must be {what}, got {value!r}")
    try:
        found = tuple(value)
    except TypeError:
        raise TypeError(f"{name} must be {what}, got {value!r}") from None
    if len(found) != 2:
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return tuple(whole(f"{name}[{i}]", n, least) for i, n in enumerate(found))


def block_size(value) -> tuple[int, int]:
    """BLOCK_SIZE as (Q, KV): one size for both, or a pair."""
    what = "a positive integer, or a pair of them for queries and keys"
    if isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool):
        return (_block("BLOCK_SIZE", value),) * 2
    return tuple(_block(f"BLOCK_SIZE[{i}]", n) for i, n in enumerate(pair("BLOCK_SIZE", value, 1, what)))


def _block(name: str, value) -> int:
    """Of any number of positions that torch can count, also more than there are."""
    number = int(whole(name, value, 1))  # a graph of torch's compiler is of one size
    if number >= 1 << 63:
        raise ValueError(f"{name} is {number}; it must be at most {(1 << 63) - 1}")
    return number


def autocast(*tensors):
    """Under autocast, floating-point tensors but float64 and float8 become autocast's dtype, as for torch's scaled_dot_product_attention.
    The first says the device."""
    if not isinstance(tensors[0], torch.Tensor) or not autocasts(tensors[0]):
        return tensors
    dtype, kept = torch.get_autocast_dtype(tensors[0].device.type), (torch.float64, torch.float8_e4m3fn)
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype not in kept else t for t in tensors)


def check_scale(scale, head_dim: int, name: str = "scale") -> float:
    """The scale as a float; 1 / sqrt(head_dim) by default. For tensors see scales.py. name: the user's."""
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, (torch.SymFloat, torch.SymInt)):  # torch's compiler traces; the operator looks at the number
        return torch.sym_float(scale)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(scale).__name__}")
    try:
        number = float(scale)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_FLOAT32:
        shown = scale if isinstance(scale, float) else f"{type(scale).__name__} too large for float32"
        raise ValueError(f"{name} must be finite in float32, got {shown}")
    return number


LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def check_mask_fits(lists, seq_lengths, query, key, mask_shape) -> None:
    """A block mask must be made for these lengths, this device and a batch and head extent that broadcasts."""
    Q_LEN, KV_LEN = query.shape[2], key.shape[2]
    if seq_lengths != (Q_LEN, KV_LEN):
        raise ValueError(
            f"block_mask was made for lengths {seq_lengths} (shape {tuple(mask_shape)}) but query is {_shape(query)} "
            f"and key {_shape(key)}; make one with create_block_mask(..., Q_LEN={Q_LEN}, KV_LEN={KV_LEN})"
        )
    if lists.kv_indices.device != query.device:
        raise ValueError(f"block_mask is on {lists.kv_indices.device} but query is on {query.device}; use block_mask.to(query.device)")
    for name, size, extent in (("B", lists.kv_indices.shape[0], query.shape[0]), ("H", lists.kv_indices.shape[1], query.shape[1])):
        if size not in (1, extent):
            raise ValueError(
                f"block_mask of shape {tuple(mask_shape)} does not broadcast to query {_shape(query)}: its {name} is {size}, "
                f"which must be 1 or {extent}"
            )


def parse_options(kernel_options: dict | Options | None) -> Options:
    """kernel_options as torch names them, or read already. Raises TypeError if it is no dict, ValueError for what is not known."""
    if kernel_options is None:
        return DEFAULT
    if type(kernel_options) is Options:
        return kernel_options
    if not isinstance(kernel_options, Mapping):
        raise TypeError(f"kernel_options must be a dict of options, got {type(kernel_options).__name__}")
    if not kernel_options:
        return DEFAULT
    if "BACKEND" in kernel_options and kernel_options.get("FORCE_USE_FLEX_ATTENTION"):
        raise ValueError("kernel_options has both BACKEND and FORCE_USE_FLEX_ATTENTION, which exclude each other; leave out the latter")
    fields, tile = {}, {}
    for name, value in kernel_options.items():
        tiles = _TILE_OPTIONS.get(name)
        if tiles is not None:
            tile.update(dict.fromkeys(tiles, _tile_number(name, value)))
        elif name in _OTHER_OPTIONS:
            field, values = _OTHER_OPTIONS[name]
            word = value.strip("'\"").lower() if name == "FLOAT32_PRECISION" and isinstance(value, str) else value  # torch's has quotes
            try:
                fields[field] = values[word]
            except (KeyError, TypeError):
                *most, last = map(repr, values)
                raise ValueError(f"kernel_options[{name!r}] is {value!r}; write {', '.join(most)} or {last}") from None
        elif name in _WITHOUT_EFFECT:
            logs.OPTIONS.debug("kernel_options[%r] = %r has no effect here", name, value)
        else:
            raise ValueError(
                f"kernel_options has no {name!r}; known are BLOCK_M, BLOCK_N, num_warps, num_stages, PRESCALE_QK "
                "and USE_TMA (the same with fwd_), BLOCK_M1, BLOCK_N1, BLOCK_M2 and BLOCK_N2 (the same "
                f"with bwd_), bwd_num_warps, bwd_num_stages, FLOAT32_PRECISION, BACKEND, and without effect " + ", ".join(_IGNORED)
            )
    return DEFAULT._replace(**fields, tile=tuple(sorted(tile.items())))


DEFAULT = Options()

# torch's names, and by them those of the tiles' parts: 1 is the kernel of dK and dV, 2 that of dQ
_TILE_OPTIONS = {
    **{prefix + name: (name,) for prefix in ("", "fwd_") for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")},
    **{
        prefix + name: (part,)
        for prefix in ("", "bwd_")
        for name, part in (("BLOCK_M1", "dkv_BLOCK_M"), ("BLOCK_N1", "dkv_BLOCK_N"), ("BLOCK_M2", "dq_BLOCK_M"), ("BLOCK_N2", "dq_BLOCK_N"))
    },
    **{f"bwd_{name}": (f"dkv_{name}", f"dq_{name}") for name in ("num_warps", "num_stages")},
}
_SWITCH = {False: False, True: True}
_OTHER_OPTIONS = {
    **{
        prefix + name: (field, values)
        for prefix in ("", "fwd_")
        for name, field, values in (("PRESCALE_QK", "prescale_qk", _SWITCH), ("USE_TMA", "use_tma", {**_SWITCH, None: None}))
    },
    "FLOAT32_PRECISION": ("float32_precision", {"ieee": "ieee", "tf32": "tf32"}),
    "BACKEND": (
        "backend",
        {
            **{"AUTO": None, "CPP": "CPP", "HOPPER": "HOPPER", "PORTABLE": "PORTABLE", "DECODE": "DECODE"},
            **{"TRITON": "PORTABLE", "GLUON": "HOPPER", "TRITON_DECODE": "DECODE"},  # two are torch's; its FLASH is refused
        },
    ),
}
# options of torch's module that have nothing to choose here: promises that no kernel relies on, and hints for others' kernels
_IGNORED = (
    "BLOCKS_ARE_CONTIGUOUS",
    "FORCE_USE_FLEX_ATTENTION",
    "IS_DIVISIBLE",
    "PARTITION_SIZE",  # of torch's kernel for CPUs
    "ROWS_GUARANTEED_SAFE",
    "SPLIT_KV",
    "WRITE_DQ",
    "kpack",  # this and the next two are ROCm's
    "matrix_instr_nonkdim",
    "waves_per_eu",
    "num_buffers_warp_spec",
    "num_consumer_groups",
)
_WITHOUT_EFFECT = frozenset(prefix + name for prefix in ("", "fwd_", "bwd_") for name in _IGNORED)


def _tile_number(name: str, value) -> int:
    if "BLOCK" in name:
        allowed, what = {16, 32, 64, 128, LARGEST_BLOCK_N}, f"BLOCK sizes are powers of two from 16 to {LARGEST_BLOCK_N}"
    elif name.endswith("num_warps"):
        allowed, what = {1, 2, 4, 8, 16, 32}, "it must be a power of two from 1 to 32"
    else:
        allowed, what = range(1, 17), "it must be an integer from 1 to 16"
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)) or int(value) not in allowed:
        raise ValueError(f"kernel_options[{name!r}] is {value!r}; {what}")
    return int(value)


def check_tile_fits_mask(options: Options, q_block: int, kv_block: int) -> None:
    """A tile that the user asks for must divide the block mask's blocks. Kernels in C++ have tiles of their own."""
    if options.backend == "CPP":
        return
    for part, number in options.tile:
        size = q_block if part.endswith("_M") else kv_block
        if "BLOCK" in part and size % number:
            name = next(name for name, parts in _TILE_OPTIONS.items() if part in parts)
            raise ValueError(
                f"kernel_options[{name!r}] = {number} does not divide the block mask's block size {size}; "
                "choose a divisor or make the mask with another BLOCK_SIZE"
            )
