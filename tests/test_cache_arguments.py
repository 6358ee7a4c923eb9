"""Arguments of cached_attention, update_cache and rope_table: what is refused and how, what is not refused because it has a meaning."""

from __future__ import annotations

import pytest
import sanitize_corrupt
import torch
from torch._subclasses import FakeTensorMode

from flexpress import cached_attention, mods, rope_table, update_cache
from flexpress.caches import shared_attention, shared_prefix
from support.dense import relative_error
from support.devices import DEVICES

HEADS, KV_HEADS, D = 4, 2, 16


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def arguments(layout: str = "pages", device: str = "cpu", dtype=torch.float32) -> dict:
    """A call of cached_attention for three sequences with 2, 1 and 3 queries; with key, value and rope beside them."""
    g = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=g).to(device, dtype)

    rows = (7, 8) if layout == "pages" else (3, 16)
    found = {
        "query": random(6, HEADS, D),
        "key": random(6, KV_HEADS, D),
        "value": random(6, KV_HEADS, D),
        "k_cache": random(*rows, KV_HEADS, D),
        "v_cache": random(*rows, KV_HEADS, D),
        "kv_len": int32(10, 1, 16, device=device),
        "cu_seqlens_q": int32(0, 2, 3, 6, device=device),
        "max_q_len": 3,
        "rope": rope_table(16, D, device=device),
    }
    if layout == "pages":
        found["page_table"] = int32([0, 1], [2, -1], [3, 4], device=device)
    elif layout == "entries":
        found["cache_loc"] = int32(2, 0, 1, device=device)
    return found


def attend(a: dict, **options):
    return cached_attention(**{k: t for k, t in a.items() if k not in ("key", "value", "rope")}, **options)


def update(a: dict, **options):
    return update_cache(a["key"], a["value"], **{k: t for k, t in a.items() if k not in ("key", "value")}, **options)


def sparse(tensor):
    return tensor.to_sparse()


def fake(tensor):
    return FakeTensorMode().from_tensor(tensor)


