"""transformers with attn_implementation="flexpress": what models compute, within the rounding of eager attention."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import _dynamo as dynamo

from flexpress import create_block_mask, create_mask
from flexpress.integrations import transformers as integration
from flexpress.mods import causal
from support import models
from support.devices import DEVICES

FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
on_devices = pytest.mark.parametrize("device", DEVICES)


def length_on(device: str) -> int:
    return 18 if device == "cpu" else 300


def compare(model, given, dtype=torch.float32):
    """A forward and a backward pass beside eager's. Returns ours."""
    found = models.results(model, "flexpress", given, dtype)
    eager, exact = models.results(model, "eager", given, dtype), models.results(model, "dense", given, torch.float64)
    models.assert_as_eager(found, eager, exact, FLOOR[dtype], lambda: models.results_nearby(model, given, dtype))
    return found


@on_devices
@pytest.mark.parametrize("name", models.ALL)
def test_logits_and_gradients_with_padding(name, device):
    compare(models.model_of(name, device), models.inputs_of(name, device, length_on(device)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", models.ALL)
def test_logits_and_gradients_in_bfloat16(name):
    compare(models.model_of(name, "cuda"), models.inputs_of(name, "cuda", 300), torch.bfloat16)


@on_devices
@pytest.mark.parametrize("name", ["gemma2", "bert"])
def test_padding_at_the_right(name, device):
    compare(models.model_of(name, device), models.inputs_of(name, device, length_on(device), padded=-7))


@on_devices
@pytest.mark.parametrize("padded", [0, -5])
def test_inside_transforms(padded, device):
    """Gradients, tangents and gradients of each sequence, of a model that makes its masks inside."""
    given = models.inputs_of("llama", device, 18, padded)
    ids, seen = given["input_ids"], given["attention_mask"]

    def along(implementation):
        model = models.model_of("llama", device, attn_implementation=implementation, use_cache=False).eval()
        parameters = {name: t.detach() for name, t in model.named_parameters()}

        def loss(parameters, ids, seen):
            logits = torch.func.functional_call(model, parameters, (), {"input_ids": ids[None], "attention_mask": seen[None]}).logits
            return (logits * seen[None, :, None]).square().mean()

        grad = torch.func.grad(loss)
        first = grad(parameters, ids[0], seen[0])
        tangent = torch.func.jvp(lambda p: loss(p, ids[0], seen[0]), (parameters,), (first,))[1]
        return tangent, first, torch.func.vmap(grad, (None, 0, 0))(parameters, ids, seen)

    torch.testing.assert_close(along("flexpress"), along("eager"), rtol=1e-3, atol=1e-4)


@on_devices
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_position_ids(name, device):
    """Sequences one after another: what follows a position 0 does not see what is before it."""
    length = length_on(device)
    given = models.inputs_of(name, device, length)
    first = 7
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(2, -1).to(device)
    packed = {"input_ids": given["input_ids"], "position_ids": positions, "use_cache": False}
    model = models.model_of(name, device)
    logits = compare(model, packed)[0]
    alone = {"input_ids": given["input_ids"][:, first:]}
    torch.testing.assert_close(logits[:, first:], models.results(model, "flexpress", alone)[0], rtol=1e-4, atol=1e-5)


@on_devices
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_compiled_step(use_cache, device):
    """No graph breaks, with padding and without, where keys are kept and where they are not."""
    dynamo.reset()
    model = models.model_of("gemma2", device)
    model.set_attn_implementation("flexpress")
    compiled = torch.compile(model, backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    for padded in (True, False):
        given = models.inputs_of("gemma2", device, length_on(device))
        if not padded:
            given.pop("attention_mask")
        eager, exact = models.results(model, "eager", given), models.results(model, "dense", given, torch.float64)
        model.zero_grad()
        logits = compiled(**given, use_cache=use_cache).logits
        logits = logits[given["attention_mask"].bool()] if padded else logits
        models.backward(logits)
        found = [logits.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]
        models.assert_as_eager(found, eager, exact, FLOOR[torch.float32])


def test_an_exported_model_of_a_window_takes_shorter_sequences():
    """What is behind a mask without values is not asked of lengths."""
    model, given = models.model_of("mistral", "cpu"), models.inputs_of("mistral", "cpu", 18)
    model.set_attn_implementation("flexpress")

    class Logits(torch.nn.Module):
        def forward(self, ids, seen):
            return model(input_ids=ids, attention_mask=seen, use_cache=False).logits

    sizes = {0: torch.export.Dim("batch", min=2, max=9), 1: torch.export.Dim("length", min=2, max=100)}
    with torch.no_grad():
        exported = torch.export.export(Logits(), (given["input_ids"], given["attention_mask"]), dynamic_shapes=(sizes, sizes)).module()
        for length in (3, 18, 40):
            ids = torch.arange(2 * length).view(2, length) % 7 + 3
            seen = torch.ones_like(ids)
            seen[0, 0] = 0
            torch.testing.assert_close(exported(ids, seen), Logits()(ids, seen))


@on_devices
def test_gradient_checkpointing(device):
    model, given = models.model_of("llama", device), models.inputs_of("llama", device, length_on(device))
    whole = models.results(model, "flexpress", given)
    model.gradient_checkpointing_enable()
    model.train()
    for ours, theirs in zip(models.results(model, "flexpress", given), whole, strict=True):
        assert torch.equal(ours, theirs)


@on_devices
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_dense_masks(kind, device):
    """A mask of the user's own for every query and key goes to attention as it is."""
    length = length_on(device)
    given = models.inputs_of("llama", device, length)
    seen = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(3)) < 0.6
    seen = (seen | torch.eye(length, dtype=torch.bool)).to(device)
    added = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)
    model = models.model_of("llama", device)
    found = models.results(model, "flexpress", {**given, "attention_mask": seen if kind == "bool" else added})
    eager, exact = (
        models.results(model, name, {**given, "attention_mask": added}, dtype)
        for name, dtype in (("eager", torch.float32), ("dense", torch.float64))
    )
    models.assert_as_eager(found, eager, exact, FLOOR[torch.float32])


@on_devices
def test_a_block_mask_as_attention_mask(device):
    length = length_on(device)
    given, model = models.inputs_of("llama", device, length), models.model_of("llama", device)
    block_mask = create_block_mask(causal, None, None, length, length, device)
    plain, masked = (
        models.results(model, "flexpress", {**given, "attention_mask": mask}) for mask in (torch.ones_like(given["input_ids"]), block_mask)
    )
    torch.testing.assert_close(masked[0], plain[0].view_as(masked[0]), rtol=1e-5, atol=1e-6)


@pytest.fixture
def llama():
    return models.model_of("llama", "cpu")


def masks_seen(model, **given) -> list:
    """The mask that each layer got."""
    seen = []
    model.set_attn_implementation("flexpress")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    model(**given)
    return seen


def test_nothing_is_stored_for_a_causal_mask(llama):
    given = models.inputs_of("llama", "cpu", padded=0)
    mask, other = masks_seen(llama, **given)
    assert mask is other and mask.mask_mod is causal and mask.block_mask is None
    mask, other = masks_seen(models.model_of("mistral", "cpu"), **given)
    assert mask is other and mask.block_mask is None and mask.shape == (2, 1, 20, 20), "a window reads no tensors: nothing is stored"


def test_layers_share_the_lists_of_padding(llama):
    mask, other = masks_seen(llama, **models.inputs_of("llama", "cpu"))
    assert mask is other and mask.block_mask.shape == (2, 1, 20, 20)


def test_positions_instead_of_lengths():
    """The first versions of transformers 5 give these."""
    padding = torch.ones(2, 9, dtype=torch.bool)
    plain = integration.mask(2, kv_length=9, cache_position=torch.arange(9), attention_mask=padding)
    assert plain.mask_mod is causal and plain.block_mask is None and plain.shape == (2, 1, 9, 9)
    made = integration.mask(2, kv_length=9, cache_position=torch.arange(5, 9), attention_mask=padding)
    expected = torch.arange(9) <= torch.arange(5, 9)[:, None]
    assert made.shape == (2, 1, 4, 9) and torch.equal(create_mask(made.mask_mod, 2, None, 4, 9, "cpu"), expected.expand(2, 1, 4, 9))


def test_room_for_keys_to_come_is_hidden():
    """An attention_mask shorter than the keys, of a mask that does not hide what comes: nothing behind its end is seen."""
    made = integration.mask(
        2,
        3,
        9,
        mask_function=lambda b, h, q_idx, kv_idx: q_idx >= 0,
        attention_mask=torch.ones(2, 6, dtype=torch.bool),
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True,
    )
    expected = (torch.arange(9) < 6).expand(2, 1, 3, 9)
    assert torch.equal(create_mask(made.mask_mod, 2, None, 3, 9, "cpu"), expected)


@pytest.mark.parametrize("q_offset", [8, torch.tensor(8)], ids=["dynamic", "static"])
@pytest.mark.parametrize("given", [4, 9, 11, 12])
def test_an_attention_mask_that_ends_before_the_queries(q_offset, given):
    """Keys behind its end are hidden, as by transformers' own masks, also those that come before a query."""
    made = integration.mask(2, 4, 14, q_offset=q_offset, attention_mask=torch.ones(2, given, dtype=torch.bool))
    kv_idx = torch.arange(14)
    expected = (kv_idx <= torch.arange(8, 12)[:, None]) & (kv_idx < given)
    assert torch.equal(create_mask(made.mask_mod, 2, None, 4, 14, "cpu"), expected.expand(2, 1, 4, 14))
    assert (made.block_mask is None) == (given == 12)  # nothing is padding, so nothing is read


def test_chunked_attention():
    """The mask of Llama 4: chunks that padding moves."""
    from transformers.masking_utils import chunked_causal_mask_function

    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[0, :5] = False
    function = chunked_causal_mask_function(6, torch.tensor([5, 0]))
    made = integration.mask(2, 20, 20, mask_function=function, attention_mask=padding, local_size=6)
    b, q, kv = torch.arange(2)[:, None, None], torch.arange(20)[:, None], torch.arange(20)
    expected = function(b, 0, q, kv) & padding[:, None, :]
    query, key, value = torch.randn(3, 2, 2, 20, 16).unbind()
    out, _ = integration.attention(torch.nn.Module(), query, key, value, made)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, expected[:, None])
    torch.testing.assert_close(out.transpose(1, 2), wanted)


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"dropout": -0.1}, ValueError, "dropout_p must be a number from 0 to 1, got -0.1"),
        ({"cache": object()}, NotImplementedError, "no paged cache of generate_batch .* which Module asks for"),
        ({"indices": torch.ones(2, 8, 4)}, NotImplementedError, "no attention to chosen keys"),
        (
            {"attention_mask": torch.ones(2, 1, 8, 5, dtype=torch.bool)},
            ValueError,
            r"attention_mask of shape \(2, 1, 8, 5\) does not broadcast",
        ),
        ({"attention_mask": torch.ones(2, 8)}, ValueError, "does not broadcast to the scores"),
        ({"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.long)}, TypeError, "attention_mask has dtype torch.int64"),
        ({"position_bias": torch.ones(1, 3, 8, 8)}, ValueError, "position_bias of shape"),
    ],
)
def test_what_is_refused(given, error, words):
    query = torch.randn(2, 4, 8, 16)
    with pytest.raises(error, match=words):
        integration.attention(torch.nn.Module(), query, query, query, **{"attention_mask": None, "is_causal": True, **given})


