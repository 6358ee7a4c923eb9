"""Measure what a user waits for besides the kernels: first calls, host time per call, and new lengths.

    python benchmarks/latency.py --out latency.json

Every measurement runs in a process of its own, with torch and triton imported and the GPU initialised before
the clock starts.

first_call  the block mask and the first forward, with empty disk caches, then in a second process with those
            filled
host_time   median time that a call keeps the host busy, over 200 calls of a tiny problem without waiting for
            the GPU; median and lowest of 20 rounds, as other work on the host lasts longer than a round
beside_sdpa host_time of calls that take turns in one process, with scaled_dot_product_attention(is_causal=True) among them: calls, calls
            with their backward pass, and create_block_mask for 8192 positions; only with the impl flexpress, whatever the case
lengths     the block mask and the forward for one length after another in the same process, and what each
            compiled
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from common import Row

IMPLS = ("flexpress", "torch_flex")
MEASURES = ("first_call", "host_time", "beside_sdpa", "lengths")
CASES = ("causal_d128", "alibi_causal_d128", "softcap_causal_d128", "relative_bias_d128", "documents_16k")
LENGTHS = (1024, 1536, 2048, 1111)
CACHES = {"FLEXPRESS_CACHE_DIR": "flexpress", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
UNSEEN = "prefix_d128"  # the case whose mods the caches of `first_call` have not seen
CALLS = 200
ROUNDS = 20
REST = 0.05  # seconds between rounds


def entry_points(impl: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return (create_block_mask, flex_attention) as a user of `impl` writes them."""
    if impl == "flexpress":
        import flexpress

        return flexpress.create_block_mask, flexpress.flex_attention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(create_block_mask), torch.compile(flex_attention)


@contextlib.contextmanager
def clock(row: Row, key: str) -> Iterator[None]:
    """Store in `row[key]` the seconds until the device has finished what the block started."""
    common.synchronize()
    start = time.perf_counter()
    yield
    common.synchronize()
    row[key] = time.perf_counter() - start


def compiled_kernels() -> int:
    """Return how many compiled Triton kernels this measurement's caches hold."""
    return sum(1 for variable in CACHES for _ in Path(os.environ[variable]).rglob("*.cubin"))


def import_time(impl: str) -> float | None:
    """Return the seconds that importing flexpress takes after torch and triton (None for torch)."""
    import triton  # noqa: F401

    torch.zeros(1, device="cuda")
    row: Row = {}
    with clock(row, "import_s"):
        entry_points(impl)
    return row["import_s"] if impl == "flexpress" else None


def first_call(impl: str, case: str) -> list[Row]:
    """Time the first block mask and the first forward of this process."""
    row: Row = {"import_s": import_time(impl), "mask_s": None}
    from workloads import BY_NAME

    work = BY_NAME[case]
    score_mod, mask_mod = work.make_mods("cuda")[:2]
    q, k, v, _ = work.inputs("cuda")
    create_block_mask, flex_attention = entry_points(impl)
    mask = None
    if mask_mod:
        with clock(row, "mask_s"):
            mask = create_block_mask(mask_mod, None, None, work.length, work.length, "cuda")
    with clock(row, "forward_s"):
        flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=work.gqa)
    return [row]


def host_time(impl: str, case: str) -> list[Row]:
    """Time calls of one head of 256 positions: the GPU is never the one waited for."""
    from workloads import BY_NAME

    work = dataclasses.replace(BY_NAME[case], batch=1, heads=1, kv_heads=1, length=256)
    score_mod, mask_mod = work.make_mods("cuda")[:2]
    q, k, v, _ = work.inputs("cuda")
    create_block_mask, flex_attention = entry_points(impl)
    mask = create_block_mask(mask_mod, None, None, work.length, work.length, "cuda") if mask_mod else None
    for _ in range(10):
        flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)
    common.synchronize()
    rounds = []
    for _ in range(ROUNDS):
        time.sleep(REST)
        rounds.append(common.host_us(lambda: flex_attention(q, k, v, score_mod=score_mod, block_mask=mask), CALLS))
    return [{"host_us": statistics.median(rounds), "host_us_lowest": min(rounds)}]