# name: (layout, what changes, error, words); a function changes the argument of that name
BOTH = {
    "max_q_len too small": ("pages", dict(max_q_len=1), ValueError, r"max_q_len is 1, but sequence 2 has 3 queries"),
    "max_q_len 0": ("pages", dict(max_q_len=0), ValueError, r"max_q_len is 0, but sequence 2 has 3 queries"),
    "max_q_len as a float": ("pages", dict(max_q_len=3.0), TypeError, "max_q_len must be an integer, got 3.0"),
    "max_q_len without cu_seqlens_q": ("entries", dict(cu_seqlens_q=None), ValueError, "must be .B, H, Q_LEN, D., got torch.float32"),
    "offsets that begin at 1": ("pages", dict(cu_seqlens_q=int32(1, 2, 3, 6)), ValueError, "cu_seqlens_q must start with 0"),
    "offsets that fall": ("pages", dict(cu_seqlens_q=int32(0, 3, 2, 6)), ValueError, "never fall"),
    "offsets beyond the tokens": ("pages", dict(cu_seqlens_q=int32(0, 2, 3, 7)), ValueError, "at most the 6 tokens there are"),
    "offsets as a list": ("pages", dict(cu_seqlens_q=[0, 2, 3, 6]), TypeError, r"cu_seqlens_q must be torch.int32 \(4,\).*got list"),
    "too few offsets": ("pages", dict(cu_seqlens_q=int32(0, 2, 6)), ValueError, r"cu_seqlens_q must be torch.int32 \(4,\)"),
    "lengths beyond the pages": ("pages", dict(kv_len=int32(10, 1, 17)), ValueError, "positions go from 0 to 15 in k_cache"),
    "lengths beyond the pages, first positions not": (
        "pages",
        dict(q_offset=int32(0, 0, 0), kv_len=int32(10, 1, 17)),
        ValueError,
        "positions go from 0 to 15 in k_cache",
    ),
    "lengths beyond the entry": ("entries", dict(kv_len=int32(10, 17, 9)), ValueError, "positions go from 0 to 15 in k_cache"),
    "a negative length": ("entries", dict(kv_len=int32(10, 1, -1)), ValueError, r"kv_len\[2\] is -1"),
    "fewer positions than queries": ("pages", dict(kv_len=int32(1, 1, 16)), ValueError, "sequence 0 has 2 new tokens from position -1"),
    "no position for queries": ("pages", dict(kv_len=int32(10, 0, 16)), ValueError, "sequence 1 has 1 new tokens from position -1"),
    "lengths as a list": ("pages", dict(kv_len=[10, 1, 16]), TypeError, r"kv_len must be torch.int32 \(n,\).*got list"),
    "no lengths": ("pages", dict(kv_len=None), TypeError, r"kv_len must be torch.int32 \(n,\).*got None"),
    "lengths in int64": ("pages", dict(kv_len=torch.Tensor.long), ValueError, "got torch.int64"),
    "a page that is padding": ("pages", dict(kv_len=int32(10, 9, 16)), ValueError, r"page_table\[1\] names pages from -1 to 2"),
    "a page after the last": ("pages", dict(page_table=int32([0, 1], [2, -1], [3, 7])), ValueError, "k_cache .* has pages 0 to 6"),
    "a flat page table": ("pages", dict(page_table=int32(0, 1, 2)), ValueError, r"page_table must be torch.int32 \(3, n\)"),
    "an entry after the last": ("entries", dict(cache_loc=int32(0, 1, 3)), ValueError, "cache_loc names entries from 0 to 3"),
    "entry -1": ("entries", dict(cache_loc=int32(0, -1, 2)), ValueError, "cache_loc names entries from -1 to 2"),
    "a row after the last": (
        "pages",
        dict(cache_loc=int32(0, 1, 3)),
        ValueError,
        r"cache_loc names rows from 0 to 3; page_table \(3, 2\) has rows 0 to 2",
    ),
    "row -1": ("pages", dict(cache_loc=int32(0, -1, 2)), ValueError, "cache_loc names rows from -1 to 2"),
    "no rows": (
        "pages",
        dict(cache_loc=int32(0, 1, 2), page_table=lambda t: t[:0]),
        ValueError,
        r"page_table \(0, 2\) has no rows for the 3",
    ),
    "rows of too few sequences": ("pages", dict(cache_loc=int32(0, 1)), ValueError, r"cache_loc must be torch.int32 \(3,\)"),
    "first positions below 0": ("pages", dict(q_offset=int32(0, -1, 0)), ValueError, "sequence 1 has 1 new tokens from position -1"),
    "another number of entries": (
        "contiguous",
        dict(k_cache=torch.zeros(2, 16, KV_HEADS, D), v_cache=torch.zeros(2, 16, KV_HEADS, D)),
        ValueError,
        "2 entries for 3 sequences",
    ),
    "a cache of integers": ("pages", dict(k_cache=torch.Tensor.int, v_cache=torch.Tensor.int), TypeError, "must both be .*got torch.int32"),
    "caches of two dtypes": ("pages", dict(v_cache=torch.Tensor.half), TypeError, "must both be .*torch.float32 and torch.float16"),
    "scales for float32": ("pages", dict(k_scale=torch.ones(2), v_scale=torch.ones(2)), TypeError, "for caches of float8_e4m3fn, got"),
    "one scale": ("pages", dict(k_scale=torch.ones(2)), ValueError, "go together"),
    "no heads": (
        "pages",
        dict(k_cache=lambda t: t[:, :, :0], v_cache=lambda t: t[:, :, :0], key=lambda t: t[:, :0], value=lambda t: t[:, :0]),
        ValueError,
        "has no heads",
    ),
    "a fake cache": ("pages", dict(k_cache=fake), NotImplementedError, "k_cache is a FakeTensor"),
    "a cache on meta": ("pages", dict(k_cache=lambda t: t.to("meta")), NotImplementedError, "k_cache must be in the memory .* on meta"),
    "a sparse cache": ("pages", dict(v_cache=sparse), NotImplementedError, "v_cache is a sparse tensor"),
    "a list of lists": ("pages", dict(k_cache=[[1.0]]), TypeError, "k_cache must be a tensor .*got list"),
    "a cache with the negative bit": ("pages", dict(k_cache=torch._neg_view), NotImplementedError, r"pass .resolve_neg\(\)"),
    "a cache that requires grad": ("pages", dict(k_cache=lambda t: t.requires_grad_()), NotImplementedError, "k_cache requires grad, but"),
}
ATTEND = {
    "positions beyond 32 bits": ("pages", dict(q_offset=int32(0, 0, 2**31 - 1)), ValueError, "kernels count in 32 bits, to 2147483647"),
    "a query that requires grad": (
        "pages",
        dict(query=lambda t: t.requires_grad_()),
        NotImplementedError,
        "query requires grad, but cached_attention is not differentiable: train with flex_attention",
    ),
    "a captured tensor that requires grad": (
        "pages",
        dict(score_mod=mods.alibi(torch.ones(HEADS, requires_grad=True))),
        NotImplementedError,
        "score_mod captures a tensor that requires grad",
    ),
    "heads": ("pages", dict(query=lambda t: t[:, :3]), ValueError, "3 heads, no multiple of the 2 heads"),
    "integers": (
        "pages",
        dict(query=torch.Tensor.int),
        TypeError,
        "query must be float16, .* or with caches of it float8_e4m3fn, got torch.int32",
    ),
    "a large head dim": (
        "pages",
        dict(query=torch.zeros(6, 4, 600), k_cache=torch.zeros(7, 8, 2, 600)),
        NotImplementedError,
        "k_cache has head_dim 600",
    ),
}
UPDATE = {
    "first positions beyond": ("pages", dict(q_offset=int32(0, 0, 14)), ValueError, "sequence 2 has 3 new tokens from position 14"),
    "a key that requires grad": ("pages", dict(key=lambda t: t.requires_grad_()), NotImplementedError, "key requires grad, but update_"),
    "one entry twice": (
        "entries",
        dict(cache_loc=int32(1, 2, 1), kv_len=int32(10, 1, 11)),
        ValueError,
        r"sequences 0 and 2 both write to entry 1 \(cache_loc\), rows 8 to 9",
    ),
    "one row twice": (
        "entries",
        dict(cache_loc=int32(1, 2, 1), kv_len=int32(10, 1, 12)),
        ValueError,
        r"sequences 0 and 2 both write to entry 1 \(cache_loc\), rows 9 to 9",
    ),
    "one page twice": (
        "pages",
        dict(page_table=int32([0, 1], [2, -1], [3, 1]), kv_len=int32(10, 1, 11)),
        ValueError,
        r"sequences 0 and 2 both write to page 1 \(page_table\), rows 0 to 1",
    ),
    "one page twice in a sequence": (
        "pages",
        dict(
            page_table=int32([0, 1], [2, -1], [3, 3]),
            kv_len=int32(10, 1, 9),
            key=None,
            value=None,
            query=None,
            rope=None,
            cu_seqlens_q=int32(0, 1, 2, 11),
            max_q_len=9,
        ),
        ValueError,
        "sequences 2 and 2 both write to page 3",
    ),
    "new ones past kv_len": (
        "pages",
        dict(q_offset=int32(8, 0, 14), kv_len=int32(10, 1, 15), cu_seqlens_q=int32(0, 2, 3, 5)),
        ValueError,
        "sequence 2 has 2 new tokens from position 14 on, but kv_len 15",
    ),
    "an expanded cache": ("pages", dict(k_cache=lambda t: t[:1].expand(7, -1, -1, -1)), ValueError, "k_cache .* elements share memory"),
    "overlapping entries": (
        "entries",
        dict(v_cache=lambda t: t.flatten().as_strided(t.shape, (8 * 32, 32, 16, 1))),
        ValueError,
        "v_cache .* elements share memory",
    ),
    "key as a list": ("pages", dict(key=[1.0]), TypeError, "key must be a tensor"),
    "a fake value": ("pages", dict(value=fake), NotImplementedError, "value is a FakeTensor"),
    "value as a list": ("pages", dict(value=[1.0]), TypeError, "value must be a tensor"),
    "another dtype of value": ("pages", dict(value=torch.Tensor.half), ValueError, "all else alike"),
    "a query of other length": ("pages", dict(query=lambda t: t[:5]), ValueError, "all but the number of heads must be equal"),
    "rope as a list": ("pages", dict(rope=[1.0]), TypeError, "rope must be a tensor"),
    "a short rope": ("pages", dict(rope=rope_table(15, D)), ValueError, "has 15 positions, but a new token has position 15"),
    "an empty rope": ("pages", dict(rope=rope_table(0, D)), ValueError, "rope must be float32"),
    "a rope of columns": (
        "pages",
        dict(rope=lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
        ValueError,
        r"rope torch.float32 .* has strides .*; pass rope.contiguous\(\)",
    ),
    "rope in float64": ("pages", dict(rope=torch.Tensor.double), ValueError, "rope must be float32"),
    "a turned rope": ("pages", dict(rope=lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)), ValueError, "has strides"),
    "a cache with strided head dims": (
        "pages",
        dict(k_cache=lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)),
        ValueError,
        "head dims of k_cache and v_cache must be contiguous",
    ),
    "no rope for the query": ("pages", dict(rope=None), ValueError, "pass rope="),
}


