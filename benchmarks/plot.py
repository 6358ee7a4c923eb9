"""Draw the forward (or backward) TFLOP/s of a results file as grouped bars.  Needs matplotlib and no GPU.

python benchmarks/plot.py results.json out.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Known implementations from top to bottom within a group; one that is not listed comes last, in grey.
COLOURS = {
    "flexpress": "#d1495b",
    "flexpress_deterministic": "#e0a3ad",
    "torch_flex": "#30638e",
    "torch_flex_tma": "#6fa8dc",
    "cudnn": "#8a9a5b",
    "flash": "#c9b458",
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
    present = dict.fromkeys(impl for _, impl in values)
    impls = [impl for impl in COLOURS if impl in present] + [impl for impl in present if impl not in COLOURS]
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
    axes.set_xlabel(f"{'backward' if key.startswith('bwd') else 'forward'} TFLOP/s (unmasked pairs only)")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title(header), fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(impls), frameon=False)
    figure.savefig(out, dpi=150)


def title(header: dict[str, Any]) -> str:
    """Return the GPU and the versions, as far as they are known."""
    parts = [header.get("gpu") or "unknown GPU"]
    parts += [f"{name} {header[name]}" for name in ("flexpress", "torch", "triton") if header.get(name)]
    return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file that forward.py wrote")
    parser.add_argument("out", type=Path, help="picture to write; the ending says the format")
    parser.add_argument("--backward", action="store_true", help="draw the backward instead")
    args = parser.parse_args(argv)
    data = json.loads(args.results.read_text())
    draw(data["header"], data["rows"], args.out, "bwd_tflops" if args.backward else "fwd_tflops")
    return 0


if __name__ == "__main__":
    sys.exit(main())
