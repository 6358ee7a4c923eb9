"""Writing to caches against plain torch in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flexpress import rope_table, update_cache
from support.dense import relative_error


@dataclass(kw_only=True)
class Update:
    """`counts` new tokens of every sequence, from the positions `offsets` on. `given`: these are passed; else the last ones are meant.

    `page_size` 0: contiguous caches. `located`: those of a larger tensor, by cache_loc. `rope_dim` 0: nothing turns.
    """

    counts: list[int]
    offsets: list[int]
    ragged: bool
    D_QK: int
    D_V: int
    Hkv: int
    Hq: int
    page_size: int
    located: bool
    given: bool
    rope_dim: int
    interleaved: bool
    tail: bool
    query: bool
    strided: bool
    fp8: bool
    dtype: torch.dtype
    seed: int


@st.composite
def updates(draw, device):
    B = draw(st.integers(1, 4))
    ragged = draw(st.booleans())
    counts = [draw(st.sampled_from([0, 1, 2, 5, 33])) for _ in range(B)]
    counts = counts if ragged else [max(counts)] * B
    D = draw(st.sampled_from([8, 20, 64]))
    return Update(
        counts=counts,
        offsets=[draw(st.integers(0, 40)) for _ in range(B)],
        ragged=ragged,
        D_QK=D,
        D_V=draw(st.sampled_from([D, 12])),
        Hkv=draw(st.integers(1, 3)),
        Hq=draw(st.integers(1, 4)),
        page_size=draw(st.sampled_from([0, 1, 7, 16])),
        located=draw(st.booleans()),
        given=draw(st.booleans()),
        rope_dim=draw(st.sampled_from([0, 2, D // 2 // 2 * 2, D])),
        interleaved=draw(st.booleans()),
        tail=draw(st.booleans()),
        query=draw(st.booleans()),
        strided=draw(st.booleans()),
        fp8=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
    )


def turned(x, position, table, interleaved, tail=False):
    """x [..., head dim] in float64, its first dimensions, or its last, turned by the angles of a position."""
    x, half = x.double(), table.shape[1]
    c, s = table[position].double().unbind(-1)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    result = x.clone()
    part, into = (t[..., t.shape[-1] - 2 * half :] if tail else t for t in (x, result))
    into[..., first] = part[..., first] * c - part[..., second] * s
    into[..., second] = part[..., second] * c + part[..., first] * s
    return result


def check_update(p: Update, device: str) -> None:
    """update_cache writes what it should and where, and nowhere else; the query is turned alike."""
    g = torch.Generator().manual_seed(p.seed)
    B, counts, offsets = len(p.counts), p.counts, p.offsets
    room = max(o + n for o, n in zip(offsets, counts, strict=True)) + 2

    def tokens(H, D):
        shape = (sum(counts), H, D) if p.ragged else (B, H, counts[0], D)
        if p.strided:
            return torch.randn(*shape[:-1], D + 8, generator=g).to(device, p.dtype)[..., 4 : D + 4]
        return torch.randn(shape, generator=g).to(device, p.dtype)

    def of_sequence(t, b):  # [tokens, heads, head dim]
        return t[sum(counts[:b]) : sum(counts[: b + 1])] if p.ragged else t[b].transpose(0, 1)

    k, v, q = tokens(p.Hkv, p.D_QK), tokens(p.Hkv, p.D_V), tokens(p.Hq, p.D_QK)
    size = p.page_size
    pages = -(-room // size) if size else 0
    entries = B * pages + 2 if size else B + 3 * p.located
    kept = torch.float8_e4m3fn if p.fp8 else p.dtype
    caches = [torch.randn(entries, size or room, p.Hkv, D, generator=g).to(device, kept) for D in (p.D_QK, p.D_V)]
    before = [c.clone() for c in caches]
    int32 = dict(dtype=torch.int32, device=device)
    arguments = {"kv_len": torch.tensor([o + n + p.given * (o + n < room) for o, n in zip(offsets, counts, strict=True)], **int32)}
    if p.given:
        arguments["q_offset"] = torch.tensor(offsets, **int32)
    if p.ragged:
        arguments["cu_seqlens_q"] = torch.tensor([0, *torch.tensor(counts).cumsum(0)], **int32)
    if size:
        table = torch.randperm(entries, generator=g)[: B * pages].reshape(B, pages)
        if p.located:
            rows = torch.randperm(B + 2, generator=g)[:B]
            arguments |= {
                "cache_loc": rows.to(**int32),
                "page_table": torch.full((B + 2, pages), -1).index_copy(0, rows, table).to(**int32),
            }
        else:
            arguments["page_table"] = table.to(**int32)
    elif p.located:
        arguments["cache_loc"] = (where := torch.randperm(entries, generator=g)[:B]).to(**int32)
    scales = [torch.rand(p.Hkv, generator=g).to(device) + 0.5 if p.fp8 else torch.ones(p.Hkv, device=device) for _ in range(2)]
    if p.fp8:
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}
    rope = rope_table(room, p.rope_dim, device=device) if p.rope_dim else None
    query = q if p.query and rope is not None else None
    found = update_cache(k, v, *caches, **arguments, rope=rope, interleaved=p.interleaved, rope_tail=p.tail, query=query)

    expected = [c.double() for c in before]
    for b in range(B):
        for i in range(counts[b]):
            at = offsets[b] + i
            place = (int(table[b, at // size]), at % size) if size else (int(where[b]) if p.located else b, at)
            new = of_sequence(k, b)[i]
            expected[0][place] = (new.double() if rope is None else turned(new, at, rope, p.interleaved, p.tail)) / scales[0][:, None]
            expected[1][place] = of_sequence(v, b)[i].double() / scales[1][:, None]
    eps = torch.finfo(kept).eps
    for cache, wanted in zip(caches, expected, strict=True):
        rounding = 2e-3 if p.fp8 else 4e-7 * wanted.abs().amax() if rope is not None else 0.0  # subnormals, and float32 products
        assert ((cache.double() - wanted).abs() <= eps * wanted.abs() + rounding).all()
    eps = torch.finfo(p.dtype).eps
    assert (found is None) == (query is None)
    if found is not None and found.numel():
        for b in range(B):
            turned_q = [turned(of_sequence(q, b)[i], offsets[b] + i, rope, p.interleaved, p.tail) for i in range(counts[b])]
            if turned_q:
                assert relative_error(of_sequence(found, b), torch.stack(turned_q)) <= 2 * eps
                assert found.dtype == q.dtype
