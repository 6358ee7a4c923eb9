"""Prefixes that sequences share are read once: the same as without sharing, and as dense attention in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress import PageAllocator, SharedPrefix, cached_attention, shared_attention
from flexpress.shared_prefix import grouped
from support.devices import DEVICES, for_any
from support.prefixes import Forked, batches, check, made, pool_of


@pytest.fixture(autouse=True)
def always_shared(monkeypatch):
    """However little need not be read again."""
    monkeypatch.setattr(shared_attention, "LEAST_BYTES", 0)


@for_any(batches, cpu=60, cuda=200)
def test_any_batch(p, device):
    check(p, device)
