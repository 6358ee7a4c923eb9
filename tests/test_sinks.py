"""Attention sinks against dense float64 attention: every public function, with mods, masks and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from flexpress import AuxRequest, cached_attention, flash_attn, flex_attention, mods, varlen_attention
from flexpress.inputs.sinks import fold_sinks, read_sinks
from support.dense import relative_error
from support.devices import DEVICES, for_any
from support.extras import check_sinks, sink_problems, with_sinks

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@for_any(sink_problems, cpu=9, cuda=100)
def test_any_problem(drawn, device):
    check_sinks(drawn, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [None, 1e-30, -0.5])
@pytest.mark.parametrize("queries", [3, 70])
def test_extreme_sinks(queries, scale, device):
    """No sink at all, one below all scores, one above them, and one of 1e9, with rows that see nothing else."""
    q, k, v = (torch.randn(1, 4, n, 16, device=device) for n in (queries, 90, 90))
    sinks = torch.tensor([-math.inf, -1e4, 1e4, 1e9], device=device, requires_grad=True)

    def hidden(b, h, q_idx, kv_idx):
        return (q_idx != 1) & (kv_idx > q_idx - 5)

    out, lse = flex_attention(q, k, v, mask_mod=hidden, scale=scale, return_lse=True, sinks=sinks)
    exact, total, _ = with_sinks(q, k, v, sinks, None, hidden, scale)
    assert relative_error(out, exact) < 1e-6
    seen = total > -math.inf
    assert torch.equal(lse > -math.inf, seen) and relative_error(lse[seen], total[seen]) < 1e-6
    weights = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, sinks, weights)
    assert found[0] == found[1] == 0 and found[2:].abs().max() < 1e-3 and not found.isnan().any()
    without = flex_attention(q, k, v, mask_mod=hidden, scale=scale)
    assert relative_error(out[:, :2], without[:, :2]) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_sinks_alone_are_bitwise_repeatable(device):
    q, k, v = (torch.randn(2, 4, 150, 32, device=device) for _ in range(3))
    sinks, weights = torch.randn(4, device=device, requires_grad=True), torch.randn_like(q)
    runs = [torch.autograd.grad(flex_attention(q, k, v, mask_mod=mods.causal, sinks=sinks), sinks, weights)[0] for _ in range(2)]
    exact = sinks.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(with_sinks(q, k, v, exact, None, mods.causal)[0], exact, weights.double())
    assert torch.equal(*runs) and relative_error(runs[0], wanted) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device):
    lengths = [5, 0, 35, 30] if device == "cpu" else [600, 0, 1, 1300]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), h, 16, device=device, requires_grad=True) for h in (4, 2, 2))
    sinks = torch.randn(4, device=device, requires_grad=True)
    out, lse = varlen_attention(q, k, v, ends, mask_mod=mods.causal, return_lse=True, sinks=sinks)
    ours = flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 1, 1, causal=True, return_attn_probs=True, sinks=sinks)
    assert torch.equal(out, ours[0]) and torch.equal(lse, ours[1].T)
    parts = [[t[a:b].transpose(0, 1)[None] for t in (q, k, v)] for a, b in zip(ends[:-1], ends[1:], strict=True) if a < b]
    wanted = [with_sinks(*part, sinks, None, mods.causal) for part in parts]
    exact, total = (torch.cat([w[i][0].transpose(0, 1) for w in wanted]) for i in range(2))
    assert relative_error(out, exact) < 2e-6 and relative_error(lse, total) < 2e-6
    weights = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, sinks), weights)
    for have, want in zip(found, torch.autograd.grad(exact, (q, k, v, sinks), weights.double()), strict=True):
        assert relative_error(have, want) < 2e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("paged", [False, True])
def test_caches(paged, dtype, device):
    """One query, few, and ragged ones; keys that are split and some that are not; a sequence that is empty."""
    room, sinks = (608 if device == "cpu" else 8192), torch.randn(4, device=device, dtype=dtype)
    lengths = torch.tensor([100, 0, room - 23], dtype=torch.int32, device=device)
    k, v = (torch.randn(3, room, 2, 16, device=device) for _ in range(2))
    where = {}
    if paged:
        where["page_table"] = torch.arange(3 * room // 16, device=device).view(3, -1).int()
    cache = [t.view(-1, 16, 2, 16) if paged else t for t in (k, v)]
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    for queries in (1, 4, None):
        q = torch.randn((7, 4, 16) if queries is None else (3, 4, queries, 16), device=device)
        ragged = {"cu_seqlens_q": starts} if queries is None else {}
        out, lse = cached_attention(q, *cache, lengths, **where, **ragged, sinks=sinks, return_lse=True)
        for i, length in enumerate(lengths.tolist()):
            if queries is None:
                mine = slice(starts[i], starts[i + 1])
                rows, got = q[mine].transpose(0, 1)[None], (out[mine].transpose(0, 1), lse[mine].T)
            else:
                rows, got = q[i : i + 1], (out[i], lse[i])
            if length == 0:
                assert not got[0].any() and torch.equal(got[1], sinks.float()[:, None].expand_as(got[1]))
                continue
            more = length - rows.shape[2]
            keys = (t[i : i + 1, :length].transpose(1, 2) for t in (k, v))
            exact, total, _ = with_sinks(rows, *keys, sinks, None, lambda b, h, q_idx, kv_idx, more=more: kv_idx <= q_idx + more)
            assert relative_error(got[0], exact[0]) < 2e-6 and relative_error(got[1], total[0]) < 2e-6


@pytest.mark.parametrize("device", [*DEVICES, "interpreter"])
@pytest.mark.parametrize("D, room", [(16, 8), (16, 608), (16, 0), (64, 64 * 40)])
def test_tokens_of_no_sequence(D, room, device, monkeypatch):
    """Of a row of queries, those after the last sequence: output 0 and lse -inf. Queries of an empty sequence have its sink. Whether keys
    split or not; without a cache; by the kernel for long prompts, too."""
    if device == "interpreter":
        device, _ = "cpu", monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")
    count = 700 if device == "cuda" and D == 64 else 2
    sinks, dtype = torch.tensor([1.0, 2.0], device=device), torch.float32 if device == "cpu" else torch.bfloat16
    k = torch.randn(3, room, 2, D, device=device, dtype=dtype)
    q = torch.randn(3 * count + 2, 2, D, device=device, dtype=dtype)
    starts = torch.tensor([0, count, 2 * count, 2 * count], device=device, dtype=torch.int32)
    lengths = torch.tensor([room, 0, room], device=device, dtype=torch.int32)
    for more in ({}, {"batch_invariant": True}, {"mask_mod": mods.sliding_window(3)}, {"max_q_len": count}):
        out, lse = cached_attention(q, k, k, lengths, cu_seqlens_q=starts, sinks=sinks, return_lse=True, **{"check": False, **more})
        assert torch.equal(lse[count : 2 * count], sinks.expand(count, 2)) and not out[count:].any()
        assert (lse[2 * count :] == -math.inf).all() and (lse[:count] >= sinks).all() and bool(out[:count].any()) == (room > 0)


@pytest.mark.parametrize("device", DEVICES)
def test_flash_attn(device):
    q, k, v = (torch.randn(2, n, 4, 16, device=device) for n in (20, 30, 30))
    sinks = torch.randn(4, device=device)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, sinks=sinks)
    packed = flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True, sinks=sinks)
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True, sinks=sinks)
    last = [t.transpose(1, 2) for t in (q, k, v)]
    exact, total, _ = with_sinks(*last, sinks, None, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 10)
    for have in (out, packed, cached):
        assert relative_error(have.transpose(1, 2), exact) < 2e-6
    assert relative_error(lse, total) < 2e-6
    with pytest.raises(NotImplementedError, match="sinks requires grad"):
        flash_attn.flash_attn_with_kvcache(q, k, v, sinks=sinks.requires_grad_())


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    """As an operator: forward, gradients, without a graph break."""
    q, k, v = (torch.randn(1, 4, 64, 16, device=device, requires_grad=True) for _ in range(3))
    sinks = torch.randn(4, device=device, requires_grad=True)

    def step(q, k, v, sinks):
        return flex_attention(q, k, v, mask_mod=mods.causal, sinks=sinks.float() * 2, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for call in (step, compiled):
        out, lse = call(q, k, v, sinks)
        exact, total, _ = with_sinks(q, k, v, sinks * 2, None, mods.causal)
        assert relative_error(out, exact) < 2e-6
        found = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))
        for have, want in zip(found, torch.autograd.grad(exact.sum() + total.sum(), (q, k, v, sinks)), strict=True):
            assert relative_error(have, want) < 2e-5


def test_kernels_find_sinks_at_a_place_that_suits_them():
    every = torch.randn(9, 4)
    for sinks in (every[1:, 1][:4], every.flatten()[1:5]):
        found = read_sinks(sinks, 4, sinks.device)
        assert found.is_contiguous() and found.data_ptr() % 16 == 0 and torch.equal(found, sinks)


def test_no_keys():
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8)
    sinks = torch.tensor([1.0, -2.0], requires_grad=True)
    out, (lse, largest, *_) = flex_attention(q, k, k, sinks=sinks, return_aux=AuxRequest(lse=True, max_scores=True))
    assert not out.any() and torch.equal(lse, sinks.detach().view(1, 2, 1).expand(1, 2, 3)) and (largest == -math.inf).all()
    (found,) = torch.autograd.grad(lse.sum(), sinks)
    assert torch.equal(found, torch.tensor([3.0, 3.0]))


@pytest.mark.parametrize(
    "sinks, error, words",
    [
        (torch.zeros(3), ValueError, r"sinks must have shape \(4,\), a logit for each head of query, got \(3,\)"),
        (torch.zeros(1, 4), ValueError, r"sinks must have shape \(4,\)"),
        (torch.zeros(4, dtype=torch.int32), TypeError, "sinks must be float16, bfloat16 or float32, got torch.int32"),
        (torch.zeros(4, dtype=torch.float64), TypeError, "sinks must be .* convert them"),
        (torch.zeros(4, device="meta"), ValueError, "sinks are on meta, but query is on cpu; move them"),
        (torch.zeros(4).to_sparse(), NotImplementedError, "sinks is a sparse tensor"),
        (1.0, TypeError, r"sinks must be a tensor of shape \(4,\), .* got float"),
    ],
)
def test_bad_sinks(sinks, error, words):
    q = torch.randn(1, 4, 8, 16)
    cache, length = torch.randn(1, 8, 4, 16), torch.tensor([8], dtype=torch.int32)
    for call in (
        lambda: flex_attention(q, q, q, sinks=sinks),
        lambda: varlen_attention(*[q[0].transpose(0, 1)] * 3, torch.tensor([0, 8]), sinks=sinks),
        lambda: cached_attention(q, cache, cache, length, sinks=sinks),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("device", DEVICES)
def test_no_sink_without_keys_has_no_gradient(device):
    """lse is the sink: its weight is 1, and that of -inf is 0, as torch.logsumexp has it."""
    q, k = (torch.randn(2, 3, n, 16, device=device, requires_grad=True) for n in (5, 0))
    sinks = torch.tensor([-math.inf, 0.5, -math.inf], device=device, requires_grad=True)
    _, lse = flex_attention(q, k, k, return_lse=True, sinks=sinks)
    weights = torch.rand_like(lse)
    (found,) = torch.autograd.grad((lse.nan_to_num(neginf=0.0) * weights).sum(), sinks)
    assert torch.equal(found, weights.sum((0, 2)) * torch.tensor([0.0, 1.0, 0.0], device=device))
    out, lse = flex_attention(q, k, k, return_lse=True, sinks=sinks)
    (found,) = torch.autograd.grad((out, lse), sinks, (torch.ones_like(out), torch.ones_like(lse)))
    assert torch.equal(found, torch.tensor([0.0, 10.0, 0.0], device=device))


def test_sinks_that_are_folded_in_afterwards():
    """As for a sequence that is split over ranks: the same, and gradients too, with empty rows and sinks of -inf."""
    out, lse = torch.randn(1, 3, 4, 8), torch.tensor([0.3, -math.inf, -2.0, 50.0]).expand(1, 3, 4).clone()
    out[lse == -math.inf] = 0.0
    sinks = torch.tensor([-math.inf, 0.7, -90.0])
    inputs = [t.requires_grad_() for t in (out, lse, sinks)]
    found, total = fold_sinks(*inputs)
    empty = (lse == -math.inf) & (sinks[:, None] == -math.inf)
    exact = torch.stack((lse.double(), sinks.double()[:, None].expand(1, 3, 4))).detach().requires_grad_()
    wanted = torch.logsumexp(exact, 0)
    kept = torch.where(empty, 0.0, (exact[0] - wanted.masked_fill(empty, 0.0)).exp())
    torch.testing.assert_close(total.double(), wanted)
    torch.testing.assert_close(found.double(), out.double() * kept.unsqueeze(-1))
    grads = torch.autograd.grad((found, total), inputs, (torch.ones_like(found), torch.ones_like(total)))
    assert all(g.isfinite().all() for g in grads)
    ((_, of_sinks),) = torch.autograd.grad((wanted.masked_fill(empty, 0.0).sum() + (out.detach().double().sum(-1) * kept).sum(),), exact)
    assert grads[2][0] == 0  # -inf
    torch.testing.assert_close(grads[2][1:].double(), of_sinks.sum((0, 2))[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_tiny_scale_and_sinks_without_gradient(traced, device):
    """Scores are not left unscaled then, and the backward pass has to know it: where a sink is the largest score."""
    q, k, v = (torch.randn(1, 1, 17, 16, device=device, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([1.3], device=device)

    def loss(v):
        return flex_attention(q, k, v, scale=1e-21, sinks=sinks).sum()

    if traced:
        loss = torch.compile(loss, backend="aot_eager", fullgraph=True)
    weight = 17 / (17 + math.exp(1.3)) * torch.ones_like(v)
    torch.testing.assert_close(torch.autograd.grad(loss(v), v)[0], weight)
