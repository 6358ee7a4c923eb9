"""What DTensors and packed sequences in a context plan must compute: that of one process (see ranks.py)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flexpress import AuxRequest, dropout_mask, flex_attention, mods, varlen_attention
from flexpress.distributed import ContextPlan
from support import context as one_process
from support.context import tensors
from support.dense import dense_attention, factors_of
from support.ranks import check, from_first_rank, here
from support.varlen import offsets


def meshes(*names: str, sizes=()):
    return init_device_mesh(here().type, sizes or (2,) * len(names), mesh_dim_names=names)


def biased(slopes, table):
    """A score_mod in which every batch entry and head has numbers of its own."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx) + 0.01 * table[b, h] * q_idx

    return score_mod


def stairs(b, h, q_idx, kv_idx):
    """A mask that is another one for every batch entry and head."""
    return q_idx + 40 * h - 60 * b >= kv_idx


def in_order(plan, tensor):
    """Rows of a whole tensor in the plan's order; what has no rows as it is."""
    if tensor.dim() < 3:
        return tensor
    return tensor[:, :, plan.order if tensor.shape[2] == plan.q_len else plan.kv_order]


def spread(plan, mesh, tensor, placements):
    """A leaf with the rows of a whole tensor in the plan's order, distributed."""
    return distribute_tensor(in_order(plan, tensor.detach()), mesh, placements).requires_grad_()


def compare(
    mesh, placements, mask_mod=mods.causal, B=None, H=None, q_len=256, kv_len=None, Hkv=2, of_slopes=None, Z=2, dropout_p=0.0, **more
):
    """out, lse, max_scores and all gradients of DTensors are those of dense attention, placed as query and as their tensors are."""
    plan = ContextPlan(mesh["context"], q_len, kv_len, mask_mod, B=B, H=H, device=here(), **more)
    leaves = [*tensors(q_len, kv_len, B=Z, Hq=4, Hkv=Hkv), torch.rand(4), torch.randn(2, 4)]
    everywhere = [Replicate()] * mesh.ndim
    lie = [*placements, of_slopes or everywhere, everywhere]
    distributed = [spread(plan, mesh, t, p) for t, p in zip(leaves, lie, strict=True)]
    wanted = AuxRequest(lse=True, max_scores=True)
    dropout, factors = {}, None
    if dropout_p:
        dropout = {"dropout_p": dropout_p, "dropout_seed": one_process.SEED.to(here())}
        factors = factors_of(dropout_mask(one_process.SEED, (Z, 4, q_len, kv_len or q_len), dropout_p), dropout_p)
    out, of_rows = flex_attention(*distributed[:3], biased(*distributed[3:]), enable_gqa=True, return_aux=wanted, context=plan, **dropout)
    reference = [t.double().requires_grad_() for t in leaves]
    exact, *exact_of_rows = dense_attention(*reference[:3], biased(*reference[3:]), mask_mod, factors=factors)
    for found, expected in zip((out, *of_rows[:2]), (exact, *exact_of_rows), strict=True):
        assert type(found) is DTensor and found.placements == tuple(placements[0]) and found.shape == expected.shape
        torch.testing.assert_close(found.full_tensor().double(), in_order(plan, expected.detach()), rtol=0, atol=2e-5)
    weights = torch.randn(exact.shape)
    # a loss of DTensors would take torch longer than the attention: for a mesh of four dimensions it looks at all ways to place it
    found = torch.autograd.grad(out, distributed, spread(plan, mesh, weights, placements[0]).detach())
    expected = torch.autograd.grad((exact * weights).sum(), reference)
    for have, want, leaf in zip(found, expected, distributed, strict=True):
        assert have.placements == leaf.placements
        want = in_order(plan, want)
        torch.testing.assert_close(have.full_tensor().double(), want, rtol=1e-4, atol=1e-4 * max(1.0, want.abs().max().item()))


