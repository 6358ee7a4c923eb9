"""flexpress.flash_attn's functions for training against dense float64 attention: every form, forward and backward."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from flexpress import cache_info, flex_attention, mods, printed_kernels
from flexpress.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from support.dense import relative_error
from support.devices import DEVICES, for_any
from support.flash_attn import Meaning, batch_attention, packed_attention
from support.gradients import assert_gradients, error_times

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LENGTHS = {"cpu": [0, 1, 2, 7, 16, 33], "cuda": [0, 1, 3, 64, 113, 200, 515]}
FORMS = ["apart", "kv", "qkv", "varlen", "varlen kv", "varlen qkv"]
FLOORS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(kw_only=True)
class Problem:
    """One sequence of queries and keys for each of `lengths`; forms that are not packed have only the first, `batch` times."""

    form: str
    dtype: torch.dtype
    lengths: list[tuple[int, int]]
    batch: int
    Hkv: int
    group: int
    D: int
    meaning: Meaning
    lse: bool
    seed: int


@st.composite
def problems(draw, device):
    length = st.sampled_from(LENGTHS[device])
    size = st.integers(-1, 40) if device == "cpu" else st.sampled_from([-1, 0, 1, 17, 64, 130, 600])
    return Problem(
        form=draw(st.sampled_from(FORMS)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16] if device == "cpu" else [torch.float16, torch.bfloat16])),
        lengths=draw(st.lists(st.tuples(length, length), min_size=1, max_size=3)),
        batch=draw(st.sampled_from([1, 2])),
        Hkv=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2])),
        D=draw(st.sampled_from([16, 24] if device == "cpu" else [32, 64, 96, 128])),
        meaning=Meaning(
            causal=draw(st.booleans()),
            window=draw(st.one_of(st.just((-1, -1)), st.tuples(size, size))),
            softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
            slopes=draw(st.sampled_from([0, 1, 2])),
            scale=draw(st.sampled_from([None, None, 0.3])),
        ),
        lse=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def inputs_of(p: Problem, device: str) -> tuple[list[torch.Tensor], tuple]:
    """q, k and v as one form takes them apart, and where packed sequences start."""
    generator = torch.Generator().manual_seed(p.seed)
    lengths = [(a, a) for a, _ in p.lengths] if p.form.endswith("qkv") else p.lengths
    Hq = p.Hkv if p.form.endswith("qkv") else p.Hkv * p.group
    if p.form.startswith("varlen"):
        starts = tuple([0, *itertools.accumulate(n)] for n in zip(*lengths, strict=True))
        sizes, batch = ((starts[0][-1],), (starts[1][-1],)), len(lengths)
    else:
        starts, batch = (), p.batch
        sizes = tuple((batch, n) for n in lengths[0])
    shapes = (*sizes[0], Hq, p.D), *[(*sizes[1], p.Hkv, p.D)] * 2
    tensors = [torch.randn(shape, generator=generator).to(device, p.dtype) for shape in shapes]
    return [*tensors, p.meaning.slopes_of(batch, Hq, device, generator)], starts


def attend(p: Problem, q, k, v, starts: tuple, slopes, **more):
    """The function of a form, on these tensors."""
    cu = [torch.tensor(s, dtype=torch.int32, device=q.device) for s in starts]
    longest = [max(b - a for a, b in itertools.pairwise(s)) for s in starts]
    arguments = {**p.meaning.arguments(slopes), **more}
    if p.form == "apart":
        return flash_attn_func(q, k, v, **arguments)
    if p.form == "kv":
        return flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **arguments)
    if p.form == "qkv":
        return flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **arguments)
    if p.form == "varlen":
        return flash_attn_varlen_func(q, k, v, *cu, *longest, **arguments)
    if p.form == "varlen kv":
        return flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *cu, *longest, **arguments)
    return flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), cu[0], longest[0], **arguments)


def reference(p: Problem, tensors, starts, slopes, d_out, d_lse, precision):
    """out, lse and the gradients of q, k and v; of out alone where d_lse is None."""
    leaves = [t.detach().to(precision).requires_grad_() for t in tensors]
    dense = packed_attention(*leaves, *starts, p.meaning, slopes, precision) if starts else None
    out, lse = dense or batch_attention(*leaves, p.meaning, slopes, precision)
    loss = (out * d_out.to(out.dtype)).sum()
    if d_lse is not None:
        loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * d_lse.to(lse.dtype)).sum()
    return out, lse, torch.autograd.grad(loss, leaves)


def check(p: Problem, device: str) -> None:
    (*tensors, slopes), starts = inputs_of(p, device)
    tensors = [t.requires_grad_() for t in tensors]
    out, lse, dropped = attend(p, *tensors, starts, slopes, return_attn_probs=True)
    assert out.shape == tensors[0].shape and out.dtype == p.dtype and lse.dtype == torch.float32 and dropped.shape == (0,)
    generator = torch.Generator(device).manual_seed(p.seed)
    d_out = torch.randn(out.shape, generator=generator, device=device).to(p.dtype)
    d_lse = torch.randn(lse.shape, generator=generator, device=device) if p.lse else None
    grads = torch.autograd.grad((out, lse) if p.lse else out, tensors, (d_out, d_lse) if p.lse else d_out)
    exact_out, exact_lse, exact = reference(p, tensors, starts, slopes, d_out, d_lse, torch.float64)
    plain_out, _, plain = reference(p, tensors, starts, slopes, d_out, d_lse, p.dtype)
    assert relative_error(out, exact_out) <= max(2 * relative_error(plain_out, exact_out), FLOORS[p.dtype])
    assert lse.shape == exact_lse.shape and torch.equal(lse == -math.inf, exact_lse == -math.inf)
    tolerance = 1e-5 if p.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(lse.double(), exact_lse.detach(), rtol=tolerance, atol=tolerance)
    assert all(g.isfinite().all() for g in grads)
    if not all(t.numel() for t in tensors):  # nothing depends on anything
        assert not any(g.any() for g in grads)
        return
    less = error_times(d_out, out, exact_out).transpose(-1, -2)
    _, _, fused = reference(p, tensors, starts, slopes, d_out, -less if d_lse is None else d_lse - less, torch.float64)
    found = [[t if t.ndim == 4 else t[None] for t in each] for each in (grads, exact, plain, fused)]
    assert_gradients(*found[:3], [p.dtype] * 3, lse=exact_lse, fused=found[3])


@for_any(problems, cpu=25, cuda=200)
def test_any_problem(p, device):
    check(p, device)


CORNERS = [(5, 2), (2, 5), (1, 5), (5, 1), (4, 4), (0, 3), (3, 0)]
MEANINGS = {
    "causal": Meaning(causal=True),
    "left": Meaning(window=(1, -1)),
    "right": Meaning(window=(-1, 1)),
    "itself": Meaning(window=(0, 0)),
    "both": Meaning(window=(2, 1)),
    "causal, left; right does not count": Meaning(causal=True, window=(1, 7)),
    "wider than all": Meaning(window=(1 << 40, 1 << 40)),
    "ALiBi": Meaning(slopes=2),
    "causal ALiBi under a cap": Meaning(causal=True, slopes=1, softcap=1.5),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["apart", "varlen"])
@pytest.mark.parametrize("name", MEANINGS)
def test_corners(name, form, device):
    """Every kind of mask where queries are more or fewer than keys; packed, all of them are one batch."""
    common = dict(dtype=torch.float32, batch=1, Hkv=1, group=2, D=16, meaning=MEANINGS[name], lse=False, seed=3)
    for lengths in [CORNERS] if form == "varlen" else [[pair] for pair in CORNERS]:
        check(Problem(form=form, lengths=lengths, **common), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths, seen", [((2, 5), [4, 5]), ((5, 2), [0, 0, 0, 1, 2])])
def test_causal_ends_bottom_right(device, lengths, seen):
    """The two pictures of flash_attn's README: equal scores give the mean of the values that are seen."""
    Sq, Skv = lengths
    q, k = torch.zeros(1, Sq, 1, 16, device=device), torch.zeros(1, Skv, 1, 16, device=device)
    v = torch.arange(1.0, Skv + 1, device=device).view(1, Skv, 1, 1).expand(1, Skv, 1, 16)
    expected = torch.tensor([(n + 1) / 2 if n else 0.0 for n in seen], device=device)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True)[0, :, 0, 0], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_other_windows_slopes_caps_and_lengths_compile_nothing(form, device):
    def made_by(lengths, window, softcap, seed) -> tuple:
        before = cache_info()
        meaning = Meaning(window=window, softcap=softcap, slopes=2)
        p = Problem(form=form, dtype=torch.float32, lengths=lengths, batch=2, Hkv=2, group=1, D=16, meaning=meaning, lse=False, seed=seed)
        (*tensors, slopes), starts = inputs_of(p, device)
        attend(p, *(t.requires_grad_() for t in tensors), starts, slopes).sum().backward()
        after = cache_info()
        return after.traces - before.traces, after.prints - before.prints, after.compiles - before.compiles

    made_by([(50, 60), (40, 30)], (5, 3), 2.0, 0)
    assert made_by([(71, 83), (41, 37)], (9, 0), 3.0, 1) == (0, 0, 0)
    assert made_by([(83, 71), (29, 31)], (0, 11), 2.5, 2) == (0, 0, 0)
    made_by([(64, 64), (32, 32)], (7, 7), 9.5, 3)  # as many queries as keys: no offset in the kernel
    assert made_by([(80, 80), (21, 21)], (1, 2), 3.5, 3) == (0, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_lengths_have_the_kernels_of_flex_attention(device):
    """Causal masks and ALiBi as the recipes have them, which kernels for Hopper take as a sum."""
    q, k, v = (torch.randn(2, 30, 2, 16, device=device) for _ in range(3))
    slopes = torch.rand(2, device=device)
    for mod, arguments in ((None, {}), (mods.alibi(slopes), dict(alibi_slopes=slopes))):
        want = flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), mod, mask_mod=mods.causal)
        before = set(printed_kernels())
        assert torch.equal(flash_attn_func(q, k, v, causal=True, **arguments), want.transpose(1, 2))
        assert set(printed_kernels()) == before


