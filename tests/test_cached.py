"""Attention to caches: contiguous and paged, prefill, decoding and both at once, against dense attention sequence by sequence."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flexpress import cache_info, cached_attention, export_cached, merge_attention, mods, rope_table, split_attention, update_cache
from flexpress.codegen.run import decode
from support.batches import Batch, batches, check, made
from support.dense import dense_attention, relative_error
from support.devices import DEVICES, for_any


@for_any(batches, cpu=20, cuda=100)
def test_any_batch(p, device):
    check(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [0, 16])
def test_sequences_share_the_device_by_length(device, page_size):
    """One new token each; one sequence as long as all others together, one empty, more sequences than are counted at a time."""
    count, longest = (300, 3000) if device == "cuda" else (30, 900)
    q_lens = [1, 1, 0, *[1] * (count - 3)]
    kv_lens = [1, 700, 0, *(i % 40 + 1 for i in range(count - 4)), longest]
    shape = dict(Hkv=1, Hq=4, page_size=page_size, dtype=torch.bfloat16)
    check(Batch(q_lens=q_lens, kv_lens=kv_lens, **shape, score="per sequence", seed=3), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask, page_size, invariant", [("none", 16, False), ("window", 0, False), ("per head", 5, True)])
def test_the_grid_follows_the_tokens(device, mask, page_size, invariant, monkeypatch):
    """Not the longest sequence: a prompt among single tokens makes no tiles for them."""
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")  # kernels in C++ have no grid
    q_lens = [*[1] * 20, 130, 0, 1, 70, 0]
    kv_lens = [*range(1, 21), 200, 3, 9, 70, 0]
    p = Batch(q_lens=q_lens, kv_lens=kv_lens, Hkv=2, Hq=8, page_size=page_size, score="alibi", mask=mask, invariant=invariant)
    check(p, device)
    ready = [*decode._ready.values()][-1]
    heads, queries = (8, 64) if mask == "per head" else (2, 16)
    assert ready.grid[0] == (sum(q_lens) // queries + len(q_lens)) * heads


def batch(device, q_lens=(3, 1, 0, 9), kv_lens=(40, 7, 0, 300), dtype=torch.float32, **changes):
    """Arguments of cached_attention: a ragged batch in pages of 16, but for what `changes`."""
    p = Batch(q_lens=list(q_lens), kv_lens=list(kv_lens), dtype=dtype, **changes)
    return made(p, device)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("mask_mod", [None, mods.sliding_window(300)], ids=["causal", "window"])
def test_a_sequence_alone_is_bitwise_the_same(device, paged, mask_mod):
    """batch_invariant, whatever room the others' caches need, and however many queries they have."""
    arguments = batch(device, (1, 3, 2, 9), (1100, 7, 30, 2500), torch.bfloat16, page_size=16 if paged else 0, invariant=True)
    arguments["mask_mod"] = mask_mod
    whole, starts = cached_attention(**arguments), arguments["cu_seqlens_q"].tolist()
    for b, n in enumerate((1, 3, 2, 9)):
        alone = {k: arguments[k] for k in ("k_cache", "v_cache", "batch_invariant", "mask_mod")}
        if paged:
            alone["page_table"] = arguments["page_table"][b : b + 1, : -(-int(arguments["kv_len"][b]) // 16)].contiguous()
        else:
            alone["cache_loc"] = torch.tensor([b], dtype=torch.int32, device=device)
        query = arguments["query"][starts[b] : starts[b + 1]]
        out = cached_attention(query.transpose(0, 1)[None], kv_len=arguments["kv_len"][b : b + 1], **alone)
        assert torch.equal(out[0].transpose(0, 1), whole[starts[b] : starts[b] + n])


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_and_values_compile_nothing(device, monkeypatch):
    """Lengths, slopes, windows, numbers of sequences and of pages change from step to step. (Few sequences have their keys split, many have
    not: another kernel, if there is a mask.)"""
    monkeypatch.setattr(decode, "INTERPRETED", 132)

    def step(n, B, slope, window):
        arguments = batch(device, q_lens=(1,) * B, kv_lens=(n,) * B)
        slopes = torch.full((6,), slope, device=device)
        cached_attention(**arguments, score_mod=mods.alibi(slopes), mask_mod=mods.sliding_window(window))
        return cache_info()

    before = step(513, 3, 0.5, 20)
    for n, B, slope, window in ((514, 3, 0.5, 20), (600, 2, 0.1, 35), (755, 4, 0.3, 100)):
        after = step(n, B, slope, window)
    assert (after.prints, after.compiles) == (before.prints, before.compiles)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_at_any_position(device):
    """A tree of speculated tokens: q_offset says where queries are, mask_mod which of each other they see."""
    arguments = batch(device, q_lens=(5,), kv_lens=(64,), ragged=False, page_size=0)
    parents = torch.tensor([-1, 0, 0, 1, 1], device=device)
    sees = torch.eye(5, dtype=torch.bool, device=device)
    for i in range(5):
        if parents[i] >= 0:
            sees[i] |= sees[parents[i]]

    def tree(b, h, q_idx, kv_idx):
        return (kv_idx < 59) | sees[q_idx - 59, kv_idx - 59] & (kv_idx >= 59)

    offset = torch.tensor([59], dtype=torch.int32, device=device)
    out = cached_attention(**arguments, q_offset=offset, mask_mod=tree)
    k, v = (arguments[t].transpose(1, 2)[:, :, :64] for t in ("k_cache", "v_cache"))

    def plain_tree(b, h, q_idx, kv_idx):
        return (kv_idx < 59) | sees[q_idx.long(), (kv_idx.long() - 59).clamp(0)] & (kv_idx >= 59)

    expected = dense_attention(arguments["query"], k, v, None, plain_tree)[0]
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_queries_behind_the_keys(device):
    """Of a part of the keys, as for merging by lse: nothing is written, so no page needs to hold the queries' own positions."""
    arguments = batch(device, q_lens=(2,), kv_lens=(32,), ragged=False, page_size=16)
    table = torch.nn.functional.pad(arguments.pop("page_table")[:, :2], (0, 1), value=-1)
    offset = torch.tensor([40], dtype=torch.int32, device=device)
    for pages in (table, table[:, :2]):
        out = cached_attention(**arguments, page_table=pages, q_offset=offset, check=True)
        k, v = (arguments[name][table[0, :2]].flatten(0, 1).transpose(0, 1)[None] for name in ("k_cache", "v_cache"))
        assert relative_error(out, dense_attention(arguments["query"], k, v)[0]) < 1e-6


BAD = {  # what changes, and what the error says
    "positions beyond the pages": (
        dict(kv_len=[40, 7, 0, 305]),
        r"sequence 3 has 9 new tokens .* go from 0 to 303 in k_cache .* with 19 pages",
    ),
    "more new tokens than positions": (dict(kv_len=[2, 7, 0, 300]), r"sequence 0 has 3 new tokens from position -1"),
    "pages outside the pool": (dict(page_table=99), r"page_table\[0\] names pages from 99 to 99; k_cache .* has pages 0 to 75"),
    "lengths that do not add up": (
        dict(cu_seqlens_q=[0, 3, 4, 4, 14]),
        r"cu_seqlens_q must .* 13 tokens there are, got \[0, 3, 4, 4, 14\]",
    ),
    "falling starts": (dict(cu_seqlens_q=[0, 3, 2, 4, 13]), "never fall"),
    "int64": (dict(kv_len=torch.tensor([40, 7, 0, 300])), r"kv_len must be torch.int32 \(n,\) on cpu, got torch.int64"),
    "another number": (dict(q_offset=[1, 2, 3]), r"q_offset must be torch.int32 \(4,\) on cpu, got torch.int32 \(3,\)"),
    "dtype of the cache": (
        dict(v_cache=torch.zeros(76, 16, 2, 16, dtype=torch.bfloat16)),
        "must both be .* got torch.float32 and torch.bfloat16",
    ),
    "heads": (dict(query=torch.zeros(13, 5, 32)), "5 heads, no multiple of the 2 heads"),
    "head dim": (dict(query=torch.zeros(13, 6, 16)), r"query \(13, 6, 16\), k_cache .* do not fit"),
    "rows": (dict(cache_loc=[0, 1, 2, 4]), r"cache_loc names rows from 0 to 4; page_table .* has rows 0 to 3"),
    "one scale": (dict(k_scale=torch.ones(2)), "go together"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    arguments, (changes, message) = batch("cpu"), BAD[name]
    for key, value in changes.items():
        arguments[key] = (
            torch.full_like(arguments[key], value)
            if isinstance(value, int)
            else torch.tensor(value, dtype=torch.int32)
            if isinstance(value, list)
            else value
        )
    with pytest.raises((ValueError, TypeError), match=message):
        cached_attention(**arguments)


@pytest.mark.gpu
def test_a_graph_sees_growing_lengths():
    """A captured step writes and attends at other positions, on other pages, when it is replayed."""
    B, Hkv, Hq, D, size = 3, 2, 8, 64, 16
    int32 = dict(dtype=torch.int32, device="cuda")
    caches = [torch.zeros(64, size, Hkv, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table = torch.randperm(60, device="cuda").to(torch.int32).reshape(B, 20)
    kv_len = torch.tensor([1, 100, 250], **int32)
    q, k, v = (torch.randn(B, h, 1, D, device="cuda", dtype=torch.bfloat16) for h in (Hq, Hkv, Hkv))
    rope = rope_table(320, D, device="cuda")

    def step():
        turned = update_cache(k, v, *caches, kv_len, page_table=table, query=q, rope=rope)
        return cached_attention(turned, *caches, kv_len, page_table=table, score_mod=mods.softcap(5.0), mask_mod=mods.sliding_window(70))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(60):
        kv_len += 1
        for t in (q, k, v):
            t.normal_()
        before = [c.clone() for c in caches]
        graph.replay()
        written = [c.clone() for c in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        assert torch.equal(step(), found)
        assert all(torch.equal(a, b) for a, b in zip(caches, written, strict=True))


@pytest.mark.gpu
def test_pools_of_more_than_2_31_elements():
    """Offsets of pages pass 32 bits."""
    size, Hkv, D = 64, 8, 128
    pages = (1 << 31) // (size * Hkv * D) + 10
    caches = [torch.empty(pages, size, Hkv, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table = torch.tensor([[pages - 1, 0, pages - 3, 1]], dtype=torch.int32, device="cuda")
    kv_len = torch.tensor([250], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1, h, 250, D, device="cuda", dtype=torch.bfloat16) for h in (16, Hkv, Hkv))
    update_cache(k, v, *caches, kv_len, page_table=table)
    out = cached_attention(q, *caches, kv_len, page_table=table)
    assert relative_error(out, dense_attention(q, k, v, None, mods.causal)[0]) < 4e-3


class Blocks(torch.nn.Sequential):
    """A mod like any other, whose truth is False: it has no parts."""

    def forward(self, *arguments):
        return arguments[-1] >= 3 if len(arguments) == 4 else arguments[0] * 0.5 + arguments[-1] * 0.1


def test_a_mod_is_asked_for_by_none_and_not_by_its_truth():
    q, cache = torch.randn(1, 2, 5, 16), torch.randn(1, 32, 2, 16)
    call, mod = (q, cache, cache, torch.tensor([20], dtype=torch.int32)), Blocks()
    assert not mod
    want = cached_attention(*call, score_mod=lambda *a: mod.forward(*a), mask_mod=lambda *a: mod.forward(*a))
    assert torch.equal(cached_attention(*call, score_mod=mod, mask_mod=mod), want)
    merged, _ = merge_attention(*split_attention(*call, 2, score_mod=mod, mask_mod=mod))
    torch.testing.assert_close(merged, want)
    for given in ({"score_mod": mod}, {"mask_mod": mod}):
        assert export_cached(*call, **given) != export_cached(*call)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mod_that_asks_for_the_device_has_that_of_the_call(device):
    """Also where integers leave int32, which decides on text of its own, and in a thread that has bound no mod before."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 5, 16, device=device)
    cache = torch.randn(1, 32, 2, 16, device=device)
    kv_len = torch.tensor([20], dtype=torch.int32, device=device)
    positions, keys = torch.arange(15, 20, device=device)[:, None], torch.arange(20, device=device)

    def hashed(m, n):
        return (m * 1103515245 + n * 12345) % 7

    def a_table(score, b, h, m, n):
        return score + torch.arange(7, device=m.device)[hashed(m, n)]

    def a_branch(score, b, h, m, n):
        return score + hashed(m, n) if m.device.type == torch.device(device).type else score

    def another_branch(score, b, h, m, n):
        return score + 3 * (n % 2) if m.device.type == torch.device(device).type else score + hashed(m, n)

    k = cache[:, :20].transpose(1, 2)
    for mod, added in ((a_table, hashed(positions, keys)), (a_branch, hashed(positions, keys)), (another_branch, 3 * (keys % 2))):
        scores = q.double() @ k.double().mT * 0.25 + added
        exact = scores.masked_fill(keys > positions, -torch.inf).softmax(-1) @ k.double()
        for call in (
            lambda mod=mod: cached_attention(q, cache, cache, kv_len, score_mod=mod),
            lambda mod=mod: split_of(q, cache, kv_len, mod),
        ):
            with ThreadPoolExecutor(1) as another:
                assert relative_error(another.submit(call).result(), exact) < 1e-5


def split_of(q, cache, kv_len, mod):
    return merge_attention(*split_attention(q, cache, cache, kv_len, 3, score_mod=mod))[0]
