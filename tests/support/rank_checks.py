"""What DTensors and torch's parallel wrappers must compute: that of one process (see ranks.py)."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flexpress import (
    AuxRequest,
    BlockMask,
    cache_clear,
    cache_info,
    cached_attention,
    create_block_mask,
    explain,
    flash_attn,
    flex_attention,
    printed_kernels,
    scaled_dot_product_attention,
    varlen_attention,
)
from flexpress.flash import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from support.ranks import check, from_first_rank


def mesh_of(*sizes: int):
    names = ("dp", "tp")[-len(sizes) :] if len(sizes) == 2 else ("tp",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def tensors(B=2, Hq=4, Hkv=4, length=20, Bkv=None, D=16):
    return [torch.randn(n, h, length, D).requires_grad_() for n, h in ((B, Hq), (Bkv or B, Hkv), (Bkv or B, Hkv))]


def spread(mesh, *pairs):
    """Leaves with the values of tensors, distributed: (tensor, placements), ..."""
    return [distribute_tensor(t.detach(), mesh, placements).requires_grad_(t.requires_grad) for t, placements in pairs]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(call, mesh, leaves, placements, expected=None, gradients=True, unused=()):
    """`call(*leaves)` gives tensors: those of DTensors, and gradients of all leaves but `unused` ones, are those of ordinary tensors."""
    distributed = spread(mesh, *zip(leaves, placements, strict=True))
    found = call(*distributed)
    weights = [torch.randn(t.shape) for t in found]
    learns = [i for i in range(len(leaves)) if i not in unused]

    def of_one_process() -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        wanted = call(*leaves)
        loss = sum((t * w).sum() for t, w in zip(wanted, weights, strict=True))
        return [t.detach() for t in wanted], torch.autograd.grad(loss, [leaves[i] for i in learns]) if gradients else ()

    wanted, wanted_gradients = from_first_rank(of_one_process)
    for have, want in zip(found, wanted, strict=True):
        assert type(have) is DTensor and have.shape == want.shape and have.placements == tuple(expected or placements[0])
        torch.testing.assert_close(have.full_tensor(), want)
    if not gradients:
        return None
    given = [spread(mesh, (w, t.placements))[0] for t, w in zip(found, weights, strict=True)]
    found = torch.autograd.grad(found, [distributed[i] for i in learns], given)
    for have, want in zip(found, wanted_gradients, strict=True):
        torch.testing.assert_close(have.full_tensor(), want)
    return distributed, found


def biased(slopes, table):
    """A score_mod in which every batch entry and head has numbers of its own."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx) + table[b, h] * q_idx

    return score_mod


def stairs(b, h, q_idx, kv_idx):
    """A mask that is another one for every batch entry and head."""
    return q_idx + h + 3 * b >= kv_idx


def attention(q, k, v, slopes, table, **more):
    more.setdefault("mask_mod", stairs)
    return flex_attention(q, k, v, biased(slopes, table), enable_gqa=True, return_lse=True, **more)


def learned(B=2, H=4):
    return [torch.rand(H).requires_grad_(), torch.randn(B, H).requires_grad_()]


SPLITS = ([Shard(0)], [Shard(1)], [Replicate()])


@check(2)
def batch_and_heads():
    """Captured DTensors lie as queries do, or are replicated, or are split where queries are not."""
    for placements, slopes, table in zip(SPLITS, (Replicate(), Shard(0), Shard(0)), (Shard(0), Shard(1), Replicate()), strict=True):
        leaves, found = compare(attention, mesh_of(2), [*tensors(Hkv=2), *learned()], [placements] * 3 + [[slopes], [table]])
        assert [t.placements for t in found] == [t.placements for t in leaves]


@check(2)
def statistics_of_the_probabilities():
    """What rows and columns of a head have lies where the head does; gradients of learned slopes are those of all ranks."""
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
    asked = AuxRequest(entropy=True, top_index=True, column_sums=True)

    def dense(q, k, v, slopes, table, sinks):
        mods = {"score_mod": biased(slopes, table), "mask_mod": stairs}
        return flex_attention(q, k, v, **mods, sinks=sinks, enable_gqa=True, return_aux=asked)[1]

    def packed(q, k, v, slopes, table, sinks):
        return varlen_attention(q, k, v, offsets, score_mod=biased(slopes, table), mask_mod=stairs, sinks=sinks, return_aux=asked)[1]

    for placements, of_heads in zip(SPLITS, (Replicate(), Shard(0), Replicate()), strict=True):
        leaves = [*tensors(Hkv=2), *learned(), torch.randn(4).requires_grad_()]
        lie = [placements] * 3 + [[of_heads], [Replicate()], [of_heads]]
        compare(lambda *x: [dense(*x).entropy, dense(*x).column_sums], mesh_of(2), leaves, lie, unused=(2,))
        compare(lambda *x: [dense(*x).top_index], mesh_of(2), leaves, lie, gradients=False)
    tokens = [t[0].detach().transpose(0, 1).contiguous().requires_grad_() for t in tensors(Hkv=2)]
    leaves, lie = [*tokens, *learned(), torch.randn(4).requires_grad_()], [[Shard(1)]] * 3 + [[Shard(0)], [Replicate()], [Shard(0)]]
    compare(lambda *x: [packed(*x).entropy, packed(*x).column_sums], mesh_of(2), leaves, lie, unused=(2,))
    compare(lambda *x: [packed(*x).top_index], mesh_of(2), leaves, lie, gradients=False)


