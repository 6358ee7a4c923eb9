"""Slices and shorter lengths of block masks against dense masks, attention of a slice against the slice of attention, equality."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import BlockMask, cache_info, create_block_mask, create_mask, flex_attention, mods
from flexpress.codegen.mod.captured import tensors
from flexpress.codegen.mod.tracing.bind import bind, why_every_call
from support.block_lists import brute_force, check_lists
from support.dense import dense_attention, positions, relative_error
from support.devices import DEVICES
from support.problems import MASK_MODS, mask_mods

NAMES = [m for m in MASK_MODS if m != "none"]
SIZES = [(16, 16), (32, 32), (32, 16), (16, 48), (20, 30)]
LENGTHS = [1, 17, 100, 127]


def dense_of(mask: BlockMask, B: int, H: int, device: str) -> torch.Tensor:
    """bool (B, H, Q_LEN, KV_LEN): what mask_mod says in a call with B batch entries and H heads."""
    return create_mask(mask.mask_mod, B, H, *mask.seq_lengths, device)


def statuses(mask: BlockMask) -> torch.Tensor:
    """int8 (B, H, rows, columns) from the public lists: 0 empty, 1 partial, 2 full."""
    columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    status = torch.zeros(*mask.kv_num_blocks.shape, columns, dtype=torch.int8)
    for value, counts, indices in ((1, mask.kv_num_blocks, mask.kv_indices), (2, mask.full_kv_num_blocks, mask.full_kv_indices)):
        for place in torch.cartesian_prod(*[torch.arange(n) for n in counts.shape]).reshape(-1, 3).tolist() if counts is not None else ():
            status[tuple(place)][indices[tuple(place)][: counts[tuple(place)]].long().cpu()] = value
    return status


def block_positions(rows, q_block: int, Q_LEN: int) -> list[int]:
    """The query positions in rows of blocks."""
    return [p for r in rows for p in range(r * q_block, min((r + 1) * q_block, Q_LEN))]


@st.composite
def indices(draw, extent: int, whole_last: bool = True):
    """An index of one dimension, and the positions it means. Not whole_last: the last one may stand at the end only."""
    kind = draw(st.sampled_from(["all", "int", "slice", "step", "list", "tensor", "bools"]))
    if kind == "all":
        return slice(None), list(range(extent))
    if kind == "int":
        i = draw(st.integers(-extent, extent - 1))
        return i, [i % extent]
    if kind in ("slice", "step"):
        bounds = st.one_of(st.none(), st.integers(-extent - 1, extent + 1))
        index = slice(draw(bounds), draw(bounds), draw(st.integers(1, 3)) if kind == "step" else None)
        return index, list(range(extent))[index]
    if kind == "bools":
        chosen = draw(st.lists(st.booleans(), min_size=extent, max_size=extent))
        return torch.tensor(chosen), [i for i, c in enumerate(chosen) if c]
    found = draw(st.lists(st.integers(0, extent - 1), min_size=1, max_size=4))
    if not whole_last:
        found = [i for i in found if i != extent - 1] + [extent - 1] * draw(st.integers(0, 1))
    return (torch.tensor(found, dtype=torch.int32) if kind == "tensor" else found), found


@st.composite
def slices(draw, extents: tuple[int, int, int], ragged: bool):
    """An index of a block mask with at most one sequence or tensor, and the positions in each dimension."""
    found, table = [], False
    for dim, extent in enumerate(extents):
        index, chosen = draw(indices(extent, dim < 2 or not ragged))
        if isinstance(index, (list, torch.Tensor)):
            if table:
                index, chosen = slice(None), list(range(extent))
            table = True
        found.append((index, chosen))
    return tuple(i for i, _ in found), [c for _, c in found]


# name, B, H, Q_LEN, KV_LEN, block size, separate full blocks
MASKS = (
    st.sampled_from(NAMES),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
    st.sampled_from(LENGTHS),
    st.sampled_from(LENGTHS),
    st.sampled_from(SIZES),
    st.booleans(),
)


@settings(max_examples=40)
@given(st.data(), *MASKS)
def test_slices_are_slices_of_the_dense_mask(data, name, B, H, Q_LEN, KV_LEN, size, separate):
    mask_mod = mask_mods(max(Q_LEN, KV_LEN), "cpu")[name]
    mask = create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, "cpu", size, separate_full_blocks=separate)
    dense, status = create_mask(mask_mod, B, H, Q_LEN, KV_LEN, "cpu"), statuses(mask)
    rows = list(range(status.shape[2]))
    part = mask
    for _ in range(data.draw(st.sampled_from([1, 1, 2]))):  # a slice of a slice too
        extents = (dense.shape[0], dense.shape[1], len(rows))
        if 0 in extents:
            break
        index, (bs, hs, rs) = data.draw(slices(extents, part.seq_lengths[0] % size[0] != 0))
        part = part[index]
        queries = block_positions(rs, size[0], dense.shape[2])
        dense, status, rows = dense[bs][:, hs][:, :, queries], status[bs][:, hs][:, :, rs], rs
    assert part.shape == tuple(dense.shape) and size == part.BLOCK_SIZE
    assert torch.equal(statuses(part), status)
    if dense.numel():
        assert torch.equal(dense_of(part, *dense.shape[:2], "cpu"), dense)
        check_lists(part, status if separate else status.clamp(max=1))
        if part.shape[0] == 1 < B:  # one entry of several stands for every entry of a call
            b, h, q_idx, kv_idx = positions((2, *dense.shape[1:]), "cpu")
            assert torch.equal(part.mask_mod(b, h, q_idx, kv_idx).expand(2, *dense.shape[1:]), dense.expand(2, *dense.shape[1:]))


@settings(max_examples=40)
@given(st.data(), *MASKS)
def test_adjust_is_a_new_mask(data, name, B, H, Q_LEN, KV_LEN, size, separate):
    """Lists of a mask made anew, but that a block cut by a length may stay partial; exactly those where no block is cut."""
    mask_mod = mask_mods(max(Q_LEN, KV_LEN), "cpu")[name]
    mask = create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, "cpu", size, separate_full_blocks=separate)
    lengths = (data.draw(st.integers(0, Q_LEN)), data.draw(st.integers(0, KV_LEN)))
    if data.draw(st.booleans()):
        lengths = tuple(n // s * s for n, s in zip(lengths, size, strict=True))
    shorter = mask.adjust(*lengths)
    assert shorter.shape == (B, H, *lengths) and shorter.mask_mod is mask_mod and shorter.as_lists().interior
    got, want = statuses(shorter), brute_force(mask_mod, B, H, *lengths, size, "cpu")
    if not separate:
        want.clamp_(max=1)
    cut_rows, cut_columns = (n % s != 0 and n < old for n, s, old in zip(lengths, size, (Q_LEN, KV_LEN), strict=True))
    assert got.shape == want.shape
    inner = (slice(None), slice(None), slice(0, got.shape[2] - cut_rows), slice(0, got.shape[3] - cut_columns))
    assert torch.equal(got[inner], want[inner])
    assert ((got == want) | (got == 1)).all()
    if not cut_rows and not cut_columns:
        assert shorter == create_block_mask(mask_mod, B, H, *lengths, "cpu", size, separate_full_blocks=separate)


def attention(q, k, v, mask, grad):
    """The output, and the gradients of q, k and v."""
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = flex_attention(*inputs, block_mask=mask, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


PARTS = {
    "rows": (slice(None), slice(None), slice(1, 3)),
    "last_rows": (slice(None), slice(None), slice(2, None)),
    "one_row": (slice(None), slice(None), -1),
    "rows_by_list": (slice(None), slice(None), [2, 0, 3]),
    "entry": (1, slice(None), slice(None)),
    "heads": (slice(None), [3, 0], slice(1, None)),
    "both": (slice(1, 2), slice(0, None, 2), slice(1, 2)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name, part",
    [
        ("causal", "rows"),
        ("causal", "rows_by_list"),
        ("window", "last_rows"),
        ("document", "one_row"),
        *(("per_batch", part) for part in ("rows", "rows_by_list", "entry", "both")),
        *(("per_head", part) for part in ("last_rows", "one_row", "heads", "both")),
    ],
)
def test_attention_of_a_slice_is_the_slice_of_attention(device, name, part):
    shared = name in ("causal", "window", "document")
    B, H = (1, 1) if shared else (2, 4)
    length, size = 61, 16
    generator = torch.Generator().manual_seed(len(name))
    q, k, v, grad = (torch.randn(B, H, length, 16, generator=generator).to(device) for _ in range(4))
    mask_mod = mask_mods(length, device)[name]
    mask = create_block_mask(mask_mod, None if shared else B, None if shared else H, length, length, device, size)
    index = PARTS[part]
    chosen = [
        list(range(n))[i] if isinstance(i, slice) else i if isinstance(i, list) else [i] for i, n in zip(index, (B, H, 4), strict=True)
    ]
    queries = block_positions([r % 4 for r in chosen[2]], size, length)

    def taken(tensor, rows=True):
        tensor = tensor[chosen[0]][:, chosen[1]]
        return tensor[:, :, queries] if rows else tensor

    sliced = mask[(slice(None), slice(None), index[2])] if shared else mask[index]
    only = torch.zeros_like(grad)  # the gradient of the part alone, laid into the whole
    only[torch.tensor(chosen[0])[:, None, None], torch.tensor(chosen[1])[None, :, None], torch.tensor(queries)] = taken(grad)
    whole = attention(q, k, v, mask, only)
    got = attention(taken(q), taken(k, False), taken(v, False), sliced, taken(grad))
    for value, reference, rows in zip(got, whole, (True, True, False, False), strict=True):
        torch.testing.assert_close(value, taken(reference, rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["causal", "window", "per_batch"])
def test_attention_of_shorter_lengths(device, name):
    B = 2 if name == "per_batch" else 1
    q, k, v, grad = (torch.randn(B, 1, 90, 16, generator=torch.Generator().manual_seed(i)).to(device) for i in range(4))
    mask_mod = mask_mods(90, device)[name]
    mask = create_block_mask(mask_mod, B, 1, 90, 90, device, 16)
    for Q_LEN, KV_LEN in ((90, 41), (33, 90), (50, 50)):
        cut = [t[:, :, :n].contiguous() for t, n in ((q, Q_LEN), (k, KV_LEN), (v, KV_LEN))]
        got = attention(*cut, mask.adjust(Q_LEN, KV_LEN), grad[:, :, :Q_LEN])
        want = attention(*cut, create_block_mask(mask_mod, B, 1, Q_LEN, KV_LEN, device, 16), grad[:, :, :Q_LEN])
        for value, reference in zip(got, want, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)


def test_slices_share_kernels():
    """Another slice, of a slice too, traces and compiles nothing."""
    mask = create_block_mask(mods.sliding_window(9), None, None, 200, 200, "cpu", 16)

    def use(part):
        q = torch.randn(1, 1, part.seq_lengths[0], 16)
        k = torch.randn(1, 1, 200, 16)
        flex_attention(q, k, k, block_mask=part)

    use(mask[:, :, 1:3])
    use(mask[:, :, [4, 2]])
    before = cache_info()
    for part in (mask[:, :, 5:9], mask[:, :, 7], mask[:, :, 2:][:, :, 3:5], mask[:, :, ::2], mask[:, :, [1, 1, 7]]):
        use(part)
    after = cache_info()
    assert (after.traces, after.prints, after.compiles) == (before.traces, before.prints, before.compiles)


def test_a_slice_of_everything_keeps_its_mask_mod():
    mask = create_block_mask(mods.causal, None, None, 100, 100, "cpu", 16)
    for whole in (mask[:], mask[0], mask[:, 0], mask[..., 0:], mask[0, 0, :5]):
        assert whole.mask_mod is mods.causal
    assert mask[:, :, 1:].mask_mod.__name__ == "causal_slice"
    assert len(list(mask)) == 1  # iteration ends


def test_a_replaced_mask_mod_is_sliced_itself():
    mask = create_block_mask(mods.causal, None, None, 64, 64, "cpu", 16)[:, :, 1:]
    mask.mask_mod = mods.causal
    assert torch.equal(dense_of(mask[:, :, 1:], 1, 1, "cpu"), create_mask(mods.causal, None, None, 64, 64, "cpu")[:, :, 16:48])


@pytest.mark.gpu
def test_a_slice_moves_with_its_tables():
    ids = torch.arange(128, device="cuda") // 40
    mask = create_block_mask(mods.document(ids), None, None, 128, 128, "cuda", 16)
    there = create_block_mask(mods.causal, None, None, 128, 128, "cpu", 16)[:, :, [3, 1]].to("cuda")
    assert there == create_block_mask(mods.causal, None, None, 128, 128, "cuda", 16)[:, :, [3, 1]]
    q = torch.randn(1, 1, 32, 16, device="cuda")
    k = torch.randn(1, 1, 128, 16, device="cuda")
    assert flex_attention(q, k, k, block_mask=there).isfinite().all()
    assert flex_attention(q, k, k, block_mask=mask[:, :, [3, 1]]).isfinite().all()


@pytest.mark.parametrize(
    "index, error, message",
    [
        ((slice(None), slice(None), [6, 5]), ValueError, r"the last query block \(6\) has 4 of 16 positions.*got rows \[6, 5\]"),
        ((slice(None), slice(None), [6, 6]), ValueError, "only be the last one selected, once"),
        ((slice(None), slice(None), slice(None, None, -1)), ValueError, "steps must be positive"),
        ((slice(None), slice(None), 7), IndexError, "query block index 7 is outside a mask with 7"),
        (2, IndexError, "batch index 2 is outside a mask with 2"),
        ((0, 1), IndexError, "head index 1 is outside .* the same for all"),
        ((0, 0, 0, 0), IndexError, r"got 4 indices.*adjust\(q_len, kv_len\)"),
        (([0, 1], slice(None), [0, 1]), IndexError, r"mask\[batches\]\[:, heads\]"),
        ((..., ...), IndexError, "at most one"),
        (None, TypeError, "batch index must be .* got None"),
        ("0", TypeError, "got '0'"),
        (True, TypeError, "got True"),
        ([0.5], TypeError, "got 0.5"),
        (torch.zeros(1, 1, dtype=torch.long), TypeError, "1-dimensional"),
        (torch.zeros(1), TypeError, "torch.float32"),
        (torch.tensor([True]), IndexError, "1 bools for 2 entries"),
    ],
)
def test_indices_that_are_refused(index, error, message):
    mask = create_block_mask(mods.causal, 2, None, 100, 100, "cpu", 16)
    with pytest.raises(error, match=message):
        mask[index]


def test_lengths_that_are_refused():
    mask = create_block_mask(mods.causal, None, None, 100, 100, "cpu", 16)
    with pytest.raises(ValueError, match=r"new_kv_len=101 is more than the 100 positions.*create_block_mask\(mask_mod, B, H, 100, 101\)"):
        mask.adjust(100, 101)
    with pytest.raises(ValueError, match="new_q_len is -1; it must be at least 0"):
        mask.adjust(-1, 5)


def test_a_full_block_that_is_cut():
    """Also where the lists come from elsewhere and reach past KV_LEN already."""
    made = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0, None, None, 32, 64, "cpu", 16)
    assert made.full_kv_num_blocks.tolist() == [[[4, 4]]]
    cut = made.adjust(32, 40)
    assert cut.full_kv_num_blocks.tolist() == [[[2, 2]]] and cut.kv_indices[..., 0].tolist() == [[[2, 2]]]
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    loose = BlockMask.from_kv_blocks(*lists, 16, seq_lengths=(32, 60))
    assert not loose.as_lists().interior and not loose[:, :, 1:].as_lists().interior
    assert loose.adjust(20, 60).as_lists().interior and loose.adjust(32, 50).as_lists().interior  # cut blocks are partial
    q, k = torch.randn(1, 1, 32, 16), torch.randn(1, 1, 64, 16)
    want = flex_attention(q, k[:, :, :60], k[:, :, :60])
    torch.testing.assert_close(flex_attention(q, k[:, :, :60], k[:, :, :60], block_mask=loose), want)
    torch.testing.assert_close(flex_attention(q[:, :, 16:], k[:, :, :60], k[:, :, :60], block_mask=loose[:, :, 1:]), want[:, :, 16:])


def test_equality_is_of_meaning():
    mask = create_block_mask(mods.sliding_window(40), None, None, 100, 90, "cpu", 16)
    other = create_block_mask(mods.sliding_window(40), None, None, 100, 90, "cpu", 16)
    past = torch.arange(other.kv_indices.shape[-1]) >= other.kv_num_blocks[..., None]
    other = BlockMask(
        other.seq_lengths,
        other.kv_num_blocks,
        torch.where(past, 5, other.kv_indices),
        other.full_kv_num_blocks,
        other.full_kv_indices,
        BLOCK_SIZE=other.BLOCK_SIZE,
        mask_mod=other.mask_mod,
    )
    assert mask == other and hash(mask) == hash(other) and mask[:, :, 2:4] == other[:, :, 2:4] and mask in {other}
    made = dict(Q_LEN=100, KV_LEN=90, device="cpu", BLOCK_SIZE=16)
    for different in (
        create_block_mask(mods.sliding_window(41), None, None, **made),
        mask[:, :, :5],
        mask.adjust(100, 89),
        None,
        create_block_mask(mods.sliding_window(40), 2, None, **made),
        create_block_mask(mods.causal, None, None, **made),
        create_block_mask(mods.sliding_window(40), None, None, **made, separate_full_blocks=False),
        create_block_mask(mods.sliding_window(40), None, None, **{**made, "BLOCK_SIZE": 32}),
    ):
        assert mask != different
    ids = torch.arange(100) // 30
    documents = create_block_mask(mods.document(ids), None, None, 100, 100, "cpu", 16)
    assert documents == create_block_mask(mods.document(ids.clone()), None, None, 100, 100, "cpu", 16)
    # the same lists, but other pairs inside partial blocks
    shifted = torch.where(torch.arange(100) == 29, 1, ids)
    assert documents != create_block_mask(mods.document(shifted), None, None, 100, 100, "cpu", 16)


def test_equality_where_memory_lies_low(monkeypatch):
    """As that of the system Pythons of Debian and Ubuntu, whose heap is below 4 GiB: an address says nothing for sure."""
    monkeypatch.setattr(tensors, "LOWEST", 1 << 62)
    ids = torch.arange(100) // 30
    one, same, other = (create_block_mask(mods.document(each), None, None, 100, 100, "cpu", 16) for each in (ids, ids.clone(), ids + 1))
    assert one == same and one != other
    table = torch.randn(5, 4, requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.logsumexp(table[q_idx % 5] * score, 0)

    bind(mod, "score")
    assert not why_every_call(mod, "score")


def test_names_of_torch():
    """What code written for torch's class uses; values where both mean the same."""
    from torch.nn.attention.flex_attention import create_block_mask as torch_mask

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    ours, theirs = create_block_mask(causal, 2, 3, 128, 128, "cpu", 32), torch_mask(causal, 2, 3, 128, 128, "cpu", 32)
    assert ours.shape == theirs.shape and ours.numel() == theirs.numel() and ours.sparsity() == pytest.approx(theirs.sparsity())
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(getattr(ours, f"{name}_num_blocks"), getattr(theirs, f"{name}_num_blocks"))
        assert getattr(ours, f"{name}_indices").shape[:-1] == getattr(theirs, f"{name}_indices").shape[:-1]
    for flatten in (True, False):
        got, want = ours.as_tuple(flatten), theirs.as_tuple(flatten)
        lead, tail = (2, 3) if flatten else (1, 2)
        assert got[:lead] == want[:lead] and got[-tail:] == want[-tail:]
        assert torch.equal(got[lead], want[lead]) and torch.equal(got[lead + 6], want[lead + 6])
    rows = torch.tensor([2, 0], dtype=torch.int32)
    for index in (slice(0, 1), (slice(None), slice(1, 3)), (slice(1, 2), slice(None), rows), (slice(None), [2, 1], slice(0, 3))):
        part, expected = ours[index], theirs[index]
        assert part.kv_num_blocks.shape == expected.kv_num_blocks.shape
        assert torch.equal(part.to_dense(), expected.to_dense())
    assert torch.equal(ours.adjust(96, 64).to_dense(), theirs._adjust(96, 64).to_dense())
    again = BlockMask(
        seq_lengths=ours.seq_lengths,
        kv_num_blocks=ours.kv_num_blocks,
        kv_indices=ours.kv_indices,
        full_kv_num_blocks=ours.full_kv_num_blocks,
        full_kv_indices=ours.full_kv_indices,
        q_num_blocks=ours.q_num_blocks,
        q_indices=ours.q_indices,
        full_q_num_blocks=ours.full_q_num_blocks,
        full_q_indices=ours.full_q_indices,
        BLOCK_SIZE=ours.BLOCK_SIZE,
        mask_mod=causal,
    )
    assert again == ours


