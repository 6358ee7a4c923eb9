"""What Triton's interpreter gets wrong or leaves out of numbers, mended. Exported files have these functions as they stand here."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def mend(scope) -> None:
    """Until `scope`, Triton's record of what it changes, is restored: products of bfloat16, roundings, unsigned numbers, fma."""
    builder = interpreter.InterpreterBuilder
    plain_dot = builder.create_dot

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        # the interpreter keeps bfloat16 as its bits, which NumPy would multiply as integers
        a, b = (_widened(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    def create_fma(self, x, y, z):
        # one rounding: the exact product is what the softmax's shift is taken from
        data = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(data.astype(z.data.dtype), z.dtype.scalar)

    def get_all_ones_value(self, type):  # NumPy refuses -1 for unsigned types
        return interpreter.TensorHandle(np.array([-1]).astype(interpreter._get_np_dtype(type)), type.scalar)

    plain_cast, plain_splat, plain_convert = builder.cast_impl, builder.create_splat, builder.create_fp_to_fp

    def create_splat(self, type, value):
        # the interpreter gives a comparison the dtype of its operands
        if value.data.dtype == np.bool_:
            value = interpreter.TensorHandle(value.data, tl.int1)
        return plain_splat(self, type, value)

    def cast_impl(self, source, type):
        # the interpreter cuts bits off; hardware rounds to the nearest
        if source.dtype.scalar == tl.float32 and type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_narrowed(source.data), tl.bfloat16)
        return plain_cast(self, source, type)

    def create_fp_to_fp(self, source, type, rounding_mode):
        # the interpreter loses the carry where rounding reaches the next power of two
        if source.dtype.scalar == tl.float32 and type.scalar == tl.float8e4nv:
            return interpreter.TensorHandle(_float8(source.data), tl.float8e4nv)
        return plain_convert(self, source, type, rounding_mode)

    # Triton would compute every integer sum and product again in 64 bits, and do nothing with it
    options = interpreter.interpreter_builder.options
    scope.set_attr(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))
    scope.set_attr(builder, "create_dot", create_dot)
    scope.set_attr(builder, "create_fma", create_fma)
    scope.set_attr(builder, "create_fp_to_fp", create_fp_to_fp)
    scope.set_attr(builder, "cast_impl", cast_impl)
    # Triton 3.6 leaves scalars as arrays of one element, which NumPy 2.4 no longer takes for numbers
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
    scope.set_attr(builder, "create_splat", create_splat)
    scope.set_attr(builder, "get_all_ones_value", get_all_ones_value)


def _widened(handle):
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def _narrowed(data):
    """float32 as the bits of the nearest bfloat16, ties to even."""
    bits = data.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _float8(data):
    """float32 as the bits of the nearest float8_e4m3fn; what is too large becomes its largest number, as on a GPU."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return torch.from_numpy(np.clip(data, -limit, limit)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def argument(value):
    """A kernel's argument in the interpreter; numbers become scalars of the type that they have on a GPU."""
    if type(value) in (bool, float):
        dtype, numpy_dtype = (tl.int1, np.bool_) if type(value) is bool else (tl.float32, np.float32)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=numpy_dtype), dtype), dtype)
    return interpreter._implicit_cvt(value)


class Libdevice:
    """libdevice's functions, which NumPy, or Python, has under the same names."""

    def __getattr__(self, name: str):
        return functools.partial(_applied, getattr(np, name, None) or np.vectorize(getattr(math, name)))


def _applied(function, *operands):
    """A function of NumPy on the interpreter's tensors and numbers."""
    semantic = interpreter.interpreter_semantic
    tensors = [x if isinstance(x, tl.tensor) else semantic.to_tensor(x, False) for x in operands]
    if len(tensors) == 2:
        tensors = list(semantic.binary_op_type_checking_impl(*tensors))
    data = function(*(t.handle.data for t in tensors))
    like = tensors[0]
    return tl.tensor(interpreter.TensorHandle(np.asarray(data, dtype=like.handle.data.dtype), like.dtype.scalar), like.type)
