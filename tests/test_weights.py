"""Models with real weights, as in examples/. `make weights` installs the packages that hold them and runs this; `make test` does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from support.devices import DEVICES

EXAMPLES = Path(__file__).parent.parent / "examples"
on_devices = pytest.mark.parametrize("device", DEVICES)


def example(name: str):
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