@check(2)
def sinks_of_all_heads():
    """Distributed as slopes may be, or an ordinary tensor, which gets the gradient of what the rank computes."""
    for placements, of_sinks in zip(SPLITS, (Replicate(), Shard(0), Shard(0)), strict=True):
        leaves = [*tensors(), torch.randn(4).requires_grad_()]

        def call(q, k, v, sinks):
            return flex_attention(q, k, v, mask_mod=stairs, sinks=sinks, return_lse=True)

        compare(call, mesh_of(2), leaves, [placements] * 3 + [[of_sinks]])
        *parts, sinks = (*spread(mesh_of(2), *((t, placements) for t in leaves[:3])), leaves[3])
        found, wanted = (torch.autograd.grad(whole(call(*args, sinks)[0]).sum(), sinks)[0] for args in (parts, leaves[:3]))
        if placements != [Replicate()]:
            dist.all_reduce(found)
        torch.testing.assert_close(found, wanted)


@check(4)
def two_dimensions_of_a_mesh():
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        leaves = [*tensors(), *learned()]
        compare(attention, mesh_of(2, 2), leaves, [placements] * 3 + [[Replicate(), Shard(0)], [Shard(1), Shard(0)]])


@check(4)
def fewer_batch_entries_than_ranks():
    """Two ranks have nothing to compute, and no part of the mask."""
    mask = create_block_mask(stairs, 2, 4, 20, 20, "cpu", 16)
    for more in ({"block_mask": mask, "mask_mod": None}, {}):
        leaves = [*tensors(), *learned()]
        compare(lambda *a, more=more: attention(*a, **more), mesh_of(4), leaves, [[Shard(0)]] * 3 + [[Replicate()]] * 2)


@check(4)
def one_dimension_of_a_mesh():
    """A submesh, as tensor parallel modules have it."""
    mesh = mesh_of(2, 2)["tp"]
    compare(attention, mesh, [*tensors(), *learned()], [[Shard(1)]] * 3 + [[Replicate()], [Replicate()]])


@check(2)
def uneven_parts():
    """Also a rank without any batch entry, and one without a head."""
    for B, H, placement in ((3, 2, Shard(0)), (1, 2, Shard(0)), (2, 3, Shard(1)), (2, 1, Shard(1))):
        compare(attention, mesh_of(2), [*tensors(B, H, H), *learned(B, H)], [[placement]] * 3 + [[Replicate()], [Replicate()]])


@check(2)
def shared_keys():
    """Replicated keys and values: of one batch entry for all, of one head, of fewer heads than query has."""
    for sizes, placement in (({"Bkv": 1}, Shard(0)), ({"Hkv": 1}, Shard(1)), ({"Hkv": 2}, Shard(1)), ({"Hkv": 4}, Shard(1))):
        leaves = [*tensors(**sizes), *learned()]
        leaves, found = compare(attention, mesh_of(2), leaves, [[placement]] + [[Replicate()]] * 4)
        assert [t.placements for t in found] == [t.placements for t in leaves]


@check(4)
def shared_keys_of_more_ranks_than_heads():
    leaves = [*tensors(Hq=8, Hkv=2), *learned(H=8)]
    compare(attention, mesh_of(4), leaves, [[Shard(1)]] + [[Replicate()]] * 4)


