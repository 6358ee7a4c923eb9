"""Tangents and second derivatives against float64 autograd through dense attention, and those of mods against torch's."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.autograd import forward_ad

from flexpress import dropout_mask, flex_attention
from flexpress.codegen.mod.expr import walk
from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.graphs.tangent import tangents_of
from flexpress.codegen.mod.tracing.bind import bind
from support.dense import dense_attention, factors_of
from support.derivatives import indices, upstream
from support.evaluate import make_mod
from support.gradients import GradientProblem
from support.problems import LEARNED_MODS, learned_mods, problems

FLOORS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
SECOND = {
    torch.float32: 2e-5,
    torch.float16: 2.5e-2,
    torch.bfloat16: 0.2,
}  # delta is of weights in half precision, and dP - delta may cancel
SHORT = {"cpu": [1, 15, 33, 65], "cuda": [1, 15, 64, 129, 257, 1025]}


def derivative_problems(device: str):
    return problems(
        device,
        GradientProblem,
        score=st.sampled_from(LEARNED_MODS),
        lse=st.booleans(),
        deterministic=st.booleans(),
        KV_LEN=st.sampled_from(SHORT[device]),
        group=st.sampled_from([1, 2]),
        Hkv=st.just(1),
        layouts=st.tuples(*[st.sampled_from(["contiguous", "bshd", "sliced", "wide_head_dim"])] * 3),  # torch makes no duals of others
        scale=st.sampled_from([None, 0.3, -0.5]),
    )


def random_like(tensors, seed: int) -> list[torch.Tensor]:
    """Random tensors of these shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in tensors]


def relative_to(found: torch.Tensor, exact: torch.Tensor, positions: int = 0) -> float:
    """The error beside what as many numbers of size 0.3 have, or more; where `positions` terms cancel, beside what such terms add up to."""
    found, exact = (torch.where(exact.isinf(), 0.0, t.double()) for t in (found, exact))
    element = 3.0 * max(positions / max(exact.numel(), 1), 1) ** 0.5 if positions else 0.3
    return (found - exact).norm().item() / max(exact.norm().item(), element * exact.numel() ** 0.5, 1e-9)


def assert_as_exact(found, exact, plain, dtype: torch.dtype, positions: int = 0, length: int = 0) -> None:
    """Every error is at most 3 times that of a plain computation, or of the order of rounding.

    A weight is exp2(score - lse), so it carries the rounding of its score, which grows with a distance of up to `length`. Of one key a
    plain computation divides a number by itself and carries nothing: only there `length` is given.
    """
    for i, (got, want, rough) in enumerate(zip(found, exact, plain, strict=True)):
        assert got.shape == want.shape and not got.isnan().any()
        rounding = (SECOND if positions else FLOORS)[dtype] * (max(1, length / 32) if dtype == torch.float32 else 1)
        limit = max(3.0 * relative_to(rough.nan_to_num(), want, positions), rounding)
        if positions and i >= 3:  # sums over many positions, of what is multiplied by distances
            limit = max(limit, min(max(10, length / 8) * limit, 0.3))
        error = relative_to(got, want, positions)
        assert error <= limit, f"number {i}: error {error:.2e}, allowed are {limit:.2e}"


