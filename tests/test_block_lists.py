"""Lists of blocks from elsewhere, whatever they hold, and blocks of any size, against the dense mask that they mean."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import BlockMask, create_block_mask, flex_attention, mods
from flexpress.codegen.run.call import reached
from flexpress.masks.block_lists import kernel_size
from support.dense import dense_attention
from support.devices import DEVICES


def stripes(b, h, q_idx, kv_idx):
    return (q_idx * 7 + kv_idx * 3 + h) % 4 != 0


def meant(lists, size, lengths, mask_mod=stripes):
    """The mask_mod that lists mean, as torch defines them: dense, by a walk over every entry. What points outside means nothing."""
    counts, indices, full_counts, full_indices = (None if t is None else t.cpu() for t in lists)
    columns = -(-lengths[1] // size[1])
    status = torch.zeros(*counts.shape, columns, dtype=torch.int8)
    for value, n, listed in ((1, counts, indices), (2, full_counts, full_indices)):
        for place in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist() if n is not None else ():
            for block in listed[tuple(place)][: max(int(n[tuple(place)]), 0)].tolist():
                if 0 <= block < columns:
                    status[(*place, block)] = value

    def mask(b, h, q_idx, kv_idx):
        found = status.to(q_idx.device)[
            b if status.shape[0] > 1 else 0, h if status.shape[1] > 1 else 0, q_idx // size[0], kv_idx // size[1]
        ]
        return (found == 2) | ((found == 1) & mask_mod(b, h, q_idx, kv_idx))

    return mask


def random_lists(shape, columns, generator, full=True, corrupt=True):
    """Counts and indices, partial and full: of numbers that may point anywhere if `corrupt`."""
    made = []
    for _ in range(1 + full):
        width = int(torch.randint(1, columns + 3, (), generator=generator))
        indices = torch.randint(-3 if corrupt else 0, columns + 3 if corrupt else columns, (*shape, width), generator=generator)
        counts = torch.randint(-2 if corrupt else 0, width + 4 if corrupt else width + 1, shape, generator=generator)
        if corrupt and int(torch.randint(0, 2, (), generator=generator)):
            indices[..., 0] = torch.tensor([1 << 20, -(1 << 31), 1 << 33])[torch.randint(0, 3, shape, generator=generator)]
        made += [counts, indices]
    return made + [None] * (4 - len(made))


def lists_of(mask):
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices


def check(mask, mask_mod, lengths, heads=2, device="cpu", queries_only=False):
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k = (torch.randn(1, heads, n, 16, generator=generator).to(device).requires_grad_() for n in lengths)
    out = flex_attention(q, k, k, block_mask=mask)
    wanted = dense_attention(q, k, k, None, mask_mod)[0]
    torch.testing.assert_close(out, wanted.float(), rtol=1e-3, atol=1e-5)
    if not queries_only:
        weight = torch.randn(out.shape, generator=generator).to(device)
        for found, expected in zip(
            torch.autograd.grad(out, (q, k), weight), torch.autograd.grad(wanted, (q, k), weight.double()), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


SIZES = st.sampled_from([(1, 64), (16, 16), (1, 1), (5, 3), (16, 20), (64, 256), (8, 1024), (300, 48), (128, 128)])


@settings(max_examples=15)
@given(
    st.sampled_from([(1, 1), (16, 300), (20, 50), (33, 90)]),
    SIZES,
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 999),
)
def test_whatever_lists_hold(lengths, size, heads, full, ours, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (-(-n // s) for n, s in zip(lengths, size, strict=True))
    lists = random_lists((1, heads, rows), columns, generator, full)
    mask_mod = meant(lists, size, lengths)
    if ours:
        mask = BlockMask.from_kv_blocks(*lists, size, stripes, lengths)
        assert torch.equal(mask.to_dense().bool(), mask._status() > 0)
    else:
        mask = theirs.BlockMask(lengths, *lists, *[None] * 4, size, stripes)
    check(mask, mask_mod, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_whatever_lists_hold_on_gpu(seed):
    """For compute-sanitizer too: counts too large, indices below 0 and far outside K."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [(1, 700), (8, 4000), (300, 400), (700, 650)][seed % 4]
    size = [(128, 128), (64, 128), (1, 64), (128, 256), (20, 33)][seed % 5]
    rows, columns = (-(-n // s) for n, s in zip(lengths, size, strict=True))
    lists = [None if t is None else t.cuda() for t in random_lists((1, 2, rows), columns, generator, seed % 3 > 0)]
    mask_mod = meant(lists, size, lengths)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (torch.randn(1, 2, n, 64, device="cuda", dtype=dtype, requires_grad=True) for n in lengths)
        for mask in (
            BlockMask.from_kv_blocks(*lists, size, stripes, lengths),
            theirs.BlockMask(lengths, *lists, *[None] * 4, size, stripes),
        ):
            out = flex_attention(q, k, k, block_mask=mask)
            wanted = dense_attention(q, k, k, None, mask_mod)[0]
            assert (out - wanted).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-3)
            found, expected = (torch.autograd.grad(o.float().sum(), (q, k)) for o in (out, wanted))
            for g, e in zip(found, expected, strict=True):
                assert (g - e).norm() <= 0.03 * e.norm() + 1e-2


@settings(max_examples=15)
@given(
    st.sampled_from([(1, 64), (1, 1), (10, 7), (64, 1 << 20), (1 << 20, 1 << 20), (16, 1024), (3, 200), (1 << 40, 17)]),
    st.sampled_from([(20, 20), (37, 50), (40, 300), (1, 257)]),
    st.sampled_from([None, 2]),
)
def test_blocks_of_any_size(size, lengths, heads):
    """In seconds, also where a block is far longer than the sequence; torch's masks of such blocks too."""
    mask_mod = stripes if heads else mods.causal
    mask = create_block_mask(mask_mod, None, heads, *lengths, "cpu", size)
    check(mask, mask_mod, lengths)
    if max(size) < 1 << 12:
        other = theirs.create_block_mask(mask_mod, None, heads, *lengths, "cpu", size)
        assert torch.equal(other.to_dense(), mask.to_dense())
        check(other, mask_mod, lengths, queries_only=True)


@pytest.mark.parametrize("device", DEVICES)
def test_full_blocks_may_be_listed_as_partial_too_and_reach_past_the_end(device):
    """They are visited once, without the mask_mod, up to the last key."""
    counts, indices = torch.full((1, 1, 2), 2), torch.tensor([0, 1]).expand(1, 1, 2, 2)
    for full_counts, full_indices in ((counts - 1, indices[..., 1:]), (counts, indices)):
        lists = tuple(t.int().to(device) for t in (counts, indices, full_counts, full_indices))
        mask = BlockMask((20, 20), *lists, BLOCK_SIZE=16, mask_mod=stripes)
        check(mask, meant(lists, (16, 16), (20, 20)), (20, 20), device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_kernels_that_are_full_in_part_are_partial(device):
    """Of four columns of blocks the first is full, and a kernel's block takes in all four."""
    nothing, first = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4, 1)
    lists = tuple(t.int().to(device) for t in (nothing, first, nothing + 1, first))
    mask = BlockMask((32, 32), *lists, BLOCK_SIZE=8, mask_mod=stripes)
    check(mask, meant(lists, (8, 8), (32, 32)), (32, 32), device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_one_query_a_block(device):
    """BLOCK_SIZE=(1, 64), sliced, cut and with another mask_mod."""
    mask = create_block_mask(stripes, None, 2, 70, 150, device, (1, 64))
    assert mask.kv_num_blocks.shape == (1, 2, 70) and mask.BLOCK_SIZE == (1, 64)
    check(mask, stripes, (70, 150), device=device)
    check(mask.adjust(30, 100), stripes, (30, 100), device=device)
    check(mask[:, :, 5:40], lambda b, h, q_idx, kv_idx: stripes(b, h, q_idx + 5, kv_idx), (35, 150), device=device)
    causal = create_block_mask(mods.causal, None, None, 70, 150, device, (1, 64))
    causal.mask_mod = stripes  # hides more than the lists, which still count
    check(causal, meant(lists_of(causal), (1, 64), (70, 150)), (70, 150), device=device)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", [(64, 32), (1, 64), (20, 1 << 20)])
def test_lists_stay_as_they_were_made_whatever_mask_mod_reads_later(size, compiled):
    """Numbers and tensors that it captures are others: full and empty blocks are not asked again, as in torch's kernels."""
    lag, limit = 0, torch.full((150,), 90)

    def late(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx >= lag) & (kv_idx < limit[q_idx])

    mask = create_block_mask(late, None, None, 150, 150, "cpu", size)
    of_parts = create_block_mask(late, None, None, 150, 150, "cpu", size)[:, :, : -(-100 // size[0])]
    lag, limit[:] = 40, torch.arange(150) // 2 + 30
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        attend = torch.compile(lambda q, k: flex_attention(q, k, k, block_mask=mask), backend="aot_eager", fullgraph=True)
        q, k = torch.randn(2, 1, 2, 150, 16)
        wanted = dense_attention(q, k, k, None, meant(lists_of(mask), size, (150, 150), late))[0]
        torch.testing.assert_close(attend(q, k), wanted.float(), rtol=1e-3, atol=1e-5)
    rows = of_parts.seq_lengths[0]
    check(of_parts, meant(lists_of(of_parts), size, (rows, 150), late), (rows, 150))


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_tensor_is_not_read_past_its_end_in_a_long_last_block(device):
    """A block of 1024 keys reaches 1023 past a sequence of one more: indices that cannot leave the tensor inside it do so there."""

    def mask_mod(b, h, q_idx, kv_idx):
        return table[kv_idx + 3] > 0

    table = torch.rand(3 + 768 + 1024, device=device)[: 3 + 768]
    lists = torch.full((1, 1, 1), 1, dtype=torch.int32, device=device), torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(128, 1024), mask_mod=mask_mod, seq_lengths=(20, 600))
    lists = mask.for_kernels()[0]
    assert reached((1, 1, 20, 600), lists) == (1, 1, 20, 1024)
    begins_anywhere = dataclasses.replace(lists, starts=torch.tensor([0, 20], dtype=torch.int32))
    assert reached((1, 1, 20, 600), begins_anywhere) == (1, 1, 20, 599 + lists.kv_block)
    check(mask, mask_mod, (20, 600), device=device)


def test_which_blocks_kernels_walk():
    assert kernel_size((128, 64), (500, 500)) == (128, 64) and kernel_size((48, 4096), (500, 9000)) == (48, 4096)
    assert kernel_size((1, 64), (500, 500)) == (128, 64) and kernel_size((1 << 20, 1 << 20), (20, 20)) == (128, 128)
    assert kernel_size((256, 255), (128, 500)) == (128, 128)


def walked(mask):
    """What kernels read."""
    return [t.tolist() for t in mask.as_lists().tables]


@pytest.mark.parametrize("device", DEVICES)
def test_lists_that_are_shown_are_copies(device):
    """Writing to those of a mask that Flexpress made changes nothing; of a mask that a user's lists made, nothing but these."""
    made = create_block_mask(mods.causal, None, None, 100, 100, device, 32)
    lists = lists_of(made)
    mask = BlockMask.from_kv_blocks(*(t.clone() for t in lists), 32, mods.causal, (100, 100))
    before = walked(made), walked(mask)
    for tensor in (*lists, *lists_of(made), made.q_num_blocks, mask.q_num_blocks):
        tensor.fill_(99)
    assert (walked(made), walked(mask)) == before
    check(mask, mods.causal, (100, 100), device=device)
    check(made, mods.causal, (100, 100), device=device)
    check(copy.deepcopy(mask), mods.causal, (100, 100), device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_changes_of_torchs_masks_are_seen(device):
    """Torch's kernels read its lists at every call."""
    lengths, mask = (100, 100), theirs.create_block_mask(mods.causal, None, None, 100, 100, device, 32)
    check(mask, mods.causal, lengths, device=device)
    mask.kv_num_blocks.zero_()
    assert mask.full_kv_num_blocks.sum() > 0
    check(mask, meant(lists_of(mask), (32, 32), lengths), lengths, device=device)
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    check(mask, lambda b, h, q_idx, kv_idx: q_idx < 0, lengths, device=device)
    other = theirs.create_block_mask(mods.causal, None, None, 100, 100, device, 32)
    check(other, mods.causal, lengths, device=device)
    other.mask_mod = stripes
    check(other, meant(lists_of(other), (32, 32), lengths), lengths, device=device)


@pytest.mark.parametrize("make", [theirs.BlockMask.from_kv_blocks, BlockMask.from_kv_blocks])
def test_a_repeated_call_reads_lists_once(monkeypatch, make):
    from flexpress.masks import given_lists

    lists = lists_of(theirs.create_block_mask(mods.causal, None, None, 20, 20, "cpu"))
    mask, q, calls = make(*lists, mask_mod=mods.causal, seq_lengths=(20, 20)), torch.randn(1, 1, 20, 16), []
    read_lists = given_lists.read_lists
    monkeypatch.setattr(given_lists, "read_lists", lambda *a: calls.append(1) or read_lists(*a))
    for _ in range(3):
        flex_attention(q, q, q, block_mask=mask)
    assert calls == [1]
    mask.kv_num_blocks.add_(0)
    for _ in range(3):
        flex_attention(q, q, q, block_mask=mask)
    assert calls == [1, 1]


@pytest.mark.parametrize("ours", [True, False])
def test_lengths_may_be_set(ours):
    """As code for decoding does with torch's masks: a row of blocks becomes the mask of one query. Blocks past the new length go."""
    make = create_block_mask if ours else theirs.create_block_mask
    mask = make(mods.causal, None, None, 64, 64, "cpu", 16)
    check(mask, mods.causal, (64, 64))
    mask.seq_lengths = (20, 24)
    check(mask, mods.causal, (20, 24))
    with pytest.raises(ValueError, match=r"made for lengths \(20, 24\)"):
        check(mask, mods.causal, (64, 64))


def test_a_mask_that_changes_before_the_backward_pass():
    """Gradients are those of the mask that the forward pass had."""
    for make in (create_block_mask, theirs.create_block_mask):
        mask = make(mods.causal, None, None, 64, 64, "cpu", 16)
        q = torch.randn(1, 1, 64, 16, requires_grad=True)
        out = flex_attention(q, q, q, block_mask=mask)
        mask.seq_lengths, mask.mask_mod = (16, 16), stripes
        (found,) = torch.autograd.grad(out.sum(), q)
        (wanted,) = torch.autograd.grad(dense_attention(q, q, q, None, mods.causal)[0].sum(), q)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mask_mod", "ours", "ours, one query a block", "torch's", "none"])
def test_graphed_callables(kind):
    """Forward and backward in CUDA graphs, as torch.cuda.make_graphed_callables captures them."""
    B, S = 2, 300
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    ours = {"ours": 64, "ours, one query a block": (1, 64)}.get(kind)
    more = {"mask_mod": mods.causal} if kind == "mask_mod" else {}
    if ours:
        more = {"block_mask": create_block_mask(mods.causal, None, None, S, S, "cuda", ours)}
    elif kind == "torch's":
        more = {"block_mask": theirs.create_block_mask(mods.causal, None, None, S, S, "cuda")}

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(slopes.detach().clone())

        def forward(self, q, k, v):
            return flex_attention(q, k, v, mods.alibi(self.slopes), **more)

    def inputs():
        return [torch.randn(B, 4, S, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    layer = Layer()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(layer), tuple(inputs()))
    for _ in range(3):
        given_inputs = inputs()
        wanted = layer(*given_inputs)
        expected = torch.autograd.grad(wanted.square().sum(), (*given_inputs, layer.slopes))
        out = graphed(*given_inputs)
        torch.testing.assert_close(out, wanted)
        for g, e in zip(torch.autograd.grad(out.square().sum(), (*given_inputs, graphed.slopes)), expected, strict=True):
            torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_graph_reads_torchs_lists_at_every_replay():
    mask = theirs.create_block_mask(mods.causal, None, None, 256, 256, "cuda")
    q = torch.randn(1, 1, 256, 64, device="cuda", dtype=torch.bfloat16)
    flex_attention(q, q, q, block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, q, q, block_mask=mask)
    graph.replay()
    torch.testing.assert_close(out, flex_attention(q, q, q, block_mask=mask))
    mask.full_kv_num_blocks.zero_()
    graph.replay()
    torch.testing.assert_close(out, flex_attention(q, q, q, block_mask=mask))


@pytest.mark.gpu
def test_a_graph_slices_by_what_a_tensor_holds_at_its_replay():
    whole = create_block_mask(mods.causal, None, None, 512, 512, "cuda")
    q, k = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16) for n in (128, 512))
    row = torch.tensor([1], device="cuda")
    flex_attention(q, k, k, block_mask=whole[:, :, row])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, k, block_mask=whole[:, :, row])
    for at in (1, -1, 0):
        row.fill_(at)
        graph.replay()
        torch.testing.assert_close(out, flex_attention(q, k, k, block_mask=whole[:, :, at]))
