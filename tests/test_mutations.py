"""A mod's captures change between calls, in every place that Python has for a value: each call computes what the mod computes then.

A place (tests/support/places.py) is made with a first value, and then given others; after each the mod's graph, evaluated on the
host, is compared with the mod itself on dense indices.
"""

from __future__ import annotations

import builtins
import enum
import math
import os
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from flexpress import cache_clear
from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.tracing.bind import bind
from support.mutations import INDICES, NAMES, SHAPE, Called, Data, Items, Kind, Number, Plain, check, in_namespace, reading, used
from support.places import PLACES

VALUES = {
    "another_int": (2, 3),
    "a_float": (2, 2.5),
    "a_bool": (1, True),
    "a_tensor": (2, torch.tensor(0.75)),
    "a_numpy_number": (0.5, np.float32(1.25)),
}


@pytest.fixture(autouse=True)
def fresh():
    """Every test starts without traces, and leaves no names behind."""
    cache_clear()
    yield
    sys.modules.pop("flexpress_test_settings", None)
    builtins.__dict__.pop("flexpress_test_value", None)


@pytest.mark.parametrize("change", VALUES)
@pytest.mark.parametrize("name", PLACES)
def test_a_changed_value_is_seen(name, change):
    """There and back: the second change finds traces of both."""
    first, second = VALUES[change]
    mod, put = PLACES[name](first)
    check(mod)
    check(mod)
    for value in (second, first, second):
        put(value)
        check(mod)
        check(mod)


# What Python asks of a value while the mod runs. `o.w` is changed from the first value to the others.

