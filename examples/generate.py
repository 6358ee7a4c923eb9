"""Greedy generation with a small Llama: a paged cache, continuous batching, prompts in chunks. generate.md explains the parts.

    python examples/generate.py
    python examples/generate.py --config config.json --weights model.safetensors --dtype bfloat16 --page-size 64 --pages 512

Random prompts, by default a random model; on a GPU if there is one. Exit status 1 if the dense model in float64 makes other tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from flexpress import OutOfPages, PageAllocator, cached_attention, rope_table, update_cache

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # attend(layer, q, k, v), all (tokens, heads, head_dim), not yet turned by RoPE


@dataclass
class Config:
    """A model in the words of Hugging Face's config.json; by default a tiny one."""

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    @staticmethod
    def read(path: str) -> Config:
        """The config of a JSON file. ValueError where the model would need more than is here."""
        given = {name: value for name, value in json.loads(Path(path).read_text(encoding="utf-8")).items() if value is not None}
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default" or given.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{path}: this example knows neither scaled RoPE nor activations other than silu")
        heads = given["num_attention_heads"]
        given = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads, **rope, **given}
        return Config(**{f.name: given[f.name] for f in fields(Config) if f.name in given})


@dataclass
class Llama:
    """Touvron et al. 2023 (arXiv 2302.13971). Its weights have Hugging Face's names; `attend` knows which token sees which."""

    config: Config
    weights: dict[str, Tensor]

    def logits(self, ids: list[int], rows: list[int], attend: Attend) -> Tensor:
        """(rows, vocab_size): what follows the tokens ids[row]."""

        def linear(name: str, x: Tensor) -> Tensor:
            return F.linear(x, self.weights[f"{name}.weight"])

        def norm(name: str, x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_norm_eps)

        x = self.weights["model.embed_tokens.weight"][ids]
        for n in range(self.config.num_hidden_layers):
            layer = f"model.layers.{n}"
            normed = norm(f"{layer}.input_layernorm", x)
            q, k, v = (linear(f"{layer}.self_attn.{i}_proj", normed).unflatten(-1, (-1, self.config.head_dim)) for i in "qkv")
            x = x + linear(f"{layer}.self_attn.o_proj", attend(n, q, k, v).flatten(1))
            normed = norm(f"{layer}.post_attention_layernorm", x)
            gate, up = linear(f"{layer}.mlp.gate_proj", normed), linear(f"{layer}.mlp.up_proj", normed)
            x = x + linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)
        return linear("lm_head", norm("model.norm", x[rows]))


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every weight."""
    hidden, middle = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    shapes = {f"model.layers.{n}.{name}.weight": shape for n in range(config.num_hidden_layers) for name, shape in of_layer.items()}
    return shapes | {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }


def make_model(config: Config, files: list[str], seed: int, device: str, dtype: torch.dtype) -> Llama:
    """A model with the weights of safetensors files, or without files random ones that keep the size of what they multiply."""
    shapes, g = weight_shapes(config), torch.Generator().manual_seed(seed)
    if files:
        from safetensors.torch import load_file

        weights = {name: weight for file in files for name, weight in load_file(file).items()}
    else:
        weights = {
            name: torch.randn(shape, generator=g) * shape[1] ** -0.5 if len(shape) == 2 else torch.ones(shape)
            for name, shape in shapes.items()
        }
    if config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    if wrong := shapes.items() ^ {name: tuple(weight.shape) for name, weight in weights.items()}.items():
        raise ValueError(f"the weights are not those of the config: {sorted(wrong)}")
    return Llama(config, {name: weight.to(device, dtype) for name, weight in weights.items()})


@dataclass(eq=False)
class Request:
    """A prompt, how many tokens shall follow it, and those that do so far."""

    prompt: list[int]
    wanted: int
    made: list[int] = field(default_factory=list)
    sequence: int = -1  # its number in the PageAllocator
    cached: int = 0  # how many of its tokens, prompt and made, are in the cache


class Generator:
    """Continuous batching. In a step every running request computes a chunk of its tokens that are not in the cache: of its prompt at
    first, then the token made last. A request waits for pages for all tokens that it may have, and frees them when it has made the last."""

    def __init__(self, model: Llama, num_pages: int, page_size: int, chunk: int) -> None:
        config, weight = model.config, model.weights["lm_head.weight"]
        self.model, self.chunk, self.device = model, chunk, weight.device
        self.pool = PageAllocator(num_pages, page_size)
        shape = (num_pages, page_size, config.num_key_value_heads, config.head_dim)
        self.caches = [[torch.empty(shape, dtype=weight.dtype, device=self.device) for _ in "kv"] for _ in range(config.num_hidden_layers)]
        self.rope = rope_table(num_pages * page_size, config.head_dim, config.rope_theta, device=self.device)
        self.waiting, self.running = [], []  # Requests, in the order of their coming

    def run(self, requests: list[Request]) -> None:
        """Makes all tokens of all requests. OutOfPages for a request that needs more than there are."""
        self.waiting += requests
        self.steps = self.steps_waited = self.peak_pages = 0
        while self.waiting or self.running:
            self.admit()
            self.step()

    def admit(self) -> None:
        """Lets requests enter in their order until there are too few pages for the next one."""
        while self.waiting:
            r = self.waiting[0]
            try:
                r.sequence = self.pool.allocate(len(r.prompt) + r.wanted)
            except OutOfPages:
                if self.running:
                    return
                raise
            self.running.append(self.waiting.pop(0))

    def step(self) -> None:
        """One run of the model over the new tokens of all running requests, one request after another."""
        new = [(r.prompt + r.made)[r.cached : r.cached + self.chunk] for r in self.running]
        for r, tokens in zip(self.running, new, strict=True):
            r.cached += len(tokens)
        ends = list(accumulate(map(len, new)))
        logits = self.model.logits(sum(new, []), [end - 1 for end in ends], self.paged_attention(ends, max(map(len, new))))
        self.steps, self.steps_waited = self.steps + 1, self.steps_waited + bool(self.waiting)
        self.peak_pages = max(self.peak_pages, self.pool.num_pages - self.pool.free_pages)
        for r, token in zip(list(self.running), logits.argmax(-1).tolist(), strict=True):
            if r.cached == len(r.prompt) + len(r.made):  # else there is more of its prompt
                r.made.append(token)
            if len(r.made) >= r.wanted:
                self.pool.free(r.sequence)
                self.running.remove(r)

    def paged_attention(self, ends: list[int], most: int) -> Attend:
        """Attention of this step's tokens, at most `most` of a request, to all that is cached of theirs; they are written there first."""
        batch = {
            "kv_len": torch.tensor([r.cached for r in self.running], dtype=torch.int32, device=self.device),
            "page_table": self.pool.page_table([r.sequence for r in self.running], device=self.device),
            "cu_seqlens_q": torch.tensor([0, *ends], dtype=torch.int32, device=self.device),
            "max_q_len": most,
        }

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = update_cache(k, v, *self.caches[layer], query=q, rope=self.rope, **batch)
            return cached_attention(q, *self.caches[layer], **batch)

        return attend


