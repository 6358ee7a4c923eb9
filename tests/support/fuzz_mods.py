"""Random mods as Python source.

An expression grows node by node, and every node knows its value at sampled positions: in float64, and as float32 would have it, from a
score that is a little off. So torch itself says what is legal, which dtype comes out and how large it is, and whether a number is exact.
Functions that jump (rounding, comparisons, casts to integers) are only applied to exact numbers; divisors and shifts are what they must be.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from support import fuzz_inputs
from support.evaluate import default_dtype

INT_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASK_SYMBOLS = ("b", "h", "q_idx", "kv_idx")
INTEGERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    13,
    16,
    31,
    32,
    63,
    64,
    100,
    127,
    128,
    129,
    255,
    256,
    32767,
    32768,
    65535,
    2**24,
    2**24 + 1,
    2**30,
    2**31 - 2,
    2**31 - 1,
    2**31,
    2**32,
    2**33,
    2**62,
)
FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 0.25, 0.1, 0.3, 3.0, 7.25, 1e-3, 100.0)


class Table:
    """A captured tensor as kernels read it: an index below zero counts from the end, outside it reads zero."""

    def __init__(self, tensor: torch.Tensor, index: tuple = ()) -> None:
        self.tensor, self.index = tensor, index

    def __getitem__(self, index):
        index = (*self.index, *(index if isinstance(index, tuple) else (index,)))
        if len(index) < self.tensor.ndim:
            return Table(self.tensor, index)
        inside, places = torch.ones((1,), dtype=torch.bool, device=self.tensor.device), []
        for place, size in zip(index, self.tensor.shape, strict=True):
            place = torch.as_tensor(place, device=self.tensor.device).long()
            place = torch.where(place < 0, place + size, place)
            inside = inside & (place >= 0) & (place < size)
            places.append(place.clamp(0, max(size - 1, 0)))
        if self.tensor.numel() == 0:
            return torch.zeros(torch.broadcast_shapes(*(p.shape for p in places)), dtype=self.tensor.dtype, device=self.tensor.device)
        return torch.where(inside, self.tensor[tuple(places)], torch.zeros((), dtype=self.tensor.dtype, device=self.tensor.device))

    def __getattr__(self, name):
        """Work on the captured tensor alone is torch's own."""
        found = getattr(self.tensor, name)
        return (lambda *args: as_table(found(*args))) if callable(found) else as_table(found)


def as_table(value):
    """What a mod captures, as the reference hands it to the mod: numbers stay, a 0-dim tensor gets a dimension, so that it counts as much
    in type promotion as the others do, others are tables."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.reshape(1) if value.ndim == 0 else Table(value)


def widened(value, precision: torch.dtype):
    """A captured tensor with its floats as a kernel loads them, in `precision`."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float().to(precision)
    return value


def in_working_precision(source: str) -> str:
    """Source whose casts to float32 are casts to WORK: what kernels compute in float32, the reference has in float64."""
    return source.replace(".float()", ".to(WORK)").replace(".to(torch.float32)", ".to(WORK)")


def reference_namespace(captured: dict, precision: torch.dtype) -> dict:
    return {"torch": torch, "F": F, "math": math, "WORK": precision, **{k: as_table(widened(v, precision)) for k, v in captured.items()}}


@dataclass(eq=False)
class Node:
    """`form` with `args` in its places {0}, {1} and so on."""

    form: str
    args: tuple
    value: torch.Tensor  # at the sampled positions
    rough: torch.Tensor
    name: str = ""

    @property
    def kind(self) -> str:
        return "b" if self.value.dtype == torch.bool else "f" if self.value.is_floating_point() else "i"

    @property
    def exact(self) -> bool:
        return torch.equal(self.value.double().nan_to_num(nan=1e300), self.rough.double().nan_to_num(nan=1e300))

    @property
    def low(self) -> float:
        return self.value.min().item()

    @property
    def high(self) -> float:
        return self.value.max().item()


# What a form asks of its operands, beside what torch does.


def exact(*nodes) -> bool:
    return all(n.exact for n in nodes)


def between(low: float, high: float):
    return lambda x, *_: x.low >= low and x.high <= high


def not_bool(x) -> bool:
    return x.value.dtype != torch.bool


def powers(x, exponent) -> bool:
    return exponent.low >= 0


