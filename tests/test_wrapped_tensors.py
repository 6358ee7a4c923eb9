"""Tensors that hold others, or have lost their memory: refused in words wherever they come from, or read with their values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.testing._internal.two_tensor import TwoTensor

from flexpress import (
    BlockMask,
    ModError,
    cached_attention,
    create_block_mask,
    create_mask,
    evaluate_mod,
    explain,
    flash_attn,
    flex_attention,
    mods,
    scaled_dot_product_attention,
    update_cache,
    varlen_attention,
)
from flexpress.flash import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from support.dense import dense_attention
from support.devices import DEVICES

REFUSED = (TypeError, NotImplementedError, ValueError)
Q, SQUARE, THREE, BSHD = torch.randn(1, 2, 20, 16), torch.randn(20, 20), torch.randn(20, 2, 16), torch.randn(1, 20, 2, 16)
MASK = create_block_mask(mods.causal, None, None, 20, 20, "cpu", 16)
CACHE, KV_LEN = torch.zeros(1, 32, 2, 16), torch.tensor([20], dtype=torch.int32)
OFFSETS = torch.tensor([0, 8, 20], dtype=torch.int32)


def freed(t):
    """Its storage has no bytes left."""
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def freed_view(t):
    """The same of a view that does not begin where its storage does, so that its address is not 0."""
    t = torch.stack([t, t])[1]
    t.untyped_storage().resize_(0)
    assert t.data_ptr()
    return t


def leaked(t):
    """A tensor of a transform that is over."""
    found = []
    torch.func.grad(lambda x: (found.append(x), x.sum())[1])(t)
    return found[0]


TABLE, ENTRY = torch.tensor([[0]], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
COLUMNS = torch.zeros(2, 3, dtype=torch.int32)[:, 0][None]  # rows that are not contiguous
PACKED, ENDS = torch.randn(5, 2, 16), torch.tensor([0, 5], dtype=torch.int32)
SLOPES, FP8, SCALES = torch.ones(1, 2), torch.zeros(1, 32, 2, 16, dtype=torch.float8_e4m3fn), torch.ones(2)
ROPE = torch.zeros(32, 4, 2)
FULL = torch.zeros_like(MASK.kv_num_blocks), torch.zeros_like(MASK.kv_indices)


def reading(t, kind):
    """A score_mod or mask_mod that reads it."""
    if kind == "score":
        return lambda score, b, h, q_idx, kv_idx: score + t[q_idx, kv_idx]
    return lambda b, h, q_idx, kv_idx: t[q_idx, kv_idx] > 0


def of_today(name, *args, **more):
    return getattr(flash_attn, f"flash_attn_{name}")(*args, **more)


def of_torch(name):
    """A call with a mask of torch's, one of whose lists is another tensor."""

    def call(t):
        lists = dict(zip(("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"), MASK.as_lists().tables, strict=True))
        mask = TorchBlockMask.from_kv_blocks(*lists.values(), BLOCK_SIZE=16, mask_mod=mods.causal, seq_lengths=(20, 20))
        setattr(mask, name, t)
        return flex_attention(Q, Q, Q, block_mask=mask)

    return call


