"""Queries, keys and values of float8, with scales, against dense float64 attention of what they stand for."""

from __future__ import annotations

import pytest
import torch

from flexpress import (
    AuxRequest,
    cached_attention,
    create_block_mask,
    explain,
    export,
    flex_attention,
    mods,
    precompile,
    printed_kernels,
    varlen_attention,
)
from flexpress.codegen.device import cuda
from flexpress.codegen.device.tma import descriptor_at
from flexpress.codegen.run.as_bfloat16 import as_bfloat16
from flexpress.codegen.run.values_by_keys import by_keys
from flexpress.inputs import checks
from flexpress.inputs.float8 import Quantised, as_multiplied, read_scales
from support.dense import dense_attention, relative_error
from support.devices import DEVICES, for_any
from support.float8 import FLOAT8, check_quantised, meant, plainly, quantised_problems

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def quantised(*shapes, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(device=device, dtype=FLOAT8) for shape in shapes]


@for_any(quantised_problems, cpu=16, cuda=120)
def test_any_problem(p, device):
    check_quantised(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [0.0, 3e6, 4e8, 1e9])
def test_rows_of_huge_scores(shift, device):
    """Weights stay below what 8 bits hold, however large the scores of a row are."""
    q, k, v = quantised((1, 2, 70, 32), (1, 2, 300, 32), (1, 2, 300, 32), device=device)
    there = torch.arange(300, device=device) % 70

    def far(score, b, h, q_idx, kv_idx):
        return torch.where(there[kv_idx] == q_idx, 1.0, -1.0) * shift + (kv_idx % 3) * 0.5

    out, lse = flex_attention(q, k, v, far, return_lse=True)
    exact, total, _ = dense_attention(q.float(), k.float(), v.float(), far, precision=torch.float32)
    rounding = 1e-6 if device == "cpu" else 1e-3  # Hopper adds products of 8 bits with 14 bits
    assert relative_error(out, exact) < 0.02 + rounding and relative_error(lse, total) < rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_tma", [True, False])
def test_values_that_lie_by_keys(device, use_tma):
    """They are read as they are; others are copied so, for TMA."""
    q, k, v = quantised((2, 4, 100, 64), (2, 2, 100, 64), (2, 2, 64, 112), device=device)
    v = v[..., :100].transpose(2, 3)
    assert by_keys(v) is v
    out = flex_attention(q, k, v, mask_mod=mods.causal, enable_gqa=True, kernel_options={"USE_TMA": use_tma})
    rows = v.contiguous()
    copied = by_keys(rows)
    assert torch.equal(copied.float(), v.float()) and copied.stride() == v.stride()
    again = flex_attention(q, k, rows, mask_mod=mods.causal, enable_gqa=True, kernel_options={"USE_TMA": use_tma})
    assert relative_error(again, out) < 1e-3
    exact = dense_attention(q, k, v, None, mods.causal)[0]
    assert relative_error(out, exact) <= 1.2 * relative_error(plainly(q.double(), k.double(), v.double(), None, mods.causal, None), exact)


def test_which_values_are_copied(monkeypatch):
    monkeypatch.setattr("flexpress.inputs.float8.architecture_of", lambda device: "sm_90")
    for queries, options, copied in ((64, {}, False), (64, {"USE_TMA": True}, True), (65, {}, True), (65, {"USE_TMA": False}, False)):
        q, k, v = quantised((1, 2, queries, 32), (1, 2, 90, 32), (1, 2, 90, 32))
        found = as_multiplied(q, k, v, checks.parse_options(options), 0)
        assert found[0] is q and found[1] is k and (found[2].stride(2) == 1) == copied and torch.equal(found[2].float(), v.float())


