"""Derivatives of score_mods by their graphs and by torch.autograd, in float64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from flexpress.codegen.mod.expr import SCORE_SYMBOLS
from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.graphs.grad import differentiate
from flexpress.codegen.mod.tracing.bind import bind
from support.evaluate import make_mod


class Derivatives:
    """d (sum of grad * mod) by the graph: in the score, and in the captured tensors by name. `grad` is random."""

    def __init__(self, expression: str, scores: torch.Tensor, captured: dict) -> None:
        self.graph, found = bind(make_mod(expression, "score", captured), "score")
        count = len(self.graph.tensors)
        self.tensors, self.scalars = found[:count], found[count:]
        self.symbols = {"score": scores, **indices(scores.shape), "grad": upstream(scores.shape)}
        self.derived = differentiate(self.graph, frozenset(range(count)))
        self.score = None if self.derived.score is None else self.value(self.derived.score).expand(scores.shape)
        self.captured: dict[str, torch.Tensor] = {}
        for load, derivative in self.derived.loads:
            self.add(load, self.value(derivative).expand(scores.shape), captured)

    def add(self, load, each: torch.Tensor, captured: dict) -> None:
        """Add a load's derivatives, one a position, where they belong: through torch if the tensor is the host's own."""
        tensor = self.tensors[load.attr]
        total = torch.zeros(tensor.shape, dtype=torch.float64)
        places = tuple(self.value(i).long().expand(each.shape) for i in load.args)
        total = total.index_put(places, each, accumulate=True) if places else each.sum()
        names = [k for k, v in captured.items() if v is tensor]
        parts = [total]
        if not names:
            names = [k for k, v in captured.items() if isinstance(v, torch.Tensor) and v.requires_grad]
            parts = torch.autograd.grad(tensor, [captured[k] for k in names], total.to(tensor.dtype), retain_graph=True, allow_unused=True)
        for name, part in zip(names, parts, strict=True):
            if part is None:
                continue
            self.captured[name] = self.captured.get(name, 0.0) + part

    def value(self, expr) -> torch.Tensor:
        tensors = [t.detach().double() if t.is_floating_point() else t for t in self.tensors]
        return compute(expr, self.symbols, tensors, self.scalars)


def indices(shape) -> dict:
    """b, h, q_idx and kv_idx, int32, that broadcast."""
    grids = (torch.arange(n, dtype=torch.int32).reshape([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(shape))
    return dict(zip(SCORE_SYMBOLS[1:], grids, strict=True))


def upstream(shape) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_autograd(expression: str, scores: torch.Tensor, captured: dict) -> dict[str, torch.Tensor]:
    """The same by torch; what does not require a gradient there is missing."""
    leaves = {"score": scores.detach().clone().requires_grad_()}
    leaves |= {
        k: v.detach().double().requires_grad_() for k, v in captured.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        out = eval(
            expression.replace(".float()", ".double()"),
            {"torch": torch, "F": F, "math": math, **captured, **indices(scores.shape), **leaves},
        )
    finally:
        torch.set_default_dtype(before)
    if not out.requires_grad:
        return {}
    out = out.expand(scores.shape)
    found = torch.autograd.grad(out, list(leaves.values()), upstream(scores.shape).to(out.dtype), allow_unused=True)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def check_derivatives(expression: str, scores: torch.Tensor, captured: dict) -> float:
    """Assert that the derivatives are torch's wherever torch's are finite; returns that share."""
    ours = Derivatives(expression, scores, captured)
    theirs = by_autograd(expression, scores, captured)
    compared = []
    for name in ("score", *captured):
        expected = theirs.get(name)
        found = ours.score if name == "score" else ours.captured.get(name)
        if expected is None:
            assert found is None or (found[found.isfinite()] == 0).all(), (expression, name, found)
            continue
        found = torch.zeros_like(expected) if found is None else found
        sure = expected.isfinite()
        close = (found - expected).abs() <= 1e-6 * (1 + expected.abs())
        assert (close | ~sure).all(), (
            f"{expression}: d {name} is {found[sure & ~close][0].item()}, in torch {expected[sure & ~close][0].item()}; {captured}"
        )
        compared.append(sure.double().mean().item())
    return min(compared, default=1.0)
