"""The driver of the kernel that puts attention to two sets of keys together. On a CPU torch does its work, unless the interpreter is asked
for."""

from __future__ import annotations

import torch

from ..device.cpp_compiler import torch_serves
from ..device.devices import backend_of
from ..plan.merge_parts import MergeCase, merge_spec, rows_of_program
from ..registry import INFO, Table
from ..text.parameters import named_strides
from .launch import Launch

_launches: dict[tuple, Launch] = Table("merged parts", 1024)


def merge_parts(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, place: torch.Tensor) -> None:
    """Add to out and lse of queries what other keys give them.

    out, lse         (Z, Hq, Q_LEN, D_V) with a contiguous head dim, and float32 (Z, Hq, Q_LEN); written
    part, part_lse   (parts, Hq, D_V) in out's dtype and float32 (parts, Hq), contiguous; -inf adds nothing
    place            int32 (Z * Q_LEN,): which of `parts` is query t % Q_LEN of sequence t // Q_LEN; one outside adds nothing
    """
    if not part.numel() or not out.numel():
        return
    if torch_serves(out.device):
        _merge_by_torch(out, lse, part, part_lse, place)
        return
    (_, Hq, Q_LEN, D_V), device, rows = out.shape, out.device, place.shape[0] * out.shape[1]
    key = (out.dtype, out.shape, out.stride(), lse.stride(), part.shape[0], device)
    launch, named = _launches.get(key), {"PART": part, "PART_LSE": part_lse, "PLACE": place, "O": out, "LSE": lse}
    if launch is not None:
        INFO.hits += 1
    else:
        numbers = {"ROWS": rows, "PARTS": part.shape[0], "Hq": Hq, "Q_LEN": Q_LEN}
        numbers |= {**named_strides("o", "zhm", out.stride()), **named_strides("l", "zhm", lse.stride())}
        launch = _launches[key] = Launch(merge_spec(MergeCase(out.dtype, D_V), backend_of(device.type)), numbers, tuple(named))
    if not launch.again_with(list(named.values()), device):
        block = rows_of_program(D_V)
        launch.with_constants((block,), named, [], (-(-rows // block),), device)


def _merge_by_torch(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, place: torch.Tensor) -> None:
    there = ((place >= 0) & (place < part.shape[0])).unsqueeze(1)  # of tokens and heads, as all that follow
    at = place.clamp(0, part.shape[0] - 1)
    of_part = torch.where(there, part_lse.index_select(0, at), -torch.inf)
    tokens, token_lse = out.transpose(1, 2), lse.transpose(1, 2)
    old, old_lse = tokens.flatten(0, 1), token_lse.flatten(0, 1)
    found = torch.logaddexp(old_lse, of_part)
    largest = torch.where(torch.isneginf(found), 0.0, found)
    kept, added = ((t - largest).exp().unsqueeze(-1) for t in (old_lse, of_part))
    merged = torch.where(torch.isneginf(of_part).unsqueeze(-1), old, old.float() * kept + part.index_select(0, at).float() * added)
    tokens.copy_(merged.to(out.dtype).view(tokens.shape))
    token_lse.copy_(found.view(token_lse.shape))