@pytest.mark.parametrize("device", DEVICES)
def test_slopes_get_a_gradient(device):
    q, k, v = (torch.randn(1, n, 2, 16, device=device) for n in (9, 12, 12))
    slopes = torch.rand(2, device=device, requires_grad=True)
    (got,) = torch.autograd.grad(flash_attn_func(q, k, v, alibi_slopes=slopes, causal=True).square().sum(), slopes)
    exact = slopes.detach().double().requires_grad_()
    out, _ = batch_attention(q, k, v, Meaning(causal=True, slopes=1), exact)
    (want,) = torch.autograd.grad(out.square().sum(), exact)
    assert relative_error(got, want) < 1e-5


def test_windows_in_tensors():
    """As flash_attn's own tests draw them."""
    expected = flash_attn_func(Q + 1, K + 1, K, window_size=(3, 1))
    for window in (torch.tensor([3, 1]), (torch.tensor(3), torch.tensor(1, dtype=torch.int32)), [3, np.int64(1)]):
        assert torch.equal(flash_attn_func(Q + 1, K + 1, K, window_size=window), expected)
    with pytest.raises(TypeError, match="window_size"):
        flash_attn_func(Q, K, K, window_size=torch.tensor([3.0, 1.0]))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_forms_are_views(device):
    """What is packed gives the same bits as what lies apart, and its gradient comes packed."""
    qkv = torch.randn(2, 21, 3, 2, 16, device=device, requires_grad=True)
    apart = [t.detach().requires_grad_() for t in qkv.unbind(2)]
    window = dict(window_size=(4, 2))
    want = flash_attn_func(*apart, **window)
    for got in (flash_attn_qkvpacked_func(qkv, **window), flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **window)):
        assert torch.equal(got, want)
        (gradient,) = torch.autograd.grad(got.sum(), qkv)
        assert torch.equal(gradient, torch.stack(torch.autograd.grad(want.sum(), apart, retain_graph=True), 2))


