"""BlockMask: block lists against brute force, torch's names and pictures, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_attention

from flexpress import BlockMask, and_masks, cache_info, create_block_mask, create_mask, flex_attention, mods, noop_mask, or_masks
from flexpress.calls.arguments import is_as_made
from flexpress.sequences import SequenceInfo
from support.block_lists import brute_force, check_bounds, check_lists
from support.dense import dense_attention, positions, relative_error
from support.devices import DEVICES, for_any
from support.problems import MASK_MODS, mask_mods


@settings(max_examples=40)
@given(
    st.sampled_from([m for m in MASK_MODS if m != "none"]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 20, 64, 127, 129, 200]),
    st.sampled_from([1, 33, 128, 190]),
    st.sampled_from([(64, 64), (16, 32), (128, 64), (48, 80), (10, 7)]),
    st.booleans(),
)
def test_lists_equal_brute_force(name, B, H, Q_LEN, KV_LEN, size, separate):
    mask_mod = mask_mods(max(Q_LEN, KV_LEN), "cpu")[name]
    mask = create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, "cpu", size, separate_full_blocks=separate)
    check_lists(mask, brute_force(mask_mod, B, H, Q_LEN, KV_LEN, size, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [m for m in MASK_MODS if m != "none"])
@pytest.mark.parametrize("size", [(128, 128), (64, 256), (48, 80)])
def test_lists_equal_brute_force_on_gpu(name, size):
    mask_mod = mask_mods(3000, "cuda")[name]
    mask = create_block_mask(mask_mod, 2, 3, 3000, 2050, "cuda", size)
    check_lists(mask, brute_force(mask_mod, 2, 3, 3000, 2050, size, "cuda").cpu())


READS = (
    "{t}[q_idx, kv_idx]",
    "{t}[kv_idx, q_idx]",
    "{t}[q_idx, q_idx // 2]",
    "{t}[kv_idx, 1]",
    "{t}[3, q_idx]",
    "{t}[b + 4, {t}[kv_idx, 2].long() % 9]",
)
DTYPES = (torch.int32, torch.int64, torch.int16, torch.uint8, torch.bool, torch.float32)


@st.composite
def tables_read_in_many_ways(draw):
    """A mask of a few reads of one or two tables, whose rows may be multiples of 16 bytes, and the tables."""
    tables = {}
    for name in "st"[: draw(st.integers(1, 2))]:
        dtype, width = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([96, 97, 98, 100, 112]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        values = sum(torch.rand(shape, generator=generator) for shape in ((96, 1), (1, width), (96, width)))
        tables[name] = (values > 1.6).to(dtype)
    reads = draw(st.lists(st.tuples(st.sampled_from(READS), st.sampled_from([*tables])), min_size=2, max_size=4))
    return f" {draw(st.sampled_from('&|'))} ".join(f"({read.format(t=name)} > 0)" for read, name in reads), tables


def check_tables(case, device):
    expression, tables = case
    namespace = {name: table.to(device) for name, table in tables.items()}
    mask_mod = eval(f"lambda b, h, q_idx, kv_idx: {expression}", namespace)
    mask = create_block_mask(mask_mod, 2, None, 96, 90, device, (16, 32))
    check_lists(mask, brute_force(mask_mod, 2, 1, 96, 90, (16, 32), device).cpu())
    check_bounds(mask_mod, 2, 1, 96, 90, (16, 32), device)


@for_any(lambda device: tables_read_in_many_ways(), cpu=40, cuda=200)
def test_a_table_read_in_many_ways(case, device):
    """By one position and by both: the texts of a mask share the table's strides."""
    check_tables(case, device)


