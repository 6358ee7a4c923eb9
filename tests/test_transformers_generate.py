"""Greedy tokens by transformers' generate with attn_implementation="flexpress", beside those of eager attention."""

from __future__ import annotations

import pytest
import torch
from torch import _dynamo as dynamo
from transformers import DynamicCache, StaticCache

import flexpress.integrations.transformers  # noqa: F401
from flexpress import cache_info
from support import models
from support.devices import DEVICES

on_devices = pytest.mark.parametrize("device", DEVICES)


@on_devices
@pytest.mark.parametrize(
    "name, cache",
    [(name, "dynamic") for name in (*models.CAUSAL, *models.SEQ2SEQ)] + [(name, "static") for name in ("llama", "gemma2", "gpt_oss", "t5")],
)
def test_generated_tokens(name, cache, device):
    model = models.model_of(name, device).eval()
    given = models.inputs_of(name, device, 9 if device == "cpu" else 200, padded=3)
    given.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 4 if device == "cpu" else 40, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    tokens = {}
    for implementation in ("eager", "flexpress"):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(**given, **options)
    assert tokens["flexpress"].tolist() == tokens["eager"].tolist()


@on_devices
@pytest.mark.parametrize("name, cache", [("llama", StaticCache), ("gemma2", StaticCache), ("gemma2", DynamicCache)])
def test_logits_piece_by_piece(name, cache, device):
    """A prompt in pieces, then tokens: the same logits as at once. A static cache counts its positions in place, before attention."""
    model, given = models.model_of(name, device).eval(), models.inputs_of(name, device, 15)
    model.set_attn_implementation("flexpress")
    past = cache(config=model.config, **({"max_cache_len": 32} if cache is StaticCache else {}))
    ids, seen = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        positions = (seen.cumsum(1) - 1).clamp_min(0)
        whole = model(**given, position_ids=positions, use_cache=False).logits
        for start, end in ((0, 7), (7, 12), (12, 13), (13, 15)):
            piece = {
                "input_ids": ids[:, start:end],
                "attention_mask": seen[:, :end],
                "position_ids": positions[:, start:end],
                "past_key_values": past,
            }
            logits = model(**piece).logits
            here = seen[:, start:end].bool()
            torch.testing.assert_close(logits[here], whole[:, start:end][here])


@on_devices
def test_generation_that_transformers_compiles(device):
    """With a static cache, `generate` compiles the decoding step; here by the means of a test, on the CPU, where it would not by itself."""
    dynamo.reset()
    model = models.model_of("llama", device).eval()
    given = models.inputs_of("llama", device, 9, padded=3)
    eager = model.generate(**given, max_new_tokens=6, do_sample=False)
    model.set_attn_implementation("flexpress")
    if device == "cpu":
        model.forward = torch.compile(model.forward, backend="eager")
    assert model.generate(**given, max_new_tokens=6, do_sample=False, cache_implementation="static").tolist() == eager.tolist()


def test_decoding_compiles_nothing_more():
    llama = models.model_of("llama", "cpu")
    llama.set_attn_implementation("flexpress")
    given = models.inputs_of("llama", "cpu", 12, padded=3)
    options = {"max_new_tokens": 4, "do_sample": False}
    llama.generate(**given, **options)
    before = cache_info()
    compiles, traces = before.compiles, before.traces
    llama.generate(**models.inputs_of("llama", "cpu", 14, padded=4), **options)
    assert (cache_info().compiles, cache_info().traces) == (compiles, traces)
