"""Attention over a sequence that is split over ranks, beside dense attention of the whole, on every rank."""

from __future__ import annotations

import torch

from flexpress import AuxRequest, dropout_mask, flex_attention
from flexpress.distributed import ContextPlan
from support.dense import dense_attention, factors_of
from support.ranks import here


def tensors(q_len, kv_len=None, B=1, Hq=2, Hkv=1, Bkv=None, D=16, D_V=None):
    """The same on every rank."""
    kv_len = q_len if kv_len is None else kv_len
    shapes = (B, Hq, q_len, D), (Bkv or B, Hkv, kv_len, D), (Bkv or B, Hkv, kv_len, D_V or D)
    return [torch.randn(shape) for shape in shapes]


SEED = torch.tensor([3 << 40 | 77])  # of dropout


def compare(whole, mask_mod, score_mod=None, captured=(), B=None, H=None, scale=None, dropout_p=0.0, **of_plan):
    """out, lse, max_scores and all gradients of attention by parts are those of dense attention of the whole in float64."""
    q_len, kv_len = whole[0].shape[2], whole[1].shape[2]
    plan = ContextPlan(q_len=q_len, kv_len=kv_len, mask_mod=mask_mod, B=B, H=H, device=here(), **of_plan)
    mine = [plan.shard(whole[0], 2), *(t[:, :, plan.kv_position_ids] for t in whole[1:])]
    mine = [t.clone().requires_grad_() for t in mine]
    wanted = AuxRequest(lse=True, max_scores=True)
    dropout = {"dropout_p": dropout_p, "dropout_seed": SEED.to(here())} if dropout_p else {}
    found, (lse, highest, *_) = flex_attention(*mine, score_mod, enable_gqa=True, return_aux=wanted, context=plan, scale=scale, **dropout)
    reference = [t.double().requires_grad_() for t in whole]
    factors = factors_of(dropout_mask(SEED, (*whole[0].shape[:3], kv_len), dropout_p), dropout_p) if dropout_p else None
    exact, exact_lse, exact_highest = dense_attention(*reference, score_mod, mask_mod, scale, factors=factors)
    d_out, d_lse = torch.randn(exact.shape), torch.randn(exact_lse.shape)
    lse_weight = torch.where(torch.isneginf(exact_lse), 0.0, d_lse)
    queries, keys = plan.position_ids, plan.kv_position_ids
    torch.testing.assert_close(found.double(), exact.detach()[:, :, queries], rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), exact_lse.detach()[:, :, queries], rtol=0, atol=2e-5)
    torch.testing.assert_close(highest.double(), exact_highest.detach()[:, :, queries], rtol=0, atol=2e-5)
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
