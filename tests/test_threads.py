"""Threads side by side, forks beside threads, and a package that does nothing when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import forks
import pytest
import torch

from flexpress import cache_clear, cache_info, evaluate_mod, flex_attention
from flexpress.codegen.device import binary, compiler, cuda, interpret, kernel, tma
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.preview_masks import evaluate_compilation
from support.fresh_mods import score_mod, score_of
from support.kept import anew


def together(count: int, work) -> list:
    """work(i) in threads that begin at once; results and errors."""
    barrier, found = threading.Barrier(count), [None] * count

    def run(i):
        barrier.wait()
        try:
            found[i] = work(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_kernel_is_printed_once_however_many_threads_ask():
    cache_clear()
    spec = evaluate_compilation("cpu", score_mod(31), "score").spec
    before = cache_info().prints
    kernels = together(8, lambda _: kernel.kernel_for(spec))
    assert len({id(k) for k in kernels}) == 1 and kernels[0].spec == spec and cache_info().prints <= before + 1


def test_threads_trace_side_by_side():
    """Each thread is half-way through its mod when the other one goes on."""
    half_way = threading.Barrier(2)

    def made(number):
        def mod(score, b, h, q_idx, kv_idx):
            half_way.wait(30)
            scaled = score * number
            half_way.wait(30)
            return scaled

        return mod

    assert [values for _, values in together(2, lambda i: bind(made(i + 0.25), "score"))] == [[0.25], [1.25]]


def test_a_variant_is_compiled_once_and_others_do_not_wait_for_it(monkeypatch):
    """Eight threads ask for two variants of one kernel; meanwhile another kernel's variant, found on disk, is there at once."""
    cache_clear()
    kernels = [kernel.kernel_for(evaluate_compilation("sm_90", score_mod(n), "score").spec) for n in (32, 33)]
    obtained, order = [], []

    def obtain(stem, layout, constants, options, device_index, load_function):
        obtained.append((stem, constants))
        if stem == kernels[0].path.stem:
            time.sleep(0.1)
        return object(), True

    monkeypatch.setattr(binary, "obtain", obtain)
    device = torch.device("cuda", 0)

    def ask(i):
        if i == 8:
            time.sleep(0.02)
        found = kernels[i == 8].variant((1.0,), device, (i % 2,), num_warps=4)[0]
        order.append(i)
        return found

    found = together(9, ask)
    assert len({id(f) for f in found[:8]}) == 2 and len(obtained) == 3 and cache_info().compiles == 3
    assert order[0] == 8


def test_one_thread_compiles_or_interprets_at_a_time(monkeypatch):
    """Compiling reads triton.language, which interpreting switches."""
    inside, most = 0, []
    spec = evaluate_compilation("sm_90", score_mod(34), "score")
    real_restore, real_switched = compiler.restore, interpret._Interpreted._switched

    def enter(work):
        nonlocal inside
        inside += 1
        most.append(inside)
        try:
            time.sleep(0.002)
            return work()
        finally:
            inside -= 1

    monkeypatch.setattr(compiler, "restore", lambda: enter(real_restore))
    monkeypatch.setattr(interpret._Interpreted, "_switched", lambda *args: enter(lambda: real_switched(*args)))
    scores = torch.randn(1, 1, 3, 3)

    def work(i):
        if i % 2:
            return spec.compile().shared is not None
        return all(torch.allclose(evaluate_mod(score_mod(n), scores), score_of(n, scores), atol=1e-5) for n in (34, 35))

    with anew():
        assert together(4, work) == [True] * 4 and max(most) == 1


def test_importing_starts_nothing():
    """No thread, no file, no kernel; a fork right after it works."""
    program = (
        "import threading, sys, os, tempfile; os.environ['FLEXPRESS_CACHE_DIR'] = folder = tempfile.mkdtemp() + '/kernels';"
        "import torch; torch.version.cuda = '12.8';"  # as with a CUDA build
        "import flexpress, forks; assert threading.active_count() == 1, threading.enumerate();"
        "assert not os.path.exists(folder); raise SystemExit(forks.child(forks.attend))"
    )
    folder = os.path.dirname(os.path.abspath(__file__))
    assert subprocess.run([sys.executable, "-c", program], cwd=folder, timeout=120).returncode == 0


@pytest.mark.parametrize("ways", [["interpret", "trace", "compile"]])
def test_a_forked_child_works_whatever_other_threads_do(ways):
    """A few of `python tests/forks.py --n 25`, in a process of their own."""
    done = subprocess.run([sys.executable, forks.__file__, "--n", "2", "--ways", *ways], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_thread_without_a_context_describes_tensors(monkeypatch):
    """The driver describes a tensor for TMA where its device's context is current."""
    called = []

    class Driver:
        def cuTensorMapEncodeTiled(self, *_):
            called.append("describe")
            return 0 if "enter 3" in called else 201

    monkeypatch.setattr(cuda, "_driver", Driver)
    monkeypatch.setattr(cuda, "_enter_context", lambda device: called.append(f"enter {device}"))
    made = tma.descriptor_at(256, torch.bfloat16, (1, 2, 300, 64), (38400, 19200, 64, 1), 128, 64)
    cuda._expanded(made, {"swizzle": 3, "block_size": [1, 1, 128, 64]}, 3)
    assert called == ["describe", "enter 3", "describe"]


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
def test_a_thread_whose_first_use_of_cuda_is_attention(gradients):
    """Its memory comes from torch's cache, so that torch does not enter the device's context there."""
    q, k, v = (torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(gradients) for _ in range(3))

    def run(_):
        out = flex_attention(q, k, v)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) if gradients else (out,)

    expected = run(None)
    for _ in range(3):
        cache_clear()  # descriptors, too
        (found,) = together(1, run)
        assert not isinstance(found, Exception), found
        assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_compiling_side_by_side_ends_well():
    """Eight threads compile for the GPU side by side, and the process ends as it should."""
    race = os.path.join(os.path.dirname(os.path.abspath(__file__)), "race.py")
    done = subprocess.run([sys.executable, race, "--threads", "8", "--calls", "48", "--device", "cuda"], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-3000:])


@pytest.mark.gpu
def test_a_process_ends_well_while_a_thread_compiles():
    program = """
import threading, torch, flexpress, itertools, time
from support import fresh_mods
def work():
    for i in itertools.count():
        q = torch.randn(1, 1, 64, 32, device="cuda")
        flexpress.flex_attention(q, q, q, fresh_mods.score_mod(i))
threading.Thread(target=work, daemon=True).start()
time.sleep(1.5)
"""
    for _ in range(3):
        folder = os.path.dirname(os.path.abspath(__file__))
        done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
