"""Dot products of long rows in packed sequences, in decoding and with caches, in compiled programs and in exported files."""

from __future__ import annotations

import pytest
import torch

from flexpress import AuxRequest, ModError, cached_attention, explain, export, flex_attention, varlen_attention
from support.dense import dense_attention
from support.devices import DEVICES

H, D, WIDTH = 4, 32, 40


def rows(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    "device, lengths",
    [("cpu", [30, 0, 45, 80]), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in ([30, 0, 45, 80], [600, 700], [515]))],
)
def test_packed_sequences(device, lengths):
    total, most = sum(lengths), max(lengths)
    q, k, v, qr, kr = rows(device, (total, H, D), (total, 2, D), (total, 2, D), (len(lengths), most, WIDTH), (len(lengths), most, WIDTH))
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    out = varlen_attention(q, k, v, ends, score_mod=lambda s, b, h, q_idx, kv_idx: s + 0.2 * torch.dot(qr[b, q_idx], kr[b, kv_idx]))
    parts = []
    for s, n in ((s, n) for s, n in enumerate(lengths) if n):
        here = slice(ends[s], ends[s + 1])
        bias = 0.2 * qr[s, :n].double() @ kr[s, :n].double().T
        found, *_ = dense_attention(*(t[here].transpose(0, 1)[None] for t in (q, k, v)), lambda score, *_, bias=bias: score + bias)
        parts.append(found[0].transpose(0, 1))
    exact = torch.cat(parts)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(device)
    for got, expected in zip(*(torch.autograd.grad(o, [q, k, v, qr, kr], upstream.to(o.dtype)) for o in (out, exact)), strict=True):
        assert (got - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(0, None), (None, 1), (0, 0)])
def test_mapped_rows(dims, device):
    """Each call of vmap has its own rows, and its own gradients."""
    q, k, v, *each = (
        t.detach() for t in rows(device, (2, H, 9, D), (2, 2, 12, D), (2, 2, 12, D), *[(H, 9, WIDTH)] * 3, *[(12, WIDTH)] * 3)
    )
    stacked = [torch.stack(parts, dim) if dim is not None else parts[0] for parts, dim in zip((each[:3], each[3:]), dims, strict=True)]

    def total(qr, kr):
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + 0.2 * torch.dot(qr[h, i], kr[j]), enable_gqa=True)
        return out.square().sum(), out

    found = torch.func.vmap(torch.func.grad(total, argnums=(0, 1), has_aux=True), in_dims=dims)(*stacked)
    for n in range(3):
        x = [
            (parts[n] if dim is not None else parts[0]).double().requires_grad_()
            for parts, dim in zip((each[:3], each[3:]), dims, strict=True)
        ]
        bias = 0.2 * x[0] @ x[1].T
        exact, *_ = dense_attention(q, k, v, lambda score, *_, bias=bias: score + bias)
        torch.testing.assert_close(found[1][n].double(), exact, atol=1e-5, rtol=1e-5)
        for got, expected in zip(found[0], torch.autograd.grad(exact.square().sum(), x), strict=True):
            assert (got[n] - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(33, 70), (9, 5), (130, 200)])
