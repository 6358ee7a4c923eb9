"""What PyTorch's own tests of flex_attention and flex_decoding ask of a caller's side: mods, paged attention, captured tensors, statistics.

docs/torch_tests.md says which of theirs each of these stands for. Masks as objects are in test_torchs_masks.py. All cases are our own.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch.nn.attention.experimental._paged_attention import PagedAttention

import flexpress
from flexpress import AuxRequest, create_block_mask, flex_attention
from support.dense import assert_as_accurate, dense_attention

LENGTH, HEAD_DIM, PAGE = 96, 16, 32
INF = float("inf")
CREATORS = [flexpress.create_block_mask, torchs.create_block_mask]

SCORE_MODS = {
    "identity": torchs._identity,
    "doubled": lambda score, b, h, q_idx, kv_idx: score * 2,
    "squared": lambda score, b, h, q_idx, kv_idx: score * score,
    "causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -INF),
    "inverse causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx <= kv_idx, score, float("-inf")),
    "relative": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "relative causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score + (q_idx - kv_idx), -INF),
    "alibi": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / 8)),
    "trigonometric": lambda score, b, h, q_idx, kv_idx: torch.sin(torch.cos(score)) + torch.tan(b),
    "branching": lambda score, b, h, q_idx, kv_idx: torch.cos(score) * torch.sin(score) + torch.tan(b),
    "windowed": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx + 50 >= kv_idx, score, -INF),
    "floor division": lambda score, b, h, q_idx, kv_idx: score - q_idx // (1 + kv_idx),
    "silu": lambda score, b, h, q_idx, kv_idx: torch.nn.functional.silu(score),
    "odd keys": lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx % 2 == 0, score, -INF),
}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def tensors(B=2, Hq=2, Q_LEN=LENGTH, KV_LEN=LENGTH, Hkv=None, Bkv=None, D=HEAD_DIM, D_V=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    keys = (Bkv or B, Hkv or Hq, KV_LEN)
    shapes = (B, Hq, Q_LEN, D), (*keys, D), (*keys, D_V or D)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def check(q, k, v, score_mod=None, block_mask=None, *, dense_mod=None, mask_mod=None, learned=()):
    """Output and gradients against dense float64 attention. `dense_mod` is the score_mod on whole tensors, if that is written otherwise."""
    out = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)
    assert_as_accurate(out, q, k, v, dense_mod or score_mod, mask_mod)
    if q.dtype == torch.float32:
        exact, *_ = dense_attention(q, k, v, dense_mod or score_mod, mask_mod)
        wanted, gradient = (q, k, v, *learned), torch.randn_like(out)
        for got, expected in zip(*(torch.autograd.grad(o, wanted, gradient.to(o.dtype)) for o in (out, exact)), strict=True):
            assert got.isfinite().all() and (got - expected).norm() <= 1e-4 * expected.norm() + 1e-4


SHAPES = {
    "fewer queries": dict(Q_LEN=40),
    "other lengths": dict(Q_LEN=LENGTH - 3, KV_LEN=LENGTH + 3),
    "groups": dict(Hq=8, Hkv=2, Q_LEN=24),
    "one query": dict(Hq=8, Hkv=1, Q_LEN=1),
    "one batch entry of keys": dict(B=3, Bkv=1, Hq=4, Hkv=2),
    "head dims": dict(D=24, D_V=48),
    "bfloat16": dict(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name):
    check(*tensors(), SCORE_MODS[name])


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape):
    for name in ("alibi", "squared", "windowed"):
        check(*tensors(**SHAPES[shape]), SCORE_MODS[name])


@pytest.mark.parametrize("head_dim", [4, 8, 17, 94, 121])
def test_head_dims(head_dim):
    check(*tensors(D=head_dim, Q_LEN=40), SCORE_MODS["relative"])


def test_score_mods_of_score_mods():
    """One inside another, several calls in a row, and a mod that becomes another between calls."""
    shifted, hidden = SCORE_MODS["relative"], SCORE_MODS["inverse causal"]
    check(*tensors(), lambda score, b, h, q_idx, kv_idx: hidden(shifted(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx))
    q, k, v = tensors()
    expected, *_ = dense_attention(dense_attention(q, k, v, shifted)[0].float(), k, v, hidden)
    torch.testing.assert_close(flex_attention(flex_attention(q, k, v, shifted), k, v, hidden).double(), expected, atol=1e-5, rtol=1e-5)
    amount, settings = torch.ones((), dtype=torch.int32), {}
    mod = lambda score, b, h, q_idx, kv_idx: score + amount if settings["adds"] else score * amount  # noqa: E731
    for settings["adds"] in (True, False, True):
        check(q, k, v, mod)


def captured_cases() -> dict:
    """Names to (score_mod, the same on whole tensors, what is learned)."""
    S, generator = LENGTH, torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    documents, rows, four, eight = torch.arange(S) // 40, normal(2, S), normal(4, 2, 2, S), normal(2, 2, 4, S)
    first = torch.tensor(0)
    halves, seen = torch.arange(S) >= S // 2, torch.tensor([30, 70], dtype=torch.int32)
    lengths, starts = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 48, 72, S], dtype=torch.int32)
    sequence = torch.searchsorted(starts[1:], torch.arange(S, dtype=torch.int32), right=True)
    multiplier, mass, dense = normal(S).bfloat16(), torch.ones(1, dtype=torch.float16), normal(2, 2, S, S)
    poisoned = torch.cat([normal(2, S, S), torch.full((2, S, S), float("nan"))])
    tall = torch.ones(2, 1, S, S, dtype=torch.bool).tril()
    return {
        "documents": (lambda s, b, h, i, j: torch.where((i >= j) & (documents[i] == documents[j]), s, -INF), None),
        "an index after an index": (lambda s, b, h, i, j: s + rows[b][j], lambda s, b, h, i, j: s + rows[:, None, None]),
        "an index between indices": (lambda s, b, h, i, j: s + four[0][b, h][j], lambda s, b, h, i, j: s + four[0, :, :, None]),
        "an index in a tensor": (lambda s, b, h, i, j: s + eight[b][h][first, j], lambda s, b, h, i, j: s + eight[:, :, 0, None]),
        "a bias of everything": (lambda s, b, h, i, j: s + dense[b, h, i, j], None),
        "a bool by position": (lambda s, b, h, i, j: torch.where(halves[i] == halves[j], s, -INF), None),
        "seen in both directions": (lambda s, b, h, i, j: torch.where(((i <= seen[b]) & (j <= seen[b])) | (i >= j), s, -INF), None),
        "two dimensions of positions": (
            lambda s, b, h, i, j: torch.where(((i / 8 - j / 8).abs() <= 3) | ((i % 8 - j % 8).abs() <= 3), s, -INF),
            None,
        ),
        "a comparison of the score": (lambda s, b, h, i, j: torch.where(s <= lengths[b], torch.where(i >= j, s, -INF), -INF), None),
        "positions in sequences": (lambda s, b, h, i, j: torch.where(i - starts[sequence[i]] >= j - starts[sequence[j]], s, -INF), None),
        "a factor in bfloat16": (lambda s, b, h, i, j: s * multiplier[i], None),
        "the logarithm of a half": (lambda s, b, h, i, j: s + torch.log(mass[0]), None),
        "NaN that is not read": (lambda s, b, h, i, j: s + poisoned[b, i, j], None),
        "zeros made of an index": (lambda s, b, h, i, j: s + tall[b, h.new_zeros(h.shape), i, j], lambda s, b, h, i, j: s + tall),
    }


@pytest.mark.parametrize("name", captured_cases())
def test_captured_tensors(name):
    mod, whole = captured_cases()[name]
    check(*tensors(), mod, dense_mod=whole)


def learned_cases() -> dict:
    S, generator = LENGTH, torch.Generator().manual_seed(2)
    normal = lambda *shape: torch.randn(*shape, generator=generator).requires_grad_()  # noqa: E731
    one, other, heads, table, of_heads = normal(2 * S), normal(S), normal(2), normal(S, S), normal(2, 2, S, S)
    window, odd = normal(17), normal(2, 2, 4, S)
    moved, first = torch.randint(0, S, (S,), generator=generator), torch.tensor(0)
    return {
        "by distance": (lambda s, b, h, i, j: s + one[torch.abs(i - j)], [one]),
        "by sum": (lambda s, b, h, i, j: s + one[i + j], [one]),
        "by both positions": (lambda s, b, h, i, j: s + table[i, j], [table]),
        "by both positions, transposed": (lambda s, b, h, i, j: s + table[j, i], [table]),
        "of everything": (lambda s, b, h, i, j: s + of_heads[b, h, i, j], [of_heads]),
        "of a clamped distance": (lambda s, b, h, i, j: s + window[torch.clamp(i - j + 8, 0, 16)], [window]),
        "a factor": (lambda s, b, h, i, j: s * other[i], [other]),
        "by an index from a tensor": (lambda s, b, h, i, j: s * other[moved[i]], [other]),
        "an odd place": (lambda s, b, h, i, j: s * odd[b, h, first, i], [odd]),
        "one tensor at two places": (lambda s, b, h, i, j: s * other[i] + other[j], [other]),
        "two tensors": (lambda s, b, h, i, j: s * other[i] + one[j], [other, one]),
        "a gate of heads": (lambda s, b, h, i, j: s * torch.sigmoid(heads[h]), [heads]),
    }


@pytest.mark.parametrize("name", learned_cases())
def test_learned_biases(name):
    mod, learned = learned_cases()[name]
    q, k, v = tensors()
    check(q, k, v, mod, learned=learned)
    alone = flex_attention(q.detach(), k.detach(), v.detach(), mod)
    exact, *_ = dense_attention(q.detach(), k.detach(), v.detach(), mod)
    gradient = torch.randn_like(alone)
    for got, expected in zip(*(torch.autograd.grad(o, learned, gradient.to(o.dtype)) for o in (alone, exact)), strict=True):
        assert (got - expected).norm() <= 1e-4 * expected.norm()


def test_a_bias_that_the_same_program_computes():
    """Its gradient goes on to what it was made of."""
    x, y = torch.randn(2, 16, HEAD_DIM, requires_grad=True), torch.randn(2, 16, requires_grad=True)
    bias = y[:, :, None] * y[:, None, :]
    q = x[:, :, None].repeat(1, 1, 16, 1)
    flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score + bias[b, q_idx, kv_idx]).square().mean().backward()
    assert x.grad.norm() > 0 and y.grad.norm() > 0


def paged(score_mod, q, k, v, block_mask):
    """Attention by torch's PagedAttention: keys in pages that other sequences have, too, and mods of physical positions."""
    B, KV_LEN = q.shape[0], k.shape[2]
    pages = -(-KV_LEN // PAGE) * (B + 3)
    k_cache, v_cache = (t.new_zeros(1, t.shape[1], pages * PAGE, t.shape[3]) for t in (k, v))
    cache = PagedAttention(pages, PAGE, B + 3, device="cpu")
    for part in (4, 2, 1):  # so that pages of sequences lie among each other
        for b in range(B):
            cache.reserve(torch.tensor(b), torch.tensor(max(KV_LEN // part, 1)))
    places = torch.arange(KV_LEN, dtype=torch.int32).expand(B, -1)
    with torch.no_grad():
        cache.assign(torch.arange(B, dtype=torch.int32), places, k, v, k_cache, v_cache)
    kv_len = torch.full((B,), KV_LEN)
    mask, mod = cache.convert_logical_block_mask(block_mask, kv_len=kv_len), cache.get_score_mod(score_mod, kv_len=kv_len)
    return flex_attention(q, k_cache, v_cache, mod, mask, enable_gqa=True, return_lse=True)


@pytest.mark.parametrize("create", CREATORS, ids=["ours", "torchs"])
@pytest.mark.parametrize("shape", [dict(), dict(Hq=8, Hkv=2, Q_LEN=20), dict(Hq=8, Hkv=2, Q_LEN=1)], ids=["square", "groups", "one query"])
def test_paged_attention(shape, create):
    q, k, v = (t.detach() for t in tensors(**shape))
    pairs = {"identity": causal, "relative causal": torchs.noop_mask, "alibi": causal, "squared": torchs.noop_mask}
    for name, mask_mod in pairs.items():
        block_mask = create(mask_mod, 2, 1, q.shape[2], LENGTH, device="cpu", BLOCK_SIZE=PAGE)
        out, lse = paged(SCORE_MODS[name], q, k, v, block_mask)
        assert_as_accurate(out, q, k, v, SCORE_MODS[name], mask_mod if mask_mod is causal else None)
        _, expected, _ = dense_attention(q, k, v, SCORE_MODS[name], mask_mod if mask_mod is causal else None)
        torch.testing.assert_close(lse.double(), expected, atol=1e-4, rtol=1e-4)


def test_paged_decoding_at_other_places():
    """Sequences of several lengths, each with a query at its beginning, by masks with lengths that were set."""
    lengths = [5, 98, 47, 94]
    whole = torchs.create_block_mask(causal, 4, 1, 128, 128, device="cpu", BLOCK_SIZE=PAGE)
    q, k, v = (t.detach() for t in tensors(B=4, Q_LEN=1, KV_LEN=128))
    cache = PagedAttention(32, PAGE, 4, device="cpu")
    for room in (64, 128):
        for b in range(4):
            cache.reserve(torch.tensor(b), torch.tensor(room))
    k_cache, v_cache = torch.zeros(1, 2, 32 * PAGE, HEAD_DIM), torch.zeros(1, 2, 32 * PAGE, HEAD_DIM)
    for b, n in enumerate(lengths):
        places = torch.arange(n, dtype=torch.int32)[None]
        cache.assign(torch.tensor([b]), places, k[b : b + 1, :, :n], v[b : b + 1, :, :n], k_cache, v_cache)
    mask = cache.convert_logical_block_mask(whole)
    mask.seq_lengths = (1, mask.seq_lengths[1])
    out = flex_attention(q, k_cache, v_cache, cache.get_score_mod(SCORE_MODS["alibi"]), mask)
    torch.testing.assert_close(out, v[:, :, :1], atol=1e-5, rtol=1e-5)  # all that a causal query at position 0 sees
    for b, n in enumerate(lengths):
        part = torchs.create_block_mask(causal, 1, 1, 128, 128, device="cpu", BLOCK_SIZE=PAGE)._adjust(1, n)
        alone = flex_attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], SCORE_MODS["alibi"], part)
        torch.testing.assert_close(out[b : b + 1], alone, atol=1e-5, rtol=1e-5)


def test_statistics():
    q, k, v = tensors(Q_LEN=61)
    for name in ("identity", "relative causal", "squared"):
        out, aux = flex_attention(q, k, v, SCORE_MODS[name], return_aux=torchs.AuxRequest(lse=True, max_scores=True))
        _, lse, highest = dense_attention(q, k, v, SCORE_MODS[name])
        for got, expected in ((aux.lse, lse), (aux.max_scores, highest)):
            assert got.dtype == torch.float32 and got.shape == (2, 2, 61)
            torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)
        assert not aux.max_scores.requires_grad and torch.equal(flex_attention(q, k, v, SCORE_MODS[name]), out)
    none = flex_attention(q, k, v, return_aux=AuxRequest())[1]
    assert none.lse is None and none.max_scores is None
    with pytest.raises(ValueError, match="exclude each other"):
        flex_attention(q, k, v, return_lse=True, return_aux=torchs.AuxRequest(lse=True))


def test_two_halves_of_a_mask_merge_by_their_lse():
    near = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 40)  # noqa: E731
    far = lambda b, h, q_idx, kv_idx: q_idx - kv_idx > 40  # noqa: E731
    q, k, v = tensors()
    options = {"FORCE_USE_FLEX_ATTENTION": True}
    parts = []
    for mask_mod in (near, far):
        mask = torchs.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
        parts.append(flex_attention(q, k, v, block_mask=mask, return_lse=True, kernel_options=options))
    top = torch.maximum(parts[0][1], parts[1][1])
    weights = [torch.exp(lse - top)[..., None] for _, lse in parts]
    merged = sum(w * out for w, (out, _) in zip(weights, parts, strict=True)) / sum(weights)
    exact, *_ = dense_attention(q, k, v, None, causal)
    torch.testing.assert_close(merged.double(), exact, atol=1e-5, rtol=1e-5)
    gradient = torch.randn_like(merged)
    for got, expected in zip(*(torch.autograd.grad(o, (q, k, v), gradient.to(o.dtype)) for o in (merged, exact)), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mod", [lambda s, *_: 1 / s, lambda s, *_: torch.where(s > 0, torch.log(s), s)], ids=["1 / score", "log"])
def test_mods_that_are_infinite_at_zero(mod):
    q, k, v = tensors(Q_LEN=97, KV_LEN=97)
    out = flex_attention(q, k, v, mod, create_block_mask(causal, None, None, 97, 97, device="cpu"))
    out.sum().backward()
    assert all(t.isfinite().all() for t in (out, q.grad, v.grad))


def test_strides_of_any_order():
    """Inputs of other strides and offsets; what comes out lies as query does, and gradients as what they are of."""
    S, H, D = 48, 4, HEAD_DIM
    shape = (2, H, S, D)
    layouts = [
        ((H * S * D, S * D, D, 1), 997),
        ((H * D, D, 2 * H * D, 1), 499),
        ((S * (D + 1), 2 * S * (D + 1), D + 1, 1), 293),
        ((1, D, 3 * (H + 1) * D, 1), 97),
    ]
    for keys, values in zip(layouts, layouts[1:] + layouts[:1], strict=True):
        memory = [torch.randn(20000, requires_grad=True) for _ in range(2)]
        k, v = (torch.as_strided(m, shape, *layout) for m, layout in zip(memory, (keys, values), strict=True))
        q = torch.randn(S // 2, H, 2, D).transpose(0, 2).requires_grad_()
        out = flex_attention(q, k, v, SCORE_MODS["alibi"], kernel_options={"USE_TMA": True})
        exact, *_ = dense_attention(q, k, v, SCORE_MODS["alibi"])
        gradient = torch.randn_like(out)
        for got, expected in zip(*(torch.autograd.grad(o, (q, *memory), gradient.to(o.dtype)) for o in (out, exact)), strict=True):
            assert (got - expected).norm() <= 1e-4 * expected.norm()
    for order in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)):
        q, k, v = (torch.randn(2, 5, 40, 16).permute(order).requires_grad_() for _ in range(3))
        out = flex_attention(q, k, v)
        assert_as_accurate(out, q, k, v)
        if order != (0, 1, 3, 2):  # kernels write rows: the head dim of outputs is the innermost
            assert out.stride() == q.stride()
        out.backward(torch.randn_like(out))
        assert all(t.grad.stride() == t.stride() for t in (q, k, v))


def test_what_torch_exports_is_here_too():
    """By torch's names; what return_aux gives is torch's class, as code that asks for it is told."""
    assert all(hasattr(flexpress, name) for name in torchs.__all__) and flexpress.AuxOutput is torchs.AuxOutput
    q = torch.randn(1, 1, 8, 16)
    assert isinstance(flexpress.flex_attention(q, q, q, return_aux=torchs.AuxRequest(lse=True))[1], torchs.AuxOutput)