@check(2)
def block_masks():
    lists = torch.ones(2, 1, 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32).expand(2, 1, 2, 2)
    masks = {
        "all": create_block_mask(stairs, 2, 4, 20, 20, "cpu", 16),
        "one a batch entry": create_block_mask(lambda b, h, q_idx, kv_idx: q_idx + 5 * b >= kv_idx, 2, None, 20, 20, "cpu", 16),
        "one a head": create_block_mask(lambda b, h, q_idx, kv_idx: q_idx + 5 * h >= kv_idx, None, 4, 20, 20, "cpu", 16),
        "one": create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 20, 20, "cpu", 16),
        "one for all that it tells apart": create_block_mask(
            lambda b, h, q_idx, kv_idx: q_idx + 5 * b >= kv_idx, None, None, 20, 20, "cpu", 16
        ),
        "torch's": torch_block_mask(stairs, 2, 4, 20, 20, "cpu", 16),
        "odd blocks": create_block_mask(stairs, 2, 4, 20, 20, "cpu", (1, 8)),
        "lists that say less": BlockMask((20, 20), *lists, BLOCK_SIZE=16, mask_mod=stairs),
        "a slice": create_block_mask(stairs, 3, 5, 20, 20, "cpu", 16)[1:, 1:],
    }
    both = Shard(0), Shard(1)
    placements = {"all": (*both, Shard(0)), "a slice": both[1:], "one a head": both[1:], "torch's": both[1:], "odd blocks": both[1:]}
    for name, mask in masks.items():

        def call(*leaves, mask=mask):
            return attention(*leaves, block_mask=mask, mask_mod=None)

        for placement in placements.get(name, both[:1]):  # of all, at last it finds this rank's part
            gradients = placement == Shard(1) and name in ("all", "one a head")
            compare(call, mesh_of(2), [*tensors(), *learned()], [[placement]] * 3 + [[Replicate()]] * 2, gradients=gradients)
    compare(lambda *a: attention(*a, block_mask=masks["all"], mask_mod=stairs), mesh_of(2), [*tensors(), *learned()], [[Shard(0)]] * 5)
    wrong = create_block_mask(stairs, 1, 2, 20, 20, "cpu", 16)
    q, k, v = spread(mesh_of(2), *[(t, [Shard(1)]) for t in tensors()])
    with pytest.raises(ValueError, match="block_mask of shape .* its H is 2, which must be 1 or 4, also where query is sharded"):
        flex_attention(q, k, v, block_mask=wrong)


