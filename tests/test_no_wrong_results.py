"""What a mod may not do, however it is reached: draw random numbers, apply an autograd.Function; and torch.no_grad() inside a mod."""

from __future__ import annotations

import functools
import os  # noqa: F401  # for expressions
import random
import secrets  # noqa: F401  # the same
from random import randint  # noqa: F401 - in texts below

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flexpress import ModError, flex_attention
from flexpress.codegen.mod.tracing.bind import bind
from support.dense import relative_error

NUMBERS = torch.tensor([0.25, 0.5, 0.75, 1.0])
GENERATOR, LEGACY, PYTHONS, TORCHS = np.random.default_rng(0), np.random.RandomState(0), random.Random(3), torch.Generator()
NORMAL = torch.distributions.Normal(torch.zeros(()), 1.0)


def drawn_elsewhere():
    return random.random()


class Noise:
    def __init__(self):
        self.python, self.numpy = random.Random(0), GENERATOR

    def drawn(self):
        return self.python.random()

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.numpy.random()

    def method(self, score, b, h, q_idx, kv_idx):
        return score * self.drawn()


class Dropout(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, score, b, h, q_idx, kv_idx):
        return self.dropout(score)


def imported(score, b, h, q_idx, kv_idx):
    import random as other

    return score * other.random()


def imported_from(score, b, h, q_idx, kv_idx):
    from numpy.random import rand

    return score * rand()


def imported_numpy(score, b, h, q_idx, kv_idx):
    import numpy

    return score + numpy.random.normal()


def branched(score, b, h, q_idx, kv_idx):
    if random.random() < 0.5:
        return score
    return score * 2


def written(expression: str):
    return eval(f"lambda score, b, h, q_idx, kv_idx: {expression}", globals())


DRAWN = {
    expression: written(expression)
    for expression in (
        "score * torch.rand(())",
        "score * torch.rand((), generator=TORCHS)",
        "score * torch.randn(4)[h]",
        "score * torch.randint(0, 3, ())",
        "score * torch.randperm(5)[q_idx % 5]",
        "torch.rand_like(score)",
        "score * torch.randn_like(NUMBERS)[h]",
        "score * torch.randint_like(NUMBERS, 3)[h]",
        "torch.bernoulli(score)",
        "score.bernoulli()",
        "score * NUMBERS.bernoulli()[h]",
        "score * torch.normal(0.0, 1.0, (1,))[0]",
        "score * torch.multinomial(NUMBERS, 1)[0]",
        "score * torch.poisson(NUMBERS)[h]",
        "F.dropout(score, 0.1)",
        "torch.dropout(score, 0.1, True)",
        "score * F.dropout(NUMBERS, 0.1)[h]",
        "F.alpha_dropout(score, 0.1, True)",
        "F.rrelu(score, training=True)",
        "score * F.gumbel_softmax(NUMBERS)[h]",
        "score * F.fractional_max_pool2d(NUMBERS.repeat(4).view(1, 4, -1), 2, output_size=2).flatten()[h]",
        "score * F.scaled_dot_product_attention(*[NUMBERS[None]] * 3, dropout_p=0.5)[0, h]",
        "score * F.scaled_dot_product_attention(*[NUMBERS[None]] * 3, None, 0.5)[0, h]",
        "score * torch.nn.init.kaiming_uniform_(NUMBERS[None].clone())[0, h]",
        "score * os.urandom(1)[0]",
        "score * secrets.randbelow(9)",
        "score.uniform_()",
        "score * torch.empty(()).uniform_()",
        "score * NUMBERS.clone().normal_()[h]",
        "score * torch.zeros(4).random_()[h]",
        "score * torch.zeros(()).exponential_()",
        "score * torch.nn.init.uniform_(torch.zeros(4))[h]",
        "score * torch.ops.aten.rand.default([])",
        "score * torch.ops.aten.rand([])",
        "score * NORMAL.sample()",
        "score * random.random()",
        "score * randint(1, 2)",
        "score * random.gauss(0, 1)",
        "score * random.choice([1, 2])",
        "score * random.Random(3).random()",
        "score * PYTHONS.random()",
        "score * (random.seed(3) or 1)",
        "score * drawn_elsewhere()",
        "score * np.random.rand()",
        "score * np.random.uniform()",
        "score * np.random.randint(3)",
        "score * np.random.default_rng().normal()",
        "score * GENERATOR.random()",
        "score * LEGACY.rand()",
    )
} | {
    "an object": Noise(),
    "a method": Noise().method,
    "a module": Dropout(),
    "a partial": functools.partial(lambda score, b, h, q_idx, kv_idx, draw: score * draw(), draw=random.random),
    "an import": imported,
    "an import of a name": imported_from,
    "an import of numpy": imported_numpy,
    "a branch": branched,
}


