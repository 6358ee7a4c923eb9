"""Threads that make first calls of fresh mods side by side, of their own and of each other's.

    python tests/race.py --threads 8 --calls 1000
    python tests/race.py --threads 8 --calls 50 --device cuda      kernels compile, too

Every call is checked. Each round of `threads` calls begins at a barrier, so that they race; half of the rounds ask all for the same mod,
which then is printed and compiled once.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
import traceback

import torch

from flexpress import cache_clear, cache_info, create_block_mask, evaluate_mod, flex_attention, varlen_attention
from flexpress.codegen.device import kernel
from support.fresh_mods import mask_mod, mask_of, score_mod, score_of

LENGTH = 20


def evaluated(number: int, device: str) -> None:
    scores = torch.randn(1, 1, 3, 5)
    found = evaluate_mod(score_mod(number), scores.to(device)).cpu()
    assert torch.allclose(found, score_of(number, scores), rtol=1e-5, atol=1e-5)


def masked(number: int, device: str) -> None:
    mask = create_block_mask(mask_mod(number), None, None, 30, 50, device, BLOCK_SIZE=8)
    m, n = torch.arange(30)[:, None], torch.arange(50)
    dense = (m - n < number) & (n - m < number + 1)
    blocks = torch.nn.functional.pad(dense, (0, 6, 0, 2)).view(4, 8, 7, 8).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].cpu().bool(), blocks)


def attended(number: int, device: str, packed: bool = False) -> None:
    q, k, v = (torch.randn(1, 1, LENGTH, 16, device=device, requires_grad=number % 2 == 0 and not packed) for _ in range(3))
    if packed:
        ends = torch.tensor([0, LENGTH], dtype=torch.int32, device=device)
        out = varlen_attention(
            *(t[0].mT.transpose(1, 2).transpose(0, 1) for t in (q, k, v)),
            ends,
            score_mod=score_mod(number),
            mask_mod=mask_mod(number % 40 + 1),
        ).transpose(0, 1)[None]
    else:
        out = flex_attention(q, k, v, score_mod(number), mask_mod=mask_mod(number % 40 + 1))
    scores = score_of(number, (q.double() @ k.double().mT / 4).cpu())
    dense = scores.masked_fill(~mask_of(number % 40 + 1, LENGTH), float("-inf")).softmax(-1) @ v.double().cpu()
    assert torch.allclose(out.double().cpu(), dense, atol=1e-3 if device == "cuda" else 1e-5)
    if out.requires_grad:
        out.sum().backward()


KINDS = {"evaluate": evaluated, "mask": masked, "attend": attended, "packed": lambda number, device: attended(number, device, True)}


def campaign(threads: int, calls: int, device: str = "cpu", seed: int = 0) -> str:
    torch.set_num_threads(1)
    attended(2, device)
    cache_clear()
    random.seed(seed)
    rounds = []  # what each thread does: its kind and the mod's number
    for i in range(calls // threads or 1):
        same = random.choice(list(KINDS)), 3 + i * threads
        rounds.append([same if i % 2 else (random.choice(list(KINDS)), 3 + i * threads + t) for t in range(threads)])
    barrier, failures = threading.Barrier(threads), []

    def work(me: int) -> None:
        for number, step in enumerate(rounds):
            barrier.wait()
            kind, mod = step[me]
            try:
                KINDS[kind](mod, device)
            except Exception:
                failures.append(f"round {number}, thread {me}, {kind} {mod}: {traceback.format_exc()}")

    begun = time.perf_counter()
    workers = [threading.Thread(target=work, args=(me,)) for me in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    info = cache_info()
    assert len(kernel.loaded()) <= 2048 and info.prints <= len({k.spec for k in kernel.loaded()}), "a kernel was printed twice"
    for failure in failures[:5]:
        print(failure, file=sys.stderr)
    assert not failures, f"{len(failures)} of {len(rounds) * threads} calls failed"
    return (
        f"{threads} threads, {len(rounds) * threads} first calls, 0 failures; {info.traces} traces, {info.prints} prints, "
        f"{info.compiles} compiled, {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    os.environ.setdefault("FLEXPRESS_CPU", "interpreter")  # on a CPU this is of kernels in Triton
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(campaign(given.threads, given.calls, given.device, given.seed))
