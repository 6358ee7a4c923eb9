"""Problems with sinks and with dropout, against dense float64 attention."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import strategies as st

from flexpress import AuxRequest, dropout_mask, flex_attention
from support.dense import dense_attention, dropped_attention, relative_error
from support.gradients import FLOORS, gradient_problems
from support.problems import learned_mods


def with_sinks(q, k, v, sinks, score_mod=None, mask_mod=None, scale=None):
    """out, lse and max_scores in float64, by another key whose value is 0."""
    out, lse, largest = dense_attention(q, k, v, score_mod, mask_mod, scale)
    scores = sinks.double()[:, None].expand_as(lse)
    total = torch.logaddexp(lse, scores)
    kept = torch.where(lse == -math.inf, 0.0, (torch.where(lse == -math.inf, 0.0, lse) - total).exp())
    return out * kept.unsqueeze(-1), total, largest


def sink_problems(device: str):
    return st.tuples(gradient_problems(device), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans())


def check_sinks(drawn: tuple, device: str) -> None:
    """out, lse, max_scores and gradients of everything, for a problem, the sinks' dtype, and whether they lie apart in memory."""
    p, dtype, slanted = drawn
    p = replace(p, dtype=torch.float32)  # in 16 bits dP - delta cancels to what rounding leaves
    make, learned = learned_mods(p.B, p.Hq, p.length, device, p.learned_dtype, p.seed)[p.score]
    torch.manual_seed(p.seed)  # so that a problem that fails does so again
    sinks = torch.randn(2 * p.Hq, device=device, dtype=dtype)[:: 1 + slanted][: p.Hq] * 3
    inputs = [t.requires_grad_() for t in (*p.tensors(device), *learned, sinks.detach())]
    options, exact = p.options(device), [t.detach().double().requires_grad_() for t in inputs]
    aux = {"return_aux": AuxRequest(True, True), "deterministic": p.deterministic}
    out, (lse, largest, *_) = flex_attention(*inputs[:3], make(*inputs[3:-1]), **options, **aux, sinks=inputs[-1])
    wanted = with_sinks(*exact[:3], exact[-1], make(*exact[3:-1]), p.mask_mod(device), p.scale)
    floor = 5 * FLOORS[p.dtype]
    for have, want in zip((out, lse, largest), wanted, strict=True):
        seen = want > -math.inf
        assert torch.equal(have > -math.inf, seen) and relative_error(have[seen], want[seen]) <= floor
    weights = torch.randn_like(out), torch.randn_like(lse) if p.lse else torch.zeros_like(lse)
    found = torch.autograd.grad((out, lse), inputs, weights, allow_unused=True)
    expected = torch.autograd.grad(wanted[:2], exact, [w.double() for w in weights], allow_unused=True)
    for i, (have, want) in enumerate(zip(found, expected, strict=True)):
        if have is None or want is None:
            assert not any(g is not None and g.any() for g in (have, want))
            continue
        element = 0.3 if i < 3 else 0.1 * max(math.prod(out.shape[:3]) / have.numel(), 1) ** 0.5
        size = max(want.norm().item(), element * want.numel() ** 0.5)
        limit = (1 if i < 3 else 5) * max(floor, FLOORS[have.dtype]) * size
        assert have.dtype == inputs[i].dtype and (have.double() - want).norm().item() <= limit, f"gradient {i}"


def dropout_problems(device: str):
    return st.tuples(gradient_problems(device), st.sampled_from([0.1, 0.5, 0.999]))


def check_dropout(drawn: tuple, device: str) -> None:
    """The output and gradients of everything, for a problem and a dropout_p, with the mask that dropout_mask says."""
    problem, dropout_p = drawn
    p = replace(problem, dtype=torch.float32)  # in 16 bits dP - delta cancels to what rounding leaves
    make, learned = learned_mods(p.B, p.Hq, p.length, device, p.learned_dtype, p.seed)[p.score]
    torch.manual_seed(p.seed)  # so that a problem that fails does so again
    inputs = [t.requires_grad_() for t in (*p.tensors(device), *learned)]
    options, exact = p.options(device), [t.detach().double().requires_grad_() for t in inputs]
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), device=device)
    out = flex_attention(*inputs[:3], make(*inputs[3:]), **options, deterministic=p.deterministic, dropout_p=dropout_p, dropout_seed=seed)
    kept = dropout_mask(seed, (p.B, p.Hq, p.Q_LEN, p.KV_LEN), dropout_p)
    wanted = dropped_attention(*exact[:3], kept, dropout_p, make(*exact[3:]), p.mask_mod(device), p.scale)
    floor = 5 * FLOORS[p.dtype]
    assert relative_error(out, wanted) <= floor
    weights = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, weights, allow_unused=True)
    expected = torch.autograd.grad(wanted, exact, weights.double(), allow_unused=True)
    for i, (have, want) in enumerate(zip(found, expected, strict=True)):
        if have is None or want is None:
            assert not any(g is not None and g.any() for g in (have, want))
            continue
        element = 0.3 if i < 3 else 0.1 * max(math.prod(out.shape[:3]) / have.numel(), 1) ** 0.5
        size = max(want.norm().item(), element * want.numel() ** 0.5 / (1 - dropout_p) ** 0.5)
        limit = (1 if i < 3 else 5) * max(floor, FLOORS[have.dtype]) * size
        assert (have.double() - want).norm().item() <= limit, f"gradient {i}"
