"""What attention over a sequence that is split over ranks must compute: that of one process (see ranks.py)."""

from __future__ import annotations

import copy
import os
import pickle
import random
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flexpress import AuxRequest, cache_clear, cached_attention, flex_attention, mods
from flexpress.distributed import ContextPlan, split_cached_attention
from flexpress.distributed.exchange import Exchange
from support.context import compare, tensors
from support.dense import dense_attention
from support.ranks import check, here


@check(2)
def causal_of_two_ranks():
    plan = compare(tensors(520), mods.causal)
    assert plan.layout.imbalance < 1.3


@check(2)
def a_single_block():
    compare(tensors(100), mods.causal)


@check(2)
def no_heads():
    plan = ContextPlan(q_len=256, mask_mod=mods.causal, device=here())
    q, k, v = (torch.zeros(2, 0, 128, 16, device=here(), requires_grad=True) for _ in range(3))
    out, lse = flex_attention(q, k, v, context=plan, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert [g.shape for g in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))] == [q.shape] * 3


@check(2)
def no_mask():
    compare(tensors(300, D_V=32), None)


@check(2)
def a_window_with_bias_that_learns():
    slopes = torch.tensor([0.1, 0.3], requires_grad=True)
    compare(tensors(700), mods.sliding_window(150), mods.alibi(slopes), [slopes])


@check(2)
def sinks():
    """Their gradient is summed over ranks, as that of what score_mod captures; or is left to be."""
    whole, logits = tensors(300), torch.randn(2, requires_grad=True)
    exact = flex_attention(*whole, mask_mod=mods.causal, enable_gqa=True, sinks=logits, return_lse=True)
    (wanted,) = torch.autograd.grad(exact[0].square().sum() + exact[1].sum(), logits)
    for sums in (True, False):
        plan = ContextPlan(q_len=300, mask_mod=mods.causal, device=here(), sum_gradients=sums)
        parts = [plan.shard(t, 2).requires_grad_() for t in whole]
        out, lse = flex_attention(*parts, context=plan, enable_gqa=True, sinks=logits, return_lse=True)
        for have, want in zip((out, lse), exact, strict=True):
            torch.testing.assert_close(plan.unshard(have, 2), want)
        (found,) = torch.autograd.grad(out.square().sum() + lse.sum(), logits, create_graph=True)
        if sums:
            with pytest.raises(NotImplementedError, match="flex_attention is differentiable once"):
                found.sum().backward()
        else:
            dist.all_reduce(found.detach())
        torch.testing.assert_close(found, wanted)


@check(2)
def a_seed_of_dropout_is_the_first_rank_s():
    """Where none is given, also if the ranks' generators differ; as torch draws it on that rank."""
    whole, plan = tensors(300), ContextPlan(q_len=300, mask_mod=mods.causal, device=here())
    torch.manual_seed(dist.get_rank())
    parts = [plan.shard(t, 2) for t in whole]
    outs = [flex_attention(*parts, context=plan, enable_gqa=True, dropout_p=0.3) for _ in range(2)]
    rounded = flex_attention(*parts, context=plan, enable_gqa=True, dropout_p=1e-9 if dist.get_rank() else 0.0)  # to a multiple of 2**-14
    torch.testing.assert_close(plan.unshard(rounded, 2), flex_attention(*whole, mask_mod=mods.causal, enable_gqa=True))
    torch.manual_seed(0)
    for out in outs:
        alone = flex_attention(*whole, mask_mod=mods.causal, enable_gqa=True, dropout_p=0.3)
        torch.testing.assert_close(plan.unshard(out, 2), alone)


@check(2)
def a_plan_of_another_mask_is_found():
    mask = mods.causal if dist.get_rank() else mods.sliding_window(20)
    plan = ContextPlan(q_len=1000, mask_mod=mask, device=here())
    q, k, v = (plan.shard(t, 2) for t in tensors(1000))
    for call in (lambda: flex_attention(q, k, v, context=plan, enable_gqa=True), lambda: plan.unshard(q, 2)):
        with pytest.raises(
            ValueError, match="rank 1 has another mask_mod than rank 0: causal.*, not sliding_window.*; rank 1 has another layout"
        ):
            call()


