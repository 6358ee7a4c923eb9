"""What return_aux tells of cached_attention: what dense attention in float64 gives for each sequence alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from flexpress import AuxRequest, AuxStatistics, cache_info, cached_attention, mods
from support.batches import Batch, batches, made, mask_mods, score_mods, shifted
from support.devices import DEVICES, for_any
from support.probabilities import ALL, assert_right

SINKS = torch.tensor([-1.0, 2.0, 40.0, -float("inf")] * 3)


def check(p: Batch, device: str) -> None:
    arguments, sequences = made(p, device)
    score_mod, mask_mod = score_mods(device)[p.score], mask_mods()[p.mask]
    sinks = SINKS[: p.Hq].to(device) if p.seed % 2 else None
    options = {**arguments, "score_mod": score_mod, "mask_mod": mask_mod, "sinks": sinks}
    torch.full((1 << 16,), float("nan"), device=device)
    out, lse = cached_attention(**options, return_lse=True)
    again, aux = cached_attention(**options, return_aux=ALL)
    assert torch.equal(out, again) and torch.equal(lse, aux.lse)
    room = arguments["k_cache"].shape[1] * (arguments["page_table"].shape[1] if p.page_size else 1)
    assert aux.column_sums.shape == (len(sequences), p.Hq, room) and aux.entropy.shape == aux.max_scores.shape == lse.shape
    starts = torch.tensor([0, *p.q_lens]).cumsum(0).tolist()
    close = 2e-5 if device == "cpu" and p.dtype == torch.float32 else 3e-3 if p.dtype == torch.float32 else 2e-2
    for b, (q, k, _) in enumerate(sequences):
        n = k.shape[2]
        assert not aux.column_sums[b, :, n:].any()
        if 0 in q.shape:
            assert not aux.column_sums[b].any()
            continue
        rows = {name: getattr(aux, name) for name in ("lse", "max_scores", "entropy", "top_index")}
        rows = {name: t[starts[b] : starts[b + 1]].T[None] if p.ragged else t[b : b + 1] for name, t in rows.items()}
        offset = n - q.shape[2]
        shift = shifted(score_mod, b, offset), shifted(mask_mod or mods.causal, b, offset)
        found = AuxStatistics(**rows, column_sums=aux.column_sums[b : b + 1, :, :n])
        assert_right(found, q, k, *shift, close=close, sinks=sinks)


@for_any(batches, cpu=15, cuda=120)
def test_any_batch(p, device):
    check(p, device)


@pytest.mark.usefixtures("in_cpp")
@settings(max_examples=5)
@given(batches("cpu"))
def test_any_batch_in_cpp(p):
    check(p, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len, ragged", [(1, False), (3, False), (3, True), (40, True)])
def test_many_keys(q_len, ragged, device, poisoned_memory):
    """Split among programs; a window visits few blocks of them, and heads may visit others each."""
    p = Batch(q_lens=[q_len] * 2, kv_lens=[700, 1500], ragged=ragged, Hq=8, score="alibi", seed=2)
    for mask in ("window", "none", "blocks per head"):
        check(replace(p, mask=mask), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1e4, 1e9, 1e30])
def test_huge_scores(size, device):
    """Where one score of a row is far above others its probability is 1, or shared among equals, be they in one part of the keys or not."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-3, 4, (2, 900), generator=generator).to(device)
    k = torch.zeros(1, 900, 1, 16, device=device)
    q, kv_len = torch.zeros(1, 2, 1, 16, device=device), torch.tensor([900], device=device, dtype=torch.int32)
    _, aux = cached_attention(q, k, k, kv_len, score_mod=lambda s, b, h, q_idx, kv_idx: whole[h, kv_idx] * size, return_aux=ALL)
    most = whole == whole.amax(-1, keepdim=True)
    torch.testing.assert_close(aux.entropy[0, :, 0], most.sum(-1).float().log(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.column_sums[0], most / most.sum(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    assert torch.equal(aux.top_index[0, :, 0], most.int().argmax(-1))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_asked_for_is_given(device):
    """And no more; what says lse alone is what return_lse gives."""
    arguments, _ = made(Batch(q_lens=[1, 2], kv_lens=[40, 70]), device)
    for request in (
        AuxRequest(),
        AuxRequest(lse=True),
        AuxRequest(max_scores=True),
        AuxRequest(column_sums=True),
        AuxRequest(entropy=True),
    ):
        _, aux = cached_attention(**arguments, return_aux=request)
        assert [name for name in aux._fields if getattr(aux, name) is not None] == [n for n, asked in request._asdict().items() if asked]
    assert torch.equal(
        cached_attention(**arguments, return_aux=AuxRequest(lse=True))[1].lse, cached_attention(**arguments, return_lse=True)[1]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_no_sequences_and_no_keys(device):
    q, k = torch.randn(2, 4, 3, 16, device=device), torch.randn(2, 8, 2, 16, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    for keys in (k, k[:, :0]):
        _, aux = cached_attention(q, keys, keys, lengths, sinks=torch.ones(4, device=device), return_aux=ALL)
        assert not aux.entropy.any() and (aux.top_index == -1).all() and aux.max_scores.isneginf().all() and (aux.lse == 1.0).all()
        assert aux.column_sums.shape == (2, 4, keys.shape[1]) and not aux.column_sums.any()
    _, aux = cached_attention(q[:0], k[:0], k[:0], lengths[:0], return_aux=ALL)
    assert aux.entropy.shape == (0, 4, 3) and aux.column_sums.shape == (0, 4, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ragged", [False, True])
def test_under_torch_compile(ragged, device):
    arguments, _ = made(Batch(q_lens=[3, 3], kv_lens=[40, 70], ragged=ragged), device)
    slopes = torch.rand(6, device=device)

    def attend(slopes, **given):
        out, aux = cached_attention(**given, score_mod=mods.alibi(slopes), return_aux=ALL)
        return out, *aux

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, attend(slopes, **arguments), compiled(slopes, **arguments)))
    only = torch.compile(
        lambda **given: cached_attention(**given, return_aux=AuxRequest(column_sums=True))[1], fullgraph=True, backend="eager"
    )
    assert torch.equal(only(**arguments).column_sums, cached_attention(**arguments, return_aux=ALL)[1].column_sums)


@pytest.mark.usefixtures("in_cpp")
def test_the_operator_in_cpp():
    """Its strides are those that torch's compiler was told."""
    for ragged in (False, True):
        arguments, _ = made(Batch(q_lens=[3, 3], kv_lens=[40, 70], ragged=ragged), "cpu")
        compiled = torch.compile(lambda **given: cached_attention(**given, return_aux=ALL)[1], fullgraph=True, backend="aot_eager")
        for have, want in zip(compiled(**arguments), cached_attention(**arguments, return_aux=ALL)[1], strict=True):
            assert torch.equal(have, want) and have.is_contiguous() and want.is_contiguous()


@pytest.mark.usefixtures("in_cpp")
def test_latent_keys_in_cpp():
    check(Batch(q_lens=[1, 3], kv_lens=[40, 70], Hkv=1, Hq=4, D_QK=576, D_V=512, values_in_keys=True), "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_latent_keys(device):
    check(Batch(q_lens=[1, 30], kv_lens=[40, 70], Hkv=1, Hq=4, D_QK=576, D_V=512, values_in_keys=True), device)


@pytest.mark.usefixtures("in_cpp")
def test_offsets_that_lie_in_cpp():
    check_offsets_that_lie("cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_offsets_that_lie(device):
    check_offsets_that_lie(device)


def check_offsets_that_lie(device: str) -> None:
    """Rows that are computed are those of the sequence that has them; others get nothing, as of the output."""
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 16, device=device), torch.randn(2, 40, 2, 16, device=device)
    lengths = torch.tensor([40, 30], dtype=torch.int32, device=device)
    for offsets, most in (([0, 2, 9], 9), ([1, 3, 5], 5), ([0, 4, 2], 5), ([-3, 2, 4], 5), ([0, 3, 5], 1)):
        starts = torch.tensor(offsets, dtype=torch.int32, device=device)
        _, aux = cached_attention(q, k, k, lengths, cu_seqlens_q=starts, max_q_len=most, check=False, return_aux=ALL)
        there = ~aux.lse.isneginf()
        assert torch.equal(there, aux.top_index >= 0) and torch.equal(there, ~aux.max_scores.isneginf())
        assert not aux.entropy[~there].any() and aux.entropy[there].isfinite().all()
        torch.testing.assert_close(aux.column_sums.sum((0, 2)), there.sum(0).float())


def test_shapes_without_memory():
    with FakeTensorMode():
        q, k = torch.randn(5, 4, 16), torch.randn(9, 8, 2, 16)
        table, lengths, starts = (torch.zeros(n, dtype=torch.int32) for n in ((2, 3), (2,), (3,)))
        _, aux = cached_attention(q, k, k, lengths, page_table=table, cu_seqlens_q=starts, return_aux=ALL)
    assert aux.entropy.shape == aux.top_index.shape == aux.max_scores.shape == (5, 4) and aux.column_sums.shape == (2, 4, 24)
    assert (aux.entropy.dtype, aux.top_index.dtype, aux.column_sums.dtype) == (torch.float32, torch.int64, torch.float32)


@pytest.mark.usefixtures("in_cpp")
def test_pages_outside_in_cpp():
    check_pages_outside("cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_pages_outside(device):
    check_pages_outside(device)


def check_pages_outside(device: str) -> None:
    """They hold zeros, as for the output; tokens that no sequence has get nothing."""
    torch.manual_seed(0)
    k = torch.randn(4, 16, 2, 16, device=device)
    q, table = torch.randn(5, 4, 16, device=device), torch.tensor([[0, -1, 3], [7, 2, 1]], device=device, dtype=torch.int32)
    lengths, starts = (torch.tensor(n, device=device, dtype=torch.int32) for n in ([40, 30], [0, 2, 4]))
    given = {"page_table": table, "cu_seqlens_q": starts, "max_q_len": 2, "check": False}
    _, found = cached_attention(q, k, k, lengths, **given, return_aux=ALL)
    zeros = torch.cat((k, torch.zeros_like(k[:1])))
    there = torch.tensor([[0, 4, 3], [4, 2, 1]], device=device, dtype=torch.int32)
    _, wanted = cached_attention(q[:4], zeros, zeros, lengths, **{**given, "page_table": there}, return_aux=ALL)
    for name in ("lse", "max_scores", "entropy", "top_index"):
        torch.testing.assert_close(getattr(found, name)[:4], getattr(wanted, name))
    torch.testing.assert_close(found.column_sums, wanted.column_sums)
    assert (found.top_index[4] == -1).all() and not found.entropy[4].any() and found.max_scores[4].isneginf().all()


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 3])
def test_in_a_cuda_graph(q_len):
    """Lengths, keys and queries may be others at each replay."""
    arguments, _ = made(Batch(q_lens=[q_len] * 2, kv_lens=[300, 700], ragged=False, page_size=0), "cuda")
    call = lambda: cached_attention(**arguments, score_mod=mods.softcap(3.0), return_aux=ALL)  # noqa: E731
    for key in ("k_cache", "v_cache"):
        arguments[key].nan_to_num_(0.5)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, aux = call()
    for lengths in ([300, 700], [20, 699]):
        arguments["kv_len"].copy_(torch.tensor(lengths))
        arguments["k_cache"].mul_(0.9)
        graph.replay()
        wanted, expected = call()
        assert torch.equal(out, wanted) and all(map(torch.equal, aux, expected))


def test_other_lengths_print_nothing_again():
    for lengths in ([40, 70], [50, 60]):
        before = cache_info()
        arguments, _ = made(Batch(q_lens=[1, 2], kv_lens=lengths), "cpu")
        cached_attention(**arguments, return_aux=ALL)
    assert cache_info().prints == before.prints


def test_what_is_refused():
    arguments, _ = made(Batch(q_lens=[1, 2], kv_lens=[40, 70]), "cpu")
    with pytest.raises(ValueError, match="return_lse and return_aux exclude each other"):
        cached_attention(**arguments, return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(TypeError, match="return_aux must be AuxRequest"):
        cached_attention(**arguments, return_aux=True)


@pytest.mark.parametrize("device", DEVICES)
def test_evicting_what_nobody_looks_at(device):
    """As H2O does: of the positions of a sequence those that were given most stay."""
    q, k = torch.ones(1, 2, 4, 32, device=device), torch.ones(1, 64, 1, 32, device=device)
    k[0, ::2] = -1.0
    kv_len = torch.tensor([60], dtype=torch.int32, device=device)
    _, aux = cached_attention(q, k, k, kv_len, return_aux=AuxRequest(column_sums=True))
    given_to = aux.column_sums[0].sum(0)
    assert abs(given_to.sum().item() - 8.0) < 1e-4
    assert sorted(given_to.topk(30).indices.tolist()) == list(range(1, 60, 2))


def test_under_autocast(in_cpp):
    """Keys of a float8 cache times their scales are wider than autocast's dtype: a key that is seen alone has all of the softmax."""
    k = torch.randn(1, 20, 2, 16).to(torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor([0.77, 3e4]), "v_scale": torch.ones(2)}
    with torch.autocast("cpu", dtype=torch.float16):
        _, aux = cached_attention(
            torch.randn(1, 2, 3, 16),
            *(k, k, torch.tensor([20], dtype=torch.int32)),
            **scales,
            scale=1e-3,
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx == 3,
            return_aux=ALL,
        )
    torch.testing.assert_close(aux.max_scores, aux.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.entropy, torch.zeros(1, 2, 3), rtol=0, atol=1e-5)
    assert (aux.top_index == 3).all() and (aux.column_sums[..., 3] > 2.999).all()
