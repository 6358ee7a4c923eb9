"""A kernel more: what it takes to add a candidate, in a test as docs/how_to.md has it in files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flexpress import explain, flex_attention, mods, precompile
from flexpress.codegen import registry
from flexpress.codegen.run import forward
from flexpress.codegen.run.launch import Unusable
from flexpress.inputs import checks
from support.dense import assert_as_accurate


class OneKey:
    """Attention to a single key without mods: every row is that key's value."""

    name = "ONE_KEY"

    def __init__(self, usable: bool = True) -> None:
        self.usable, self.ran = usable, 0

    def fits(self, call) -> str | None:
        if call.score or call.mask or call.extents[3] != 1:
            return "there are mods, or more keys than one"
        return None

    def worthwhile(self, call) -> str | None:
        return None if call.extents[2] > 1 else "one query is no work"

    def prepare(self, call, names, lists):
        def run(tensors, addresses, score, mask, lists) -> None:
            if not self.usable:
                raise Unusable("it spills")
            self.ran += 1
            found = dict(zip(names, tensors, strict=True))
            group = found["Q"].shape[1] // found["K"].shape[1]
            keys, values = (found[name].repeat_interleave(group, 1) for name in ("K", "V"))
            found["O"].copy_(values.expand(found["O"].shape))
            product = (found["Q"].float() * keys.float()).sum(-1)
            found["LSE"].copy_(product * call.scale)
            if "ROWS" in found:  # gradients are wanted: the largest product, and log2 of its weight, which is 1
                found["ROWS"].copy_(torch.stack((product, torch.zeros_like(product)), -1))

        return SimpleNamespace(run=run, launches=(), raw=False, waits=True)


@pytest.fixture
def one_key(monkeypatch):
    registry.clear()
    candidate = OneKey()
    monkeypatch.setattr(forward, "CANDIDATES", (candidate, *forward.CANDIDATES))
    yield candidate
    registry.clear()


def inputs(q_len: int, kv_len: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((4, q_len), (2, kv_len), (2, kv_len)))


def test_it_serves_what_it_fits(one_key):
    q, k, v = inputs(20, 1)
    for _ in range(2):
        out, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    assert one_key.ran == 2 and lse.shape == (2, 4, 20)
    assert_as_accurate(out, q, k, v)
    others = [
        (inputs(20, 2), {}),
        (inputs(1, 1), {}),
        ((q, k, v), {"score_mod": mods.softcap(2.0)}),
        ((q, k, v), {"mask_mod": mods.causal}),
    ]
    for tensors, details in others:
        assert_as_accurate(flex_attention(*tensors, enable_gqa=True, **details), *tensors, **details)
    assert one_key.ran == 2


def test_gradients_through_it(one_key):
    tensors = [t.requires_grad_() for t in inputs(20, 1)]
    out = flex_attention(*tensors, enable_gqa=True)
    gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert one_key.ran == 1
    for found, expected in zip(gradients, (0.0, 0.0, 40.0), strict=True):  # a value gets one from each of 20 queries of two heads
        torch.testing.assert_close(found, torch.full_like(found, expected), atol=1e-5, rtol=1e-5)


def test_it_is_precompiled(one_key):
    for backward in (False, True):
        precompile(*inputs(20, 1), enable_gqa=True, backward=backward)
    assert one_key.ran == 2  # it has no launches: nothing of it is compiled


def test_explain_knows_it(one_key):
    assert explain(*inputs(20, 1), enable_gqa=True).startswith("forward   ONE_KEY")
    assert "not ONE_KEY: there are mods, or more keys than one" in explain(*inputs(20, 2), enable_gqa=True)
    assert "not ONE_KEY: one query is no work" in explain(*inputs(1, 1), enable_gqa=True)


def test_the_next_one_takes_its_place(one_key):
    one_key.usable = False
    q, k, v = inputs(20, 1)
    assert_as_accurate(flex_attention(q, k, v, enable_gqa=True), q, k, v)
    assert "not ONE_KEY: it spills" in explain(q, k, v, enable_gqa=True)


def test_a_user_names_it(one_key, monkeypatch):
    monkeypatch.setitem(checks._OTHER_OPTIONS["BACKEND"][1], "ONE_KEY", "ONE_KEY")
    named = {"enable_gqa": True, "kernel_options": {"BACKEND": "ONE_KEY"}}
    flex_attention(*inputs(1, 1), **named)
    assert one_key.ran == 1
    with pytest.raises(ValueError, match="BACKEND.*names ONE_KEY, but there are mods, or more keys than one"):
        flex_attention(*inputs(20, 2), **named)
