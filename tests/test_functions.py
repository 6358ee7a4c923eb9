"""torch.func through attention: grad, vjp, jvp, vmap over batches and over what mods capture, jacobians and hessians, functional_call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from flexpress import (
    BlockMask,
    create_block_mask,
    create_mask,
    flash_attn,
    flex_attention,
    mods,
    scaled_dot_product_attention,
    varlen_attention,
)
from flexpress.flash import flash_attn_func
from support.dense import dense_attention
from support.devices import DEVICES
from support.tangents import assert_as_exact

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BATCHES = {  # of q, k, v, slopes and lengths: where each has the mapped dimension
    "all": (0, 0, 0, 0, 0),
    "queries": (0, None, None, None, None),
    "keys": (None, 1, 2, None, None),
    "slopes": (None, None, None, 1, None),
    "lengths": (None, None, None, None, 0),
}


def tensors(device: str, batch: int = 2, length: int = 9) -> list[torch.Tensor]:
    """q, k, v, slopes and lengths, by which a mask and a score_mod see the batch."""
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, 2, length, 8), (batch, 1, length + 4, 8), (batch, 1, length + 4, 4), (batch, 2)
    return [
        *(torch.randn(s, generator=generator).to(device) for s in shapes),
        torch.randint(3, length + 4, (batch,), generator=generator).to(device),
    ]


def attention(attend):
    """Both attentions with the same mods, of q, k, v, slopes and lengths: out and lse."""

    def call(q, k, v, slopes, lengths):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score * slopes[b, h]) * 2 - slopes[b, h] * 0.1 * (q_idx - kv_idx)

        return attend(q, k, v, score_mod, lambda b, h, q_idx, kv_idx: kv_idx < lengths[b] + q_idx // 2)

    return call


ours = attention(lambda q, k, v, s, m: flex_attention(q, k, v, s, mask_mod=m, enable_gqa=True, return_lse=True))
theirs = attention(lambda q, k, v, s, m: dense_attention(q, k, v, s, m)[:2])


def exact(x) -> tuple:
    """Floats in float64."""
    return tuple(t.double() if t.is_floating_point() else t for t in x)


def loss(attend):
    def of(floats, lengths):
        out, lse = attend(*floats, lengths)
        return out.square().sum() + lse.pow(3).sum()

    return of


def check(transform, *x) -> None:
    """What a transform makes of both attentions is the same."""
    found = tree_leaves(transform(ours)(*x))
    wanted = tree_leaves(transform(theirs)(*torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, x)))
    assert_as_exact(found, wanted, wanted, torch.float32)


TRANSFORMS = {  # of a function of floats (a tuple) and lengths
    "grad": lambda attend: grad(loss(attend)),
    "vjp": lambda attend: lambda x, n: vjp(lambda x: attend(*x, n), x)[1](tuple(t.detach().cos() for t in attend(*x, n))),
    "jvp of grad": lambda attend: lambda x, n: jvp(lambda x: grad(loss(attend))(x, n), (x,), (tuple(t.sin() for t in x),)),
    "grad of grad": lambda attend: grad(lambda x, n: sum(g.square().sum() for g in grad(loss(attend))(x, n))),
    "grad of jvp": lambda attend: grad(lambda x, n: sum(t.square().sum() for t in jvp(lambda *x: attend(*x, n), x, x)[1])),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(name, device):
    *floats, lengths = tensors(device)
    check(TRANSFORMS[name], tuple(floats), lengths)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BATCHES)
def test_vmap(name, device):
    """Mods go on to see the batch that they know, and what they capture may be mapped."""
    plain, dims = tensors(device), BATCHES[name]
    several = [tensors(device, 6)[i].unflatten(0, (3, 2)).movedim(0, dim or 0) for i, dim in enumerate(dims)]
    x = [t if dim is None else s for t, s, dim in zip(plain, several, dims, strict=True)]
    check(lambda attend: vmap(attend, in_dims=dims), *x)
    if name in ("all", "slopes"):
        check(lambda attend: vmap(lambda *x: grad(loss(attend))(x[:4], x[4]), in_dims=dims), *x)


@pytest.mark.parametrize("device", DEVICES)
def test_nested_vmap(device):
    x = [t.unflatten(0, (2, 3, 1)) for t in tensors(device, 6)]
    check(lambda attend: vmap(vmap(attend), in_dims=1), *x)
    check(lambda attend: vmap(vmap(attend, in_dims=(0, None, None, None, None)), in_dims=(0, 0, 0, 0, 0)), x[0], *(t[:, 0] for t in x[1:]))


@pytest.mark.parametrize("device", DEVICES)
def test_tangents_inside_and_outside_of_vmap(device):
    *floats, lengths = (t.unflatten(0, (2, 1)) for t in tensors(device))
    floats = tuple(floats)
    check(lambda attend: vmap(lambda x, n: jvp(lambda *x: attend(*x, n), x, tuple(t.cos() for t in x))), floats, lengths)
    check(lambda attend: lambda x, n: jvp(lambda *x: vmap(attend)(*x, n), x, tuple(t.cos() for t in x)), floats, lengths)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_which_nothing_is_there(device):
    """The tangent of a loss that is linear: torch's gradients are then zeros without memory."""
    q, k, v, weights = (torch.randn(1, 1, 5, 8, device=device) for _ in range(4))

    def along(attend, k):
        return jvp(lambda k: (attend(q, k, v) * weights).sum(), (k,), (k.sin(),))[1]

    def dense(q, k, v):
        return (q @ k.mT / 8**0.5).softmax(-1) @ v

    torch.testing.assert_close(grad(along, 1)(flex_attention, k), grad(along, 1)(dense, k), rtol=1e-3, atol=1e-5)
    zeros = torch._efficientzerotensor(q.shape, device=device)
    x = q.clone().requires_grad_()
    (found,) = torch.autograd.grad(flex_attention(x, k, v), x, zeros)
    assert not found.any()


