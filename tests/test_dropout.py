"""Dropout against dense float64 attention with the very mask that dropout_mask says: every tile, kernel and layout drops the same."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from flexpress import (
    AuxRequest,
    dropout_mask,
    flash_attn,
    flex_attention,
    mods,
    printed_kernels,
    scaled_dot_product_attention,
    varlen_attention,
)
from flexpress.codegen.plan.extras import DROPOUT_STEPS, Extras
from flexpress.codegen.run.preview import compilation
from flexpress.codegen.text.render import render
from flexpress.inputs import dropout
from support.dense import dense_attention, dropped_attention, relative_error
from support.devices import DEVICES, for_any
from support.extras import check_dropout, dropout_problems
from support.ptx import inline_asm_elementwise

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@for_any(dropout_problems, cpu=8, cuda=100)
def test_any_problem(drawn, device):
    check_dropout(drawn, device)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["HOPPER", "PORTABLE"])
@pytest.mark.parametrize(
    "head_dims, score", [((64, 64), "alibi"), ((128, 128), None), ((72, 40), "softcap"), ((192, 128), None), ((256, 256), None)]
)
def test_in_16_bits_at_real_lengths(head_dims, score, backend):
    """Errors of the output and of every gradient are at most twice those of a plain computation in bfloat16."""
    if backend == "HOPPER" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    torch.manual_seed(0)
    shapes = ((2, 4, 1100, head_dims[0]), (2, 2, 1300, head_dims[0]), (2, 2, 1300, head_dims[1]))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    mod = {None: None, "alibi": mods.alibi(mods.alibi_slopes(4, "cuda")), "softcap": mods.softcap(5.0)}[score]
    for mask_mod in (None, mods.causal):
        options, seed = {"BACKEND": backend} if backend == "PORTABLE" else {}, torch.tensor([77 << 33], device="cuda")
        out = flex_attention(q, k, v, mod, mask_mod=mask_mod, enable_gqa=True, dropout_p=0.2, dropout_seed=seed, kernel_options=options)
        kept, weights = dropout_mask(seed, (2, 4, 1100, 1300), 0.2), torch.randn_like(out)
        results = [(out, *torch.autograd.grad(out, (q, k, v), weights))]
        for precision in (torch.float64, torch.bfloat16):
            inputs = [t.detach().to(precision).requires_grad_() for t in (q, k, v)]
            dense = dropped_attention(*inputs, kept, 0.2, mod, mask_mod, precision=precision)
            results.append((dense, *torch.autograd.grad(dense, inputs, weights.to(precision))))
        for found, exact, plain in zip(*results, strict=True):
            assert relative_error(found, exact) <= 2 * relative_error(plain, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", [{}, {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 1}, {"USE_TMA": True}])
def test_every_tile_drops_the_same(tile, device):
    """Values that are the identity show the weights themselves, with few queries, too."""
    q, k, v = torch.zeros(2, 2, 64, 16, device=device), torch.zeros(2, 2, 64, 16, device=device), torch.eye(64, device=device)
    seed = torch.tensor([1 << 40], device=device)
    kept = dropout_mask(seed, (2, 2, 64, 64), 0.3)
    for queries in (64, 5):
        given = q[:, :, :queries], k, v.expand(2, 2, 64, 64)
        out = flex_attention(*given, dropout_p=0.3, dropout_seed=seed, kernel_options=tile)
        assert torch.equal(out != 0, kept[:, :, :queries])
    for batch in range(2):  # b and h are part of the place
        assert not torch.equal(kept[batch, 0], kept[batch, 1]) and not torch.equal(kept[0, batch], kept[1, batch])


@pytest.mark.parametrize("backend", ["AUTO", "PORTABLE"])
@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences_drop_what_a_batch_of_them_does(device, backend):
    lengths = [5, 0, 35, 150] if device == "cpu" else [600, 0, 1, 1300]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), h, 16, device=device, requires_grad=True) for h in (4, 2, 2))
    seed = torch.tensor([-7], device=device)
    out = varlen_attention(q, k, v, ends, mask_mod=mods.causal, dropout_p=0.4, dropout_seed=seed, kernel_options={"BACKEND": backend})
    kept, wanted = dropout_mask(seed, (4, 4, max(lengths), max(lengths)), 0.4), []
    for i, (a, b) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        if a < b:
            part = (t[a:b].transpose(0, 1)[None] for t in (q, k, v))
            wanted.append(dropped_attention(*part, kept[i : i + 1, :, : b - a, : b - a], 0.4, None, mods.causal)[0].transpose(0, 1))
    exact, weights = torch.cat(wanted), torch.randn_like(out)
    assert relative_error(out, exact) < 5e-6
    found = torch.autograd.grad(out, (q, k, v), weights)
    for have, want in zip(found, torch.autograd.grad(exact, (q, k, v), weights.double()), strict=True):
        assert relative_error(have, want) < 5e-5


def test_as_many_weights_are_dropped_as_asked_and_independently():
    """Over 2**19 weights: their number, in rows too, and how often neighbours of any kind agree."""
    seed, n = torch.tensor([42]), 1 << 19
    for p in (0.1, 0.5, 0.003):
        dropped = ~dropout_mask(seed, (2, 4, 256, 256), p)
        p = round(p * DROPOUT_STEPS) / DROPOUT_STEPS
        allowed = 5 * (p * (1 - p) / n) ** 0.5
        assert abs(dropped.float().mean().item() - p) < allowed
        of_rows = dropped.float().sum(3) - 256 * p
        assert abs(of_rows.square().mean().item() / (256 * p * (1 - p)) - 1) < 5 * (2 / 2048) ** 0.5 + 1 / (256 * p)
        for dim, step in ((3, 1), (3, 2), (3, 8), (3, 16), (3, 64), (3, 128), (2, 1), (2, 4), (2, 8), (2, 16), (1, 1), (0, 1)):
            length = dropped.shape[dim] - step
            both = (dropped.narrow(dim, 0, length) & dropped.narrow(dim, step, length)).float()
            assert abs(both.mean().item() - p * p) < 5 * (p * p / both.numel()) ** 0.5 + 2e-5
    assert not (dropout_mask(seed, (1, 1, 64, 64), 0.5) == dropout_mask(seed + (1 << 32), (1, 1, 64, 64), 0.5)).all()


def rank(rows: list[int]) -> int:
    """Of rows of bits, over the field of two numbers."""
    basis: list[int] = []
    for row in rows:
        for other in basis:
            row = min(row, row ^ other)
        if row:
            basis.append(row)
    return len(basis)


def test_bits_that_say_what_is_dropped_depend_on_each_other_as_little_as_said(monkeypatch):
    """Each bit of a group's numbers is a sum of Philox's 128 bits: of which ones is found with one of them set at a time. The 14 bits of a
    number are independent, so that p is exact; and so are the upper 6 of any two weights together."""
    group = [(m, 8 * j + i) for m in (0, 8) for j in range(16) for i in range(2)]
    sums = [[0] * 14 for _ in group]
    for source in range(128):
        words = [1 << source % 32 if i == source // 32 else 0 for i in range(4)]
        monkeypatch.setattr(dropout, "philox", lambda _, *at, words=words: [torch.full(at[0].shape, w) for w in words])
        numbers = dropout.random_numbers(torch.tensor([0]), (1, 1, 16, 128))[0, 0]
        for (m, n), bits in zip(group, sums, strict=True):
            for i in range(14):
                bits[i] |= (numbers[m, n].item() >> 13 - i & 1) << source
    assert all(rank(bits) == 14 for bits in sums)
    assert all(rank(one[:6] + other[:6]) == 12 for one, other in itertools.combinations(sums, 2))


def test_products_of_the_kernels():
    """What Philox multiplies by, as instructions: the upper and the lower 32 bits."""
    spec = compilation("sm_90", extras=Extras(dropout="positions")).spec
    words = torch.randint(0, 1 << 32, (50,), generator=torch.Generator().manual_seed(0))
    found = re.findall(r'"(\{.reg .b64 product; mul.wide.u32 product, \$2, (0x\w+);[^"]*)"', render(spec))
    assert [int(factor, 0) for _, factor in found] == [0xD2511F53, 0xCD9E8D57]
    for asm, factor in found:
        high, low = inline_asm_elementwise(asm, "=r,=r,r", [words], (torch.int64, torch.int64), True, 1)
        assert [(h << 32) + n for h, n in zip(high.tolist(), low.tolist(), strict=True)] == [n * int(factor, 0) for n in words.tolist()]


def test_the_generator_gives_the_seed():
    q = torch.randn(1, 2, 40, 16, requires_grad=True)

    def call(drop=0.5):
        return flex_attention(q, q, q, mask_mod=mods.causal, dropout_p=drop)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for function, seed in ((call, 1), (call, 1), (call, 2), (compiled, 1)):
        torch.manual_seed(seed)
        found.append(function())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2]) and torch.equal(found[0], found[3])
    gradients = [torch.autograd.grad(out.square().sum(), q)[0] for out in (found[0], found[3])]
    assert torch.equal(*gradients)
    assert not call(1.0).any() and torch.equal(call(0.0), flex_attention(q, q, q, mask_mod=mods.causal))
    before = torch.get_rng_state()
    call(0.0)
    assert torch.equal(before, torch.get_rng_state()), "without dropout nothing is drawn"


def test_another_probability_in_compiled_code():
    """torch's compiler makes a symbol of a number that changes."""
    q, seed = torch.randn(1, 2, 40, 16), torch.tensor([11])

    def call(p):
        return flex_attention(q, q, q, dropout_p=p, dropout_seed=seed)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for p in (0.1, 0.3, 0.0, 1.0, 0.3):
        assert torch.equal(compiled(p), call(p))


