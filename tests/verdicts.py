"""Verdicts of random mask_mods against brute force, on the host: no kernel runs.

    python tests/verdicts.py --n 20000 --seed 1     prints what is wrong, and how many empty and full blocks were found

Masks are random trees of integers, floats and bools with gathers by one axis and by both, arithmetic that wraps around on either side of a
comparison, and captured numbers near the ends of every dtype. Positions begin anywhere, up to the largest one.
"""

from __future__ import annotations

import argparse
import math
import random
import traceback
from dataclasses import dataclass

import torch

from flexpress import ModError
from flexpress.codegen.mod.expr import ModGraph, walk
from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.graphs.intervals import Analysis, analyse
from flexpress.codegen.mod.tracing.bind import bind
from support.evaluate import FLOATS, INTEGERS, make_mod

SIZE = 20  # positions along an axis
GATHERS = (
    "[{q}]",
    "[{k}]",
    "[q_idx + kv_idx]",
    "[q_idx - kv_idx]",
    "[kv_idx - q_idx]",
    "[{q}, {k}]",
    "[h, {k}]",
    "[{q}, b]",
    "[b]",
    "[b, h]",
    "[{q}, {q}]",
    "[q_idx - kv_idx, h]",
)
LITERALS = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    31,
    32,
    63,
    64,
    100,
    127,
    128,
    255,
    256,
    32767,
    32768,
    65535,
    2**24 + 1,
    2**31 - 1,
    2**31,
    2**32 + 5,
    2**62,
    2**63 - 1,
)
COMPARISONS = ("{0} == {1}", "{0} != {1}", "{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}")
INTEGER_FORMS = (
    "{i} + {i}",
    "{i} - {i}",
    "{i} * {i}",
    "{i} + {a}",
    "{i} - {a}",
    "{a} - {i}",
    "{i} * {a}",
    "-{i}",
    "~{i}",
    "abs({i})",
    "torch.sign({i})",
    "{i} // {a}",
    "{i} // {i}",
    "{i} % {a}",
    "{i} % {i}",
    "{a} % {i}",
    "{a} // {i}",
    "torch.fmod({i}, {i})",
    "torch.fmod({i}, {a})",
    'torch.div({i}, {i}, rounding_mode="trunc")',
    'torch.div({i}, {a}, rounding_mode="trunc")',
    "{i} & {i}",
    "{i} & {a}",
    "{i} | {i}",
    "{i} ^ {a}",
    "{i} << {i}",
    "{i} << ({i} & 3)",
    "{i} << {s}",
    "{i} >> {i}",
    "{i} >> {s}",
    "{i} ** ({i} & 3)",
    "{i} ** {s}",
    "torch.minimum({i}, {i})",
    "torch.maximum({i}, {i})",
    "torch.clamp({i}, {a}, {a})",
    "torch.clamp({i}, min={a})",
    "torch.where({b}, {i}, {i})",
    "torch.where({b}, {i}, {a})",
    "({b}).int()",
    "({i}).to({d})",
    "({i}).to({d})",
    "({f}).to({d})",
    "torch.full_like({i}, {a})",
    "torch.floor({i})",
    "{i}.detach()",
)
COMMON_FORMS = ("{i} + {a}", "{i} - {a}", "{a} - {i}", "-{i}", "~{i}", "abs({i})", "{i} * {a}", "{i} << ({i} & 3)", "{i} % {a}")
FLOAT_FORMS = (
    "{f} + {f}",
    "{f} - {i}",
    "{f} * {f}",
    "{f} * {a}",
    "{f} / {f}",
    "{i} / {i}",
    "-{f}",
    "abs({f})",
    "{f} % {x}",
    "{f} // {x}",
    "torch.exp({f})",
    "torch.sqrt({f})",
    "torch.tanh({f})",
    "torch.floor({f})",
    "torch.round({f})",
    "torch.minimum({f}, {f})",
    "torch.maximum({f}, {f})",
    "torch.where({b}, {f}, {f})",
    "torch.where({b}, {f}, {x})",
    "({i}).float()",
    "({i}).to({e})",
    "({f}).to({e})",
    "torch.sign({f})",
    "torch.log({f})",
    "torch.clamp({f}, -3, {x})",
    "({b}) * {f}",
    "F.relu({f})",
    "{f} ** 2",
    "torch.sin({f})",
    "torch.atan2({f}, {f})",
)
BOOL_FORMS = (
    "({b}) & ({b})",
    "({b}) | ({b})",
    "({b}) ^ ({b})",
    "~({b})",
    "torch.logical_and({i}, {b})",
    "torch.logical_not({i})",
    "({i}).bool()",
    "torch.where({b}, {b}, {b})",
    "torch.isnan({f})",
    "torch.isfinite({f})",
    "({f}).bool()",
    "({b}) == ({b})",
    "({b}) <= ({b})",
    "torch.logical_xor({f}, {i})",
    "({b}) * ({b})",
    "torch.maximum({b}, {b})",
)