@check(2)
def sharded_over_the_sequence():
    compare(meshes("context"), [[Shard(2)]] * 3, q_len=512)
    compare(meshes("context"), [[Shard(2)]] * 3, stairs, B=2, H=4, kv_len=512, sum_gradients=False)


@check(4)
def with_batch_and_heads_over_other_ranks():
    """The batch; heads; heads of queries alone, with all keys on every rank. Masks and biases are told which they are, and captured tensors
    may lie in parts."""
    batch, heads = ([[Shard(dim), Shard(2)]] * 3 for dim in (0, 1))
    compare(meshes("data", "context"), batch, stairs, B=2, H=4)
    compare(meshes("tp", "context"), heads, stairs, B=2, H=4, of_slopes=[Shard(0), Shard(0)])
    compare(meshes("context", "tp"), [[Shard(2), Shard(1)]] + [[Shard(2), Replicate()]] * 2, Hkv=1, Z=1)


@check(4)
def local_parts_of_tensor_parallel_heads():
    """DTensors over a mesh that does not have the plan's ranks: their parts are those of this rank."""
    mesh, whole = meshes("context", "tp"), tensors(300, Hq=4, Hkv=2)
    plan = ContextPlan(mesh["context"], 300, mask_mod=stairs, H=4, device=here())
    q, k, v = (distribute_tensor(plan.shard(t, 2), mesh["tp"], [Shard(1)]) for t in whole)
    out = flex_attention(q, k, v, context=plan, enable_gqa=True).full_tensor()
    exact = dense_attention(*whole, None, stairs)[0]
    torch.testing.assert_close(plan.unshard(out, 2).double(), exact.double(), rtol=0, atol=2e-5)


@check(2)
def parts_of_unequal_lengths():
    """DTensor.from_local of what the plan gives each rank."""
    mesh, whole = meshes("context"), tensors(300)
    plan = ContextPlan(mesh, 300, mask_mod=mods.causal, device=here())
    made = [plan.shard(t, 2).contiguous() for t in whole]
    made = [DTensor.from_local(p, mesh, [Shard(2)], shape=t.shape, stride=t.stride()) for p, t in zip(made, whole, strict=True)]
    out = flex_attention(*made, context=plan, enable_gqa=True)
    assert out.shape == whole[0].shape
    torch.testing.assert_close(
        plan.unshard(out.to_local(), 2).double(), dense_attention(*whole, None, mods.causal)[0].double(), rtol=0, atol=2e-5
    )


@check(2)
def refusals():
    mesh, whole = meshes("context"), tensors(256, Hq=2, Hkv=2)
    plan = ContextPlan(mesh, 256, mask_mod=mods.causal, device=here())
    at = {p: [distribute_tensor(t, mesh, [p]) for t in whole] for p in (Shard(0), Shard(1), Shard(2), Replicate())}
    packed = [t[0].transpose(0, 1).contiguous() for t in whole]
    two = init_device_mesh(here().type, (1, 2), mesh_dim_names=("a", "b"))
    cases = {
        r"query has placements \[Shard\(dim=2\)\]: over mesh dimension 'context' the sequence .*context=ContextPlan\(mesh\['context'\]": (
            lambda: flex_attention(*at[Shard(2)])
        ),
        r"q has placements \[Shard\(dim=0\)\]: .* the sequence is sharded.*ContextPlan": lambda: varlen_attention(
            *(distribute_tensor(t, mesh, [Shard(0)]) for t in packed), torch.tensor([0, 256])
        ),
        r"query has placements .*, but over mesh dimension 'context' the context plan splits the sequence: .*=\[Shard\(dim=2\)": (
            lambda: flex_attention(*at[Shard(1)], context=plan)
        ),
        "key has placements .*, but over mesh dimension 'context'": lambda: flex_attention(
            at[Shard(2)][0], *at[Replicate()][1:], context=plan
        ),
        "query is a DTensor but key is a Tensor": lambda: flex_attention(at[Shard(2)][0], *whole[1:], context=plan),
        r"pass one of its dimensions, such as mesh\['a'\]": lambda: ContextPlan(two, 256),
    }
    for words, call in cases.items():
        with pytest.raises((ValueError, NotImplementedError, TypeError), match=words):
            call()
    dist.barrier()


