"""Kernels in C++ against dense float64 attention: any problem, as for the interpreter."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from flexpress import cache_clear, explain, mods
from support.attention import check_attention
from support.problems import problems


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Tensors on the CPU are computed by kernels in C++."""
    with mock.patch.dict(os.environ, FLEXPRESS_CPU="cpp"):
        cache_clear()
        yield
    cache_clear()


@settings(max_examples=10)
@given(problems("cpu"))
def test_any_problem(p):
    check_attention(p, "cpu")


def test_explain_names_the_kernel():
    q = torch.randn(1, 2, 50, 16)
    assert "CPP" in str(explain(q, q, q, mods.softcap(3.0)))
