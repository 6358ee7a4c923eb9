"""Layout: which rank holds which blocks of a sequence, and who needs whose keys."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

from flexpress.distributed.agreement import digest_of
from flexpress.distributed.assignment import assign, imbalance

BLOCK = 128  # positions that stay together


class Layout:
    """What a plan decides, for all ranks; the same on each of them. It needs no process group, so any number of ranks can be looked at.

    status                int8 (B, H, rows, columns) of the mask's blocks: 0 empty, 1 partial, 2 full
    q_blocks, kv_blocks   for each rank the numbers of its blocks of BLOCK positions, ascending; one object where Q_LEN is KV_LEN
    visits                int32 (ranks, KV blocks): by how many blocks of a rank's queries each is visited, counted over the mask's B and H
    imbalance             largest over mean work of a rank, counted in blocks that are visited
    """

    def __init__(self, status: np.ndarray, q_len: int, kv_len: int, ranks: int) -> None:
        self.status, visited = status, status != 0
        work = visited.sum((0, 1, 3), dtype=np.float64)
        self.q_len, self.kv_len, self.ranks = q_len, kv_len, ranks
        self.q_blocks = assign(work, ranks)
        equal = np.ones(visited.shape[3])
        self.kv_blocks = self.q_blocks if q_len == kv_len else assign(equal, ranks)
        self.imbalance = imbalance(work, _owners(self.q_blocks, len(work)), ranks)
        by_row = visited.sum((0, 1), dtype=np.int32)
        self.visits = np.stack([by_row[blocks].sum(0, dtype=np.int32) for blocks in self.q_blocks])

    def sent(self, source: int, target: int) -> np.ndarray:
        """The blocks of keys that one rank has and another needs, those first that most of its blocks of queries visit."""
        blocks = self.kv_blocks[source]
        visits = self.visits[target, blocks]
        return blocks[np.argsort(-visits, kind="stable")[: np.count_nonzero(visits)]]

    def keys(self, rank: int) -> list[np.ndarray]:
        """The blocks of keys that a rank attends to, in the order in which they lie there: some of its own, those of rank 0 and so on
        (nothing of itself), and the rest of its own.

        The backward pass computes them in this order, and what takes longest had best not come last. So its own come first where at least
        as many of its blocks of queries visit them as others' on average.
        """
        own, visits = self.sent(rank, rank), self.visits[rank]
        others = [own[:0] if source == rank else self.sent(source, rank) for source in range(self.ranks)]
        remote = np.concatenate(others)
        first = np.count_nonzero(visits[own] >= visits[remote].mean()) if len(remote) else len(own)
        return [own[:first], *others, own[first:]]

    @cached_property
    def remote_blocks(self) -> np.ndarray:
        """(ranks,) How many blocks of keys each rank gets from others: as few as its queries need."""
        needed = self.visits != 0
        return np.array([needed[rank].sum() - needed[rank, self.kv_blocks[rank]].sum() for rank in range(self.ranks)])

    def digest(self) -> int:
        """A number that two layouts share only if they are the same."""
        parts = (self.q_len, self.kv_len, self.ranks, *(b.tolist() for b in (*self.q_blocks, *self.kv_blocks)), self.status.shape)
        return digest_of((parts, hashlib.sha256(self.status.tobytes()).digest()))


def _owners(parts: list[np.ndarray], blocks: int) -> np.ndarray:
    owners = np.zeros(blocks, dtype=np.int64)
    for rank, part in enumerate(parts):
        owners[part] = rank
    return owners


def positions_of(blocks: np.ndarray, length: int) -> np.ndarray:
    """The positions in blocks of BLOCK, in their order; the last block of a sequence ends with it."""
    positions = whole_blocks(blocks)
    return positions[positions < length]


def whole_blocks(blocks: np.ndarray) -> np.ndarray:
    """The positions in blocks of BLOCK, in their order, also those past the end of the sequence."""
    return (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
