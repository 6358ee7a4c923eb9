"""What sinks, dropout, derivatives, long dot products and statistics cost, beside what a user would do without them.

    python benchmarks/features.py --out features.json
    python benchmarks/features.py --out features.json --cases sinks_causal,jvp_causal

A case is one attention problem in bfloat16, done by several ways that take turns, three rounds each. The first way is the call
without the feature, and "cost" is a time over that of the first. Before anything is timed the outputs are compared: `diff` is the
relative difference to the way that `same` names, which computes the same thing, and `grad_diff` the largest of the gradients. Where no
other way does (dropout), one head of one sequence is compared with dense float64. feature_cases.py has the cases.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import common
import torch
import torch._functorch.config
from feature_cases import CASES, Case, Way, difference

ROUNDS = 3


def measure(name: str, rep: float) -> list[common.Row]:
    """A row for every way of the case."""
    torch.manual_seed(0)
    case = CASES[name]()
    rows = {way: {"case": name, "way": way, "fwd_rounds": [], "bwd_rounds": []} for way in case.ways}
    outs: dict[str, tuple[torch.Tensor, ...]] = {}
    for way, row in rows.items():
        try:
            out = case.ways[way].run()[0]
            found = (out.detach(), *(torch.autograd.grad(out, case.leaves, torch.ones_like(out)) if case.leaves else ()))
            if way == "feature" and case.answer:
                row["diff"] = case.answer(found)
            elif case.ways[way].same in outs:
                row["diff"], *others = map(difference, found, outs[case.ways[way].same])
                row["grad_diff"] = max(others, default=None)
            if not max(row.get("diff", 0.0), row.get("grad_diff") or 0.0) < case.limit:
                raise ValueError(f"another result: {row['diff']:.3g}, gradients {row.get('grad_diff')}")
        except Exception as error:
            row["error"] = common.first_line(error)
            continue
        outs[way] = found
    outs.clear()
    running = [way for way in rows if "error" not in rows[way]]
    for turn in range(ROUNDS):
        for way in running[:: 1 if turn % 2 else -1]:
            timed(rows[way], case, case.ways[way], rep)
    for direction in ("fwd", "bwd"):
        first = common.median(rows["plain"][f"{direction}_rounds"])
        for row in rows.values():
            row[f"{direction}_ms"] = common.median(row[f"{direction}_rounds"])
            row[f"{direction}_cost"] = common.ratio(row[f"{direction}_ms"], first)
    return list(rows.values())


def timed(row: common.Row, case: Case, way: Way, rep: float) -> None:
    """Add a round."""
    row["fwd_rounds"].append(common.time_ms(way.run, rep))
    if not case.leaves:
        return
    out = way.run()[0]
    weights = torch.ones_like(out)
    row["bwd_rounds"].append(common.time_ms(lambda: torch.autograd.grad(out, case.leaves, weights, retain_graph=True), rep))


def summary(rows: Sequence[common.Row]) -> str:
    columns = ("fwd_ms", "fwd_cost", "bwd_ms", "bwd_cost", "diff", "grad_diff")
    return common.table(
        ["case", "way", *columns, "error"],
        [[row["case"], row["way"], *(row.get(column) for column in columns), row.get("error", "")] for row in rows],
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.arguments(__doc__, "benchmarks/results/features.json")
    parser.add_argument("--cases", type=common.names(list(CASES)), default=list(CASES), help="comma-separated (default: all)")
    parser.add_argument("--rep", type=float, default=60.0, help="milliseconds a round (default: %(default)s)")
    asked = parser.parse_args(sys.argv[1:] if argv is None else argv)
    torch._functorch.config.donated_buffer = False  # or a compiled backward could not be run twice
    torch._dynamo.config.cache_size_limit = 64
    rows: list[common.Row] = []
    for name in asked.cases:
        rows += measure(name, asked.rep)
        common.write_results(asked.out, common.header(asked.commit), rows)
        torch.cuda.empty_cache()
    print(summary(rows))


if __name__ == "__main__":
    main()