def whole(dtype):
    """Exact floats that a cast to an integer dtype keeps inside its range."""
    info = torch.iinfo(dtype)
    return lambda x: x.exact and x.low > max(info.min, -(2**30)) and x.high < min(info.max, 2**30)


# form, what it asks for, weight
FLOAT_FORMS = [
    ("{f} + {f}", None, 4),
    ("{f} - {f}", None, 4),
    ("{f} * {f}", None, 3),
    ("{f} * {x}", None, 3),
    ("{f} + {x}", None, 2),
    ("{f} + {i}", between(-1e4, 1e4), 2),
    ("{i} * {x}", between(-(2**24), 2**24), 3),
    ("{f} * {i}", None, 2),
    ("{x} - {f}", None, 1),
    ("-{f}", None, 1),
    ("abs({f})", None, 1),
    ("{f} / {x}", None, 1),
    ("{f} / (abs({f}) + 1)", None, 1),
    ("{i} / ({i} % 9 + 1)", None, 1),
    ("{f}**2", None, 1),
    ("{f}**3", None, 1),
    ("torch.square({f})", None, 1),
    ("torch.reciprocal({f} * {f} + 1)", None, 1),
    ("torch.exp(torch.clamp({f}, max=3))", None, 1),
    ("torch.exp({f})", between(-80, 4), 1),
    ("torch.exp2({f})", between(-80, 5), 1),
    ("torch.expm1({f})", between(-80, 4), 1),
    ("torch.log(abs({f}) + 1)", None, 1),
    ("torch.log2({f})", between(0.01, 1e6), 1),
    ("torch.log1p({f})", between(-0.9, 1e6), 1),
    ("torch.sqrt({f} * {f} + 0.5)", None, 1),
    ("torch.sqrt({f})", between(0.01, 1e6), 1),
    ("torch.rsqrt(abs({f}) + 1)", None, 1),
    ("torch.sin({f})", between(-30, 30), 1),
    ("torch.cos({f})", between(-30, 30), 1),
    ("torch.cos({i})", between(-30, 30), 1),
    ("torch.tan({f})", between(-1.2, 1.2), 1),
    ("torch.atan({f})", None, 1),
    ("torch.atan2({f}, abs({f}) + 1)", None, 1),
    ("torch.erf({f})", None, 1),
    ("torch.sigmoid({f})", None, 1),
    ("torch.tanh({f})", None, 2),
    ("{x} * torch.tanh({f} / 5)", None, 1),
    ("torch.minimum({f}, {f})", None, 1),
    ("torch.maximum({f}, {f})", None, 1),
    ("torch.clamp({f}, -3, 5)", None, 1),
    ("torch.clamp({f}, max={f})", None, 1),
    ("torch.clamp_min({f}, {x})", None, 1),
    ("F.relu({f})", None, 1),
    ("F.gelu({f})", between(-50, 50), 1),
    ("F.gelu({f}, approximate='tanh')", between(-20, 20), 1),
    ("F.silu({f})", None, 1),
    ("F.softplus({f})", None, 1),
    ("F.logsigmoid({f})", None, 1),
    ("torch.add({f}, {f}, alpha=3)", None, 1),
    ("torch.rsub({f}, {f})", None, 1),
    ("torch.pow(abs({f}) + 0.5, {x})", between(0, 100), 1),
    ("torch.where({b}, {f}, {f})", None, 3),
    ("torch.where({b}, {f}, {x})", None, 2),
    ("{f}.where({b}, {f})", None, 1),
    ("{b} * {f}", None, 1),
    ("{b}.float()", None, 1),
    ("{i}.float()", between(-(2**24), 2**24), 2),
    ("{i}.to(torch.float32)", between(-(2**24), 2**24), 1),
    ("{i}.double()", between(-(2**24), 2**24), 1),
    ("{i}.half().float()", between(-2000, 2000), 1),
    ("{i}.bfloat16().float()", between(-200, 200), 1),
    ("torch.floor({f})", exact, 1),
    ("torch.ceil({f})", exact, 1),
    ("torch.trunc({f})", exact, 1),
    ("torch.round({f})", exact, 1),
    ("torch.sign({f})", exact, 1),
    ("{f} % 3.0", exact, 1),
    ("{f}.detach() // 2.0", exact, 1),
    ("torch.fmod({f}, 2.5)", exact, 1),
    ("torch.div({f}, 4, rounding_mode='floor')", exact, 1),
    ("{f}.half().float()", exact, 1),
    ("{f}.bfloat16().float()", exact, 1),
    ("{f}.detach()", None, 0.3),
    ("torch.zeros_like({f})", None, 0.2),
    ("torch.full_like({f}, {x})", None, 0.3),
    ("torch.tensor({x}) + {f}", None, 0.3),
    ("{f}.clone()", None, 0.2),
]
INT_FORMS = [
    ("{i} + {i}", None, 4),
    ("{i} - {i}", None, 4),
    ("{i} * {i}", None, 2),
    ("{i} + {n}", None, 4),
    ("{n} - {i}", None, 2),
    ("{i} - {n}", None, 2),
    ("{i} * {n}", None, 2),
    ("-{i}", None, 1),
    ("abs({i})", None, 1),
    ("~{i}", None, 1),
    ("{i} // 3", None, 1),
    ("{i} // -2", None, 1),
    ("{i} % 5", None, 1),
    ("{i} % -7", None, 1),
    ("{i} // ({i} % 5 + 2)", None, 1),
    ("{i} % (({i} & 7) + 1)", None, 1),
    ("torch.fmod({i}, 3)", None, 1),
    ("torch.div({i}, 4, rounding_mode='trunc')", None, 1),
    ("torch.div({i}, -3, rounding_mode='floor')", None, 1),
    ("{i} & {i}", None, 1),
    ("{i} | {i}", None, 1),
    ("{i} ^ {i}", None, 1),
    ("{i} & {n}", None, 1),
    ("{i} | {n}", None, 1),
    ("{i} ^ {n}", None, 1),
    ("{i} << 2", not_bool, 1),
    ("{i} << ({i} & 3)", None, 1),
    ("{i} >> 1", not_bool, 1),
    ("{i} >> ({i} & 5)", None, 1),
    ("{i}**2", None, 1),
    ("{i}**3", None, 1),
    ("{i} ** ({i} & 3)", None, 1),
    ("{i} ** {i}", powers, 1),
    ("torch.minimum({i}, {i})", None, 1),
    ("torch.maximum({i}, {i})", None, 1),
    ("torch.where({b}, {i}, {i})", None, 2),
    ("torch.where({b}, {i}, {n})", None, 1),
    ("torch.where({b}, {n}, {n})", None, 1),
    ("torch.clamp({i}, 2, 9)", None, 1),
    ("torch.clamp({i}, min={i})", None, 1),
    ("torch.clamp_max({i}, {n})", None, 1),
    ("torch.sign({i})", None, 1),
    ("{b}.int()", None, 1),
    ("{i}.long()", None, 1),
    ("{i}.int()", None, 1),
    ("{i}.short()", None, 0.5),
    ("{i}.char()", None, 0.5),
    ("{i}.byte()", None, 0.5),
    ("{i}.to(torch.int8)", None, 0.3),
    ("{f}.int()", whole(torch.int32), 1),
    ("{f}.long()", whole(torch.int64), 0.5),
    ("{f}.to(torch.int16)", whole(torch.int16), 0.5),
    ("torch.square({i})", None, 0.5),
    ("{b} + {i}", None, 0.5),
    ("torch.add({i}, {i}, alpha=3)", None, 0.5),
    ("torch.full_like({i}, {n})", None, 0.2),
    ("torch.rsub({i}, {n})", None, 0.3),
    ("torch.bucketize({i}.long(), {row})", None, 0.7),
    ("torch.searchsorted({row}, {i}.long(), right=True)", None, 0.7),
    ("torch.take({row}, {i}.long() % 3)", None, 0.5),
]
BOOL_FORMS = [
    *((f"{{i}} {op} {{i}}", None, 3) for op in ("<", "<=", ">", ">=", "==", "!=")),
    *((f"{{i}} {op} {{n}}", None, 3) for op in ("<", "<=", ">", ">=", "==", "!=")),
    *((f"{{f}} {op} {{f}}", exact, 0.5) for op in ("<", "<=", ">", ">=", "==", "!=")),
    ("{f} < {x}", exact, 1),
    ("{f} >= {x}", exact, 1),
    ("{i} < {f}", exact, 1),
    ("{i} >= 2.5", None, 1),
    ("{b} & {b}", None, 5),
    ("{b} | {b}", None, 5),
    ("{b} ^ {b}", None, 1),
    ("~{b}", None, 2),
    ("torch.logical_and({i}, {b})", None, 1),
    ("torch.logical_or({b}, {i})", None, 1),
    ("torch.logical_xor({b}, {b})", None, 0.5),
    ("torch.logical_not({i})", None, 1),
    ("torch.isnan({f})", exact, 0.3),
    ("torch.isfinite({f})", exact, 0.3),
    ("torch.isinf({f})", exact, 0.3),
    ("{i}.bool()", None, 1),
    ("{b} == {b}", None, 0.5),
    ("{b} < {b}", None, 0.3),
    ("torch.where({b}, {b}, {b})", None, 1),
    ("({i} & {n}) != 0", None, 1),
    ("torch.lt({i}, {i})", None, 0.5),
    ("torch.isin({i}, {row})", None, 0.5),
    ("torch.isin({i}.long(), {row}, invert=True)", None, 0.3),
    ("{b} & {on}", None, 0.5),
    ("{b} | {on}", None, 0.3),
]
FORMS = {"f": FLOAT_FORMS, "i": INT_FORMS, "b": BOOL_FORMS}
WEIGHTS = {kind: [weight for *_, weight in forms] for kind, forms in FORMS.items()}


