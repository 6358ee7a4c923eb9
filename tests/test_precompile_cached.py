"""flexpress.precompile_cached: after it a call of cached_attention compiles nothing, and it launches no attention kernel itself."""

from __future__ import annotations

import pytest
import torch

from flexpress import PageAllocator, cache_clear, cached_attention, mods, precompile_cached
from flexpress.caches import shared_prefix
from flexpress.codegen import registry
from flexpress.codegen.device import interpret
from support.costs import costs
from support.devices import DEVICES
from support.fake_hopper import Variant, pass_for_hopper

pytestmark = pytest.mark.usefixtures("own_directory")


def cached_calls() -> dict[str, dict]:
    """Shapes of query and of the caches, those of what describes the batch, and other arguments."""
    entries, pages = [(3, 300, 2, 16)] * 2, [(40, 16, 2, 16), (40, 16, 2, 24)]
    return {
        "one query": dict(shapes=[(3, 4, 1, 16), *entries], kv_len=(3,)),
        "few keys, score_mod": dict(shapes=[(2, 4, 1, 16), *[(2, 20, 2, 16)] * 2], kv_len=(2,), score_mod=mods.softcap(3.0)),
        "pages, a window": dict(
            shapes=[(3, 4, 2, 16), *pages], kv_len=(3,), page_table=(3, 20), q_offset=(3,), mask_mod=mods.sliding_window(9)
        ),
        "ragged": dict(shapes=[(50, 4, 16), *pages], kv_len=(3,), page_table=(3, 20), cu_seqlens_q=(4,), max_q_len=30),
        "float8": dict(shapes=[(2, 4, 1, 16), *entries], kv_len=(2,), cache_loc=(2,), k_scale=(2,), v_scale=(2,), kept=torch.float8_e4m3fn),
        "batch_invariant": dict(shapes=[(3, 4, 1, 16), *entries], kv_len=(3,), batch_invariant=True),
        "sinks": dict(shapes=[(3, 4, 1, 16), *entries], kv_len=(3,), sinks=(4,)),
        "sinks, ragged": dict(shapes=[(50, 4, 16), *pages], kv_len=(3,), page_table=(3, 20), cu_seqlens_q=(4,), max_q_len=30, sinks=(4,)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["shapes", "meta", "examples"])
@pytest.mark.parametrize("name", cached_calls())
def test_calls_with_a_cache(name, way, device):
    call = cached_calls()[name]
    shapes, kept = call.pop("shapes"), call.pop("kept", torch.float32)
    tables = {key: call.pop(key) for key in list(call) if isinstance(call[key], tuple)}

    def made(where: str) -> tuple[list, dict]:
        qkv = [torch.zeros(shape, device=where, dtype=dtype) for shape, dtype in zip(shapes, (torch.float32, kept, kept), strict=True)]
        of_scales = {"k_scale": torch.float32, "v_scale": torch.float32, "sinks": torch.float32}
        return qkv, {key: torch.ones(shape, device=where, dtype=of_scales.get(key, torch.int32)) for key, shape in tables.items()}

    given, described = (shapes, tables) if way == "shapes" and kept is torch.float32 else made("meta" if way != "examples" else device)
    compiled = precompile_cached(*given, **described, **call, dtype=torch.float32, device=None if way == "examples" else device)
    assert compiled and all(kernel.path.name.startswith(("decode", "combine", "block_")) for kernel in compiled)
    if way == "examples":
        assert not any(t.float().any() for t in given)
    qkv, described = made(device)
    if "cu_seqlens_q" in described:
        described["cu_seqlens_q"] = torch.tensor([0, 1, 20, 50], dtype=torch.int32, device=device)
    assert costs(lambda: cached_attention(*qkv, **described, **call, check=False)) == (0, 0)
    assert precompile_cached(*given, **described, **call, dtype=torch.float32, device=None if way == "examples" else device) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_shared_prefixes(device, pays, ragged, monkeypatch):
    """Both ways to read what sequences share."""
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 0 if pays else 1 << 40)
    pool, int32 = PageAllocator(40, 16), dict(dtype=torch.int32, device=device)
    first = pool.allocate(70)
    sequences = [first, pool.fork(first), pool.allocate(20)]
    mask = dict(mask_mod=mods.sliding_window(50)) if ragged else {}
    query, where = ((9, 4, 16), dict(cu_seqlens_q=(4,), max_q_len=5)) if ragged else ((3, 4, 1, 16), {})
    caches = torch.zeros(2, 40, 16, 2, 16, device=device)
    compiled = precompile_cached(
        query, *caches, (3,), page_table=(3, 8), **where, **mask, shared_prefix=(2, 6), dtype=torch.float32, device=device
    )
    assert {k.path.name.split("_")[0] for k in compiled} >= {"decode", "merge", "shared"} and not caches.any()
    shared = pool.shared_prefix(sequences, device, groups=2, width=6)
    kv_len, table = torch.tensor([70, 70, 20], **int32), pool.page_table(sequences, 8, device)
    batch = dict(page_table=table, **mask)
    if ragged:
        batch |= dict(cu_seqlens_q=torch.tensor([0, 2, 4, 9], **int32), max_q_len=5)
    q = torch.zeros(query, device=device)
    tables = {} if not ragged else {"cu_seqlens_q": batch["cu_seqlens_q"]}

    def call():
        made = shared.tables(kv_len, table, queries=9 if ragged else 1, **tables)
        cached_attention(q, *caches, kv_len, **batch, shared_prefix=made, check=False)

    assert costs(call) == (0, 0)


