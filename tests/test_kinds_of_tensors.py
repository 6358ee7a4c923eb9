"""Tensors that are no ordinary memory: refused in words by every public function, or read with their right values."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import flexpress
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

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")


class Wrapper(torch.Tensor):
    """A subclass that holds another tensor, as DTensor and many others do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride())

    def __init__(self, inner) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*[a.inner if isinstance(a, Wrapper) else a for a in args], **(kwargs or {}))


def nested(layout):
    def make(t):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.nested.nested_tensor([t[0], t[0]], layout=layout)

    return make


KINDS = {
    "fake": (FakeTensorMode().from_tensor, "FakeTensor"),
    "wrapper": (Wrapper, "Wrapper"),
    "sparse": (lambda t: t.to_sparse(), "sparse"),
    "mkldnn": (lambda t: t.float().to_mkldnn(), "_mkldnn"),
    "nested": (nested(torch.strided), "nested"),
    "jagged": (nested(torch.jagged), "nested"),
    "meta": (lambda t: t.to("meta"), "meta"),
    "quantized": (lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.quint8), "quantized|quint8"),
    "complex": (lambda t: t.to(torch.complex64), "complex|integers|int32|float"),
    "zeros without memory": (lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype), "ZeroTensor"),
}
REFUSED = (TypeError, NotImplementedError, ValueError)

Q = torch.randn(1, 2, 20, 16)
MASK = create_block_mask(mods.causal, None, None, 20, 20, "cpu", 16)
CACHE, KV_LEN = torch.zeros(1, 32, 2, 16), torch.tensor([20], dtype=torch.int32)
OFFSETS = torch.tensor([0, 8, 20], dtype=torch.int32)


def captured_by_score(call):
    return lambda t: call(lambda score, b, h, q_idx, kv_idx: score + t[q_idx, kv_idx])


def captured_by_mask(call):
    return lambda t: call(lambda b, h, q_idx, kv_idx: t[q_idx, kv_idx] > 0)


SQUARE, THREE, BSHD = torch.randn(20, 20), torch.randn(20, 2, 16), torch.randn(1, 20, 2, 16)
SLOPES, ANGLES, ENDS = torch.ones(1, 2), torch.ones(32, 4), (OFFSETS, OFFSETS.clone(), 12, 12)


def packed(q, cu_seqlens_k):
    return flash_attn.flash_attn_varlen_func(q, THREE, THREE, OFFSETS, cu_seqlens_k, 12, 12, causal=True)