def compare_packed(lengths, kv_lengths=None, score_mod=None, mask_mod=None, learned=(), Hq=2, Hkv=1, dropout_p=0.0, **options):
    """out, lse and all gradients of packed sequences over ranks are those of dense attention, within each sequence."""
    q_starts, k_starts = (offsets(n) for n in (lengths, kv_lengths or lengths))
    (total_q, total_k), D = (int(t[-1]) for t in (q_starts, k_starts)), 16
    whole = [torch.randn(n, h, D) for n, h in ((total_q, Hq), (total_k, Hkv), (total_k, Hkv))]
    plan = ContextPlan.packed(q_starts, k_starts if kv_lengths else None, mask_mod, device=here(), **options)
    positions = plan.position_ids, plan.kv_position_ids, plan.kv_position_ids
    mine = [t[p].requires_grad_() for t, p in zip(whole, positions, strict=True)]
    wanted = AuxRequest(lse=True, max_scores=True)
    dropout = {"dropout_p": dropout_p, "dropout_seed": one_process.SEED.to(here())} if dropout_p else {}
    out, (lse, max_scores) = varlen_attention(*mine, score_mod=score_mod, return_aux=wanted, context=plan, **dropout)
    (of_q, at_q), (of_k, at_k) = (
        (torch.searchsorted(t, torch.arange(n), right=True) - 1, n) for t, n in ((q_starts, total_q), (k_starts, total_k))
    )
    at_q, at_k = torch.arange(at_q) - q_starts[of_q], torch.arange(at_k) - k_starts[of_k]
    torch.testing.assert_close(plan.positions_in_sequence, at_q[plan.position_ids])

    def mask(b, h, i, j):
        allowed = of_q[i] == of_k[j]
        return allowed & mask_mod(of_q[i], h, at_q[i], at_k[j]) if mask_mod else allowed

    def score(s, b, h, i, j):
        local = at_k[j].clamp(max=int(at_q.max())) if kv_lengths is None else at_k[j]
        return score_mod(s, of_q[i], h, at_q[i], local)

    reference = [t.double().requires_grad_() for t in whole]
    dense = [t.transpose(0, 1)[None] for t in reference]
    factors = None
    if dropout_p:
        kept = dropout_mask(one_process.SEED, (len(lengths), Hq, max(lengths), max(kv_lengths or lengths)), dropout_p)
        factors = factors_of(kept[of_q[:, None], :, at_q[:, None], at_k].permute(2, 0, 1), dropout_p)
    found = dense_attention(*dense, score if score_mod else None, mask, factors=factors)
    exact, exact_lse, exact_max = (t[0].transpose(0, 1) for t in found)
    torch.testing.assert_close(out.double(), exact.detach()[plan.position_ids], rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), exact_lse.detach()[plan.position_ids], rtol=0, atol=2e-5)
    torch.testing.assert_close(max_scores.double(), exact_max.detach()[plan.position_ids], rtol=0, atol=2e-5)
    d_out = torch.randn(exact.shape)
    found = torch.autograd.grad((out * d_out[plan.position_ids]).sum(), [*mine, *learned])
    expected = torch.autograd.grad((exact * d_out).sum(), [*reference, *learned])
    expected = [*(g[p] for g, p in zip(expected, positions, strict=False)), *expected[3:]]
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(
            have.double(), want.double(), rtol=1e-4, atol=1e-4 * max(1.0, want.abs().max().item() if want.numel() else 1.0)
        )
    return plan


@check(2)
def packed_sequences():
    """Of any lengths, cut anywhere. Mods are told the sequence, and positions in it."""
    slopes, table = torch.tensor([0.1, 0.3], requires_grad=True), torch.randn(6, 2, requires_grad=True)
    compare_packed([100, 0, 250, 1, 37, 160], None, mods.alibi(slopes), mods.causal, [slopes])
    compare_packed([100, 0, 250, 1, 37, 160], None, lambda s, b, h, i, j: s + table[b, h] + 0.01 * i - 0.02 * j, None, [table])
    assert compare_packed([90], None, None, mods.sliding_window(20)).layout.remote_blocks.sum() == 0


