"""flash_attn_with_kvcache, and packed queries on pages, against dense float64 attention: what is written, turned, hidden and returned."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st

from flexpress import cache_info, cached_attention
from flexpress.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache, kvcache
from support.caches import turned
from support.dense import relative_error
from support.devices import DEVICES, for_any
from support.flash_attn import Meaning, sequence_attention, slopes_at

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FLOORS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(kw_only=True)
class Problem:
    """`lengths` positions of each sequence are in the cache, and `new` ones come (-1: none are given).

    place      "own": sequence b has entry b; "spare": of more entries; "index": one of another number; or the page size
    rope_dim   0: nothing turns
    number     the lengths are all the first, given as a number
    copied     keys behind left padding are copied, however few queries there are
    """

    dtype: torch.dtype
    lengths: list[int]
    queries: int
    new: int
    Hkv: int
    group: int
    D: int
    place: str | int
    rope_dim: int
    interleaved: bool
    leftpad: bool
    number: bool
    meaning: Meaning
    seed: int
    copied: bool = False


@st.composite
def problems(draw, device):
    tiny = device == "cpu"
    size = st.sampled_from([-1, 0, 1, 3, 30] if tiny else [-1, 0, 1, 17, 200, 4000])
    new = draw(st.sampled_from([-1, 0, 1, 3] if tiny else [-1, 0, 1, 3, 70]))
    queries = draw(st.one_of(st.just(max(new, 1)), st.sampled_from([1, 2, 5] if tiny else [1, 4, 17, 130])))
    return Problem(
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16] if tiny else [torch.float16, torch.bfloat16])),
        lengths=draw(st.lists(st.sampled_from([0, 1, 4, 15, 20] if tiny else [0, 1, 4, 255, 900, 2500]), min_size=1, max_size=3)),
        queries=queries,
        new=new,
        Hkv=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 4])),
        D=draw(st.sampled_from([16, 24] if tiny else [64, 96, 128])),
        place=draw(st.sampled_from(["own", "spare", "index", 4, 16] if tiny else ["own", "spare", "index", 64, 256])),
        rope_dim=draw(st.sampled_from([0, 0, 8, 16])) if new >= 0 else 0,
        interleaved=draw(st.booleans()),
        leftpad=draw(st.booleans()),
        number=draw(st.booleans()),
        meaning=Meaning(
            causal=draw(st.booleans()),
            window=draw(st.one_of(st.just((-1, -1)), st.tuples(size, size))),
            softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
            slopes=draw(st.sampled_from([0, 1, 2])),
            scale=draw(st.sampled_from([None, None, 0.3])),
        ),
        seed=draw(st.integers(0, 99)),
        copied=draw(st.booleans()),
    )


def make(p: Problem, device: str) -> tuple[dict, list[list[tuple[int, int]]]]:
    """The call's arguments, and where each sequence's positions are: (entry, row) of the cache."""
    g = torch.Generator().manual_seed(p.seed)

    def random(*shape):
        return torch.randn(shape, generator=g).to(device, p.dtype)

    B, room = len(p.lengths), max(p.lengths) + max(p.new, 0) + 3
    int32 = dict(dtype=torch.int32, device=device)
    arguments = p.meaning.arguments(p.meaning.slopes_of(B, p.Hkv * p.group, device, g))
    arguments["cache_seqlens"] = p.lengths[0] if p.number else torch.tensor(p.lengths, **int32)
    if isinstance(p.place, int):
        pages = -(-room // p.place)
        table = torch.randperm(B * pages + 2, generator=g)[: B * pages].reshape(B, pages)
        arguments["block_table"] = table.to(**int32)
        entries, size, room = B * pages + 2, p.place, pages * p.place
        places = [[(int(table[b, i // size]), i % size) for i in range(room)] for b in range(B)]
    else:
        where = torch.randperm(B + 2, generator=g)[:B] if p.place == "index" else torch.arange(B)
        entries, size = B + 2 * (p.place != "own"), room
        places = [[(int(where[b]), i) for i in range(room)] for b in range(B)]
        if p.place == "index":
            arguments["cache_batch_idx"] = where.to(**int32)
    arguments |= {"q": random(B, p.queries, p.Hkv * p.group, p.D)}
    arguments |= {name: random(entries, size, p.Hkv, p.D) for name in ("k_cache", "v_cache")}
    if p.new >= 0:
        arguments |= {name: random(B, p.new, p.Hkv, p.D) for name in ("k", "v")}
    if p.rope_dim:
        angles = torch.rand(room + p.queries, p.rope_dim // 2, generator=g) * 6  # queries go on from the length, without new keys, too
        arguments |= {"rotary_cos": angles.cos().to(device, p.dtype), "rotary_sin": angles.sin().to(device, p.dtype)}
        arguments["rotary_interleaved"] = p.interleaved
    if p.leftpad:
        arguments["cache_leftpad"] = torch.tensor([min(n, 1 + b) for b, n in enumerate(p.lengths)], **int32)
        if p.number:
            arguments["cache_leftpad"].clamp_(max=p.lengths[0])
    return arguments, places


def turn(p: Problem, arguments: dict, x, position: int):
    """x (H, D) turned by the angles of a position, as it is written: in the call's dtype."""
    if not p.rope_dim:
        return x
    table = torch.stack((arguments["rotary_cos"], arguments["rotary_sin"]), -1)
    return turned(x, position, table, p.interleaved)


