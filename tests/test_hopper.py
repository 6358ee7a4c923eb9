"""The kernels for Hopper on a Hopper GPU: every problem that they serve, whether or not the portable kernels would be chosen."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import create_block_mask, explain, flex_attention, mods, printed_kernels
from flexpress.codegen.device import counters
from flexpress.codegen.run import backward_kernels, forward_kernels
from flexpress.inputs import checks
from support import shifts
from support.attention import check_attention
from support.gradients import check_gradients, gradient_problems
from support.problems import problems

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
    pytest.mark.skipif(checks.DEFAULT.backend == "PORTABLE", reason="--backend TRITON"),
]


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """Small problems as well."""
    for kernels in (forward_kernels, backward_kernels):
        monkeypatch.setattr(kernels, "worthwhile", lambda *_: None)


def poison() -> None:
    """Fill memory that is then free with NaN: what a kernel does not write shows."""
    torch.full((1 << 26,), float("nan"), device="cuda")


@st.composite
def served(draw, drawn, head_dims, widest):
    """Problems with such head dims, of V up to `widest`."""
    D_QK = draw(st.sampled_from(head_dims))
    others = st.sampled_from([d for d in head_dims if d <= widest])
    return replace(
        draw(drawn),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        D_QK=D_QK,
        D_V=draw(st.one_of(st.just(D_QK), others) if widest >= D_QK else others),
        layouts=draw(st.tuples(*[st.sampled_from(["contiguous", "bshd"])] * 3)),
        BLOCK_SIZE=draw(st.sampled_from([128, 256, (128, 256), (256, 128)])),
        USE_TMA=None,
    )


def ran(name: str) -> int:
    return sum(path.stem.startswith(name) for path in printed_kernels())


@settings(max_examples=40)
@given(served(problems("cuda"), [24, 32, 40, 64, 72, 80, 96, 128, 136, 160, 192, 200, 256], widest=256))
def test_any_forward(p):
    poison()
    check_attention(p, "cuda")


@settings(max_examples=30)
@given(served(gradient_problems("cuda"), [24, 32, 40, 64, 72, 80, 96, 128, 136, 192], widest=128))
def test_any_backward(p):
    poison()
    check_gradients(replace(p, deterministic=False), "cuda")


@settings(max_examples=12)
@given(served(gradient_problems("cuda"), [136, 160, 192, 256], widest=256))
def test_any_wide_backward(p):
    poison()
    check_gradients(replace(p, deterministic=False), "cuda")


@settings(max_examples=12)
@given(st.one_of(served(gradient_problems("cuda"), [40, 64, 128], widest=128), served(gradient_problems("cuda"), [160, 256], widest=256)))
def test_any_backward_head_by_head(p):
    """With groups of one key/value head, as long sequences have them: tiles of one zero the sums of dQ of the next."""
    poison()
    with mock.patch.object(backward_kernels, "L2_BYTES", 1):
        check_gradients(replace(p, deterministic=False), "cuda")


@st.composite
def elsewhere(draw):
    D = draw(st.sampled_from([40, 64, 128, 192, 256]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    return replace(draw(shifts.problems("cuda")), D=D, Dv=draw(st.sampled_from([min(D, 128), D])), dtype=dtype, deterministic=False)


@settings(max_examples=40)
@given(elsewhere())
def test_any_blocks_elsewhere(p):
    poison()
    shifts.check_problem(p, "cuda")


def test_they_ran():
    """The problems above reach the kernels that they are for (the file's tests run in order)."""
    q = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert explain(q, q, q) == "forward   HOPPER; not DECODE: query has 300 positions, more than 16\nbackward  HOPPER"
    before = ran("hopper_forward"), ran("hopper_backward")
    flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score * 0.123).sum().backward()
    assert (ran("hopper_forward"), ran("hopper_backward")) == (before[0] + 1, before[1] + 1)


def inputs(length=1500, head_dim=128, heads=8):
    return [torch.randn(2, heads, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("masked", [False, True])
def test_repeats_are_bitwise_equal(head_dim, masked):
    """Which program computes a tile varies, the result does not; nor does dK or dV. Deterministic gradients do not vary at all."""
    q, k, v = inputs(head_dim=head_dim)
    mask = create_block_mask(mods.causal, None, None, 1500, 1500, "cuda") if masked else None
    first = flex_attention(q, k, v, block_mask=mask)
    grads = torch.autograd.grad(first, (q, k, v), first.detach(), retain_graph=True)
    exact = torch.autograd.grad(flex_attention(q, k, v, block_mask=mask, deterministic=True), (q, k, v), first.detach())
    for _ in range(200):
        out = flex_attention(q, k, v, block_mask=mask)
        assert torch.equal(out, first)
        assert all(torch.equal(g, e) for g, e in zip(torch.autograd.grad(out, (q, k, v), first.detach())[1:], grads[1:], strict=True))
    for _ in range(20):
        out = flex_attention(q, k, v, block_mask=mask, deterministic=True)
        assert all(torch.equal(g, e) for g, e in zip(torch.autograd.grad(out, (q, k, v), first.detach()), exact, strict=True))
    torch.cuda.synchronize()
    assert not any(counter.any() for counter in counters._counters.values())


def test_streams_and_graphs_beside_each_other():
    """Every stream, and every CUDA graph, has a tile counter of its own."""
    with torch.no_grad():
        sets = [inputs(length) for length in (700, 1500, 2500)]
        expected = [flex_attention(*s) for s in sets]
        streams, graphs, outs = [torch.cuda.Stream() for _ in sets], [], []
        for s in sets:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs.append(flex_attention(*s))
            graphs.append(graph)
        for _ in range(30):
            found = []
            for o in outs:
                o.fill_(float("nan"))
            torch.cuda.synchronize()
            for stream, graph, s in zip(streams, graphs, sets, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
                    found.append(flex_attention(*s))
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found + outs, expected * 2, strict=True))


def test_backward_on_streams_beside_each_other():
    """Programs of one kernel take multiprocessors from the other, and wait for tiles that are not done."""
    sets = [inputs(length) for length in (700, 1500, 2500)]
    outs = [flex_attention(*s) for s in sets]
    expected = [torch.autograd.grad(o, s, o.detach(), retain_graph=True) for o, s in zip(outs, sets, strict=True)]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    for _ in range(30):
        found = []
        for stream, o, s in zip(streams, outs, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(torch.autograd.grad(o, s, o.detach(), retain_graph=True))
        torch.cuda.synchronize()
        for grads, known in zip(found, expected, strict=True):
            assert (grads[0] - known[0]).abs().max() <= 0.01 * known[0].abs().max()
            assert all(torch.equal(g, e) for g, e in zip(grads[1:], known[1:], strict=True))
    assert not any(counter.any() for counter in counters._counters.values())