def test_what_is_no_shared_prefix():
    caches = [(40, 16, 2, 16)] * 2
    with pytest.raises(TypeError, match=r"shared_prefix must be a SharedPrefix, or \(groups, pages\), got 3"):
        precompile_cached((3, 4, 1, 16), *caches, (3,), page_table=(3, 8), shared_prefix=3, dtype=torch.float32, device="cpu")
    pool = PageAllocator(40, 16)
    first = pool.allocate(70)
    two = pool.shared_prefix([first, pool.fork(first)], "cpu")
    with pytest.raises(ValueError, match="shared_prefix was made for 2 sequences on cpu, but kv_len is"):
        precompile_cached((3, 4, 1, 16), *caches, (3,), page_table=(3, 8), shared_prefix=two, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="shared_prefix is for caches in pages: pass kv_len and page_table"):
        precompile_cached((3, 4, 1, 16), *caches, (3,), shared_prefix=(1, 1), dtype=torch.float32, device="cpu")


def test_no_attention_kernel_runs(monkeypatch):
    """But those that make block lists do."""
    ran = []
    monkeypatch.setattr(interpret._Interpreted, "run", lambda self, *_: ran.append(self.function.__name__))
    precompile_cached((2, 4, 5, 16), *[(2, 900, 2, 16)] * 2, (2,), dtype=torch.float32, device="cpu")
    assert ran and all(name.startswith("block_") for name in ran)


@pytest.mark.parametrize("spills", [0, 4000])
def test_a_kernel_for_hopper_over_a_cache(monkeypatch, spills):
    obtained, launched = [], []

    class Recorder(Variant):
        def launch(self, grid, args, _) -> None:
            launched.append(self.name)

    def variant(name):
        obtained.append(name)
        return Recorder(name, local=spills if name.startswith("hopper") else 0)

    pass_for_hopper(monkeypatch, variant)
    registry.clear()
    shapes = (2048, 4, 64), (64, 64, 2, 64), (64, 64, 2, 64)
    tables = dict(kv_len=(2,), page_table=(2, 32), cu_seqlens_q=(3,), max_q_len=1024)
    precompile_cached(*shapes, **tables, dtype=torch.bfloat16, device="cpu")
    assert any(name.startswith("hopper_forward") for name in obtained) and any(name.startswith("decode") for name in obtained) == bool(
        spills
    )
    assert not [name for name in launched if name.startswith(("hopper", "decode"))]
    obtained.clear()
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    tables = dict(kv_len=torch.full((2,), 1024), page_table=torch.zeros(2, 32), cu_seqlens_q=torch.tensor([0, 1024, 2048]))
    cached_attention(q, k, v, **{key: t.int() for key, t in tables.items()}, max_q_len=1024, check=False)
    assert obtained == [] and any(name.startswith("decode" if spills else "hopper_forward") for name in launched)
    registry.clear()


def test_arguments_of_calls_with_a_cache():
    query, cache = (2, 4, 1, 16), (2, 20, 2, 16)
    for error, message, given, options in (
        (ValueError, "kv_len", (query, cache, cache, (5,)), {}),
        (
            TypeError,
            "page_table must be a torch.Tensor or a shape, a tuple of integers, got 3",
            (query, cache, cache, (2,)),
            {"page_table": 3},
        ),
        (ValueError, "no multiple of the 3 heads", (query, *[(2, 20, 3, 16)] * 2, (2,)), {}),
        (ValueError, "has no rows for the 2 sequences", (query, cache, cache, (2,)), {"page_table": (0, 1), "cache_loc": (2,)}),
    ):
        with pytest.raises(error, match=message):
            precompile_cached(*given, **options, dtype=torch.float32, device="cpu")
    nothing = (0, 20, 2, 16)
    assert precompile_cached((0, 4, 1, 16), nothing, nothing, (0,), dtype=torch.float32, device="cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, 4096])
def test_a_server(tokens):
    """Decoding and, on Hopper, the kernel for long queries; on disk, for another process, too."""
    k, v = torch.randn(2, 512, 64, 8, 128, device="cuda", dtype=torch.bfloat16).unbind()
    query, tables = ((4, 32, 1, 128), {}) if tokens is None else ((tokens, 32, 128), {"cu_seqlens_q": (5,), "max_q_len": 1024})
    compiled = precompile_cached(query, k, v, (4,), page_table=(4, 64), **tables, score_mod=mods.softcap(20.0), dtype=torch.bfloat16)
    assert compiled and all(kernel.seconds > 0.05 for kernel in compiled if kernel.path.name.startswith(("decode", "hopper")))
    pages = torch.arange(256, device="cuda", dtype=torch.int32).reshape(4, 64)
    lengths = torch.full((4,), 4000, device="cuda", dtype=torch.int32)
    if tokens is not None:
        tables["cu_seqlens_q"] = torch.arange(0, tokens + 1, 1024, device="cuda", dtype=torch.int32)
    q = torch.randn(query, device="cuda", dtype=torch.bfloat16)

    def really():
        cached_attention(q, k, v, lengths, page_table=pages, **tables, score_mod=mods.softcap(20.0))

    assert costs(really) == (0, 0)
    cache_clear()
    assert costs(really) == (0, 0)
