"""Kernels in C++ beside torch on a CPU: scaled_dot_product_attention, torch.compile(flex_attention) and the rate of a matrix product.

    python benchmarks/cpu.py                     a table, and benchmarks/results/cpu.json
    python benchmarks/cpu.py --threads 2         by two threads, on the clock: for a machine that nobody else uses

With one thread, times are the thread's own CPU time, so that other processes count little; the least of some repetitions that alternate
between the candidates. Rates are shares of what torch reaches in a product of matrices in float32 in the same minute: by
torch.mm or, where that is faster, by oneDNN (MKL takes half of what an AMD CPU can do). Masked positions are no work.

What a candidate computes of the first head is compared with dense attention in float64 before it is timed, and the program ends if it is
wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree

from flexpress import create_block_mask, flex_attention, mods
from flexpress.codegen.device.cpp_build import described

H, S, LONG, WINDOW = 8, 2048, 8192, 256
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of relative errors
RESULTS = Path(__file__).parent / "results" / "cpu.json"


def softcap(score, b, h, q_idx, kv_idx):
    return torch.tanh(score / 20) * 20


def clock() -> float:
    """The thread's own time where there is one thread."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(run: Callable) -> float:
    start = clock()
    run()
    return clock() - start


def first_call(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def dense(q, k, v, score_mod=None, mask_mod=None) -> torch.Tensor:
    """Attention of the first head in float64."""
    q, k, v = (t[:, :1].double() for t in (q, k, v))
    m, n = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores, zero = q @ k.mT * q.shape[3] ** -0.5, torch.zeros((), dtype=torch.int64)
    scores = scores if score_mod is None else score_mod(scores, zero, zero, m, n)
    scores = scores if mask_mod is None else scores.masked_fill(~mask_mod(zero, zero, m, n), -float("inf"))
    return scores.softmax(-1) @ v


def error_of(found, exact, dtype: torch.dtype) -> float:
    """The largest relative error of a candidate's tensors, as far as they belong to the first head. Ends the program if that is not one of
    rounding."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(exact), strict=True)
    error = max(((a.detach()[:, :1].double() - b).norm() / b.norm()).item() for a, b in pairs)
    if not error <= LIMITS[dtype]:
        raise SystemExit(f"a candidate's relative error is {error:.1e}")
    return error


def compare(name: str, flops: float, candidates: dict[str, Callable], exact, repeats: int, dtype: torch.dtype = torch.float32) -> dict:
    """Seconds of each candidate and of its first call, and their rates by that of a product of matrices. exact: what they should give of
    the first head."""
    square = torch.randn(1536, 1536)
    products = {"mm": lambda: square @ square, "onednn": lambda: torch.ops.mkldnn._linear_pointwise(square, square, None, "none", [], "")}
    firsts = {who: first_call(run) for who, run in candidates.items()}
    errors = {who: error_of(run(), exact, dtype) for who, run in candidates.items()}
    best = dict.fromkeys([*candidates, *products], float("inf"))
    for _ in range(repeats):
        for who, run in candidates.items():
            best[who] = min(best[who], timed(run))
        for who, run in products.items():
            best[who] = min(best[who], *(timed(run) for _ in range(4)))
    rates = {who: 2 * 1536**3 / best.pop(who) for who in products}
    rate = max(rates.values())
    found = {"case": name, **{f"{who}_gflops": round(each * 1e-9, 1) for who, each in rates.items()}}
    for who, seconds in best.items():
        found[who] = {"ms": round(1e3 * seconds, 2), "of_mm": round(flops / seconds / rate, 3), "first_call_s": round(firsts[who], 2)}
        found[who]["rel_err"] = float(f"{errors[who]:.2g}")
    shown = "  ".join(f"{who} {r['ms']:.1f} ms ({r['of_mm']:.2f})" for who, r in found.items() if isinstance(r, dict))
    print(f"{name:34} {shown}", flush=True)
    return found


def forward_cases(heads: int, repeats: int) -> list[dict]:
    compiled, found = torch.compile(torchs.flex_attention), []
    slopes = mods.alibi_slopes(heads, "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for D in (64, 128):
            q, k, v = torch.randn(3, 1, heads, S, D).to(dtype).unbind()
            flops = 4.0 * heads * S * S * D
            causal = create_block_mask(mods.causal, None, None, S, S, "cpu")
            torchs_causal = torchs.create_block_mask(mods.causal, None, None, S, S, "cpu")
            for what, score_mod, masked in (
                ("full", None, False),
                ("causal", None, True),
                ("alibi", mods.alibi(slopes), False),
                ("softcap", softcap, False),
            ):
                ours = {"block_mask": causal} if masked else {}
                theirs = {"block_mask": torchs_causal} if masked else {}
                candidates = {
                    "flexpress": lambda: flex_attention(q, k, v, score_mod, **ours),  # noqa: B023
                    "flex": lambda: compiled(q, k, v, score_mod, **theirs),  # noqa: B023
                }
                if score_mod is None:
                    candidates["sdpa"] = lambda: scaled_dot_product_attention(q, k, v, is_causal=masked)  # noqa: B023
                name = f"{what} {D} {str(dtype).removeprefix('torch.')}"
                with torch.no_grad():
                    exact = dense(q, k, v, score_mod, mods.causal if masked else None)
                    found.append(compare(name, flops * (0.5 if masked else 1), candidates, exact, repeats, dtype))
                torch._dynamo.reset()
    return found


def gradients_of(out: torch.Tensor, inputs: tuple, gradient: torch.Tensor) -> Callable:
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def backward_cases(heads: int, repeats: int) -> list[dict]:
    found = []
    for D in (64, 128):
        q, k, v = (torch.randn(1, heads, S, D, requires_grad=True) for _ in range(3))
        for what, given in (
            ("full", {}),
            ("causal", {"mask_mod": mods.causal}),
            ("alibi", {"score_mod": mods.alibi(mods.alibi_slopes(heads, "cpu"))}),
        ):
            runs, flops = {}, 2.5 * 4 * heads * S * S * D * (0.5 if what == "causal" else 1)
            outputs = {"flexpress": flex_attention(q, k, v, **given)}
            if what != "alibi":
                outputs["sdpa"] = scaled_dot_product_attention(q, k, v, is_causal=what == "causal")
            gradient = torch.randn(1, heads, S, D)
            for who, out in outputs.items():
                runs[who] = gradients_of(out, (q, k, v), gradient)
            first = [t.detach()[:, :1].double().requires_grad_() for t in (q, k, v)]
            exact = torch.autograd.grad(dense(*first, **given), first, gradient[:, :1].double())
            found.append(compare(f"backward {what} {D} float32", flops, runs, exact, repeats))
    return found


def derivative_cases(heads: int, repeats: int) -> list[dict]:
    """Forward mode, and gradients of gradients, of causal attention beside dense attention in torch."""
    q, k, v, *direction = torch.randn(6, 1, heads, S, 64).unbind()
    visible = torch.ones(S, S, dtype=torch.bool).tril()

    def by_torch(q, k, v):
        return (q @ k.mT / 8).masked_fill(~visible, -float("inf")).softmax(-1) @ v

    def printed(q, k, v):
        return flex_attention(q, k, v, mask_mod=mods.causal)

    def twice(attend: Callable, given=(q, k, v)) -> tuple[torch.Tensor, ...]:
        inputs = [t.clone().requires_grad_() for t in given]
        found = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in found), inputs)

    forward = {who: lambda f=f: torch.func.jvp(f, (q, k, v), tuple(direction)) for who, f in (("flexpress", printed), ("dense", by_torch))}
    second = {who: lambda f=f: twice(f) for who, f in (("flexpress", printed), ("dense", by_torch))}
    flops, first = 2.0 * heads * S * S * 64, [t[:, :1].double() for t in (q, k, v, *direction)]
    return [
        compare("jvp causal 64 float32", 3 * flops, forward, torch.func.jvp(by_torch, tuple(first[:3]), tuple(first[3:])), repeats),
        compare("second causal 64 float32", 11.5 * flops, second, twice(by_torch, first[:3]), repeats),
    ]


def window_case(heads: int, repeats: int) -> dict:
    """A sliding window over a long sequence, beside dense attention that does not know of it."""
    q, k, v = torch.randn(3, 1, heads, LONG, 64).unbind()
    mask = create_block_mask(mods.sliding_window(WINDOW), None, None, LONG, LONG, "cpu")
    name, flops = f"window {WINDOW} of {LONG} float32", 4.0 * heads * LONG * WINDOW * 64
    runs = {"flexpress": lambda: flex_attention(q, k, v, block_mask=mask)}
    found = compare(name, flops, runs, dense(q, k, v, mask_mod=mods.sliding_window(WINDOW)), repeats)
    runs = {"sdpa": lambda: scaled_dot_product_attention(q, k, v)}  # which has another result
    return {**found, "sdpa": compare("the same, all positions", flops, runs, dense(q, k, v), repeats)["sdpa"]}


def decode_cases(repeats: int) -> list[dict]:
    """One query of each head at 8192 keys: how fast keys and values are read. Four query heads may share one of the keys'."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for heads, shared in ((H, H), (4 * H, H)):
            q = torch.randn(1, heads, 1, 128).to(dtype)
            k, v = torch.randn(2, 1, shared, LONG, 128).to(dtype).unbind()
            bytes_read = 2 * k.numel() * k.element_size()
            runs = {
                "flexpress": lambda: flex_attention(q, k, v, enable_gqa=True),  # noqa: B023
                "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),  # noqa: B023
            }
            case = {"case": f"one query, {heads} heads on {shared} of {LONG} keys, 128 {str(dtype).removeprefix('torch.')}"}
            exact = dense(q, k, v)
            for who, run in runs.items():
                error_of(run(), exact, dtype)
                seconds = min(timed(run) for _ in range(4 * repeats))
                case[who] = {"ms": round(1e3 * seconds, 2), "gb_s": round(1e-9 * bytes_read / seconds, 1)}
            print(case, flush=True)
            found.append(case)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--heads", type=int, default=H)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--output", type=Path, default=RESULTS)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    cases = forward_cases(given.heads, given.repeats)
    cases += backward_cases(given.heads, given.repeats)
    cases += derivative_cases(given.heads, min(given.repeats, 2))
    cases.append(window_case(given.heads, given.repeats))
    cases += decode_cases(given.repeats)
    named = re.search(r"model name\s*: (.*?)(?: vendor_id|$)", described())
    machine = {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    about = {"torch": torch.__version__, "threads": given.threads, "heads": given.heads, "length": S, **machine}
    given.output.write_text(json.dumps({"about": about, "cases": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
