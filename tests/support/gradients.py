"""Gradients against float64 autograd through dense attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flexpress import flex_attention
from support.dense import dense_attention
from support.problems import LEARNED_MODS, Problem, learned_mods, problems, tensor_of

# cancellation in dP - delta, which every flash attention computes from a rounded output, may cost some digits
FLOORS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(kw_only=True)
class GradientProblem(Problem):
    """`score` is a name in LEARNED_MODS. `lse`: the loss depends on it, too."""

    lse: bool = False
    deterministic: bool = False
    learned_dtype: torch.dtype = torch.float32
    grad_layout: str = "contiguous"


def gradient_problems(device: str):
    return problems(
        device,
        GradientProblem,
        score=st.sampled_from(LEARNED_MODS),
        lse=st.booleans(),
        deterministic=st.booleans(),
        learned_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        grad_layout=st.sampled_from(["contiguous", "bshd", "wide_head_dim", "shared_batch"]),
    )


def reference_gradients(inputs, make, mask_mod, scale, d_out, d_lse, precision):
    """Gradients of all inputs (q, k, v, then learned tensors) by autograd through dense attention."""
    leaves = [
        t.detach().to(precision if i < 3 else torch.promote_types(precision, torch.float32)).requires_grad_() for i, t in enumerate(inputs)
    ]
    out, lse, _ = dense_attention(*leaves[:3], make(*leaves[3:]), mask_mod, scale, precision)
    loss = (out * d_out.to(out.dtype)).sum()
    if d_lse is not None:
        loss = loss + (torch.where(lse == -math.inf, 0.0, lse) * d_lse.to(lse.dtype)).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def error_times(d_out, out, exact):
    """What the output is off from the exact one, times d_out, summed for every row.

    Fused kernels, torch's too, have it in their delta, which they take from the output: it does to gradients what so much less d_lse does.
    """
    return ((out.detach().double() - exact.detach()) * d_out.double()).sum(-1)


def gradients_of(leaves, out, lse, seen, weights, less=0.0):
    """The gradients of (out, lse) times `weights`, but for `less` of that of lse; lse of rows that are not `seen` counts as 0."""
    loss = (out * weights[0].to(out.dtype)).sum() + (torch.where(seen, lse, 0.0) * (weights[1].to(lse.dtype) - less)).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True) if loss.requires_grad else [None] * len(leaves)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def assert_gradients(grads, exact, plain, dtypes, factor=2.0, lse=None, fused=None):
    """Every gradient's error is at most `factor` times that of the plain computation, or of the order of rounding.

    `fused`: exact but for `error_times`; what is as close to that will do, too.

    Weights are recomputed from lse in float32, as by torch's fused kernels: where scores are large, lse's own rounding counts.

    Gradients that cancel to little are measured against elements of 0.3; an element of a learned tensor, which sums over many
    positions, against what as many random numbers would add up to.
    """
    positions = math.prod(exact[0].shape[:3]) * exact[1].shape[2]
    rounding = 0.0 if lse is None else 2**-25 * lse.abs().masked_fill(lse == -math.inf, 0.0).max().item()
    for i, (got, want, rough, rounded, dtype) in enumerate(zip(grads, exact, plain, fused or exact, dtypes, strict=True)):
        if got is None:
            assert not want.any()
            continue
        slack, element = (1, 0.3) if i < 3 else (5, 0.1 * max(positions / want.numel(), 1) ** 0.5)
        size = max(want.norm().item(), element * want.numel() ** 0.5)
        allowed = (rough.nan_to_num().double() - want).norm().item() / size
        error = min((got.double() - one).norm().item() / size for one in (want, rounded))
        limit = slack * max(factor * allowed, FLOORS[dtype], rounding)
        assert error <= limit, f"gradient {i}: error {error:.2e}, a plain computation has {allowed:.2e}"


def check_gradients(p: GradientProblem, device: str) -> None:
    """Gradients of q, k, v and learned tensors of a problem are as exact as a plain computation's."""
    make, learned = learned_mods(p.B, p.Hq, p.length, device, p.learned_dtype, p.seed)[p.score]
    inputs = [t.requires_grad_() for t in (*p.tensors(device), *learned)]
    mask_mod = p.mask_mod(device)
    out, lse = flex_attention(*inputs[:3], make(*inputs[3:]), **p.options(device), return_lse=True, deterministic=p.deterministic)
    d_out = tensor_of(out.shape, p.grad_layout, p.dtype, device, p.seed + 7)
    d_lse = torch.randn(lse.shape, device=device) if p.lse else None
    outputs, weights = ((out, lse), (d_out, d_lse)) if p.lse else ((out,), (d_out,))
    grads = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    for t, g in zip(inputs, grads, strict=True):
        assert g is None or (g.shape == t.shape and g.dtype == t.dtype and g.isfinite().all())
    exact = reference_gradients(inputs, make, mask_mod, p.scale, d_out, d_lse, torch.float64)
    plain = reference_gradients(inputs, make, mask_mod, p.scale, d_out, d_lse, p.dtype)
    leaves = [t.detach().double() for t in inputs]
    less = error_times(d_out, out, dense_attention(*leaves[:3], make(*leaves[3:]), mask_mod, p.scale)[0])
    fused = reference_gradients(inputs, make, mask_mod, p.scale, d_out, -less if d_lse is None else d_lse - less, torch.float64)
    rougher = torch.bfloat16 if torch.bfloat16 in (p.dtype, p.learned_dtype) else p.dtype
    assert_gradients(grads, exact, plain, [p.dtype] * 3 + [rougher] * len(learned), lse=lse.detach(), fused=fused)
