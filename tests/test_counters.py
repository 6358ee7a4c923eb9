"""Counters of kernels in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flexpress import create_block_mask, flex_attention, mods
from flexpress.codegen.device import counters


@pytest.fixture
def capture(monkeypatch):
    """Streams of "cpu" are captured into the graph of which `capture.number` is set to the number. There are three counters to spare."""

    class Capture:
        number: int | None = 1

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(counters, "capture_number", lambda stream: Capture.number)
    monkeypatch.setitem(counters._spare, torch.device("cpu"), counters._Spare(torch.zeros(3, 4, dtype=torch.int32)))
    return Capture


def test_kernels_of_a_graph_share_one_on_each_stream(capture):
    device = torch.device("cpu")
    first = counters.counter(device, 5)
    with counters.held_counter(device, 5) as held:
        assert held is first
    other_stream = counters.counter(device, 6)
    assert counters.counter(device, 5) is first and counters.counter(device, 6) is other_stream
    capture.number = 2
    other_graph = counters.counter(device, 5)
    assert len({t.data_ptr() for t in (first, other_stream, other_graph)}) == 3


def test_none_serves_a_second_graph(capture):
    device, found = torch.device("cpu"), []
    for capture.number in range(5):
        found.append(counters.counter(device, 5))
        found.append(counters.counter(device, 5))
    pointers = [t.data_ptr() for t in found]
    assert pointers[0] == pointers[1] and pointers[2] == pointers[3] and pointers[4] == pointers[5]
    assert len(set(pointers)) == 3 + 4  # when there are no more, each call gets its own, set to zero
    assert all(t.dtype == torch.int32 and t.numel() >= 2 and not t.any() for t in found)


def test_a_driver_that_does_not_tell_captures_apart(capture):
    capture.number = None
    assert counters.counter(torch.device("cpu"), 5).data_ptr() != counters.counter(torch.device("cpu"), 5).data_ptr()


@pytest.mark.gpu
def test_a_graph_consists_of_the_kernels_alone():
    """Memory set to zero for each call would be one more, of a microsecond."""
    q, k, v = (torch.randn(2, 8, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(mods.causal, None, None, 1024, 1024, device="cuda")
    call = lambda: flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "HOPPER"})
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for _ in range(3)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 3 and all("hopper_forward" in name for name in names), names
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.gpu
def test_graphs_run_beside_each_other():
    graphs, streams = [torch.cuda.CUDAGraph() for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    problems = [[torch.randn(2, 16, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)] for _ in graphs]
    found = []

    def call(qkv):
        out = flex_attention(*qkv, mask_mod=mods.causal, kernel_options={"BACKEND": "HOPPER"})
        return torch.autograd.grad(out.float().square().sum(), qkv)

    expected = [call(qkv) for qkv in problems]
    for graph, qkv in zip(graphs, problems, strict=True):
        with torch.cuda.graph(graph):
            found.append([call(qkv) for _ in range(4)])
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for calls, wanted in zip(found, expected, strict=True):
        for grads in calls:
            for mine, g in zip(grads, wanted, strict=True):
                torch.testing.assert_close(mine, g, rtol=2e-2, atol=2e-2)
