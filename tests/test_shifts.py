"""Kernels whose blocks lie in a longer sequence: mods are told positions there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flexpress.codegen import registry
from support.benchmarks import benchmark
from support.devices import DEVICES, for_any
from support.fake_hopper import forward_on_cpu
from support.shifts import Problem, check_problem, problems


@for_any(problems, cpu=16, cuda=120)
def test_any_blocks(p, device):
    check_problem(p, device)


ONE = Problem(rows=[5, 2, 7], columns=[6, 0, 3], q_len=980, kv_len=850, score="none", dtype=torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_other_sizes(device):
    check_problem(replace(ONE, rows=[1, 3], size=(256, 128), score="table"), device)
    check_problem(replace(ONE, columns=[1, 3], size=(128, 256), mask="chunks", padded=False), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", ["alibi", "table", "rows", "columns", "bias"])
def test_every_way_to_gather_a_gradient(score, device):
    check_problem(replace(ONE, score=score), device)
    check_problem(replace(ONE, score=score, deterministic=True, mask="window", padded=False, columns=[0, 3, 6]), device)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout(device):
    """Weights are dropped that the whole sequence drops there."""
    check_problem(replace(ONE, dropout_p=0.3), device)
    check_problem(replace(ONE, dropout_p=0.3, size=(256, 128), rows=[1, 3], deterministic=True, dtype=torch.float32), device)


def test_in_cpp(in_cpp):
    check_problem(ONE, "cpu")
    check_problem(replace(ONE, dropout_p=0.3, score="alibi"), "cpu")


@pytest.mark.parametrize(
    "changes",
    [
        dict(score="alibi", D=128, Dv=128),
        dict(score="table", mask="window"),
        dict(score="bias", D=192, Dv=128, mask="chunks"),
        dict(score="columns", columns=[2, 6, 1], rows=[7]),
        dict(score="alibi", dropout_p=0.3),
    ],
    ids=str,
)
def test_text_for_hopper(monkeypatch, changes):
    """The forward kernel for Hopper, in a stand-in for Gluon; the backward one is in test_hopper_backward.py."""
    launched = forward_on_cpu(monkeypatch)
    registry.clear()
    check_problem(replace(ONE, **{"D": 64, "Dv": 64, **changes}), "cpu", backward=False)
    registry.clear()
    assert len(launched) == 1 and launched[0].spec.template == "hopper_forward"


def test_benchmark_of_a_rank_measures_the_same_attention(monkeypatch):
    """benchmarks/context_kernels.py, on the CPU and without a clock: by shifts and by tables a rank computes the same rows."""
    kernels, outs = benchmark("context_kernels"), []

    def run(call, rep):
        outs.append(call())
        return 1.0  # ms

    monkeypatch.setattr(kernels, "queued_ms", run)
    asked = SimpleNamespace(heads=4, kv_heads=1, head_dim=16)
    row = kernels.row_of(kernels.Problem("causal, ALiBi", 1024, asked, torch.device("cpu")), ranks=4, rank=1, rep=0.0)
    shifted, gradients, tables, others = outs[:4]
    torch.testing.assert_close(shifted, tables, rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert row["forward_tflops"] == row["tables"]["forward_tflops"] and row["query_heads"] == 4
