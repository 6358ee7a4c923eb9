"""The driver of the kernel that lays out a step of sequences that share pages. On a CPU torch does its work, unless the interpreter is
asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.cpp_compiler import torch_serves
from ..device.devices import backend_of
from ..plan.shared_tables import BLOCK_T, SharedCase, shared_spec
from ..registry import INFO, Table
from .launch import Launch

_launches: dict[tuple, Launch] = Table("tables of shared prefixes", 1024)


class Laid(NamedTuple):
    """The tables of a step, int32. Rows are the tokens in the order of the groups.

    shift            (B,): tokens that a sequence reads with its group; 0 for one that reads all itself
    kv_len, pages    (B,) and (B, n): what it reads itself
    starts           (groups + 1,): where the rows of a group begin
    token            (T,): the token of each row
    sequence, position   (T,): of each row
    place            (T,): the row of each token, -1 for one of a sequence that reads all itself
    q_offset         (B,): positions of first queries behind the shift; None if the step has none
    """

    shift: torch.Tensor
    kv_len: torch.Tensor
    pages: torch.Tensor
    starts: torch.Tensor
    token: torch.Tensor
    sequence: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor
    q_offset: torch.Tensor | None = None


_NAMES = "SHIFT", "OWN_LENS", "OWN_PAGES", "GROUP_STARTS", "TOKEN", "SEQUENCE", "POSITION", "PLACE", "OWN_OFFSETS"


def lay_out(
    order: torch.Tensor,
    starts: torch.Tensor,
    prefix: torch.Tensor,
    kv_len: torch.Tensor,
    pages: torch.Tensor,
    cu_q: torch.Tensor | None,
    q_offset: torch.Tensor | None,
    queries: int,
    page_size: int,
) -> Laid:
    """The tables of a step of B sequences with these lengths and pages. All int32; what they hold need not be right.

    order, starts, prefix   (B,), (groups + 1,), (B,): of a SharedPrefix
    queries                 tokens with cu_q (B + 1,), else those of each sequence
    """
    B, width, device = order.shape[0], pages.shape[1], order.device
    if not B or torch_serves(device):
        return _by_torch(order, starts, prefix, kv_len, pages, cu_q, q_offset, queries, page_size)
    T = queries if cu_q is not None else B * queries
    pages = pages if pages.stride(1) == 1 else pages.contiguous()
    given = {"KV_LENS": kv_len, "CU_Q": cu_q, "Q_OFFSETS": q_offset, "ORDER": order, "STARTS": starts, "PREFIX": prefix}
    named = {name: t.contiguous() for name, t in given.items() if t is not None} | {"PAGES": pages}
    shapes = [(B,), (B,), (B, width), tuple(starts.shape), *[(T,)] * 4, *([] if q_offset is None else [(B,)])]
    laid = Laid(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))
    named |= dict(zip(_NAMES, laid[: len(shapes)], strict=False))
    key = (B, T, starts.shape[0], width, pages.stride(0), page_size, cu_q is None, q_offset is None, device)
    launch = _launches.get(key)
    if launch is None:
        numbers = {"B": B, "T": T, "Q_LEN": queries, "WIDTH": width, "ROOM": width * page_size, "PAGE_SIZE": page_size}
        spec = shared_spec(SharedCase(cu_q is not None, q_offset is not None), backend_of(device.type))
        launch = _launches[key] = Launch(spec, {**numbers, "stride_pages": pages.stride(0)}, tuple(named))
    else:
        INFO.hits += 1
    if not launch.again_with(list(named.values()), device):
        launch.with_constants((BLOCK_T,), named, [], (-(-T // BLOCK_T) + B + starts.shape[0],), device)
    return laid


def _by_torch(
    order: torch.Tensor,
    starts: torch.Tensor,
    prefix: torch.Tensor,
    kv_len: torch.Tensor,
    pages: torch.Tensor,
    cu_q: torch.Tensor | None,
    q_offset: torch.Tensor | None,
    queries: int,
    page_size: int,
) -> Laid:
    """What `lay_out` gives, by torch's operations. No index is outside of what it is used for."""
    B, width, device = order.shape[0], pages.shape[1], order.device
    int32 = {"dtype": torch.int32, "device": device}
    cu = torch.arange(B + 1, **int32) * queries if cu_q is None else cu_q
    T = B * queries if cu_q is None else queries
    counts = cu.diff().clamp(0, T)
    first = kv_len - counts if q_offset is None else q_offset
    prefix = prefix.clamp(min=0)
    apart = (kv_len >= prefix) & (kv_len <= width * page_size) & (first >= prefix)
    shift = torch.where(apart, prefix, 0)
    columns = torch.arange(width, **int32) + (shift // page_size).unsqueeze(1)
    own_pages = pages.gather(1, columns.clamp(max=width - 1).long()).masked_fill_(columns >= width, -1)

    order = order.clamp(0, B - 1)
    ends = torch.nn.functional.pad(counts[order].cumsum(0), (1, 0))  # where the rows of each of `order` begin and end
    rows = torch.arange(T, device=device)
    at = torch.searchsorted(ends[1:], rows, right=True).clamp(max=B - 1)
    sequence = order[at]
    known = rows < ends[-1]
    token = torch.where(known, cu[sequence] + rows - ends[at], rows).clamp(0, T - 1)
    place = torch.full((T,), -1, **int32)
    place[token] = torch.where(known & (shift[sequence] > 0), rows, -1).int()
    return Laid(
        shift,
        kv_len - shift,
        own_pages,
        ends[starts.clamp(0, B)].int(),
        token.int(),
        sequence,
        (first[sequence] + rows - ends[at]).int(),
        place,
        None if q_offset is None else q_offset - shift,
    )
