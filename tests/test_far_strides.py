"""Batch entries and heads that lie 2**31 elements apart, and more: where they begin is computed in 64 bits.

Of the memory between them nothing is touched, so it takes no room on a CPU; what a stride of 32 bits would lead to is NaN.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from flexpress import cached_attention, flex_attention, update_cache
from flexpress.codegen.plan.geometry import FARTHEST_ROWS
from support.dense import dense_attention, relative_error
from support.devices import DEVICES

FAR = 1 << 31
NORESERVE = 0x4000  # Linux: memory is given where it is touched


def memory(elements: int, device: str, dtype=torch.float16) -> torch.Tensor:
    if device == "cuda":
        if torch.cuda.mem_get_info()[0] < 3 * elements * dtype.itemsize:
            pytest.skip("the GPU has too little memory")
        return torch.empty(elements, dtype=dtype, device="cuda")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", NORESERVE)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def far_apart(values: torch.Tensor) -> torch.Tensor:
    """A copy whose first dimension, of 2, has a stride of 2**31. Before it is NaN, where a stride of -2**31 would lead."""
    entry = values[0]
    base = memory(2 * FAR + entry.numel(), values.device.type, values.dtype)
    base[: entry.numel()] = float("nan")
    found = base.as_strided(values.shape, (FAR, *entry.contiguous().stride()), FAR)
    return found.copy_(values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [None, {"BACKEND": "PORTABLE"}, {"BACKEND": "TRITON_DECODE"}], ids=["any kernel", "portable", "decode"])
def test_keys_far_apart(device, options):
    length = 5 if options and "DECODE" in options["BACKEND"] else 130
    q, k, v = (torch.randn(2, 2, n, 32, device=device).half() for n in (length, 150, 150))
    far_k, far_v = far_apart(k), far_apart(v)
    backward = length > 16 and device == "cuda" or options == {"BACKEND": "PORTABLE"}
    inputs = [q, far_k, far_v]
    if backward:
        inputs = [t.requires_grad_() for t in inputs]
    out = flex_attention(*inputs, kernel_options=options)
    exact_inputs = [t.detach().double().cpu().requires_grad_() for t in (q, k, v)]
    exact = dense_attention(*exact_inputs)[0]
    assert relative_error(out.detach().cpu(), exact.detach()) < 2e-3
    if backward:
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, inputs, grad)
        for gradient, expected in zip(found, torch.autograd.grad(exact, exact_inputs, grad.double().cpu()), strict=True):
            assert relative_error(gradient.cpu(), expected) < 4e-3


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_far_apart(device):
    q, k = torch.randn(2, 2, 1, 32, device=device).half(), torch.randn(2, 64, 2, 32, device=device).half()
    cache = far_apart(k)
    lengths = torch.tensor([50, 64], dtype=torch.int32, device=device)
    out = cached_attention(q, cache, cache, lengths)
    for entry, length in enumerate(lengths.tolist()):
        keys = k[entry, :length].transpose(0, 1)[None].double().cpu()
        exact = dense_attention(q[entry : entry + 1].double().cpu(), keys, keys)[0]
        assert relative_error(out[entry : entry + 1].cpu(), exact) < 2e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", ["b", "1 - b", "1"])
def test_a_bias_far_apart(device, index):
    q, k, v = torch.randn(3, 2, 2, 130, 32, device=device).half().unbind()
    bias = torch.randn(2, 2, 130, 136, device=device).half()
    far = far_apart(bias)
    mods = {
        "b": lambda score, b, h, q_idx, kv_idx: score + far[b, h, q_idx, kv_idx],
        "1 - b": lambda score, b, h, q_idx, kv_idx: score + far[1 - b, h, q_idx, kv_idx],
        "1": lambda score, b, h, q_idx, kv_idx: score + far[1, h, q_idx, kv_idx],
    }
    read = {"b": bias, "1 - b": bias.flip(0), "1": bias[1:].expand(2, -1, -1, -1)}[index][..., :130].double().cpu()
    out = flex_attention(q, k, v, mods[index])
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double().cpu() for t in (q, k, v)), attn_mask=read)
    assert relative_error(out.cpu(), exact) < 2e-3


@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_a_cache_far_apart(device):
    """Head 8 of a cache whose heads are 2**28 elements apart begins at 2**31."""
    heads, stride, D = 9, FAR // 8, 16
    base = memory(FAR + 8 * stride + 4 * D, device)
    wrapped = base[FAR + 8 * stride - 2 * FAR :][:D]  # where head 8 would be in 32 bits
    k_cache = base.as_strided((1, 4, heads, D), (0, D, stride, 1), FAR)
    v_cache = torch.zeros(1, 4, heads, D, dtype=torch.float16, device=device)
    k_cache.zero_()
    wrapped.zero_()
    key = torch.arange(1, heads + 1, device=device).half()[None, :, None, None].expand(1, heads, 1, D).contiguous()
    update_cache(key, key, k_cache, v_cache, torch.tensor([2], dtype=torch.int32, device=device))
    assert torch.equal(k_cache[0, 1, :, 0].cpu(), key[0, :, 0, 0].cpu())
    assert not k_cache[0, 0].any()
    assert not wrapped.any()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_too_far_apart_are_refused(device):
    base = memory(2 * (FARTHEST_ROWS + 8), device)
    q = torch.randn(1, 1, 2, 16, device=device).half()
    k = base.as_strided((1, 1, 2, 16), (0, 0, FARTHEST_ROWS + 8, 1)).copy_(q)
    with pytest.raises(NotImplementedError, match=r"key: positions lie 8388616 elements apart in memory, .* key.contiguous\(\)"):
        flex_attention(q, k, q)
    at_most = base.as_strided((1, 1, 2, 16), (0, 0, FARTHEST_ROWS, 1)).copy_(q)
    assert torch.equal(flex_attention(q, at_most, q), flex_attention(q, q, q))


@pytest.mark.parametrize("device", DEVICES)
def test_columns_too_far_apart_are_refused(device):
    step = (1 << 24) + (1 << 18)
    base = memory(128 * step, device)
    q = torch.randn(1, 1, 20, 128, device=device).half()
    far = base.as_strided(q.shape, (0, 0, 1, step)).copy_(q)
    for name, given in {"query": (far, q, q), "key": (q, far, q), "value": (q, q, far)}.items():
        with pytest.raises(
            NotImplementedError, match=rf"{name}: positions lie 1 elements apart in memory, columns {step}, .* {name}.contiguous"
        ):
            flex_attention(*given, kernel_options={"BACKEND": "PORTABLE"})
    near = base.as_strided(q.shape, (0, 0, 1, 1 << 24)).copy_(q)
    assert torch.equal(flex_attention(q, near, q), flex_attention(q, q, q))


@pytest.mark.parametrize("device", DEVICES)
def test_large_pages_whose_rows_are_far_apart(device, monkeypatch):
    """Rows of a page are 2**31 elements apart and more, though neighbours are not."""
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")
    step, size = (1 << 21) + (1 << 16), 1024
    base = memory(size * step + 1000, device)
    caches = [base[at:].as_strided((2, size, 1, 16), (32, step, 16, 1)) for at in (0, 16)]
    values = torch.randn(2, 2, size, 1, 16, device=device).half()
    for cache, value in zip(caches, values, strict=True):
        cache.copy_(value)
    kv_len, pages = torch.tensor([size - 3], dtype=torch.int32, device=device), torch.tensor([[1]], dtype=torch.int32, device=device)
    q = torch.randn(1, 1, 1, 16, device=device).half()
    found, expected = (cached_attention(q, *given, kv_len, page_table=pages) for given in (caches, values.unbind()))
    assert torch.equal(found, expected)


def test_gradients_too_far_apart_are_copied():
    """A gradient of the output whose rows are too far apart is copied, as any whose rows kernels cannot read."""
    q = torch.randn(1, 1, 2, 16).half().requires_grad_()
    grad = memory(2 * (FARTHEST_ROWS + 8), "cpu").as_strided((1, 1, 2, 16), (0, 0, FARTHEST_ROWS + 8, 1)).copy_(q.detach())
    found = torch.autograd.grad(flex_attention(q, q, q), q, grad)[0]
    assert torch.equal(found, torch.autograd.grad(flex_attention(q, q, q), q, grad.contiguous())[0])