@pytest.mark.parametrize("device", DEVICES)
def test_no_sequences(device):
    q, cu = torch.empty(0, 2, 16, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    out, lse, _ = flash_attn_varlen_func(q, q, q, cu, cu.clone(), 0, 0, causal=True, return_attn_probs=True)
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)


Q, K = torch.zeros(2, 5, 4, 16), torch.zeros(2, 7, 2, 16)
KV, QKV, CU = torch.zeros(2, 7, 2, 2, 16), torch.zeros(2, 5, 3, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
VARLEN, SLOPES = flash_attn_varlen_func, torch.ones(4)
BAD = {
    "dropout": (lambda: flash_attn_func(Q, K, K, 1.1), ValueError, "dropout_p must be a number from 0 to 1, got 1.1"),
    "packed dropout": (lambda: flash_attn_varlen_qkvpacked_func(QKV[0], CU, 3, -0.5), ValueError, "dropout_p must be .* got -0.5"),
    "rank": (lambda: flash_attn_func(Q, K[0], K), ValueError, r"k must have shape \(B, S, H, D\), got \(7, 2, 16\)"),
    "k and v": (lambda: flash_attn_func(Q, K, K[:, 1:]), ValueError, "k and v must have the same shape"),
    "heads": (lambda: flash_attn_kvpacked_func(Q[:, :, :3], KV), ValueError, r"multiple of kv's, got q \(2, 5, 3, 16\)"),
    "dtype": (lambda: flash_attn_func(Q, K, K.half()), TypeError, "q and v must have the same dtype"),
    "double": (lambda: flash_attn_qkvpacked_func(QKV.double()), TypeError, "qkv has dtype torch.float64"),
    "a window": (lambda: flash_attn_func(Q, K, K, window_size=3), TypeError, r"window_size must be a pair of integers \(left, right\)"),
    "half a window": (lambda: flash_attn_func(Q, K, K, window_size=(1.5, 0)), TypeError, r"window_size\[0\] must be an integer, got 1.5"),
    "a cap": (lambda: flash_attn_func(Q, K, K, softcap="x"), TypeError, "softcap must be a number, 0.0 for none, got 'x'"),
    "no number": (lambda: flash_attn_func(Q, K, K, softcap=math.nan), ValueError, "cap must be finite"),
    "scales": (lambda: flash_attn_func(Q, K, K, softmax_scale=torch.ones(2)), ValueError, "softmax_scale must be a number, got a tensor"),
    "a scale": (lambda: flash_attn_func(Q, K, K, softmax_scale="x"), TypeError, "softmax_scale must be a number"),
    "slopes": (lambda: flash_attn_func(Q, K, K, alibi_slopes=[0.1] * 4), TypeError, r"alibi_slopes must be a torch.Tensor of shape"),
    "half slopes": (lambda: flash_attn_func(Q, K, K, alibi_slopes=SLOPES.half()), TypeError, "got torch.float16"),
    "some slopes": (lambda: flash_attn_func(Q, K, K, alibi_slopes=SLOPES[:2]), ValueError, r"\(4,\) or \(2, 4\), got \(2,\)"),
    "slopes elsewhere": (lambda: flash_attn_func(Q, K, K, alibi_slopes=SLOPES.to("meta")), ValueError, "alibi_slopes are on meta"),
    "cu_seqlens": (lambda: VARLEN(Q[0], K[0], K[0], CU, CU, 3, 3), ValueError, "number of tokens"),
    "no cu_seqlens_k": (lambda: VARLEN(Q[0], Q[0], Q[0], CU, None, 3, 3), TypeError, "cu_seqlens_k must be a tensor .* got None"),
    "no cu_seqlens_k, causal": (lambda: VARLEN(Q[0], Q[0], Q[0], CU, None, 3, 3, causal=True), TypeError, "cu_seqlens_k must be .* None"),
    "other sequences": (lambda: VARLEN(Q[0], K[0], K[0], CU, CU[:2], 3, 3, causal=True), ValueError, "cu_seqlens_k must be"),
    "packed pairs": (lambda: flash_attn_varlen_kvpacked_func(Q[0], K[0], CU, CU, 3, 3), ValueError, r"kv must have shape \(total_k, 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case):
    call, error, words = BAD[case]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("cap", [np.float32(5), np.float64(5), np.int32(5), 5])
def test_numbers_of_numpy_are_caps(cap):
    q = torch.randn(1, 5, 2, 16)
    assert torch.equal(flash_attn_func(q, q, q, softcap=cap), flash_attn_func(q, q, q, softcap=5.0))
