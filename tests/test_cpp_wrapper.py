"""Models that torch writes out in C++: AOTInductor's packages, and torch.compile with its C++ wrapper.

There an operator's empty lists are None, its texts stand in C++ as they are, and the CPU is a device with a number."""

from __future__ import annotations

import shutil

import pytest
import torch

from flexpress import (
    AuxRequest,
    cached_attention,
    create_block_mask,
    create_mask,
    flex_attention,
    mods,
    scaled_dot_product_attention,
    varlen_attention,
)
from flexpress.graphs.programs import argument_of, json_of
from flexpress.versions import torch_writes_operators

written = pytest.mark.skipif(
    not shutil.which("g++") or not torch_writes_operators(), reason="needs a C++ compiler, and torch 2.13 or later"
)


class Layer(torch.nn.Module):
    """Attention with learned slopes, a block mask made inside, and without any mod."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(16, 48)
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.3]))
        self.sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0]))

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x):
        q, k, v = self.heads(x)
        mask = create_block_mask(mods.sliding_window(7), None, None, x.shape[1], x.shape[1], x.device)
        slopes = self.slopes
        biased = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * slopes[h], mask, sinks=self.sinks)
        return biased + flex_attention(q, k, v)


class Served(Layer):
    """What else may stand in a model that is exported: statistics, packed sequences, a cache."""

    def forward(self, x, cu_seqlens, kv_len):
        q, k, v = self.heads(x)
        out, aux = flex_attention(q, k, v, mask_mod=mods.causal, return_aux=AuxRequest(lse=True, entropy=True))
        dense = create_mask(mods.prefix_lm(4), None, None, x.shape[1], x.shape[1], x.device)
        rows = (t[0].transpose(0, 1) for t in (q, k, v))
        cached = cached_attention(q[:, :, -1:], k.transpose(1, 2), v.transpose(1, 2), kv_len, check=False)
        return (
            super().forward(x),
            *(out, aux.lse, aux.entropy, dense),
            scaled_dot_product_attention(q, k, v, dense),
            varlen_attention(*rows, cu_seqlens, mask_mod=mods.causal),
            cached,
        )


@written
def test_aot_inductor(tmp_path):
    served = Served().eval()

    def given(length: int) -> tuple[torch.Tensor, ...]:
        cu_seqlens = torch.tensor([0, 5, 9, length], dtype=torch.int32)
        return torch.randn(2, length, 16), cu_seqlens, torch.tensor([length, 3], dtype=torch.int32)

    with torch.no_grad():
        lengths = {1: torch.export.Dim("S", min=10, max=128)}
        program = torch.export.export(served, given(24), dynamic_shapes=(lengths, None, None))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "served.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for length in (24, 70):
            arguments = given(length)
            for found, expected in zip(loaded(*arguments), served(*arguments), strict=True):
                torch.testing.assert_close(found, expected)


@written
def test_cpp_wrapper():
    torch.use_deterministic_algorithms(False)  # as users run it: then memory of the device that is named comes from the allocator directly
    layer, x = Layer(), torch.randn(2, 40, 16, requires_grad=True)

    def gradients(call) -> tuple[torch.Tensor, ...]:
        out = call(x)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))

    found = gradients(torch.compile(layer, fullgraph=True, options={"cpp_wrapper": True}))
    for one, other in zip(found, gradients(layer), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("text", ['{"name":"it\'s"}', '{"name":"a\\\\b~1\\"~0~"}', "{}"])
def test_texts_of_arguments(text):
    argument = argument_of(text)
    assert not set(argument) & {'"', "\\"}
    assert json_of(argument) == text
    assert json_of(text) == text  # as files of earlier versions have it
