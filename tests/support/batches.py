"""Batches of sequences in caches, drawn at random, and cached_attention of them against dense attention sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flexpress import cached_attention, mods
from support.dense import dense_attention, relative_error

SLOPES = torch.linspace(0.1, 0.9, 12)


def score_mods(device):
    slopes = SLOPES.to(device)
    return {
        "none": None,
        "alibi": mods.alibi(slopes),
        "softcap": mods.softcap(2.0),
        "hash": lambda score, b, h, q, k: score + ((q * 2654435761) ^ k) % 11 * 0.2,
        "per sequence": lambda score, b, h, q, k: score + b * 0.3 - k * 0.01 + slopes[h],
    }


def mask_mods():
    return {
        "none": None,
        "window": mods.sliding_window(20),
        "per sequence": lambda b, h, q, k: (k <= q) & ((k + b) % 3 != 0),
        "hash": lambda b, h, q, k: (k <= q) & ((q * 1103515245 + k * 12345) % 7 < 5),
        "all": lambda b, h, q, k: k >= 0,
        "per head": lambda b, h, q, k: (k <= q) & (k >= h),
        "blocks per head": lambda b, h, q, k: (k <= q) & (k // 128 % 3 != h % 3),
    }


@dataclass(kw_only=True)
class Batch:
    """Sequences of `kv_lens` keys, the last `q_lens` of which are new: heads Hq and Hkv, head dims D_QK and D_V.

    `page_size` 0: contiguous caches. `located`: those, or rows of page tables, of a larger tensor, by cache_loc. `values_in_keys`: the
    values are the keys' first columns.
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
    fp8_query: bool = False  # with fp8; then dtype is the output's
    seed: int = 1
    values_in_keys: bool = False


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
        fp8_query=draw(st.booleans()),
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
    if p.values_in_keys:
        v = [t[..., : p.D_V] for t in k]
    kept = torch.float8_e4m3fn if p.fp8 else p.dtype
    k, v = ([t.to(kept) for t in tensors] for tensors in (k, v))
    q = [t.to(kept) for t in q] if p.fp8_query else q
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
        if p.located:
            rows = torch.randperm(B + 2, generator=g)[:B]
            arguments["cache_loc"] = rows.to(device, torch.int32)
            table = torch.full((B + 2, table.shape[1]), -1).index_copy(0, rows, table)
        arguments["page_table"] = table.to(device, torch.int32)
    else:
        places = torch.randperm(B + 2, generator=g)[:B] if p.located else torch.arange(B)
        caches = [torch.full((B + 2 * p.located, S, *t[0].shape[1::2]), float("nan"), dtype=kept, device=device) for t in (k, v)]
        for cache, tensors in zip(caches, (k, v), strict=True):
            for place, t in zip(places, tensors, strict=True):
                cache[place, : t.shape[2]] = t[0].transpose(0, 1)
        if p.located:
            arguments["cache_loc"] = places.to(device, torch.int32)
    if p.values_in_keys:
        caches[1] = caches[0][..., : p.D_V]
    arguments |= {"k_cache": caches[0], "v_cache": caches[1]}
    if p.fp8:
        scales = [torch.rand(p.Hkv, generator=g).to(device) + 0.5 for _ in range(2)]
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}
        k, v = ([t.double() * s[None, :, None, None] for t in tensors] for tensors, s in zip((k, v), scales, strict=True))
        if p.fp8_query:
            scale = (torch.rand(p.Hkv if p.seed % 2 else 1, generator=g) + 0.5).to(device)
            arguments |= {"q_scale": scale, "out_dtype": p.dtype}
            spread = scale.expand(p.Hkv).repeat_interleave(p.Hq // p.Hkv)[None, :, None, None]
            q = [t.double() * spread for t in q]
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
        by_chance = 2 / found[0].numel() ** 0.5  # errors of few numbers are larger or smaller than those of others
        assert relative_error(found[0], exact[0]) <= (1.2 + by_chance) * relative_error(plain, exact) + 1e-6
        assert torch.equal(found[1] == float("-inf"), exact_lse[0] == float("-inf"))
        error, plain_error = ((t - exact_lse[0]).nan_to_num(0.0, 0.0, 0.0).abs().max() for t in (found[1], plain_lse[0]))
        assert error <= 2 * plain_error + 1e-5
