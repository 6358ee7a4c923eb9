"""What PyTorch's own tests ask of block masks: torch's where ours go, ours where torch's do, helpers, slices, pytrees.

docs/torch_tests.md says which of theirs each of these stands for.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch.utils import _pytree

import flexpress
from flexpress import BlockMask, create_block_mask, flex_attention
from flexpress.masks.foreign_masks import adopt
from support.dense import assert_as_accurate, dense_attention

LENGTH = 160
CREATORS = [flexpress.create_block_mask, torchs.create_block_mask]
OF_BOTH = pytest.mark.parametrize("create", CREATORS, ids=["ours", "torchs"])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 64


def later(b, h, q_idx, kv_idx):
    return q_idx < kv_idx


def tensors(Q_LEN=LENGTH, KV_LEN=LENGTH, B=2, H=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, 16, generator=generator).requires_grad_() for n in (Q_LEN, KV_LEN, KV_LEN)]


@OF_BOTH
@pytest.mark.parametrize("size", [32, 256, (128, 256), (256, 128), (1, 64), (128, 64), 96])
def test_block_sizes(size, create):
    for B, H, lengths in ((2, 2, (LENGTH, LENGTH)), (None, None, (1, LENGTH))):
        mask = create(near, B, H, *lengths, BLOCK_SIZE=size, device="cpu")
        assert (size if isinstance(size, tuple) else (size, size)) == mask.BLOCK_SIZE and mask.shape == (B or 1, H or 1, *lengths)
        q, k, v = tensors(*lengths)
        out = flex_attention(q, k, v, block_mask=mask)
        assert_as_accurate(out, q, k, v, None, near)
        exact, *_ = dense_attention(q, k, v, None, near)
        gradient = torch.randn_like(out)
        for got, expected in zip(*(torch.autograd.grad(o, (q, k, v), gradient.to(o.dtype)) for o in (out, exact)), strict=True):
            assert (got - expected).norm() <= 1e-4 * expected.norm()


def test_torchs_helpers_are_mask_mods():
    """and_masks, or_masks and noop_mask, inside each other, with ours and with mods that capture tensors."""
    ids = torch.arange(LENGTH) // 50
    same = lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]  # noqa: E731
    q, k, v = tensors()
    for torchs_mod, ours in (
        (torchs.noop_mask, flexpress.noop_mask),
        (torchs.and_masks(causal, near), flexpress.and_masks(causal, near)),
        (torchs.or_masks(causal, near, same), flexpress.or_masks(causal, near, same)),
        (
            torchs.and_masks(flexpress.or_masks(later, near), torchs.noop_mask, same),
            lambda b, h, i, j: (later(b, h, i, j) | near(b, h, i, j)) & same(b, h, i, j),
        ),
    ):
        made = [create(mod, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32) for mod in (torchs_mod, ours) for create in CREATORS]
        assert all(m.kv_num_blocks.equal(made[0].kv_num_blocks) and m.to_dense().equal(made[0].to_dense()) for m in made)
        out = flex_attention(q, k, v, mask_mod=torchs_mod)
        assert torch.equal(out, flex_attention(q, k, v, mask_mod=ours))
        torch.testing.assert_close(out, flex_attention(q, k, v, block_mask=made[0]))
    assert create_block_mask(torchs.and_masks(causal, later), 1, 1, 256, 256, device="cpu").kv_num_blocks.sum() == 0
    both = create_block_mask(torchs.or_masks(causal, later), 1, 1, 256, 256, device="cpu")
    assert both.sparsity() == create_block_mask(torchs.noop_mask, 1, 1, 256, 256, device="cpu").sparsity() == 0.0


def test_mods_that_are_partials():
    def padded(b, h, q_idx, kv_idx, lengths):
        return (q_idx < lengths[b]) & (kv_idx < lengths[b])

    lengths, (q, k, v) = torch.tensor([3, 100]), tensors()
    mod = functools.partial(padded, lengths=lengths)
    out = flex_attention(query=q, key=k, value=v, block_mask=create_block_mask(mod, B=2, H=None, Q_LEN=LENGTH, KV_LEN=LENGTH, device="cpu"))
    assert_as_accurate(out, q, k, v, None, mod)
    assert not out[0, :, 3:].any() and not out[1, :, 100:].any()
    within = functools.partial(lambda b, h, q_idx, kv_idx, width: (q_idx - kv_idx).abs() < width, width=torch.tensor(3.5))
    assert create_block_mask(within, None, None, 256, 256, device="cpu").kv_num_blocks.tolist() == [[[2, 2]]]


def test_indices_may_be_clamped():
    ids = torch.arange(130) // 40
    mod = lambda b, h, q_idx, kv_idx: ids[q_idx.clamp(0, 129)] == ids[kv_idx.clamp(0, len(ids) - 1)]  # noqa: E731
    q, k, v = tensors(130, 130)
    assert_as_accurate(flex_attention(q, k, v, block_mask=create_block_mask(mod, None, None, 130, 130, "cpu")), q, k, v, None, mod)


@OF_BOTH
def test_a_slice_with_a_mask_mod_of_its_own(create):
    """One query at a place of its own: the way of decoding that torch's documentation shows."""
    q, k, v = tensors(1)
    whole, place = create(causal, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32), 70
    part, offset = whole[:, :, place // 32], torch.tensor(place)
    part.mask_mod = lambda b, h, q_idx, kv_idx: whole.mask_mod(b, h, q_idx + offset, kv_idx)
    part.seq_lengths = (1, part.seq_lengths[1])
    assert_as_accurate(flex_attention(q, k, v, block_mask=part), q, k, v, None, lambda b, h, q_idx, kv_idx: q_idx + place >= kv_idx)


def test_slices_of_torchs_without_a_mask_mod_are_refused():
    whole, (q, k, v) = torchs.create_block_mask(causal, 2, 1, LENGTH, LENGTH, device="cpu"), tensors()
    for part in (whole[0], whole[:, :, 0]):
        with pytest.raises(ValueError, match="a slice of torch's BlockMask, which has lost its mask_mod"):
            flex_attention(q, k, v, block_mask=part)


def test_torchs_mask_that_stands_for_none():
    for lengths in ((LENGTH, LENGTH), (1, LENGTH), (70, 31)):
        q, k, v = tensors(*lengths)
        assert_as_accurate(flex_attention(q, k, v, block_mask=torchs._create_empty_block_mask(q, k)), q, k, v)


@pytest.mark.parametrize("cls", [BlockMask, torchs.BlockMask])
def test_masks_without_transposed_lists(cls):
    """They are made when a backward pass needs them."""
    count, listed = torch.tensor([[[4]]], dtype=torch.int32), torch.tensor([[[[0, 1, 2, 3]]]], dtype=torch.int32)
    mask = cls.from_kv_blocks(count, listed, compute_q_blocks=False)
    assert mask.shape == mask[0].shape == (1, 1, 128, 512) and mask.BLOCK_SIZE == (128, 128)
    q, k, v = tensors(128, 512, 1, 1)
    flex_attention(q, k, v, block_mask=mask).sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_lists_by_hand():
    """Listed as -1 past the count, full blocks apart from partial ones, and two that do not go together."""
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        ones, torch.tensor([[[[1, -1]]]], dtype=torch.int32), ones, torch.tensor([[[[0, -1]]]], dtype=torch.int32)
    )
    assert mask.q_num_blocks.tolist() == [[[0, 1]]] and mask.full_q_num_blocks.tolist() == [[[1, 0]]]
    assert mask.q_indices.tolist() == mask.full_q_indices.tolist() == [[[[0], [0]]]]
    lists = dict(
        kv_num_blocks=ones, kv_indices=ones[None], q_num_blocks=ones, q_indices=ones[None], BLOCK_SIZE=(64, 64), seq_lengths=(1, 1)
    )
    for name in ("full_kv", "full_q"):
        with pytest.raises(ValueError, match="go together"):
            BlockMask(**lists, **{f"{name}_num_blocks": ones, f"{name}_indices": None})