def in_precision(tensors, precision: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v in a precision, and what mods capture in float32 at least."""
    kept = torch.promote_types(precision, torch.float32)
    return tuple(t.detach().to(precision if i < 3 else kept) for i, t in enumerate(tensors))


def _attentions(p: GradientProblem, device: str, sinks: bool, dropout_p: float) -> tuple:
    """Ours, and the dense one in a precision, each a function of inputs that gives out and lse; and the inputs: q, k, v, what score_mod
    captures, and sinks."""
    make, learned = learned_mods(p.B, p.Hq, p.length, device, torch.float32, p.seed)[p.score]
    inputs, mask_mod, options = [*p.tensors(device), *learned], p.mask_mod(device), p.options(device)
    end = len(inputs)
    if sinks:
        inputs += [2 * t for t in random_like([torch.empty(p.Hq, device=device)], p.seed + 4)]
    factors, dropout = {}, {}
    if dropout_p:
        seed = torch.tensor([p.seed - 5], device=device)
        dropout = {"dropout_p": dropout_p, "dropout_seed": seed}
        factors = {"factors": factors_of(dropout_mask(seed, (p.B, p.Hq, p.Q_LEN, p.KV_LEN), dropout_p), dropout_p)}

    def ours(*x):
        given = {**dropout, **({"sinks": x[end]} if sinks else {})}
        return flex_attention(*x[:3], make(*x[3:end]), **options, **given, return_lse=True, deterministic=p.deterministic)

    def dense(precision, *x):
        attend = dense_attention_with_sinks(x[end]) if sinks else dense_attention
        return attend(*x[:3], make(*x[3:end]), mask_mod, p.scale, precision, **factors)[:2]

    return ours, dense, inputs


def dense_attention_with_sinks(sinks):
    """dense_attention with a further key, whose value is 0, and whose score is the sink of a head."""

    def attend(q, k, v, score_mod, mask_mod, scale, precision):
        end, logits = k.shape[2], sinks.to(torch.promote_types(precision, torch.float32))

        def score_of(score, b, h, m, n):
            score = score if score_mod is None else score_mod(score, b, h, m, n.clamp(max=end - 1))
            return torch.where(n == end, logits[h], score)

        def mask_of(b, h, m, n):
            return (n == end) | (mask_mod is None or mask_mod(b, h, m, n.clamp(max=end - 1)))

        k, v = (torch.cat([t, torch.zeros_like(t[:, :, :1])], 2) for t in (k, v))
        return dense_attention(q, k, v, score_of, mask_of, scale, precision)

    return attend


def check_tangents(p: GradientProblem, device: str, sinks: bool = False, dropout_p: float = 0.0) -> None:
    """out, lse and their tangents by forward mode are as exact as a plain computation's."""
    ours, dense, inputs = _attentions(p, device, sinks, dropout_p)
    direction = random_like(inputs, p.seed + 5)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(inputs, direction, strict=True)]
        outputs = ours(*duals)
        found = [part for dual in map(forward_ad.unpack_dual, outputs) for part in (dual.primal, dual.tangent)]
    assert found[1].dtype == p.dtype and found[3].dtype == torch.float32

    def reference(precision):
        given = in_precision(inputs, precision), in_precision(direction, precision)
        (out, lse), (out_t, lse_t) = torch.func.jvp(partial(dense, precision), *given)
        return out, out_t, lse, lse_t.masked_fill(lse == -math.inf, 0.0)

    assert_as_exact(found, reference(torch.float64), reference(p.dtype), p.dtype)


def twice_differentiated(attend, inputs, weights, direction) -> list[torch.Tensor]:
    """The gradients of <direction, gradients> in the inputs and in the gradients of the outputs; attend(*inputs) gives out and lse."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    weights = [None if w is None else w.detach().requires_grad_() for w in weights]
    outputs = attend(*inputs)
    used = [(o, w.to(o.dtype)) for o, w in zip(outputs, weights, strict=True) if w is not None]
    first = torch.autograd.grad([o for o, _ in used], inputs, [w for _, w in used], create_graph=True, allow_unused=True)
    both = [(g, d) for g, d in zip(first, direction, strict=True) if g is not None and g.requires_grad]
    wanted = [*inputs, *(w for w in weights if w is not None)]
    found = torch.autograd.grad([g for g, _ in both], wanted, [d.to(g.dtype) for g, d in both], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def check_second(p: GradientProblem, device: str, sinks: bool = False, dropout_p: float = 0.0) -> None:
    """Second derivatives in q, k, v, captured tensors, sinks and the gradients of out and lse are as exact as a plain computation's."""
    ours, dense, inputs = _attentions(p, device, sinks, dropout_p)
    direction = random_like(inputs, p.seed + 5)
    shape = (p.B, p.Hq, p.Q_LEN)
    d_out, d_lse = (torch.randn(*shape, *tail, generator=torch.Generator().manual_seed(p.seed + 6)).to(device) for tail in ((p.D_V,), ()))
    weights = [d_out.to(p.dtype), d_lse if p.lse else None]

    def reference(precision):
        def attend(*x):
            out, lse = dense(precision, *x)
            return out, torch.where(lse == -math.inf, 0.0, lse)

        return twice_differentiated(
            attend, in_precision(inputs, precision), [w if w is None else w.to(precision) for w in weights], direction
        )

    found = twice_differentiated(ours, inputs, weights, direction)
    positions = p.B * p.Hq * p.Q_LEN * p.KV_LEN
    distance = p.length if p.score == "slopes" and p.KV_LEN == 1 else 0
    assert_as_exact(found, reference(torch.float64), reference(p.dtype), p.dtype, positions, distance)