ASKED: dict[str, tuple[Callable, tuple]] = {
    "isinstance": (lambda o: 2 if isinstance(o.w, int) else 3, (1, 1.0, True)),
    "isinstance of several": (lambda o: 2 if isinstance(o.w, (float, str)) else 3, (1, 1.0, "x")),
    "type": (lambda o: 2 if type(o.w) == int else 3, (1, 1.0, True)),  # noqa: E721
    "type is": (lambda o: 2 if type(o.w) is int else 3, (1, 1.0, True)),
    "is True": (lambda o: 2 if o.w is True else 3, (True, 1, False)),
    "is not None": (lambda o: 2 if o.w is not None else 3, (None, 0, 1)),
    "None is": (lambda o: 2 if None is o.w else 3, (None, 0, 1)),
    "is of objects": (lambda o: 2 if o.w is o.first else 3, (math, torch, math)),
    "== of objects": (lambda o: 2 if o.w == o.first else 3, (Plain(1), Plain(1), None)),
    "== of functions": (lambda o: 2 if o.w == o.first else 3, (check, used, check)),
    "== of lists": (lambda o: 2 if o.w == [1, 2] else 3, ([1, 2], [1, 3], (1, 2))),
    "!= of strings": (lambda o: 2 if o.w != "a" else 3, ("a", "b", "a")),
    "in a list": (lambda o: 2 if 3 in o.w else 3, ([1, 2], [3], [])),
    "in a tuple of constants": (lambda o: 2 if o.w in (1, "x", None) else 3, (1, "x", 5)),
    "in a set": (lambda o: 2 if o.w in {1, 2} else 3, (1, 5, 2)),
    "in a string": (lambda o: 2 if o.w in "abc" else 3, ("a", "d", "")),
    "in a dict": (lambda o: 2 if "a" in o.w else 3, ({"a": 1}, {"b": 1}, {})),
    "in a range": (lambda o: 2 if o.w in range(3) else 3, (1, 5, 2)),
    "truth of a list": (lambda o: 2 if o.w else 3, ([1], [], [0])),
    "truth of an object": (lambda o: 2 if o.w else 3, (Items(0), Items(2), None)),
    "not": (lambda o: 2 if not o.w else 3, (0, 1, 0.0)),
    "and or": (lambda o: o.w and 2 or 3, (0, 1, 4)),
    "chained comparison": (lambda o: 2 if 0 < o.w < 3 else 3, (1, 5, -1)),
    "min": (lambda o: min(o.w, 2), (1, 5, -1.5)),
    "max of a list": (lambda o: max(o.w), ([1, 2], [5], [0.5, -1])),
    "sorted": (lambda o: sorted(o.w)[0], ([3, 1], [5, 9], [0.5])),
    "reversed": (lambda o: list(reversed(o.w))[0], ([3, 1], [5, 9], [0.5])),
    "enumerate": (lambda o: sum(i * x for i, x in enumerate(o.w)), ([3, 1], [5, 9, 2], [0.5])),
    "zip": (lambda o: sum(x * y for x, y in zip(o.w, [1, 2, 3], strict=False)), ([3, 1], [5, 9, 2], [0.5])),
    "map": (lambda o: sum(map(lambda x: x + 1, o.w)), ([3, 1], [5, 9, 2], [0.5])),
    "any all": (lambda o: 2 if any(o.w) and not all(o.w) else 3, ([0, 1], [1, 1], [])),
    "len": (lambda o: len(o.w), ([1], [], "abc")),
    "len of an object": (lambda o: len(o.w), (Items(1), Items(4), [1])),
    "range": (lambda o: sum(range(o.w)), (3, 5, 0)),
    "while": (lambda o: [n := o.w, [n := n - 1 for _ in range(2)]][0], (3, 5, 1)),
    "int": (lambda o: int(o.w), (2.5, 3.5, -1)),
    "float": (lambda o: float(o.w), (2, 3, True)),
    "round": (lambda o: round(o.w), (2.4, 3.6, -1)),
    "divmod": (lambda o: divmod(o.w, 3)[1], (4, 5, 2.5)),
    "abs": (lambda o: abs(o.w), (-4, 5, -2.5)),
    "pow": (lambda o: pow(o.w, 2), (4, 5, 2.5)),
    "math": (lambda o: math.floor(o.w) + math.sqrt(abs(o.w)), (4, 5, -2.5)),
    "hex": (lambda o: len(hex(o.w)), (4, 500, 0)),
    "str": (lambda o: len(str(o.w)), (4, 500, None)),
    "str of an object": (lambda o: len(str(o.w)), (Kind.ONE, [1, 2], "abc")),
    "repr": (lambda o: len(repr(o.w)), ("a", "ab", 3)),
    "f-string": (lambda o: {"1": 5, "2": 7}.get(f"{o.w}", 9), (1, 2, "1")),
    "format": (lambda o: 5 if f"{o.w:.1f}" == "1.5" else 7, (1.5, 2.5, 1.52)),
    "percent of a float": (lambda o: 5 if "%g" % o.w == "0" else 7, (0.0, -0.0, 1)),  # noqa: UP031
    "enum of numbers": (lambda o: 2 if isinstance(o.w, enum.Enum) else 3, (Number.ONE, 1, Number.ONE)),
    "keys": (lambda o: sum(o.w[k] for k in o.w), ({"a": 1}, {"a": 1, "b": 2}, {"b": 3})),
    "in a function inside": (lambda o: (lambda x: 2 if x is o.first else 3)(o.w), (math, torch, math)),
    "name of the class": (lambda o: len(o.w.__class__.__name__), (1, 1.5, "x")),
    "percent": (lambda o: 5 if "%s" % o.w == "1" else 7, (1, 2, "1")),  # noqa: UP031
    "string method": (lambda o: 5 if o.w.startswith("a") else 7, ("ab", "b", "a")),
    "hash": (lambda o: hash(o.w) % 7, (1, 2, "a")),
    "key of a dict": (lambda o: {1: 5, 2: 7, "a": 9}[o.w], (1, 2, "a")),
    "index of a list": (lambda o: [5, 7, 9][o.w], (1, 2, -1)),
    "slice": (lambda o: sum([5, 7, 9][: o.w]), (1, 2, None)),
    "bit_length": (lambda o: o.w.bit_length(), (1, 200, 0)),
    "real": (lambda o: o.w.real, (1, 2.5, True)),
    "is_integer": (lambda o: 2 if float(o.w).is_integer() else 3, (1, 2.5, 3.0)),
    "callable": (lambda o: 2 if callable(o.w) else 3, (check, 1, None)),
    "issubclass": (lambda o: 2 if issubclass(o.w, Plain) else 3, (Called, Items, Plain)),
    "class called": (lambda o: o.w(2.6) * 1, (int, float, bool)),
    "class of the user's called": (lambda o: o.w(3).w, (Called, Plain, Data)),
    "dir": (lambda o: len([n for n in dir(o.w) if n == "w"]), (Plain(1), 1, Plain(2))),
    "id": (lambda o: 2 if id(o.w) == id(o.first) else 3, (check, used, check)),
    "enum": (lambda o: 2 if o.w is Kind.ONE else 3, (Kind.ONE, Kind.TWO, 1)),
    "enum value": (lambda o: o.w.value, (Kind.ONE, Kind.TWO, Kind.ONE)),
    "complex": (lambda o: o.w.imag, (1 + 2j, 3.0, 5 + 1j)),
    "bytes": (lambda o: o.w[0], (b"ab", b"b", [7])),
    "set": (lambda o: len(o.w | {1}), ({1}, {2}, set())),
    "frozenset": (lambda o: 2 if 1 in o.w else 3, (frozenset([1]), frozenset(), [1])),
    "dtype": (lambda o: torch.tensor(2.6).to(o.w), (torch.float32, torch.int32, torch.float64)),
    "device": (lambda o: 2 if o.w.type == "cpu" else 3, (torch.device("cpu"), torch.device("meta"), torch.device("cpu"))),
    "tensor ndim": (lambda o: o.w.ndim, (torch.ones(2), torch.ones(2, 2), torch.ones(()))),
    "tensor shape": (lambda o: o.w.shape[0], (torch.ones(2), torch.ones(5, 2), torch.ones(3))),
    "shape ==": (lambda o: 2 if o.w.shape == (2,) else 3, (torch.ones(2), torch.ones(5), torch.ones(2, 2))),
    "tensor size": (lambda o: o.w.numel() + o.w.size(0), (torch.ones(2), torch.ones(5, 2), torch.ones(3))),
    "tensor stride": (lambda o: o.w.stride(0), (torch.ones(2), torch.ones(5, 2), torch.ones(6)[::2])),
    "tensor contiguous": (lambda o: 2 if o.w.is_contiguous() else 3, (torch.ones(2), torch.ones(6)[::2], torch.ones(3))),
    "tensor dtype": (lambda o: 2 if o.w.dtype == torch.float32 else 3, (torch.ones(2), torch.ones(2).half(), torch.ones(2, dtype=int))),
    "tensor requires_grad": (lambda o: 2 if o.w.requires_grad else 3, (torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2))),
    "isinstance of a parameter": (
        lambda o: 2 if isinstance(o.w, torch.nn.Parameter) else 3,
        (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    ),
    "if tensor": (lambda o: 2 if o.w > 1 else 3, (torch.tensor(2.0), torch.tensor(0.0), torch.tensor(5))),
    "int of a tensor": (lambda o: int(o.w[0]), (torch.tensor([2.0]), torch.tensor([4.5]), torch.tensor([7]))),
    "tensor item": (lambda o: o.w.item(), (torch.tensor(2.0), torch.tensor(4.5), torch.tensor(7))),
    "tensor tolist": (lambda o: sum(o.w.tolist()), (torch.ones(2), torch.arange(3), torch.ones(0))),
    "tensor iterated": (lambda o: sum(x * 2 for x in o.w), (torch.ones(2), torch.arange(3), torch.ones(4))),
    "tensor unpacked": (lambda o: (lambda x, *_: x)(*o.w), (torch.ones(2), torch.arange(3) + 1, torch.ones(4) * 3)),
    "len of a tensor": (lambda o: len(o.w), (torch.ones(2), torch.arange(3), torch.ones(4, 2))),
    "in a tensor": (lambda o: 2 if 1 in o.w else 3, (torch.ones(2), torch.zeros(3), torch.arange(4))),
    "tensor numpy": (lambda o: float(o.w.numpy()[0]), (torch.ones(2), torch.zeros(3), torch.ones(4) * 3)),
    "nan": (lambda o: 2 if o.w != o.w else 3, (math.nan, 1.0, math.nan)),
    "signed zero": (lambda o: math.copysign(2, o.w), (0.0, -0.0, 1)),
    "numpy array": (lambda o: o.w[0], (np.ones(2), np.arange(3) + 5, np.zeros(2, dtype=np.int8))),
    "numpy shape": (lambda o: o.w.shape[0], (np.ones(2), np.arange(3), np.zeros((4, 2)))),
    "numpy arithmetic": (lambda o: o.w / 3, (np.float32(1.5), np.float64(1.5), np.int8(7))),
    "numpy wrap-around": (lambda o: int(o.w + o.w), (np.int8(100), np.int16(100), 100)),
    "environment": (lambda o: len(os.environ.get("FLEXPRESS_TEST", "")) + o.w, (1, 2, 3)),
}