def test_attributes_and_slices_by_number():
    offset = torch.arange(8)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx + offset[b] * 128 >= kv_idx, 8, 2, 2048, 2048, device="cpu")
    assert mask.sparsity() == 29.1015625 and mask[0].sparsity() == 46.875 and mask[0].sparsity() > mask[1].sparsity()
    assert mask.numel() == 8 * 2 * 2048 * 2048 and mask[0].shape == (1, 2, 2048, 2048) and mask[-1, -2].kv_indices.shape == (1, 1, 16, 16)
    rows = torch.tensor([1, 3], dtype=torch.int32)
    assert mask[0:2, 1:2, rows].kv_num_blocks.shape == (2, 1, 2)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(mask[:, :, rows], name), getattr(mask, name)[:, :, rows])


def test_ours_are_instances_of_torchs():
    """As transformers, torchtune and others ask; and torch's flex_attention takes them."""
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
    assert isinstance(mask, torchs.BlockMask) and len(mask.shape) == 4 and isinstance(mask.to("cpu"), BlockMask)
    theirs = torchs.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
    ours, other = ([type(part) for part in m.as_tuple()] for m in (mask, theirs))
    assert ours == other or len(other) != len(ours)  # other versions of torch have fewer parts
    public = [name for name in dir(torchs.BlockMask) if not name.startswith("_")]
    assert all(getattr(BlockMask, name) is not getattr(torchs.BlockMask, name) for name in public)  # no code of torch's runs
    q, k, v = (t.detach() for t in tensors())
    kept, torchs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = torchs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, True
    try:
        torch.testing.assert_close(torchs.flex_attention(q, k, v, block_mask=mask), flex_attention(q, k, v, block_mask=theirs))
    finally:
        torchs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = kept


