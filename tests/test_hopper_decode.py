"""The decode kernel for Hopper: values that are the first columns of the keys. On a CPU its text runs in a stand-in for Gluon."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexpress
from flexpress import cached_attention, flex_attention, mods
from flexpress.codegen import registry
from flexpress.codegen.run import decode, decode_kernels
from flexpress.codegen.run.launch import Launch, OnlyBegun, Unusable
from support import batches
from support.dense import dense_attention, relative_error
from support.fake_hopper import decode_on_cpu


@pytest.fixture(autouse=True)
def fresh():
    """What one test pretends to have compiled is not there in another."""
    registry.clear()
    yield
    registry.clear()


def latent(**changes) -> batches.Batch:
    """A batch whose values are a view of its keys."""
    known = dict(q_lens=[1, 1, 1], kv_lens=[70, 5, 200], Hkv=1, Hq=16, D_QK=320, D_V=256, dtype=torch.bfloat16, values_in_keys=True)
    return batches.Batch(**(known | changes))


CASES = {
    "pages of 64": dict(page_size=64),
    "pages of 16, ragged": dict(page_size=16, q_lens=[1, 0, 3], mask="all"),
    "pages of 8, causal": dict(page_size=8, q_lens=[3, 2, 1], mask="window"),
    "pages of 128": dict(page_size=128, dtype=torch.float16),
    "an entry a sequence": dict(page_size=0),
    "entries anywhere": dict(page_size=0, located=True, Hkv=2, Hq=8),
    "no columns of keys alone": dict(D_QK=512, D_V=512),
    "padded": dict(D_QK=304),
    "576 and 512": dict(D_QK=576, D_V=512, kv_lens=[130, 64, 1]),
    "alibi": dict(score="alibi", Hq=12),
    "softcap": dict(score="softcap", q_lens=[2, 2, 2], ragged=False),
    "by sequence": dict(Hq=6, score="per sequence", mask="per sequence", q_lens=[2, 3, 5]),
    "a mask of each head": dict(mask="per head", Hq=4),
    "tiles by tokens": dict(q_lens=[40, 3, 17], Hq=4, kv_lens=[70, 5, 90]),
    "split": dict(kv_lens=[1500, 3, 700], page_size=64),
    "split, an entry a sequence": dict(kv_lens=[1030, 64, 513], page_size=0, score="alibi", Hq=4),
    "batch invariant": dict(kv_lens=[1500, 3, 700], page_size=64, invariant=True),
    "one key, and few": dict(kv_lens=[1, 2, 3], ragged=False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_kernel_computes(monkeypatch, name):
    """By the kernel's text, from what it finds in a cache that is NaN wherever no sequence is."""
    launched = decode_on_cpu(monkeypatch)
    batches.check(latent(**CASES[name]), "cpu")
    assert len(launched) >= 1


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=batches.batches("cpu"),
    dims=st.sampled_from([(320, 256), (512, 512), (264, 256)]),
    heads=st.sampled_from([(1, 12), (2, 8), (1, 3)]),
)
def test_any_batch(monkeypatch, drawn, dims, heads):
    dtype = torch.float16 if drawn.dtype is torch.float32 else drawn.dtype
    page_size = {1: 8, 5: 128}.get(drawn.page_size, drawn.page_size)  # that TMA copies
    known = dict(page_size=page_size, D_QK=dims[0], D_V=dims[1], Hkv=heads[0], Hq=heads[1], values_in_keys=True, fp8=False, dtype=dtype)
    with monkeypatch.context() as patch:
        decode_on_cpu(patch)
        batches.check(replace(drawn, **known), "cpu")
    registry.clear()


def test_without_a_cache(monkeypatch):
    """flex_attention of few queries, with sinks."""
    launched = decode_on_cpu(monkeypatch)
    q, k = torch.randn(2, 8, 2, 320, dtype=torch.bfloat16), torch.randn(2, 1, 700, 320, dtype=torch.bfloat16)
    sinks = torch.randn(8)
    out, lse = flex_attention(q, k, k[..., :256], score_mod=mods.softcap(20.0), enable_gqa=True, sinks=sinks, return_lse=True)
    assert len(launched) == 1
    exact, exact_lse, _ = dense_attention(q, k, k[..., :256], mods.softcap(20.0))
    with_sinks = torch.logaddexp(exact_lse, sinks.double()[:, None])
    exact, exact_lse = exact * (exact_lse - with_sinks).exp()[..., None], with_sinks
    assert relative_error(out, exact) < 1e-2
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-3)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rate=st.sampled_from([-0.5, 0.01, 0.05, 0.09, 0.2, 0.7]),
    keys=st.integers(600, 800),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    wants_max=st.booleans(),
)
def test_scores_that_grow(monkeypatch, rate, keys, dtype, wants_max):
    """Maxima that grow from block to block, a little and much."""
    q, k = torch.randn(1, 4, 3, 320, dtype=dtype), torch.randn(1, 1, keys, 320, dtype=dtype)

    def rising(score, b, h, q_idx, kv_idx):
        return score + rate * kv_idx

    request = flexpress.AuxRequest(lse=True, max_scores=wants_max)
    with monkeypatch.context() as patch:
        launched = decode_on_cpu(patch)
        out, aux = flex_attention(q, k, k[..., :256], score_mod=rising, enable_gqa=True, return_aux=request)
    registry.clear()
    assert len(launched) == 1
    exact, exact_lse, _ = dense_attention(q, k, k[..., :256], rising)
    assert relative_error(out, exact) < 1e-2
    torch.testing.assert_close(aux.lse.double(), exact_lse, atol=1e-3, rtol=1e-3)
    if wants_max:
        scores = q.double() @ k.double().transpose(2, 3) * 320**-0.5 + rate * torch.arange(keys)
        torch.testing.assert_close(aux.max_scores.double(), scores.amax(-1), atol=1e-3, rtol=1e-3)


