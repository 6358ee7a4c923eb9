"""Masks that cost nothing: flex_attention(mask_mod=...), the lists that bounds give, capacities, and no waiting for a device."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from flexpress import BlockMask, cache_info, create_block_mask, flex_attention, mods
from flexpress.codegen import registry
from flexpress.codegen.mod.graphs.wide import in_wide_integers
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run import masks
from flexpress.codegen.run.masks import automatic_lists
from support.block_lists import as_kernels_compute, brute_force, check_bounds, check_lists, dense_status
from support.compositions import MASK_LEAVES, compositions, mask_captures
from support.dense import assert_as_accurate, dense_attention, relative_error
from support.devices import DEVICES
from support.evaluate import make_mod
from support.problems import MASK_MODS, mask_mods

SIZES = [(64, 64), (128, 128), (256, 256), (64, 128)]


def inputs(device, length=100, kv_length=None, heads=2, head_dim=16, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    lengths = (length, kv_length or length, kv_length or length)
    return [torch.randn(batch, heads, n, head_dim, generator=generator).to(device, dtype).requires_grad_() for n in lengths]


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
@settings(max_examples=60)
@given(
    st.integers(1, 3).flatmap(lambda depth: compositions("b", depth, MASK_LEAVES)),
    mask_captures(),
    st.sampled_from(SIZES),
    st.sampled_from([(1, 127), (129, 1), (127, 129), (129, 129), (1000, 127), (127, 1000)]),
    st.sampled_from([(1, 1), (2, 1), (1, 2)]),
)
def test_lists_of_random_masks(expression, captured, size, lengths, extents):
    """Against brute force: exact where create_block_mask evaluates what is undecided, never wrong by bounds alone."""
    mask_mod = make_mod(expression, "mask", captured)
    bound = in_wide_integers(bind(mask_mod, "mask"), (*extents, *lengths))
    if bound[0].symbols:
        truth = brute_force(as_kernels_compute(bound, (*extents, *lengths)), *extents, *lengths, size, "cpu")
        check_lists(create_block_mask(mask_mod, *extents, *lengths, "cpu", size), truth)
        lists = automatic_lists(bound, (*extents, *lengths), torch.device("cpu"), size)
        status = dense_status(lists, *truth.shape[-2:])
        assert ((status == 1) | (status == truth)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [m for m in MASK_MODS if m != "none"])
def test_bounds_are_never_wrong(name, device):
    length = 200 if device == "cpu" else 3000
    mask_mod = mask_mods(length, device)[name]
    for size in ((16, 16), (32, 64)) if device == "cpu" else ((128, 128), (64, 256)):
        extents = (2 if "b" in bind(mask_mod, "mask")[0].symbols else 1, 2 if "h" in bind(mask_mod, "mask")[0].symbols else 1)
        found, truth = check_bounds(mask_mod, *extents, length, length - 37, size, device)
        if name in ("causal", "window", "document", "per_batch", "per_head", "nothing", "joined"):  # decided as far as can be
            ragged = torch.zeros_like(truth, dtype=torch.bool)
            ragged[..., -1] = ragged[..., -1, :] = True
            assert ((found == truth) | ragged).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASK_MODS)
def test_the_call_makes_its_mask(name, device):
    """Outputs and gradients with mask_mod= equal those of dense attention."""
    length, kv_length = (70, 100) if device == "cpu" else (1000, 1300)
    mask_mod = mask_mods(max(length, kv_length), device)[name]
    q, k, v = inputs(device, length, kv_length, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    out = flex_attention(q, k, v, mods.softcap(3.0), mask_mod=mask_mod)
    assert_as_accurate(out, q, k, v, mods.softcap(3.0), mask_mod, None)
    d_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    exact = torch.autograd.grad(dense_attention(q, k, v, mods.softcap(3.0), mask_mod)[0], (q, k, v), d_out.double())
    for got, want in zip(grads, exact, strict=True):
        assert got.isfinite().all()
        assert relative_error(got, want) < (1e-5 if device == "cpu" else 1e-2) or want.norm() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["causal", "window", "document", "tiles", "per_batch"])
def test_marking_every_block_partial_changes_nothing(name, device):
    q, k, v = inputs(device, 60 if device == "cpu" else 1000)
    length = q.shape[2]
    mask_mod = mask_mods(length, device)[name]
    size = 16 if device == "cpu" else 128
    blocks = -(-length // size)
    counts = torch.full((1, 1, blocks), blocks, dtype=torch.int32, device=device)
    everywhere = BlockMask.from_kv_blocks(
        counts,
        torch.arange(blocks, dtype=torch.int32, device=device).expand(1, 1, blocks, blocks),
        BLOCK_SIZE=size,
        mask_mod=mask_mod,
        seq_lengths=(length, length),
    )
    want = flex_attention(q, k, v, block_mask=everywhere)
    d_out = torch.randn_like(want)
    gradients = torch.autograd.grad(want, (q, k, v), d_out)
    made = create_block_mask(mask_mod, 2, 2, length, length, device, size)
    for arguments in ({"mask_mod": mask_mod}, {"block_mask": made}, {"block_mask": made, "mask_mod": mask_mod}):
        out = flex_attention(q, k, v, **arguments)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), d_out), gradients)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [22, -22, 2**40])
def test_captured_numbers_beside_int64(number, device):
    """They come in as int32; bounds of an element of int64 that nobody knows do not fit into that."""
    table = (torch.arange(64 * 64, device=device) * 7919 % 64).reshape(64, 64)

    def mask_mod(b, h, q_idx, kv_idx):
        return (table[q_idx, kv_idx] & number) != 0

    check_bounds(mask_mod, 1, 1, 64, 64, (64, 64), device)
    check_lists(create_block_mask(mask_mod, 1, 1, 64, 64, device, 16), brute_force(mask_mod, 1, 1, 64, 64, (16, 16), device))


@pytest.mark.parametrize("device", DEVICES)
def test_block_mask_and_mask_mod_must_agree(device):
    q, k, v = inputs(device)
    mask = create_block_mask(mods.sliding_window(30), None, None, 100, 100, device)
    flex_attention(q, k, v, block_mask=mask, mask_mod=mods.sliding_window(30))
    with pytest.raises(ValueError, match="block_mask was made of sliding_window, not of the mask_mod sliding_window"):
        flex_attention(q, k, v, block_mask=mask, mask_mod=mods.sliding_window(31))
    with pytest.raises(ValueError, match="not of the mask_mod causal"):
        flex_attention(q, k, v, block_mask=mask, mask_mod=mods.causal)

    def mapped(window):
        return vmap(lambda q: flex_attention(q, k, v, block_mask=mask, mask_mod=mods.sliding_window(window)))(q[None])

    torch.testing.assert_close(mapped(30)[0], flex_attention(q, k, v, block_mask=mask))
    with pytest.raises(ValueError, match="block_mask was made of sliding_window, not of the mask_mod sliding_window"):
        mapped(31)


@pytest.mark.parametrize("device", DEVICES)
def test_masks_without_tensors_are_kept(device):
    """The same window at the same length launches no mask kernel; another one gets its own lists."""
    q, k, v = (t.detach() for t in inputs(device))  # a backward pass has lists of its own
    registry.clear()
    kept = []
    for window in (30, 30, 8, 30):
        out = flex_attention(q, k, v, mask_mod=mods.sliding_window(window))
        torch.testing.assert_close(out, dense_attention(q, k, v, None, mods.sliding_window(window))[0].float(), rtol=1e-4, atol=1e-4)
        kept.append(len(masks._kept))
    assert kept == [1, 1, 2, 2]
    for _ in range(2):
        flex_attention(q, k, v, mask_mod=mods.document(torch.zeros(100, dtype=torch.int32, device=device)))
    assert len(masks._kept) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_captured_tensors_are_read_at_every_call(device):
    """Also after writes that autograd's version counter does not see."""
    q, k, v = (t.detach() for t in inputs(device))
    ids = torch.zeros(100, dtype=torch.int64, device=device)
    mask_mod = mods.document(ids)
    for cut in (100, 50, 7):
        ids.data.copy_(torch.arange(100, device=device) // cut)
        assert relative_error(flex_attention(q, k, v, mask_mod=mask_mod), dense_attention(q, k, v, None, mask_mod)[0]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_that_changes_every_step(device):
    """Window, offset and lengths change at every step: nothing is compiled after a first one with few, more and many keys (which are not
    split, in tiles for few queries, and split), and the host never waits for the device."""
    steps = 1000 if device == "cuda" else 12
    cache = [torch.randn(1, 2, 4096 if device == "cuda" else 64, 64, device=device) for _ in range(2)]
    q = torch.randn(1, 4, 1, 64, device=device)

    def step(i: int) -> tuple:
        length, window, offset = 17 + 2 * i, 5 + i % 91, 16 + 2 * i

        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx + offset >= kv_idx) & (q_idx + offset - kv_idx < window)

        k, v = (t[:, :, :length] for t in cache)
        return flex_attention(q, k, v, mask_mod=mask_mod, enable_gqa=True), k, v, mask_mod

    for i in (0, 150, 900) if device == "cuda" else (0,):
        step(i)
    before = cache_info()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = [step(i) for i in range(1, steps)]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    after = cache_info()
    assert (after.compiles, after.traces, after.prints) == (before.compiles, before.traces, before.prints)
    for out, k, v, mask_mod in found[::97] if device == "cuda" else found[::5]:
        assert relative_error(out, dense_attention(q, k, v, None, mask_mod)[0]) < 1e-5


@pytest.mark.gpu
def test_cuda_graphs_replay_masks_of_changed_tensors():
    q, k, v = (t.detach() for t in inputs("cuda", 1000, dtype=torch.bfloat16, head_dim=64))
    ids = (torch.arange(1000, device="cuda") // 300).to(torch.int32)
    mask_mod = mods.document(ids, mods.causal)

    def both():
        mask = create_block_mask(mask_mod, None, None, 1000, 1000, "cuda", capacity=8)
        return flex_attention(q, k, v, mask_mod=mask_mod), flex_attention(q, k, v, block_mask=mask)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = both()
    for cut in (300, 77, 1000):
        ids.copy_(torch.arange(1000, device="cuda") // cut)
        graph.replay()
        for out in outs:
            assert_as_accurate(out, q, k, v, None, mask_mod, None)


@pytest.mark.parametrize("device", DEVICES)
def test_large_lists_are_as_wide_as_the_densest_row(device, monkeypatch):
    """Small ones are as wide as there are columns, and nobody waits for them."""
    shapes = {"window": (mods.sliding_window(100), 2, 1), "causal": (mods.causal, 1, 15)}
    for mask_mod, _, _ in shapes.values():
        assert create_block_mask(mask_mod, None, None, 2048, 2048, device).as_lists().kv_indices.shape == (1, 1, 16, 16)
    monkeypatch.setattr(masks, "_ROOMY", 1000)
    for mask_mod, partial, full in shapes.values():
        mask = create_block_mask(mask_mod, None, None, 2048, 2048, device)
        lists, turned = mask.as_lists(), mask.as_transposed_lists()
        assert lists.kv_indices.shape == turned.kv_indices.shape == (1, 1, 16, partial)
        assert lists.full_kv_indices.shape == turned.full_kv_indices.shape == (1, 1, 16, full)
        assert mask.kv_indices.shape == mask.q_indices.shape == (1, 1, 16, 16)


def test_small_lists_are_not_waited_for(monkeypatch):
    """No number is read back from the device, for a mask, its transposed lists and a call that makes its mask, with its backward pass."""
    q, k, v = (torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3))
    window = mods.sliding_window(100)

    def all_of_it():
        create_block_mask(window, None, None, 300, 300, "cpu").as_transposed_lists()
        flex_attention(q, k, v, mask_mod=window).sum().backward()

    all_of_it()  # tracing a mod folds constants by torch

    def read(*_):
        raise AssertionError("a number is read back")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            patch.setattr(torch.Tensor, name, read)
        all_of_it()


def test_capacity():
    made = create_block_mask(mods.sliding_window(100), None, None, 1024, 1024, "cpu", capacity=3)
    assert made.as_lists().kv_indices.shape == made.as_lists().full_kv_indices.shape == (1, 1, 8, 3)
    assert made == create_block_mask(mods.sliding_window(100), None, None, 1024, 1024, "cpu")
    with pytest.raises(RuntimeError, match="a row has more blocks than capacity=1"):
        create_block_mask(mods.sliding_window(100), None, None, 1024, 1024, "cpu", capacity=1)
    assert create_block_mask(mods.causal, None, None, 64, 64, "cpu", capacity=1 << 40).kv_indices.shape == (
        1,
        1,
        1,
        1,
    )  # no wider than columns
    with pytest.raises(ValueError, match="capacity is -1; it must be at least 0"):
        create_block_mask(mods.causal, None, None, 64, 64, "cpu", capacity=-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(0, 64), (64, 0), (0, 0)])
def test_nothing_to_mask(lengths, device):
    q, k, v = inputs(device, 1)
    q, k, v = (
        t[:, :, :0].expand(-1, -1, 0, -1) if n == 0 else t.expand(-1, -1, n, -1)
        for t, n in zip((q, k, v), (lengths[0], lengths[1], lengths[1]), strict=True)
    )
    out = flex_attention(q, k, v, mask_mod=mods.causal)
    assert out.shape == q.shape and (out == 0).all()
    mask = create_block_mask(mods.causal, None, None, *lengths, device, capacity=3)
    assert mask.shape == (1, 1, *lengths) and mask.kv_num_blocks.sum() == 0


@pytest.mark.gpu
def test_a_million_positions():
    """The status of 67 million blocks, counted: what bounds decide is right at this size too."""
    length, blocks = 1 << 20, 8192
    window = create_block_mask(mods.sliding_window(1024), None, None, length, length, "cuda")
    assert window.kv_num_blocks.sum().item() == blocks + blocks - 8 and window.full_kv_num_blocks.sum().item() == 7 * blocks - 28
    assert window.as_lists().kv_indices.shape == (1, 1, blocks, 2)
    causal = create_block_mask(mods.causal, None, None, length, length, "cuda")
    assert causal.kv_num_blocks.eq(1).all()
    assert causal.full_kv_num_blocks[0, 0].equal(torch.arange(blocks, device="cuda", dtype=torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_of_zero_is_not_one_of_minus_zero(device):
    """They are equal, and so is their hash; lists of one are not kept for the other."""
    q, k, v = inputs(device)

    def at_one_end(end):
        return lambda b, h, q_idx, kv_idx: torch.reciprocal(torch.full_like(kv_idx, 1, dtype=torch.float32) * end) > torch.tan(0.0 * q_idx)

    for end in (0.0, -0.0, 0.0):
        out = flex_attention(q, k, v, mask_mod=at_one_end(end))
        exact = dense_attention(q, k, v, mask_mod=at_one_end(end))[0]
        assert out.any() == exact.any() == (math.copysign(1, end) > 0)
        assert relative_error(out, exact) < 1e-5 or not exact.any()


def test_a_block_mask_whose_mask_mod_was_taken_away():
    """Its partial blocks are not whole ones."""
    q = torch.randn(1, 1, 20, 16)
    mask = create_block_mask(mods.causal, 1, 1, 20, 20, device="cpu")
    mask.mask_mod = None
    with pytest.raises(TypeError, match="block_mask.mask_mod is None; set it to a function, or to noop_mask"):
        flex_attention(q, q, q, block_mask=mask)
