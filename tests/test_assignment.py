"""Blocks of a sequence dealt out to ranks: equal work, whole and equal lengths, as few keys sent as a mask allows."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flexpress.distributed.assignment import assign, imbalance
from flexpress.distributed.layout import BLOCK, Layout, positions_of
from flexpress.distributed.plan import _own_starts

RANKS = (2, 4, 8, 16, 32, 64)


def owners_of(parts, blocks):
    owners = np.full(blocks, -1)
    for rank, part in enumerate(parts):
        assert (owners[part] == -1).all() and (np.diff(part) > 0).all()
        owners[part] = rank
    assert (owners >= 0).all()
    return owners


def document_starts(blocks: int, seed: int) -> np.ndarray:
    """The first block of the document that each row of blocks begins in."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, blocks * BLOCK), rng.integers(2, 40), replace=False))
    starts = np.concatenate([[0], cuts])
    return starts[np.searchsorted(starts, np.arange(blocks) * BLOCK, side="right") - 1] // BLOCK


def status_of(first, last) -> np.ndarray:
    """int8 (1, 1, rows, columns) of masks whose rows see the blocks from `first` up to `last`."""
    columns = np.arange(len(first))
    return ((columns >= first[:, None]) & (columns <= last[:, None])).astype(np.int8)[None, None]


def masks(blocks: int):
    rows = np.arange(blocks)
    yield "causal", status_of(0 * rows, rows)
    yield "window", status_of(np.maximum(rows - 32, 0), rows)
    yield "prefix", status_of(0 * rows, np.maximum(rows, blocks // 5))
    yield "full", status_of(0 * rows, 0 * rows + blocks - 1)
    for seed in range(64):
        yield f"documents {seed}", status_of(document_starts(blocks, seed), rows)


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_have_equal_work(ranks):
    for name, status in masks(1024):
        layout = Layout(status, 1024 * BLOCK, 1024 * BLOCK, ranks)
        assert layout.imbalance <= 1.03, (name, layout.imbalance)
        assert {len(part) for part in layout.q_blocks} == {1024 // ranks}, name


@pytest.mark.parametrize("ranks", RANKS)
def test_simple_masks_keep_neighbours_together(ranks):
    runs = {name: Layout(status, 1024 * BLOCK, 1024 * BLOCK, ranks) for name, status in list(masks(1024))[:4]}
    runs = {name: max(map(runs_of, layout.q_blocks)) for name, layout in runs.items()}
    assert runs == {"causal": 2, "window": 1, "prefix": runs["prefix"], "full": 1} and runs["prefix"] <= 5


def runs_of(part: np.ndarray) -> int:
    return 1 + int((np.diff(part) > 1).sum())


@pytest.mark.parametrize("ranks", RANKS)
def test_documents_stay_together(ranks):
    """A rank gets 0.15 of the keys on average, and fewer than 0.6 where nearly all is one document (an all-gather: 1 - 1 / ranks)."""
    layouts = [Layout(status, 1024 * BLOCK, 1024 * BLOCK, ranks) for name, status in masks(1024) if name.startswith("documents")]
    sent = [layout.remote_blocks.mean() / 1024 for layout in layouts]
    assert max(sent) <= 0.6 and np.mean(sent) <= 0.16
    assert max(runs_of(part) for layout in layouts for part in layout.q_blocks) <= 8


def test_cuts_are_as_few_as_necklaces_need():
    """Work that goes up and down: two cuts for each division, 2 (ranks - 1) in all, but for the exchange of single blocks."""
    work = 2000.0 + 1000 * np.sin(np.arange(4096) / 150) + np.arange(4096) / 10
    for ranks in (2, 3, 5, 8, 12):
        parts = assign(work, ranks)
        assert sum(map(runs_of, parts)) <= 2 * (ranks - 1) + 1
        assert imbalance(work, owners_of(parts, 4096), ranks) <= 1.002


def test_a_total_is_checked_whatever_the_default_device():
    with torch.device("meta"):
        starts = torch.tensor([0, 3, 8], device="cpu")
        assert _own_starts("cu_seqlens_q", starts, torch.device("cpu"))[1] == 8


def test_only_what_a_mask_needs_is_sent():
    """A causal mask over two ranks: the rank with the first and last quarter needs the other's, which needs the first quarter."""
    layout = Layout(status_of(np.zeros(8, int), np.arange(8)), 8 * BLOCK, 8 * BLOCK, 2)
    assert [part.tolist() for part in layout.q_blocks] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert layout.sent(0, 1).tolist() == [0, 1] and layout.sent(1, 0).tolist() == [2, 3, 4, 5]
    assert layout.sent(0, 0).tolist() == [0, 1, 6, 7], "what it needs of its own"
    assert layout.remote_blocks.tolist() == [4, 2]


def test_keys_that_most_queries_visit_come_first():
    """As in the first backward pass of one sequence. Others' come together, in the order of ranks."""
    layout = Layout(status_of(np.zeros(8, int), np.arange(8)), 8 * BLOCK, 8 * BLOCK, 2)
    assert layout.visits.tolist() == [[4, 3, 2, 2, 2, 2, 2, 1], [4, 4, 4, 3, 2, 1, 0, 0]]
    assert [part.tolist() for part in layout.keys(0)] == [[0, 1, 6], [], [2, 3, 4, 5], [7]]
    assert [part.tolist() for part in layout.keys(1)] == [[2], [0, 1], [], [3, 4, 5]]


@example(1, 2, 0)
@example(3, 2, 0)
@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 99))
def test_every_block_has_one_owner(blocks, ranks, seed):
    work = np.random.default_rng(seed).integers(0, 50, blocks).astype(float)
    parts = assign(work, ranks)
    owners = owners_of(parts, blocks)
    assert len(parts) == ranks and imbalance(work, owners, ranks) >= 1.0
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_planning_is_quick_whatever_the_work():
    """Work of which no division is fair: the search for one ends soon. Milliseconds, of which a slow machine may need more."""
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for ranks in (2, 8):
        assign(rng.pareto(1.5, 8192), ranks)
        assign(np.eye(1, 8192)[0], ranks)
    assert time.perf_counter() - start < 1.0


@given(st.lists(st.integers(0, 9), unique=True), st.integers(0, 10 * BLOCK))
def test_positions_end_with_the_sequence(blocks, length):
    positions = positions_of(np.array(sorted(blocks), dtype=int), length)
    assert positions.tolist() == [p for p in range(length) if p // BLOCK in blocks]