@check(2)
def options_and_statistics():
    leaves = [*tensors(), *learned()]
    distributed = spread(mesh_of(2), *[(t, [Shard(1)]) for t in leaves[:3]], *[(t, [Replicate()]) for t in leaves[3:]])

    def call(q, k, v, slopes, table, **more):
        mod, aux = biased(slopes, table), AuxRequest(lse=True, max_scores=True)
        return flex_attention(q, k, v, mod, scale=0.5, kernel_options={"BLOCK_M": 16}, return_aux=aux, **more)

    for more in ({}, {"deterministic": True}):
        (out, aux), (want, wanted) = call(*distributed, **more), call(*leaves, **more)
        for have, expected in ((out, want), (aux.lse, wanted.lse), (aux.max_scores, wanted.max_scores)):
            torch.testing.assert_close(have.full_tensor(), expected)
        assert not aux.max_scores.requires_grad
    assert explain(*distributed[:3]) == explain(*leaves[:3])
    with torch.no_grad():
        out = flex_attention(*distributed[:3])
        assert not out.requires_grad
        torch.testing.assert_close(out.full_tensor(), flex_attention(*leaves[:3]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert flex_attention(*distributed[:3]).dtype == torch.bfloat16
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves[:3])  # as linear layers give them
    d = [DTensor.from_local(t.chunk(2, 1)[dist.get_rank()], mesh_of(2), [Shard(1)]) for t in (q, k, v)]
    out = flex_attention(*d)
    assert out.stride() == flex_attention(q, k, v).stride()
    out.transpose(1, 2).reshape(2, 20, 64)


@check(2)
def all_ranks_have_the_same_kernels():
    """And no other for other parts, or other tensors."""
    cache_clear()
    parts = spread(mesh_of(2), *zip([*tensors(), *learned()], [[Shard(1)]] * 3 + [[Replicate()]] * 2, strict=True))
    torch.autograd.grad(sum(t.sum() for t in attention(*parts)), parts)
    names = [None, None]
    dist.all_gather_object(names, sorted(p.name for p in printed_kernels()))
    assert names[0] == names[1]
    before = cache_info()
    traces, prints = before.traces, before.prints
    for B, H in ((2, 4), (2, 6), (1, 4)):
        leaves = [*tensors(B, H, H), *learned(B, H)]
        q, k, v, slopes, table = spread(mesh_of(2), *[(t, [Shard(1)]) for t in leaves[:3]], *[(t, [Replicate()]) for t in leaves[3:]])
        attention(q, k, v, slopes, table)
    after = cache_info()
    assert (after.traces, after.prints) == (traces, prints)

    def by_distance(q, k, v):
        return flex_attention(
            q, k, v, lambda score, b, h, q_idx, kv_idx: score + q_idx, mask_mod=lambda b, h, q_idx, kv_idx: q_idx > kv_idx
        )

    q, k, v = tensors()
    by_distance(q, k, v)
    prints = cache_info().prints
    by_distance(*spread(mesh_of(2), *[(t, [Shard(1)]) for t in (q, k, v)]))
    assert cache_info().prints == prints  # a mod that is not told b and h needs no offsets


class Bias(nn.Module):
    def __init__(self, slopes) -> None:
        super().__init__()
        self.slopes = slopes

    def forward(self, score, b, h, q_idx, kv_idx):
        return score + self.slopes[h] * (kv_idx - q_idx)


def alibi(slopes):
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def traced_at_every_call(slopes):
    def score_mod(score, b, h, q_idx, kv_idx):
        try:
            return score + slopes[h] * kv_idx
        except IndexError:
            return score

    return score_mod


MODS = {
    "a module": Bias,
    "computed on the host": lambda t: lambda score, b, h, q_idx, kv_idx: score * (t.exp() + t)[h],
    "its shape": lambda t: lambda score, b, h, q_idx, kv_idx: score + t[h] * t.shape[0],
    "backwards": lambda t: lambda score, b, h, q_idx, kv_idx: score + t[-1 - h] * kv_idx,
    "one element": lambda t: lambda score, b, h, q_idx, kv_idx: score * t[1],
    "0-dim": lambda t: lambda score, b, h, q_idx, kv_idx: score * t.sum(),
    "traced at every call": traced_at_every_call,
}


@check(2)
def captured_dtensors():
    ways = itertools.cycle(((Shard(1), Shard(0)), (Shard(0), Replicate())))
    for make, (split, lies) in zip(MODS.values(), ways, strict=False):

        def call(q, k, v, t, make=make):
            return flex_attention(q, k, v, make(t), return_lse=True)

        compare(call, mesh_of(2), [*tensors(), learned()[0]], [[split]] * 3 + [[lies]])


@check(2)
def captured_dtensors_without_derivative():
    """Also where one rank has nothing to compute, all take part in adding up zeros."""
    (q, k, v), (steps, slopes), mesh = tensors(1), learned(1), mesh_of(2)
    leaves = spread(mesh, *[(t, [Shard(0)]) for t in (q, k, v)], (steps, [Replicate()]), (slopes[0].detach(), [Shard(0)]))
    *qkv, dsteps, dslopes = leaves
    out = flex_attention(*qkv, lambda score, b, h, q_idx, kv_idx: score + torch.floor(dsteps[h] * 3) * dslopes[h] * kv_idx)
    (gradient,) = torch.autograd.grad(out.to_local().square().sum(), dsteps)
    assert gradient.placements == dsteps.placements and not gradient.to_local().any()


@check(2)
def captured_numbers_and_masks():
    """Without gradients: 0-dim numbers, integers, sums that are still pending."""
    q, k, v = tensors()
    window, table = torch.tensor(5), torch.randint(2, (4, 20), dtype=torch.int32)
    mesh = mesh_of(2)
    dq, dk, dv, dwindow, dtable = spread(mesh, *[(t, [Shard(1)]) for t in (q, k, v)], (window, [Replicate()]), (table, [Shard(0)]))
    pending = DTensor.from_local(torch.full((4,), 0.5 * dist.get_rank()), mesh, [Partial()])

    def call(q, k, v, window, table, slopes):
        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx - kv_idx < window) & (table[h, kv_idx] == 0)

        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * slopes[h], mask_mod=mask_mod)

    found = call(dq, dk, dv, dwindow, dtable, pending)
    torch.testing.assert_close(found.full_tensor(), call(q, k, v, window, table, torch.full((4,), 0.5)))


@check(2)
def captured_ordinary_tensors():
    """They are taken as they are; their gradient is this rank's."""
    q, k, v, slopes = *tensors(), learned()[0]
    d = spread(mesh_of(2), *[(t, [Shard(1)]) for t in (q, k, v)])
    out = flex_attention(*d, Bias(slopes))
    torch.testing.assert_close(out.full_tensor(), flex_attention(q, k, v, Bias(slopes)))
    (mine,) = torch.autograd.grad(out.full_tensor().square().sum(), slopes)
    first = 2 * dist.get_rank()
    (wanted,) = torch.autograd.grad(flex_attention(q, k, v, Bias(slopes))[:, first : first + 2].square().sum(), slopes)
    torch.testing.assert_close(mine, wanted)


