"""Time create_block_mask and measure its peak memory, for long sequences; and attention that makes its mask itself against a prepared one.

python benchmarks/block_mask.py --out block_mask.json
python benchmarks/block_mask.py --out mask_calls.json --lengths 16384 --impls flexpress --calls
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch
import torch._dynamo
from common import Row
from workloads import Mod, Workload, causal, documents, prefix, window

IMPLS = ("flexpress", "torch_compile")
LENGTHS = (16384, 131072, 1048576)
CALL_LENGTH, CALL_HEADS, CALL_HEAD_DIM = 16384, 16, 128
MASKS = (
    Workload("causal", "causal", mask=causal),
    Workload("window", "sliding window 1024", mask=window, size=1024),
    Workload("prefix", "prefix 1024", mask=prefix, size=1024),
    Workload("documents", "64 documents, causal", mask=documents, size=64),
)
CALLS = (*MASKS, Workload("documents_12", "12 documents, causal", mask=documents, size=12))
WALL_CALLS = 20


def create(impl: str) -> Callable[..., Any]:
    """Return the create_block_mask of `impl`."""
    if impl == "flexpress":
        import flexpress

        return flexpress.create_block_mask
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


def visited_blocks(mask: Any) -> int | None:
    """Return how many blocks of scores the attention will visit, or None if the mask does not say."""
    counts = [getattr(mask, name, None) for name in ("kv_num_blocks", "full_kv_num_blocks")]
    return sum(int(count.sum()) for count in counts if count is not None) if counts[0] is not None else None


def measure(impl: str, mask_mod: Mod, length: int, rep: float) -> Row:
    """Return the figures for one mask: see the table in README.md."""
    create_block_mask = create(impl)

    def make() -> Any:
        return create_block_mask(mask_mod, None, None, length, length, device="cuda")

    start = time.perf_counter()
    mask = make()
    common.synchronize()
    row: Row = {"first_s": time.perf_counter() - start, "blocks": visited_blocks(mask)}
    del mask
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    make()
    common.synchronize()
    row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    walls = []
    for _ in range(WALL_CALLS):
        start = time.perf_counter()
        make()
        common.synchronize()
        walls.append(time.perf_counter() - start)
    row["wall_ms"] = statistics.median(walls) * 1e3
    row["ms"] = common.time_ms(make, rep)
    return row


def measure_call(way: str, mask_mod: Mod, rep: float) -> Row:
    """Return times of flex_attention with block_mask= prepared before, or with mask_mod=: forward and backward, bfloat16."""
    import flexpress

    length = CALL_LENGTH
    q, k, v, d_out = (
        torch.randn(1, CALL_HEADS, length, CALL_HEAD_DIM, device="cuda", dtype=torch.bfloat16).requires_grad_(i < 3) for i in range(4)
    )
    mask = flexpress.create_block_mask(mask_mod, None, None, length, length, device="cuda")
    masked = {"mask_mod": mask_mod} if way == "mask_mod" else {"block_mask": mask}

    def forward() -> torch.Tensor:
        return flexpress.flex_attention(q, k, v, **masked)

    out = forward()
    expected = flexpress.flex_attention(q, k, v, block_mask=mask)
    with torch.no_grad():
        fwd_ms = common.time_ms(forward, rep)
    bwd_ms = common.time_ms(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True), rep)
    return {"fwd_ms": fwd_ms, "bwd_ms": bwd_ms, "rel_err": float(((out - expected).norm() / expected.norm()).detach())}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = common.arguments(__doc__, "block_mask.json")
    masks = [row.name for row in MASKS]
    lengths = [str(length) for length in LENGTHS]
    parser.add_argument("--cases", type=common.names(masks), default=masks, help="comma-separated (default: all)")
    parser.add_argument("--impls", type=common.names(IMPLS), default=list(IMPLS), help="comma-separated (default: all)")
    parser.add_argument("--lengths", type=common.names(lengths), default=lengths, help="comma-separated (default: all)")
    parser.add_argument("--rep", type=float, default=50.0, help="ms of runs per measurement (default: %(default)g)")
    parser.add_argument("--calls", action="store_true", help="time attention with mask_mod= too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    head = common.header(args.commit)
    rows: list[Row] = []
    for case in MASKS:
        for length in map(int, args.lengths):
            for impl in args.impls:
                if case.name not in args.cases:
                    continue
                row: Row = {"case": case.name, "impl": impl, "length": length, "ms": None, "peak_mib": None}
                rows.append(row)
                torch._dynamo.reset()
                torch.cuda.empty_cache()
                try:
                    row |= measure(impl, dataclasses.replace(case, length=length).make_mods("cuda")[1], length, args.rep)
                except Exception as error:
                    row["error"] = common.first_line(error)
                common.write_results(args.out, head, rows)
    calls: list[Row] = []
    for case in CALLS:
        for way in ("block_mask", "mask_mod", "block_mask", "mask_mod"):  # twice, for the scatter
            if case.name.partition("_")[0] in args.cases and args.calls:
                mask_mod = dataclasses.replace(case, length=CALL_LENGTH).make_mods("cuda")[1]
                calls.append({"case": case.name, "impl": way, "length": CALL_LENGTH} | measure_call(way, mask_mod, args.rep))
    common.write_results(args.out, head, rows + calls)
    for keys, shown in (
        (("case", "impl", "length", "ms", "wall_ms", "peak_mib", "first_s", "blocks", "error"), rows),
        (("case", "impl", "length", "fwd_ms", "bwd_ms", "rel_err"), calls),
    ):
        print(common.table(keys, [[row.get(key) for key in keys] for row in shown]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