def check(p: Problem, device: str) -> None:
    arguments, places = make(p, device)
    caches = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with mock.patch.dict(kvcache.COPIED_FROM, {device: 1} if p.copied else {}):
        out, lse = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    q, new = arguments["q"], max(p.new, 0)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == (*q.shape[:1], q.shape[2], q.shape[1])
    expected = [c.double() for c in caches]
    limited = p.meaning.causal or p.meaning.window != (-1, -1)
    lengths = [p.lengths[0]] * len(p.lengths) if p.number else p.lengths
    for b, n in enumerate(lengths):
        for i in range(new):
            entry, row = places[b][n + i]
            expected[0][entry, row] = turn(p, arguments, arguments["k"][b, i], n + i)
            expected[1][entry, row] = arguments["v"][b, i]
    eps = torch.finfo(p.dtype).eps
    for name, want in zip(("k_cache", "v_cache"), expected, strict=True):
        assert ((arguments[name].double() - want).abs() <= 4 * eps * (1 + want.abs())).all(), name
    for b, n in enumerate(lengths):
        rows = tuple(zip(*places[b][: n + new], strict=True)) if n + new else ([], [])
        k, v = (cache[list(rows[0]), list(rows[1])] for cache in (arguments["k_cache"], arguments["v_cache"]))
        turned_q = torch.stack([turn(p, arguments, q[b, i], n + i * limited) for i in range(p.queries)])
        slopes = slopes_at(arguments["alibi_slopes"], b)
        leftpad = int(arguments["cache_leftpad"][b]) if p.leftpad else 0
        exact, exact_lse = sequence_attention(turned_q, k, v, p.meaning, slopes, leftpad)
        plain, _ = sequence_attention(turned_q.to(p.dtype), k, v, p.meaning, slopes, leftpad, precision=p.dtype)
        assert relative_error(out[b], exact) <= max(2 * relative_error(plain, exact), FLOORS[p.dtype])
        assert torch.equal(lse[b] == -math.inf, exact_lse == -math.inf)
        tolerance = 1e-5 if p.dtype == torch.float32 else 5e-2
        torch.testing.assert_close(lse[b].double(), exact_lse, rtol=tolerance, atol=tolerance)


@for_any(problems, cpu=25, cuda=200)
def test_any_problem(p, device):
    check(p, device)


COMMON = dict(
    dtype=torch.float32, lengths=[4, 0, 9], queries=3, new=3, Hkv=1, group=2, D=16, place="own", rope_dim=0, interleaved=True,
    leftpad=False, number=False, meaning=Meaning(causal=True), seed=5,
)  # fmt: skip
CORNERS = {
    "append": {},
    "more queries than keys": dict(queries=6, lengths=[4, 0, 1], new=-1),
    "more queries than keys, in pages": dict(queries=6, lengths=[4, 0, 1], new=1, place=4),
    "a number for all": dict(number=True, place="spare"),
    "entries": dict(place="index", leftpad=True),
    "pages and left padding": dict(place=4, leftpad=True, meaning=Meaning(window=(2, -1))),
    "all queries at one position": dict(rope_dim=8, meaning=Meaning()),
    "each query at its own": dict(rope_dim=8, interleaved=False, meaning=Meaning(window=(-1, 1))),
    "entries, copied": dict(place="index", leftpad=True, copied=True),
    "pages and left padding, copied": dict(place=4, leftpad=True, copied=True, meaning=Meaning(window=(2, -1))),
    "fewer queries than new keys": dict(rope_dim=16, queries=2, leftpad=True),
    "more queries than new keys": dict(rope_dim=16, queries=2, new=1),
    "one query": dict(queries=1, new=1, rope_dim=16, meaning=Meaning(window=(3, 0), slopes=2)),
    "no new keys": dict(new=0, rope_dim=8),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CORNERS)
