"""Random score_mods of vectors and small matrices, and eager torch's answer to them, position by position."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

from support.derivatives import upstream
from support.evaluate import default_dtype, make_mod

LENGTH = 5
VECTORS = (  # of 3 elements
    "place[q_idx]",
    "place[kv_idx]",
    "table[h, kv_idx][1:]",
    "table[b, q_idx, :3]",
    "table[..., h + 1][1, :3]",
    "weights",
    "frames[q_idx, 1]",
    "frames[kv_idx, :, 2]",
)
OF_VECTORS = (
    "({v} + {v})",
    "({v} - {v})",
    "({v} * {v})",
    "({v} / ({v} ** 2 + 1))",
    "({v} * {s})",
    "{v}.abs()",
    "torch.where({v} > 0, {v}, {s})",
    "torch.tanh({v})",
    "(matrix @ {v})",
    "({v} @ matrix)",
    "(frames[q_idx] @ {v})",
    "(frames[kv_idx].T @ {v})",
    "torch.matmul(frames[kv_idx], frames[q_idx])[0]",
    "F.linear({v}, matrix, weights)",
    "torch.cross({v}, {v}, dim=0)",
    "torch.outer({v}, {v}).sum(0)",
    "({v}[:, None] * frames[q_idx]).mean(1)",
    "torch.stack([{s}, {v}[0], {v}[2]])",
    "torch.cat([{v}[:1], {v}[1:]])",
    "{v}.view(3, 1).flatten()",
    "{v}.unsqueeze(0).squeeze(0)",
    "{v}.reshape(1, 3).expand(2, 3).sum(0)",
    "{v}.flip(0)",
    "(torch.cos((q_idx - kv_idx) * weights) + {v})",
    "({v} if len({v}) == 3 else 0)",
)
SCALARS = (
    "{v}.sum()",
    "{v}.sum(-1)",
    "{v}.sum(dim=0, keepdim=True).squeeze()",
    "torch.mean({v})",
    "{v}.prod()",
    "({v} + apart).amax()",
    "torch.amin({v} + apart, dim=0)",
    "({v} + apart).max()",
    "torch.dot({v}, {v})",
    "({v} @ {v})",
    "torch.linalg.norm({v} - {v})",
    "torch.linalg.vector_norm({v}, 1)",
    "({v}).norm(p=3)",
    "torch.linalg.vector_norm({v} + apart, ord=float('inf'))",
    "torch.dist({v}, {v})",
    "torch.cdist({v}[None], {v}[None]).squeeze()",
    "torch.cdist({v}.view(1, 3), torch.stack([{v}, weights])).sum()",
    "F.pairwise_distance({v}, {v})",
    "F.cosine_similarity({v} + 1.5, weights, dim=0)",
    "torch.where(({v} > 0).any(), {s}, 1.0)",
    "torch.where(({v} < {v}).all(-1), 2.0, {s})",
    "{v}[-1]",
    "({s} * {s})",
    "score",
)


@st.composite
def programs(draw) -> str:
    """An expression of a score_mod."""

    def vector(depth: int) -> str:
        if depth == 0 or draw(st.integers(0, 2)) == 0:
            return draw(st.sampled_from(VECTORS))
        return filled(draw(st.sampled_from(OF_VECTORS)), depth)

    def scalar(depth: int) -> str:
        return filled(draw(st.sampled_from(SCALARS)), depth)

    def filled(form: str, depth: int) -> str:
        while "{" in form:
            kind = form[form.index("{") + 1]
            inner = vector(depth - 1) if kind == "v" else scalar(depth - 1) if depth > 0 else "weights[1]"
            form = form.replace(f"{{{kind}}}", inner, 1)
        return form

    return f"score * torch.tanh({scalar(2)}) + {scalar(2)}"


def captured() -> dict[str, torch.Tensor]:
    """Tensors that the programs read, float64, each with a gradient."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"place": (LENGTH, 3), "table": (2, LENGTH, 4), "weights": (3,), "frames": (LENGTH, 3, 3), "matrix": (3, 3)}
    found = {name: torch.randn(shape, generator=generator).double().requires_grad_() for name, shape in shapes.items()}
    return found | {"apart": torch.tensor([0.1, 20.2, -30.3], dtype=torch.float64)}  # no two elements are equal then


def in_eager_torch(expression: str, scores: torch.Tensor, values: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mod's results, (B, H, Q, KV), by running it at every position on 0-dim tensors; the gradients of the sum of grad * results."""
    mod, scores = make_mod(expression, "score", values), scores.detach().requires_grad_()
    with default_dtype(torch.float64):
        found = [
            mod(scores[place], *(torch.tensor(i, dtype=torch.int32) for i in place))
            for place in itertools.product(*map(range, scores.shape))
        ]
    out = torch.stack(found).view(scores.shape)
    leaves = {"score": scores, **{name: t for name, t in values.items() if t.requires_grad}}
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream(scores.shape), allow_unused=True)
    return out.detach(), {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