def dense_attention(config: Config) -> Attend:
    """Attention within one whole sequence by plain torch."""

    def turned(x: Tensor) -> Tensor:
        j = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=x.device) / config.head_dim
        angles = torch.arange(len(x), device=x.device)[:, None, None] * config.rope_theta**-j
        (first, second), c, s = x.chunk(2, -1), angles.cos().to(x), angles.sin().to(x)
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (turned(q), turned(k), v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    return attend


def wrong_tokens(model: Llama, request: Request) -> int:
    """How many tokens are not what the model in float64 chooses, computing all tokens before, densely, for each of them. In bfloat16, a
    logit may be below the best one by 4 errors of the dense model in bfloat16: ours may have twice that, for the best one and its own."""
    exact = Llama(model.config, {name: weight.double() for name, weight in model.weights.items()})
    attend, wrong = dense_attention(model.config), 0
    for i, token in enumerate(request.made):
        plain, logits = (m.logits(request.prompt + request.made[:i], [-1], attend)[0] for m in (model, exact))
        allowed = 0 if plain.dtype == torch.float32 else 4 * (plain - logits).abs().max()
        wrong += int(logits.max() - logits[token] > allowed)
    return wrong


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", help="a Llama's config.json; a tiny model if left out")
    parser.add_argument("--weights", nargs="+", default=[], help="its safetensors files; random weights if left out")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, help="ask the dense model; by default up to 50M weights")
    for name, default, meaning in (
        ("requests", 6, "how many"),
        ("prompt", 40, "tokens of a prompt, at most"),
        ("new", 12, "tokens to make, at most"),
        ("chunk", 16, "tokens of a prompt in a step"),
        ("pages", 8, "of the cache"),
        ("page-size", 16, "tokens of a page"),
        ("seed", 0, "of all"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default {default})")
    return parser.parse_args()


def main() -> int:
    args, device = arguments(), "cuda" if torch.cuda.is_available() else "cpu"
    config = Config.read(args.config) if args.config else Config()
    model = make_model(config, args.weights, args.seed, device, getattr(torch, args.dtype))
    generator = Generator(model, args.pages, args.page_size, args.chunk)
    for _ in range(2 if device == "cuda" else 1):  # the first run loads the kernels, and compiles those not on disk
        draw = random.Random(args.seed)
        requests = [
            Request([draw.randrange(config.vocab_size) for _ in range(draw.randint(1, args.prompt))], draw.randint(1, args.new))
            for _ in range(args.requests)
        ]
        start = time.perf_counter()
        generator.run(requests)
        seconds = time.perf_counter() - start

    made = sum(len(r.made) for r in requests)
    check = sum(weight.numel() for weight in model.weights.values()) <= 50e6 if args.check is None else args.check
    wrong = sum(wrong_tokens(model, r) for r in requests) if check else 0
    table = {
        "requests": len(requests),
        "prompt tokens": sum(len(r.prompt) for r in requests),
        "generated tokens": made,
        "tokens per second": f"{made / seconds:.1f}",
        "steps": generator.steps,
        "steps with a request waiting": generator.steps_waited,
        "pages at most": f"{generator.peak_pages} of {args.pages}",
        "tokens unlike float64, dense": wrong if check else "not checked",
    }
    print("\n".join(f"{name:30}{value:>12}" for name, value in table.items()))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
