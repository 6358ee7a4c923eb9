"""Rows whose scores are all finite and huge, as additive masks of -1e9 or finfo.min make them, beside ordinary ones: every kernel family.

Queries and keys are whole numbers, so that scores are exact in float32; the softmax of these is computed in float64.
"""

from __future__ import annotations

import math

import pytest
import torch

from flexpress import AuxRequest, cached_attention, create_block_mask, flex_attention, mods, varlen_attention
from flexpress.codegen import registry
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run import backward_kernels, forward_kernels
from flexpress.codegen.run.call import Bound, Inputs
from flexpress.codegen.run.forward import forward
from support.devices import DEVICES
from support.fake_hopper import forward_on_cpu

MIN = torch.finfo(torch.float32).min
TABLE = torch.tensor([0.0, -1e9, MIN, -65504.0])  # what models write for "hidden", by query
SLOPES = torch.tensor([1073741824.0, 1e5])


def score_mods(device: str) -> dict:
    table, slopes = TABLE.to(device), SLOPES.to(device)
    return {
        "all the same": lambda s, b, h, m, n: s - 1e9,
        "the least number": lambda s, b, h, m, n: s + MIN,
        "the largest numbers": lambda s, b, h, m, n: torch.where(n % 3 == 0, 3.4e38, torch.where(n % 3 == 1, -3.4e38, s)),
        "some rows": lambda s, b, h, m, n: torch.where(m % 2 == 0, s, s - 1e9),
        "additive masks": lambda s, b, h, m, n: s + torch.where((n > 5) & (n < 90), table[m % 4], table[(m + 1) % 4]),
        "one number apart": lambda s, b, h, m, n: s * 8 + 33554432.0,
        "64 apart": lambda s, b, h, m, n: s * 64 + 1e9,
        "products": lambda s, b, h, m, n: (1073741824 - h) * ((n - m) / 4),
        "times 1e9": lambda s, b, h, m, n: s * 1e9,
        "times 1e30": lambda s, b, h, m, n: s * 1e30,
        "rising": lambda s, b, h, m, n: s + n * 1.0e7,
        "falling": lambda s, b, h, m, n: s - n * 1.0e7,
        "rising to ordinary ones": lambda s, b, h, m, n: torch.where(n < 100, -3e38, s),
        "one left": lambda s, b, h, m, n: torch.where(n == m // 2, s - 3e38, -float("inf")),
        "slopes": lambda s, b, h, m, n: s + slopes[h] * (n - m),
        "by key": lambda s, b, h, m, n: s + torch.where(n > 100, -1e9, MIN),
    }


NAMES = list(score_mods("cpu"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def whole_numbers(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(device, dtype)


def exact(q, k, v, score_mod, mask_mod=None, scale=0.25):
    """out, lse and largest scores of float32 scores, in float64; differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    b, h, m, n = (
        torch.arange(size, device=q.device).view(view)
        for size, view in zip((*q.shape[:3], k.shape[2]), ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)), strict=True)
    )
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    scores = scores if score_mod is None else score_mod(scores, b, h, m, n).expand(scores.shape)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, m, n), -float("inf"))
    scores = scores.double()
    top = scores.amax(-1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ v.double(), top + (scores - top[..., None]).nan_to_num(0.0).exp().sum(-1).log(), top


def assert_close(found, expected, dtype):
    scale = expected.abs().max().clamp(min=1.0)
    # what was wrong is off by 1 or not finite; the weight of a row's largest score is any number near 1, and rounded
    allowed = {torch.float32: 5e-5, torch.float16: 5e-2, torch.bfloat16: 5e-1}[dtype]
    assert found.isfinite().all()
    assert ((found.double() - expected.double()).abs().max() / scale).item() <= allowed


def check(name, q, k, v, mask_mod=None, options=None, deterministic=False):
    """out, lse and the gradients of q, k and v; of v alone where the derivative makes the others' rounding errors large."""
    score_mod = score_mods(q.device)[name]
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    mask = mask_mod and create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device=q.device)
    out, lse = flex_attention(
        q, k, v, score_mod, mask, scale=0.25, enable_gqa=True, return_lse=True, kernel_options=options, deterministic=deterministic
    )
    expected = exact(q, k, v, score_mod, mask_mod)
    assert_close(out, expected[0], q.dtype)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-4)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    wanted = torch.autograd.grad(expected[0], (q, k, v), d_out.double(), allow_unused=True)
    found = torch.autograd.grad(out, (q, k, v), d_out)
    for ours, gradient in list(zip(found, wanted, strict=True))[2 if name.startswith("times") else 0 :]:
        assert_close(ours, torch.zeros_like(ours) if gradient is None else gradient, q.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_any_dtype(name):
    """In the interpreter a dtype for each mod, on a GPU all of them."""
    dtype = DTYPES[NAMES.index(name) % 3]
    q, k = (whole_numbers(1, h, n, 16, dtype=dtype, device="cpu", seed=n) for h, n in ((2, 70), (1, 130)))
    check(name, q, k, torch.randn(1, 1, 130, 16).to(dtype), options={"BACKEND": "TRITON"})


@pytest.mark.gpu
@pytest.mark.parametrize("backend, head_dim", [("TRITON", 64), ("GLUON", 64), ("GLUON", 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_dtype_on_gpu(monkeypatch, name, dtype, backend, head_dim):
    """Causal in half of the cases."""
    check_on_gpu(monkeypatch, name, dtype, backend, head_dim, mods.causal if NAMES.index(name) % 2 else None)


@pytest.mark.gpu
@pytest.mark.parametrize("mask_mod", [None, mods.causal], ids=["dense", "causal"])
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("name", ["all the same", "the least number", "slopes", "products"])
def test_large_head_dims_on_gpu(monkeypatch, name, head_dim, mask_mod):
    check_on_gpu(monkeypatch, name, torch.bfloat16, "GLUON", head_dim, mask_mod)


def check_on_gpu(monkeypatch, name, dtype, backend, head_dim, mask_mod):
    if backend == "GLUON" and (dtype is torch.float32 or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("no kernel for Hopper")
    for kernels in (forward_kernels, backward_kernels):
        monkeypatch.setattr(kernels, "worthwhile", lambda *_: None)
    q, k = (whole_numbers(2, h, n, head_dim, dtype=dtype, device="cuda", seed=n) for h, n in ((2, 300), (1, 400)))
    v = torch.randn(2, 1, 400, head_dim, device="cuda").to(dtype)
    check(name, q, k, v, mask_mod, {"BACKEND": backend})
    if backend == "GLUON" and name != "slopes":  # of which the two kernels round scores differently
        check(name, q, k, v, mask_mod, {"BACKEND": backend}, deterministic=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2.0**9, 2.0**14])
def test_without_a_mod(size, dtype, device):
    """Scores up to 2**31 of large queries and keys."""
    if dtype is torch.float16 and size > 2.0**9:
        pytest.skip("its gradients are beyond float16")
    q, k = (whole_numbers(1, 2, n, 16, dtype=dtype, device=device, seed=n) * size for n in (40, 70))
    v = torch.randn(1, 2, 70, 16, device=device).to(dtype)
    out, lse = flex_attention(q, k, v, scale=0.25, return_lse=True)
    expected = exact(q, k, v, None)
    assert_close(out, expected[0], dtype)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_few_queries(name, device):
    """Of which keys are split among programs; with gradients, and largest scores."""
    dtype = DTYPES[(NAMES.index(name) + 1) % 3]
    q, k = (whole_numbers(1, h, n, 16, dtype=dtype, device=device, seed=n) for h, n in ((2, 3), (1, 600)))
    v = torch.randn(1, 1, 600, 16, device=device).to(dtype)
    check(name, q, k, v, options={"BACKEND": "TRITON_DECODE"})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["all the same", "the least number", "additive masks", "products"])
def test_caches_and_packed_sequences(name, device):
    score_mod, lengths = score_mods(device)[name], [70, 3]
    q, k = (whole_numbers(sum(lengths), h, 16, dtype=torch.float32, device=device, seed=h) for h in (2, 1))
    v = torch.randn(sum(lengths), 1, 16, device=device)
    cu_seqlens = torch.tensor([0, 70, 73], dtype=torch.int32, device=device)
    out, lse = varlen_attention(q, k, v, cu_seqlens, score_mod=score_mod, scale=0.25, return_lse=True)
    cache_k, cache_v = (torch.zeros(2, 80, 1, 16, device=device) for _ in range(2))
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    for i, (start, length) in enumerate(((0, 70), (70, 3))):
        own = [t[start : start + length].transpose(0, 1)[None] for t in (q, k, v)]
        expected = exact(*own, score_mod)
        assert_close(out[start : start + length].transpose(0, 1)[None], expected[0], q.dtype)
        torch.testing.assert_close(lse[start : start + length].T[None].double(), expected[1], rtol=1e-6, atol=1e-4)
        cache_k[i, :length], cache_v[i, :length] = k[start : start + length], v[start : start + length]
    last = torch.stack((q[69], q[72]))[:, :, None]
    out = cached_attention(last, cache_k, cache_v, kv_len, score_mod=score_mod, scale=0.25)
    for i, (start, length) in enumerate(((0, 70), (70, 3))):
        own = [t[start : start + length].transpose(0, 1)[None] for t in (q, k, v)]
        assert_close(out[i], exact(*own, score_mod)[0][0, :, -1:], q.dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_largest_scores_are_scores(device):
    q, k = (whole_numbers(1, 2, n, 16, dtype=torch.float32, device=device, seed=n) for n in (20, 30))
    for score_mod in (score_mods(device)["times 1e9"], score_mods(device)["the least number"], None):
        _, aux = flex_attention(q, k, k, score_mod, scale=0.25, return_aux=AuxRequest(max_scores=True))
        torch.testing.assert_close(aux.max_scores.double(), exact(q, k, k, score_mod)[2], rtol=2e-7, atol=0.0)


@pytest.mark.parametrize(
    "name",
    [
        "all the same",
        "the least number",
        "the largest numbers",
        "64 apart",
        "rising",
        "rising to ordinary ones",
        "slopes",
        "by key",
        "products",
    ],
)
def test_text_for_hopper(monkeypatch, name):
    """The forward kernel for Hopper, in a stand-in for Gluon."""
    dtype = DTYPES[1 + NAMES.index(name) % 2]
    launched = forward_on_cpu(monkeypatch)
    registry.clear()
    q, k = (whole_numbers(1, h, n, 64, dtype=dtype, device="cpu", seed=n) for h, n in ((2, 130), (1, 260)))
    v = torch.randn(1, 1, 260, 64).to(dtype)
    score = bind(score_mods("cpu")[name], "score")
    out, lse, _, rows = forward(Bound(q, k, v, Inputs(q, k, v, False), 0.25, score), output_rows=True)
    registry.clear()
    assert len(launched) == 1
    expected = exact(q, k, v, score_mods("cpu")[name])
    assert rows.raw == (name == "slopes")
    top, share = rows.values.double().unbind(-1)
    torch.testing.assert_close(top * (0.25 if rows.raw else 1.0), expected[2], rtol=2e-7, atol=0.0)
    with_top = torch.where(expected[2].abs() < 1e7, expected[1] - expected[2], -share / math.log2(math.e))  # lse is too coarse for others
    torch.testing.assert_close(-share / math.log2(math.e), with_top, rtol=1e-5, atol=1e-5)
    assert_close(out, expected[0], dtype)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-4)