@pytest.mark.parametrize("shape", [(1, 1, 37, 32), (2, 1, 300, 1), (1, 3, 16, 64)])
def test_tma_finds_values_by_keys(shape):
    """Every stride is a multiple of 16 bytes, also of a dimension of one."""
    v = by_keys(*quantised(shape))
    found = descriptor_at(4096, v.dtype, v.shape, v.stride(), 64, 128)
    assert found.shape == [*shape[:2], shape[3], shape[2]] and found.strides[3] == 1
    assert not any(stride % 16 for stride in found.strides[:3]) and v.dtype in cuda._MAP_TYPES


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["PORTABLE", "HOPPER"])
@pytest.mark.parametrize("lengths", [(2048, 2048), (64 + 7, 16384 + 3)])
def test_real_shapes(lengths, backend):
    """The error does not grow with the number of keys: the accumulator is outside of what adds with few bits."""
    q, k, v = quantised((1, 2, lengths[0], 128), (1, 2, lengths[1], 128), (1, 2, lengths[1], 128), device="cuda")
    scale = torch.tensor([0.5, 2.0], device="cuda")
    out = flex_attention(q, k, v, q_scale=scale, v_scale=scale, kernel_options={"BACKEND": backend})
    scores = meant(q, scale, 2) @ k.double().mT * 128**-0.5
    weights, exact = (scores - scores.amax(-1, keepdim=True)).exp(), scores.softmax(-1) @ meant(v, scale, 2)
    plain = (weights.float() * 256).to(FLOAT8).double() / 256 / weights.sum(-1, keepdim=True) @ meant(v, scale, 2)
    assert relative_error(out, exact) < 1.2 * relative_error(plain, exact) + 4e-3


@pytest.mark.parametrize("kind", ["sm_80", "gfx942", "narrow blocks", "wide heads"])
def test_where_no_kernel_multiplies_8_bits(kind, monkeypatch):
    """bfloat16 holds all that float8 does; weights are rounded to it, and kernels multiply by scales."""
    monkeypatch.setattr("flexpress.inputs.float8.architecture_of", lambda device: kind if kind in ("sm_80", "gfx942") else "sm_90")
    D, S = (288, 20) if kind == "wide heads" else (48, 70)
    q, k, v = quantised((2, 4, S, D), (2, 2, S, D), (2, 2, S, D))
    scales = [torch.rand(2) + 0.5, torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.rand(2, 1) + 0.5]
    mask = create_block_mask(mods.causal, None, None, S, S, "cpu", BLOCK_SIZE=16 if kind == "narrow blocks" else 128)
    given = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    for score in (None, mods.softcap(2.0)):
        out, lse = flex_attention(q, k, v, score, mask, enable_gqa=True, return_lse=True, **given)
        scales[2] = scales[2].expand(2, 2)
        exact, total, _ = dense_attention(*(meant(t, s, 2) for t, s in zip((q, k, v), scales, strict=True)), score, mods.causal)
        assert out.dtype == torch.bfloat16 and relative_error(out, exact) < 4e-3 and relative_error(lse, total) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lies", ["as it is", "transposed", "expanded", "cut", "empty", "no sixteens", "from an odd place"])
def test_every_number_becomes_bfloat16(lies, device):
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8).to(device)
    given = every.repeat(25)[: 5 * 7 * 2 * 80].view(5, 7, 2, 80)
    ways = {
        "as it is": given,
        "transposed": given.transpose(1, 2),
        "expanded": given[:, :1].expand(5, 7, 2, 80),
        "cut": given[..., 3:70],
        "empty": given[:, :0],
        "no sixteens": given[:3, :1, :, :73].contiguous(),
        "from an odd place": every.repeat(25)[3:][: 5 * 7 * 2 * 80].view(5, 7, 2, 80),
    }
    found = as_bfloat16(ways[lies])
    assert found.dtype == torch.bfloat16 and found.shape == ways[lies].shape
    assert torch.equal(found.float().nan_to_num(-1e9), ways[lies].float().nan_to_num(-1e9))
    assert lies == "expanded" or found.stride() == ways[lies].stride() or lies == "cut"


