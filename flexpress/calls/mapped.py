"""vmap of the functions of derivatives.py: the mapped dimension becomes a part of the batch, behind the batch itself."""

from __future__ import annotations

from functools import partial

import torch

from flexpress.calls.problem import Problem

from ..codegen.mod.captured.levels import each_alone

BATCH = -1  # a tensor with the batch first; other kinds are numbers of captured tensors
ALONE = -2  # one of all batch entries: calls that have their own are no larger call


def inputs_of(count: int) -> list[int]:
    """The kinds of `count` tensors that begin with q, k and v and go on with what mods capture."""
    return [BATCH] * 3 + list(range(count - 3))


def mapped(function, info, in_dims, problem: Problem, wanted: tuple[int, ...] | None, tensors, kinds: list[int]) -> tuple:
    """The function's results for `info.batch_size` calls, as one call, and where their mapped dimension is.

    wanted   captured tensors of which gradients are asked for: behind those of q, k and v. Each call has its own. None: the function has
             no such argument
    kinds    of the tensors; the first one has all entries of the batch, while keys and values may have one for all
    """
    size, dims = info.batch_size, in_dims[len(in_dims) - len(tensors) :]
    alone = any(kind == ALONE and dim is not None for kind, dim in zip(kinds, dims, strict=True))
    if size and (alone or problem.dropout is not None):  # in a larger batch other weights would be dropped
        outs = each_alone(partial(function.apply, problem, *(() if wanted is None else (wanted,))), size, tensors, dims)
        return outs, (0,) * len(outs)
    own = frozenset(kind for kind, dim in zip(kinds, dims, strict=True) if kind != BATCH and dim is not None) | frozenset(wanted or ())
    spread = [_spread(t, dim, kind, kind in own, size) for t, dim, kind in zip(tensors, dims, kinds, strict=True)]
    batch = spread[0].shape[0]
    folded = [
        t if t is None or kind != BATCH else t.expand(batch, *t.shape[1:]).flatten(0, 1) for t, kind in zip(spread, kinds, strict=True)
    ]
    found = function.apply(problem.folded(size, own), *(() if wanted is None else (wanted,)), *folded)
    at = range(3, 3 + len(wanted or ()))  # gradients of captured tensors
    outs = [t if i in at else t.unflatten(0, (batch, size)) for i, t in enumerate(found)]
    if wanted is not None:  # gradients of q, k and v come first, and q, k and v before what mods capture
        inputs = spread[function.INPUTS : function.INPUTS + 3]
        outs[:3] = [g if g.shape[0] == t.shape[0] else g.sum(0, keepdim=True) for g, t in zip(outs[:3], inputs, strict=True)]
    return tuple(outs), tuple(0 if i in at else 1 for i in range(len(outs)))


def _spread(tensor: torch.Tensor | None, dim: int | None, kind: int, own: bool, size: int) -> torch.Tensor | None:
    """A tensor of all calls: of the batch with calls behind it, what mods capture with calls first if each has its own."""
    if tensor is None or (kind != BATCH and not own):
        return tensor
    at = 1 if kind == BATCH else 0
    shape = (*tensor.shape[:at], size, *tensor.shape[at:])
    return tensor.unsqueeze(at).expand(shape) if dim is None else tensor.movedim(dim, at)
