"""torch's attention functions by flexpress's kernels, through torch's registry of FlashAttention implementations.

On a CPU torch has other operators behind scaled_dot_product_attention; there the ones of the registry are called by their names.
"""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch
from torch.nn import attention

from flexpress.integrations import torch as integration
from support.devices import DEVICES

varlen = pytest.importorskip("torch.nn.attention.varlen")
F = torch.nn.functional
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def installed(device):
    """torch's operators on this device are flexpress's; a call that reaches none of our kernels fails the test."""
    handle = integration.install(device.upper())
    with (
        mock.patch.object(integration, "bound", wraps=integration.bound) as dense,
        mock.patch.object(integration, "packed_call", wraps=integration.packed_call) as packed,
    ):
        yield
    handle.remove()
    assert dense.called or packed.called


def dtype_on(device) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def inputs(device, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype_on(device)).requires_grad_() for shape in shapes]


def assert_like_dense(found, tensors, mask, grad_out):
    """out and the gradients of `tensors`, (B, H, S, D), beside dense attention in float64 with a bool mask."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    q, k, v = exact
    group = q.shape[1] // k.shape[1]
    out = F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask)
    wanted = [out, *torch.autograd.grad(out, exact, grad_out.double())]
    for ours, true in zip(found, wanted, strict=True):
        error = (ours.double() - true).norm() / true.norm()
        assert error < (1e-6 if ours.dtype == torch.float32 else 1e-2), error


@on_devices
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_product_attention(is_causal, device, installed):
    length = 40 if device == "cpu" else 500
    q, k, v = inputs(device, (2, 4, length, 16), *2 * [(2, 4 if device == "cpu" else 2, length, 16)])
    if device == "cpu":
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    else:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad_out)]
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril() if is_causal else None
    assert_like_dense(found, (q, k, v), mask, grad_out)


HAS = inspect.signature(varlen.varlen_attn).parameters  # other versions of torch have fewer
LENGTHS = [(9, 9), (0, 4), (5, 12), (12, 5)]


def offsets(lengths, device):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)


@on_devices
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4), (-1, 2)])
@pytest.mark.parametrize("shared", [True, False])
def test_varlen_attn(window, shared, device, installed):
    """Each sequence by itself, causal and windows from its bottom right corner; rows that see nothing are 0 and have no gradient."""
    lengths = [(n, n) for n, _ in LENGTHS] if shared else LENGTHS
    scale = 1 if device == "cpu" else 20
    lengths = [(scale * nq, scale * nk) for nq, nk in lengths]
    starts = [offsets([pair[i] for pair in lengths], device) for i in (0, 1)]
    total_q, total_k = (sum(pair[i] for pair in lengths) for i in (0, 1))
    gqa = {"enable_gqa": True} if "enable_gqa" in HAS else {}
    q, k, v = inputs(device, (total_q, 4, 16), *2 * [(total_k, 2 if gqa else 4, 16)])
    longest = 12 * scale
    out = varlen.varlen_attn(q, k, v, starts[0], starts[0] if shared else starts[1], longest, longest, window_size=window, **gqa)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad_out)]

    mask = torch.zeros(total_q, total_k, dtype=torch.bool, device=device)
    for (nq, nk), sq, sk in zip(lengths, starts[0].tolist(), starts[1].tolist(), strict=False):
        distance = torch.arange(nk, device=device) - (torch.arange(nq, device=device)[:, None] + nk - nq)
        seen = torch.ones(nq, nk, dtype=torch.bool, device=device)
        if window[0] >= 0:
            seen &= distance >= -window[0]
        if window[1] >= 0:
            seen &= distance <= window[1]
        mask[sq : sq + nq, sk : sk + nk] = seen
    turned = [t.transpose(0, 1)[None] for t in (*found, q, k, v, grad_out)]
    assert_like_dense(turned[:4], turned[4:7], mask, turned[7])


@pytest.mark.skipif("block_table" not in HAS, reason="this torch's varlen_attn has no block_table")
@on_devices
def test_keys_that_are_not_there_yet(device):
    """seqused_k: the first keys of each sequence's room; causal from the last of these."""
    handle = integration.install(device.upper())
    used, starts_q, starts_k = [7, 12, 2], offsets([3, 5, 2], device), offsets([12, 12, 12], device)
    q, k, v = (t.detach() for t in inputs(device, (10, 4, 16), (36, 2, 16), (36, 2, 16)))
    seqused_k = torch.tensor(used, dtype=torch.int32, device=device)
    options = {"seqused_k": seqused_k, "enable_gqa": True, "window_size": (-1, 0)}
    packed = varlen.varlen_attn(q, k, v, starts_q, starts_k, 5, 12, **options)
    table = torch.arange(9, dtype=torch.int32, device=device).view(3, 3).flip(0)  # pages of 4 positions
    pages = [t.view(3, 3, 4, 2, 16).flip(0).reshape(9, 4, 2, 16) for t in (k, v)]
    paged = varlen.varlen_attn(q, *pages, starts_q, None, 5, 12, block_table=table, **options)
    handle.remove()
    for b, n in enumerate(used):
        rows = slice(*starts_q[b : b + 2].tolist())
        seen = torch.ones(rows.stop - rows.start, n, dtype=torch.bool, device=device).tril(n - (rows.stop - rows.start))
        exact = [t.double().transpose(0, 1)[None] for t in (q[rows], k[12 * b : 12 * b + n], v[12 * b : 12 * b + n])]
        wanted = F.scaled_dot_product_attention(exact[0], *(t.repeat_interleave(2, 1) for t in exact[1:]), seen)[0].transpose(0, 1)
        for found in (packed, paged):
            torch.testing.assert_close(found[rows].double(), wanted, rtol=0, atol=1e-6 if device == "cpu" else 2e-2)


def test_one_line_activates_it():
    integration.activate()
    assert attention.current_flash_attention_impl() == "flexpress" and "flexpress" in attention.list_flash_attention_impls()
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_a_torch_without_the_registry_is_told(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match="use torch>=2.11"):
        integration.register()


@pytest.mark.parametrize("more, words", [({"dropout_p": 0.1}, "dropout"), ({"return_debug_mask": True}, "a debug mask")])
def test_what_is_refused(more, words):
    handle = integration.install("CPU")
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match=f"flexpress, the active FlashAttention implementation, does not take {words}"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, **more)
    handle.remove()
