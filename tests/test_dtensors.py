"""DTensors, and modules that torch has parallelized, in processes of their own: forward and gradients are those of one process."""

from __future__ import annotations

import pytest
import torch

from support import ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="processes talk through gloo"
)

if torch.distributed.is_available():
    import support.rank_checks as checks

    failed = ranks.failures_of(checks)


@pytest.mark.parametrize("name, world", ranks.checks_in(checks).items())
def test_ranks_compute_what_one_process_does(failed, name, world):
    why = failed(name, world)
    assert not why, why