def test_wide_heads_become_bfloat16_for_the_kernel_for_hopper(monkeypatch):
    """It has no tiles of 8 bits for them. Few queries, options that it lacks and problems that it would be slow for stay as they are."""
    monkeypatch.setattr("flexpress.inputs.float8.architecture_of", lambda device: "sm_90")
    monkeypatch.setattr("flexpress.codegen.run.forward_kernels.multiprocessors", lambda device: 8)
    for dims, queries, options, becomes in (
        ((256, 256), 1024, {}, True),
        ((64, 160), 1024, {"BACKEND": "HOPPER"}, True),
        ((208, 64), 1024, {}, True),
        ((192, 128), 1024, {}, False),
        ((256, 256), 1023, {}, False),
        ((256, 256), 1024, {"BACKEND": "PORTABLE"}, False),
        ((256, 256), 1024, {"USE_TMA": False}, False),
        ((256, 256), 1024, {"BLOCK_M": 64}, False),
    ):
        q, k, v = quantised((1, 1, queries, dims[0]), (1, 1, 1024, dims[0]), (1, 1, 1024, dims[1]))
        found = as_multiplied(q, k, v, checks.parse_options(options), 0)
        assert {t.dtype for t in found} == {torch.bfloat16 if becomes else FLOAT8}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [32, 288])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-41])
def test_elements_that_are_all_zero(scale, head_dim, device):
    """A scale of 0, as the largest element over 448 gives one, or near it: every key is seen alike. One that is NaN shows."""
    q, k, v = quantised((1, 2, 40, head_dim), (1, 2, 50, head_dim), (1, 2, 50, 32), device=device)

    def attend(scale):
        nothing = torch.tensor(scale, device=device)
        return flex_attention(q, torch.zeros_like(k), v, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx > 9, k_scale=nothing)

    out = attend(scale)
    assert attend(float("nan")).isnan().all()
    assert relative_error(out, v.double()[:, :, 10:].mean(2, keepdim=True).expand(out.shape)) < 4e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[5, 0, 35, 30], [700, 0, 1, 1300]], ids=["short", "long"])
