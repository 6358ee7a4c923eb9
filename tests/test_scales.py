"""scale= as a tensor: learned, of any floating dtype, on the CPU or the call's device, and read by nobody on the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from flexpress import cache_info, cached_attention, explain, flex_attention, mods, varlen_attention
from support.dense import dense_attention
from support.devices import DEVICES


def tensors(device: str, *shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_learned_scale_gets_its_gradient(dtype, shape, device):
    slopes = torch.linspace(0.1, 0.5, 4, device=device, requires_grad=True)
    score_mod = lambda score, b, h, q_idx, kv_idx: torch.tanh(score) * 3 - slopes[h] * (q_idx - kv_idx).abs()  # noqa: E731
    q, k, v = tensors(device, (2, 4, 50, 16), (2, 2, 70, 16), (2, 2, 70, 16))
    gradient = torch.randn(2, 4, 50, 16, generator=torch.Generator().manual_seed(1)).to(device)  # a sum that is no sum of opposites
    for mod in (None, score_mod):
        for home in {device, "cpu"}:
            scale = torch.full(shape, 0.375, dtype=dtype, device=home, requires_grad=True)
            wanted = (q, k, v, scale) if mod is None else (q, k, v, scale, slopes)
            out = flex_attention(q, k, v, mod, mask_mod=mods.sliding_window(30), scale=scale, enable_gqa=True)
            exact, *_ = dense_attention(q, k, v, mod, mods.sliding_window(30), scale.to(device).double().reshape(()))
            torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
            got = torch.autograd.grad(out, wanted, gradient)
            expected = torch.autograd.grad(exact, wanted, gradient.double())
            for g, e in zip(got, expected, strict=True):
                assert (g.dtype, g.shape, g.device) == (e.dtype, e.shape, e.device)
                assert (g - e).norm() <= {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(g.dtype, 1e-4) * e.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mod", [None, mods.softcap(5.0)])
def test_a_learned_scale_of_packed_sequences(mod, device):
    lengths = [20, 33, 0, 11]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    q, k, v = tensors(device, (64, 2, 16), (64, 2, 16), (64, 2, 16))
    scale = torch.nn.Parameter(torch.tensor(0.5, device=device))
    gradient = torch.randn(64, 2, 16, device=device)
    out = varlen_attention(q, k, v, ends, None, mod, mods.causal, scale=scale)
    triples = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    parts = [[t.transpose(0, 1)[None] for t in triple] for triple in triples if len(triple[0])]
    exact = torch.cat([dense_attention(*part, mod, mods.causal, scale)[0][0].transpose(0, 1) for part in parts])
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    got, expected = (torch.autograd.grad(o, (q, k, v, scale), gradient.to(o.dtype)) for o in (out, exact))
    for g, e in zip(got, expected, strict=True):
        assert (g - e).norm() <= 1e-4 * e.norm()


def test_finite_differences():
    """Of out and lse, by the scale."""
    q, k, v = tensors("cpu", (1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16))
    scale = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)

    def summed(x):
        out, lse = flex_attention(q, k, v, mods.softcap(4.0), scale=x, return_lse=True)
        return out.double().square().sum() + lse.double().sum()

    (slope,) = torch.autograd.grad(summed(scale), scale)
    with torch.no_grad():
        measured = (summed(scale + 1e-2) - summed(scale - 1e-2)) / 2e-2
    assert slope.item() == pytest.approx(measured.item(), rel=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_another_scale_compiles_nothing_and_is_not_read_on_the_host(device):
    q = tensors(device, (1, 2, 40, 16))[0]
    scale = torch.tensor(0.5, device=device, requires_grad=True)
    flex_attention(q, q, q, mods.softcap(5.0), scale=scale).sum().backward()
    before = cache_info()
    with mock.patch.object(torch.Tensor, "item", side_effect=AssertionError("read on the host")):
        flex_attention(q, q, q, mods.softcap(5.0), scale=scale * 3).sum().backward()
    after = cache_info()
    assert (after.traces, after.prints, after.compiles) == (before.traces, before.prints, before.compiles)
    assert "forward" in explain(q, q, q, scale=scale)


@pytest.mark.gpu
def test_a_scale_on_a_gpu_is_not_waited_for():
    q = torch.randn(1, 2, 64, 16, device="cuda")
    k_cache = torch.randn(1, 64, 2, 16, device="cuda")
    kv_len = torch.full((1,), 64, dtype=torch.int32, device="cuda")
    scale = torch.tensor(0.5, device="cuda")

    def both(scale):
        return flex_attention(q, q, q, scale=scale), cached_attention(q[:, :, :1], k_cache, k_cache, kv_len, scale=scale)

    both(scale)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = both(scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, expected in zip(found, both(0.5), strict=True):
        torch.testing.assert_close(got, expected)


def test_scales_without_gradient():
    """On the CPU a tensor is a number, and so is a learned one under torch.no_grad()."""
    q = torch.randn(1, 1, 20, 16)
    expected = flex_attention(q, q, q, scale=0.5)
    assert torch.equal(flex_attention(q, q, q, scale=torch.tensor([0.5], dtype=torch.bfloat16)), expected)
    with torch.no_grad():
        assert torch.equal(flex_attention(q, q, q, scale=torch.tensor(0.5, requires_grad=True)), expected)


def test_a_cache_takes_a_scale_without_gradient():
    q, k_cache, kv_len = torch.randn(1, 2, 1, 16), torch.randn(1, 64, 2, 16), torch.tensor([50], dtype=torch.int32)
    expected = cached_attention(q, k_cache, k_cache, kv_len, scale=0.5)
    assert torch.equal(cached_attention(q, k_cache, k_cache, kv_len, scale=torch.tensor(0.5)), expected)
    with pytest.raises(NotImplementedError, match="scale requires grad, but cached_attention is not differentiable"):
        cached_attention(q, k_cache, k_cache, kv_len, scale=torch.tensor(0.5, requires_grad=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-37, 1e-39, 1e-46, 5e-324])
@pytest.mark.parametrize("backend", ["AUTO", "PORTABLE"])
def test_tiny_scales(scale, backend, device):
    """Weights are alike, also where a row's first blocks of keys are hidden."""
    q, k, v = (torch.randn(1, 1, n, 16, device=device).requires_grad_() for n in (40, 300, 300))

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx == 290) | ((kv_idx == 5) & (q_idx == 3))

    for mask in (None, mods.causal, mask_mod):
        out, lse = flex_attention(q, k, v, mask_mod=mask, scale=scale, return_lse=True, kernel_options={"BACKEND": backend})
        expected, expected_lse, *_ = dense_attention(q.double(), k.double(), v.double(), None, mask, 0.0)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
        for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
            assert gradient.isfinite().all()
