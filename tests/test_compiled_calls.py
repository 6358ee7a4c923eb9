"""Calls inside torch.compile(fullgraph=True): output and gradients as in eager mode, whatever the mod is and wherever it was made."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import flex_attention as torchs

import flexpress
from flexpress import and_masks, create_block_mask, create_mask, flash, flex_attention, mods, or_masks, varlen_attention
from support.devices import DEVICES

pytest.importorskip("torch._dynamo")
pytestmark = pytest.mark.usefixtures("fresh_compiler")
LENGTH = 40


def random(*shape, device, grad=True):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device).requires_grad_(grad)


def inputs(device, heads=2, kv_heads=2):
    return [random(2, h, LENGTH, 16, device=device) for h in (heads, kv_heads, kv_heads)]


class Case(NamedTuple):
    """run      of tensors and numbers; what of its result is no tensor is not compared
    arguments   tensors that may want a gradient, and numbers
    others      arguments of later calls: other numbers
    """

    run: Callable
    arguments: list
    others: tuple[list, ...] = ()


class Scale:
    """A mod that is an object."""

    def __init__(self, by) -> None:
        self.by = by

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.by[h]


INDICES = {
    "made there": lambda table, h, places: table[h, torch.arange(3, device=table.device)].mean(),
    "captured": lambda table, h, places: table[h, places].sum(),
    "gathered": lambda table, h, places: table[h].gather(0, places).sum(),
    "selected": lambda table, h, places: table[h].index_select(0, places).sum(),
}


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_indices(device, index):
    """Compilers have none of their values: they are read in the kernel."""
    table, places = random(2, 3, device=device), torch.tensor([0, -1], device=device).remainder(3)

    def attend(q, k, v):
        read = INDICES[index]
        return flex_attention(
            *(q, k, v),
            lambda score, b, h, q_idx, kv_idx: score + read(table, h, places),
            mask_mod=lambda b, h, q_idx, kv_idx: (read(table, h, places) > 0) | (q_idx >= kv_idx),
        )

    tensors = inputs(device)
    found, expected = torch.compile(attend, fullgraph=True)(*tensors), attend(*tensors)
    torch.testing.assert_close(found, expected)
    for mine, right in zip(*(torch.autograd.grad(out.sum(), (*tensors, table)) for out in (found, expected)), strict=True):
        torch.testing.assert_close(mine, right)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.3]))
        self.cap = 5.0
        self.register_buffer("documents", torch.arange(LENGTH) // 17)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return self.cap * torch.tanh((score + self.slopes[h] * (kv_idx - q_idx)) / self.cap)

    def forward(self, q, k, v):
        def same(b, h, q_idx, kv_idx):
            return self.documents[q_idx] == self.documents[kv_idx]

        mask = create_block_mask(and_masks(same, mods.causal), None, None, q.shape[2], k.shape[2], q.device)
        return flex_attention(q, k, v, self.score_mod, mask)


def plain(device):
    return Case(lambda q, k, v: flex_attention(q * 2, k, v), inputs(device))


def recipe_outside(device):
    slopes = random(2, device=device)
    mod = mods.alibi(slopes)
    return Case(lambda q, k, v, _: flex_attention(q, k, v, mod, mask_mod=mods.causal), [*inputs(device), slopes])


def closure_over_the_graph(device):
    def run(q, k, v, slopes):
        doubled = slopes * 2

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + doubled[h] * (kv_idx - q_idx)

        return flex_attention(q, k, v, score_mod)

    return Case(run, [*inputs(device), random(2, device=device)])


def numbers_that_change(device):
    def run(q, k, v, window, cap):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx - kv_idx < window, cap * torch.tanh(score / cap), -float("inf"))

        return flex_attention(q, k, v, score_mod)

    tensors = inputs(device)
    return Case(run, [*tensors, 3, 2.0], ([*tensors, 9, 2.5], [*tensors, 12, 3.5], [*tensors, 13, 4.5]))


def recipes_with_numbers_that_change(device):
    def run(q, k, v, window, cap):
        return flex_attention(q, k, v, mods.softcap(cap), mask_mod=mods.sliding_window(window))

    tensors = inputs(device)
    return Case(run, [*tensors, 3, 2.0], ([*tensors, 9, 2.5], [*tensors, 12, 3.5]))


def modules_attributes(device):
    layer = Layer().to(device)
    return Case(lambda q, k, v, _: layer(q, k, v), [*inputs(device), layer.slopes])


def an_object(device):
    by = random(2, device=device)
    mod = Scale(by)
    return Case(lambda q, k, v, _: flex_attention(q, k, v, mod), [*inputs(device), by])


def a_partial(device):
    def score_mod(score, b, h, q_idx, kv_idx, by):
        return score * by[h]

    return Case(
        lambda q, k, v, by: flex_attention(q, k, v, functools.partial(score_mod, by=by)), [*inputs(device), random(2, device=device)]
    )


def nested_functions(device):
    def run(q, k, v, bias):
        def shifted(by):
            return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx] * by

        first = shifted(0.5)

        def score_mod(score, b, h, q_idx, kv_idx):
            return shifted(2.0)(first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

        return flex_attention(q, k, v, score_mod)

    return Case(run, [*inputs(device), random(2, 2, LENGTH, LENGTH, device=device)])


def mask_from_outside(device):
    mask = create_block_mask(mods.sliding_window(7), None, None, LENGTH, LENGTH, device)
    return Case(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), inputs(device))


def mask_made_inside(device):
    def run(q, k, v, documents):
        ids = documents.cumsum(0) // 99

        def mask_mod(b, h, q_idx, kv_idx):
            return ids[q_idx] == ids[kv_idx]

        mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], q.device, 128)
        return flex_attention(flex_attention(q, k, v, block_mask=mask), k, v, block_mask=mask)

    return Case(run, [*inputs(device), torch.arange(LENGTH, device=device)])


def mask_handed_out(device):
    def run(q, k, v, window):
        mask = create_block_mask(mods.sliding_window(window), None, None, LENGTH, LENGTH, q.device)
        return flex_attention(q, k, v, block_mask=mask), mask

    return Case(run, [*inputs(device), 9])


def torchs_mask(device):
    mask = torchs.create_block_mask(mods.prefix_lm(5), 1, 1, LENGTH, LENGTH, device)
    return Case(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), inputs(device))


def torchs_helpers(device):
    def run(q, k, v, window):
        late = lambda b, h, q_idx, kv_idx: q_idx > kv_idx + window
        return flex_attention(q, k, v, mask_mod=torchs.or_masks(torchs.and_masks(mods.causal, late), lambda b, h, i, j: i == j))

    return Case(run, [*inputs(device), 3])


def our_helpers(device):
    near = mods.sliding_window(4)
    return Case(lambda q, k, v: flex_attention(q, k, v, mask_mod=or_masks(near, flexpress.noop_mask)), inputs(device))


def gqa_and_statistics(device):
    def run(q, k, v):
        out, aux = flex_attention(q, k, v, mods.softcap(3.0), enable_gqa=True, return_aux=flexpress.AuxRequest(lse=True, max_scores=True))
        return out, aux.lse, aux.max_scores

    return Case(run, inputs(device, heads=4))


def scales_that_change(device):
    run = lambda q, k, v, scale: flex_attention(q, k, v, mods.softcap(2.0), scale=scale)
    tensors = inputs(device)
    return Case(run, [*tensors, 0.3], ([*tensors, 0.4], [*tensors, 2], [*tensors, 3]))


def lse_and_options(device):
    options = {"BLOCK_M": 32, "BLOCK_N": 32, "BACKEND": "PORTABLE"}
    return Case(lambda q, k, v: flex_attention(q, k, v, return_lse=True, kernel_options=options, scale=0.3), inputs(device))


def packed_sequences(device):
    offsets = torch.tensor([0, 9, 30, 80], dtype=torch.int32, device=device)

    def run(q, k, v, slopes):
        packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        mod = lambda score, b, h, q_idx, kv_idx: score + slopes[b, h] * (kv_idx - q_idx)
        return varlen_attention(*packed, offsets, None, mod, mods.causal, return_lse=True)

    return Case(run, [*inputs(device), random(3, 2, device=device)])


def flash_functions(device):
    def run(q, k, v, bias):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        first = flash.flash_attn_func(q, k, v, bias, causal=True)
        second = flash.flash_attn_kvpacked_func(first, torch.stack([k, v], 2))
        return flash.flash_attn_qkvpacked_func(torch.stack([second, k, v], 2), causal=True)

    return Case(run, [*inputs(device), random(1, 2, 1, LENGTH, device=device)])


def a_dense_mask(device):
    return Case(
        lambda q, window: q[0, 0] @ q[0, 0].T * create_mask(mods.sliding_window(window), 1, 1, LENGTH, LENGTH, q.device)[0, 0],
        [random(1, 1, LENGTH, 16, device=device), 5],
    )


def numbers_read_from_tensors(device):
    """By float() and .item(), which Dynamo makes nodes of the mod's graph of."""
    temperature, bound, shift = torch.tensor(0.7), torch.tensor(1.5, device=device), torch.tensor(3)
    weights = np.array([0.5, 0.25], dtype=np.float32)

    def score_mod(score, b, h, q_idx, kv_idx):
        score = (score * float(temperature)).clamp(-bound.item(), 2 * float(bound) + 1)
        return score * float(weights[1]) + weights.mean().item() + (q_idx - kv_idx) * int(shift) * float(shift)

    return Case(lambda q, k, v: flex_attention(q, k, v, score_mod), inputs(device))


