"""What is decided by floats is decided alike in every kernel, and as in torch: products that are added to something are rounded first."""

from __future__ import annotations

import pytest
import torch

from flexpress import create_block_mask, create_mask, evaluate_mod, flex_attention
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.plan.masks import mask_texts
from flexpress.codegen.run.preview import compilation, hopper_compilation
from flexpress.codegen.text.render import render
from support.devices import DEVICES

S = 150


@pytest.fixture(autouse=True)
def as_users_compile(in_cpp, monkeypatch):
    """On a CPU by kernels in C++, whose compiler makes multiply-adds. The interpreter rounds each product, and so does -O1."""
    monkeypatch.setenv("FLEXPRESS_CXXFLAGS", "-O2")


def masks(device: str) -> dict:
    """Masks of sums of products that are 0, or nearly so, at many positions."""
    x, y = (torch.rand(S, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (1, 2))
    frame, third = torch.tensor(0.04, device=device), torch.tensor(0.1, device=device)
    return {
        "equal times": lambda b, h, q, k: (q // 4) * frame - (k // 4) * frame == 0,
        "time goes on": lambda b, h, q, k: q * third - k * third >= 0,
        "a number of Python's": lambda b, h, q, k: q * 0.1 - k * 0.1 >= 0,
        "cross product": lambda b, h, q, k: x[q] * y[k] - x[k] * y[q] >= 0,
        "a sum that is negated": lambda b, h, q, k: -(x[q] * y[k]) + x[k] * y[q] <= 0,
        "rounded down": lambda b, h, q, k: torch.floor(x[q] * 7 - x[k] * 7) >= 0,
        "an index": lambda b, h, q, k: (y[k] * 3 - y[q] * 3).int() >= 0,
        "a choice": lambda b, h, q, k: torch.where(q > k, x[q] * third - x[k] * third, y[k] * third - y[q] * third) >= 0,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", masks("cpu"))
def test_masks_are_those_of_torch(name, device):
    mask_mod = masks(device)[name]
    positions = torch.arange(S, device=device)
    expected = mask_mod(0, 0, positions[:, None], positions).expand(S, S)
    assert torch.equal(create_mask(mask_mod, 1, 1, S, S, device=device)[0, 0], expected)
    q, k = (torch.zeros(1, 1, S, 16, device=device, requires_grad=True) for _ in range(2))
    v = torch.eye(S, device=device)[None, None].requires_grad_()
    block_mask = create_block_mask(mask_mod, None, None, S, S, device=device)
    for how in ({"mask_mod": mask_mod}, {"block_mask": block_mask}):
        out = flex_attention(q, k, v, **how)
        assert torch.equal(out[0, 0] > 0, expected)
        (d_v,) = torch.autograd.grad(out.sum(), v)  # what each key is weighed with
        torch.testing.assert_close(d_v[0, 0, :, 0], out[0, 0].sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_choices_of_scores(device):
    """Of a captured number, and of the score itself, whose last step is the product with the scale."""
    x = torch.tensor([0.1, 0.7, 1.3] * 20, device=device)
    step, positions = torch.tensor(0.04, device=device), torch.arange(60, device=device)

    def by_time(score, b, h, q_idx, kv_idx):
        return torch.where(x[q_idx] * step - x[kv_idx] * step < 0, -100.0, 0.0) + score

    scores = torch.randn(1, 1, 60, 60, device=device)
    expected = by_time(scores[0, 0], 0, 0, positions[:, None], positions)
    assert torch.equal(evaluate_mod(by_time, scores)[0, 0], expected)
    zero = torch.zeros(1, 1, 60, 64, device=device)
    weights = flex_attention(zero, zero, torch.eye(60, device=device)[None, None], by_time)[0, 0]
    torch.testing.assert_close(weights, (expected - scores[0, 0]).softmax(-1), rtol=1e-5, atol=1e-6)

    q, k = (torch.randn(1, 1, 60, 64, device=device) for _ in range(2))
    own = (q @ k.mT * 0.3)[0, 0]

    def above(score, b, h, q_idx, kv_idx):
        return torch.where(score - score * 1.0 == 0, 0.0, -torch.inf)

    assert torch.equal(evaluate_mod(above, own[None, None]), torch.zeros(1, 1, 60, 60, device=device))
    out = flex_attention(q, k, torch.eye(60, device=device)[None, None], above, scale=0.3)
    torch.testing.assert_close(out, torch.full_like(out, 1 / 60))


def test_what_decides_is_not_approximated():
    """tanh has an approximate spelling for 16-bit attention: another dtype, or create_mask, must not attend to others."""
    row = torch.rand(300)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.tanh(score / 9) + torch.where(torch.tanh(row[q_idx]) > 0.5, 1.0, 0.0)

    def mask_mod(b, h, q_idx, kv_idx):
        return torch.tanh(row[q_idx] * row[kv_idx]) >= 0.3

    text = render(compilation("sm_90", score_mod, mask_mod, "bfloat16", 64).spec)
    assert text.count("libdevice.tanh(") == 2 and text.count(" tanh_approx(") == 2  # its definition, and one call


@pytest.mark.parametrize("device", DEVICES)
def test_roots_of_0_have_a_value(device):
    """Distances by products, as torch computes them: no rounding leaves less than 0 where torch has 0."""
    x = (torch.rand(64, generator=torch.Generator().manual_seed(1)) * 3).to(device)
    positions, zero, eye = (
        torch.arange(64, device=device),
        torch.zeros(1, 1, 64, 64, device=device),
        torch.eye(64, device=device)[None, None],
    )

    def apart(score, b, h, q_idx, kv_idx):
        return score - torch.sqrt(x[q_idx] * x[q_idx] + x[kv_idx] * x[kv_idx] - 2 * x[q_idx] * x[kv_idx])

    def decay(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score - torch.sqrt(q_idx * 0.1 - kv_idx * 0.1), -torch.inf)

    for mod in (apart, decay):
        expected = mod(zero[0, 0], 0, 0, positions[:, None], positions)
        expected = torch.where(expected.isnan(), -torch.inf, expected) if mod is decay else expected
        for queries in (64, 4):
            weights = flex_attention(zero[:, :, :queries], zero, eye, mod)[0, 0]
            torch.testing.assert_close(weights, expected[:queries].softmax(-1), rtol=1e-4, atol=1e-5)


FUNCTIONS = "exp exp2 expm1 log log2 log10 log1p sin cos tan atan asin acos sinh cosh asinh acosh atanh erf erfc tanh sigmoid sqrt rsqrt"


@pytest.mark.parametrize("device", DEVICES)
def test_a_function_of_a_query_is_that_of_a_key(device):
    """What is a vector in one place and a number in another. All functions at once, each where it is defined."""
    inside, above = torch.linspace(-0.99, 0.99, S, device=device), torch.linspace(1.01, 9.0, S, device=device)
    functions = [(getattr(torch, name), inside if name in ("asin", "acos", "atanh") else above) for name in FUNCTIONS.split()]

    def same(b, h, q_idx, kv_idx):
        found = q_idx == q_idx
        for function, x in functions:
            found = found & ((function(x[q_idx]) == function(x[kv_idx])) | (q_idx != kv_idx))
        return found & (q_idx >= kv_idx)

    expected = torch.ones(S, S, device=device).tril()
    assert torch.equal(create_mask(same, 1, 1, S, S, device=device)[0, 0].float(), expected)
    zero, eye = torch.zeros(1, 1, S, 64, device=device), torch.eye(S, device=device)[None, None]
    for queries in (S, 4):
        out = flex_attention(zero[:, :, :queries], zero, eye, mask_mod=same)
        assert torch.equal((out[0, 0] > 0).float(), expected[:queries])


def test_quotients_and_roots_that_decide_are_the_nearest_floats():
    """Triton's `/` and sqrt are approximate."""
    row = torch.rand(300)

    def mask_mod(b, h, q_idx, kv_idx):
        return (torch.sqrt(row[q_idx]) <= row[kv_idx]) & ((q_idx / 3).floor() == (kv_idx / 3).floor())

    def score_mod(score, b, h, q_idx, kv_idx):
        return score / torch.sqrt(row[kv_idx] + 1)

    for print_of in (hopper_compilation, compilation):
        text = render(print_of("sm_90", score_mod, mask_mod, "bfloat16", 64).spec)
        assert text.count("l.sqrt_rn(") == 1 and text.count("l.div_rn(") == 2 and text.count("l.sqrt(") == 1


def test_what_zones_hold_is_computed_as_masks_compute_it():
    """A quotient less what it nearly is: there is no room for that of an approximate division."""
    row = torch.rand(300)

    def mask_mod(b, h, q_idx, kv_idx):
        return (row[q_idx] / row[q_idx + 1] - torch.sqrt(row[q_idx + 2]) >= 0) & (kv_idx <= q_idx)

    texts = mask_texts(bind(mask_mod, "mask"), (1, 1, 297, 297), "cuda")
    (zone,) = (zone.text for zone in texts.zones)
    for text in (zone, texts.mask):
        written = "\n".join(map(str, (*text.lines, text.result)))
        assert "tl.div_rn(" in written and "tl.sqrt_rn(" in written


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_a_quotient_less_what_it_is(device):
    divided, by = (torch.rand(S, generator=torch.Generator().manual_seed(seed)).add(1).to(device) for seed in (1, 2))
    quotient = divided / by

    def mask_mod(b, h, q_idx, kv_idx):
        return (divided[q_idx] / by[q_idx] - quotient[q_idx] >= 0) & (kv_idx <= q_idx)

    mask = create_block_mask(mask_mod, None, None, S, S, device, BLOCK_SIZE=(1, 128))
    there = create_mask(mask_mod, 1, 1, S, S, device)[0, 0]
    assert torch.equal(there, torch.ones(S, S, dtype=torch.bool, device=device).tril())
    assert torch.equal(mask.to_dense()[0, 0].bool(), torch.stack([part.any(1) for part in there.split(128, 1)], 1))
