"""What a mod may capture, and when it is traced again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
from typing import NamedTuple

import pytest
import torch

from flexpress import cache_clear, cache_info, evaluate_mod
from flexpress.codegen.signature import bind

WINDOW = 5
SCORES = torch.randn(1, 2, 6, 7)


class Kind(enum.Enum):
    ADD = 1
    SUBTRACT = 2


class Pair(NamedTuple):
    low: int
    high: float


@dataclasses.dataclass
class Config:
    window: int
    kind: Kind = Kind.ADD


class Bias:
    def __init__(self, table, shift):
        self.table, self.shift = table, shift

    def __call__(self, score, b, h, q_idx, kv_idx):
        return self.shifted(score) + self.table[h]

    def shifted(self, score):
        return score + self.shift


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2))
        self.scale = 3

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.scale + self.weight[h].exp()


@pytest.fixture(autouse=True)
def nothing_cached():
    cache_clear()


def value(mod) -> torch.Tensor:
    return evaluate_mod(mod, SCORES)


def heads(numbers) -> torch.Tensor:
    return torch.as_tensor(numbers).view(1, -1, 1, 1)


def traces(call) -> int:
    before = cache_info().traces
    call()
    return cache_info().traces - before


def same_graph(make, *arguments) -> bool:
    """Do the mods that `make` gives for each argument share one trace, with each its own value?"""
    return len({id(bind(make(a), "score")[0]) for a in arguments}) == 1


def test_numbers_are_run_time_arguments():
    def make(n):
        return lambda score, b, h, q_idx, kv_idx: score * n + WINDOW

    assert same_graph(make, 2, 3, 1 << 40)
    assert same_graph(make, 0.5, -1.25)
    assert not same_graph(make, 2, 2.0), "another type computes in another dtype"
    for n in (2, -7, 0.5, True):
        assert torch.allclose(value(make(n)), SCORES * n + WINDOW)


def test_numbers_that_python_uses_are_part_of_the_signature():
    def make(n):
        def mod(score, b, h, q_idx, kv_idx):
            for _ in range(n):
                score = score + 1
            return score

        return mod

    assert torch.equal(value(make(2)), SCORES + 1 + 1) and torch.equal(value(make(3)), SCORES + 1 + 1 + 1)
    assert traces(lambda: value(make(3))) == 0 and traces(lambda: value(make(4))) == 1

    def branch(flag):
        return lambda score, b, h, q_idx, kv_idx: score * 2 if flag else score

    assert torch.equal(value(branch(True)), SCORES * 2) and torch.equal(value(branch(False)), SCORES)


def test_host_arithmetic_is_repeated():
    def make(n):
        return lambda score, b, h, q_idx, kv_idx: score + (n * 2 - 1) // 3 + n / 4

    assert same_graph(make, 5, 11)
    for n in (5, 11):
        assert torch.allclose(value(make(n)), SCORES + (n * 2 - 1) // 3 + n / 4)
    assert torch.allclose(value(lambda score, b, h, q_idx, kv_idx: score * math.sqrt(WINDOW)), SCORES * math.sqrt(5))


def test_tensors():
    def make(table):
        return lambda score, b, h, q_idx, kv_idx: score + table.exp()[h] + table.shape[0] // 2 + table.sum()

    first, second = torch.rand(2), torch.rand(2)
    assert same_graph(make, first, second) and not same_graph(make, first, first.half())
    for table in (first, second):
        assert torch.allclose(value(make(table)), SCORES + heads(table.exp()) + 1 + table.sum())


def test_one_tensor_twice_is_not_two_tensors():
    def make(x, y):
        return lambda score, b, h, q_idx, kv_idx: score + x[h] - y[h]

    one, two = torch.rand(2), torch.rand(2)
    assert torch.allclose(value(make(one, one)), SCORES)
    assert torch.allclose(value(make(one, two)), SCORES + heads(one) - heads(two))


def test_globals_defaults_and_partials():
    global WINDOW
    assert torch.equal(value(lambda score, b, h, q_idx, kv_idx: score + WINDOW), SCORES + 5)
    mod = eval("lambda score, b, h, q_idx, kv_idx, n=3, *, m=4: score + n * m")
    assert torch.equal(value(mod), SCORES + 12)

    def scaled(factor, score, b, h, q_idx, kv_idx, shift=0):
        return score * factor + shift

    assert torch.equal(value(functools.partial(scaled, 2.0, shift=1)), SCORES * 2 + 1)
    assert traces(lambda: value(functools.partial(scaled, 3.0, shift=2))) == 0

    def windowed(score, b, h, q_idx, kv_idx):
        return score + WINDOW

    value(windowed)
    WINDOW = 9
    try:
        assert traces(lambda: torch.testing.assert_close(value(windowed), SCORES + 9)) == 0
        WINDOW = 0.5
        assert traces(lambda: torch.testing.assert_close(value(windowed), SCORES + 0.5)) == 1
    finally:
        WINDOW = 5


def test_objects_and_modules():
    table = torch.rand(2)
    bias = Bias(table, 1)
    assert torch.allclose(value(bias), SCORES + 1 + heads(table))
    bias.shift = 4
    assert traces(lambda: torch.testing.assert_close(value(bias), SCORES + 4 + heads(table))) == 0
    assert torch.allclose(value(bias.__call__), SCORES + 4 + heads(table))
    module = Module()
    assert torch.allclose(value(module), SCORES * 3 + heads(module.weight.exp()))


def test_containers_and_configurations():
    config, pair, listed, named = Config(3), Pair(1, 0.5), [torch.rand(2), 2], {"shift": 7}

    def mod(score, b, h, q_idx, kv_idx):
        sign = 1 if config.kind is Kind.ADD else -1
        return score + sign * config.window + pair.low * pair.high + listed[0][h] * listed[1] + named["shift"]

    def expected(sign):
        return SCORES + sign * config.window + 0.5 + heads(listed[0]) * listed[1] + named["shift"]

    assert torch.allclose(value(mod), expected(1))
    config.window, named["shift"], listed[1] = 8, 1, 5
    assert traces(lambda: torch.testing.assert_close(value(mod), expected(1))) == 0
    config.kind = Kind.SUBTRACT
    assert traces(lambda: torch.testing.assert_close(value(mod), expected(-1))) == 1
    listed.append(3)
    assert traces(lambda: value(mod)) == 1


def test_helpers_and_changed_helpers():
    def helper(x):
        return x + 1

    box = [helper, operator.neg]

    def mod(score, b, h, q_idx, kv_idx):
        return box[1](box[0](score))

    assert torch.equal(value(mod), -(SCORES + 1))
    box[0] = lambda x: x * 3
    assert torch.equal(value(mod), -(SCORES * 3))


def test_a_trace_keeps_no_tensor_alive():
    import gc
    import weakref

    table = torch.rand(2)
    value(lambda score, b, h, q_idx, kv_idx: score + table[h])
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is None