def places_in_tensors(device):
    """That have no dimension: Python would read their number."""
    table, place = random(4, 16, device=device), torch.tensor(3, device=device)

    def run(q, k, v, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * table[place % 4, place] + table[:, place][h] + table[-place, kv_idx % 16]

        return flex_attention(q, k, v, score_mod, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < place * 4 + table[0, place - 9])

    return Case(run, [*inputs(device), table])


def sizes_of_tensors(device):
    """Floats that come of lengths, which are no numbers that a tensor holds."""

    def run(q, k, v):
        row = q[0, 0, :, 0]
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * (9 / row.numel()) + float(len(row)) / row.shape[0])

    return Case(run, inputs(device))


CASES = [
    plain,
    places_in_tensors,
    numbers_read_from_tensors,
    recipe_outside,
    closure_over_the_graph,
    numbers_that_change,
    recipes_with_numbers_that_change,
    modules_attributes,
    an_object,
    a_partial,
    nested_functions,
    mask_from_outside,
    mask_made_inside,
    mask_handed_out,
    torchs_mask,
    torchs_helpers,
    our_helpers,
    gqa_and_statistics,
    scales_that_change,
    lse_and_options,
    packed_sequences,
    flash_functions,
]
WITHOUT_AUTOGRAD = [plain, an_object, mask_made_inside, torchs_mask, lse_and_options, packed_sequences, flash_functions]  # in the graph
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler"))
BY_INDUCTOR = [closure_over_the_graph, numbers_that_change, modules_attributes, mask_made_inside, packed_sequences, gqa_and_statistics]


