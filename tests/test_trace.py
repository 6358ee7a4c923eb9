"""What a mod may capture, and when two mods are the same: what is found again, and what is traced anew.

`bind` gives the graph of a mod and its captured values. The same graph object means that nothing is printed
or compiled for it; `cache_info().traces` counts the others.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from flexpress import ModError, and_masks, cache_clear, cache_info, explain, flex_attention, mods, noop_mask
from flexpress.codegen.mod.bind import bind, why_every_call
from flexpress.codegen.run.evaluate import evaluate_mod
from flexpress.mods import compose_scores
from support.dense import positions

SCORES = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(0))
SLOPES = torch.tensor([0.5, 0.25, 0.125])


@pytest.fixture(autouse=True)
def fresh_traces():
    """Every test starts without traces."""
    cache_clear()


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


# What may be captured

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


@pytest.mark.parametrize("make", CAPTURES, ids=NAMES)
def test_captures(make):
    """Right results, and one trace however often: the same object again, then one made afresh."""
    mod = make()
    assert traces(mod) == 1
    assert traces(mod) == 0
    assert traces(make()) == 0


def test_a_mod_runs_as_it_is_after_tracing():
    """Tracing leaves the function alone: called with tensors it is still torch's."""
    mod = closure()
    expected = mod(SCORES, *positions(SCORES.shape, "cpu"))
    result(mod)
    assert torch.equal(mod(SCORES, *positions(SCORES.shape, "cpu")), expected)


# Numbers


def windowed(window, scale=1.0, on=True):
    return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx - kv_idx < window) & on, score * scale, -1.0)


def test_numbers_are_arguments():
    """A captured int, float or bool changes nothing in the graph; int for float does."""
    first = graph(windowed(3))
    assert traces(windowed(3)) == 0
    for other in (windowed(5), windowed(-2), windowed(3, -0.5), windowed(3, math.inf), windowed(2, on=False)):
        assert traces(other) == 0 and graph(other) is first
    assert traces(windowed(3.0)) == 1
    assert traces(windowed(True)) == 1
    assert [c.kind for c in first.scalars] == [int, bool, float]


def test_constants_of_libraries_are_literals():
    for mod in (
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -math.inf),
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, float("-inf")),
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -torch.inf),
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, torch.finfo(torch.float32).min),
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, torch.finfo(score.dtype).max * -0.5),
        lambda score, b, h, q_idx, kv_idx: score * 0.5 / math.sqrt(2) + math.pi * 2,
    ):
        assert not graph(mod).scalars
        assert traces(mod) == 0


def test_nan_and_signed_zero_are_arguments_too():
    ones = torch.ones(1, 1, 2, 2)
    out = [evaluate_mod(windowed(3, x), ones)[0, 0, 0, 0].item() for x in (0.0, -0.0, math.nan)]
    assert [math.copysign(1, x) for x in out[:2]] == [1, -1] and math.isnan(out[2])
    assert cache_info().traces == 1


def test_large_numbers_keep_their_value():
    def make(limit):
        return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx < limit, score, 0.0)

    for limit in (3, 2**31 - 1, 2**31, 2**40, -(2**40)):
        out = evaluate_mod(make(limit), SCORES)
        inside = torch.arange(7)[:, None] < limit
        assert torch.equal(out, torch.where(inside, SCORES, 0.0))
    assert cache_info().traces == 4  # an int beyond int32 is part of the kernel


def repeated(n):
    def mod(score, b, h, q_idx, kv_idx):
        for i in range(n):
            score = score + i
        return score

    return mod


def branched(n):
    return lambda score, b, h, q_idx, kv_idx: score * n if n > 2 else score - n


def looked_up(n):
    return lambda score, b, h, q_idx, kv_idx: score + [1.0, 2.0, 3.0, 4.0][n]


def chained(n):
    return lambda score, b, h, q_idx, kv_idx: score + (1 if 0 < n < 3 else 2)


@pytest.mark.parametrize("make", [repeated, branched, looked_up, chained])
def test_numbers_that_python_consumes_are_constants(make):
    """range(n), if n, list[n]: another value is another graph, and the old one stays."""
    first = graph(make(1))
    assert graph(make(1)) is first
    assert traces(make(3)) == 1 and graph(make(3)) is not first
    assert traces(make(1)) == 0 and graph(make(1)) is first


def test_a_consumed_number_that_also_meets_symbols():
    """`n` decides a branch and is an argument of what stands in it."""
    assert traces(branched(3)) == 1
    assert traces(branched(3)) == 0
    assert traces(branched(1)) == 1


