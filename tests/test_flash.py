"""flash_attn functions against dense float64 attention: packed forms, biases, causal, strides; and that nothing is copied or made twice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from flexpress import cache_info, flash, mods
from flexpress.codegen import registry
from flexpress.flash import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from support.dense import assert_as_accurate, dense_attention
from support.devices import DEVICES, for_any

LENGTHS = {"cpu": [1, 2, 16, 33, 64, 100, 129], "cuda": [1, 113, 128, 203, 512, 1023, 1024]}
HEAD_DIMS = {"cpu": [1, 16, 40, 48, 64, 80, 88, 96, 128], "cuda": [16, 40, 48, 64, 80, 88, 96, 128, 192, 256]}
RACE_HEAD_DIMS = [40, 48, 64, 80, 88, 96, 128]
LAYOUTS = ["contiguous", "heads_first", "sliced", "strided_head_dim"]
BIASES = {
    "none": None,
    "vector": "1h1n",
    "matrix": "1hmn",
    "per_batch": "bhmn",
    "shared": "11mn",
    "batch_vector": "b11n",
    "column": "1hm1",
    "number": "1111",
}


def tensor_of(shape, layout: str, dtype, device: str, generator) -> torch.Tensor:
    """A random tensor of `shape`, (B, S, ..., H, D), in one of LAYOUTS."""

    def random(*sizes):
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    B, S, *packed, H, D = shape
    if layout == "heads_first":
        return random(B, H, *packed, S, D).transpose(1, -2)
    if layout == "sliced":
        return random(B, S + 3, *packed, H + 1, D + 5)[:, 2 : S + 2, ..., 1:, 3 : D + 3]
    if layout == "strided_head_dim":
        return random(*shape[:-1], 2 * D)[..., ::2]
    return random(*shape)


@dataclass(kw_only=True)
class Problem:
    """q (B, Sq, Hkv * group, D), k and v (B, Skv, Hkv, D); packed together as `form` says: "apart", "kv" or "qkv"."""

    dtype: torch.dtype
    B: int
    Hkv: int
    group: int
    Sq: int
    Skv: int
    D: int
    form: str
    layouts: tuple[str, str, str]
    bias: str
    bias_dtype: str
    bias_layout: str
    causal: bool
    scale: float | None
    seed: int


@st.composite
def problems(draw, device):
    Sq = draw(st.sampled_from(LENGTHS[device]))
    return Problem(
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        B=draw(st.sampled_from([1, 2])),
        Hkv=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 1, 2, 3])),
        Sq=Sq,
        Skv=draw(st.one_of(st.just(Sq), st.sampled_from(LENGTHS[device]))),
        D=draw(st.sampled_from(HEAD_DIMS[device])),
        form=draw(st.sampled_from(["apart", "kv", "qkv"])),
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
        bias=draw(st.sampled_from(sorted(BIASES))),
        bias_dtype=draw(st.sampled_from(["own", "float32"])),
        bias_layout=draw(st.sampled_from(["contiguous", "transposed"])),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.3])),
        seed=draw(st.integers(0, 99)),
    )


def check_problem(p: Problem, device: str) -> None:
    generator = torch.Generator(device=device).manual_seed(p.seed)
    B, Hkv, Sq, Skv, D, form = p.B, p.Hkv, p.Sq, p.Skv, p.D, p.form
    H, Skv = (Hkv, Sq) if form == "qkv" else (Hkv * p.group, Skv)
    if form == "qkv":
        (qkv,) = inputs = (tensor_of((B, Sq, 3, H, D), p.layouts[0], p.dtype, device, generator),)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    elif form == "kv":
        q, kv = inputs = tuple(
            tensor_of(shape, layout, p.dtype, device, generator)
            for shape, layout in zip(((B, Sq, H, D), (B, Skv, 2, Hkv, D)), p.layouts[:2], strict=True)
        )
        k, v = kv[:, :, 0], kv[:, :, 1]
    else:
        q, k, v = inputs = tuple(
            tensor_of(shape, layout, p.dtype, device, generator)
            for shape, layout in zip(((B, Sq, H, D), (B, Skv, Hkv, D), (B, Skv, Hkv, D)), p.layouts, strict=True)
        )
    function = {"apart": flash_attn_func, "kv": flash_attn_kvpacked_func, "qkv": flash_attn_qkvpacked_func}[form]
    bias = add = None
    if BIASES[p.bias]:
        sizes = [{"b": B, "h": H, "m": Sq, "n": Skv, "1": 1}[c] for c in BIASES[p.bias]]
        transposed = p.bias_layout == "transposed"
        bias = torch.randn(sizes[:2] + sizes[:1:-1] if transposed else sizes, generator=generator, device=device)
        bias = bias.to(p.dtype if p.bias_dtype == "own" else torch.float32)
        bias = bias.transpose(2, 3) if transposed else bias
        add = lambda score, b, h, q_idx, kv_idx: score + bias
    out = function(*inputs, bias, p.causal, p.scale)
    assert out.shape == (B, Sq, H, D) and out.dtype == p.dtype
    assert_as_accurate(*(t.transpose(1, 2) for t in (out, q, k, v)), add, mods.causal if p.causal else None, p.scale)


@for_any(problems, cpu=26, cuda=150)
def test_any_problem(p, device):
    check_problem(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", BIASES)
def test_gradients(kind, causal, device):
    """Of q, packed k and v, and of every kind of bias, against float64 autograd through dense attention."""
    B, Sq, Skv, H, D = (2, 37, 41, 2, 40) if device == "cpu" else (2, 517, 610, 4, 80)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    inputs = [random(B, Sq, H, D), random(B, Skv, 2, H, D)]
    if BIASES[kind]:
        inputs.append(random(*({"b": B, "h": H, "m": Sq, "n": Skv, "1": 1}[c] for c in BIASES[kind])))
    d_out = random(B, Sq, H, D).detach()
    grads = torch.autograd.grad(flash_attn_kvpacked_func(*inputs, causal=causal), inputs, d_out)
    q, kv, *bias = exact = [t.detach().double().requires_grad_() for t in inputs]
    add = (lambda score, b, h, q_idx, kv_idx: score + bias[0]) if bias else None
    out, *_ = dense_attention(q.transpose(1, 2), *(t.transpose(1, 2) for t in kv.unbind(2)), add, mods.causal if causal else None)
    for got, want in zip(grads, torch.autograd.grad(out.transpose(1, 2), exact, d_out.double()), strict=True):
        # sums that cancel are measured against sums of random numbers, one for each of the B * H * Sq rows
        assert (got - want).norm() <= 1e-5 * max(want.norm().item(), 3.0 * want.numel() ** 0.5, 0.1 * (B * H * Sq) ** 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_packed_qkv(device):
    qkv = torch.randn(2, 33, 3, 2, 16, device=device, requires_grad=True)
    d_out = torch.randn(2, 33, 2, 16, device=device)
    (got,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv, causal=True), qkv, d_out)
    apart = [t.detach().requires_grad_() for t in qkv.unbind(2)]
    want = torch.autograd.grad(flash_attn_func(*apart, causal=True), apart, d_out)
    assert torch.equal(got, torch.stack(want, 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_lse(causal, device):
    """Beside the same output, from all three, and with its gradient."""
    qkv = torch.randn(2, 33, 3, 2, 16, device=device, requires_grad=True)
    bias = torch.randn(1, 2, 33, 33, device=device)
    bias[:, 0, 5] = -math.inf
    q, k, v = qkv.unbind(2)
    exact = [t.transpose(1, 2) for t in qkv.double().unbind(2)]
    out, lse, _ = dense_attention(*exact, lambda score, b, h, q_idx, kv_idx: score + bias, mods.causal if causal else None)
    weights = torch.randn_like(lse)
    (want,) = torch.autograd.grad((lse.masked_fill(lse == -math.inf, 0) * weights).sum(), qkv)
    for function, inputs in (
        (flash_attn_func, (q, k, v)),
        (flash_attn_kvpacked_func, (q, qkv[:, :, 1:])),
        (flash_attn_qkvpacked_func, (qkv,)),
    ):
        found, found_lse = function(*inputs, bias, causal, return_lse=True)
        assert torch.equal(found, function(*inputs, bias, causal))
        assert found_lse.dtype == torch.float32 and found_lse.shape == (2, 2, 33)
        torch.testing.assert_close(found_lse.double(), lse.detach(), rtol=1e-5, atol=1e-5)
        (got,) = torch.autograd.grad((found_lse.masked_fill(found_lse == -math.inf, 0) * weights).sum(), qkv, retain_graph=True)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", RACE_HEAD_DIMS)
def test_repeats_are_bitwise_equal(head_dim):
    """The race test of FlashAttention's Triton file: the forward 200 times, for each of its head dims, tails and Sq != Skv included."""
    for Sq, Skv, causal in ((113, 203, False), (1023, 1024, True), (512, 512, True)):
        q = torch.randn(2, Sq, 4, head_dim, device="cuda", dtype=torch.bfloat16)
        kv = torch.randn(2, Skv, 2, 4, head_dim, device="cuda", dtype=torch.bfloat16)
        for bias in (None, torch.randn(1, 4, 1, Skv, device="cuda"), torch.randn(1, 4, Sq, Skv, device="cuda", dtype=torch.bfloat16)):
            first = flash_attn_kvpacked_func(q, kv, bias, causal)
            for _ in range(199):
                assert torch.equal(flash_attn_kvpacked_func(q, kv, bias, causal), first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(2, 4), (4, 2)])
