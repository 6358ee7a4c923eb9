"""flex_attention against dense float64 attention: shapes, strides, dtypes, mods, masks. On a GPU the same with real shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flexpress
from flexpress import AuxRequest, cache_clear, create_block_mask, flex_attention, mods
from support.attention import check_attention
from support.dense import assert_as_accurate, dense_attention, relative_error
from support.devices import DEVICES, for_any
from support.evaluate import default_dtype
from support.problems import mask_mods, problems, tensor_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@for_any(problems, cpu=26, cuda=120)
def test_any_problem(p, device):
    check_attention(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [0, 1])
def test_empty_lengths(device, length):
    """No keys: output 0 and lse -inf. No queries: nothing."""
    q = torch.randn(1, 2, 5, 16, device=device)
    kv = torch.randn(1, 2, 0, 16, device=device)
    out, lse = flex_attention(q, kv, kv, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    out = flex_attention(q[:, :, :0], q[:, :, :length], q[:, :, :length])
    assert out.shape == (1, 2, 0, 16)


@pytest.mark.parametrize("device", DEVICES)
def test_output_keeps_the_order_of_dimensions(device):
    """(B, S, H, D) code gets (B, S, H, D) memory back."""
    q = torch.randn(2, 33, 4, 16, device=device).transpose(1, 2)
    assert flex_attention(q, q, q).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_infinite_keys_outside_the_mask_do_not_leak(device):
    """What a mask hides, and what lies past the end, contributes nothing, even if it is inf or NaN in memory."""
    k = torch.full((1, 1, 80, 16), math.nan, device=device)
    k[:, :, :50] = torch.randn(1, 1, 50, 16, device=device)
    q = torch.randn(1, 1, 33, 16, device=device)
    expected, *_ = dense_attention(q, k[:, :, :50], k[:, :, :50])
    assert relative_error(flex_attention(q, k[:, :, :50], k[:, :, :50]), expected) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "option",
    [
        {"PRESCALE_QK": True},
        {"BLOCK_M": 32, "BLOCK_N": 16},
        {"fwd_BLOCK_M": np.int64(16), "num_warps": 4, "num_stages": 1},
        {"FLOAT32_PRECISION": "tf32"},
    ],
)
def test_kernel_options(device, option):
    q, k, v = (torch.randn(1, 2, 70, 32, device=device) for _ in range(3))
    mask = create_block_mask(mods.causal, None, None, 70, 70, device)
    for score_mod in (None, mods.softcap(5.0)):
        out = flex_attention(q, k, v, score_mod, mask, kernel_options=option)
        expected, *_ = dense_attention(q, k, v, score_mod, mods.causal)
        assert relative_error(out, expected) < (2e-3 if option.get("FLOAT32_PRECISION") == "tf32" else 2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("promise", ["BLOCKS_ARE_CONTIGUOUS", "ROWS_GUARANTEED_SAFE"])
def test_promises_are_not_relied_on(promise, device):
    """Partial and full blocks of a window interleave. Each of its rows sees a key, but not in each tile that it visits."""
    q, k, v = (torch.randn(1, 1, 200, 16, device=device) for _ in range(3))
    for mod in (mods.sliding_window(50), mods.sliding_window(2), mods.prefix_lm(70)):
        mask = create_block_mask(mod, None, None, 200, 200, device, 32)
        out = flex_attention(q, k, v, block_mask=mask, kernel_options={promise: True, "BACKEND": "PORTABLE"})
        assert relative_error(out, dense_attention(q, k, v, None, mod)[0]) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_wide_keys_and_narrow_values(device):
    """ptxas 12.8 loses the address of V here (see compiler.newer_assembler)."""
    q, k = (tensor_of((2, heads, 70, 192), "wide_head_dim", torch.bfloat16, device, heads) for heads in (6, 2))
    v = tensor_of((2, 2, 70, 8), "sliced", torch.bfloat16, device, 0)
    mask_mod = mask_mods(70, device)["per_head"]
    mask = create_block_mask(mask_mod, 2, 6, 70, 70, device, 256, separate_full_blocks=False)
    out, _ = flex_attention(q, k, v, mods.softcap(3.0), mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True))
    assert_as_accurate(out, q, k, v, mods.softcap(3.0), mask_mod, None)


@pytest.mark.parametrize("device", DEVICES)
def test_block_masks_of_torch(device):
    """torch's BlockMask objects work, whichever way they were made."""
    from torch.nn.attention import flex_attention as theirs

    q, k, v = (torch.randn(2, 2, 130, 16, device=device) for _ in range(3))
    made = theirs.create_block_mask(mods.causal, 1, 1, 130, 130, device=device, BLOCK_SIZE=64)
    assert relative_error(flex_attention(q, k, v, block_mask=made), dense_attention(q, k, v, None, mods.causal)[0]) < 1e-6
    everything = torch.arange(3, dtype=torch.int32, device=device).expand(1, 1, 3, 3).contiguous()
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32, device=device)
    none = torch.zeros_like(counts)
    listed = theirs.BlockMask.from_kv_blocks(none, everything, counts, everything, BLOCK_SIZE=64, seq_lengths=(130, 130))
    assert relative_error(flex_attention(q, k, v, block_mask=listed), dense_attention(q, k, v)[0]) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    """Under autocast float32 inputs are computed in its dtype, as torch's scaled_dot_product_attention does."""
    q = torch.randn(1, 1, 20, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flex_attention(q, q, q).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("length", [16384, 4001])
@pytest.mark.parametrize("head_dim", [64, 128, (192, 128), 256])
def test_real_lengths(length, head_dim):
    """bfloat16 at real lengths, checked on the last rows of some heads; the error is at most that of torch's fused kernel."""
    d_qk, d_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    q, k = (torch.randn(1, 4, length, d_qk, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, 4, length, d_v, device="cuda", dtype=torch.bfloat16)
    mask = create_block_mask(mods.causal, None, None, length, length, "cuda")
    out = flex_attention(q, k, v, block_mask=mask)
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows = slice(length - 300, length)
    expected, *_ = dense_attention(q[:, :, rows], k, v, None, lambda b, h, m, n: m + length - 300 >= n)
    assert relative_error(out[:, :, rows], expected) <= 1.02 * relative_error(fused[:, :, rows], expected)


@pytest.mark.gpu
def test_repeats_are_bitwise_equal():
    q, k, v = (torch.randn(2, 8, 1000, 80, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(mods.causal, None, None, 1000, 1000, "cuda")
    first = flex_attention(q, k, v, mods.softcap(20.0), mask)
    for _ in range(100):
        assert torch.equal(flex_attention(q, k, v, mods.softcap(20.0), mask), first)


@pytest.mark.gpu
def test_cuda_graph_replays():
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flex_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, flex_attention(q, k, v))


@pytest.mark.gpu
def test_offsets_past_32_bits():
    """A captured bias of more than 2**31 elements, and a key/value buffer as large, are addressed in 64 bits."""
    length, heads = 16384, 9
    bias = torch.zeros(1, heads, length, length, device="cuda", dtype=torch.float16)  # 2.4e9 elements
    bias[0, -1] = torch.randn(length, device="cuda", dtype=torch.float16)
    q = torch.randn(1, heads, 128, 64, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16)

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[b, h, q_idx, kv_idx]

    out = flex_attention(q, kv, kv, biased)[:, -1:]
    expected, *_ = dense_attention(q[:, -1:], kv[:, -1:], kv[:, -1:], lambda s, b, h, m, n: s + bias[0, -1, 0][None])
    assert relative_error(out, expected) < 5e-3


@pytest.mark.gpu
def test_forward_allocates_no_scores():
    """Peak memory is the output and lse: nothing of Q_LEN x KV_LEN."""
    q, k, v = (torch.randn(1, 16, 16384, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(mods.causal, None, None, 16384, 16384, "cuda")
    flex_attention(q, k, v, block_mask=mask)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= out.nbytes + lse.nbytes + (1 << 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_statistics_are_float32_whatever_torch_makes_by_default(dtype, device):
    """Buffers of another element size would be overrun, or half filled."""
    cache_clear()  # what is decided at the first call of a kind lasts
    q = torch.randn(1, 2, 20, 16, dtype=torch.float32, device=device)
    with default_dtype(dtype):
        out, aux = flex_attention(q, q, q, return_aux=AuxRequest(lse=True, max_scores=True))
        scores = (q @ q.mT) * 0.25
    assert (out.dtype, aux.lse.dtype, aux.max_scores.dtype) == (torch.float32,) * 3
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(aux.max_scores, scores.amax(-1), rtol=1e-3, atol=1e-3)


def test_public_names_have_docstrings():
    public = [getattr(flexpress, name) for name in flexpress.__all__ if name not in ("MaskMod", "ScoreMod")]  # types have none
    assert all(thing.__doc__ for thing in public if callable(thing))
