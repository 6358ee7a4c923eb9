"""Masks that show few neighbouring keys: calls on Hopper with head dims up to 64 walk blocks of 64."""

from __future__ import annotations

import pytest
import torch

from flexpress import BlockMask, create_block_mask, flex_attention, mods
from flexpress.calls.call import bound
from flexpress.codegen import registry
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.plan import tiles
from flexpress.codegen.run.masks import visits
from support.dense import dense_attention, relative_error
from support.devices import DEVICES

LENGTH = 1100


@pytest.fixture(autouse=True)
def narrow_everywhere(monkeypatch):
    """Also on a CPU, and in float32."""
    monkeypatch.setattr(tiles, "_NARROW", {("cpu", 64, 4): 3, **tiles._NARROW})
    registry.clear()
    yield
    registry.clear()


def tensors(device, head_dim=64):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(1, n, LENGTH, head_dim, generator=generator, device=device).to(dtype).requires_grad_() for n in (2, 1, 1)]


def blocks_of(q, k, v, mask_mod=None, block_mask=None, kernel_options=None):
    """The sizes of the blocks that a call walks."""
    lists = bound(q, k, v, None, block_mask, None, True, kernel_options, mask_mod).lists
    return lists.q_block, lists.kv_block


@pytest.mark.parametrize(
    "mask_mod, rows",
    [
        (mods.sliding_window(1), 1),
        (mods.sliding_window(128), 2),
        (mods.sliding_window(257), 3),
        (mods.sliding_window(258), 4),
        (mods.sliding_window_bidirectional(64, 64), 3),
        (lambda b, h, q_idx, kv_idx: q_idx // 256 == kv_idx // 256, 2),
        (lambda b, h, q_idx, kv_idx: q_idx < 0, 0),
        (mods.causal, 32),
        (lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= h, None),
        (mods.document(torch.zeros(4096, dtype=torch.int32)), None),
    ],
)
def test_blocks_that_a_row_visits(mask_mod, rows):
    assert visits(bind(mask_mod, "mask"), (4096, 4096), 128) == rows
    assert visits(bind(mask_mod, "mask"), (4001, 4096), 128) == rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask_mod", [mods.sliding_window(100), mods.sliding_window_bidirectional(70, 31)], ids=["causal", "both_sides"])
def test_attention_and_gradients_in_narrow_blocks(mask_mod, device):
    """With and without a mask made before, bit by bit, and right; those of a mask with blocks of 64 are right, too."""
    q, k, v = tensors(device)
    d_out = torch.randn_like(q)
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device)
    fine = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device, BLOCK_SIZE=64)
    assert blocks_of(q, k, v, mask_mod) == blocks_of(q, k, v, block_mask=mask) == (64, 64)
    assert mask.BLOCK_SIZE == (128, 128) and mask.kv_indices.shape[-2:] == (9, 9)  # what the user sees of it
    results = []
    for more in ({"mask_mod": mask_mod}, {"block_mask": mask}, {"block_mask": fine}):
        out = flex_attention(q, k, v, enable_gqa=True, **more)
        results.append([out, *torch.autograd.grad(out, (q, k, v), d_out)])
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = dense_attention(*exact, None, mask_mod)[0]
    references = [out, *torch.autograd.grad(out, exact, d_out.double())]
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    for found in results:
        for got, want in zip(found, references, strict=True):
            assert relative_error(got, want) < (1e-5 if device == "cpu" else 8e-3)


def test_what_keeps_its_blocks():
    """Masks and calls that are not narrow, whose blocks someone chose, or that mean what their lists say."""
    q, k, v = tensors("cpu")
    window = mods.sliding_window(100)
    mask = create_block_mask(window, None, None, LENGTH, LENGTH, "cpu")
    assert blocks_of(q, k, v, mods.causal) == blocks_of(q, k, v, mods.sliding_window(400)) == (128, 128)
    assert blocks_of(*tensors("cpu", head_dim=80), window) == (128, 128)
    assert blocks_of(*(t[:, :, :1000] for t in (q, k, v)), window) == (128, 128)
    assert blocks_of(q, k, v, window, kernel_options={"BLOCK_M": 16}) == (128, 128)
    assert blocks_of(q, k, v, block_mask=create_block_mask(window, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=256)) == (256, 256)
    own = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, mask_mod=window, seq_lengths=(LENGTH, LENGTH))
    assert blocks_of(q, k, v, block_mask=own) == (128, 128)
    mask.mask_mod = mods.sliding_window(90)  # its lists are still those of the other window
    assert blocks_of(q, k, v, block_mask=mask) == (128, 128)


def test_windows_that_change_are_decided_anew():
    q, k, v = tensors("cpu")
    for window, blocks in ((100, 64), (600, 128), (200, 64)):
        assert blocks_of(q, k, v, mods.sliding_window(window)) == (blocks, blocks)
        out = flex_attention(q, k, v, mask_mod=mods.sliding_window(window), enable_gqa=True)
        assert relative_error(out, dense_attention(q, k, v, None, mods.sliding_window(window))[0]) < 1e-5