def test_masks_as_pytrees():
    """By the methods that programs register torch's BlockMask with."""
    mask = create_block_mask(causal, B=2, H=4, Q_LEN=512, KV_LEN=512, device="cpu")
    lists, context = mask._flatten()
    assert BlockMask._unflatten(lists, context) == mask
    for keyed, names in zip(mask._flatten_with_keys(), (BlockMask._TENSOR_ATTRS, BlockMask._CONTEXT_ATTRS), strict=True):
        assert [key for key, _ in keyed] == [_pytree.GetAttrKey(name) for name in names]
    wild = BlockMask._unflatten([lists[0] + 5, lists[1] - 9, *lists[2:]], context)  # lists are mended whoever made them
    q, k, v = (torch.randn(2, 4, 512, 16) for _ in range(3))
    assert flex_attention(q, k, v, block_mask=wild).isfinite().all()


def test_torchs_last_arguments():
    mask = create_block_mask(causal, 1, 1, LENGTH, LENGTH, "cpu", 32, False, True, False, True)
    assert mask == create_block_mask(causal, 1, 1, LENGTH, LENGTH, "cpu", 32, compute_dq_write_order=True, dq_kv_order=False)
    assert create_block_mask(causal, 1, 1, LENGTH, LENGTH, "cpu", 32, False, False).full_kv_num_blocks is None


@OF_BOTH
def test_masks_of_other_lengths_are_refused(create):
    q, k, v = tensors()
    for lengths in ((100, 100), (LENGTH - 1, LENGTH), (LENGTH + 1, LENGTH)):
        with pytest.raises(ValueError, match="block_mask was made for"):
            flex_attention(q, k, v, block_mask=create(causal, None, None, *lengths, device="cpu"))


def test_lists_in_torchs_order():
    """All by position, with orders of dQ's writes, which are taken and not there."""
    theirs = torchs.create_block_mask(near, None, None, LENGTH, LENGTH, device="cpu")
    lists = [getattr(theirs, f"{kind}{name}") for kind in ("kv_", "full_kv_", "q_", "full_q_") for name in ("num_blocks", "indices")]
    made = BlockMask((LENGTH, LENGTH), *lists, (128, 128), near, dq_write_order=None)
    assert torch.equal(made.to_dense(), theirs.to_dense()) and made.mask_mod is near
    assert made.dq_write_order is made.dq_write_order_full is made.dq_kv_order is made.dq_kv_order_spt is None
    again = BlockMask.from_kv_blocks(*lists[:4], mask_mod=near, seq_lengths=(LENGTH, LENGTH), dq_kv_order=True)
    assert again == made
    with pytest.raises(TypeError, match="q_num_blocks and q_indices must be tensors, got int and function; BLOCK_SIZE comes later"):
        BlockMask((LENGTH, LENGTH), *lists[:4], 128, near)


@pytest.mark.parametrize("combine", [flexpress.and_masks, flexpress.or_masks, torchs.or_masks], ids=["and", "or", "torchs"])
def test_combined_masks_are_functions_to_their_users(combine):
    """They get names, as attention-gym gives them, and arguments by name."""
    mask_mod = combine(causal, near)
    mask_mod.__name__ = "prefix_lm_4"
    assert mask_mod.__name__ == "prefix_lm_4" and mask_mod.__qualname__ and mask_mod.__code__.co_argcount == 4
    b, i = torch.tensor(0), torch.arange(4)
    assert torch.equal(mask_mod(b=b, h=b, q_idx=i[:, None], kv_idx=i), mask_mod(b, b, i[:, None], i))
    assert create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu").to_dense().any()


def test_a_mask_that_reaches_its_owner_goes_with_it():
    class Window(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.size = 20
            self.mask = torchs.create_block_mask(lambda b, h, i, j: i - j < self.size, None, None, 128, 128, device="cpu")

    q, window = torch.randn(1, 2, 128, 16), Window()
    flex_attention(q, q, q, block_mask=window.mask)
    gone = weakref.ref(window)
    del window
    gc.collect()
    assert gone() is None


def test_copies_of_masks_and_their_files():
    """What was read of a mask stays with it: a copy has lists and a mask_mod of its own, and a file needs nothing of ours."""
    q = torch.randn(1, 2, 200, 16)
    mask = torchs.create_block_mask(flexpress.mods.causal, None, None, 200, 200, device="cpu")
    expected = flex_attention(q, q, q, block_mask=mask)
    other, deep = copy.copy(mask), copy.deepcopy(mask)
    other.mask_mod = flexpress.mods.sliding_window(3)
    flex_attention(q, q, q, block_mask=other)
    assert adopt(other, (200, 200)) is not adopt(mask, (200, 200))  # threads may use both at once
    kept = io.BytesIO()
    torch.save(mask, kept)
    assert b"flexpress.foreign" not in kept.getvalue()
    kept.seek(0)
    for same in (mask, deep, torch.load(kept, weights_only=False)):
        assert torch.equal(flex_attention(q, q, q, block_mask=same), expected)
