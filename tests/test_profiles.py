"""Mods have names in profiles; where nobody profiles, a call is as it was."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flexpress import cached_attention, flex_attention, mods, varlen_attention
from flexpress.codegen.run import forward, profiled
from support.devices import DEVICES


def ranges(call, device: str) -> list[str]:
    """The names that a profile of a call shows."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as found:
        call()
    return sorted({event.name for event in found.events() if event.name.startswith("flexpress: ")})


@pytest.mark.parametrize("device", DEVICES)
def test_forward_and_backward_have_the_names_of_their_mods(device):
    q, k, v = (torch.randn(1, 2, 20, 16, device=device, requires_grad=True) for _ in range(3))
    score_mod = mods.alibi(torch.rand(2, device=device))

    def call():
        flex_attention(q, k, v, score_mod, mask_mod=mods.causal).sum().backward()

    for _ in range(2):  # the second one is a repeated call
        assert ranges(call, device) == ["flexpress: alibi+causal backward", "flexpress: alibi+causal forward"]
    assert ranges(lambda: flex_attention(q, k, v), device) == ["flexpress: forward"]
    assert ranges(lambda: flex_attention(q[:, :, :1], k, v, score_mod), device) == ["flexpress: alibi forward"]


@pytest.mark.parametrize("device", DEVICES)
def test_other_calls_have_names(device):
    q = torch.randn(20, 2, 16, device=device)
    cu_seqlens = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)
    found = ranges(lambda: varlen_attention(q, q, q, cu_seqlens, mask_mod=mods.causal), device)
    assert found == ["flexpress: varlen_causal forward"]
    keys = torch.randn(1, 40, 2, 16, device=device)
    kv_len = torch.tensor([33], dtype=torch.int32, device=device)
    query = torch.randn(1, 2, 3, 16, device=device)
    call = lambda **more: lambda: cached_attention(query, keys, keys, kv_len, **more)
    assert ranges(call(), device) == ["flexpress: causal cached_attention"]
    assert ranges(call(score_mod=mods.softcap(3.0), mask_mod=mods.sliding_window(9)), device) == [
        "flexpress: softcap+sliding_window cached_attention"
    ]


def test_a_compiled_call_has_them_too():
    q = torch.randn(1, 2, 20, 16)
    call = torch.compile(lambda q: flex_attention(q, q, q, mask_mod=mods.causal), backend="eager", fullgraph=True)
    call(q)
    assert ranges(lambda: call(q), "cpu") == ["flexpress: causal forward"]


def test_nothing_is_made_where_nobody_profiles(monkeypatch):
    def unexpected(*_):
        raise AssertionError("a range is made")

    monkeypatch.setattr(forward, "in_range", unexpected)
    q = torch.randn(1, 2, 20, 16)
    flex_attention(q, q, q)
    assert not profiled.is_profiled()


@pytest.mark.gpu
def test_nvtx_ranges_have_them(monkeypatch):
    pushed = []
    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", lambda self: pushed.append(self.name))
    monkeypatch.setattr(torch.autograd.profiler.record_function, "__exit__", lambda *_: None)
    q = torch.randn(1, 2, 20, 16, device="cuda")
    with torch.autograd.profiler.emit_nvtx():
        flex_attention(q, q, q, mask_mod=mods.causal)
    assert "flexpress: causal forward" in pushed
