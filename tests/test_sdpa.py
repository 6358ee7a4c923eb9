"""flexpress.scaled_dot_product_attention against torch's in float64: layouts, masks, gradients, errors."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs

from flexpress import ModError, cache_info, flex_attention, scaled_dot_product_attention, sdpa
from support.dense import relative_error
from support.devices import DEVICES, for_any
from support.gradients import assert_gradients

FLOORS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(kw_only=True)
class Problem:
    """`leading` precedes Q_LEN in query. In key and value, extents at places in `shared` are 1; `group` heads share one."""

    dtype: torch.dtype
    leading: tuple[int, ...]
    shared: frozenset[int]
    group: int
    Q_LEN: int
    KV_LEN: int
    D: int
    D_V: int
    transposed: bool
    mask: str
    mask_ones: frozenset[int]
    mask_rank: int
    causal: bool
    scale: float | None
    seed: int


@st.composite
def problems(draw, device):
    tiny = device == "cpu"
    length, D = st.sampled_from([1, 5, 16, 33] if tiny else [1, 64, 113, 515]), st.sampled_from([16, 24] if tiny else [64, 96, 128])
    leading = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3)))
    group = draw(st.sampled_from([1, 1, 2])) if leading else 1
    places = st.frozensets(st.integers(0, max(len(leading) - 1, 0)))
    mask = draw(st.sampled_from(["none", "none", "bool", "float"]))
    return Problem(
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16] if tiny else [torch.float16, torch.bfloat16])),
        leading=leading,
        shared=draw(places) if group == 1 else frozenset(),
        group=group,
        Q_LEN=draw(length),
        KV_LEN=draw(length),
        D=draw(D),
        D_V=draw(D),
        transposed=draw(st.booleans()),
        mask=mask,
        mask_ones=draw(st.frozensets(st.integers(0, len(leading) + 1))),
        mask_rank=draw(st.integers(0, len(leading) + 2)),
        causal=mask == "none" and draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])),
        seed=draw(st.integers(0, 99)),
    )


def check(p: Problem, device: str) -> None:
    g = torch.Generator().manual_seed(p.seed)

    def random(*shape):
        tensor = torch.randn(shape, generator=g).to(device, p.dtype)
        if p.transposed and tensor.ndim > 2:
            tensor = tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
        return tensor.requires_grad_()

    leading = tuple(1 if i in p.shared else n for i, n in enumerate(p.leading))
    heads = (*p.leading[:-1], p.leading[-1] * p.group) if p.leading else ()
    q = random(*heads, p.Q_LEN, p.D)
    k, v = random(*leading, p.KV_LEN, p.D), random(*leading, p.KV_LEN, p.D_V)
    inputs, mask = [q, k, v], None
    if p.mask != "none":
        scores = (*heads, p.Q_LEN, p.KV_LEN)
        shape = tuple(1 if i in p.mask_ones else n for i, n in enumerate(scores))[len(scores) - p.mask_rank :]
        mask = torch.rand(shape, generator=g).to(device) < 0.6 if p.mask == "bool" else random(*shape).detach().requires_grad_()
        inputs += [mask] if p.mask == "float" else []
    more = dict(is_causal=p.causal, scale=p.scale, enable_gqa=p.group > 1)
    out = scaled_dot_product_attention(q, k, v, mask, **more)
    d_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, d_out)

    def by_torch(precision):
        leaves = [t.detach().to(precision).requires_grad_() for t in inputs]
        with sdpa_kernel(SDPBackend.MATH):
            theirs = torchs(*leaves[:3], leaves[3] if p.mask == "float" else mask, **more)
        return theirs, torch.autograd.grad(theirs, leaves, d_out.to(precision))

    (exact, exact_grads), (plain, plain_grads) = by_torch(torch.float64), by_torch(p.dtype)
    assert out.shape == exact.shape and out.dtype == p.dtype
    assert relative_error(out, exact) <= max(2 * relative_error(plain, exact), FLOORS[p.dtype])
    assert all(g.shape == t.shape and g.dtype == t.dtype and g.isfinite().all() for g, t in zip(grads, inputs, strict=True))
    four = [(1, -1, *t.shape[-2:]) if i < 3 else t.shape for i, t in enumerate(inputs)]
    assert_gradients(
        *([g.reshape(f) for g, f in zip(found, four, strict=True)] for found in (grads, exact_grads, plain_grads)), [p.dtype] * len(inputs)
    )


@for_any(problems, cpu=20, cuda=120)
def test_any_problem(p, device):
    check(p, device)


def test_the_signature_is_torchs():
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    shown = [(p.name, p.kind.name, p.default) for p in parameters.values() if p.default is not p.empty]
    positional = [("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False)]
    assert list(parameters)[:3] == ["query", "key", "value"]
    assert shown == [
        *[(name, "POSITIONAL_OR_KEYWORD", default) for name, default in positional],
        ("scale", "KEYWORD_ONLY", None),
        ("enable_gqa", "KEYWORD_ONLY", False),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_with_nothing_gives_zero(device):
    q, k, v = (torch.randn(2, 3, n, 16, device=device, requires_grad=True) for n in (4, 6, 6))
    mask = torch.ones(4, 6, dtype=torch.bool, device=device)
    mask[1] = False
    hidden = torch.where(mask, 0.0, -math.inf)
    for attn_mask in (mask, hidden):
        out = scaled_dot_product_attention(q, k, v, attn_mask)
        assert (out[:, :, 1] == 0).all() and out.isfinite().all()
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert (gradient[:, :, 1] == 0).all() and gradient.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_nothing_is_copied(device, leading, monkeypatch):
    """The kernel reads q, k, v and the mask where they lie, and what it writes is returned."""
    calls = []

    def spy(*args, **options):
        calls.append((args, options, flex_attention(*args, **options)))
        return calls[-1][-1]

    flex_attention = sdpa.flex_attention
    monkeypatch.setattr(sdpa, "flex_attention", spy)
    q, k = torch.randn(*leading, 5, 16, device=device), torch.randn(*(1 for _ in leading), 7, 16, device=device)
    mask = torch.rand(5, 7, device=device) < 0.5
    out = scaled_dot_product_attention(q, k, k, mask)
    (args, options, result) = calls.pop()
    assert [t.data_ptr() for t in args[:3]] == [q.data_ptr(), k.data_ptr(), k.data_ptr()]
    captured = [cell.cell_contents for cell in options["mask_mod"].__closure__ if isinstance(cell.cell_contents, torch.Tensor)]
    assert [t.data_ptr() for t in captured] == [mask.data_ptr()]
    assert out.data_ptr() == result.data_ptr() and out.is_contiguous() and out.shape == q.shape


@pytest.mark.parametrize("device", DEVICES)
def test_other_lengths_and_masks_compile_nothing(device):
    def made_by(B, Q_LEN, KV_LEN):
        before = cache_info()
        q, k = torch.randn(B, 2, Q_LEN, 16, device=device), torch.randn(B, 2, KV_LEN, 16, device=device)
        scaled_dot_product_attention(q, k, k, torch.rand(B, 1, 1, KV_LEN, device=device) < 0.5)
        scaled_dot_product_attention(q, k, k, is_causal=True)
        after = cache_info()
        return after.traces - before.traces, after.prints - before.prints, after.compiles - before.compiles

    made_by(2, 40, 50)
    assert made_by(3, 61, 37) == (0, 0, 0)


Q, K = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 7, 16)
BAD = {
    "dropout": (lambda: scaled_dot_product_attention(K, K, K, dropout_p=1.5), ValueError, "dropout_p must be a number from 0 to 1"),
    "two masks": (lambda: scaled_dot_product_attention(K, K, K, torch.ones(7, 7), is_causal=True), ValueError, "exclude each other"),
    "groups": (lambda: scaled_dot_product_attention(Q, K, K), ValueError, "for grouped-query attention pass enable_gqa=True"),
    "batches": (lambda: scaled_dot_product_attention(Q, Q[:1].expand(3, -1, -1, -1), Q), ValueError, "does not broadcast: query"),
    "no groups": (lambda: scaled_dot_product_attention(Q[:, :3], K, K, enable_gqa=True), ValueError, "must be a multiple"),
    "rank": (lambda: scaled_dot_product_attention(Q[0, 0, 0], K, K), ValueError, r"query must have shape \(..., length, head dim\), got"),
    "no heads": (
        lambda: scaled_dot_product_attention(Q[0, 0], K, K, enable_gqa=True),
        ValueError,
        r"query must have shape \(..., heads, length, head dim\)",
    ),
    "list": (lambda: scaled_dot_product_attention(Q, [1.0], K), TypeError, "key must be a torch.Tensor of shape .* got list"),
    "mask": (lambda: scaled_dot_product_attention(K, K, K, torch.ones(2, 9) > 0), ValueError, r"attn_mask \(2, 9\) does not broadcast"),
    "wide mask": (lambda: scaled_dot_product_attention(K, K, K, torch.ones(3, 1, 1, 7, 7) > 0), ValueError, "does not broadcast to the sc"),
    "whole mask": (lambda: scaled_dot_product_attention(K, K, K, torch.ones(7, 7).int()), TypeError, "attn_mask must be bool or floating"),
    "dtype": (lambda: scaled_dot_product_attention(K.double(), K.double(), K.double()), TypeError, "torch.float64; supported are"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case):
    call, error, words = BAD[case]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("lead", [(2, 1, 1), (1, 3, 1), (2, 3, 1), (2, 1, 4), (1, 1, 4), (2, 1)])
def test_a_mask_of_some_batch_dimensions(lead, dtype):
    """Each of the others has it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, n, 8, generator=generator) for n in (5, 7, 7))
    mask = torch.randn(*lead, 5, 7, generator=generator)
    mask = mask > -0.5 if dtype == torch.bool else mask
    if len(lead) == 2:
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), torchs(q, k, v, mask))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 12), (12, 5)])
@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases_of_torch(kind, lengths, compiled):
    """Their memory means nothing: torch's function asks what they are. (Of a row that sees nothing torch's makes NaN.)"""
    q, k = (torch.randn(1, 2, n, 16, requires_grad=True) for n in lengths)
    bias, function = kind(*lengths), scaled_dot_product_attention
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    out = function(q, k, k, bias)
    expected = torchs(q.double(), k.double(), k.double(), bias._materialize()).nan_to_num()
    assert relative_error(out, expected) < 1e-6
    if lengths[0] <= lengths[1]:
        for found, exact in zip(*(torch.autograd.grad(o.sin().sum(), (q, k)) for o in (out, expected)), strict=True):
            assert relative_error(found, exact) < 1e-5


def test_causal_biases_elsewhere():
    q, bias = torch.randn(1, 2, 9, 16), causal_lower_right(9, 12)
    for call, error, words in (
        (
            lambda: scaled_dot_product_attention(q, q, q, bias),
            ValueError,
            r"causal bias of \(9, 12\) positions, but query and key have 9 and 9",
        ),
        (lambda: scaled_dot_product_attention(q, q, q, bias, is_causal=True), ValueError, "attn_mask and is_causal exclude each other"),
        (lambda: flex_attention(q, q, q, lambda s, b, h, i, j: s + bias[0, i, j]), ModError, "captures bias, which is a CausalBias"),
        (lambda: flex_attention(bias[None], q, q), NotImplementedError, "query is a CausalBias, whose memory means nothing"),
    ):
        with pytest.raises(error, match=words):
            call()
