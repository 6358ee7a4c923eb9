"""Block masks of packed sequences: what bounds decide, where blocks begin, and the lists of sequences with blocks of their own."""

from __future__ import annotations

import pytest
import torch

from flexpress import mods
from flexpress.calls.packed_blocks import starts_of
from flexpress.calls.packing import _of_distances, packing_of
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.masks import automatic_lists
from flexpress.codegen.run.status_lists import block_starts, owned_starts
from support.block_lists import check_bounds
from support.devices import DEVICES
from support.varlen import mask_mods, offsets

LONG, OTHER = [700, 0, 650, 130, 1, 300], [650, 50, 800, 60, 1, 320]
EXACT = {
    "none": None,
    "causal": mods.causal,
    "window": mods.sliding_window(300),
    "dilated": mods.dilated_window(4, 3),
    "bidirectional": mods.sliding_window_bidirectional(200, 300),
    "offset": mods.causal_offset(64),
}


def packed_mask(mask_mod, lengths, kv_lengths):
    packing = packing_of(offsets(lengths), None if kv_lengths is None else offsets(kv_lengths), sum(lengths), sum(kv_lengths or lengths))
    return packing.mask_mod(mask_mod)


@pytest.mark.parametrize("kv_lengths", [None, OTHER])
@pytest.mark.parametrize("name", sorted(EXACT))
def test_bounds_decide_every_block_of_a_mask_of_distances(name, kv_lengths):
    found, truth = check_bounds(packed_mask(EXACT[name], LONG, kv_lengths), 1, 1, sum(LONG), sum(kv_lengths or LONG), (128, 128), "cpu")
    assert torch.equal(found, truth)
    assert (found == 2).any() or name == "dilated"


@pytest.mark.parametrize("kv_lengths", [None, OTHER])
@pytest.mark.parametrize("name", ["prefix", "first_tokens", "chunks", "sequence_window"])
def test_bounds_find_every_full_block(name, kv_lengths):
    """Where positions count, blocks that hold parts of several sequences may be called partial without need, but none that is full is."""
    mask_mod = {"chunks": lambda b, h, m, n: m // 300 == n // 300}.get(name, mask_mods(len(LONG), "cpu")[name])
    found, truth = check_bounds(packed_mask(mask_mod, LONG, kv_lengths), 1, 1, sum(LONG), sum(kv_lengths or LONG), (128, 128), "cpu")
    assert torch.equal(found == 2, truth == 2)
    assert (found == 1).sum() <= 2 * (truth == 1).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [LONG, [0, 0, 1000], [128, 256, 0], [1] * 300, [127, 129] * 70, [0, 40000]])
