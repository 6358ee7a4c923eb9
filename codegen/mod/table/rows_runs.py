"""Rows that nobody writes in a mod: position_runs.py makes them of comparisons (see op.py for the columns)."""

from __future__ import annotations

import torch

from .op import Op


def _within(position: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return (first <= position) & (position < first + count)


def _bounded(limit: torch.Tensor) -> torch.Tensor:
    return limit.clamp(-(1 << 29), 1 << 29).to(torch.int32)


WITHIN = Op("within", _within, (), "within({0}, {1}, {2})", "common")
BOUNDED = Op("bounded", _bounded, (), "bounded({0})", "common")
