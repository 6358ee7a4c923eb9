"""Block masks used as code for torch does: lists read, cropped and rewritten, attributes set, lengths and mask_mods that change."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from hypothesis import given, settings
from hypothesis import strategies as st

import flexpress
from flexpress import BlockMask, create_block_mask, flex_attention, mods
from flexpress.calls.arguments import is_as_made
from flexpress.masks.foreign_masks import adopt
from support.dense import dense_attention
from support.devices import DEVICES
from support.problems import MASK_MODS, mask_mods

LISTS = [f"{kind}_{what}" for kind in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]
CREATORS = [torchs.create_block_mask, flexpress.create_block_mask]
OF_BOTH = pytest.mark.parametrize("create", CREATORS, ids=["torchs", "ours"])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100)


def everything(b, h, q_idx, kv_idx):
    return q_idx >= 0


def tensors(device, Q_LEN, KV_LEN, B=1, H=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, 16, generator=generator).to(device) for n in (Q_LEN, KV_LEN, KV_LEN)]


def check(mask, mask_mod, lengths, device="cpu", B=1):
    """flex_attention with a mask is dense attention with a mask_mod."""
    q, k, v = tensors(device, *lengths, B)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), dense_attention(q, k, v, None, mask_mod)[0].float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [m for m in MASK_MODS if m != "none"])
@pytest.mark.parametrize("separate", [True, False])
def test_shown_lists_are_torchs(device, name, separate):
    """To the letter, with what lies past the counts, and partial blocks that lengths cut."""
    options = {} if separate else {"separate_full_blocks": False}
    if options and "separate_full_blocks" not in inspect.signature(torchs.create_block_mask).parameters:
        pytest.skip("this torch always has full blocks apart")
    for lengths in ((200, 190), (64, 128), (1, 190), (90, 20)):
        mod = mask_mods(max(lengths), device)[name]
        theirs, ours = (make(mod, 2, 3, *lengths, device, (32, 64), **options) for make in CREATORS)
        for attribute in LISTS:
            expected, found = getattr(theirs, attribute), getattr(ours, attribute)
            assert (expected is None and found is None) or (torch.equal(found, expected) and found.dtype == expected.dtype), attribute


def cropped(counts, indices, batch, rows, columns):
    """As attention-gym's examples/paged_attention does it."""
    indices, counts = indices[[batch], :, :rows, :columns], counts[[batch], :, :rows]
    counts = torch.where(counts < columns, counts, columns)
    return torch.sum(indices < counts[:, :, :, None], dim=-1).to(torch.int32), indices


@pytest.mark.parametrize("device", DEVICES)
@OF_BOTH
def test_lists_that_users_crop(create, device):
    mask = create(window, 2, 1, 256, 256, device=device, BLOCK_SIZE=32)
    lists = [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)]
    part = mask.from_kv_blocks(*cropped(*lists[0], 1, 6, 6), *cropped(*lists[1], 1, 6, 6), mask.BLOCK_SIZE, mask.mask_mod)
    part.seq_lengths = (192, 192)
    check(part, window, (192, 192), device)


def test_large_lists_are_shown_whole(monkeypatch):
    """Also where the mask's own are only as wide as the densest row."""
    from flexpress.codegen.run import masks

    monkeypatch.setattr(masks, "_ROOMY", 100)
    theirs, ours = (make(window, None, None, 700, 700, "cpu", 32) for make in CREATORS)
    assert ours.as_lists().kv_indices.shape[-1] < 22
    for attribute in LISTS:
        assert torch.equal(getattr(ours, attribute), getattr(theirs, attribute)), attribute


def test_nobody_waits_for_lists_that_are_shown(monkeypatch):
    """No number is read back from the device, for a mask whose mask_mod and lengths were changed, and for a user's lists."""
    made = create_block_mask(everything, None, None, 100, 200, "cpu", 32)
    users = BlockMask.from_kv_blocks(*[getattr(made, name) for name in LISTS[:4]], BLOCK_SIZE=32, mask_mod=causal, seq_lengths=(100, 200))
    made.mask_mod = causal

    def read(*_):
        raise AssertionError("a number is read back")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            patch.setattr(torch.Tensor, name, read)
        for mask in (made, users, made[:, :, 1:], users[:, :, 1:], made.adjust(60, 70)):
            for name in LISTS:
                assert getattr(mask, name) is not None
            mask.seq_lengths = (40, 60)
            mask.for_kernels(), mask.as_transposed_lists()


