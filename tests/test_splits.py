"""Attention to a cache in parts: each against dense attention to its keys, and all merged against attention to the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from flexpress import ModError, cached_attention, merge_attention, mods, split_attention
from support.batches import batches, made, mask_mods, score_mods, shifted
from support.dense import dense_attention, relative_error
from support.devices import DEVICES, for_any


@st.composite
def problems(draw, device):
    p = draw(batches(device).filter(lambda p: not p.ragged and p.q_lens[0]))
    return p, draw(st.integers(1, 5))


@for_any(problems, cpu=12, cuda=60)
def test_any_parts(problem, device):
    p, splits = problem
    arguments, sequences = made(p, device)
    invariant = arguments.pop("batch_invariant")
    mod = {"score_mod": score_mods(device)[p.score], "mask_mod": mask_mods()[p.mask]}
    outs, lses = split_attention(**arguments, splits=splits, **mod)
    assert outs.shape[:2] == lses.shape[:2] == (splits, len(sequences)) and outs.dtype == p.dtype
    for b, (q, k, v) in enumerate(sequences):
        n, offset = k.shape[2], k.shape[2] - q.shape[2]
        share = -(-n // splits)
        score_mod, mask_mod = shifted(mod["score_mod"], b, offset), shifted(mod["mask_mod"] or mods.causal, b, offset)
        for part, (out, lse) in enumerate(zip(outs[:, b], lses[:, b], strict=True)):

            def mine(b, h, m, n, mask_mod=mask_mod, begin=share * part, end=share * (part + 1)):
                return mask_mod(b, h, m, n) & (n >= begin) & (n < end)

            exact, exact_lse, _ = dense_attention(q, k, v, score_mod, mine)
            plain = dense_attention(q, k, v, score_mod, mine, precision=p.dtype)[0]
            assert relative_error(out[None], exact) <= 1.2 * relative_error(plain, exact) + 1e-6
            assert torch.equal(lse.isneginf(), exact_lse[0].isneginf())
    whole = cached_attention(**arguments, **mod, batch_invariant=invariant)
    eps = torch.finfo(p.dtype).eps
    assert relative_error(merge_attention(outs, lses)[0], whole) <= 4 * eps


@pytest.mark.parametrize("device", DEVICES)
def test_inside_a_graph_that_is_compiled(device):
    q, cache, bias = (torch.randn(shape, device=device) for shape in ((2, 2, 3, 16), (2, 40, 1, 16), (40,)))
    kv_len = torch.tensor([9, 40], dtype=torch.int32, device=device)

    def run(q):
        outs, lses = split_attention(
            q * 2, cache, cache, kv_len, 3, score_mod=lambda s, b, h, m, n: s + bias[n], mask_mod=lambda b, h, m, n: n < m
        )
        return merge_attention(outs, lses)

    for found, want in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(q), run(q), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("device", DEVICES)
def test_absent_sequences_and_more_parts_than_keys(device):
    q, cache = torch.randn(2, 2, 1, 16, device=device), torch.randn(2, 8, 1, 16, device=device)
    kv_len = torch.tensor([0, 2], dtype=torch.int32, device=device)
    outs, lses = split_attention(q, cache, cache, kv_len, 5)
    assert not outs[:, 0].any() and lses[:, 0].isneginf().all()
    assert torch.equal(outs[:2, 1, 0, 0], cache[1, :2, 0]) and not outs[2:].any() and lses[2:].isneginf().all()


Q, CACHE, KV_LEN = torch.zeros(2, 4, 1, 16), torch.zeros(2, 8, 2, 16), torch.tensor([3, 4], dtype=torch.int32)
BAD = {
    "no splits": (dict(splits=0), ValueError, "splits is 0; it must be at least 1"),
    "splits that are no integer": (dict(splits=2.0), TypeError, "splits must be an integer, got 2.0"),
    "more splits than memory holds": (dict(splits=1 << 63), ValueError, "splits is 9223372036854775808; it must be at most 65536"),
    "a mod of other arguments": (dict(mask_mod=lambda q, k: q > k), ModError, "does not take 4 positional arguments"),
    "no mod": (dict(score_mod=False), TypeError, "score_mod must be a function, got bool"),
    "ragged queries": (dict(query=Q[:, :, 0]), ValueError, r"query must be \(B, H, Q_LEN, D\), got torch.float32 \(2, 4, 16\)"),
    "lengths": (dict(kv_len=KV_LEN[:1]), ValueError, r"kv_len must be torch.int32 \(2,\) on cpu, got torch.int32 \(1,\)"),
    "more entries than sequences": (
        dict(k_cache=CACHE.repeat(2, 1, 1, 1), v_cache=CACHE.repeat(2, 1, 1, 1)),
        ValueError,
        "4 entries for 2 sequences; say with cache_loc or page_table",
    ),
    "entries": (dict(cache_loc=KV_LEN[:1]), ValueError, r"cache_loc must be torch.int32 \(2,\)"),
    "first positions": (dict(q_offset=KV_LEN.long()), ValueError, r"q_offset must be torch.int32 \(2,\)"),
    "a flat page table": (dict(page_table=KV_LEN), ValueError, r"page_table must be torch.int32 \(2, n\)"),
    "rows of pages": (dict(page_table=KV_LEN[:1, None]), ValueError, r"page_table must be torch.int32 \(2, n\)"),
    "heads": (dict(query=Q[:, :3]), ValueError, "3 heads, no multiple of the 2 heads"),
    "a negative length": (dict(kv_len=KV_LEN - 9), ValueError, r"kv_len\[0\] is -6;"),
    "a later one": (dict(kv_len=torch.tensor([4, -1]).int()), ValueError, r"kv_len\[1\] is -1;"),
    "too long": (
        dict(kv_len=KV_LEN + 8),
        ValueError,
        "sequence 0 has 1 new tokens from position 10 on, and kv_len 11; positions go from 0 to 7",
    ),
    "a sequence that is too long": (
        dict(kv_len=KV_LEN * torch.tensor([1, 4]).int(), splits=5),
        ValueError,
        "sequence 1 has 1 new tokens from position 15 on, and kv_len 16; positions go from 0 to 7 in k_cache",
    ),
    "queries before the first position": (
        dict(q_offset=KV_LEN - 4),
        ValueError,
        "sequence 0 has 1 new tokens from position -1 on, and kv_len 3",
    ),
    "a page that is not there": (
        dict(page_table=torch.tensor([[0], [2]]).int(), splits=3),
        ValueError,
        r"page_table\[1\] names pages from 2 to 2; .* has pages 0 to 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    changes, error, message = BAD[case]
    arguments = {"query": Q, "k_cache": CACHE, "v_cache": CACHE, "kv_len": KV_LEN, "splits": 2} | changes
    with pytest.raises(error, match=message):
        split_attention(**arguments)