def test_where_blocks_begin(lengths, device):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    expected = [start for end, n in zip(ends, lengths, strict=True) for start in range(end - n, end, 128)]
    starts = block_starts(offsets(lengths, device), ends[-1], 128).tolist()
    assert starts[: len(expected)] == expected
    assert starts[len(expected) :] == [ends[-1]] * (ends[-1] // 128 + len(lengths) + 1 - len(expected))


@pytest.mark.parametrize("lengths, more", [([700, 0, 650, 130, 1, 300], 0), ([128, 256, 0], 200), ([0, 0], 5), ([127, 129] * 70, 1)])
def test_which_sequences_blocks_are_of(lengths, more):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    expected = [
        (start, b)
        for b, (end, n) in enumerate(zip([*ends, ends[-1] + more], [*lengths, more], strict=True))
        for start in range(end - n, end, 128)
    ]
    starts, owners = owned_starts(cu, ends[-1] + more, 128)
    assert list(zip(starts.tolist(), owners.tolist(), strict=False))[: len(expected)] == expected
    assert set(starts[len(expected) :].tolist()) == {ends[-1] + more} and set(owners[len(expected) :].tolist()) <= {len(lengths)}


@pytest.mark.parametrize(
    "cu",
    [
        [0, 300, 200, 500],
        [0, 300, 900, 500],
        [7, 300, 400, 500],
        [0, -5, 200, 500],
        [0, 300, 300, 2**31 - 131],
        [-(1 << 31)] * 4,
        [1 << 30] * 4,
    ],
)
@pytest.mark.parametrize("before", [0, 130])
def test_positions_after_wrong_offsets_are_of_no_sequence(cu, before):
    """And every position is in one block, also behind more sequences than are counted at a time. The first offset counts as 0."""
    cu, total = [*range(before), *(n + before for n in cu)], 600 + before
    ends = [0, *cu[1:]]
    valid = next((b for b in range(len(cu) - 1) if not ends[b] <= ends[b + 1] <= total), len(cu) - 1)
    expected = [(start, b) for b in range(valid) for start in range(ends[b], ends[b + 1], 128)]
    expected += [(start, len(cu) - 1) for start in range(ends[valid], total, 128)]
    starts, owners = owned_starts(torch.tensor(cu, dtype=torch.int32), total, 128)
    found = list(zip(starts.tolist(), owners.tolist(), strict=False))
    assert found[: len(expected)] == expected and all(pair == (total, len(cu) - 1) for pair in found[len(expected) :])


@pytest.mark.parametrize("cu_seqlens", [[0, 500, 300, 1000], [0, 2000, 1000], [0, -5, 1000], [700, 900, 1000]])
def test_wrong_offsets_write_nothing_outside(cu_seqlens):
    starts = block_starts(torch.tensor(cu_seqlens, dtype=torch.int32), 1000, 128)
    assert ((starts >= 0) & (starts <= 1000)).all()


def own_lists(mask_mod, lengths, kv_lengths=None):
    """Where the blocks of sequences begin, and the lists of their mask, forward and transposed."""
    total_q, total_k = sum(lengths), sum(kv_lengths or lengths)
    packing = packing_of(offsets(lengths), None if kv_lengths is None else offsets(kv_lengths), total_q, total_k)
    starts = starts_of(packing.starts_q, packing.starts_k, len(packing.sequence_q), len(packing.sequence_k), 128, 128)
    assert len(starts) == 2
    bound, extents = bind(packing.mask_mod(mask_mod), "mask"), (1, 1, total_q, total_k)
    return starts, *(automatic_lists(bound, extents, torch.device("cpu"), (128, 128), starts=starts, transposed=t) for t in (False, True))


def visited(lists) -> list[tuple[set, set]]:
    """First positions of the partial and of the full blocks of every row that is not empty."""
    rows = []
    for row in range(int((lists.starts[1:] > lists.starts[:-1]).sum())):
        tables = (lists.kv_num_blocks, lists.kv_indices), (lists.full_kv_num_blocks, lists.full_kv_indices)
        rows.append(tuple(set(indices[0, 0, row, : count[0, 0, row]].tolist()) for count, indices in tables))
    return rows


def test_blocks_of_sequences_are_those_of_each_one_alone():
    """Under a causal mask: a row's own block is partial, those before it full. In the transposed lists, cut blocks are partial too."""
    lengths = [700, 0, 1300, 5, 2000, 900]
    _, lists, transposed = own_lists(mods.causal, lengths)
    rows = [(base + at, base, base + n) for base, n in zip(offsets(lengths).tolist(), lengths, strict=False) for at in range(0, n, 128)]
    assert visited(lists) == [({start}, set(range(base, start, 128))) for start, base, _ in rows]
    for (start, _, end), (partial, full) in zip(rows, visited(transposed), strict=True):
        later = set(range(start + 128, end - 127, 128))
        assert full == later and partial == set(range(start, end, 128)) - later


def test_undecided_blocks_of_sequences_are_evaluated():
    """The same lists by evaluation, but for a sequence's last row, where only a whole block is full."""
    lengths = [700, 1300, 600]
    _, *decided = own_lists(mods.causal, lengths)
    _, *evaluated = own_lists(lambda b, h, m, n: torch.tan((m - n) * 0.0) + m >= n, lengths)
    for a, b in zip(decided, evaluated, strict=True):
        for (partial, full), (partial_too, full_too) in zip(visited(a), visited(b), strict=True):
            assert partial | full == partial_too | full_too and full_too in (full, set())


def test_which_sequences_have_blocks_of_their_own():
    def starts(lengths, **named):
        return starts_of(*[offsets(lengths)] * 2, *[sum(lengths)] * 2, 128, 128, **named)

    assert starts([256] * 4) and starts([1000, 24]) and starts([0, 0, 1000]) and starts([64] * 4, dropout=True)
    assert not starts([255] * 4) and not starts([2000] + [1] * 8) and not starts([63] * 4, dropout=True)
    assert not starts([1000] * 4, float8=True)


TABLE = torch.zeros(100)
OF_DISTANCES = {
    "causal": (lambda b, h, m, n: m >= n, True),
    "offset": (lambda b, h, m, n: m + 3 - n.long() > TABLE[b].int(), True),
    "modulo": (lambda b, h, m, n: (m - n) % 4 == 0, True),
    "table": (lambda b, h, m, n: TABLE[m - n] > TABLE[h], True),
    "sums": (lambda b, h, m, n: (m + n) - (n + m) == 0, True),
    "constant": (lambda b, h, m, n: h > 2, True),
    "position": (lambda b, h, m, n: m > 3, False),
    "sum": (lambda b, h, m, n: m + n > 3, False),
    "chunks": (lambda b, h, m, n: m // 4 == n // 4, False),
    "twice": (lambda b, h, m, n: 2 * m >= 2 * n, False),
    "narrow": (lambda b, h, m, n: m.to(torch.int8) >= n.to(torch.int8), False),
    "floats": (lambda b, h, m, n: m.float() >= n.float(), False),
    "index": (lambda b, h, m, n: TABLE[m] > TABLE[n], False),
    "mixed": (lambda b, h, m, n: (m >= n) & (n < 4), False),
}


@pytest.mark.parametrize("name", OF_DISTANCES)
def test_which_mods_are_of_distances(name):
    mod, expected = OF_DISTANCES[name]
    assert _of_distances(bind(mod, "mask")[0]) is expected


@pytest.mark.parametrize("values", [[0, 5, 3, 9], [2, 4, 8, 9], [0, -5, 99, 9], [0, 2, 4, 6]])
def test_wrong_values_stay_inside(values):
    """On a GPU nobody checks cu_seqlens: whatever they say, no index made of them leaves a tensor."""
    packing = packing_of(torch.tensor(values), torch.tensor(values[::-1]), 9, 9)
    for tokens in (packing.sequence_q, packing.sequence_k):
        assert (tokens >= 0).all() and (tokens <= 3).all()
    assert packing.local_q.shape == packing.local_k.shape == packing.aligned_q.shape == (9,)