@settings(max_examples=15)
@given(tables_read_in_many_ways())
def test_a_table_read_in_many_ways_in_cpp(in_cpp, case):
    check_tables(case, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_many_columns(device):
    """Rows longer than one chunk of the compacting kernel."""
    mask = create_block_mask(mods.causal, None, None, 32, 1100 * 16, device, 16)
    assert mask.kv_num_blocks.tolist() == [[[1, 1]]] and mask.full_kv_num_blocks.tolist() == [[[0, 1]]]
    dilated = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx // 16 % 3 == 1, None, None, 16, 1100 * 16, device, 16)
    assert dilated.full_kv_indices[0, 0, 0, :367].tolist() == list(range(1, 1100, 3))


@pytest.mark.parametrize("device", DEVICES)
def test_dense_mask(device):
    for name, mask_mod in mask_mods(100, device).items():
        if mask_mod is not None:
            expected = mask_mod(*positions((2, 3, 100, 90), device)).expand(2, 3, 100, 90)
            assert torch.equal(create_mask(mask_mod, 2, 3, 100, 90, device), expected), name
    hidden = create_mask(lambda score, b, h, q_idx, kv_idx: torch.where(q_idx > kv_idx, score, -float("inf")), None, None, 5, 5, device)
    assert torch.equal(hidden, torch.ones(5, 5, dtype=torch.bool, device=device).tril(-1)[None, None])


def test_combinations():
    window, causal = mods.sliding_window(3), mods.causal
    args = positions((1, 1, 9, 9), "cpu")
    assert torch.equal(and_masks(window, causal)(*args), window(*args) & causal(*args))
    assert torch.equal(or_masks(window, causal)(*args), window(*args) | causal(*args))
    assert create_mask(noop_mask, None, None, 4, 4, "cpu").all() and create_mask(and_masks(), None, None, 2, 2, "cpu").all()
    assert and_masks(causal, window).__name__ == "causal_and_sliding_window"
    with pytest.raises(TypeError, match="argument 1 must be a mask_mod, got int"):
        and_masks(causal, 3)


def test_torchs_arguments_in_torchs_order():
    """Its signature is (mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile)."""
    theirs = torch_block_mask(mods.causal, None, None, 100, 130, "cpu", (32, 64), False)
    for compiled in (False, True):
        ours = create_block_mask(mods.causal, None, None, 100, 130, "cpu", (32, 64), compiled)
        assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE and torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(
        create_block_mask(mods.causal, None, None, 100, 130, "cpu", 32, _compile=True).to_dense().sum(), torch.tensor(4 * 5 // 2)
    )


def test_names_and_pictures():
    mask = create_block_mask(mods.causal, None, None, 256, 256, "cpu", 64)
    assert mask.shape == (1, 1, 256, 256) and mask.numel() == 65536 and mask.BLOCK_SIZE == (64, 64)
    assert mask.sparsity() == pytest.approx(37.5)
    assert mask.to_string().splitlines() == ["(0, 0)", "░░      ", "██░░    ", "████░░  ", "██████░░"]
    assert "sparsity=37.50%" in repr(mask) and "causal" in repr(mask)
    assert mask.to("cpu").kv_indices.equal(mask.kv_indices)
    for other in (torch.int64, torch.int16, torch.zeros(1), None, True, "x"):
        with pytest.raises(TypeError, match="device must be a torch.device or its name, got"):
            mask.to(other)
    assert len(create_block_mask(mods.causal, 3, 3, 64, 64, "cpu").to_string().split("\n\n")) == 5


def test_from_kv_blocks():
    made = create_block_mask(mods.causal, None, None, 192, 192, "cpu", 64)
    again = BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices, 64, mods.causal)
    assert again.seq_lengths == (192, 192) and again.to_dense().equal(made.to_dense())
    with pytest.raises(ValueError, match="go together"):
        BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, made.kv_num_blocks)
    with pytest.raises(ValueError, match=r"kv_num_blocks has shape \(1, 1, 2\)"):
        BlockMask.from_kv_blocks(made.kv_num_blocks[..., :2], made.kv_indices)


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_length_compiles_nothing(device):
    create_block_mask(mods.sliding_window(5), None, None, 100, 100, device)
    before = cache_info()
    create_block_mask(mods.sliding_window(9), 2, 3, 77, 130, device)
    after = cache_info()
    assert (after.traces, after.prints, after.compiles) == (before.traces, before.prints, before.compiles)