ARGUMENTS = {
    "flex_attention query": (Q, lambda t: flex_attention(t, Q, Q)),
    "flex_attention key": (Q, lambda t: flex_attention(Q, t, Q)),
    "flex_attention value": (Q, lambda t: flex_attention(Q, Q, t)),
    "flex_attention score_mod": (SQUARE, lambda t: flex_attention(Q, Q, Q, reading(t, "score"))),
    "flex_attention mask_mod": (SQUARE, lambda t: flex_attention(Q, Q, Q, mask_mod=reading(t, "mask"))),
    "varlen_attention q": (THREE, lambda t: varlen_attention(t, THREE, THREE, OFFSETS)),
    "varlen_attention v": (THREE, lambda t: varlen_attention(THREE, THREE, t, OFFSETS)),
    "varlen_attention cu_seqlens_q": (OFFSETS, lambda t: varlen_attention(THREE, THREE, THREE, t)),
    "varlen_attention score_mod": (SQUARE, lambda t: varlen_attention(THREE, THREE, THREE, OFFSETS, score_mod=reading(t, "score"))),
    "flash_attn_func q": (BSHD, lambda t: flash_attn_func(t, BSHD, BSHD)),
    "flash_attn_func bias": (Q[..., :1], lambda t: flash_attn_func(BSHD, BSHD, BSHD, t)),
    "flash_attn_kvpacked_func kv": (torch.stack([BSHD] * 2, 2), lambda t: flash_attn_kvpacked_func(BSHD, t)),
    "flash_attn_qkvpacked_func qkv": (torch.stack([BSHD] * 3, 2), lambda t: flash_attn_qkvpacked_func(t)),
    "flash_attn_func alibi_slopes": (SLOPES, lambda t: flash_attn.flash_attn_func(BSHD, BSHD, BSHD, alibi_slopes=t)),
    "flash_attn_varlen_qkvpacked_func qkv": (torch.stack([THREE] * 3, 1), lambda t: of_today("varlen_qkvpacked_func", t, OFFSETS, 12)),
    "flash_attn_varlen_func cu_seqlens_k": (OFFSETS, lambda t: of_today("varlen_func", *[THREE] * 3, OFFSETS, t, 12, 12, causal=True)),
    "flash_attn_with_kvcache q": (BSHD, lambda t: of_today("with_kvcache", t, CACHE, CACHE)),
    "flash_attn_with_kvcache k_cache": (CACHE, lambda t: of_today("with_kvcache", BSHD, t, CACHE)),
    "flash_attn_with_kvcache cache_seqlens": (KV_LEN, lambda t: of_today("with_kvcache", BSHD, CACHE, CACHE, cache_seqlens=t)),
    "scaled_dot_product_attention value": (Q, lambda t: scaled_dot_product_attention(Q, Q, t)),
    "scaled_dot_product_attention attn_mask": (SQUARE, lambda t: scaled_dot_product_attention(Q, Q, Q, t)),
    "create_block_mask mask_mod": (SQUARE, lambda t: create_block_mask(reading(t, "mask"), None, None, 20, 20, "cpu")),
    "create_mask mask_mod": (SQUARE, lambda t: create_mask(reading(t, "mask"), None, None, 20, 20, "cpu")),
    "evaluate_mod mod": (SQUARE, lambda t: evaluate_mod(reading(t, "score"), torch.zeros(1, 1, 20, 20))),
    "evaluate_mod scores": (torch.zeros(1, 1, 20, 20), lambda t: evaluate_mod(lambda s, b, h, q_idx, kv_idx: s, t)),
    "BlockMask kv_num_blocks": (MASK.kv_num_blocks, lambda t: BlockMask((20, 20), t, MASK.kv_indices, BLOCK_SIZE=16)),
    "BlockMask kv_indices": (MASK.kv_indices, lambda t: BlockMask.from_kv_blocks(MASK.kv_num_blocks, t, BLOCK_SIZE=16)),
    "cached_attention query": (Q, lambda t: cached_attention(t, CACHE, CACHE, KV_LEN)),
    "cached_attention k_cache": (CACHE, lambda t: cached_attention(Q, t, CACHE, KV_LEN)),
    "cached_attention kv_len": (KV_LEN, lambda t: cached_attention(Q, CACHE, CACHE, t)),
    "cached_attention mask_mod": (SQUARE, lambda t: cached_attention(Q, CACHE, CACHE, KV_LEN, mask_mod=reading(t, "mask"))),
    "cached_attention v_cache": (CACHE, lambda t: cached_attention(Q, CACHE, t, KV_LEN)),
    "cached_attention page_table": (TABLE, lambda t: cached_attention(Q, CACHE, CACHE, KV_LEN, page_table=t)),
    "cached_attention cache_loc": (ENTRY, lambda t: cached_attention(Q, CACHE, CACHE, KV_LEN, cache_loc=t)),
    "cached_attention q_offset": (ENTRY, lambda t: cached_attention(Q, CACHE, CACHE, KV_LEN, q_offset=t)),
    "cached_attention cu_seqlens_q": (ENDS, lambda t: cached_attention(PACKED, CACHE, CACHE, KV_LEN, cu_seqlens_q=t)),
    "cached_attention k_scale": (SCALES, lambda t: cached_attention(Q, FP8, FP8, KV_LEN, k_scale=t, v_scale=SCALES)),
    "cached_attention query of float8": (Q.to(FP8.dtype), lambda t: cached_attention(t, FP8, FP8, KV_LEN)),
    "cached_attention q_scale": (SCALES[:1], lambda t: cached_attention(Q.to(FP8.dtype), FP8, FP8, KV_LEN, q_scale=t)),
    "cached_attention page_table by columns": (COLUMNS, lambda t: cached_attention(Q, CACHE, CACHE, KV_LEN, page_table=t)),
    "update_cache key by columns": (Q.mT.contiguous().mT, lambda t: update_cache(t, Q, CACHE, CACHE, KV_LEN)),
    "update_cache value by columns": (Q.mT.contiguous().mT, lambda t: update_cache(Q, t, CACHE, CACHE, KV_LEN)),
    "update_cache key": (Q, lambda t: update_cache(t, Q, CACHE, CACHE, KV_LEN)),
    "update_cache value": (Q, lambda t: update_cache(Q, t, CACHE, CACHE, KV_LEN)),
    "update_cache k_cache": (CACHE, lambda t: update_cache(Q, Q, t, CACHE, KV_LEN)),
    "update_cache kv_len": (KV_LEN, lambda t: update_cache(Q, Q, CACHE, CACHE, t)),
    "update_cache page_table": (TABLE, lambda t: update_cache(Q, Q, CACHE, CACHE, KV_LEN, page_table=t)),
    "update_cache rope": (ROPE, lambda t: update_cache(Q, Q, CACHE, CACHE, KV_LEN, rope=t)),
    "update_cache query": (Q, lambda t: update_cache(Q, Q, CACHE, CACHE, KV_LEN, rope=ROPE, query=t)),
    "flex_attention kv_num_blocks": (MASK.kv_num_blocks, of_torch("kv_num_blocks")),
    "flex_attention full_kv_indices": (MASK.full_kv_indices, of_torch("full_kv_indices")),
    "flex_attention scale": (torch.tensor(0.5), lambda t: flex_attention(Q, Q, Q, scale=t)),
}
WRAPPED = {
    "fake": (FakeTensorMode().from_tensor, "FakeTensor"),
    "meta": (lambda t: t.to("meta"), "meta"),
    "two tensors": (lambda t: TwoTensor(t.contiguous(), t.contiguous().clone()), "TwoTensor"),
    "of torch.func": (leaked, "torch.func"),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_they_are_refused_in_words(argument):
    """Before and after a call with an ordinary tensor, whose shape, dtype and device they share."""
    good, call = ARGUMENTS[argument]
    name, wrong = argument.split()[1].removesuffix("_mod"), []
    kinds = {**WRAPPED, "freed": (freed, "memory was freed"), "freed view": (freed_view, "memory was freed")}
    for again in (False, True):
        for kind, (make, words) in kinds.items():
            if kind == "of torch.func" and good.dtype not in (torch.float32, torch.float16):
                continue
            try:
                call(make(good))
                wrong.append((kind, again, "accepted"))
            except REFUSED as error:
                # a launch that gets an address knows no names
                if words.lower() not in str(error).lower() or (name not in str(error) and not kind.startswith("freed")):
                    wrong.append((kind, again, str(error)))
            except Exception as error:
                if "storage of size 0" not in str(error):  # torch's words when it makes a view
                    wrong.append((kind, again, error))
        call(good)
    assert not wrong


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_is_freed_before_the_backward_pass_is_missed(device):
    q, k, bias, d_out = (torch.randn(shape).to(device) for shape in ((1, 2, 20, 16), (1, 2, 20, 16), (20, 20), (1, 2, 20, 16)))
    for tensor in (k, bias, d_out):
        out = flex_attention(q.requires_grad_(), k, k, lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx])
        size = tensor.untyped_storage().nbytes()
        kept = tensor.clone()
        tensor.untyped_storage().resize_(0)
        with pytest.raises(NotImplementedError, match="memory was freed"):
            torch.autograd.grad(out, q, d_out)
        tensor.untyped_storage().resize_(size)
        tensor.data.copy_(kept)


