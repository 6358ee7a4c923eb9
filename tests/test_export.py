"""Exported files: they run without flexpress, and compute what the library computes."""

from __future__ import annotations

import pytest
import torch

from flexpress import flex_attention
from flexpress.mods import alibi, alibi_slopes, causal, document, relative_bias, sliding_window
from support.dense import assert_as_accurate, dense_attention, relative_error
from support.devices import DEVICES
from support.exported import assert_equal, captured_of, run_alone, saved, tensors, undecided


@pytest.mark.parametrize("device", DEVICES)
def test_plain(tmp_path, device):
    q, k, v = tensors(device, D_V=48)
    path, module = saved(tmp_path, q, k, v)
    for lengths in ((1, 7), (129, 33)):
        q, k, v = tensors(device, Z=3, Hq=6, Hkv=2, Q_LEN=lengths[0], KV_LEN=lengths[1], D_V=48)
        out, lse = module.attention(q, k, v, scale=0.3, return_lse=True)
        assert_as_accurate(out, q, k, v, scale=0.3)
        library, library_lse = flex_attention(q, k, v, scale=0.3, enable_gqa=True, return_lse=True, kernel_options={"BACKEND": "PORTABLE"})
        assert_equal(out, library)
        assert_equal(lse, library_lse)
        assert out.stride() == library.stride()
    assert "error" in run_alone(path)


@pytest.mark.parametrize("device", DEVICES)
def test_alibi_and_a_window_with_gradients(tmp_path, device):
    q, k, v = tensors(device, Hq=4, Hkv=2, Q_LEN=90, KV_LEN=90, grad=True)
    slopes = alibi_slopes(4, device).requires_grad_()
    path, module = saved(tmp_path, q, k, v, score_mod=alibi(slopes), mask_mod=sliding_window(64), enable_gqa=True)
    for length, window in ((90, 64), (128, 100)):  # 128 are whole blocks, which have kernels of their own
        q, k, v = tensors(device, Z=1, Hq=4, Hkv=2, Q_LEN=length, KV_LEN=length, grad=True)
        inputs = q, k, v, slopes
        out, lse = module.attention(q, k, v, slopes=slopes, window=window, return_lse=True)
        mods = alibi(slopes), sliding_window(window)
        library, library_lse = flex_attention(q, k, v, score_mod=mods[0], mask_mod=mods[1], enable_gqa=True, return_lse=True)
        exact, exact_lse, _ = dense_attention(q, k, v, *mods)
        d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
        tolerance = 1e-5 if device == "cpu" else 2e-2
        for with_lse in (False, True):
            results = (out, lse), (library, library_lse), (exact, exact_lse)
            losses = [(o * d_out.to(o.dtype)).sum() + (e * d_lse.to(e.dtype)).sum() * with_lse for o, e in results]
            for mine, theirs, right in zip(*(torch.autograd.grad(loss, inputs, retain_graph=True) for loss in losses), strict=True):
                assert relative_error(mine, right) <= max(tolerance, 1.5 * relative_error(theirs, right))
                assert relative_error(mine, theirs) <= tolerance
    lists = module.create_block_lists(q, k, window=100)
    again = module.attention(q, k, v, slopes=slopes, window=100, lists=lists)
    assert torch.equal(again, out)
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(again.sum(), inputs), torch.autograd.grad(out.sum(), inputs), strict=True)
    )
    assert "gradient of slopes" in run_alone(path)


@pytest.mark.parametrize("device", DEVICES)
def test_a_document_mask_by_a_captured_tensor(tmp_path, device):
    q, k, v = tensors(device, Q_LEN=300, KV_LEN=300)
    ids = torch.arange(300, dtype=torch.int32, device=device) // 70
    path, module = saved(tmp_path, q, k, v, mask_mod=document(ids, causal))
    other = (torch.arange(170, dtype=torch.int32, device=device) // 33) % 3
    q, k, v = (t[:, :, :170] for t in (q, k, v))
    out = module.attention(q, k, v, ids=other)
    assert_as_accurate(out, q, k, v, mask_mod=document(other, causal))
    assert_equal(out, flex_attention(q, k, v, mask_mod=document(other, causal)))
    assert "dense" not in path.read_text().split("# ---- a demo")[0].replace("with dense attention", "")


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_that_is_evaluated(tmp_path, device):
    q, k, v = tensors(device, Q_LEN=140, KV_LEN=260, grad=True)
    _, module = saved(tmp_path, q, k, v, mask_mod=undecided)
    out = module.attention(q, k, v)
    library = flex_attention(q, k, v, mask_mod=undecided)
    assert_equal(out, library)
    gradients = (torch.autograd.grad(o.float().square().sum(), (q, k, v)) for o in (out, library))
    for mine, theirs in zip(*gradients, strict=True):
        assert relative_error(mine, theirs) <= (1e-5 if device == "cpu" else 2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_what_is_captured_in_every_way(tmp_path, device):
    """Elements by head and distance, by query, by key, and one for every position."""
    length = 70
    q, k, v = tensors(device, Z=2, Hq=2, Hkv=2, Q_LEN=length, KV_LEN=length, D=16, grad=True)
    generator = torch.Generator().manual_seed(1)
    table, rows, columns, bias = (
        torch.randn(shape, generator=generator).to(device).requires_grad_()
        for shape in ((2, 2 * length - 1), (2, length), (length // 2 + 1,), (2, 2, length, length))
    )
    near = relative_bias(table)

    def mod(score, b, h, q_idx, kv_idx):
        return near(score, b, h, q_idx, kv_idx) * 0.5 + rows[h, q_idx] + columns[kv_idx // 2] * rows[h, q_idx] + bias[b, h, q_idx, kv_idx]

    _, module = saved(tmp_path, q, k, v, score_mod=mod)
    inputs = q, k, v, table, rows, columns, bias
    out = module.attention(q, k, v, **captured_of(module, table=table, rows=rows, columns=columns, bias=bias))
    exact, *_ = dense_attention(q, k, v, mod)
    d_out = torch.randn_like(out)
    found, right = (torch.autograd.grad(o, inputs, d_out.to(o.dtype)) for o in (out, exact))
    for mine, wanted in zip(found, right, strict=True):
        assert relative_error(mine, wanted) <= (2e-5 if device == "cpu" else 3e-2)
