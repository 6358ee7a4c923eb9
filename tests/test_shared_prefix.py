"""Prefixes that sequences share are read once: the same as without sharing, and as dense attention in float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flexpress import PageAllocator, SharedPrefix, cached_attention
from flexpress.caches import shared_attention, shared_prefix
from flexpress.caches.shared_prefix import grouped
from flexpress.codegen.run.shared_tables import lay_out
from support.benchmarks import benchmark
from support.devices import DEVICES, for_any
from support.prefixes import Forked, batches, check, made, pool_of


@pytest.fixture(autouse=True)
def always_shared(monkeypatch):
    """However little need not be read again."""
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 0)


@for_any(batches, cpu=60, cuda=200)
def test_any_batch(p, device):
    check(p, device)


# 0, 1 and 2 share 40, 3 and 4 share 8
TWINS = dict(forks=[(-1, 0, 40), (0, 40, 3), (0, 40, 1), (-1, 0, 9), (3, 9, 2)], order=[3, 1, 0, 4, 2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["none", "window", "all"])
@pytest.mark.parametrize("ragged", [True, False])
def test_queries_inside_the_prefix(device, mask, ragged):
    """Such a sequence reads all itself: sequence 0, which ends with its prefix, and with moved queries others."""
    for moved in (None, 6):
        p = Forked(**TWINS, q_lens=[2] * 5, ragged=ragged, mask=mask, score="alibi", moved=moved)
        check(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [True, False])
def test_sinks_count_once(device, fp8):
    check(Forked(**TWINS, q_lens=[1, 2, 1, 3, 0], sinks=True, fp8=fp8, score="softcap"), device)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_behind_the_last_sequence(device):
    """They stay 0, though the last sequence's group has rows of others behind its own."""
    check(Forked(forks=[(-1, 0, 20), (0, 20, 1), (0, 20, 5)], order=[2, 1, 0], q_lens=[2, 1, 1]), device)
    check(Forked(forks=[(-1, 0, 20), (0, 20, 1), (-1, 0, 5)], order=[2, 1, 0], q_lens=[2, 1, 0]), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("made_before", [True, False])
@pytest.mark.parametrize("offsets", [True, False])
def test_sequences_that_left(device, made_before, offsets):
    """kv_len 0, or less than is shared, says so on the device; the others go on sharing."""
    p = Forked(**TWINS, q_lens=[1] * 5, ragged=False)
    arguments, _, _ = made(p, device)
    shared, where = arguments.pop("shared_prefix"), {}
    if offsets:
        arguments["q_offset"] = where["q_offset"] = arguments["kv_len"] - 1
    for b, length in ((1, 0), (2, 17), (0, 5)):
        arguments["kv_len"][b] = length
        if not offsets:
            arguments["page_table"][b, -(-length // p.page_size) :] = -1
        tables = shared.tables(arguments["kv_len"], arguments["page_table"], queries=1, **where) if made_before else shared
        found = cached_attention(**arguments, shared_prefix=tables, return_lse=True)
        expected = cached_attention(**arguments, return_lse=True)
        for have, want in zip(found, expected, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_tables_of_tensors_that_are_columns(device):
    """kv_len, q_offset and cu_seqlens_q may be columns of one table; kernels read contiguous copies, which are the same step's."""
    p = Forked(**TWINS, q_lens=[1, 2, 3, 1, 1])
    arguments, _, _ = made(p, device)
    shared, starts = arguments.pop("shared_prefix"), arguments["cu_seqlens_q"]
    arguments["q_offset"] = arguments["kv_len"] - starts.diff()
    expected = cached_attention(**arguments)
    columns = {name: torch.stack([arguments[name]] * 3, 1)[:, 1] for name in ("kv_len", "q_offset", "cu_seqlens_q")}
    step = {"page_table": arguments["page_table"], **columns}
    tables = shared.tables(**step, queries=arguments["query"].shape[0])
    torch.testing.assert_close(cached_attention(**{**arguments, **step}, shared_prefix=tables), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_a_view_of_the_keys(device):
    """Latent attention: 128 heads of queries share 320 columns, of which the values are the first 256."""
    p = Forked(**TWINS, q_lens=[1, 2, 3, 1, 1], Hkv=1, Hq=16, D_QK=320, D_V=256)
    arguments, _, _ = made(p, device)
    arguments["v_cache"] = arguments["k_cache"][..., :256]
    expected = cached_attention(**{**arguments, "shared_prefix": None}, return_lse=True)
    for have, want in zip(cached_attention(**arguments, return_lse=True), expected, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def parts_of_calls(monkeypatch) -> list[int]:
    """Appended to: 1 for each merge of two parts."""
    merged, merge = [], shared_attention.merge_parts
    monkeypatch.setattr(shared_attention, "merge_parts", lambda *tensors: (merged.append(1), merge(*tensors)))
    return merged


@pytest.mark.parametrize("device", DEVICES)
def test_the_usual_way(device, monkeypatch):
    """Where sharing does not pay, or is not promised: bitwise the same as without."""
    merged = parts_of_calls(monkeypatch)
    p = Forked(**TWINS, q_lens=[1] * 5)
    arguments, _, _ = made(p, device)
    cached_attention(**arguments)
    assert merged == [1]
    without = {**arguments, "shared_prefix": None}
    for options in ({"batch_invariant": True}, {"score_mod": rows_of_tables(device)}):
        assert torch.equal(cached_attention(**arguments, **options), cached_attention(**without, **options))
    saved, row = arguments["shared_prefix"].tokens_saved, p.Hkv * (p.D_QK + p.D_V) * 4
    assert saved == 2 * 40 + 8
    tables = arguments["shared_prefix"].tables(
        arguments["kv_len"], arguments["page_table"], queries=7, cu_seqlens_q=arguments["cu_seqlens_q"]
    )
    enough = saved * row / (1 + 7 / shared_prefix.QUERIES)
    for named, least in ((arguments["shared_prefix"], enough / shared_prefix.TABLES_TIMES), (tables, enough)):
        for more in (0, 1):
            monkeypatch.setattr(shared_prefix, "LEAST_BYTES", least + more)
            del merged[:]
            cached_attention(**{**arguments, "shared_prefix": named})
            assert len(merged) == 1 - more
            caches = arguments["k_cache"], arguments["v_cache"]
            assert arguments["shared_prefix"].pays(*caches, queries=7, tables=named is tables) == (not more)
            assert not arguments["shared_prefix"].pays(*caches, queries=64 * 5 + 1)
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 0)
    monkeypatch.setattr(shared_prefix, "MOST_QUERIES", 1)
    del merged[:]
    cached_attention(**arguments)  # 5 queries of 5 sequences and 2 behind them
    assert not merged


def rows_of_tables(device):
    """A score_mod with a dot product of rows of a table for each sequence."""
    table = torch.randn(5, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    return lambda score, b, h, q_idx, kv_idx: score + (table[b, q_idx] * table[b, kv_idx]).sum()


@pytest.mark.parametrize("device", DEVICES)
def test_one_step_of_many(device):
    """Tables are kept while lengths, pages and groups change in place, as under a CUDA graph, which makes the tables of the step anew."""
    pool = PageAllocator(64, 4)
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(64, 4, 2, 16, generator=g).to(device) for _ in range(2))
    q = torch.randn(4, 4, 1, 16, generator=g).to(device)
    first = pool.allocate(17)
    sequences = [first, pool.fork(first), pool.allocate(6), pool.fork(first)]
    kept = pool.shared_prefix(sequences, device, groups=2, width=8)
    table, kv_len = torch.full((4, 12), -1, dtype=torch.int32, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    for step in range(6):
        if step == 2:
            pool.free(sequences[1])
            sequences[1] = pool.fork(sequences[2])
            pool.extend(sequences[2], 3)
        if step == 4:
            for b in (0, 3):
                pool.free(sequences[b])
                sequences[b] = pool.allocate(9 + b)
            for b in (1, 2):
                pool.truncate(sequences[b], 2)
        kept.update(pool.shared_prefix(sequences, device, groups=2, width=8))
        for sequence in sequences:
            pool.extend(sequence, 1)
        table.copy_(pool.page_table(sequences, width=12))
        kv_len.copy_(torch.tensor([pool.length(s) for s in sequences]))
        tables = kept.tables(kv_len, table, queries=1)
        expected = cached_attention(q, k, v, kv_len, page_table=table)
        for _ in range(2):  # layers
            torch.testing.assert_close(cached_attention(q, k, v, kv_len, page_table=table, shared_prefix=tables), expected)
    assert kept.tokens_saved == 0


@pytest.mark.gpu
@pytest.mark.parametrize("least_fill", [0.0, 2.0])
def test_a_graph_sees_other_groups(monkeypatch, least_fill):
    """A captured step with its tables, replayed for lengths, pages and groups that it was not captured with; on Hopper by tiles, too."""
    monkeypatch.setattr(shared_attention, "LEAST_FILL", least_fill)
    pool, int32 = PageAllocator(600, 16), dict(dtype=torch.int32, device="cuda")
    k, v = (torch.randn(600, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(6, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    first, second = pool.allocate(1000), pool.allocate(500)
    sequences = [pool.fork(first) for _ in range(6)]
    kept = pool.shared_prefix(sequences, "cuda", groups=3, width=80)
    table, kv_len = torch.zeros(6, 80, **int32), torch.zeros(6, **int32)

    def fill():
        for sequence in sequences:
            pool.extend(sequence, 7)
        table.copy_(pool.page_table(sequences, width=80))
        kv_len.copy_(torch.tensor([pool.length(s) for s in sequences]))

    def step():
        tables = kept.tables(kv_len, table, queries=1)
        return [cached_attention(q, k, v, kv_len, page_table=table, shared_prefix=tables) for _ in range(2)]

    fill()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for i in range(6):
        pool.free(sequences[i])
        sequences[i] = pool.fork(second)
        kept.update(pool.shared_prefix(sequences, "cuda", groups=3, width=80))
        fill()
        graph.replay()
        expected = cached_attention(q, k, v, kv_len, page_table=table)
        for out in found:
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def commonly(lists):
    """How many first elements all have in common."""
    return next((i for i, column in enumerate(zip(*lists, strict=False)) if len(set(column)) > 1), min(map(len, lists)))


def most_saved(lists) -> int:
    """By trying all partitions."""

    def partitions(numbers):
        if not numbers:
            yield []
            return
        for size in range(len(numbers)):
            for others in itertools.combinations(numbers[1:], size):
                rest = [n for n in numbers[1:] if n not in others]
                for found in partitions(rest):
                    yield [(numbers[0], *others), *found]

    return max(sum((len(group) - 1) * commonly([lists[n] for n in group]) for group in found) for found in partitions([*range(len(lists))]))


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=6))
@example([[0], [0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])  # the first two, which are in no longer group, are one
def test_groups_save_the_most(lists):
    found = grouped(lists)
    assert sum(count * (len(members) - 1) for count, members in found) == most_saved(lists) if lists else not found
    for count, members in found:
        assert len(members) > 1 and count == commonly([lists[n] for n in members]) > 0
    assert len({n for _, members in found for n in members}) == sum(len(members) for _, members in found)


@given(st.data())
def test_what_is_claimed_is_shared_and_full(data):
    p = data.draw(batches("cpu"))
    groups = data.draw(st.sampled_from([None, 1, 3]))
    pool, sequences = pool_of(p)
    shared = pool.shared_prefix(sequences, groups=groups)
    full = [pool.pages(s)[: pool.length(s) // p.page_size] for s in sequences]
    if shared is None:
        assert all(commonly(pair) == 0 for pair in itertools.combinations(full, 2))
        return
    order, starts, lengths, pages, prefix = (t.tolist() for t in (shared.order, shared.starts, shared.lengths, shared.pages, shared.prefix))
    assert sorted(order) == [*range(len(sequences))] and starts[0] == 0 and (groups is None or len(lengths) == groups)
    saved, expected = 0, [0] * len(sequences)
    for first, last, length, row in zip(starts[:-1], starts[1:], lengths, pages, strict=True):
        members = order[first:last]
        if not members:
            assert length == 0 and set(row) == {-1}
            continue
        count = length // p.page_size
        assert len(members) > 1 and count * p.page_size == length and members == sorted(members)
        assert count == commonly([full[n] for n in members]), "the longest one"
        assert all(full[n][:count] == row[:count] for n in members) and set(row[count:]) <= {-1}
        saved += length * (len(members) - 1)
        for n in members:
            expected[n] = length
    assert prefix == expected and shared.tokens_saved == saved > 0
    assert all(t.dtype == torch.int32 for t in (shared.order, shared.starts, shared.lengths, shared.pages, shared.prefix))


def test_a_thousand_sequences_are_grouped_at_once():
    """Each shares a page less with the first: the tree of beginnings is as deep as there are sequences. Groups are of neighbours then."""
    lists = [[*range(n), 5000 + n] for n in range(1100)]
    best = [0]  # of the first lists
    for count in range(1, len(lists) + 1):
        best.append(max(best[first] + (count - first - 1) * first for first in range(count)))
    assert sum(count * (len(members) - 1) for count, members in grouped(lists)) == best[-1]


def other_pool() -> SharedPrefix:
    pool = PageAllocator(64, 8)
    first = pool.allocate(20)
    return pool.shared_prefix([first, *(pool.fork(first) for _ in range(4))])


@pytest.mark.parametrize("device", DEVICES)
@given(st.data())
def test_tables_are_those_of_torchs_operations(device, data):
    """The kernel's, in the interpreter or on a GPU, of any batch, and of more sequences and pages than it takes at a time."""
    p = data.draw(batches("cpu"))
    p.made_before = True
    if data.draw(st.booleans()):
        times = 140 // len(p.order) + 1
        p.order, p.q_lens = p.order * times, p.q_lens * times
    if len(p.q_lens) == 0 or not sum(p.q_lens):
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FLEXPRESS_CPU", "interpreter")
        arguments, _, _ = made(p, device)
        if "shared_prefix" not in arguments:
            return
        tables = arguments["shared_prefix"]
        on_cpu = [t if t is None else t.cpu() for t in (tables.shared.order, tables.shared.starts, tables.shared.prefix)]
        patched.setenv("FLEXPRESS_CPU", "cpp")
        given_cpu = [None if t is None else t.cpu() for t in tables.made_of.values()]
        expected = lay_out(*on_cpu, *given_cpu, tables.queries, tables.shared.page_size)
    total = sum(p.q_lens)
    for name, found, wanted in zip(expected._fields, tables.laid, expected, strict=True):
        if wanted is not None:
            rows = slice(total) if name in ("sequence", "position") else slice(None)  # behind them nobody asks
            assert found.dtype == torch.int32 and torch.equal(found.cpu()[rows], wanted[rows]), name


BAD = {  # what changes, and what the error says
    "another batch": (
        lambda a: {"kv_len": a["kv_len"][:4].clone(), "page_table": a["page_table"][:4], "query": a["query"][:4]},
        r"shared_prefix was made for 5 sequences on cpu, but kv_len is \(4,\) on cpu; make one for the batch at hand",
    ),
    "another device": (
        lambda a: {"shared_prefix": moved(a["shared_prefix"])},
        r"shared_prefix was made for 5 sequences on meta, but kv_len is \(5,\) on cpu",
    ),
    "no pages": (
        lambda a: {"page_table": None, "cache_loc": torch.zeros(5, dtype=torch.int32), "kv_len": torch.ones(5, dtype=torch.int32)},
        r"shared_prefix is for caches in pages, but k_cache \(400, 4, 2, 32\) comes without page_table; pass page_table",
    ),
    "another pool": (
        lambda a: {"shared_prefix": other_pool()},
        r"shared_prefix has pages of 8 tokens, but k_cache \(400, 4, 2, 32\) has pages of 4",
    ),
    "other pages": (
        lambda a: {"page_table": a["page_table"].clone().index_fill_(1, torch.tensor(0), 7)},
        r"shared_prefix says that sequence 0 begins with pages \[12, 13\], but page_table has \[7, 13\]; make it anew when",
    ),
    "pages that only some sequences share": (
        lambda a: {
            "page_table": a["page_table"].clone().index_put_((torch.tensor(4), torch.tensor(9)), torch.tensor(7, dtype=torch.int32))
        },
        r"shared_prefix says that sequence 4 begins with pages \[(\d+, ){9}\d+\], but page_table has \[(\d+, ){9}7\]; make it anew when",
    ),
    "no SharedPrefix": (lambda a: {"shared_prefix": True}, r"must be what PageAllocator.shared_prefix returns, got bool True"),
    "tables of other lengths": (
        lambda a: {"shared_prefix": tables_of(a), "kv_len": a["kv_len"].clone()},
        r"shared_prefix holds tables that were made of another kv_len \(torch.int32 \(5,\) on cpu\) than this one",
    ),
    "tables without offsets": (
        lambda a: {"shared_prefix": tables_of(a), "q_offset": a["kv_len"] - 1},
        r"made of another q_offset \(None\) than this one \(torch.int32",
    ),
    "tables of more queries": (
        lambda a: {"shared_prefix": tables_of(a, 2)},
        r"made of queries=2, but query \(5, 6, 1, 32\) has 1; make them once a step",
    ),
    "tables of an earlier step": (
        lambda a: {"shared_prefix": (made := tables_of(a), made.laid, a["kv_len"].sub_(1))[0]},  # a call has used them
        r"shared_prefix holds tables of an earlier step; make them once a step",
    ),
    "tables of rows": (
        lambda a: {"shared_prefix": tables_of(a), "cache_loc": torch.arange(5, dtype=torch.int32)},
        r"pass page_table\[cache_loc\]",
    ),
}


def moved(shared: SharedPrefix) -> SharedPrefix:
    names = "order", "starts", "lengths", "pages", "prefix"
    return SharedPrefix(*(getattr(shared, name).to("meta") for name in names), shared.page_size, shared.tokens_saved)


def tables_of(arguments: dict, queries: int = 1):
    return arguments["shared_prefix"].tables(arguments["kv_len"], arguments["page_table"], queries=queries)


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    arguments, _, _ = made(Forked(**TWINS, q_lens=[1] * 5, ragged=False), "cpu")
    changes, message = BAD[name]
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    with pytest.raises((ValueError, TypeError), match=message):
        cached_attention(**{**arguments, **changes(arguments)})
    assert all(torch.equal(arguments[name].nan_to_num(7.0), cache.nan_to_num(7.0)) for name, cache in caches.items())


def test_errors_of_the_host():
    pool = PageAllocator(64, 4)
    first = pool.allocate(20)
    sequences = [first, pool.fork(first)]
    shared = pool.shared_prefix(sequences)
    assert pool.shared_prefix([first]) is pool.shared_prefix([]) is pool.shared_prefix([first, pool.allocate(20)]) is None
    with pytest.raises(ValueError, match="there is no sequence 9 in this pool"):
        pool.shared_prefix([first, 9])
    with pytest.raises(ValueError, match="width is 3, but sequences share 5 pages"):
        pool.shared_prefix(sequences, width=3)
    with pytest.raises(ValueError, match=r"\(2,\), \(1,\), \(1, 5\), .* \(3,\), \(2,\), \(2, 5\)"):
        shared.update(pool.shared_prefix(sequences, groups=2))
    kv_len, table = torch.tensor([20, 20], dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"made for 2 sequences on cpu, but page_table is \(3, 5\)"):
        shared.tables(kv_len, torch.zeros(3, 5, dtype=torch.int32), queries=1)
    with pytest.raises(ValueError, match=r"page_table must be torch.int32 \(n, n\) on cpu, got torch.int32 \(2,\)"):
        shared.tables(kv_len, table[:, 0], queries=1)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be torch.int32 \(n,\) on cpu, got torch.int64 \(3,\)"):
        shared.tables(kv_len, table, queries=2, cu_seqlens_q=torch.arange(3))
    with pytest.raises(ValueError, match="queries is -1"):
        shared.tables(kv_len, table, queries=-1)
    cache = torch.zeros(64, 4, 2, 16)
    with pytest.raises(TypeError, match=r"other must be a SharedPrefix, .* or None, got int 5"):
        shared.update(5)
    with pytest.raises(TypeError, match="v_cache must be a torch.Tensor .* got NoneType"):
        shared.pays(cache, None, queries=1)
    with pytest.raises(ValueError, match=r"k_cache must have shape \(pages, page size, Hkv, D\), got \(64, 4, 2\)"):
        shared.pays(cache[..., 0], cache, queries=1)
    with pytest.raises(TypeError, match="queries must be an integer, got 'x'"):
        shared.pays(cache, cache, queries="x")
    with pytest.raises(TypeError, match="queries must be an integer, got None"):
        shared.fills(None)


@pytest.mark.parametrize("device", DEVICES)
@given(st.integers(0, 999))
def test_a_shared_prefix_that_lies_reads_nothing_outside(device, seed):
    """Its tensors hold anything: every row is written, and no index is outside."""
    g = torch.Generator().manual_seed(seed)
    arguments, _, _ = made(Forked(**TWINS, q_lens=[1, 2, 0, 3, 1], score="per sequence", mask="window", made_before=False), device)
    shared = arguments["shared_prefix"]
    for name in ("order", "starts", "lengths", "pages", "prefix"):
        tensor = getattr(shared, name)
        tensor.copy_(torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=g) // 10 ** int(torch.randint(10, (), generator=g)))
    out, lse = cached_attention(**arguments, check=False, return_lse=True)
    assert out.shape == arguments["query"].shape[:2] + (16,) and lse.shape == out.shape[:2]


def test_compiled_calls_go_the_usual_way(monkeypatch):
    merged = parts_of_calls(monkeypatch)
    arguments, _, _ = made(Forked(**TWINS, q_lens=[1] * 5, ragged=False), "cpu")

    @torch.compile(backend="eager", fullgraph=True)
    def step(query, shared):
        return cached_attention(**{**arguments, "query": query, "shared_prefix": shared})

    found = step(arguments["query"], arguments["shared_prefix"])
    assert not merged and torch.equal(found, cached_attention(**{**arguments, "shared_prefix": None}))


@pytest.mark.parametrize("score", ["plain", "alibi"])
def test_benchmark_measures_the_same_attention(score, monkeypatch):
    """benchmarks/shared_prefix.py, on the CPU and without a clock."""
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 1 << 20)
    program = benchmark("shared_prefix")
    asked = SimpleNamespace(page_size=16, layers=2, heads=4, kv_heads=2, head_dim=16, rep=0.0, ways=["shared", "few", "tiles"], count=False)
    step = program.Step(40, 3, 5, score, asked, torch.device("cpu"))
    row = program.row_of(step, asked, lambda run: (run(), None), lambda replay, rep: 1.0)
    assert shared_prefix.LEAST_BYTES == 1 << 20 and shared_attention.LEAST_FILL == 0.5
    assert row["fill"] == 3 / 128 and row["shared_speedup"] == row["tiles_speedup"] == 1
    assert row["usual"] and row["saved_mb"] == 2 * 32 * 2 * 2 * 16 * 2 / 1e6 and 0 < row["error"] < 0.01


def test_of_more_groups_than_there_is_room_for_those_that_save_most_are_kept():
    """Neither the longest nor the largest: pages times members but one."""
    pool, sequences, expected = PageAllocator(64, 4), [], {}
    for pages, members in ((1, 4), (6, 2), (4, 3)):  # 3, 6 and 8 pages that are not read again
        first = pool.allocate(pages * 4)
        group = [first, *(pool.fork(first) for _ in range(members - 1))]
        expected[pages] = range(len(sequences), len(sequences) + members)
        sequences += group
    for groups, kept in ((1, (4,)), (2, (6, 4)), (3, (1, 6, 4))):
        shared = pool.shared_prefix(sequences, groups=groups)
        assert shared.lengths.tolist() == [4 * pages for pages in kept]
        starts = shared.starts.tolist()
        found = [shared.order[a:b].tolist() for a, b in itertools.pairwise(starts)]
        assert found == [[*expected[pages]] for pages in kept]
