"""The dense reference that kernels are compared with: plain attention in float64, and in the kernel's own precision."""

from __future__ import annotations

import torch

from flexpress.codegen.plan.extras import DROPOUT_STEPS


def dense_attention(q, k, v, score_mod=None, mask_mod=None, scale=None, precision=torch.float64, factors=None):
    """out (B, Hq, Q_LEN, D_V), lse and max_scores (B, Hq, Q_LEN) by materialised scores, in `precision`.

    Mods are computed in float64 for precision=float64, else in float32; a row with nothing to attend to gives 0 and -inf.

    factors   (B, Hq, Q_LEN, KV_LEN): what probabilities are multiplied by, as dropout does
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, Hq, Q_LEN, _ = q.shape
    group = Hq // k.shape[1]
    q, k, v = (t.to(precision) for t in (q, k, v))
    k = k.expand(B, -1, -1, -1).repeat_interleave(group, dim=1)
    v = v.expand(B, -1, -1, -1).repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(precision, torch.float32)) * scale
    b, h, m, n = positions(scores.shape, q.device)
    if score_mod is not None:
        scores = score_mod(scores, b, h, m, n).to(scores.dtype).expand(scores.shape)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, m, n).expand(scores.shape), float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - torch.where(highest == float("-inf"), 0.0, highest)).exp()
    total = weights.sum(-1, keepdim=True)
    probabilities = (weights / torch.where(total == 0.0, 1.0, total)).to(precision)
    if factors is not None:
        probabilities = probabilities * factors.to(precision)
    lse = (highest + torch.where(total == 0.0, 1.0, total).log()).squeeze(-1)
    return probabilities @ v, torch.where(total.squeeze(-1) == 0.0, float("-inf"), lse), highest.squeeze(-1)


def dropped_attention(q, k, v, kept, p, *others, **named):
    """out of dense_attention, of weights that are `kept` with probability 1 - p."""
    return dense_attention(q, k, v, *others, **named, factors=factors_of(kept, p))[0]


def factors_of(kept, p):
    """What probabilities are multiplied by where weights are `kept` with probability 1 - p; p is rounded as dropout_p is."""
    return kept / (1 - round(p * DROPOUT_STEPS) / DROPOUT_STEPS)


def positions(shape, device):
    """b, h, q_idx and kv_idx that broadcast to (B, H, Q_LEN, KV_LEN), int64 as in torch."""
    views = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    return [torch.arange(n, device=device).view(view) for n, view in zip(shape, views, strict=True)]


def relative_error(value, reference) -> float:
    """||value - reference|| / ||reference||, NaN for NaN; the absolute error where the reference is zero."""
    difference = (value.double() - reference.double()).norm().item()
    size = reference.double().norm().item()
    return difference / size if size else difference


def assert_as_accurate(out, q, k, v, score_mod=None, mask_mod=None, scale=None, factor=2.0):
    """The error of `out` against float64 is at most `factor` times that of a plain computation in q's dtype."""
    exact, *_ = dense_attention(q, k, v, score_mod, mask_mod, scale)
    plain, *_ = dense_attention(q, k, v, score_mod, mask_mod, scale, precision=q.dtype)
    error, allowed = relative_error(out, exact), relative_error(plain, exact)
    floor = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[q.dtype]
    assert error <= max(factor * allowed, floor), f"error {error:.2e}, a plain computation has {allowed:.2e}"
