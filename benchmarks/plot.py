"""Draw the forward (or backward) TFLOP/s of a results file: bars, or curves if scale.py wrote it.  Needs matplotlib and no GPU.

python benchmarks/plot.py results.json out.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Known implementations from top to bottom within a group; one that is not listed comes last, in grey.
COLOURS = {
    "flexpress": "#d1495b",
    "flexpress_deterministic": "#e0a3ad",
    "flexpress_varlen": "#8c2f39",
    "fa4": "#2a9d8f",
    "torch_flex": "#30638e",
    "torch_flex_tma": "#6fa8dc",
    "cudnn": "#8a9a5b",
    "flash": "#c9b458",
    "sdpa": "#6d597a",
    "manual": "#b8b8b8",
}
BAR = 0.2  # inches


def draw(header: dict[str, Any], rows: Sequence[dict[str, Any]], out: Path, key: str = "fwd_tflops") -> None:
    """Write the chart of `rows[...][key]` to `out`; a row without a value has no bar.

    Raises ValueError when no row has a value.
    """
    values = {(row["case"], row["impl"]): row[key] for row in rows if row.get(key) is not None}
    if key.startswith("fwd"):  # the same kernels as without
        values = {(case, impl): value for (case, impl), value in values.items() if impl != "flexpress_deterministic"}
    if not values:
        raise ValueError(f"no row has {key}")
    impls = in_order(impl for _, impl in values)
    bars: dict[str, list[tuple[float, float]]] = {impl: [] for impl in impls}  # (place from the top, value)
    ticks: dict[str, float] = {}
    top = 0.0
    for case in dict.fromkeys(case for case, _ in values):
        group = [impl for impl in impls if (case, impl) in values]
        for place, impl in enumerate(group):
            bars[impl].append((top + place, values[case, impl]))
        ticks[case] = top + (len(group) - 1) / 2
        top += len(group) + 1
    figure = Figure(figsize=(10, 1.6 + BAR * top), layout="constrained")
    axes = figure.subplots()
    for impl, group in bars.items():
        places, widths = zip(*group, strict=True)
        drawn = axes.barh(places, widths, height=0.9, label=impl, color=COLOURS.get(impl, "#999999"))
        axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=7)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.set_ylim(top - 1, -1)
    axes.margins(x=0.06)
    axes.set_xlabel(label(key))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title(header), fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(impls), frameon=False)
    figure.savefig(out, dpi=150)


def draw_curves(header: dict[str, Any], rows: Sequence[dict[str, Any]], out: Path, key: str = "fwd_tflops") -> None:
    """Write a chart for every `part` of the rows to `out`: `rows[...][key]` over their `x`; a row without a value has no point.

    Raises ValueError when no row has a value.
    """
    found = [row for row in rows if row.get(key) is not None]
    if not found:
        raise ValueError(f"no row has {key}")
    parts = list(dict.fromkeys(row["part"] for row in found))
    columns = min(3, len(parts))
    lines = -(-len(parts) // columns)
    figure = Figure(figsize=(1 + 4 * columns, 1.2 + 2.8 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    impls = in_order(row["impl"] for row in found)
    for axes, part in zip(grid, parts, strict=False):
        for impl in impls:
            curve = sorted((row["x"], row[key]) for row in found if (row["part"], row["impl"]) == (part, impl))
            axes.plot([x for x, _ in curve], [y for _, y in curve], marker="o", markersize=3, color=COLOURS.get(impl, "#999999"))
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_title(part, fontsize=10)
    for axes in grid[len(parts) :]:
        axes.set_visible(False)
    handles = [Line2D([], [], marker="o", markersize=3, color=COLOURS.get(impl, "#999999"), label=impl) for impl in impls]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(impls), frameon=False)
    figure.supylabel(label(key), fontsize=10)
    figure.suptitle(title(header), fontsize=10)
    figure.savefig(out, dpi=150)


def in_order(found: Iterable[str]) -> list[str]:
    """Return the implementations that are there, in the order of COLOURS."""
    present = dict.fromkeys(found)
    return [impl for impl in COLOURS if impl in present] + [impl for impl in present if impl not in COLOURS]


def label(key: str) -> str:
    """Return what an axis says of a key such as "fwd_tflops"."""
    return f"{'backward' if key.startswith('bwd') else 'forward'} TFLOP/s (unmasked pairs only)"


def title(header: dict[str, Any]) -> str:
    """Return the GPU and the versions, as far as they are known."""
    parts = [header.get("gpu") or "unknown GPU"]
    parts += [f"{name} {header[name]}" for name in ("flexpress", "torch", "triton", "fa4") if header.get(name)]
    return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file that forward.py or scale.py wrote")
    parser.add_argument("out", type=Path, help="picture to write; the ending says the format")
    parser.add_argument("--backward", action="store_true", help="draw the backward instead")
    args = parser.parse_args(argv)
    data = json.loads(args.results.read_text())
    chart = draw_curves if any("part" in row for row in data["rows"]) else draw
    chart(data["header"], data["rows"], args.out, "bwd_tflops" if args.backward else "fwd_tflops")
    return 0


if __name__ == "__main__":
    sys.exit(main())