def test_corners(name, device):
    check(Problem(**{**COMMON, **CORNERS[name]}), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("place", ["own", "index", 4])
@pytest.mark.parametrize("copied", [False, True])
def test_what_the_padding_holds_is_not_read(copied, place, heads_first, queries, device, monkeypatch):
    """A cache that was never written may hold NaN there: 0 times NaN would be NaN."""
    monkeypatch.setitem(kvcache.COPIED_FROM, device, 1 if copied else sys.maxsize)
    lengths, padding = [9, 30, 5], [4, 17, 5]
    p = Problem(**{**COMMON, "lengths": lengths, "queries": queries, "new": queries, "place": place, "leftpad": True, "rope_dim": 8})
    arguments, places = make(p, device)
    arguments["cache_leftpad"] = torch.tensor(padding, dtype=torch.int32, device=device)
    if heads_first:
        for name in ("k_cache", "v_cache"):
            arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    expected = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    for b, count in enumerate(padding):
        for entry, row in places[b][:count]:
            arguments["k_cache"][entry, row] = arguments["v_cache"][entry, row] = math.nan
    found = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(found, expected, strict=True))


def test_padding_of_one_entry_and_of_entries_that_share_memory():
    """Strides of a dimension of one mean nothing; entries may be one and the same."""
    q, caches = torch.randn(3, 2, 4, 16), [torch.randn(1, 8, 2, 16) for _ in range(2)]
    padding, lengths = int32(0, 3, 8), int32(8, 7, 8)
    whole = dict(cache_seqlens=lengths, cache_leftpad=padding, causal=True)
    found = flash_attn_with_kvcache(q, *(c.expand(3, -1, -1, -1) for c in caches), **whole)
    for b in range(2):
        one = dict(cache_seqlens=lengths[b : b + 1], cache_leftpad=padding[b : b + 1], causal=True)
        caches[1] = caches[1].as_strided(caches[1].shape, (7, *caches[1].stride()[1:]))
        assert torch.allclose(found[b : b + 1], flash_attn_with_kvcache(q[b : b + 1], *caches, **one), atol=1e-6)
    assert (found[2] == 0).all()  # all of it is padding


def test_padding_of_caches_with_other_layouts_is_refused():
    wide = torch.zeros(3, 8, 2, 32)[:, :, :, :16]
    q, lengths = torch.zeros(3, 1, 4, 16), int32(4, 4, 4)
    for k_cache, v_cache in ((wide, torch.zeros(3, 8, 2, 16)), (torch.zeros(3, 8, 2, 16), torch.zeros(3, 2, 8, 16).transpose(1, 2))):
        call = dict(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=lengths, cache_leftpad=int32(0, 1, 2))
        if k_cache is wide:
            assert flash_attn_with_kvcache(**call).isfinite().all()  # rows are longer, but follow one another alike
        else:
            with pytest.raises(ValueError, match=r"lie alike in memory, got strides \(256, 32, 16, 1\) and \(256, 16, 128, 1\)"):
                flash_attn_with_kvcache(**call)


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_without_lengths_is_full(device):
    q, *caches = (torch.randn(2, n, 2, 16, device=device) for n in (3, 8, 8))
    full = torch.full((2,), 8, dtype=torch.int32, device=device)
    assert torch.equal(flash_attn_with_kvcache(q, *caches), flash_attn_with_kvcache(q, *caches, cache_seqlens=full))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", ["own", 16])