def test_tensors_without_elements_need_no_memory():
    q = torch.randn(1, 2, 0, 16)
    assert flex_attention(q, Q, Q).shape == (1, 2, 0, 16)
    assert not flex_attention(Q, q, q).any()
    nothing = torch.empty(0)
    torch.testing.assert_close(
        flex_attention(Q, Q, Q, lambda score, b, h, q_idx, kv_idx: score + nothing[kv_idx]), dense_attention(Q, Q, Q)[0].float()
    )
    assert varlen_attention(THREE[:0], THREE[:0], THREE[:0], OFFSETS * 0).shape == (0, 2, 16)


class Loaded(torch.nn.Parameter):
    """A parameter with a class of its own, as loaders of weights have."""


@pytest.mark.parametrize("wanted", [False, True])
def test_parameters_of_a_class_of_their_own_work(wanted):
    slopes = Loaded(torch.tensor([0.1, 0.7]), requires_grad=wanted)
    ordinary = torch.tensor([0.1, 0.7], requires_grad=wanted)
    q = Loaded(Q.clone(), requires_grad=wanted)
    out, expected = flex_attention(q, q, q, mods.alibi(slopes)), flex_attention(Q, Q, Q, mods.alibi(ordinary))
    torch.testing.assert_close(out, expected)
    if wanted:
        torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), s)[0] for o, s in ((out, slopes), (expected, ordinary))))
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: slopes[h] * q_idx > kv_idx, None, 2, 20, 20, "cpu")
    flex_attention(q, q, q, block_mask=mask)
    assert "PORTABLE" in explain(q, q, q, mods.alibi(slopes))


