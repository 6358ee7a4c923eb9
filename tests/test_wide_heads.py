"""Head dims beyond 256: in slices side by side, forward, backward, with caches, and values that are a view of the keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from flexpress import cached_attention, explain, export, flex_attention, mods, update_cache, varlen_attention
from flexpress.codegen.plan.hopper_tiles import output_parts
from flexpress.codegen.plan.slices import lies_in, parts_of, slices_of, summed_columns
from support import batches
from support.attention import check_attention
from support.dense import dense_attention, relative_error
from support.devices import DEVICES, for_any
from support.gradients import check_gradients, gradient_problems
from support.problems import problems

DIMS = st.sampled_from([(257, 257), (320, 320), (512, 512), (576, 512), (300, 40), (64, 400), (384, 512)])


def wide(drawn):
    """The same problems with wide heads."""
    return st.builds(lambda p, dims: replace(p, D_QK=dims[0], D_V=dims[1]), drawn, DIMS)


@for_any(lambda device: wide(problems(device)), cpu=24, cuda=24)
def test_any_forward(p, device):
    check_attention(p, device)


@for_any(lambda device: wide(gradient_problems(device)), cpu=16, cuda=16)
def test_any_backward(p, device):
    check_gradients(p, device)


@for_any(lambda device: wide(batches.batches(device)), cpu=20, cuda=24)
def test_any_cache(p, device):
    batches.check(p, device)


@pytest.mark.parametrize("d, widths", [(256, [256]), (257, [256, 64]), (384, [256, 128]), (512, [512]), (520, [512, 64]), (576, [512, 64])])
def test_slices(d, widths):
    assert [s.width for s in slices_of(d)] == widths
    assert [s.start for s in slices_of(d)] == [sum(widths[:i]) for i in range(len(widths))]


def test_which_values_lie_in_whole_slices_of_the_keys():
    assert lies_in(512, 576) and lies_in(512, 512)
    assert not lies_in(400, 576) and not lies_in(576, 512)


@pytest.mark.parametrize("padded", [32, 64, 128, 256])
def test_products_leave_padding_out(padded):
    for d in range(padded // 2 + 1, padded + 1):
        for step in (16, 32):
            found = summed_columns(d, padded, step)
            assert [c.start for c in found] == [sum(c.width for c in found[:i]) for i in range(len(found))]
            assert d <= sum(c.width for c in found) < d + step and all(c.width % step == 0 == c.width & (c.width - 1) for c in found)
        first, *rest = parts_of(d, padded)
        assert first.start == 0 and [part.start for part in rest] == [first.width] * len(rest)
        width = first.width + sum(part.width for part in rest)
        assert d <= width <= padded and (not rest or width <= 0.75 * padded)


@pytest.mark.parametrize(
    "d, padded, widths", [(64, 64, [64]), (80, 128, [64, 16]), (112, 128, [128]), (160, 192, [128, 32]), (192, 192, [128, 64])]
)
def test_outputs_have_accumulators_for_their_columns(d, padded, widths):
    parts = output_parts(d, padded)
    assert [part.width for part in parts] == widths and len({part.name for part in parts}) == len(widths)
    assert [part.start for part in parts] == [sum(widths[:i]) for i in range(len(widths))]
    assert [part.layout for part in parts] == ["", "_REST"][: len(widths)]


def latent(device: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: int, page_size: int = 0, dtype=torch.bfloat16) -> dict:
    """Arguments of cached_attention: one head of 576 columns in a cache, of which the first 512 are the values."""
    generator = torch.Generator().manual_seed(7)
    room = -(-max(kv_lens) // 16) * 16
    table = None
    if page_size:
        table = torch.randperm(len(kv_lens) * room // page_size, generator=generator).int().view(len(kv_lens), -1).to(device)
    shape = (table.numel(), page_size, 1, 576) if page_size else (len(kv_lens), room, 1, 576)
    k_cache = torch.randn(shape, generator=generator).to(device, dtype)
    query = torch.randn(len(q_lens), heads, q_lens[0], 576, generator=generator).to(device, dtype)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    return {"query": query, "k_cache": k_cache, "v_cache": k_cache[..., :512], "kv_len": lens, "page_table": table}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("new", [1, 2])
def test_values_that_are_a_view_of_the_keys(device, page_size, new):
    """Absorbed latent attention: read once, they are the same as values of their own."""
    kv_lens, heads = ((40, 7, 30), 16) if device == "cpu" else ((5000, 7, 3000), 128)
    given = latent(device, (new,) * 3, kv_lens, heads, page_size)
    out = cached_attention(**given, mask_mod=mods.causal, scale=192**-0.5)
    copied = cached_attention(**{**given, "v_cache": given["v_cache"].clone()}, mask_mod=mods.causal, scale=192**-0.5)
    assert relative_error(out, copied.double()) < 4e-3
    for b, n in enumerate(kv_lens):
        keys = given["k_cache"][given["page_table"][b].long()].flatten(0, 1) if page_size else given["k_cache"][b]
        k = keys[:n].transpose(0, 1)[None]
        exact = dense_attention(given["query"][b : b + 1], k, k[..., :512], None, lambda b, h, m, j, n=n: m + n - new >= j, 192**-0.5)[0]
        assert relative_error(out[b : b + 1], exact) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_a_view_of_the_keys_without_a_cache(device):
    """Forward and backward: the gradient of the values is part of that of the keys."""
    length = 40 if device == "cpu" else 700
    q, k = (torch.randn(1, h, length, 576, device=device, dtype=torch.bfloat16).requires_grad_() for h in (4, 1))
    out = flex_attention(q, k, k[..., :512], mask_mod=mods.causal, enable_gqa=True, scale=192**-0.5)
    exact = dense_attention(q, k, k[..., :512], None, mods.causal, 192**-0.5)[0]
    assert relative_error(out, exact) < 1e-2
    upstream = torch.randn(out.shape, device=device, dtype=out.dtype)
    found, expected = (torch.autograd.grad(o, (q, k), upstream.to(o.dtype)) for o in (out, exact))
    assert all(relative_error(a, b.double()) < 2e-2 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_new_keys_go_to_wide_caches(device):
    k_cache, v_cache = (torch.zeros(4, 16, 1, d, device=device) for d in (576, 512))
    key, value = (torch.randn(2, 1, 3, d, device=device) for d in (576, 512))
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    update_cache(key, value, k_cache, v_cache, torch.tensor([15, 3], dtype=torch.int32, device=device), page_table=table)
    for new, cache in ((key, k_cache), (value, v_cache)):
        first = torch.cat([cache[2, 12:], cache[0]])[:3]
        assert torch.equal(first, new[0].transpose(0, 1)) and torch.equal(cache[3, :3], new[1].transpose(0, 1))
        assert cache.count_nonzero() == new.count_nonzero()


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device):
    lens = (20, 33) if device == "cpu" else (300, 700)
    q, k, v = (torch.randn(sum(lens), h, 512, device=device).requires_grad_() for h in (2, 1, 1))
    ends = torch.tensor([0, *lens], device=device).cumsum(0).int()
    out = varlen_attention(q, k, v, ends, mask_mod=mods.causal)
    parts = []
    for begin, end in ((0, lens[0]), (lens[0], sum(lens))):
        one = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
        parts.append(dense_attention(*one, None, mods.causal)[0][0].transpose(0, 1))
    exact = torch.cat(parts)
    assert relative_error(out, exact) < 2e-5
    upstream = torch.randn_like(out)
    found, expected = (torch.autograd.grad(o, (q, k, v), upstream.to(o.dtype)) for o in (out, exact))
    assert all(relative_error(a, b.double()) < 3e-5 for a, b in zip(found, expected, strict=True))


def test_what_is_too_wide():
    def tensors(d_qk: int, d_v: int) -> list[torch.Tensor]:
        return [torch.zeros(1, 1, 8, d) for d in (d_qk, d_qk, d_v)]

    too_wide = [
        ((577, 512), r"query has head_dim 577 \(shape \(1, 1, 8, 577\)\); supported are 1 to 576"),
        ((576, 513), "value has head_dim 513"),
    ]
    for dims, message in too_wide:
        with pytest.raises(NotImplementedError, match=message):
            flex_attention(*tensors(*dims))
    assert "PORTABLE" in explain(*tensors(576, 512), kernel_options={"BACKEND": "PORTABLE"})
    with pytest.raises(NotImplementedError, match="head_dim 300 .*; exported files have backward kernels up to 256, pass backward=False"):
        export(*tensors(300, 300), backward=True)
