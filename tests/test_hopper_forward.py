"""The forward kernel for Hopper at head dims that it pads less, or cuts into slices. On a CPU its text runs in a stand-in for Gluon."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import create_block_mask, dropout_mask, flex_attention, mods, varlen_attention
from flexpress.calls import packed_blocks
from flexpress.codegen import registry
from support.dense import dense_attention, dropped_attention, factors_of, relative_error
from support.fake_hopper import forward_on_cpu
from support.few_mods import MASKS, SCORES
from support.float8 import FLOAT8, Quantised, check_quantised, plainly
from support.varlen import by_sequence, offsets

DIMS = [(24, 24), (32, 64), (192, 192), (136, 160), (64, 192), (192, 32), (72, 96), (40, 112), (200, 176), (224, 208)]


@pytest.fixture(autouse=True)
def fresh():
    """What one test pretends to have compiled is not there in another."""
    registry.clear()
    yield
    registry.clear()


def tensors(d_qk: int, d_v: int, q_len: int, kv_len: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(d_qk + d_v)
    shapes = ((1, 2, q_len, d_qk), (1, 1, kv_len, d_qk), (1, 1, kv_len, d_v))
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dims", DIMS)
def test_head_dims(monkeypatch, dims, masked):
    launched = forward_on_cpu(monkeypatch)
    q, k, v = tensors(*dims, 200, 300)
    mask = create_block_mask(mods.causal, None, None, 200, 300, "cpu") if masked else None
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert [launch.spec.template for launch in launched] == ["hopper_forward"]
    assert relative_error(out, dense_attention(q, k, v, None, mods.causal if masked else None)[0]) < 1e-2


def test_rows_of_full_blocks_alone(monkeypatch):
    """Whose first block is not the first of all, or there is none."""
    forward_on_cpu(monkeypatch)
    q, k, v = tensors(64, 64, 500, 400)
    mask = lambda b, h, q_idx, kv_idx: (kv_idx // 128 == q_idx // 128 + h) & (q_idx < 384)
    out = flex_attention(q, k, v, mask_mod=mask, enable_gqa=True)
    assert relative_error(out, dense_attention(q, k, v, None, mask)[0]) < 1e-2


@settings(max_examples=12)
@given(
    dims=st.tuples(st.integers(3, 32), st.integers(3, 32)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    score=st.sampled_from(SCORES),
    mask=st.sampled_from(MASKS),
    lengths=st.tuples(st.integers(65, 500), st.integers(1, 450)),
    packed=st.one_of(st.none(), st.lists(st.sampled_from([0, 1, 40, 70, 130, 180]), max_size=3)),
)
def test_any_problem(dims, dtype, score, mask, lengths, packed):
    lengths = lengths if packed is None else (sum(packed) + 150,) * 2
    q, k, v = (t.to(dtype) for t in tensors(8 * dims[0], 8 * dims[1], *lengths))
    with pytest.MonkeyPatch.context() as patch:
        registry.clear()
        launched = forward_on_cpu(patch)
        if packed is None:
            out = flex_attention(q, k, v, score, mask_mod=mask, enable_gqa=True)
            exact, plain = (dense_attention(q, k, v, score, mask, precision=p)[0] for p in (torch.float64, dtype))
        else:
            patch.setattr(packed_blocks, "LONG", 0)  # blocks begin where sequences do, however short these are
            q, k, v, parts = *(t[0].transpose(0, 1) for t in (q, k, v)), [*packed, 150]
            out = varlen_attention(q, k, v, offsets(parts), score_mod=score, mask_mod=mask)
            exact, plain = (by_sequence(q, k, v, parts, parts, score, mask, None, p)[0] for p in (torch.float64, dtype))
    assert [launch.spec.template for launch in launched] == ["hopper_forward"]
    assert relative_error(out, exact) <= 1.5 * relative_error(plain, exact) + 1e-3


def test_batch_entries_that_share_a_bias(monkeypatch):
    """They take turns for each head."""
    launched = forward_on_cpu(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in ((3, 4, 200, 64), (1, 2, 150, 64), (1, 2, 150, 64)))
    bias = torch.randn(4, 200, 150, generator=generator)

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx, kv_idx] + b

    out = flex_attention(q, k, v, biased, enable_gqa=True)
    assert [launch.spec.flag["BATCH_INSIDE"] for launch in launched] == [True]
    assert relative_error(out, dense_attention(q, k, v, biased)[0]) < 1e-2


@pytest.mark.parametrize("dims, dtype, masked", [((64, 64), torch.bfloat16, True), ((192, 72), torch.float16, False)])
def test_dropout(monkeypatch, dims, dtype, masked):
    """Two consumers, or three, drop what dropout_mask says, in blocks of any kind."""
    launched = forward_on_cpu(monkeypatch)
    q, k, v = (t.to(dtype).repeat(2, 1, 1, 1) for t in tensors(*dims, 400, 420))
    mask_mod, seed = (mods.causal if masked else None), torch.tensor([-(3 << 40) + 5])
    mask = create_block_mask(mods.causal, None, None, 400, 420, "cpu") if masked else None
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, dropout_p=0.3, dropout_seed=seed)
    assert [launch.spec.template for launch in launched] == ["hopper_forward"]
    exact = dropped_attention(q, k, v, dropout_mask(seed, (2, 2, 400, 420), 0.3), 0.3, None, mask_mod)
    assert relative_error(out, exact) < 1e-2


@pytest.mark.parametrize("d_v, lengths", [(64, [[150, 0, 1, 190]]), (128, [[70, 130, 3], [200, 0, 150]])])
def test_dropout_of_packed_sequences(monkeypatch, d_v, lengths):
    """Tiles and blocks begin where sequences do: what is dropped follows from where that is."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(packed_blocks, "LONG", 0)
    q, k, v = (t[0].transpose(0, 1) for t in tensors(d_v, d_v, sum(lengths[0]), sum(lengths[-1])))
    mask_mod, seed = (mods.causal if len(lengths) == 1 else None), torch.tensor([77])
    out = varlen_attention(q, k, v, *map(offsets, lengths), mask_mod=mask_mod, dropout_p=0.3, dropout_seed=seed)
    assert [(launch.spec.template, launch.spec.flag["STARTS"]) for launch in launched] == [("hopper_forward", True)]
    kept = dropout_mask(seed, (len(lengths[0]), 2, max(lengths[0]), max(lengths[-1])), 0.3)
    exact, _ = by_sequence(q, k, v, lengths[0], lengths[-1], None, mask_mod, None, torch.float64, factors_of(kept, 0.3))
    for have, want in zip(out.split(lengths[0]), exact.split(lengths[0]), strict=True):
        assert relative_error(have, want) < 1e-2 if want.any() else not have.any()