@check(2)
def packed_sequences():
    q, k, v, slopes = *(torch.randn(40, h, 16).requires_grad_() for h in (4, 2, 2)), learned()[0]
    offsets = torch.tensor([0, 13, 40], dtype=torch.int32)
    other = torch.tensor([0, 20, 40], dtype=torch.int32)

    def call(q, k, v, slopes, cu_seqlens_k=None):
        def mask_mod(b, h, q_idx, kv_idx):
            return q_idx + h >= kv_idx

        return varlen_attention(q, k, v, offsets, cu_seqlens_k, Bias(slopes), mask_mod, return_lse=True)

    for split in ([Shard(1)], [Replicate()]):
        compare(call, mesh_of(2), [q, k, v, slopes], [split] * 3 + [[Shard(0)]])
        compare(lambda *a: call(*a, cu_seqlens_k=other), mesh_of(2), [q, k, v, slopes], [split] * 3 + [[Replicate()]])
    largest = lambda q, k, v: [varlen_attention(q, k, v, offsets, return_aux=AuxRequest(max_scores=True))[1].max_scores]
    compare(largest, mesh_of(2), [q, k, v], [[Shard(1)]] * 3, gradients=False)
    d = spread(mesh_of(2), *[(t, [Shard(0)]) for t in (q, k, v)])
    with pytest.raises(NotImplementedError, match=r"q has placements \[Shard\(dim=0\)\]: .* the sequence is sharded.*ContextPlan\("):
        varlen_attention(*d, offsets)


@check(2)
def flash_functions():
    q, k, v, kv, qkv = (torch.randn(2, 20, *more, 4, 16).requires_grad_() for more in ((), (), (), (2,), (3,)))
    bias = torch.randn(2, 4, 1, 20).requires_grad_()
    mesh, heads, batch, both = mesh_of(2), [Shard(2)], [Shard(0)], [Replicate()]
    compare(lambda q, k, v, b: [flash_attn_func(q, k, v, b, True)], mesh, [q, k, v, bias], [heads, heads, heads, [Shard(1)]])
    compare(lambda q, k, v, b: [flash_attn_func(q, k, v, b)], mesh, [q, k, v, bias], [batch, batch, batch, both])
    compare(lambda q, kv, b: [flash_attn_kvpacked_func(q, kv, b)], mesh, [q, kv, bias], [heads, [Shard(3)], both])
    compare(lambda qkv, b: [flash_attn_qkvpacked_func(qkv, b, True)], mesh, [qkv, bias], [[Shard(3)], both], expected=heads)


@check(2)
def flash_functions_of_today_and_torchs():
    """Slopes of all heads and batch entries; packed sequences; a mask of all."""
    mesh, heads, both = mesh_of(2), [Shard(2)], [Replicate()]
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in tensors(length=12))
    slopes, offsets = torch.rand(2, 4).requires_grad_(), torch.tensor([0, 5, 12], dtype=torch.int32)
    window = dict(window_size=(4, 1), softcap=2.0)
    for lie in (heads, [Shard(0)], both):
        call = lambda q, k, v, s: flash_attn.flash_attn_func(q, k, v, alibi_slopes=s, return_attn_probs=True, **window)[:1]
        compare(call, mesh, [q, k, v, slopes], [lie, lie, lie, both])
    qkv = torch.randn(12, 3, 4, 16).requires_grad_()
    call = lambda qkv, s: [flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 7, alibi_slopes=s, causal=True)]
    compare(call, mesh, [qkv, slopes], [heads, both], expected=[Shard(1)])
    mask = torch.randn(2, 1, 20, 20).requires_grad_()
    for lie in ([Shard(0)], [Shard(1)], both):
        compare(lambda q, k, v, m: [scaled_dot_product_attention(q, k, v, m)], mesh, [*tensors(), mask], [lie, lie, lie, both])


