"""Objects that a mod captures and calls, members of enumerations, tensors that it keeps: changed ones are seen at the next call."""

from __future__ import annotations

import enum
import functools
import math
import operator

import pytest
import torch
from torch import nn

from flexpress import ModError, cache_info, create_mask, evaluate_mod, flex_attention

ONE, ROW = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 2.0, 3.0])


def weighted(weight: float) -> nn.Linear:
    linear = nn.Linear(3, 1, bias=False)
    nn.init.constant_(linear.weight, weight)
    return linear


def without_gradients(weight: float):
    @torch.no_grad()
    def scaled(x):
        return x * weight

    return scaled


def by_kind(weight: float):
    @functools.singledispatch
    def scaled(x):
        return x * weight

    return scaled


CALLABLES = {  # of one number; what they make of ROW is other for another one
    "module": weighted,
    "modules in a row": lambda w: nn.Sequential(weighted(w), nn.Tanh()),
    "an activation": lambda w: (lambda act: lambda x: act(-x))(nn.LeakyReLU(w)),
    "a part of a module": lambda w: functools.partial(weighted(w)),
    "no_grad": without_gradients,
    "vmap": lambda w: torch.vmap(lambda x: x * w),
    "compiled": lambda w: torch.compile(lambda x: x * w, backend="eager"),
    "traced": lambda w: torch.jit.trace(lambda x: x * w, (ROW,), check_trace=False),
    "singledispatch": by_kind,
    "a getter": lambda w: operator.itemgetter([int(w)]),
    "an operator": lambda w: torch.ops.aten.exp.default if w == 1 else torch.ops.aten.neg.default,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CALLABLES)
def test_another_callable_of_a_library(name):
    """Called with what is captured alone, it is called again at every call: the one that is captured then."""

    def made(weight):
        call = CALLABLES[name](weight)
        return lambda score, b, h, q_idx, kv_idx: score * call(ROW)[0]

    for weight in (1.0, 2.0):
        expected = CALLABLES[name](weight)(ROW)[0].item()
        assert evaluate_mod(made(weight), ONE).item() == pytest.approx(expected)


def test_masks_of_a_function_without_gradients():
    def made(reach):
        scaled, one = without_gradients(reach), torch.ones(1, dtype=torch.int32)
        return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < scaled(one)[0]

    assert [create_mask(made(n), 1, 1, 5, 5, device="cpu").sum().item() for n in (1, 3, 5)] == [5, 19, 25]


def biased(network, places, score, b, h, q_idx, kv_idx):
    return score + network(places)[q_idx - kv_idx + 7, 0]


def test_two_layers_have_their_own_modules_and_gradients():
    """Position biases by a small network, as in Swin Transformer V2 (arXiv 2111.09883)."""
    places, i = torch.linspace(-1, 1, 15)[:, None], torch.arange(8)
    q, k, v = torch.randn(3, 1, 1, 8, 16).unbind()
    for seed in range(3):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
        out = flex_attention(q, k, v, functools.partial(biased, network, places))
        found = torch.autograd.grad(out.square().sum(), list(network.parameters()))
        network.double()
        scores = q.double() @ k.double().mT / 4 + network(places.double())[i[:, None] - i + 7, 0]
        exact = scores.softmax(-1) @ v.double()
        expected = torch.autograd.grad(exact.square().sum(), list(network.parameters()))
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        for have, want in zip(found, expected, strict=True):
            torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)


def test_a_module_that_draws_is_refused():
    dropout = nn.Dropout(0.5)

    def dropped(score, b, h, q_idx, kv_idx):
        return score * dropout(ROW)[0]

    with pytest.raises(ModError, match="dropout draws random numbers"):
        evaluate_mod(dropped, ONE)
    dropout.eval()
    assert evaluate_mod(dropped, ONE).item() == 1


REACH = {"near": 1}


class Kind(enum.Enum):
    NEAR = "near"
    LISTED = (1, [2.0])

    @property
    def reach(self):
        return REACH[self.value]

    def weighted(self, score):
        return score * REACH[self.value]