@pytest.mark.parametrize(
    "expression",
    [
        "window * 2 + 1",
        "window // 2",
        "window / 3",
        "2**window",
        "-window",
        "abs(window - 7)",
        "window % 4",
        "window << 1 | 1",
        "int(True) + window",
        "window > 2",
        "table.shape[1] // 2",
        "table.numel() + 1",
        "table.size(0) - 1",
        "len(table)",
        "table.shape[0] * window",
        "max_of.sum().item()",
        "table.dim() + window",
        "scale * window",
        "window ** 0.5",
        "1 / window",
        "table.sum()",
        "math.sqrt(window)",
        "float(window)",
        "window - scale",
        "round(scale * 2)",
        "max(window, 2)",
        "[scale, window][1]",
        "window.bit_length()",
        "len(f'{rows}') * window",
    ],
)
def test_arithmetic_on_captured_numbers_is_done_at_every_call(expression):
    """Host arithmetic stays symbolic: another window or another table of the same rank is the same graph."""

    def make(window, rows, scale):
        table, max_of = torch.randn(rows, rows + 3), torch.randn(rows)
        namespace = {"window": window, "table": table, "max_of": max_of, "scale": scale, "rows": "rows", "math": math}
        exec(f"def mod(score, b, h, q_idx, kv_idx):\n    return score + ({expression}) * (kv_idx - q_idx)", namespace)
        return namespace["mod"]

    if expression == "len(table)":
        assert traces(make(3, 4, 0.5)) == 1  # Python's len gives a plain int: a constant
        assert traces(make(5, 4, 1.5)) == 0
        return
    assert traces(make(3, 4, 0.5)) == 1
    assert traces(make(5, 6, 1.5)) == 0


# Tensors


def test_tensors_are_arguments():
    """Values, shapes and strides may change; dtype, rank and requires_grad are part of the graph."""

    def make(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx]

    assert traces(make(torch.randn(3, 9))) == 1
    assert traces(make(torch.randn(3, 9))) == 0
    assert traces(make(torch.randn(5, 20))) == 0
    assert traces(make(torch.randn(9, 3).T)) == 0
    assert traces(make(torch.randn(1, 9).expand(3, 9))) == 0
    assert traces(make(torch.randn(3, 9).half())) == 1
    assert traces(make(torch.randn(3, 9, requires_grad=True).detach())) == 0

    table = torch.randn(3, 9)
    mod = make(table)
    before = result(mod)
    table.mul_(2)
    assert cache_info().traces == 2 and not torch.equal(result(mod), before)


def test_a_tensor_of_another_rank_is_another_graph():
    def make(table):
        return lambda score, b, h, q_idx, kv_idx: score + (table[h] if table.ndim == 1 else table[h, kv_idx])

    assert traces(make(torch.randn(3))) == 1
    assert traces(make(torch.randn(3, 9))) == 1
    assert traces(make(torch.randn(4))) == 0


@pytest.mark.parametrize(
    "work",
    [
        "table.exp()",
        "table * 2 + 1",
        "torch.softmax(table, 0)",
        "table.flip(0)",
        "table.to(torch.float64)",
        "table[1:]",
        "table.reshape(-1)",
        "torch.cat([table, table])",
        "-table",
        "table @ square",
        "F.pad(table, (1, 1))",
        "torch.stack([table, table])[1]",
        "table.cumsum(0)",
        "table.sort().values",
        "table.split(2)[0]",
        "table.clone().mul_(3)",
        "torch.where(table > 0, table, 0.0)",
        "table.chunk(2)[0]",
        "table[torch.tensor([0, 2, 1])]",
        "torch.einsum('i,ij->j', table, square)",
        "table[ids]",
    ],
)
def test_work_on_captured_tensors_alone_is_redone_at_every_call(work):
    """What touches no symbol runs eagerly, as in torch, and is found again with the next tensor."""

    def make():
        namespace = {"table": torch.randn(3), "square": torch.randn(3, 3), "ids": torch.randint(0, 3, (3,)), "torch": torch, "F": F}
        exec(f"def mod(score, b, h, q_idx, kv_idx): return score + ({work})[h % 2]", namespace)
        return namespace["mod"]

    mod = make()
    assert traces(mod) == 1
    assert traces(mod) == 0
    assert traces(make()) == 0