@check(4)
def packed_sequences_with_other_keys():
    """More keys than queries, fewer, and none."""
    compare_packed([200, 64, 300, 10], [300, 200, 0, 77], None, lambda b, h, i, j: j <= i + 100, Hq=4, Hkv=2)
    plan = compare_packed([400, 300, 324], None, None, mods.causal, head_groups=1)
    assert plan.layout.imbalance < 1.35


@check(4)
def packed_dtensors():
    mesh, starts = meshes("context", "tp"), offsets([100, 156])
    plan = ContextPlan.packed(starts, mask_mod=mods.causal, group=mesh["context"], device=here())
    whole = [torch.randn(256, 4, 16).requires_grad_() for _ in range(3)]
    made = [distribute_tensor(t.detach()[plan.order], mesh, [Shard(0), Shard(1)]).requires_grad_() for t in whole]
    slopes = torch.rand(4)
    out = varlen_attention(*made, score_mod=mods.alibi(slopes), context=plan)
    expected = varlen_attention(*whole, starts, score_mod=mods.alibi(slopes), mask_mod=mods.causal)
    assert out.placements == (Shard(0), Shard(1))
    torch.testing.assert_close(out.full_tensor(), expected.detach()[plan.order])
    found = torch.autograd.grad(out.square().sum(), made)
    for have, want in zip(found, torch.autograd.grad(expected.square().sum(), whole), strict=True):
        torch.testing.assert_close(have.full_tensor(), want[plan.order], rtol=1e-4, atol=1e-5)


@check(4)
def dropout_of_the_whole():
    """Of DTensors whose batch and heads are over other ranks, of heads that ranks exchange, and of packed sequences."""
    mesh, both = meshes("context", "tp"), meshes("context", "heads")
    compare(mesh, [[Shard(2), Shard(1)]] * 3, dropout_p=0.3, q_len=512)
    compare(mesh, [[Shard(2), Shard(0)]] * 3, dropout_p=0.3, head_groups=2)
    compare(both, [[Shard(2), Shard(2)]] * 3, stairs, B=1, H=4, Z=1, heads=both["heads"], dropout_p=0.3)
    one_process.compare(tensors(330, Hq=4, Hkv=2), mods.causal, group=both["context"], heads=both["heads"], dropout_p=0.3)
    compare_packed([200, 64, 300, 10], [300, 200, 0, 77], None, lambda b, h, i, j: j <= i + 100, Hq=4, Hkv=2, dropout_p=0.3)
    compare_packed([100, 250, 37, 160], None, None, mods.causal, Hkv=2, group=both["context"], heads=both["heads"], dropout_p=0.3)


@check(4)
def a_seed_that_is_drawn_is_that_of_all_ranks():
    """The first one's, also where the ranks of DTensors are none of the plan's."""
    mesh = meshes("context", "tp")
    plan = ContextPlan(mesh["context"], 256, mask_mod=mods.causal, device=here())
    whole = [torch.randn(1, 2, 256, 16, generator=torch.Generator().manual_seed(i)).to(here()) for i in range(3)]
    torch.manual_seed(0)
    alone = flex_attention(*whole, mask_mod=mods.causal, dropout_p=0.3)
    for over, placements, local in ((mesh, [Shard(2), Shard(1)], False), (mesh["tp"], [Shard(1)], True)):
        given = [plan.shard(t) if local else in_order(plan, t) for t in whole]
        given = [distribute_tensor(t, over, placements, src_data_rank=None) for t in given]
        torch.manual_seed(dist.get_rank())
        out = flex_attention(*given, context=plan, dropout_p=0.3).full_tensor()
        torch.testing.assert_close(plan.unshard(out) if local else out[:, :, plan.order.argsort()], alone)


