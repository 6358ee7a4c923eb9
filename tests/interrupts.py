"""Interrupts at any moment of an interpreted call: afterwards the library is as before, and the next call is right.

    python tests/interrupts.py --n 500             KeyboardInterrupt at random moments: by a timer's signal, and in another thread
    python tests/interrupts.py --n 500 --seed 3

After every one: triton.language is what it was, gradients are on, NumPy's error state is the same, the next call gives the right numbers;
after every 50, and at the end, a kernel compiles for a GPU that is not there. An interrupt inside NumPy, as it asks an argument for its
length, arrives as a TypeError: NumPy takes whatever is raised there for that.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import threading
import time
import traceback

import numpy as np
import torch

from flexpress import cache_clear, create_block_mask, evaluate_mod, flex_attention, mods
from flexpress.codegen.run.preview import compilation
from support.fresh_mods import language, mask_mod, mask_of, same_language, score_mod, score_of
from support.kept import anew

LENGTH = 40


def call(number: int) -> None:
    """A mask, a forward and a backward pass of mods that are new, checked."""
    q, k, v = (torch.randn(1, 1, LENGTH, 16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(mask_mod(2 + number % 30), None, None, LENGTH, LENGTH, "cpu")
    out = flex_attention(q, k, v, score_mod(number), mask)
    (dq,) = torch.autograd.grad(out.sum(), q)
    scores = score_of(number, q @ k.mT / 4).masked_fill(~mask_of(2 + number % 30, LENGTH), float("-inf"))
    dense = scores.softmax(-1) @ v
    assert torch.allclose(out, dense, atol=1e-4), (out - dense).abs().max()
    assert torch.allclose(dq, torch.autograd.grad(dense.sum(), q)[0], atol=1e-4)


def quick_check(number: int) -> None:
    scores = torch.randn(1, 1, 5, 7)
    assert torch.allclose(evaluate_mod(score_mod(number), scores), score_of(number, scores), atol=1e-5)


def by_signal(number: int, delay: float) -> bool:
    """Call until a timer's signal strikes; was the call cut off?"""
    struck = []

    def strike(*_):
        struck.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            call(number)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, TypeError, SystemError):
        if not struck:
            raise
    finally:
        signal.signal(signal.SIGALRM, before)
    return bool(struck)


def in_thread(number: int, delay: float) -> bool:
    """The same in a thread, struck by another."""
    struck, ended = [], []

    def work():
        try:
            call(number)
            time.sleep(0.001)
        except KeyboardInterrupt:
            struck.append(True)

    thread = threading.Thread(target=work)
    hook, threading.excepthook = threading.excepthook, ended.append
    try:
        thread.start()
        time.sleep(delay)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
        thread.join()
    finally:
        threading.excepthook = hook
    for args in ended:
        if issubclass(args.exc_type, (KeyboardInterrupt, TypeError, SystemError)):  # as by_signal
            struck.append(True)
        else:
            shown = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
            raise AssertionError(f"the thread ended otherwise:\n{shown}")
    return bool(struck)


def compiles() -> None:
    cache_clear()
    with anew():
        assert compilation("sm_90", mask_mod=mods.causal, head_dim=64).compile().registers != 0


def campaign(n: int, seed: int, ways=(by_signal, in_thread), offline: bool = True) -> int:
    """`n` interrupts; how many struck inside a call."""
    random.seed(seed)
    call(0)
    if offline:
        compiles()
    pristine, errors = language(), np.geterr()
    start = time.perf_counter()
    call(1)
    usual = time.perf_counter() - start
    struck = 0
    for i in range(n):
        if i % 10 == 0:
            cache_clear()
        number = 2 + i if i % 3 else 2  # mods that are new, and one that is known
        struck += ways[i % len(ways)](number, random.uniform(0.0005, max(usual, 0.01)))
        assert same_language(pristine), f"interrupt {i}: triton.language is not what it was"
        assert torch.is_grad_enabled(), f"interrupt {i}: gradients are off"
        assert np.geterr() == errors, f"interrupt {i}: NumPy's error state is another"
        quick_check(i)
        if offline and i % 50 == 49:
            compiles()
    call(3)
    if offline:
        compiles()
    return struck


if __name__ == "__main__":
    os.environ.setdefault("FLEXPRESS_CPU", "interpreter")  # on a CPU this is of kernels in Triton
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun = time.perf_counter()
    inside = campaign(given.n, given.seed)
    print(f"{given.n} interrupts, {inside} inside a call, 0 failures, {time.perf_counter() - begun:.0f} s")
