"""The example and the benchmark of sequences over ranks run, on processes of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.devices import DEVICES

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="processes talk through gloo"
)

ROOT = Path(__file__).parent.parent


def run(command: str, device: str) -> str:
    """What a program prints, on a machine with GPUs or one that seems to have none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ranks_on(device: str) -> int:
    return 2 if device == "cpu" else min(torch.cuda.device_count(), 4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_example_trains_as_one_rank_does(device):
    size = "--length 400 --dim 32 --layers 1 --steps 4" if device == "cpu" else "--length 16384 --dim 256 --steps 4 --lr 1e-3"
    ranks = f"-m torch.distributed.run --standalone --nproc-per-node {ranks_on(device)}"
    printed = run(f"{ranks} {ROOT / 'examples/train_context.py'} {size}", device)
    losses = [(float(a), float(b)) for a, b in re.findall(r"^ +\d+ +(\S+) +(\S+)$", printed, re.MULTILINE)]
    assert len(losses) == 4 and all(3.5 < a < 5.5 and abs(a - b) <= (2e-4 if device == "cpu" else 2e-2) for a, b in losses), printed
    assert len({a for a, _ in losses}) == 4, "the model learns, and documents differ"


@pytest.mark.parametrize("device", DEVICES)
def test_the_benchmark_writes_a_row_for_each_way_also_where_one_fails(device, tmp_path):
    size = "--heads 2 --kv-heads 1 --head-dim 16 --lengths 256" if device == "cpu" else "--lengths 8192"
    small = f"{ROOT / 'benchmarks/context.py'} --ranks {ranks_on(device)} {size}"
    printed = run(f"{small} --masks causal --out {tmp_path / 'rows.json'}", device)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(printed.splitlines()) == len(rows) == 5
    for row in rows:
        if row["way"].startswith("torch") and device == "cpu":
            assert row["error"].startswith("rank 0: "), "torch's has no ring for CPUs"
        else:
            assert row["forward_ms"] > 0 and row["both_ms"] > 0 and ("both_ratio" in row) == (row["way"] != "one GPU")
    run(f"{small} --seconds 0 --out {tmp_path / 'none.json'}", device)
    rows = json.loads((tmp_path / "none.json").read_text())["rows"]
    assert len(rows) == 20 and all("0.0 seconds were over" in row["error"] for row in rows)
