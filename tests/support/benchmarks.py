"""The benchmark programs as modules, and workloads that a test can afford."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the programs import each other by plain names, as they do when run as scripts
common, decode, forward, implementations, latency, block_mask, ragged, reference, serving, supervisor, workloads = map(
    importlib.import_module,
    (
        "common",
        "decode",
        "forward",
        "implementations",
        "latency",
        "block_mask",
        "ragged",
        "reference",
        "serving",
        "supervisor",
        "workloads",
    ),
)

LENGTH, SIZE = 97, 13


def benchmark(name: str):
    """Another of the programs."""
    return importlib.import_module(name)


def small(row, **changes):
    """Return a workload of the same kind that a test can afford."""
    return dataclasses.replace(row, length=LENGTH, size=min(row.size, SIZE), **changes)
