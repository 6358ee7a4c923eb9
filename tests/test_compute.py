"""Graphs that the host computes: reads outside of tensors, casts, and index expressions."""

from __future__ import annotations

import pytest
import torch

from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.tracing.bind import bind
from support.derivatives import indices
from support.evaluate import make_mod


def test_host_reads_zero_outside_and_wraps_once():
    table = torch.tensor([1.0, 2.0, 3.0])
    graph, found = bind(make_mod("table[kv_idx - 4]", "score", {"table": table}), "score")
    out = compute(graph.result, {"kv_idx": torch.arange(9, dtype=torch.int32)}, found, [])
    assert out.tolist() == [0, 1, 2, 3, 1, 2, 3, 0, 0] and out.dtype == torch.float32
    graph, found = bind(make_mod("table[kv_idx] + 1", "score", {"table": torch.empty(0)}), "score")
    assert compute(graph.result, {"kv_idx": torch.arange(2, dtype=torch.int32)}, found, []).tolist() == [1, 1]


def test_host_rounds_where_a_mod_casts():
    scores = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    for expression, expected in (("score.half()", scores.half()), ("score.float()", scores), ("score.int() + 0.5", scores.int() + 0.5)):
        graph, _ = bind(make_mod(expression, "score", {}), "score")
        assert torch.equal(compute(graph.result, {"score": scores}, [], []), expected.double())


@pytest.mark.parametrize(
    "expression",
    [
        "q_idx // 3 - kv_idx % n",
        "ids[q_idx] * 2",
        "(q_idx << 2) ^ kv_idx",
        "n - q_idx",
        "q_idx.long()",
        "torch.clamp(q_idx, 1, n)",
        "(q_idx / 2).int()",
        "q_idx // (kv_idx - 1) * 0",
    ],
)
def test_host_computes_indices(expression):
    """Index expressions have torch's value and dtype; a division by zero is no exception."""
    captured = {"ids": torch.tensor([3, 1, 2, 5]), "n": 3}
    graph, found = bind(make_mod(expression, "score", captured), "score")
    symbols = indices((1, 1, 4, 5))
    out = compute(graph.result, symbols, found[: len(graph.tensors)], found[len(graph.tensors) :])
    if "(kv_idx - 1)" in expression:
        assert (out == 0).all()
        return
    expected = eval(expression, {"torch": torch, **captured, **symbols})
    assert out.dtype == expected.dtype and torch.equal(out, expected)