# (function and argument) -> (a good value, the call with another one)
ARGUMENTS = {
    "flex_attention query": (Q, lambda t: flex_attention(t, Q, Q)),
    "flex_attention key": (Q, lambda t: flex_attention(Q, t, Q)),
    "flex_attention value": (Q, lambda t: flex_attention(Q, Q, t)),
    "flex_attention score_mod": (SQUARE, captured_by_score(lambda mod: flex_attention(Q, Q, Q, mod))),
    "flex_attention mask_mod": (SQUARE, captured_by_mask(lambda mod: flex_attention(Q, Q, Q, mask_mod=mod))),
    "explain query": (Q, lambda t: explain(t, Q, Q)),
    "explain score_mod": (SQUARE, captured_by_score(lambda mod: explain(Q, Q, Q, mod))),
    "varlen_attention q": (THREE, lambda t: varlen_attention(t, THREE, THREE, OFFSETS)),
    "varlen_attention k": (THREE, lambda t: varlen_attention(THREE, t, THREE, OFFSETS)),
    "varlen_attention cu_seqlens_q": (OFFSETS, lambda t: varlen_attention(THREE, THREE, THREE, t)),
    "varlen_attention cu_seqlens_k": (OFFSETS, lambda t: varlen_attention(THREE, THREE, THREE, OFFSETS, t)),
    "varlen_attention score_mod": (SQUARE, captured_by_score(lambda mod: varlen_attention(THREE, THREE, THREE, OFFSETS, score_mod=mod))),
    "cached_attention query": (Q, lambda t: cached_attention(t, CACHE, CACHE, KV_LEN)),
    "cached_attention k_cache": (CACHE, lambda t: cached_attention(Q, t, CACHE, KV_LEN)),
    "cached_attention kv_len": (KV_LEN, lambda t: cached_attention(Q, CACHE, CACHE, t)),
    "cached_attention mask_mod": (SQUARE, captured_by_mask(lambda mod: cached_attention(Q, CACHE, CACHE, KV_LEN, mask_mod=mod))),
    "update_cache key": (Q, lambda t: update_cache(t, Q, CACHE, CACHE, KV_LEN)),
    "update_cache value": (Q, lambda t: update_cache(Q, t, CACHE, CACHE, KV_LEN)),
    "update_cache v_cache": (CACHE, lambda t: update_cache(Q, Q, CACHE, t, KV_LEN)),
    "create_block_mask mask_mod": (SQUARE, captured_by_mask(lambda mod: create_block_mask(mod, None, None, 20, 20, "cpu"))),
    "create_mask mask_mod": (SQUARE, captured_by_mask(lambda mod: create_mask(mod, None, None, 20, 20, "cpu"))),
    "evaluate_mod mod": (SQUARE, captured_by_score(lambda mod: evaluate_mod(mod, torch.zeros(1, 1, 20, 20)))),
    "evaluate_mod scores": (torch.zeros(1, 1, 20, 20), lambda t: evaluate_mod(lambda s, b, h, q_idx, kv_idx: s, t)),
    "flash_attn_func q": (BSHD, lambda t: flash_attn_func(t, BSHD, BSHD)),
    "flash_attn_func bias": (Q[..., :1], lambda t: flash_attn_func(BSHD, BSHD, BSHD, t)),
    "flash_attn_kvpacked_func kv": (torch.stack([BSHD] * 2, 2), lambda t: flash_attn_kvpacked_func(BSHD, t)),
    "flash_attn_qkvpacked_func qkv": (torch.stack([BSHD] * 3, 2), lambda t: flash_attn_qkvpacked_func(t)),
    "flash_attn_func v of 2.8": (BSHD, lambda t: flash_attn.flash_attn_func(BSHD, BSHD, t, causal=True)),
    "flash_attn_func alibi_slopes": (SLOPES, lambda t: flash_attn.flash_attn_func(BSHD, BSHD, BSHD, alibi_slopes=t)),
    "flash_attn_varlen_func q": (THREE, lambda t: packed(t, OFFSETS)),
    "flash_attn_varlen_func cu_seqlens_k": (OFFSETS, lambda t: packed(THREE, t)),
    "flash_attn_varlen_kvpacked_func kv": (
        torch.stack([THREE] * 2, 1),
        lambda t: flash_attn.flash_attn_varlen_kvpacked_func(THREE, t, *ENDS),
    ),
    "flash_attn_with_kvcache q": (BSHD, lambda t: flash_attn.flash_attn_with_kvcache(t, CACHE, CACHE)),
    "flash_attn_with_kvcache v_cache": (CACHE, lambda t: flash_attn.flash_attn_with_kvcache(BSHD, CACHE, t)),
    "flash_attn_with_kvcache k": (BSHD, lambda t: flash_attn.flash_attn_with_kvcache(BSHD, CACHE, CACHE, t, BSHD, cache_seqlens=0)),
    "flash_attn_with_kvcache cache_seqlens": (KV_LEN, lambda t: flash_attn.flash_attn_with_kvcache(BSHD, CACHE, CACHE, cache_seqlens=t)),
    "flash_attn_with_kvcache rotary_sin": (
        ANGLES,
        lambda t: flash_attn.flash_attn_with_kvcache(BSHD, CACHE, CACHE, BSHD, BSHD, ANGLES, t, cache_seqlens=0),
    ),
    "scaled_dot_product_attention key": (Q, lambda t: scaled_dot_product_attention(Q, t, Q)),
    "scaled_dot_product_attention attn_mask": (SQUARE, lambda t: scaled_dot_product_attention(Q, Q, Q, t)),
    "BlockMask kv_num_blocks": (MASK.kv_num_blocks, lambda t: BlockMask((20, 20), t, MASK.kv_indices, BLOCK_SIZE=16)),
    "BlockMask kv_indices": (MASK.kv_indices, lambda t: BlockMask.from_kv_blocks(MASK.kv_num_blocks, t, BLOCK_SIZE=16)),
    "BlockMask full_kv_indices": (
        MASK.full_kv_indices,
        lambda t: BlockMask.from_kv_blocks(MASK.kv_num_blocks, MASK.kv_indices, MASK.full_kv_num_blocks, t, BLOCK_SIZE=16),
    ),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_other_kinds_are_refused_in_words(argument):
    """Before and after a call with an ordinary tensor, whose shape, dtype and device they share."""
    good, call = ARGUMENTS[argument]
    name, wrong = argument.split()[1].removesuffix("_mod"), []
    for again in (False, True):
        for kind, (make, words) in KINDS.items():
            if (kind in ("mkldnn", "jagged") and not good.is_floating_point()) or (kind.startswith("zeros") and "explain" in argument):
                continue  # the latter launches nothing
            try:
                call(make(good))
                wrong.append((kind, again, "accepted"))
            except REFUSED as error:
                text = str(error).lower()
                if name not in text or not any(word.lower() in text for word in words.split("|")):
                    wrong.append((kind, again, text))
            except Exception as error:
                wrong.append((kind, again, error))
        call(good)
    assert not wrong


TRANSFORMS = {
    "vmap": lambda call, t: torch.vmap(call)(torch.stack([t, t])),
    "grad": lambda call, t: torch.func.grad(lambda x: torch.as_tensor(call(x)).sum())(t),
    "jvp": lambda call, t: torch.func.jvp(call, (t,), (t,)),
    "functionalize": lambda call, t: torch.func.functionalize(call)(t),
}
RECORDED = {
    "make_fx": lambda call: make_fx(lambda t: torch.as_tensor(call(t)).clone())(Q),
    "FakeTensorMode": lambda call: _with(FakeTensorMode(allow_non_fake_inputs=True), call),
}


def _with(context, call):
    with context:
        return call(torch.empty(1, 2, 20, 16))


CALLS = {
    "flex_attention": lambda t: flex_attention(t, Q, Q),
    "varlen_attention": lambda t: varlen_attention(THREE, THREE, THREE, OFFSETS),
    "cached_attention": lambda t: cached_attention(Q, CACHE, CACHE, KV_LEN),
    "explain": lambda t: explain(Q, Q, Q) and t,
    "update_cache": lambda t: update_cache(Q, Q, CACHE, CACHE, KV_LEN),
    "evaluate_mod": lambda t: evaluate_mod(mods.softcap(1.0), Q),
    "create_mask": lambda t: create_mask(mods.causal, None, None, 3, 3, "cpu"),
    "create_block_mask": lambda t: create_block_mask(mods.causal, None, None, 20, 20, "cpu").kv_indices,
    "flash_attn_func": lambda t: flash_attn_func(BSHD, BSHD, BSHD),
    "flash_attn_varlen_func": lambda t: packed(THREE, OFFSETS),
    "flash_attn_with_kvcache": lambda t: flash_attn.flash_attn_with_kvcache(BSHD, CACHE, CACHE),
    "scaled_dot_product_attention": lambda t: scaled_dot_product_attention(t, Q, Q),
    "BlockMask": lambda t: BlockMask((20, 20), MASK.kv_num_blocks, MASK.kv_indices, BLOCK_SIZE=16).kv_indices,
}


FOLLOWING = {  # tests/test_functions.py
    *("flex_attention", "varlen_attention", "flash_attn_func", "flash_attn_varlen_func", "scaled_dot_product_attention"),
    *("create_mask", "create_block_mask", "BlockMask"),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_calls_inside_a_transform_are_refused_in_words(transform):
    for name, call in CALLS.items():
        if name in FOLLOWING and transform != "functionalize":
            TRANSFORMS[transform](call, Q)
            continue
        with pytest.raises(NotImplementedError, match=f"^{name} was called "):
            TRANSFORMS[transform](call, Q)


@pytest.mark.parametrize("name", ["explain", "evaluate_mod"])
@pytest.mark.parametrize("recorder", RECORDED)
def test_functions_that_are_no_operators_are_refused_where_torch_records(recorder, name):
    with pytest.raises(NotImplementedError, match=f"^{name} was called where torch records"):
        RECORDED[recorder](CALLS[name])


def test_parameters_without_shape_are_refused_in_words():
    with pytest.raises(NotImplementedError, match="key is an UninitializedParameter, which has no memory yet"):
        flex_attention(Q, torch.nn.UninitializedParameter(), Q)


def test_calls_under_jit_trace_are_refused_in_words():
    with warnings.catch_warnings(), pytest.raises(NotImplementedError, match="under torch.jit.trace"):
        warnings.simplefilter("ignore")
        torch.jit.trace(CALLS["flex_attention"], Q)


def test_tangents_are_refused_in_words():
    """Where they would be lost."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(Q, Q)
        with pytest.raises(NotImplementedError, match="cached_attention was given a dual tensor"):
            cached_attention(dual, CACHE, CACHE, KV_LEN)
        slopes = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises((ModError, NotImplementedError), match="captures slopes, which is a dual tensor"):
            evaluate_mod(mods.alibi(slopes), Q)
        flex_attention(Q, Q, Q)


def test_batched_gradients_inside_of_each_other_are_refused_in_words():
    """is_grads_batched maps the backward pass by means of its own; which of two a tensor is of is not known."""
    q = Q.clone().requires_grad_()
    out = flex_attention(q, Q, Q)

    def several(scale):
        return torch.autograd.grad(out, q, torch.ones(2, *out.shape) * scale, is_grads_batched=True, retain_graph=True)[0]

    with pytest.raises((NotImplementedError, RuntimeError), match="one of several that is_grads_batched=True"):
        torch._vmap_internals._vmap(several)(torch.ones(3))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_may_be_sparse_or_negative_views(device):
    q = Q.clone().to(device).requires_grad_()

    def gradient(loss_of):
        return torch.autograd.grad(loss_of(flex_attention(q, q, q)), q)[0]

    index = torch.zeros(1, 2, 20, 1, dtype=torch.long, device=device)
    torch.testing.assert_close(
        gradient(lambda out: torch.gather(out, 3, index, sparse_grad=True).sum()), gradient(lambda out: torch.gather(out, 3, index).sum())
    )
    weight = torch.randn(1, 2, 20, 16, device=device)
    torch.testing.assert_close(
        gradient(lambda out: (torch.complex(weight, out).conj().imag * weight).sum()), gradient(lambda out: -(out * weight).sum())
    )


class Plain(torch.Tensor):
    """A subclass that is ordinary memory."""


@pytest.mark.parametrize("make", [torch.nn.Parameter, torch.nn.Buffer, lambda t: t.as_subclass(Plain)])
def test_subclasses_that_are_memory_work(make):
    slopes = torch.tensor([0.1, 0.7])
    wanted = dense_attention(Q, Q, Q, mods.alibi(slopes))[0].float()
    out = flex_attention(make(Q.clone()), make(Q.clone()), make(Q.clone()), mods.alibi(make(slopes.clone())))
    torch.testing.assert_close(out.detach().as_subclass(torch.Tensor), wanted)


def test_other_modes_do_no_harm():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        torch.testing.assert_close(flex_attention(Q, Q, Q), dense_attention(Q, Q, Q)[0].float())


def negative(t):
    """The tensor as a view whose memory holds its negative."""
    view = torch.complex(t, -t).conj().imag
    assert view.is_neg() and torch.equal(view, t)
    return view


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position", range(4))
def test_negative_views_have_their_sign_in_attention(position, device):
    """query, key, value and what score_mod captures, forward and gradients; first after a call that saw the same layout without."""
    generator = torch.Generator().manual_seed(position)
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in [(1, 2, 20, 16)] * 3 + [(20, 20)]]

    def results(view):
        tensors = list(leaves)
        tensors[position] = view(tensors[position])
        *qkv, bias = tensors
        out = flex_attention(*qkv, lambda s, b, h, q_idx, kv_idx: s + bias[q_idx, kv_idx])
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    without = results(lambda t: torch.complex(t, t).imag)
    for found, wanted in zip(results(negative), without, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_negative_views_have_their_sign_elsewhere(device):
    table, q = torch.randn(20, 20).to(device), Q.to(device)
    three, lengths, cache, kv_len = (t.to(device) for t in (THREE, OFFSETS, torch.randn(1, 32, 2, 16), KV_LEN))

    def mask(t):
        return lambda b, h, q_idx, kv_idx: t[q_idx, kv_idx] > 0

    def score(t):
        return lambda s, b, h, q_idx, kv_idx: s * t[q_idx, kv_idx]

    calls = {
        "mask_mod": lambda view: flex_attention(q, q, q, mask_mod=mask(view(table))),
        "create_block_mask": lambda view: create_block_mask(mask(view(table)), None, None, 20, 20, device, 16).to_dense(),
        "create_mask": lambda view: create_mask(mask(view(table)), None, None, 20, 20, device),
        "evaluate_mod": lambda view: evaluate_mod(score(view(table)), view(torch.ones(1, 1, 20, 20, device=device))),
        "varlen q": lambda view: varlen_attention(view(three), three, three, lengths),
        "varlen score_mod": lambda view: varlen_attention(three, three, three, lengths, score_mod=score(view(table))),
        "cached score_mod": lambda view: cached_attention(q, cache, cache, kv_len, score_mod=score(view(table))),
        "flash q": lambda view: flash_attn_func(view(q.transpose(1, 2)), BSHD.to(device), BSHD.to(device)),
        "flash bias": lambda view: flash_attn_func(*[BSHD.to(device)] * 3, view(table)[None, None]),
    }
    for name, call in calls.items():
        torch.testing.assert_close(call(negative), call(lambda t: t), msg=name)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: cached_attention(Q, t, CACHE, KV_LEN),
        lambda t: cached_attention(Q, CACHE, t, KV_LEN),
        lambda t: update_cache(Q, Q, t, CACHE, KV_LEN),
        lambda t: update_cache(Q, Q, CACHE, t, KV_LEN),
    ],
)
def test_caches_that_are_negative_views_are_refused(call):
    with pytest.raises(NotImplementedError, match="_cache is a view with the negative bit"):
        call(negative(torch.randn(1, 32, 2, 16)))


def test_block_mask_devices_without_kernels_are_refused():
    for device, error in (("meta", NotImplementedError), ("xla", NotImplementedError), ("nowhere", TypeError), (True, TypeError)):
        with pytest.raises(error, match="device"):
            create_block_mask(mods.causal, None, None, 8, 8, device)
    assert flexpress.create_block_mask(mods.causal, None, None, 8, 8, torch.device("cpu")).shape == (1, 1, 8, 8)


def test_the_cpu_has_no_number():
    """Tensors that are made on cpu:0 are on cpu."""
    ids = torch.zeros(8, dtype=torch.int32)
    for device in ("cpu:0", torch.device("cpu", 0)):
        assert create_block_mask(mods.document(ids), None, None, 8, 8, device) == create_block_mask(
            mods.document(ids), None, None, 8, 8, "cpu"
        )
        assert create_mask(mods.document(ids), None, None, 8, 8, device).all()


def other_strides(t):
    return t.mT.contiguous().mT if t.ndim > 1 else torch.stack([t, t], 1)[:, 0]


def other_order(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim > 2 else t


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: FlopCounterMode(display=False), forward_ad.dual_level])
@pytest.mark.parametrize("masked", [False, True])
def test_hooks_may_lay_out_saved_tensors_anew(around, masked, device):
    q, k, v = (torch.randn(2, 3, 20, 16, device=device, requires_grad=True) for _ in range(3))
    sinks, bias = (torch.randn(n, device=device, requires_grad=True) for n in (3, 20))
    options = {"sinks": sinks}
    if masked:
        options["block_mask"] = create_block_mask(mods.sliding_window(9), None, None, 20, 20, device, (16, 16))
    inputs = q, k, v, bias, sinks

    def gradients(pack, unpack):
        with around():
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out, lse = flexpress.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j], return_lse=True, **options)
            return torch.autograd.grad(out.square().sum() + lse.sum(), inputs)

    wanted = gradients(lambda t: t, lambda t: t)
    for lay_out in (other_strides, other_order):
        for have, want in zip(gradients(lambda t: t, lay_out), wanted, strict=True):
            torch.testing.assert_close(have, want)
    if around is not contextlib.nullcontext:
        return
    with pytest.raises(TypeError, match="hooks of saved tensors gave flex_attention's back in other dtypes"):
        gradients(lambda t: t.half(), lambda t: t)
    with pytest.raises(ValueError, match="hooks of saved tensors gave flex_attention's back in other shapes"):
        gradients(lambda t: t, lambda t: t[:1] if t.ndim == 4 else t)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_inference_mode_beside_gradients(device):
    q = torch.randn(1, 2, 20, 16, device=device, requires_grad=True)
    with torch.inference_mode():
        ids, slopes, seed = (
            torch.arange(20, device=device) // 6,
            torch.ones(2, device=device),
            torch.ones(1, dtype=torch.int64, device=device),
        )
        logits = torch.ones(2, device=device)
    torch.testing.assert_close(*(torch.autograd.grad(flex_attention(q, q, q, sinks=t).sum(), q) for t in (logits, torch.ones_like(slopes))))
    mods = {"score_mod": lambda s, b, h, i, j: s + slopes[h] * j, "mask_mod": lambda b, h, i, j: ids[i] == ids[j]}

    def gradient(create_graph=False, **more):
        return torch.autograd.grad(flexpress.flex_attention(q, q, q, **mods, **more).square().sum(), q, create_graph=create_graph)[0]

    found = gradient(), gradient(True), gradient(dropout_p=0.5, dropout_seed=seed)
    second = torch.autograd.grad(found[1].square().sum(), q)[0]
    ids, slopes, seed = ids.clone(), slopes.clone(), seed.clone()
    torch.testing.assert_close(found, (gradient(), gradient(True), gradient(dropout_p=0.5, dropout_seed=seed)))
    torch.testing.assert_close(second, torch.autograd.grad(gradient(True).square().sum(), q)[0])


def test_tensors_of_inference_mode_that_are_overwritten_before_the_backward_pass():
    """autograd counts no writes to them: the backward pass has what the forward pass read."""
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    with torch.inference_mode():
        slopes, ids, seed, logits = torch.randn(2), torch.arange(20) // 6, torch.tensor([5]), torch.randn(2)
    mods = {"score_mod": lambda s, b, h, i, j: s + slopes[h] * j, "mask_mod": lambda b, h, i, j: ids[i] >= ids[j]}
    out, lse = flex_attention(q, q, q, **mods, sinks=logits, dropout_p=0.3, dropout_seed=seed, return_lse=True)
    found = []
    for _ in range(2):
        found.append(torch.autograd.grad(out.square().sum() + lse.sum(), q, retain_graph=True)[0])
        with torch.inference_mode():
            for tensor in (slopes, seed, logits, ids):
                tensor.add_(1).mul_(3)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["explain", "precompile"])
def test_forward_mode_around_functions_that_do_not_follow_it(name):
    q = torch.randn(1, 2, 9, 16)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"{name} was called inside torch.autograd.forward_ad"):
        getattr(flexpress, name)(q, q, q)