def test_a_zero_dim_tensor_on_the_host_is_a_number():
    def make(value):
        return lambda score, b, h, q_idx, kv_idx: score * value + value

    temperature = torch.tensor(0.7)
    mod = make(temperature)
    assert traces(mod) == 1
    temperature.fill_(-2.0)
    assert traces(mod) == 0
    assert traces(make(torch.tensor(3.0))) == 0
    assert traces(make(torch.tensor(3))) == 1


def test_the_same_tensor_twice_is_part_of_the_graph():
    """Two names of one tensor are one argument, so two different tensors need another graph."""

    def make(x, y):
        return lambda score, b, h, q_idx, kv_idx: score + x[h] * y[h]

    one, other = torch.randn(3), torch.randn(3)
    assert traces(make(one, one)) == 1
    assert traces(make(other, other)) == 0
    assert traces(make(one, other)) == 1
    assert traces(make(other, one)) == 0


def test_names_come_from_the_mod():
    table, window = torch.randn(9), 3
    found = graph(lambda score, b, h, q_idx, kv_idx: score + table[kv_idx] * window + SLOPES[h])
    assert [c.name for c in found.tensors] == ["table", "slopes"]
    assert [c.name for c in found.scalars] == ["window"]
    assert found.symbols == {"score", "h", "kv_idx"}


# Functions and objects


def test_another_function_is_another_graph():
    """A changed closed-over function is seen; a fresh copy of the same code is the same."""

    def make(inner):
        return lambda score, b, h, q_idx, kv_idx: inner(score) + 1

    def inner(factor):
        return lambda x: x * factor

    assert traces(make(inner(2.0))) == 1
    assert traces(make(inner(3.0))) == 0
    assert traces(make(lambda x: x - 1)) == 1
    assert traces(make(torch.tanh)) == 1
    assert traces(make(torch.sin)) == 1
    assert traces(make(inner(4.0))) == 0


def test_a_changed_global_is_seen(monkeypatch):
    mod = helper_function()
    assert traces(mod) == 1
    monkeypatch.setitem(globals(), "WINDOW", 5)
    assert traces(mod) == 0
    monkeypatch.setitem(globals(), "WINDOW", 5.5)
    assert traces(mod) == 1
    monkeypatch.setitem(globals(), "scaled", lambda score, factor: score - factor)
    assert traces(mod) == 1
    monkeypatch.undo()
    assert traces(mod) == 0


def test_a_builtin_that_a_global_hides_is_seen(monkeypatch):
    def mod(score, b, h, q_idx, kv_idx):
        return abs(score)

    assert traces(mod) == 1
    monkeypatch.setitem(globals(), "abs", torch.exp)
    assert traces(mod) == 1
    monkeypatch.undo()
    assert traces(mod) == 0


def test_changed_code_is_seen(monkeypatch):
    def mod(score, b, h, q_idx, kv_idx):
        return score + 1

    assert traces(mod) == 1
    mod.__code__ = (lambda score, b, h, q_idx, kv_idx: score + 2).__code__
    assert traces(mod) == 1


def test_changed_defaults_are_seen():
    mod = default()
    assert traces(mod) == 1
    mod.__defaults__ = (SLOPES * 2, 5)
    assert traces(mod) == 0
    mod.__defaults__ = (SLOPES, 0.5)
    assert traces(mod) == 1


def test_a_changed_attribute_is_seen():
    """The attributes that a mod reads, one by one."""
    slope = Slope(SLOPES, 0.5)
    assert traces(slope) == 1
    slope.shift = 2.5
    slope.slopes = SLOPES * 3
    slope.unused = "anything"
    assert traces(slope) == 0
    slope.shift = 2
    assert traces(slope) == 1

    class Steeper(Slope):
        def slope(self, h):
            return self.slopes[h] * 10

    assert traces(Steeper(SLOPES, 0.5)) == 1


def test_an_instance_function_is_seen():
    """A function stored on the object itself stands before that of its class."""
    slope = Slope(SLOPES, 0.5)
    assert traces(slope) == 1
    slope.slope = lambda h: SLOPES[h] * 4
    assert traces(slope) == 1


def test_properties():
    slope = Slope(SLOPES, 0.5)
    assert traces(lambda score, b, h, q_idx, kv_idx: score + slope.doubled) == 1


def test_module_in_training_and_another_setting():
    module = Bias()
    assert traces(module) == 1
    module.inner.max_distance = 2
    with torch.no_grad():
        module.weight.add_(1.0)
    assert traces(module) == 0
    module.weight.requires_grad_(False)
    assert traces(module) == 1


