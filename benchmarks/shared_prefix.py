"""Decoding of sequences that share a prefix: with shared_prefix, beside the same call without.

    python benchmarks/shared_prefix.py --out results.json

bfloat16 in pages, 32 query heads, 8 key heads of 128, one new token a sequence. What is timed is a CUDA graph of several calls, each
with its own cache, as the layers of a model have; the tables of a step are made in it once. Each row: microseconds of a call without
sharing, with it as it comes ("shared"), and by force in either way: "few" by the kernel for few queries, "tiles" by the kernel for Hopper
that has tiles of the groups' queries; megabytes that need not be read again; how much faster than without. Where `usual` is true, less need
not be read again than pays. In flexpress/caches, LEAST_BYTES and QUERIES of shared_prefix.py are to be where a forced one begins to win,
LEAST_FILL of shared_attention.py where tiles do; `fill` is what it is compared with. --ways leaves some out. Outputs are compared with
those without. With --count also how many kernels a step of all layers launches.
"""

from __future__ import annotations

import torch
from common import arguments, captured, header, integers, replay_ms, write_results

from flexpress import PageAllocator, SharedPrefix, cached_attention, mods
from flexpress.caches import shared_attention, shared_prefix

WAYS = {"few": (0, 2.0), "tiles": (0, 0.0)}  # LEAST_BYTES and LEAST_FILL by which calls go so
SCORE_MODS = {"plain": lambda heads: None, "alibi": mods.alibi, "softcap": lambda heads: mods.softcap(30.0)}


class Step:
    """Sequences that share a prefix, their caches, and calls of a step of `layers` layers."""

    def __init__(self, prefix: int, sequences: int, own: int, score: str, asked, device: torch.device) -> None:
        size, heads = asked.page_size, (asked.heads, asked.kv_heads, asked.kv_heads)
        pages = -(-prefix // size) + sequences * (-(-own // size) + 1)
        pool = PageAllocator(pages + 1, size)
        first = pool.allocate(prefix)
        numbers = [pool.fork(first) for _ in range(sequences)]
        for number in numbers:
            pool.extend(number, own)
        shared = pool.shared_prefix(numbers, device)
        assert shared is not None, "nothing is shared: the prefix is shorter than a page"
        self.shared: SharedPrefix = shared
        self.table = pool.page_table(numbers, device=device)
        self.kv_len = torch.tensor([pool.length(n) for n in numbers], dtype=torch.int32, device=device)
        self.query = torch.randn(sequences, heads[0], 1, asked.head_dim, device=device, dtype=torch.bfloat16)
        shape = asked.layers, 2, pages + 1, size, heads[1], asked.head_dim
        self.caches = torch.randn(shape, device=device, dtype=torch.bfloat16).unbind()
        slopes = 2.0 ** -torch.linspace(1, 8, heads[0], device=device)
        self.score_mod = SCORE_MODS[score](slopes)
        self.saved = shared.tokens_saved * self.caches[0][:, 0, 0].nbytes

    def run(self, is_shared: bool) -> list[torch.Tensor]:
        """The output of each layer."""
        tables = self.shared.tables(self.kv_len, self.table, queries=1) if is_shared else None
        where = {"page_table": self.table, "score_mod": self.score_mod, "shared_prefix": tables, "check": False}
        return [cached_attention(self.query, k, v, self.kv_len, **where) for k, v in self.caches]


def row_of(step: Step, asked, capture=captured, time_ms=replay_ms) -> dict:
    """What is measured of a step."""
    found, errors, exact, usual = {}, [0.0], None, (shared_prefix.LEAST_BYTES, shared_attention.LEAST_FILL)
    for name in ("without", *asked.ways):
        shared_prefix.LEAST_BYTES, shared_attention.LEAST_FILL = WAYS.get(name, usual)
        try:
            made, replay = capture(lambda name=name: step.run(name != "without"))
            found[f"{name}_us"] = 1e3 * time_ms(replay, asked.rep) / asked.layers
            if asked.count:
                found[f"{name}_kernels"] = kernels_of(lambda name=name: step.run(name != "without"))
        finally:
            shared_prefix.LEAST_BYTES, shared_attention.LEAST_FILL = usual
        exact = made[-1].float() if exact is None else exact
        errors.append(float((made[-1].float() - exact).norm() / exact.norm()))
    assert max(errors) < 0.01, f"the outputs differ by {max(errors):.3f} of their size"
    speedups = {f"{name}_speedup": found["without_us"] / found[f"{name}_us"] for name in asked.ways}
    known = {"saved_mb": step.saved / 1e6, "usual": step.saved < usual[0], "fill": step.shared.fills(step.shared.batch_size)}
    return {**known, **found, **speedups, "error": max(errors)}


def kernels_of(run) -> int:
    """How many kernels a step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def main() -> None:
    parser = arguments(__doc__, "benchmarks/results/shared_prefix.json")
    for name, default in (("prefixes", [128, 512, 1024, 8192]), ("sequences", [8, 32, 128])):
        parser.add_argument(f"--{name}", type=integers, default=default)
    for name, default in (("own", 256), ("page-size", 64), ("layers", 4), ("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=["shared", *WAYS], default=["shared", *WAYS], help="beside without")
    parser.add_argument("--score-mods", nargs="+", choices=[*SCORE_MODS], default=[*SCORE_MODS], dest="score_mods")
    parser.add_argument("--count", action="store_true", help="kernels of a step, by torch's profiler")
    parser.add_argument("--rep", type=float, default=100.0, help="ms to measure each")
    asked, rows = parser.parse_args(), []
    for score in asked.score_mods:
        for sequences in asked.sequences:
            for prefix in asked.prefixes:
                torch.cuda.empty_cache()
                step = Step(prefix, sequences, asked.own, score, asked, torch.device("cuda"))
                rows.append({"score": score, "sequences": sequences, "prefix": prefix, "own": asked.own, **row_of(step, asked)})
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
                write_results(asked.out, header(asked.commit), rows)


if __name__ == "__main__":
    main()
