"""Packed sequences: where tokens belong, and mods on packed positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexpress.graphs.bound_mods import graph_and_values
from flexpress.inputs.dropout import Dropout, readable_seed

from ..codegen.mod.captured.tensors import tracing
from ..codegen.mod.expr import Expr, ModGraph, walk
from ..codegen.mod.graphs.loads import dots_of
from ..codegen.mod.graphs.wide import part_in_wide_integers
from ..codegen.mod.symbolic.long_dots import same_where_seen
from ..codegen.mod.table.ops import row_of
from ..codegen.mod.tracing.capture import name_of, plain
from ..codegen.registry import remembered
from ..codegen.run.call import ExtraInputs


@dataclass(eq=False)
class Packing:
    """Where tokens belong, and mods on packed positions made of mods on sequences. All tensors int32, made on the device.

    starts_q, starts_k         (n + 1,) the cu_seqlens; one object if they are shared
    sequence_q, sequence_k     (total,) the sequence of each token; one object if they are shared
    """

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    sequence_q: torch.Tensor
    sequence_k: torch.Tensor

    shared = property(lambda self: self.starts_q is self.starts_k)

    @functools.cached_property
    def local_q(self) -> torch.Tensor:
        """(total_q,) position of each query in its sequence."""
        return _moved(self.sequence_q, -self.starts_q)

    @functools.cached_property
    def local_k(self) -> torch.Tensor:
        """(total_k,) position of each key in its sequence."""
        return self.local_q if self.shared else _moved(self.sequence_k, -self.starts_k)

    @functools.cached_property
    def aligned_q(self) -> torch.Tensor:
        """(total_q,) the packed position of the key that has the query's place in its sequence."""
        return _moved(self.sequence_q, self.starts_k - self.starts_q)

    @functools.cached_property
    def aligned_k(self) -> torch.Tensor:
        """(total_k,) the packed position of the query that has the key's place in its sequence."""
        return self.aligned_q if self.shared else _moved(self.sequence_k, self.starts_q - self.starts_k)

    @functools.cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 (3, total_q): the number of each query's sequence, its position there, and where that one's keys begin; and (3, total_k):
        the same of keys, and where the queries begin."""
        of_queries = torch.stack((self.sequence_q, self.local_q, self.aligned_q - self.local_q))
        of_keys = of_queries if self.shared else torch.stack((self.sequence_k, self.local_k, self.aligned_k - self.local_k))
        return of_queries, of_keys

    def score_mod(self, mod: Callable) -> Callable:
        """The score_mod on packed positions."""
        graph, mod = self._part(mod, "score")
        places, sequence, of_keys = self._places(graph), self.sequence_q, self.sequence_k

        def packed(score, b, h, q_idx, kv_idx):
            return mod(score, sequence[q_idx], h, *places(q_idx, kv_idx))

        def packed_with_rows(score, b, h, q_idx, kv_idx):
            return mod(score, same_where_seen(sequence[q_idx], of_keys[kv_idx]), h, *places(q_idx, kv_idx))

        packed = packed_with_rows if dots_of(graph) else packed
        packed.__name__ = f"varlen_{name_of(mod)}"
        return packed

    def mask_mod(self, mod: Callable | None) -> Callable:
        """The mask_mod on packed positions: of one sequence, and allowed by `mod`."""
        sequence_q, sequence_k = self.sequence_q, self.sequence_k
        if mod is None:

            def varlen(b, h, q_idx, kv_idx):
                return sequence_q[q_idx] == sequence_k[kv_idx]

            return varlen
        graph, mod = self._part(mod, "mask")
        places = self._places(graph)

        def packed(b, h, q_idx, kv_idx):
            sequence = sequence_q[q_idx]
            return (sequence == sequence_k[kv_idx]) & mod(sequence, h, *places(q_idx, kv_idx))

        packed.__name__ = f"varlen_{name_of(mod)}"
        return packed

    def _part(self, mod: Callable, kind: str) -> tuple[ModGraph, Callable]:
        """A mod of sequences: its graph, and as a part of a mod on packed positions."""
        bound = graph_and_values(mod, kind, self.sequence_q.device)
        return bound[0], part_in_wide_integers(
            plain(mod), bound, (self.sequence_q.shape[0], self.sequence_k.shape[0])
        )  # len would make a number of a symbol

    def _places(self, graph: ModGraph) -> Callable:
        """From packed positions to the q_idx and kv_idx that a mod is given.

        A mod of distances alone gets packed positions, aligned so that distances within a sequence are right: bounds of a block that
        holds parts of two sequences are then tight, and less is loaded. Others get positions inside the sequence.
        """
        if not _of_distances(graph):
            local_q, local_k = self.local_q, self.local_k
            return lambda q_idx, kv_idx: (local_q[q_idx], local_k[kv_idx])
        if self.shared:
            return lambda q_idx, kv_idx: (q_idx, kv_idx)
        aligned_q = self.aligned_q
        return lambda q_idx, kv_idx: (aligned_q[q_idx], kv_idx)


def packing_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None, total_q: int, total_k: int) -> Packing:
    """What cu_seqlens say, in two small kernels for queries and two for keys, without waiting for the device."""

    def read(cu_seqlens, total):
        starts = cu_seqlens.to(torch.int32).contiguous()  # as the kernel reads them that makes blocks
        return starts, _sequences(starts[1:], total)

    starts_q, sequence_q = read(cu_seqlens_q, total_q)
    starts_k, sequence_k = (starts_q, sequence_q) if cu_seqlens_k is None else read(cu_seqlens_k, total_k)
    return Packing(starts_q, starts_k, sequence_q, sequence_k)


def extras_of_dropout(dropout: Dropout, packed: tuple | None, extents: tuple[int, int, int, int]) -> ExtraInputs:
    """What kernels need of dropout. packed: where packed sequences start, if there are some; extents: B, Hq, Q_LEN, KV_LEN."""
    return ExtraInputs(None, dropout.p, readable_seed(dropout.seed), places_of_dropout(packed, *extents[2:]))


def places_of_dropout(packed: tuple | None, total_q: int, total_k: int) -> tuple[torch.Tensor, ...]:
    """ExtraInputs.places of packed sequences, which start at `packed`; nothing for others."""
    if not packed:
        return ()
    starts_q, starts_k = packed
    return packing_of(starts_q, None if starts_q is starts_k else starts_k, total_q, total_k).places


def _sequences(ends: torch.Tensor, total: int) -> torch.Tensor:
    """The sequence of each of `total` tokens."""
    if not tracing():
        return torch.searchsorted(ends.contiguous(), _positions(total, ends.device), right=True, out_int32=True)
    # Inductor's searchsorted reads a view from where its storage begins
    ones = torch.ones_like(ends)
    return ends.new_zeros(total + 1).index_add(0, ends.clamp(0, total), ones).cumsum(0, dtype=torch.int32)[:total]


def _positions(total: int, device: torch.device) -> torch.Tensor:
    return torch.arange(total, dtype=torch.int32, device=device)


def _moved(sequence: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The packed position of each token, plus what `by` has for its sequence."""
    return _positions(sequence.shape[0], sequence.device) + by.index_select(0, sequence)