WAYS = {
    "eager": lambda attend, q: attend(q),
    "torch.compile": lambda attend, q: torch.compile(attend, backend="aot_eager", fullgraph=True)(q),
    "vmap": lambda attend, q: torch.vmap(attend)(q[None])[0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [128, 24])
@pytest.mark.parametrize(("B", "H"), [(None, None), (2, None), (1, 3)])
def test_a_mask_mod_that_tells_entries_apart_decides_whatever_b_and_h_a_mask_was_made_with(in_cpp, way, size, B, H):
    """As in torch's eager reference. The lists are those of the first entry, which attends to nothing at all here."""

    def later(b, h, q_idx, kv_idx):
        return (b + h > 0) & (q_idx - kv_idx < 20 * b + 5) & (kv_idx <= q_idx + 30 * h)

    q, k, v = torch.randn(3, 2, 3, 100, 16, generator=torch.Generator().manual_seed(0)).unbind()
    mask, wanted = create_block_mask(later, B, H, 100, 100, "cpu", size), dense_attention(q, k, v, None, later)[0].float()
    torch._dynamo.reset()
    found = WAYS[way](lambda q: flex_attention(q, k, v, block_mask=mask), q)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    if way == "eager":
        torch.testing.assert_close(torch_attention(q, k, v, block_mask=torch_block_mask(later, B, H, 100, 100, "cpu")), found)
    if way != "vmap":
        weight, leaves = torch.randn(q.shape), [t.clone().requires_grad_() for t in (q, k, v)]
        out = WAYS[way](lambda q: flex_attention(q, *leaves[1:], block_mask=mask), leaves[0])
        reference = dense_attention(*leaves, None, later)[0].float()
        gradients = (torch.autograd.grad((o * weight).sum(), leaves) for o in (out, reference))
        for g, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(g, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_memory_at_131072(name):
    """A mask of 131072 x 131072 is never in memory: the peak stays under 300 MiB."""
    length = 131072
    ids = torch.arange(length, device="cuda") // (length // 64)
    mask_mod = mods.causal if name == "causal" else mods.document(ids, mods.causal)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = create_block_mask(mask_mod, None, None, length, length, "cuda")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20
    assert int(mask.kv_num_blocks.sum()) == 1024  # the diagonal


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["seq_lengths", "BlockMask", "from_kv_blocks", "torch"])
def test_lists_with_more_rows_than_there_are_queries(device, way):
    """No kernel of the backward pass reads statistics of rows that do not exist."""
    made = create_block_mask(mods.causal, None, None, 512, 512, device, BLOCK_SIZE=64)
    lists = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
    given = dict(BLOCK_SIZE=64, mask_mod=mods.causal)
    if way == "seq_lengths":
        mask = made
        mask.seq_lengths = (100, 512)
    elif way == "torch":
        mask = torchs.BlockMask.from_kv_blocks(*lists, **given)
        mask.seq_lengths = (100, 512)
    else:
        make = BlockMask.from_kv_blocks if way == "from_kv_blocks" else lambda *lists, **given: BlockMask((100, 512), *lists, **given)
        mask = make(*lists, **given, **({"seq_lengths": (100, 512)} if way == "from_kv_blocks" else {}))
    if way != "torch":
        lists, turned = mask.as_lists(), mask.as_transposed_lists()
        assert lists.kv_indices.shape[2] == 2 and int(turned.kv_indices.max()) < 2
        assert int((turned.kv_num_blocks + turned.full_kv_num_blocks).max()) <= 2
    q, k, v = (torch.randn(1, 3, n, 16, device=device, requires_grad=True) for n in (100, 512, 512))
    bias = torch.randn(3, 512, device=device, requires_grad=True)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j], mask)
    weights = torch.randn(out.shape, device=device)
    exact = dense_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j], mods.causal)[0]
    found, wanted = (torch.autograd.grad((o * weights).sum(), (q, k, v, bias)) for o in (out, exact))
    for have, want in zip(found, wanted, strict=True):
        assert relative_error(have, want) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [64, 20])
