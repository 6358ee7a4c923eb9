"""Kernels drawn at random, of every template and with every flag, through Triton's compiler, for GPUs that are not here.

    python tests/compile_sweep.py --n 2000 --seed 1                          until Triton's own passes have run ("ttgir")
    python tests/compile_sweep.py --n 100 --assemble --target sm_90          to the end, assembler and all
    PYTHONPATH=.venv/triton-3.6.0 python tests/compile_sweep.py ...          the same with another Triton
    python tests/compile_sweep.py --seed 1 --only 17                         the 17th kernel of seed 1, with the compiler's words

Prints what failed, and ends with 1 if anything did.
"""

from __future__ import annotations

import argparse
import collections
import random
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from flexpress.codegen.plan.forward import Blocks, Cache, Options
from flexpress.codegen.run.preview import (
    Compilation,
    backward_compilations,
    compilation,
    decode_compilations,
    hopper_backward_compilations,
    hopper_compilation,
    update_cache_compilation,
)
from flexpress.codegen.run.preview_masks import (
    block_lists_compilation,
    block_starts_compilation,
    dense_mask_compilation,
    evaluate_compilation,
    mask_compilations,
)
from flexpress.commands.recipes import RECIPES, make

Kernel = tuple[str, Compilation]

WEIGHTS, ROWS, PAIRS = torch.ones(16, 4096), torch.ones(4096), torch.ones(4, 16, 64, 64, dtype=torch.float16)
IDS, FLAGS, WIDTH = torch.zeros(4, 4096, dtype=torch.int32), torch.ones(4096, dtype=torch.bool), 5