def on_real_objects(mod):
    """The same mod, which no stand-ins can follow."""

    def run(score, b, h, q_idx, kv_idx):
        try:
            factor = 1
        except ValueError:
            factor = 2
        return mod(score, b, h, q_idx, kv_idx) * factor

    return run


@pytest.mark.parametrize("make", [lambda mod: mod, on_real_objects], ids=["stand-ins", "real objects"])
@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_are_refused(name, make):
    states = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(
        ModError, match=r"(?s)score_mod: \S+ draws random numbers\n  File .*Draw them before the call and capture the tensor"
    ):
        bind(make(DRAWN[name]), "score")
    if "random.R" not in name and "F." not in name and "torch" not in name:
        assert states == (random.getstate(), np.random.get_state()[1].tolist())


def test_random_numbers_are_refused_in_masks_and_where_they_come_later():
    with pytest.raises(ModError, match="mask_mod: torch.rand draws random numbers"):
        bind(lambda b, h, q_idx, kv_idx: torch.rand(()) < 0.5, "mask")
    settings = Noise()
    settings.training = False
    mod = lambda score, b, h, q_idx, kv_idx: score * (random.random() if settings.training else 2.0)  # noqa: E731
    bind(mod, "score")
    settings.training = True
    with pytest.raises(ModError, match="random.random draws random numbers"):
        bind(mod, "score")


def test_names_like_those_are_no_random_numbers():
    random_bias = torch.ones(4)
    for mod in (
        lambda score, b, h, q_idx, kv_idx: F.normalize(NUMBERS, dim=0)[h] + random_bias[h] * score,
        lambda score, b, h, q_idx, kv_idx: score + torch.zeros(4).fill_(2.0)[h],
        on_real_objects(lambda score, b, h, q_idx, kv_idx: score + np.float32(2.0) * np.pi),
    ):
        bind(mod, "score")


@pytest.mark.parametrize("make", [lambda mod: mod, on_real_objects], ids=["stand-ins", "real objects"])
def test_dropout_outside_training_draws_nothing(make):
    """Of the score and of what is captured; and it is asked again at every call."""

    class Biased(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.dropout = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.5)), torch.nn.Dropout(0.5)
            self.register_buffer("places", torch.randn(20, 2))

        def forward(self, score, b, h, q_idx, kv_idx):
            return self.dropout(score) + self.bias(self.places)[kv_idx, 0]

    module, q = Biased().eval(), torch.randn(1, 1, 20, 16)
    mod, bias = make(module), module.bias[0](module.places)[:, 0]
    torch.testing.assert_close(
        flex_attention(q, q, q, mod), flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx])
    )
    for part in (module.dropout, module.bias):
        part.train()
        with pytest.raises(ModError, match="dropout draws random numbers"):
            flex_attention(q, q, q, mod)
        part.eval()
        flex_attention(q, q, q, mod)


def test_objects_are_looked_through_without_being_asked():
    class Proud:
        def __getattr__(self, name):
            raise KeyError(name)

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * 2

    proud = Proud()
    bind(on_real_objects(lambda *given: proud(*given)), "score")
    bind(lambda score, b, h, q_idx, kv_idx: proud(score, b, h, q_idx, kv_idx), "score")


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return 7 * gradient


class Applies(torch.nn.Module):
    function = Reversed
    kept = staticmethod(Reversed.apply)

    def forward(self, score, b, h, q_idx, kv_idx):
        return self.function.apply(score)

    def through_a_method(self, score, b, h, q_idx, kv_idx):
        return self(score, b, h, q_idx, kv_idx)


def reverse(x):
    return Reversed.apply(x)


apply = Reversed.apply


@pytest.mark.parametrize(
    "mod",
    [
        written("Reversed.apply(score)"),
        written("Rounded.apply(score)"),
        written("apply(score)"),
        written("reverse(score) * 2"),
        written("Reversed.apply(NUMBERS[h]) * score"),
        written("Applies.kept(score)"),
        Applies(),
        Applies().through_a_method,
        functools.partial(lambda score, b, h, q_idx, kv_idx, f: f(score), f=Reversed.apply),
        on_real_objects(written("Reversed.apply(score)")),
    ],
)
def test_an_autograd_function_of_a_symbol_is_refused(mod):
    with pytest.raises(ModError, match=r"(?s)an autograd.Function: its own backward would not be run\n  File"):
        bind(mod, "score")


