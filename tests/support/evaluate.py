"""What the tests of mods share: mods from expressions, torch's answer to them, and a kernel's.

An expression is a line of Python in the symbols score, b, h, q_idx, kv_idx and in what it captures. A printed
kernel evaluates it at every position (`flexpress.codegen.run.evaluate`), torch does so on tensors that broadcast.
Numbers in floating point are compared with float64; what a kernel may be off by comes from the same
computation with noise on every operation.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flexpress.codegen.mod.expr import MASK_SYMBOLS, SCORE_SYMBOLS
from flexpress.codegen.mod.table.ops import OPS
from flexpress.codegen.mod.table.rows_special import SPECIAL
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.evaluate import evaluate_mod
from support.dense import positions

SHAPES = {"cpu": (2, 2, 20, 24), "cuda": (2, 3, 200, 333)}  # (B, H, Q_LEN, KV_LEN)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny
EPS = torch.finfo(torch.float32).eps

_FLOAT_VALUES = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.0,
    -7.25,
    88.0,
    -100.0,
    65504.0,
    1e-3,
    0.1,
    math.inf,
    -math.inf,
    math.nan,
)
_INT_VALUES = (0, 1, -1, 2, -2, 3, -3, 7, -7, 8, 31, 63, 64, -100, 100)


def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """`count` values of a dtype: its corners (signed zeros, infinities, NaN, extremes) among random ones.

    An integer's smallest value is left out: divided by -1 it ends the process.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype.is_floating_point:
        corners, scale = torch.tensor(_FLOAT_VALUES), torch.tensor([0.3, 3.0, 30.0])
        rest = torch.randn(count, generator=generator) * scale[torch.arange(count) % 3]
    else:
        info = torch.iinfo(dtype)
        extremes = info.max, info.min + 1
        corners = torch.tensor([n for n in (*_INT_VALUES, *extremes) if info.min <= n <= info.max])
        rest = torch.randint(max(info.min, -1000), min(info.max, 1000), (count,), generator=generator)
    return torch.cat([corners, rest]).to(dtype)[:count][torch.randperm(count, generator=generator)]


def make_mod(expression: str, kind: str, captured: dict):
    """A mod that returns `expression`."""
    namespace = {"torch": torch, "F": F, "math": math, **captured}
    symbols = SCORE_SYMBOLS if kind == "score" else MASK_SYMBOLS
    exec(f"def mod({', '.join(symbols)}):\n    return {expression}", namespace)
    return namespace["mod"]


def traced_dtype(expression: str, captured: dict) -> torch.dtype:
    """The dtype that a traced score_mod has found for its result."""
    return bind(make_mod(expression, "score", captured), "score")[0].result.dtype


def torch_dtype(expression: str, captured: dict) -> torch.dtype:
    """The dtype that torch finds for the expression of 0-dim tensors."""
    dtypes = {"score": torch.float32}
    symbols = {name: torch.zeros((), dtype=dtypes.get(name, torch.int32)) for name in SCORE_SYMBOLS}
    return _run(expression, symbols, _on_cpu(captured)).dtype


