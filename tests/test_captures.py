"""What a mod may capture, and how it reaches the kernel: as an argument, or as a constant of the graph.

`bind` gives the graph of a mod and its captured values. The same graph object means that nothing is printed
or compiled for it; `cache_info().traces` counts the others.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings

import pytest
import torch
import torch.nn.functional as F

from flexpress import ModError, cache_clear, cache_info
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.evaluate import evaluate_mod
from support.captures import CAPTURES, NAMES, SCORES, SLOPES, closure, graph, result, traces, windowed
from support.dense import positions


@pytest.fixture(autouse=True)
def fresh_traces():
    """Every test starts without traces."""
    cache_clear()


@pytest.mark.parametrize("make", CAPTURES, ids=NAMES)
def test_captures(make):
    """Right results, and one trace however often: the same object again, then one made afresh."""
    mod = make()
    assert traces(mod) == 1
    assert traces(mod) == 0
    assert traces(make()) == 0


KINDS = torch.Tensor, int


def test_symbols_are_tensors():
    """As in torch, whose mods are told tensors. What is asked is part of the trace."""
    global KINDS
    if_tensor = [
        lambda s, b, h, m, n: s + h if torch.is_tensor(m) else s,
        lambda s, b, h, m, n: s + h if isinstance(m - n, torch.Tensor) and not isinstance(s, (int, float)) else s,
        lambda s, b, h, m, n: s + h if isinstance(s, KINDS) else s,
    ]
    expected = if_tensor[0](SCORES, *positions(SCORES.shape, "cpu"))
    for mod in if_tensor:
        assert traces(mod) == 1 and traces(mod) == 0
        torch.testing.assert_close(evaluate_mod(mod, SCORES), expected)

    KINDS = (int,)
    torch.testing.assert_close(evaluate_mod(if_tensor[2], SCORES), SCORES)
    KINDS = torch.Tensor, int


def test_functions_that_keep_their_results():
    """functools.lru_cache and functools.cache: symbols are never kept, and what such a function reads is read anew."""
    shift = torch.tensor(0.5)

    @functools.lru_cache
    def mod(score, b, h, q_idx, kv_idx):
        return score + shift * near(q_idx, kv_idx, 3)

    @functools.cache
    def near(q_idx, kv_idx, window):
        return (q_idx - kv_idx).abs() < window

    assert traces(mod) == 1 and traces(lambda *x: mod(*x)) == 1
    shift.fill_(2.0)
    assert traces(mod) == 0
    assert mod.cache_info().currsize == 3  # of the calls with tensors


def test_what_a_partial_holds_is_called_as_the_parameters_are():
    def near(window, score, b, h, q_idx, kv_idx, slope):
        return score - slope[h] * (q_idx - kv_idx).abs() + window

    found = graph(functools.partial(near, 7, slope=SLOPES))
    assert [c.name for c in (*found.tensors, *found.scalars)] == ["slope", "window"]
    assert [c.name for c in graph(functools.partial(lambda *x: x[1] * x[0], 2.0)).scalars] == ["argument_0"]
    assert traces(functools.partial(near, 7, slope=SLOPES)) == traces(functools.partial(near, 8, slope=SLOPES)) == 0


def test_a_mod_runs_as_it_is_after_tracing():
    """Tracing leaves the function alone: called with tensors it is still torch's."""
    mod = closure()
    expected = mod(SCORES, *positions(SCORES.shape, "cpu"))
    result(mod)
    assert torch.equal(mod(SCORES, *positions(SCORES.shape, "cpu")), expected)


# Numbers


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


def test_numpy_numbers():
    np = pytest.importorskip("numpy")

    def make(x, n):
        return lambda score, b, h, q_idx, kv_idx: score * x + n * h

    assert traces(make(np.float32(0.5), np.int64(3))) == 1
    assert traces(make(np.float32(1.5), np.int64(4))) == 0


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


def test_an_index_of_an_index_in_host_memory():
    table, place = torch.randn(7, 4), torch.tensor(2)
    mod = lambda score, b, h, q_idx, kv_idx: score + table[q_idx][place]  # noqa: E731
    for i in (2, 3):
        place.fill_(i)
        torch.testing.assert_close(evaluate_mod(mod, SCORES), SCORES + table[:, i, None])
    assert cache_info().traces == 1


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
    with pytest.raises(ModError, match="changes a captured tensor") as refused:
        bind(names["mod"], "score")
    assert 'File "<string>", line 2' in str(refused.value)
    assert torch.equal(table, torch.ones(3))
    names["table"] = table
    exec(
        f"def mod(score, b, h, q_idx, kv_idx):\n    copy = table.clone()\n    {change.replace('table', 'copy')}\n"
        "    return score + copy[h]",
        names,
    )
    result(names["mod"])
    assert torch.equal(table, torch.ones(3))