def test_causal_starts_top_left(device, lengths):
    """Query i gets the mean of values 0 to i: with equal scores that shows exactly which keys it sees."""
    Sq, Skv = lengths
    q, k = torch.zeros(1, Sq, 1, 16, device=device), torch.zeros(1, Skv, 1, 16, device=device)
    v = torch.arange(Skv, dtype=torch.float32, device=device).view(1, Skv, 1, 1).expand(1, Skv, 1, 16)
    seen = [min(i + 1, Skv) for i in range(Sq)]
    expected = torch.tensor([(n - 1) / 2 for n in seen], device=device)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True)[0, :, 0, 0], expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bias_of_minus_infinity_hides(device):
    """-inf hides a position; a row of nothing else gives 0."""
    q, k, v = (torch.randn(1, 20, 2, 16, device=device) for _ in range(3))
    bias = torch.zeros(1, 1, 20, 20, device=device)
    bias[..., 10:] = -math.inf
    bias[..., 3, :] = -math.inf
    out = flash_attn_func(q, k, v, bias)
    assert (out[:, 3] == 0).all()
    torch.testing.assert_close(out[:, 4:], flash_attn_func(q, k[:, :10], v[:, :10])[:, 4:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths(device, lengths):
    q, kv = (torch.randn(1, n, *rest, 16, device=device) for n, rest in zip(lengths, ((2,), (2, 2)), strict=True))
    out = flash_attn_kvpacked_func(q, kv, torch.zeros(1, 1, 1, 1, device=device), causal=True)
    assert out.shape == q.shape and (out == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_copied(device, monkeypatch):
    """flex_attention and its score_mod get views of what was given, and the result is its output."""
    calls = []

    def spy(*args, **options):
        calls.append((*args, flex_attention(*args, **options)))
        return calls[-1][-1]

    flex_attention = flash.flex_attention
    monkeypatch.setattr(flash, "flex_attention", spy)
    q, k, v = (torch.randn(2, 33, 4, 40, device=device) for _ in range(3))
    kv, qkv = torch.randn(2, 33, 2, 4, 40, device=device), torch.randn(2, 33, 3, 4, 40, device=device)
    bias = torch.randn(1, 4, 1, 33, device=device)
    for function, inputs, parts in (
        (flash_attn_func, (q, k, v), (q, k, v)),
        (flash_attn_kvpacked_func, (q, kv), (q, kv[:, :, 0], kv[:, :, 1])),
        (flash_attn_qkvpacked_func, (qkv,), (qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])),
    ):
        out = function(*inputs, bias)
        *received, score_mod, block_mask, scale, result = calls.pop()
        for got, part in zip(received, parts, strict=True):
            assert got.data_ptr() == part.data_ptr() and got.stride() == part.transpose(1, 2).stride()
        (captured,) = [cell.cell_contents for cell in score_mod.__closure__ if isinstance(cell.cell_contents, torch.Tensor)]
        assert captured.data_ptr() == bias.data_ptr() and captured.shape == (4, 33)
        assert out.data_ptr() == result.data_ptr() and out.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_causal_masks_are_made_once(device):
    """Also when the first call comes in inference mode: the mask must serve training afterwards."""
    registry.clear()
    q, k, v = (torch.randn(1, n, 1, 16, device=device, requires_grad=True) for n in (50, 60, 60))
    with torch.inference_mode():
        flash_attn_func(q, k, v, causal=True)
    before = cache_info()
    with torch.no_grad():
        for _ in range(3):
            flash_attn_func(q, k, v, causal=True)
    assert cache_info().hits == before.hits + 3  # the attention kernels; a mask kernel would count as well
    flash_attn_func(q, k, v, causal=True).sum().backward()
    assert q.grad.isfinite().all() and v.grad[0, 50:].eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", sorted(BIASES))
def test_new_lengths_compile_nothing(device, kind):
    """Nor do new batch sizes, head counts and scales: the text shows which extents of a bias are 1 and if a matrix has aligned rows."""

    def made_by(Sq, Skv, B, H, scale=None) -> tuple:
        before = cache_info()
        bias = None
        if BIASES[kind]:
            bias = torch.randn([{"b": B, "h": H, "m": Sq, "n": Skv, "1": 1}[c] for c in BIASES[kind]], device=device)
        q, kv = torch.randn(B, Sq, H, 16, device=device), torch.randn(B, Skv, 2, H, 16, device=device)
        flash_attn_kvpacked_func(q, kv, bias, True, scale)
        after = cache_info()
        return after.traces - before.traces, after.prints - before.prints, after.compiles - before.compiles

    made_by(50, 61, 2, 3)
    assert made_by(71, 83, 3, 5, 0.3) == (0, 0, 0)
    assert made_by(141, 7, 2, 3) == (0, 0, 0)
    if BIASES[kind] not in ("1hmn", "bhmn", "11mn"):
        assert made_by(256, 256, 2, 4) == (0, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_reach_flex_attention(device):
    """Whichever input requires a gradient, the output does."""
    q, kv = torch.randn(1, 20, 2, 16, device=device), torch.randn(1, 20, 2, 2, 16, device=device)
    bias = torch.zeros(1, 2, 1, 20, device=device)
    assert not flash_attn_kvpacked_func(q, kv, bias).requires_grad
    for tensor in (q, kv, bias):
        tensor.requires_grad_()
        assert flash_attn_kvpacked_func(q, kv, bias, True).requires_grad
        tensor.requires_grad_(False)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    q, kv = torch.randn(1, 20, 2, 16, device=device), torch.randn(1, 20, 2, 2, 16, device=device, dtype=torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_attn_kvpacked_func(q, kv).dtype == torch.bfloat16


Q, K = torch.zeros(2, 5, 4, 16), torch.zeros(2, 7, 2, 16)
KV, QKV = torch.zeros(2, 7, 2, 2, 16), torch.zeros(2, 5, 3, 4, 16)
BAD = {
    "list": (flash_attn_func, ([1.0], K, K), TypeError, r"q must be a torch.Tensor of shape \(B, S, H, D\), got list"),
    "rank": (flash_attn_func, (Q, K[0], K), ValueError, r"k must have shape \(B, S, H, D\), got \(7, 2, 16\)"),
    "k and v": (flash_attn_func, (Q, K, K[:, 1:]), ValueError, r"same shape, got k \(2, 7, 2, 16\) and v \(2, 6, 2, 16\)"),
    "dtype": (flash_attn_func, (Q, K, K.half()), TypeError, r"q and v must have the same dtype, got torch.float32 and torch.float16"),
    "double": (flash_attn_qkvpacked_func, (QKV.double(),), TypeError, r"qkv has dtype torch.float64; supported are float16"),
    "device": (flash_attn_func, (Q, K.to("meta"), K), ValueError, r"q is on cpu but k is on meta"),
    "batch": (flash_attn_func, (Q[:1], K, K), ValueError, r"batch size, got q \(1, 5, 4, 16\) and k \(2, 7, 2, 16\)"),
    "head dim": (flash_attn_func, (Q[..., :8], K, K), ValueError, r"same head dim, got q \(2, 5, 4, 8\) and k \(2, 7, 2, 16\)"),
    "heads": (flash_attn_func, (Q[:, :, :3], K, K), ValueError, r"multiple of k's, got q \(2, 5, 3, 16\) and k \(2, 7, 2, 16\)"),
    "no heads": (flash_attn_func, (Q, K[:, :, :0], K[:, :, :0]), ValueError, r"multiple of k's"),
    "large head dim": (
        flash_attn_qkvpacked_func,
        (torch.zeros(1, 2, 3, 1, 513),),
        NotImplementedError,
        r"qkv has head dim 513; supported are 1 to 512, got \(1, 2, 3, 1, 513\)",
    ),
    "kv rank": (flash_attn_kvpacked_func, (Q, K), ValueError, r"kv must have shape \(B, S, 2, H, D\), got \(2, 7, 2, 16\)"),
    "kv packed": (flash_attn_kvpacked_func, (Q, QKV), ValueError, r"kv must have shape \(B, S, 2, H, D\), got \(2, 5, 3, 4, 16\)"),
    "kv dtype": (flash_attn_kvpacked_func, (Q, KV.half()), TypeError, r"q and kv must have the same dtype"),
    "kv heads": (flash_attn_kvpacked_func, (Q[:, :, :3], KV), ValueError, r"got q \(2, 5, 3, 16\) and kv \(2, 7, 2, 2, 16\)"),
    "qkv packed": (flash_attn_qkvpacked_func, (KV,), ValueError, r"qkv must have shape \(B, S, 3, H, D\), got \(2, 7, 2, 2, 16\)"),
    "bias rank": (flash_attn_func, (Q, K, K, torch.zeros(5, 7)), ValueError, r"bias must have shape \(B, H, Sq, Skv\), got \(5, 7\)"),
    "bias shape": (
        flash_attn_func,
        (Q, K, K, torch.zeros(1, 2, 5, 7)),
        ValueError,
        r"bias of shape \(1, 2, 5, 7\) does not broadcast to the scores \(B, H, Sq, Skv\) = \(2, 4, 5, 7\)",
    ),
    "bias dtype": (flash_attn_func, (Q, K, K, torch.ones(1, 1, 5, 7).bool()), TypeError, r"floating-point dtype, got torch.bool"),
    "bias device": (flash_attn_func, (Q, K, K, torch.zeros(1, 1, 1, 7, device="meta")), ValueError, r"captures bias, .* on meta"),
    "scale": (flash_attn_func, (Q, K, K, None, False, "big"), TypeError, r"scale must be a number, got str"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_arguments(case):
    function, arguments, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        function(*arguments)
    assert len(str(caught.value)) < 300
