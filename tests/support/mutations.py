"""What tests of changed captures share: the comparison with the mod itself, and objects that hold a value."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
from collections.abc import Callable

import torch

from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.tracing.bind import bind
from support.dense import positions

SHAPE = (2, 3, 5, 7)
SCORES = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
INDICES = positions(SHAPE, "cpu")
NAMES = ("score", "b", "h", "q_idx", "kv_idx")


def check(mod) -> None:
    """What the mod's graph computes with what it captures now is what the mod computes now."""
    graph, values = bind(mod, "score")
    count = len(graph.tensors)
    found = compute(graph.result, dict(zip(NAMES, (SCORES, *INDICES), strict=True)), values[:count], values[count:])
    expected = mod(SCORES, *INDICES)
    expected = expected if isinstance(expected, torch.Tensor) else torch.tensor(expected)
    torch.testing.assert_close(found.float().expand(SHAPE), expected.float().expand(SHAPE), rtol=2e-6, atol=2e-6)


def used(score, w, q_idx, kv_idx):
    return score + w * (kv_idx - q_idx)


def in_namespace(text: str, **names) -> tuple[Callable, dict]:
    """A mod written as text, and its globals."""
    namespace = {"torch": torch, "used": used, "sys": sys, **names}
    exec(f"def mod(score, b, h, q_idx, kv_idx):\n    {text}", namespace)
    return namespace["mod"], namespace


def reading(read: Callable, holder) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: used(score, read(holder), q_idx, kv_idx)


class Plain:
    """An object with an attribute."""

    def __init__(self, w):
        self.w = w

    @property
    def doubled(self):
        return self.w * 2

    def method(self, score, b, h, q_idx, kv_idx):
        return used(score, self.w, q_idx, kv_idx)

    def reader(self):
        return self.w


class Slots:
    __slots__ = ("w",)


class Called(Plain):
    def __call__(self, score, b, h, q_idx, kv_idx):
        return used(score, self.w, q_idx, kv_idx)


class Dynamic:
    def __getattr__(self, name):
        if name == "w":
            return self.__dict__["hidden"]
        raise AttributeError(name)


class Items:
    def __init__(self, w):
        self.content = w

    def __getitem__(self, key):
        return self.content

    def __len__(self):
        return int(self.content)


class Descriptor:
    """A descriptor that keeps its value on itself."""

    def __get__(self, owner, kind):
        return self.value


@dataclasses.dataclass
class Data:
    w: object
    inner: object = None


class Named(collections.namedtuple("Named", "w other")):  # noqa: SLOT002
    """A tuple with names."""


class Stringed(str):
    """A string with an attribute."""


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Number(enum.IntEnum):
    ONE = 1