@pytest.mark.parametrize("device", DEVICES)
def test_jacobians_and_hessians(device):
    q, k, v, slopes, lengths = tensors(device, 1, 2)

    def of_some(attend):
        return lambda q, slopes: attend(q, k.to(q.dtype), v.to(q.dtype), slopes, lengths)

    for jacobian in (jacrev, jacfwd):
        check(lambda attend, jacobian=jacobian: jacobian(of_some(attend), argnums=(0, 1)), q, slopes)
    check(lambda attend: hessian(lambda q, slopes: of_some(attend)(q, slopes)[0].square().sum(), argnums=(0, 1)), q, slopes)


@pytest.mark.parametrize("device", DEVICES)
def test_masks_made_before(device):
    """One that all batch entries share, and one of each."""
    *floats, _ = tensors(device, 6, 20)
    x = [t.unflatten(0, (3, 2)) for t in floats[:3]]
    starts = torch.tensor([2, 5], device=device)
    for mask_mod, batch in ((mods.causal, None), (lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + starts[b], 2)):
        mask = create_block_mask(mask_mod, batch, None, 20, 24, device, 16)
        found = vmap(lambda *x, mask=mask: flex_attention(*x, block_mask=mask, enable_gqa=True))(*x)
        wanted = torch.stack([flex_attention(*each, block_mask=mask, enable_gqa=True) for each in zip(*x, strict=True)])
        torch.testing.assert_close(found, wanted)

        def total(*x, mask=mask):
            return flex_attention(*x, block_mask=mask, enable_gqa=True).square().sum()

        slopes = vmap(grad(total))(*x)
        wanted = torch.stack([grad(total)(*each) for each in zip(*x, strict=True)])
        torch.testing.assert_close(slopes, wanted)
        torch.testing.assert_close(grad(lambda *x, total=total: vmap(total)(*x).sum())(*x), wanted)
        moved = jvp(lambda q, total=total: vmap(total)(q, *x[1:]).sum(), (x[0],), (x[0],))[1]
        torch.testing.assert_close(moved, (wanted * x[0]).sum(), rtol=1e-4, atol=1e-4)