class ModTangents:
    """What the tangents of a mod are by its graph, and by torch, in float64, in a random direction of all that moves."""

    def __init__(self, expression: str, scores: torch.Tensor, captured: dict) -> None:
        self.expression, self.scores, self.captured = expression, scores, captured
        self.graph, found = bind(make_mod(expression, "score", captured), "score")
        count = len(self.graph.tensors)
        self.tensors, self.scalars = found[:count], found[count:]
        floats = frozenset(i for i, t in enumerate(self.tensors) if t.is_floating_point())
        self.derived = tangents_of(self.graph, frozenset({"score", "grad"}), floats, floats)
        self.moving = sorted(floats)
        self.directions = random_like([scores, upstream(scores.shape), *(self.tensors[i].double() for i in self.moving)], 3)

    @property
    def operations(self) -> set[str]:
        return {n.op for n in walk(self.graph.result)}

    def ours(self) -> dict[str, torch.Tensor]:
        """The tangents of the result, of the gradient for the score, and of those for captured tensors."""
        shape = self.scores.shape
        score_t, grad_t, *others = self.directions
        symbols = {"score": self.scores, **indices(shape), "grad": upstream(shape), "score_tangent": score_t, "grad_tangent": grad_t}
        tensors = [*(t.double() if t.is_floating_point() else t for t in self.tensors), *others]

        def value(expr):
            return torch.zeros(shape, dtype=torch.float64) if expr is None else compute(expr, symbols, tensors, self.scalars).expand(shape)

        found = {"result": value(self.derived.result), "score": value(self.derived.of_score)}
        for load, tangent in self.derived.of_loads:
            total = torch.zeros(self.tensors[load.attr].shape, dtype=torch.float64)
            places = tuple(compute(i, symbols, tensors, self.scalars).long().expand(shape) for i in load.args)
            each = value(tangent)
            total = total.index_put(places, each, accumulate=True) if places else each.sum()
            name = next(k for k, v in self.captured.items() if v is self.tensors[load.attr])
            found[name] = found.get(name, 0.0) + total
        return found

    def theirs(self) -> dict[str, torch.Tensor]:
        """The same by torch.func."""
        names = [next(k for k, v in self.captured.items() if v is self.tensors[i]) for i in self.moving]
        leaves = [self.scores, *(self.tensors[i].double() for i in self.moving)]
        text, plain = self.expression.replace(".float()", ".double()"), {"torch": torch, "F": F, "math": math}

        def result(*x):
            found = eval(
                text, {**plain, **self.captured, **indices(self.scores.shape), "score": x[0], **dict(zip(names, x[1:], strict=True))}
            )
            return found.double().expand(self.scores.shape)

        def gradients(grad, *x):
            return torch.func.grad(lambda x: (result(*x) * grad).sum())(x)

        score_t, grad_t, *others = self.directions
        moved = torch.func.jvp(gradients, (upstream(self.scores.shape), *leaves), (grad_t, score_t, *others))[1]
        found = torch.func.jvp(result, tuple(leaves), (score_t, *others))[1]
        return {"result": found, **dict(zip(("score", *names), moved, strict=True))}