@remembered("mods by distance", 1024)
def _of_distances(graph: ModGraph) -> bool:
    """Does a mod depend on q_idx and kv_idx through their distance alone, so that moving both by as much changes nothing?

    Found by how much each integer grows with both positions; False where that is not clear. Numbers within a packing's length of the
    ends of int32 do not count: `q_idx + (2**31 - 1) >= kv_idx` wraps around elsewhere than it would in the sequence alone.
    """
    growth: dict[int, int | None] = {}
    for node in walk(graph.result):
        growth[id(node)] = _growth(node, [growth[id(a)] for a in node.args])
    return growth[id(graph.result)] == 0


def _growth(node: Expr, args: list[int | None]) -> int | None:
    """By how much an expression grows when q_idx and kv_idx grow by 1, from that of its arguments; None if unknown."""
    if node.op == "symbol":
        return int(node.attr in ("q_idx", "kv_idx"))
    if all(a == 0 for a in args):
        return 0
    known = [a for a in args if a is not None]
    if len(known) < len(args):
        return None
    row = row_of(node)
    if row.decided:
        return 0 if known[0] == known[1] else None
    if node.dtype in (torch.int32, torch.int64):  # so what grows is always one of these
        if row.signs:
            return sum(sign * arg for sign, arg in zip(row.signs, known, strict=True))
        if node.op == "cast":
            return known[0]
    return None