MASKS_MADE = {
    "ours": lambda mod, device: create_block_mask(mod, None, None, 20, 20, device, 16),
    "torch's": lambda mod, device: torchs.create_block_mask(mod, None, None, 20, 20, device=device, BLOCK_SIZE=16),
    "of lists": lambda mod, device: BlockMask.from_kv_blocks(
        torch.ones(1, 1, 2, dtype=torch.int32, device=device) + torch.arange(2, device=device).int(),
        torch.arange(2, device=device).int().expand(1, 1, 2, 2).contiguous(),
        BLOCK_SIZE=16,
        mask_mod=mod,
        seq_lengths=(20, 20),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["ours", "torch's", "of lists"])
def test_masks_made_inside(name, device):
    """As a model makes its mask in each forward pass: a mask has no derivative."""
    q, k, v = (torch.randn(1, 2, 20, 8, device=device) for _ in range(3))
    reach = torch.tensor(7, device=device)

    def attend(q, reach):
        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < reach)

        return flex_attention(q, k, v, block_mask=MASKS_MADE[name](mask_mod, device))

    def masked(q, reach):
        return flex_attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < reach))

    for along in (
        lambda f: jvp(lambda q: f(q, reach), (q,), (k,))[1],
        lambda f: grad(lambda q: f(q, reach).square().sum())(q),
        lambda f: jvp(grad(lambda q: f(q, reach).square().sum()), (q,), (k,))[1],
        lambda f: vmap(lambda q: f(q, reach))(torch.stack([q, k])),
        lambda f: grad(lambda q, far: f(q, far).square().sum(), (0, 1))(q, reach.float())[0],
    ):
        torch.testing.assert_close(along(attend), along(masked), rtol=1e-4, atol=1e-5)
    if name == "ours":
        with pytest.raises(NotImplementedError, match="captures .*, which is mapped by vmap.*pass mask_mod="):
            vmap(lambda far: attend(q, far))(torch.stack([reach, reach]))