def tensors_of(result) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]


def run_and_differentiate(call, arguments):
    found = tensors_of(call(*arguments))
    wanted = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    loss = sum(t.nan_to_num(neginf=0.0).square().mean() for t in found if t.requires_grad)
    return found, torch.autograd.grad(loss, wanted)


def check(case: Case, backend: str, **options) -> None:
    compiled = torch.compile(case.run, backend=backend, fullgraph=True, **options)
    for arguments in (case.arguments, *case.others):
        for mine, expected in zip(run_and_differentiate(compiled, arguments), run_and_differentiate(case.run, arguments), strict=True):
            for t, other in zip(mine, expected, strict=True):
                torch.testing.assert_close(t, other, rtol=1e-4, atol=1e-5)


WAYS = [*(("aot_eager", make) for make in CASES), *(("eager", make) for make in WITHOUT_AUTOGRAD)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend, make", WAYS, ids=lambda x: getattr(x, "__name__", x))
def test_as_in_eager_mode(backend, make, device):
    check(make(device), backend)


@pytest.mark.parametrize("scalars", [False, True])
def test_floats_of_integers_that_a_mod_reads_break_the_graph(fresh_compiler, scalars):
    """Where it may not break, an error says what to do."""
    window, (q, k, v) = torch.tensor(3), inputs("cpu")

    def run(q, k, v):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * (int(window) / 2))

    with torch._dynamo.config.patch(capture_scalar_outputs=scalars):
        words = "of an integer that it reads from a tensor: compute it before the call"
        with pytest.warns(UserWarning), pytest.raises(torch._dynamo.exc.Unsupported, match=words):
            torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
        with pytest.warns(UserWarning, match="the call is a graph break"):
            found = torch.compile(run, backend="aot_eager")(q, k, v)
        torch.testing.assert_close(found, run(q, k, v))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", BY_INDUCTOR)
