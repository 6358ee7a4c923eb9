"""Models with real weights, as in examples/. `make weights` installs the packages that hold them and runs this; `make test` does not."""

from __future__ import annotations

import argparse
import functools

import pytest
import torch

from support.devices import DEVICES
from support.engines import engine, example

on_devices = pytest.mark.parametrize("device", DEVICES)


@on_devices
def test_embeddings_of_sentences(device):
    minilm = example("embeddings")
    sentences = minilm.SENTENCES if device == "cpu" else [" ".join(minilm.SENTENCES * n) for n in range(1, 7)]  # of up to 512 tokens
    ours, eager = (minilm.embeddings(sentences, name, device) for name in ("flexpress", "eager"))
    assert (ours - eager).abs().max() <= minilm.ALLOWED
    assert ours[0] @ ours[1] > ours[0] @ ours[-1] + 0.2 or device != "cpu", "sentences that say the same are near each other"


@on_devices
def test_greedy_text(device):
    smollm2 = example("smollm2")
    made = {}
    for name in ("eager", "flexpress"):
        model, tokenizer = smollm2.load(name, device)
        made[name] = smollm2.answer(model, tokenizer, smollm2.PROMPT, 8)
        assert "Paris" in tokenizer.decode(made[name])
        if device == "cuda":
            made[name] += smollm2.answer(model, tokenizer, "Write a story about a lighthouse and a fox.", 200)
    assert made["flexpress"] == made["eager"]


@on_devices
def test_losses_of_fine_tuning(device):
    smollm2 = example("smollm2")
    steps, length, batch = (2, 24, 1) if device == "cpu" else (50, 256, 4)
    losses = {}
    for name in ("eager", "flexpress"):
        model, tokenizer = smollm2.load(name, device)
        ids = torch.tensor(tokenizer(smollm2.TEXT.read_text(encoding="utf-8"))["input_ids"])
        losses[name] = torch.tensor(smollm2.fine_tune(model, ids, steps, length, batch))
    assert (losses["flexpress"] - losses["eager"]).abs().max() <= smollm2.LOSS_ALLOWED
    assert losses["flexpress"][-1] < losses["flexpress"][0], "it learns"


@functools.cache
def served_model():
    """SmolLM2 as an engine takes it, its tokenizer, and what ends an answer."""
    return example("generate").smollm2()


@functools.cache
def answers(device) -> list[list[int]]:
    """What transformers says to the questions, token for token."""
    smollm2 = example("smollm2")
    model, tokenizer = smollm2.load("eager", device)
    return [smollm2.answer(model, tokenizer, question, NEW[device]) for question in QUESTIONS]


NEW = {"cpu": 12, "cuda": 200}  # tokens of an answer, at most
QUESTIONS = [
    "What is the capital of France?",
    "Name three colors.",
    "What is the capital of Italy?",
    "Write a story about a lighthouse and a fox.",
]
WAYS = {"plain": {}, "drafts": dict(draft=engine().PromptLookup(), nodes=5), "interrupted": {}}


@on_devices
@pytest.mark.usefixtures("in_cpp")  # hundreds of steps
@pytest.mark.parametrize("way", WAYS)
def test_the_engine_says_what_transformers_says(device, way):
    """Greedy text, token for token; the questions begin with the same system prompt."""
    generate, parts = example("generate"), engine()
    model, tokenizer, ends = served_model()
    requests = [parts.Request(generate.chat(tokenizer, q), NEW[device], parts.Answer(tokenizer, ends)) for q in QUESTIONS]
    server = parts.Engine(model.to(device), num_pages=80, page_size=8, chunk=24, **WAYS[way])
    for request in requests if way == "interrupted" else ():
        server.submit(request)
        for _ in range(3):
            server.step()
        server.scheduler.abandon()  # nothing is in the cache any more
    server.run(requests if way != "interrupted" else [])
    assert [r.made for r in requests] == answers(device)
    assert "Paris" in requests[0].stop.text and requests[0].reason == "end of text" and requests[3].reason == "length"
    assert server.scheduler.tokens_found > 0


@on_devices
@pytest.mark.usefixtures("in_cpp")  # hundreds of steps
def test_the_engine_with_a_float8_cache(device):
    """Tokens are those of the dense model whose keys and values are rounded to e4m3, and the answer is right."""
    generate, parts = example("generate"), engine()
    model, tokenizer, ends = served_model()
    model = model.to(device)
    server = parts.Engine(model, num_pages=40, page_size=16, chunk=64, float8=True)
    server.calibrate(generate.chat(tokenizer, "Why is the sky blue?"))
    request = parts.Request(generate.chat(tokenizer, QUESTIONS[0]), 12 if device == "cpu" else 100, parts.Answer(tokenizer, ends))
    server.run([request])
    assert parts.wrong_tokens(model, request, server.tensors.stored) == 0
    assert "Paris" in request.stop.text


@on_devices
@pytest.mark.usefixtures("in_cpp")  # hundreds of steps
def test_a_load_on_real_weights(device):
    """The load test of examples/generate.md, small: nothing is lost."""
    generate, parts = example("generate"), engine()
    model, tokenizer, ends = served_model()
    model, requests, most = (model, 6, 12) if device == "cpu" else (model.to("cuda", torch.bfloat16), 200, 300)
    args = argparse.Namespace(seed=0, system=40, systems=2, prompt=most, new=most, requests=requests, stop=[])
    requests = generate.text_prompts(args, tokenizer, ends)
    server = parts.Engine(
        model, num_pages=30 if device == "cpu" else 400, page_size=16, chunk=64, max_sequences=4 if device == "cpu" else 64
    )
    server.run(requests)
    assert generate.lost(requests) == [] and server.scheduler.tokens_found > 0
    if device == "cuda":
        exact = model.to(dtype=torch.float64)
        assert [parts.wrong_tokens(model, r, None, exact) for r in requests] == [0] * len(requests)
