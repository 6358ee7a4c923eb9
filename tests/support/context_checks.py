"""What attention over a sequence that is split over ranks must compute: that of one process (see ranks.py)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flexpress import cached_attention, flex_attention, mods
from flexpress.context_exchange import Exchange
from flexpress.distributed import ContextPlan, split_cached_attention
from support.dense import dense_attention
from support.ranks import check, main


def tensors(q_len, kv_len=None, B=1, Hq=2, Hkv=1, Bkv=None, D=16, D_V=None):
    """The same on every rank."""
    kv_len = q_len if kv_len is None else kv_len
    shapes = (B, Hq, q_len, D), (Bkv or B, Hkv, kv_len, D), (Bkv or B, Hkv, kv_len, D_V or D)
    return [torch.randn(shape) for shape in shapes]


def compare(whole, mask_mod, score_mod=None, captured=(), kv_len=None, B=None, H=None, **options):
    """out, lse and all gradients of attention by parts are those of dense attention of the whole in float64."""
    q_len, kv_len = whole[0].shape[2], whole[1].shape[2]
    plan = ContextPlan(q_len=q_len, kv_len=kv_len, mask_mod=mask_mod, B=B, H=H, device="cpu")
    mine = [plan.shard(whole[0], 2), *(t[:, :, plan.kv_position_ids] for t in whole[1:])]
    mine = [t.clone().requires_grad_() for t in mine]
    found, lse = flex_attention(*mine, score_mod, enable_gqa=True, return_lse=True, context=plan, **options)
    reference = [t.double().requires_grad_() for t in whole]
    exact, exact_lse, _ = dense_attention(*reference, score_mod, mask_mod, options.get("scale"))
    d_out, d_lse = torch.randn(exact.shape), torch.randn(exact_lse.shape)
    lse_weight = torch.where(torch.isneginf(exact_lse), 0.0, d_lse)
    queries, keys = plan.position_ids, plan.kv_position_ids
    torch.testing.assert_close(found.double(), exact.detach()[:, :, queries], rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), exact_lse.detach()[:, :, queries], rtol=0, atol=2e-5)
    torch.testing.assert_close(plan.unshard(found.detach(), 2), exact.detach().float(), rtol=0, atol=2e-5)
    finite = torch.where(torch.isneginf(lse), 0.0, lse)
    gradients = torch.autograd.grad((found * d_out[:, :, queries]).sum() + (finite * lse_weight[:, :, queries]).sum(), [*mine, *captured])
    finite = torch.where(torch.isneginf(exact_lse), 0.0, exact_lse)
    expected = torch.autograd.grad((exact * d_out).sum() + (finite * lse_weight).sum(), [*reference, *captured])
    parts = [expected[0][:, :, queries], *(g[:, :, keys] for g in expected[1:3]), *expected[3:]]
    for name, g, e in zip(("dq", "dk", "dv", "captured", "captured"), gradients, parts, strict=False):
        error = (g.double() - e.double()).abs().max().item() if e.numel() else 0.0
        assert g.shape == e.shape and error <= 1e-4 * max(1.0, expected_size(expected, name)), (name, error)
    return plan


def expected_size(expected, name: str) -> float:
    return expected[("dq", "dk", "dv", "captured").index(name)].abs().max().item()


@check(2)
def causal_of_two_ranks():
    plan = compare(tensors(520), mods.causal)
    assert plan.layout.imbalance < 1.3


@check(2)
def a_single_block():
    compare(tensors(100), mods.causal)


@check(2)
def no_mask():
    compare(tensors(300, D_V=32), None)


@check(2)
def a_window_with_bias_that_learns():
    slopes = torch.tensor([0.1, 0.3], requires_grad=True)
    compare(tensors(700), mods.sliding_window(150), mods.alibi(slopes), [slopes])


@check(2)
def a_plan_of_another_mask_is_found():
    mask = mods.causal if dist.get_rank() else mods.sliding_window(20)
    with pytest.raises(ValueError, match="have another plan than the rest; lengths, mask_mod"):
        ContextPlan(q_len=1000, mask_mod=mask, device="cpu")


@check(2)
def other_shapes_are_found():
    plan = ContextPlan(q_len=512, mask_mod=mods.causal, device="cpu")
    q, k, v = (plan.shard(t, 2) for t in tensors(512, D=16 if dist.get_rank() else 32))
    with pytest.raises(ValueError, match="another query, key or value than the rest"):
        flex_attention(q, k, v, context=plan, enable_gqa=True)


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
        plan, counted = ContextPlan(q_len=4096, mask_mod=mask_mod, device="cpu"), []

        def counts(found, sending, received, sent, counted=counted, **more):
            counted.append((sum(received) - received[dist.get_rank()], sending.numel() // max(sum(sent), 1)))
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
def softcap_and_scale():
    compare(tensors(640), mods.causal, mods.softcap(5.0), scale=0.3)


@check(4)
def rows_without_keys():
    compare(tensors(512), lambda b, h, i, j: (j > 200) & (j < i - 60))


@check(4)
def a_cache_that_is_split_over_ranks():
    rank, lengths = dist.get_rank(), torch.tensor([37, 6, 150], dtype=torch.int32)
    for q_len, score_mod, mask_mod in (
        (1, None, None),
        (3, mods.alibi(torch.tensor([0.1, 0.4])), None),
        (2, lambda s, b, h, i, j: s + 0.01 * i - 0.03 * j * (b + 1), mods.sliding_window(60)),
        (5, None, lambda b, h, i, j: (j % 3 == 0) & (j <= i)),
    ):
        q, k, v = torch.randn(3, 2, q_len, 16), torch.randn(3, 150, 1, 16), torch.randn(3, 150, 1, 16)
        share = -(-lengths // 3)  # the last rank has nothing
        start = (share * rank).clamp(max=lengths)
        mine = ((lengths - start).clamp(0) if rank < 3 else 0 * lengths).minimum(share).int()
        held = torch.full((3, 60, 1, 32), torch.nan)
        for b in range(3):
            for part, whole in ((held[..., :16], k), (held[..., 16:], v)):
                part[b, : mine[b]] = whole[b, start[b] : start[b] + mine[b]]
        out, lse = split_cached_attention(q, held[..., :16], held[..., 16:], mine, start.int(), score_mod=score_mod, mask_mod=mask_mod)
        whole, whole_lse = cached_attention(q, k, v, lengths, score_mod=score_mod, mask_mod=mask_mod, return_lse=True)
        torch.testing.assert_close(out, whole, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=2e-6)


if __name__ == "__main__":
    main()
