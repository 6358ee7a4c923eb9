"""float8 beside bfloat16 and other libraries: speed, and the error against float64 of what the tensors stand for.

    python benchmarks/float8.py --out float8.json
    python benchmarks/float8.py --cases causal_4k --tiles        # every tile of the portable kernel: what tables of tiles are made of

A case is one forward pass of 16 heads. q, k and v are normal numbers, of which float8 has a scale for each head; the bfloat16 ways get what
they stand for, rounded. Ways take turns, three rounds each. Errors are ||out - exact|| / ||exact|| of some heads.

    float8          flexpress, q, k and v in e4m3
    float8_by_keys  the same, of V that lies by keys, which is not copied
    widened         the same after q.to(bfloat16) and so on, by flexpress, conversions included; without scales
    bfloat16        flexpress
    fa3             flash_attn_interface (FlashAttention-3), q, k and v in e4m3, if it is installed
    cudnn           torch's scaled_dot_product_attention by cuDNN, bfloat16
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import common
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexpress import flex_attention
from flexpress.codegen.run.values_by_keys import by_keys
from flexpress.mods import causal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there tests run it, with small shapes
ROUNDS = 3
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A batch of heads of one length."""

    batch: int
    length: int
    head_dim: int
    causal: bool
    heads: int = 16
    head_dim_v: int = 0  # if it is another

    @property
    def head_dims(self) -> tuple[int, int, int]:
        """Of q, k and v."""
        return self.head_dim, self.head_dim, self.head_dim_v or self.head_dim

    @property
    def flops(self) -> float:
        """Of both products, of visible pairs."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 2 * self.batch * self.heads * pairs * sum(self.head_dims[1:])


CASES = {
    f"{'causal' if is_causal else 'full'}_{'4k' if length == 4096 else '16k'}{'' if head_dim == 128 else f'_d{head_dim}'}": Case(
        batch, length, head_dim, is_causal
    )
    for head_dim in (128, 64, 256)
    for is_causal in (False, True)
    for length, batch in ((4096, 4), (16384, 1))
    if head_dim == 128 or length == 4096
} | {
    f"{'causal' if is_causal else 'full'}_4k_mla": Case(4, 4096, 192, is_causal, head_dim_v=128)  # of DeepSeek's prefill
    for is_causal in (False, True)
}


def quantised(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k and v in float8, and their scales (batch, heads)."""
    tensors, scales = [], []
    for head_dim in case.head_dims:
        t = torch.randn(case.batch, case.heads, case.length, head_dim, device=DEVICE)
        scale = t.abs().amax((2, 3)) / 448
        tensors.append((t / scale[..., None, None]).to(FLOAT8))
        scales.append(scale)
    return tensors, scales


def ways_of(case: Case) -> tuple[dict[str, Callable[[], torch.Tensor]], list[torch.Tensor]]:
    """Ways by name, and q, k and v as they are meant."""
    tensors, scales = quantised(case)
    meant = [(t.float() * s[..., None, None]).bfloat16() for t, s in zip(tensors, scales, strict=True)]
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    mask_mod = causal if case.causal else None
    turned = by_keys(tensors[2])

    def fa3() -> torch.Tensor:
        from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]  # which nobody must have

        found = flash_attn_func(
            *(t.transpose(1, 2) for t in tensors), causal=case.causal, **{f"{name[0]}_descale": scale for name, scale in named.items()}
        )
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*meant, is_causal=case.causal)

    return {
        "float8": lambda: flex_attention(*tensors, mask_mod=mask_mod, **named),
        "float8_by_keys": lambda: flex_attention(*tensors[:2], turned, mask_mod=mask_mod, **named),
        "widened": lambda: flex_attention(*(t.to(torch.bfloat16) for t in tensors), mask_mod=mask_mod),
        "bfloat16": lambda: flex_attention(*meant, mask_mod=mask_mod),
        "fa3": fa3,
        "cudnn": cudnn,
    }, [t.double() * s[..., None, None] for t, s in zip((t[:, :2] for t in tensors), (s[:, :2] for s in scales), strict=True)]


def exact_of(meant: Sequence[torch.Tensor], case: Case, rows: int = 512) -> torch.Tensor:
    """The last `rows` queries of one batch entry in float64."""
    q, k, v = (t[:1] for t in meant)
    scores = q[:, :, -rows:] @ k.mT * case.head_dim**-0.5
    if case.causal:
        first = max(case.length - rows, 0)
        places = torch.arange(case.length, device=DEVICE)
        scores = scores.masked_fill(places[first:, None] < places, float("-inf"))
    return scores.softmax(-1) @ v


def measure(name: str, rep: float) -> list[common.Row]:
    """A row for every way of the case."""
    torch.manual_seed(0)
    case = CASES[name]
    ways, meant = ways_of(case)
    exact = exact_of(meant, case)
    rows: dict[str, common.Row] = {way: {"case": name, "way": way, "rounds": []} for way in ways}
    for way, row in rows.items():
        try:
            out = ways[way]()
            if way != "widened":  # which has no scales
                row["error"] = float((out[:1, :2, -exact.shape[2] :].double() - exact).norm() / exact.norm())
        except Exception as why:
            row["failed"] = common.first_line(why)
    running = [way for way in rows if "failed" not in rows[way]]
    for turn in range(ROUNDS):
        for way in running[:: 1 if turn % 2 else -1]:
            rows[way]["rounds"].append(common.time_ms(ways[way], rep))
    for row in rows.values():
        row["ms"] = common.median(row["rounds"])
        row["tflops"] = common.tflops(case.flops, row["ms"]) if row["ms"] else None
    return list(rows.values())


def tiles(name: str, rep: float) -> list[common.Row]:
    """The same for tiles of the portable kernel."""
    torch.manual_seed(0)
    case, rows = CASES[name], []
    tensors, scales = quantised(case)
    tensors[2] = by_keys(tensors[2])
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    for m, n, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4)):
        row: common.Row = {"case": name, "way": f"{m} x {n}, {warps} warps, {stages} stages", "rounds": []}
        options = {"BACKEND": "PORTABLE", "BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        try:
            run = lambda: flex_attention(*tensors, mask_mod=causal if case.causal else None, kernel_options=options, **named)  # noqa: B023
            run()
            row["ms"] = common.time_ms(run, rep)
            row["tflops"] = common.tflops(case.flops, row["ms"])
        except Exception as why:
            row["failed"] = common.first_line(why)
        rows.append(row)
    return rows


def summary(rows: Sequence[common.Row]) -> str:
    """A table for people."""
    return common.table(
        ["case", "way", "ms", "tflops", "error", "failed"],
        [[row["case"], row["way"], row.get("ms"), row.get("tflops"), row.get("error"), row.get("failed", "")] for row in rows],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = common.arguments(__doc__, "benchmarks/results/float8.json")
    parser.add_argument("--cases", type=common.names(list(CASES)), default=list(CASES), help="comma-separated (default: all)")
    parser.add_argument("--rep", type=float, default=60.0, help="milliseconds a round (default: %(default)s)")
    parser.add_argument("--tiles", action="store_true", help="tiles of the portable kernel instead of ways")
    asked = parser.parse_args(sys.argv[1:] if argv is None else argv)
    rows: list[common.Row] = []
    for name in asked.cases:
        rows += (tiles if asked.tiles else measure)(name, asked.rep)
        common.write_results(asked.out, common.header(asked.commit), rows)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(summary(rows))


if __name__ == "__main__":
    main()
