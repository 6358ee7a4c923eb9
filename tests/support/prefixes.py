"""Batches of sequences that forks of a PageAllocator made, and cached_attention that reads what they share once: against the same call
without sharing and against dense attention in float64, sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from flexpress import PageAllocator, cached_attention, mods
from support.batches import mask_mods, score_mods, shifted
from support.dense import dense_attention, relative_error


@dataclass(kw_only=True)
class Forked:
    """A batch: `forks` lists sequences as (number of the one that it goes on from, tokens of that one that it keeps, its own tokens); the
    first has none to go on from. All are in the batch, in the order `order`, with q_lens of their last tokens as queries.

    moved   q_offset is given: queries stand so many positions before the last ones
    """

    forks: list[tuple[int, int, int]]
    order: list[int]
    q_lens: list[int]
    ragged: bool = True
    Hkv: int = 2
    Hq: int = 6
    D_QK: int = 32
    D_V: int = 16
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    score: str = "none"
    mask: str = "none"
    moved: int | None = None
    sinks: bool = False
    fp8: bool = False
    made_before: bool = False  # the tables of the step
    seed: int = 1
    lengths: list[int] = field(default_factory=list)  # in the order of the batch, once it is made


@st.composite
def forks(draw):
    """Sequences that go on from others at random lengths, some from none."""
    found, lengths = [], []
    for i in range(draw(st.integers(2, 6))):
        parent = draw(st.integers(-1, i - 1))
        kept = 0 if parent < 0 else draw(st.integers(0, lengths[parent]))
        own = draw(st.sampled_from([0, 1, 3, 9, 40]))
        found.append((parent, kept, own))
        lengths.append(kept + own)
    return found, lengths


@st.composite
def batches(draw, device):
    """Any of these."""
    found, lengths = draw(forks())
    order = draw(st.permutations(range(len(found))))
    lengths = [lengths[i] for i in order]
    ragged = draw(st.booleans())
    q_lens = [min(n, draw(st.sampled_from([0, 1, 1, 2, 7]))) for n in lengths]
    if not ragged:
        q_lens = [min([1, *lengths]) and draw(st.sampled_from([1, 1, 3]))] * len(order)
        q_lens = [min(q_lens[0], *lengths)] * len(order)
    Hkv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]))
    return Forked(
        forks=found,
        order=order,
        q_lens=q_lens,
        ragged=ragged,
        Hkv=Hkv,
        Hq=Hkv * group,
        D_QK=draw(st.sampled_from([16, 20, 64])),
        D_V=draw(st.sampled_from([16, 24])),
        page_size=draw(st.sampled_from([1, 4, 16])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        score=draw(st.sampled_from(list(score_mods("cpu")))),
        mask=draw(st.sampled_from(list(mask_mods()))),
        moved=draw(st.sampled_from([None, None, 0, 5])),
        sinks=draw(st.booleans()),
        fp8=draw(st.booleans()),
        made_before=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def pool_of(p: Forked, num_pages: int = 400) -> tuple[PageAllocator, list[int]]:
    """The allocator, and the batch's sequences."""
    pool, made = PageAllocator(num_pages, p.page_size), []
    for parent, kept, own in p.forks:
        sequence = pool.allocate() if parent < 0 else pool.fork(made[parent])
        pool.truncate(sequence, kept)
        pool.extend(sequence, own)
        made.append(sequence)
    return pool, [made[i] for i in p.order]