@check(2)
def refusals():
    """On all ranks alike, before anything is launched or communicated."""
    mesh, (q, k, v) = mesh_of(2), tensors()
    at = {p: spread(mesh, *[(t, [p]) for t in (q, k, v)]) for p in (Shard(0), Shard(1), Shard(2), Shard(3), Replicate())}
    strided = [DTensor.from_local(t.detach().chunk(2, 1)[0], mesh, [_StridedShard(1, split_factor=2)]) for t in (q, k, v)]
    partial = [DTensor.from_local(t, mesh, [Partial()]) for t in (q, k, v)]
    fewer = spread(mesh, *[(t, [Shard(1)]) for t in tensors(Hq=6, Hkv=3)])
    three, (_, k_of_3, v_of_3) = spread(mesh, (tensors(Hq=9, Hkv=3)[0], [Shard(1)]))[0], tensors(Hq=9, Hkv=3)
    k_of_3, v_of_3 = spread(mesh, (k_of_3, [Replicate()]), (v_of_3, [Replicate()]))
    other_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    elsewhere = spread(other_mesh, (k, [Replicate(), Shard(1)]))[0]
    slopes, here = spread(mesh, (learned()[0], [Replicate()]))[0], at[Shard(1)]
    there = spread(other_mesh, (learned()[0], [Replicate(), Replicate()]))[0]
    one_each = spread(mesh, *[(t, [p]) for t, p in zip(tensors(Hq=2, Hkv=1), (Shard(1), Replicate(), Replicate()), strict=True)])
    alone = spread(mesh, *[(t, [Shard(0)]) for t in tensors(Bkv=1)])
    cases = {
        lambda: flex_attention(*at[Shard(2)]): (
            NotImplementedError,
            r"query has placements \[Shard\(dim=2\)\]: .* the sequence is sharded.*ContextPlan\(",
        ),
        lambda: flex_attention(*at[Shard(3)]): (NotImplementedError, r"query has placements .* redistribute it, for example query\.redist"),
        lambda: flex_attention(here[0], here[1], at[Shard(2)][2]): (
            NotImplementedError,
            r"value has placements \[Shard\(dim=2\)\].*ContextPlan",
        ),
        lambda: flex_attention(*strided): (NotImplementedError, "query has placements .* is not supported"),
        lambda: flex_attention(*partial): (ValueError, r"query has placements .*: sums that are still to be added up over ranks; redistr"),
        lambda: flex_attention(here[0], k, v): (TypeError, "query is a DTensor but key is a Tensor; make all of them DTensors"),
        lambda: flex_attention(q, here[1], here[2]): (NotImplementedError, "key is a DTensor, a tensor subclass .* beside DTensors"),
        lambda: flex_attention(here[0], *at[Shard(0)][1:]): (
            ValueError,
            r"key has placements .* but query .* they must be alike: key\.red",
        ),
        lambda: flex_attention(at[Replicate()][0], *here[1:]): (ValueError, "key has placements .* must be alike"),
        lambda: flex_attention(at[Shard(0)][0], *at[Replicate()][1:]): (ValueError, "key has placements .* must be alike"),
        lambda: flex_attention(here[0], elsewhere, here[2]): (ValueError, "key is distributed over .*, but query over .*; use one mesh"),
        lambda: flex_attention(*fewer, enable_gqa=True): (ValueError, "query has 6 heads and key 3 on 2 ranks.* split evenly"),
        lambda: flex_attention(three, k_of_3, v_of_3, enable_gqa=True): (ValueError, "query has 9 heads and key 3 on 2 ranks"),
        lambda: flex_attention(*one_each): (ValueError, "query has 2 heads and key/value have 1 .* pass enable_gqa=True"),
        lambda: flex_attention(*alone): (ValueError, "key must have the batch size of query, or 1 and be replicated"),
        lambda: flex_attention(here[0][0], here[1], here[2]): (ValueError, "query has shape"),
        lambda: flex_attention(q, k, v, Bias(slopes)): (NotImplementedError, "score_mod Bias captures slopes, which is a DTensor"),
        lambda: flex_attention(*here, Bias(there)): (ValueError, "captures slopes, a DTensor on .*; distribute it over that, or"),
        lambda: flex_attention(*here, scale=slopes): (
            ValueError,
            r"scale must be a number, got a tensor of torch.float32 and shape \(4,\)",
        ),
        lambda: create_block_mask(lambda b, h, m, n: slopes[h] > 0, 1, 4, 9, 9, "cpu"): (
            NotImplementedError,
            "captures slopes, which is a D",
        ),
        lambda: cached_attention(*here, torch.ones(2, dtype=torch.int32)): (NotImplementedError, "query is a DTensor"),
        lambda: torch.ops.flexpress.scaled_dot_product_attention(*here): (NotImplementedError, "flexpress.* sharding strategy"),
        lambda: flex_attention(*here, block_mask=stairs): (TypeError, "block_mask is a function"),
    }
    for call, (error, words) in cases.items():
        with pytest.raises(error, match="(?s)" + words):
            call()
    compiled = cache_info().compiles
    dist.barrier()
    assert cache_info().compiles == compiled


gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor  # until torch 2.12
gather_with_gradient = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