def growing(rates):
    """A score_mod that adds so much of the position to a head's scores."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + rates[h] * kv_idx

    return score_mod


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_does_not_depend_on_others(monkeypatch, device, dtype):
    """The output is scaled in blocks in which some row's maximum has grown by much, and for the other rows the bits are the same."""
    if device == "cpu":
        decode_on_cpu(monkeypatch)
    q, k = torch.randn(1, 8, 1, 320, dtype=dtype, device=device), torch.randn(1, 1, 900, 320, dtype=dtype, device=device)
    rates = torch.tensor([0.0, 0.004, 0.02, 0.0, -0.1, 0.06, 0.0, 0.3], device=device)
    out = flex_attention(q, k, k[..., :256], score_mod=growing(rates), enable_gqa=True)
    for still in (range(1), range(3, 5), range(8)):
        others = torch.tensor([h not in still for h in range(8)], device=device)
        new_rates, new_q = torch.where(others, rates.flip(0), rates), torch.where(others[:, None, None], 3 * q.flip(1), q)
        new = flex_attention(new_q, k, k[..., :256], score_mod=growing(new_rates), enable_gqa=True)
        assert torch.equal(new[:, ~others], out[:, ~others])
    exact, _, _ = dense_attention(q.cpu(), k.cpu(), k[..., :256].cpu(), growing(rates.cpu()))
    assert relative_error(out.cpu(), exact) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_maxima_that_grow_past_what_is_usual(monkeypatch, dtype):
    """There float32 numbers are so far apart that the last key has all weight."""
    launched = decode_on_cpu(monkeypatch)
    q, k = torch.randn(1, 4, 1, 320, dtype=dtype), torch.randn(1, 1, 700, 320, dtype=dtype)
    out = flex_attention(q, k, k[..., :256], score_mod=growing(torch.tensor([1.1e6, 2.8e5, 3e7, 1e5])), enable_gqa=True)
    assert len(launched) == 1
    assert relative_error(out, k[:, :, -1:, :256].expand_as(out)) < 1e-2


def test_the_portable_kernel_takes_its_place(monkeypatch):
    """Where the one for Hopper does not compile."""
    decode_on_cpu(monkeypatch)
    portable = []

    def if_usable(*_):
        raise Unusable("it does not compile")

    monkeypatch.setattr(Launch, "if_usable", if_usable)
    monkeypatch.setattr(Launch, "with_tile", lambda launch, *_: portable.append(launch.spec.template))
    monkeypatch.setattr(Launch, "with_constants", lambda *_: None)
    p = latent(page_size=64)
    given, _ = batches.made(p, "cpu")
    for _ in range(2):
        cached_attention(**given, scale=0.1)
    assert portable == ["decode", "decode"] and "it does not compile" in decode_kernels._refused.values()


def test_a_kernel_that_is_only_begun_is_not_refused(monkeypatch):
    """As precompile does, which has other processes compile."""
    decode_on_cpu(monkeypatch)
    batches.check(latent(page_size=64), "cpu")
    kernels = [*decode._ready.values()][-1]

    def if_usable(*_):
        raise OnlyBegun("it is only begun")

    monkeypatch.setattr(Launch, "if_usable", if_usable)
    with pytest.raises(OnlyBegun):
        kernels._launch({}, [], None, torch.device("cpu"))
    assert kernels.call.for_hopper and not [*decode_kernels._refused.values()]


ON_GPU = {
    "one query, parts": dict(q_lens=[1, 1, 1, 1], kv_lens=[9000, 3, 4096, 640]),
    "64 rows and more": dict(q_lens=[7, 40, 1], kv_lens=[700, 3000, 65], page_size=64),
    "pages of 8, masks": dict(q_lens=[2, 5, 0], kv_lens=[1300, 90, 4], page_size=8, mask="per sequence", score="per sequence"),
    "entries anywhere": dict(q_lens=[1, 3, 17], kv_lens=[640, 100, 2000], page_size=0, located=True, Hkv=2, Hq=8, score="softcap"),
    "a mask of each head": dict(q_lens=[2, 1, 1], kv_lens=[500, 200, 64], mask="per head", Hq=4),
    "batch invariant": dict(kv_lens=[5000, 3, 700], page_size=128, invariant=True, score="alibi"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(576, 512), (512, 512), (320, 256)], ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu(name, dims):
    """The same on the real thing; on another GPU than Hopper by the portable kernel."""
    for dtype in (torch.bfloat16, torch.float16):
        case = dict(Hq=12, q_lens=[1, 1, 1]) | ON_GPU[name]
        batches.check(latent(**case | dict(D_QK=dims[0], D_V=dims[1], dtype=dtype)), "cuda")
    if torch.cuda.get_device_capability() == (9, 0):
        assert any(path.name.startswith("hopper_decode") for path in flexpress.printed_kernels())


@pytest.mark.gpu
def test_the_same_bits_every_time():
    given, _ = batches.made(latent(q_lens=[1] * 5, kv_lens=[3000, 2000, 64, 9000, 1], Hq=12, D_QK=576, D_V=512, page_size=64), "cuda")
    first = cached_attention(**given)
    assert all(torch.equal(cached_attention(**given), first) for _ in range(20))
