"""Activation checkpoints: what the forward pass saves comes from a recomputation, which other traces and other kernels may serve."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flexpress import flex_attention, mods, varlen_attention
from flexpress.codegen import registry
from support.dense import dense_attention, relative_error
from support.devices import DEVICES
from support.fake_hopper import forward_on_cpu

SAVED = [torch.ops.flexpress.flex_attention.default, torch.ops.aten.exp.default]
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, SAVED)
KINDS = {"whole": {}, "selective": {"context_fn": SELECTIVE}}


class Layer(torch.nn.Module):
    """Attention whose score_mod computes with a parameter, and is another one for local layers."""

    def __init__(self, local: bool, device: str) -> None:
        super().__init__()
        self.local, self.slopes = local, torch.nn.Parameter(torch.tensor([-1.0, -2.0], device=device))

    def score_mod(self, score, b, h, q_idx, kv_idx):
        slopes = self.slopes.exp()
        if self.local:
            return score - slopes[h] * (q_idx - kv_idx).abs()
        return score + slopes[h] * 0.01 * kv_idx

    def forward(self, x, exact=False):
        if exact:
            return x + dense_attention(x, x, x, self.score_mod)[0]
        return x + flex_attention(x, x, x, self.score_mod)


def compared(layers, x, options: dict) -> None:
    """Gradients of parameters, through checkpoints, beside those of dense attention."""
    learned, found, exact = [layer.slopes for layer in layers], x, x.double()
    for layer in layers:
        found, exact = checkpoint(layer, found, use_reentrant=False, **options), layer(exact, exact=True)
    for mine, right in zip(*(torch.autograd.grad(y.sin().sum(), learned) for y in (found, exact)), strict=True):
        assert relative_error(mine, right) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_one_code_and_two_kernels(device, kind):
    """The second finds the first one's trace, which does not fit. Nobody may see what was computed of captured tensors to find that out."""
    registry.clear()
    layers = [Layer(i % 2 == 0, device) for i in range(3)]
    x = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).to(device)
    for _ in range(2):
        compared(layers, x, KINDS[kind])


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_training_after_an_evaluation(quiet, kind):
    """There the same mod has another trace: what it computes needs no gradient."""
    registry.clear()
    layer, x = Layer(True, "cpu"), torch.randn(1, 2, 40, 16)
    with quiet():
        layer(x)
    compared([layer], x, KINDS[kind])


def test_a_mod_that_is_traced_at_every_call():
    """The first call tries to record it, in vain."""
    weight = torch.rand(2, requires_grad=True)

    def layer(x):
        def score_mod(score, b, h, q_idx, kv_idx):
            slopes = weight.exp()
            return score - slopes[h] * (q_idx - kv_idx) * next(iter([0.5]))

        return flex_attention(x, x, x, score_mod)

    for _ in range(2):
        x = torch.randn(1, 2, 30, 16, requires_grad=True)
        found = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sin().sum(), (x, weight))
        for mine, right in zip(found, torch.autograd.grad(layer(x).sin().sum(), (x, weight)), strict=True):
            assert relative_error(mine, right) <= 1e-5


def test_a_compiled_function():
    """The compiler asks what a mod is while the checkpoint counts."""
    weight = torch.rand(2, requires_grad=True)

    @torch.compile(backend="aot_eager")
    def layer(x):
        return flex_attention(x, x, x, lambda score, b, h, q_idx, kv_idx: score + weight.exp()[h] * kv_idx)

    x = torch.randn(1, 2, 9, 8, requires_grad=True)
    found = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sin().sum(), (x, weight))
    for mine, right in zip(found, torch.autograd.grad(layer(x).sin().sum(), (x, weight)), strict=True):
        assert relative_error(mine, right) <= 1e-5


def test_packed_sequences():
    weight, ends = torch.rand(2, requires_grad=True), torch.tensor([0, 9, 30], dtype=torch.int32)

    def layer(x):
        score_mod = lambda score, b, h, q_idx, kv_idx: score - torch.nn.functional.softplus(weight)[h] * (q_idx - kv_idx)  # noqa: E731
        return varlen_attention(x, x, x, ends, score_mod=score_mod, mask_mod=mods.causal)

    x = torch.randn(30, 2, 16)
    with torch.no_grad():
        layer(x)
    (found,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sin().sum(), weight)
    assert relative_error(found, *torch.autograd.grad(layer(x).sin().sum(), weight)) <= 1e-5


@pytest.mark.parametrize("hopper", [1, 2])
def test_another_kernel_serves_the_recomputation(hopper):
    """That for Hopper leaves largest scores of distances without scale; the one that served while it was compiled does not."""
    slopes, calls = mods.alibi_slopes(2), 0

    def layer(q, k, v):
        nonlocal calls
        calls += 1
        with pytest.MonkeyPatch.context() as patch:
            if calls == hopper:
                launched = forward_on_cpu(patch)
                registry.clear()
            out = flex_attention(q, k, v, mods.alibi(slopes))
            assert calls != hopper or [launch.spec.flag["SUM_IS_RAW"] for launch in launched] == [True]
        registry.clear()
        return out

    q, k, v = (torch.randn(1, 2, 130, 64, generator=torch.Generator().manual_seed(i)).bfloat16().requires_grad_() for i in range(3))
    right = torch.autograd.grad(dense_attention(q, k, v, mods.alibi(slopes))[0].sin().sum(), (q, k, v))
    found = torch.autograd.grad(checkpoint(layer, q, k, v, use_reentrant=False).float().sin().sum(), (q, k, v))
    assert calls == 2 and all(relative_error(mine, exact) <= 2e-2 for mine, exact in zip(found, right, strict=True))


FIRST_STEP = """
import torch
from torch.utils.checkpoint import checkpoint
from flexpress import flex_attention, mods, wait_for_kernels

torch.manual_seed(0)
q, k, v = (torch.randn(2, 8, 2048, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
slopes = mods.alibi_slopes(8, "cuda")

def step():
    out = checkpoint(lambda *x: flex_attention(*x, mods.alibi(slopes), mask_mod=mods.causal), q, k, v, use_reentrant=False)
    wait_for_kernels()
    return torch.autograd.grad(out.float().square().sum(), (q, k, v))

for first, later in zip(step(), step()):
    assert (first - later).norm() <= 1e-2 * later.norm()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_first_step_of_a_process(tmp_path):
    """With nothing compiled yet: those that compile fast serve the forward pass, and others are there for its recomputation."""
    environment = {**os.environ, "FLEXPRESS_CACHE_DIR": str(tmp_path), "FLEXPRESS_WAIT": "0"}
    subprocess.run([sys.executable, "-c", FIRST_STEP], check=True, env=environment, timeout=300)