@check(2)
def pending_collectives():
    """They are waited for; gradients go through."""
    q, k, v, slopes = *tensors(), learned()[0]
    mesh = mesh_of(2)

    def gathered(t):
        found = gather(t.detach().chunk(2)[dist.get_rank()].contiguous(), 0, mesh)
        assert type(found) is collectives.AsyncCollectiveTensor
        return found

    wanted = flex_attention(q, k, v, Bias(slopes)).detach()
    torch.testing.assert_close(flex_attention(gathered(q), gathered(k), gathered(v), Bias(gathered(slopes))), wanted)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    packed = q.detach()[0].transpose(0, 1).contiguous()
    torch.testing.assert_close(
        varlen_attention(gathered(packed), packed, packed, 10 * cu), varlen_attention(packed, packed, packed, 10 * cu)
    )
    with torch.no_grad():
        flash_attn_func(*[gathered(t).transpose(1, 2) for t in (q, k, v)])
    lengths = gathered(torch.tensor([3, 4], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match=r"kv_len is a AsyncCollectiveTensor.*\.wait\(\)"):
        cached_attention(*[t.detach().transpose(1, 2) for t in (q, k, v)], lengths)
    lengths.wait()

    part = q.detach().chunk(2)[dist.get_rank()].requires_grad_()
    found = gather_with_gradient(part, 0, mesh)
    assert type(found) is collectives.AsyncCollectiveTensor and found.requires_grad
    (gradient,) = torch.autograd.grad(flex_attention(found, k, v, Bias(slopes)).square().sum(), part)
    (expected,) = torch.autograd.grad(flex_attention(q, k, v, Bias(slopes)).square().sum(), q)
    torch.testing.assert_close(gradient, 2 * expected.chunk(2)[dist.get_rank()])  # both ranks have computed all

    leaves = spread(mesh, *[(t, [Shard(1)]) for t in (q, k, v)], (slopes, [Shard(0)]))
    pending = [t.redistribute(placements=[Replicate()], async_op=True) for t in leaves[:3]]
    torch.testing.assert_close(flex_attention(*pending, Bias(leaves[3])).to_local().detach(), wanted)


class Attention(nn.Module):
    """A layer with slopes to learn."""

    def __init__(self, width=32, heads=4) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head_dim = width // heads
        self.slopes = nn.Parameter(torch.rand(heads))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        slopes = self.slopes  # of this rank's heads, if that is what there is
        if isinstance(slopes, DTensor) and not isinstance(q, DTensor):
            slopes = slopes.to_local()
        out = flex_attention(q, k, v, alibi(slopes), mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
        return self.wo(out.transpose(1, 2).flatten(-2))


def trained(model, x, share=slice(None)):
    """The output, and gradients by names, of the mean over `share` of the batch."""
    out = model(x[share])
    out = whole(out)
    out.square().mean().backward()
    return out.detach(), {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}


def same_gradients(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda m, name=name: f"{name}: {m}")


def alike():
    """Two equal layers and their input, the same on all ranks."""
    torch.manual_seed(1)
    first, second, x = Attention(), Attention(), torch.randn(4, 20, 32)
    second.load_state_dict(first.state_dict())
    return first, second, x


def my_share(size: int, ranks: int, rank: int) -> slice:
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


@check(2)
def data_parallel():
    model, reference, x = alike()
    share = my_share(4, 2, dist.get_rank())
    out, gradients = trained(DistributedDataParallel(model), x, share)
    wanted, expected = trained(reference, x)
    torch.testing.assert_close(out, wanted[share])
    same_gradients(gradients, expected)


@check(2)
def fully_sharded():
    """The memory of a layer's slopes is freed between its forward and its backward pass."""
    (first, reference, x), (second, more, _) = alike(), alike()
    share = my_share(4, 2, dist.get_rank())
    layers = [fully_shard(layer, mesh=mesh_of(2), reshard_after_forward=True) for layer in (first, second)]
    model = fully_shard(nn.Sequential(*layers, nn.Identity()), mesh=mesh_of(2))
    wanted, expected = trained(nn.Sequential(reference, more), x)
    for _ in range(2):
        out, gradients = trained(model, x, share)
        torch.testing.assert_close(out, wanted[share])
        same_gradients(gradients, expected)
        model.zero_grad()


@check(2)
def flat_parameters():
    """FullyShardedDataParallel makes parameters views of one tensor, whose memory it frees."""
    model, reference, x = alike()
    share = my_share(4, 2, dist.get_rank())
    wanted, expected = trained(reference, x)
    parallel = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    out = parallel(x[share])
    out.square().mean().backward()
    torch.testing.assert_close(out.detach(), wanted[share])
    with FullyShardedDataParallel.summon_full_params(parallel, with_grads=True):
        same_gradients({n.removeprefix("_fsdp_wrapped_module."): p.grad for n, p in parallel.named_parameters()}, expected)


def split_over_ranks(model, mesh, local: bool):
    """Tensor parallel: each rank has some heads. With `local`, layers hand over ordinary tensors, of this rank's heads."""
    columns = ColwiseParallel(use_local_output=local)
    rows = RowwiseParallel(use_local_output=local)
    model = parallelize_module(model, mesh, {"wq": columns, "wk": columns, "wv": columns, "wo": rows})
    slopes = distribute_tensor(model.slopes.detach(), mesh, [Shard(0)])
    model.slopes = nn.Parameter(slopes)
    return model


def dropping(q, k, v, slopes, table):
    seed = torch.tensor([1 << 40 | 12345])
    return flex_attention(
        q, k, v, biased(slopes, table), mask_mod=stairs, enable_gqa=True, dropout_p=0.3, dropout_seed=seed, return_lse=True
    )


@check(4)
def dropout_of_the_whole_batch_and_all_heads():
    """The same weights are dropped as by one process, on any mesh, in every kernel; also those of packed sequences."""
    offsets, seed = torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([77])
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Replicate()]):
        lie = [placements] * 3 + [[Replicate()] * 2] * 2
        compare(dropping, mesh_of(2, 2), [*tensors(Hkv=2), *learned()], lie)
    tokens = [t[0].detach().transpose(0, 1).contiguous().requires_grad_() for t in tensors()]
    attend = lambda q, k, v: [varlen_attention(q, k, v, offsets, dropout_p=0.3, dropout_seed=seed)]  # noqa: E731
    compare(attend, mesh_of(4), tokens, [[Shard(1)]] * 3)
    q, k, v = spread(mesh_of(2, 2), *((t.detach(), [Replicate(), Shard(1)]) for t in tensors()))
    torch.manual_seed(dist.get_rank())  # a seed that is drawn is the first rank's
    drawn = flex_attention(q, k, v, dropout_p=0.3).full_tensor()
    torch.testing.assert_close(drawn, from_first_rank(lambda: drawn))


