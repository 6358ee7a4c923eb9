"""Attention over sequences that are split over ranks, in processes of their own: it is that of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="processes talk through gloo"
)

if torch.distributed.is_available():
    import support.context_checks as checks


EXAMPLE = Path(__file__).parent.parent / "examples" / "train_context.py"
failed = ranks.failures_of("context_checks.py")


@pytest.mark.parametrize("name, world", ranks.checks_in(checks).items())
def test_ranks_compute_what_one_process_does(failed, name, world):
    for rank, errors in enumerate(failed(world)):
        assert not errors.get(name, errors), f"rank {rank} of {world}: {errors.get(name, errors)}"


def test_the_example_trains_as_one_rank_does():
    command = f"-m torch.distributed.run --standalone --nproc-per-node 2 {EXAMPLE} --length 400 --dim 32 --layers 1 --steps 4".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [(float(a), float(b)) for a, b in re.findall(r"^ +\d+ +(\S+) +(\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 4 and all(3.5 < a < 5.5 and abs(a - b) <= 2e-4 for a, b in losses), done.stdout
    assert len({a for a, _ in losses}) == 4, "the model learns, and documents differ"
