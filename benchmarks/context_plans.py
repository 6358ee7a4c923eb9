"""How a sequence is split over ranks, for 2 to 64 of them, without a GPU: balance, and what is sent.

    python benchmarks/context_plans.py --out benchmarks/results/context_plans.json

131,072 positions, 1,024 blocks of 128. Of each mask: largest over mean work of a rank; the runs of blocks that a rank has at the most; the
keys that a rank gets from others, on average, as a share of all (an all-gather sends 1 - 1/ranks of them); and how long the host plans, the
median. Documents are 64 random layouts of 3 to 40 documents: the worst of each number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from flexpress.distributed.layout import BLOCK, Layout

BLOCKS, RANKS = 1024, (2, 4, 8, 16, 32, 64)


def status_of(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """int8 (1, 1, rows, columns) of masks whose rows see the blocks from `first` up to `last`."""
    columns = np.arange(len(first))
    return ((columns >= first[:, None]) & (columns <= last[:, None])).astype(np.int8)[None, None]


def documents(seed: int) -> np.ndarray:
    rng, rows = np.random.default_rng(seed), np.arange(BLOCKS)
    starts = np.concatenate([[0], np.sort(rng.choice(np.arange(1, BLOCKS * BLOCK), rng.integers(2, 40), replace=False))])
    return status_of(starts[np.searchsorted(starts, rows * BLOCK, side="right") - 1] // BLOCK, rows)


def masks() -> dict[str, list[np.ndarray]]:
    rows = np.arange(BLOCKS)
    return {
        "causal": [status_of(0 * rows, rows)],
        "window of 4096": [status_of(np.maximum(rows - 32, 0), rows)],
        "prefix of a quarter": [status_of(0 * rows, np.maximum(rows, BLOCKS // 4))],
        "full": [status_of(0 * rows, 0 * rows + BLOCKS - 1)],
        "documents": [documents(seed) for seed in range(64)],
    }


def row_of(name: str, ranks: int, statuses: list[np.ndarray]) -> dict:
    found, times = [], []
    for status in statuses * (1 if len(statuses) > 1 else 9):
        start = time.perf_counter()
        layout = Layout(status, BLOCKS * BLOCK, BLOCKS * BLOCK, ranks)
        seconds = time.perf_counter() - start
        runs = max(1 + int((np.diff(part) > 1).sum()) for part in layout.q_blocks)
        found.append((layout.imbalance, runs, float(layout.remote_blocks.mean()) / BLOCKS))
        times.append(1e3 * seconds)
    worst = dict(zip(("imbalance", "runs", "sent"), (max(column) for column in zip(*found, strict=True)), strict=True))
    return {"mask": name, "ranks": ranks, **worst, "all_gather": 1 - 1 / ranks, "plan_ms": statistics.median(times)}


def picture(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (balance, sent) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in dict.fromkeys(row["mask"] for row in rows):
        mine = [row for row in rows if row["mask"] == name]
        balance.plot(RANKS, [row["imbalance"] for row in mine], marker="o", label=name)
        sent.plot(RANKS, [row["sent"] for row in mine], marker="o", label=name)
    sent.plot(RANKS, [1 - 1 / ranks for ranks in RANKS], color="black", linestyle=":", label="all-gather")
    for axes, title in ((balance, "largest over mean work"), (sent, "keys that a rank gets, of all")):
        axes.set(title=title, xlabel="ranks", xscale="log", xticks=RANKS, xticklabels=RANKS)
        axes.minorticks_off()
    sent.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/context_plans.json"))
    asked = parser.parse_args()
    rows = [row_of(name, ranks, statuses) for name, statuses in masks().items() for ranks in RANKS]
    for row in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    asked.out.write_text(json.dumps({"positions": BLOCKS * BLOCK, "rows": rows}, indent=1))
    picture(rows, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