@check(2)
def a_learned_scale():
    """A DTensor, whose gradient is that of all ranks; also with packed sequences."""
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
    scale = torch.tensor(0.3, requires_grad=True)
    for placements in SPLITS:
        attend = lambda q, k, v, scale: [flex_attention(q, k, v, mask_mod=stairs, scale=scale)]  # noqa: E731
        compare(attend, mesh_of(2), [*tensors(), scale], [placements] * 3 + [[Replicate()]])
    tokens = [t[0].detach().transpose(0, 1).contiguous().requires_grad_() for t in tensors()]
    attend = lambda q, k, v, scale: [varlen_attention(q, k, v, offsets, scale=scale)]  # noqa: E731
    compare(attend, mesh_of(2), [*tokens, scale], [[Shard(1)]] * 3 + [[Replicate()]])


@check(2)
def where_operators_are_seen():
    """Captured DTensors are gathered under modes, too."""
    selective = partial(create_selective_checkpoint_contexts, [torch.ops.flexpress.flex_attention.default])

    def seen(*x):
        found = checkpoint(lambda *x: attention(*x)[0], *x, use_reentrant=False, context_fn=selective)
        with FlopCounterMode(display=False) as counter:
            again = attention(*x)[1]
        assert counter.get_total_flops() > 0
        return [found, again]

    compare(seen, mesh_of(2), [*tensors(Hkv=2), *learned()], [[Shard(1)]] * 3 + [[Shard(0)], [Shard(1)]])


@check(2)
def tensor_parallel():
    for local in (False, True):
        model, reference, x = alike()
        model = split_over_ranks(model, mesh_of(2), local)
        wanted, expected = trained(reference, x)
        for again in (model, lambda x, model=model: checkpoint(model, x, use_reentrant=False)):
            out = whole(again(x))
            out.square().mean().backward()
            torch.testing.assert_close(out.detach(), wanted)
            same_gradients({name: whole(p.grad) for name, p in model.named_parameters()}, expected)
            model.zero_grad()


@check(2)
def compiled_modules():
    """torch.compile around what torch has parallelized."""
    ways = {
        "data parallel": DistributedDataParallel,
        "fully sharded": lambda model: fully_shard(model, mesh=mesh_of(2)),
        "tensor parallel": lambda model: split_over_ranks(model, mesh_of(2), False),
    }
    for name, way in ways.items():
        model, reference, x = alike()
        share = slice(None) if name == "tensor parallel" else my_share(4, 2, dist.get_rank())
        parallel = way(model)  # DistributedDataParallel must live until the backward pass
        out = whole(torch.compile(parallel, backend="aot_eager")(x[share]))
        out.square().mean().backward()
        wanted, expected = trained(reference, x)
        torch.testing.assert_close(out.detach(), wanted[share])
        same_gradients({name: whole(p.grad) for name, p in model.named_parameters()}, expected)


@check(4)
def fully_sharded_and_tensor_parallel():
    model, reference, x = alike()
    mesh = mesh_of(2, 2)
    model = fully_shard(split_over_ranks(model, mesh["tp"], False), mesh=mesh["dp"])
    share = my_share(4, 2, mesh.get_local_rank("dp"))
    out, gradients = trained(model, x, share)
    wanted, expected = trained(reference, x)
    torch.testing.assert_close(out, wanted[share])
    same_gradients(gradients, expected)
