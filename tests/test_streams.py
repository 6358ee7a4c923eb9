"""What is derived of a block mask by a call on one stream, and read by calls on others."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torchs_block_mask

from flexpress import create_block_mask, flex_attention, mods
from flexpress.codegen.device.streams import MadeOn
from support.dense import relative_error

LENGTH = 1024


@pytest.fixture
def machine(monkeypatch):
    """A stand-in for a GPU: `current` is the number of its current stream, `seen` what streams were told."""
    found = SimpleNamespace(current=1, seen=[], captures=False)

    def stream(device):
        number = found.current
        return SimpleNamespace(
            number=number, record_event=lambda: f"event of {number}", wait_event=lambda event: found.seen.append((number, event))
        )

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.captures)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.current, raising=False)
    found.tensor = SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", 0), record_stream=lambda stream: found.seen.append((stream.number, "reads"))
    )
    return found


def test_other_streams_wait_once(machine):
    made = MadeOn([machine.tensor])
    made.wait()
    assert not machine.seen  # on the stream that made it
    for machine.current in (2, 3, 2, 1):
        made.wait()
    assert machine.seen == [(2, "event of 1"), (2, "reads"), (3, "event of 1"), (3, "reads")]


def test_nothing_waits_inside_a_graph(machine):
    made = MadeOn([machine.tensor])
    machine.current, machine.captures = 2, True
    made.wait()
    assert not machine.seen
    machine.captures = False
    made.wait()
    assert machine.seen[0] == (2, "event of 1")


def test_copies_wait_for_nothing(machine):
    made = copy.deepcopy(MadeOn([machine.tensor]))
    machine.current = 2
    made.wait()
    assert not machine.seen


def test_tensors_of_a_cpu():
    MadeOn([torch.zeros(3)]).wait()


MASKS = {
    "torch's": (lambda mod: torchs_block_mask(mod, None, None, LENGTH, LENGTH, device="cuda"), False),
    "other blocks": (lambda mod: create_block_mask(mod, None, None, LENGTH, LENGTH, "cuda", BLOCK_SIZE=100), False),
    "transposed lists": (lambda mod: create_block_mask(mod, None, None, LENGTH, LENGTH, "cuda"), True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_masks_on_two_streams(name):
    """The mask is there before either call; what one call derives of it is waited for by the other. What lay in that memory before says
    that nothing is visited."""
    make, backward = MASKS[name]
    q, k, v, do = (torch.randn(2, 4, LENGTH, 64, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3) for i in range(4))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
    gradients = torch.autograd.grad(expected, exact, do.double())

    def run(mask):
        out = flex_attention(q, k, v, block_mask=mask)
        return (out, *torch.autograd.grad(out, (q, k, v), do)) if backward else (out,)

    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in streams:
        with torch.cuda.stream(stream):
            run(make(mods.causal))
            for _ in range(3):
                run(make(lambda b, h, q_idx, kv_idx: q_idx < kv_idx - 100000))
        torch.cuda.synchronize()
    mask = make(mods.causal)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(1_000_000_000)
        run(mask)
    with torch.cuda.stream(streams[1]):
        found = run(mask)
    torch.cuda.synchronize()
    for tensor, double in zip(found, (expected, *gradients), strict=False):
        assert relative_error(tensor.detach(), double.detach()) < 1e-2
