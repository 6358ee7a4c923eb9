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


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """By number of ranks: for each what failed."""
    found = {}

    def of(world: int) -> list[dict[str, str]]:
        if world not in found:
            found[world] = ranks.run(world, tmp_path_factory.mktemp(f"{world}_ranks"), "context_checks.py")
        return found[world]

    return of


@pytest.mark.parametrize("name, world", ranks.checks_in(checks).items())
def test_ranks_compute_what_one_process_does(failed, name, world):
    for rank, errors in enumerate(failed(world)):
        assert not errors.get(name, errors), f"rank {rank} of {world}: {errors.get(name, errors)}"