def test_statistics_of_the_probabilities(lengths, device):
    M, N = lengths
    q, k, qr, kr = (t.detach() for t in rows(device, (2, H, M, D), (2, 2, N, D), (M, WIDTH), (2, N, WIDTH)))

    def attend(mod):
        request = AuxRequest(entropy=True, column_sums=True)
        return flex_attention(q, k, k, mod, mask_mod=lambda b, h, i, j: i + 3 >= j, enable_gqa=True, return_aux=request)[1]

    found = attend(lambda s, b, h, i, j: s + 0.2 * torch.dot(qr[i], kr[b, j]))
    bias = 0.2 * qr.double() @ kr.double().transpose(-1, -2)
    wanted = attend(lambda s, b, h, i, j: s + bias[b, i, j])
    torch.testing.assert_close(found.entropy, wanted.entropy, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found.column_sums, wanted.column_sums, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_few_queries(device):
    q, k, v, qr, kr = (t.detach() for t in rows(device, (2, H, 3, D), (2, 2, 700, D), (2, 2, 700, D), (2, H, 3, WIDTH), (2, 700, WIDTH)))
    mod = lambda score, b, h, q_idx, kv_idx: score + (qr[b, h, q_idx] * kr[b, kv_idx]).sum(-1)  # noqa: E731
    assert any(name in explain(q, k, v, score_mod=mod, enable_gqa=True) for name in ("DECODE", "CPP"))
    exact, *_ = dense_attention(q, k, v, lambda score, *_: score + (qr @ kr[:, None].transpose(-1, -2)).double())
    torch.testing.assert_close(flex_attention(q, k, v, mod, enable_gqa=True).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ragged", [False, True])
def test_paged_caches(device, ragged):
    lengths, new, pages = [37, 90], 5, 6
    shapes = (2 * pages, 16, 2, D), (2 * pages, 16, 2, D), (2, H, new, D), (2, H, 96, WIDTH), (2, 96, WIDTH), (2, H, 96, WIDTH)
    keys, values, q, qr, kr, by_head = (t.detach() for t in rows(device, *shapes))
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(7)).int().view(2, pages).to(device)
    mod = lambda score, b, h, q_idx, kv_idx: score + 0.2 * torch.dot(qr[b, h, q_idx], kr[b, kv_idx])  # noqa: E731
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    query = q.transpose(1, 2).reshape(2 * new, H, D) if ragged else q
    starts = {"cu_seqlens_q": torch.tensor([0, new, 2 * new], dtype=torch.int32, device=device)} if ragged else {}
    out = cached_attention(query, keys, values, held, page_table=table, score_mod=mod, **starts)
    out = out.view(2, new, H, D).transpose(1, 2) if ragged else out
    for s, n in enumerate(lengths):
        k, v = (t[table[s].long()].reshape(-1, 2, D)[:n].transpose(0, 1)[None] for t in (keys, values))
        bias = 0.2 * qr[s, :, n - new : n].double() @ kr[s, :n].double().T
        exact, *_ = dense_attention(q[s : s + 1], k, v, lambda score, *_, bias=bias: score + bias, lambda b, h, i, j, n=n: j <= i + n - new)
        torch.testing.assert_close(out[s].double(), exact[0], atol=1e-5, rtol=1e-5)
    refused = lambda score, b, h, q_idx, kv_idx: score + torch.dot(qr[b, h, q_idx], by_head[b, h, kv_idx])  # noqa: E731
    with pytest.raises(ModError, match="(?s)a dot product of 40 elements with a row read by kv_idx and h.*File.*read it by b and kv_idx"):
        cached_attention(query, keys, values, held, page_table=table, score_mod=refused, **starts)


def test_a_program_of_torchs_compiler():
    q, k, v, qr, kr = rows("cpu", (1, 2, 40, D), (1, 2, 40, D), (1, 2, 40, D), (40, WIDTH), (40, WIDTH))

    def attend(q, k, v, qr, kr):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + torch.dot(qr[q_idx], kr[kv_idx]))

    inputs = q, k, v, qr, kr
    out, compiled = attend(*inputs), torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs)
    assert torch.equal(out, compiled)
    for one, other in zip(*(torch.autograd.grad(o.sum(), inputs) for o in (out, compiled)), strict=True):
        assert torch.equal(one, other)


def test_exported_files_refuse():
    q, qr = torch.randn(1, 2, 40, D), torch.randn(40, WIDTH)
    with pytest.raises(NotImplementedError, match="dot product of 40 elements of captured rows.*Write the rows behind query and key"):
        export(q, q, q, score_mod=lambda score, b, h, q_idx, kv_idx: score + qr[q_idx] @ qr[kv_idx])