def test_one_query_takes_the_kernel_of_a_plain_decoding_step(place, device):
    """No mask and no block lists, causal or not; with another length nothing is compiled."""
    lengths = [20, 7, 33]
    for causal in (False, True):
        p = Problem(**{**COMMON, "lengths": lengths, "queries": 1, "new": -1, "place": place, "meaning": Meaning(causal=causal)})
        arguments, _ = make(p, device)
        q, caches = arguments["q"].transpose(1, 2), (arguments["k_cache"], arguments["v_cache"])
        want = cached_attention(q, *caches, arguments["cache_seqlens"], page_table=arguments.get("block_table"))
        before = cache_info()
        assert torch.equal(flash_attn_with_kvcache(**arguments), want.transpose(1, 2))
        arguments["cache_seqlens"] = arguments["cache_seqlens"] + 1
        flash_attn_with_kvcache(**arguments)
        after = cache_info()
        assert (after.traces, after.prints, after.compiles) == (before.traces, before.prints, before.compiles)
        assert after.hits == before.hits + 2  # a mask's block lists would be another kernel


@pytest.mark.parametrize("device", DEVICES)
def test_other_windows_slopes_lengths_and_padding_compile_nothing(device):
    def made_by(lengths, window, softcap, seed):
        before = cache_info()
        meaning = Meaning(window=window, softcap=softcap, slopes=2)
        p = Problem(**{**COMMON, "lengths": lengths, "rope_dim": 8, "place": 4, "leftpad": True, "meaning": meaning, "seed": seed})
        flash_attn_with_kvcache(**make(p, device)[0])
        after = cache_info()
        return after.traces - before.traces, after.prints - before.prints, after.compiles - before.compiles

    made_by([4, 0, 9], (3, 1), 2.0, 0)
    assert made_by([14, 3, 1], (7, 0), 5.0, 1) == (0, 0, 0)
    assert made_by([2, 21, 30], (0, 9), 7.0, 2) == (0, 0, 0)


PACKED = {  # (queries, keys) of each sequence, the page size, the head dim and the dtype; long ones have another kernel on Hopper
    "cpu": [([3, 0, 5, 1, 2], [9, 4, 2, 13, 0], 4, 16, torch.float32)],
    "cuda": [
        ([3, 0, 5, 1, 2], [9, 4, 2, 13, 0], 4, 64, torch.bfloat16),
        ([700, 0, 600, 900], [1100, 70, 100, 0], 64, 64, torch.bfloat16),
        ([1500, 800], [1500, 2000], 256, 128, torch.float16),
    ],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("meaning", [Meaning(), Meaning(causal=True), Meaning(window=(3, 1), slopes=2, softcap=2.0)], ids=str)
def test_packed_queries_on_pages(meaning, device):
    """Sequences without queries, without keys, and with more queries than keys among them."""
    for problem in PACKED[device]:
        check_packed(*problem, meaning, device)


def check_packed(counts, lengths, size, D, dtype, meaning, device) -> None:
    g = torch.Generator().manual_seed(1)
    int32, B = dict(dtype=torch.int32, device=device), len(counts)
    columns = -(-max(lengths) // size)
    q = torch.randn(sum(counts), 4, D, generator=g).to(device, dtype)
    pages = [torch.randn(B * columns + 2, size, 2, D, generator=g).to(device, dtype) for _ in range(2)]
    table = torch.randperm(B * columns + 2, generator=g)[: B * columns].reshape(B, columns).to(**int32)
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0)], **int32) for n in (counts, lengths))
    slopes = meaning.slopes_of(B, 4, device, g)
    more = dict(**meaning.arguments(slopes), block_table=table)
    out, lse, dropped = flash_attn_varlen_func(q, *pages, cu_q, cu_k, max(counts), max(lengths), **more, return_attn_probs=True)
    assert lse.shape == (4, sum(counts)) and dropped.shape == (0,)
    for b, (start, count, length) in enumerate(zip(cu_q.tolist(), counts, lengths, strict=False)):
        own = q[start : start + count], *(t[table[b].long()].flatten(0, 1)[:length] for t in pages), meaning, slopes_at(slopes, b)
        exact, exact_lse = sequence_attention(*own)
        plain, _ = sequence_attention(*own, precision=dtype)
        assert relative_error(out[start : start + count], exact) <= max(2 * relative_error(plain, exact), FLOORS[dtype])
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(lse[:, start : start + count].double(), exact_lse, rtol=tolerance, atol=tolerance)


