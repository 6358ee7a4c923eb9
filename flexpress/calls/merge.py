"""Attention to a set of keys, from attention to its parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from flexpress.inputs.cache_checks import check_still_there

from ..codegen.mod.captured.tensors import is_moving

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def merge_attention(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the same queries to all keys, of attention to disjoint sets of keys.

    outs   floating-point (..., Q_LEN, D_V) each, as flex_attention returns it: what is in a row whose lse is -inf, NaN even, is not read
    lses   floating-point (..., Q_LEN) each, natural logarithms, as return_lse gives them; -inf where a part has no keys for a row. Either
           may be one tensor with the parts in its first dimension, as split_attention gives them

    Computed in float32, or in float64 where a part or an lse is; out has the dtype of the parts, lse the one it is computed in. A row
    without keys in any part gives 0 and lse -inf. Differentiable in both, any number of times, under torch.compile, too.
    Raises ValueError for shapes and devices that do not fit, TypeError for other dtypes and for what is no tensor. Source: partial softmax,
    Milakov and Gimelshein 2018 (arXiv 1805.02867).

        out, lse = merge_attention(*zip(*(flex_attention(q, k, v, return_lse=True) for k, v in parts)))
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        _check_parts(name, parts)
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"merge_attention needs an lse for each out, and at least one, got {len(outs)} outs and {len(lses)} lses")
    shape = outs[0].shape  # compared by ==, as a compiler's lengths have no hash
    if not len(shape) or any(out.shape != shape for out in outs) or any(lse.shape != shape[:-1] for lse in lses):
        shapes = [", ".join(str(tuple(t.shape)) for t in given) for given in (outs, lses)]
        raise ValueError(f"all outs must have one shape (..., Q_LEN, D_V) and all lses (..., Q_LEN), got {shapes[0]} and {shapes[1]}")
    if not all(t.dtype in _DTYPES for t in (*outs, *lses)):
        dtypes = [", ".join(str(t.dtype) for t in given) for given in (outs, lses)]
        raise TypeError(f"outs and lses must be floating-point, as flex_attention returns them, got {dtypes[0]} and {dtypes[1]}")
    if any(t.device != outs[0].device for t in (*outs, *lses)):
        devices = [", ".join(str(t.device) for t in given) for given in (outs, lses)]
        raise ValueError(f"outs and lses must be on one device, got {devices[0]} and {devices[1]}; move them with .to(...)")
    precision = functools.reduce(torch.promote_types, (t.dtype for t in (*outs, *lses)), torch.float32)
    stacked = torch.stack(tuple(lses)).to(precision)
    largest = stacked.detach().amax(0)
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = (stacked - largest).exp()
    total = weights.sum(0)
    seen = ~torch.isneginf(stacked).all(0)  # NaN is no sign of no keys
    total = torch.where(seen, total, 1.0)
    shares = (weights / total).unsqueeze(-1)
    out = sum(torch.where(share > 0, out.to(precision), 0.0) * share for out, share in zip(outs, shares, strict=True))
    return out.to(outs[0].dtype), torch.where(seen, largest + total.log(), -torch.inf)


def _check_parts(name: str, parts) -> None:
    """Tensors of parts, or one that has them in its first dimension."""
    together = isinstance(parts, torch.Tensor)
    if not together and (isinstance(parts, str) or not isinstance(parts, Sequence)) or together and not parts.dim():
        what = "one of no dimension" if together else type(parts).__name__
        raise TypeError(f"{name} must be a list of tensors, or a tensor with the parts in its first dimension, got {what}")
    for i, part in enumerate([parts] if together else parts):
        called = name if together else f"{name}[{i}]"
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"{called} must be a torch.Tensor, got {type(part).__name__}")
        if part.is_nested or part.layout is not torch.strided:
            raise TypeError(f"{called} must be a dense tensor, got a nested one or one of layout {part.layout}; pad or densify it")
        if not torch.compiler.is_dynamo_compiling() and not is_moving(part):
            check_still_there(called, part)
