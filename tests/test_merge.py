"""Results of attention to parts of the keys are put together: as if all had been one call."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress import flex_attention, merge_attention
from support.dense import dense_attention
from support.devices import DEVICES


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 99), st.sampled_from([1.0, 1e4]))
def test_parts_make_the_whole(sizes, seed, scale):
    """In float64, for values and gradients; some rows see nothing in some parts, or in all."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64).requires_grad_() for n in (5, sum(sizes), sum(sizes)))
    hidden = torch.rand(5, sum(sizes)) < 0.6
    hidden[0] = True

    def attend(first, last):
        scores = (q @ k[:, :, first:last].transpose(-1, -2) * scale).masked_fill(hidden[:, first:last], -torch.inf)
        seen = ~hidden[:, first:last].all(-1)
        lse = torch.where(seen, torch.where(seen[:, None], scores, 0.0).logsumexp(-1), -torch.inf)
        weights = (scores - torch.where(seen, lse, 0.0)[..., None]).exp()
        return weights @ v[:, :, first:last], lse

    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [attend(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    found, whole = merge_attention(*zip(*parts, strict=True)), attend(0, ends[-1])
    for have, want in zip(found, whole, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10)
    d_out, d_lse = torch.randn(found[0].shape), torch.randn(found[1].shape)
    losses = [(out * d_out).sum() + (torch.where(torch.isneginf(lse), 0.0, lse) * d_lse).sum() for out, lse in (found, whole)]
    for have, want in zip(*(torch.autograd.grad(loss, (q, k, v)) for loss in losses), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-9 * max(1.0, scale))


@pytest.mark.parametrize("parts", [1, 3])
def test_derivatives_by_outs_and_lses(parts):
    """Of both orders, by differences; also of parts that are far smaller than others, or empty."""
    torch.manual_seed(0)
    outs = [torch.randn(2, 3, 2, dtype=torch.float64).requires_grad_() for _ in range(parts)]
    lses = [torch.randn(2, 3, dtype=torch.float64) * 5 for _ in range(parts)]
    lses[0][0] = -torch.inf
    finite = [lse.nan_to_num(neginf=0.0).requires_grad_() for lse in lses]

    def merged(*tensors):
        given = [torch.where(torch.isneginf(lse), -torch.inf, x) for lse, x in zip(lses, tensors[parts:], strict=True)]
        out, lse = merge_attention(tensors[:parts], given)
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(merged, (*outs, *finite))
    assert torch.autograd.gradgradcheck(merged, (*outs, *finite))


def test_an_empty_part_is_not_read():
    torch.manual_seed(0)
    out, lse = torch.randn(1, 2, 3, 4).requires_grad_(), torch.randn(1, 2, 3).requires_grad_()
    poison, empty = torch.full_like(out, torch.nan).detach().requires_grad_(), torch.full_like(lse, -torch.inf).detach().requires_grad_()
    found = merge_attention([poison, out], [empty, lse])
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    d_out, d_empty, d_poison = torch.autograd.grad(found[0].sum() + found[1].sum(), (out, empty, poison))
    assert torch.equal(d_out, torch.ones_like(out)) and not d_empty.any() and not d_poison.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_part_that_failed_is_seen_in_what_is_merged(bad):
    """Only -inf says that a part has no keys. What is merged of others is NaN, however they are merged."""
    outs, lses = torch.randn(3, 1, 2, 4, 8), torch.randn(3, 1, 2, 4)
    lses[0, 0, 1] = bad
    for parts in ([0, 1, 2], [2, 1, 0]):
        out, lse = merge_attention([outs[i] for i in parts], [lses[i] for i in parts])
        first = merge_attention([outs[i] for i in parts[:2]], [lses[i] for i in parts[:2]])
        again = merge_attention([first[0], outs[parts[2]]], [first[1], lses[parts[2]]])
        for found in (lse, out, again[1], again[0]):
            assert found[0, 1].isnan().all() and found[0, 0].isfinite().all()


def test_precisions():
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        merged, found = merge_attention([out.to(dtype)] * 2, [lse] * 2)
        assert merged.dtype == dtype and found.dtype == expected
        torch.testing.assert_close(found, lse.to(expected) + math.log(2.0))


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device):
    """In one graph with the calls that make the parts, gradients and all."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16, device=device).requires_grad_() for _ in range(3))

    def attend(q, k, v):
        parts = [flex_attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 32), slice(32, 64))]
        return merge_attention([out for out, _ in parts], [lse for _, lse in parts])

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for function in (attend, compiled):
        out, lse = function(q, k, v)
        results.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), (q, k, v))))
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("device", DEVICES)
def test_of_kernels(device):
    q, k, v = (torch.randn(1, 2, 70, 16, device=device).requires_grad_() for _ in range(3))
    parts = [flex_attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 33), slice(33, 70))]
    out, lse = merge_attention(*zip(*parts, strict=True))
    exact, exact_lse, _ = dense_attention(q, k, v)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5 if device == "cpu" else 2e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5 if device == "cpu" else 2e-3)
    d_out = torch.randn_like(out)
    for have, want in zip(
        torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True), torch.autograd.grad(exact, (q, k, v), d_out.double()), strict=True
    ):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-4 if device == "cpu" else 1e-2)


def test_shapes_that_do_not_fit():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="needs an lse for each out, and at least one, got 2 outs and 1 lses"):
        merge_attention([out, out], [lse])
    with pytest.raises(TypeError, match="outs and lses must be floating-point, as flex_attention returns them, got torch.int64"):
        merge_attention([torch.ones(2, 3, dtype=torch.int64)], [torch.zeros(2)])
    with pytest.raises(ValueError, match=r"all lses \(..., Q_LEN\), got"):
        merge_attention([out, out[:, :1]], [lse, lse])


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
BAD = {
    "nothing": (None, [LSE], TypeError, "outs must be a list of tensors, .* got NoneType"),
    "a number": ([OUT], 5, TypeError, "lses must be a list of tensors, .* got int"),
    "a number as tensor": (torch.tensor(1.0), [LSE], TypeError, "outs must be a list .* got one of no dimension"),
    "no part": ([OUT, None], [LSE, LSE], TypeError, r"outs\[1\] must be a torch.Tensor, got NoneType"),
    "an array": ([OUT], [LSE.numpy()], TypeError, r"lses\[0\] must be a torch.Tensor, got ndarray"),
    "a list": ([[1.0]], [LSE], TypeError, r"outs\[0\] must be a torch.Tensor, got list"),
    "float8": ([OUT.to(torch.float8_e4m3fn)], [LSE], TypeError, "outs and lses must be floating-point, .* got torch.float8_e4m3fn"),
    "another device": ([OUT, OUT.to("meta")], [LSE, LSE], ValueError, "must be on one device, got cpu, meta and cpu, cpu"),
    "sparse": ([OUT, OUT.to_sparse()], [LSE, LSE], TypeError, r"outs\[1\] must be a dense tensor, .* torch.sparse_coo"),
    "no dimension": ([OUT.sum()], [LSE.sum()], ValueError, r"all outs must have one shape \(..., Q_LEN, D_V\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_parts_that_are_none(case):
    outs, lses, error, message = BAD[case]
    with pytest.raises(error, match=message):
        merge_attention(outs, lses)


@pytest.mark.parametrize("strict", [False, True])
def test_export_for_any_length(strict):
    class Merged(torch.nn.Module):
        def forward(self, a, b, lse_a, lse_b):
            return merge_attention([a, b], [lse_a, lse_b])

    def parts(length):
        return *torch.randn(2, 1, 2, length, 8), *torch.randn(2, 1, 2, length)

    length = torch.export.Dim("length", max=999)
    made = torch.export.export(Merged(), parts(9), dynamic_shapes=({2: length},) * 4, strict=strict).module()
    x = parts(17)
    for have, want in zip(made(*x), Merged()(*x), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_of_half_precision_alone_are_merged_in_float32(dtype):
    """Also where lses have it, too; 4096 parts that are all the same add up to more than halves count."""
    out, lse = merge_attention(torch.ones(4096, 3, 2, dtype=dtype), torch.zeros(4096, 3, dtype=dtype))
    assert out.dtype == dtype and (out == 1).all()
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.full((3,), 4096.0).log(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_inside_transforms(device):
    q, k, v = torch.randn(3, 1, 2, 20, 8, device=device).unbind()

    def merged(q):
        parts = (flex_attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(7), slice(7, 20)))
        return merge_attention(*zip(*parts, strict=True))[0]

    def whole(q):
        return flex_attention(q, k, v)

    for along in (
        lambda f: torch.func.jvp(f, (q,), (k,))[1],
        lambda f: torch.func.grad(lambda q: f(q).square().sum())(q),
        lambda f: torch.func.vmap(f)(torch.stack([q, k])),
    ):
        torch.testing.assert_close(along(merged), along(whole), rtol=1e-4, atol=1e-5)
