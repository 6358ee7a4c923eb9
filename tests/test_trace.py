"""When two mods are the same: which graph is found again, what is traced anew, and which mods are traced at every call.

How numbers and tensors reach a kernel: test_captures.py.
"""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import pytest
import torch

from flexpress import and_masks, cache_clear, evaluate_mod, explain, flex_attention, mods, noop_mask
from flexpress.codegen.mod.tracing.bind import bind, why_every_call
from flexpress.mods import compose_scores
from support import captures
from support.captures import SLOPES, Bias, Kind, Slope, closure, default, graph, helper_function, result, traces, windowed
from support.dense import positions


@pytest.fixture(autouse=True)
def fresh_traces():
    """Every test starts without traces."""
    cache_clear()


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
    monkeypatch.setattr(captures, "WINDOW", 5)
    assert traces(mod) == 0
    monkeypatch.setattr(captures, "WINDOW", 5.5)
    assert traces(mod) == 1
    monkeypatch.setattr(captures, "scaled", lambda score, factor: score - factor)
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


def test_a_comparison_with_none_and_identity():
    """`is None` of captured values is decided while tracing, and guarded."""

    def make(bias):
        return lambda score, b, h, q_idx, kv_idx: score if bias is None else score + bias[h]

    assert traces(make(None)) == 1
    assert traces(make(SLOPES)) == 1
    assert traces(make(None)) == 0


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
    limit, half = 0.5, 0.25
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
        lambda score, b, h, q_idx, kv_idx: score.clamp(-limit, limit),
        lambda score, b, h, q_idx, kv_idx: torch.float_power(score, half) + torch.copysign(score, half) + torch.xlogy(score, half),
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


def test_numpy_numbers_where_torch_takes_numbers():
    scores = torch.randn(1, 1, 4, 4)
    for function in (torch.float_power, torch.copysign, torch.xlogy):
        for number in (np.float32(0.5), np.float64(2.0), np.int64(3)):
            found = evaluate_mod(lambda score, b, h, q_idx, kv_idx, f=function, n=number: f(score.abs(), n), scores)
            torch.testing.assert_close(found, function(scores.abs(), number).float())


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
    said = [r for r in caplog.records if r.name == "flexpress.trace"]
    assert len(said) == 1 and "uses `is` (test_trace.py:" in said[0].getMessage()
    assert "traced at every call: it uses `is`" in explain(*[torch.randn(1, 1, 8, 16)] * 3, mod)


def test_a_kernel_for_each_value_is_said_once():
    def make(n):
        def mod(score, b, h, q_idx, kv_idx):
            for _ in range(n):
                score = score * score
            return score

        return mod

    with pytest.warns(UserWarning, match="has become 17 different kernels") as caught:
        for n in range(20):
            bind(make(n), "score")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(20):  # numbers that only look consumed
            step, scale = n, n + 0.5
            bind(lambda score, b, h, q_idx, kv_idx, step=step, scale=scale: score * float(step) + math.sqrt(scale) * int(scale), "score")
            bind(compose_scores(eval(f"lambda score, b, h, q_idx, kv_idx: score + {n}"), windowed(n)), "score")


def test_compiled_graphs_of_one_mod_are_one_kernel():
    """Each has a source line of its own, as torch names it, and the same text."""
    q = torch.randn(1, 1, 8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            torch._dynamo.reset()
            torch.compile(lambda q: flex_attention(q, q, q, mask_mod=mods.causal), backend="eager", fullgraph=True)(q)


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


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_an_object_is_called_by_a_method_of_its_class(kind):
    if kind is staticmethod:

        class Mod:
            @staticmethod
            def __call__(score, b, h, q_idx, kv_idx):
                return score + kv_idx
    else:

        class Mod:
            @classmethod
            def __call__(cls, score, b, h, q_idx, kv_idx):
                return score + kv_idx

    assert evaluate_mod(Mod(), torch.zeros(1, 1, 1, 3)).flatten().tolist() == [0.0, 1.0, 2.0]