@pytest.mark.parametrize("question", ASKED)
def test_what_python_asks_is_seen(question):
    """Three values in turn, twice each, and the first one again."""
    answer, values = ASKED[question]
    holder = Plain(values[0])
    holder.first = values[0]
    mod = reading(answer, holder)
    for value in (*values, values[0]):
        holder.w = value
        check(mod)
        check(mod)


# The rest of the world


def test_the_grad_mode_is_seen():
    mod = lambda score, b, h, q_idx, kv_idx: score * (2 if torch.is_grad_enabled() else 3)  # noqa: E731
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            check(mod)


def test_the_default_dtype_is_seen():
    mod = lambda score, b, h, q_idx, kv_idx: score * (2 if torch.get_default_dtype() == torch.float32 else 3)  # noqa: E731
    divided = lambda score, b, h, q_idx, kv_idx: score * ((h / 2).dtype == torch.float32)  # noqa: E731
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for one in (mod, divided):
                check(one)
    finally:
        torch.set_default_dtype(torch.float32)


def test_numbers_of_an_outer_function_count_calls():
    """What `nonlocal` assigns is seen by the next call, and by others."""
    count = 0.5

    def mod(score, b, h, q_idx, kv_idx):
        nonlocal count
        count += 1
        return score * count

    for expected in (1.5, 2.5, 3.5):
        assert bind(mod, "score")[1] == [expected] and count == expected


