"""The fused backward kernel's text, run in a stand-in for Gluon: programs that share tiles, zero dQ ahead for each other and finish it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import create_block_mask, dropout_mask, mods
from flexpress.calls import packed_blocks
from flexpress.calls.packed_call import packed_call
from flexpress.codegen import registry
from flexpress.codegen.device import counters, kernel
from flexpress.codegen.device.arguments import one_by_one
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.plan.extras import DROPOUT_STEPS
from flexpress.codegen.run import backward_kernels, launch
from flexpress.codegen.run.backward import backward
from flexpress.codegen.run.call import Bound, ExtraInputs, Inputs, Rows
from flexpress.codegen.run.forward import forward
from flexpress.codegen.text.render import render
from flexpress.inputs.dropout import Dropout
from flexpress.masks.block_lists import transposed_lists
from support import fake_gluon
from support.dense import dense_attention, dropped_attention, factors_of, relative_error
from support.fake_hopper import Variant, pass_for_hopper
from support.few_mods import MASKS, SCORES
from support.shifts import Problem, at_positions, in_whole, shifted_lists
from support.varlen import by_sequence, offsets

NUMBERS = torch.randn(1024, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(4, 300, 300, generator=torch.Generator().manual_seed(1))
CASES = {  # heads of q and k, batch entries of q and k, lengths, head dims; how many MiB of heads are worked on at a time, and programs;
    # which blocks of a longer sequence those of queries, and of keys, are
    "one group": dict(),
    "head by head": dict(megabytes=0),
    "head by head, GQA": dict(heads=(4, 2), megabytes=0, programs=3),
    "shared keys": dict(batches=(2, 1), megabytes=0, lengths=(130, 257)),
    "more programs than tiles": dict(lengths=(600, 100), heads=(2, 1), programs=7),
    "head dim 128": dict(dims=(128, 128), megabytes=0, lengths=(150, 140)),
    "head dims 72 and 40": dict(dims=(72, 40), megabytes=0, lengths=(100, 200)),
    "head dim 32, causal": dict(dims=(32, 32), mask=mods.causal, megabytes=0, lengths=(300, 300)),
    "head dims 48 and 24, alibi": dict(dims=(48, 24), score=mods.alibi(torch.tensor([0.5, 0.1])), megabytes=0, lengths=(130, 150)),
    "head dims 24 and 32, learned per key": dict(
        dims=(24, 32), score=lambda s, b, h, m, n: torch.tanh(s) * NUMBERS[n], learned=NUMBERS, lengths=(130, 150)
    ),
    "head dims 96 and 112, softcap": dict(dims=(96, 112), score=mods.softcap(2.0), megabytes=0, lengths=(130, 150)),
    "head dims 80 and 72, dropout": dict(dims=(80, 72), dropout_p=0.3, lengths=(130, 150)),
    "head dims 136 and 120": dict(dims=(136, 120), lengths=(100, 140)),
    "head dims 160 and 208": dict(dims=(160, 208), mask=mods.causal, megabytes=0, lengths=(150, 140)),
    "head dims 224 and 192": dict(dims=(224, 192), megabytes=0, lengths=(100, 140)),
    "packed sequences, head dims 96 and 80": dict(packed=[[70, 0, 1, 180]], mask=mods.causal, dims=(96, 80)),
    "packed sequences, head dims 24 and 32": dict(packed=[[70, 0, 1, 180]], mask=mods.causal, dims=(24, 32), megabytes=0),
    "head dims 192 and 128": dict(dims=(192, 128), megabytes=0, lengths=(100, 140)),
    "head dims 192 and 160": dict(dims=(192, 160), megabytes=0, lengths=(100, 140), heads=(4, 2)),
    "head dims 136 and 192, many blocks, alibi, causal": dict(
        dims=(136, 192), score=mods.alibi(torch.tensor([0.5, 0.1])), mask=mods.causal, lengths=(500, 470), programs=3
    ),
    "head dim 160, softcap, shared keys": dict(dims=(160, 160), score=mods.softcap(2.0), batches=(2, 1), lengths=(130, 257)),
    "packed sequences, head dim 192": dict(packed=[[70, 0, 1, 180]], mask=mods.causal, dims=(192, 192)),
    "head dim 256": dict(dims=(256, 256), megabytes=0, lengths=(100, 140)),
    "head dims 192 and 128, many blocks": dict(dims=(192, 128), heads=(1, 1), lengths=(700, 70)),
    "head dim 256, many blocks": dict(dims=(256, 256), heads=(1, 1), lengths=(700, 70)),
    "scores of 1e9": dict(score=lambda s, b, h, m, n: torch.where(m % 2 == 0, s, s * 0.0 - 1e9), lengths=(130, 150)),
    "a head of huge scores, causal": dict(score=lambda s, b, h, m, n: s - torch.where(h == 1, 1e9, 0.0), mask=mods.causal, megabytes=0),
    "the least number, head dims 192 and 128": dict(
        score=lambda s, b, h, m, n: s + torch.finfo(torch.float32).min, dims=(192, 128), lengths=(100, 140)
    ),
    "alibi as the forward kernel for Hopper has it": dict(score=mods.alibi(torch.tensor([0.5, 1e5])), lengths=(130, 150), raw=True),
    "a number for every key": dict(score=lambda s, b, h, m, n: s + n * 0.125, lengths=(130, 150)),
    "alibi, causal": dict(score=mods.alibi(torch.tensor([0.5, 0.1])), mask=mods.causal, megabytes=0),
    "softcap": dict(score=mods.softcap(2.0), megabytes=0, lengths=(130, 150)),
    "causal, head by head": dict(mask=mods.causal, megabytes=0, lengths=(300, 300), programs=3),
    "window, GQA": dict(mask=mods.sliding_window(90), heads=(4, 2), megabytes=0),
    "blocks of a longer sequence, alibi": dict(
        score=mods.alibi(torch.tensor([0.02, 0.1])), mask=mods.causal, blocks=[[6, 1], [2, 0, 5]], lengths=(200, 384), megabytes=0
    ),
    "the same, by row and key, head dim 128": dict(
        score=lambda s, b, h, m, n: s + NUMBERS[m] * NUMBERS[n], blocks=[[6, 1], [2, 5]], lengths=(200, 256), dims=(128, 128)
    ),
    "NaN of a score of 0, learned per head": dict(
        score=lambda s, b, h, m, n: s + s / s.abs() * NUMBERS[h], learned=NUMBERS, lengths=(130, 150)
    ),
    "the same, learned per key": dict(
        score=lambda s, b, h, m, n: torch.tanh(s) * NUMBERS[n], blocks=[[6, 1], [5, 2]], lengths=(200, 256), learned=NUMBERS
    ),
    "the same, learned per distance": dict(
        score=lambda s, b, h, m, n: s + NUMBERS[(m - n).abs()], blocks=[[6, 1], [5, 2]], lengths=(200, 256), learned=NUMBERS
    ),
    "the same, head dims 192 and 128": dict(
        score=lambda s, b, h, m, n: s + n * 0.0125, mask=mods.sliding_window(700), blocks=[[0, 7], [6]], lengths=(256, 128), dims=(192, 128)
    ),
    "the same, head dim 256": dict(
        score=lambda s, b, h, m, n: s + (m - n) * 0.01, mask=mods.causal, blocks=[[4], [3, 1]], lengths=(60, 256), dims=(256, 256)
    ),
    "dropout": dict(dropout_p=0.3, batches=(2, 1), heads=(4, 2), megabytes=0),
    "dropout, causal, softcap, head dim 128": dict(
        dropout_p=0.5, score=mods.softcap(2.0), mask=mods.causal, dims=(128, 128), lengths=(300, 300)
    ),
    "dropout, learned per head": dict(
        dropout_p=0.1, score=lambda s, b, h, m, n: s + NUMBERS[h] * (m - n) * 0.01, learned=NUMBERS, lengths=(130, 150)
    ),
    "dropout, of a part": dict(dropout_p=0.3, part=(1, 2), batches=(2, 1), heads=(4, 2)),
    "dropout, blocks of a longer sequence": dict(dropout_p=0.4, blocks=[[6, 1], [5, 2]], lengths=(200, 256)),
    "the same, of a part, causal, head dim 128": dict(
        dropout_p=0.4, part=(1, 2), mask=mods.causal, blocks=[[6, 1], [5, 2]], lengths=(200, 256), dims=(128, 128), megabytes=0
    ),
    "packed sequences": dict(packed=[[70, 0, 1, 180]], mask=mods.causal, dims=(64, 64)),
    "dropout, packed sequences": dict(packed=[[150, 0, 1, 190]], dropout_p=0.3, mask=mods.causal, megabytes=0),
    "the same, other keys, softcap, head dim 128": dict(
        packed=[[70, 130, 3], [200, 0, 150]], dropout_p=0.4, score=mods.softcap(2.0), dims=(128, 128), heads=(4, 2)
    ),
    "a bias of each head that batch entries share": dict(
        score=lambda s, b, h, m, n: s + BIAS[h, m, n], learned=BIAS, heads=(4, 2), batches=(3, 3), lengths=(130, 200), megabytes=0
    ),
    "the same, one group, keys shared, too": dict(
        score=lambda s, b, h, m, n: s + BIAS[h, m, n], learned=BIAS, heads=(4, 2), batches=(3, 1), lengths=(130, 200)
    ),
    "a head without queries": dict(mask=lambda b, h, m, n: (h == 1) & (m >= n), megabytes=0),
}


def by_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """(1, H, T, D) as packed sequences are given: (T, H, D)."""
    return tensor[0].transpose(0, 1)


@st.composite
def cases(draw):
    """Such cases, of any kind."""
    kind = draw(st.sampled_from(["plain", "shared keys", "packed", "blocks", "dropout"]))
    D_QK = draw(st.integers(3, 32)) * 8
    D_V = draw(st.one_of(st.just(D_QK), st.integers(3, 16).map(lambda n: n * 8))) if D_QK <= 192 else draw(st.integers(17, 32)) * 8
    if kind in ("packed", "dropout"):  # wider ones are the portable kernels'
        D_QK, D_V = min(D_QK, 192 if kind == "packed" else 128), min(D_V, 128)
    case = dict(
        dims=(D_QK, D_V),
        heads=draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)])),
        score=draw(st.sampled_from(SCORES)),
        mask=draw(st.sampled_from(MASKS)),
        lengths=(draw(st.integers(60, 400)), draw(st.integers(60, 300))),
        megabytes=draw(st.sampled_from([0, 24])),
        programs=draw(st.integers(1, 5)),
    )
    if kind == "shared keys":
        case |= dict(batches=(2, draw(st.sampled_from([1, 2]))))
    if kind == "packed":
        case |= dict(packed=[[*draw(st.lists(st.sampled_from([0, 1, 40, 70, 130, 180]), max_size=3)), 150]])
    if kind == "blocks":
        case |= dict(blocks=[[6, 1], [2, 0, 5]], lengths=(draw(st.integers(129, 256)), 384))
    if kind == "dropout":
        case |= dict(dropout_p=draw(st.sampled_from([0.1, 0.5])))
    return case


@settings(max_examples=8)
@given(cases())
def test_any_gradients(case):
    with pytest.MonkeyPatch.context() as patch:
        check(patch, case)


@pytest.mark.parametrize("name", CASES)
def test_gradients(monkeypatch, name):
    check(monkeypatch, CASES[name])


def check(monkeypatch, case: dict) -> None:
    usual = dict(
        heads=(2, 2), batches=(1, 1), lengths=(200, 300), dims=(64, 64), score=None, mask=None, megabytes=24, programs=2, raw=False
    )
    case = {**usual, "blocks": None, "packed": None, "learned": None, "dropout_p": 0.0, "part": (), **case}
    packed = case["packed"] and (case["packed"][0], case["packed"][-1])  # lengths of sequences, of queries and of keys
    if packed:
        case["lengths"] = tuple(map(sum, packed))
    (Hq, Hkv), (Z, Zkv), (Q_LEN, KV_LEN), (D_QK, D_V) = (case[key] for key in ("heads", "batches", "lengths", "dims"))
    generator = torch.Generator().manual_seed(0)
    shapes = ((Z, Hq, Q_LEN, D_QK), (Zkv, Hkv, KV_LEN, D_QK), (Zkv, Hkv, KV_LEN, D_V), (Z, Hq, Q_LEN, D_V))
    q, k, v, do = (torch.randn(s, generator=generator).bfloat16() for s in shapes)
    score_mod, mask_mod, lists = case["score"], case["mask"], (None, None)
    if case["blocks"]:
        part = Problem(rows=case["blocks"][0], columns=case["blocks"][1], q_len=1024, kv_len=1024, B=Z, Hkv=Hkv, group=Hq // Hkv)
        case["mask"] = in_whole(part, mask_mod)
        found = shifted_lists(part, case["mask"], "cpu")
        lists = found, lambda _: transposed_lists(found, KV_LEN)
        score_mod, mask_mod = (
            at_positions(mod, *part.positions, score=kind == "score") for mod, kind in ((score_mod, "score"), (mask_mod, "mask"))
        )
    elif mask_mod and not packed:
        mask = create_block_mask(mask_mod, None, Hq, Q_LEN, KV_LEN, device="cpu")
        lists = mask.as_lists(), lambda _: mask.as_transposed_lists()
    mods = [case[kind] and bind(case[kind], kind) for kind in ("score", "mask")]
    seed, p = torch.tensor([(5 << 40) + 3]), round(case["dropout_p"] * DROPOUT_STEPS) / DROPOUT_STEPS
    if packed:
        monkeypatch.setattr(packed_blocks, "LONG", 0)  # blocks begin where sequences do, however short these are
        q_ends, k_ends = [*map(offsets, case["packed"]), None][:2]
        bound = packed_call(*map(by_tokens, (q, k, v)), q_ends, k_ends, score_mod, mask_mod, dropout=Dropout(p, seed) if p else None)
    else:
        extras = ExtraInputs(dropout_p=p, seed=torch.cat([seed, torch.tensor(case["part"], dtype=torch.int64)])) if p else None
        bound = Bound(q, k, v, Inputs(q, k, v, True), D_QK**-0.5, *mods, *lists, extras=extras)
    out, _, _, rows = forward(bound, output_rows=True)
    if case["raw"]:
        rows = Rows(rows.values * torch.tensor([D_QK**0.5, 1.0]), True)
    ran = []

    class Ran(Variant):
        def launch(self, grid, args, _) -> None:
            ran.append(grid)
            fake_gluon.run(render(plan().fused), plan().fused.template, tuple(args), grid)

    def plan():
        return list(backward_kernels._plans.values())[-1]

    def kernel_for(spec):
        return kernel.kernel_for(replace(spec, backend="cpu") if spec.template == "backward_delta" else spec)

    pass_for_hopper(monkeypatch, Variant, case["programs"])
    monkeypatch.setattr(launch, "kernel_for", kernel_for)
    monkeypatch.setattr(launch, "descriptor", lambda t, rows, columns: fake_gluon.Descriptor(t, rows, columns))
    monkeypatch.setattr(launch, "usable", lambda kernel, args, *_: (Ran(), one_by_one(args)))
    monkeypatch.setattr(backward_kernels, "L2_BYTES", case["megabytes"] << 20)
    registry.clear()
    wanted = frozenset() if case["learned"] is None else frozenset({0})
    *found, of_captured, _ = backward(bound, out, rows, do, None, wanted=wanted)
    found += of_captured.values()
    (counter,) = counters._counters.values()
    assert len(ran) == 1 and not counter.any() and plan().fused.flag["STARTS"] == bool(packed)
    registry.clear()

    def gradients(precision):
        inputs = [t.detach().to(precision).requires_grad_() for t in (q, k, v)]
        inputs += [case["learned"].requires_grad_()] if wanted else []
        if packed:
            factors = factors_of(dropout_mask(seed, (len(packed[0]), Hq, *map(max, packed)), p), p) if p else None
            result, _ = by_sequence(*map(by_tokens, inputs[:3]), *packed, score_mod, mask_mod, None, precision, factors)
            result = result.transpose(0, 1)[None]
        elif p:
            b, h = case["part"] or (0, 0)
            rows_at, keys_at = part.positions if case["blocks"] else map(torch.arange, (Q_LEN, KV_LEN))
            of_whole = dropout_mask(seed, (b + Z, h + Hq, int(rows_at.max()) + 1, int(keys_at.max()) + 1), p)
            kept = of_whole[b:, h:, rows_at[:Q_LEN]][..., keys_at[:KV_LEN]]
            result = dropped_attention(*inputs[:3], kept, p, score_mod, mask_mod, precision=precision)
        else:
            result = dense_attention(*inputs[:3], score_mod, mask_mod, precision=precision)[0]
        return torch.autograd.grad(result, inputs, do.to(precision))

    for mine, exact, plain in zip(found, gradients(torch.float64), gradients(torch.bfloat16), strict=True):
        assert relative_error(mine, exact) <= 1.5 * relative_error(plain, exact) + 1e-3


def test_kernels_that_count_together_have_their_counters_alone(monkeypatch):
    """Two threads, and so two backward passes, may queue their kernels on one stream by turns."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    registry.clear()
    device = torch.device("cpu")
    with counters.held_counter(device, 0) as first, counters.held_counter(device, 0) as second:
        assert first is not second
        assert counters.counter(device, 0) is not first
    assert counters.counter(device, 0) is first
    with pytest.raises(ValueError), counters.held_counter(device, 0) as broken:
        broken += 1
        raise ValueError
    assert not counters.counter(device, 0).any()
    registry.clear()
