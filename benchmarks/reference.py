"""A dense float64 attention over a few heads, and errors against it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from common import Row
from workloads import Mods, Workload

Tensors = tuple[torch.Tensor, ...]
Batch = torch.Tensor | Sequence[torch.Tensor]  # (batch, heads, length, head dim), or lengths of their own
ERROR_LIMIT = 0.02  # bf16 lands between 0.001 and 0.01
ROW_ERROR_LIMIT = 0.2


class WrongResult(Exception):
    """An implementation's output is not the attention that was asked for."""


@dataclass(frozen=True)
class Slice:
    """The float64 answer for one batch and one key/value head with its group of query heads.

    `out` is (group, length, d_v); `grads` holds dq (group, length, d_qk), dk (length, d_qk) and
    dv (length, d_v), or nothing; `learned` what this batch adds to the gradients of the learned tensors, (group, ...) each.
    """

    batch: int
    heads: slice
    kv_head: int
    out: torch.Tensor
    grads: Tensors = ()
    learned: Tensors = ()


def references(
    row: Workload,
    qkv: Sequence[Batch],
    mods: Mods,
    grad_out: torch.Tensor | None = None,
    chunk: int = 512,
    more: Iterable[tuple[int, int]] = (),
) -> list[Slice]:
    """Return the answers for the first and the last (batch, key/value head), and for `more`.

    `qkv` are the inputs of the whole problem; q_idx counts from 0 whatever the number of keys.  `grad_out` asks for gradients: those of
    learned tensors are sums over the batch, so all of it is done for the two heads.  Every query must see a key.
    """
    wanted = {(0, 0), (row.batch - 1, row.kv_heads - 1), *more}
    if mods.learned and grad_out is not None:
        wanted |= {(b, head) for b in range(row.batch) for head in (0, row.kv_heads - 1)}
    return [_attend(row, qkv, mods, grad_out, chunk, *where) for where in sorted(wanted)]


def _attend(row: Workload, qkv: Sequence[Batch], mods: Mods, grad_out: torch.Tensor | None, chunk: int, batch: int, kv_head: int) -> Slice:
    mods, learned = in_double(row, mods, grad_out is not None)
    group = row.heads // row.kv_heads
    heads = slice(kv_head * group, (kv_head + 1) * group)
    leaves = [x[batch][head].detach().double() for x, head in zip(qkv, (heads, kv_head, kv_head), strict=True)]
    for leaf in leaves:
        leaf.requires_grad_(grad_out is not None)
    q, k, v = leaves
    b = torch.tensor(batch, dtype=torch.int32, device=q.device)
    h = torch.arange(heads.start, heads.stop, dtype=torch.int32, device=q.device)[:, None, None]
    index = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
    kv_idx = torch.arange(k.shape[0], dtype=torch.int32, device=q.device)[None, None, :]
    parts = []
    for begin in range(0, q.shape[1], chunk):
        rows = slice(begin, begin + chunk)
        q_idx = index[rows][None, :, None]
        scores = q[:, rows] @ k.T / math.sqrt(row.d_qk)
        if mods.score is not None:
            scores = mods.score(scores, b, h, q_idx, kv_idx)
        if mods.mask is not None:
            scores = scores.masked_fill(~mods.mask(b, h, q_idx, kv_idx), -math.inf)
        if mods.sinks is not None:  # one more column, with a value of 0
            scores = torch.cat([scores, mods.sinks[heads, None, None].expand(*scores.shape[:-1], 1)], -1)
        part = scores.softmax(-1)[..., : k.shape[0]] @ v
        if grad_out is not None:
            part.backward(grad_out[batch, heads, rows].double())
        parts.append(part.detach())
    grads = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
    return Slice(
        batch, heads, kv_head, torch.cat(parts, 1), grads, tuple(leaf.grad[heads].clone() for leaf in learned if leaf.grad is not None)
    )


def in_double(row: Workload, mods: Mods, backward: bool) -> tuple[Mods, Tensors]:
    """Return the mods with learned tensors in float64, and these tensors, which get gradients if `backward`."""
    bias, sinks = (x if x is None else x.detach().double().requires_grad_(backward) for x in (mods.bias, mods.sinks))
    if row.learned is not None and bias is not None:
        mods = mods._replace(score=row.learned.score(bias))
    mods = mods._replace(bias=bias, sinks=sinks)
    return mods, mods.learned


def relative_error(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return ||got - want|| / ||want|| over all (got, want) together."""
    wrong = sum(float((got.double() - want).square().sum()) for got, want in pairs)
    whole = sum(float(want.square().sum()) for _, want in pairs)
    return math.sqrt(wrong / whole)


def finite(value: float) -> float | None:
    """Return `value`, or None for NaN and infinity, which a results file cannot hold."""
    return value if abs(value) < float("inf") else None


def check_output(row: Row, answers: list[Slice], out: Batch) -> None:
    """Fill in the row's `rel_err` and `row_err`, and raise WrongResult if they are too large."""
    rel_err, row_err = output_errors(answers, out)
    row["rel_err"], row["row_err"] = finite(rel_err), finite(row_err)
    if not (rel_err < ERROR_LIMIT and row_err < ROW_ERROR_LIMIT):
        raise WrongResult(f"relative error {rel_err:.3g}, worst row {row_err:.3g}")


def output_errors(answers: list[Slice], out: Batch) -> tuple[float, float]:
    """Return the relative error of `out` and that of its worst row, in which a single wrong tile shows."""
    pairs = [(out[x.batch][x.heads].detach().double(), x.out) for x in answers]
    rows = torch.cat([((got - want).norm(dim=-1) / want.norm(dim=-1)).flatten() for got, want in pairs])
    return relative_error(pairs), float(rows.max())


def gradient_error(answers: list[Slice], dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *learned: torch.Tensor) -> float:
    """Return the largest of the relative errors of dq, dk, dv and the gradients of learned tensors."""
    pairs = [
        [(dq[x.batch, x.heads], x.grads[0]) for x in answers],
        [(dk[x.batch, x.kv_head], x.grads[1]) for x in answers],
        [(dv[x.batch, x.kv_head], x.grads[2]) for x in answers],
    ]
    for number, got in enumerate(learned):
        of_head: dict[int, torch.Tensor] = {}
        for x in answers:
            of_head[x.kv_head] = of_head.get(x.kv_head, 0) + x.learned[number]
        heads = {x.kv_head: x.heads for x in answers}
        pairs.append([(got[heads[kv_head]], want) for kv_head, want in of_head.items()])
    return float(torch.tensor([relative_error(which) for which in pairs], dtype=torch.float64).max())
