"""A Llama (Touvron et al. 2023, arXiv 2302.13971): its config, its weights, and what it computes but for attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from flexpress import Llama3Scaling, YarnScaling

Attend = Callable[
    [int, Tensor], Tensor
]  # attend(layer, qkv): (tokens, heads of q, k and v, head_dim), not yet turned, to (tokens, heads of q, head_dim)
SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"  # without which there is no model
SCALINGS = {"llama3": Llama3Scaling, "yarn": YarnScaling}


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
    scaling: Llama3Scaling | YarnScaling | None = None

    @staticmethod
    def of(config: dict) -> Config:
        """From what a config.json holds, read as transformers reads it. ValueError where the model would need more than is here, or the
        config lacks something."""
        if config.get("model_type", "llama") != "llama":
            raise ValueError(f"this example computes Llamas alone, and the config's model_type is {config['model_type']!r}")
        given = {name: value for name, value in config.items() if value is not None}
        for name in SIZES:
            if type(given.get(name)) is not int or given[name] < 1:
                raise ValueError(f"the config's {name} is {given.get(name)!r}; it must be a whole number of at least 1")
        rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
        rope = {name: value for name, value in rope.items() if value is not None}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", *SCALINGS) or given.get("hidden_act", "silu") != "silu":
            raise ValueError(f"this example knows neither RoPE of type {kind!r} nor activations other than silu")
        if kind in SCALINGS:
            given["scaling"] = _scaling(kind, rope, given)
        hidden, heads = given["hidden_size"], given["num_attention_heads"]
        kv_heads = given.setdefault("num_key_value_heads", heads)
        if hidden % heads or heads % kv_heads:
            raise ValueError(
                f"the config's hidden_size {hidden} must be a multiple of its num_attention_heads {heads}, and that one of its "
                f"num_key_value_heads {kv_heads}"
            )
        given = {"head_dim": hidden // heads, "rms_norm_eps": 1e-6} | given  # what Hugging Face's Llamas have by default
        if "rope_theta" in rope:
            given["rope_theta"] = rope["rope_theta"]
        return Config(**{f.name: given[f.name] for f in fields(Config) if f.name in given})

    @staticmethod
    def read(path: str) -> Config:
        """That of a JSON file."""
        return Config.of(json.loads(Path(path).read_text(encoding="utf-8")))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, by Hugging Face's names."""
        hidden, middle = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
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
        shapes = {f"model.layers.{n}.{name}.weight": shape for n in range(self.num_hidden_layers) for name, shape in of_layer.items()}
        outer = {"model.embed_tokens.weight": (self.vocab_size, hidden), "model.norm.weight": (hidden,)}
        return shapes | outer | {"lm_head.weight": (self.vocab_size, hidden)}


def _scaling(kind: str, rope: dict, config: dict) -> Llama3Scaling | YarnScaling:
    """How RoPE of that kind is scaled. What is left out of its parameters stands beside them, or follows from it."""
    length, scaling = "original_max_position_embeddings", SCALINGS[kind]
    given = {name: config[name] for name in ("partial_rotary_factor",) if config.get(name, 1) != 1} | rope
    if original := config.get(length, rope.get(length, config.get("max_position_embeddings"))):
        given[length] = original
    known = {"rope_type", "type", "rope_theta", *(f.name for f in fields(scaling))}
    if more := sorted(given.keys() - known):
        raise ValueError(f"this example knows no {', '.join(more)} of RoPE of type {kind!r}")
    if missing := [name for name in ("factor", length) if name not in given]:
        raise ValueError(f"the config has no {' and no '.join(missing)} for RoPE of type {kind!r}; add it to its rope_parameters")
    return scaling(**{f.name: given[f.name] for f in fields(scaling) if f.name in given})


@dataclass
class Layer:
    """Weights (outputs, inputs). Those of q, k and v are one, and those of gate and up: two products less."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    middle_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass
class Llama:
    """`attend` knows where tokens are and which sees which; all else treats every token alike."""

    config: Config
    embeddings: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor

    @staticmethod
    def of(config: Config, weights: dict[str, Tensor]) -> Llama:
        """From weights by Hugging Face's names. ValueError if they are not those of the config."""
        if config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
            weights = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
        if wrong := config.weight_shapes().items() ^ {name: tuple(weight.shape) for name, weight in weights.items()}.items():
            raise ValueError(f"the weights are not those of the config: {sorted(wrong)}")

        def layer(n: int) -> Layer:
            def of(*names: str) -> Tensor:
                found = [weights[f"model.layers.{n}.{name}.weight"] for name in names]
                return found[0] if len(found) == 1 else torch.cat(found)

            attention = of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), of("self_attn.o_proj")
            mlp = of("mlp.gate_proj", "mlp.up_proj"), of("mlp.down_proj")
            return Layer(of("input_layernorm"), *attention, of("post_attention_layernorm"), *mlp)

        outer = weights["model.embed_tokens.weight"], weights["model.norm.weight"], weights["lm_head.weight"]
        return Llama(config, outer[0], [layer(n) for n in range(config.num_hidden_layers)], *outer[1:])

    @staticmethod
    def random(config: Config, seed: int) -> Llama:
        """Random weights that keep the size of what they multiply."""
        g = torch.Generator().manual_seed(seed)
        made = {}
        for name, shape in config.weight_shapes().items():
            if not (config.tie_word_embeddings and name == "lm_head.weight"):
                made[name] = torch.randn(shape, generator=g) * shape[1] ** -0.5 if len(shape) == 2 else torch.ones(shape)
        return Llama.of(config, made)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Llama:
        """The same model elsewhere, or of another dtype."""

        def moved(t: Tensor) -> Tensor:
            return t.to(device=device, dtype=dtype)

        embeddings = moved(self.embeddings)
        layers = [Layer(*(moved(getattr(layer, f.name)) for f in fields(Layer))) for layer in self.layers]
        head = embeddings if self.config.tie_word_embeddings else moved(self.head)
        return Llama(self.config, embeddings, layers, moved(self.norm), head)

    def parameters(self) -> int:
        """How many weights it has."""
        return sum(torch.Size(shape).numel() for shape in self.config.weight_shapes().values())

    def logits(self, ids: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        """(rows, vocab_size): what follows the tokens ids[row]."""
        eps, head_dim = self.config.rms_norm_eps, self.config.head_dim

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], weight, eps)

        x = self.embeddings[ids]
        for n, layer in enumerate(self.layers):
            qkv = F.linear(norm(x, layer.input_norm), layer.qkv).unflatten(-1, (-1, head_dim))
            x = torch.addmm(x, attend(n, qkv).flatten(1), layer.out.T)
            gate, up = F.linear(norm(x, layer.middle_norm), layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate) * up, layer.down.T)
        return F.linear(norm(x[rows], self.norm), self.head)
