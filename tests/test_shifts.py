"""Kernels whose blocks lie in a longer sequence: mods are told positions there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexpress.codegen import registry
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


@pytest.mark.parametrize(
    "changes",
    [
        dict(score="alibi", D=128, Dv=128),
        dict(score="table", mask="window"),
        dict(score="bias", D=192, Dv=128, mask="chunks"),
        dict(score="columns", columns=[2, 6, 1], rows=[7]),
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
