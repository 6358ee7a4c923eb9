"""Exported files for caches with kernels in C++: they run without flexpress, and compute the library's bits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from flexpress import cached_attention, export_cached
from flexpress.mods import alibi, alibi_slopes, sliding_window, softcap
from support.dense import relative_error
from support.exported import cache, first_positions, imports_of, load, ragged, run_alone, some_sinks

pytestmark = pytest.mark.usefixtures("in_cpp")


def saved(tmp_path, *arguments, **options):
    """An exported file, and it as a module."""
    path = tmp_path / "cache_to_own.py"
    export_cached(*arguments, path=path, **options)
    return path, load(path)


def assert_same(module, arguments, *, mods=(None, None), captured=None, exact=2e-6, **named):
    """A file's output and lse are cached_attention's bits, laid out as those, and near dense attention in float64."""
    found = module.attention(*arguments, **named, **(captured or {}), return_lse=True)
    library = cached_attention(*arguments, **named, score_mod=mods[0], mask_mod=mods[1], return_lse=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, library, strict=True))
    assert found[0].stride() == library[0].stride()
    of_reference = {name: value for name, value in named.items() if name != "max_q_len"}
    assert relative_error(found[0], module.reference(*arguments, **of_reference, **(captured or {}))) < exact


def test_pages_and_one_query(tmp_path):
    """Of sequences of any lengths, of which one is not there, and pages that are not either; a head dim of the values that is another."""
    q, k, v, kv_len, table = cache("cpu", D_V=44)
    path, module = saved(tmp_path, q, k, v, kv_len, page_table=table, score_mod=alibi(alibi_slopes(8)), scale=0.2)
    for Z, Hkv, pages in ((3, 2, 24), (1, 1, 300), (5, 3, 3)):
        q, k, v, kv_len, table = cache("cpu", Z=Z, Hq=4 * Hkv, Hkv=Hkv, pages=pages, D_V=44)
        kv_len[Z // 2] = kv_len[Z // 2] - 1 if Z == 1 else 0
        slopes = alibi_slopes(4 * Hkv)
        assert_same(module, (q, k, v, kv_len), page_table=table, mods=(alibi(slopes), None), captured={"slopes": slopes}, scale=0.2)
    table[-1, 1] = -1  # which the library refuses, unless it is told not to look
    found = module.attention(q, k, v, kv_len, table, slopes=slopes)
    assert torch.equal(found, cached_attention(q, k, v, kv_len, page_table=table, score_mod=alibi(slopes), scale=0.2, check=False))
    assert "error" in run_alone(path)


def wider_by_head(window):
    """A window that each head has its own of."""

    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < window * (h + 1)) & (kv_idx <= q_idx)

    return mask


def test_a_window_over_many_queries(tmp_path):
    """A prompt, and single queries, of caches in any strides and queries as (Z, Q_LEN, Hq, D); each head has other lists."""
    q, k, v, kv_len, table = cache("cpu", Q_LEN=3, dtype=torch.bfloat16)
    _, module = saved(tmp_path, q, k, v, kv_len, page_table=table, mask_mod=wider_by_head(30))
    for Q_LEN, window, strided in ((200, 20, False), (1, 9, True), (5, 40, True)):
        q, k, v, kv_len, table = cache("cpu", Q_LEN=Q_LEN, dtype=torch.bfloat16)
        if strided:
            q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))
        named = {"page_table": table, "mods": (None, wider_by_head(window)), "captured": {"window": window}}
        assert_same(module, (q, k, v, kv_len), **named, exact=4e-3)


def test_entries_of_a_cache_in_eight_bits(tmp_path):
    q, k, v, kv_len, _ = cache("cpu", Q_LEN=2, S=300, pages=0, N=6, dtype=torch.float16)
    k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    k_scale, v_scale = torch.rand(2, 2) + 0.5
    where = {"cache_loc": torch.tensor([4, 0, 2], dtype=torch.int32), "k_scale": k_scale, "v_scale": v_scale}
    path, module = saved(tmp_path, q, k, v, kv_len, score_mod=softcap(20.0), **where)
    assert_same(module, (q, k, v, kv_len), mods=(softcap(20.0), None), exact=1e-3, **where)
    assert "error" in run_alone(path)
    # of one query the library makes no lists by itself: the same numbers but for the order of sums
    found = module.attention(q[:, :, :1], k, v, kv_len, **where)
    assert relative_error(found, cached_attention(q[:, :, :1], k, v, kv_len, score_mod=softcap(20.0), **where)) < 1e-3


@pytest.mark.parametrize("length, kinds", [(1, ["q_offset"]), (1, ["sinks"]), (3, ["q_offset", "sinks"])])
def test_positions_of_queries_and_sinks(tmp_path, length, kinds):
    """Of other lengths than the example's, too, of a sequence of which the cache holds nothing, and of no sequence."""

    def given(kv_len, q_len, heads):
        made = {"q_offset": first_positions(kv_len, q_len), "sinks": some_sinks(heads, torch.bfloat16)}
        return {kind: made[kind] for kind in kinds}

    q, k, v, kv_len, table = cache("cpu", Q_LEN=length, D_V=44)
    mod, own = alibi(alibi_slopes(8)), given(kv_len, length, 8)
    path, module = saved(tmp_path, q, k, v, kv_len, page_table=table, score_mod=mod, scale=0.2, **own)
    lengths = (7, 1, 40) if "q_offset" in kinds else (1, 1, 1)  # those that the library has lists of, where the file has
    for q_len, (Z, Hkv, pages) in zip(lengths, ((3, 2, 24), (1, 1, 300), (4, 3, 9)), strict=True):
        q, k, v, kv_len, table = cache("cpu", Z=Z, Hq=4 * Hkv, Hkv=Hkv, Q_LEN=q_len, pages=pages, D_V=44)
        kv_len[Z // 2] = 16 * pages - 5 if Z == 1 else 0
        slopes, own = alibi_slopes(4 * Hkv), given(kv_len, q_len, 4 * Hkv)
        assert_same(module, (q, k, v, kv_len), page_table=table, mods=(alibi(slopes), None), captured={"slopes": slopes}, scale=0.2, **own)
    none = [t[:0] for t in (kv_len, table)]
    own = {name: t[:0] if name == "q_offset" else t for name, t in own.items()}
    assert module.attention(q[:0], k, v, none[0], none[1], **own, slopes=slopes).shape == (0, *q.shape[1:3], 44)
    assert "error" in run_alone(path)


@pytest.mark.parametrize("kinds", [[], ["q_offset", "sinks"]])
def test_ragged_queries(tmp_path, kinds):
    """Of other numbers of sequences, heads and queries than the example's; sequences without queries, without keys, and tokens of none."""

    def given(Z, Hkv, counts, pages, after=0):
        q, k, v, kv_len, table = cache("cpu", Z=Z, Hq=4 * Hkv, Hkv=Hkv, Q_LEN=max(counts), pages=pages, D_V=44)
        q, starts = ragged(q, counts, after)
        made = {"q_offset": first_positions(kv_len, 5), "sinks": some_sinks(4 * Hkv, torch.bfloat16)}
        return (q, k, v, kv_len), {"page_table": table, "cu_seqlens_q": starts, **{kind: made[kind] for kind in kinds}}

    arguments, named = given(3, 2, [3, 1, 7], 24)
    mods = alibi(alibi_slopes(8)), wider_by_head(30)
    path, module = saved(tmp_path, *arguments, **named, score_mod=mods[0], mask_mod=mods[1], scale=0.2)
    for Z, Hkv, counts, pages, most in ((3, 2, [3, 0, 7], 24, 7), (1, 1, [200], 300, None), (5, 3, [1, 40, 0, 2, 0], 9, 40)):
        arguments, named = given(Z, Hkv, counts, pages, after=2)
        arguments[3][Z // 2] = 16 * pages - 5 if Z == 1 else 0
        slopes = alibi_slopes(4 * Hkv)
        more = {"mods": (alibi(slopes), wider_by_head(20)), "captured": {"slopes": slopes, "window": 20}, "scale": 0.2}
        assert_same(module, arguments, **named, **more, **({} if most is None else {"max_q_len": most}))
    found = module.attention(*arguments, **named, slopes=slopes, window=20, scale=0.2, max_q_len=4)  # fewer than a sequence has
    library = cached_attention(
        *arguments, **named, score_mod=alibi(slopes), mask_mod=wider_by_head(20), scale=0.2, max_q_len=4, check=False
    )
    assert torch.equal(found, library)
    none = {name: t[:0] if name in ("page_table", "q_offset") else t[:1] if name == "cu_seqlens_q" else t for name, t in named.items()}
    assert module.attention(*arguments[:3], arguments[3][:0], **none, slopes=slopes).abs().max() == 0
    if kinds:
        assert "error" in run_alone(path)


def test_ragged_queries_of_a_contiguous_cache_in_eight_bits(tmp_path):
    """By the default mask, and entries by cache_loc."""
    q, k, v, kv_len, _ = cache("cpu", Q_LEN=9, S=300, pages=0, N=6, dtype=torch.bfloat16)
    (q, starts), (k, v) = ragged(q, [2, 9, 4]), (t.to(torch.float8_e4m3fn) for t in (k, v))
    k_scale, v_scale = torch.rand(2, 2) + 0.5
    named = {"cu_seqlens_q": starts, "cache_loc": torch.tensor([4, 0, 2], dtype=torch.int32), "k_scale": k_scale, "v_scale": v_scale}
    _, module = saved(tmp_path, q, k, v, kv_len, **named)
    assert_same(module, (q, k, v, kv_len), **named, exact=1e-2)


def test_a_tensor_may_be_lengths_and_positions(tmp_path):
    """As the example has it; a file's arguments are two."""
    q, k, v, kv_len, table = cache("cpu", Q_LEN=2)
    _, module = saved(tmp_path, q, k, v, kv_len, page_table=table, q_offset=kv_len)
    assert_same(module, (q, k, v, kv_len), page_table=table, q_offset=first_positions(kv_len, 2))


def test_a_scale_that_sinks_cannot_be_divided_by(tmp_path):
    q, k, v, kv_len, table = cache("cpu")
    sinks = some_sinks(8, torch.float32)
    _, module = saved(tmp_path, q, k, v, kv_len, page_table=table, sinks=sinks)
    with pytest.raises(ValueError, match="scale must be a number above 1e-20, got 1e-30"):
        module.attention(q, k, v, kv_len, table, sinks, scale=1e-30)
    path = tmp_path / "small.py"
    export_cached(q, k, v, kv_len, page_table=table, sinks=sinks, scale=1e-30, path=path)
    for scale in (1e-30, -0.3):
        assert_same(load(path), (q, k, v, kv_len), page_table=table, sinks=sinks, scale=scale)


def test_a_file_needs_torch_alone_and_passes_the_linter(tmp_path):
    q, k, v, kv_len, table = cache("cpu")
    kinds = {"a": {}, "b": {"score_mod": softcap(20.0), "mask_mod": sliding_window(64)}}
    for name, options in kinds.items():
        text = export_cached(q, k, v, kv_len, page_table=table, **options, path=tmp_path / f"{name}.py")
        assert {n.split(".")[0] for n in imports_of(text)} - set(sys.stdlib_module_names) == {"torch"}
        assert text == export_cached(q, k, v, kv_len, page_table=table, **options, target="cpu")
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "."], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_target_follows_from_the_call(monkeypatch):
    """Tensors on a CPU, and whether the interpreter is asked for."""
    q, k, v, kv_len, table = cache("cpu")

    def needs_triton(**options):
        return "import triton" in export_cached(q, k, v, kv_len, page_table=table, **options)

    assert not needs_triton() and needs_triton(target="sm_80")
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")
    assert needs_triton() and not needs_triton(target="cpu")
    with pytest.raises(ValueError, match="layout 'kernels' is for kernels in Triton"):
        export_cached(q, k, v, kv_len, page_table=table, target="cpu", layout="kernels", path="a")
    with pytest.raises(ValueError, match="target must be one of"):
        export_cached(q, k, v, kv_len, page_table=table, target="sm_1")


def test_other_devices_are_an_error(tmp_path):
    q, k, v, kv_len, table = cache("cpu")
    _, module = saved(tmp_path, q, k, v, kv_len, page_table=table)
    with pytest.raises(NotImplementedError, match="these kernels are for CPUs"):
        module.attention(*(t.to("meta") for t in (q, k, v, kv_len, table)))