def test_an_autograd_function_of_what_is_captured_has_its_own_backward():
    slopes = torch.randn(2, requires_grad=True)
    q, gradient = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)

    def slope(mod):
        return torch.autograd.grad(flex_attention(q, q, q, mod), slopes, gradient)[0]

    expected = slope(lambda score, b, h, q_idx, kv_idx: slopes[h] * score)
    torch.testing.assert_close(slope(lambda score, b, h, q_idx, kv_idx: Sevenfold.apply(slopes)[h] * score), 7 * expected)


def test_no_gradient_flows_through_what_is_computed_without():
    """By torch.no_grad() and its kin, as a context, a decorator and a function; and again in enable_grad()."""
    slopes = torch.randn(2, requires_grad=True)
    q, gradient = torch.randn(1, 2, 20, 16, requires_grad=True), torch.randn(1, 2, 20, 16)

    def context(score, b, h, q_idx, kv_idx):
        with torch.no_grad():
            gate = torch.sigmoid(score * slopes[h])
        return score * gate

    @torch.no_grad()
    def decorated(score, h):
        return torch.sigmoid(score * slopes[h])

    def switched(score, b, h, q_idx, kv_idx):
        torch.set_grad_enabled(False)
        gate = torch.sigmoid(score * slopes[h])
        torch.set_grad_enabled(True)
        return score * gate

    def inference(score, b, h, q_idx, kv_idx):
        with torch.inference_mode():
            gate = torch.sigmoid(score * slopes[h])
        return score * gate

    def enabled_again(score, b, h, q_idx, kv_idx):
        with torch.no_grad(), torch.enable_grad():
            return score * torch.sigmoid(score * slopes[h])

    def gradients(mod):
        out = flex_attention(q, q, q, mod)
        assert torch.is_grad_enabled()
        return [torch.zeros(2) if g is None else g for g in torch.autograd.grad(out, (q, slopes), gradient, allow_unused=True)]

    detached = gradients(lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(score * slopes[h]).detach())
    whole = gradients(lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(score * slopes[h]))
    for mod in (context, lambda score, b, h, q_idx, kv_idx: score * decorated(score, h), switched, inference):
        torch.testing.assert_close(gradients(mod), detached)
    torch.testing.assert_close(gradients(enabled_again), whole)
    assert whole[1].any() and not detached[1].any()


@pytest.mark.parametrize(
    "number", [np.float16(0.5), np.float32(0.5), np.float64(0.5), np.int8(3), np.int64(3), np.uint8(3), np.bool_(True)]
)
@pytest.mark.parametrize("kind", [lambda n: n, np.asarray], ids=["scalar", "0-dim array"])
def test_captured_numpy_numbers_work(number, kind):
    value, items, q = kind(number), np.asarray([number, number]), torch.randn(1, 1, 20, 16)
    expected = flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score * float(number))
    for mod in (
        lambda score, b, h, q_idx, kv_idx: score * value,
        lambda score, b, h, q_idx, kv_idx: value * score,
        lambda score, b, h, q_idx, kv_idx: score * items[1],
    ):
        torch.testing.assert_close(flex_attention(q, q, q, mod), expected)


def test_numpy_arrays_that_meet_a_position_name_the_line():
    array = np.arange(20.0)
    for expression in ("score * array[q_idx]", "np.maximum(score, array)", "score * array"):
        mod = eval(f"lambda score, b, h, q_idx, kv_idx: {expression}", {"np": np, "array": array})
        with pytest.raises(ModError, match=r'(?s)score_mod: .*\n  File "<string>", line 1'):
            bind(mod, "score")
    with pytest.raises(ModError, match="torch.as_tensor"):
        bind(lambda score, b, h, q_idx, kv_idx: score * array[q_idx], "score")


def test_attention_without_dropout_draws_nothing():
    q = torch.randn(1, 1, 8, 16)

    def mod(score, b, h, q_idx, kv_idx):
        return score * F.scaled_dot_product_attention(*[NUMBERS[None]] * 3, dropout_p=0.0)[0, q_idx % 4]

    exact = F.scaled_dot_product_attention(*[NUMBERS[None]] * 3)[0, torch.arange(8) % 4]
    scores = q.double() @ q.double().mT * 0.25 * exact.double()[:, None]
    assert relative_error(flex_attention(q, q, q, mod), scores.softmax(-1) @ q.double()) < 1e-5