@pytest.mark.parametrize("device", DEVICES)
def test_dense_masks_made_inside(device):
    reach = torch.tensor(2.0, device=device)

    def count(q, reach):
        return (q.sum() * create_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < reach, 1, 1, 4, 4, device)).sum()

    assert grad(count)(torch.ones(3, device=device), reach).tolist() == [13.0] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_in_inference_mode(device):
    """As likelihoods of flows are evaluated. Torch 2.11 has tangents of zero there, of any function."""

    def dense(q, k, v):
        return (q @ k.mT / 8**0.5).softmax(-1) @ v

    with torch.inference_mode():
        q, k, v = torch.randn(3, 1, 2, 12, 8, device=device).unbind()
        found, wanted = (jvp(lambda q, f=f: f(q, k, v), (q,), (k,)) for f in (flex_attention, dense))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        if not wanted[1].any():
            pytest.skip("this torch has no tangents in inference mode")
        found, wanted = (jvp(grad(lambda q, f=f: f(q, k, v).square().sum()), (q,), (k,)) for f in (flex_attention, dense))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_batched_gradients(device):
    """vmap of the backward pass of a plain call."""
    q = torch.randn(2, 2, 9, 8, device=device, requires_grad=True)
    starts = torch.tensor([2, 5], device=device)
    out = flex_attention(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + starts[b])
    weights = torch.randn(3, *out.shape, device=device)
    found = vmap(lambda w: torch.autograd.grad(out, q, w, retain_graph=True)[0])(weights)
    torch.testing.assert_close(found, torch.stack([torch.autograd.grad(out, q, w, retain_graph=True)[0] for w in weights]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_several_gradients_at_once(dropout_p, device):
    """As is_grads_batched=True and vectorize=True ask for them."""
    q, k, v, slopes = (t.to(device) for t in (*torch.randn(3, 1, 2, 9, 8).unbind(), torch.rand(2)))
    dropout = {"dropout_p": dropout_p, "dropout_seed": torch.tensor([4], device=device)} if dropout_p else {}
    weights = torch.randn(3, 1, 2, 9, 8, device=device)

    def attend(q, k, v, slopes):
        return flex_attention(q, k, v, mods.alibi(slopes), mask_mod=mods.causal, **dropout)

    x = [t.requires_grad_() for t in (q, k, v, slopes)]
    out = attend(*x)
    found = torch.autograd.grad(out, x, weights, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, x, w, retain_graph=True) for w in weights]
    for several, alone in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(several, torch.stack(alone), rtol=1e-5, atol=1e-6)
    functional = torch.autograd.functional
    of_some = [
        lambda vectorize: functional.jacobian(lambda q: attend(q, k, v, slopes)[:, :, 4:6, :2], q, vectorize=vectorize),
        lambda vectorize: functional.hessian(lambda s: attend(q, k, v, s).square().sum(), slopes, vectorize=vectorize),
    ]
    for run in of_some:
        torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-5)
    (forces,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)  # a force field's, and its Hessian
    rows = torch.eye(forces.numel(), device=device)[40:44]
    (found,) = torch.autograd.grad(forces.flatten(), q, rows, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(forces.flatten(), q, row, retain_graph=True)[0] for row in rows]
    assert found.any()
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_functional_call_of_an_ensemble(device):
    """Gradients of each example, and of each of several models, whose learned bias the mod captures."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.bias = torch.nn.Linear(8, 24), torch.nn.Parameter(torch.randn(2, 16))

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(-2, -3)[None] for t in self.project(x).chunk(3, -1))
            return flex_attention(q, k, v, lambda s, b, h, i, j: s + self.bias[h, i - j + 8], mask_mod=mods.causal).square().sum()

    layers, x = [Layer().to(device) for _ in range(2)], torch.randn(3, 8, 8, device=device)
    stacked, _ = torch.func.stack_module_state(layers)

    def one(parameters, x):
        return functional_call(layers[0], parameters, (x,))

    found = vmap(vmap(grad(one), in_dims=(None, 0)), in_dims=(0, None))(stacked, x)
    for i, layer in enumerate(layers):
        for j, example in enumerate(x):
            wanted = torch.autograd.grad(layer(example), list(layer.parameters()))
            for (name, _), g in zip(layer.named_parameters(), wanted, strict=True):
                torch.testing.assert_close(found[name][i, j], g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_other_front_doors(device):
    q = torch.randn(3, 2, 12, 8, device=device)
    ends = torch.tensor([0, 5, 12], device=device, dtype=torch.int32)
    doors = [
        lambda q: scaled_dot_product_attention(q[None], q[None], q[None], is_causal=True),
        lambda q: flash_attn_func(q.transpose(0, 1)[None], q.transpose(0, 1)[None], q.transpose(0, 1)[None], causal=True),
        lambda q: varlen_attention(*[q.transpose(0, 1)] * 3, ends, mask_mod=mods.causal),
    ]
    for door in doors:

        def total(q, door=door):
            return door(q).square().sum()

        torch.testing.assert_close(vmap(door)(q), torch.stack([door(each) for each in q]))
        each = [torch.autograd.functional.vjp(total, t)[1] for t in q]
        torch.testing.assert_close(vmap(grad(total))(q), torch.stack(each))
        out, tangent = jvp(total, (q[0],), (q[1],))
        torch.testing.assert_close(tangent, (each[0] * q[1]).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mod", [None, lambda score, b, h, q_idx, kv_idx: torch.tanh(score) * 2])
def test_gradients_of_what_jvp_gives(mod, device):
    """Of the output and of its tangent, in a direction that depends on the inputs."""
    x = tuple(torch.randn(1, 2, 9, 8, device=device, generator=torch.Generator(device).manual_seed(i)) for i in range(3))

    def loss(attend):
        def of(*x):
            primal, tangent = jvp(lambda *x: attend(*x)[:2], x, tuple(t.cos() for t in x))
            return sum(t.square().sum() for t in (*primal, *tangent))

        return grad(of, argnums=(0, 1, 2))

    found = loss(lambda q, k, v: flex_attention(q, k, v, mod, return_lse=True))(*x)
    wanted = loss(lambda q, k, v: dense_attention(q, k, v, mod))(*exact(x))
    assert_as_exact(found, wanted, wanted, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moving", [(0,), (1, 2), (3,), (0, 1, 2, 3)])
def test_dual_tensors_that_require_gradients(moving, device):
    """Outside of torch.func a gradient has a tangent where the inputs have one, and a tangent has a gradient."""
    *floats, lengths = tensors(device)

    def both(attend, x):
        x = [t.clone().requires_grad_() for t in x]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, t.detach().cos()) if i in moving else t for i, t in enumerate(x)]
            outputs = attend(*duals, lengths)
            total = sum(t.square().sum() + t.pow(3).sum() for t in outputs)
            of_gradients = [forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(total, duals, create_graph=True)]
            tangents = [forward_ad.unpack_dual(t).tangent.square().sum() for t in outputs]
            of_tangents = torch.autograd.grad(sum(tangents), x)
        return [*of_gradients, *(forward_ad.unpack_dual(g).primal for g in of_tangents)]

    wanted = both(theirs, exact(floats))
    assert_as_exact(both(ours, floats), wanted, wanted, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(0, None, None, None, None), (None, 0, 1, None, None), (0, 0, 0, 0, 0)])
def test_vmap_where_all_entries_share_keys(dims, device):
    """Keys and values of one batch entry stay one inside a mapped call, and so does their gradient."""
    several = tensors(device, 6)
    x = [
        t[:n] if dim is None else t.unflatten(0, (3, 2))[:, :n].movedim(0, dim)
        for t, dim, n in zip(several, dims, (2, 1, 1, 2, 2), strict=True)
    ]
    check(lambda attend: vmap(attend, in_dims=dims), *x)
    check(lambda attend: vmap(lambda *x: grad(loss(attend))(x[:4], x[4]), in_dims=dims), *x)
    check(lambda attend: vmap(lambda *x: TRANSFORMS["jvp of grad"](attend)(x[:4], x[4]), in_dims=dims), *x)


@pytest.mark.parametrize("device", DEVICES)
def test_captured_tensors_that_only_steps_read(device):
    """Their gradient is 0, in every way to ask for it."""
    q, steps = torch.randn(1, 2, 9, 8, device=device), torch.rand(9, device=device)

    def total(q, steps):
        return flex_attention(q, q, q, lambda s, b, h, i, j: s + torch.floor(3 * steps[j])).square().sum()

    leaf = steps.clone().requires_grad_()
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    gradients = grad(total, argnums=1)(q, steps), *(torch.autograd.grad(f(q, leaf), leaf)[0] for f in (total, compiled))
    for g in gradients:
        assert g.shape == steps.shape and not g.any()


READERS = {  # score_mods beside a mask_mod that reads `reach`
    "the mask alone": lambda reach, weight: None,
    "both mods": lambda reach, weight: lambda score, b, h, q_idx, kv_idx: score + reach[h] * kv_idx,
    "each its own": lambda reach, weight: lambda score, b, h, q_idx, kv_idx: score + weight[h] * kv_idx,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", READERS)
def test_what_a_mask_reads_may_require_a_gradient(name, device):
    """Through the mask there is none, by torch.func, in second derivatives and behind a tangent."""
    q, k, v = torch.randn(3, 1, 2, 8, 16, device=device).unbind()
    given = q, torch.tensor([2.0, 5.0], device=device), torch.rand(2, device=device)

    def loss_of(attend):
        def loss(q, reach, weight):
            out = attend(q, k, v, READERS[name](reach, weight), lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + reach[h])
            return out.square().sum() + 0 * (reach.sum() + weight.sum())

        return loss

    def penalty(loss):
        x = [t.clone().requires_grad_() for t in given]
        first = torch.autograd.grad(loss(*x), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first if g.requires_grad), x, allow_unused=True)

    def behind_a_tangent(loss):
        x = [t.clone().requires_grad_() for t in given]
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(x[0], torch.ones_like(x[0])), *x[1:])).tangent
            return torch.autograd.grad(tangent, x[0])

    ours = loss_of(lambda q, k, v, s, m: flex_attention(q, k, v, s, mask_mod=lambda b, h, i, j: m(b, h, i, j)))
    exact = loss_of(lambda q, k, v, s, m: dense_attention(q, k, v, s, m)[0])
    for derivative in (grad(ours, (0, 1, 2)), jacrev(ours, (0, 1, 2))):
        for found, wanted in zip(derivative(*given), grad(exact, (0, 1, 2))(*given), strict=True):
            torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-3, atol=1e-3)
    for of in (penalty, behind_a_tangent):
        for found, wanted in zip(of(ours), of(exact), strict=True):
            if wanted is not None:
                torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_there_is_refused_in_words(device):
    q = torch.randn(1, 1, 4, 8, device=device)
    with pytest.raises(NotImplementedError, match="forward mode over forward mode"):
        jacfwd(jacfwd(lambda q: flex_attention(q, q, q)))(q)
    with pytest.raises(NotImplementedError, match="this would be a third"):
        total = lambda q: flex_attention(q, q, q).square().sum()  # noqa: E731
        for _ in range(2):
            total = lambda q, inner=total: grad(inner)(q).square().sum()  # noqa: E731
        grad(total)(q)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mod_that_asks_for_the_device_has_that_of_the_call(device):
    """Also in a thread that has bound no mod before."""
    q, k, v, *_ = tensors(device)

    def a_branch(score, b, h, m, n):
        return score + 0.1 * n if m.device.type == torch.device(device).type else score

    def a_table(score, b, h, m, n):
        return score + torch.arange(9, device=m.device)[n] * 0.1

    for mod in (a_branch, a_table):

        def loss(q, mod=mod):
            return flex_attention(q, k, v, mod, enable_gqa=True).square().sum()

        with ThreadPoolExecutor(1) as another:
            found = another.submit(grad(loss), q).result()
        torch.testing.assert_close(found, torch.autograd.grad(loss(x := q.clone().requires_grad_()), x)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["batch", "packed", "packed, other keys"])
def test_what_is_written_for_flash_attn(kind, device):
    """Gradients, a jvp and vmap over queries and slopes, beside eager mode's gradients and calls one by one."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 9, 4, 16, generator=generator).to(device).unbind()
    slopes, sinks, ends = torch.rand(4, device=device), torch.randn(4, device=device), torch.tensor([0, 4, 9], device=device).int()
    others = torch.tensor([0, 5, 9], device=device).int() if kind.endswith("other keys") else ends
    options = {"causal": True, "window_size": (4, 0), "softcap": 5.0, "sinks": sinks}

    def attend(q, slopes):
        if kind == "batch":
            return flash_attn.flash_attn_func(q[None], k[None], v[None], alibi_slopes=slopes, **options)
        return flash_attn.flash_attn_varlen_func(q, k, v, ends, others, 5, 5, alibi_slopes=slopes, **options)

    x = [t.clone().requires_grad_() for t in (q, slopes)]
    wanted = torch.autograd.grad(attend(*x).sin().sum(), x)
    torch.testing.assert_close(grad(lambda *x: attend(*x).sin().sum(), (0, 1))(q, slopes), wanted, rtol=1e-4, atol=1e-5)
    _, tangent = jvp(lambda s: attend(q, s).sin().sum(), (slopes,), (torch.ones_like(slopes),))
    torch.testing.assert_close(tangent, wanted[1].sum(), rtol=1e-4, atol=1e-5)
    several = torch.stack([q, -q]), torch.stack([slopes, 2 * slopes])
    torch.testing.assert_close(vmap(attend)(*several), torch.stack([attend(*one) for one in zip(*several, strict=True)]))


def test_a_transform_in_one_graph_is_refused_in_words():
    q = torch.randn(1, 1, 9, 8)
    squared = grad(lambda x: flex_attention(x, x, x).square().sum())
    with pytest.raises(Exception, match="Leave out fullgraph=True"):
        torch.compile(squared, backend="eager", fullgraph=True)(q)