def test_greater_seq_lengths(device, size):
    """Rows that a full block did not have are asked of mask_mod; keys that no list names stay hidden."""
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx < 90) | (kv_idx < 3), None, None, 90, 120, device, BLOCK_SIZE=size)
    mask.seq_lengths = (100, 200)
    q, k = torch.randn(2, 1, 1, 200, 16, device=device).unbind()
    out = flex_attention(q[:, :, :100], k, torch.eye(200, device=device)[None, None], block_mask=mask)
    seen = torch.zeros(100, 200, dtype=torch.bool, device=device)
    listed = -(-120 // size) * size
    seen[:90, :listed], seen[90:, :3] = True, True
    assert torch.equal(out[0, 0] > 0, seen)
    mask.seq_lengths = (90, 120)
    assert mask.to_dense().all() and is_as_made(mask, mask.BLOCK_SIZE, (90, 120))
    mask.seq_lengths = (90 + 2 * size, 120)
    with pytest.raises(ValueError, match="rows of blocks"):
        flex_attention(q[:, :, : 90 + 2 * size], k[:, :, :120], k[:, :, :120], block_mask=mask)


@pytest.mark.parametrize("device", DEVICES)
def test_masks_whose_mods_make_tensors_are_equal_by_what_they_make(device):
    def made_of(width):
        return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) < torch.tensor([width], device=q_idx.device)[q_idx * 0]

    one, same, other = (create_block_mask(made_of(width), None, None, 64, 64, device, 16) for width in (5, 5, 6))
    assert one == same and one != other
    q = torch.randn(1, 1, 64, 16, device=device)
    torch.testing.assert_close(flex_attention(q, q, q, block_mask=one, mask_mod=made_of(5)), flex_attention(q, q, q, mask_mod=made_of(5)))
    with pytest.raises(ValueError, match="block_mask was made of"):
        flex_attention(q, q, q, block_mask=one, mask_mod=made_of(6))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entries", [(0, 2), (2, 0)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_of_an_empty_batch(compiled, entries, device):
    """As the last one of an epoch may be; also of a mask that reads tensors of the batch."""
    ids = torch.zeros(entries[0], 100, dtype=torch.int32, device=device)

    def seen(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    def attend(q, k):
        return flex_attention(q, k, k, block_mask=create_block_mask(seen, *entries, 100, 200, device))

    q, k = torch.randn(*entries, 100, 16, device=device, requires_grad=True), torch.randn(*entries, 200, 16, device=device)
    out = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(q, k)
    assert out.shape == q.shape and create_block_mask(seen, *entries, 100, 200, device).kv_num_blocks.shape == (*entries, 1)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    assert create_mask(seen, *entries, 100, 200, device).shape == (*entries, 100, 200)


def test_defaults_of_a_mod_are_no_arguments():
    """create_mask tells a score_mod from a mask_mod by what it must be given."""
    expected = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    assert torch.equal(create_mask(lambda b, h, q_idx, kv_idx, more=0: q_idx + more >= kv_idx, None, None, 9, 9, "cpu"), expected)
    hidden = lambda score, b, h, q_idx, kv_idx, low=-torch.inf: torch.where(q_idx >= kv_idx, score, low)  # noqa: E731
    assert torch.equal(create_mask(hidden, None, None, 9, 9, "cpu"), expected)
    assert torch.equal(create_mask(lambda b, h, q_idx, kv_idx, *, more=0: q_idx + more >= kv_idx, None, None, 9, 9, "cpu"), expected)


def test_the_first_cpu_is_the_cpu():
    q = torch.randn(1, 1, 20, 16)
    mask = create_block_mask(mods.causal, None, None, 20, 20, "cpu:0")
    assert torch.equal(flex_attention(q, q, q, block_mask=mask), flex_attention(q, q, q, mask_mod=mods.causal))
    assert SequenceInfo(device="cpu:0").device == torch.device("cpu") == mask.to("cpu:0").as_lists().kv_indices.device