def test_a_mod_that_is_traced_at_every_call_captures_the_same_kinds():
    def score_mod(score, b, h, q_idx, kv_idx):
        try:
            return score + table[q_idx, kv_idx]
        except IndexError:
            return score

    for kind, (make, words) in {**WRAPPED, "freed": (freed, "memory was freed")}.items():
        table = make(torch.zeros(20, 20))
        with pytest.raises((ModError, *REFUSED), match="captures table") as caught:
            flex_attention(Q, Q, Q, score_mod)
        assert words.lower() in str(caught.value).lower(), kind


def test_operators_of_torch_library_unwrap_or_refuse():
    """torch hands a wrapper its call, and the wrapper makes calls with what it holds."""
    attend = torch.ops.flexpress.scaled_dot_product_attention
    two = attend(TwoTensor(Q, Q.neg()), Q, Q)
    torch.testing.assert_close((two.a, two.b), (attend(Q, Q, Q), attend(Q.neg(), Q, Q)))
    assert attend(Q.to("meta"), Q.to("meta"), Q.to("meta")).is_meta
    for lost in (freed, freed_view):
        with pytest.raises(NotImplementedError, match="memory was freed"):
            attend(lost(Q), Q, Q)
    step = torch.ops.flexpress.mha_with_cache
    qkv, position = torch.randn(1, 3, 32), torch.tensor([0])
    for lost in (freed, freed_view):
        with pytest.raises(NotImplementedError, match="memory was freed"):
            step(qkv, qkv, qkv, position, lost(CACHE), CACHE)


def test_complex_views_are_read_with_their_values():
    """Their real and imaginary parts, that is, also of the conjugate."""
    z = torch.randn(1, 2, 20, 16, dtype=torch.complex64)
    for view in (z.real, z.imag, z.conj().real, z.conj().imag, z.mH.imag.mT):
        torch.testing.assert_close(flex_attention(view, view, view), flex_attention(*[view.clone()] * 3))
    with pytest.raises(TypeError, match="query has dtype torch.complex64"):
        flex_attention(z.conj(), z.conj(), z.conj())
