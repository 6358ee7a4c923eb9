"""SequenceInfo: what comes back out of a batch, its positions and pages, its limits, and that bad input changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import OutOfPages, PageAllocator
from flexpress.sequences import ARG_NAMES, AttentionInfo, CacheConfig, PositionalEmbeddingConfig, SequenceInfo

SIZES = dict(max_seq_len=40, max_batch_size=4, page_size=8)


def state(info: SequenceInfo) -> dict:
    """Everything that a batch is, with the memory behind its tensors."""
    return {
        **{name: memory.tolist() for name, memory in info._step.memory.items()},
        "num_pages": info.num_pages,
        "host": (info.sequence_lengths, info.input_positions, info.page_assignments),
    }


@given(st.data())
@settings(max_examples=100)
def test_batches(data):
    """One object through several steps: tensors against what they should be, by plain loops."""
    size = data.draw(st.sampled_from([0, 3, 8]))
    info = SequenceInfo(max_seq_len=20, max_batch_size=5, page_size=size, max_num_tokens=60, num_pages=40)
    where = {name: getattr(info, name).data_ptr() for name in ARG_NAMES}
    for _ in range(3):
        lengths = data.draw(st.lists(st.integers(0, 12) if data.draw(st.booleans()) else st.just(1), min_size=1, max_size=5))
        tokens = [data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=n, max_size=n)) for n in lengths]
        positions = [data.draw(st.integers(0, 20 - n)) for n in lengths]
        spare = iter(data.draw(st.permutations(range(info.num_pages))))
        pages = [[next(spare) for _ in range(-(-(p + n) // info.page_size))] for p, n in zip(positions, lengths, strict=True)]
        kind = data.draw(st.sampled_from([list, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)]))
        info.nest_sequences([kind(ids) for ids in tokens])
        info.update_pos(torch.tensor(positions) if data.draw(st.booleans()) else positions, reset=True)
        info.assign_cache_loc(pages)

        n, total, flat = len(lengths), sum(lengths), [i for ids in tokens for i in ids]
        assert (info.num_sequences, info.num_tokens, info.sequence_lengths) == (n, total, lengths)
        assert (info.input_positions, info.page_assignments) == (positions, pages)
        assert info.is_generate == (set(lengths) == {1})
        assert tuple(info.input_ids.shape) == ((n, 1) if info.is_generate else (1, total))
        assert info.input_ids.flatten().tolist() == flat
        assert [ids.tolist() for ids in info.unnest_sequences(info.input_ids)] == tokens
        hidden = torch.randn(*info.input_ids.shape, 2, 3)
        assert torch.equal(torch.cat(info.unnest_sequences(hidden)), hidden.flatten(0, 1))
        assert info.seq_len.tolist() == lengths and info._step.memory["seq_len"][n:].eq(0).all()
        assert info.seq_start.tolist() == [sum(lengths[:i]) for i in range(n)]
        assert info.input_pos.tolist() == positions
        assert info.position_ids.shape == info.input_ids.shape and info.position_ids.dtype == torch.int32
        assert info.position_ids.flatten().tolist() == [p + i for p, s in zip(positions, lengths, strict=True) for i in range(s)]
        assert info.cache_loc.tolist() == [page for row in pages for page in row]
        assert info.pages_per_seq.tolist() == [len(row) for row in pages]
        assert info.page_table.tolist() == [row + [-1] * (info.max_pages_per_seq - len(row)) for row in pages]
        assert info._step.memory["page_table"][n:].eq(-1).all()
        assert all(t.dtype == torch.int32 for t in info.args)
        assert {name: getattr(info, name).data_ptr() for name in ARG_NAMES if getattr(info, name).numel()}.items() <= where.items()


@given(st.data())
@settings(max_examples=60)
def test_tokens_may_be_rows(data):
    """Embeddings, or several ids a token: they lie as ids would, come back as they were, and their memory stays where it is."""
    info = SequenceInfo(max_seq_len=20, max_batch_size=4, max_num_tokens=60)
    ids = info.input_ids.data_ptr()
    row = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]))
    held = dtype if dtype.is_floating_point else torch.int32
    where = set()
    for _ in range(2):
        lengths = data.draw(st.lists(st.integers(0, 12) if data.draw(st.booleans()) else st.just(1), min_size=1, max_size=4).filter(sum))
        rows = [torch.randint(-9, 9, (n, *row)).to(dtype) for n in lengths]
        together = len(set(lengths)) == 1 and data.draw(st.booleans())
        info.nest_sequences(torch.stack(rows) if together else [[] if not len(r) and data.draw(st.booleans()) else r for r in rows], 0)
        assert info.sequence_lengths == lengths and info.input_ids.dtype == held
        assert info.input_ids.shape[:2] == info.position_ids.shape == ((len(lengths), 1) if info.is_generate else (1, sum(lengths)))
        assert all(torch.equal(a, b) for a, b in zip(info.unnest_sequences(info.input_ids), (r.to(held) for r in rows), strict=True))
        where.add(info.input_ids.data_ptr())
        other = SequenceInfo(max_seq_len=20, max_batch_size=4, max_num_tokens=60)
        other.sync(info)
        assert torch.equal(other.input_ids, info.input_ids)
    assert len(where) == 1 and ids not in where
    for largest in (info.set_largest_batch, info.reset):
        largest()
        assert (info.input_ids.dtype, tuple(info.input_ids.shape[2:])) == (held, row) and not info.input_ids.any()
    example = info.example_args()[0]
    assert (example.dtype, tuple(example.shape)) == (held, (2, 4, *row))
    info.nest_sequences([[1, 2], [3]])
    assert info.input_ids.tolist() == [[1, 2, 3]] and info.input_ids.data_ptr() == ids


def test_embeddings_bring_no_graph_of_autograd():
    info = SequenceInfo(**SIZES)
    info.nest_sequences([torch.ones(2, 3, requires_grad=True), []])
    assert not info.input_ids.requires_grad and info.to("meta").input_ids.shape == (1, 2, 3)


def test_a_conversation():
    """Prompts, then decoding, then a sequence ends and its place is taken by a new prompt."""
    info, pool = SequenceInfo(max_seq_len=16, max_batch_size=3, page_size=4, num_pages=9), PageAllocator(9, 4)
    first, second = pool.allocate(5), pool.allocate(2)
    info.nest_sequences([[1, 2, 3, 4, 5], [6, 7]], 0, [pool.pages(first), pool.pages(second)])
    assert info.page_table.tolist() == [[0, 1, -1, -1], [2, -1, -1, -1]]
    info.update_pos()
    for token in (8, 9):
        for sequence in (first, second):
            pool.extend(sequence, 1)
        info.nest_sequences([[token], [token]], page_assignments=[pool.pages(first), pool.pages(second)])
        assert info.is_generate and info.input_ids.tolist() == [[token], [token]]
        assert info.position_ids.tolist() == [[p] for p in info.input_positions]
        info.args  # noqa: B018
        info.update_pos()
    assert info.input_positions == [7, 4]
    pool.free(second)
    pool.extend(first, 1)
    third = pool.allocate(3)
    info.nest_sequences([[10], [11, 12, 13]], input_pos=[7, 0], page_assignments=[pool.pages(first), pool.pages(third)])
    assert info.input_ids.tolist() == [[10, 11, 12, 13]] and info.position_ids.tolist() == [[7, 0, 1, 2]]
    info.update_pos([1, 3])
    info.update_pos([-2, 0])
    assert info.input_positions == [6, 3], "two guessed tokens are taken back"
    with pytest.raises(OutOfPages):
        pool.allocate(36)


def test_places_keep_positions_and_pages():
    info = SequenceInfo(**SIZES)
    info.nest_sequences([[1], [2, 3], [4]], [5, 6, 7], [[3], [4], [5]])
    info.nest_sequences([[1], [2]])
    assert (info.input_positions, info.page_assignments) == ([5, 6], [[3], [4]])
    info.nest_sequences(torch.arange(8).reshape(4, 2))
    assert (info.input_positions, info.page_assignments) == ([5, 6, 0, 0], [[3], [4], [], []])
    with pytest.raises(ValueError, match="sequence 2 has 0 tokens in the cache and 2 new ones, but its 0 pages hold 0; assign_cache_loc"):
        info.args  # noqa: B018
    info.update_pos(1)
    info.update_pos(3, reset=True)
    assert info.input_positions == [3] * 4


def test_without_paging():
    info = SequenceInfo(max_seq_len=10, max_batch_size=4)
    assert not info.is_paged and (info.page_size, info.num_pages, info.max_pages_per_seq) == (10, 4, 1)
    info.nest_sequences([[1, 2]])
    info.nest_sequences([[1, 2], [3], []])
    assert info.cache_loc.tolist() == [0, 1, 2], "sequence i is on page i"
    info.nest_sequences([[1], [2]], page_assignments=[[3], [2]])
    info.nest_sequences([[1], [2], [3], [4]])
    assert info.page_assignments == [[3], [2], [], []], "never a page that another sequence has"


def test_reset_and_warm_up():
    info = SequenceInfo(**SIZES, max_num_tokens=30, num_pages=8)
    fresh = state(info)
    assert info.is_generate and info.input_ids.tolist() == [[0]] * 4 and info.cache_loc.tolist() == [0, 1, 2, 3]
    info.nest_sequences([[1, 2, 3], [], [4]], [0, 1, 2], [[7], [6, 5], [4]])
    info.reset()
    assert {**state(info), "input_ids": 0, "cache_loc": 0} == {**fresh, "input_ids": 0, "cache_loc": 0}
    assert info.input_ids.tolist() == [[0]] * 4
    info.set_largest_batch()
    assert info.num_tokens == 30 and sorted(info.sequence_lengths) == [7, 7, 8, 8]
    assert len({page for row in info.page_assignments for page in row}) == 4 and len(info.args) == len(ARG_NAMES)
    few = SequenceInfo(max_seq_len=8, max_batch_size=4, page_size=2, max_num_tokens=3)
    assert few.num_sequences == 3
    few.set_largest_batch()
    assert sorted(few.sequence_lengths) == [0, 1, 1, 1]


def test_number_of_pages():
    info = SequenceInfo(**SIZES)
    assert info.num_pages == 4 * 5 and info.max_pages_per_seq == 5 and info.is_paged
    info.num_pages = 100
    info.nest_sequences([[1]], page_assignments=[[99]])
    with pytest.raises(ValueError, match="num_pages is 50, but page 99 is assigned; reset first"):
        info.num_pages = 50
    assert info.num_pages == 100 and "num_pages=100" in repr(info)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.integers(1, 50))
@settings(max_examples=200)
def test_the_default_number_of_pages_holds_any_first_step_and_no_more(length, batch, size, tokens):
    """Against all ways to spread so many tokens, at most, over so many sequences."""

    def filled(sequences, left):
        return max((-(-n // size) + filled(sequences - 1, left - n) for n in range(min(length, left) + 1)), default=0) if sequences else 0

    info = SequenceInfo(length, batch, min(size, length), tokens)
    size = info.page_size
    assert info.num_pages == max(filled(batch, min(tokens, batch * length)), batch)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.integers(1, 50), st.integers(0, 12))
@settings(max_examples=200)
def test_the_largest_batch_is_the_largest_that_pages_hold(length, batch, size, tokens, more_pages):
    """Against all ways to give pages to sequences. No page has two sequences, which would write to one place."""

    def held(sequences, left):
        return max(min(n * size, length) + held(sequences - 1, left - n) for n in range(left + 1)) if sequences else 0

    size = min(size, length)
    info = SequenceInfo(length, batch, size, tokens)
    info.set_largest_batch()
    assert info.num_tokens == min(tokens, batch * length), "the default number of pages holds it"
    info.reset()
    info.num_pages = batch + more_pages
    info.set_largest_batch()
    assert info.num_tokens == min(tokens, held(batch, info.num_pages)) and len(info.args) == len(ARG_NAMES)
    pages = [page for row in info.page_assignments for page in row]
    assert len(pages) == len(set(pages))


def test_names_and_other_devices():
    info = SequenceInfo(**SIZES)
    assert tuple(info.named_args) == ARG_NAMES and info.extra_arg_names == ARG_NAMES[1:]
    assert all(a is b or torch.equal(a, b) for a, b in zip(info.args, info.named_args.values(), strict=True))
    assert SequenceInfo(**SIZES).to("meta").device.type == "meta"
    other = SequenceInfo(**SIZES)
    other.nest_sequences([[1, 2], [], [3]], [4, 5, 6], [[1], [2], [3]])
    info.sync(other)
    assert state(info)["host"] == state(other)["host"] and torch.equal(info.input_ids, other.input_ids)
    with pytest.raises(ValueError, match="page_size is 8 here and 4 in the other"):
        info.sync(SequenceInfo(max_seq_len=40, max_batch_size=4, page_size=4))


def test_export():
    class Model(torch.nn.Module):
        def forward(self, input_ids, seq_len, input_pos, cache_loc, pages_per_seq, seq_start, page_table):
            return input_ids * 2, seq_len + input_pos + seq_start, cache_loc + 1, page_table.sum(1) + pages_per_seq

    info = SequenceInfo(**SIZES)
    before = state(info)
    model = torch.export.export(Model(), info.example_args(), dynamic_shapes=info.dynamic_shapes).module()
    assert state(info) == before
    info.nest_sequences([[1, 2, 3], [4], [5, 6]], [0, 9, 0], [[0], [1, 2], [3]])
    assert all(torch.equal(a, b) for a, b in zip(model(*info.args), Model()(*info.args), strict=True))
    info.reset()
    assert all(torch.equal(a, b) for a, b in zip(model(*info.args), Model()(*info.args), strict=True))
    for limits in ((16, 1, 4), (16, 1, 4, 1), (3, 2, 1, 2), (16, 3, 0, 3), (1, 3), (2, 1, 1)):
        info = SequenceInfo(*limits)
        shapes = info.dynamic_shapes
        assert all(a.shape[d] > 1 for a, dims in zip(info.example_args(), shapes, strict=True) for d in dims), limits
        model = torch.export.export(Model(), info.example_args(), dynamic_shapes=shapes).module()
        for tokens in ([[1]], [[1] * min(info.max_seq_len, info.max_num_tokens)], [[1]] + [[]] * (info.max_batch_size - 1)):
            info.nest_sequences(tokens, 0, [[0] * info.max_pages_per_seq for _ in tokens])
            assert all(torch.equal(a, b) for a, b in zip(model(*info.args), Model()(*info.args), strict=True))
    one = SequenceInfo()
    assert one.dynamic_shapes == ({},) * 7 and [tuple(a.shape) for a in one.example_args()[:2]] == [(1, 1), (1,)]


BAD = {
    "no sequences": (lambda i: i.nest_sequences([]), ValueError, "sequences has 0 entries; a batch has 1 to max_batch_size = 4"),
    "not a list": (lambda i: i.nest_sequences(3), TypeError, "sequences must be a list of sequences, or a tensor, got int"),
    "flat": (lambda i: i.nest_sequences([1, 2]), TypeError, "sequence 0 must be a list of integers or a tensor, got 1"),
    "flat tensor": (
        lambda i: i.nest_sequences(torch.arange(3)),
        ValueError,
        r"sequences must be \[n, s\] or \[n, s, ...\] as one tensor, got shape \(3,\)",
    ),
    "nested": (lambda i: i.nest_sequences([[1], [[2]]]), ValueError, r"sequence 1 must have 1 dimension, got shape \(1, 1\)"),
    "floats": (
        lambda i: i.nest_sequences([[1], [2.5]]),
        TypeError,
        "sequence 1 must hold integers, or be .s, .... for embeddings, got torch.float32",
    ),
    "a number": (
        lambda i: i.nest_sequences([torch.tensor(1)]),
        ValueError,
        r"sequence 0 must have 1 dimension, got shape \(\); a token alone",
    ),
    "complex rows": (lambda i: i.nest_sequences(torch.zeros(2, 2, 3, dtype=torch.complex64)), TypeError, "embeddings, got torch.complex64"),
    "rows and ids": (
        lambda i: i.nest_sequences([[1], torch.zeros(1, 3)]),
        ValueError,
        "sequence 0 is torch.int64 .1,., sequence 1 torch.float",
    ),
    "rows of two widths": (lambda i: i.nest_sequences([torch.zeros(1, 3), torch.zeros(1, 4)]), ValueError, "rows of one shape and dtype"),
    "rows of two dtypes": (
        lambda i: i.nest_sequences([torch.zeros(1, 3), torch.zeros(1, 3).half()]),
        ValueError,
        "rows of one shape and dtype",
    ),
    "many rows": (lambda i: i.nest_sequences(torch.zeros(4, 20, 2)), ValueError, "sequences has 80 tokens; max_num_tokens is 60"),
    "bools": (lambda i: i.nest_sequences([torch.tensor([True])]), TypeError, "sequence 0 must hold integers, or be .s, .... for embed"),
    "text": (lambda i: i.nest_sequences(["abc"]), TypeError, "sequence 0 must be a list of integers"),
    "large id": (lambda i: i.nest_sequences([[1], [2**31]]), ValueError, "an id that does not fit int32"),
    "many sequences": (lambda i: i.nest_sequences([[1]] * 5), ValueError, "sequences has 5 entries"),
    "long": (lambda i: i.nest_sequences([[1], [0] * 41]), ValueError, "sequence 1 has 41 tokens; max_seq_len is 40"),
    "tokens without values": (
        lambda i: i.nest_sequences([torch.ones(2, dtype=torch.int64, device="meta")]),
        ValueError,
        "sequences has a tensor on meta",
    ),
    "many tokens": (lambda i: i.nest_sequences([[0] * 20] * 4), ValueError, "sequences has 80 tokens; max_num_tokens is 60"),
    "nest, positions": (lambda i: i.nest_sequences([[1]], [1, 2]), ValueError, "input_pos has 2 entries for 1 sequences"),
    "nest, pages": (lambda i: i.nest_sequences([[1]], 0, [[20]]), ValueError, r"page_assignments\[0\] has page 20; there are 20 pages"),
    "positions": (lambda i: i.update_pos([1, 2, 3]), ValueError, "seq_len has 3 entries for 2 sequences"),
    "float positions": (lambda i: i.update_pos(torch.tensor([1.0, 2.0])), TypeError, r"seq_len must hold integers, got \[1.0, 2.0\]"),
    "text positions": (lambda i: i.update_pos("1"), TypeError, "seq_len must hold integers, got 1"),
    "back too far": (lambda i: i.update_pos([0, -10]), ValueError, "sequence 1 would have -1 tokens in the cache; possible are 0 to 40"),
    "too far": (lambda i: i.update_pos(41, reset=True), ValueError, "sequence 0 would have 41 tokens"),
    "few lists": (lambda i: i.assign_cache_loc([[1]]), ValueError, "page_assignments has 1 entries for 2 sequences"),
    "many pages": (lambda i: i.assign_cache_loc([[1], [*range(6)]]), ValueError, r"page_assignments\[1\] has 6 pages; 5 hold max_seq_len"),
    "negative page": (lambda i: i.assign_cache_loc([[1], [-1]]), ValueError, r"page_assignments\[1\] has page -1"),
    "page type": (lambda i: i.assign_cache_loc([1, 2]), TypeError, r"page_assignments\[0\] must hold integers, got 1"),
    "unnest": (lambda i: i.unnest_sequences(torch.zeros(4, 1, 3)), ValueError, r"shape \(4, 1, 3\); this batch is laid out as \(1, 4\)"),
    "few pages": (lambda i: setattr(i, "num_pages", 3), ValueError, "num_pages is 3; it must be at least 4"),
    "a bool as position": (lambda i: i.update_pos(True), TypeError, "seq_len must hold integers, got True"),
    "bools as positions": (lambda i: i.nest_sequences([[1]], input_pos=[True]), TypeError, r"input_pos must hold integers, got \[True\]"),
    "a tensor of bools": (lambda i: i.update_pos(torch.tensor([True, False])), TypeError, "seq_len must hold integers"),
    "bools as pages": (lambda i: i.assign_cache_loc([[True], [0]]), TypeError, r"page_assignments\[0\] must hold integers, got \[True\]"),
    "no lists": (lambda i: i.assign_cache_loc(None), TypeError, "page_assignments must be a list of lists of pages, got None"),
    "sync with nothing": (lambda i: i.sync(None), TypeError, "other must be a SequenceInfo, got NoneType"),
    "unnest nothing": (lambda i: i.unnest_sequences(None), TypeError, "tensor must be a torch.Tensor, got NoneType"),
    "no device": (lambda i: SequenceInfo(8, device="x"), TypeError, "device must be a torch.device or its name, got 'x'"),
    "a dtype as device": (lambda i: i.to(torch.int64), TypeError, "device must be a torch.device or its name, got torch.int64"),
    "a tensor as device": (lambda i: i.to(torch.zeros(1)), TypeError, "device must be a torch.device or its name"),
    "limits": (lambda i: SequenceInfo(0, 1), ValueError, "max_seq_len is 0; it must be at least 1"),
    "limits, pages": (lambda i: SequenceInfo(8, 4, num_pages=2), ValueError, "num_pages is 2; it must be at least 4"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_arguments_change_nothing(case):
    call, error, message = BAD[case]
    info = SequenceInfo(**SIZES, max_num_tokens=60, num_pages=20)
    info.nest_sequences([[1, 2, 3], [4]], [0, 9], [[2], [5, 6]])
    before = state(info)
    with pytest.raises(error, match=message):
        call(info)
    assert state(info) == before


def test_check_before_a_step():
    info = SequenceInfo(**SIZES)
    info.nest_sequences([[1], [2, 3]], [0, 14], [[0], [1, 2]])
    assert len(info.args) == 7
    info.update_pos([0, 1])
    with pytest.raises(ValueError, match="sequence 1 has 15 tokens in the cache and 2 new ones, but its 2 pages hold 16"):
        info.named_args  # noqa: B018
    info.update_pos([40, 0])
    with pytest.raises(ValueError, match="sequence 0 has 40 tokens in the cache and 1 new ones; max_seq_len is 40"):
        info.check()


def test_layers():
    info = AttentionInfo(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    assert (info.cache_dtype, info.rope_dim, info.cache_config, info.pos_embd_config.mode) == (torch.bfloat16, 0, CacheConfig(), None)
    rope = PositionalEmbeddingConfig(mode="rope", rope_theta=5e5)
    assert AttentionInfo(8, 2, 64, torch.float16, CacheConfig(torch.float8_e4m3fn), rope).cache_dtype == torch.float8_e4m3fn
    assert AttentionInfo(8, 2, 64, torch.float16, pos_embd_config=rope).rope_dim == 64
    part = PositionalEmbeddingConfig("rope", rope_dim=16)
    assert AttentionInfo(8, 2, 64, torch.float16, pos_embd_config=part).rope_dim == 16
    assert len({info, AttentionInfo(8, 2, 64, torch.bfloat16)}) == 1, "equal and hashable"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: PositionalEmbeddingConfig("alibi"), "mode is 'alibi'; it must be None or 'rope'"),
        (lambda: PositionalEmbeddingConfig("rope", rope_theta=0.0), "rope_theta is 0.0; it must be positive"),
        (lambda: PositionalEmbeddingConfig("rope", rope_scale=-1.0), "rope_scale is -1.0"),
        (lambda: PositionalEmbeddingConfig("rope", rope_theta=float("nan")), "rope_theta is nan; it must be positive and finite"),
        (lambda: PositionalEmbeddingConfig("rope", rope_theta=10**400), "rope_theta is 1000.*; it must be positive and finite"),
        (lambda: PositionalEmbeddingConfig("rope", rope_scale=float("inf")), "rope_scale is inf; it must be positive and finite"),
        (lambda: PositionalEmbeddingConfig("rope", rope_dim=3), "rope_dim is 3; it must be even"),
        (lambda: AttentionInfo(6, 4, 64, torch.float16), "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
        (lambda: AttentionInfo(6, 0, 64, torch.float16), "num_kv_heads is 0; it must be at least 1"),
        (
            lambda: AttentionInfo(4, 4, 64, torch.float16, pos_embd_config=PositionalEmbeddingConfig("rope", rope_dim=80)),
            "at most head_dim",
        ),
        (
            lambda: AttentionInfo(4, 4, 63, torch.float16, pos_embd_config=PositionalEmbeddingConfig("rope")),
            "rope_dim is 63; it must be even",
        ),
    ],
)
def test_bad_layers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: PositionalEmbeddingConfig("rope", "1e4"), "rope_theta must be a number, got '1e4'"),
        (lambda: PositionalEmbeddingConfig("rope", rope_interleaved=1), "rope_interleaved must be a bool, got 1"),
        (lambda: CacheConfig(torch.int8), "dtype of a cache is torch.int8; it must be float16, bfloat16, float32, float8_e4m3fn or None"),
        (lambda: CacheConfig("float16"), "dtype of a cache is 'float16'"),
        (lambda: AttentionInfo(4, 4, 64, torch.float64), "dtype is torch.float64; q, k and v must be float16, bfloat16 or float32"),
        (lambda: AttentionInfo(4, 4, 64, torch.float16, torch.float16), "cache_config must be a CacheConfig, got torch.float16"),
        (lambda: AttentionInfo(4, 4, 64.0, torch.float16), "head_dim must be an integer, got 64.0"),
    ],
)
def test_layers_of_wrong_types(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.gpu
def test_the_host_never_waits():
    host, info = SequenceInfo(**SIZES), SequenceInfo(**SIZES, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids = torch.tensor([[1, 2], [3, 4]]).pin_memory().to("cuda", non_blocking=True)
        info.nest_sequences(list(ids), [7, 0], [[3, 4], [5]])
        info.update_pos()
        info.nest_sequences(ids[:, :1])
        info.update_pos()
        info.nest_sequences([[1, 2, 3], [], [4]], [8, 9, 10], [[1, 2], [3, 4], [5, 6]])
        tensors, positions = info.args, info.position_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host.nest_sequences([[1, 2, 3], [], [4]], [8, 9, 10], [[1, 2], [3, 4], [5, 6]])
    assert [t.tolist() for t in (*tensors, positions)] == [t.tolist() for t in (*host.args, host.position_ids)]
    assert info.to("cpu").input_ids.tolist() == [[1, 2, 3, 4]]