@pytest.mark.parametrize("backend", [INDUCTOR])
def test_by_inductor(backend, make, device):
    check(make(device), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("make", CASES)
def test_by_inductor_on_a_gpu(make):
    check(make("cuda"), "inductor")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [numbers_that_change, mask_made_inside, sizes_of_tensors])
def test_dynamic_from_the_start(make, device):
    check(make(device), "aot_eager", dynamic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [modules_attributes, mask_made_inside, packed_sequences])
def test_cuda_graphs_of_a_compiled_call(make):
    check(make("cuda"), "inductor", mode="reduce-overhead")


@pytest.mark.gpu
def test_cuda_graphs_of_kernels_that_count():
    """Those for Hopper count tiles in memory; lists of a mask_mod without tensors are kept for later calls elsewhere."""
    q, k, v = (torch.randn(2, 8, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    run = lambda q, k, v: flex_attention(q * 1, k, v, mods.softcap(5.0), mask_mod=mods.causal)
    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    weight = torch.randn_like(q)
    for _ in range(4):
        found = torch.autograd.grad((compiled(q, k, v) * weight).sum(), (q, k, v))
    for g, other in zip(found, torch.autograd.grad((run(q, k, v) * weight).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(g, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_make_graphed_callables():
    layer, (q, k, v) = Layer().cuda(), inputs("cuda")
    expected = run_and_differentiate(Layer().cuda(), (q, k, v))
    graphed = torch.cuda.make_graphed_callables(layer, tuple(t.detach().clone().requires_grad_() for t in (q, k, v)))
    for _ in range(2):
        for mine, other in zip(run_and_differentiate(graphed, (q, k, v)), expected, strict=True):
            for t, wanted in zip(mine, other, strict=True):
                torch.testing.assert_close(t, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("inside", [True, False], ids=["level inside", "level outside"])
def test_forward_mode_around_a_compiled_call_and_in_it(backend, inside):
    """An operator has no tangent: such a call is a graph break."""
    q, k, v, direction = torch.randn(4, 1, 1, 8, 16).unbind()

    def attend(q):
        return flex_attention(q, k, v) + q

    def tangent(attend):
        def run(q, direction):
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(attend(forward_ad.make_dual(q, direction))).tangent

        return run

    torch._dynamo.reset()
    wanted = tangent(attend)(q, direction)
    if inside:
        found = torch.compile(tangent(attend), backend=backend)(q, direction)
    else:
        found = tangent(torch.compile(attend, backend=backend))(q, direction)
    torch.testing.assert_close(found, wanted)
