"""Functions of vectors that reduce them, and rows of every dtype to call them with: what tests compare with torch."""

from __future__ import annotations

import torch

from support.evaluate import FLOATS, INTEGERS, make_mod

# {v}: a row of 4 elements; {m}: a matrix of two rows
REDUCTIONS = (
    *(f"{{v}}.{name}()" for name in ("sum", "prod", "mean", "amax", "amin", "max", "min", "any", "all", "var", "std", "norm")),
    *(f"{{v}}.{name}()" for name in ("argmax", "argmin", "count_nonzero")),
    *(f"torch.{name}({{v}}, 0)" for name in ("sum", "prod", "mean", "amax", "amin", "any", "all", "var", "std", "argmax", "logsumexp")),
    *(f"torch.{name}({{v}})" for name in ("sum", "max", "any", "var", "norm", "count_nonzero")),
    *(
        f"{{v}}.{name}(dtype=torch.{dtype})"
        for name in ("sum", "prod", "mean", "norm")
        for dtype in ("float32", "float16", "int64", "int8", "bool")
    ),
    *(f"{{v}}.cumsum(0{dtype})[2]" for dtype in ("", ", dtype=torch.int8", ", dtype=torch.float32", ", dtype=torch.int64")),
    *(f"{{v}}.{name}(0)[1]" for name in ("softmax", "log_softmax")),
    *(f"{{v}}.{name}(0, torch.float32)[1]" for name in ("softmax", "log_softmax")),
    *(f"F.{name}({{v}}, 0)[1]" for name in ("softmax", "log_softmax", "softmin")),
    *(f"F.{name}({{v}}, dim=0, dtype=torch.float32)[1]" for name in ("softmax", "log_softmax", "softmin")),
    "torch.softmax({v}, 0, torch.float16)[1]",
    "torch.special.softmax({v}, 0)[1]",
    "torch.special.log_softmax({v}, 0)[1]",
    "{v}.logsumexp(0, keepdim=True)[0]",
    "{v}.view(2, 2).softmax(1)[1, 0]",
    "{v}.view(2, 2).cumsum(1)[1, 1]",
    "{v}.view(2, 2).sum(1)[0]",
    "{v}.max(0).values",
    "{v}.min(0).indices",
    "torch.any({v}.view(2, 2), 0)[1]",
    "{v}.var(0, unbiased=False)",
    "torch.std({v}, correction=0)",
    "torch.dot({v}, {v})",
    "torch.dot({v}, {m}[1])",
    "{v} @ {m}[1]",
    "torch.vdot({v}, {v})",
    "torch.inner({v}, {v})",
    "torch.linalg.vecdot({v}, {m}[1])",
    "torch.outer({v}, {v} != 9)[1, 2]",
    "({m} @ {v})[0]",
    "torch.mv({m}, {v})[1]",
    "torch.mm({m}, {m}.T)[0, 1]",
    "torch.bmm({m}[None], {m}.T[None])[0, 0, 1]",
    "torch.matmul({v}, {m}.T)[1]",
    "F.linear({v}, {m})[0]",
    "F.linear({v}, {m}, {v}[:2])[1]",
    'torch.einsum("i->", {v})',
    'torch.einsum("i,i", {v}, {m}[1])',
    'torch.einsum("i,i", [{v}, {v}])',
    'torch.einsum("i,ji->j", {v}, {m})[0]',
    'torch.einsum("i,j->ij", {v}, {v} != 9)[1, 2]',
    'torch.einsum("ij,i->i", {m}, {v}[:2])[0]',
    "{v}.norm(1)",
    "{v}.norm(0)",
    '{v}.norm(float("inf"))',
    "torch.norm({m})",
    "torch.norm({v}, p=3, dim=0)",
    "torch.linalg.norm({v}, 1)",
    'torch.linalg.norm({m}, "fro")',
    "torch.linalg.vector_norm({v})",
    "torch.dist({v}, {m}[1])",
    "F.pairwise_distance({v}, {m}[1])",
    "F.cosine_similarity({v}, {v}, dim=0)",
    "F.cosine_similarity({v}, {m}[1], dim=0)",
    "F.normalize({v}, dim=0)[1]",
    "F.layer_norm({v}, (4,))[1]",
    "F.layer_norm({v}, (4,), {v}, {v})[2]",
    "F.rms_norm({v}, (4,))[2]",
    "F.rms_norm({v}, (4,), {v})[2]",
    "F.rms_norm({v}, (4,), eps=1e-3)[2]",
    "torch.stack([{v}[0], {v}.float()[1]]).sum()",
    "torch.stack([q_idx.long(), {v}[1]]).sum()",
    "torch.cat([{v}, {v}.double()]).prod()",
)
_NARROW = (
    [300.0, -300.0, 100.0, 1.0],  # whose squares no half holds
    [0.01, 0.02, 0.03, 0.02],
    [1000.0, 999.0, 1001.0, 1003.0],
    [2.7, 1.9, -1.6, 0.5],
    [3e-4, 2e-4, 1e-4, 5e-4],
)


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 4 elements: floats whose squares half precision does not hold, integers whose sums and products wrap around."""
    if dtype in FLOATS:
        return torch.tensor(_NARROW).to(dtype)
    if dtype in INTEGERS:
        half = torch.iinfo(dtype).max // 2 + 1
        return torch.tensor([[3, 1, 2, 7], [100, 100, 100, 51], [0, 0, 5, 0], [half, half, half, 3]]).to(dtype)
    return torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])


def of_row(form: str) -> str:
    """A form in a mod: of the row x[q_idx], and the matrix of it and the one before."""
    return form.format(v="x[q_idx]", m="m[q_idx]")


def in_torch(form: str, rows: torch.Tensor, place: int) -> torch.Tensor:
    """torch's own result for a row. Raises what torch raises."""
    return make_mod(of_row(form), "score", {"x": rows, "m": matrices(rows)})(*[torch.tensor(place)] * 5)


def matrices(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([rows, rows.roll(1, 0).flip(1)], 1)