@check(2)
def calls_that_differ_are_found():
    """By all ranks, with the name of the one that differs and of what does; nobody waits."""
    rank, slopes = dist.get_rank(), torch.tensor([0.1, 0.3])
    whole = {n: tensors(256, D=n) for n in (16, 32)}

    def call(n=16, score_mod=None, learns=True, heads=2, plans=None, dtype=None, mask_mod=mods.causal, **more):
        plan = ContextPlan(q_len=256, mask_mod=mask_mod, device=here(), head_groups=plans or 2)
        q, k, v = (plan.shard(t, 2).requires_grad_(learns) for t in whole[n])
        return flex_attention(q[:, :heads], k.to(dtype), v, score_mod, context=plan, enable_gqa=True, **more)

    found = {
        r"rank 1 has another query \(B, H, D\) than rank 0: \(1, 2, 32\) torch.float32, requires_grad, not \(1, 2, 16\)": {"n": 32},
        "rank 1 has another score_mod than rank 0: softcap.*, not None": {"score_mod": mods.softcap(3.0)},
        r"rank 1 has another slopes than rank 0: \(2,\) torch.float64, not None": {"score_mod": mods.alibi(slopes.double())},
        "rank 1 has another query .*: .*float32, not .* requires_grad; rank 1 has another key": {"learns": False},
        r"rank 1 has another query .*: \(1, 1, 16\)": {"heads": 1},
        "rank 1 has another head_groups than rank 0: 1, not 2": {"plans": 1},
        "rank 1 has another max_scores than rank 0: True, not False": {"return_aux": AuxRequest(max_scores=True)},
        r"rank 1 has another sinks than rank 0: \(2,\) torch.float32, not None": {"sinks": slopes},
        "rank 1 has raised ValueError: sinks must have shape|^sinks must have shape": {"sinks": slopes[:1]},
        "rank 1 has another scale than rank 0: 0.5, not 0.25": {"scale": 0.5},
        "key has dtype torch.bfloat16 but query has torch.float32": {"dtype": torch.bfloat16},
    }
    for words, other in found.items():
        with pytest.raises((ValueError, TypeError), match=words):
            call(**(other if rank else {}))
    for name, made in (("mask_mod", mods.sliding_window), ("score_mod", mods.softcap)):
        with pytest.raises(ValueError, match=f"rank 1 has another [a-z_0-9]+ of {name} than rank 0: 11(.0)?, not 10(.0)?"):
            call(**{name: made(10 + rank)})
    with torch.no_grad():
        call(learns=bool(rank))  # nobody wants a gradient
    call()  # after errors, ranks are together


@check(2)
def what_one_rank_raises_is_named_on_the_other():
    plan = ContextPlan(q_len=256, mask_mod=mods.causal, device=here())
    q, k, v = (plan.shard(t, 2) for t in tensors(256))
    q = q[:, :, 1:] if dist.get_rank() else q
    mine = "query has shape .*, but this rank holds 128 of its positions"
    with pytest.raises(ValueError, match=mine if dist.get_rank() else f"^rank 1 has raised ValueError: {mine}"):
        flex_attention(q, k, v, context=plan, enable_gqa=True)


@check(2)
def what_the_front_door_raises_is_told():
    """Arguments that are refused before the plan is asked, on one rank alone."""
    for raised, words, more in (
        (ValueError, "dropout_p must be a number from 0 to 1", {"dropout_p": 2.0}),
        (ValueError, "with context= the plan has the mask", {"mask_mod": mods.causal}),
        (NotImplementedError, "entropy", {"return_aux": AuxRequest(entropy=True)}),
        (TypeError, "key", {"key": None}),
    ):
        plan = ContextPlan(None, 256, mask_mod=mods.causal, device=here())
        q, k, v = (plan.shard(torch.randn(1, 2, 256, 16, device=here())) for _ in range(3))
        with pytest.raises(raised if dist.get_rank() else ValueError, match=words if dist.get_rank() else "rank 1 has raised"):
            flex_attention(**{"query": q, "key": k, "value": v, "context": plan} | (more if dist.get_rank() else {}))