def changed(found: dict, changes: dict) -> dict:
    for name, change in changes.items():
        found[name] = change(found[name]) if callable(change) and name in found else change
    if "key" in changes and changes["key"] is None:  # 11 tokens
        found |= {"key": torch.ones(11, KV_HEADS, D), "value": torch.ones(11, KV_HEADS, D)}
    return found


@pytest.mark.parametrize("call", [attend, update])
@pytest.mark.parametrize("name", BOTH)
def test_bad_calls_of_both(call, name):
    refuses(call, *BOTH[name])


@pytest.mark.parametrize("name", ATTEND)
def test_bad_calls_of_cached_attention(name):
    refuses(attend, *ATTEND[name])


@pytest.mark.parametrize("name", UPDATE)
def test_bad_calls_of_update_cache(name):
    refuses(update, *UPDATE[name])


def refuses(call, layout, changes, error, words):
    found = changed(arguments(layout), changes)
    kept = {n: found[n].clone() for n in ("k_cache", "v_cache") if n not in changes}
    with pytest.raises(error, match=words):
        call(found)
    assert all(torch.equal(found[n], t) for n, t in kept.items()), "nothing was written"


@pytest.mark.parametrize(
    "call",
    [
        lambda: rope_table(8.5, 16),
        lambda: rope_table("8", 16),
        lambda: rope_table(8, 16.0),
        lambda: rope_table(8, 16, "1e4"),
        lambda: rope_table(8, 16, True),
        lambda: rope_table(8, 16, inv_freq=[1.0] * 8),
        lambda: rope_table(8, 16, inv_freq=torch.arange(8)),
    ],
)
def test_rope_table_says_what_is_no_number(call):
    with pytest.raises(TypeError, match="length must be an int|rope_dim must be an int|theta must be a number|inv_freq must be"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: rope_table(-1, 16),
        lambda: rope_table(8, 15),
        lambda: rope_table(8, 0),
        lambda: rope_table(8, 16, -1.0),
        lambda: rope_table(8, 16, 0),
        lambda: rope_table(8, 16, float("nan")),
        lambda: rope_table(8, 16, float("inf")),
        lambda: rope_table(8, 16, 10**400),
        lambda: rope_table(8, 16, scale=float("nan")),
        lambda: rope_table(8, 16, scale=0.0),
        lambda: rope_table(8, 16, inv_freq=torch.ones(7)),
    ],
)
def test_rope_table_says_which_number_is_wrong(call):
    with pytest.raises(ValueError, match="length is -1|rope_dim must be even|theta is .*positive and finite|scale is|inv_freq must have"):
        call()


