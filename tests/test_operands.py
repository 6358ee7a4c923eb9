"""What the interpreter keeps of operands (interpreter_operands.py) is what Triton finds out about them each time, and what it computes past
Triton's functions (interpreter_direct.py) is what those compute."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from flexpress.codegen.device import interpreter_direct
from flexpress.codegen.device.switching import LANGUAGE, at_once, switches

DTYPES = {
    tl.int1: np.bool_,
    tl.uint8: np.uint8,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.uint32: np.uint32,
    tl.uint64: np.uint64,
    tl.float16: np.float16,
    tl.bfloat16: np.uint16,
    tl.float32: np.float32,
    tl.float64: np.float64,
}
SHAPES = ((), (4,), (4, 1), (1, 4), (4, 4), (2, 1, 4), (8,))
NUMBERS = (-1, 0, 1, 300, 2**31, 2**32, 2**40, True, 0.0, -0.0, 0.5, 1e-42, float("inf"), float("nan"))


def tensor(dtype, shape):
    data = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape or (1,)).astype(DTYPES[dtype])
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def found(make_alike, *operands):
    """Types, and values as NumPy broadcasts them in the operation that follows; or the kind of error."""
    try:
        made = make_alike(*operands)
    except Exception as error:
        return type(error)
    values = np.broadcast_arrays(*(t.handle.data for t in made))
    return [str(t.type) for t in made], [t.shape for t in made], [(v.dtype, v.shape, v.tobytes()) for v in values]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("divided", [False, True])
def test_operands_become_what_triton_makes_of_them(dtype, divided):
    def compare():
        plain = TritonSemantic.binary_op_type_checking_impl
        there, back = switches()
        try:
            at_once(there)
            kept = interpreter.interpreter_semantic.binary_op_type_checking_impl
            others = [*(tensor(other, shape) for other in DTYPES for shape in SHAPES), *NUMBERS]
            for shape, other, turned, again in itertools.product(SHAPES, others, (False, True), range(2)):
                operands = [tensor(dtype, shape), other][:: -1 if turned else 1]
                more = (False, False, True, divided)
                wanted = found(lambda *given: plain(interpreter.interpreter_semantic, *given), *operands, *more)
                assert found(kept, *operands, *more) == wanted, (shape, other, turned, again)
        finally:
            at_once(back)

    LANGUAGE.run(compare)


OPERATORS = [
    getattr(operator, name) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor", "lshift", "rshift")
]
FEW_SHAPES = ((), (4,), (4, 1), (4, 4))
NEW_DIMENSIONS = [(slice(None), None), (None, slice(None)), (None, slice(None), None), (None,), (slice(None), slice(None), None)]


def pointers(buffer, shape):
    """Pointers to all of a buffer."""
    element = next(t for t in DTYPES if DTYPES[t] == buffer.dtype)
    addresses = buffer.ctypes.data + buffer.itemsize * np.arange(np.prod(shape, dtype=np.uint64), dtype=np.uint64)
    kind = tl.pointer_type(element)
    handle = interpreter.TensorHandle(addresses.reshape(shape or (1,)), kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def seen(compute):
    """What a result holds, or the kind of error."""
    try:
        result = compute()
    except Exception as error:
        return type(error)
    data = result.handle.data
    return str(result.type), result.shape, data.dtype, data.shape, data.tobytes()


def agree(compute, what):
    """`compute()` gives the same at first, when Triton computes, and then."""
    interpreter_direct._ways.clear()
    wanted = seen(compute)
    assert seen(compute) == wanted, what


def interpreted(check):
    there, back = switches()

    def run():
        try:
            at_once(there)
            with np.errstate(all="ignore"):
                check()
        finally:
            at_once(back)

    LANGUAGE.run(run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_give_what_tritons_functions_give(dtype):
    def check():
        for shape in FEW_SHAPES:
            x = tensor(dtype, shape)
            for other, compute in itertools.product([*(tensor(d, s) for d in DTYPES for s in FEW_SHAPES), *NUMBERS], OPERATORS):
                agree(lambda x=x, y=other, compute=compute: compute(x, y), (compute, shape, other))
                if not isinstance(other, tl.tensor):  # a tensor on the left comes in its turn
                    agree(lambda x=x, y=other, compute=compute: compute(y, x), (compute, other, shape))
            for where in NEW_DIMENSIONS:
                agree(lambda x=x, where=where: x[where], (shape, where))
            for to in DTYPES:
                agree(lambda x=x, to=to: x.to(to), (shape, to))

    interpreted(check)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choices_are_what_triton_makes_of_them(dtype):
    def check():
        others = [*(tensor(d, s) for d in DTYPES for s in FEW_SHAPES), *NUMBERS]
        for shape, other, of_mask in itertools.product(FEW_SHAPES, others, FEW_SHAPES):
            x, mask = tensor(dtype, shape), tensor(tl.int32, of_mask) % 2 == 0
            agree(lambda x=x, y=other, mask=mask: tl.where(mask, x, y), (shape, other, of_mask))
            agree(lambda x=x, y=other, mask=mask: tl.where(mask, y, x), (other, shape, of_mask))

    interpreted(check)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_read_and_written_as_triton_does(dtype):
    def check():
        for shape, of_mask in itertools.product(FEW_SHAPES, (None, (), (4,), (1, 4), (4, 1), (4, 4))):
            buffer = tensor(dtype, shape).handle.data.copy()
            mask = None if of_mask is None else tensor(tl.int32, of_mask) % 2 == 0
            at = pointers(buffer, shape)
            for other in (None, 0, 0.0, 7, tensor(dtype, shape)):
                agree(lambda at=at, mask=mask, other=other: tl.load(at, mask, other), (shape, of_mask, other))
            for offset in (*(tensor(d, s) * 0 for d in (tl.int32, tl.int64) for s in SHAPES), 0):
                agree(lambda at=at, offset=offset: tl.load(at + offset), (shape, offset))
            for value in (*(tensor(d, s) for d in (dtype, tl.float32) for s in (shape, ())), 1.0):

                def written(at=at, value=value, mask=mask, buffer=buffer):
                    buffer[...] = 0
                    tl.store(at, value, mask)
                    return tl.tensor(interpreter.TensorHandle(buffer.copy(), dtype), at.type)

                agree(written, (shape, of_mask, value))

    interpreted(check)


def test_pointers_move_by_elements():
    def check():
        buffer = np.arange(16, dtype=np.float32)
        at = pointers(buffer, ())
        for _ in range(2):
            found = tl.load(at + tl.arange(0, 8) * 2)
            assert found.handle.data.tolist() == buffer[::2].tolist()

    interpreted(check)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_ranges_are_what_triton_makes_of_them(dtype):
    def check():
        shapes = (16, 32), (32, 16), (16, 16), (2, 16, 32), (2, 32, 16), (16, 4), (16,)
        sums = None, tensor(tl.float32, (16, 16)), tensor(tl.float64, (16, 16)), tensor(tl.float32, (2, 16, 16)), 0
        for a, b, acc, other in itertools.product(shapes, shapes, sums, (dtype, tl.float32)):
            x, y = tensor(dtype, a), tensor(other, b)
            for options in ({}, {"input_precision": "ieee"}, {"out_dtype": tl.float16}):
                agree(lambda x=x, y=y, acc=acc, options=options: tl.dot(x, y, acc, **options), (a, b, other, acc, options))
        for start, end in itertools.product((0, 16, -4, 3), (16, 32, 0, 4)):
            agree(lambda start=start, end=end: tl.arange(start, end), (start, end))

    interpreted(check)