def in_torch(expression: str, scores: torch.Tensor, captured: dict, precision: torch.dtype, formulas: bool = False) -> torch.Tensor:
    """torch's result at every position, on the CPU, with floats in `precision` (float32 or float64).

    Captured values are rounded to float32 first, as kernels load them. `formulas`: compute rows that the op
    table writes in terms of others in those terms.
    """

    def widened(value):
        if isinstance(value, torch.Tensor):
            value = value.reshape(1, 1, 1, 1) if value.ndim == 0 else value
            value = value.float().to(precision) if value.is_floating_point() else value
        return value

    index = dict(zip(MASK_SYMBOLS, positions(scores.shape, "cpu"), strict=True))
    names = {name: widened(value) for name, value in _on_cpu({"score": scores, **captured}).items()}
    if formulas:
        written = {name: row.expand for name, row in OPS.items() if row.expand and f"F.{name}" in row.spellings}
        names["F"] = SimpleNamespace(**{**written, "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh})
        names["torch"] = SimpleNamespace(**{**vars(torch), **{row.name: row.expand for row in SPECIAL}})
    with default_dtype(precision):
        return _run(expression, index, names).expand(scores.shape)


def _run(expression: str, symbols: dict, names: dict) -> torch.Tensor:
    return eval(expression, {"torch": torch, "F": F, "math": math, **symbols, **names})


def _on_cpu(captured: dict) -> dict:
    return placed(captured, "cpu")


def placed(captured: dict, device: str) -> dict:
    """What a mod captures, on `device`."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in captured.items()}


@contextmanager
def default_dtype(dtype: torch.dtype):
    """torch's default dtype is `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_integer(value) -> bool:
    """Whether it is a tensor of integers."""
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool


class Noise(TorchDispatchMode):
    """Every operation that rounds is off by a few float32 roundings, and overflows where float32 does."""

    ROUND = {"add", "sub", "rsub", "mul", "div", "sqrt", "rsqrt", "reciprocal", "remainder", "square"}
    BLUR = {
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "sin",
        "cos",
        "tan",
        "atan",
        "atan2",
        "tanh",
        "erf",
        "sigmoid",
        "pow",
        "gelu",
        "silu",
        "softplus",
        "log_sigmoid_forward",
    }  # so may their operands be
    AMOUNT = 4 * EPS

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def blurred(self, value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        noise = torch.rand(value.shape, generator=self.generator, dtype=value.dtype) * 2 - 1
        value = torch.where(value.abs() > LARGEST, value.sign() * math.inf, value)
        return torch.where(value.isfinite(), value * (1 + noise * self.AMOUNT) + noise * SMALLEST, value)

    def as_float(self, value):
        """An integer on its way into floating point, which rounds if it is large."""
        if is_integer(value):
            return torch.where(value.abs() > 1 << 24, self.blurred(value.double()), value.double())
        return value

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        mixed = any(t.is_floating_point() for t in tensors) or any(isinstance(a, float) for a in args)
        if mixed and name not in ("index", "where"):
            args = tuple(map(self.as_float, args))
        if name in self.BLUR or mixed and "alpha" in (kwargs or {}):
            args = tuple(self.blurred(a.double() if is_integer(a) and name != "pow" else a) for a in args)
        result = function(*args, **(kwargs or {}))
        return self.blurred(result) if name in self.ROUND | self.BLUR else result


def blur(expression: str, scores: torch.Tensor, captured: dict, samples: int = 6) -> list[torch.Tensor]:
    """What float32 arithmetic might make of the expression: float64 results with noise on every operation."""
    found = []
    for seed in range(samples):
        with Noise(seed):
            found.append(in_torch(expression, scores, captured, torch.float64, formulas=True))
    return found


def check(
    expression: str,
    scores: torch.Tensor,
    captured: dict,
    *,
    exact: bool = False,
    precision: str = "float32",
    tolerance: float = 0.0,
    infinities: bool = True,
) -> float:
    """Assert that a kernel computes what torch does, in torch's dtype; returns the share compared.

    exact      the floating-point result is torch's float32 result itself (integers and bools always are)
    precision  of attention's tensors, which decides between spellings
    tolerance  a relative error that is allowed beside
    infinities False: leave out positions whose exact value is infinite or NaN (0 / 0 after an underflow is
               anybody's guess)
    """
    dtype = torch_dtype(expression, captured)
    assert traced_dtype(expression, captured) == dtype, expression
    if not dtype.is_floating_point:
        return _check_exactly(expression, dtype, scores, captured, precision)
    out = evaluate_mod(make_mod(expression, "score", captured), scores, precision=precision).cpu().double()
    if exact:
        expected = in_torch(expression, scores, captured, torch.float32).double()
        allowed = torch.zeros_like(expected)
    else:
        expected = in_torch(expression, scores, captured, torch.float64).double()
        plain = in_torch(expression, scores, captured, torch.float32).double()
        samples = torch.stack([plain, *blur(expression, scores, captured)]).double()
        spread = (samples - expected).abs().nan_to_num(posinf=math.inf).amax(0)
        spread[spread > 1e-2 * (1 + expected.abs())] = math.inf  # anything may come of it
        allowed = 4 * spread + (4 * EPS + tolerance) * expected.abs() + 4 * SMALLEST
    expected = torch.where(expected.abs() > LARGEST, expected.sign() * math.inf, expected)
    same = (out == expected) | (out.isnan() & expected.isnan()) | ((out - expected).abs() <= allowed)
    same |= allowed.isinf() & expected.isfinite()
    if not infinities:
        same |= ~expected.isfinite()
    assert same.all(), describe(expression, scores, captured, same, out, expected)
    return (~allowed.isinf() | ~expected.isfinite()).double().mean().item()


def _check_exactly(expression: str, dtype: torch.dtype, scores: torch.Tensor, captured: dict, precision: str) -> float:
    """Bools come out as 0 and 1; integers the kernel itself compares with torch's, in their own dtype."""
    expected = in_torch(expression, scores, captured, torch.float64, formulas=True).to(dtype).contiguous()
    sure = torch.ones_like(expected, dtype=torch.bool)
    plain = in_torch(expression, scores, captured, torch.float32)
    for sample in (plain, *blur(expression, scores, captured)):
        sure &= sample == expected
    if dtype == torch.bool:
        mod = make_mod(expression, "score", captured)
        agrees = evaluate_mod(mod, scores, precision=precision).cpu() == expected
    else:
        with_answer = {**captured, "expected": expected.to(scores.device)}
        mod = make_mod(f"expected[b, h, q_idx, kv_idx] == ({expression})", "score", with_answer)
        agrees = evaluate_mod(mod, scores, precision=precision).cpu().bool()
    assert (agrees | ~sure).all(), describe(expression, scores, captured, agrees | ~sure, agrees, expected)
    return sure.double().mean().item()


def describe(expression: str, scores, captured: dict, same, out, expected) -> str:
    """Where a result differs first, with what the expression captures."""
    at = tuple((~same).nonzero()[0].tolist())
    lines = [
        f"{expression}: {int((~same).sum())} of {same.numel()} positions differ, the first at {at}:",
        f"    kernel {out[at].item()!r}, torch {expected[at].item()!r}, score {scores[at].item()!r}",
    ]
    lines += [f"    {name} = {value!r}" for name, value in captured.items()]
    return "\n".join(lines)