@check(2)
def what_is_written_to_while_a_plan_lives():
    """A mask's tensor between forward and backward pass is found, and lengths of sequences are the plan's own."""
    limit = torch.full((300,), 50, device=here())
    plan = ContextPlan(None, 300, mask_mod=lambda b, h, i, j: (i >= j) & (i - j < limit[i]), device=here())
    q, k, v = (plan.shard(t.to(here())).requires_grad_() for t in torch.randn(3, 1, 2, 300, 16))
    out = flex_attention(q, k, v, context=plan)
    limit.fill_(40)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device=here())
    plan, other = (ContextPlan.packed(t, mask_mod=mods.causal) for t in (ends, ends.clone()))
    ends.copy_(torch.tensor([0, 200, 300]))
    assert torch.equal(plan.positions_in_sequence, other.positions_in_sequence)


@check(2)
def lse_of_nothing_is_float32():
    torch.set_default_dtype(torch.bfloat16)
    plan = ContextPlan(None, 256, mask_mod=lambda b, h, i, j: (i < 128) & (j <= i), device=here())
    q, k, v = (plan.shard(torch.randn(1, 2, 256, 16, dtype=torch.float32, device=here())) for _ in range(3))
    out, lse = flex_attention(q, k, v, context=plan, return_lse=True)
    torch.set_default_dtype(torch.float32)
    assert out.dtype == lse.dtype == torch.float32


@check(2)
def what_is_no_part_of_a_sequence():
    whole, plan = torch.randn(2, 300), ContextPlan(q_len=300, kv_len=500, mask_mod=mods.causal, device=here())
    held = len(plan.position_ids)
    cases = {
        rf"dimension 1 of tensor \(2, 300\) has 300 positions, but this rank holds {held} of 300: pass its part": (whole, 1),
        rf"dimension 0 of tensor \(2, 300\) has 2 positions, but this rank holds {held} of 300": (whole, 0),
        "length of the whole is 400 positions, but this plan is for 300 or 500": (whole, 1, 400),
    }
    for words, arguments in cases.items():
        with pytest.raises(ValueError, match=words):
            plan.unshard(*arguments)
    torch.testing.assert_close(plan.unshard(plan.shard(whole, 1), 1), whole)
    for words, arguments in {
        "tensor must be a torch.Tensor, got NoneType": (None,),
        r"dim is 2, but tensor \(2, 300\) has 2 dimensions": (whole, 2),
        "dim is -3; it must be at least -2": (whole, -3),
        "dim must be an integer, got 'x'": (whole, "x"),
    }.items():
        for call in (plan.shard, plan.unshard):
            with pytest.raises((ValueError, TypeError), match=words):
                call(*arguments)
    with pytest.raises(ValueError, match="dimension 1 has 301 positions, but this plan is for 300 or 500"):
        plan.shard(torch.randn(2, 301), 1)


@check(2)
def a_captured_tensor_that_is_sharded():
    """The plan puts it together, and gives each rank the gradient of its part."""
    bias, whole = torch.randn(300), tensors(300)
    plan = ContextPlan(q_len=300, mask_mod=mods.causal, device=here(), sum_gradients=False)
    q, k, v = (plan.shard(t, 2) for t in whole)
    mine, one = plan.shard(bias, 0).requires_grad_(), bias.clone().requires_grad_()
    table = plan.unshard(mine, 0)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j] * table[i], context=plan, enable_gqa=True)
    exact = dense_attention(*whole, lambda s, b, h, i, j: s + one[j] * one[i], mods.causal)[0]
    torch.testing.assert_close(out.double(), exact.detach()[:, :, plan.position_ids], rtol=0, atol=2e-5)
    (expected,) = torch.autograd.grad(exact.square().sum(), one)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), mine)[0], plan.shard(expected, 0), rtol=1e-4, atol=1e-4)


