"""Exported files for caches: they run without flexpress, and compute what cached_attention computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexpress import cached_attention, export_cached
from flexpress.mods import alibi, alibi_slopes, sliding_window, softcap
from support.dense import relative_error
from support.devices import DEVICES
from support.exported import cache, first_positions, load, ragged, run_alone, some_sinks


def assert_as_library(
    module, arguments, table, *, scale=None, tolerance=None, mods=(None, None), captured=None, most=None, tokens=None, **places
):
    """Output and lse of a file beside cached_attention and beside dense attention in float64. most: max_q_len; tokens: those of sequences,
    of ragged queries."""
    named = {**places, **({} if table is None else {"page_table": table})}
    own = {} if scale is None else {"scale": scale}
    captured = captured or {}
    of_queries = {} if most is None else {"max_q_len": most}
    out, lse = module.attention(*arguments, **named, **captured, **own, **of_queries, return_lse=True)
    own_mods = {"score_mod": mods[0], "mask_mod": mods[1]}
    library, library_lse = cached_attention(*arguments, **named, **own_mods, scale=scale, **of_queries, return_lse=True)
    exact = module.reference(*arguments, **named, **captured, **own)
    allowed = tolerance or {torch.float32: 2e-6, torch.bfloat16: 1e-2}[out.dtype]
    assert relative_error(out, library) <= allowed and relative_error(out, exact) <= allowed
    assert tokens is None or (lse[tokens:] == -torch.inf).all()
    assert relative_error(lse.exp(), library_lse.exp()) <= 10 * allowed  # -inf for none
    assert out.stride() == library.stride()


@pytest.mark.parametrize("device", DEVICES)
def test_paged_decode(tmp_path: Path, device):
    q, k, v, kv_len, table = cache(device, D_V=48)
    slopes, path = alibi_slopes(8, device), tmp_path / "paged.py"
    export_cached(q, k, v, kv_len, page_table=table, score_mod=alibi(slopes), path=path)
    module = load(path)
    for Z, Hkv, pages in ((3, 2, 24), (1, 1, 40), (5, 3, 3)):
        q, k, v, kv_len, table = cache(device, Z=Z, Hq=4 * Hkv, Hkv=Hkv, pages=pages, D_V=48)
        slopes = alibi_slopes(4 * Hkv, device)
        kv_len[0] = 0  # nothing to attend to
        captured = {"slopes": slopes}
        assert_as_library(module, (q, k, v, kv_len), table, mods=(alibi(slopes), None), captured=captured, scale=0.2)
    assert "error" in run_alone(path)


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_over_several_queries(tmp_path, device):
    q, k, v, kv_len, table = cache(device, Q_LEN=3)
    path = tmp_path / "windowed.py"
    export_cached(q, k, v, kv_len, page_table=table, mask_mod=sliding_window(64), path=path)
    module = load(path)
    for Q_LEN, window in ((5, 9), (1, 100)):
        q, k, v, kv_len, table = cache(device, Q_LEN=Q_LEN)
        assert_as_library(module, (q, k, v, kv_len), table, mods=(None, sliding_window(window)), captured={"window": window})
    assert "error" in run_alone(path)


@pytest.mark.parametrize("device", DEVICES)
def test_entries_of_a_contiguous_cache_in_eight_bits(tmp_path, device):
    q, k, v, kv_len, _ = cache(device, Q_LEN=2, S=300, pages=0, N=6)
    k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    k_scale, v_scale = torch.rand(2, 2, device=device) + 0.5
    where = {"cache_loc": torch.tensor([4, 0, 2], dtype=torch.int32, device=device), "k_scale": k_scale, "v_scale": v_scale}
    path = tmp_path / "entries.py"
    export_cached(q, k, v, kv_len, score_mod=softcap(20.0), **where, path=path)
    assert_as_library(load(path), (q, k, v, kv_len), None, mods=(softcap(20.0), None), tolerance=1e-3 if device == "cpu" else 2e-2, **where)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length, positioned", [(1, False), (3, True)])
def test_positions_of_queries_and_sinks(tmp_path, length, positioned, device):
    """Where keys are split, and where they are not; a sequence of which the cache holds nothing has its sinks alone."""

    def given(kv_len, q_len, heads):
        of_positions = {"q_offset": first_positions(kv_len, q_len)} if positioned else {}
        return {"sinks": some_sinks(heads, torch.float16, device), **of_positions}

    q, k, v, kv_len, table = cache(device, Q_LEN=length)
    path = tmp_path / "sinks.py"
    export_cached(q, k, v, kv_len, page_table=table, score_mod=softcap(20.0), path=path, **given(kv_len, length, 8))
    module = load(path)
    for Z, Hkv, q_len, pages in ((3, 2, length, 24), (2, 1, 5 if positioned else 1, 150), (5, 3, 1, 3)):
        q, k, v, kv_len, table = cache(device, Z=Z, Hq=4 * Hkv, Hkv=Hkv, Q_LEN=q_len, pages=pages)
        kv_len[0] = 0
        assert_as_library(module, (q, k, v, kv_len), table, mods=(softcap(20.0), None), **given(kv_len, q_len, 4 * Hkv))
    if positioned:
        assert "error" in run_alone(path)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("positioned", [False, True])
def test_ragged_queries(tmp_path, positioned, device):
    """Where keys are split, and where they are not, of several tiles a sequence; a sequence without queries, and tokens of none."""

    def given(Z, Hkv, counts, pages, after=0):
        q, k, v, kv_len, table = cache(device, Z=Z, Hq=4 * Hkv, Hkv=Hkv, Q_LEN=max(counts), pages=pages)
        q, starts = ragged(q, counts, after)
        more = {"q_offset": first_positions(kv_len, max(counts)), "sinks": some_sinks(4 * Hkv, torch.float16, device)} if positioned else {}
        return (q, k, v, kv_len), table, {"cu_seqlens_q": starts, **more}

    arguments, table, more = given(3, 2, [2, 5, 1], 24)
    path = tmp_path / "ragged.py"
    export_cached(*arguments, page_table=table, **more, max_q_len=5, score_mod=softcap(20.0), path=path)
    module = load(path)
    for Z, Hkv, counts, pages in ((3, 2, [3, 0, 1], 150), (1, 1, [40], 24), (5, 3, [1, 19, 4, 0, 2], 3)):
        arguments, table, more = given(Z, Hkv, counts, pages, after=2)
        arguments[3][-1] = 16 * pages - 5  # keys
        assert_as_library(module, arguments, table, mods=(softcap(20.0), None), most=max(counts), tokens=sum(counts), **more)
    if positioned:
        assert "error" in run_alone(path)


def test_errors(tmp_path):
    q, k, v, kv_len, table = cache("cpu")
    sinks, path = some_sinks(8, torch.float32), tmp_path / "sinks.py"
    export_cached(q, k, v, kv_len, page_table=table, q_offset=kv_len - 1, sinks=sinks, path=path)
    attention = load(path).attention
    for error, message, arguments in (
        (ValueError, "q_offset must be torch.int32", (kv_len.long(), sinks)),
        (ValueError, "q_offset must be torch.int32", (kv_len[:2], sinks)),
        (ValueError, "sinks must be torch.float32", (kv_len, sinks.half())),
        (ValueError, "sinks must be torch.float32 .*contiguous", (kv_len, sinks.repeat(2)[::2])),
        (ValueError, "sinks must be torch.float32", (kv_len, sinks[:4])),
        (NotImplementedError, "sinks requires grad", (kv_len, sinks.clone().requires_grad_())),
    ):
        with pytest.raises(error, match=message):
            attention(q, k, v, kv_len, table, *arguments)
    with pytest.raises(ValueError, match="sinks must have shape"):
        export_cached(q, k, v, kv_len, page_table=table, sinks=sinks[:4])
    with pytest.raises(ValueError, match="q_offset"):
        export_cached(q, k, v, kv_len, page_table=table, q_offset=kv_len[:2])
    path = tmp_path / "paged.py"
    export_cached(q, k, v, kv_len, page_table=table, path=path)
    attention = load(path).attention
    for error, message, arguments in (
        (TypeError, "query has dtype torch.float64", (q.double(), k, v, kv_len, table)),
        (ValueError, "pages have 8 positions", (q, k[:, :8], v[:, :8], kv_len, table)),
        (ValueError, "query has 3 positions", (q.expand(-1, -1, 3, -1), k, v, kv_len, table)),
        (ValueError, "query has 4 heads and the cache 2", (q[:, :4], k, v, kv_len, table)),
        (ValueError, "kv_len must be torch.int32", (q, k, v, kv_len.long(), table)),
        (ValueError, "page_table must be torch.int32", (q, k, v, kv_len, table[:2])),
        (NotImplementedError, "no backward pass", (q.clone().requires_grad_(), k, v, kv_len, table)),
    ):
        with pytest.raises(error, match=message):
            attention(*arguments)
    with pytest.raises(ValueError, match=r"query must be \(B, H, Q_LEN, D\)"):
        export_cached(q[0], k, v, kv_len, page_table=table)
    tokens, starts = ragged(q.expand(-1, -1, 3, -1), [1, 0, 3])
    path = tmp_path / "ragged.py"
    export_cached(tokens, k, v, kv_len, page_table=table, cu_seqlens_q=starts, path=path)
    attention = load(path).attention
    for message, arguments, most in (
        ("query must be a tensor of 3 dimensions", (q, k, v, kv_len, table, starts), None),
        ("cu_seqlens_q must be torch.int32", (tokens, k, v, kv_len, table, starts[1:]), None),
        ("cu_seqlens_q must be torch.int32", (tokens, k, v, kv_len, table, starts.long()), None),
        ("kv_len must be torch.int32", (tokens, k, v, kv_len[0], table, starts), None),
        ("max_q_len must be a whole number from 0 to the 4 tokens", (tokens, k, v, kv_len, table, starts), 5),
        ("max_q_len must be a whole number", (tokens, k, v, kv_len, table, starts), 2.0),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*arguments, max_q_len=most)
    with pytest.raises(ValueError, match=r"page_table or cache_loc, not both; pass page_table\[cache_loc\]"):
        export_cached(q, k, v, kv_len, page_table=table, cache_loc=torch.zeros_like(kv_len))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export_cached(q, k, v, kv_len, page_table=table, path=path)
