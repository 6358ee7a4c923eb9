"""flash_attn's meaning, sequence by sequence with dense scores: what flexpress.flash_attn is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What is asked of every form. `slopes`: 0 for none, 1 for (Hq,), 2 for (B, Hq)."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: int = 0
    scale: float | None = None

    def arguments(self, slopes: torch.Tensor | None) -> dict:
        return dict(causal=self.causal, window_size=self.window, softcap=self.softcap, alibi_slopes=slopes, softmax_scale=self.scale)

    def slopes_of(self, batch: int, heads: int, device: str, generator) -> torch.Tensor | None:
        """In (0, 1), as those of the paper are."""
        if self.slopes == 0:
            return None
        return torch.rand((heads,) if self.slopes == 1 else (batch, heads), generator=generator).to(device)


def sequence_attention(q, k, v, meaning: Meaning, slopes=None, leftpad: int = 0, precision=torch.float64):
    """out (Sq, Hq, D) and lse (Hq, Sq) of one sequence: q (Sq, Hq, D), k and v (Skv, Hkv, D), of which the first `leftpad` are nothing.

    slopes   (Hq,) or None. Scores are computed in float32 at least, a row that sees nothing gives 0 and -inf.
    """
    Sq, Hq, D = q.shape
    k, v = (t[leftpad:].repeat_interleave(Hq // t.shape[1], 1) for t in (k, v))
    Sk = k.shape[0]
    q, k, v = (t.to(precision) for t in (q, k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k).to(torch.promote_types(precision, torch.float32))
    scores = scores * (D**-0.5 if meaning.scale is None else meaning.scale)
    if meaning.softcap > 0:
        scores = meaning.softcap * (scores / meaning.softcap).tanh()
    after = torch.arange(Sk, device=q.device)[None, :] - (torch.arange(Sq, device=q.device)[:, None] + Sk - Sq)
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype)[:, None, None] * after.abs()
    left, right = meaning.window
    seen = torch.ones_like(after, dtype=torch.bool)
    if left >= 0:
        seen = seen & (after >= -left)
    if meaning.causal or right >= 0:
        seen = seen & (after <= (0 if meaning.causal else right))
    scores = scores.masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1) if Sk else torch.ones(Sq, dtype=torch.bool, device=q.device)
    lse = (
        torch.where(empty, -math.inf, scores.masked_fill(empty[:, None], 0.0).logsumexp(-1)) if Sk else scores.new_full((Hq, Sq), -math.inf)
    )
    weights = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", weights.to(precision), v), lse


def batch_attention(q, k, v, meaning, slopes=None, precision=torch.float64):
    """out (B, Sq, Hq, D) and lse (B, Hq, Sq) of a batch (B, S, H, D)."""
    found = [sequence_attention(q[b], k[b], v[b], meaning, slopes_at(slopes, b), 0, precision) for b in range(q.shape[0])]
    return tuple(map(torch.stack, zip(*found, strict=True)))


def packed_attention(q, k, v, starts_q: list[int], starts_k: list[int], meaning, slopes=None, precision=torch.float64):
    """out (total_q, Hq, D) and lse (Hq, total_q) of packed sequences."""
    outs, lses = [], []
    for b, (q0, q1, k0, k1) in enumerate(zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)):
        out, lse = sequence_attention(q[q0:q1], k[k0:k1], v[k0:k1], meaning, slopes_at(slopes, b), 0, precision)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


def slopes_at(slopes: torch.Tensor | None, b: int) -> torch.Tensor | None:
    return slopes if slopes is None or slopes.ndim == 1 else slopes[b]