class Named(str, enum.Enum):
    NEAR = "near"

    def __str__(self):
        return self.value


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def test_members_of_enumerations():
    """What is computed of them, or set, is read anew. Comparisons and values that nobody can change are part of the trace."""
    kind, level = Kind.NEAR, Level.HIGH
    changing = {
        "property": lambda score, b, h, q_idx, kv_idx: score * kind.reach,
        "method": lambda score, b, h, q_idx, kv_idx: kind.weighted(score),
        "value": lambda score, b, h, q_idx, kv_idx: score * Kind.LISTED.value[1][0],
        "attribute": lambda score, b, h, q_idx, kv_idx: score * Level.LOW.gain,
    }
    for number in (1, 3, 5):
        REACH["near"] = Kind.LISTED.value[1][0] = Level.LOW.gain = number
        for name, mod in changing.items():
            assert evaluate_mod(mod, ONE).item() == number, name
    mask = create_mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < kind.reach, 1, 1, 5, 5, device="cpu")
    assert mask.all()
    fixed = {
        lambda score, b, h, q_idx, kv_idx: score * (2 if kind == Kind.NEAR else 3): 2,
        lambda score, b, h, q_idx, kv_idx: score * len(kind.value): 4,
        lambda score, b, h, q_idx, kv_idx: score * (2 if Named.NEAR == "near" else 3): 2,
        lambda score, b, h, q_idx, kv_idx: score * level + Level.HIGH: 4,
    }
    for mod, expected in fixed.items():
        assert evaluate_mod(mod, ONE).item() == expected
        traces = cache_info().traces
        evaluate_mod(mod, ONE)
        assert cache_info().traces == traces


class Keeping:
    """Makes a tensor of its slope at the first call."""

    def __init__(self, slope: float) -> None:
        self.slope, self.gain, self.kept = slope, 1.0, None

    def __call__(self, score, b, h, q_idx, kv_idx):
        if self.kept is None:
            self.kept = torch.tensor(self.slope)
        return score * self.gain + self.kept * (q_idx - kv_idx)


@functools.lru_cache
def tensor_of(number: float):
    return torch.tensor(number)


def test_tensors_that_are_made_once_and_kept():
    scores, apart = torch.ones(1, 1, 2, 2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    keeping = Keeping(0.5)
    for gain in (1.0, 1.0, 3.0):
        keeping.gain = gain
        assert torch.equal(evaluate_mod(keeping, scores)[0, 0], gain + 0.5 * apart)
    for number in (0.5, 0.25, 0.5, math.inf):

        def memoised(score, b, h, q_idx, kv_idx, number=number):
            return torch.where(q_idx > kv_idx, tensor_of(number), score * keeping.gain)

        assert torch.equal(evaluate_mod(memoised, scores)[0, 0], torch.tensor([[3.0, 3.0], [number, 3.0]]))


def test_values_that_are_kept_are_refused():
    kept, pairs = {}, torch.arange(8.0).view(4, 2)

    def first_score(score, b, h, q_idx, kv_idx):
        return kept.setdefault("score", score * 2)

    def first_row(score, b, h, q_idx, kv_idx):
        return score + (kept.setdefault("row", pairs[q_idx]) * pairs[kv_idx]).sum()

    for mod in (first_score, first_row):
        evaluate_mod(mod, ONE)
        with pytest.raises(ModError, match="a value that was computed in an earlier call, and kept"):
            evaluate_mod(mod, ONE)


def test_what_a_program_adds_to_tensors(monkeypatch):
    """A method, a number, and what stands in a tensor's __dict__."""
    row, name = torch.ones(1), "flexpress_test_gain"
    for number in (2.0, 5.0):
        monkeypatch.setattr(torch.Tensor, name, lambda self, number=number: self * number, raising=False)
        assert evaluate_mod(lambda score, b, h, q_idx, kv_idx: score * row.flexpress_test_gain()[0], ONE).item() == number
    for number in (2.0, 5.0):
        monkeypatch.setattr(torch.Tensor, name, number)
        assert evaluate_mod(lambda score, b, h, q_idx, kv_idx: score * row.flexpress_test_gain, ONE).item() == number
    for number in (2.0, 5.0):
        row.gain = number
        assert evaluate_mod(lambda score, b, h, q_idx, kv_idx: score * row.__dict__.get("gain", 1.0), ONE).item() == number


class Fives(tuple):
    def __iter__(self):
        yield 5.0


class Doubled(list):
    def __getitem__(self, place):
        return 2 * super().__getitem__(place)


class Shorter(tuple):
    def __len__(self):
        return 1


@pytest.mark.parametrize(
    "numbers", [Doubled([2.0, 3.0]), Shorter((2.0, 3.0)), [2.0, 3.0], (2.0, 3.0)], ids=lambda numbers: type(numbers).__name__
)
def test_iterating_asks_for_no_place(numbers):
    """Python's own iteration over a list reads its elements, whatever a subclass makes of places and of its length."""

    def product(score, b, h, q_idx, kv_idx):
        for factor in numbers:
            score = score * factor
        return score

    assert evaluate_mod(product, ONE).item() == 6


def test_iterating_and_signs_as_in_python():
    pair, number = Fives((2.0, 3.0)), [0j]

    def product(score, b, h, q_idx, kv_idx):
        for factor in pair:
            score = score * factor
        return score * math.copysign(1.0, number[0].imag)

    assert evaluate_mod(product, ONE).item() == 5
    number[0] = complex(0.0, -0.0)
    assert evaluate_mod(product, ONE).item() == -5