def test_statistics_and_sinks_know_nothing_of_it():
    q, sinks = torch.randn(1, 2, 70, 16), torch.randn(2, requires_grad=True)
    seed = torch.tensor([3])
    aux = {"return_aux": AuxRequest(lse=True, max_scores=True), "mask_mod": mods.causal, "sinks": sinks}
    out, dropped = flex_attention(q, q, q, dropout_p=0.5, dropout_seed=seed, **aux)
    _, without = flex_attention(q, q, q, **aux)
    assert torch.equal(dropped.lse, without.lse) and torch.equal(dropped.max_scores, without.max_scores)
    kept = dropout_mask(seed, (1, 2, 70, 70), 0.5)
    exact = sinks.detach().double().requires_grad_()
    plain, lse, _ = dense_attention(q, q, q, None, mods.causal)
    share = (lse - torch.logaddexp(lse, exact[:, None].expand_as(lse))).exp().unsqueeze(-1)
    wanted = dropped_attention(q, q, q, kept, 0.5, None, mods.causal) * share
    assert relative_error(out, wanted) < 1e-6
    weights = torch.randn_like(out)
    (found,), (expected,) = torch.autograd.grad(out, sinks, weights), torch.autograd.grad(wanted, exact, weights.double())
    assert relative_error(found, expected) < 1e-5