Q, CACHE, NEW, COS = torch.zeros(2, 1, 4, 16), torch.zeros(3, 8, 2, 16), torch.zeros(2, 1, 2, 16), torch.ones(8, 4)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD = {
    "k alone": (dict(k=NEW, cache_seqlens=3), ValueError, "k and v go together, got k alone"),
    "no lengths": (dict(k=NEW, v=NEW), ValueError, "cache_seqlens says where k and v are to be written"),
    "long lengths": (dict(cache_seqlens=torch.tensor([1, 2])), ValueError, r"cache_seqlens must be torch.int32 \(2,\)"),
    "some lengths": (dict(cache_seqlens=int32(1)), ValueError, r"cache_seqlens must be torch.int32 \(2,\)"),
    "half a length": (dict(cache_seqlens=1.5), TypeError, "cache_seqlens must be an integer, got 1.5"),
    "no room": (dict(k=NEW, v=NEW, cache_seqlens=int32(2, 8)), ValueError, "sequence 1 has 8 positions in the cache and 1 new ones"),
    "new heads": (dict(k=NEW[:, :, :1], v=NEW, cache_seqlens=1), ValueError, r"k must be torch.float32 \(2, 1, 2, 16\)"),
    "new dtype": (dict(k=NEW, v=NEW.half(), cache_seqlens=1), ValueError, r"v must be torch.float32 \(2, 1, 2, 16\)"),
    "entries": (dict(cache_batch_idx=int32(0, 3)), ValueError, "cache_batch_idx names entries from 0 to 3; the cache has entries 0 to 2"),
    "pages": (dict(block_table=int32(0, 1, 3, 1).view(2, 2)), ValueError, r"block_table\[1\] names pages from 1 to 3"),
    "both": (dict(cache_batch_idx=int32(0, 1), block_table=int32(0, 1).view(2, 1)), ValueError, "exclude each other"),
    "leftpad": (dict(cache_leftpad=3), TypeError, r"cache_leftpad must be torch.int32 \(2,\)"),
    "negative padding": (
        dict(cache_leftpad=int32(0, -1)),
        ValueError,
        "cache_leftpad names positions from -1 to 0; the cache has positions",
    ),
    "padding beyond the room": (dict(cache_leftpad=int32(0, 9)), ValueError, "cache_leftpad names positions from 0 to 9"),
    "padding beyond a sequence": (
        dict(cache_seqlens=int32(3, 4), cache_leftpad=int32(3, 5)),
        ValueError,
        r"cache_leftpad\[1\] is 5, but sequence 1 has 4 positions in the cache, padding included",
    ),
    "rotary alone": (dict(rotary_cos=COS, rotary_sin=COS), ValueError, "rotary_cos and rotary_sin are for new keys"),
    "half a rotary": (dict(rotary_cos=COS, k=NEW, v=NEW, cache_seqlens=1), TypeError, "rotary_sin must be a tensor"),
    "a short rotary": (dict(rotary_cos=COS[1:], rotary_sin=COS[1:], k=NEW, v=NEW, cache_seqlens=1), ValueError, "7 positions; a sequence"),
    "a wide rotary": (dict(rotary_cos=torch.ones(8, 9), rotary_sin=torch.ones(8, 9), k=NEW, v=NEW, cache_seqlens=1), ValueError, "18 dim"),
    "splits": (dict(num_splits=-1), ValueError, "num_splits is -1"),
    "a window": (dict(window_size=None), TypeError, "window_size must be a pair"),
    "slopes": (dict(alibi_slopes=torch.ones(2, 2)), ValueError, r"alibi_slopes must have shape \(4,\) or \(2, 4\)"),
    "gradients": (dict(q=Q.clone().requires_grad_()), NotImplementedError, "q requires grad, but flash_attn_with_kvcache is not diff"),
    "a huge length": (dict(cache_seqlens=2**31), ValueError, "cache_seqlens is 2147483648, but a sequence in the cache has room for 8"),
    "query heads": (dict(q=Q[:, :, :3]), ValueError, r"q's number of heads must be a multiple of k_cache's, got q \(2, \d, 3, 16\)"),
    "another head dim": (dict(q=Q[..., :8]), ValueError, r"q and k_cache must have the same head dim, got q \(2, \d, 4, 8\)"),
    "queries of float64": (dict(q=Q.double()), TypeError, "q must be float16, bfloat16 or float32, or float8_e4m3fn as k_cache"),
    "queries of float8": (dict(q=Q.to(torch.float8_e4m3fn)), TypeError, "q must be float16.* got torch.float8_e4m3fn and torch.float32"),
    "another cache": (
        dict(v_cache=CACHE[:, :5]),
        ValueError,
        r"k_cache \(.*\) and v_cache \(.*\) must be alike in all extents but the last",
    ),
    "a cache of halves": (dict(v_cache=CACHE.half()), TypeError, "k_cache and v_cache must have the same dtype"),
    "a scale that is none": (dict(softmax_scale=math.nan), ValueError, "scale must be finite in float32, got nan"),
    "a huge scale": (dict(softmax_scale=math.inf), ValueError, "scale must be finite in float32, got inf"),
    "words for a scale": (dict(softmax_scale="1"), TypeError, "scale must be a number, got str"),
    "two scales": (
        dict(softmax_scale=torch.ones(2)),
        ValueError,
        r"scale must be a number, got a tensor of torch.float32 and shape \(2,\)",
    ),
    "a learned scale": (dict(softmax_scale=torch.ones(1).requires_grad_()), NotImplementedError, "scale requires grad"),
    "a cap that is none": (dict(softcap=math.nan), ValueError, "cap must be finite and above 0 in float32, got nan"),
    "a huge cap": (dict(softcap=math.inf), ValueError, "cap must be finite and above 0 in float32, got inf"),
    "words for a cap": (dict(softcap="1"), TypeError, "softcap must be a number"),
    "sinks of other heads": (dict(sinks=torch.ones(2)), ValueError, r"sinks must have shape \(4,\)"),
    "sinks of integers": (dict(sinks=torch.ones(4).int()), TypeError, "sinks must be float16, bfloat16 or float32"),
    "a number for sinks": (dict(sinks=1.0), TypeError, "sinks must be a tensor of shape"),
    "sparse sinks": (dict(sinks=torch.ones(4).to_sparse()), NotImplementedError, "sinks is a sparse tensor"),
    "learned sinks": (dict(sinks=torch.ones(4).requires_grad_()), NotImplementedError, "sinks requires grad"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument_before_anything_is_written(case):
    arguments, error, words = BAD[case]
    caches = CACHE.clone().fill_(1.0), CACHE.clone().fill_(1.0)
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(**{"q": Q, "k_cache": caches[0], "v_cache": caches[1], **arguments})
    assert all((c == 1).all() for c in caches)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_bad_arguments_leave_the_caches_as_they_were(paged, turns):
    """Each of them beside new keys and values. Without it the caches are written."""
    place = {"block_table": int32(0, 2).view(2, 1)} if paged else {}
    rotary = dict(rotary_cos=COS, rotary_sin=COS) if turns else {}
    for name, (arguments, error, _) in {**BAD, "none": ({}, None, "")}.items():
        given = {"q": Q, "k": NEW, "v": NEW, "cache_seqlens": int32(3, 4), **place, **rotary, **arguments}
        if name in ("k alone", "no lengths", "rotary alone", "half a rotary"):  # right beside these
            continue
        caches = CACHE.clone().fill_(1.0), CACHE.clone().fill_(1.0)
        if error is None:
            flash_attn_with_kvcache(k_cache=caches[0], v_cache=caches[1], **given)
            assert all((c == 0).any() for c in caches)
            continue
        with pytest.raises((error, ValueError)):
            flash_attn_with_kvcache(**{"k_cache": caches[0], "v_cache": caches[1], **given})
        assert all((c == 1).all() for c in caches), name


@pytest.mark.parametrize("kinds", [(torch.float8_e4m3fn, torch.float32), (torch.bfloat16, torch.float8_e4m3fn)])
def test_tables_of_two_dtypes_turn_as_their_numbers_do(kinds):
    cos, sin = (torch.rand(8, 4, generator=torch.Generator().manual_seed(0)).to(kind) for kind in kinds)
    caches = [[CACHE[:2].clone(), CACHE[:2].clone()] for _ in range(2)]
    given = dict(q=Q + 1, k=NEW + 1, v=NEW + 1, cache_seqlens=int32(3, 4))
    found = flash_attn_with_kvcache(k_cache=caches[0][0], v_cache=caches[0][1], rotary_cos=cos, rotary_sin=sin, **given)
    right = flash_attn_with_kvcache(k_cache=caches[1][0], v_cache=caches[1][1], rotary_cos=cos.float(), rotary_sin=sin.float(), **given)
    assert torch.equal(found, right) and torch.equal(caches[0][0], caches[1][0])


def test_two_sequences_may_not_write_to_one_place():
    caches = CACHE.clone(), CACHE.clone()
    given = dict(q=Q, k_cache=caches[0], v_cache=caches[1])
    one, page = dict(cache_batch_idx=int32(1, 1)), dict(block_table=int32(1, 1).view(2, 1))
    for where, words in ((one, r"entry 1 \(cache_batch_idx\)"), (page, r"page 1 \(block_table\)")):
        with pytest.raises(ValueError, match=f"sequences 0 and 1 both write to {words}, rows 3 to 3; give each its own"):
            flash_attn_with_kvcache(k=NEW + 1, v=NEW + 1, cache_seqlens=int32(3, 3), **where, **given)
        assert not any(cache.any() for cache in caches)
        flash_attn_with_kvcache(cache_seqlens=int32(3, 3), **where, **given)  # they may read it
        flash_attn_with_kvcache(k=NEW, v=NEW, cache_seqlens=int32(3, 4), **where, **given)  # and write to rows of their own


def test_errors_of_packed_queries_on_pages():
    q, pages, cu, table = torch.zeros(4, 2, 16), torch.zeros(3, 4, 2, 16), int32(0, 3, 4), int32(0, 1).view(2, 1)

    def call(q=q, k=pages, cu_k=cu, longest=3, block_table=table, **more):
        return flash_attn_varlen_func(q, k, pages, cu, cu_k, longest, 3, block_table=block_table, **more)

    assert torch.equal(call(longest=torch.tensor(3)), call())  # as (cu[1:] - cu[:-1]).max() gives it
    for words, arguments in {
        "max_seqlen_q is 2, but a sequence has more queries": dict(longest=2),
        "block_table must be": dict(block_table=table[:1]),
        r"block_table\[1\] names pages from 7": dict(block_table=table * 7),
        "cu_seqlens_k must be": dict(cu_k=cu.long()),
        "room for 4": dict(cu_k=cu * 2),
        r"k must be \(pages, page size, Hkv, D\)": dict(k=pages[0]),
        r"q's number of heads must be a multiple of k's, got q \(4, 3, 16\) and k \(3, 4, 2, 16\)": dict(q=torch.zeros(4, 3, 16)),
        "q and k must have the same head dim": dict(q=q[..., :8]),
        "k and v must have the same dtype": dict(k=pages.half()),
        "q must be float16, bfloat16 or float32": dict(q=q.double()),
    }.items():
        with pytest.raises((ValueError, TypeError), match=words):
            call(**arguments)
    with pytest.raises(NotImplementedError, match="k requires grad, but flash_attn_varlen_func with a block_table is not differentiable"):
        call(k=pages.clone().requires_grad_())


@pytest.mark.parametrize("device", DEVICES)
def test_queries_of_float8(device):
    """They are computed with in the output's dtype, as in cached_attention."""
    generator = torch.Generator().manual_seed(0)
    q, cache = (torch.randn(shape, generator=generator).to(torch.float8_e4m3fn).to(device) for shape in ((2, 3, 4, 16), (2, 20, 2, 16)))
    lengths = torch.tensor([9, 20], dtype=torch.int32, device=device)
    out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, cached_attention(q.transpose(1, 2), cache, cache, lengths).transpose(1, 2))


def test_pages_take_no_dropout():
    """They would be attended to without it."""
    q, pages = torch.zeros(3, 2, 16), torch.zeros(2, 8, 2, 16)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    call = lambda p: flash_attn_varlen_func(q, pages, pages, cu, cu, 3, 3, p, block_table=torch.zeros(1, 1, dtype=torch.int32))  # noqa: E731
    assert not call(0.0).any()
    with pytest.raises(NotImplementedError, match="dropout_p is 0.1; there is no dropout in this attention"):
        call(0.1)