def test_dense_reference_of_a_slice():
    """mask_mod of a slice is an ordinary function: it runs on tensors of positions as well."""
    mask = create_block_mask(mods.causal, 2, 2, 100, 100, "cpu", 16)
    part = mask[1, :, [1, 4]]
    b, h, q_idx, kv_idx = positions((1, 2, 32, 100), "cpu")
    queries = torch.tensor(block_positions([1, 4], 16, 100))
    assert torch.equal(part.mask_mod(b, h, q_idx, kv_idx).expand(1, 2, 32, 100)[0, 0], queries[:, None] >= torch.arange(100))


def test_lists_without_a_mask_mod_that_are_cut():
    """The last block becomes partial, so no kernel looks where keys end in full ones."""
    counts, places = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    full = torch.full_like(counts, 2), torch.tensor([[[[0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, places, *full, BLOCK_SIZE=64, seq_lengths=(64, 128)).adjust(64, 100)
    assert mask._status().tolist() == [[[[2, 1]]]] and mask.as_lists().interior
    q, k = torch.randn(1, 1, 64, 16), torch.randn(1, 1, 100, 16)
    assert relative_error(flex_attention(q, k, k, block_mask=mask), dense_attention(q, k, k)[0]) < 1e-5


def test_full_blocks_of_lists_that_are_cut():
    """They stay full, whatever mask_mod would hide, and end where keys do."""
    counts, places = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    full = torch.full_like(counts, 2), torch.tensor([[[[0, 1]]]], dtype=torch.int32)
    nothing = lambda b, h, q_idx, kv_idx: q_idx < 0  # noqa: E731
    mask = BlockMask.from_kv_blocks(counts, places, *full, BLOCK_SIZE=64, mask_mod=nothing, seq_lengths=(64, 128)).adjust(64, 100)
    assert mask._status().tolist() == [[[[2, 2]]]]
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for n in (64, 100, 100))
    out, exact = flex_attention(q, k, v, block_mask=mask), dense_attention(q, k, v)[0]
    assert relative_error(out, exact) < 1e-5
    d_out = torch.randn_like(out)
    for found, wanted in zip(*(torch.autograd.grad(o, (q, k, v), d_out.to(o.dtype)) for o in (out, exact)), strict=True):
        assert relative_error(found, wanted) < 1e-5