def test_enum_and_string_are_compared():
    def make(kind, name):
        def mod(score, b, h, q_idx, kv_idx):
            return score + 1 if kind == Kind.SUM and name == "a" else score * 2

        return mod

    assert traces(make(Kind.SUM, "a")) == 1
    assert traces(make(Kind.SUM, "a")) == 0
    assert traces(make(Kind.PRODUCT, "a")) == 1
    assert traces(make(Kind.SUM, "b")) == 1


def test_containers_of_another_length():
    def make(items):
        return lambda score, b, h, q_idx, kv_idx: functools.reduce(lambda x, y: x + y, items, score)

    assert traces(make([1, 2.0])) == 1
    assert traces(make([3, 4.0])) == 0
    assert traces(make([1, 2.0, 3])) == 1
    assert traces(make((1, 2.0))) == 1


def test_recursion_and_mutual_calls():
    def countdown(x, n):
        return x if n == 0 else countdown(x * 0.5, n - 1) + n

    assert traces(lambda score, b, h, q_idx, kv_idx: countdown(score, 3)) == 1


def test_a_list_of_mods():
    """Mods of mods, as and_masks makes them."""
    mods = [windowed(3), windowed(2, 0.5), closure()]

    def make(mods):
        def mod(score, b, h, q_idx, kv_idx):
            for inner in mods:
                score = inner(score, b, h, q_idx, kv_idx)
            return score

        return mod

    assert traces(make(mods)) == 1
    assert traces(make([windowed(5), windowed(1, 0.25), closure()])) == 0
    assert traces(make(mods[:2])) == 1


def test_a_mod_that_sets_an_attribute_sets_it_at_every_call():
    slope = Slope(SLOPES, 0)

    def mod(score, b, h, q_idx, kv_idx):
        slope.shift = slope.shift + 0.5
        return score * (slope.shift + slope.shift)

    assert [bind(mod, "score")[1] for _ in range(2)] == [[1.0], [2.0]]


@pytest.mark.parametrize(
    "change",
    [
        "table.mul_(2)",
        "table[1:].add_(1)",
        "torch.exp(table, out=table)",
        "table.__setitem__(0, 1.0)",
        "torch.relu_(table)",
        "F.relu(table, inplace=True)",
        "F.relu(table, True)",
        "operator.iadd(table, 1)",
    ],
)
def test_a_mod_may_not_change_captured_tensors(change):
    """How often a mod runs is not for it to know. A copy of its own it may change."""
    table, names = torch.ones(3), {"torch": torch, "F": F, "operator": operator}
    exec(f"def mod(score, b, h, q_idx, kv_idx, table=table):\n    {change}\n    return score + table[h]", names | {"table": table}, names)
    with pytest.raises(ModError, match="changes a captured tensor"):
        bind(names["mod"], "score")
    assert torch.equal(table, torch.ones(3))
    names["table"] = table
    exec(
        f"def mod(score, b, h, q_idx, kv_idx):\n    copy = table.clone()\n    {change.replace('table', 'copy')}\n"
        "    return score + copy[h]",
        names,
    )
    result(names["mod"])
    assert torch.equal(table, torch.ones(3))


def test_a_comparison_with_none_and_identity():
    """`is None` of captured values is decided while tracing, and guarded."""

    def make(bias):
        return lambda score, b, h, q_idx, kv_idx: score if bias is None else score + bias[h]

    assert traces(make(None)) == 1
    assert traces(make(SLOPES)) == 1
    assert traces(make(None)) == 0


def test_numpy_numbers():
    np = pytest.importorskip("numpy")

    def make(x, n):
        return lambda score, b, h, q_idx, kv_idx: score * x + n * h

    assert traces(make(np.float32(0.5), np.int64(3))) == 1
    assert traces(make(np.float32(1.5), np.int64(4))) == 0


def test_traces_do_not_keep_captured_tensors_alive():
    import gc
    import weakref

    table = torch.randn(9)
    alive = weakref.ref(table)
    result(lambda score, b, h, q_idx, kv_idx, table=table: score + table[kv_idx])
    del table
    gc.collect()
    assert alive() is None


def test_two_kinds_of_one_function():
    """The same function as score_mod and as mask_mod is two graphs."""

    def mod(*symbols):
        return symbols[-2] >= symbols[-1]

    score, mask = bind(mod, "score")[0], bind(mod, "mask")[0]
    assert score is not mask and score.kind == "score" and mask.kind == "mask"
    assert mask.symbols == {"q_idx", "kv_idx"}


