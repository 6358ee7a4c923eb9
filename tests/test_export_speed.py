"""Exported files take the time of calls of the library."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from flexpress import cached_attention, create_block_mask, export, export_cached, flex_attention
from flexpress.mods import alibi, alibi_slopes, sliding_window
from support.exported import load

pytestmark = pytest.mark.gpu
ALLOWED = 1.05
RUNS = 5  # one after another
BUSY = 20_000_000  # cycles, some 10 ms: the host has queued all runs by then


def times_of(function) -> tuple[float, float]:
    """Milliseconds of the device and of the host for a run. The device begins when the host is done."""
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    start = time.perf_counter()
    first.record()
    for _ in range(RUNS):
        function()
    last.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return first.elapsed_time(last) / RUNS, 1e3 * host / RUNS


def compare(own, library) -> None:
    """By turns, as a GPU's clock changes."""
    functions = own, library
    for function in functions * 5:
        function()
    times = [[times_of(function) for function in functions] for _ in range(20)]
    (mine, my_host), (theirs, their_host) = (map(statistics.median, zip(*one, strict=True)) for one in zip(*times, strict=True))
    print(f"exported {mine:.3f} ms, the library {theirs:.3f} ms; of the host {my_host:.3f} and {their_host:.3f}")
    assert mine <= ALLOWED * theirs


def problem(length=8192, head_dim=128, grad=False):
    return [torch.randn(2, 16, length, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_(grad) for _ in range(3)]


BACKENDS = pytest.mark.parametrize("options", [None, {"BACKEND": "PORTABLE"}], ids=["by default", "portable"])


def check_that_hopper_serves(own, options) -> None:
    """By default, on a Hopper GPU."""
    if options is None and torch.cuda.get_device_capability() == (9, 0):
        launches = [launch for name, launch in vars(own).items() if name.startswith("HOPPER_") and not isinstance(launch, dict)]
        assert launches and not any(launch.refused for launch in launches)


@BACKENDS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plain(tmp_path, head_dim, options):
    q, k, v = problem(head_dim=head_dim)
    export(q, k, v, kernel_options=options, path=tmp_path / "own.py")
    own = load(tmp_path / "own.py")
    compare(lambda: own.attention(q, k, v), lambda: flex_attention(q, k, v, kernel_options=options))
    check_that_hopper_serves(own, options)


@BACKENDS
def test_plain_gradients(tmp_path, options):
    q, k, v = problem(grad=True)
    export(q, k, v, kernel_options=options, path=tmp_path / "own.py")
    own, d_out = load(tmp_path / "own.py"), torch.randn_like(q)
    compare(
        lambda: torch.autograd.grad(own.attention(q, k, v), (q, k, v), d_out),
        lambda: torch.autograd.grad(flex_attention(q, k, v, kernel_options=options), (q, k, v), d_out),
    )
    check_that_hopper_serves(own, options)


@BACKENDS
@pytest.mark.parametrize("length", [8192, 8000])
@pytest.mark.parametrize("learned", [False, True])
def test_alibi_and_a_window_with_gradients(tmp_path, length, learned, options):
    q, k, v = problem(length, grad=True)
    slopes = alibi_slopes(16, "cuda").requires_grad_(learned)
    mods = {"score_mod": alibi(slopes), "mask_mod": sliding_window(1024)}
    export(q, k, v, **mods, kernel_options=options, path=tmp_path / "own.py")
    own = load(tmp_path / "own.py")
    lists = own.create_block_lists(q, k, window=1024)
    mask = create_block_mask(mods["mask_mod"], None, None, length, length, device="cuda")
    d_out, inputs = torch.randn_like(q), (q, k, v, *([slopes] if learned else []))

    def library():
        return flex_attention(q, k, v, score_mod=mods["score_mod"], block_mask=mask, kernel_options=options)

    compare(lambda: own.attention(q, k, v, slopes=slopes, lists=lists), library)
    compare(
        lambda: torch.autograd.grad(own.attention(q, k, v, slopes=slopes, lists=lists), inputs, d_out),
        lambda: torch.autograd.grad(library(), inputs, d_out),
    )
    check_that_hopper_serves(own, options)


def test_paged_decode(tmp_path):
    Z, Hq, Hkv, D, S, n = 64, 32, 8, 128, 16, 512
    q = torch.randn(Z, Hq, 1, D, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, Z * n, S, Hkv, D, device="cuda", dtype=torch.bfloat16)
    pages = torch.randperm(Z * n, device="cuda").reshape(Z, n).int()
    kv_len = torch.randint(S * n // 2, S * n, (Z,), device="cuda", dtype=torch.int32)
    mod = alibi(alibi_slopes(Hq, "cuda"))
    export_cached(q, k, v, kv_len, page_table=pages, score_mod=mod, path=tmp_path / "own.py")
    own, slopes = load(tmp_path / "own.py"), alibi_slopes(Hq, "cuda")
    compare(
        lambda: own.attention(q, k, v, kv_len, pages, slopes=slopes),
        lambda: cached_attention(q, k, v, kv_len, page_table=pages, score_mod=mod),
    )