@dataclass
class Captures:
    """What a mod may capture: source by name, and values on the CPU."""

    source: dict[str, str] = field(default_factory=dict)
    value: dict[str, object] = field(default_factory=dict)
    axes: dict[str, tuple] = field(default_factory=dict)  # the symbol that each dimension of a table is meant for
    learned: list[str] = field(default_factory=list)

    def add(self, name: str, source: str, axes: tuple = ()) -> None:
        self.source[name], self.axes[name] = source, axes
        self.value[name] = eval(source, {"torch": torch, "math": math, "device": "cpu", **vars(fuzz_inputs)})


class Writer:
    """Grows the expressions of one mod.

    extents     (B, H, Q_LEN, KV_LEN), or for the fuzzer's sequences the largest of each
    deviation   of the scores; None for a mask_mod
    """

    SAMPLES = 4000

    def __init__(self, rng: random.Random, extents: tuple, deviation: float | None, captures: Captures, prefix: str = "t") -> None:
        self.rng, self.extents, self.captures, self.prefix = rng, extents, captures, prefix
        self.kinds = "fib" if deviation is not None else "ib"
        generator = torch.Generator().manual_seed(rng.randrange(2**30))
        count = math.prod(extents)
        if count <= self.SAMPLES:
            places = torch.arange(count)
        else:
            places = torch.randint(0, count, (self.SAMPLES,), generator=generator)
            places[0], places[1] = 0, count - 1
        symbols = {}
        for name, n in reversed(list(zip(MASK_SYMBOLS, extents, strict=True))):
            symbols[name] = places % n
            places = places // n
        self.symbols = {name: Node(name, (), symbols[name], symbols[name]) for name in MASK_SYMBOLS}
        if deviation is not None:
            score = (torch.randn(len(symbols["b"]), generator=generator, dtype=torch.float64) * 1.3 * deviation).float()
            off = torch.randn(score.shape, generator=generator) * 3e-7
            self.symbols["score"] = Node("score", (), score.double(), score * (1 + off))

    # leaves

    def number(self) -> str:
        """An integer, written or captured."""
        rng = self.rng
        choice = rng.random()
        n = rng.choice(INTEGERS) if choice < 0.4 else rng.randint(0, max(self.extents[2:]) + 5 if choice < 0.7 else 9)
        n = -n if rng.random() < 0.3 else n
        return self.captured_number(n) if rng.random() < 0.3 else f"{n}" if n >= 0 else f"({n})"

    def real(self) -> str:
        x = self.rng.choice(FLOATS) * self.rng.choice((1, 1, -1))
        return self.captured_number(x) if self.rng.random() < 0.3 else f"{x}" if x >= 0 else f"({x})"

    def captured_number(self, value) -> str:
        for name, known in self.captures.value.items():
            if type(known) is type(value) and known == value:
                return name
        name = f"n{len(self.captures.source)}"
        self.captures.add(name, repr(value))
        return name

    def on(self) -> str:
        return self.captured_number(self.rng.random() < 0.5)

    def row(self) -> str:
        """The name of a captured row of ascending integers, int64."""
        numbers = sorted(self.rng.randint(-5, max(self.extents[2:]) + 5) for _ in range(self.rng.choice((3, 4, 7, 8, 9))))
        name = f"r{len(self.captures.source)}"
        self.captures.add(name, f"torch.tensor({numbers}).to(device)")
        return name

    def leaf(self, kind: str) -> Node:
        rng = self.rng
        if kind == "f":
            if "score" in self.symbols and rng.random() < 0.5:
                return self.symbols["score"]
            return self.load_float() if rng.random() < 0.7 else self.made(f"{{0}} * {self.real()}", self.index_leaf())
        if kind == "i":
            return self.load("i", both=rng.random() < 0.4) if rng.random() < 0.35 else self.index_leaf()
        choice = rng.random()
        if choice < 0.3:
            return self.made("{0} >= {1}", self.symbols["q_idx"], self.symbols["kv_idx"])
        if choice < 0.5:
            return self.load("b")
        node = self.index_leaf()
        return self.made(f"{{0}} {rng.choice(('<', '<=', '>', '>=', '==', '!='))} {self.fitted(self.number(), [node])}", node)

    def index_leaf(self) -> Node:
        rng, s = self.rng, self.symbols
        choice = rng.random()
        if choice < 0.2:
            return self.made("{0} - {1}", *rng.sample((s["q_idx"], s["kv_idx"]), 2))
        if choice < 0.25:
            return self.made("{0} + {1}", s["q_idx"], s["kv_idx"])
        return s[rng.choice(("q_idx", "kv_idx", "q_idx", "kv_idx", "h", "b"))]

    # captured tensors

    def table(self, kind: str) -> str:
        """The name of a captured tensor of a kind, often one that there is."""
        rng = self.rng
        tensors = {n: v for n, v in self.captures.value.items() if isinstance(v, torch.Tensor) and n[0] in self.prefix + "m"}
        known = [n for n, v in tensors.items() if _kind(v) == kind and len(self.captures.axes[n]) == v.ndim]  # a mask's, too
        if known and rng.random() < 0.65:
            return rng.choice(known)
        name = f"{self.prefix}{len(self.captures.source)}"
        whole = rng.random() < 0.5  # rows of whole 16 bytes are read otherwise than others
        sizes = dict(zip(MASK_SYMBOLS, self.extents, strict=True))
        axes, shape, cells = [], [], 1
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3, 4))):
            axis = rng.choice((*MASK_SYMBOLS, "q_idx", "kv_idx", "distance", "any"))
            size = {"distance": self.extents[2] + self.extents[3], "any": rng.randint(1, 7)}.get(axis) or sizes[axis]
            if rng.random() < 0.15:
                size = max(1, size - rng.randint(1, 5))  # some indices lie outside
            if whole:
                size = -(-size // 16) * 16
            if cells * size > 200_000:
                break
            cells *= size
            axes.append(axis)
            shape.append(size)
        shape, seed = tuple(shape), rng.randrange(10_000)
        if kind == "f":
            dtype = rng.choice(FLOAT_DTYPES)
            source = f"floats({shape}, {dtype}, {seed})"
        elif kind == "b":
            source = f"flags({shape}, {seed}, {rng.choice((0.1, 0.5, 0.9, 0.99))})"
        else:
            dtype = rng.choice(INT_DTYPES)
            if rng.random() < 0.2:
                source = f"extremes({shape}, {dtype}, {seed})"
            elif rng.random() < 0.4 and len(shape) == 1:
                source = f"ascending({shape[0]}, {rng.choice((2, 3, 5))}, {dtype}, {seed})"
            else:
                low, high = rng.choice(((0, 1), (0, 3), (0, 9), (-3, 3), (-9, 9), (0, 100), (5, 5)))
                source = f"integers({shape}, {dtype}, {seed}, {max(low, torch.iinfo(dtype).min)}, {high})"
        self.captures.add(name, self.with_layout(f"{source}.to(device)", shape), tuple(axes))
        return name

    def table_of_pairs(self) -> str:
        """An integer tensor with an element for every pair of positions, or for every sum of them."""
        rng, (_, _, M, N) = self.rng, self.extents
        pairs = [n for n, axes in self.captures.axes.items() if axes in (("q_idx", "kv_idx"), ("sum",))]
        known = [n for n in pairs if _kind(self.captures.value[n]) == "i"]
        if known and rng.random() < 0.6:
            return rng.choice(known)
        name, dtype = f"{self.prefix}{len(self.captures.source)}", rng.choice(INT_DTYPES)
        axes = ("q_idx", "kv_idx") if M * N <= 200_000 and rng.random() < 0.7 else ("sum",)
        shape = (M, N) if len(axes) == 2 else (M + N,)
        if rng.random() < 0.5:
            shape = *shape[:-1], -(-shape[-1] // 16) * 16
        low, high = rng.choice(((0, 1), (0, 3), (-3, 3), (0, 100)))
        source = f"integers({shape}, {dtype}, {rng.randrange(10_000)}, {max(low, torch.iinfo(dtype).min)}, {high})"
        if rng.random() < 0.15:
            source = f"extremes({shape}, {dtype}, {rng.randrange(10_000)})"
        self.captures.add(name, self.with_layout(f"{source}.to(device)", shape), axes)
        return name

    def with_layout(self, source: str, shape: tuple) -> str:
        rng = self.rng
        if not shape:
            return source
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            choice, dim = rng.random(), rng.randrange(len(shape))
            if choice < 0.35:
                source = f"among_poison({source}, {rng.choice((1, 2))})"
            elif choice < 0.6:
                source = f"turned({source})"
            elif choice < 0.8:
                source = f"{source}.narrow({dim}, {rng.randrange(shape[dim])}, 1).expand{shape}"
            elif len(shape) == 1 and shape[0] > 2:
                source = f"{source}.flip(0)[{rng.choice(('0:', '-' + str(shape[0]) + ':'))}]"
        return source

    def load_float(self) -> Node:
        """Sixteen bits go into the score as they are, else float32 goes on: torch rounds what it computes of them alone, kernels do not."""
        node = self.load("f")
        base = node
        while base.form.startswith("{0}"):
            base = base.args[0]
        if self.captures.value[base.form.split("[")[0]].dtype not in (torch.float16, torch.bfloat16):
            return node
        if "score" in self.symbols and self.rng.random() < 0.4:
            return self.made(self.rng.choice(("{0} + {1}", "{0} * {1}", "{0} - {1}")), self.symbols["score"], node)
        return self.made("{0}.float()", node)

    def load(self, kind: str, both: bool = False) -> Node:
        """A captured tensor at some indices; `both`: at a place for every pair of positions, so that nobody knows its bounds."""
        name = self.table_of_pairs() if both else self.table(kind)
        axes, value = self.captures.axes[name], self.captures.value[name]
        if not axes:
            return self.made(name)
        index = [self.place(axis, n) for axis, n in zip(axes, value.shape, strict=True)]
        if len(index) > 1 and self.rng.random() < 0.5:  # one row, or one column, beside what others read of the same tensor
            for dim, size in enumerate(value.shape):
                if self.rng.random() < 0.5:
                    index[dim] = self.symbols[self.rng.choice(("q_idx", "kv_idx", "q_idx", "kv_idx", "h"))]
                elif dim and self.rng.random() < 0.5:
                    index[dim] = self.constant(self.rng.randrange(-size, size))
        places = [f"{{{i}}}" for i in range(len(index))]
        cut = self.rng.randint(1, len(index)) if self.rng.random() < 0.1 else len(index)
        form = f"{name}[{', '.join(places[:cut])}]" + (f"[{', '.join(places[cut:])}]" if cut < len(index) else "")
        return self.made(form, *index)

    def read_twice(self) -> Node:
        """A condition on what a table has for each pair of positions, and on one of its rows or columns."""
        rng, s, name = self.rng, self.symbols, self.table_of_pairs()
        if self.captures.value[name].ndim < 2:
            return self.leaf("b")
        form, at = f"{name}[{{0}}, {{1}}]", self.constant(rng.randint(0, 9))
        reads = self.made(form, s["q_idx"], s["kv_idx"]), self.made(form, *rng.sample((s[rng.choice(("q_idx", "kv_idx"))], at), 2))
        conditions = []
        for node in reads:
            n = node.value[rng.randrange(len(node.value))].item()
            conditions.append(self.made(f"{{0}} {rng.choice(('<=', '>', '==', '!='))} {n if 0 <= n <= 100 else 0}", node))
        return self.made(rng.choice(("{0} & {1}", "{0} | {1}")), *conditions)

    def constant(self, n: int) -> Node:
        """An index that is written in the mod."""
        value = torch.full_like(self.symbols["b"].value, n)
        return Node(str(n), (), value, value)

    def place(self, axis: str, size: int) -> Node:
        rng, s = self.rng, self.symbols
        if axis == "distance":
            first, second = rng.choice(((s["q_idx"], s["kv_idx"]), (s["kv_idx"], s["q_idx"])))
            offset = rng.choice((self.extents[3], self.extents[2], 0, rng.randint(-5, 20)))
            node = self.made(f"{{0}} - {{1}} + {offset}", first, second) if offset else self.made("{0} - {1}", first, second)
        elif axis == "sum":
            node = self.made("{0} + {1}", s["q_idx"], s["kv_idx"])
        elif axis == "any" or rng.random() < 0.1:
            node = self.grown("i", 1)
            if rng.random() < 0.7:
                node = self.made(f"{{0}} % {size}", node)
        else:
            node = s[axis]
            change = rng.random()
            if change < 0.1:
                node = self.made("{0} // 2", node)
            elif change < 0.2:
                node = self.made(f"{{0}} {rng.choice('+-')} {rng.randint(1, 9)}", node)
            elif change < 0.25:
                node = self.made(f"{size - 1} - {{0}}", node)
            elif change < 0.3:
                node = self.made(f"({{0}} + {self.number()}).long()", node)
        return self.made("{0}.int()", node) if node.value.dtype == torch.uint8 else node

    # expressions

    def made(self, form: str, *args: Node) -> Node:
        """A node, evaluated; ValueError if torch refuses it."""
        values = [self.evaluated(form, args, rough) for rough in (False, True)]
        shape = self.symbols["b"].value.shape
        return Node(form, args, *(v.expand(shape) for v in values))

    def evaluated(self, form: str, args: tuple, rough: bool) -> torch.Tensor:
        precision = torch.float32 if rough else torch.float64
        names = {f"_{i}": a.rough if rough else a.value for i, a in enumerate(args)}
        captured = {k: as_table(widened(v, precision)) for k, v in self.captures.value.items() if k in form}
        with default_dtype(precision), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                namespace = {"torch": torch, "F": F, "math": math, "WORK": precision, **captured, **names}
                found = eval(in_working_precision(form).format(*names), namespace)
            except (TypeError, RuntimeError, AttributeError, OverflowError) as error:
                raise ValueError(str(error)) from None
        if not isinstance(found, torch.Tensor):
            raise ValueError("no tensor")
        return found

    def grown(self, kind: str, depth: int) -> Node:
        """A random expression of a kind: "f", "i" or "b"."""
        if depth <= 0:
            return self.leaf(kind)
        for _ in range(8):
            form, asks, _ = self.rng.choices(FORMS[kind], WEIGHTS[kind])[0]
            if "{f}" in form and "f" not in self.kinds and self.rng.random() < 0.7:
                continue
            try:
                node = self.filled(form, asks, depth)
            except ValueError:
                continue
            if node.kind == kind and self.moderate(node):
                return node
        return self.leaf(kind)

    def filled(self, form: str, asks, depth: int) -> Node:
        args, text = [], form
        while (at := text.find("{")) >= 0:
            end = text.index("}", at)
            key = text[at + 1 : end]
            if key in ("n", "x", "on", "row"):
                put = {"n": self.number, "x": self.real, "on": self.on, "row": self.row}[key]()
                if key == "n" and (any(sign in form for sign in "<>=") or "torch.where" in form or "clamp" in form):
                    put = self.fitted(put, args)
            else:
                put = f"\0{len(args)}\1"
                args.append(self.grown(key, depth - 1 if not args else self.rng.randint(0, depth - 1)))
            text = text[:at] + put + text[end + 1 :]
        if asks is not None and not asks(*args):
            raise ValueError("not for these operands")
        return self.made(text.replace("\0", "{").replace("\1", "}"), *args)

    def fitted(self, number: str, args: list[Node]) -> str:
        """A number that the integers beside it can be: compared with others, torch wraps them around, and kernels do not."""
        value = self.captures.value[number] if number in self.captures.value else int(number.strip("()"))
        dtypes = [a.value.dtype for a in args if a.kind == "i"]
        if all(torch.iinfo(d).min <= value <= torch.iinfo(d).max for d in dtypes):
            return number
        return str(self.rng.randint(0, 100))

    def moderate(self, node: Node) -> bool:
        """Floats neither huge, infinite nor NaN, and not far from what float32 has."""
        if node.kind != "f":
            return True
        value = node.value.double()
        return bool(
            value.isfinite().all()
            and (value.abs() <= 1e5).all()
            and ((value - node.rough.double()).abs() <= 1e-4 * (1 + value.abs())).all()
        )


def _kind(value: torch.Tensor) -> str:
    return "b" if value.dtype == torch.bool else "f" if value.is_floating_point() else "i"


def score_source(writer: Writer, depth: int) -> str:
    """The source of a score_mod: its result depends on the score, and softmax can make something of it."""
    rng, score = writer.rng, writer.symbols["score"]
    node = writer.grown("f", depth)
    if not _uses(node, score) or rng.random() < 0.4:
        form = rng.choice(("{0} + {1}", "{0} + {1}", "{0} * {1}", "{0} - {1}"))
        node = writer.made(form, score, node)
    if not writer.moderate(node):
        node = writer.made("{0} * 0.5", score)
    largest = node.value.abs().max().item()
    if largest > 60:
        node = writer.made(
            rng.choice(("20 * torch.tanh({0} / 20)", "torch.clamp({0}, -20, 20)", f"{{0}} * {2.0 ** -math.ceil(math.log2(largest / 20))}")),
            node,
        )
    if rng.random() < 0.12:
        hidden = rng.choice(("-math.inf", "-math.inf", "float('-inf')", "torch.finfo(torch.float32).min", "-1e9"))
        node = writer.made(f"torch.where({{0}}, {{1}}, {hidden})", writer.grown("b", 2), node)
    return source_of(node, "score_mod", ("score", *MASK_SYMBOLS))


def mask_source(writer: Writer, depth: int, name: str = "mask_mod") -> str:
    """The source of a mask_mod; of a few, one that hides some and not all, more often than not."""
    for _ in range(4):
        node = writer.grown("b", depth)
        if writer.rng.random() < 0.3:
            other = writer.made("{0} >= {1}", writer.symbols["q_idx"], writer.symbols["kv_idx"])
            node = writer.made(writer.rng.choice(("{0} & {1}", "{0} & {1}", "{0} | {1}")), other, node)
        if writer.rng.random() < 0.25:
            node = writer.made(writer.rng.choice(("{0} & {1}", "{0} | {1}")), node, writer.read_twice())
        if 0 < node.value.float().mean() < 1:
            break
    return source_of(node, name, MASK_SYMBOLS)


def _uses(node: Node, symbol: Node) -> bool:
    return node is symbol or any(_uses(a, symbol) for a in node.args)


def source_of(result: Node, name: str, symbols: tuple) -> str:
    """A function that returns a node: what is used more than once, or is long, has a line of its own."""
    uses: Counter = Counter()

    def count(node: Node) -> None:
        uses[id(node)] += 1
        if uses[id(node)] == 1:
            for i, arg in enumerate(node.args):
                count(arg)
                uses[id(arg)] += node.form.count(f"{{{i}}}") - 1

    count(result)
    lines, written = [], {}

    def write(node: Node) -> str:
        if id(node) in written:
            return written[id(node)]
        text = node.form.format(*(write(a) for a in node.args))
        simple = text.replace("_", "").isalnum()
        if not simple and node is not result and (uses[id(node)] > 1 or len(text) > 60):
            written[id(node)] = f"x{len(lines)}"
            lines.append(f"    x{len(lines)} = {text}\n")
        else:
            written[id(node)] = text if simple or node is result else f"({text})"
        return written[id(node)]

    last = write(result)
    return f"def {name}({', '.join(symbols)}):\n{''.join(lines)}    return {last}\n"