@check(2)
def captured_tensors_that_lie_otherwise_on_a_rank():
    """Their gradients are summed by elements, not as they lie in memory."""
    whole, base = tensors(300), torch.randn(2, 600)
    plan = ContextPlan(q_len=300, mask_mod=mods.causal, device=here())
    table = (base.t().contiguous().t() if dist.get_rank() else base.clone()).requires_grad_()
    one = base.clone().requires_grad_()

    def biased(table):
        return lambda s, b, h, i, j: s + table[h, i - j + 299]

    out = flex_attention(*(plan.shard(t, 2) for t in whole), biased(table), context=plan, enable_gqa=True)
    exact = flex_attention(*whole, biased(one), mask_mod=mods.causal, enable_gqa=True)
    found, wanted = torch.autograd.grad(out.square().sum(), table)[0], torch.autograd.grad(exact.square().sum(), one)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@check(2)
def the_whole_is_differentiable_twice():
    plan = ContextPlan(q_len=300, mask_mod=mods.causal, device=here())
    x = plan.shard(torch.randn(300, 4), 0).requires_grad_()
    (once,) = torch.autograd.grad(plan.unshard(x, 0).pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(once, 2 * 3 * x**2)  # each of two ranks has all of the sum
    (twice,) = torch.autograd.grad(once.square().sum(), x)
    torch.testing.assert_close(twice, 2 * 2 * once.detach() * 6 * x)


@check(2)
def copies_of_a_plan():
    """A module that holds a plan may be copied, also on one rank alone; a plan is not pickled."""
    plan = ContextPlan(q_len=300, mask_mod=mods.causal, device=here())
    q, k, v = (plan.shard(t, 2) for t in tensors(300, Hkv=2))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.plan = plan

        def forward(self):
            return flex_attention(q, k, v, context=self.plan)

    layer = Layer()
    out = layer()
    again = copy.deepcopy(layer) if dist.get_rank() else layer
    torch.testing.assert_close(again(), out, rtol=0, atol=0)
    with pytest.raises(TypeError, match="a ContextPlan is of one rank, so it is not pickled"):
        pickle.dumps(plan)


@check(2)
def a_rank_that_has_forgotten_what_it_traced():
    """Its next call of a kind that ranks have agreed on asks nobody."""
    plan = ContextPlan(q_len=300, mask_mod=mods.causal, device=here())
    q, k, v = (plan.shard(t, 2) for t in tensors(300, Hkv=2))
    calls = [flex_attention(q, k, v, mods.softcap(2.0), context=plan)]
    if dist.get_rank():
        cache_clear()
    calls.append(flex_attention(q, k, v, mods.softcap(2.0), context=plan))
    torch.testing.assert_close(*calls, rtol=0, atol=0)


@check(2)
def masks_by_head_of_a_plan_without_heads():
    plan = ContextPlan(q_len=300, mask_mod=lambda b, h, i, j: i - j < 40 + 100 * h, device=here())
    with pytest.raises(ValueError, match=r"made with H=1, but query has shape \(1, 2, .* pass ContextPlan\(\.\.\., H=\)"):
        flex_attention(*(plan.shard(t, 2) for t in tensors(300, Hkv=2)), context=plan)


@check(2)
def what_torch_does_to_calls():
    """Autocast, a scale that is learned, counters of operations, checkpoints; no second derivative."""
    plan = ContextPlan(q_len=300, mask_mod=mods.causal, device=here())
    q, k, v = (plan.shard(t, 2).requires_grad_() for t in tensors(300, Hkv=2))
    scale = torch.tensor(0.4, requires_grad=True)

    def attend(q, k, v):
        return flex_attention(q, k, v, mods.softcap(3.0), scale=scale, context=plan)

    def gradients(out):
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, scale), retain_graph=True)

    exact = gradients(attend(q, k, v))
    whole = [plan.unshard(t.detach(), 2).requires_grad_() for t in (q, k, v)]
    alone = dense_attention(*whole, mods.softcap(3.0), mods.causal, scale)[0]
    d_scale = torch.autograd.grad(alone.square().sum(), scale)[0]
    torch.testing.assert_close(exact[-1], d_scale, rtol=1e-4, atol=1e-4)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(gradients(attend(q, k, v)), exact)
    for options in ({}, {"context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])}):
        torch.testing.assert_close(gradients(checkpoint(attend, q, k, v, use_reentrant=False, **options)), exact)
    slopes = torch.rand(q.shape[1], requires_grad=True)

    def computes(q):  # of what it captures, which the first call computes while it traces
        return flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score - slopes.exp()[h] * (q_idx - kv_idx), context=plan)

    first = torch.autograd.grad(checkpoint(computes, q, use_reentrant=False).sin().sum(), (q, slopes))
    torch.testing.assert_close(first, torch.autograd.grad(computes(q).sin().sum(), (q, slopes)))
    with torch.autocast(here().type, torch.bfloat16):
        half = gradients(attend(q, k, v))
    assert half[0].dtype == torch.bfloat16
    torch.testing.assert_close([t.float() for t in half], list(exact), rtol=0.1, atol=0.1)
    (d_q,) = torch.autograd.grad(exact[0].square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flex_attention is differentiable once"):
        d_q.sum().backward()
    with pytest.raises(TypeError, match="context must be a ContextPlan .*, got int"):
        flex_attention(q, k, v, context=4)
    for name, given in (("query", (None, k, v)), ("value", (q, k, [1.0]))):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got"):
            flex_attention(*given, context=plan)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        (d_q,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flex_attention is differentiable once"):
        d_q.sum().backward()
    freed = v.detach().clone().requires_grad_()
    attend(q, k, freed)
    freed.untyped_storage().resize_(0)
    with pytest.raises(NotImplementedError, match="value is a tensor whose memory was freed"):
        attend(q, k, freed)


@check(2)
def a_first_call_without_values_is_refused():
    """Ranks tell each other what they raise, which is real where operations are recorded without their values."""
    plan = ContextPlan(q_len=40, mask_mod=mods.causal, device=here())
    q, k, v = (plan.shard(t, 2) for t in tensors(40))
    refused = "context= was called where torch records operations without their values"
    with pytest.raises(NotImplementedError, match=refused), FakeTensorMode() as mode:
        flex_attention(*(mode.from_tensor(t) for t in (q, k, v)), context=plan, enable_gqa=True)
    for tracing_mode in ("real", "fake"):
        with pytest.raises(NotImplementedError, match=refused):
            make_fx(lambda q, k, v: flex_attention(q, k, v, context=plan, enable_gqa=True), tracing_mode=tracing_mode)(q, k, v)
    flex_attention(q, k, v, context=plan, enable_gqa=True)


@check(2)
def tensors_whose_memory_holds_other_values():
    """Views with the negative bit, and gradients that are. On a CPU by Triton's interpreter too, as kernels read memory there."""
    plan = ContextPlan(q_len=140, mask_mod=mods.causal, device=here())
    mine = [plan.shard(t, 2) for t in tensors(140)]
    d_out = torch.randn_like(mine[0])
    for name in ("interpreter", "cpp"):
        with mock.patch.dict(os.environ, {"FLEXPRESS_CPU": name}):
            found = []
            for q, k, v, do in ([t.clone() for t in (*mine, d_out)], [torch._neg_view(-t) for t in (*mine, d_out)]):
                given = [t.requires_grad_() for t in (q, k, v)]
                out = flex_attention(*given, context=plan, enable_gqa=True)
                found.append([out, *torch.autograd.grad(out, given, do)])
            torch.testing.assert_close(*found, rtol=0, atol=0)


@check(2)
def random_problems_of_two_ranks():
    random_problems(3)


@check(4)
def random_problems_of_four_ranks():
    random_problems(2)


def hashed(score, b, h, q_idx, kv_idx):
    """Integers that leave int32."""
    return score + ((q_idx * 2654435761) ^ kv_idx) % 11 * 0.2


def random_problems(count: int):
    """Lengths, heads that share keys, head dims, masks and biases, drawn alike on all ranks; gradients are those of one process."""
    draw = random.Random(dist.get_world_size())
    for _ in range(count):
        Hkv, shared, B = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([1, 2])
        q_len = draw.randrange(1, 450)
        kv_len = draw.choice([q_len, draw.randrange(1, 450)])
        whole = tensors(q_len, kv_len, B, Hkv * shared, Hkv, draw.choice([B, 1]), draw.choice([8, 16]), draw.choice([8, 24]))
        ids = torch.randint(4, (max(q_len, kv_len),)).sort().values
        masks = [None, mods.causal, mods.sliding_window(draw.randrange(1, 300)), lambda b, h, i, j: ids[i] == ids[j]]  # noqa: B023
        slopes = torch.rand(Hkv * shared, requires_grad=True)
        score_mod, learned = draw.choice([(None, []), (mods.alibi(slopes), [slopes]), (mods.softcap(2.0), []), (hashed, [])])
        options = {"head_groups": draw.choice([1, 2, 4]), "dropout_p": draw.choice([0.0, 0.0, 0.3])}
        compare(whole, draw.choice(masks), score_mod, learned, **options)


@check(4)
def documents_over_four_ranks():
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 250, 50, 210]))
    slopes = torch.tensor([0.1, 0.3, 0.02, 0.2], requires_grad=True)
    compare(tensors(610, Hq=4, Hkv=2), lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), mods.alibi(slopes), [slopes])