def test_names_come_from_the_mod():
    table, window = torch.randn(9), 3
    found = graph(lambda score, b, h, q_idx, kv_idx: score + table[kv_idx] * window + SLOPES[h])
    assert [c.name for c in found.tensors] == ["table", "slopes"]
    assert [c.name for c in found.scalars] == ["window"]
    assert found.symbols == {"score", "h", "kv_idx"}


def in_steps(score, b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    distance = distance.abs()
    distance += 100
    distance //= 3
    small = (q_idx - kv_idx).to(torch.int8)
    small += kv_idx * 100  # wraps
    half = score.half()
    half *= 0.7
    copy = score.clone()
    copy += 1
    near = q_idx > kv_idx
    near |= q_idx == kv_idx
    row = SLOPES[:2]
    row = row * 2
    row -= SLOPES[1:3]
    total = 0.0
    for x in (distance, small, half, copy, row.sum(), score):
        total += x
    return torch.where(near, total, score)


def test_in_place():
    """`x += y` keeps x's dtype, as in torch."""
    scores = torch.randn(1, 2, 5, 7)

    def elsewhere(score, b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx).abs()
        small = (q_idx - kv_idx).to(torch.int8) + (kv_idx * 100).to(torch.int8)
        total = (distance + 100) // 3 + small + (score.half() * 0.7).half() + score + 1 + (SLOPES[:2] * 2 - SLOPES[1:3]).sum() + score
        return torch.where(q_idx >= kv_idx, total, score)

    torch.testing.assert_close(evaluate_mod(in_steps, scores), evaluate_mod(elsewhere, scores), rtol=1e-3, atol=1e-3)
    expected = elsewhere(scores, *positions(scores.shape, "cpu"))
    torch.testing.assert_close(evaluate_mod(in_steps, scores), expected.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, q_idx, kv_idx: score + torch.arange(8, device=q_idx.device)[kv_idx] * SLOPES.to(score.device)[h],
        lambda score, b, h, q_idx, kv_idx: (
            score + torch.tensor([0, 1, 2, 3, 4, 5, 6], device=str(score.device))[kv_idx] * SLOPES.to(score)[h]
        ),
        lambda score, b, h, q_idx, kv_idx: score + kv_idx * SLOPES.type_as(score)[h] * (SLOPES.device == score.device) + score.is_cuda,
    ],
)
def test_the_device_of_symbols_is_that_of_the_call(mod):
    scores = torch.randn(1, 2, 5, 7)
    expected = scores + torch.arange(7) * SLOPES[:2].reshape(2, 1, 1)
    torch.testing.assert_close(evaluate_mod(mod, scores), expected)
    before = cache_info().traces
    torch.testing.assert_close(evaluate_mod(mod, scores), expected)
    assert cache_info().traces == before
    graph, values = bind(mod, "score", torch.device("meta"))
    assert {value.device.type for value in values if isinstance(value, torch.Tensor)} <= {"meta", "cpu"}


def test_computing_with_elements_of_float64_is_a_warning():
    """Kernels compute in float32, where times a second apart are equal. A cast says that this is meant."""
    times, scores = 1.7e9 + torch.arange(5, dtype=torch.float64), torch.zeros(1, 1, 5, 5)
    with pytest.warns(
        UserWarning, match=r"score_mod captures times, a tensor of float64.*the difference from one of them.*test_captures.py:\d+"
    ):
        evaluate_mod(lambda score, b, h, q_idx, kv_idx: score - (times[q_idx] - times[kv_idx]), scores)
    near = (times - times[0]).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate_mod(lambda score, b, h, q_idx, kv_idx: score - (near[q_idx] - near[kv_idx]), scores)
        evaluate_mod(lambda score, b, h, q_idx, kv_idx: score - times[kv_idx].float(), scores)


@pytest.mark.parametrize("made", ["method", "property"])
def test_what_a_program_has_put_into_tensors(made, monkeypatch):
    by = [2.0]

    def scaled(self):
        return float(by[0])

    monkeypatch.setattr(torch.Tensor, "own_scale", property(scaled) if made == "property" else scaled, raising=False)
    table = torch.ones(3)
    mod = (lambda s, b, h, m, n: s * table.own_scale) if made == "property" else (lambda s, b, h, m, n: s * table.own_scale())
    scores = torch.ones(1, 1, 2, 2)
    for by[0] in (2.0, 3.0, 2.0):
        assert (evaluate_mod(mod, scores) == by[0]).all()