def compare_sinks(placements, of_sinks, names=("context",), sums=True):
    """DTensors, packed or not, and sinks that are a DTensor with those placements, or with None a tensor of all heads that every rank has.
    Gradients of these are summed over the plan's ranks, but not over those that have other heads, as of what score_mod captures."""
    mesh, packed = meshes(*names), placements[0] == Shard(0)
    of_plan = {"mask_mod": mods.causal, "device": here(), "sum_gradients": sums}
    if "heads" in names:
        of_plan["heads"] = mesh["heads"]
    starts, logits = offsets([100, 412]), torch.randn(4).requires_grad_()
    if packed:
        whole, plan = [torch.randn(512, 4, 16) for _ in range(3)], ContextPlan.packed(starts, group=mesh["context"], **of_plan)
        made = [distribute_tensor(t[plan.order], mesh, placements) for t in whole]
    else:
        whole, plan = tensors(512, Hq=4, Hkv=4), ContextPlan(mesh["context"], 512, **of_plan)
        made = [distribute_tensor(in_order(plan, t), mesh, placements) for t in whole]

    def of_one_process() -> tuple[torch.Tensor, torch.Tensor]:
        exact = attend(*whole, *([starts] if packed else []), mask_mod=mods.causal, sinks=logits)
        return exact.detach(), *torch.autograd.grad(exact.square().sum(), logits)

    attend = varlen_attention if packed else flex_attention
    exact, wanted = from_first_rank(of_one_process)
    mine = logits.detach() if of_sinks is None else distribute_tensor(logits.detach(), mesh, of_sinks)
    mine.requires_grad_()
    out = attend(*made, context=plan, sinks=mine)
    torch.testing.assert_close(out.full_tensor(), exact[plan.order] if packed else in_order(plan, exact))
    (found,) = torch.autograd.grad(out.square().sum(), mine)
    if of_sinks is not None:
        assert found.placements == tuple(of_sinks)
        found = found.full_tensor()
    else:
        for name in names:
            if name == "tp" or not sums:
                dist.all_reduce(found, group=mesh[name].get_group())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@check(2)
def sinks_of_dtensors():
    for sums in (True, False):
        for sinks in (None, [Replicate()], [Shard(0)]):
            compare_sinks([Shard(2)], sinks, sums=sums)
        compare_sinks([Shard(0)], None, sums=sums)


@check(2)
def sinks_that_one_rank_lacks():
    """DTensors are not gathered before ranks have agreed."""
    rank, mesh = dist.get_rank(), meshes("context")
    sinks = distribute_tensor(torch.randn(4), mesh, [Shard(0)])
    for more, words in (
        ({"sinks": None}, "rank 1 has another sinks than rank 0: None, not"),
        ({"sinks": sinks, "dropout_p": 0.5}, "rank 1 has another dropout_p than rank 0: 0.5, not 0.0"),
    ):
        plan = ContextPlan(mesh, 256, mask_mod=mods.causal, device=here())
        given = [distribute_tensor(in_order(plan, t), mesh, [Shard(2)]) for t in tensors(256, Hq=4, Hkv=4)]
        with pytest.raises(ValueError, match=words):
            flex_attention(*given, context=plan, **(more if rank else {"sinks": sinks}))


@check(4)
def sinks_of_heads_over_other_ranks():
    for sums in (True, False):
        for sinks in (None, [Shard(0), Shard(0)]):
            compare_sinks([Shard(2), Shard(1)], sinks, names=("context", "tp"), sums=sums)
        compare_sinks([Shard(2), Shard(2)], None, names=("context", "heads"), sums=sums)


