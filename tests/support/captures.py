"""Mods that capture in every way, and how often they are traced."""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flexpress import cache_info
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.evaluate import evaluate_mod
from support.dense import positions

SCORES = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(0))
SLOPES = torch.tensor([0.5, 0.25, 0.125])


def result(mod):
    """What a kernel makes of `mod`, after a check against torch."""
    out = evaluate_mod(mod, SCORES)
    expected = mod(SCORES, *positions(SCORES.shape, "cpu"))
    torch.testing.assert_close(out, expected.float().expand(SCORES.shape), rtol=2e-6, atol=2e-6)
    return out


def traces(mod) -> int:
    """How many traces it takes to compute what `mod` computes now."""
    before = cache_info().traces
    result(mod)
    return cache_info().traces - before


def graph(mod):
    return bind(mod, "score")[0]


WINDOW = 3
NOTHING = None


def scaled(score, factor):
    return score * factor + WINDOW


class Slope:
    """A callable object."""

    def __init__(self, slopes, shift):
        self.slopes, self.shift = slopes, shift

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score + self.slope(h) * (kv_idx - q_idx)

    def slope(self, h):
        return self.slopes[h] + self.shift

    def method(self, score, b, h, q_idx, kv_idx):
        return score * self.slope(h)

    @staticmethod
    def static(score, b, h, q_idx, kv_idx):
        return score + WINDOW

    @property
    def doubled(self):
        return self.shift * 2


@dataclass
class Settings:
    """A configuration."""

    cap: float
    heads: int
    table: torch.Tensor
    name: str = "soft"


@dataclass(frozen=True, slots=True)
class Frozen:
    """A configuration without a __dict__."""

    cap: float


Pair = namedtuple("Pair", "shift table")


class Kind(enum.Enum):
    """A choice."""

    SUM = 1
    PRODUCT = 2


class Bias(torch.nn.Module):
    """A module with a parameter, a buffer, a submodule and a setting."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.tensor(0.5))
        self.inner = torch.nn.Module()
        self.inner.max_distance = 4
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 3)])

    def forward(self, score, b, h, q_idx, kv_idx):
        near = abs(q_idx - kv_idx) < self.inner.max_distance
        return torch.where(near, score + self.weight[h] + self.layers[0].bias[h], score - self.offset)


def closure():
    factor, table = 2.5, torch.randn(9)
    return lambda score, b, h, q_idx, kv_idx: score * factor + table[kv_idx]


def default():
    def mod(score, b, h, q_idx, kv_idx, slopes=SLOPES, shift=2):
        return score + slopes[h] * shift

    return mod


def keyword_default():
    def mod(score, b, h, q_idx, kv_idx, *, slopes=SLOPES, shift=2):
        return score + slopes[h] * shift

    return mod


def global_number():
    return lambda score, b, h, q_idx, kv_idx: score + WINDOW


def helper_function():
    return lambda score, b, h, q_idx, kv_idx: scaled(score, 2)


def nested_function():
    def mod(score, b, h, q_idx, kv_idx):
        def inside(x):
            return x * SLOPES[h]

        return inside(score) + (lambda y: y - 1)(score)

    return mod


def partial():
    def mod(slopes, score, b, h, q_idx, kv_idx, shift):
        return score + slopes[h] * shift

    return functools.partial(mod, SLOPES, shift=3)


def partial_of_partial():
    def mod(a, b_, score, b, h, q_idx, kv_idx):
        return score * a + b_

    return functools.partial(functools.partial(mod, 2.0), 3)


def partial_of_object():
    return functools.partial(Slope(SLOPES, 1.5).method)


def dataclass_settings():
    settings = Settings(2.0, 3, torch.randn(3))

    def mod(score, b, h, q_idx, kv_idx):
        return settings.cap * torch.tanh(score / settings.cap) + settings.table[h % settings.heads]

    return mod


def slots():
    frozen = Frozen(1.5)
    return lambda score, b, h, q_idx, kv_idx: score * frozen.cap


def named_tuple():
    pair = Pair(2, torch.randn(9))
    return lambda score, b, h, q_idx, kv_idx: score + pair.shift * pair.table[kv_idx] + pair[0]


def dictionary():
    settings = {"shift": 2, "tables": {"near": torch.randn(9)}, 3: 0.5}

    def mod(score, b, h, q_idx, kv_idx):
        return score * settings[3] + settings["shift"] * settings["tables"]["near"][q_idx]

    return mod


def list_and_tuple():
    things = [2, (0.5, torch.randn(3)), [1], operator.neg]

    def mod(score, b, h, q_idx, kv_idx):
        return things[-1](score) * things[0] + things[1][0] * things[1][1][h] + things[-2][0]

    return mod


def constants():
    dtype, name, kind, nothing, device = torch.int32, "sum", Kind.SUM, None, torch.device("cpu")

    def mod(score, b, h, q_idx, kv_idx):
        if name == "sum" and kind == Kind.SUM and nothing is None and NOTHING is None and device.type == "cpu":
            return score.to(dtype).float() + score
        return score

    return mod


def libraries():
    def mod(score, b, h, q_idx, kv_idx):
        return F.relu(score) + math.pi + functools.reduce(lambda x, y: x + y, [score, h, 2])

    return mod


def unpacked():
    table = torch.randn(3, 9)
    low, high = 2, 5
    return lambda score, *index: score + table[index[1], index[3]] * (high - low)


CAPTURES = [
    closure,
    default,
    keyword_default,
    global_number,
    helper_function,
    nested_function,
    partial,
    partial_of_partial,
    partial_of_object,
    dataclass_settings,
    slots,
    named_tuple,
    dictionary,
    list_and_tuple,
    constants,
    libraries,
    unpacked,
    lambda: Slope(SLOPES, 0.5),
    lambda: Slope(SLOPES, 0.5).method,
    lambda: Slope.static,
    Bias,
]
NAMES = [*(f.__name__ for f in CAPTURES[:17]), "callable_object", "bound_method", "static_method", "module"]


def windowed(window, scale=1.0, on=True):
    return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx - kv_idx < window) & on, score * scale, -1.0)
