"""Recipes, what is composed of them, and block masks go through pickle, torch.save, deepcopy and DataLoader workers."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch

from flexpress import BlockMask, and_masks, cache_info, create_block_mask, create_mask, evaluate_mod, flex_attention, mods, or_masks
from flexpress import safe_globals as known_to_flexpress
from flexpress.codegen.mod.tracing.bind import bind
from support.dense import dense_attention, relative_error
from support.devices import DEVICES

S = 200
IDS = torch.arange(S, dtype=torch.int32) // 70
MASKS = {
    "causal": mods.causal,
    "causal_offset": mods.causal_offset(3),
    "dilated_window": mods.dilated_window(8, dilation=3),
    "document": mods.document(IDS),
    "document_of_a_batch": mods.document(IDS[None].repeat(2, 1), mods.causal),
    "document_from_offsets": mods.document_from_offsets(torch.tensor([0, 90, 200]), mask_mod=mods.sliding_window(16)),
    "global_sliding": mods.global_sliding(16, 2),
    "prefix_lm": mods.prefix_lm(20),
    "prefix_lm_of_a_batch": mods.prefix_lm(torch.tensor([3, 40])),
    "sliding_window": mods.sliding_window(window=16),
    "sliding_window_bidirectional": mods.sliding_window_bidirectional(right=4, left=9),
    "block_causal": mods.block_causal(24),
    "block_diffusion": mods.block_diffusion(length=100, block=24),
    "graph_neighbors": mods.graph_neighbors((IDS[:, None] - IDS).abs(), 1),
    "jagged_window": mods.jagged_window(torch.arange(S) - IDS, torch.arange(S) + 3),
    "neighborhood": mods.neighborhood((S // 8, 8), (3, 5), causal=(True, False)),
    "within_radius": mods.within_radius(torch.randn(S, 3), radius=1.5),
    "tree": mods.tree((torch.arange(S) - 1) // 2),
    "tree_behind_texts": mods.tree((torch.arange(S) - 1) // 2, start=torch.tensor([3, 9])),
    "and_or": and_masks(mods.causal, or_masks(mods.sliding_window(9), mods.prefix_lm(5))),
}
SCORES = {
    "alibi": mods.alibi(mods.alibi_slopes(2)),
    "alibi_symmetric": mods.alibi_symmetric(slopes=mods.alibi_slopes(2)),
    "compose_scores": mods.compose_scores(mods.softcap(5.0), mods.alibi(mods.alibi_slopes(2))),
    "disentangled": mods.disentangled(torch.randn(1, 2, 5, 6), p2c=torch.randn(1, 2, 7, 6)),
    "forget_gate": mods.forget_gate(-torch.rand(1, 2, 7)),
    "gaussian_distances": mods.gaussian_distances(torch.randn(2, S, 3), torch.zeros(4), torch.ones(4), weights=torch.randn(2, 4)),
    "invariant_points": mods.invariant_points(torch.randn(1, 2, S, 4, 3), torch.randn(1, 2, S, 4, 3), torch.ones(2)),
    "graph_bias": mods.graph_bias((IDS[:, None] - IDS).abs(), torch.randn(3, 2)),
    "relative_bias": mods.relative_bias(torch.randn(2, 2 * S - 1)),
    "softcap": mods.softcap(2.0),
    "t5_bias": mods.t5_bias(torch.randn(32, 2), bidirectional=False),
    "yarn_temperature": mods.yarn_temperature(8.0, mscale=0.7),
}


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value, weights_only: bool = False):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    with torch.serialization.safe_globals(known_to_flexpress() if weights_only else []):
        return torch.load(file, weights_only=weights_only)


def saved_with_weights_only(value):
    return saved(value, weights_only=True)


WAYS = [pickled, saved, saved_with_weights_only, copy.copy, copy.deepcopy]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_comes_back(name, way):
    """The same mask, by the same trace: nothing is printed for it again."""
    mod = MASKS[name]
    found, extents = way(mod), (2, 1, S, S)
    assert found.__name__ == mod.__name__ and repr(found).partition(" at ")[0] == repr(mod).partition(" at ")[0]
    expected, traces = create_mask(mod, *extents, "cpu"), cache_info().traces
    assert torch.equal(create_mask(found, *extents, "cpu"), expected)
    assert bind(found, "mask")[0] is bind(mod, "mask")[0] and cache_info().traces == traces


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_mod_comes_back(name, way):
    scores = torch.randn(1, 2, 5, 7)
    assert torch.equal(evaluate_mod(way(SCORES[name]), scores), evaluate_mod(SCORES[name], scores))


def test_every_recipe_is_here():
    """Those that make a mod: they return one, and need no other argument than the ones above have."""
    makers = {name for name in mods.__all__ if inspect.signature(getattr(mods, name)).return_annotation in ("MaskMod", "ScoreMod")}
    assert makers | {"causal"} <= {*MASKS, *SCORES} and len(makers) >= 13


@pytest.mark.parametrize("way", WAYS[:4])
@pytest.mark.parametrize("name", ["sliding_window", "document", "and_or", "global_sliding"])
def test_a_block_mask_comes_back(name, way):
    mask = create_block_mask(MASKS[name], None, None, S, S, "cpu")
    found = way(mask)
    assert type(found) is BlockMask and found == mask and str(found) == str(mask) and found._decided == mask._decided
    q, k, v = torch.randn(3, 1, 2, S, 16).unbind()
    assert torch.equal(flex_attention(q, k, v, block_mask=found), flex_attention(q, k, v, block_mask=mask))
    assert found.adjust(100, 90) == mask.adjust(100, 90)


@pytest.mark.parametrize("way", [pickled, saved_with_weights_only, copy.deepcopy])
@pytest.mark.parametrize("index", [(0, slice(None), slice(1, 3)), (slice(None), slice(None), [3, 1]), (1,)])
def test_a_slice_of_a_block_mask_comes_back(index, way):
    """With the mask_mod that knows its offsets, which is made anew."""
    whole = create_block_mask(MASKS["document_of_a_batch"], 2, None, S, S, "cpu", BLOCK_SIZE=48)
    part = whole[index]
    found = way(part)
    assert found == part and found[:, :, :1] == part[:, :, :1]
    extents = found.shape[0], 1, *found.seq_lengths
    assert torch.equal(create_mask(found.mask_mod, *extents, "cpu"), create_mask(part.mask_mod, *extents, "cpu"))


@pytest.mark.gpu
def test_a_mask_goes_to_another_device():
    mask = create_block_mask(MASKS["sliding_window"], None, None, S, S, "cuda")[:, :, 1:]
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    found = torch.load(file, weights_only=False, map_location="cpu")
    assert found.kv_indices.device.type == "cpu" and found == mask.to("cpu")
    assert pickled(mask).kv_indices.is_cuda and pickled(mask) == mask


def test_a_mask_whose_mod_was_replaced_comes_back():
    mask = create_block_mask(mods.causal, None, None, S, S, "cpu")
    mask.mask_mod = mods.prefix_lm(3)
    found = pickled(mask)
    assert found == mask and not found._decided


def mine(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 7


def test_ones_own_function_pickles_by_its_name():
    mask = create_block_mask(and_masks(mine, mods.causal), None, None, S, S, "cpu")
    assert pickled(mask) == mask


def test_a_lambda_is_pickles_own_error_that_names_it():
    for mod in (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, and_masks(mods.causal, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)):
        with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
            pickle.dumps(create_block_mask(mod, None, None, S, S, "cpu"))


def test_a_copied_module_has_mods_of_its_own_parameters():
    module = torch.nn.Module()
    module.slopes = torch.nn.Parameter(torch.rand(2))
    module.mod = mods.alibi(module.slopes)
    found = copy.deepcopy(module)
    assert bind(found.mod, "score")[1][0] is found.slopes


def test_composing_a_recipe_costs_a_call_nothing():
    """What a mod that holds others captures are their functions themselves."""
    for mod in (mods.document(IDS, MASKS["sliding_window"]), and_masks(MASKS["prefix_lm"], MASKS["causal"]), SCORES["compose_scores"]):
        cells = [cell.cell_contents for cell in mod.function.__closure__]
        held = [f for cell in cells for f in (cell if isinstance(cell, tuple) else (cell,)) if callable(f)]
        assert held and all(type(f) is type(mine) for f in held)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mod_that_captures_one(device):
    near = mods.sliding_window(5)

    def mod(b, h, q_idx, kv_idx):
        return near(b, h, q_idx, kv_idx) | (kv_idx == 0)

    q, k, v = torch.randn(3, 1, 2, S, 16, device=device).unbind()
    assert relative_error(flex_attention(q, k, v, mask_mod=mod), dense_attention(q, k, v, mask_mod=mod)[0]) < 2e-6
    traces = cache_info().traces
    near = mods.sliding_window(9)
    assert relative_error(flex_attention(q, k, v, mask_mod=mod), dense_attention(q, k, v, mask_mod=mod)[0]) < 2e-6
    assert cache_info().traces == traces
    near = mods.prefix_lm(9)
    assert relative_error(flex_attention(q, k, v, mask_mod=mod), dense_attention(q, k, v, mask_mod=mod)[0]) < 2e-6


class Masks(torch.utils.data.Dataset):
    """Samples with a mask each."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int):
        return torch.full((2,), i), create_block_mask(mods.sliding_window(16 * (i + 1)), None, None, S, S, "cpu")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_dataloader_worker_returns_masks(context):
    loader = torch.utils.data.DataLoader(Masks(), batch_size=None, num_workers=1, multiprocessing_context=context)
    for i, (sample, mask) in enumerate(loader):
        assert sample.tolist() == [i, i]
        assert mask == create_block_mask(mods.sliding_window(16 * (i + 1)), None, None, S, S, "cpu")