@check(2)
def sinks_of_packed_sequences():
    starts, whole, logits = offsets([100, 0, 250, 37]), [torch.randn(387, 2, 16) for _ in range(3)], torch.randn(2).requires_grad_()
    exact = varlen_attention(*whole, starts, mask_mod=mods.causal, sinks=logits)
    for sums in (True, False):
        plan = ContextPlan.packed(starts, mask_mod=mods.causal, device=here(), sum_gradients=sums)
        out = varlen_attention(*(t[plan.position_ids] for t in whole), context=plan, sinks=logits)
        torch.testing.assert_close(plan.unshard(out, 0), exact)
        (found,), (wanted,) = (torch.autograd.grad(t.square().sum(), logits, retain_graph=True) for t in (out, exact))
        if not sums:
            dist.all_reduce(found)
        torch.testing.assert_close(found, wanted)


@check(2)
def refusals_of_packed_sequences():
    starts, x = offsets([100, 156]), torch.randn(128, 2, 16)
    plan, other = ContextPlan.packed(starts, device=here()), ContextPlan(q_len=256, device=here())
    cases = {
        "context= must be a plan of packed sequences here: ContextPlan.packed": lambda: varlen_attention(x, x, x, context=other),
        "with context= the plan has cu_seqlens_q: leave it out": lambda: varlen_attention(x, x, x, starts, context=plan),
        "with context= the plan has mask_mod": lambda: varlen_attention(x, x, x, mask_mod=mods.causal, context=plan),
        r"q must have shape \(local tokens, H, D\)": lambda: varlen_attention(x[None], x, x, context=plan),
        "query has shape .* this rank holds 128": lambda: varlen_attention(x[1:], x, x, context=plan),
        "cu_seqlens_q must say where sequences are; it is left out only with context=": lambda: varlen_attention(x, x, x),
        "cu_seqlens_q must be 0 and then the end of each sequence": lambda: ContextPlan.packed(torch.tensor([0, 9, 5]), device=here()),
        "cu_seqlens_q must be a torch.Tensor, got list": lambda: ContextPlan.packed([0, 5], device=here()),
        "cu_seqlens_k must be a torch.Tensor, got list": lambda: ContextPlan.packed(starts, [0, 5], device=here()),
        "cu_seqlens_q must have shape": lambda: ContextPlan.packed(starts[None], device=here()),
        "cu_seqlens_q has dtype torch.float32": lambda: ContextPlan.packed(starts.float(), device=here()),
        "sum_gradients must be True or False, got str": lambda: ContextPlan(q_len=256, device=here(), sum_gradients="no"),
        "must be of as many sequences": lambda: ContextPlan.packed(starts, starts[::2], device=here()),
        "this plan is of one sequence": lambda: other.positions_in_sequence,
    }
    for words, call in cases.items():
        with pytest.raises((ValueError, TypeError), match=words):
            call()


@check(4)
def heads_over_a_second_dimension():
    """Ulysses: ranks that hold a part together attend by some heads each, also where they share key heads, or heads have other masks."""
    mesh = meshes("context", "heads")
    for whole, score_mod, mask_mod, more in (
        (tensors(330, Hq=4, Hkv=2), mods.alibi, mods.causal, {}),
        (tensors(200, 290, B=2, Hq=4, Hkv=1, Bkv=1), None, stairs, {"B": 2, "H": 4, "head_groups": 1}),
    ):
        learned = [torch.rand(4, requires_grad=True)] if score_mod else []
        plan = one_process.compare(
            whole, mask_mod, score_mod and score_mod(*learned), learned, group=mesh["context"], heads=mesh["heads"], **more
        )
        assert abs(len(plan.position_ids) - len(plan._held[1]) / 2) < 1
    with pytest.raises(ValueError, match=r"query has 3 heads and key 3, which 2 ranks \(heads= of the plan\) cannot split"):
        plan = ContextPlan(mesh["context"], 200, heads=mesh["heads"], device=here())
        flex_attention(*(plan.shard(t, 2) for t in tensors(200, Hq=3, Hkv=3)), context=plan)