def test_scales_are_looked_at():
    found = arguments()
    found |= {c: found[c].to(torch.float8_e4m3fn) for c in ("k_cache", "v_cache")} | {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    for number in (0.0, -1.0, float("nan"), float("inf")):
        found["v_scale"][1] = number
        with pytest.raises(ValueError, match="v_scale has .*; scales must be positive and finite"):
            update(found)


def test_gradients_are_dropped_where_they_are_off():
    found = arguments()
    expected = attend(found)
    found["query"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(attend(found), expected)
    with torch.inference_mode():
        assert torch.equal(attend(found), expected)
        update(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["pages", "entries", "contiguous"])
def test_tables_may_have_any_strides(layout, device):
    """Every second element of something larger, one element for all, columns of a matrix."""
    found = arguments(layout, device)
    expected = attend(found)

    def apart(tensor):
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), -7, dtype=tensor.dtype, device=device)
        wide[..., ::2] = tensor
        return wide[..., ::2]

    names = [n for n in ("kv_len", "cu_seqlens_q", "page_table", "cache_loc") if n in found]
    assert torch.equal(attend(found | {n: apart(found[n]) for n in names}), expected)
    if layout == "pages":
        assert torch.equal(attend(found | {"page_table": found["page_table"].t().contiguous().t()}), expected)
    same = found | {"kv_len": int32(7, device=device).expand(3), "q_offset": int32(4, device=device).expand(3)}
    assert torch.equal(attend(same), attend(same | {n: same[n].contiguous() for n in ("kv_len", "q_offset")}))