def test_slices_of_packed_sequences(monkeypatch):
    """Tiles that end in the middle store their rows one by one, slice by slice."""
    launched = forward_on_cpu(monkeypatch)
    q, k, v = (t[0].transpose(0, 1) for t in tensors(192, 160, 230, 230))
    ends = torch.tensor([0, 100, 230], dtype=torch.int32)
    out = varlen_attention(q, k, v, ends)
    assert len(launched) == 1
    for begin, end in ((0, 100), (100, 230)):
        one = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
        assert relative_error(out[begin:end].transpose(0, 1)[None], dense_attention(*one, None, None)[0]) < 1e-2


FLOAT8_PROBLEMS = {
    "plain": dict(score="none", mask="none", scales=("head", "batch", "all")),
    "a scale first": dict(score="scaled", mask="causal", scales=("head", "batch", "all"), out_dtype=torch.float32),
    "sinks": dict(score="alibi", mask="document", scales=("all", "", "head"), sinks=True),
    "blocks that are all full": dict(score="table", mask="window", scales=("", "", ""), D_V=64),
    "no mods and sinks": dict(score="none", mask="none", scales=("", "batch", ""), sinks=True, scale=-0.5),
    "head dim 96": dict(score="none", mask="causal", scales=("head", "", "all"), D_QK=96, D_V=80),
    "head dims 192 and 128": dict(score="alibi", mask="causal", scales=("head", "batch", "all"), D_QK=192, D_V=128),
    "head dims 144 and 32, in float32": dict(score="none", mask="none", scales=("", "", "head"), D_QK=144, D_V=32, out_dtype=torch.float32),
    # these become bfloat16
    "head dim 256": dict(score="none", mask="causal", scales=("head", "batch", "all"), D_QK=256, D_V=256, spread=4.0),
    "head dims 256 and 48, a scale first": dict(score="scaled", mask="none", scales=("head", "", "batch"), D_QK=256),
    "head dims 64 and 160, sinks": dict(score="alibi", mask="document", scales=("", "head", ""), D_V=160, sinks=True, scale=-0.5),
}


@pytest.mark.parametrize("name", FLOAT8_PROBLEMS)
def test_float8(monkeypatch, name):
    """Tiles of V are those of its transpose, and scales are another for each tile."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr("flexpress.inputs.float8.WORTH_A_COPY", 128)
    shapes = dict(dtype=FLOAT8, B=2, Hkv=2, Q_LEN=150, KV_LEN=300, D_QK=64, D_V=48, mask_made="by the call")
    usual = dict(out_dtype=None, sinks=False, spread=1.0)
    check_quantised(Quantised(**{**shapes, **usual, **FLOAT8_PROBLEMS[name]}), "cpu")
    assert [launch.spec.template for launch in launched] == ["hopper_forward"]


def test_packed_sequences_of_float8(monkeypatch):
    launched = forward_on_cpu(monkeypatch)
    q, k, v = (t[0].transpose(0, 1).to(FLOAT8) for t in tensors(64, 32, 1230, 1230))
    ends, scale = torch.tensor([0, 700, 1230], dtype=torch.int32), torch.tensor([0.5])
    out = varlen_attention(q, k, v, ends, mask_mod=mods.causal, k_scale=scale)
    assert [(launch.spec.template, launch.spec.flag["STARTS"]) for launch in launched] == [("hopper_forward", False)]
    for begin, end in ((0, 700), (700, 1230)):
        q_, k_, v_ = (t[begin:end].transpose(0, 1)[None].double() for t in (q, k, v))
        exact = dense_attention(q_, k_ * 0.5, v_, None, mods.causal)[0]
        allowed = relative_error(plainly(q_, k_ * 0.5, v_, None, mods.causal, None), exact)
        assert relative_error(out[begin:end].transpose(0, 1)[None], exact) < 1.2 * allowed + 4e-3
