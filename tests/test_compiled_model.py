"""A small model as in Llama, compiled as a whole: it computes what it does in eager mode, and nothing of ours is compiled twice."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from flexpress import cache_info, create_block_mask, flex_attention, mods
from support.devices import DEVICES

dynamo = pytest.importorskip("torch._dynamo")
F = torch.nn.functional
LONGEST = 96


class Block(torch.nn.Module):
    """Attention with grouped key heads and gated feed-forward, both behind RMSNorm. ALiBi's slopes and a bias by distance are learned."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (torch.nn.Linear(*size, bias=False) for size in ((width, 2 * width),) * 2 + ((2 * width, width),))
        self.slopes = torch.nn.Parameter(torch.linspace(0.1, 0.5, heads))
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, heads * LONGEST).view(heads, LONGEST))

    def forward(self, x, mask):
        B, S, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).split([n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        q, k, v = (t.view(B, S, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + self.slopes[h] * (kv_idx - q_idx) + self.bias[h, torch.abs(q_idx - kv_idx)]

        attended = flex_attention(q, k, v, score_mod, mask, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, S, -1))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(torch.nn.Module):
    """Tokens to logits. Documents end at token 0; the mask is made once a step, of a window that may change."""

    def __init__(self, width: int = 32, heads: int = 4, kv_heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(17, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(width)

    def forward(self, tokens, window):
        documents = (tokens == 0).cumsum(1)

        def mask_mod(b, h, q_idx, kv_idx):
            return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx - kv_idx < window)

        def causal_mask(b, h, q_idx, kv_idx):
            return mods.causal(b, h, q_idx, kv_idx) & mask_mod(b, h, q_idx, kv_idx)

        mask = create_block_mask(causal_mask, tokens.shape[0], None, tokens.shape[1], tokens.shape[1], tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.embed.weight.T


def step(model, tokens, window):
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(tokens, window)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_model(device):
    dynamo.reset()
    model = Model(layers=1).to(device)  # Inductor's C++ for each takes seconds
    compiled = torch.compile(model, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    made = []
    for length, window in ((64, 20), (80, 33), (51, 7), (96, 90)):
        tokens = torch.randint(0, 17, (2, length), generator=generator).to(device)
        with torch.no_grad():  # other slopes
            for block in model.blocks:
                block.slopes.mul_(1.1)
        before = cache_info().compiles
        loss, gradients = step(compiled, tokens, window)
        made.append(cache_info().compiles - before)
        expected, others = step(model, tokens, window)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        for g, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(g, other, rtol=2e-3, atol=1e-5)
    assert made[2:] == [0, 0]  # the first call and the first other numbers may compile
    dynamo.reset()


def test_layers_share_what_their_mask_needs():
    """A mask's lists, and those that the backward pass reads, are made once a step, as torch takes equal calls of an operator together."""
    dynamo.reset()
    graphs = []

    def kept(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "flexpress" in str(n.target)])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=min_cut_rematerialization_partition)
    model = Model(layers=3)
    tokens = torch.arange(64).view(1, 64) % 17
    step(torch.compile(model, backend=backend, fullgraph=True), tokens, 20)
    forward, backward = graphs
    assert sorted(forward) == sorted(
        ["flexpress.block_lists.default", "flexpress.transposed_lists.default", *["flexpress.flex_attention.default"] * 3]
    )
    assert backward == ["flexpress.flex_attention_backward.default"] * 3
    dynamo.reset()