def beside_sdpa(impl: str, case: str) -> list[Row]:
    """Time calls of one head of 256 positions in turns; `to_sdpa` is the ratio to scaled_dot_product_attention's time."""
    from torch.nn.functional import scaled_dot_product_attention
    from workloads import document_ids

    from flexpress import create_block_mask, flex_attention, mods

    q, k, v = (torch.randn(1, 1, 256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weights = torch.randn_like(q)
    learned = [t.clone().requires_grad_() for t in (q, k, v)]
    mask, alibi = create_block_mask(mods.causal, None, None, 256, 256, "cuda"), mods.alibi(mods.alibi_slopes(1, "cuda"))
    document = mods.document(document_ids(8192, 12, "cuda"), mask_mod=mods.causal)

    def with_gradients(attention: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(*learned), learned, weights)

    def sdpa(*tensors: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=True)

    def causal(*tensors: torch.Tensor) -> torch.Tensor:
        return flex_attention(*tensors, block_mask=mask)

    def alibi_causal(*tensors: torch.Tensor) -> torch.Tensor:
        return flex_attention(*tensors, score_mod=alibi, block_mask=mask)

    calls = {
        "sdpa": lambda: sdpa(q, k, v),
        "causal": lambda: causal(q, k, v),
        "alibi_causal": lambda: alibi_causal(q, k, v),
        "sdpa, gradients": with_gradients(sdpa),
        "causal, gradients": with_gradients(causal),
        "alibi_causal, gradients": with_gradients(alibi_causal),
        "create_block_mask, causal": lambda: create_block_mask(mods.causal, None, None, 8192, 8192, "cuda"),
        "create_block_mask, documents": lambda: create_block_mask(document, None, None, 8192, 8192, "cuda"),
    }
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            time.sleep(REST / 5)
            took = common.host_us(call, CALLS // 2)
            if turn:  # what was compiled and allocated first does not count
                rounds[name].append(took)
    found = {name: statistics.median(times) for name, times in rounds.items()}
    rows = []
    for name, us in found.items():
        peer = None if "mask" in name else found["sdpa, gradients" if "gradients" in name else "sdpa"]
        rows.append({"call": name, "host_us": us, "host_us_lowest": min(rounds[name]), "to_sdpa": common.ratio(us, peer)})
    return rows


def lengths(impl: str, case: str) -> list[Row]:
    """Time the first use of each length of `LENGTHS`, and count the kernels compiled for it."""
    from workloads import BY_NAME

    rows = []
    create_block_mask, flex_attention = entry_points(impl)
    for length in LENGTHS:
        work = dataclasses.replace(BY_NAME[case], batch=1, length=length)
        score_mod, mask_mod = work.make_mods("cuda")[:2]
        q, k, v, _ = work.inputs("cuda")
        row: Row = {"length": length, "mask_s": None}
        before = compiled_kernels()
        mask = None
        if mask_mod:
            with clock(row, "mask_s"):
                mask = create_block_mask(mask_mod, None, None, length, length, "cuda")
        with clock(row, "forward_s"):
            flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=work.gqa)
        row["kernels"] = compiled_kernels() - before
        rows.append(row)
    return rows


def in_process(measure: str, impl: str, case: str, caches: Path, limit: float) -> list[Row]:
    """Run one measurement in a new process with its disk caches under `caches`, which they create themselves.

    A failure is a row with an `error`.
    """
    about: Row = {"measure": measure, "impl": impl, "case": case}
    environment = os.environ | {variable: str(caches / folder) for variable, folder in CACHES.items()}
    command = [sys.executable, __file__, "--child", measure, impl, case]
    return [about | row for row in common.rows_of(command, environment, limit)]


def measure_all(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows of one measurement after another."""
    for measure in args.measures:
        for case in args.cases:
            for impl in args.impls:
                if measure == "beside_sdpa" and (impl, case) != ("flexpress", args.cases[0]):
                    continue
                with tempfile.TemporaryDirectory(prefix="latency-") as folder:
                    if measure != "first_call":
                        yield in_process(measure, impl, case, Path(folder), args.limit)
                        continue
                    # empty caches; filled ones; and filled ones that have never seen these mods
                    for cache, which in (("empty", case), ("filled", case), ("other mods", UNSEEN)):
                        rows = in_process(measure, impl, which, Path(folder), args.limit)
                        yield [row | {"cache": cache} for row in rows]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = common.arguments(__doc__, "latency.json")
    parser.add_argument("--measures", type=common.names(MEASURES), default=list(MEASURES), help="comma-separated (default: all)")
    parser.add_argument(
        "--cases",
        type=common.names(CASES),
        default=["alibi_causal_d128"],
        help=f"comma-separated, of {', '.join(CASES)} (default: alibi_causal_d128)",
    )
    parser.add_argument("--impls", type=common.names(IMPLS), default=list(IMPLS), help="comma-separated (default: all)")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds per process (default: %(default)g)")
    parser.add_argument("--child", nargs=3, metavar=("MEASURE", "IMPL", "CASE"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        measure, impl, case = args.child
        print(
            json.dumps(
                {"first_call": first_call, "host_time": host_time, "beside_sdpa": beside_sdpa, "lengths": lengths}[measure](impl, case)
            )
        )
        return 0
    head = common.header(args.commit)
    rows: list[Row] = []
    for more in measure_all(args):
        rows += more
        common.write_results(args.out, head, rows)
    keys = (
        "measure",
        "case",
        "impl",
        "cache",
        "length",
        "import_s",
        "mask_s",
        "forward_s",
        "kernels",
        "host_us",
        "host_us_lowest",
        "call",
        "to_sdpa",
        "error",
    )
    print(common.table(keys, [[row.get(key) for key in keys] for row in rows]))
    return int(any(row.get("error") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