@check(4)
def more_keys_than_queries_and_masks_by_head():
    shift = torch.tensor([0, 200])
    compare(tensors(300, 640, B=2, Bkv=1, Hkv=2), lambda b, h, i, j: j <= i + shift[h], H=2)


@check(4)
def what_is_sent_is_what_the_mask_needs():
    """Counted on its way, both passes: at most a tenth more than the keys that a rank's queries see and it has not."""
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([900, 300, 1700, 96, 1100]))
    masks = mods.causal, mods.sliding_window(1000), lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    exchanged, whole = dist.all_to_all_single, torch.randn(4096)
    for mask_mod in masks:
        plan, counted = ContextPlan(q_len=4096, mask_mod=mask_mod, device=here()), []

        def counts(found, sending, received, sent, counted=counted, **more):
            counted.append((sum(received), sending.numel() // max(sum(sent), 1)))
            return exchanged(found, sending, received, sent, **more)

        exchange = Exchange(plan)
        mine = plan.shard(whole, 0)[None, None, :, None]
        with mock.patch.object(dist, "all_to_all_single", counts):
            keys, values = exchange.gather(mine, 2 * mine).pair()
            exchange.give_back(keys, values).pair()
        blocks = torch.from_numpy(exchange.blocks)
        assert torch.equal(keys.flatten(), whole.view(-1, 128)[blocks].flatten()) and torch.equal(values, 2 * keys)
        seen = mask_mod(0, 0, plan.position_ids[:, None], torch.arange(4096)).any(0)
        needed = seen.index_fill(0, plan.kv_position_ids, False).sum()
        total = torch.tensor([counted[0][0], counted[1][0], needed])
        assert counted[0][1] == 2  # a key and its value, each one number here
        dist.all_reduce(total)
        assert total[2] <= total[0] <= 1.1 * total[2] and total[1] == total[0], total


@check(4)
def keys_come_once_where_most_are_a_rank_s_own():
    """Else a second time for the backward pass. What is kept is a copy, and has no second derivative."""
    exchanged, count = dist.all_to_all_single, 0

    def counts(*given, **more):
        nonlocal count
        count += 1
        return exchanged(*given, **more)

    for mask_mod, head_groups, wanted in ((mods.sliding_window(100), 1, 2), (mods.sliding_window(100), 2, 4), (mods.causal, 1, 3)):
        count, whole = 0, tensors(512, Hkv=2)
        with mock.patch.object(dist, "all_to_all_single", counts):
            plan = compare(whole, mask_mod, head_groups=head_groups)
        assert plan.exchange.keeps == (mask_mod is not mods.causal) and count == wanted, (mask_mod, count)
    plan = ContextPlan(q_len=512, mask_mod=mods.sliding_window(100), device=here())
    q, k, v = (plan.shard(t, 2) for t in tensors(512))
    gradients = []
    for changes in (False, True):
        key = k.clone().requires_grad_()
        out = flex_attention(q, key, v, context=plan, enable_gqa=True)
        if changes:
            key.detach().zero_()
        gradients += torch.autograd.grad(out.square().sum(), key, create_graph=True)
    assert torch.equal(*gradients)
    with pytest.raises(NotImplementedError, match="flex_attention is differentiable once"):
        gradients[0].sum().backward()


@check(4)
def softcap_and_scale():
    compare(tensors(640), mods.causal, mods.softcap(5.0), scale=0.3)


@check(2)
def what_is_captured_is_read_as_elsewhere():
    """A tensor that is expanded gets its gradient once, one of inference mode none; and a mod may ask for the device, with integers that
    leave int32."""
    table = torch.randn(1, 1040, requires_grad=True)
    spread = table.expand(2, 1040)
    with torch.inference_mode():
        slopes = torch.tensor([0.1, 0.3])

    def score_mod(score, b, h, q_idx, kv_idx):
        steps = torch.arange(7, device=q_idx.device)
        return score + spread[h, q_idx - kv_idx + 520] + slopes[h] * steps[(q_idx * 1103515245 + kv_idx) % 7]

    def mask_mod(b, h, q_idx, kv_idx):
        steps = torch.arange(7, device=q_idx.device)
        return (steps[(q_idx * 1103515245 + kv_idx) % 7] < 6) & (kv_idx <= q_idx)

    compare(tensors(520), mask_mod, score_mod, [table])


@check(2)
def hooks_that_lay_out_saved_tensors_anew():
    plan = ContextPlan(q_len=256, mask_mod=mods.causal, device=here())
    q, k, v = (torch.randn(1, 2, 128, 16, device=here(), requires_grad=True) for _ in range(3))

    def gradients(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = flex_attention(q, k, v, context=plan)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    expected = gradients(lambda t: t)
    for dims in ((-1, -2), (1, 2)):
        found = gradients(lambda t, dims=dims: t.transpose(*dims).contiguous().transpose(*dims) if t.ndim > 2 else t)
        for gradient, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, exact)


@check(4)
def keys_of_its_own_alone():
    """No rank needs another's, and nothing is exchanged."""
    with mock.patch.object(dist, "all_to_all_single", side_effect=AssertionError("keys travel")):
        compare(tensors(640), lambda b, h, i, j: i // 128 == j // 128)


@check(4)
def rows_without_keys():
    compare(tensors(512), lambda b, h, i, j: (j > 200) & (j < i - 60))


@check(4)
def a_cache_that_is_split_over_ranks():
    rank, lengths = dist.get_rank(), torch.tensor([37, 6, 150, 0], dtype=torch.int32)
    for q_len, score_mod, mask_mod in (
        (1, None, None),
        (3, mods.alibi(torch.tensor([0.1, 0.4])), None),
        (2, lambda s, b, h, i, j: s + 0.01 * i - 0.03 * j * (b + 1), mods.sliding_window(60)),
        (5, None, lambda b, h, i, j: (j % 3 == 0) & (j <= i)),
    ):
        q, k, v = torch.randn(4, 2, q_len, 16), torch.randn(4, 150, 1, 16), torch.randn(4, 150, 1, 16)
        share = -(-lengths // 3)  # the last rank has nothing
        start = share * rank
        mine = ((lengths - start).clamp(0) if rank < 3 else 0 * lengths).minimum(share).int()
        start = torch.where(mine > 0, start, 1000)
        held = torch.full((4, 60, 1, 32), torch.nan)
        for b in range(4):
            for part, whole in ((held[..., :16], k), (held[..., 16:], v)):
                part[b, : mine[b]] = whole[b, start[b] : start[b] + mine[b]]
        given = dict(score_mod=score_mod, mask_mod=mask_mod, sinks=torch.tensor([0.5, -1.0]) if q_len > 2 else None)
        place = dict(q_offset=lengths - q_len) if q_len == 5 else {}
        out, lse = split_cached_attention(q, held[..., :16], held[..., 16:], mine, start.int(), **given, **place)
        whole, whole_lse = cached_attention(q, k, v, lengths, **given, return_lse=True)
        torch.testing.assert_close(out, whole, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=2e-6)