@pytest.mark.parametrize("device", DEVICES)
def test_the_negative_bit_of_new_tokens_counts(device):
    found = arguments("pages", device)
    negative = found | {n: torch._neg_view(-found[n]) for n in ("query", "key", "value")}
    assert torch.equal(attend(negative), attend(found))
    made = []
    for a in (found, negative):
        a = a | {n: a[n].clone() for n in ("k_cache", "v_cache")}
        made.append((update(a), a["k_cache"], a["v_cache"]))
    assert all(torch.equal(x, y) for x, y in zip(*made, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_caches_of_any_dtype(dtype, kept, device):
    """A cache in another dtype than queries holds rounded keys and values, and is read as what it holds."""
    found = arguments("pages", device, dtype)
    found |= {n: found[n].to(kept) for n in ("k_cache", "v_cache")}
    turned = update(found)
    plain = found | {n: found[n].to(dtype) for n in ("k_cache", "v_cache")}
    assert turned.dtype == dtype and found["k_cache"].dtype == kept
    tokens = found["value"][0:2]  # positions 8 and 9 of the first sequence
    assert torch.equal(found["v_cache"][1, 0:2], tokens.to(kept))
    for score_mod in (None, mods.softcap(3.0)):
        out = attend(found | {"query": turned}, score_mod=score_mod)
        assert out.dtype == dtype
        assert relative_error(out, attend(plain | {"query": turned}, score_mod=score_mod).double()) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    """Queries, keys and values become autocast's dtype, whatever dtype the cache has."""
    found, low = arguments("pages", device), arguments("pages", device)
    low |= {n: low[n].bfloat16() for n in ("query", "key", "value")}
    with torch.autocast(device, torch.bfloat16):
        out, turned = attend(found), update(found)
    assert out.dtype == turned.dtype == torch.bfloat16
    assert torch.equal(out, attend(low)) and torch.equal(turned, update(low)) and torch.equal(found["k_cache"], low["k_cache"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["pages", "entries", "contiguous"])
@pytest.mark.parametrize("max_q_len", [0, 1, 2])
def test_a_max_q_len_that_lies_loses_nothing_but_late_queries(max_q_len, layout, device):
    """Unchecked: update_cache writes all; in cached_attention a sequence's first max_q_len queries are right, others 0 and -inf."""
    found = arguments(layout, device)
    (expected, expected_lse), (out, lse) = (attend(found | {"max_q_len": n}, check=False, return_lse=True) for n in (3, max_q_len))
    number = torch.tensor([0, 1, 0, 0, 1, 2], device=device)  # of each query in its sequence
    there = number < max_q_len
    assert torch.allclose(out[there], expected[there], atol=1e-6) and torch.allclose(lse[there], expected_lse[there], atol=1e-6)
    assert (out[~there] == 0).all() and (lse[~there] == float("-inf")).all()
    written = []
    for n in (3, max_q_len):
        caches = {name: found[name].clone() for name in ("k_cache", "v_cache")}
        written.append((update(found | caches | {"max_q_len": n}, check=False), *caches.values()))
    assert all(torch.equal(a, b) for a, b in zip(*written, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_max_q_len_above_the_number_of_tokens_is_that_number(device):
    found = arguments("pages", device)
    assert torch.equal(attend(found), attend(found | {"max_q_len": 4096}))
    written = [found["k_cache"].clone(), update(found | {"max_q_len": 4096})]
    again = arguments("pages", device)
    assert torch.equal(update(again), written[1]) and torch.equal(again["k_cache"], found["k_cache"])


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_after_the_last_sequence_stay_as_they_are_in_the_turned_query(device):
    found = arguments("pages", device) | {"cu_seqlens_q": int32(0, 2, 3, 4, device=device), "kv_len": int32(10, 1, 16, device=device)}
    torch.full((1 << 12,), float("nan"), device=device)
    turned = update(found)
    assert torch.equal(turned[4:], found["query"][4:]) and not torch.equal(turned[:4], found["query"][:4])


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_that_is_not_there_is_not_written(device):
    """kv_len 0, wherever q_offset says its tokens would be."""
    found = arguments("contiguous", device)
    found |= {n: found[n][:3, :, None] for n in ("key", "value", "query")} | {"q_offset": int32(3, 3, 3, device=device)}
    found |= {"kv_len": int32(4, 0, 4, device=device), "cu_seqlens_q": None, "max_q_len": None}
    before = found["k_cache"].clone()
    update(found)
    different = (found["k_cache"] != before).flatten(2).any(2)
    assert different.nonzero().tolist() == [[0, 3], [2, 3]]


LIES = {
    "pages that are not there, pages, ragged",
    "a page after the last, and the least number, pages",
    "entries that are not there, entries",
    "offsets outside, contiguous, ragged",
}


@pytest.mark.parametrize("part", ["caches", "prefixes"])
def test_lies_read_and_write_nothing_outside(monkeypatch, part):
    """A part of what tests/sanitize_corrupt.py calls, which runs under compute-sanitizer as well."""
    calls = sanitize_corrupt.calls
    monkeypatch.setattr(sanitize_corrupt, "calls", lambda *a, **k: (c for c in calls(*a, **k) if c[0] in LIES))
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", shared_prefix.LEAST_BYTES)  # which the part changes, and the next
    monkeypatch.setattr(shared_attention, "LEAST_FILL", shared_attention.LEAST_FILL)
    sanitize_corrupt.main("cpu", part)
