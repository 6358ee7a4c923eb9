"""What the interpreter keeps of operands (interpreter_operands.py) is what Triton finds out about them each time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from flexpress.codegen.device.switching import LANGUAGE, at_once, switches

DTYPES = {
    tl.int1: np.bool_,
    tl.uint8: np.uint8,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.float16: np.float16,
    tl.bfloat16: np.uint16,
    tl.float32: np.float32,
    tl.float64: np.float64,
}
SHAPES = ((), (4,), (4, 1), (1, 4), (4, 4), (2, 1, 4), (8,))
NUMBERS = (-1, 0, 1, 300, 2**31, 2**40, True, 0.0, -0.0, 0.5, 1e-42, float("inf"), float("nan"))


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