class Writer:
    """Writes random expressions, and captures what they use."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.captured = rng, {}

    def mask(self) -> str:
        """A bool expression, most often of integers."""
        return self.bool(self.rng.choice((1, 1, 2, 2, 3, 4)))

    def fill(self, form: str, depth: int) -> str:
        makers = {
            "i": lambda: self.integer(depth - 1),
            "f": lambda: self.float(depth - 1),
            "b": lambda: self.bool(depth - 1),
            "a": self.number,
            "s": lambda: str(self.rng.choice((0, 1, 2, 3, 7, 8, 31, 33, 63, 64, -1))),
            "d": lambda: str(self.rng.choice(INTEGERS)),
            "e": lambda: str(self.rng.choice(FLOATS)),
            "x": self.real,
        }
        for letter, make in makers.items():
            while f"{{{letter}}}" in form:
                form = form.replace(f"{{{letter}}}", make(), 1)
        return f"({form})"

    def bool(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(
                (
                    lambda: "(q_idx >= kv_idx)",
                    lambda: self.load(torch.bool),
                    lambda: self.load(torch.bool),
                    lambda: f"(kv_idx - q_idx < {self.number()})",
                    self.flag,
                )
            )()
        if self.rng.random() < 0.7:
            if self.rng.random() < 0.75:
                sides = [self.integer(depth), self.number() if self.rng.random() < 0.6 else self.integer(self.rng.randrange(depth + 1))]
            else:
                sides = [self.float(depth), self.rng.choice((self.real, lambda: self.float(depth - 1), lambda: self.integer(depth - 1)))()]
            self.rng.shuffle(sides)
            return f"({self.rng.choice(COMPARISONS).format(*sides)})"
        return self.fill(self.rng.choice(BOOL_FORMS), depth)

    def integer(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(("q_idx", "kv_idx", "h", "b", *4 * [""])) or self.load(self.rng.choice(INTEGERS))
        return self.fill(self.rng.choice(COMMON_FORMS if self.rng.random() < 0.4 else INTEGER_FORMS), depth)

    def float(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(("q_idx.float()", "(h * 0.5)", *3 * [""])) or self.load(self.rng.choice(FLOATS))
        return self.fill(self.rng.choice(FLOAT_FORMS), depth)

    def capture(self, prefix: str, make) -> str:
        """The name of something captured: a new one, or one that is there."""
        name = f"{prefix}{self.rng.randrange(3)}"
        if name not in self.captured:
            self.captured[name] = make()
        return name

    def number(self) -> str:
        """An integer: a literal, or captured."""
        value = self.rng.choice(LITERALS if self.rng.random() < 0.5 else LITERALS[:6])
        value = value * self.rng.choice((1, 1, -1)) + self.rng.choice((0, 0, 0, 1, -1))
        value = min(max(value, -(2**63)), 2**63 - 1)
        if self.rng.random() < 0.6:
            return f"({value})"
        if self.rng.random() < 0.7:
            value = self.rng.choice((value % 64, -(2**31), 2**31 - 1, -128, 127, 255, 256))
        return self.capture("n", lambda: value)

    def flag(self) -> str:
        return f"((b >= 0) & {self.capture('on', lambda: self.rng.random() < 0.5)})"

    def real(self) -> str:
        value = self.rng.choice((0.0, 0.5, -1.25, 3.0, 1e-3, 65504.0, 7e4, 2.0**24, 2.0**31, 1e30, 0.1, math.inf))
        if math.isinf(value) or self.rng.random() < 0.5:
            return self.capture("x", lambda: value)
        return f"({value})"

    def load(self, dtype: torch.dtype) -> str:
        gather = self.rng.choice(GATHERS)
        for letter, axis in (("q", "q_idx"), ("k", "kv_idx")):
            index = self.rng.choice((axis, axis, axis, f"{axis} // 3", f"{axis} - 3", f"({axis} * 7) % 11"))
            gather = gather.replace(f"{{{letter}}}", index)
        rank = gather.count(",") + 1
        name = self.capture(f"t{rank}_{str(dtype).removeprefix('torch.')}_", lambda: self.tensor(dtype, rank))
        return f"{name}{gather}"

    def tensor(self, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """Values of one of many kinds: all over the dtype, near its ends, small, sorted, constant; NaN and infinities among floats."""
        shape = (SIZE * 2,) * rank
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        how = self.rng.choice(("small", "small", "narrow", "constant", "ends", "anything", "sorted", "mixed"))
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < {"constant": 1.0, "small": 0.0, "narrow": 0.1}.get(how, 0.5)
        if dtype.is_floating_point:
            found = torch.randn(shape, generator=generator) * {"small": 1.0, "narrow": 1e-3, "ends": 1e5}.get(how, 20.0)
            if how == "constant":
                found = torch.full(shape, self.rng.choice((0.0, 1.0, -0.0, math.inf, math.nan, 3e38, 1e-40)))
            if how in ("mixed", "ends"):
                odd = torch.tensor((math.nan, math.inf, -math.inf, 3e38, 0.0, -0.0, 1e-40))
                found = torch.where(torch.rand(shape, generator=generator) < 0.1, odd[torch.randint(7, shape, generator=generator)], found)
            return found.to(dtype)
        info = torch.iinfo(dtype)
        middle = self.rng.choice((0, 0, 0, info.min, info.max, 100, -5))
        reach = {"small": 4, "narrow": 1, "constant": 0, "ends": 2, "anything": info.max, "sorted": SIZE, "mixed": 40}[how]
        if how == "ends":
            middle = self.rng.choice((info.min, info.max))
        low, high = max(middle - reach, info.min), min(middle + reach, info.max)
        low = min(max(low, info.min), info.max)
        high = max(high, low)
        wide = torch.tensor([self.rng.randint(low, high) for _ in range(64)], dtype=dtype)
        found = wide[torch.randint(64, shape, generator=generator)]
        if how == "mixed":
            ends = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
            found = torch.where(torch.rand(shape, generator=generator) < 0.05, ends[torch.randint(4, shape, generator=generator)], found)
        return found.sort(0).values if how == "sorted" else found


@dataclass
class Judged:
    """A mask_mod, its verdicts on blocks, and what is so."""

    graph: ModGraph
    tensors: list
    scalars: list
    analysis: Analysis

    @classmethod
    def of(cls, mod) -> Judged:
        graph, found = bind(mod, "mask")
        count = len(graph.tensors)
        return cls(graph, found[:count], found[count:], analyse(graph))

    def value(self, expr, symbols: dict) -> torch.Tensor:
        return compute(expr, symbols, self.tensors, self.scalars)

    def blocks(self, q: list[int], kv: list[int], B: int = 2, H: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        """(verdict, truth), each (B, H, blocks of queries, blocks of keys): 0 empty, 2 full, 1 neither. q and kv: where blocks begin, and
        where the last one ends."""

        def whole(values, *shape):
            return torch.tensor(values, dtype=torch.int32).reshape(shape)

        own = {"b": whole(range(B), B, 1, 1, 1), "h": whole(range(H), 1, H, 1, 1)}
        positions = own | {"q_idx": torch.arange(q[0], q[-1]).int()[:, None], "kv_idx": torch.arange(kv[0], kv[-1]).int()}
        symbols = own | {"q_min": whole(q[:-1], -1, 1), "q_max": whole(q[1:], -1, 1) - 1}
        symbols |= {"kv_min": whole(kv[:-1], -1), "kv_max": whole(kv[1:], -1) - 1}
        for i, zone in enumerate(self.analysis.zones):
            read = {n.attr for n in walk(zone.graph.result) if n.op == "symbol"}
            assert {"q_idx", "kv_idx"} & read == {zone.axis}
            values = self.value(zone.graph.result, positions)
            values = values if values.dtype in (torch.bool, torch.float32) else values.long()
            dim, starts = (2, q) if zone.axis == "q_idx" else (3, kv)
            values = values.expand([max(n, m) for n, m in zip((B, H, 1, 1), (1,) * (4 - values.ndim) + tuple(values.shape), strict=True)])
            parts = values.split([b - a for a, b in zip(starts, starts[1:], strict=False)], dim)
            low, high = (torch.cat([getattr(part, end)(dim, keepdim=True) for part in parts], dim) for end in ("amin", "amax"))
            if values.dtype == torch.float32:
                unknown = low.isnan() | high.isnan()
                low, high = torch.where(unknown, -math.inf, low), torch.where(unknown, math.inf, high)
            symbols[f"zone{i}_min"], symbols[f"zone{i}_max"] = low, high
        shape = (B, H, len(q) - 1, len(kv) - 1)
        verdict = self.value(self.analysis.verdict.result, symbols)
        assert verdict.dtype == torch.int32
        seen = self.value(self.graph.result, positions).expand(B, H, q[-1] - q[0], kv[-1] - kv[0])
        return verdict.expand(shape), _truth(seen, q, kv)


def _truth(seen: torch.Tensor, q: list[int], kv: list[int]) -> torch.Tensor:
    """0, 1 or 2 of blocks of a dense mask."""
    for dim, starts in ((2, q), (3, kv)):
        sizes = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        if dim == 2:
            parts = [(p.all(2), p.any(2)) for p in seen.split(sizes, 2)]
            every, some = (torch.stack([p[i] for p in parts], 2) for i in (0, 1))
        else:
            every = torch.stack([p.all(3) for p in every.split(sizes, 3)], 3)
            some = torch.stack([p.any(3) for p in some.split(sizes, 3)], 3)
    return every.int() + some.int()


def starts(rng: random.Random) -> list[int]:
    """Where random blocks of SIZE positions begin, and where they end."""
    first = rng.choice((0, 0, 0, 0, 0, 100, 120, 250, 32760, 2**24 - 8, 2**30 - 4, 2**31 - 1 - SIZE))
    inner = rng.sample(range(first + 1, first + SIZE), rng.randrange(6))
    return [first, *sorted(inner), first + SIZE]


class Wrong(AssertionError):
    """A sure verdict that is wrong."""


def check(expression: str, captured: dict, q: list[int], kv: list[int]) -> tuple[int, int] | None:
    """How many empty and full blocks were found, and how many there are; None if the mask is refused."""
    try:
        judged = Judged.of(make_mod(expression, "mask", captured))
    except (ModError, TypeError, AttributeError, OverflowError, RuntimeError, ZeroDivisionError) as error:
        if isinstance(error, ModError) or "codegen" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            return None  # torch refuses some: a bool minus a bool, a number that its dtype does not hold
        raise
    if judged.graph.result.dtype != torch.bool:
        return None
    verdict, truth = judged.blocks(q, kv)
    assert ((verdict >= 0) & (verdict <= 2)).all()
    wrong = (verdict != 1) & (verdict != truth)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise Wrong(f"{expression}\n  block {at} of {q} x {kv}: verdict {verdict[tuple(at)]}, truth {truth[tuple(at)]}\n  {captured}")
    return int((verdict != 1).sum()), int((truth != 1).sum())


def random_case(seed: int) -> tuple[str, dict, list[int], list[int]]:
    """A mask's expression, what it captures, and where its blocks begin."""
    rng = random.Random(seed)
    writer = Writer(rng)
    return writer.mask(), writer.captured, starts(rng), starts(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    judged = wrong = found = sure = 0
    for number in range(options.n):
        seed = options.seed * 1_000_000 + number
        case = random_case(seed)
        try:
            counts = check(*case)
        except Exception as error:  # say which, and go on
            wrong += 1
            print(f"seed {seed}: {case[0]}\n  {type(error).__name__}: {str(error)[:1500]}", flush=True)
            continue
        if counts is not None:
            judged, found, sure = judged + 1, found + counts[0], sure + counts[1]
    print(f"{judged} masks of {options.n} judged, {wrong} wrong; {found} of {sure} empty and full blocks found")
    raise SystemExit(wrong != 0)


if __name__ == "__main__":
    main()