def test_packed_sequences(lengths, device):
    lengths = lengths if device == "cuda" else [n // 8 + (n > 0) for n in lengths] if max(lengths) > 40 else lengths
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    total = sum(lengths)
    q, k, v = quantised((total, 4, 64), (total, 2, 64), (total, 2, 48), device=device)
    scales = [torch.rand(2, device=device) + 0.5 for _ in "qkv"]
    given = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    out, lse = varlen_attention(q, k, v, ends, None, mods.softcap(9.0), mods.causal, return_lse=True, **given)
    assert out.dtype == torch.bfloat16 and out.shape == (total, 4, 48) and lse.shape == (total, 4)
    for a, b in zip(ends[:-1], ends[1:], strict=True):
        if a < b:
            part = [meant(t[a:b].transpose(0, 1)[None], s, 2) for t, s in zip((q, k, v), scales, strict=True)]
            exact = dense_attention(*part, mods.softcap(9.0), mods.causal)[0]
            error = relative_error(plainly(*part, mods.softcap(9.0), mods.causal, None), exact)
            assert relative_error(out[a:b].transpose(0, 1), exact[0]) <= 1.2 * error + 4e-3


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    """As an operator, without a graph break; its fake knows the output's dtype."""
    q, k, v = quantised((2, 4, 64, 32), (2, 2, 64, 32), (2, 2, 64, 16), device=device)
    scale = torch.tensor([0.5, 2.0], device=device)

    def step(q, k, v, scale, out_dtype):
        out = flex_attention(q, k, v, mask_mod=mods.causal, enable_gqa=True, k_scale=scale * 2, v_scale=scale, out_dtype=out_dtype)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for dtype in (None, torch.float32):
        assert torch.equal(compiled(q, k, v, scale, dtype), step(q, k, v, scale, dtype))
        with torch.device("meta"):
            found = step(*(t.to("meta") for t in (q, k, v, scale)), dtype)
        assert found.dtype == (dtype or torch.bfloat16) and found.shape == (2, 4, 64, 16)


@pytest.mark.gpu
def test_in_a_graph():
    q, k, v = quantised((1, 4, 1000, 128), (1, 4, 1000, 128), (1, 4, 1000, 128), device="cuda")
    scale, out = torch.ones((), device="cuda"), flex_attention(q, k, v, mask_mod=mods.causal, v_scale=torch.ones((), device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flex_attention(q, k, v, mask_mod=mods.causal, v_scale=scale)
    scale.fill_(0.5)
    graph.replay()
    assert torch.equal(found, out / 2)


def test_what_calls_get(own_directory, monkeypatch):
    q, k, v = quantised(*[(1, 2, 300, 64)] * 3)
    monkeypatch.setattr("flexpress.codegen.run.forward.architecture_of", lambda device: "sm_90")
    wide = q.new_zeros(1, 2, 300, 208)
    assert "not HOPPER: head dims are 208 and 64; for float8 there are tiles for up to 192 and 128" in explain(wide, wide, v).split("\n")[0]
    assert "not DECODE: float8: other kernels have it" in explain(q[:, :, :5], k, v).split("\n")[0]
    monkeypatch.undo()
    made = precompile((1, 2, 300, 64), (1, 2, 300, 64), (1, 2, 300, 64), dtype=FLOAT8, q_scale=(), v_scale=(2,))
    assert len(made) == 1 and "_fp8" in made[0].path.name
    one, two = torch.ones(()), torch.ones(2)
    flex_attention(q, k, v, q_scale=one, v_scale=two)
    flex_attention(q, k, v, q_scale=two.view(1, 2), v_scale=torch.ones(1, 2))  # strides are numbers
    assert len(printed_kernels()) == 1
    assert not any(p.name.startswith("forward") for p in map(lambda m: m.path, precompile(q, k, v, q_scale=one, v_scale=two)))


def test_kernels_find_scales_at_a_place_that_suits_them():
    every = torch.rand(9, 4)
    ((name, found),) = read_scales(Quantised(v_scale=every.flatten()[1:5]))
    assert name == "v" and found.tensor.data_ptr() % 16 == 0 and found.strides == (0, 1)
    ((_, found),) = read_scales(Quantised(k_scale=every[:, :2]))
    assert found.strides == (4, 1)


@pytest.mark.parametrize(
    "given, error, words",
    [
        (
            dict(q_scale=torch.ones(4)),
            ValueError,
            r"q_scale must have one element or shape \(2,\) or \(3, 2\), .*\(3, 2, 8, 16\).* got \(4,\)",
        ),
        (dict(v_scale=torch.ones(2, 3)), ValueError, r"v_scale must have .* got \(2, 3\)"),
        (dict(k_scale=0.5), TypeError, "k_scale must be a float32 tensor, got float"),
        (dict(k_scale=torch.ones(2).half()), TypeError, "k_scale must be float32, got torch.float16"),
        (dict(k_scale=torch.ones(2, device="meta")), ValueError, "k_scale is on meta, but query is on cpu"),
        (dict(out_dtype=torch.float64), TypeError, "out_dtype is torch.float64; it must be torch.bfloat16"),
        (dict(kernel_options={"PRESCALE_QK": True}), ValueError, "PRESCALE_QK.* would round query"),
        (dict(dropout_p=0.5), NotImplementedError, "dropout_p is for training"),
        (dict(return_aux=AuxRequest(entropy=True)), NotImplementedError, "are not supported for float8"),
    ],
)
def test_bad_arguments(given, error, words):
    q, k, v = quantised((3, 4, 8, 16), (3, 2, 8, 16), (3, 2, 8, 16))
    with pytest.raises(error, match=words):
        flex_attention(q, k, v, enable_gqa=True, **given)


def test_bad_tensors():
    q, k, v = quantised(*[(1, 2, 8, 16)] * 3)
    with pytest.raises(TypeError, match="key has dtype torch.bfloat16 but query has torch.float8_e4m3fn; convert one"):
        flex_attention(q, k.bfloat16(), v)
    with pytest.raises(TypeError, match="query has dtype torch.float8_e5m2; supported are"):
        flex_attention(*(t.to(torch.float8_e5m2) for t in (q, k, v)))
    with pytest.raises(TypeError, match="k_scale is for float8_e4m3fn, but query has torch.float32: leave it out"):
        flex_attention(*(t.float() for t in (q, k, v)), k_scale=torch.ones(2))
    with pytest.raises(TypeError, match="out_dtype is for float8_e4m3fn, but query has torch.float32"):
        flex_attention(*(t.float() for t in (q, k, v)), out_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="query is float8, which exported files do not support"):
        export(q, k, v)
    with pytest.raises(ValueError, match=r"q_scale must have one element or shape \(2,\)"):
        varlen_attention(*(t[0].transpose(0, 1) for t in (q, k, v)), torch.tensor([0, 3, 8]), q_scale=torch.ones(2, 1))


def test_gradients_are_refused():
    q, k, v = quantised(*[(1, 2, 8, 16)] * 3)
    slopes, scale = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    for call in (
        lambda: flex_attention(q.clone().requires_grad_(), k, v),
        lambda: flex_attention(q, k, v, mods.alibi(slopes)),
        lambda: flex_attention(q, k, v, sinks=slopes),
        lambda: flex_attention(q, k, v, v_scale=scale),
        lambda: varlen_attention(*(t[0].transpose(0, 1) for t in (q, k, v)), torch.tensor([0, 3, 8]), k_scale=scale),
        lambda: torch.compile(lambda s: flex_attention(q, k, v, q_scale=s), backend="eager")(scale),
    ):
        with pytest.raises(NotImplementedError, match="attention of float8 has no gradients: call it under torch.no_grad"):
            call()
        with torch.no_grad():
            call()
    with pytest.raises(NotImplementedError, match="float8 is not supported inside transforms"):
        torch.func.vmap(flex_attention)(*(t[None] for t in (q, k, v)))


def test_autocast_leaves_float8_as_it_is():
    q, k, v = quantised(*[(1, 2, 8, 16)] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flex_attention(q, k, v), flex_attention(q, k, v, out_dtype=torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
def test_cached_queries_compile(device):
    """As an operator, whose fake knows the output's dtype. (support/batches.py has any problems of them.)"""
    q, k, v = quantised((2, 4, 5, 32), (2, 40, 2, 32), (2, 40, 2, 32), device=device)
    scale, lengths = torch.tensor([0.5, 2.0], device=device), torch.tensor([40, 9], dtype=torch.int32, device=device)

    def step(q, scale, out_dtype):
        out = cached_attention(q, k, v, lengths, q_scale=scale * 2, k_scale=scale, v_scale=scale, out_dtype=out_dtype)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for dtype in (None, torch.float32):
        found = step(q, scale, dtype)
        assert found.dtype == (dtype or torch.bfloat16) and torch.equal(compiled(q, scale, dtype), found)
    whole = cached_attention(q, k, v, lengths, q_scale=scale, out_dtype=torch.float32)
    assert torch.equal(cached_attention(q.float(), k, v, lengths, k_scale=scale, v_scale=torch.ones(2, device=device)), whole)


def test_bad_cached_queries():
    q, k, v = quantised((1, 4, 5, 16), (1, 40, 2, 16), (1, 40, 2, 16))
    lengths = torch.tensor([40], dtype=torch.int32)
    with pytest.raises(TypeError, match="query has torch.float8_e4m3fn, but k_cache and v_cache have torch.float32; convert query"):
        cached_attention(q, k.float(), v.float(), lengths)
    with pytest.raises(ValueError, match=r"q_scale must have one element or shape \(2,\), .* \(1, 40, 2, 16\); got \(4,\)"):
        cached_attention(q, k, v, lengths, q_scale=torch.ones(4))
    with pytest.raises(ValueError, match="q_scale has 0.0; scales must be positive"):
        cached_attention(q, k, v, lengths, q_scale=torch.zeros(2))
    with pytest.raises(TypeError, match="q_scale is for float8_e4m3fn, but query has torch.float32"):
        cached_attention(q.float(), k, v, lengths, q_scale=torch.ones(2))
    with pytest.raises(TypeError, match="out_dtype is for float8_e4m3fn"):
        cached_attention(q.float(), k, v, lengths, out_dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="q_scale requires grad, but cached_attention is not differentiable"):
        cached_attention(q, k, v, lengths, q_scale=torch.ones(2, requires_grad=True))