SCORES = {
    "no index": lambda s, b, h, m, n: torch.zeros_like(s),
    "rows": lambda s, b, h, m, n: m * 0.5,
    "columns": lambda s, b, h, m, n: ROWS[n] * 0.5,
    "per key": lambda s, b, h, m, n: torch.tanh(s) * WEIGHTS[h, n],
    "per query": lambda s, b, h, m, n: s * ROWS[m],
    "table": lambda s, b, h, m, n: s + WEIGHTS[h, (m - n) % 4096],
    "bias": lambda s, b, h, m, n: s + PAIRS[b, h, m % 64, n % 64],
    "choices": lambda s, b, h, m, n: torch.where(m >= n, torch.minimum(s, torch.sigmoid(s)), -float("inf")),
    "integers": lambda s, b, h, m, n: s + ((n - m) // WIDTH) + (m - n) % 7 + torch.sign(m - n) + (m - n) ** 2,
    "may be NaN": lambda s, b, h, m, n: torch.sqrt(torch.abs(s)) + torch.exp(s) * h,
}
MASKS = {
    "rows": lambda b, h, m, n: m > WIDTH,
    "columns": lambda b, h, m, n: n < 100 * (b + 1),
    "heads": lambda b, h, m, n: h < 3,
    "no index": lambda b, h, m, n: torch.ones_like(m, dtype=torch.bool),
    "gathered": lambda b, h, m, n: (IDS[b, m] == IDS[b, n]) & FLAGS[n],
    "either": lambda b, h, m, n: (torch.where(FLAGS[m], 3, 7) * (m // WIDTH) >= n % WIDTH) | (m >= n),
}


class Draw:
    """Random choices, which are remembered as text."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.said: list[str] = []

    def of(self, name: str, *values):
        value = self.random.choice(values)
        self.said.append(f"{name}={value!r}")
        return value

    def now_and_then(self, **values) -> dict:
        """Each with a probability of one in four."""
        kept = {k: v for k, v in values.items() if self.random.random() < 0.25}
        self.said += [f"{k}={v!r}" for k, v in kept.items()]
        return kept

    def mods(self) -> tuple[Callable | None, Callable | None]:
        score = self.of("score_mod", *[None] * 9, *SCORES, *(n for n, r in RECIPES.items() if r.kind == "score"))
        mask = self.of("mask_mod", None, *MASKS, *(n for n, r in RECIPES.items() if r.kind == "mask"))
        return (SCORES.get(score) or (make(score)[0] if score else None)), self.mask(mask)

    def mask(self, name: str | None) -> Callable | None:
        return MASKS.get(name) or (make(name)[1] if name else None)

    def head_dims(self, least: int = 1) -> dict:
        dims = [d for d in (1, 8, 16, 24, 40, 64, 72, 80, 96, 128, 136, 192, 256) if d >= least]
        both = self.of("head_dim", 64, 128, *dims)
        return {"head_dim": both, **self.now_and_then(head_dim_v=self.random.choice(dims))}


def elsewhere(d: Draw, blocks: dict) -> dict:
    """Blocks that lie in a longer sequence, unless they begin where sequences do."""
    return {} if "starts" in blocks else d.now_and_then(shifted=True)


def forward(d: Draw, target: str) -> list[Kernel]:
    dtype = d.of("dtype", "float16", "bfloat16", "float32")
    blocks = dict(
        block_size=(d.of("q_block", 128, 128, 16, 48, 64, 256), d.of("kv_block", 128, 128, 16, 64, 96, 384)),
        interior=d.of("interior", True, False),
        **d.now_and_then(separate_full=False, starts=True),
    )
    if "starts" in blocks:  # those of packed sequences: 16 keys at a time would fail for sm_100, with either Triton
        blocks["block_size"] = (128, 128)
    tile = d.now_and_then(num_stages=d.random.choice((1, 2, 3, 4)), num_warps=d.random.choice((4, 8)))
    if target == "gfx942":  # the tables' is 1: Triton 3.6 fails with some kernels if a user asks for more
        tile.pop("num_stages", None)
    options = d.now_and_then(prescale_qk=True, float32_precision="tf32", use_tma=False)
    options = Options(**options, tile=tuple(tile.items()))
    call, dims = d.mods(), d.head_dims()
    details = blocks | d.now_and_then(output_max=True, transposed=True, scale_is_positive=False) | elsewhere(d, blocks)
    return [("forward", compilation(target, *call, dtype, **dims, options=options, **details))]


def backward(d: Draw, target: str) -> list[Kernel]:
    dtype = d.of("dtype", "float16", "bfloat16", "float32")
    details = dict(
        block_size=(d.of("q_block", 128, 128, 64, 256), d.of("kv_block", 128, 128, 64, 256)),
        interior=d.of("interior", True, False),
        **d.now_and_then(
            separate_full=False,
            starts=True,
            whole=False,
            captured=True,
            deterministic=True,
            lse_gradient=True,
            scale_is_positive=False,
            use_tma=False,
        ),
    )
    stages = d.now_and_then(stages=d.random.choice((1, 2, 3)))
    tile = (("dkv_num_stages", stages["stages"]), ("dq_num_stages", stages["stages"])) if stages else ()
    options = Options(**d.now_and_then(float32_precision="tf32"), tile=tile)
    call, dims = d.mods(), d.head_dims()
    return list(backward_compilations(target, *call, dtype, **dims, **details, **elsewhere(d, details), options=options).items())


def decode(d: Draw, target: str) -> list[Kernel]:
    score_mod, mask_mod = d.mods()
    details = d.now_and_then(
        output_max=True, split=False, lengths=True, scale_is_positive=False, float32_precision="tf32", kv_dtype="float8_e4m3fn"
    )
    if target not in ("sm_90", "sm_100"):
        details.pop("kv_dtype", None)
    if "lengths" in details:  # of a cache
        details |= d.now_and_then(ragged=True, located=True)
        details |= d.now_and_then(balanced=True) if "split" not in details and mask_mod is None else {}
        details |= d.now_and_then(by_tokens=True) if "ragged" in details and "balanced" not in details else {}
        details |= {} if "located" in details else d.now_and_then(page_size=d.random.choice((1, 8, 16, 48, 64, 128, 256)))
        mask_mod = None  # in place of block lists
    made = decode_compilations(
        target,
        score_mod,
        mask_mod,
        d.of("dtype", "float16", "bfloat16", "float32"),
        **d.head_dims(),
        q_len=d.of("q_len", 1, 1, 2, 5, 16, 64),
        group=d.of("group", 1, 4, 8, 12, 64),
        **details,
    )
    return list(made.items())


def masks(d: Draw, target: str) -> list[Kernel]:
    mask_mod = d.mask(d.of("mask_mod", *MASKS, *(n for n, r in RECIPES.items() if r.kind == "mask")))
    sizes = (d.of("q_block", 128, 16, 48, 64, 256), d.of("kv_block", 128, 16, 64, 80, 512))
    made = mask_compilations(target, mask_mod, sizes, **d.now_and_then(starts=True))
    made["dense"] = dense_mask_compilation(target, mask_mod)
    made["evaluate"] = evaluate_compilation(target, mask_mod, "mask")
    return list(made.items())


def rest(d: Draw, target: str) -> list[Kernel]:
    score_mod = d.mods()[0] or SCORES["choices"]
    fp8 = d.now_and_then(cache_dtype="float8_e4m3fn") if target in ("sm_90", "sm_100") else {}
    update = d.now_and_then(ragged=True, offsets=True, rope_dim=d.random.choice((64, 96, 128)), interleaved=True, rope_tail=True)
    update |= d.now_and_then(page_size=d.random.choice((1, 16, 64))) or d.now_and_then(located=True)
    return [
        ("update_cache", update_cache_compilation(target, d.of("dtype", "float16", "bfloat16", "float32"), **fp8, **update)),
        ("block_lists", block_lists_compilation(target, **d.now_and_then(separate_full=False, starts=True))),
        ("block_starts", block_starts_compilation(target, d.of("sequences", True, False))),
        ("dense", dense_mask_compilation(target, score_mod, "score")),
        ("evaluate", evaluate_compilation(target, score_mod, precision=d.of("precision", "float32", "bfloat16", "float16"))),
    ]


def hopper(d: Draw, target: str) -> list[Kernel]:
    details = d.now_and_then(separate_full=False, interior=False, output_max=True, scale_is_positive=False)
    score_mod, mask_mod = d.mods()
    if mask_mod:
        details |= d.now_and_then(starts=True)
    if "starts" in details:
        details |= d.now_and_then(
            cache=Cache(*d.random.choice(((0, True), (0, False), (8,), (16,), (64,), (128,), (256,))), **d.now_and_then(offsets=True))
        )
    dtype, dims = d.of("dtype", "float16", "bfloat16"), d.head_dims(40)
    return [("hopper_forward", hopper_compilation("sm_90", score_mod, mask_mod, dtype, **dims, **details, **elsewhere(d, details)))]


def hopper_backward(d: Draw, target: str) -> list[Kernel]:
    score_mod, mask_mod = d.mods()
    details = d.now_and_then(scale_is_positive=False, lse_gradient=True, captured=True)
    if mask_mod:
        blocks = Blocks(True, 128, 128)._replace(**d.now_and_then(has_full=False, interior=False, starts=True, q_block=256))
        details["blocks"] = blocks._replace(q_block=128) if blocks.starts else blocks
    dtype, dims = d.of("dtype", "float16", "bfloat16"), d.head_dims(40)
    if mask_mod and not details["blocks"].starts:
        details["blocks"] = details["blocks"]._replace(**elsewhere(d, {}))
    return list(hopper_backward_compilations(score_mod, mask_mod, dtype, **dims, **details).items())


KINDS = {
    "forward": forward,
    "backward": backward,
    "decode": decode,
    "masks": masks,
    "rest": rest,
    "hopper": hopper,
    "hopper_backward": hopper_backward,
}
TARGETS = ("sm_90", "sm_90", "sm_90", "sm_80", "sm_100", "gfx942")


def drawn(seed: int, number: int, kinds: tuple[str, ...] = tuple(KINDS), target: str | None = None) -> tuple[str, list[Kernel]]:
    """What was drawn, in words, and its kernels; none if no kernel serves it."""
    d = Draw(f"{seed} {number}")
    kind = d.of("kind", *kinds)
    target = target or d.of("target", *TARGETS)
    try:
        kernels = KINDS[kind](d, "sm_90" if kind.startswith("hopper") else target)
    except ValueError:  # what it does not serve
        kernels = []
    return ", ".join(d.said), kernels


def failures(seed: int, number: int, assemble: bool = False, **choice) -> tuple[int, list[str]]:
    """How many kernels were compiled, and what failed."""
    said, kernels = drawn(seed, number, **choice)
    failed = []
    for name, kernel in kernels:
        try:
            kernel.compile(None if assemble else "ttgir")
        except (RuntimeError, subprocess.CalledProcessError) as error:
            failed.append(f"{seed} {number}: {name} for {kernel.target} ({said}): {type(error).__name__} {str(error)[:200]}")
    return len(kernels), failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--target", choices=sorted(set(TARGETS)))
    parser.add_argument("--assemble", action="store_true")
    args = parser.parse_args()
    counts, failed, began = collections.Counter(), [], time.time()
    for number in [args.only] if args.only is not None else range(args.n):
        made, wrong = failures(args.seed, number, args.assemble, kinds=tuple(args.kinds), target=args.target)
        counts["kernels"] += made
        counts["draws that nothing serves"] += not made
        failed += wrong
        for line in wrong:
            print(line, flush=True)
    print(f"{dict(counts)}, {len(failed)} failed, {time.time() - began:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