def test_another_probability_compiles_nothing_and_counts():
    q, seed = torch.randn(1, 1, 30, 16, requires_grad=True), torch.tensor([9])
    compiled = set()
    for p in (0.1, 0.6, 0.1):
        out = flex_attention(q, q, q, dropout_p=p, dropout_seed=seed)
        exact = dropped_attention(q, q, q, dropout_mask(seed, (1, 1, 30, 30), p), p)
        assert relative_error(out, exact) < 1e-6
        have, want = (torch.autograd.grad(t.square().sum(), q)[0] for t in (out, exact))
        assert relative_error(have, want) < 1e-5
        compiled.add(tuple(printed_kernels()))
    assert len(compiled) == 1


def test_other_functions():
    """They drop what flex_attention drops, and on a mean over many seeds nothing is lost."""
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    calls = (
        lambda: flash_attn.flash_attn_func(q, k, v, 0.5, causal=True).transpose(1, 2),
        lambda: scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), dropout_p=0.5, is_causal=True),
        lambda: flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask_mod=mods.causal, dropout_p=0.5),
    )
    found = []
    for call in calls:
        torch.manual_seed(5)
        found.append(call())
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be a number from 0 to 1, got 1.5"),
        ({"dropout_p": math.nan}, ValueError, "dropout_p must be a number from 0 to 1, got nan"),
        ({"dropout_p": True}, TypeError, "dropout_p must be a number from 0 to 1, got bool"),
        ({"dropout_p": "a"}, TypeError, "dropout_p must be a number from 0 to 1, got str"),
        ({"dropout_p": None}, TypeError, "dropout_p must be a number from 0 to 1, got NoneType"),
        ({"dropout_p": []}, TypeError, "got list"),
        ({"dropout_p": torch.zeros(2)}, TypeError, "got Tensor"),
        ({"dropout_p": 0.0, "dropout_seed": "x"}, TypeError, "dropout_seed must be an int64 tensor of one element, got str"),
        ({"dropout_p": 0.5, "dropout_seed": torch.tensor([3]).to_sparse()}, NotImplementedError, "dropout_seed is a sparse tensor"),
        ({"dropout_p": 0.5, "dropout_seed": 3}, TypeError, "dropout_seed must be an int64 tensor of one element, got int"),
        ({"dropout_p": 0.5, "dropout_seed": torch.zeros(2, dtype=torch.int64)}, TypeError, r"got torch.int64 \(2,\)"),
        ({"dropout_p": 0.5, "dropout_seed": torch.zeros(1, dtype=torch.int64, device="meta")}, ValueError, "dropout_seed is on meta"),
        ({"dropout_p": 0.5, "kernel_options": {"BACKEND": "HOPPER"}}, ValueError, "BACKEND'. names HOPPER, but"),
    ],
)
def test_bad_arguments(given, error, words):
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(error, match=words):
        flex_attention(q, q, q, **given)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"dropout_p": -1}, ValueError, "dropout_p must be a number from 0 to 1, got -1"),
        ({"dropout_p": True}, TypeError, "got bool"),
        ({"seed": torch.tensor([3], dtype=torch.int32)}, TypeError, r"got torch.int32 \(1,\)"),
        ({"seed": [3]}, TypeError, "seed must be an int64 tensor of one element, got list"),
        ({"shape": (4, 4)}, TypeError, r"shape must be \(B, Hq, Q_LEN, KV_LEN\), got \(4, 4\)"),
        ({"shape": (1, 1, 4.0, 4)}, TypeError, "Q_LEN must be an integer, got 4.0"),
    ],
)
def test_bad_arguments_of_a_mask(changes, error, words):
    with pytest.raises(error, match=words):
        dropout_mask(**{"seed": torch.tensor([3]), "shape": (1, 1, 4, 4), "dropout_p": 0.5} | changes)


def test_none_is_dropped_where_p_is_0():
    q = torch.randn(1, 2, 8, 16)
    assert dropout_mask(torch.tensor([3]), (1, 2, 8, 8), 0).all()
    for p in (0, False):  # as `self.training and p` gives
        assert torch.equal(flex_attention(q, q, q, dropout_p=p, dropout_seed=torch.tensor([3])), flex_attention(q, q, q))