@check(4)
def heads_over_a_second_dimension_of_others():
    """DTensors, and packed sequences."""
    mesh = meshes("context", "heads")
    compare(mesh, [[Shard(2), Shard(2)]] * 3, stairs, B=1, H=4, Z=1, of_slopes=[Shard(0), Replicate()], heads=mesh["heads"])
    compare_packed([100, 250, 37, 160], None, None, mods.causal, Hkv=2, group=mesh["context"], heads=mesh["heads"])
    mesh = meshes("tp", "one", "context", "heads", sizes=(2, 1, 1, 2))
    compare(mesh, [[Shard(1), Replicate(), Shard(2), Shard(2)]] * 3, stairs, B=1, H=4, Z=1, heads=mesh["heads"])
    turned = init_device_mesh(here().type, (2, 2), mesh_dim_names=("heads", "context"))
    plan = ContextPlan(turned["context"], 512, heads=turned["heads"], device=here())
    x = distribute_tensor(torch.randn(1, 2, 512, 16), turned, [Shard(2), Shard(2)])
    with pytest.raises(ValueError, match="has the ranks that split heads before those that split the sequence"):
        flex_attention(x, x, x, context=plan)


@check(2)
def a_plan_of_one_rank_whose_group_has_no_name():
    """Of a mesh's dimensions with one rank it is that over which the sequence is sharded."""
    mesh = init_device_mesh(here().type, (1, 2, 1), mesh_dim_names=("data", "tensor", "context"))
    plan = ContextPlan(mesh.get_group("context"), 256, mask_mod=mods.causal, device=here())
    whole = [torch.randn(2, 2, 256, 16, generator=torch.Generator().manual_seed(i)).to(here()) for i in range(3)]
    q, k, v = (distribute_tensor(t, mesh, [Shard(0), Shard(1), Shard(2)]) for t in whole)
    out = flex_attention(q, k, v, context=plan).full_tensor()
    assert torch.equal(out, flex_attention(*whole, mask_mod=mods.causal))


@check(2)
def heads_alone():
    mesh = init_device_mesh(here().type, (1, 2), mesh_dim_names=("context", "heads"))
    for length in (150, 129):  # of the latter a rank has no positions
        one_process.compare(tensors(length), mods.causal, mods.softcap(4.0), group=mesh["context"], heads=mesh["heads"])


class Layer(nn.Module):
    """Attention with a bias by distance, that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.slopes = nn.Linear(16, 3 * 32), nn.Parameter(torch.rand(2))

    def forward(self, x, **mask):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(1, 2, 0, 3)[:, None]
        return flex_attention(q, k, v, mods.alibi(self.slopes), **mask)


@check(2)
def fully_sharded_parameters():
    """FSDP2 over the ranks of the plan adds up what each rank's queries give, of captured parameters, too."""
    alone, x = Layer(), torch.randn(300, 16)
    sharded, mesh = copy.deepcopy(alone), meshes("context")
    fully_shard(sharded, mesh=mesh)
    plan = ContextPlan(mesh, 300, mask_mod=mods.causal, device=here(), sum_gradients=False)
    (2 * sharded(x[plan.position_ids], context=plan).square().sum()).backward()  # gradients are averaged
    alone(x, mask_mod=mods.causal).square().sum().backward()
    for found, expected in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-4)


@check(2)
def under_torch_compile():
    """A call is a graph break, and right."""
    whole = tensors(256)
    plan = ContextPlan(q_len=256, mask_mod=mods.causal, device=here())
    packed = ContextPlan.packed(offsets([100, 156]), mask_mod=mods.causal, device=here())
    slopes = torch.rand(2, requires_grad=True)

    def layer(q, k, v):
        out = flex_attention(2 * q, k, v, mods.alibi(slopes), enable_gqa=True, context=plan) + 1
        return out + varlen_attention(*(t[0].transpose(0, 1) for t in (q, k, v)), context=packed).transpose(0, 1)

    mine = [plan.shard(t, 2).requires_grad_() for t in whole]
    found, expected = torch.compile(layer, backend="aot_eager")(*mine), layer(*mine)
    torch.testing.assert_close(found, expected)
    leaves = [*mine, slopes]
    gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected))
    torch.testing.assert_close(*gradients)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="with context= ranks send each other keys.*compile without fullgraph=True"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(*mine)
