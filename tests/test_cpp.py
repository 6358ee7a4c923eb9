"""Kernels in C++ against torch: operations, and attention and its gradients of any problem, as for the interpreter."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from flexpress import cache_clear, evaluate_mod, explain, flex_attention, mods
from support.attention import check_attention
from support.evaluate import check
from support.gradients import check_gradients, gradient_problems
from support.problems import problems

EXAMPLES = int(os.environ.get("FLEXPRESS_CPU_EXAMPLES", "6"))  # `make test-cpu` draws more


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Tensors on the CPU are computed by kernels in C++."""
    with mock.patch.dict(os.environ, FLEXPRESS_CPU="cpp"):
        cache_clear()
        yield
    cache_clear()


@pytest.mark.parametrize(
    "expression",
    [
        "(q_idx - kv_idx) // 3 + (kv_idx - 7) % 5 + (q_idx - 4) ** 3 + (kv_idx >> 1) - (h << 2)",
        "torch.where((q_idx < kv_idx) ^ (h == 1), torch.minimum(score, x[q_idx]), x[kv_idx] / (score + 300))",
        "score // x[kv_idx] + score % 7 + torch.round(score) + torch.floor(x[q_idx]) - torch.sign(score)",
        "torch.tanh(score / 9) + torch.exp(-torch.abs(score)) + torch.erf(score) + torch.log1p(score * score) + torch.sigmoid(score)",
        "(i8[q_idx] * i8[kv_idx] + 100).float() + (u8[kv_idx] - u8[q_idx]).float() + score",
        "(score.to(torch.bfloat16) + score.half() + x[(q_idx - kv_idx) % 24]).float()",
    ],
)
def test_operations(expression):
    """Vectors of queries, numbers that they share, and both together; those of 8 bits wrap around."""
    generator = torch.Generator().manual_seed(0)
    small = [torch.randint(0, 120, (24,), generator=generator).to(dtype) for dtype in (torch.int8, torch.uint8)]
    captured = {"x": torch.randn(24, generator=generator), "i8": small[0], "u8": small[1]}
    scores = torch.randn(2, 2, 20, 24, generator=generator) * 10
    check(expression, scores, captured)


@settings(max_examples=EXAMPLES)
@given(problems("cpu"))
def test_any_problem(p):
    check_attention(p, "cpu")


@settings(max_examples=EXAMPLES // 2)
@given(gradient_problems("cpu"))
def test_any_gradient(p):
    check_gradients(p, "cpu")


def test_explain_names_the_kernel():
    q = torch.randn(1, 2, 50, 16)
    assert "CPP" in str(explain(q, q, q, mods.softcap(3.0)))


def continued(score, b, h, q_idx, kv_idx):
    # fmt: off
    return score \
        + q_idx
    # fmt: on


def test_a_line_that_ends_with_a_backslash_hides_none():
    """In C++ such a comment would go on in the next line."""
    scores = torch.randn(1, 1, 20, 5)
    assert torch.allclose(evaluate_mod(continued, scores), scores + torch.arange(20.0)[:, None])


def test_any_number_of_threads_gives_the_same_gradients():
    """Of a table, too, whose elements all heads and positions share."""
    inputs = [torch.randn(1, 4, 300, 16, requires_grad=True) for _ in range(3)]
    table = torch.randn(600, requires_grad=True)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        out = flex_attention(*inputs, lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx + 300])
        found.append(torch.autograd.grad(out.sum(), (*inputs, table)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