# Mods that are traced at every call


def test_ordinary_mods_are_traced_once():
    table, slopes, ids = torch.randn(3, 9, 9), torch.rand(3), torch.zeros(9, dtype=torch.int32)
    for mod in (
        mods.alibi(slopes),
        mods.alibi_symmetric(slopes),
        mods.softcap(3.0),
        mods.t5_bias(torch.randn(32, 3)),
        compose_scores(mods.softcap(3.0), mods.alibi(slopes)),
        mods.relative_bias(torch.randn(3, 17)),
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, torch.full_like(score, -math.inf)),
        lambda score, b, h, q_idx, kv_idx: score + torch.zeros_like(score) + score.new_ones(()) + torch.tensor(2.0),
        lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx, kv_idx] * torch.ones_like(score).to(table.dtype),
    ):
        graph(mod)
        assert not why_every_call(mod, "score")
    for mod in (
        mods.causal,
        mods.causal_offset(3),
        mods.sliding_window(3),
        mods.prefix_lm(torch.tensor([3])),
        mods.document(ids, mods.causal),
        mods.dilated_window(4, 2),
        mods.global_sliding(5, 2),
        and_masks(mods.causal, mods.sliding_window(5)),
        noop_mask,
        lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx),
    ):
        bind(mod, "mask")
        assert not why_every_call(mod, "mask")


def test_what_stand_ins_cannot_see_is_traced_at_every_call(caplog):
    """Nothing compiles again, another number neither, and the log says it once."""
    flag, factor = True, 2.5

    def mod(score, b, h, q_idx, kv_idx):
        return score * factor if flag is True else score

    assert traces(mod) == 1 and traces(mod) == 1
    first = graph(mod)
    factor = 3.5
    assert graph(mod) is first and [c.name for c in first.scalars] == ["number"]
    flag = 1
    assert graph(mod) is not first
    said = [r for r in caplog.records if r.name == "flexpress"]
    assert len(said) == 1 and "uses `is` (test_trace.py:" in said[0].getMessage()
    assert "traced at every call: it uses `is`" in explain(*[torch.randn(1, 1, 8, 16)] * 3, mod)


def test_a_kernel_for_each_value_is_said_once():
    def make(n):
        def mod(score, b, h, q_idx, kv_idx):
            for _ in range(n):
                score = score * score
            return score

        return mod

    with pytest.warns(UserWarning, match="has become 9 different kernels") as caught:
        for n in range(14):
            bind(make(n), "score")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(14):  # numbers that only look consumed
            step, scale = n, n + 0.5
            bind(lambda score, b, h, q_idx, kv_idx, step=step, scale=scale: score * float(step) + math.sqrt(scale) * int(scale), "score")
            bind(compose_scores(eval(f"lambda score, b, h, q_idx, kv_idx: score + {n}"), windowed(n)), "score")


def test_no_gradient_flows_through_what_is_computed_without_grad():
    weight = torch.ones(3, requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx):
        with torch.no_grad():
            kept = torch.tanh(score) * weight[h]
        return score + kept

    q, k, v = (torch.randn(1, 3, 5, 8, requires_grad=True) for _ in range(3))
    flex_attention(q, k, v, mod).square().sum().backward()
    found = q.grad.clone()
    q.grad = None
    scores = q @ k.mT / math.sqrt(8)
    (torch.softmax(mod(scores, *positions(scores.shape, "cpu")), -1) @ v).square().sum().backward()
    torch.testing.assert_close(found, q.grad, rtol=1e-4, atol=1e-5)
    assert weight.grad is None


def test_an_index_of_an_index_in_host_memory():
    table, place = torch.randn(7, 4), torch.tensor(2)
    mod = lambda score, b, h, q_idx, kv_idx: score + table[q_idx][place]  # noqa: E731
    for i in (2, 3):
        place.fill_(i)
        torch.testing.assert_close(evaluate_mod(mod, SCORES), SCORES + table[:, i, None])
    assert cache_info().traces == 1


def test_classes_are_not_kept_alive():
    import gc
    import weakref

    class Holder:
        factor = 2.0
        large = torch.ones(3)

    alive, large = weakref.ref(Holder), weakref.ref(Holder.large)
    one = Holder()
    result(lambda score, b, h, q_idx, kv_idx, holder=Holder, one=one: score * holder.factor + one.factor)
    del Holder, one
    gc.collect()
    assert alive() is None and large() is None
