"""Exported files take the time of the library's portable kernels, which they hold."""

from __future__ import annotations

import statistics

import pytest
import torch

from flexpress import cached_attention, create_block_mask, export, export_cached, flex_attention
from flexpress.mods import alibi, alibi_slopes, sliding_window
from support.exported import load

pytestmark = pytest.mark.gpu
ALLOWED = 1.05


def time_of(function) -> float:
    """Milliseconds of the device, the median of some runs one after another."""
    for _ in range(5):
        function()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(5):
            function()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 5)
    return statistics.median(times)


def compare(own, library) -> None:
    mine, theirs = time_of(own), time_of(library)
    print(f"exported {mine:.3f} ms, the library {theirs:.3f} ms")
    assert mine <= ALLOWED * theirs


def problem(length=8192, grad=False):
    return [torch.randn(2, 16, length, 128, device="cuda", dtype=torch.bfloat16).requires_grad_(grad) for _ in range(3)]


def test_plain(tmp_path):
    q, k, v = problem()
    export(q, k, v, path=tmp_path / "own.py")
    own = load(tmp_path / "own.py")
    compare(lambda: own.attention(q, k, v), lambda: flex_attention(q, k, v, kernel_options={"BACKEND": "PORTABLE"}))


@pytest.mark.parametrize("length", [8192, 8000])
def test_alibi_and_a_window_with_gradients(tmp_path, length):
    q, k, v = problem(length, grad=True)
    slopes = alibi_slopes(16, "cuda").requires_grad_()
    mods = {"score_mod": alibi(slopes), "mask_mod": sliding_window(1024)}
    export(q, k, v, **mods, path=tmp_path / "own.py")
    own = load(tmp_path / "own.py")
    lists = own.create_block_lists(q, k, window=1024)
    mask = create_block_mask(mods["mask_mod"], None, None, length, length, device="cuda")
    d_out, inputs, options = torch.randn_like(q), (q, k, v, slopes), {"BACKEND": "PORTABLE"}

    def library():
        return flex_attention(q, k, v, score_mod=mods["score_mod"], block_mask=mask, kernel_options=options)

    compare(lambda: own.attention(q, k, v, slopes=slopes, lists=lists), library)
    compare(
        lambda: torch.autograd.grad(own.attention(q, k, v, slopes=slopes, lists=lists), inputs, d_out),
        lambda: torch.autograd.grad(library(), inputs, d_out),
    )


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
