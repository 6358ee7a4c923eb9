"""Problems of which the probabilities are looked at, against dense attention in float64."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from flexpress import AuxRequest, create_block_mask, flex_attention, mods
from support.dense import positions

ALL = AuxRequest(lse=True, max_scores=True, entropy=True, top_index=True, column_sums=True)


def dense(q, k, score_mod=None, mask_mod=None, scale=None, sinks=None):
    """Scores and entropy, top index, column sums of their softmax, in float64. A head's sink is one more key, which has no column."""
    k = k.double().expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    where = positions(scores.shape, q.device)
    if score_mod is not None:
        scores = score_mod(scores, *where).expand(scores.shape)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*where).expand(scores.shape), -math.inf)
    empty = scores.isneginf().all(-1)
    further = scores.new_full((q.shape[1],), -math.inf) if sinks is None else sinks.double()
    weights = torch.cat([scores, further[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = weights.softmax(-1).masked_fill(weights.isneginf().all(-1, keepdim=True), 0.0)
    entropy = -weights * torch.where(weights > 0.0, weights, 1.0).log()  # torch.special.entr has no gradient where a weight is 0
    return scores, entropy.sum(-1), scores.argmax(-1).masked_fill(empty, -1), weights[..., :-1].sum(-2)


def assert_right(aux, q, k, score_mod=None, mask_mod=None, scale=None, close=1e-5, sinks=None):
    """Also of top indices where scores are about equal: what the kernel takes for the largest is not below it by more than rounding."""
    scores, entropy, top_index, column_sums = dense(q, k, score_mod, mask_mod, scale, sinks)
    torch.testing.assert_close(aux.entropy.double(), entropy, rtol=close, atol=close)
    torch.testing.assert_close(aux.column_sums.double(), column_sums, rtol=close, atol=close * max(1.0, q.shape[2] / 50))
    assert aux.top_index.dtype == torch.int64 and torch.equal(aux.top_index < 0, top_index < 0)
    picked, best = (scores.gather(-1, index.clamp_min(0)[..., None])[..., 0] for index in (aux.top_index, top_index))
    torch.testing.assert_close(picked, best, rtol=close, atol=close)


MODS = {
    "none": lambda device: None,
    "softcap": lambda device: mods.softcap(2.0),
    "alibi": lambda device: mods.alibi(mods.alibi_slopes(4, device)),
    "table": lambda device: mods.relative_bias(torch.randn(4, 399, device=device)),
}
MASKS = {
    "none": lambda device: None,
    "causal": lambda device: mods.causal,
    "window": lambda device: mods.sliding_window(20),
    "late": lambda device: lambda b, h, q_idx, kv_idx: kv_idx < q_idx - 20 - 10 * h,  # many rows see nothing
    "documents": lambda device: mods.document((torch.arange(200, device=device) // 40).int()),
}


@st.composite
def probability_problems(draw, device):
    """q, k, score_mod, mask_mod, scale, whether a block mask is made before the call, and sinks."""
    torch.manual_seed(draw(st.integers(0, 99)))
    batch, group, q_len, kv_len = (draw(st.sampled_from(values)) for values in ([1, 2], [1, 2, 4], [1, 33, 130], [5, 64, 150]))
    dim = draw(st.sampled_from([16, 20, 64]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    q = torch.randn(batch, 4, q_len, dim, device=device, dtype=dtype)
    k = torch.randn(draw(st.sampled_from([1, batch])), 4 // group, kv_len, dim, device=device, dtype=dtype)
    if draw(st.booleans()):
        q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))
    if draw(st.booleans()):
        k = k.mT.contiguous().mT
    mod, mask = MODS[draw(st.sampled_from([*MODS]))](device), MASKS[draw(st.sampled_from([*MASKS]))](device)
    sinks = draw(st.sampled_from([None, torch.float32, torch.bfloat16]))
    sinks = sinks and torch.tensor([-math.inf, -1.0, 2.0, 40.0], device=device, dtype=sinks)
    return q, k, mod, mask, draw(st.sampled_from([None, 1.0, -0.5])), draw(st.booleans()), sinks


def check_probabilities(p: tuple, device: str) -> None:
    """Entropy, top index and column sums of a problem."""
    q, k, score_mod, mask_mod, scale, prepared, sinks = p
    options = {"mask_mod": mask_mod}
    if prepared and mask_mod is not None:
        options = {"block_mask": create_block_mask(mask_mod, 1, 4, q.shape[2], k.shape[2], device, BLOCK_SIZE=(64, 32))}
    options |= {"scale": scale, "enable_gqa": True, "sinks": sinks}
    plain = flex_attention(q, k, k, score_mod, **options)
    out, aux = flex_attention(q, k, k, score_mod, **options, return_aux=ALL)
    assert torch.equal(out, plain)
    close = 2e-5 if device == "cpu" else 3e-3 if q.dtype == torch.float32 else 1e-2  # of 16 bits a GPU's tanh is one of 16 bits, too
    assert_right(aux, q, k, score_mod, mask_mod, scale, close, sinks)
