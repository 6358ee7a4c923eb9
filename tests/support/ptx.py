"""PTX of inline assembly in kernels, run on a CPU: the few instructions that they have, on all elements of tensors at once.

Where threads exchange words, the four of a group are the last dimension.
"""

from __future__ import annotations

import re

import numpy as np
import torch

_LOW = 0xFFFFFFFF


def inline_asm_elementwise(asm: str, constraints: str, args: list, dtype, is_pure: bool, pack: int):
    """As Triton's: of `pack` neighbours in the last dimension at a time, which share registers of 32 bits where they have 16 each."""
    if not args:
        return torch.arange(4, dtype=torch.int32) if "%laneid" in asm else torch.zeros((), dtype=torch.int32)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    tensors = torch.broadcast_tensors(*map(torch.as_tensor, args))
    inputs = [register for tensor in tensors for register in _registers(_bits(tensor), _is_half(tensor.dtype), pack)]
    counts = [1 if pack == 1 or _is_half(t) else 2 for t in dtypes]
    names = {f"${sum(counts) + i}": register for i, register in enumerate(inputs)}
    assert constraints.count("=") == sum(counts) and len(constraints.split(",")) == sum(counts) + len(inputs)
    for statement in filter(None, map(str.strip, asm.strip("{}").split(";"))):
        if not statement.startswith(".reg"):
            name, operands = statement.split(None, 1)
            _OPERATIONS[name](names, *re.findall(r"\{[^}]*\}|[^,\s]+", operands))
    found, first = [], 0
    for kind, count in zip(dtypes, counts, strict=True):
        found.append(_tensor([names[f"${first + i}"] for i in range(count)], kind, pack, tensors[0].shape))
        first += count
    return tuple(found) if isinstance(dtype, tuple) else found[0]


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 2


def _bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.is_floating_point():
        tensor = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
    return tensor.to(torch.int64).numpy() & (0xFFFF if _is_half(tensor.dtype) else _LOW)


def _registers(bits: np.ndarray, is_half: bool, pack: int) -> list[np.ndarray]:
    if pack == 1:
        return [bits]
    one, other = (np.broadcast_to(bits, bits.shape)[..., i::2] for i in range(2))
    return [one | other << 16] if is_half else [one, other]


def _tensor(registers: list[np.ndarray], dtype: torch.dtype, pack: int, shape: torch.Size) -> torch.Tensor:
    if pack == 2:
        parts = [registers[0] & 0xFFFF, registers[0] >> 16] if len(registers) == 1 else registers
        registers = [np.stack(np.broadcast_arrays(*parts), -1).reshape(shape)]
    bits = torch.from_numpy(np.ascontiguousarray(registers[0]))
    if dtype in (torch.int64, torch.uint16):
        return bits.to(dtype)
    whole = (bits << 48 >> 48).to(torch.int16) if _is_half(dtype) else (bits << 32 >> 32).to(torch.int32)
    return whole.view(dtype)


def _value(names: dict, operand: str) -> np.ndarray:
    return names[operand] if operand in names else np.int64(int(operand, 0))


def _simple(compute):
    def operation(names: dict, to: str, *operands: str) -> None:
        names[to] = compute(*(_value(names, o) for o in operands)) & _LOW

    return operation


def _mul_wide(names: dict, to: str, one: str, other: str) -> None:
    a, b = (np.asarray(_value(names, o)).astype(np.uint64) for o in (one, other))
    names[to] = a * b


def _move(bits: int):
    """A word to its halves, or two halves to their word."""

    def operation(names: dict, to: str, whole: str) -> None:
        low, high = (whole if whole.startswith("{") else to).strip("{}").replace(",", " ").split()
        if whole.startswith("{"):
            names[to] = names[low] | names[high] << bits
            return
        names[low] = (names[whole] & np.array((1 << bits) - 1, dtype=names[whole].dtype)).astype(np.int64)
        names[high] = (names[whole] >> np.array(bits, dtype=names[whole].dtype)).astype(np.int64)

    return operation


def _prmt(a, b, selector):
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both, found = a | b << 32, np.zeros_like(a)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 0xFF
        found |= np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte) << 8 * i
    return found


def _lop3(a, b, c, table):
    """Bits by bits of a table: number 4 * a + 2 * b + c."""
    found = np.zeros_like(a | b | c)
    for i in range(8):
        if int(table) >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _halves(a) -> list[np.ndarray]:
    """Two bfloat16 as float32."""
    return [(np.asarray(part & 0xFFFF, dtype=np.uint32) << 16).view(np.float32) for part in (a, a >> 16)]


def _setp_neu(names: dict, to: str, a: str, b: str) -> None:
    """Unequal, or one is a NaN."""
    pairs = zip(_halves(_value(names, a)), _halves(_value(names, b)), strict=True)
    names |= {name: ~(x == y) for name, (x, y) in zip(to.split("|"), pairs, strict=True)}


def _shuffle(word, source, segments, lanes):
    """What the threads `source` of the same group of four have."""
    assert (segments, lanes) == (0x1C1F, -1)
    return np.take_along_axis(word, np.broadcast_to(source, word.shape), -1)


def _rounded(dtype: torch.dtype):
    def compute(upper, lower):
        low, high = (_bits(torch.from_numpy((x & _LOW).astype(np.uint32).view(np.float32)).to(dtype)) for x in (lower, upper))
        return low | high << 8 * dtype.itemsize

    return _simple(compute)


def _float_of_half(a):
    return _bits(torch.from_numpy((a & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)))


_OPERATIONS = {
    "and.b32": _simple(lambda a, b: a & b),
    "shl.b32": _simple(lambda a, b: a << b & _LOW),
    "prmt.b32": _simple(_prmt),
    "lop3.b32": _simple(_lop3),
    "mul.wide.u32": _mul_wide,
    "mov.b64": _move(32),
    "mov.b32": _move(16),
    "setp.ne.s32": _simple(lambda a, b: a != b),
    "shfl.sync.idx.b32": _simple(_shuffle),
    "setp.neu.bf16x2": _setp_neu,
    "selp.b32": _simple(lambda a, b, which: np.where(which, a, b)),
    "cvt.rn.bf16x2.f32": _rounded(torch.bfloat16),
    "cvt.rn.f16x2.f32": _rounded(torch.float16),
    "cvt.rn.satfinite.e4m3x2.f32": _rounded(torch.float8_e4m3fn),
    "cvt.f32.f16": _simple(_float_of_half),
}