def test_lists_that_were_given_are_shown_as_given():
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, -1, -1], [2, 0, -1]]]], dtype=torch.int32)
    for mask in (
        BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16),
        BlockMask((32, 48), counts, indices, None, None, counts, indices, BLOCK_SIZE=16),
    ):
        assert mask.kv_num_blocks is counts and mask.kv_indices is indices and mask.full_kv_indices is None
        mask.seq_lengths = (20, 40)
        assert mask.kv_indices is indices
    assert mask.q_num_blocks is counts and mask.q_indices is indices
    assert mask[:, :, 1:].kv_indices.tolist() == [[[[2, 0, -1]]]]


MODS = [causal, everything, lambda b, h, i, j: (i - j).abs() < 40, lambda b, h, i, j: j < 77]


@st.composite
def changes(draw):
    """Lengths and block size of a mask, and what is done to it, one after another."""
    lengths = draw(st.sampled_from([(96, 128), (100, 130), (1, 200), (64, 64), (130, 70)]))
    size = draw(st.sampled_from([(32, 32), (32, 64), (64, 32)]))
    new_lengths = st.tuples(*(st.integers(1, -(-n // s) * s) for n, s in zip(lengths, size, strict=True)))
    change = st.one_of(
        st.tuples(st.just("mask_mod"), st.sampled_from(MODS)),
        st.tuples(st.just("seq_lengths"), new_lengths),
        st.tuples(st.just("rebuild"), st.sampled_from(MODS)),
        st.tuples(st.just("set"), st.sampled_from(["full_kv_num_blocks", "kv_num_blocks"])),
        st.tuples(st.just("write"), st.just(None)),
        st.tuples(st.just("copy"), st.just(None)),
    )
    return lengths, size, draw(st.sampled_from(MODS)), draw(st.lists(change, min_size=1, max_size=5))


def changed(mask, what, value):
    if what in ("mask_mod", "seq_lengths"):
        setattr(mask, what, value)
    elif what == "set":
        setattr(mask, value, getattr(mask, value) * 0)
    elif what == "write":
        lists = [getattr(mask, name).clone() for name in LISTS[:4]]
        mask = mask.from_kv_blocks(*lists, mask.BLOCK_SIZE, mask.mask_mod, mask.seq_lengths)
        lists[1][..., 0] = 1
    elif what == "rebuild":
        mask = mask.from_kv_blocks(*[getattr(mask, name) for name in LISTS[:4]], mask.BLOCK_SIZE, value, mask.seq_lengths)
    return copy.copy(mask) if what == "copy" else mask


@settings(max_examples=60)
@given(changes())
def test_changes_in_any_order_are_those_of_torchs_masks(case):
    lengths, size, mask_mod, steps = case
    theirs, ours = (create(mask_mod, 1, 1, *lengths, device="cpu", BLOCK_SIZE=size) for create in CREATORS)
    for step in steps:
        theirs, ours = changed(theirs, *step), changed(ours, *step)
        for name in LISTS[:4]:
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        q, k, v = tensors("cpu", *ours.seq_lengths)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=ours), flex_attention(q, k, v, block_mask=theirs))


# mask_mods that replace the one a mask was made of


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [128, 64, (1, 64), 48])
@OF_BOTH
def test_a_mask_of_one_query_gets_a_mask_mod_at_every_step(create, size, device):
    """What a length cuts is partial in torch's lists, so the new mask_mod is asked there."""
    mask = create(lambda b, h, q_idx, kv_idx: kv_idx < 200, None, None, 1, 200, device=device, BLOCK_SIZE=size)
    for last in (5, 130, 199):
        mask.mask_mod = lambda b, h, q_idx, kv_idx, last=last: kv_idx <= last
        if size != (1, 64):
            check(mask, mask.mask_mod, (1, 200), device)
            shorter = mask._adjust(1, 150)
            if create is create_block_mask or shorter.seq_lengths == (1, 150):  # torch 2.11 rounds lengths up to blocks
                check(shorter, mask.mask_mod, (1, 150), device)
            if create is create_block_mask:  # torch's slices lose their mask_mod
                check(mask[0], mask.mask_mod, (1, 200), device)
            check(copy.copy(mask), mask.mask_mod, (1, 200), device)
    if size == (1, 64):  # no block of queries is cut, and those of keys that are full stay so
        check(mask, lambda b, h, q_idx, kv_idx: kv_idx < 200, (1, 200), device)


@OF_BOTH
def test_full_blocks_that_no_length_cuts_stay_full(create):
    mask = create(everything, None, None, 100, 150, device="cpu", BLOCK_SIZE=64)
    mask.mask_mod = causal
    torchs_rule = lambda b, h, i, j: ((i < 64) & (j < 128)) | (i >= j)  # noqa: E731
    check(mask, torchs_rule, (100, 150))
    mask.seq_lengths = (50, 150)  # cuts a row that was whole as the lists were made
    check(mask, torchs_rule, (50, 150))
    if create is flexpress.create_block_mask:
        mask.seq_lengths = (100, 150)
        check(pickle.loads(pickle.dumps(create_and_replace())), torchs_rule, (100, 150))


def create_and_replace():
    mask = create_block_mask(mods.prefix_lm(200), None, None, 100, 150, "cpu", 64)
    mask.mask_mod = mods.causal
    return mask


def test_lists_rebuilt_with_another_mask_mod():
    for create in CREATORS:
        made = create(everything, None, None, 1, 256, device="cpu")
        lists = [getattr(made, name) for name in LISTS[:4]]
        mask = type(made).from_kv_blocks(*lists, mask_mod=lambda b, h, i, j: j < 7, seq_lengths=(1, 256))
        check(mask, mask.mask_mod, (1, 256))


@pytest.mark.parametrize("create", CREATORS, ids=["torchs", "ours"])
def test_a_mask_mod_that_is_set_in_what_is_compiled(create):
    mask = create(everything, 1, 1, 1, 256, device="cpu")
    q, k, v = tensors("cpu", 1, 256)

    def step(q, place):
        mask.mask_mod = lambda b, h, q_idx, kv_idx: kv_idx <= place
        return flex_attention(q, k, v, block_mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for place in (5, 130):
        expected = dense_attention(q, k, v, None, lambda b, h, i, j, place=place: j <= place)[0].float()
        torch.testing.assert_close(compiled(q, torch.tensor(place)), expected)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected)


def test_the_mask_mod_of_the_mask_comes_back():
    """Then its lists alone count again: nothing is asked in full blocks."""
    mask = create_block_mask(everything, None, None, 100, 200, "cpu", 64)
    mine, before = mask.mask_mod, [t.tolist() for t in mask.as_lists().tables]
    mask.mask_mod = causal
    check(mask, lambda b, h, i, j: ((i < 64) & (j < 192)) | (i >= j), (100, 200))
    mask.mask_mod = mine
    check(mask, everything, (100, 200))
    assert [t.tolist() for t in mask.as_lists().tables] == before and is_as_made(mask, (64, 64), (100, 200))


# lengths that change


@pytest.mark.parametrize("device", DEVICES)
@OF_BOTH
def test_lengths_come_back(create, device):
    """Lists are those that the mask was made with, whatever lengths it had in between."""
    mask = create(causal, 1, 1, 512, 512, device=device)
    expected = [getattr(mask, name) for name in LISTS]
    for lengths in ((512, 256), (100, 100), (0, 0), (300, 512), (512, 512)):
        mask.seq_lengths = lengths
        if all(lengths):
            check(mask, causal, lengths, device)
    assert all(torch.equal(getattr(mask, name), e) for name, e in zip(LISTS, expected, strict=True))
    mask.seq_lengths = (512, 256)
    mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 50
    check(mask, lambda b, h, i, j: (i // 128 > j // 128) | ((i // 128 == j // 128) & (i - j < 50)), (512, 256), device)


@pytest.mark.parametrize("device", DEVICES)
@OF_BOTH
def test_rows_past_the_lengths_of_now(create, device):
    """Falcon-OCR: the prompt sets lengths of a mask that all layers share, and decoding slices it by rows further on."""
    mask = create(causal, 1, 1, 512, 512, device=device)
    mask.seq_lengths = (100, 100)
    check(mask, causal, (100, 100), device)
    for last in (110, 300, 511):
        part = mask[:, :, last // 128]
        part.seq_lengths = (1, last + 1)
        part.mask_mod = lambda b, h, q_idx, kv_idx, last=last: kv_idx <= last
        check(part, part.mask_mod, (1, last + 1), device)
    assert mask.seq_lengths == (100, 100)


def test_slices_of_masks_with_other_lengths():
    mask = create_block_mask(causal, 1, 1, 500, 512, "cpu")
    mask.seq_lengths = (200, 512)
    assert mask[0].seq_lengths == (200, 512) and mask[:, :, 1].seq_lengths == (72, 512) and mask[:, :, 3].seq_lengths == (116, 512)
    check(mask[:, :, 1:], lambda b, h, i, j: i + 128 >= j, (72, 512))
    check(mask[:, :, 2], lambda b, h, i, j: i + 256 >= j, (128, 512))
    again = mask[:, :, 1:]
    again.seq_lengths = (372, 512)
    check(again, lambda b, h, i, j: i + 128 >= j, (372, 512))
    with pytest.raises(ValueError, match=r"the last query block \(1\) has 72 of 128 positions"):
        mask[:, :, [1, 0]]
    found = pickle.loads(pickle.dumps(create_block_mask(mods.causal, None, None, 512, 512, "cpu").adjust(512, 400)))
    found.seq_lengths = (100, 100)
    found = pickle.loads(pickle.dumps(found)).to("cpu")
    found.seq_lengths = (512, 400)
    check(found, causal, (512, 400))


def test_lengths_that_are_set_in_what_is_compiled():
    mask = create_block_mask(causal, 1, 1, 256, 256, "cpu")
    q, k, v = tensors("cpu", 200, 256)

    def step(q):
        mask.seq_lengths = (200, 256)
        return flex_attention(q, k, v, block_mask=mask)

    torch._dynamo.reset()
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(out, dense_attention(q, k, v, None, causal)[0].float())


# lists that are written to


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", [torchs.BlockMask, BlockMask], ids=["torchs", "ours"])
@pytest.mark.parametrize("size", [(128, 16), (128, 24)])
def test_lists_that_are_rewritten_at_every_step(cls, size, device):
    """Persistent buffers of a paged cache: views of them made one mask, slices and copies of it."""
    counts, indices = torch.ones(4, 1, dtype=torch.int32, device=device), torch.zeros(4, 1, 4, dtype=torch.int32, device=device)
    mask = cls.from_kv_blocks(counts[None, :2], indices[None, :2], BLOCK_SIZE=size, seq_lengths=(4, 4 * size[1]))
    copied = copy.copy(mask)
    every = cls.from_kv_blocks(counts[None], indices[None], BLOCK_SIZE=size, seq_lengths=(4, 4 * size[1]))
    parts = [mask[:, 1:], mask[0], every[:, ::2], every[:, 1::2][0]] if cls is BlockMask else []
    for step in (2, 1, 3):
        counts.fill_(1 + (step == 1))
        indices.fill_(step)
        indices[..., 1] = 0
        listed = (step, 0) if step == 1 else (step,)
        expected = lambda b, h, i, j, listed=listed: sum(j // size[1] == n for n in listed) > 0  # noqa: E731
        for seen in (mask, copied, *parts):
            check(seen, expected, (4, 4 * size[1]), device)
    with torch.inference_mode():
        indices.fill_(0)
        counts.fill_(1)
        check(mask, lambda b, h, i, j: j < size[1], (4, 4 * size[1]), device)
        born = cls.from_kv_blocks(counts.clone()[None, :2], indices.clone()[None, :2], BLOCK_SIZE=size, seq_lengths=(4, 4 * size[1]))
        check(born, lambda b, h, i, j: j < size[1], (4, 4 * size[1]), device)
        born.kv_indices.fill_(2)
        check(born, lambda b, h, i, j: j // size[1] == 2, (4, 4 * size[1]), device)


@pytest.mark.parametrize("cls", [torchs.BlockMask, BlockMask], ids=["torchs", "ours"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_call_follows_lists(cls, backend):
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 4, dtype=torch.int32)
    mask = cls.from_kv_blocks(counts, indices, BLOCK_SIZE=(128, 16), seq_lengths=(4, 64))
    q, k, v = tensors("cpu", 4, 64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: flex_attention(q, k, v, block_mask=mask), backend=backend, fullgraph=True)
    for step in (0, 2, 1):
        indices.fill_(step)
        expected = dense_attention(q, k, v, None, lambda b, h, i, j, step=step: j // 16 == step)[0].float()
        torch.testing.assert_close(compiled(q), expected)


@pytest.mark.gpu
def test_a_graph_reads_given_lists_at_every_replay():
    counts, indices = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((1, 1, 1), (1, 1, 1, 4)))
    mask = BlockMask.from_kv_blocks(counts + 1, indices, BLOCK_SIZE=(128, 16), seq_lengths=(4, 64))
    q, k, v = tensors("cuda", 4, 64)
    flex_attention(q, k, v, block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, block_mask=mask)
        shown = create_block_mask(window, None, None, 300, 300, "cuda", 32).kv_indices
    for step in (1, 3):
        indices.fill_(step)
        graph.replay()
        expected = dense_attention(q, k, v, None, lambda b, h, i, j, step=step: j // 16 == step)[0].float()
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    assert torch.equal(shown, torchs.create_block_mask(window, None, None, 300, 300, "cuda", 32).kv_indices)


def test_torchs_mask_is_read_once_for_its_slices_and_calls():
    mask = torchs.create_block_mask(causal, None, None, 100, 100, device="cpu")
    assert adopt(mask, (100, 100)) is adopt(mask, (100, 100))
    mask.kv_indices = mask.kv_indices.clone()
    check(mask, causal, (100, 100))


# attributes that are set


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@OF_BOTH
def test_lists_that_are_set(create, make):
    """Managers of paged caches copy a mask and set its lists one after another, of other widths than before."""
    logical = create(causal, 1, 1, 256, 256, device="cpu")
    paged = make(logical)
    pages = torch.tensor([3, 1], dtype=torch.int32)
    for kind in ("kv", "full_kv"):
        listed = pages[getattr(logical, f"{kind}_indices").long()]
        setattr(paged, f"{kind}_indices", torch.nn.functional.pad(listed, (0, 2)))
        setattr(paged, f"{kind}_num_blocks", getattr(logical, f"{kind}_num_blocks").clone())
    paged.q_num_blocks = paged.q_indices = None
    paged.full_q_num_blocks = paged.full_q_indices = None
    paged.seq_lengths = (256, 512)
    place = torch.tensor([512, 128, 512, 0])
    paged.mask_mod = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx % 128 + place[kv_idx // 128]
    check(paged, paged.mask_mod, (256, 512))
    assert paged.q_indices is None and paged.shape == (1, 1, 256, 512) and logical.kv_indices.shape[-1] == 2
    check(logical, causal, (256, 256))
    paged.kv_num_blocks.zero_()
    check(paged, lambda b, h, i, j: (i // 128 == 1) & (j // 128 == 3), (256, 512))


def test_what_is_set_is_looked_at_when_it_is_used():
    mask, q = create_block_mask(causal, 1, 1, 100, 100, "cpu"), torch.randn(1, 1, 100, 16)
    mask.kv_indices = None
    with pytest.raises(TypeError, match=r"kv_indices must be a torch.Tensor of int32, got NoneType"):
        flex_attention(q, q, q, block_mask=mask)
    with pytest.raises(TypeError, match=r"kv_indices must be a torch.Tensor"):
        mask[0]
    mask.kv_indices = torch.zeros(1, 1, 1, 3, dtype=torch.int32)
    mask.full_kv_num_blocks = mask.full_kv_indices = None
    check(mask, causal, (100, 100))
    mask.kv_num_blocks = torch.zeros(1, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"kv_num_blocks has shape \(1, 1, 2\), but kv_indices \(1, 1, 1, 3\) needs"):
        flex_attention(q, q, q, block_mask=mask)
    whole = create_block_mask(everything, 1, 1, 128, 128, "cpu", 64)
    whole.BLOCK_SIZE = 32  # as many blocks, of less positions
    whole.seq_lengths = (64, 64)
    assert whole.BLOCK_SIZE == (32, 32) and whole.to_dense().tolist() == [[[[1, 1], [1, 1]]]]
    with pytest.raises(ValueError, match=r"BLOCK_SIZE is 0"):
        whole.BLOCK_SIZE = 0


@pytest.mark.parametrize("cls", [torchs.BlockMask, BlockMask], ids=["torchs", "ours"])
def test_orders_of_dq_writes(cls):
    """Torch's metadata for its deterministic backward pass: checked as there, and handed back."""
    if "dq_write_order" not in inspect.signature(cls.from_kv_blocks).parameters:
        pytest.skip("this torch has no such metadata")
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    order, full, places = (torch.full((1, 1, 2, 2), n, dtype=torch.int32) for n in range(3))
    for scheduled in (True, False, places, None):
        mask = cls.from_kv_blocks(counts, indices, dq_write_order=order, dq_write_order_full=full, dq_kv_order=scheduled)
        assert mask.dq_write_order is order and mask.dq_write_order_full is full
        assert mask.dq_kv_order is (scheduled if scheduled is places else None)
        assert mask.dq_kv_order_spt is (None if scheduled is places else scheduled)
        assert mask.as_tuple()[10:14] == (order, full, mask.dq_kv_order, mask.dq_kv_order_spt)
        assert copy.copy(mask).dq_write_order is order and mask.to("cpu").dq_kv_order is mask.dq_kv_order
    with pytest.raises(ValueError, match="dq_write_order_full requires dq_write_order"):
        cls.from_kv_blocks(counts, indices, dq_write_order_full=full)
    with pytest.raises(ValueError, match="dq_kv_order must be a bool"):
        cls.from_kv_blocks(counts, indices, dq_kv_order=1)


@OF_BOTH
def test_lengths_in_tensors_and_whole_pictures(create):
    length = torch.tensor(130)
    mask = create(causal, None, None, length, length, device="cpu", BLOCK_SIZE=32)
    assert mask.shape == (1, 1, 130, 130)
    if create is create_block_mask:  # torch's keeps the tensors as its lengths
        check(mask, causal, (130, 130))
    whole = create(causal, None, None, 32 * 25, 32 * 25, device="cpu", BLOCK_SIZE=32)
    assert len(max(whole.to_string((-1, -1)).splitlines(), key=len)) == 50 and whole.to_string(-1) == whole.to_string((-1, -1))
    assert len(whole.to_string((-1, 5)).splitlines()) == len(whole.to_string(-1).splitlines())


def test_lengths_that_are_no_integers():
    for wrong in (torch.tensor(1.5), torch.tensor([130]), torch.tensor(True)):
        with pytest.raises(TypeError, match="Q_LEN must be an integer"):
            create_block_mask(causal, None, None, wrong, 130, "cpu")


def changed_mask(kind):
    """A mask whose lists for kernels are yet to be made, so inside of what a call is transformed by."""
    if kind in ("lengths", "mask_mod"):
        mask = create_block_mask(everything, 1, 1, *((200, 200) if kind == "lengths" else (100, 100)), "cpu", 256)
        mask.seq_lengths, mask.mask_mod = (100, 100), causal
        return mask
    theirs = torchs.create_block_mask(causal, 1, 1, 100, 100, device="cpu", BLOCK_SIZE=32)
    if kind == "torchs":
        return theirs
    return BlockMask.from_kv_blocks(*[getattr(theirs, n) for n in LISTS[:4]], BLOCK_SIZE=32, mask_mod=causal, seq_lengths=(100, 100))


@pytest.mark.parametrize("kind", ["torchs", "ours", "lengths", "mask_mod"])
def test_lists_that_are_first_read_inside_a_transform(kind):
    """They are tensors of no transform, and serve calls outside of it, too."""
    q = tensors("cpu", 100, 100)[0]
    exact = dense_attention(q, q, q, None, causal)[0].float()
    for way in ("jvp", "vmap", "grad"):
        mask = changed_mask(kind)

        def attend(q, mask=mask):
            return flex_attention(q, q, q, block_mask=mask)

        if way == "jvp":
            out = torch.func.jvp(attend, (q,), (torch.ones_like(q),))[0]
        elif way == "vmap":
            out = torch.vmap(attend)(q[None])[0]
        else:
            out = torch.func.grad_and_value(lambda q, attend=attend: (attend(q).sum(), attend(q)), has_aux=True)(q)[1][1]
        torch.testing.assert_close(out, exact)
        torch.testing.assert_close(attend(q), exact)


class Until:
    def __init__(self, end):
        self.end = end

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx < self.end


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("captured", ["tensor", "number"])
@pytest.mark.parametrize("lengths", [(1, 128), (100, 256)])
def test_what_a_mask_mod_captures_may_change_where_a_length_cuts(lengths, captured, compiled, device):
    """As in torch's masks, whose lists name such blocks as partial: one mask of a query serves all steps of decoding."""
    until = Until(torch.tensor([lengths[1]], device=device) if captured == "tensor" else lengths[1])
    mod = (lambda b, h, q_idx, kv_idx: kv_idx < until.end[0]) if captured == "tensor" else until
    mask = create_block_mask(mod, None, None, *lengths, device)
    copied = copy.copy(mask[:, :, 0:])
    if captured == "tensor":
        until.end.fill_(40)
    else:
        until.end = 40
    q, k = (torch.randn(1, 2, n, 16, device=device) for n in lengths)
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, backend="aot_eager") if compiled else flex_attention
    for each in (mask, copied):
        found = attend(q, k, k, block_mask=each)
        torch.testing.assert_close(found, flex_attention(q, k[:, :, :40], k[:, :, :40]), rtol=1e-3, atol=1e-3)
