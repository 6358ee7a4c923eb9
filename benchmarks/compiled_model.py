"""One training step of a Llama-shaped model, compiled as a whole: flexpress beside torch's flex_attention.

    python benchmarks/compiled_model.py --layers 2 --length 4096

The model has grouped key heads (16 and 4 of 128), RMSNorm and gated feed-forward, in bfloat16. Each layer adds ALiBi; the mask of
documents is made inside the step, of its tokens. The implementations take turns:

    flexpress              in eager mode
    flexpress compiled     torch.compile(model, fullgraph=True): one graph, the calls are operators in it
    torch compiled         the same model with torch.nn.attention.flex_attention, compiled the same way

The loss and the gradients of flexpress compiled are compared with those in eager mode, and torch's with these.
"""

from __future__ import annotations

import functools
import statistics
import time

import torch
from common import arguments, header, time_ms, write_results
from torch.nn.attention import flex_attention as torchs

import flexpress

F = torch.nn.functional
ROUNDS = 5


class Layer(torch.nn.Module):
    def __init__(self, library, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.library, self.sizes, self.head_dim = library, [n * head_dim for n in (heads, kv_heads, kv_heads)], head_dim
        self.first, self.second = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, sum(self.sizes), bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(3 * width, width, bias=False)
        self.register_buffer("slopes", torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads))

    def forward(self, x, mask):
        B, S, width = x.shape
        q, k, v = (t.view(B, S, -1, self.head_dim).transpose(1, 2) for t in self.qkv(self.first(x)).split(self.sizes, -1))

        def alibi(score, b, h, q_idx, kv_idx):
            return score + self.slopes[h] * (kv_idx - q_idx)

        out = self.library.flex_attention(q, k, v, score_mod=alibi, block_mask=mask, enable_gqa=True)
        x = x + self.out(out.transpose(1, 2).reshape(B, S, width))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(torch.nn.Module):
    def __init__(self, library, layers: int, heads: int = 16, kv_heads: int = 4, head_dim: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.library = library
        self.embed = torch.nn.Embedding(4096, heads * head_dim)
        self.layers = torch.nn.ModuleList(Layer(library, heads, kv_heads, head_dim) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(heads * head_dim)

    def forward(self, tokens):
        documents = (tokens == 0).cumsum(1)

        def mask_mod(b, h, q_idx, kv_idx):
            return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

        B, S = tokens.shape
        mask = self.library.create_block_mask(mask_mod, B, None, S, S, tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x) @ self.embed.weight.T


def step(model, weights, tokens):
    """The loss; gradients are left in the weights."""
    for weight in weights:
        weight.grad = None
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def main() -> None:
    parser = arguments(__doc__, "benchmarks/results/compiled_model.json")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    asked = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64
    tokens = torch.randint(0, 4096, (asked.batch, asked.length), device="cuda")
    tokens[:, :: asked.length // 5] = 0
    models = {library: Model(library, asked.layers).cuda().bfloat16() for library in (flexpress, torchs)}
    compiled = {library: torch.compile(model, fullgraph=True) for library, model in models.items()}
    runs = {
        "flexpress": (models[flexpress], flexpress),
        "flexpress compiled": (compiled[flexpress], flexpress),
        "torch compiled": (compiled[torchs], torchs),
    }
    steps, rows, gradients = {}, {}, {}
    for name, (model, library) in runs.items():
        weights = list(models[library].parameters())
        steps[name] = functools.partial(step, model, weights, tokens)
        start = time.perf_counter()
        loss = steps[name]().item()
        rows[name] = {"implementation": name, "first_s": time.perf_counter() - start, "loss": loss}
        gradients[name] = [w.grad.clone() for w in weights]
        rows[name]["grad_diff"] = max(
            ((g.float() - other.float()).norm() / other.float().norm()).item()
            for g, other in zip(gradients[name], gradients["flexpress"], strict=True)
        )
        print({k: v for k, v in rows[name].items() if k != "grad_diff"}, flush=True)
    times = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            times[name].append(time_ms(steps[name], rep=300))
    for name, row in rows.items():
        row["ms"], row["ms_rounds"] = statistics.median(times[name]), times[name]
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    shape = {"layers": asked.layers, "length": asked.length, "batch": asked.batch}
    write_results(asked.out, header(asked.commit), [{**shape, **row} for row in rows.values()])


if __name__ == "__main__":
    main()
