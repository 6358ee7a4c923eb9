"""Decoding with absorbed latent attention (MLA): many query heads over one key/value head, of whose columns the values are the first.

    python benchmarks/latent.py --out results.json
    python benchmarks/latent.py --out results.json --head-dims 512,512 --kv-heads 8 --heads 16      # Gemma's global layers

bfloat16 in pages of 64, D_QK 576 and D_V 512 (DeepSeek-AI 2024, arXiv 2405.04434). What is timed is a CUDA graph of a few calls, each with
its own cache. Each row: microseconds of a call, TB/s of the keys and their share of a device copy's, TFLOP/s and their share of a square
product's of 8192, and the error of the graph's outputs against float64, for the first and the last sequence. `portable`: the same without
the kernel for Hopper.
"""

from __future__ import annotations

import common
import torch
from common import arguments, captured, header, integers, replay_ms, write_results
from shared_prefix import SCORE_MODS

from flexpress import PageAllocator, cached_attention, mods
from flexpress.codegen import registry
from flexpress.codegen.run import decode_kernels

BYTES = 4 << 30  # of caches at least: far more than fits into L2
SCALE = 192**-0.5
NO_KERNEL_FOR_HOPPER = "the benchmark asks for the portable kernel"


class Step:
    """Sequences of one length and calls of a step of a few layers."""

    def __init__(self, sequences: int, length: int, heads: int, queries: int, score: str, asked, device: torch.device) -> None:
        (d_qk, self.d_v), size = asked.head_dims, asked.page_size
        pool = PageAllocator(sequences * -(-length // size), size)
        numbers = [pool.allocate(length) for _ in range(sequences)]
        pages = pool.page_table(numbers, device=device)
        self.table = torch.randperm(pages.numel(), device=device).to(torch.int32)[pages.long()]  # anywhere
        self.kv_len = torch.full((sequences,), length, dtype=torch.int32, device=device)
        self.query = torch.randn(sequences, heads, queries, d_qk, device=device, dtype=torch.bfloat16)
        self.bytes = sequences * length * asked.kv_heads * d_qk * 2
        self.calls = min(8, max(2, -(-BYTES // self.bytes)))
        shape = self.calls, pages.numel(), size, asked.kv_heads, d_qk
        self.caches = torch.randn(shape, device=device, dtype=torch.bfloat16).unbind()
        self.flops = 2 * sequences * heads * queries * length * (d_qk + self.d_v)
        self.score_mod = SCORE_MODS[score](2.0 ** -torch.linspace(1, 8, heads, device=device))
        self.mask_mod = None if queries == 1 else mods.causal

    def run(self) -> list[torch.Tensor]:
        """The output of each layer."""
        where = {"page_table": self.table, "score_mod": self.score_mod, "mask_mod": self.mask_mod, "scale": SCALE, "check": False}
        return [cached_attention(self.query, k, k[..., : self.d_v], self.kv_len, **where) for k in self.caches]

    def error(self, out: torch.Tensor) -> float:
        """Of the last layer, for the first and the last sequence."""
        worst = 0.0
        for z in (0, -1):
            k = self.caches[-1][self.table[z].long()].flatten(0, 1)[: int(self.kv_len[z])].double()
            q = self.query[z].double()
            heads, new, length = q.shape[0], q.shape[1], k.shape[0]
            k = k.repeat_interleave(heads // k.shape[1], 1).transpose(0, 1)
            score = SCALE * q @ k.transpose(1, 2)
            q_idx, kv_idx = torch.arange(length - new, length, device=k.device)[:, None], torch.arange(length, device=k.device)[None, :]
            if self.score_mod:
                h = torch.arange(heads, device=k.device)[:, None, None]
                score = self.score_mod(score, torch.tensor(0, device=k.device), h, q_idx, kv_idx)
            exact = score.masked_fill(kv_idx > q_idx, float("-inf")).softmax(-1) @ k[..., : self.d_v]
            worst = max(worst, float((out[z].double() - exact).norm() / exact.norm()))
        return worst


def row_of(step: Step, asked, capture=captured, time_ms=replay_ms) -> dict:
    """What is measured of a step, by the kernel that serves and by the portable one."""
    found = {}
    for name in ("", "portable_")[: 2 if asked.portable else 1]:
        fits = decode_kernels.fits
        if name:
            decode_kernels.fits = lambda *_: NO_KERNEL_FOR_HOPPER
        registry.clear()
        try:
            outs, replay = capture(step.run)
            found[f"{name}us"] = 1e3 * time_ms(replay, asked.rep) / step.calls
            found[f"{name}error"] = step.error(outs[-1])
        finally:
            decode_kernels.fits = fits
        assert found[f"{name}error"] < 0.01, f"the output is off by {found[f'{name}error']:.3f} of its size"
    return {"tb_s": step.bytes / found["us"] / 1e6, "tflops": step.flops / found["us"] / 1e6, **found}


def main() -> None:
    parser = arguments(__doc__, "benchmarks/results/latent.json")
    for name, default in (("sequences", [16, 64, 128]), ("lengths", [8192, 32768]), ("heads", [16, 64, 128]), ("head-dims", [576, 512])):
        parser.add_argument(f"--{name}", type=integers, default=default)
    parser.add_argument("--queries", type=integers, default=[1, 2], help="new ones of a sequence")
    parser.add_argument("--scores", type=common.names(list(SCORE_MODS)), default=["plain"], help=", ".join(SCORE_MODS))
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--rep", type=float, default=50.0, help="ms to measure each")
    parser.add_argument("--portable", action="store_true", help="time the portable kernel, too")
    asked, rows = parser.parse_args(), []
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy, product = common.copy_tb_s(asked.rep), common.tflops(2 * 8192**3, common.queued_ms(lambda: a @ a, asked.rep))
    head = header(asked.commit) | {"copy_tb_s": copy, "matmul_tflops": product}
    for score in asked.scores:
        for heads in asked.heads:
            for queries in asked.queries:
                for sequences in asked.sequences:
                    for length in asked.lengths:
                        torch.cuda.empty_cache()
                        step = Step(sequences, length, heads, queries, score, asked, torch.device("cuda"))
                        row = {"score": score, "heads": heads, "queries": queries, "sequences": sequences, "length": length}
                        row |= row_of(step, asked)
                        rows.append(row | {"of_copy": row["tb_s"] / copy, "of_matmul": row["tflops"] / product})
                        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
                        write_results(asked.out, head, rows)
                        del step


if __name__ == "__main__":
    main()
