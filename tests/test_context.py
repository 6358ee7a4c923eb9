"""Attention over sequences that are split over ranks, in processes of their own: it is that of one process."""

from __future__ import annotations

import pytest
import torch

from support import ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="processes talk through gloo"
)

if torch.distributed.is_available():
    import support.context_checks as checks

    failed = ranks.failures_of(checks)


@pytest.mark.parametrize("name, world, device", ranks.on_devices(checks))
def test_ranks_compute_what_one_process_does(failed, name, world, device):
    why = failed(name, world, device)
    assert not why, why
