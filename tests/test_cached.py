"""Attention to caches: contiguous and paged, prefill, decoding and both at once, against dense attention sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from flexpress import cache_info, cached_attention, mods, rope_table, update_cache
from flexpress.codegen.run import decode
from support.dense import dense_attention, relative_error
from support.devices import DEVICES, for_any

SLOPES = torch.linspace(0.1, 0.9, 12)


def score_mods(device):
    slopes = SLOPES.to(device)
    return {
        "none": None,
        "alibi": mods.alibi(slopes),
        "softcap": mods.softcap(2.0),
        "per sequence": lambda score, b, h, q, k: score + b * 0.3 - k * 0.01 + slopes[h],
    }


def mask_mods():
    return {
        "none": None,
        "window": mods.sliding_window(20),
        "per sequence": lambda b, h, q, k: (k <= q) & ((k + b) % 3 != 0),
        "all": lambda b, h, q, k: k >= 0,
        "per head": lambda b, h, q, k: (k <= q) & (k >= h),
    }


@dataclass(kw_only=True)
class Batch:
    """Sequences of `kv_lens` keys, the last `q_lens` of which are new: heads Hq and Hkv, head dims D_QK and D_V.

    `page_size` 0: contiguous caches. `located`: those of a larger tensor, by cache_loc.
    """

    q_lens: list[int]
    kv_lens: list[int]
    ragged: bool = True
    Hkv: int = 2
    Hq: int = 6
    D_QK: int = 32
    D_V: int = 16
    page_size: int = 16
    located: bool = False
    dtype: torch.dtype = torch.float32
    score: str = "none"
    mask: str = "none"
    invariant: bool = False
    fp8: bool = False
    seed: int = 1


@st.composite
def batches(draw, device):
    """Caches with sequences in them, and their new queries."""
    big = device == "cuda"
    B = draw(st.integers(1, 4))
    ragged = draw(st.booleans())
    q_lens = [draw(st.sampled_from([0, 1, 2, 5, 17, 150] if big else [0, 1, 2, 5, 17])) for _ in range(B)]
    if not ragged:
        q_lens = [max(q_lens)] * B
    room = draw(st.sampled_from([1, 30, 100, 700] if big else [1, 30, 70]))
    Hkv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3), (1, 12), (4, 2)]))
    return Batch(
        q_lens=q_lens,
        kv_lens=[n + draw(st.integers(0, room)) for n in q_lens],
        ragged=ragged,
        Hkv=Hkv,
        Hq=Hkv * group,
        D_QK=draw(st.sampled_from([16, 20, 64])),
        D_V=draw(st.sampled_from([16, 24])),
        page_size=draw(st.sampled_from([0, 0, 1, 5, 16, 64])),
        located=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        score=draw(st.sampled_from(list(score_mods("cpu")))),
        mask=draw(st.sampled_from(list(mask_mods()))),
        invariant=draw(st.booleans()),
        fp8=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def made(p: Batch, device: str) -> tuple[dict, list]:
    """The arguments of cached_attention, and each sequence's queries, keys and values [1, heads, length, head dim]."""
    g = torch.Generator().manual_seed(p.seed)

    def random(*shape):
        return torch.randn(*shape, generator=g).to(device, p.dtype)

    B, S = len(p.q_lens), max(p.kv_lens) + 3
    q, k, v = (
        [random(1, H, n, D) for n in lens]
        for H, D, lens in ((p.Hq, p.D_QK, p.q_lens), (p.Hkv, p.D_QK, p.kv_lens), (p.Hkv, p.D_V, p.kv_lens))
    )
    kept = torch.float8_e4m3fn if p.fp8 else p.dtype
    k, v = ([t.to(kept) for t in tensors] for tensors in (k, v))
    arguments = {"kv_len": torch.tensor(p.kv_lens, dtype=torch.int32, device=device), "batch_invariant": p.invariant}
    if p.ragged:
        arguments["query"] = torch.cat([t[0].transpose(0, 1) for t in q])
        arguments["cu_seqlens_q"] = torch.tensor([0, *torch.tensor(p.q_lens).cumsum(0)], dtype=torch.int32, device=device)
        arguments["max_q_len"] = max(p.q_lens)
    else:
        arguments["query"] = torch.cat(q)
    if p.page_size:
        size = p.page_size
        table = torch.randperm(B * -(-S // size), generator=g).reshape(B, -1)
        caches = [torch.full((table.numel(), size, *t[0].shape[1::2]), float("nan"), dtype=kept, device=device) for t in (k, v)]
        for cache, tensors in zip(caches, (k, v), strict=True):
            for pages, t in zip(table.tolist(), tensors, strict=True):
                for i, position in enumerate(t[0].transpose(0, 1)):
                    cache[pages[i // size], i % size] = position
        for pages, n in zip(table, p.kv_lens, strict=True):
            pages[-(-n // size) :] = 1 << 30  # never to be read
        arguments["page_table"] = table.to(device, torch.int32)
    else:
        places = torch.randperm(B + 2, generator=g)[:B] if p.located else torch.arange(B)
        caches = [torch.full((B + 2 * p.located, S, *t[0].shape[1::2]), float("nan"), dtype=kept, device=device) for t in (k, v)]
        for cache, tensors in zip(caches, (k, v), strict=True):
            for place, t in zip(places, tensors, strict=True):
                cache[place, : t.shape[2]] = t[0].transpose(0, 1)
        if p.located:
            arguments["cache_loc"] = places.to(device, torch.int32)
    arguments |= {"k_cache": caches[0], "v_cache": caches[1]}
    if p.fp8:
        scales = [torch.rand(p.Hkv, generator=g).to(device) + 0.5 for _ in range(2)]
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}
        k, v = ([t.double() * s[None, :, None, None] for t in tensors] for tensors, s in zip((k, v), scales, strict=True))
    return arguments, list(zip(q, k, v, strict=True))


def shifted(mod, b, offset):
    """A mod as a sequence alone sees it: it is number b, and its first query at `offset`."""
    return mod and (lambda *args: mod(*args[:-4], torch.full_like(args[-4], b), args[-3], args[-2] + offset, args[-1]))


def check(p: Batch, device: str) -> None:
    arguments, sequences = made(p, device)
    score_mod, mask_mod = score_mods(device)[p.score], mask_mods()[p.mask]
    torch.full((1 << 16,), float("nan"), device=device)
    out, lse = cached_attention(**arguments, score_mod=score_mod, mask_mod=mask_mod, return_lse=True)
    starts = torch.tensor([0, *p.q_lens]).cumsum(0).tolist()
    for b, (q, k, v) in enumerate(sequences):
        if 0 in q.shape:
            continue
        offset = k.shape[2] - q.shape[2]
        found = (out[b], lse[b]) if not p.ragged else [t[starts[b] : starts[b + 1]].transpose(0, 1) for t in (out, lse)]
        shift = shifted(score_mod, b, offset), shifted(mask_mod or mods.causal, b, offset)
        exact, exact_lse, _ = dense_attention(q, k, v, *shift)
        plain, plain_lse, _ = dense_attention(q, k, v, *shift, precision=p.dtype)
        assert relative_error(found[0], exact[0]) <= 1.2 * relative_error(plain, exact) + 1e-6
        assert torch.equal(found[1] == float("-inf"), exact_lse[0] == float("-inf"))
        error, plain_error = ((t - exact_lse[0]).nan_to_num(0.0, 0.0, 0.0).abs().max() for t in (found[1], plain_lse[0]))
        assert error <= 2 * plain_error + 1e-5


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


def batch(device, q_lens=(3, 1, 0, 9), kv_lens=(40, 7, 0, 300), dtype=torch.float32, **changes):
    """Arguments of cached_attention: a ragged batch in pages of 16, but for what `changes`."""
    p = Batch(q_lens=list(q_lens), kv_lens=list(kv_lens), dtype=dtype, **changes)
    return made(p, device)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
def test_a_sequence_alone_is_bitwise_the_same(device, paged):
    """batch_invariant, whatever room the others' caches need."""
    arguments = batch(device, (3, 1, 2, 9), (1100, 7, 30, 2500), torch.bfloat16, page_size=16 if paged else 0, invariant=True)
    whole, starts = cached_attention(**arguments), arguments["cu_seqlens_q"].tolist()
    for b, n in enumerate((3, 1, 2, 9)):
        alone = {k: arguments[k] for k in ("k_cache", "v_cache", "batch_invariant")}
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
    monkeypatch.setattr(decode, "_INTERPRETED", 132)

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
    "both": (dict(cache_loc=[0, 1, 2, 3]), "exclude each other"),
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