def test_graphs_with_zeros_of_both_signs_are_two():
    mods = [in_namespace(f"return torch.where(score > 1e9, score, {zero}).reciprocal()")[0] for zero in ("0.0", "-0.0", "0.0")]
    graphs = [bind(mod, "score")[0] for mod in mods]
    assert graphs[0] is graphs[2] is not graphs[1]
    for mod in mods:
        check(mod)


def test_side_effects_happen_once_a_call():
    """Python code beside the kernel runs once for each call, as in torch."""
    calls, count = [], 0

    def mod(score, b, h, q_idx, kv_idx):
        nonlocal count
        calls.append(len(calls))
        count += 1
        return score * (len(calls) * 10)

    for expected in (1, 2, 3):
        graph, values = bind(mod, "score")
        scored = compute(graph.result, {"score": torch.ones(())}, [], values).item()
        assert (len(calls), count, scored) == (expected, expected, expected * 10)


def test_a_changed_function_of_a_library_is_seen(monkeypatch):
    mod = lambda score, b, h, q_idx, kv_idx: torch.tanh(score)  # noqa: E731
    check(mod)
    monkeypatch.setattr(torch, "tanh", torch.sigmoid)
    check(mod)
    monkeypatch.undo()
    check(mod)


def test_hooks_that_come_and_go_are_seen():
    module = torch.nn.Module()
    module.forward = lambda score, b, h, q_idx, kv_idx: score * 2
    check(module)
    handle = module.register_forward_hook(lambda module, args, out: out + 5)
    check(module)
    handle.remove()
    check(module)
    handle = module.register_forward_pre_hook(lambda module, args: (args[0] + 3, *args[1:]))
    check(module)
    handle.remove()
    check(module)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 7)
    try:
        check(module)
    finally:
        handle.remove()
    check(module)


def test_a_parametrized_weight_is_computed_at_every_call():
    class Mod(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, score, b, h, q_idx, kv_idx):
            return score + self.weight[h] * self.weight[0]

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return x * 2

    module = Mod()
    check(module)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    check(module)
    with torch.no_grad():
        module.parametrizations.weight.original.mul_(3)
    check(module)


@pytest.mark.parametrize("other", ["and_masks", "or_masks"])
def test_one_mask_twice_and_then_two(other):
    """torch's helpers and ours: the second guard of one function is not lost."""
    from torch.nn.attention import flex_attention as torch_flex

    import flexpress

    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx  # noqa: E731
    window = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 2  # noqa: E731
    for home in (torch_flex, flexpress):
        join = getattr(home, other)
        for parts in ((causal, causal), (causal, window), (window, causal), (window, window), (causal, causal)):
            mod = join(*parts)
            graph, values = bind(mod, "mask")
            assert torch.equal(
                compute(graph.result, dict(zip(NAMES[1:], INDICES, strict=True)), values, []).expand(SHAPE), mod(*INDICES).expand(SHAPE)
            )


def test_enough_changes_are_tested():
    assert len(PLACES) * len(VALUES) + len(ASKED) >= 300