def test_masks_of_other_lengths_are_refused():
    """As of DeepSeek-V4, whose layers add keys to those that the mask is for. A mask that hides nothing fits any."""
    query, key = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 11, 16)
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[0, 0] = False
    for given in ({}, {"attention_mask": padding}):
        with pytest.raises(ValueError, match="mask is for 8 queries and 8 keys, but Module has 8 and 11"):
            integration.attention(torch.nn.Module(), query, key, key, integration.mask(2, 8, 8, **given))
    seen = integration.mask(2, 8, 8, allow_is_causal_skip=False, allow_is_bidirectional_skip=True)
    out, _ = integration.attention(torch.nn.Module(), query, key, key, seen)
    torch.testing.assert_close(out.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(query, key, key))


def test_attention_without_a_mask_asks_the_module():
    query, module = torch.randn(2, 4, 8, 16), torch.nn.Module()
    with pytest.raises(ValueError, match="Module gives attention no mask and no is_causal"):
        integration.attention(module, query, query, query, None)
    for module.is_causal in (False, True):
        out, _ = integration.attention(module, query, query, query, None)
        wanted = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=module.is_causal)
        torch.testing.assert_close(out.transpose(1, 2), wanted)


@pytest.mark.parametrize("padded", [0, 5])
@pytest.mark.parametrize("name", models.OTHERS)
def test_what_the_mask_says_counts(name, padded):
    """Where modules have no is_causal, or another than their mask. Encoders must not become causal, nor decoders see what comes."""
    given, found = models.inputs_of(name, "cpu", padded=padded), {}
    for implementation in ("eager", "flexpress"):
        model = models.other_model_of(name, implementation)
        found[implementation] = model(**given)[0][given["attention_mask"].bool()]
    torch.testing.assert_close(found["flexpress"], found["eager"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["pegasus_x", "bert"])
def test_a_compiled_step_without_an_attention_mask(name):
    """No graph breaks on masks that are only causal, or hide nothing."""
    dynamo.reset()
    ids, found = models.inputs_of(name, "cpu")["input_ids"], {}
    for implementation in ("eager", "flexpress"):
        model = models.other_model_of(name, implementation) if name in models.OTHERS else models.model_of(name, "cpu").eval()
        model.set_attn_implementation(implementation)
        step = torch.compile(model, backend="aot_eager", fullgraph=True) if implementation == "flexpress" else model
        found[implementation] = step(ids, use_cache=False)[0]
    torch.testing.assert_close(found["flexpress"], found["eager"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padded", [0, 5])
@pytest.mark.parametrize("name", models.REFUSED)
def test_models_that_compute_attention_themselves_are_refused(name, padded):
    """They take masks for tensors. With a mask of None they would see everything."""
    model, use = models.other_model_of(name, "flexpress"), models.REFUSED[name][2]
    words = rf'{type(model.config).__name__} uses one \({re.escape(use)}\).*attn_implementation="eager"'
    with pytest.raises(NotImplementedError, match=words):
        model(**models.inputs_of(name, "cpu", padded=padded))


@pytest.mark.parametrize(
    "use",
    [
        lambda mask, scores: scores + mask,
        lambda mask, scores: mask + scores,
        lambda mask, scores: scores.add_(mask),
        lambda mask, scores: scores * mask,
        lambda mask, scores: 1.0 - mask,
        lambda mask, scores: ~mask,
        lambda mask, scores: mask == 0,
        lambda mask, scores: mask < 0,
        lambda mask, scores: 0.0 in mask,
        lambda mask, scores: mask[:, :, :, :5],
        lambda mask, scores: len(mask),
        lambda mask, scores: mask.size(),
        lambda mask, scores: mask.dtype,
        lambda mask, scores: mask.to(torch.float32),
        lambda mask, scores: torch.cat([scores, mask], -1),
        lambda mask, scores: torch.where(mask, scores, 0.0),
        lambda mask, scores: scores.masked_fill(mask, 0.0),
    ],
)
def test_a_mask_is_no_tensor(use):
    mask = integration.mask(2, 8, 8)
    with pytest.raises(NotImplementedError, match="has no mask tensor, and the model of"):
        use(mask, torch.zeros(2, 4, 8, 8))


def test_what_passes_a_mask_on():
    """accelerate's hooks ask whether it can be moved, generate hands it in again, and it can be compared, hashed, copied and shown."""
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[0, 0] = False
    for mask in (integration.mask(2, 8, 8), integration.mask(2, 8, 8, attention_mask=padding)):
        assert hasattr(mask, "to") and not hasattr(mask, "size") and mask.ndim == mask.dim() == len(mask.shape)
        moved = mask.to("cpu", non_blocking=True)
        assert moved.shape == mask.shape and moved.mask_mod is mask.mask_mod and (moved.block_mask is None) == (mask.block_mask is None)
        assert integration.mask(2, 8, 8, attention_mask=mask) is mask is mask.contiguous()
        assert mask in {mask} and mask != integration.mask(2, 8, 8) and mask is not None and copy.copy(mask).shape == mask.shape
        assert str(mask).startswith("Mask(shape=(2, 1, 8, 8)")


def test_dropout_in_training():
    """Weights are dropped, others each time, and the same after the same seed."""
    model = models.model_of("bert", "cpu", attention_probs_dropout_prob=0.5)
    model.set_attn_implementation("flexpress")
    given = models.inputs_of("bert", "cpu", 8)
    assert torch.equal(model.eval()(**given)[0], model(**given)[0])
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model.train()(**given)[0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    found[0].sum().backward()
    query, module = torch.randn(1, 2, 8, 16), torch.nn.Module().eval()  # a model that passes its probability in any case
    out, _ = integration.attention(module, query, query, query, None, dropout=0.5, is_causal=True)
    assert torch.equal(out, integration.attention(module, query, query, query, None, is_causal=True)[0])


def test_attention_weights_are_not_output(llama):
    llama.set_attn_implementation("flexpress")
    with pytest.raises(ValueError, match="output_attentions"):
        llama.config.output_attentions = True


@pytest.mark.parametrize("version, words", [("4.57.0", "This is 4.57.0"), (None, "install transformers>=5")])
def test_another_transformers_is_told(version, words, monkeypatch):
    import sys
    import types

    fake = None if version is None else types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with pytest.raises(ImportError, match=words):
        integration._interfaces()