def made(p: Forked, device: str) -> tuple[dict, list, list[int]]:
    """The arguments of cached_attention, each sequence's queries, keys and values [1, heads, length, head dim] in float64, and where its
    queries begin."""
    g = torch.Generator().manual_seed(p.seed)
    pool, sequences = pool_of(p)
    p.lengths = [pool.length(s) for s in sequences]
    kept = torch.float8_e4m3fn if p.fp8 else p.dtype
    used = torch.zeros(pool.num_pages, p.page_size, dtype=torch.bool)
    for s, n in zip(sequences, p.lengths, strict=True):
        for position in range(n):
            used[pool.pages(s)[position // p.page_size], position % p.page_size] = True
    caches = []
    for D in (p.D_QK, p.D_V):
        rows = torch.randn(pool.num_pages, p.page_size, p.Hkv, D, generator=g)
        caches.append(torch.where(used[..., None, None], rows, float("nan")).to(kept).to(device))
    int32 = dict(dtype=torch.int32, device=device)
    arguments = {
        "k_cache": caches[0],
        "v_cache": caches[1],
        "kv_len": torch.tensor(p.lengths, **int32),
        "page_table": pool.page_table(sequences, width=max(-(-max(p.lengths) // p.page_size), 1) + 1, device=device),
    }
    scales = torch.ones(2, p.Hkv)
    if p.fp8:
        scales = torch.rand(2, p.Hkv, generator=g) + 0.5
        arguments |= {"k_scale": scales[0].to(device), "v_scale": scales[1].to(device)}
    q = [torch.randn(1, p.Hq, n, p.D_QK, generator=g).to(p.dtype) for n in p.q_lens]
    offsets = [max(0, n - c - (p.moved or 0)) for n, c in zip(p.lengths, p.q_lens, strict=True)]
    if p.moved is not None:
        arguments["q_offset"] = torch.tensor(offsets, **int32)
    if p.ragged:
        behind = torch.zeros(2, p.Hq, p.D_QK, dtype=p.dtype)  # tokens of no sequence
        arguments["query"] = torch.cat([*(t[0].transpose(0, 1) for t in q), behind]).to(device)
        arguments["cu_seqlens_q"] = torch.tensor([0, *torch.tensor(p.q_lens).cumsum(0)], **int32)
        arguments["max_q_len"] = max(p.q_lens)
    else:
        arguments["query"] = torch.cat(q).to(device)
    if p.sinks:
        arguments["sinks"] = torch.randn(p.Hq, generator=g).to(device)
    found = []
    for s, n, query in zip(sequences, p.lengths, q, strict=True):
        keys = (c[pool.pages(s)].flatten(0, 1)[:n].transpose(0, 1)[None].double() for c in caches)
        found.append((query.to(device), *(t * x.to(device)[None, :, None, None] for t, x in zip(keys, scales.double(), strict=True))))
    shared = pool.shared_prefix(sequences, device=device)
    if shared is not None:
        arguments["shared_prefix"] = shared
        if p.made_before:
            where = {name: arguments.get(name) for name in ("cu_seqlens_q", "q_offset")}
            queries = arguments["query"].shape[0 if p.ragged else 2]
            arguments["shared_prefix"] = shared.tables(arguments["kv_len"], arguments["page_table"], queries=queries, **where)
    return arguments, found, offsets


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """out (1, Hq, Q_LEN, D_V) and lse of attention that has sinks, of those without."""
    if sinks is None:
        return out, lse
    scores = sinks.to(lse.dtype)[None, :, None]
    return out * torch.sigmoid(lse - scores).unsqueeze(-1), torch.logaddexp(lse, scores.expand_as(lse))


def check(p: Forked, device: str) -> None:
    arguments, sequences, offsets = made(p, device)
    score_mod, mask_mod = score_mods(device)[p.score], mask_mods()[p.mask]
    mods_of = {"score_mod": score_mod, "mask_mod": mask_mod, "return_lse": True}
    out, lse = cached_attention(**arguments, **mods_of)
    plain_out, plain_lse = cached_attention(**{**arguments, "shared_prefix": None}, **mods_of)
    assert out.shape == plain_out.shape and out.stride() == plain_out.stride() and lse.shape == plain_lse.shape
    starts = torch.tensor([0, *p.q_lens]).cumsum(0).tolist()

    def of_sequence(t, b):
        return t[starts[b] : starts[b + 1]].transpose(0, 1) if p.ragged else t[b]

    for b, (q, k, v) in enumerate(sequences):
        if 0 in q.shape or 0 in k.shape:
            continue
        shift = shifted(score_mod, b, offsets[b]), shifted(mask_mod or mods.causal, b, offsets[b])
        exact, exact_lse = with_sinks(*dense_attention(q, k, v, *shift)[:2], arguments.get("sinks"))
        dense, dense_lse = with_sinks(*dense_attention(q, k, v, *shift, precision=p.dtype)[:2], arguments.get("sinks"))
        unshared, found = (relative_error(of_sequence(t, b), exact[0]) for t in (plain_out, out))
        assert found <= 2 * max(unshared, relative_error(dense, exact)) + 1e-6
        found_lse = of_sequence(lse, b)
        assert torch.equal(torch.isneginf(found_lse), torch.isneginf(exact_lse[0]))
        errors = [(t - exact_lse[0]).nan_to_num(0.0, 0.0, 0.0).abs().max() for t in (found_lse, of_sequence(plain_lse, b), dense_lse[0])]
        assert errors[0] <= 2 * max(errors[1:]) + 1e-5
    if p.ragged:
        assert torch.equal(out[starts[-1] :], plain_out[starts[-1] :])
        torch.testing.assert_close(lse[starts[-1] :], plain_lse[starts[-1] :], atol=1e-6, rtol=1e-6)  # that of sinks is theirs, via base 2
