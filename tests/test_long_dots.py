"""Dot products of long rows of captured tensors: values and gradients against dense attention in float64, and what is refused."""

from __future__ import annotations

import pytest
import torch

from flexpress import ModError
from flexpress.codegen.mod.graphs.loads import dots_of
from flexpress.codegen.mod.tracing.bind import bind
from support.devices import for_any
from support.evaluate import make_mod
from support.long_dots import check_dot_derivatives, check_dots, dot_problems


@for_any(dot_problems, cpu=5, cuda=60)
def test_any_dot_products_and_their_gradients(p, device):
    check_dots(p, device)


@for_any(dot_problems, cpu=3, cuda=40)
def test_any_tangents_and_second_derivatives(p, device):
    check_dot_derivatives(p, device)


@pytest.mark.parametrize(
    "text",
    [
        "score + a[q_idx] @ c[kv_idx]",
        "score + torch.dot(c[kv_idx], a[q_idx])",
        "score + (a[q_idx] * c[kv_idx]).float().sum(dim=-1)",
        "score + a[q_idx].double().dot(c[kv_idx].double())",
        "score + a[q_idx, :].inner(c[kv_idx, ...])",
        "score + (a[q_idx].to(torch.float32) * c[kv_idx].float()).sum()",
    ],
)
def test_what_is_a_product_of_matrices(text):
    captured = {"a": torch.randn(50, 200), "c": torch.randn(60, 200)}
    (dot,) = dots_of(bind(make_mod(text, "score", captured), "score")[0])
    assert dot.attr == 200 and [row.op for row in dot.args] == ["row", "row"]


def test_sixteen_elements_are_computed_with_one_by_one():
    captured = {"a": torch.randn(50, 16), "c": torch.randn(60, 16)}
    assert not dots_of(bind(make_mod("score + a[q_idx] @ c[kv_idx]", "score", captured), "score")[0])


@pytest.mark.parametrize(
    "text, kind, problem",
    [
        ("score + (a[q_idx] - c[kv_idx]).abs().sum()", "score", r"a vector of 200 elements of a captured tensor of shape \(50, 200\)"),
        ("score + (a[q_idx] * 2) @ c[kv_idx]", "score", "a vector of 200 elements"),
        ("score + a[q_idx] @ a[q_idx]", "score", "a vector of 200 elements"),
        ("score + a[q_idx] @ c[kv_idx - q_idx]", "score", "a vector of 200 elements"),
        ("score + (a[q_idx].half() * c[kv_idx]).sum()", "score", "a vector of 200 elements"),
        ("a[q_idx] @ c[kv_idx] > 0", "mask", "a vector of 200 elements"),
        ("score + wide[q_idx] @ wide[kv_idx]", "score", "a dot product of rows of 300 elements"),
        ("score + a[q_idx] @ wide[kv_idx]", "score", r"shapes \(200,\) and \(300,\)"),
        ("score + numbers[q_idx] @ numbers[kv_idx]", "score", "a vector of 80 elements"),
    ],
)
def test_what_is_refused(text, kind, problem):
    captured = {"a": torch.randn(50, 200), "c": torch.randn(60, 200), "wide": torch.randn(9, 300), "numbers": torch.ones(9, 80).int()}
    with pytest.raises(ModError, match=f"(?s){problem}.*File"):
        bind(make_mod(text, kind, captured), kind)
