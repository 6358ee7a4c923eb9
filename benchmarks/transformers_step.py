"""A Llama of transformers with attention by flexpress, by sdpa and by transformers' own flex_attention: a training step, and generation.

    python benchmarks/transformers_step.py
    python benchmarks/transformers_step.py --parts train --layers 8 --length 8192

The model is random, in bfloat16, with 16 query heads and 4 key heads of 128. Rows:

    train       torch.compile(model, fullgraph=True): forward, loss and backward of a batch without padding; ms a step. transformers' own
                flex_attention breaks the graph (it calls a compiled function), so it is compiled without fullgraph
    packed      the same with position_ids of 8 packed sequences a row
    eager       the same as train, not compiled
    generate    greedy tokens after a prompt with a dynamic cache, padded at the left; tokens a second, and ms a token
    static      the same with a static cache, for which transformers compiles the decoding step and captures CUDA graphs

Losses and tokens are compared with sdpa's. What fails has its error in its row.
"""

from __future__ import annotations

import functools
import statistics
import time

import torch
from common import arguments, first_line, header, names, synchronize, time_ms, version_of, write_results
from transformers import LlamaConfig, LlamaForCausalLM

import flexpress.integrations.transformers  # noqa: F401 registers the name "flexpress"

IMPLEMENTATIONS = ("sdpa", "flexpress", "flex_attention")
PARTS = ("train", "packed", "eager", "generate", "static")
SEQUENCES = 8  # packed in a row
ROUNDS = 3


def make_model(layers: int, positions: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    config = LlamaConfig(**sizes, vocab_size=4096, num_hidden_layers=layers, max_position_embeddings=positions, eos_token_id=None)
    config.pad_token_id = 0
    return LlamaForCausalLM(config).cuda().bfloat16()


def step(model, weights, given: dict) -> torch.Tensor:
    """The loss; gradients are left in the weights."""
    for weight in weights:
        weight.grad = None
    loss = model(**given, labels=given["input_ids"], use_cache=False).loss
    loss.backward()
    return loss.detach()


def training(model: LlamaForCausalLM, part: str, tokens: torch.Tensor, *, fullgraph: bool) -> dict:
    """Times of a step, and its loss."""
    length = tokens.shape[1]
    given = {"input_ids": tokens}
    if part == "packed":
        given["position_ids"] = (torch.arange(length, device=tokens.device) % (length // SEQUENCES)).expand(len(tokens), -1)
    torch._dynamo.reset()
    run = model if part == "eager" else torch.compile(model, fullgraph=fullgraph)
    once = functools.partial(step, run, list(model.parameters()), given)
    start = time.perf_counter()
    loss = once().item()
    first = time.perf_counter() - start
    times = [time_ms(once, rep=200) for _ in range(ROUNDS)]
    return {"first_s": first, "ms": statistics.median(times), "ms_rounds": times, "loss": loss}


def generation(model: LlamaForCausalLM, part: str, tokens: torch.Tensor, new: int) -> tuple[dict, list]:
    """Tokens a second of decoding, and the tokens. Prefill is timed by a call that makes one token."""
    torch._dynamo.reset()
    seen = torch.ones_like(tokens)
    seen[0, : tokens.shape[1] // 4] = 0
    cache = {"cache_implementation": "static"} if part == "static" else {}

    def run(count: int) -> tuple[float, torch.Tensor]:
        synchronize()
        start = time.perf_counter()
        made = model.generate(tokens, attention_mask=seen, min_new_tokens=count, max_new_tokens=count, do_sample=False, **cache)
        synchronize()
        return time.perf_counter() - start, made[:, tokens.shape[1] :]

    first, made = run(new)
    whole, prefill = (min(run(count)[0] for _ in range(ROUNDS)) for count in (new, 1))
    ms = (whole - prefill) / (new - 1) * 1e3
    return {"first_s": first, "prefill_ms": prefill * 1e3, "ms": ms, "tokens_per_s": len(tokens) * 1e3 / ms}, made.tolist()


def measure(part: str, implementation: str, asked, tokens: torch.Tensor) -> tuple[dict, object]:
    """A row, and what is to be equal: a loss or tokens."""
    model = make_model(asked.layers, 2 * asked.length)
    model.set_attn_implementation(implementation)
    if part in ("generate", "static"):
        return generation(model.eval(), part, tokens[:, : asked.prompt].repeat(asked.requests // len(tokens), 1), asked.new)
    row = training(model.train(), part, tokens, fullgraph=implementation != "flex_attention")
    return row, row["loss"]


def main() -> None:
    parser = arguments(__doc__, "benchmarks/results/transformers_step.json")
    parser.add_argument("--parts", type=names(PARTS), default=list(PARTS))
    parser.add_argument("--impls", type=names(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS))
    for name, default in (("layers", 2), ("length", 4096), ("batch", 2), ("requests", 8), ("prompt", 2048), ("new", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    tokens = torch.randint(1, 4096, (asked.batch, asked.length), generator=torch.Generator().manual_seed(0)).cuda()
    rows = []
    for part in asked.parts:
        results = {}
        for implementation in asked.impls:
            row = {"part": part, "implementation": implementation}
            try:
                found, results[implementation] = measure(part, implementation, asked, tokens)
                row |= found
                if part in ("generate", "static") and "sdpa" in results:
                    row["tokens_as_sdpa"] = results[implementation] == results["sdpa"]
            except Exception as error:  # it is a result: others' paths refuse some of this
                row["error"] = first_line(error)
            torch.cuda.empty_cache()
            rows.append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    shape = {name: getattr(asked, name) for name in ("layers", "length", "batch", "requests", "prompt", "new")}
    head = {**header(asked.commit), "transformers": version_of("transformers")}
    write_results(asked.out, head, [{**shape, **row} for row in rows])


if __name__ == "__main__":
    main()
