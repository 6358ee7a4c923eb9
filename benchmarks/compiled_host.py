"""How long a call inside of what torch.compile compiled keeps the host busy: flexpress beside torch's flex_attention.

    python benchmarks/compiled_host.py --out compiled_host.json

A graph (fullgraph=True) has nothing but calls of attention, each on the output of the one before. They are so small that the GPU waits
for the host. No CUDA graphs: a model that runs in one waits for no host. `us` is for one call: what a graph of 2 * CALLS takes more than
one of CALLS, by CALLS, as the median of rounds; `us_lowest` is that of the lowest times, as other work on the host lasts longer than a
round. Implementations take turns. Each output is compared with flexpress's in eager mode.

plain, causal, alibi_causal   one mask for all calls, 256 positions
cut                           causal with 200 positions: Q_LEN cuts the last block
decode                        one query of 256 keys at a position that is a tensor: mask[:, :, position // 128] with a mask_mod of its own
learned                       causal, forward and backward: the time of both for one call
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from common import Row, arguments, header, host_us, names, ratio, table, write_results
from torch.nn.attention import flex_attention as torchs

import flexpress

CASES = "plain", "causal", "alibi_causal", "cut", "decode", "learned"
CALLS, TIMES, ROUNDS = 4, 50, 20


def problem(case: str, library, device: str = "cuda") -> Callable[[int], Callable[[], torch.Tensor]]:
    """calls -> what runs so many in one graph, and returns the last output (learned: the gradient of the first query)."""
    length = 200 if case == "cut" else 256
    made = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 4, length, 64, device=device, dtype=torch.bfloat16, generator=made) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    mask = library.create_block_mask(lambda b, h, m, n: m >= n, None, None, length, length, device=device)

    def alibi(score, b, h, m, n):
        return score + slopes[h] * (n - m)

    def attend(q, position):
        if case != "decode":
            return library.flex_attention(q, k, v, alibi if case == "alibi_causal" else None, None if case == "plain" else mask)
        row = mask[:, :, position // 128]
        row.mask_mod, row.seq_lengths = lambda b, h, m, n: m + position[0] >= n, (1, length)
        return library.flex_attention(q, k, v, block_mask=row)

    def chain(calls: int, q, position):
        for _ in range(calls):
            q = attend(q, position)
        return q

    def of(calls: int) -> Callable[[], torch.Tensor]:
        run = torch.compile(lambda q, position: chain(calls, q, position), fullgraph=True, dynamic=False)
        given, position = q, torch.tensor([150], device=device)
        if case == "decode":
            given = q[:, :, :1].contiguous()
        if case != "learned":
            return lambda: run(given, position)
        learned, d_out = q.clone().requires_grad_(), torch.ones_like(q)
        return lambda: torch.autograd.grad(run(learned, position), learned, d_out)[0]

    return of


def eager(case: str) -> torch.Tensor:
    """What CALLS calls give in eager mode."""
    with torch.compiler.set_stance("force_eager"):
        return problem(case, flexpress)(CALLS)()


def measure(case: str) -> list[Row]:
    """A row for each implementation."""
    libraries = {"flexpress": flexpress, "torch": torchs}
    torch.compiler.reset()
    runs, rows, expected = {}, {}, eager(case).float()
    for name, library in libraries.items():
        runs[name] = [problem(case, library)(calls) for calls in (CALLS, 2 * CALLS)]
        found = runs[name][0]().float()
        for run in runs[name]:
            run()
        rows[name] = {"case": case, "implementation": name, "rel_diff": ((found - expected).norm() / expected.norm()).item()}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            short, long = (host_us(run, TIMES) for run in runs[name])
            rounds[name].append((short, long))
    for name, row in rows.items():
        short, long = map(min, zip(*rounds[name], strict=True))
        row |= {"us": statistics.median([b - a for a, b in rounds[name]]) / CALLS, "us_lowest": (long - short) / CALLS}
    for row in rows.values():
        row |= {"to_torch": ratio(row["us"], rows["torch"]["us"])}
    return list(rows.values())


def main() -> int:
    parser = arguments(__doc__, "compiled_host.json")
    parser.add_argument("--cases", type=names(CASES), default=list(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    asked = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64
    rows: list[Row] = []
    for case in asked.cases:
        rows += measure(case)
        write_results(asked.out, header(asked.commit), rows)
    keys = "case", "implementation", "us", "us_lowest", "to_torch", "rel_diff"
    print(table(keys, [[row[key] for key in keys] for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
