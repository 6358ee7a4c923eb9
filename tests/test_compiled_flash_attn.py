"""flash_attn's functions and scaled_dot_product_attention inside torch.compile(fullgraph=True): results and gradients as in eager mode."""

from __future__ import annotations

import pytest
import torch

from flexpress import flash, flash_attn, scaled_dot_product_attention
from support.devices import DEVICES

pytest.importorskip("torch._dynamo")
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("backend", ["aot_eager", "export"])
def test_tables_are_looked_at_before_compiled_code_writes(backend):
    """On a CPU, as in eager mode: for room, lengths, entries, padding, pages and two tokens with one place."""
    generator = torch.Generator().manual_seed(2)
    q, new, cache = (torch.randn(shape, generator=generator) for shape in ((2, 1, 4, 16), (2, 1, 2, 16), (2, 8, 2, 16)))
    ints = lambda *n: torch.tensor(n, dtype=torch.int32)  # noqa: E731

    def whole(q, k, k_cache, v_cache, lengths, entries):
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=lengths, cache_batch_idx=entries)

    def paged(q, k, k_cache, v_cache, lengths, entries):
        padding, table = (lengths - 3).clone(), entries.view(2, 1)
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=3, cache_leftpad=padding, block_table=table)

    def packed(q, k, k_cache, v_cache, lengths, entries):
        starts, table = ints(0, 1, 2), entries.view(2, 1)
        held = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return flash_attn.flash_attn_varlen_func(q[:, 0], k_cache, v_cache, starts, held, 1, 8, block_table=table)

    for run, cases in (
        (whole, (((8, 3), (0, 1)), ((-3, 3), (0, 1)), ((3, 3), (0, 7)), ((3, 3), (0, 0)))),
        (paged, (((2, 3), (0, 1)), ((3, 13), (0, 1)), ((3, 3), (0, 7)), ((3, 3), (1, 1)))),
        (packed, (((9, 3), (0, 1)), ((3, 3), (0, -1)))),
    ):
        fine = q, new, cache.clone(), cache.clone(), ints(3, 4), ints(0, 1)
        if backend == "export":
            module = type("Step", (torch.nn.Module,), {"forward": lambda self, *given, run=run: run(*given)})()
            compiled = torch.export.export(module, fine).module()
        else:
            compiled = torch.compile(run, backend=backend, fullgraph=True)
        again = *fine[:2], cache.clone(), cache.clone(), *fine[4:]
        assert torch.equal(compiled(*fine), run(*again)) and torch.equal(fine[2], again[2])
        for lengths, entries in cases:
            for attend in (run, compiled):
                caches = cache.clone(), cache.clone()
                with pytest.raises(ValueError, match="room for|names|both write"):
                    attend(q, new, *caches, ints(*lengths), ints(*entries))
                assert all(torch.equal(c, cache) for c in caches)


def random(*shape, device):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device).requires_grad_()


def offsets(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def dense(device):
    def run(q, k, v, slopes, left):
        return flash_attn.flash_attn_func(q * 2, k, v, causal=True, window_size=(left, -1), softcap=3.0, alibi_slopes=slopes)

    return run, [random(2, 20, 4, 16, device=device), *[random(2, 30, 2, 16, device=device)] * 2, random(4, device=device)], (5, 9, 12)


def both_functions_of_one_name(device):
    """flexpress.flash has one too, with another meaning."""

    def run(q, k, v, left):
        new = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(left, 0), return_attn_probs=True)
        return flash.flash_attn_func(q, k, v, causal=True), *new[:2]

    return run, [random(1, 20, 2, 16, device=device), *[random(1, 30, 2, 16, device=device)] * 2], (3, 4)


def packed(device):
    cu_q, cu_k = offsets(0, 9, 9, 20, device=device), offsets(0, 4, 14, 30, device=device)

    def run(q, k, v, right):
        return flash_attn.flash_attn_varlen_func(q + 1, k, v, cu_q, cu_k, 11, 16, window_size=(6, right), return_attn_probs=True)[:2]

    return run, [random(20, 4, 16, device=device), *[random(30, 2, 16, device=device)] * 2], (3, 4, 8)


def packed_triples(device):
    cu = offsets(0, 9, 9, 20, device=device)
    run = lambda qkv, cap: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 11, causal=True, softcap=cap)
    return run, [random(20, 3, 2, 16, device=device)], (3.0, 4.0)


def sdpa(device):
    def run(q, k, v, mask, scale):
        first = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        return first, scaled_dot_product_attention(first[0], k[0, :1], v[0, :1], is_causal=True)

    tensors = random(2, 4, 20, 16, device=device), *[random(2, 2, 20, 16, device=device)] * 2, random(4, 1, 20, device=device)
    return run, list(tensors), (0.3, 0.4)


CASES = [dense, both_functions_of_one_name, packed, packed_triples, sdpa]


def run_and_differentiate(call, tensors, number):
    found = call(*tensors, number)
    found = found if isinstance(found, tuple) else (found,)
    loss = sum(t.nan_to_num(neginf=0.0).square().mean() for t in found)
    return *found, *torch.autograd.grad(loss, tensors)


def check(case, device, backend, **options):
    run, tensors, numbers = case(device)
    compiled = torch.compile(run, backend=backend, fullgraph=True, **options)
    for number in numbers:
        for got, want in zip(run_and_differentiate(compiled, tensors, number), run_and_differentiate(run, tensors, number), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_as_in_eager_mode(case, device):
    check(case, device, "aot_eager")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [dense, packed])
def test_dynamic_from_the_start(case, device):
    check(case, device, "aot_eager", dynamic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_by_inductor(case):
    check(case, "cuda", "inductor")


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_with_a_cache(device):
    """Caches are written in place, as in eager mode."""

    @torch.no_grad()
    def step(q, k_cache, v_cache, new, cos, sin, lengths):
        rotary = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
        out = flash_attn.flash_attn_with_kvcache(q * 2, k_cache, v_cache, new, new, cache_seqlens=lengths, causal=True, **rotary)
        return out + 1, lengths + 1

    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        q, new = (random(2, 1, h, 16, device=device).detach() for h in (4, 2))
        caches = [random(2, 12, 2, 16, device=device).detach().clone() for _ in range(2)]
        tables, lengths, outs = [random(12, 4, device=device).detach()] * 2, offsets(3, 7, device=device), []
        for _ in range(3):
            out, lengths = run(q, *caches, new, *tables, lengths)
            outs.append(out)
        results.append([*outs, *caches, lengths])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
